"""The job that a run is on Slurm: what it asks for, where its ranks go, what its folder has of it.

`launch.slurm`, what each job asks for:

partition       as sbatch knows it; the cluster's default if left out
account         the same
walltime_s      limit of a job; by default the run's timeout and time to start
pending_s       how long a job may wait in the queue; a day by default
nodes           over how many nodes a run is spread, one rank a node at least
ranks_per_node  ranks that a node holds at most; by default its GPUs, or no limit
gpus_per_node   GPUs that a job takes of each node
cpus_per_rank   processors of a rank
same_nodes      whether control and candidate wait for their reference and get its nodes
requeue         whether Slurm may start a job again, after a node failed or it was preempted
args            more options of sbatch, as they are

Ranks go on nodes in blocks of neighbours, as even as they come; 8 on 3 nodes: [0 1 2] [3 4 5] [6 7]

    slurm.json   Submission  written by the harness before sbatch is called, again with the job's id
    start<N>/                made by the job when it starts for the Nth time: a second one gives up
    restart<N>/              what the Nth start had left when Slurm started the job again
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from harness.codec import Json, dumps
from harness.errors import UsageError
from harness.records import CaseSpec, RecordError, RunSpec
from harness.repeats import confirming_runs, runs_of, unique_runs
from harness.store.files import MAX_FILE_BYTES, read_plain, write_atomic

OURS = {
    "--job-name": "", "-J": "", "--output": "", "-o": "", "--error": "", "-e": "", "--array": "",
    "-a": "", "--wrap": "", "--parsable": "", "--quiet": "", "-Q": "", "--open-mode": "",
    "--wait": "", "-W": "", "--test-only": "", "--export": "", "--input": "", "-i": "",
    "--nodes": "nodes", "-N": "nodes", "--ntasks": "nodes", "-n": "nodes",
    "--ntasks-per-node": "ranks_per_node", "--cpus-per-task": "cpus_per_rank",
    "-c": "cpus_per_rank", "--time": "walltime_s", "-t": "walltime_s",
    "--partition": "partition", "-p": "partition", "--account": "account", "-A": "account",
    "--requeue": "requeue", "--no-requeue": "requeue", "--gres": "gpus_per_node",
    "--gpus-per-node": "gpus_per_node", "--gpus": "gpus_per_node", "-G": "gpus_per_node",
}  # fmt: skip
"""Options of sbatch that the engine sets, and the key of `launch.slurm` to say instead."""
START_S = 300.0
"""What a job may take beyond its run's timeout: cold imports, file systems, stacks."""
SUBMISSION_FILE = "slurm.json"
MANIFEST_KEY = "slurm"


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Json):
    """See the module's docstring."""

    partition: str = ""
    account: str = ""
    walltime_s: float | None = None
    pending_s: float = 86_400.0
    nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_rank: int = 1
    same_nodes: bool = False
    requeue: bool = False
    args: tuple[str, ...] = ()


DEFAULT_OPTIONS = SlurmOptions()
KEYS = tuple(entry.name for entry in fields(SlurmOptions))


@dataclass(frozen=True)
class Shares:
    """`num_nodes` nodes with at most `ranks_per_node` of `world_size` ranks each."""

    world_size: int
    num_nodes: int
    ranks_per_node: int

    def ranks(self, node: int) -> range:
        """Ranks of a node, never none.

        Raises:
            ValueError: no such node.
        """
        if not 0 <= node < self.num_nodes:
            raise ValueError(f"Expected a node below {self.num_nodes}, got {node}.")
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.world_size))


def share_out(world_size: int, options: SlurmOptions, device: str) -> Shares:
    """Spread a run over as few nodes as the options allow."""
    most = options.ranks_per_node
    if most is None and device == "cuda":
        most = options.gpus_per_node
    wanted = min(options.nodes, world_size)
    if most is not None:
        wanted = max(wanted, -(-world_size // most))
    each = -(-world_size // wanted)
    # Blocks of that size may fill fewer nodes than were asked for; none is left empty.
    return Shares(world_size, -(-world_size // each), each)


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


@dataclass(frozen=True, kw_only=True)
class Submission(Json):
    """One job of one run. `name` is unlike that of any other job, `job_id` None until known."""

    name: str
    num_nodes: int
    ranks_per_node: int
    submitted_unix_s: float
    attempt: int = 0
    job_id: int | None = None
    cancelled: bool = False


def save_submission(folder: Path, submission: Submission) -> None:
    """Store what is known of the job (`Infrastructure`: the disk refused)."""
    write_atomic(folder / SUBMISSION_FILE, dumps(submission) + "\n")


def load_submission(folder: Path) -> Submission | None:
    """The job of a run folder; None if there is none that decodes."""
    with suppress(OSError, ValueError, RecursionError):
        text = read_plain(folder / SUBMISSION_FILE, MAX_FILE_BYTES).decode()
        return Submission.from_json(json.loads(text))
    return None


# --- what differs before a run is started -------------------------------------------------------
# The machine at hand is then only where the harness waits: what it lacks says nothing.


def device_on_slurm(wanted: str, options: SlurmOptions) -> Literal["cpu", "cuda"]:
    """The device that `auto`, `cpu` or `cuda` means on nodes that nobody has seen yet.

    Raises:
        UsageError: GPUs wanted, but none asked for.
    """
    if wanted == "cpu" or (wanted == "auto" and options.gpus_per_node is None):
        return "cpu"
    if options.gpus_per_node is None:
        raise UsageError(
            "device cuda on Slurm: expected launch.slurm.gpus_per_node (--slurm "
            "gpus_per_node=8), got nothing"
        )
    return "cuda"


def slots_on_slurm(wanted: int | None, cases: Sequence[CaseSpec]) -> int:
    """Ranks that may be submitted at a time: all of them, as Slurm has a queue of its own."""
    return wanted or max(1, sum(run.world_size for run in unique_runs(cases).values()))


def references_of(cases: Sequence[CaseSpec]) -> dict[str, str]:
    """By key of a run, that of the reference which it is compared with, if it is not one itself."""
    references = {case.reference.key for case in cases}
    return {
        spec.key: case.reference.key
        for case in cases
        if not case.skip_reason
        for spec in (*runs_of(case), *confirming_runs(case).values())
        if spec.key not in references
    }


def stored_options(manifest: Mapping[str, Any]) -> SlurmOptions | None:
    """What an earlier harness asked of Slurm; None if it ran on its own machine.

    Raises:
        UsageError: the manifest is damaged there.
    """
    stored = manifest.get(MANIFEST_KEY)
    if stored is None:
        return None
    try:
        return SlurmOptions.from_json(stored)
    except RecordError as error:
        raise UsageError(f"the run folder's manifest is damaged: {error}") from error
