"""Clocks that somebody sets are for stamps; durations are taken by the one that only runs."""

from tests.arch.tree import ROOT, code_files


def test_the_wall_clock_is_for_stamps() -> None:
    """`time.time()` is read for values that are named after the epoch, and for nothing else."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in code_files()
        if path.relative_to(ROOT).parts[0] in ("harness", "fsdp_core", "reports")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "time.time(" in line and "unix_s" not in line
    ]
    assert found == []
