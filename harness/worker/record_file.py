"""A rank's record file as it is written: line by line, with a checksum in the last."""

import os
from collections.abc import Callable
from pathlib import Path

from harness.recorder import write_all
from harness.records import EndRecord, Json, dumps
from harness.store.checksum import LinesChecksum

LineFilter = Callable[[str], list[str]]


class RecordFile:
    """Appends record lines to a rank's file; each line is one write and is flushed at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._checksum = LinesChecksum()
        self.alter: LineFilter = lambda line: [line]

    def write(self, record: Json) -> None:
        """Write one record as one line; an end record with the checksum of the file.

        Raises:
            RecordsUnwritable: the disk has no room for the whole line.
            OSError: it could not be written for another reason.
        """
        if isinstance(record, EndRecord):
            record = self._checksum.sealed(record)
        for line in self.alter(dumps(record)):
            self.write_raw(line + "\n")

    def write_raw(self, text: str) -> None:
        """Write text as it is; raises as `write`."""
        data = text.encode()
        self._checksum.add(data)
        write_all(self._fd, data)

    def close(self) -> None:
        """Close the file; a rank leaves that to its end."""
        os.close(self._fd)
