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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.codec import Json
from harness.decode import (
    MAX_SECONDS,
    dotted,
    refuse,
    take_bool,
    take_float,
    take_int,
    take_list,
    take_str,
)
from harness.yaml_source import Node

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


def decode_slurm(entries: Mapping[str, Node], where: str = "launch.slurm") -> SlurmOptions:
    """The options of a mapping whose keys are known to be legal.

    Raises:
        ScenarioError: a value of the wrong type, or an argument that the engine sets itself.
    """
    return SlurmOptions(
        **{name: _TAKERS[name](node, dotted(where, name)) for name, node in entries.items()}
    )


def _count(node: Node, key: str) -> int:
    return take_int(node, key, minimum=1)


def _word(node: Node, key: str) -> str:
    word = take_str(node, key)
    if not word or word.split() != [word]:
        raise refuse(node, key, "a name without spaces")
    return word


def _arguments(node: Node, key: str) -> tuple[str, ...]:
    nodes = take_list(node, key, "options of sbatch") if node.value != () else ()
    return tuple(_argument(entry, key) for entry in nodes)


def _argument(node: Node, key: str) -> str:
    text = take_str(node, key)
    # `-pname` and `--partition=name` are one argument each; `-p` and `name` would be two.
    option = text.partition("=")[0] if text.startswith("--") else text[:2]
    # sbatch takes the beginning of an option's name for the option: --arr for --array.
    option = next((ours for ours in OURS if len(option) > 2 and ours.startswith(option)), option)
    if option in OURS:
        instead = (
            f"launch.slurm.{OURS[option]}" if OURS[option] else "an option that is not its own"
        )
        raise refuse(node, key, f"{instead}, as the engine says {option} itself")
    if not text.startswith("-") or "\n" in text:
        raise refuse(node, key, "options of sbatch, each with its value (--qos=high)")
    return text


_TAKERS: dict[str, Callable[[Node, str], Any]] = {
    "partition": _word,
    "account": _word,
    "walltime_s": lambda node, key: take_float(node, key, above=0, most=MAX_SECONDS),
    "pending_s": lambda node, key: take_float(node, key, above=0, most=MAX_SECONDS),
    "nodes": _count,
    "ranks_per_node": _count,
    "gpus_per_node": _count,
    "cpus_per_rank": _count,
    "same_nodes": take_bool,
    "requeue": take_bool,
    "args": _arguments,
}
