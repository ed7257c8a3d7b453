"""Whose a full disk is: that of the records, or the program's own."""

import os
from collections.abc import Callable
from pathlib import Path

from harness.recorder import UNRECORDED
from tests.unit.harness.recorder.recorded import recorded
from tests.unit.harness.recorder.test_recorder import plain


def _on_a_full_disk(program: Callable[[], object]) -> None:
    """Train with the file of records on a disk without space."""
    (fd,) = [
        int(entry.name) for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and entry.readlink().name == "rank0.jsonl"
    ]  # fmt: skip
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd)
    program()


def test_a_full_disk_of_records_is_told_by_the_exit_code(tmp_path: Path) -> None:
    """A program whose records find no space ends with a code of the recorder's own."""
    records = recorded(lambda: _on_a_full_disk(plain), tmp_path, code=UNRECORDED)
    assert (records.error, records.end) == (None, None)


def test_a_full_disk_of_the_programs_own_is_its_own_failure(tmp_path: Path) -> None:
    """An OSError for want of space elsewhere is recorded as what it is: a crash."""

    def program() -> None:
        plain()
        Path("/dev/full").write_text("a checkpoint")

    error = recorded(program, tmp_path, code=1).error
    assert error is not None
    assert (error.what, error.type) == ("crashed", "OSError")
