"""From a cause to what fails alone: a scenario that anybody can run, a script without us.

    cause -> least case -> base, one compared axis, plants -> YAML -> decoded again -> it fails
    of somebody's program: the same, and a script that starts it twice -> it fails, too

What the two runs differ in must fit on one axis; what does not goes into `base`, into both. Which
of the differences is compared is tried one after the other until a scenario fails as the case did:
it is believed because it was run, not because it was written.
"""

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp_core.config import (
    EAGER,
    NO_COMPILE,
    NO_STRESS,
    TrainConfig,
    model_from_preset,
)
from harness.bisect.causes import DEFAULTS, FoundCauses, find_least
from harness.bisect.differences import (
    PLANT,
    LegChanges,
    config_of,
    leaves_of,
    plants_of,
    program_in,
)
from harness.bisect.experiments import (
    FAILS,
    UNRESOLVED,
    Asker,
    Failure,
    Judged,
    OutOfBudget,
    Reply,
    failure_of,
)
from harness.checks.evidence import count
from harness.codec import Json
from harness.errors import HarnessError
from harness.faults.catalogue import CATALOGUE
from harness.program.spec import capabilities_of, command_line
from harness.records import CaseSpec, PlantSpec, RunSpec, Verdict, What
from harness.scenario.matrix import expand
from harness.scenario.schema import MAX_WHY_CHARS, decode_scenario
from harness.scenario.settings import OPEN
from harness.scenario.suite import whole_id
from harness.store.files import make_folder, refused

FOLDER = Path("scenarios/repro")
TEMPLATE = Path(__file__).with_name("standalone.py")
BEYOND_BITS: tuple[What, ...] = ("memory_regression", "throughput_regression", "noisy")
"""Failures that a comparison of bits does not show."""
SCRIPT_RUNS = 2
SPARE_S = 120.0
"""For the script itself, and for packages that it installs."""
_IGNORED = "# Written by harness bisect, for whoever ran it: `git add --force` keeps one.\n*\n"

FIRST = ("graph", "stress", "fsdp", "compile", PLANT)
"""Which difference is compared, where there are several: in this order, all others after."""
_NONE = {"graph": EAGER, "stress": NO_STRESS, "compile": NO_COMPILE, PLANT: "none"}
_MAX_NAME = 60
_USUAL = {"taps": [], "stress": [], "every": 1, "determinism": "", "record": "auto"}
"""Settings that a scenario need not say."""


@dataclass(frozen=True, kw_only=True)
class Alone(Json):
    """A scenario that fails alone.

    Attributes:
        path: of the file; "" if there is none.
        ranks, layers, steps, microbatches: that it takes.
        made: what was made smaller, in words.
        passed: layouts of fewer ranks that do not fail, the smallest first.
        message: of its verdict.
        notes: why there is none, a sentence each.
        script: of a program that is not the built-in one: a script that needs nothing of ours.
        script_flaw: why the script was not seen to fail; "" if it was.
    """

    path: str = ""
    ranks: int = 0
    layers: int = 0
    steps: int = 0
    microbatches: int = 0
    made: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    message: str = ""
    notes: tuple[str, ...] = ()
    script: str = ""
    script_flaw: str = ""

    def __str__(self) -> str:
        """For people: `harness run X.yaml (1 rank, 1 layer, 3 steps, 1 microbatch)`, or why not."""
        script = ""
        if self.script:
            script = f"; python {self.script} ({self.script_flaw or 'seen to fail without Δ0'})"
        if not self.path:
            return ("; ".join(self.notes) or "none") + script
        sizes = {
            "rank": self.ranks, "layer": self.layers, "step": self.steps,
            "microbatch": self.microbatches,
        }  # fmt: skip
        told = ", ".join(count(number, noun) for noun, number in sizes.items() if number)
        fewer = f"; fewer ranks pass: {', '.join(self.passed)}" if self.passed else ""
        return f"harness run {self.path} ({told}){fewer}{script}"


def leave_alone(
    case: CaseSpec, verdict: Verdict, causes: FoundCauses | None, asker: Asker,
    *, folder: Path = FOLDER, place: str = "",
) -> Alone:  # fmt: skip
    """Write the least scenario that fails as the case does.

    Args:
        case, verdict: that failed.
        causes: of its failure; the first is kept. None for all differences.
        asker: makes the runs.
        folder: where the scenario goes.
        place: where the fault entered, in words, for the scenario's `why`.

    Raises:
        OutOfBudget: nothing was written; what was asked is kept.
    """
    differences = LegChanges(case.reference, case.candidate)
    cause = next(iter(causes.causes), None) if causes is not None else None
    names = cause.changes if cause is not None else differences.names
    if cause is None or causes is None:
        judged = Judged(case, failure_of(verdict), asker, verdict)
    else:
        alone = dataclasses.replace(case, candidate=differences.run_with(cause.changes))
        judged = Judged(alone, cause.failure, asker)
        judged.policy = causes.policy
        words = f"does it fail with {' + '.join(names) or 'none of the changes'}?"
        if judged.answer(judged.case.candidate, words=words) != FAILS:
            return Alone(notes=("the cause alone did not fail again",))
    least = find_least(judged, case.reference, judged.case.candidate)
    if least.stopped:
        raise OutOfBudget(least.stopped)
    together = " together" if len(names) > 1 else ""
    where = f" {place[:1].upper()}{place[1:]}." if place else ""
    story = (
        f"Least case of {case.id} of {case.scenario}: {judged.failure} with "
        f"{' and '.join(names) or 'no change'}{together}.{where}"
    )
    repro = find_repro(case, judged, least.reference, least.candidate, story=story, folder=folder)
    found = Alone(made=least.made, message=least.message, notes=repro.why_not)
    config = least.candidate.config
    if repro.text:
        found = Alone(
            path=str(write_repro(repro, folder)), ranks=least.candidate.world_size,
            layers=config.get("model", {}).get("layers", 0), steps=config["steps"],
            microbatches=config.get("microbatches", 0),
            made=least.made, passed=least.passed, message=least.message,
        )  # fmt: skip
    if capabilities_of(config).layouts:
        return found
    text = script_text(least.reference, least.candidate, story=story)
    script = _write(text, repro_name(case), folder, ".py")
    flaw = seen_to_fail(script, judged.failure, least.candidate, asker)
    return dataclasses.replace(found, script=str(script), script_flaw=flaw)


# --- a scenario ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Repro:
    """A scenario's text and its one case; or why there is none, a sentence for each try."""

    text: str = ""
    case: CaseSpec | None = None
    why_not: tuple[str, ...] = ()


def find_repro(
    case: CaseSpec, judged: Judged, reference: RunSpec, candidate: RunSpec, *, story: str,
    folder: Path = FOLDER,
) -> Repro:  # fmt: skip
    """A scenario of two runs that fails as their case did, run to prove it.

    `judged` has their failure, and how often a scenario is run before it passes; `folder` is where
    it goes, from which a program's paths are.
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
        alone.policy = judged.policy
        answer = alone.answer(found.candidate, words=f"does {found.scenario} fail alone?")
        if answer == FAILS:
            return Repro(text=text, case=found)
        failed.append(f"{', '.join(found.labels)} compared: {answer}")
    return Repro(why_not=tuple(failed))


def write_repro(repro: Repro, folder: Path = FOLDER) -> Path:
    """Put the scenario into a file of its own, named after it; never over another.

    Git ignores the folder of its own choice, if it is made here: what a search leaves is nobody's
    change, until somebody adds it. A folder that was there, or was asked for, stays as it is.

    Raises:
        Infrastructure: the disk refused.
    """
    return _write(repro.text, str(yaml.safe_load(repro.text)["name"]), folder, ".yaml")


def _write(text: str, name: str, folder: Path, suffix: str) -> Path:
    if folder == FOLDER and not folder.exists():
        _write_new(folder / ".gitignore", _IGNORED)
    names = (f"{name}{end}{suffix}" for end in ("", *(f"-{n}" for n in range(2, 10_000))))
    return next(path for each in names if _write_new(path := folder / each, text))


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
    preset = str(leaves.get("model.preset", DEFAULTS["model.preset"]))
    usual = {f"model.{k}": v for k, v in nested_model(preset).items()}
    departing = {
        leaf: value
        for leaf, value in leaves.items()
        if leaf != "model.preset" and value != {**DEFAULTS, **usual}.get(leaf)
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


# --- of somebody's program


class _Quoted(str):
    """A text that YAML would take for a number without its quotes."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def scenario_texts(
    case: CaseSpec, reference: RunSpec, candidate: RunSpec, *, name: str, why: str, folder: Path
) -> Iterator[str]:
    """Scenarios in `folder` whose one case may be that of the legs, one for each compared axis."""
    before, after = leaves_of(reference.config), leaves_of(candidate.config)
    differing = [x for x in dict.fromkeys((*after, *before)) if before.get(x) != after.get(x)]
    program = program_in(candidate)
    place = folder.absolute()
    for axis in differing:
        same = {leaf: value for leaf, value in after.items() if leaf != axis and value is not None}
        values = [_plain(each.get(axis, _USUAL.get(axis))) for each in (before, after)]
        values = ["off" if axis == "determinism" and not value else value for value in values]
        section: dict[str, Any] = {
            "folder": os.path.relpath(program.folder, place),
            program.kind: program.target,
            "ranks": candidate.world_size,
            "steps": same.get("steps", candidate.config["steps"]),
        }
        if program.kind == "script":
            section["script"] = os.path.relpath(program.target, program.folder)
        for part in OPEN:
            held = {leaf.partition(".")[2]: _plain(value)
                    for leaf, value in same.items() if leaf.partition(".")[0] == part}  # fmt: skip
            section |= {part: held} if held else {}
        section |= {k: same[k] for k, plain in _USUAL.items() if same.get(k, plain) != plain}
        section |= {"smaller": dict(program.smaller)} if program.smaller else {}
        launch = {"device": candidate.device, "timeout_s": candidate.timeout_s}
        launch |= {} if candidate.stall_s is None else {"stall_s": candidate.stall_s}
        plain = {
            "name": name, "why": why, "program": section, "axes": {axis: values},
            "compare": {"axis": axis, "reference": values[0], "expect": case.expect},
            "checks": {k: v for k, v in case.checks.items() if k not in ("throughput", "soak")},
            "launch": launch,
        }  # fmt: skip
        yield yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _Quoted(value) if isinstance(value, str) else value


# --- a script --------------------------------------------------------------------------------


def script_text(reference: RunSpec, candidate: RunSpec, *, story: str) -> str:
    """A script that starts the program as both legs do and compares them, by torch alone."""
    programs = {"reference": program_in(reference), "candidate": program_in(candidate)}
    program = programs["candidate"]
    case = {
        "kind": program.kind, "target": program.target, "folder": program.folder,
        "ranks": candidate.world_size, "timeout_s": candidate.timeout_s,
        "deterministic": program.determinism == "enforce",
        "runs": {
            leg: {
                "words": command_line(each.args) if each.kind != "entry" else [],
                "args": each.args, "env": each.env, "packages": each.packages,
            }
            for leg, each in programs.items()
        },
    }  # fmt: skip
    text = TEMPLATE.read_text(encoding="utf-8")
    # A docstring must not end early, nor hold an escape.
    said = story.replace("\\", "/").replace('"""', "'''").rstrip('"')
    plain = json.dumps(case, indent=1).replace('"""', '\\"\\"\\"')
    return text.replace("__STORY__", said, 1).replace("__CASE__", plain, 1)


def seen_to_fail(path: Path, failure: Failure, candidate: RunSpec, asker: Asker) -> str:
    """Run a stand-alone script; "" if it fails, else why it could not be made to fail.

    Raises:
        OutOfBudget: it takes two runs.
    """
    if failure.what in BEYOND_BITS:
        return f"the script could not be made to fail: it does not compare {failure.what}"

    def find_out() -> Reply:
        try:
            done = subprocess.run(
                [sys.executable, str(path)], capture_output=True, text=True, errors="replace",
                timeout=2 * candidate.timeout_s + SPARE_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Reply(answer=UNRESOLVED, words="it did not end")
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        words = f"exit code {done.returncode}: {said[0] if said else 'it said nothing'}"
        return Reply(answer=FAILS if done.returncode == 1 else UNRESOLVED, words=words)

    words = "does the stand-alone script fail?"
    reply = asker.questions.pay(f"script-{candidate.key}", words, SCRIPT_RUNS, find_out)
    if reply.answer == FAILS:
        return ""
    return f"the script could not be made to fail: {reply.words}"
