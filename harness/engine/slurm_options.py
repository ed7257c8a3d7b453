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

Which ranks of a run go on which node: blocks of neighbours, as even as they come.

world 8, 3 nodes:  [0 1 2] [3 4 5] [6 7]
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
