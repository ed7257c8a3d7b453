"""`python -m harness`, and what the installed command calls.

Standard streams cannot change what a command says: a closed one is the null device, as the next
file that is opened would take its place; what nobody reads (`| head`) goes there, too, while the
command goes on; a full disk ends it with exit code 6, as half an answer must not look whole.
"""

import errno
import gc
import io
import os
import sys
from typing import Any, TextIO


class _Outlet(io.FileIO):
    """A stream's descriptor: to nowhere once nobody reads; `Infrastructure`: the device refused."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if error.errno == errno.EPIPE:
                return memoryview(data).nbytes
            from harness.errors import Infrastructure

            name = {1: "stdout", 2: "stderr"}[self.fileno()]
            raise Infrastructure(f"cannot write to {name}: {error.strerror}") from error


def _secured(stream: TextIO | None, fd: int) -> TextIO:
    if stream is not None and not isinstance(stream, io.TextIOWrapper):
        return stream  # somebody's own, as in tests
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlet(fd, "w", closefd=False)),
        encoding=stream.encoding if stream else "utf-8",
        errors=stream.errors if stream else "backslashreplace",
        line_buffering=fd == 2 or os.isatty(fd), write_through=fd == 2,
    )  # fmt: skip


def secure_streams() -> None:
    """Take over this process's standard streams, before anything is opened or printed."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # the lowest free number is this one
            os.open(os.devnull, os.O_RDONLY if fd == 0 else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stdout, sys.stderr = _secured(sys.stdout, 1), _secured(sys.stderr, 2)


def main() -> int:
    """Run one command; the exit code. Ctrl-C while modules are still read is an answer too."""
    try:
        secure_streams()
        gc.set_threshold(100_000)  # plans and records are many objects, and few are in cycles
        from harness.cli import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("harness: interrupted\n")
        return 2
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
