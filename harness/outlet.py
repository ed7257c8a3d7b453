"""Standard streams that cannot change what a command says: closed ones, pipes without a reader.

closed (`>&-`)           the null device, or the next file that is opened would take its place
no reader (`| head`)     the rest goes to the null device, the command and its exit code go on
full, or gone otherwise  the machine's fault, exit code 6: half an answer must not look whole
"""

import errno
import io
import os
import sys
from typing import Any, TextIO

from harness.errors import Infrastructure


class _Outlet(io.FileIO):
    """A stream's descriptor."""

    def write(self, data: Any, /) -> int:
        """Write; to nowhere once nobody reads.

        Raises:
            Infrastructure: the device refused. What comes after goes nowhere.
        """
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                raise
            _to_nowhere(self.fileno())
            if error.errno == errno.EPIPE:
                return memoryview(data).nbytes
            name = {1: "stdout", 2: "stderr"}.get(self.fileno(), "a stream")
            raise Infrastructure(f"cannot write to {name}: {error.strerror}") from error


def secure_streams() -> None:
    """Take over this process's standard streams, before anything is opened or printed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDONLY if fd == 0 else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stdout = _secured(sys.stdout, 1)
    sys.stderr = _secured(sys.stderr, 2)


def _secured(stream: TextIO | None, fd: int) -> TextIO:
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream  # somebody's own, as in tests
    raw = _Outlet(fd, "w", closefd=False)
    known = stream is not None
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors=stream.errors if stream is not None else "backslashreplace",
        line_buffering=fd == 2 or (known and raw.isatty()),
        write_through=fd == 2,
    )


def _to_nowhere(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
