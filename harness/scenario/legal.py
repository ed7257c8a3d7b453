"""An axis of layouts that the rules list, in place of one that the file lists.

    axes:
      parallel: {legal_layouts: 64}                       every legal layout of 64 ranks
      parallel: {legal_layouts: 64, tp: [1, 2], pp: 1}    those of these degrees

The model is that of `base`. The keys beside `legal_layouts` are those of `parallel`, each with the
value, or the list of values, that it may have; any, if it is left out (`pp_chunks` is 1 then, and
`dynamic_cp` empty). A value of the axis names what differs from degree 1 alone.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_core.config import ConfigError, ParallelConfig
from fsdp_core.layouts import legal_layouts
from harness.errors import shown
from harness.scenario.decode import dotted, refuse, take_int, take_mapping
from harness.scenario.settings import Setting, build_model, decode_leaf
from harness.scenario.yaml_source import Node, Origin

KEY = "legal_layouts"
MAX_LAYOUTS = 50_000
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(ParallelConfig)}


def is_listed(axis: str, node: Node) -> bool:
    """Whether the values of an axis are for the rules to list."""
    return axis == "parallel" and isinstance(node.value, dict) and KEY in node.value


def listed_layouts(
    node: Node, key: str, base: Mapping[str, Setting], fallback: Origin
) -> tuple[tuple[Setting, ...], ...]:
    """The settings of each legal layout, in the order of `fsdp_core.layouts`.

    Args:
        node: the axis, a mapping with `legal_layouts`.
        key: its name in messages.
        base: settings of every run, the model among them.
        fallback: where to point when a default of the model is at fault.

    Raises:
        ScenarioError: bad keys or values, a base that sets degrees too, no legal layout, or too
            many of them.
    """
    entries = dict(take_mapping(node, key, legal=(KEY, *_DEFAULTS)))
    for leaf, setting in base.items():
        if leaf.startswith("parallel."):
            raise setting.origin.error(
                dotted("base", leaf), expected=f"no degree, as {key} lists whole layouts",
                got=shown(setting.value),
            )  # fmt: skip
    world_size = take_int(entries.pop(KEY), dotted(key, KEY), minimum=1)
    only = {name: _allowed(name, value, key) for name, value in entries.items()}
    model = build_model(base, fallback)
    microbatches = base["microbatches"].value if "microbatches" in base else 1
    assert isinstance(microbatches, int)
    try:
        legal = legal_layouts(world_size, model, microbatches=microbatches, only=only)
    except ConfigError as error:
        raise refuse(node, dotted(key, KEY), error.expected, got=shown(error.got)) from None
    layouts = list(itertools.islice(legal, MAX_LAYOUTS + 1))
    if not layouts:
        expected = f"a legal layout of {world_size} ranks"
        raise refuse(node, key, expected, got=f"none for the model {model.preset}")
    if len(layouts) > MAX_LAYOUTS:
        raise refuse(node, key, f"at most {MAX_LAYOUTS:,} layouts", got="more")
    return tuple(_settings(layout, node.origin) for layout in layouts)


def _allowed(name: str, node: Node, key: str) -> tuple[Any, ...]:
    """The values that a field may have: one, or a list. `dynamic_cp` is a list, or one of lists."""
    many = isinstance(node.value, tuple)
    if name == "dynamic_cp" and isinstance(node.value, tuple):
        many = any(isinstance(entry.value, tuple) for entry in node.value)
    nodes: Iterable[Node] = node.value if many and isinstance(node.value, tuple) else (node,)
    return tuple(_take(name, entry, key) for entry in nodes)


def _take(name: str, node: Node, key: str) -> Any:
    if name == "dynamic_cp" and node.value == ():
        return ()  # no dynamic sizes, beside some
    return decode_leaf(f"parallel.{name}", node, dotted(key, name))


def _settings(layout: ParallelConfig, origin: Origin) -> tuple[Setting, ...]:
    values = {name: getattr(layout, name) for name in _DEFAULTS}
    named = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    return tuple(
        Setting(f"parallel.{name}", value, origin) for name, value in (named or {"dp": 1}).items()
    )
