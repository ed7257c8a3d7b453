"""Records what a training program does, step by step, so that two runs can be compared bit for bit.

In a training script, two lines are enough; outside of the harness both do nothing, unless a folder
is given (`record`):

    from harness.recorder import record

    recorder = record(model, optimizer)
    for batch in data:
        with recorder.step():
            loss = ...; loss.backward(); recorder.microbatch(loss)
            recorder.grad_norm(norm); optimizer.step()
        recorder.state("ema", ema)

Without them a run under the harness is recorded all the same, by hooks of torch.

    site, session   how recording begins in an interpreter, how it ends, what errors mean
    hooks           all that is hooked in torch, and taps
    observer        when a step begins and ends; digests, written without waiting for the device
    state           which tensors there are, by name; digests and contents as records have them
    graphs          CUDA graphs that the program captures: replays, addresses, their memory
    collectives     which collective the rank is in, for whoever has to explain a hang
    rounding        arithmetic that rounds at random
    capture         torch.cuda's graphs for programs, and in their place the host's without a GPU

Recording needs torch, these files, `harness.provenance` and `masking`, and of `fsdp_core` the
digest and `dispatch`; host graphs for a capture without a GPU.
"""

import atexit
import contextlib
import errno
import json
import mmap
import os
import queue
import string
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "DELTAZERO_RECORD"
"""Names the run's folder; where it is not set nothing is recorded."""
RUN_VARIABLE = "DELTAZERO_RUN"
"""The key of the run, for the start record."""
UNRECORDED = 74
"""Exit code of a rank whose records found no space: that of sysexits.h for input and output."""
PLACE_BYTES = 1 << 14


class RecordsUnwritable(OSError):
    """No space on the disk for a rank's records: no fault of the program."""


class RecordFile:
    """Appends records to a rank's file, each as one line in one write; needs no torch.

    Args:
        is_new: whether the file must not be there (`FileExistsError`).
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags | (os.O_EXCL if is_new else 0), 0o644)
        self.alter: Callable[[str], list[str]] = lambda line: [line]

    def write(self, record: Any) -> None:
        """Write one record, a mapping or a `harness.records.Json`.

        Raises:
            RecordsUnwritable: the disk has no room for the whole line.
            OSError: it could not be written for another reason.
        """
        for line in self.alter(_text(record)):
            self.write_raw(line + "\n")

    def write_raw(self, text: str) -> None:
        """Write text as it is; raises as `write`."""
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            why = f"cannot write records: {error.strerror}"
            raise RecordsUnwritable(error.errno, why) from error

    def close(self) -> None:
        os.close(self._fd)


def _text(record: Any) -> str:
    plain = record if isinstance(record, Mapping) else record.to_json()
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


class PlaceFile:
    """Where a rank is, as one object in a file that is mapped into its memory: a write is a copy of
    some hundred bytes, and what was written is there whatever ends the rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(PLACE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), PLACE_BYTES)

    def write(self, place: Any) -> None:
        """Replace what is there; what does not fit is left out."""
        text = _text(place).encode() + b"\n"
        if len(text) <= PLACE_BYTES:
            self._map[: len(text)] = text

    def remove(self) -> None:
        """Take the file away: a run that ended well has no need of it."""
        self._map.close()
        self._path.unlink(missing_ok=True)


class Recorder:
    """What a script may say; this one does nothing. Nothing of it waits for the device."""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Everything inside is one step; its state is recorded as it ends."""
        yield

    def microbatch(self, loss: Any) -> None:
        """The loss of one microbatch, one number or a tensor of it, in the order of the step."""

    def grad_norm(self, norm: Any) -> None:
        """The norm of the step's gradients, a tensor of one element or a number."""

    def state(self, group: str, tensors: Mapping[str, Any]) -> None:
        """Further named tensors to digest after each step (`ValueError`: a group of ours)."""

    def skipped(self, why: str) -> None:
        """The optimizer does not take this step."""


def record(
    model: Any = None,
    optimizer: Any = None,
    *,
    taps: str | Iterable[str] = (),
    deterministic: bool = False,
    folder: str | Path | None = None,
    every: int = 100,
    ring: int | str = "256MB",
    first_step: int = 0,
) -> Recorder:
    """The recorder of this process; outside of the harness one that does nothing without `folder`.

    Args:
        model: a module, or several in a list or a mapping; None for those that optimizers train.
        optimizer: one or several; None for all that step.
        taps: patterns of modules whose inputs, outputs or gradients are digested from now on, as in
            a scenario and together with its own.
        deterministic: ask torch for deterministic kernels now, under the harness or not.
        folder: where this rank of a job without a harness records, for `harness diff`: losses,
            norm, seconds and skipped steps of every step; state and taps of some. All ranks may
            share it, and a job that goes on adds to it. The harness has settings of its own for
            this and what follows. Nothing that fails here ends the job.
        every: state and taps are digested in steps whose number this divides; 0: of no step.
        ring: bytes that a rank keeps, as `256MB`: the oldest steps go first.
        first_step: number of the first step, as of the checkpoint that the job goes on from.

    Raises:
        ValueError: under the harness or with a folder, one of `taps` is no pattern; with a folder,
            `every`, `ring` or `first_step` is no such number.
    """
    if deterministic:
        from harness.recorder.session import enforce_determinism

        enforce_determinism()
    if FOLDER_VARIABLE not in os.environ:
        if folder is None:
            return Recorder()
        from harness.recorder.session import begin_job

        for name, number in {"every": every, "first_step": first_step}.items():
            if type(number) is not int or number < 0:
                raise ValueError(f"{name}: expected a whole number >= 0, got {number!r}")
        begin_job(Path(folder), num_bytes(ring), every=every, first_step=first_step)
    from harness.recorder.hooks import recorder_for_script

    return recorder_for_script(model, optimizer, (taps,) if isinstance(taps, str) else tuple(taps))


# --- a job of days: segments of a bounded size, written by a thread of their own ------------------

# FOLDER/rank3/part0/start.jsonl     provenance, first names, the state before the first step
# FOLDER/rank3/part0/000000.jsonl    names and steps; of a rank's segments the oldest go first
# FOLDER/rank3/part1/...             of the process that went on, as after a restart
#
# {"kind":"step",...} 5d1f09aa 7c3e0b01      a line: the record, its checksum, that of its names
#
# A checksum covers the line before it in the file, too, so that a missing line shows in the next
# one. A step tells the names that its digests have, so that damaged names never give it others.
# Each segment begins with all names: nothing older is needed to read it. `harness.store.streams`
# reads.
#
# Nothing here raises into the program or waits for the disk: what cannot be written ends the
# recording, not the job.
START_FILE, SEGMENTS = "start.jsonl", "[0-9]*.jsonl"
JOB = "job"
"""Name of the event that says what the script asked for."""
NUM_SEGMENTS = 8
"""Of a full ring; the newest grows."""
LEAST_BYTES = 1 << 16
MOST_BEHIND_BYTES, CLOSING_S = 64 << 20, 10.0
"""Not written yet, before the disk counts as gone; how long the end of a job waits for it."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}  # fmt: skip
_SEAL_CHARS = 18


def num_bytes(ring: int | str) -> int:
    """`256MB` or a number, as bytes (`ValueError`: neither, or less than `LEAST_BYTES`)."""
    text = str(ring).strip()
    number = text.rstrip(string.ascii_letters)
    try:
        size = round(float(number) * _UNITS[text[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < LEAST_BYTES:
        units = ", ".join(filter(None, _UNITS))
        raise ValueError(f"ring: expected bytes, {LEAST_BYTES} or more, as 256MB (units: {units}), "
                         f"got {ring!r}")  # fmt: skip
    return size


def sealed(text: str, before: int, names: int) -> bytes:
    """A record's text as a line, after a line with checksum `before`; `names`: of its names."""
    body = f"{text} {names:08x}".encode()
    return f"{text} {zlib.crc32(body, before):08x} {names:08x}\n".encode()


def unsealed(line: bytes, before: int) -> tuple[bytes, int, int] | None:
    """Text, checksum and names of a line; None if it or the one before it is not as written."""
    body, seal = line[: -_SEAL_CHARS - 1], line[-_SEAL_CHARS - 1 : -1]
    with suppress(ValueError):
        checksum, names = int(seal[1:9], 16), int(seal[10:], 16)
        if sealed(body.decode(), before, names) == line:
            return body, checksum, names
    return None


def checksum_in(line: bytes) -> int:
    """The checksum that a damaged line states, for the line after it; 0 if none can be read."""
    with suppress(ValueError):
        return int(line[-_SEAL_CHARS:-10], 16)
    return 0


class Ring:
    """Appends a rank's records to a new part in `folder`, in at most `limit` bytes of all parts.

    The start of the first part and of each that has a segment left stay, and the newest step.
    `OSError`: the folder cannot be made. Of later failures `stopped` is called with the reason.
    """

    def __init__(self, folder: Path, limit: int, stopped: Callable[[str], None]) -> None:
        self._limit, self._stopped = limit, stopped
        folder.mkdir(parents=True, exist_ok=True)
        parts = sorted(folder.glob("part*"), key=lambda path: int(path.name[4:] or 0))
        self._old = [(p, p.stat().st_size) for part in parts for p in sorted(part.glob(SEGMENTS))]
        self._starts = [part / START_FILE for part in parts]
        number = int(parts[-1].name[4:] or 0) + 1 if parts else 0
        while True:  # another process may have taken the number
            self.folder = folder / f"part{number}"
            with suppress(FileExistsError):
                self.folder.mkdir()
                break
            number += 1
        self._names: dict[str, Any] = {}
        self._number, self._fd, self._is_open = -1, -1, True
        self._size = self._chain = self._named = 0
        self._open(self.folder / START_FILE)
        self._starts.append(self._path)
        self._queue: queue.SimpleQueue[tuple[Mapping[str, Any], str] | None] = queue.SimpleQueue()
        self._put_bytes = self._done_bytes = 0
        self._thread = threading.Thread(target=self._run, name="harness recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a record to the thread that writes it."""
        if not self._is_open:
            return
        text = _text(record)
        self._put_bytes += len(text)
        if self._put_bytes - self._done_bytes > MOST_BEHIND_BYTES:
            self._stop(f"the disk is {MOST_BEHIND_BYTES >> 20} MiB behind")
        else:
            self._queue.put((record, text))

    def close(self) -> None:
        """Write what is left, but do not wait long."""
        self._queue.put(None)
        self._thread.join(CLOSING_S)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while self._is_open and (held := self._queue.get()) is not None:
            try:
                self._put(*held)
            except Exception as error:  # noqa: BLE001 - whatever it is, the job goes on
                self._leave_word(held[0], error)
                self._stop(f"cannot write records: {error}")
            self._done_bytes += len(held[1])

    def _put(self, record: Mapping[str, Any], text: str) -> None:
        if record["kind"] == "names":
            before = self._names
            self._names = {**record, **{
                key: {**before.get(key, {}), **record[key]} for key in ("tensors", "shapes")
            }}  # fmt: skip
        size, share = len(text) + _SEAL_CHARS + 1, self._limit // NUM_SEGMENTS
        is_full = self._number >= 0 and self._size + size > share
        if record["kind"] == "step" and (self._number < 0 or is_full):
            self._old += [(self._path, self._size)] * (self._number >= 0)
            self._number += 1
            names = _text({**self._names, "step": record["step"]}) if self._names else ""
            self._forget(max(share, len(names) + _SEAL_CHARS + 1 + size))
            self._open(self.folder / f"{self._number:06d}.jsonl")
            if names:
                self._line("names", names)
        self._line(record["kind"], text)

    def _line(self, kind: str, text: str) -> None:
        names = zlib.crc32(text.encode()) if kind == "names" else self._named
        left = line = sealed(text, self._chain, names)
        while left:
            left = left[os.write(self._fd, left) :]
        self._size, self._chain, self._named = self._size + len(line), checksum_in(line), names

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd, self._size, self._chain, self._named = path, fd, 0, 0, 0

    def _forget(self, room: int) -> None:
        """Remove the oldest segments until there is room for so many bytes."""
        used = sum(size for _, size in self._old)
        used += sum(path.stat().st_size for path in self._starts if path.exists())
        while self._old and used + room > self._limit:
            path, size = self._old.pop(0)
            path.unlink(missing_ok=True)
            used -= size
        needed = {path.parent for path, _ in self._old} | {self.folder}
        for start in self._starts[1:]:
            if start.parent not in needed:
                self._starts.remove(start)
                start.unlink(missing_ok=True)
                with suppress(OSError):  # something of somebody else's is in it
                    start.parent.rmdir()

    def _leave_word(self, record: Mapping[str, Any], error: Exception) -> None:
        """Say in the folder why it ends, in the room that a half-written line leaves."""
        with suppress(OSError):
            os.ftruncate(self._fd, self._size)
            said = {
                "kind": "error", "rank": record["rank"], "step": record.get("step", -1),
                "what": "unsupported", "type": type(error).__name__, "traceback": "",
                "message": f"cannot write records: {error}",
            }  # fmt: skip
            self._line("error", _text(said))

    def _stop(self, why: str) -> None:
        if self._is_open:
            self._is_open = False
            self._stopped(why)


def say_once(why: str) -> None:
    """The one line on stderr that a job gets of a recorder that has stopped."""
    say(f"stopped, the job goes on: {why}")


def say(what: str) -> None:
    """A line on stderr, which the program may have closed or taken away."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"recorder: {what}\n")
        sys.stderr.flush()
