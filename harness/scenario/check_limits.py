"""Parameters of the checks that take any: what a scenario may say, and what it leaves unsaid.

    peak_memory   max_ratio          candidate's peak over the reference's
                  max_bytes          a number, or a formula over `FORMULA_NAMES`
                  max_growth_bytes   what steps may leave behind, from early to late
                  max_unexplained    part of the peak, or 16 MiB, that may have no owner
    throughput    max_slowdown       part of the reference's step time
                  skip_steps         of each run, the warm-up
                  repeats            pairs of runs

What is left unsaid of `throughput` is filled in, so that a case's file says all of it.
"""

from typing import Any

from harness.checks.limits import (
    DEFAULT_MAX_SLOWDOWN,
    DEFAULT_SKIP_STEPS,
    FORMULA_NAMES,
    MAX_REPEATS,
    PEAK_MEMORY,
    THROUGHPUT,
    FormulaError,
    names_in,
)
from harness.paired import LEAST_PAIRS
from harness.scenario.decode import refuse, take_float, take_int, take_mapping
from harness.scenario.yaml_source import Node


def decode_peak_memory(node: Node, key: str) -> dict[str, Any]:
    """Limits of peak memory, at least one.

    Raises:
        ScenarioError: an unknown or missing limit, a value that is none, or no formula.
    """
    entries = take_mapping(node, key, legal=PEAK_MEMORY)
    if not entries:
        expected = " or ".join(PEAK_MEMORY)
        raise refuse(node, key, expected, got="an empty mapping", legal=PEAK_MEMORY)
    limits: dict[str, Any] = {}
    for name in ("max_ratio", "max_unexplained"):
        if name in entries:
            limits[name] = take_float(entries[name], f"{key}.{name}", above=0)
    if "max_bytes" in entries:
        limits["max_bytes"] = _bytes_or_formula(entries["max_bytes"], f"{key}.max_bytes")
    if "max_growth_bytes" in entries:
        name = "max_growth_bytes"
        limits[name] = take_int(entries[name], f"{key}.{name}", minimum=1)
    return limits


def _bytes_or_formula(node: Node, key: str) -> int | str:
    if not isinstance(node.value, str):
        return take_int(node, key, minimum=1)
    try:
        unknown = sorted(names_in(node.value) - set(FORMULA_NAMES))
    except FormulaError as error:
        raise refuse(node, key, error.expected, got=error.got) from None
    if unknown:
        expected = "a formula over known names"
        raise refuse(node, key, expected, got=unknown[0], legal=FORMULA_NAMES)
    return node.value


def decode_throughput(node: Node, key: str) -> dict[str, Any]:
    """Parameters of `throughput`, all of them, defaults filled in.

    Raises:
        ScenarioError: an unknown parameter or a value that is none.
    """
    entries = take_mapping(node, key, legal=THROUGHPUT)
    found: dict[str, Any] = {
        "max_slowdown": DEFAULT_MAX_SLOWDOWN, "skip_steps": DEFAULT_SKIP_STEPS,
        "repeats": LEAST_PAIRS,
    }  # fmt: skip
    if "max_slowdown" in entries:
        found["max_slowdown"] = take_float(entries["max_slowdown"], f"{key}.max_slowdown", above=0)
    if "skip_steps" in entries:
        found["skip_steps"] = take_int(entries["skip_steps"], f"{key}.skip_steps", minimum=0)
    if "repeats" in entries:
        repeats = take_int(entries["repeats"], f"{key}.repeats")
        if not LEAST_PAIRS <= repeats <= MAX_REPEATS:
            # The interval of fewer is not as sure as the verdict says.
            expected = f"an integer from {LEAST_PAIRS} to {MAX_REPEATS}"
            raise refuse(entries["repeats"], f"{key}.repeats", expected)
        found["repeats"] = repeats
    return found
