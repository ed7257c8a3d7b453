"""Contracts of harness.faults.catalogue."""

import subprocess
import sys
from importlib import import_module
from typing import get_args

from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Kind
from harness.records import WHATS


def test_entries_are_whole() -> None:
    """Every fault has a sentence, a device, and expects only answers that a verdict can give."""
    for name, fault in CATALOGUE.items():
        assert name == fault.name
        assert fault.description.endswith(".")
        assert fault.devices
        assert set(fault.devices) <= {"cpu", "cuda"}
        assert fault.expects
        assert set(fault.expects) <= set(WHATS) - {""}


def test_entries_stand_with_their_kind() -> None:
    """A fault is in the module of its kind, once, and says where a search must end."""
    num = 0
    for kind in get_args(Kind):
        for fault in import_module(f"harness.faults.{kind}").FAULTS:
            assert fault.kind == kind
            assert CATALOGUE[fault.name] is fault
            assert fault.symptom
            assert fault.points_at is not None
            num += 1
    assert num == len(CATALOGUE)


def test_what_acts_everywhere_takes_no_rank() -> None:
    """A rank means something to a fault, or it acts on all of them."""
    for fault in CATALOGUE.values():
        assert not (fault.everywhere and "rank" in fault.takes), fault.name


def test_counterparts_exist_and_take_the_same() -> None:
    """A counterpart is a fault of its own that is planted with the same arguments."""
    for fault in CATALOGUE.values():
        if fault.counterpart:
            other = CATALOGUE[fault.counterpart]
            assert other.takes == fault.takes
            assert other.counterpart == ""


def test_the_front_of_the_harness_never_imports_torch() -> None:
    """Everything up to the plan and the command line runs where torch is not wanted."""
    code = (
        "import sys, harness.cli, harness.faults.catalogue, harness.plan, harness.scenario.matrix;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
