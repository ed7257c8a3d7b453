"""Which runs `--resume` makes again, though they have an outcome.

    interrupted, not_run          they say nothing of the program
    undecided, shared_gpu         nobody knows whose end it was (`harness.engine.local`)
    killed, and not for memory    somebody did it: by its own count not the kernel
    killed, anything else         only if somebody asks for it (`--again-killed`)
    what the machine failed       as often as `launch.retries` allows (`harness.runner.retries`)

Any other outcome is final. A rank that is killed may have used too much memory: that is a failure,
and told as one by the harness that saw it, whoever sent the signal. An attempt that is made again
is kept and shown beside the new one, and a new one whose bits differ from it does not pass.
"""

from pathlib import Path

from harness.records import RunOutcome, What
from harness.repeats import confirming_runs, unique_runs
from harness.store import RunFolder

TO_REPEAT: tuple[What, ...] = ("interrupted", "not_run", "shared_gpu")
"""Outcomes that say nothing of the program."""


def says_nothing(outcome: RunOutcome | None) -> bool:
    """Whether an outcome, if there is one, says nothing of the program: `--resume` asks again."""
    if outcome is None:
        return True
    if outcome.undecided or outcome.what in TO_REPEAT:
        return True
    return outcome.what == "killed" and outcome.from_outside


def set_killed_aside(path: Path) -> tuple[str, ...]:
    """Set every killed run of a folder aside, so that `--resume` makes it; their keys.

    For whoever knows that it was not the program's doing where the kernel cannot tell.

    Raises:
        UsageError: not a run folder, damaged, or in use by another harness.
        Infrastructure: the disk refused.
    """
    with RunFolder.open(path) as folder:
        repeats = (spec for case in folder.cases for spec in confirming_runs(case).values())
        keys = dict.fromkeys([*unique_runs(folder.cases), *(spec.key for spec in repeats)])
        outcomes = {key: folder.finished(key) for key in keys}
        killed = [key for key, outcome in outcomes.items() if outcome and outcome.what == "killed"]
        for key in killed:
            folder.set_aside(key)
    return tuple(killed)
