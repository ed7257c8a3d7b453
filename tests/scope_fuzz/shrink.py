"""Makes a failing case smaller: features are dropped one at a time as long as it still fails.

Greedy, in rounds, from large to small: whole events and parts of the configuration first, numbers
last (a simple form of delta debugging, Zeller and Hildebrandt, 2002). What rules refuse is not run.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fsdp_core.config import ConfigError
from tests.scope_fuzz.case import Case

Failing = Callable[[Case], str]
"""Runs a case: the kind of its failure, empty if there is none."""

SMALLEST = {
    "steps": 2, "microbatches": 1, "micro_batch_size": 1, "model.first_dense_layers": 0,
    "model.layers": 1,
}  # fmt: skip


def shrunk(case: Case, kind: str, failing: Failing, limit_s: float) -> Case:
    """The smallest case found in `limit_s` seconds that still fails in the same kind."""
    deadline = time.monotonic() + limit_s
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(case):
            if time.monotonic() > deadline:
                return case
            if _is_legal(smaller) and failing(smaller) == kind:
                case, changed = smaller, True
                break
    return case


def _is_legal(case: Case) -> bool:
    try:
        case.config()
    except ConfigError:
        return False
    return True


def _smaller(case: Case) -> Iterator[Case]:
    if case.weighs:
        yield replace(case, weighs=False)
    for part in ("parallel", "fsdp", "optim"):
        others = {k: v for k, v in case.settings.items() if not k.startswith(f"{part}.")}
        if len(others) < len(case.settings):
            yield replace(case, settings=others)
    yield from _fewer_events(case)
    for key, value in case.settings.items():
        for smaller in _less(key, value):
            yield replace(case, settings=case.settings | {key: smaller})
        if _can_go(key, value):
            others = {k: v for k, v in case.settings.items() if k != key}
            yield replace(case, settings=others)


def _less(key: str, value: Any) -> Iterator[Any]:
    """Smaller values of a setting, the smallest first."""
    if key == "graph" and len(value) > 1:
        for scope in value:
            yield tuple(each for each in value if each != scope)
    elif key in SMALLEST:
        if value > SMALLEST[key]:
            yield SMALLEST[key]
            yield value - 1
    elif key.startswith("parallel.") and type(value) is int and value > 1:
        yield value // 2


def _can_go(key: str, value: Any) -> bool:
    """Whether a setting may be left to its default: sizes of models are small for a reason."""
    if key == "graph" or key in SMALLEST:
        return False
    return not key.startswith("model.") or type(value) is not int


def _fewer_events(case: Case) -> Iterator[Case]:
    """Without each event; with one step less at the end."""
    events = case.events
    for index, event in enumerate(events):
        if event[0] != "step":
            yield replace(case, events=events[:index] + events[index + 1 :])
    if events and events[-1][0] == "step" and len(events) > 2:
        yield replace(case, events=events[:-1])
