"""A rank's record file as it is written, line by line; ranks without torch write it, too."""

import os
from collections.abc import Callable
from pathlib import Path

from harness.recorder import write_all
from harness.records import Json, dumps


class RecordFile:
    """Appends record lines to a rank's file; each line is one write and is flushed at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.alter: Callable[[str], list[str]] = lambda line: [line]

    def write(self, record: Json) -> None:
        """Write one record as one line.

        Raises:
            RecordsUnwritable: the disk has no room for the whole line.
            OSError: it could not be written for another reason.
        """
        for line in self.alter(dumps(record)):
            self.write_raw(line + "\n")

    def write_raw(self, text: str) -> None:
        """Write text as it is; raises as `write`."""
        write_all(self._fd, text.encode())

    def close(self) -> None:
        """Close the file; a rank leaves that to its end."""
        os.close(self._fd)
