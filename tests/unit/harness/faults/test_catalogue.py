"""The table of faults; every entry has cases, in its own setup and elsewhere; clean are clean."""

import subprocess
import sys

import pytest

from harness.campaign.cases import (
    BARE,
    RACES,
    WHOLE,
    cases_of,
    clean_cases,
    fault_case,
    scenario_text,
    variants,
)
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Pointer, Setup, read_table
from harness.records import WHATS
from harness.scenario.matrix import Device
from harness.scenario.schema import decode_scenario
from harness.store import LEGS

ROW = """
== data: Tokens.
# Why it is so.
other | F1 | step rank tensor | graph=attn+mlp stress=races dp=2 dynamic_cp=[1,2] model.layers=3
    model.preset=tiny seed=1 step=2 rank=0 legs=reference+control timeout_s=20 later=1 devices=cuda
    scopes=mlp needs.tp=2 counterpart=ulp checks.peak_memory.max_ratio=1.5 |
    race diverged | reduce - main grad * | -0.0 is written. |
    nothing | after: element $tensor
    ulp
least | - | - | - | crashed | forward layers.* | It ends. | it ends | fail raise
"""


def test_a_row_says_all_of_an_entry() -> None:
    """Words of the setup go where a scenario, a plant or an entry has them; the rest is empty."""
    other, least = read_table(ROW).values()
    assert (other.name, other.kind, other.source) == ("other", "data", "F1")
    assert (other.takes, other.expects) == (("step", "rank", "tensor"), ("race", "diverged"))
    assert (other.description, other.symptom) == ("-0.0 is written.", "nothing")
    assert other.plant == "after: element $tensor ulp"
    assert other.points_at == Pointer(phase="reduce", tensor="main grad *", later=1)
    assert other.setup == Setup(
        settings={"parallel": {"dp": 2, "dynamic_cp": [1, 2]},
                  "model": {"layers": 3, "preset": "tiny"}, "seed": 1},
        graph=("attn", "mlp"), stress=("races",), step=2, rank=0, legs=("reference", "control"),
        checks={"peak_memory": {"max_ratio": 1.5}}, timeout_s=20,
    )  # fmt: skip
    assert (other.devices, other.scopes, other.needs) == (("cuda",), ("mlp",), {"tp": 2})
    assert (other.counterpart, other.everywhere) == ("ulp", False)
    assert other.lacks({"tp": 1}) == "tp 2 or more"
    assert (least.source, least.takes, least.setup, least.everywhere) == ("", (), Setup(), True)
    assert least.points_at == Pointer(phase="forward", module="layers.*", tensor="layers.*")


@pytest.mark.parametrize(
    "text",
    ["a | b | c", ROW.replace("data", "date"), ROW[1:].partition("\n")[2], ROW + ROW],
)
def test_a_row_that_is_not_whole_is_refused(text: str) -> None:
    """Nine columns under a known kind, and each name once."""
    with pytest.raises(ValueError, match="expected 9 columns and a new name"):
        read_table(text)


def test_every_entry_is_whole_and_has_legal_cases_that_plant_it() -> None:
    """A sentence, a device, a place, words that a verdict can give; a scenario to copy."""
    ids = []
    for fault in CATALOGUE.values():
        assert fault.description.endswith(".")
        assert fault.symptom
        assert fault.points_at.phase
        assert fault.expects
        assert set(fault.expects) <= set(WHATS) - {""}
        if fault.counterpart:
            other = CATALOGUE[fault.counterpart]
            assert (other.takes, other.counterpart) == (fault.takes, "")
        device: Device = "cpu" if "cpu" in fault.devices else "cuda"
        for variant in variants(fault, device):
            case = fault_case(fault, variant, device)
            ids.append(case.id)
            assert not case.skip_reason, (fault.name, variant.name, case.skip_reason)
            assert case.labels["fault"] == fault.name
            assert {getattr(case, leg).plant.fault for leg in fault.setup.legs} == {fault.name}
            assert len({getattr(case, leg).key for leg in LEGS}) == 3
        text = scenario_text(fault)
        assert decode_scenario(text.encode(), "shown").why == fault.description
        (case,) = cases_of(text, device)
        assert case.candidate.config["graph"] == list(fault.setup.graph)
    assert len(set(ids)) == len(ids)
    assert len(CATALOGUE) >= 172


def test_a_setup_with_stressors_is_run_bare_and_with_each_alone() -> None:
    """So that what a plain run would have shown is a run, not a guess."""
    fault = CATALOGUE["early_release"]
    cases = {v.name: fault_case(fault, v, "cpu") for v in variants(fault)}
    configs = {name: case.candidate.config for name, case in cases.items()}
    assert {name: (each["stress"], each["ledger"]) for name, each in configs.items()} == {
        BARE: ([], False), "poison": (["poison"], True), "scramble": (["scramble"], True),
        WHOLE: (["poison", "scramble"], True),
    }  # fmt: skip
    assert len({case.reference.key for case in cases.values()}) == 1


@pytest.mark.parametrize(("name", "tapped"), [("early_release", 1), ("ulp", 1), ("drop_step", 0)])
def test_modules_are_tapped_where_the_entry_points_at_one(name: str, tapped: int) -> None:
    """A search needs no run of its own; a lost record or a dead rank is in no module."""
    case = fault_case(CATALOGUE[name], variants(CATALOGUE[name])[-1], "cpu")
    assert bool(case.candidate.config["taps"]) == tapped
    assert case.reference.config["taps"] == case.candidate.config["taps"]


def test_on_gpus_the_other_stressors_stand_in_for_races() -> None:
    """Races are seen on the CPU alone; a fault of GPUs is skipped there, with the reason."""
    fault = CATALOGUE["gather_ignores_writes"]
    assert RACES in fault.setup.stress
    found = {v.name: v.stress for v in variants(fault, "cuda")}
    assert list(found) == [BARE, "jitter", "poison", "scramble", WHOLE]
    assert found[WHOLE] == ("jitter", "poison", "scramble")
    (clean,) = clean_cases([fault], 1, "cuda")
    assert clean.candidate.config["stress"] == ["jitter", "poison", "scramble"]
    fault = CATALOGUE["illegal_access"]
    assert "cuda" in fault_case(fault, variants(fault)[-1], "cpu").skip_reason


def test_clean_cases_are_many_differ_and_plant_nothing() -> None:
    """200 of them, no two the same run, layouts and scopes and stressors of many kinds."""
    cases = clean_cases(CATALOGUE.values(), 200, "cpu")
    assert len({case.candidate.key for case in cases}) == len({case.id for case in cases}) == 200
    for case in cases:
        assert [getattr(case, leg).plant for leg in LEGS] == [None] * 3
        assert case.labels["clean"]
        assert case.reference.config["graph"] == case.reference.config["stress"] == []
    held = [case.candidate.config for case in cases]
    for key, least in (("parallel", 7), ("graph", 7), ("stress", 4)):
        assert len({str(config[key]) for config in held}) >= least
    assert len({case.reference.key for case in cases}) <= 60


def test_the_front_of_the_harness_never_imports_torch() -> None:
    """Everything up to the plan and the command line runs where torch is not wanted."""
    code = (
        "import sys, harness.cli, harness.faults.catalogue, harness.runner.plan;"
        "import harness.scenario.matrix;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
