"""Values of axes, how they read, and names of cases: readable, unique, safe as file names.

An id is made of one token a key, `-` between them: `parallel` first, the compared axis last, the
others between in alphabetical order. `dp2-attn`, `dp8-optim_grads_params-full_iteration`,
`dp2_tp4-lr0.001-attn`. It says everything in which the case departs from the scenario's base, so
editing one part of a scenario renames only the cases that this part makes.
"""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.faults.catalogue import CATALOGUE
from harness.records import PlantSpec
from harness.scenario.settings import LAST_RANK, OPEN, Setting, Value, leaf_types
from harness.scenario.yaml_source import Origin

MAX_ID_CHARS = 120
_HASH_CHARS = 8
_BARE = ("graph", "model.preset", "fsdp.strategy", "engine", "backend", "dtype")
"""Leaves whose values speak for themselves; every other token carries the leaf's name."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]")


@dataclass(frozen=True)
class Choice:
    """One value of an axis, or one key of an include entry: the settings that it stands for."""

    settings: tuple[Setting, ...]
    origin: Origin

    @functools.cached_property
    def leaves(self) -> dict[str, Any]:
        """Leaf to value."""
        return {setting.leaf: setting.value for setting in self.settings}

    @functools.cached_property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """Two choices are the same if these are."""
        return tuple(sorted(self.leaves.items(), key=lambda item: item[0]))

    @functools.cached_property
    def label(self) -> str:
        """What a table shows: the value alone, or all settings if there are more."""
        if len(self.settings) == 1 and self.settings[0].leaf.partition(".")[0] != "parallel":
            (setting,) = self.settings
            is_none = setting.leaf in ("stress", "compile") and not setting.value
            return "none" if is_none else _text(setting.value)
        return self.token

    @functools.cached_property
    def token(self) -> str:
        """The part of an id."""
        order = _order()
        # A program's own leaves have no order but the file's.
        settings = sorted(self.settings, key=lambda setting: order.get(setting.leaf, len(order)))
        return "_".join(_safe(_leaf_token(setting.leaf, setting.value)) for setting in settings)


Assignment = dict[str, Choice]
"""What a case says beyond the scenario's base: key to choice."""


def whole_id(scenario: str, case_id: str) -> str:
    """`SCENARIO.CASE`, which is what a case of several scenarios in one run is called anyway."""
    return case_id if case_id.startswith(f"{scenario}.") else f"{scenario}.{case_id}"


def unique_ids(assignments: Iterable[Assignment], *, last: str) -> list[str]:
    """An id for each assignment; `last` names the compared axis.

    Those that read alike all get a hash of what they hold.
    """
    held = list(assignments)
    ids = [_case_id(assignment, last) for assignment in held]
    # Folded: two cases must not share a folder on a file system that ignores case either.
    counts = Counter(name.casefold() for name in ids)
    return [
        name if counts[name.casefold()] == 1 else shortened(name, _plain(assignment), MAX_ID_CHARS)
        for name, assignment in zip(ids, held, strict=True)
    ]


def shortened(name: str, held: str, most: int) -> str:
    """The beginning of a name and a hash of what it stands for, together at most so long."""
    digest = hashlib.sha256(held.encode()).hexdigest()[:_HASH_CHARS]
    return f"{name[: most - _HASH_CHARS - 1]}-{digest}"


def _case_id(assignment: Assignment, last: str) -> str:
    names = sorted(assignment, key=lambda name: (name == last, name != "parallel", name))
    text = "-".join([assignment[name].token for name in names])
    return text if len(text) <= MAX_ID_CHARS else shortened(text, _plain(assignment), MAX_ID_CHARS)


def _plain(assignment: Assignment) -> str:
    """Everything that an assignment holds, whatever the order of its keys."""
    held = {
        name: {k: v.to_json() if isinstance(v, PlantSpec) else v for k, v in choice.leaves.items()}
        for name, choice in assignment.items()
    }
    return json.dumps(held, sort_keys=True, allow_nan=False)


@functools.cache
def _order() -> Mapping[str, int]:
    return {leaf: place for place, leaf in enumerate(leaf_types())}


def _leaf_token(leaf: str, value: Value) -> str:
    head, _, name = leaf.partition(".")
    name = name if head in OPEN else leaf.rpartition(".")[2]
    if leaf in _BARE:
        return _text(value)
    if leaf == "plant":
        return "unplanted" if value is None else _text(value)
    if value == ():
        return f"no_{name}"
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return f"{name}{value}" if isinstance(value, int | float) else f"{name}_{_text(value)}"


def _text(value: Value) -> str:
    if isinstance(value, PlantSpec):
        return "+".join(map(_fault_text, value.each))
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "eager"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _fault_text(plant: PlantSpec) -> str:
    takes = CATALOGUE[plant.fault].takes
    words = [plant.fault]
    if "step" in takes:
        words.append(f"s{plant.step}")
    if "rank" in takes:
        words.append("rlast" if plant.rank == LAST_RANK else f"r{plant.rank}")
    if plant.tensor:
        words.append(plant.tensor)
    if plant.legs != ("candidate",):
        words.append("+".join(plant.legs))
    if plant.chance != 1.0:
        words.append(f"p{plant.chance}")
    return "_".join(words)


def _safe(text: str) -> str:
    safe = _UNSAFE.sub("_", text)
    return text if safe == text else f"{safe}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
