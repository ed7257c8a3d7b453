"""Failures of the machine and not of the program, by name: the only ones that may be tried again.

A candidate that crashed by one of them is not judged: no verdict, with the name of what failed. One
that hung is: only its own ranks know why they did not meet. A run whose records hold a NaN, or in
which some rank saw an illegal access, ran out of memory or refused its graph is the program's. What
a rank printed counts for nothing: an exception counts if the rank at fault recorded it, blames no
other, and is in the table of `harness.recorder.session`.
"""

import errno
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.provenance import fingerprint
from harness.recorder.session import failures_of
from harness.records import ErrorRecord, RankRecords, RunOutcome, RunResult, What

SHARED_GPU: What = "shared_gpu"
"""Of a run that shared a GPU with failing ones: nobody knows which of them ended it."""
HOST_KEY = "NCCL_HOSTID"
SHARED_HOST = "shared-gpus"
"""How its value begins where ranks share GPUs (`harness/engine/base.py` has the reason)."""


class Signature(NamedTuple):
    """What a run must have ended as; the engine says so in a field, or a rank by its exception."""

    whats: tuple[What, ...]
    from_engine: bool = False
    before_any_step: bool = False


SIGNATURES: dict[str, Signature] = {
    "port_in_use": Signature(("crashed",), before_any_step=True),
    "rendezvous_timeout": Signature(("crashed", "hang"), before_any_step=True),  # of ranks
    "no_process": Signature(("not_run",), from_engine=True),  # by the kernel, or its memory
    "forkserver_died": Signature(("interrupted",), from_engine=True),  # of this machine's runs
    "node_failure": Signature(("interrupted",), from_engine=True),  # NODE_FAIL, BOOT_FAIL, ...
    "nccl_system_error": Signature(("crashed",)),  # a call of the system or network failed
    "device_unavailable": Signature(("crashed",), before_any_step=True),  # CUDA gives no GPU
    "memory_error": Signature(("crashed",)),  # of a GPU, and uncorrectable
}
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
    return "no_group" in failures_of(error.type, error.message)


def signature_of(
    outcome: RunOutcome, errors: Sequence[ErrorRecord] = (), *, any_step: bool = False
) -> str:
    """Name of the failure of the machine that ended a run; "" if it was none.

    `errors` are what its ranks recorded as their ends, `any_step` whether one completed a step.
    """
    # Of a hang nobody is known to be at fault: who waited in vain says what for. None is heard of
    # who quotes what another one said.
    recorded = {
        failure for e in errors
        if e.blames in (None, e.rank) and (outcome.what == "hang" or e.rank == outcome.culprit_rank)
        for failure in failures_of(e.type, e.message)
    }  # fmt: skip
    engine = outcome.ending.machine if outcome.ending is not None else ""
    for name, (whats, from_engine, before_any_step) in SIGNATURES.items():
        found = name == engine if from_engine else name in recorded
        if found and outcome.what in whats and not (before_any_step and any_step):
            return name
    return ""


def machine_failure(run: RunResult) -> str:
    """As `signature_of`, of a run with its records: "" too if they tell of the program."""
    if any(_is_of_the_program(records) for records in run.ranks):
        return ""
    errors = [records.error for records in run.ranks if records.error is not None]
    # Steps that waited to be written are lost with a failing rank; its error knows the step.
    any_step = any(records.steps for records in run.ranks) or any(e.step > 0 for e in errors)
    return signature_of(run.outcome, errors, any_step=any_step)


def _is_of_the_program(records: RankRecords) -> bool:
    return (records.error is not None and records.error.what in _OF_THE_PROGRAM) or any(
        any(value is not None and not value.finite for value in (step.loss, step.grad_norm))
        or any(step.nonfinite.values())
        for step in records.steps
    )


def shares_gpus(run: RunResult) -> bool:
    """Whether any rank of the run shared its GPU with another one: its times mean nothing."""
    started = (rank.start.environment for rank in run.ranks if rank.start is not None)
    variables = (fingerprint(environment).get("environment") for environment in started)
    hosts = (str(held.get(HOST_KEY, "")) for held in variables if isinstance(held, Mapping))
    return any(host.startswith(SHARED_HOST) for host in hosts)
