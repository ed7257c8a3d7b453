"""Contracts of harness.faults.catalogue."""

import subprocess
import sys

from harness.faults.catalogue import CATALOGUE
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
        "import sys, harness.cli, harness.faults.catalogue, harness.plan, harness.matrix;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
