"""Records what a training program does, step by step, so that two runs can be compared bit for bit.

In a training script, two lines are enough; outside of the harness both do nothing:

    from harness.recorder import record

    recorder = record(model, optimizer)
    for batch in data:
        with recorder.step():
            loss = ...; loss.backward(); recorder.microbatch(loss)
            recorder.grad_norm(norm); optimizer.step()
        recorder.state("ema", ema)

Without them a run under the harness is recorded all the same: hooks of torch's optimizers and of
autograd see steps, losses, gradients and state.

    site         a folder for PYTHONPATH, whose sitecustomize starts the recorder in an interpreter
    session      one rank's file of records, how the process begins and ends, what errors mean
    hooks        all that is hooked in torch, taps and random rounding included
    observer     when a step begins and ends; digests, written without waiting for the device
    state        which tensors there are, by name; memory
    graphs       CUDA graphs that the program captures: replays, addresses, their memory
    capture      torch.cuda's graphs for programs, and in their place the host's without a GPU
    collectives  which collective the rank is in, for whoever has to explain a hang

These files, `harness.provenance` and `masking`, `fsdp_core.graph.digest` and its
three parts, and torch are all that recording needs; a capture without a GPU needs
`fsdp_core.graph.host` too, random rounding `fsdp_core.rounding` and `fsdp_core.device`.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

FOLDER_VARIABLE = "DELTAZERO_RECORD"
"""Names the run's folder; where it is not set nothing is recorded."""
RUN_VARIABLE = "DELTAZERO_RUN"
"""The key of the run, for the start record."""
UNRECORDED = 74
"""Exit code of a rank whose records found no space: that of sysexits.h for input and output."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class RecordsUnwritable(OSError):
    """A rank's records found no space on the disk: no fault of the program."""


def write_all(fd: int, data: bytes) -> None:
    """Write a whole line of records.

    Raises:
        RecordsUnwritable: the disk has no room for it.
        OSError: it could not be written for another reason.
    """
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        why = f"cannot write records: {error.strerror}"
        raise RecordsUnwritable(error.errno, why) from error


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
        """Further named tensors to digest at the end of each step, as a group of that name.

        Raises:
            ValueError: a group that the recorder fills itself.
        """

    def skipped(self, why: str) -> None:
        """The optimizer does not take this step."""


def record(
    model: Any = None,
    optimizer: Any = None,
    *,
    taps: str | Iterable[str] = (),
    deterministic: bool = False,
) -> Recorder:
    """The recorder of this process; one that does nothing outside of the harness.

    Args:
        model: a module, or several in a list or a mapping; None for those that optimizers train.
        optimizer: one or several; None for all that step.
        taps: patterns of modules whose inputs, outputs or gradients are digested from now on, as in
            a scenario and together with its own.
        deterministic: ask torch for deterministic kernels now, under the harness or not.

    Raises:
        ValueError: under the harness, one of `taps` is no pattern.
    """
    if deterministic:
        from harness.recorder.session import enforce_determinism

        enforce_determinism()
    if FOLDER_VARIABLE not in os.environ:
        return Recorder()
    from harness.recorder.hooks import recorder_for_script

    return recorder_for_script(model, optimizer, (taps,) if isinstance(taps, str) else tuple(taps))
