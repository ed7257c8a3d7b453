"""Names of cases: readable, unique, safe as file names, and blind to order and position.

An id is made of one token a key, `-` between them: `parallel` first, the compared axis last, the
others between in alphabetical order. `dp2-attn`, `dp8-optim_grads_params-full_iteration`,
`dp2_tp4-lr0.001-attn`. It says everything in which the case departs from the scenario's base, so
editing one part of a scenario renames only the cases that this part makes.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from harness.faults.catalogue import CATALOGUE
from harness.records import PlantSpec
from harness.scenario.program_section import OPEN
from harness.scenario.schema import Choice
from harness.scenario.settings import LAST_RANK, Value, leaf_types

MAX_ID_CHARS = 120
_HASH_CHARS = 8
_BARE = ("graph", "model.preset", "fsdp.strategy", "engine", "backend", "dtype")
"""Leaves whose values speak for themselves; every other token carries the leaf's name."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]")


def whole_id(scenario: str, case_id: str) -> str:
    """`SCENARIO.CASE`, which is what a case of several scenarios in one run is called anyway."""
    return case_id if case_id.startswith(f"{scenario}.") else f"{scenario}.{case_id}"


def label(choice: Choice) -> str:
    """What a table shows for `choice`: the value alone, or all its settings if there are more."""
    if len(choice.settings) == 1 and choice.settings[0].leaf.partition(".")[0] != "parallel":
        (setting,) = choice.settings
        is_none = setting.leaf in ("stress", "compile") and not setting.value
        return "none" if is_none else _text(setting.value)
    return token(choice)


def token(choice: Choice) -> str:
    """The part of an id that stands for `choice`."""
    order = _order()
    # A program's own leaves have no order but the file's.
    settings = sorted(choice.settings, key=lambda setting: order.get(setting.leaf, len(order)))
    return "_".join(_safe(_leaf_token(setting.leaf, setting.value)) for setting in settings)


@functools.cache
def _order() -> dict[str, int]:
    return {leaf: place for place, leaf in enumerate(leaf_types())}


class Words:
    """Labels and tokens of choices that live as long as this does, each made once."""

    def __init__(self) -> None:
        self.labels: dict[int, str] = {}
        self.tokens: dict[int, str] = {}

    def label(self, choice: Choice) -> str:
        """As `label`."""
        if id(choice) not in self.labels:
            self.labels[id(choice)] = label(choice)
        return self.labels[id(choice)]

    def token(self, choice: Choice) -> str:
        """As `token`."""
        if id(choice) not in self.tokens:
            self.tokens[id(choice)] = token(choice)
        return self.tokens[id(choice)]


def case_id(assignment: Mapping[str, Choice], words: Words, *, last: str) -> str:
    """The id of the case that gives each key its choice; `last` names the compared axis."""
    names = sorted(assignment, key=lambda name: (name == last, name != "parallel", name))
    text = "-".join(words.token(assignment[name]) for name in names)
    if len(text) <= MAX_ID_CHARS:
        return text
    return f"{text[: MAX_ID_CHARS - _HASH_CHARS - 1]}-{fingerprint(assignment)}"


def unique_ids(assignments: Iterable[Mapping[str, Choice]], *, last: str) -> list[str]:
    """An id for each assignment. Those that read alike all get a hash of what they hold."""
    held, words = list(assignments), Words()
    ids = [case_id(assignment, words, last=last) for assignment in held]
    # Folded: two cases must not share a folder on a file system that ignores case either.
    counts: dict[str, int] = {}
    for name in ids:
        counts[name.casefold()] = counts.get(name.casefold(), 0) + 1
    return [
        name if counts[name.casefold()] == 1 else _with_hash(name, assignment)
        for name, assignment in zip(ids, held, strict=True)
    ]


def fingerprint(assignment: Mapping[str, Choice]) -> str:
    """A hash of everything that an assignment holds, whatever the order of its keys."""
    held = {name: _plain(choice.leaves) for name, choice in assignment.items()}
    text = json.dumps(held, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARS]


def _with_hash(name: str, assignment: Mapping[str, Choice]) -> str:
    return f"{name[: MAX_ID_CHARS - _HASH_CHARS - 1]}-{fingerprint(assignment)}"


def _plain(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {
        leaf: value.to_json() if isinstance(value, PlantSpec) else value
        for leaf, value in leaves.items()
    }


def _leaf_token(leaf: str, value: Value) -> str:
    head, _, name = leaf.partition(".")
    name = name if head in OPEN else leaf.rpartition(".")[2]
    if leaf in _BARE:
        return _text(value)
    if leaf == "plant":
        return _text(value) if value is not None else "unplanted"
    if value == ():
        return f"no_{name}"
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, int | float):
        return f"{name}{value}"
    return f"{name}_{_text(value)}"


def _text(value: Value) -> str:
    if isinstance(value, PlantSpec):
        return _plant_text(value)
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "eager"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _plant_text(plant: PlantSpec) -> str:
    return "+".join(map(_fault_text, plant.each))


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
    if safe == text:
        return text
    return f"{safe}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
