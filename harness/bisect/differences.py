"""What differs between the two legs of a case, one change at a time, and which changes go together.

    reference, candidate -> changes -> any of them over the reference -> a run, or why there is none

A change is one leaf of the configuration (`fsdp.pool: double -> traced`), one entry of a list of
names (`graph: attn`, `stress: jitter`, `compile: mlp`, one pattern of `taps`), or one planted
fault. All changes over the reference are the candidate itself, with its key. What the rules of
`fsdp_core.config` refuse is refused here without a run, and so is what has no partner for each
record of the reference: another number of ranks, steps or microbatches, other compiled parts.
"""

import copy
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_core.config import DENSE_DEGREES, ConfigError, TrainConfig, not_built
from harness.codec import Json
from harness.errors import one_line
from harness.faults.catalogue import CATALOGUE, is_of_any_engine
from harness.program.spec import ProgramSpec, capabilities_of, program_of
from harness.records import PlantSpec, RunSpec, each_of, joined
from harness.scenario.settings import OPEN, leaf_types

PLANT, PROGRAM, STRESS = "plant", "program", "stress"
OF_PROGRAM = ("record", "determinism", "every")
"""Keys of a program that are settings of their own in a scenario."""
_PAIRED = ("steps", "microbatches", "compile", "compile_backend")
"""Leaves that both legs of a case have alike, or nothing can be compared one to one."""


@dataclass(frozen=True, kw_only=True)
class Change(Json):
    """One difference of the candidate from the reference.

    Attributes:
        name: for people, and unique among the changes of a case.
        leaf: dotted name of the setting, or `plant`.
        before, after: its value in the reference and in the candidate. Of a list of names the entry
            that is only there; of plants the fault. None where the leg has no such entry.
        in_list: whether the leaf is a list that is changed entry by entry.
    """

    name: str
    leaf: str
    before: Any
    after: Any
    in_list: bool = False


def leaves_of(config: dict[str, Any]) -> dict[str, Any]:
    """Setting to value, of `RunSpec.config`; a value is whole, whatever it holds.

    Of somebody's program: `args.X`, `env.X` and `packages.X` by name, as a scenario has them.
    """
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if key == PROGRAM:
            leaves |= leaves_of({name: value[name] for name in value if name in OPEN})
            leaves |= {name: value[name] for name in value if name in OF_PROGRAM}
            rest = {name: value[name] for name in value if name not in (*OPEN, *OF_PROGRAM)}
            leaves[PROGRAM] = rest
        elif isinstance(value, dict):
            leaves |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            leaves[key] = value
    return leaves


def config_of(leaves: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `leaves_of`. An option of a program that is None is left out."""
    config: dict[str, Any] = {}
    program: dict[str, Any] = {}
    if (rest := leaves.get(PROGRAM)) is not None:
        config[PROGRAM] = program = copy.deepcopy(rest) | {part: {} for part in OPEN}
    for leaf, value in leaves.items():
        part, _, name = leaf.partition(".")
        holder = config.setdefault(part, {}) if name and rest is None else config
        if rest is not None and (value is None or (leaf == STRESS and not value)):
            continue  # as a scenario that does not say it
        if rest is not None and (part in OPEN or leaf in OF_PROGRAM):
            holder = program[part] if name else program
        if leaf != PROGRAM:
            holder[name or leaf] = copy.deepcopy(value)
    return config


def program_in(spec: RunSpec) -> ProgramSpec:
    """The program of a run that has one."""
    program = program_of(spec.config)
    assert program is not None
    return program


def plants_of(spec: RunSpec) -> tuple[PlantSpec, ...]:
    """The faults planted in a run."""
    return each_of(spec.plant)


def with_plants(spec: RunSpec, plants: Sequence[PlantSpec]) -> RunSpec:
    """The run with these faults in place of its own."""
    return dataclasses.replace(spec, plant=joined(plants))


class LegChanges:
    """Reference and candidate of a case, and what lies between them.

    Args:
        reference: the leg that is trusted.
        candidate: the leg that fails.

    Attributes:
        changes: what makes the candidate of the reference, in the order of the configuration.
    """

    def __init__(self, reference: RunSpec, candidate: RunSpec) -> None:
        self.reference, self.candidate = reference, candidate
        self._before, self._after = leaves_of(reference.config), leaves_of(candidate.config)
        foreign = not capabilities_of(reference.config).layouts
        self._gone = [leaf for leaf in self._before if foreign and leaf not in self._after]
        self._plants = _paired_plants(plants_of(reference), plants_of(candidate))
        self.changes = (*self._settings(), *(change for change, _, _ in self._plants))
        self._by_name = {change.name: change for change in self.changes}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the changes, in their order."""
        return tuple(self._by_name)

    def _settings(self) -> Iterable[Change]:
        for leaf in dict.fromkeys((*self._before, *self._after)):
            before, after = self._before.get(leaf), self._after.get(leaf)
            if before == after and type(before) is type(after):
                continue
            if is_list_of_names(leaf):
                yield from _entries(leaf, before or (), after or ())
            else:
                name = f"{leaf}: {_told(before)} -> {_told(after)}"
                yield Change(name=name, leaf=leaf, before=before, after=after)

    def run_with(self, names: Collection[str]) -> RunSpec:
        """The reference with some of the changes; with all of them it is the candidate.

        Whether it is legal is for `why_illegal` to say.
        """
        changes = [c for c in self.changes if c.name in names and c.leaf != PLANT]
        leaves = dict(self._before)
        for change in changes:
            if not change.in_list:
                leaves[change.leaf] = change.after
        for leaf in {change.leaf for change in changes if change.in_list}:
            leaves[leaf] = self._joined(leaf, [c for c in changes if c.leaf == leaf])
        # In the order of the candidate; an option that one run alone has is None in the other.
        config = config_of({leaf: leaves.get(leaf) for leaf in (*self._after, *self._gone)})
        plants = [
            plant
            for change, theirs, ours in self._plants
            if (plant := ours if change.name in names else theirs) is not None
        ]
        kept = {before for _, before, _ in self._plants}
        shared = [plant for plant in plants_of(self.reference) if plant not in kept]
        made = dataclasses.replace(
            self.candidate,
            config=config,
            world_size=world_size_of(config, self.reference.world_size),
            soak=self.candidate.soak if config.get("graph") else self.reference.soak,
        )
        ordered = sorted((*shared, *plants), key=(*plants_of(self.candidate), *plants).index)
        return with_plants(made, ordered)

    def _joined(self, leaf: str, changes: Sequence[Change]) -> list[str]:
        """A list of names after some of its changes, in the order that it has in a leg."""
        before, after = list(self._before.get(leaf) or ()), list(self._after.get(leaf) or ())
        gone = {change.before for change in changes}
        held = {name for name in before if name not in gone} | {c.after for c in changes} - {None}
        return [name for name in dict.fromkeys((*after, *before)) if name in held]

    def why_illegal(self, names: Collection[str]) -> str:
        """Why the reference with these changes cannot be run or compared; "" if it can."""
        try:
            spec = self.run_with(names)
        except (ValueError, TypeError) as error:
            return one_line(str(error))
        return why_illegal(spec) or self._why_unpaired(spec)

    def _why_unpaired(self, spec: RunSpec) -> str:
        if spec.world_size != self.reference.world_size:
            return f"{spec.world_size} ranks against {self.reference.world_size} of the reference"
        for leaf in _PAIRED:
            ours, theirs = leaves_of(spec.config).get(leaf), self._before.get(leaf)
            if ours != theirs:
                return f"{leaf} {_told(ours)} against {_told(theirs)} of the reference"
        return ""


def with_steps(spec: RunSpec, steps: int) -> RunSpec:
    """The run with another number of steps; of a program that declares none, the run as it is."""
    leaves = leaves_of(spec.config)
    if (program := program_of(spec.config)) is not None:
        leaf = program.smaller.get("steps", "")
        if not isinstance(stated := leaves.get(leaf), int):
            return spec
        leaves[leaf] = stated + steps - leaves["steps"]
    return dataclasses.replace(spec, config=config_of(leaves | {"steps": steps}))


def is_list_of_names(leaf: str) -> bool:
    """Whether a leaf holds names that can be there one without the other."""
    return bool(leaf_types().get(leaf) == tuple[str, ...])


def world_size_of(config: dict[str, Any], stated: int = 1) -> int:
    """Ranks of a configuration: the product of its dense degrees, or what a program states."""
    if not capabilities_of(config).layouts:
        return stated
    return math.prod(int(config["parallel"].get(axis, 1)) for axis in DENSE_DEGREES)


def why_illegal(spec: RunSpec) -> str:
    """Which rule refuses a run, as its own error says it; "" if none does."""
    try:
        if program_of(spec.config) is not None:
            return ""
        config = TrainConfig.from_dict(spec.config)
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError) as error:
        return one_line(str(error))
    missing = not_built(config)
    if missing is not None:
        return one_line(str(missing))
    return next(filter(None, (_why_not_planted(plant, spec) for plant in plants_of(spec))), "")


def _why_not_planted(plant: PlantSpec, spec: RunSpec) -> str:
    fault, config = CATALOGUE[plant.fault], spec.config
    if fault.scopes and not set(fault.scopes) & set(config["graph"]):
        return f"{plant.fault} is planted in one of the graph scopes {', '.join(fault.scopes)}"
    lacks = fault.lacks(config["parallel"])
    where = f"a layout with {lacks}" if lacks else ""
    if config["engine"] != "ours" and not is_of_any_engine(fault):
        where = "engine ours"
    if where:
        return f"{plant.fault} is planted in {where}"
    if "step" in fault.takes and plant.step >= config["steps"]:
        return f"{plant.fault} is planted in step {plant.step} of {config['steps']}"
    if plant.rank >= spec.world_size:
        return f"{plant.fault} is planted in rank {plant.rank} of {spec.world_size}"
    if spec.device not in fault.devices:
        return f"{plant.fault} cannot be planted on {spec.device}"
    return ""


def _entries(leaf: str, before: Iterable[str], after: Iterable[str]) -> Iterable[Change]:
    ours, theirs = list(after), list(before)
    for entry in ours:
        if entry not in theirs:
            yield Change(name=f"{leaf}: {entry}", leaf=leaf, before=None, after=entry, in_list=True)
    for entry in theirs:
        if entry not in ours:
            yield Change(
                name=f"{leaf}: no {entry}", leaf=leaf, before=entry, after=None, in_list=True
            )


_Pair = tuple[Change, PlantSpec | None, PlantSpec | None]


def _paired_plants(theirs: Sequence[PlantSpec], ours: Sequence[PlantSpec]) -> tuple[_Pair, ...]:
    """Each change of plants, with the reference's plant that it takes away and the one it adds.

    A fault whose counterpart is in the reference is one change with it, as the scenario has it.
    """
    left = [plant for plant in theirs if plant not in ours]
    pairs: list[tuple[PlantSpec | None, PlantSpec | None]] = []
    for plant in (plant for plant in ours if plant not in theirs):
        counterpart = CATALOGUE[plant.fault].counterpart
        partner = next((other for other in left if other.fault == counterpart), None)
        if partner is not None:
            left.remove(partner)
        pairs.append((partner, plant))
    pairs += [(plant, None) for plant in left]
    names: dict[str, int] = {}
    made = []
    for before, after in pairs:
        name = _plant_name(before, after)
        names[name] = names.get(name, 0) + 1
        name = name if names[name] == 1 else f"{name} ({names[name]})"
        change = Change(
            name=name,
            leaf=PLANT,
            before=None if before is None else before.to_json(),
            after=None if after is None else after.to_json(),
        )
        made.append((change, before, after))
    return tuple(made)


def _plant_name(before: PlantSpec | None, after: PlantSpec | None) -> str:
    plant = after or before
    assert plant is not None
    takes = CATALOGUE[plant.fault].takes
    words = [plant.fault]
    if "step" in takes:
        words.append(f"in step {plant.step}")
    if "rank" in takes:
        words.append("on the last rank" if plant.rank < 0 else f"on rank {plant.rank}")
    if plant.tensor:
        words.append(f"of {plant.tensor}")
    return f"{PLANT}: {'no ' if after is None else ''}{' '.join(words)}"


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
