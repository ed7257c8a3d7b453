"""Every entry of the catalogue has cells, and clean cells are clean."""

from harness.detection.clean import CLEAN_LABEL, clean_cells
from harness.faults.cases import (
    BARE,
    CELL,
    FAULT_LABEL,
    RACES,
    cases_of,
    fault_case,
    plant_of,
    scenario_text,
    variants,
)
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Fault
from harness.scenario.matrix import Device
from harness.scenario.schema import decode_scenario


def _device(fault: Fault) -> Device:
    return "cpu" if "cpu" in fault.devices else "cuda"


def test_every_entry_has_a_legal_cell_that_plants_it() -> None:
    """The rules of scenarios take each cell of each entry, and some leg of it has the fault."""
    for fault in CATALOGUE.values():
        for variant in variants(fault, _device(fault)):
            case = fault_case(fault, variant, _device(fault))
            assert not case.skip_reason, (fault.name, variant.name, case.skip_reason)
            assert case.labels[FAULT_LABEL] == fault.name
            planted = {leg: getattr(case, leg).plant for leg in fault.cell.legs}
            assert {plant.fault for plant in planted.values()} == {fault.name}
            keys = {case.reference.key, case.control.key, case.candidate.key}
            assert len(keys) == 3


def test_ids_of_cases_differ() -> None:
    """No two cells of the catalogue share a case."""
    ids = [fault_case(f, v, "cpu").id for f in CATALOGUE.values() for v in variants(f)]
    assert len(set(ids)) == len(ids)


def test_a_cell_with_stressors_is_run_bare_and_with_each_alone() -> None:
    """So that what a plain run would have shown is a run, not a guess."""
    fault = CATALOGUE["early_release"]
    cases = {v.name: fault_case(fault, v, "cpu") for v in variants(fault)}
    assert list(cases) == [BARE, *fault.cell.stress, CELL]
    configs = {name: case.candidate.config for name, case in cases.items()}
    assert configs[BARE]["stress"] == []
    assert not configs[BARE]["ledger"]
    for name in fault.cell.stress:
        assert configs[name]["stress"] == [name]
    assert configs[CELL]["stress"] == list(fault.cell.stress)
    assert len({case.reference.key for case in cases.values()}) == 1
    assert configs[CELL]["ledger"]


def test_modules_are_tapped_where_the_entry_points_at_one() -> None:
    """A search needs no run of its own; a lost record or a dead rank is in no module."""
    for name, tapped in (("early_release", True), ("ulp", True), ("drop_step", False)):
        fault = CATALOGUE[name]
        case = fault_case(fault, variants(fault)[-1], "cpu")
        assert bool(case.candidate.config["taps"]) is tapped
        assert case.reference.config["taps"] == case.candidate.config["taps"]


def test_on_gpus_the_other_stressors_stand_in_for_races() -> None:
    """Races are seen on the CPU alone; no case and no clean cell of a GPU asks for them."""
    fault = CATALOGUE["gather_ignores_writes"]
    assert RACES in fault.cell.stress
    found = {v.name: v.stress for v in variants(fault, "cuda")}
    assert list(found) == [BARE, "jitter", "poison", "scramble", CELL]
    assert found[CELL] == ("jitter", "poison", "scramble")
    (clean,) = clean_cells([fault], 1, "cuda")
    assert clean.candidate.config["stress"] == ["jitter", "poison", "scramble"]


def test_a_fault_of_another_device_is_planned_and_skipped() -> None:
    """It shows as not run, with the reason, in place of being left out."""
    fault = CATALOGUE["illegal_access"]
    case = fault_case(fault, variants(fault)[-1], "cpu")
    assert "cuda" in case.skip_reason


def test_the_scenario_to_copy_is_the_cell() -> None:
    """`harness faults show` prints a file that decodes, with the plant and the candidate's cell."""
    for fault in CATALOGUE.values():
        text = scenario_text(fault)
        assert decode_scenario(text.encode(), "shown").why == fault.description
        (case,) = cases_of(text, _device(fault))
        assert case.candidate.config["graph"] == list(fault.cell.graph)
        assert plant_of(fault)["fault"] in text


def test_clean_cells_are_many_differ_and_plant_nothing() -> None:
    """200 of them, no two the same run, layouts and scopes and stressors of many kinds."""
    cases = clean_cells(CATALOGUE.values(), 200, "cpu")
    assert len(cases) == 200
    assert len({case.candidate.key for case in cases}) == 200
    assert len({case.id for case in cases}) == 200
    for case in cases:
        legs = (case.reference, case.control, case.candidate)
        assert [leg.plant for leg in legs] == [None] * 3
        assert case.labels[CLEAN_LABEL]
        assert case.reference.config["graph"] == case.reference.config["stress"] == []
    held = [case.candidate.config for case in cases]
    assert len({str(config["parallel"]) for config in held}) >= 7
    assert len({str(config["graph"]) for config in held}) >= 7
    assert len({str(config["stress"]) for config in held}) >= 4
    assert len({case.reference.key for case in cases}) <= 60
