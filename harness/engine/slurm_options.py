"""`launch.slurm`: what the job of each run asks of Slurm.

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
"""

from dataclasses import dataclass, fields

from harness.codec import Json

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
