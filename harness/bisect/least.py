"""The least case that still fails: fewer steps, ranks, layers and microbatches, plainer settings.

    cause -> legs that differ in it alone -> steps -> ranks -> layers -> microbatches -> settings

Both legs are made smaller in the same way, so what they differ in stays. A step is kept if the case
still fails as it did; one that passes, fails otherwise or is illegal is not. What a size may be is
found by halving: the least one first, as most faults need little.

Before that, where a cause captures parts of layers, the smallest range of layers that must be
captured for it to fail: the candidate with `graph_layers`, halved at each end. A fault of several
layers that are no range, or of no layer in particular, ends as some range that was seen to fail.
"""

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_core.config import DEGREES, TrainConfig
from harness.bisect.causes import FoundCause, FoundCauses
from harness.bisect.chance import FAILS, PASSES, UNRESOLVED, Answer
from harness.bisect.differences import (
    LegChanges,
    config_of,
    leaves_of,
    plants_of,
    why_illegal,
    with_plants,
    with_steps,
    world_size_of,
)
from harness.bisect.experiments import Asker, Judged, OutOfBudget, failure_of
from harness.codec import Json
from harness.faults.catalogue import CATALOGUE
from harness.program.spec import capabilities_of, program_of
from harness.records import CaseSpec, RunSpec, Verdict
from harness.scenario.settings import LAST_RANK


def first_failing(values: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first of ordered values from which on all fail; None if none was seen to.

    The first one is asked first, as most faults need little. A value after the last is taken to
    fail: where those that are asked pass, the answer lies behind them. None is asked twice.
    """
    if not values or fails(values[0]):
        return values[0] if values else None
    place = bisect_left(values, True, lo=1, key=fails)
    return values[place] if place < len(values) else None


KEY = "graph_layers"
COUNTS = ("model.layers", "microbatches", "micro_batch_size")
"""Sizes that are made smaller, in this order, after steps and ranks."""
PLAIN = (
    "stress", "graph", "compile", "taps", "fsdp.", "optim.", "data.", "flush_every", "ledger",
    "graph_optimizer", "stress_seed", "fp8", "model.dropout",
)  # fmt: skip
"""Settings that are put back to what they are by default, where both legs have them alike."""
MAX_LAYOUTS, RANKS = 12, "ranks"
_DEFAULTS = leaves_of(TrainConfig().to_dict())


@dataclass(frozen=True, kw_only=True)
class LeastCase:
    """What is left of a failing case.

    Attributes:
        reference, candidate: its legs.
        message: of its verdict.
        made: what was made smaller, in words: `steps 8 -> 4`.
        passed: layouts of fewer ranks that do not fail: `dp 2 tp 2`.
        stopped: why the search ended before its end; "" if it did not.
    """

    reference: RunSpec
    candidate: RunSpec
    message: str
    made: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    stopped: str = ""


def find_least(judged: Judged, reference: RunSpec, candidate: RunSpec) -> LeastCase:
    """Make a failing case as small as it goes.

    Args:
        judged: answers whether a case fails in the same way.
        reference, candidate: legs that do.
    """
    return _Shrinking(judged, reference, candidate).carry_out()


class _Shrinking:
    def __init__(self, judged: Judged, reference: RunSpec, candidate: RunSpec) -> None:
        self._judged = judged
        self._legs = (reference, candidate)
        self._first = tuple(leaves_of(spec.config) | self._ranks_of(spec) for spec in self._legs)
        self._changed = {change.leaf for change in LegChanges(reference, candidate).changes}
        self._passed: list[str] = []

    def carry_out(self) -> LeastCase:
        stopped = ""
        try:
            if (program := program_of(self._legs[1].config)) is not None:
                self._declared(program.smaller)
            else:
                self._steps()
                self._ranks()
                for leaf in COUNTS:
                    self._count(leaf, range(1, self._value(leaf)))
                self._settings()
        except OutOfBudget as error:
            stopped = str(error)
        verdict = self._judged.verdicts.get(self._legs[1].key)
        return LeastCase(
            reference=self._legs[0],
            candidate=self._legs[1],
            message=verdict.message if verdict is not None else "",
            made=tuple(self._told()),
            passed=tuple(self._passed),
            stopped=stopped,
        )

    # --- one try

    def _try(self, **leaves: Any) -> bool:
        """Take other values in both legs, if the case still fails the same way with them."""
        return self._asked(leaves) == FAILS

    def _asked(self, leaves: dict[str, Any]) -> Answer:
        legs = (_with(self._legs[0], leaves), _with(self._legs[1], leaves))
        if any(why_illegal(spec) for spec in legs) or legs[0].world_size != legs[1].world_size:
            return UNRESOLVED
        if legs[0].key == legs[1].key:
            return UNRESOLVED
        now = leaves_of(self._legs[1].config)
        told = ", ".join(f"{leaf} {_words(v)}" for leaf, v in leaves.items() if v != now.get(leaf))
        answer = self._judged.answer(
            legs[1], reference=legs[0], words=f"does it still fail with {told}?"
        )
        if answer == FAILS:
            self._legs = legs
        return answer

    def _value(self, leaf: str) -> int:
        return int((leaves_of(self._legs[1].config) | self._ranks_of(self._legs[1]))[leaf])

    @staticmethod
    def _ranks_of(spec: RunSpec) -> dict[str, Any]:
        """The number of ranks of a program, which is no part of its configuration."""
        return {} if capabilities_of(spec.config).layouts else {RANKS: spec.world_size}

    def _is_legal(self, **leaves: Any) -> bool:
        return not any(why_illegal(_with(spec, leaves)) for spec in self._legs)

    def _count(self, leaf: str, values: Sequence[int]) -> None:
        """The least of ascending values that fails, as far as it is one from which on all do."""
        if leaf in self._changed:
            return
        legal = [value for value in values if self._is_legal(**{leaf: value})]
        first_failing(legal, lambda value: self._try(**{leaf: value}))

    # --- what is made smaller

    def _declared(self, smaller: Mapping[str, str]) -> None:
        """What a program says may be smaller: `layers` to `args.n_layers`, `ranks` to `ranks`."""
        known = self._first[1]
        for name, leaf in smaller.items():
            if type(known.get(leaf)) is not int or leaf in self._changed:
                continue
            if name == "steps":
                self._steps()
            else:
                self._count(leaf, range(1, self._value(leaf)))

    def _steps(self) -> None:
        """Up to the step that was seen to be bad; faults that are planted need theirs."""
        steps = self._value("steps")
        verdict = self._judged.verdicts.get(self._legs[1].key)
        found = verdict.difference.step + 1 if verdict and verdict.difference else 0
        if found and found < steps and self._is_legal(steps=found) and self._try(steps=found):
            return
        self._count("steps", range(max(found, 1), steps))

    def _ranks(self) -> None:
        """Fewer ranks, the fewest first: degrees are halved, and what needs them goes."""
        if any(leaf.startswith("parallel.") for leaf in self._changed):
            return
        layouts = sorted(self._smaller_layouts(), key=_size)
        for layout in layouts[:MAX_LAYOUTS]:
            answer = self._asked(layout)
            if answer == FAILS:
                return
            if answer == PASSES:
                self._passed.append(layout_words(layout))

    def _smaller_layouts(self) -> Iterator[dict[str, Any]]:
        now = leaves_of(self._legs[1].config)
        degrees = {axis: int(now[f"parallel.{axis}"]) for axis in DEGREES}
        for chosen in itertools.product(*(_halves(degree) for degree in degrees.values())):
            layout: dict[str, Any] = {
                f"parallel.{axis}": degree for axis, degree in zip(degrees, chosen, strict=True)
            }
            if layout["parallel.tp"] == 1:
                layout["parallel.sequence_parallel"] = False
            if layout["parallel.pp"] == 1:
                layout["parallel.pp_chunks"] = 1
            smaller = world_size_of(config_of({**now, **layout})) < self._legs[1].world_size
            if smaller and self._is_legal(**layout):
                yield layout

    def _settings(self) -> None:
        """What both legs have alike, and need not have: all of it at once, else one by one."""
        now = leaves_of(self._legs[0].config)
        plain = {
            leaf: _DEFAULTS[leaf]
            for leaf, value in now.items()
            if leaf.startswith(PLAIN)
            and value != _DEFAULTS[leaf]
            and leaf not in self._changed
            and not (leaf == "taps" and "taps" in self._judged.case.checks)
        }
        if len(plain) > 1 and self._try(**plain):
            return
        for leaf, value in plain.items():
            self._try(**{leaf: value})

    def _told(self) -> Iterator[str]:
        before = self._first[1]
        after = leaves_of(self._legs[1].config) | self._ranks_of(self._legs[1])
        for leaf, value in before.items():
            if after[leaf] != value:
                yield f"{leaf} {_words(value)} -> {_words(after[leaf])}"


def _with(spec: RunSpec, leaves: dict[str, Any]) -> RunSpec:
    if not capabilities_of(spec.config).layouts:
        spec = with_steps(spec, leaves.get("steps", spec.config["steps"]))
        taken = {leaf: value for leaf, value in leaves.items() if leaf not in ("steps", RANKS)}
        ranks = leaves.get(RANKS, spec.world_size)
        config = config_of({**leaves_of(spec.config), **taken})
        return dataclasses.replace(spec, config=config, world_size=ranks)
    config = config_of({**leaves_of(spec.config), **leaves})
    world_size = world_size_of(config)
    made = dataclasses.replace(spec, config=config, world_size=world_size)
    plants = [
        dataclasses.replace(plant, rank=LAST_RANK)
        if "rank" in CATALOGUE[plant.fault].takes and plant.rank >= world_size
        else plant
        for plant in plants_of(spec)
    ]
    return with_plants(made, plants)


def _halves(degree: int) -> list[int]:
    """A degree and its halves: 8, 4, 2, 1."""
    halves = [degree]
    while halves[-1] > 1:
        halves.append(halves[-1] // 2)
    return halves


def layout_words(layout: dict[str, Any]) -> str:
    """`dp 2 tp 2`, `one rank`."""
    degrees = {axis: int(layout[f"parallel.{axis}"]) for axis in DEGREES}
    return " ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one rank"


def _size(layout: dict[str, Any]) -> tuple[int, int]:
    """Sort key: fewest ranks first; of those, the one with the most axes left as they are."""
    degrees = [layout[f"parallel.{axis}"] for axis in DEGREES]
    return world_size_of(config_of(layout)), -sum(degree > 1 for degree in degrees)


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- the least range of layers that is captured


@dataclass(frozen=True, kw_only=True)
class LayerRange(Json):
    """Layers of which the captured parts are enough to fail.

    Attributes:
        first, last: both are in it.
        num_layers: of the model.
        scopes: that are captured in them.
    """

    first: int
    last: int
    num_layers: int
    scopes: tuple[str, ...]

    def __str__(self) -> str:
        """For people: `attn captured in layer 5 alone, of 8`."""
        num = self.last - self.first + 1
        if num == self.num_layers:
            return f"fails only with {'+'.join(self.scopes)} captured in all {num} layers"
        which = f"layer {self.first} alone" if num == 1 else f"layers {self.first} to {self.last}"
        return f"fails with {'+'.join(self.scopes)} captured in {which}, of {self.num_layers}"


def find_layer_range(
    case: CaseSpec, verdict: Verdict, causes: FoundCauses, asker: Asker
) -> LayerRange | None:
    """The range, for the first cause of a case; None if no capture of layers is a part of it.

    Raises:
        OutOfBudget: what was asked is kept.
    """
    cause = next(iter(causes.causes), None)
    if cause is None or not any(name.startswith("graph: ") for name in cause.changes):
        return None
    candidate = LegChanges(case.reference, case.candidate).run_with(cause.changes)
    num_layers = candidate.config["model"]["layers"]
    first, last = map(int, candidate.config.get(KEY) or (0, num_layers - 1))
    if first == last or why_illegal(_within(candidate, first, last)):
        return None
    judged = judged_of_cause(case, verdict, causes, cause, asker)
    if judged is None:
        return None
    scopes = "+".join(candidate.config["graph"])

    def fails(first: int, last: int) -> bool:
        words = f"does it fail with {scopes} captured in layers {first} to {last}?"
        return judged.answer(_within(candidate, first, last), words=words) == FAILS

    end = first_failing(range(first, last), lambda end: fails(first, end))
    last = last if end is None else end
    begin = first_failing(range(last, first, -1), lambda begin: fails(begin, last))
    first = first if begin is None else begin
    return LayerRange(
        first=first, last=last, num_layers=num_layers,
        scopes=tuple(candidate.config["graph"]),
    )  # fmt: skip


def _within(candidate: RunSpec, first: int, last: int) -> RunSpec:
    return replace(candidate, config={**candidate.config, KEY: [first, last]})


def judged_of_cause(
    case: CaseSpec,
    verdict: Verdict,
    causes: FoundCauses | None,
    cause: FoundCause | None,
    asker: Asker,
) -> Judged | None:
    """Who answers for the cause by itself; None if it does not fail again."""
    if cause is None or causes is None:
        return Judged(case, failure_of(verdict), asker, verdict)
    legs = LegChanges(case.reference, case.candidate)
    alone = dataclasses.replace(case, candidate=legs.run_with(cause.changes))
    judged = Judged(alone, cause.failure, asker)
    judged.patience = causes.patience
    words = f"does it fail with {' + '.join(cause.changes) or 'none of the changes'}?"
    return judged if judged.answer(alone.candidate, words=words) == FAILS else None
