"""Layouts to measure, written as a scenario writes them: `--parallel '{dp: 4, tp: 2}'`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_core.config import ConfigError, ParallelConfig
from harness.errors import UsageError
from harness.scenario.settings import Choice, decode_settings
from harness.scenario.yaml_source import Origin, parse_text

OPTION = "--parallel"


@dataclass(frozen=True)
class Layout:
    """Degrees of a layout and its name, as in a case's id."""

    name: str
    degrees: dict[str, Any]


def usual_layout(ranks: int, *, has_experts: bool) -> Layout:
    """Data parallel over all ranks, with experts dealt out over them."""
    if has_experts:
        return Layout(f"dp{ranks}_ep{ranks}", {"dp": ranks, "ep": ranks})
    return Layout(f"dp{ranks}", {"dp": ranks})


def read_layouts(texts: Sequence[str]) -> tuple[int, tuple[Layout, ...]]:
    """Decode layouts of one number of ranks.

    Returns:
        The number of ranks, and the layouts.

    Raises:
        UsageError: not a mapping of degrees, a layout that cannot be, one twice, or several numbers
            of ranks.
    """
    found: dict[str, tuple[int, Layout]] = {}
    for text in texts:
        ranks, layout = _read(text)
        if layout.name in found:
            raise UsageError(f"{OPTION} {text!r}: expected each layout once, got it again")
        found[layout.name] = ranks, layout
    sizes = {ranks for ranks, _ in found.values()}
    if len(sizes) != 1:
        got = ", ".join(f"{name} of {ranks}" for name, (ranks, _) in found.items())
        raise UsageError(f"{OPTION}: expected layouts of one number of ranks, got {got}")
    return sizes.pop(), tuple(layout for _, layout in found.values())


def _read(text: str) -> tuple[int, Layout]:
    origin = Origin(OPTION)
    node = parse_text(text, origin)
    settings = decode_settings("parallel", node, origin, "")
    degrees = {setting.leaf.partition(".")[2]: setting.value for setting in settings}
    try:
        ranks = ParallelConfig(**degrees).world_size
    except ConfigError as error:
        raise UsageError(f"{OPTION} {text!r}: {error.within('parallel')}") from None
    return ranks, Layout(Choice(settings, node.origin).token, degrees)
