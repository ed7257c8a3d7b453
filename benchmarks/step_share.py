"""Share of a matrix's time that its ranks spend in steps: `python -m benchmarks.step_share RUN`.

    seconds of its steps, of all ranks of all runs / (slots * seconds from the first run's start to
    the last one's end)

Seconds of steps are those between the end of one step and of the next, on the device; what a rank
needs before its first step (`start-up`: from the release of its devices, if it was started early)
and from its last step to the end of its run (`rest`) make up what is left of a run's time.
"""

import itertools
import sys
from pathlib import Path

from harness.records import RunResult
from harness.repeats import unique_runs
from harness.store import RunFolder


def seconds(run: RunResult) -> tuple[float, float]:
    """Of the steps of all ranks, and of their start-up."""
    ends = [records.end.startup_s for records in run.ranks if records.end is not None]
    return sum(step.step_s for records in run.ranks for step in records.steps), sum(ends)


def main(folder: Path) -> None:
    """Print the share of a run folder, and what its runs take."""
    stored = RunFolder.open(folder)
    slots = int(stored.manifest["slots"])
    runs = [stored.load_run(spec) for spec in unique_runs(stored.cases).values()]
    runs = [run for run in runs if run.outcome.wall_s > 0]
    begun = sorted((run.outcome.started_unix_s, run.outcome.wall_s) for run in runs)
    whole_s = max(start + wall for start, wall in begun) - begun[0][0]
    gaps_s = [max(b[0] - a[0] - a[1], 0.0) for a, b in itertools.pairwise(begun)]
    busy_s = sum(run.outcome.wall_s * run.spec.world_size for run in runs)
    in_steps, starting = map(sum, zip(*map(seconds, runs), strict=True))
    ranks = sum(run.spec.world_size for run in runs)
    print(f"{len(runs)} runs of {ranks} ranks on {slots} slots in {whole_s:.2f} s")
    print(f"  in steps   {in_steps / (slots * whole_s):7.1%} of the time of all slots")
    print(f"  start-up   {starting / (slots * whole_s):7.1%}, {starting / ranks:.2f} s a rank")
    print(f"  rest       {(busy_s - in_steps - starting) / (slots * whole_s):7.1%} of runs' time")
    print(f"  no run     {1 - busy_s / (slots * whole_s):7.1%}, "
          f"{sum(gaps_s):.2f} s between runs that follow each other")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
