"""From a scenario to its cases: axes multiply, exclude removes, include extends or adds.

The rules, in the order in which they apply:

1. The product of all axes is taken. The combinations whose compared axis has its reference value
   are not cases: each is the reference leg of its neighbours.
2. An `exclude` entry names some axes, each with one of its values, and removes every case that has
   all of them. An entry that removes no case of the product is an error.
3. An `include` entry names axes and any other settings. If some of the cases left agree with every
   axis value that it names (all agree if it names none), it extends these with its other settings,
   in both legs; a later entry wins over an earlier one. If no case agrees, it adds one case of
   exactly its settings over `base`, which needs a value of the compared axis that is not the
   reference. Values that are not on the axis are allowed here. Entries see the cases of the
   product only, not those that other entries added. An entry that changes nothing is an error.

Each case then has three runs: the candidate; the reference, with the compared axis at its reference
value and nothing else changed; and the control, which is the reference again. A planted fault goes
into the legs that it names; the other legs get its counterpart, if the catalogue gives it one.
"""

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.checks.speed import TIMED_STEPS
from harness.errors import NothingSelected
from harness.faults.catalogue import CATALOGUE, LEGS
from harness.records import CaseSpec, PlantSpec, RunSpec, each_of, joined
from harness.repeats import refusal
from harness.scenario.case_id import Assignment, Choice, unique_ids
from harness.scenario.decode import dotted
from harness.scenario.schema import Rule, Scenario
from harness.scenario.settings import Leg, check_has_part, overlay
from harness.scenario.yaml_source import Origin
from harness.soaking import LEAST_STEPS
from harness.tolerance import ROUNDING, LossGap, tolerance_of

MAX_COMBINATIONS = 50_000
Device = Literal["cpu", "cuda"]
Plants = Mapping[str, PlantSpec | None]
"""What is planted, by role of the run in its case."""
_NO_PLANTS: Plants = dict.fromkeys(LEGS)
Flaw = tuple[Origin, str, str, str]
"""Where, at which key, what was expected and what is there."""


def expand(scenario: Scenario, device: Device) -> tuple[CaseSpec, ...]:
    """The cases of a scenario for one kind of device, in the order of the file.

    Raises:
        ScenarioError: a combination breaks a rule of the configuration, an exclude or include
            entry does nothing, two cases are the same, or there are too many.
        NothingSelected: no case is left.
    """
    return expand_marked(scenario, device)[0]


def expand_marked(
    scenario: Scenario, device: Device
) -> tuple[tuple[CaseSpec, ...], tuple[str, ...]]:
    """As `expand`, and the ids of the cases that include entries added: somebody wants these."""
    gc.disable()  # it would walk tens of thousands of objects, none in a cycle, again and again
    try:
        left, added = _assignments(scenario)
        if not (assignments := left + added):
            raise NothingSelected(f"{scenario.path}: exclude leaves no case of {scenario.name}")
        ids = unique_ids(assignments, last=scenario.compare.axis)
        maker = _Maker(scenario, device)
        cases = [maker.case(name, held) for name, held in zip(ids, assignments, strict=True)]
        return tuple(cases), tuple(ids[len(left) :])
    finally:
        gc.enable()


def named(scenario: Scenario) -> Iterator[tuple[str, dict[str, str]]]:
    """Id and labels of each case that `expand` gives, in a tenth of its time: none is checked.

    Raises:
        ScenarioError: an exclude or include entry does nothing, or there are too many cases.
    """
    assignments = list(itertools.chain(*_assignments(scenario)))
    ids = unique_ids(assignments, last=scenario.compare.axis)
    for name, held in zip(ids, assignments, strict=True):
        yield name, {key: choice.label for key, choice in held.items()}


def count(scenario: Scenario) -> int:
    """How many cases `expand` gives. Only axes that an entry names are multiplied out.

    Raises:
        ScenarioError: as `named`.
    """
    _check_size(scenario)
    ruled = {key for rule in (*scenario.exclude, *scenario.include) for key in rule.choices}
    few = dataclasses.replace(
        scenario, axes=tuple(axis for axis in scenario.axes if axis.name in ruled)
    )
    left, added = _assignments(few)
    others = (c for axis, c in _columns(scenario).items() if axis not in ruled)
    return len(left) * math.prod(map(len, others)) + len(added)


def _assignments(scenario: Scenario) -> tuple[list[Assignment], list[Assignment]]:
    """What the axes give, without what is excluded, and what include entries add."""
    held = _product(scenario)
    matching, removed = _matching(held), set[int]()
    for rule in scenario.exclude:
        if not (places := matching(rule.choices)):
            raise rule.origin.error(
                "exclude",
                "an entry that removes a case",
                f"{_words(rule)}, which matches none (the reference leg is no case)",
            )
        removed.update(places)
    return _include(scenario, [each for n, each in enumerate(held) if n not in removed])


def _check_size(scenario: Scenario) -> None:
    count = math.prod(len(axis.choices) for axis in scenario.axes)
    if count > MAX_COMBINATIONS:
        lengths = " x ".join(f"{axis.name} {len(axis.choices)}" for axis in scenario.axes)
        most, got = f"at most {MAX_COMBINATIONS:,} combinations", f"{lengths} = {count:,}"
        raise scenario.axes[0].origin.error("axes", most, got)


def _columns(scenario: Scenario) -> dict[str, list[Choice]]:
    """The values of each axis in a candidate."""
    compare = scenario.compare
    return {
        each.name: [c for c in each.choices
                    if each.name != compare.axis or c.identity != compare.reference.identity]
        for each in scenario.axes
    }  # fmt: skip


def _product(scenario: Scenario) -> list[Assignment]:
    _check_size(scenario)
    columns = _columns(scenario)
    return [dict(zip(columns, row, strict=True)) for row in itertools.product(*columns.values())]


def _matching(assignments: list[Assignment]) -> Callable[[Mapping[str, Choice]], list[int]]:
    """Finds the places of those that have every wanted choice, without asking each each time."""
    by_names: dict[tuple[str, ...], dict[tuple[Hashable, ...], list[int]]] = {}

    def matching(wanted: Mapping[str, Choice]) -> list[int]:
        names = tuple(sorted(wanted))
        if names not in by_names:
            groups = by_names[names] = {}
            for place, held in enumerate(assignments):
                key = tuple([held[name].identity for name in names])
                groups.setdefault(key, []).append(place)
        return by_names[names].get(tuple(wanted[name].identity for name in names), [])

    return matching


def _include(
    scenario: Scenario, assignments: list[Assignment]
) -> tuple[list[Assignment], list[Assignment]]:
    matching = _matching(assignments)
    extended = [dict(held) for held in assignments]
    added: list[Assignment] = []
    for rule in scenario.include:
        on_axes = {key: c for key, c in rule.choices.items() if scenario.axis(key) is not None}
        others = {key: c for key, c in rule.choices.items() if key not in on_axes}
        places = matching(on_axes)
        if not places:
            added.append(_added(scenario, rule))
        elif not others:
            raise rule.origin.error(
                "include",
                "an entry that extends or adds a case",
                f"{_words(rule)}, a case that the axes already give",
            )
        for place in places:
            _extend(extended[place], others, rule)
    return extended, added


def _extend(held: Assignment, others: Mapping[str, Choice], rule: Rule) -> None:
    for key, choice in others.items():
        for other, earlier in held.items():
            if other != key and (shared := set(earlier.leaves) & set(choice.leaves)):
                raise rule.origin.error(
                    dotted("include", key),
                    "one name for a setting",
                    f"{min(shared)}, which an earlier entry sets as {other}",
                )
        held[key] = choice


def _added(scenario: Scenario, rule: Rule) -> Assignment:
    axis = scenario.compare.axis
    choice = rule.choices.get(axis)
    if choice is None or choice.identity == scenario.compare.reference.identity:
        got = "nothing" if choice is None else "the reference, which is no case by itself"
        raise (rule.origin if choice is None else choice.origin).error(
            dotted("include", axis),
            "a value to compare with the reference, since no case fits to be extended",
            got,
        )
    return dict(rule.choices)


def _words(rule: Rule) -> str:
    return ", ".join(f"{key}: {choice.label}" for key, choice in rule.choices.items())


@dataclass
class _Maker:
    """Builds cases; legs and runs that cases share are built once.

    `legs` have a number beside them, one for all that do the same: it is cheaper to hash.
    """

    scenario: Scenario
    device: Device
    legs: dict[tuple[tuple[str, int], ...], tuple[Leg, int]] = field(default_factory=dict)
    runs: dict[tuple[int, str, PlantSpec | None, bool], RunSpec] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    seen: dict[tuple[object, ...], str] = field(default_factory=dict)

    def case(self, name: str, held: Assignment) -> CaseSpec:
        compare, checks = self.scenario.compare, self.scenario.checks
        candidate, mine = self._leg(held)
        reference, theirs = self._leg({**held, compare.axis: compare.reference})
        plants = _planted(candidate, reference)
        runs = ((mine, plants["candidate"]), (theirs, plants["reference"]))
        choice, key = held[compare.axis], dotted("axes", compare.axis)
        if runs[0] == runs[1]:
            got = f"{choice.label}, which leaves candidate and reference alike"
            raise choice.origin.error(key, "a value that changes the run", got)
        for origin, at, expected, got in self._mismatches(choice, candidate, reference):
            raise origin.error(at, expected, got)
        if (other := self.seen.setdefault(runs, name)) != name:
            got = f"{name}, the same runs as {other}"
            raise choice.origin.error(key, "each case once", got)
        for origin, at, expected, got in self._idle(candidate, reference):
            raise origin.error(at, expected, got)
        self._check_planted(held, candidate, reference, plants)
        soaks = self._who_soaks(candidate, reference)
        return CaseSpec(
            id=name,
            scenario=self.scenario.name,
            labels={key: choice.label for key, choice in held.items()},
            reference=self._run(reference, "reference", plants["reference"], soaks=soaks[1]),
            control=self._run(reference, "control", plants["control"], soaks=soaks[1]),
            candidate=self._run(candidate, "candidate", plants["candidate"], soaks=soaks[0]),
            expect=compare.expect,
            checks=checks,
            repeats=checks.get("throughput", {}).get("repeats", 0),
            # Within a tolerance bits differ by design: that they come again says nothing.
            confirm=self.scenario.launch.confirm and compare.expect == "bitwise",
        )

    def _leg(self, held: Assignment) -> tuple[Leg, int]:
        # Choices live as long as the scenario, so their addresses name them.
        key = tuple([(name, id(choice)) for name, choice in held.items()])
        if key not in self.legs:
            settings = overlay(self.scenario.base, *(choice.settings for choice in held.values()))
            leg = self.scenario.build(settings)
            self.legs[key] = leg, self.numbers.setdefault(leg.identity, len(self.numbers))
        return self.legs[key]

    def _who_soaks(self, candidate: Leg, reference: Leg) -> tuple[bool, bool]:
        """Whether each leg goes on past its `steps`: those with graphs, all where none has any.

        An eager reference beside graphs stops there: what is compared is what both have.
        """
        if (soak := self.scenario.soak) is None:
            return False, False
        graphed = bool(candidate.graph), bool(reference.graph)
        return graphed if any(graphed) and soak.spec.is_open else (True, True)

    def _run(self, leg: Leg, role: str, plant: PlantSpec | None, *, soaks: bool) -> RunSpec:
        key = (id(leg), role, plant, soaks)
        if key not in self.runs:
            self.runs[key] = RunSpec(
                config=leg.plain(),
                device=self.device,
                world_size=leg.world_size,
                timeout_s=self.scenario.launch.timeout_s,
                replica=1 if role == "control" else 0,
                plant=plant,
                soak=self.scenario.soak.spec if soaks and self.scenario.soak else None,
                stall_s=self.scenario.launch.stall_s,
            )
        return self.runs[key]

    def _mismatches(self, choice: Choice, candidate: Leg, reference: Leg) -> Iterator[Flaw]:
        """What must be equal for records of the runs to have a partner each, and their bits to."""
        compare = self.scenario.compare
        due: dict[str, tuple[int | str, int | str]] = {
            "world size": (candidate.world_size, reference.world_size),
            "number of steps": (candidate.steps, reference.steps),
            "number of microbatches": (candidate.microbatches, reference.microbatches),
        }
        if compare.expect == "bitwise":
            # Compiled code is another program: fused operators round elsewhere.
            due["compiled parts"] = (candidate.compiled, reference.compiled)
        for what, (mine, theirs) in due.items():
            if mine != theirs:
                expected = f"the reference's {what}, {theirs}, to compare one to one"
                yield choice.origin, dotted("axes", compare.axis), expected, str(mine)
        builtin = reference.config is not None
        if compare.expect == ROUNDING and builtin and (why := refusal(reference.plain())):
            # A reference that cannot round at random has no bounds of rounding.
            expected = f"{why[0]}, for rounding to be measured"
            yield compare.origin, "compare.expect", expected, why[1]

    def _idle(self, candidate: Leg, reference: Leg) -> Iterator[Flaw]:
        """A check or a soak with nothing to look at would be for nothing."""
        scenario, checks = self.scenario, self.scenario.checks
        at, steps = scenario.checks_origin, candidate.steps
        taps_due = scenario.program is None  # a script may give its recorder some
        if taps_due and "taps" in checks and not (candidate.taps and reference.taps):
            yield at, "checks.taps", "taps in base, of the modules to compare", "none"
        if "state" in checks and candidate.engine != reference.engine:
            expected = (
                "no state, as ranks of two engines hold other parts of each tensor; loss, "
                "taps and finite say what can be said"
            )
            yield at, "checks.state", expected, f"{candidate.engine} against {reference.engine}"
        if timed := checks.get("throughput"):
            # Times of warm-up and capture say nothing of the steps that come after.
            skipped = timed["skip_steps"]
            captured = max(leg.num_steps_before_graphs for leg in (candidate, reference))
            if skipped < captured:
                expected = f"{captured} or more, as graphs are captured in the step before"
                yield at, "checks.throughput.skip_steps", expected, str(skipped)
            if steps < (least := skipped + TIMED_STEPS):
                expected = f"skip_steps + {TIMED_STEPS} = {least} or more to time"
                yield at, "steps", expected, str(steps)
        tolerance = tolerance_of(scenario.compare.expect)
        if isinstance(tolerance, LossGap) and tolerance.over > steps:
            expected = f"at most the number of steps, {steps}"
            stated = scenario.compare.expect_origin
            yield stated, "compare.expect.over", expected, str(tolerance.over)
        if (soak := scenario.soak) is not None:
            if steps < LEAST_STEPS:
                expected = f"{LEAST_STEPS} steps at least, as growth of memory shows from there on"
                yield soak.origin, "soak", expected, f"steps {steps}"
            if soak.spec.by == "replays" and not candidate.graph:
                yield soak.origin, "soak.replays", "a graph in every candidate", "an eager one"

    def _check_planted(
        self, held: Assignment, candidate: Leg, reference: Leg, plants: Plants
    ) -> None:
        for role, plant in plants.items():
            leg = candidate if role == "candidate" else reference
            for planted in each_of(plant):
                assert leg.config is not None
                written = held.get("plant", held[self.scenario.compare.axis]).origin
                check_has_part(CATALOGUE[planted.fault], leg.config, role, written)


def _planted(candidate: Leg, reference: Leg) -> Plants:
    """The faults of each run: its own leg's, and counterparts of those it is compared with."""
    if candidate.plant is None and reference.plant is None:
        return _NO_PLANTS
    plants = {}
    for role in LEGS:
        own = candidate.plant if role == "candidate" else reference.plant
        mine = [fault for fault in each_of(own) if role in fault.legs]
        twins = [
            dataclasses.replace(fault, fault=CATALOGUE[fault.fault].counterpart, legs=(role,))
            for fault in each_of(candidate.plant or own)
            if role not in fault.legs and CATALOGUE[fault.fault].counterpart
        ]
        plants[role] = joined(mine + twins)
    return plants
