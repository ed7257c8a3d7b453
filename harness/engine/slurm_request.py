"""What sbatch is told for a run: options, and a script that becomes the job on its first node."""

import math
import shlex
import sys
from pathlib import Path

from harness.engine.job_files import LOG_FILE
from harness.engine.shares import share_out
from harness.engine.slurm_options import SlurmOptions
from harness.engine.watch import Limits
from harness.errors import UsageError
from harness.records import RunSpec

START_S = 300.0
"""What a job may take beyond its run's timeout: cold imports, file systems, stacks."""


def request(spec: RunSpec, options: SlurmOptions) -> list[str]:
    """Options of sbatch that say what a run needs: equal for all runs of one shape."""
    shares = share_out(spec.world_size, options, spec.device)
    wall_s = options.walltime_s or spec.timeout_s + START_S
    asked = [
        f"--nodes={shares.num_nodes}",
        f"--ntasks={shares.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={shares.ranks_per_node * options.cpus_per_rank}",
        f"--time={math.ceil(wall_s / 60)}",
        "--requeue" if options.requeue else "--no-requeue",
    ]
    if options.gpus_per_node is not None and spec.device == "cuda":
        asked.append(f"--gres=gpu:{options.gpus_per_node}")
    if options.partition:
        asked.append(f"--partition={options.partition}")
    if options.account:
        asked.append(f"--account={options.account}")
    return [*asked, *options.args]


def identity(name: str, folder: Path) -> list[str]:
    """Options of sbatch that are only this job's.

    Raises:
        UsageError: Slurm would not write to such a folder.
    """
    if "\\" in str(folder):
        # Slurm takes the backslashes out of the name of the file, and there is no way to quote one.
        raise UsageError(f"engine slurm: expected a path without a backslash, got {folder}")
    log = str(folder / LOG_FILE).replace("%", "%%")
    return [f"--job-name={name}", f"--output={log}", "--open-mode=append", "--export=ALL"]


def batch_command(name: str, folder: Path, entry: str, limits: Limits) -> list[str]:
    """What the job runs on its first node."""
    return [
        sys.executable, "-P", "-m", "harness.worker", "job", "--folder", str(folder),
        "--name", name, "--entry", entry,
        "--grace-s", str(limits.grace_s), "--stacks-s", str(limits.stacks_s),
        "--output-cap-bytes", str(limits.output_cap_bytes),
    ]  # fmt: skip


def script(command: list[str]) -> str:
    """A batch script that becomes `command`."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"
