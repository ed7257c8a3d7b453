"""From a scenario to its cases: axes multiply, exclude removes, include extends or adds.

1. The product of all axes is taken. The combinations whose compared axis has its reference value
   are not cases: each is the reference of its neighbours.
2. An `exclude` entry removes every case that has all the values of axes that it names.
3. An `include` entry names values of axes and any other settings. Cases of the product that agree
   with every such value (all agree if there is none) get the other settings, in both runs; a later
   entry wins. If no case agrees, one is added of exactly the entry's settings over `base`: it needs
   a value of the compared axis that is not the reference, and its values may be on no axis.

An entry that changes nothing is an error. A planted fault goes into the runs that it names, its
counterpart, if the catalogue gives it one, into the others.

An id has one token a key: `parallel` first, the compared axis last, the others in alphabetical
order, as in `dp2_tp4-lr0.001-attn`. An edit of one part of a scenario renames only the cases that
this part makes.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdp_core.config import SAME_LAYOUT
from harness.checks.speed import TIMED_STEPS
from harness.errors import NothingSelected
from harness.faults.catalogue import CATALOGUE, LEGS
from harness.records import CaseSpec, Device, PlantSpec, RunSpec, each_of, joined
from harness.repeats import refusal
from harness.scenario.schema import Rule, Scenario
from harness.scenario.settings import Choice, Leg, check_has_part, overlay
from harness.scenario.yaml_source import Origin, dotted
from harness.values import LEAST_QUARTERED, LEAST_STEPS, ROUNDING, Close, LossGap, tolerance_of

MAX_COMBINATIONS, MAX_ID_CHARS, _HASH_CHARS = 50_000, 120, 8
Assignment = dict[str, Choice]
"""What a case says beyond the scenario's base: key to choice."""
_Index = dict[tuple[str, int], set[int]]
"""Places of assignments, by a key and the identity of its choice."""


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
    ids, assignments, num_left = _identified(scenario)
    if not assignments:
        raise NothingSelected(f"{scenario.path}: exclude leaves no case of {scenario.name}")
    maker = _Maker(scenario, device)
    cases = [maker.case(name, held) for name, held in zip(ids, assignments, strict=True)]
    return tuple(cases), tuple(ids[num_left:])


def count(scenario: Scenario) -> int:
    """As `named`, the number: only axes that an entry names are multiplied out."""
    _check_size(scenario)
    ruled = {key for rule in (*scenario.exclude, *scenario.include) for key in rule.choices}
    few = tuple(axis for axis in scenario.axes if axis.name in ruled)
    left, added = _assignments(dataclasses.replace(scenario, axes=few))
    others = (len(c) for name, c in _columns(scenario).items() if name not in ruled)
    return len(left) * math.prod(others) + len(added)


# --- which cases ------------------------------------------------------------------------------


def _check_size(scenario: Scenario) -> None:
    lengths = [len(axis.choices) for axis in scenario.axes]
    if (size := math.prod(lengths)) > MAX_COMBINATIONS:
        words = [f"{axis.name} {n}" for axis, n in zip(scenario.axes, lengths, strict=True)]
        most, got = f"at most {MAX_COMBINATIONS:,} combinations", f"{' x '.join(words)} = {size:,}"
        raise scenario.axes[0].origin.error("axes", most, got)


def _columns(scenario: Scenario) -> dict[str, list[Choice]]:
    reference = scenario.compare.reference
    return {axis.name: [c for c in axis.choices if c is not reference] for axis in scenario.axes}


def _assignments(scenario: Scenario) -> tuple[list[Assignment], list[Assignment]]:
    """What the axes give, without what is excluded, and what include entries add."""
    _check_size(scenario)
    columns = _columns(scenario)
    left = [dict(zip(columns, row, strict=True)) for row in itertools.product(*columns.values())]
    removed, whole = set[int](), left
    places_of = _index(whole) if scenario.exclude else {}
    for rule in scenario.exclude:
        if not (places := _matching(places_of, len(whole), rule.choices)):
            got = f"{_words(rule)}, which matches none (the reference leg is no case)"
            raise rule.origin.error("exclude", "an entry that removes a case", got)
        removed.update(places)
    left, added = [held for n, held in enumerate(whole) if n not in removed], []
    places_of = _index(left) if scenario.include else {}
    for rule in scenario.include:
        on_axes = {key: choice for key, choice in rule.choices.items() if key in columns}
        others = {key: choice for key, choice in rule.choices.items() if key not in columns}
        if not (places := _matching(places_of, len(left), on_axes)):
            added.append(_added(scenario, rule))
        elif not others:
            got = f"{_words(rule)}, a case that the axes already give"
            raise rule.origin.error("include", "an entry that extends or adds a case", got)
        for place in places:
            left[place].update(others)
    return left, added


def _index(assignments: Sequence[Assignment]) -> _Index:
    found = _Index()
    for place, held in enumerate(assignments):
        for key, choice in held.items():
            found.setdefault((key, id(choice)), set()).add(place)
    return found


def _matching(places_of: _Index, num: int, wanted: Mapping[str, Choice]) -> list[int]:
    """Places of those that have every wanted choice; entries hold the axes' own objects."""
    places = [places_of.get((key, id(choice)), set()) for key, choice in wanted.items()]
    return sorted(set.intersection(*sorted(places, key=len)) if places else range(num))


def _added(scenario: Scenario, rule: Rule) -> Assignment:
    choice = rule.choices.get(scenario.compare.axis)
    if choice is None or choice is scenario.compare.reference:
        got = "nothing" if choice is None else "the reference, which is no case by itself"
        expected = "a value to compare with the reference, since no case fits to be extended"
        raise rule.origin.error(dotted("include", scenario.compare.axis), expected, got)
    return dict(rule.choices)


def _words(rule: Rule) -> str:
    return ", ".join(f"{key}: {choice.label}" for key, choice in rule.choices.items())


# --- ids --------------------------------------------------------------------------------------


def _identified(scenario: Scenario) -> tuple[list[str], list[Assignment], int]:
    """All assignments with an id each, and how many of them the axes give.

    The compared axis is last in an id; a hash tells those apart that read alike.
    """
    (left, added), last = _assignments(scenario), scenario.compare.axis
    assignments, ids = left + added, []
    for held in assignments:
        names = sorted(held, key=lambda name: (name == last, name != "parallel", name))
        text = "-".join([held[name].token for name in names])
        ids.append(text if len(text) <= MAX_ID_CHARS else shortened(text, _plain(held)))
    # Folded: two cases must not share a folder on a file system that ignores case either.
    counts = Counter(name.casefold() for name in ids)
    ids = [name if counts[name.casefold()] == 1 else shortened(name, _plain(held))
           for name, held in zip(ids, assignments, strict=True)]  # fmt: skip
    return ids, assignments, len(left)


def shortened(name: str, held: str, most: int = MAX_ID_CHARS) -> str:
    """The beginning of a name and a hash of what it stands for, together at most so long."""
    digest = hashlib.sha256(held.encode()).hexdigest()[:_HASH_CHARS]
    return f"{name[: most - _HASH_CHARS - 1]}-{digest}"


def _plain(assignment: Assignment) -> str:
    """Everything that an assignment holds, whatever the order of its keys."""
    held = {
        name: {k: v.to_json() if isinstance(v, PlantSpec) else v for k, v in choice.leaves.items()}
        for name, choice in assignment.items()
    }
    return json.dumps(held, sort_keys=True, allow_nan=False)


# --- runs -------------------------------------------------------------------------------------


@dataclass
class _Maker:
    """Builds cases; legs and runs that cases share are built once.

    Each leg has a number, one for all that do the same: it is cheaper to hash.
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
        self._check_pair(choice.origin, candidate, reference)
        if (other := self.seen.setdefault(runs, name)) != name:
            got = f"{name}, the same runs as {other}"
            raise choice.origin.error(key, "each case once", got)
        self._check_not_idle(candidate, reference)
        for role, plant in plants.items():
            leg = candidate if role == "candidate" else reference
            for planted in each_of(plant):
                assert leg.config is not None
                written = held.get("plant", choice).origin
                check_has_part(CATALOGUE[planted.fault], leg.config, role, written)
        # By replays and by duration only runs with graphs go on past their `steps`, if any has
        # some: an eager reference stops there, as what is compared is what both have.
        is_open = self.scenario.soak is not None and self.scenario.soak.is_open
        some = is_open and bool(candidate.graph or reference.graph)
        specs = {
            role: self._run(leg, role, plants[role], soaks=not some or bool(leg.graph))
            for role, leg in zip(LEGS, (candidate, reference, reference), strict=True)
        }
        return CaseSpec(
            id=name, scenario=self.scenario.name,
            labels={key: choice.label for key, choice in held.items()},
            reference=specs["reference"], control=specs["control"], candidate=specs["candidate"],
            expect=compare.expect, checks=checks,
            repeats=checks.get("throughput", {}).get("repeats", 0),
            # Within a tolerance bits differ by design: that they come again says nothing.
            confirm=self.scenario.launch.confirm and compare.expect == "bitwise",
        )  # fmt: skip

    def _leg(self, held: Assignment) -> tuple[Leg, int]:
        # Choices live as long as the scenario, so their addresses name them.
        key = tuple([(name, id(choice)) for name, choice in held.items()])
        if key not in self.legs:
            settings = overlay(self.scenario.base, *(choice.settings for choice in held.values()))
            leg = self.scenario.build(settings)
            self.legs[key] = leg, self.numbers.setdefault(leg.identity, len(self.numbers))
        return self.legs[key]

    def _run(self, leg: Leg, role: str, plant: PlantSpec | None, *, soaks: bool) -> RunSpec:
        key = (id(leg), role, plant, soaks)
        if key not in self.runs:
            launch = self.scenario.launch
            self.runs[key] = RunSpec(
                config=leg.plain(), device=self.device, world_size=leg.world_size,
                timeout_s=launch.timeout_s, replica=1 if role == "control" else 0, plant=plant,
                soak=self.scenario.soak if soaks else None, stall_s=launch.stall_s,
                sketch=self._sketched,
            )  # fmt: skip
        return self.runs[key]

    @property
    def _sketched(self) -> Literal["none", "first", "all"]:
        """Of which steps a user's program has gradients to compare within a tolerance."""
        tolerance = tolerance_of(self.scenario.compare.expect)
        if self.scenario.program is None or tolerance is None or isinstance(tolerance, LossGap):
            return "none"
        return "first" if isinstance(tolerance, Close) else "all"

    def _check_pair(self, origin: Origin, candidate: Leg, reference: Leg) -> None:
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
                raise origin.error(dotted("axes", compare.axis), expected, str(mine))
        builtin = reference.config is not None
        if compare.expect == ROUNDING and builtin and (why := refusal(reference.plain())):
            # A reference that cannot round at random has no bounds of rounding.
            expected = f"{why[0]}, for rounding to be measured"
            raise self.scenario.origins["compare"].error("compare.expect", expected, why[1])

    def _check_not_idle(self, candidate: Leg, reference: Leg) -> None:
        """A check or a soak with nothing to look at would be for nothing."""
        scenario, checks, steps = self.scenario, self.scenario.checks, candidate.steps

        def need(ok: object, key: str, expected: str, got: object, at: str = "checks") -> None:
            if not ok:
                raise scenario.origins[at].error(key, expected, str(got))

        if "taps" in checks and scenario.program is None:  # a script may give its recorder some
            expected = "taps in base, of the modules to compare"
            need(candidate.taps and reference.taps, "checks.taps", expected, "none")
        configs = [leg.config for leg in (candidate, reference) if leg.config]
        elsewhere = any(c.resume_from != SAME_LAYOUT for c in configs)
        expected = "1 or more in one run, as resume_from is another layout"
        need(
            not elsewhere or any(c.resume_at for c in configs),
            "resume_at", expected, 0, at="compare",
        )  # fmt: skip
        if "state" in checks:
            expected = "no state, as ranks of two engines hold other parts of each tensor"
            got = f"{candidate.engine} against {reference.engine}"
            need(candidate.engine == reference.engine, "checks.state", expected, got)
        if timed := checks.get("throughput"):
            # Times of warm-up and capture say nothing of the steps that come after.
            skipped = timed["skip_steps"]
            graphed = [c.resume_at + c.graph_warmup_steps + 1 for c in configs if c.graph]
            captured = max(graphed, default=0)
            expected = f"{captured} or more, as graphs are captured in the step before"
            need(skipped >= captured, "checks.throughput.skip_steps", expected, skipped)
            least = skipped + TIMED_STEPS
            expected = f"skip_steps + {TIMED_STEPS} = {least} or more to time"
            need(steps >= least, "steps", expected, steps)
        if "max_growth_bytes" in checks.get("peak_memory", {}):
            expected = f"{LEAST_QUARTERED} steps or more, as quarters of the run are compared"
            key = "checks.peak_memory.max_growth_bytes"
            need(steps >= LEAST_QUARTERED, key, expected, f"steps {steps}")
        tolerance = tolerance_of(scenario.compare.expect)
        if isinstance(tolerance, LossGap):
            over, expected = tolerance.over, f"at most the number of steps, {steps}"
            need(over <= steps, "compare.expect.over", expected, over, at="expect")
        if (soak := scenario.soak) is not None:
            expected = f"{LEAST_STEPS} steps at least, as growth of memory shows from there on"
            need(steps >= LEAST_STEPS, "soak", expected, f"steps {steps}", at="soak")
            can_replay = soak.by != "replays" or candidate.graph
            expected = "a graph in every candidate"
            need(can_replay, "soak.replays", expected, "an eager one", at="soak")


def _planted(candidate: Leg, reference: Leg) -> Mapping[str, PlantSpec | None]:
    """The faults of each run: its own leg's, and counterparts of those it is compared with."""
    if candidate.plant is None and reference.plant is None:
        return dict.fromkeys(LEGS)
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
