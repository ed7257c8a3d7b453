"""What differs between two runs: settings and faults, one change at a time, and environments.

A change is one leaf of the configuration (`fsdp.pool: double -> traced`), one entry of a list of
names (`graph: attn`), or one planted fault. All changes over the reference are the candidate
itself, with its key; what the rules of `fsdp_core.config` refuse costs no run.
"""

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_core.config import DENSE_DEGREES, ConfigError, TrainConfig
from harness.checks.evidence import different_leaves, rank_table, show_ranks, stated_leaves
from harness.errors import ScenarioError, one_line
from harness.faults.catalogue import CATALOGUE
from harness.program.spec import ProgramSpec, program_of
from harness.provenance import fingerprint
from harness.records import PlantSpec, RunResult, RunSpec, each_of, joined
from harness.scenario.settings import OPEN, check_has_part, leaf_types
from harness.scenario.yaml_source import Origin

PLANT, PROGRAM, STRESS = "plant", "program", "stress"
OF_PROGRAM = ("record", "determinism", "every")
"""Keys of a program that are settings of their own in a scenario."""
_PAIRED = ("steps", "microbatches", "compile", "compile_backend")
"""Leaves that both legs of a case have alike, or nothing can be compared one to one."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference of the candidate from the reference, by a unique name.

    Of a setting, an entry of one (`in_list`), or a planted fault; None where a run has none.
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


class RunChanges:
    """What lies between the reference of a case and its candidate, in the configuration's order."""

    def __init__(self, reference: RunSpec, candidate: RunSpec) -> None:
        self.reference, self.candidate = reference, candidate
        self._before, self._after = leaves_of(reference.config), leaves_of(candidate.config)
        foreign = not reference.is_builtin
        self._gone = [leaf for leaf in self._before if foreign and leaf not in self._after]
        self._plants = _paired_plants(each_of(reference.plant), each_of(candidate.plant))
        self.changes = (*self._settings(), *self._plants)
        self.names = tuple(change.name for change in self.changes)

    def _settings(self) -> Iterator[Change]:
        for leaf in dict.fromkeys((*self._before, *self._after)):
            before, after = self._before.get(leaf), self._after.get(leaf)
            if before == after and type(before) is type(after):
                continue
            if leaf_types().get(leaf) != tuple[str, ...]:
                yield Change(
                    name=f"{leaf}: {_told(before)} -> {_told(after)}", leaf=leaf, before=before,
                    after=after,
                )  # fmt: skip
                continue
            old, new = before or (), after or ()
            pairs = [(None, each) for each in new if each not in old]
            for gone, come in (*pairs, *((each, None) for each in old if each not in new)):
                name = f"{leaf}: {come if gone is None else f'no {gone}'}"
                yield Change(name=name, leaf=leaf, before=gone, after=come, in_list=True)

    def run_with(self, names: Collection[str]) -> RunSpec:
        """The reference with some of the changes, legal or not; with all it is the candidate."""
        leaves, listed = dict(self._before), dict[str, list[Change]]()
        for change in (c for c in self.changes if c.name in names and c.leaf != PLANT):
            if change.in_list:
                listed.setdefault(change.leaf, []).append(change)
            else:
                leaves[change.leaf] = change.after
        for leaf, changes in listed.items():
            # In the order that names have in a run that holds them.
            before, after = self._before.get(leaf) or (), self._after.get(leaf) or ()
            held = {*before} - {c.before for c in changes} | {c.after for c in changes}
            leaves[leaf] = [name for name in dict.fromkeys((*after, *before)) if name in held]
        # In the order of the candidate; an option that one run alone has is None in the other.
        config = config_of({leaf: leaves.get(leaf) for leaf in (*self._after, *self._gone)})
        kept = [c.before for c in self._plants]
        plants = [plant for plant in each_of(self.reference.plant) if plant not in kept]
        changed = (c.after if c.name in names else c.before for c in self._plants)
        plants += [plant for plant in changed if plant is not None]
        order = (*each_of(self.candidate.plant), *plants)
        return replace(
            self.candidate, config=config, plant=joined(sorted(plants, key=order.index)),
            world_size=world_size_of(config, self.reference.world_size),
            soak=self.candidate.soak if config.get("graph") else self.reference.soak,
        )  # fmt: skip

    def why_illegal(self, names: Collection[str]) -> str:
        """Why the reference with these changes cannot be run or compared; "" if it can."""
        try:
            spec = self.run_with(names)
        except (ValueError, TypeError) as error:
            return one_line(str(error))
        if refused := why_illegal(spec):
            return refused
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
    return replace(spec, config=config_of(leaves | {"steps": steps}))


def world_size_of(config: dict[str, Any], stated: int = 1) -> int:
    """Ranks of a configuration: the product of its dense degrees, or what a program states."""
    if config.get("program") is not None:
        return stated
    return math.prod(int(config["parallel"].get(axis, 1)) for axis in DENSE_DEGREES)


def why_illegal(spec: RunSpec) -> str:
    """Which rule refuses a run, as its own error says it; "" if none does."""
    try:
        if program_of(spec.config) is not None:
            return ""
        config = TrainConfig.from_dict(spec.config)
        for plant in each_of(spec.plant):
            fault = CATALOGUE[plant.fault]
            check_has_part(fault, config, "run", Origin(PLANT))
            if "step" in fault.takes and plant.step >= config.steps:
                return f"step {plant.step} of {config.steps}"
            if plant.rank >= spec.world_size:
                return f"rank {plant.rank} of {spec.world_size}"
            if spec.device not in fault.devices:
                return f"{fault.name} runs on {', '.join(fault.devices)}"
    except (ConfigError, ScenarioError, TypeError, ValueError, KeyError, AttributeError) as error:
        return one_line(str(error))
    return ""


def _paired_plants(theirs: Sequence[PlantSpec], ours: Sequence[PlantSpec]) -> list[Change]:
    """A change of each plant; one whose counterpart the reference has is one change with it."""
    left = [plant for plant in theirs if plant not in ours]
    pairs: list[tuple[PlantSpec | None, PlantSpec | None]] = []
    for plant in (plant for plant in ours if plant not in theirs):
        counterpart = CATALOGUE[plant.fault].counterpart
        partner = next((other for other in left if other.fault == counterpart), None)
        left = [other for other in left if other is not partner]
        pairs.append((partner, plant))
    names, made = list[str](), list[Change]()
    for before, after in (*pairs, *((plant, None) for plant in left)):
        words = _words_of(after) if after else f"no {_words_of(before)}" if before else ""
        names.append(f"{PLANT}: {words}")
        number = names.count(names[-1])
        name = names[-1] if number == 1 else f"{names[-1]} ({number})"
        made.append(Change(name=name, leaf=PLANT, before=before, after=after))
    return made


def _words_of(plant: PlantSpec) -> str:
    takes, words = CATALOGUE[plant.fault].takes, [plant.fault]
    words += [f"in step {plant.step}"] if "step" in takes else []
    if plant.device:
        words.append(f"on device {plant.device}")
    elif "rank" in takes:
        words.append("on the last rank" if plant.rank < 0 else f"on rank {plant.rank}")
    return " ".join([*words, *([f"of {plant.tensor}"] if plant.tensor else [])])


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool | None) else str(value)


# --- environments -----------------------------------------------------------------------------


def different_on_ranks(
    reference: RunResult, other: RunResult
) -> dict[int, list[tuple[str, str, str]]]:
    """By rank, what it recorded otherwise but for what scenarios state: name, both values."""
    others, stated = rank_table(other), stated_leaves(reference, other)
    found: dict[int, list[tuple[str, str, str]]] = {}
    for rank, records in rank_table(reference).items():
        starts = records.start, others[rank].start if rank in others else None
        sides = [dict(fingerprint(start.environment)) for start in starts if start is not None]
        leaves = different_leaves(*sides) if len(sides) == 2 else []
        if leaves := [leaf for leaf in leaves if leaf[0] not in stated]:
            found[rank] = leaves
    return found


def between_environments(reference: RunResult, other: RunResult) -> tuple[str, ...]:
    """What two runs recorded otherwise, as `torch 2.11 became 2.12`: of all ranks, else by rank."""
    ranks: dict[str, set[int]] = {}
    for rank, leaves in different_on_ranks(reference, other).items():
        for name, before, after in leaves:
            ranks.setdefault(f"{name} {before} became {after}", set()).add(rank)
    every = len(other.ranks)
    return tuple(
        words if len(at) == every else f"{show_ranks(at)}: {words}" for words, at in ranks.items()
    )
