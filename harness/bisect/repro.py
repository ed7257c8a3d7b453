"""From a cause to a scenario that fails alone, which anybody can run.

What the two runs differ in must fit on one axis; what does not goes into both. Which of the
differences is compared is tried one after the other until a scenario fails as the case did: it is
believed because it was run.
"""

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fsdp_core.config import EAGER, NO_COMPILE, NO_STRESS, TrainConfig, model_from_preset
from harness.bisect.causes import DEFAULTS, FoundCauses, LeastCase
from harness.bisect.differences import PLANT, RunChanges, config_of, leaves_of, program_in
from harness.bisect.experiments import Asker, Judged
from harness.checks.evidence import count
from harness.errors import HarnessError
from harness.faults.catalogue import CATALOGUE
from harness.records import CaseSpec, PlantSpec, RunSpec, each_of
from harness.scenario.matrix import expand
from harness.scenario.schema import MAX_WHY_CHARS, decode_scenario
from harness.scenario.settings import OPEN
from harness.scenario.suite import whole_id
from harness.store.files import make_folder, write_once
from harness.values import Json

FOLDER = Path("scenarios/repro")
_IGNORED = "# Written by harness bisect, for whoever ran it: `git add --force` keeps one.\n*\n"
FIRST = ("graph", "stress", "fsdp", "compile", PLANT)
"""Which difference is compared, where there are several: in this order, all others after."""
_NONE = {"graph": EAGER, "stress": NO_STRESS, "compile": NO_COMPILE}
_MAX_NAME = 60
_USUAL = {"taps": [], "stress": [], "every": 1, "determinism": "", "record": "auto"}
"""Settings of a program that a scenario need not say."""


@dataclass(frozen=True, kw_only=True)
class MinimalCase(Json):
    """A scenario that fails alone, or in `notes` why there is none.

    `made` is what was made smaller, in words, `passed` layouts of fewer ranks that do not fail.
    """

    path: str = ""
    ranks: int = 0
    layers: int = 0
    steps: int = 0
    microbatches: int = 0
    made: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: `harness run X.yaml (1 rank, 1 layer, 3 steps, 1 microbatch)`, or why not."""
        if not self.path:
            return "; ".join(self.notes) or "none"
        nouns = ("rank", "layer", "step", "microbatch")
        sizes = (self.ranks, self.layers, self.steps, self.microbatches)
        told = ", ".join(count(n, noun) for n, noun in zip(sizes, nouns, strict=True) if n)
        fewer = f"; fewer ranks pass: {', '.join(self.passed)}" if self.passed else ""
        return f"harness run {self.path} ({told}){fewer}"


def write_minimal_case(
    case: CaseSpec, causes: FoundCauses, asker: Asker, *, folder: Path = FOLDER, place: str = ""
) -> MinimalCase:
    """Write the least scenario in which the first cause fails; `place` is for its `why`."""
    cause = causes.causes[0]
    alone = replace(
        case, candidate=RunChanges(case.reference, case.candidate).run_with(cause.changes)
    )
    judged = Judged(alone, cause.failure, asker, policy=causes.policy)
    words = f"does it fail with {' + '.join(cause.changes) or 'none of the changes'}?"
    if judged.answer(alone.candidate, words=words) != "fails":
        return MinimalCase(notes=("the cause alone did not fail again",))
    least = LeastCase(judged, case.reference, alone.candidate)
    together = " together" if len(cause.changes) > 1 else ""
    where = f" {place[:1].upper()}{place[1:]}." if place else ""
    story = (
        f"Least case of {case.id} of {case.scenario}: {cause.failure} with "
        f"{' and '.join(cause.changes) or 'no change'}{together}.{where}"
    )
    text, notes = find_repro(judged, least.reference, least.candidate, story=story, folder=folder)
    found = MinimalCase(made=least.made, notes=notes)
    if not text:
        return found
    config = least.candidate.config
    return replace(
        found, path=str(write_new(text, repro_name(case), folder)),
        passed=tuple(least.passed), ranks=least.candidate.world_size, steps=config["steps"],
        layers=config.get("model", {}).get("layers", 0),
        microbatches=config.get("microbatches", 0),
    )  # fmt: skip


# --- a scenario ------------------------------------------------------------------------------


def find_repro(
    judged: Judged, reference: RunSpec, candidate: RunSpec, *, story: str, folder: Path = FOLDER
) -> tuple[str, tuple[str, ...]]:
    """A scenario in `folder` of two runs that fails as `judged` asks, run to prove it.

    Its text, "" if there is none; and a sentence for each try that did not fail.
    """
    failed = []
    for text in scenarios(judged.case, reference, candidate, story=story, folder=folder):
        try:
            found = read_back(text, reference.device, folder)
        except HarnessError as error:
            failed.append(str(error))
            continue
        alone = Judged(found, judged.failure, judged.asker, policy=judged.policy)
        answer = alone.answer(found.candidate, words=f"does {found.scenario} fail alone?")
        if answer == "fails":
            return text, ()
        failed.append(f"{', '.join(found.labels)} compared: {answer}")
    return "", tuple(failed)


def write_new(text: str, name: str, folder: Path) -> Path:
    """Put a scenario into a file of its own; never over another (`Infrastructure`: disk refused).

    Git ignores the folder of its own choice, if it is made here: what a search leaves is nobody's
    change, until somebody adds it. A folder that was there, or was asked for, stays as it is.
    """
    make_new = folder == FOLDER and not folder.exists()
    make_folder(folder)
    if make_new:
        write_once(folder / ".gitignore", _IGNORED)
    paths = (folder / f"{name}{f'-{n}' if n > 1 else ''}.yaml" for n in itertools.count(1))
    return next(path for path in paths if write_once(path, text))


def read_back(text: str, device: Any, folder: Path = FOLDER) -> CaseSpec:
    """The one case of a scenario's text, as any is decoded (`ScenarioError`: it is not legal)."""
    (case,) = expand(decode_scenario(text.encode(), str(folder / "repro.yaml")), device)
    return case


def repro_name(case: CaseSpec) -> str:
    """Of the scenario that fails alone: `repro_SCENARIO_CASE`."""
    whole = whole_id(case.scenario, case.id)
    return re.sub(r"[^A-Za-z0-9]+", "_", f"repro_{whole}").strip("_")[:_MAX_NAME].rstrip("_")


class _Dumper(yaml.SafeDumper):
    """Quotes whatever another YAML might take for a number, and has no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if " " in text or text.isidentifier() else '"'
    ),
)


def scenarios(
    case: CaseSpec, reference: RunSpec, candidate: RunSpec, *, story: str, folder: Path = FOLDER
) -> Iterator[str]:
    """Scenarios in `folder` whose one case may be that of two runs, the likeliest first."""
    is_ours = candidate.is_builtin
    found = (
        _of_model(reference, candidate) if is_ours else _of_program(reference, candidate, folder)
    )
    checks = {name: how for name, how in case.checks.items() if name not in ("throughput", "soak")}
    launch = {"device": candidate.device, "timeout_s": candidate.timeout_s}
    launch |= {} if is_ours or candidate.stall_s is None else {"stall_s": candidate.stall_s}
    for axis, section, values in found:
        plain = {
            "name": repro_name(case), "why": story[:MAX_WHY_CHARS], **section,
            "axes": {axis: [*values]},
            "compare": {"axis": axis, "reference": values[0], "expect": case.expect},
            "checks": checks, "launch": launch,
        }  # fmt: skip
        yield yaml.dump(
            plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100,
            allow_unicode=True,
        )  # fmt: skip


_Scenario = tuple[str, dict[str, Any], tuple[Any, Any]]
"""The compared axis, what both runs have, its two values."""


def _of_model(reference: RunSpec, candidate: RunSpec) -> Iterator[_Scenario]:
    before, after = leaves_of(reference.config), leaves_of(candidate.config)
    leaves = [leaf for leaf in after if before.get(leaf) != after[leaf]]
    axes = list(dict.fromkeys(_part(leaf) for leaf in leaves))
    plants = _plants(reference, candidate)
    if any(change.leaf == PLANT for change in RunChanges(reference, candidate).changes):
        axes.append(PLANT)
    for axis in sorted(axes, key=lambda axis: (*FIRST, axis).index(axis)):
        own = [leaf for leaf in leaves if _part(leaf) == axis]
        base = _base({leaf: value for leaf, value in after.items() if leaf not in own})
        if axis == PLANT:
            yield axis, {"base": base}, ("none", plants)
            continue
        base |= {PLANT: plants} if plants else {}
        values = _value(axis, own, before), _value(axis, own, after)
        yield axis, {"base": base}, values


def _part(leaf: str) -> str:
    return leaf.partition(".")[0]


def _value(axis: str, leaves: list[str], values: dict[str, Any]) -> Any:
    if "." not in leaves[0]:
        return values[axis] or _NONE.get(axis, values[axis])
    return {leaf.partition(".")[2]: values[leaf] for leaf in leaves}


def _base(leaves: dict[str, Any]) -> dict[str, Any]:
    """What departs from the defaults, nested; the model by its preset and what departs from it.

    Steps and the data axis are there in any case: whoever reads the file looks for them.
    """
    preset = str(leaves.get("model.preset", DEFAULTS["model.preset"]))
    model: dict[str, Any] = TrainConfig(model=model_from_preset(preset, {})).to_dict()["model"]
    usual = {**DEFAULTS, **{f"model.{name}": value for name, value in model.items()}}
    plain = config_of({
        leaf: value for leaf, value in leaves.items() if leaf != "model.preset"
        if value != usual.get(leaf) or leaf in ("steps", "parallel.dp")
    })  # fmt: skip
    model = plain.pop("model", {})
    base: dict[str, Any] = {"model": {"preset": preset, **model} if model else preset}
    return base | {key: value or _NONE.get(key, value) for key, value in plain.items()}


def _plants(reference: RunSpec, candidate: RunSpec) -> Any:
    """What a scenario says of the faults of both runs; counterparts come by themselves."""
    ours = list(each_of(candidate.plant))
    twins = {CATALOGUE[plant.fault].counterpart for plant in ours} - {""}
    ours += [p for p in each_of(reference.plant) if p not in ours and p.fault not in twins]
    plain = [written_plant(plant) for plant in ours]
    return plain[0] if len(plain) == 1 else plain


def written_plant(plant: PlantSpec) -> dict[str, Any]:
    """What a scenario says of one fault."""
    takes = CATALOGUE[plant.fault].takes
    has_no_rank = "rank" not in takes or plant.device
    plain = {
        "step": plant.step if "step" in takes else None,
        "rank": None if has_no_rank else "last" if plant.rank < 0 else plant.rank,
        "tensor": plant.tensor or None,
        "legs": list(plant.legs) if plant.legs != ("candidate",) else None,
        "chance": plant.chance if plant.chance != 1.0 else None,
        "device": int(plant.device) if plant.device else None,
        "once": plant.once or None,
    }
    return {"fault": plant.fault} | {k: value for k, value in plain.items() if value is not None}


def _of_program(reference: RunSpec, candidate: RunSpec, folder: Path) -> Iterator[_Scenario]:
    before, after = leaves_of(reference.config), leaves_of(candidate.config)
    program, place = program_in(candidate), folder.absolute()
    target = program.target
    if program.kind == "script":
        target = os.path.relpath(target, program.folder)
    for axis in (x for x in dict.fromkeys((*after, *before)) if before.get(x) != after.get(x)):
        same = {leaf: value for leaf, value in after.items() if leaf != axis and value is not None}
        values = [each.get(axis, _USUAL.get(axis)) for each in (before, after)]
        off = ["off" if axis == "determinism" and not value else value for value in values]
        section: dict[str, Any] = {
            "folder": os.path.relpath(program.folder, place), program.kind: target,
            "ranks": candidate.world_size, "steps": same.get("steps", candidate.config["steps"]),
        }  # fmt: skip
        for part in OPEN:
            held = {k.partition(".")[2]: v for k, v in same.items() if _part(k) == part}
            section |= {part: held} if held else {}
        section |= {k: same[k] for k, usual in _USUAL.items() if same.get(k, usual) != usual}
        section |= {"smaller": dict(program.smaller)} if program.smaller else {}
        yield axis, {"program": section}, (off[0], off[1])
