"""Failures of the machine and not of the program, by name: the only ones that may be tried again.

A candidate that crashed by one of them is not judged: no verdict, with the name of what failed. One
that hung is: only its own ranks know why they did not meet.

    signature           ended as        because                                        read from
    port_in_use         crashed         the address is taken; before any step          an exception
    rendezvous_timeout  crashed, hang   ranks did not all meet; before any step        an exception
    nccl_system_error   crashed         NCCL: a call of the system or network failed   an exception
    device_unavailable  crashed         CUDA gives out no GPU; before any step         an exception
    memory_error        crashed         a GPU has an uncorrectable error of memory     an exception
    no_process          not_run         the kernel refused a process or its memory     a field
    forkserver_died     interrupted     the server of this machine's runs is gone      a field
    node_failure        interrupted     Slurm: NODE_FAIL, BOOT_FAIL, PREEMPTED, ...    a field

What ended a run decides, never what a check said of it. A run whose records hold a NaN, or in which
some rank saw an illegal access, ran out of memory or refused its graph is the program's, whatever
else was printed: trying it again would hide what was seen.

Ranks that share a GPU may bring each other down (`harness.engine.gpus`): then nobody is to blame
(`SHARED_GPU`), and their times mean nothing.

What a rank printed counts for nothing. An exception counts if the rank at fault recorded it, blames
no other, and is in the table of `harness.recorder.session`. A program that says the same by
chance is not forgiven.
"""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.recorder.session import failures_of
from harness.records import ErrorRecord, RankRecords, RunOutcome, RunResult, What

SHARED_GPU: What = "shared_gpu"
"""What is said of a run where nobody knows whose doing its end was."""
HOST_KEY = "NCCL_HOSTID"
SHARED_HOST = "shared-gpus"
"""How its value begins where ranks share GPUs (`harness/engine/gpus.py` has the reason)."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One failure of the machine.

    Attributes:
        name: as `launch.retries` and reports call it; as `Ending.machine` or the table of library
            errors does, too.
        whats: what the run must have ended as.
        read: who says so: the engine, in the outcome, or the exception that a rank recorded.
        before_any_step: whether it counts only in a run that completed no step.
    """

    name: str
    whats: tuple[What, ...]
    read: Literal["engine", "exception"]
    before_any_step: bool = False


SIGNATURES = (
    Signature(name="port_in_use", whats=("crashed",), read="exception", before_any_step=True),
    Signature(
        name="rendezvous_timeout", whats=("crashed", "hang"), read="exception", before_any_step=True
    ),
    Signature(name="no_process", whats=("not_run",), read="engine"),
    Signature(name="forkserver_died", whats=("interrupted",), read="engine"),
    Signature(name="node_failure", whats=("interrupted",), read="engine"),
    Signature(name="nccl_system_error", whats=("crashed",), read="exception"),
    Signature(
        name="device_unavailable", whats=("crashed",), read="exception", before_any_step=True
    ),
    Signature(name="memory_error", whats=("crashed",), read="exception"),
)

_OF_THE_PROGRAM: tuple[What, ...] = (
    "diverged", "nonfinite", "illegal_access", "oom", "stale_address", "stale_guards", "race",
    "capture_refused", "unsupported",
)  # fmt: skip
"""What one rank's own error may say that makes the whole run the program's."""


def no_process(number: int) -> str:
    """Name of the failure of a fork, by its error number; "" if that is none of the machine's."""
    return "no_process" if number in (errno.EAGAIN, errno.ENOMEM) else ""


def has_lost_its_groups(error: ErrorRecord) -> bool:
    """Whether process groups were gone."""
    return "no_group" in library_failures(error)


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
        if signature.read == "engine":
            found = outcome.ending is not None and outcome.ending.machine == signature.name
        else:
            found = any(signature.name in library_failures(e) for e in _at_fault(outcome, errors))
        if found:
            return signature.name
    return ""


def library_failures(error: ErrorRecord) -> frozenset[str]:
    """What the exception of a rank means, by the table of library errors."""
    return failures_of(error.type, error.message)


def _at_fault(outcome: RunOutcome, errors: Sequence[ErrorRecord]) -> list[ErrorRecord]:
    """Errors of who is at fault, but not of who quotes what another one said."""
    # Of a hang nobody is known to be at fault: who waited in vain says what for.
    return [
        each
        for each in errors
        if (outcome.what == "hang" or each.rank == outcome.culprit_rank)
        and each.blames in (None, each.rank)
    ]


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


def shares_gpus(run: RunResult) -> bool:
    """Whether any rank of the run shared its GPU with another one: its times mean nothing."""
    return any(
        _host(rank.start.environment).startswith(SHARED_HOST)
        for rank in run.ranks
        if rank.start is not None
    )


def _host(environment: Mapping[str, object]) -> str:
    fingerprint = environment.get("fingerprint", environment)
    variables = fingerprint.get("environment") if isinstance(fingerprint, Mapping) else None
    return str(variables.get(HOST_KEY, "")) if isinstance(variables, Mapping) else ""
