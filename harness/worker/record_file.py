"""A rank's record file as it is written: line by line, with a checksum in the last."""

import os
from collections.abc import Callable
from pathlib import Path

from harness.checksum import LinesChecksum
from harness.records import EndRecord, Json, dumps

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
            OSError: the line could not be written whole, as on a full disk.
        """
        if isinstance(record, EndRecord):
            record = self._checksum.sealed(record)
        for line in self.alter(dumps(record)):
            self.write_raw(line + "\n")

    def write_raw(self, text: str) -> None:
        """Write text as it is."""
        data = text.encode()
        self._checksum.add(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close the file; a rank leaves that to its end."""
        os.close(self._fd)
