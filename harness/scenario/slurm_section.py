"""Decoding `launch.slurm` (`harness.engine.slurm_options`)."""

from collections.abc import Callable, Mapping
from typing import Any

from harness.engine.slurm_options import OURS, SlurmOptions
from harness.scenario.decode import (
    MAX_SECONDS,
    dotted,
    refuse,
    take_bool,
    take_float,
    take_int,
    take_list,
    take_str,
)
from harness.scenario.yaml_source import Node


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
