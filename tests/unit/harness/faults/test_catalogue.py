"""Contracts of harness.faults.catalogue and of its table."""

import subprocess
import sys

import pytest

from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Pointer, Setup, read_table
from harness.records import WHATS

ROW = """
== data: Tokens.
# Why it is so.
other | F1 | step rank tensor | graph=attn+mlp stress=races dp=2 dynamic_cp=[1,2] model.layers=3
    model.preset=tiny seed=1 step=2 rank=0 legs=reference+control timeout_s=20 later=1 devices=cuda
    scopes=mlp needs.tp=2 counterpart=ulp checks.peak_memory.max_ratio=1.5 |
    race diverged | reduce - main grad * | -0.0 is written. |
    nothing
least | - | - | - | crashed | forward layers.* | It ends. | it ends
"""


def test_a_row_says_all_of_an_entry() -> None:
    """Words of the setup go where a scenario, a plant or an entry has them; the rest is empty."""
    other, least = read_table(ROW).values()
    assert (other.name, other.kind, other.source) == ("other", "data", "F1")
    assert (other.takes, other.expects) == (("step", "rank", "tensor"), ("race", "diverged"))
    assert (other.description, other.symptom) == ("-0.0 is written.", "nothing")
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
    """Eight columns under a known kind, and each name once."""
    with pytest.raises(ValueError, match="expected 8 columns and a new name"):
        read_table(text)


def test_entries_are_whole() -> None:
    """Every fault has a sentence, a device, a place, and expects what a verdict can give."""
    for name, fault in CATALOGUE.items():
        assert name == fault.name
        assert fault.description.endswith(".")
        assert fault.symptom
        assert fault.points_at.phase
        assert set(fault.devices) <= {"cpu", "cuda"}
        assert fault.devices
        assert fault.expects
        assert set(fault.expects) <= set(WHATS) - {""}
    assert len(CATALOGUE) >= 172


def test_counterparts_exist_and_take_the_same() -> None:
    """A counterpart is a fault of its own that is planted with the same arguments."""
    for fault in CATALOGUE.values():
        if fault.counterpart:
            other = CATALOGUE[fault.counterpart]
            assert (other.takes, other.counterpart) == (fault.takes, "")


def test_the_front_of_the_harness_never_imports_torch() -> None:
    """Everything up to the plan and the command line runs where torch is not wanted."""
    code = (
        "import sys, harness.cli, harness.faults.catalogue, harness.runner.plan;"
        "import harness.scenario.matrix;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
