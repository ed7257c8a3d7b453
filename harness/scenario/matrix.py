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
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.checks.limits import TIMED_STEPS
from harness.collector import held_off
from harness.errors import NothingSelected
from harness.faults.catalogue import CATALOGUE, LEGS
from harness.plant_spec import PlantSpec, each_of, joined
from harness.records import CaseSpec, RunSpec
from harness.samples import refusal
from harness.scenario.case_id import Words, label, unique_ids
from harness.scenario.decode import dotted
from harness.scenario.schema import Choice, Rule, Scenario
from harness.scenario.settings import Leg, check_has_part, overlay
from harness.soaking import LEAST_STEPS
from harness.tolerance import ROUNDING, LossGap, tolerance_of

MAX_COMBINATIONS = 50_000
Device = Literal["cpu", "cuda"]
Assignment = dict[str, Choice]
_Match = tuple[tuple[str, tuple[tuple[str, object], ...]], ...]


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
    left = _exclude(scenario, _product(scenario))
    assignments = _include(scenario, left)
    if not assignments:
        raise NothingSelected(f"{scenario.path}: exclude leaves no case of {scenario.name}")
    with held_off():
        ids = unique_ids(assignments, last=scenario.compare.axis)
        maker = _Maker(scenario, device)
        named = zip(ids, assignments, strict=True)
        return tuple(maker.case(name, held) for name, held in named), tuple(ids[len(left) :])


def named(scenario: Scenario) -> Iterator[tuple[str, dict[str, str]]]:
    """Id and labels of each case that `expand` gives, in a tenth of its time: none is checked.

    Raises:
        ScenarioError: an exclude or include entry does nothing, or there are too many cases.
    """
    assignments = _include(scenario, _exclude(scenario, _product(scenario)))
    words = Words()
    for name, held in zip(
        unique_ids(assignments, last=scenario.compare.axis), assignments, strict=True
    ):
        yield name, {key: words.label(choice) for key, choice in held.items()}


def _product(scenario: Scenario) -> list[Assignment]:
    count = math.prod(len(axis.choices) for axis in scenario.axes)
    if count > MAX_COMBINATIONS:
        lengths = " x ".join(f"{axis.name} {len(axis.choices)}" for axis in scenario.axes)
        raise scenario.axes[0].origin.error(
            "axes",
            expected=f"at most {MAX_COMBINATIONS:,} combinations",
            got=f"{lengths} = {count:,}",
        )
    names = [axis.name for axis in scenario.axes]
    reference = scenario.compare.reference.leaves
    columns = [
        [c for c in axis.choices if axis.name != scenario.compare.axis or c.leaves != reference]
        for axis in scenario.axes
    ]
    return [dict(zip(names, row, strict=True)) for row in itertools.product(*columns)]


def _identity(choice: Choice) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(choice.leaves.items()))


class _Index:
    """Finds the cases that agree with a rule's axis values, without asking each case each time."""

    def __init__(self, assignments: list[Assignment]) -> None:
        self.assignments = assignments
        self.identities: dict[int, tuple[tuple[str, object], ...]] = {}
        self.by_names: dict[tuple[str, ...], dict[_Match, list[int]]] = {}

    def matches(self, wanted: Mapping[str, Choice]) -> list[int]:
        """Positions of the cases that have every wanted choice."""
        names = tuple(sorted(wanted))
        if names not in self.by_names:
            groups: dict[_Match, list[int]] = {}
            for position, held in enumerate(self.assignments):
                groups.setdefault(self._match(held, names), []).append(position)
            self.by_names[names] = groups
        return self.by_names[names].get(self._match(wanted, names), [])

    def _match(self, held: Mapping[str, Choice], names: tuple[str, ...]) -> _Match:
        return tuple((name, self._known(held[name])) for name in names)

    def _known(self, choice: Choice) -> tuple[tuple[str, object], ...]:
        if id(choice) not in self.identities:
            self.identities[id(choice)] = _identity(choice)
        return self.identities[id(choice)]


def _exclude(scenario: Scenario, assignments: list[Assignment]) -> list[Assignment]:
    index = _Index(assignments)
    removed: set[int] = set()
    for rule in scenario.exclude:
        matched = index.matches(rule.choices)
        if not matched:
            raise rule.origin.error(
                "exclude",
                expected="an entry that removes a case",
                got=f"{_words(rule)}, which matches none (the reference leg is no case)",
            )
        removed.update(matched)
    return [held for position, held in enumerate(assignments) if position not in removed]


def _include(scenario: Scenario, assignments: list[Assignment]) -> list[Assignment]:
    index = _Index(assignments)
    extended = [dict(held) for held in assignments]
    added: list[Assignment] = []
    for rule in scenario.include:
        on_axes = {key: c for key, c in rule.choices.items() if scenario.axis(key) is not None}
        others = {key: c for key, c in rule.choices.items() if key not in on_axes}
        matched = index.matches(on_axes)
        if not matched:
            added.append(_added(scenario, rule))
            continue
        if not others:
            raise rule.origin.error(
                "include",
                expected="an entry that extends or adds a case",
                got=f"{_words(rule)}, a case that the axes already give",
            )
        for position in matched:
            _extend(extended[position], others, rule)
    return extended + added


def _extend(held: Assignment, others: Mapping[str, Choice], rule: Rule) -> None:
    for key, choice in others.items():
        for other, earlier in held.items():
            if other != key and (shared := set(earlier.leaves) & set(choice.leaves)):
                raise rule.origin.error(
                    dotted("include", key),
                    expected="one name for a setting",
                    got=f"{min(shared)}, which an earlier entry sets as {other}",
                )
        held[key] = choice


def _added(scenario: Scenario, rule: Rule) -> Assignment:
    axis = scenario.compare.axis
    choice = rule.choices.get(axis)
    if choice is None or choice.leaves == scenario.compare.reference.leaves:
        got = "nothing" if choice is None else "the reference, which is no case by itself"
        raise (rule.origin if choice is None else choice.origin).error(
            dotted("include", axis),
            expected="a value to compare with the reference, since no case fits to be extended",
            got=got,
        )
    return dict(rule.choices)


def _words(rule: Rule) -> str:
    return ", ".join(f"{key}: {label(choice)}" for key, choice in rule.choices.items())


@dataclass
class _Maker:
    """Builds cases; legs and runs that cases share are built once."""

    scenario: Scenario
    device: Device
    legs: dict[tuple[tuple[str, int], ...], Leg] = field(default_factory=dict)
    runs: dict[tuple[int, str, PlantSpec | None, bool], RunSpec] = field(default_factory=dict)
    identities: dict[Hashable, int] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    seen: dict[tuple[object, ...], str] = field(default_factory=dict)
    words: Words = field(default_factory=Words)

    def case(self, name: str, held: Assignment) -> CaseSpec:
        compare = self.scenario.compare
        candidate = self._leg(held)
        reference = self._leg({**held, compare.axis: compare.reference})
        plants = {role: _planted(role, candidate, reference) for role in LEGS}
        self._check_pair(name, held, candidate, reference, plants)
        self._check_looks(held, candidate, reference, plants)
        soaks = self._who_soaks(candidate, reference)
        return CaseSpec(
            id=name,
            scenario=self.scenario.name,
            labels={key: self.words.label(choice) for key, choice in held.items()},
            reference=self._run(reference, "reference", plants["reference"], soaks=soaks[1]),
            control=self._run(reference, "control", plants["control"], soaks=soaks[1]),
            candidate=self._run(candidate, "candidate", plants["candidate"], soaks=soaks[0]),
            expect=compare.expect,
            checks=self.scenario.checks,
            repeats=self.scenario.checks.get("throughput", {}).get("repeats", 0),
            # Within a tolerance bits differ by design: that they come again says nothing.
            confirm=self.scenario.launch.confirm and compare.expect == "bitwise",
        )

    def _leg(self, held: Mapping[str, Choice]) -> Leg:
        # Choices live as long as the scenario, so their addresses name them.
        key = tuple((name, id(choice)) for name, choice in held.items())
        if key not in self.legs:
            layers = (choice.settings for choice in held.values())
            settings = overlay(self.scenario.base, *layers)
            leg = self.legs[key] = self.scenario.build(settings)
            number = self.identities.setdefault(leg.identity, len(self.identities))
            self.numbers[id(leg)] = number
        return self.legs[key]

    def _who_soaks(self, candidate: Leg, reference: Leg) -> tuple[bool, bool]:
        """Whether each leg goes on past its `steps`: those with graphs, all where none has any.

        An eager reference beside graphs stops there: what is compared is what both have.
        """
        soak = self.scenario.soak
        if soak is None:
            return False, False
        if candidate.steps < LEAST_STEPS:
            raise soak.origin.error(
                "soak",
                expected=f"{LEAST_STEPS} steps at least, as growth of memory shows from there on",
                got=f"steps {candidate.steps}",
            )
        graphed = bool(candidate.graph), bool(reference.graph)
        if soak.spec.by == "replays" and not graphed[0]:
            raise soak.origin.error(
                "soak.replays", expected="a graph in every candidate", got="an eager one"
            )
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
                explain="max_unexplained" in self.scenario.checks.get("peak_memory", {}),
                soak=self.scenario.soak.spec if soaks and self.scenario.soak else None,
                kernels=self.scenario.launch.kernels,
                stall_s=self.scenario.launch.stall_s,
            )
        return self.runs[key]

    def _check_pair(
        self,
        name: str,
        held: Assignment,
        candidate: Leg,
        reference: Leg,
        plants: Mapping[str, PlantSpec | None],
    ) -> None:
        axis = self.scenario.compare.axis
        where, key = held[axis].origin, dotted("axes", axis)
        # Equal configurations have one number, which is cheaper to hash again and again.
        first, second = self.numbers[id(candidate)], self.numbers[id(reference)]
        pair = (first, plants["candidate"], second, plants["reference"])
        if pair[:2] == pair[2:]:
            raise where.error(
                key, expected="a value that changes the run", got=f"{label(held[axis])}, "
                "which leaves candidate and reference alike"
            )  # fmt: skip
        self._check_rounds(reference)
        exact = self.scenario.compare.expect == "bitwise"
        for what, mine, theirs in _pairing(candidate, reference, exact=exact):
            if mine != theirs:
                raise where.error(
                    key,
                    expected=f"the reference's {what}, {theirs}, to compare one to one",
                    got=f"{mine}",
                )
        if pair in self.seen:
            raise where.error(
                key, expected="each case once", got=f"{name}, the same runs as {self.seen[pair]}"
            )
        self.seen[pair] = name

    def _check_rounds(self, reference: Leg) -> None:
        """A reference that cannot round at random has no bounds of rounding."""
        if self.scenario.compare.expect != ROUNDING or reference.config is None:
            return
        if (why := refusal(reference.plain())) is not None:
            raise self.scenario.compare.origin.error(
                "compare.expect", expected=f"{why[0]}, for rounding to be measured", got=why[1]
            )

    def _check_looks(
        self,
        held: Assignment,
        candidate: Leg,
        reference: Leg,
        plants: Mapping[str, PlantSpec | None],
    ) -> None:
        """A check with nothing to look at, or a fault with no place, would be for nothing."""
        taps_due = self.scenario.program is None  # a script may give its recorder some
        if taps_due and "taps" in self.scenario.checks and not (candidate.taps and reference.taps):
            raise self.scenario.checks_origin.error(
                "checks.taps", expected="taps in base, of the modules to compare", got="none"
            )
        if "state" in self.scenario.checks and candidate.engine != reference.engine:
            raise self.scenario.checks_origin.error(
                "checks.state",
                expected="no state, as ranks of two engines hold other parts of each tensor; loss, "
                "taps and finite say what can be said",
                got=f"{candidate.engine} against {reference.engine}",
            )
        self._check_timed(candidate, reference)
        tolerance = tolerance_of(self.scenario.compare.expect)
        if isinstance(tolerance, LossGap) and tolerance.over > candidate.steps:
            raise self.scenario.compare.expect_origin.error(
                "compare.expect.over",
                expected=f"at most the number of steps, {candidate.steps}",
                got=f"{tolerance.over}",
            )
        for role, plant in plants.items():
            leg = candidate if role == "candidate" else reference
            for planted in each_of(plant):
                assert leg.config is not None
                written = held.get("plant", held[self.scenario.compare.axis]).origin
                check_has_part(CATALOGUE[planted.fault], leg.config, role, written)

    def _check_timed(self, candidate: Leg, reference: Leg) -> None:
        """Times of warm-up and capture say nothing of the steps that come after."""
        timed = self.scenario.checks.get("throughput")
        if timed is None:
            return
        skipped, steps = timed["skip_steps"], candidate.steps
        captured = max(leg.num_steps_before_graphs for leg in (candidate, reference))
        if skipped < captured:
            raise self.scenario.checks_origin.error(
                "checks.throughput.skip_steps",
                expected=f"{captured} or more, as graphs are captured in the step before",
                got=f"{skipped}",
            )
        if steps < skipped + TIMED_STEPS:
            raise self.scenario.checks_origin.error(
                "steps",
                expected=f"skip_steps + {TIMED_STEPS} = {skipped + TIMED_STEPS} or more to time",
                got=f"{steps}",
            )


def _pairing(
    candidate: Leg, reference: Leg, *, exact: bool
) -> Iterator[tuple[str, int | str, int | str]]:
    """What must be equal for records of the legs to have a partner each, and for their bits to."""
    mine, theirs = candidate, reference
    yield "world size", mine.world_size, theirs.world_size
    yield "number of steps", mine.steps, theirs.steps
    yield "number of microbatches", mine.microbatches, theirs.microbatches
    if exact:
        # Compiled code is another program: fused operators round elsewhere.
        yield "compiled parts", mine.compiled, theirs.compiled


def _planted(role: str, candidate: Leg, reference: Leg) -> PlantSpec | None:
    """The faults of one run: its own leg's, and counterparts of those it is compared with."""
    own = candidate.plant if role == "candidate" else reference.plant
    mine = [fault for fault in each_of(own) if role in fault.legs]
    twins = [
        dataclasses.replace(fault, fault=CATALOGUE[fault.fault].counterpart, legs=(role,))
        for fault in each_of(candidate.plant or own)
        if role not in fault.legs and CATALOGUE[fault.fault].counterpart
    ]
    return joined(mine + twins)
