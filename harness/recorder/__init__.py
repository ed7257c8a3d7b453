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
    ring            bounded files of a job of days, which has no harness around it
    hooks           all that is hooked in torch, and taps
    observer        when a step begins and ends; digests, written without waiting for the device
    state           which tensors there are, by name
    graphs          CUDA graphs that the program captures: replays, addresses, their memory
    collectives     which collective the rank is in, for whoever has to explain a hang
    rounding        arithmetic that rounds at random
    rows            digests and contents as records have them, of the built-in trainer as well
    capture         torch.cuda's graphs for programs, and in their place the host's without a GPU

Recording needs torch, these files, `harness.provenance` and `masking`, and of `fsdp_core` the
digest and `dispatch`; host graphs for a capture without a GPU.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "DELTAZERO_RECORD"
"""Names the run's folder; where it is not set nothing is recorded."""
RUN_VARIABLE = "DELTAZERO_RUN"
"""The key of the run, for the start record."""
UNRECORDED = 74
"""Exit code of a rank whose records found no space: that of sysexits.h for input and output."""


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
        plain = record if isinstance(record, Mapping) else record.to_json()
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
        for line in self.alter(text):
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
        """Close the file; a rank leaves that to its end."""
        os.close(self._fd)


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
        from harness.recorder.ring import num_bytes
        from harness.recorder.session import begin_job

        for name, number in {"every": every, "first_step": first_step}.items():
            if type(number) is not int or number < 0:
                raise ValueError(f"{name}: expected a whole number >= 0, got {number!r}")
        begin_job(Path(folder), num_bytes(ring), every=every, first_step=first_step)
    from harness.recorder.hooks import recorder_for_script

    return recorder_for_script(model, optimizer, (taps,) if isinstance(taps, str) else tuple(taps))
