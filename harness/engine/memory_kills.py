"""Whether the kernel killed anything for want of memory, by its own count.

A SIGKILL does not say who sent it. The kernel counts its own before it sends them, those of every
cgroup, in `oom_kill` of /proc/vmstat (proc(5), since Linux 4.13): if that number is what it was
when the run began, somebody else sent the signal. Where there is no such number, as in some
sandboxes, nothing is known.
"""

import dataclasses
import signal
from pathlib import Path

from harness.records import RunOutcome

_COUNTERS = Path("/proc/vmstat")
NOT_THE_KERNEL = (
    "the kernel killed nothing for want of memory, so somebody did: --resume makes the run again"
)


def num_memory_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it started; None: not told."""
    try:
        lines = _COUNTERS.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def with_sender(outcome: RunOutcome, before: int | None) -> RunOutcome:
    """The outcome, and of one that a SIGKILL brought about who sent that, as far as it is known.

    Args:
        outcome: of a run that has ended on this machine.
        before: `num_memory_kills` when it began.
    """
    # Without a culprit it was the leader of the ranks that died.
    codes = [state.code for state in outcome.ranks if state.rank == outcome.culprit_rank]
    by_sigkill = codes in ([], [-signal.SIGKILL])
    now = num_memory_kills()
    if outcome.what != "killed" or not by_sigkill or before is None or now is None:
        return outcome
    words = NOT_THE_KERNEL
    if now != before:
        words = f"the kernel killed {now - before} for want of memory meanwhile"
    return dataclasses.replace(
        outcome, message=f"{outcome.message}; {words}", from_outside=now == before
    )
