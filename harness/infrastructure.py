"""Failures of the machine and not of the program, by name: the only ones that may be tried again.

A candidate that crashed by one of them is not judged: no verdict, with the name of what failed. One
that hung is: only its own ranks know why they did not meet.

    signature           ended as        and its words say                              in
    port_in_use         crashed         the address is taken; before any step          an exception
    rendezvous_timeout  crashed, hang   ranks did not all meet; before any step        an exception
    nccl_system_error   crashed         NCCL: a call of the system or network failed   an exception
    device_unavailable  crashed         CUDA gives out no GPU; before any step         an exception
    memory_error        crashed         a GPU has an uncorrectable error of memory     an exception
    no_process          not_run         the kernel refused a process or its memory     our own words
    forkserver_died     interrupted     the server of this machine's runs is gone      our own words
    node_failure        interrupted     Slurm: NODE_FAIL, BOOT_FAIL, PREEMPTED, ...    our own words

What ended a run decides, never what a check said of it. A run whose records hold a NaN, or in which
some rank saw an illegal access, ran out of memory or refused its graph is the program's, whatever
else was printed: trying it again would hide what was seen.

What a rank printed counts for nothing. An exception counts if the rank at fault recorded it, blames
no other, and is of a type that torch raises for its libraries; a plain RuntimeError if it begins
with a place in gloo's sources, or with CUDA's own words. A program that says the same by chance is
not forgiven.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.records import ErrorRecord, RankRecords, RunOutcome, RunResult, What

_DISTRIBUTED = (
    "DistError", "DistBackendError", "DistNetworkError", "DistStoreError",
    "RendezvousTimeoutError", "RendezvousConnectionError",
)  # fmt: skip
"""Types that torch.distributed raises for NCCL, the store and the network."""
_GLOO = re.compile(r"\[(?:enforce fail at )?[^\]\s]*/gloo/[^\]\s]+:\d+\] ")
"""How what gloo throws begins: the place in its sources."""
_CUDA = ("AcceleratorError", "RuntimeError")
_CUDA_WORDS = "CUDA error: "


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One failure of the machine.

    Attributes:
        name: as `launch.retries` and reports call it.
        whats: what the run must have ended as.
        phrases: in lower case; one of them is in what is read.
        read: the outcome's message, where the harness words it alone, or the exception that a rank
            recorded, of torch.distributed or of CUDA.
        before_any_step: whether it counts only in a run that completed no step.
    """

    name: str
    whats: tuple[What, ...]
    phrases: tuple[str, ...]
    read: Literal["outcome", "distributed", "cuda"]
    before_any_step: bool = False


SIGNATURES = (
    Signature(
        name="port_in_use",
        whats=("crashed",),
        phrases=("address already in use", "eaddrinuse"),
        read="distributed",
        before_any_step=True,
    ),
    Signature(
        name="rendezvous_timeout",
        whats=("crashed", "hang"),
        phrases=(
            "rendezvoustimeouterror", "rendezvousconnectionerror", "clients joined",
            "timed out waiting for clients", "client socket has timed out",
        ),
        read="distributed",
        before_any_step=True,
    ),
    Signature(
        name="no_process",
        whats=("not_run",),
        phrases=("resource temporarily unavailable", "cannot allocate memory"),
        read="outcome",
    ),
    Signature(
        name="forkserver_died",
        whats=("interrupted",),
        phrases=("the forkserver ",),
        read="outcome",
    ),
    Signature(
        name="node_failure",
        whats=("interrupted",),
        phrases=(
            "ended as node_fail", "ended as boot_fail", "ended as preempted",
            "ended as launch_failed",
        ),
        read="outcome",
    ),
    Signature(
        name="nccl_system_error",
        whats=("crashed",),
        phrases=("ncclsystemerror", "nccl error: unhandled system error"),
        read="distributed",
    ),
    Signature(
        name="device_unavailable",
        whats=("crashed",),
        phrases=("cuda-capable device(s) is/are busy or unavailable",),
        read="cuda",
        before_any_step=True,
    ),
    Signature(
        name="memory_error",
        whats=("crashed",),
        phrases=("uncorrectable ecc error encountered",),
        read="cuda",
    ),
)  # fmt: skip

_OF_THE_PROGRAM: tuple[What, ...] = (
    "diverged", "nonfinite", "illegal_access", "oom", "stale_address", "stale_guards", "race",
    "capture_refused", "unsupported",
)  # fmt: skip
"""What one rank's own error may say that makes the whole run the program's."""


def signature_of(
    outcome: RunOutcome, errors: Sequence[ErrorRecord] = (), *, any_step: bool = False
) -> str:
    """Name of the failure of the machine that ended a run; "" if it was none.

    Args:
        outcome: how the run ended.
        errors: what its ranks recorded as their ends.
        any_step: whether some rank completed a step.
    """
    for signature in SIGNATURES:
        too_late = signature.before_any_step and any_step
        if outcome.what not in signature.whats or too_late:
            continue
        texts = [text.lower() for text in _texts(signature, outcome, errors)]
        if any(phrase in text for phrase in signature.phrases for text in texts):
            return signature.name
    return ""


def _texts(
    signature: Signature, outcome: RunOutcome, errors: Sequence[ErrorRecord]
) -> tuple[str, ...]:
    """Where the phrases of a signature may stand."""
    if signature.read == "outcome":
        return (outcome.message,)
    # Of a hang nobody is known to be at fault: who waited in vain says what for.
    at_fault = [e for e in errors if outcome.what == "hang" or e.rank == outcome.culprit_rank]
    return tuple(f"{e.type}: {e.message}" for e in at_fault if _is_from(signature.read, e))


def _is_from(source: Literal["distributed", "cuda"], error: ErrorRecord) -> bool:
    if error.blames not in (None, error.rank):
        return False  # it quotes what the other one said
    if source == "cuda":
        return error.type in _CUDA and error.message.startswith(_CUDA_WORDS)
    if error.type in _DISTRIBUTED:
        return True
    return error.type == "RuntimeError" and _GLOO.match(error.message) is not None


def machine_failure(run: RunResult) -> str:
    """As `signature_of`, of a run with its records: "" too if they tell of the program."""
    if any(_tells_of_the_program(records) for records in run.ranks):
        return ""
    errors = [records.error for records in run.ranks if records.error is not None]
    # Steps that waited to be written are lost with a failing rank; its error knows the step.
    any_step = any(records.steps for records in run.ranks) or any(e.step > 0 for e in errors)
    return signature_of(run.outcome, errors, any_step=any_step)


def _tells_of_the_program(records: RankRecords) -> bool:
    if records.error is not None and records.error.what in _OF_THE_PROGRAM:
        return True
    return any(
        any(value is not None and not value.finite for value in (step.loss, step.grad_norm))
        or any(step.nonfinite.values())
        for step in records.steps
    )
