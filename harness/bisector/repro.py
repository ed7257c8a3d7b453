"""A scenario that fails alone: the least case as a file that anybody can run.

    legs -> base, one compared axis, plants -> YAML -> decoded again -> runs -> the same failure

What the legs differ in must fit on one axis; what does not goes into `base`, into both legs. Which
of the differences is compared is tried one after the other until a scenario fails as the case did:
it is believed because it was run, not because it was written.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp_core.config import EAGER, NO_COMPILE, NO_STRESS, TrainConfig, model_from_preset
from harness.bisector.differences import PLANT, LegChanges, config_of, leaves_of, plants_of
from harness.bisector.failure import Judged
from harness.bisector.foreign import scenario_texts
from harness.bisector.questions import FAILS
from harness.errors import HarnessError
from harness.faults.catalogue import CATALOGUE
from harness.plant_spec import PlantSpec
from harness.program.spec import capabilities_of
from harness.records import CaseSpec, RunSpec
from harness.scenario.case_id import whole_id
from harness.scenario.matrix import expand
from harness.scenario.schema import decode_scenario
from harness.scenario.sections import MAX_WHY_CHARS
from harness.store.files import make_folder, refused

FOLDER = Path("scenarios/repro")
_IGNORED = "# Written by harness bisect, for whoever ran it: `git add --force` keeps one.\n*\n"
FIRST = ("graph", "stress", "fsdp", "compile", PLANT)
"""Which difference is compared, where there are several: in this order, all others after."""
_NONE = {"graph": EAGER, "stress": NO_STRESS, "compile": NO_COMPILE, PLANT: "none"}
_MAX_NAME = 60
_DEFAULTS = leaves_of(TrainConfig().to_dict())


@dataclass(frozen=True, kw_only=True)
class Repro:
    """A scenario that was written, or why there is none.

    Attributes:
        text: of the scenario; "" if none fails as the case did.
        case: the one case of it.
        why_not: a sentence for each that was tried in vain.
    """

    text: str
    case: CaseSpec | None
    why_not: tuple[str, ...] = ()


def find_repro(
    case: CaseSpec, judged: Judged, reference: RunSpec, candidate: RunSpec, *, story: str,
    folder: Path = FOLDER,
) -> Repro:  # fmt: skip
    """A scenario of two legs that fails as their case did, run to prove it.

    Args:
        case: that failed; its checks are those of the scenario.
        judged: what its failure is, and how often a scenario is run before it passes.
        reference, candidate: legs that fail the same way, as small as they are.
        story: what was found, for `why`.
        folder: where the scenario goes, from which a program's paths are.

    Raises:
        OutOfBudget: of the asker.
    """
    failed = []
    if capabilities_of(candidate.config).layouts:
        texts = scenarios(case, reference, candidate, story=story)
    else:
        texts = scenario_texts(
            case, reference, candidate, name=repro_name(case), why=story[:MAX_WHY_CHARS],
            folder=folder,
        )  # fmt: skip
    for text in texts:
        try:
            found = read_back(text, reference.device, folder)
        except HarnessError as error:
            failed.append(str(error))
            continue
        alone = Judged(found, judged.failure, judged.asker)
        alone.patience = judged.patience
        answer = alone.answer(found.candidate, words=f"does {found.scenario} fail alone?")
        if answer == FAILS:
            return Repro(text=text, case=found)
        failed.append(f"{', '.join(found.labels)} compared: {answer}")
    return Repro(text="", case=None, why_not=tuple(failed))


def write_repro(repro: Repro, folder: Path = FOLDER) -> Path:
    """Put the scenario into a file of its own, named after it; never over another.

    Git ignores the folder of its own choice, if it is made here: what a search leaves is nobody's
    change, until somebody adds it. A folder that was there, or was asked for, stays as it is.

    Raises:
        Infrastructure: the disk refused.
    """
    return write_script(repro.text, str(yaml.safe_load(repro.text)["name"]), folder, ".yaml")


def write_script(text: str, name: str, folder: Path = FOLDER, suffix: str = ".py") -> Path:
    """The same for any text.

    Raises:
        Infrastructure: the disk refused.
    """
    number = 1
    if folder == FOLDER and not folder.exists():
        _write_new(folder / ".gitignore", _IGNORED)
    while True:
        path = folder / (f"{name}{suffix}" if number == 1 else f"{name}-{number}{suffix}")
        if _write_new(path, text):
            return path
        number += 1


def _write_new(path: Path, text: str) -> bool:
    """Make a file; False if there is one of that name."""
    make_folder(path.parent)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError as error:
        raise refused("write", path, error) from error
    return True


def read_back(text: str, device: Any, folder: Path = FOLDER) -> CaseSpec:
    """The one case of a scenario's text, through the decoder that reads all of them.

    Raises:
        ScenarioError: it is not legal.
    """
    (case,) = expand(decode_scenario(text.encode(), str(folder / "repro.yaml")), device)
    return case


def scenarios(
    case: CaseSpec, reference: RunSpec, candidate: RunSpec, *, story: str
) -> Iterator[str]:
    """Scenarios whose one case may be that of the legs, the likeliest first."""
    before, after = leaves_of(reference.config), leaves_of(candidate.config)
    leaves = [leaf for leaf in after if before.get(leaf) != after[leaf]]
    axes = list(dict.fromkeys(leaf.partition(".")[0] for leaf in leaves))
    plants = _plants(reference, candidate)
    if any(change.leaf == PLANT for change in LegChanges(reference, candidate).changes):
        axes.append(PLANT)
    axes.sort(key=lambda axis: FIRST.index(axis) if axis in FIRST else len(FIRST))
    for axis in axes:
        values: tuple[Any, Any]
        base = {leaf: value for leaf, value in after.items() if not _is_of(leaf, axis)}
        if axis == PLANT:
            values = "none", plants
        else:
            own = [leaf for leaf in leaves if _is_of(leaf, axis)]
            same = [leaf for leaf in after if _is_of(leaf, axis) and leaf not in own]
            base |= {leaf: after[leaf] for leaf in same}
            values = _value(axis, own, before), _value(axis, own, after)
        plain = _base(base)
        if plants and axis != PLANT:
            plain[PLANT] = plants
        yield _text(case, axis, plain, values, story)


def _is_of(leaf: str, axis: str) -> bool:
    return leaf.partition(".")[0] == axis


def _value(axis: str, leaves: Sequence[str], values: dict[str, Any]) -> Any:
    """A value of an axis: of a leaf by itself, or of the leaves of a part."""
    if "." not in leaves[0]:
        return values[axis] or _NONE.get(axis, values[axis])
    return {leaf.partition(".")[2]: values[leaf] for leaf in leaves}


def _base(leaves: dict[str, Any]) -> dict[str, Any]:
    """What departs from the defaults, nested; the model by its preset and what departs from it."""
    preset = str(leaves.get("model.preset", _DEFAULTS["model.preset"]))
    usual = {f"model.{k}": v for k, v in nested_model(preset).items()}
    departing = {
        leaf: value
        for leaf, value in leaves.items()
        if leaf != "model.preset" and value != {**_DEFAULTS, **usual}.get(leaf)
    }
    plain = config_of(departing)
    model = plain.pop("model", {})
    base: dict[str, Any] = {"model": {"preset": preset, **model} if model else preset}
    for key, value in plain.items():
        base[key] = value or _NONE.get(key, value)
    for leaf in ("steps", "parallel.dp"):
        # Said even where they are the defaults: whoever reads the file looks for them.
        if leaf in leaves:
            base |= {k: v for k, v in config_of({leaf: leaves[leaf]}).items() if k not in base}
    return base


def nested_model(preset: str) -> dict[str, Any]:
    """The shapes of a preset, as plain values."""
    plain: dict[str, Any] = TrainConfig(model=model_from_preset(preset, {})).to_dict()["model"]
    return plain


def _plants(reference: RunSpec, candidate: RunSpec) -> Any:
    """What a scenario says of the faults of both legs; counterparts come by themselves."""
    ours = list(plants_of(candidate))
    twins = {CATALOGUE[plant.fault].counterpart for plant in ours} - {""}
    ours += [p for p in plants_of(reference) if p not in ours and p.fault not in twins]
    plain = [_plant(plant) for plant in ours]
    return plain[0] if len(plain) == 1 else plain


def _plant(plant: PlantSpec) -> dict[str, Any]:
    takes = CATALOGUE[plant.fault].takes
    plain: dict[str, Any] = {"fault": plant.fault}
    if "step" in takes:
        plain["step"] = plant.step
    if "rank" in takes:
        plain["rank"] = "last" if plant.rank < 0 else plant.rank
    if plant.tensor:
        plain["tensor"] = plant.tensor
    if plant.legs != ("candidate",):
        plain["legs"] = list(plant.legs)
    if plant.chance != 1.0:
        plain["chance"] = plant.chance
    return plain


def repro_name(case: CaseSpec) -> str:
    """Of the scenario that fails alone: `repro_SCENARIO_CASE`."""
    whole = whole_id(case.scenario, case.id)
    return re.sub(r"[^A-Za-z0-9]+", "_", f"repro_{whole}").strip("_")[:_MAX_NAME].rstrip("_")


def _text(
    case: CaseSpec, axis: str, base: dict[str, Any], values: tuple[Any, Any], story: str
) -> str:
    name = repro_name(case)
    checks = {k: v for k, v in case.checks.items() if k not in ("throughput", "soak")}
    plain = {
        "name": name,
        "why": story[:MAX_WHY_CHARS],
        "base": base,
        "axes": {axis: list(values)},
        "compare": {"axis": axis, "reference": copy.deepcopy(values[0]), "expect": "bitwise"},
        "checks": checks,
        "launch": {"device": case.candidate.device, "timeout_s": case.candidate.timeout_s},
    }
    text: str = yaml.safe_dump(
        plain, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
    )
    return text
