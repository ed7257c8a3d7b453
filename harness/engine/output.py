"""What a rank prints: from a pipe into a file that cannot fill the disk.

    rank stdout+stderr -> pipe -> leader -> rank<R>.stderr: the first `cap_bytes`, as they come
                                            a line that says how much was dropped
                                            the last `TAIL_BYTES`, added when the rank has ended

The end of a flood is kept because that is where a traceback is; the rank is never slowed or killed
for printing.
"""

import os
from pathlib import Path

CAP_BYTES = 64 << 20
TAIL_BYTES = 256 << 10
_READ_BYTES = 1 << 18


class CappedOutput:
    """Copies what arrives at `read_fd` into `path`; owns the descriptor."""

    def __init__(self, read_fd: int, path: Path, *, cap_bytes: int = CAP_BYTES) -> None:
        os.set_blocking(read_fd, False)
        self.read_fd = read_fd
        self.problem = ""
        self._file = path.open("wb", buffering=0)
        self._cap_bytes = cap_bytes
        self._written_bytes = 0
        self._beyond_bytes = 0
        self._tail = bytearray()

    def drain(self, max_reads: int = 16) -> bool:
        """Copy what is there now, a bounded part of it at most; False at the end of the output."""
        for _ in range(max_reads):
            try:
                data = os.read(self.read_fd, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._take(data)
        return True

    def close(self) -> None:
        """Copy what is left, add the end of a flood, and close. Safe to call twice."""
        if self._file.closed:
            return
        # A pipe holds at most 1 MiB; a stray child that floods it must not keep us here.
        self.drain(max_reads=64)
        os.close(self.read_fd)
        if self._beyond_bytes:
            dropped = self._beyond_bytes - len(self._tail)
            self._write(
                b"\n[harness: output above %d bytes: %d bytes dropped here, the last %d follow]\n"
                % (self._cap_bytes, dropped, len(self._tail))
            )
            self._write(bytes(self._tail))
        self._file.close()

    def abandon(self) -> None:
        """Close without copying: in a forked process, to which this belongs only by inheritance."""
        os.close(self.read_fd)
        self._file.close()

    def _take(self, data: bytes) -> None:
        room = max(self._cap_bytes - self._written_bytes, 0)
        head, rest = data[:room], data[room:]
        if head:
            self._write(head)
            self._written_bytes += len(head)
        if rest:
            self._beyond_bytes += len(rest)
            self._tail += rest
            if len(self._tail) > TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]

    def _write(self, data: bytes) -> None:
        """Write all of `data`; a full disk is noted once and must not stop the draining."""
        view = memoryview(data)
        while view and not self.problem:
            try:
                view = view[self._file.write(view) or 0 :]
            except OSError as error:
                self.problem = str(error)
