"""Every entry of the catalogue has cases, in its own setup and elsewhere; clean ones are clean."""

import pytest

from harness.campaign.cases import (
    BARE,
    CLEAN_LABEL,
    FAULT_LABEL,
    RACES,
    WHOLE,
    cases_of,
    clean_cases,
    fault_case,
    scenario_text,
    variants,
)
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Fault
from harness.scenario.matrix import Device
from harness.scenario.schema import decode_scenario
from harness.store import LEGS


def _device(fault: Fault) -> Device:
    return "cpu" if "cpu" in fault.devices else "cuda"


def test_every_entry_has_legal_cases_that_plant_it_and_a_scenario_to_copy() -> None:
    """The rules of scenarios take each setup of each entry, and the runs it names plant it."""
    ids = []
    for fault in CATALOGUE.values():
        for variant in variants(fault, _device(fault)):
            case = fault_case(fault, variant, _device(fault))
            ids.append(case.id)
            assert not case.skip_reason, (fault.name, variant.name, case.skip_reason)
            assert case.labels[FAULT_LABEL] == fault.name
            planted = [getattr(case, leg).plant.fault for leg in fault.setup.legs]
            assert set(planted) == {fault.name}
            assert len({getattr(case, leg).key for leg in LEGS}) == 3
        text = scenario_text(fault)
        assert decode_scenario(text.encode(), "shown").why == fault.description
        (case,) = cases_of(text, _device(fault))
        assert case.candidate.config["graph"] == list(fault.setup.graph)
    assert len(set(ids)) == len(ids)


def test_a_setup_with_stressors_is_run_bare_and_with_each_alone() -> None:
    """So that what a plain run would have shown is a run, not a guess."""
    fault = CATALOGUE["early_release"]
    cases = {v.name: fault_case(fault, v, "cpu") for v in variants(fault)}
    assert list(cases) == [BARE, *fault.setup.stress, WHOLE]
    configs = {name: case.candidate.config for name, case in cases.items()}
    assert (configs[BARE]["stress"], configs[BARE]["ledger"]) == ([], False)
    for name in fault.setup.stress:
        assert configs[name]["stress"] == [name]
    assert (configs[WHOLE]["stress"], configs[WHOLE]["ledger"]) == (["poison", "scramble"], True)
    assert len({case.reference.key for case in cases.values()}) == 1


@pytest.mark.parametrize(("name", "tapped"), [("early_release", 1), ("ulp", 1), ("drop_step", 0)])
def test_modules_are_tapped_where_the_entry_points_at_one(name: str, tapped: int) -> None:
    """A search needs no run of its own; a lost record or a dead rank is in no module."""
    case = fault_case(CATALOGUE[name], variants(CATALOGUE[name])[-1], "cpu")
    assert bool(case.candidate.config["taps"]) == tapped
    assert case.reference.config["taps"] == case.candidate.config["taps"]


def test_on_gpus_the_other_stressors_stand_in_for_races() -> None:
    """Races are seen on the CPU alone; no case and no clean case of a GPU asks for them."""
    fault = CATALOGUE["gather_ignores_writes"]
    assert RACES in fault.setup.stress
    found = {v.name: v.stress for v in variants(fault, "cuda")}
    assert list(found) == [BARE, "jitter", "poison", "scramble", WHOLE]
    assert found[WHOLE] == ("jitter", "poison", "scramble")
    (clean,) = clean_cases([fault], 1, "cuda")
    assert clean.candidate.config["stress"] == ["jitter", "poison", "scramble"]


def test_a_fault_of_another_device_is_planned_and_skipped() -> None:
    """It shows as not run, with the reason, in place of being left out."""
    fault = CATALOGUE["illegal_access"]
    assert "cuda" in fault_case(fault, variants(fault)[-1], "cpu").skip_reason


def test_clean_cases_are_many_differ_and_plant_nothing() -> None:
    """200 of them, no two the same run, layouts and scopes and stressors of many kinds."""
    cases = clean_cases(CATALOGUE.values(), 200, "cpu")
    assert len({case.candidate.key for case in cases}) == len({case.id for case in cases}) == 200
    for case in cases:
        assert [getattr(case, leg).plant for leg in LEGS] == [None] * 3
        assert case.labels[CLEAN_LABEL]
        assert case.reference.config["graph"] == case.reference.config["stress"] == []
    held = [case.candidate.config for case in cases]
    for key, least in (("parallel", 7), ("graph", 7), ("stress", 4)):
        assert len({str(config[key]) for config in held}) >= least
    assert len({case.reference.key for case in cases}) <= 60
