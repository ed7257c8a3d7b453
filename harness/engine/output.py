"""What a rank prints: from a pipe into a file that cannot fill the disk.

    rank stdout+stderr -> pipe -> leader -> rank<R>.stderr: the first `cap_bytes`, as they come
                                            a line that says how much was dropped
                                            the last `TAIL_BYTES`, added when the rank has ended

The end of a flood is kept because that is where a traceback is; no rank is killed for printing.
Secrets are masked before anything is written: up to the cap everything is, beyond it only the tail,
at the end. `python -m benchmarks.output` measures it: some 50 MB/s of log lines up to the cap and
1,200 beyond it, of all ranks of a leader together.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from harness.masking import MAX_HELD_BYTES, Masker, Stream

CAP_BYTES = 16 << 20
TAIL_BYTES = 256 << 10
_READ_BYTES = 1 << 20
"""As much as a pipe can hold without privileges; what is read at once is masked at once."""


class CappedOutput:
    """Copies what arrives at `read_fd` into `path`; owns the descriptor."""

    def __init__(
        self,
        read_fd: int,
        path: Path,
        *,
        cap_bytes: int = CAP_BYTES,
        masker: Masker | None = None,
    ) -> None:
        self._masker = masker or Masker({})
        self._stream = Stream(self._masker)
        os.set_blocking(read_fd, False)
        with suppress(OSError):  # not allowed: the user's pipes hold too much already
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _READ_BYTES)
        self.read_fd = read_fd
        self.problem = ""
        self._file = path.open("wb", buffering=0)
        self._cap_bytes = cap_bytes
        self._written_bytes = 0
        self._beyond_bytes = 0
        self._tail = bytearray()

    def drain(self, max_reads: int = 4) -> bool:
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
        # One read empties a pipe; a stray child that floods it must not keep us here.
        self.drain()
        os.close(self.read_fd)
        self._store(self._stream.rest())
        if self._beyond_bytes:
            tail = self._masked_tail()
            dropped = self._beyond_bytes - len(tail)
            self._write(
                b"\n[harness: output above %d bytes: %d bytes dropped here, the last %d follow]\n"
                % (self._cap_bytes, dropped, len(tail))
            )
            self._write(tail)
        self._file.close()

    def _masked_tail(self) -> bytes:
        tail, cut = bytes(self._tail), max(len(self._tail) - TAIL_BYTES, 0)
        # The beginning of a tail that was cut there may be the end of a secret: it only shows
        # whether the first byte that is stored is inside of one.
        cut = self._masker.parted(tail, cut) if cut else 0
        return self._masker.data(tail[cut:])[-TAIL_BYTES:]

    def abandon(self) -> None:
        """Close without copying: in a forked process, to which this belongs only by inheritance."""
        os.close(self.read_fd)
        self._file.close()

    def _take(self, data: bytes) -> None:
        if self._beyond_bytes:
            # Most of a flood is dropped: only its end is masked, once that is known.
            self._store(self._stream.release() + data)
        else:
            self._store(self._stream.take(data))

    def _store(self, data: bytes) -> None:
        room = max(self._cap_bytes - self._written_bytes, 0)
        head, rest = data[:room], data[room:]
        if head:
            self._write(head)
            self._written_bytes += len(head)
        if rest:
            self._beyond_bytes += len(rest)
            self._tail += rest
            # More than is stored: a secret that its end begins inside of is seen whole.
            kept = TAIL_BYTES + MAX_HELD_BYTES
            if len(self._tail) > kept:
                del self._tail[:-kept]

    def _write(self, data: bytes) -> None:
        """Write all of `data`; a full disk is noted once and must not stop the draining."""
        view = memoryview(data)
        while view and not self.problem:
            try:
                view = view[self._file.write(view) or 0 :]
            except OSError as error:
                self.problem = str(error)
