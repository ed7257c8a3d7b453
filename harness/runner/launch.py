"""From a request on the command line to verdicts.

    request -> scenario -> cases -> plan -> run folder -> engine -> verdicts

`prepare` refuses what the user did wrong, before a folder is made; `rounds`, or `carry_out`, does
the rest.
"""

import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_core.config import TrainConfig
from harness.engine import Engine, machine
from harness.engine import slurm as on_slurm
from harness.engine.local import LocalEngine
from harness.engine.machine import Machine, shared
from harness.engine.slurm import SlurmOptions
from harness.errors import (
    HarnessError,
    InternalError,
    Interrupted,
    NothingSelected,
    UsageError,
    one_line,
)  # fmt: skip
from harness.masking import Masker
from harness.program.spec import codes_of, commit_of_configs, make_environments, program_of
from harness.provenance import changes, deciding, record
from harness.records import CaseSpec, Device, Verdict, dumps, each_of
from harness.repeats import unique_runs
from harness.runner.plan import Plan, expected_here, make_plan, take_shard
from harness.runner.run import (
    RETRIES_KEY,
    View,
    clear_leftovers,
    execution,
    is_left,
    keep_trace,
    open_repeats,
    stored_limit,
    whole,
)
from harness.scenario.schema import Overrides
from harness.scenario.suite import Picked, load_suite
from harness.store import RunFolder, load_case
from harness.store.folder import DEFAULT_OUT, unused
from harness.store.merge import Whole, keep_whole

DEFAULT_SCENARIOS = Path("scenarios")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for.

    `slurm` are `KEY=YAML` texts over `launch.slurm`; `history` says what runs take; `mixed` goes on
    with a folder of other code; `picked` are the cases that pytest selected.
    """

    paths: tuple[Path, ...] = ()
    tiers: tuple[str, ...] = ()
    select: str | None = None
    picked: Picked | None = None
    shard: str | None = None
    history: Path | None = None
    resume: Path | None = None
    mixed: bool = False
    keyword: str | None = None
    device: str | None = None
    slots: int | None = None
    ranks_per_gpu: int | None = None
    jobs: int | None = None
    out: Path | None = None
    exit_first: bool = False
    engine: str | None = None
    slurm: tuple[str, ...] = ()
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that can be carried out: nothing has been written yet.

    `said` goes into the manifest, `text`, if there is any, into scenario.yaml; `devices` are the
    GPU of each slot, as CUDA_VISIBLE_DEVICES names it, none on the CPU; `slurm` is None where this
    machine makes the runs; `resumed` is the folder to go on with; `whole` is what a shard is of.
    """

    said: Mapping[str, Any]
    plan: Plan
    device: Device
    devices: tuple[str, ...]
    machine: Machine
    slurm: SlurmOptions | None = None
    text: str = ""
    notes: tuple[str, ...] = ()
    retries: int = 0
    resumed: RunFolder | None = None
    whole: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What was carried out."""

    folder: Path
    verdicts: tuple[Verdict, ...]
    num_cases: int
    wall_s: float


class CutShort(Interrupted):
    """A launch that was interrupted; `done` is what had been carried out by then."""

    def __init__(self, text: str, done: Carried) -> None:
        self.done = done
        super().__init__(text, done.verdicts)


# ---- checking and planning


def prepare(request: Request) -> Prepared:
    """Check a request and plan it (`HarnessError`: it cannot be carried out)."""
    here = machine.describe_machine()
    if request.resume is not None:
        return _prepare_resume(request, request.resume, here)
    paths = request.paths or ((DEFAULT_SCENARIOS,) if request.tiers else ())
    if not paths:
        raise UsageError("run: expected a SCENARIO, --tier or --resume RUN, got none")
    sets = [*request.overrides.sets, *(f"launch.slurm.{text}" for text in request.slurm)]
    sets += [f"launch.engine={request.engine}"] if request.engine is not None else []
    overrides = dataclasses.replace(request.overrides, sets=tuple(sets))
    suite = load_suite(paths, tiers=request.tiers, overrides=overrides)
    slurm = suite.launch.slurm if suite.launch.engine == "slurm" else None
    if request.slurm and slurm is None:
        raise UsageError("--slurm: expected --engine slurm with it, got engine local")
    device = _device(request.device or suite.launch.device, slurm, here)
    chosen, selected = suite.cases(
        device, forced=request.device is not None, keyword=request.keyword, how=request.select,
        picked=request.picked,
    )  # fmt: skip
    _refuse_secrets(chosen)
    part_of = None
    if request.shard is not None:
        chosen, part_of = take_shard(chosen, request.shard)
    stated = request.slots or suite.slots(
        on_slurm.slots_on_slurm(None, chosen) if slurm else machine.default_slots(here)
    )
    notes = tuple(filter(None, (part.note() for part in selected)))
    said = {
        "scenario": suite.name, "why": suite.why, "tier": suite.tiers, "notes": notes,
        "selected": [part.to_json() for part in selected],
        "shard": "" if part_of is None else str(part_of.shard),
    }  # fmt: skip
    return _planned(
        chosen, device, slurm, here, slots=stated, ranks_per_gpu=request.ranks_per_gpu,
        jobs=request.jobs, history=request.history, said=said, text=suite.text, notes=notes,
        retries=suite.launch.retries, whole=part_of,
    )  # fmt: skip


def _prepare_resume(request: Request, path: Path, here: Machine) -> Prepared:
    refused = {
        "SCENARIO": request.paths, "-k": request.keyword, "--device": request.device,
        "--out": request.out, "--set": request.overrides.sets, "--axis": request.overrides.axes,
        "--engine": request.engine, "--slurm": request.slurm, "--tier": request.tiers,
        "--select": request.select, "--shard": request.shard,
    }  # fmt: skip
    if option := next((option for option, value in refused.items() if value), ""):
        raise UsageError(f"--resume: expected no {option}, the cases of {path} are planned")
    folder = RunFolder.open(path)
    manifest, cases = folder.manifest, folder.cases
    if not cases:
        raise NothingSelected(f"{path} holds no case")
    _check_configs(path, cases)
    if not request.mixed and "code" in manifest:
        _refuse_other_code(folder, here)
    device, slurm = cases[0].candidate.device, on_slurm.stored_options(manifest)
    _device(device, slurm, here)
    stored = manifest.get("slots") if device == "cpu" and slurm is None else None
    stored_devices = manifest.get("devices") or ()
    crowd = max(map(stored_devices.count, stored_devices), default=None)
    return _planned(
        cases, device, slurm, here, slots=request.slots or stored,
        ranks_per_gpu=request.ranks_per_gpu or crowd, jobs=request.jobs, history=request.history,
        said=manifest, retries=stored_limit(manifest), resumed=folder,
    )  # fmt: skip


def prepare_rerun(case_folder: Path, **room: Any) -> Prepared:
    """Plan one case again, from its folder alone (`HarnessError`: none, or it cannot run here)."""
    case = dataclasses.replace(load_case(case_folder).case, skip_reason="")
    if case.reference.recorded:
        raise UsageError(
            f"{case_folder}: expected a case that can be run, its runs were recorded by hand: "
            "record them again and compare them with harness compare-runs"
        )
    _check_configs(case_folder, [case])
    why = f"Case {case.id} of {case.scenario}, run again."
    return prepare_cases([case], name=case.scenario, why=why, **room)


def prepare_cases(cases: Sequence[CaseSpec], *, name: str, why: str, **room: Any) -> Prepared:
    """Plan cases of one device from no scenario file (`HarnessError`: they cannot run here).

    `room` has `slots`, `ranks_per_gpu` and `jobs`, None for the usual.
    """
    here = machine.describe_machine()
    device = _device(cases[0].candidate.device, None, here)
    return _planned(cases, device, None, here, said={"scenario": name, "why": why}, **room)


def _device(wanted: str, slurm: SlurmOptions | None, here: Machine) -> Device:
    return (
        on_slurm.device_on_slurm(wanted, slurm) if slurm else machine.resolve_device(wanted, here)
    )


def _planned(
    cases: Sequence[CaseSpec], device: Device, slurm: SlurmOptions | None, here: Machine, *,
    slots: int | None = None, ranks_per_gpu: int | None = None, jobs: int | None = None,
    history: Path | None = None, **prepared: Any,
) -> Prepared:  # fmt: skip
    if ranks_per_gpu is not None and (slurm is not None or device == "cpu"):
        where = "in Slurm" if slurm is not None else "on the CPU"
        raise UsageError(
            f"--ranks-per-gpu {ranks_per_gpu}: expected a run on GPUs here, this one is {where}"
        )
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = here.memory_bytes
    if slurm is not None:
        slots, jobs, memory_bytes = on_slurm.slots_on_slurm(slots, cases), 1, None
    elif device == "cpu":
        slots = slots or machine.default_slots(here)
    else:  # fewer GPUs than wanted: the plan skips what does not fit, and says so
        devices = shared([gpu.id for gpu in here.gpus], ranks_per_gpu or 1)[:slots]
        slots, memory_bytes = len(devices), sum(gpu.memory_bytes for gpu in here.gpus)
    left: dict[str, Any] = {}
    resumed: RunFolder | None = prepared.get("resumed")
    if resumed is not None:
        runs = unique_runs(cases).items()
        made = {key for key, spec in runs if not is_left(resumed, spec)}
        left = {"finished": made.__contains__, "repeats": open_repeats(resumed)}
    plan = make_plan(
        cases, slots=slots, jobs=jobs, expected=expected_here(history, here),
        memory_bytes=memory_bytes, **left,
    )  # fmt: skip
    return Prepared(
        plan=plan, device=device, devices=devices, machine=here, slurm=slurm,
        **prepared,
    )  # fmt: skip


def _check_configs(place: Path, cases: Iterable[CaseSpec]) -> None:
    for spec in unique_runs(cases).values():
        try:
            full = TrainConfig.from_dict(spec.config).to_dict() if spec.is_builtin else {}
            if lacks := [name for name, value in full.items() if spec.config.get(name) != value]:
                raise ValueError(f"it lacks settings of {', '.join(lacks)}")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            why = one_line(f"{type(error).__name__}: {error}")
            raise UsageError(
                f"{place} is of another version or damaged: the configuration of {spec.key}: {why}"
            ) from error


def _refuse_other_code(folder: RunFolder, here: Machine) -> None:
    before, now = deciding(folder.manifest), deciding(provenance_of(here, folder.cases))
    if found := changes(before, now):
        raise UsageError(
            f"--resume {folder.path}: expected the code, packages and variables of its runs, but "
            f"{found}; start a new run, or use --mixed: a case with runs of both is incomparable"
        )


def _refuse_secrets(cases: Iterable[CaseSpec]) -> None:
    """See that no free text of a plan, which is stored with every run, is a secret."""
    masker = Masker(os.environ)
    for key, text in sorted({(key, text) for case in cases for key, text in _texts(case)}):
        if masker.text(text) != text:
            raise UsageError(f"{key}: expected no secret, as this is stored with every run; leave "
                             "it to a file or a variable that the machine holds")  # fmt: skip


def _texts(case: CaseSpec) -> Iterator[tuple[str, str]]:
    for spec in (case.reference, case.candidate):
        if (program := program_of(spec.config)) is not None:
            yield from ((f"args.{k}", str(v)) for k, v in program.args.items())
            yield from ((f"env.{k}", v) for k, v in program.env.items())
            continue
        yield "data.path", str(spec.config.get("data", {}).get("path") or "")
        yield from (("taps", str(pattern)) for pattern in spec.config.get("taps", ()))
        yield from (("plant.tensor", fault.tensor) for fault in each_of(spec.plant))


# ---- carrying out


def rounds(
    prepared: Prepared, view: View, *, out: Path | None, exit_first: bool, argv: Sequence[str]
) -> Generator[None, None, Carried]:
    """Make the runs and judge the cases in rounds; closing them closes folder and engine, too.

    `out` is the run folder to make, None for a new one under `out/`; `argv` is for its manifest.

    Raises:
        UsageError: a run needs more than the engine has; nothing was made.
        CutShort: it was interrupted.
        HarnessError: the machine or our own code failed.
    """
    started_s, plan = time.monotonic(), prepared.plan
    engine = make_engine(prepared)
    if prepared.resumed is None:  # what can never start leaves no folder
        for run in plan.runs:
            engine.check(run.spec)
    folder = prepared.resumed or make_folder(prepared, out, argv)
    interrupted = None
    with folder, view:
        if prepared.resumed is not None:
            clear_leftovers(folder)
        view.planned(plan)
        programs = filter(None, (program_of(run.spec.config) for run in plan.runs))
        make_environments(programs, lambda text: print(text, file=sys.stderr))
        known = {run.key: run.estimate_s for run in plan.runs}
        try:
            verdicts = yield from execution(
                folder, plan.cases, engine, view, exit_first=exit_first, retries=prepared.retries,
                seconds=lambda spec: known.get(spec.key, 0.0),
            )  # fmt: skip
        except Interrupted as error:
            interrupted, verdicts = error, error.verdicts
        except HarnessError:
            raise
        except Exception as error:
            # Kept with the run that it spoiled, where whoever looks into it will look first.
            trace = folder.path / "internal_error.txt"
            why = keep_trace(trace, error)
            raise InternalError(f"internal error: {why} (traceback: {trace})") from error
        finally:
            engine.close()
    done = Carried(
        folder=folder.path, verdicts=verdicts, num_cases=len(plan.cases),
        wall_s=time.monotonic() - started_s,
    )  # fmt: skip
    if interrupted is not None:
        raise CutShort(str(interrupted), done)
    return done


carry_out = whole(rounds)


def make_engine(prepared: Prepared) -> Engine:
    """What makes the runs: this machine or Slurm; the caller closes it."""
    slots, jobs = prepared.plan.slots, prepared.plan.jobs
    if prepared.slurm is None:
        return LocalEngine(slots=slots, jobs=jobs, devices=prepared.devices)
    return on_slurm.SlurmEngine(prepared.slurm, slots=slots)


def make_folder(prepared: Prepared, out: Path | None, argv: Sequence[str]) -> RunFolder:
    """A new run folder, locked: `out`, or one under `out/` that is named after the scenario.

    Raises `UsageError` if there is something else, `Infrastructure` if it cannot be written.
    """
    part_of, name = prepared.whole, prepared.said["scenario"]
    said = {
        **prepared.said, "device": prepared.device, "slots": prepared.plan.slots,
        "devices": list(prepared.devices), RETRIES_KEY: prepared.retries,
        on_slurm.MANIFEST_KEY: None if prepared.slurm is None else prepared.slurm.to_json(),
        **provenance_of(prepared.machine, prepared.plan.cases),
    }  # fmt: skip

    def fill(folder: RunFolder) -> None:
        if part_of is not None:
            keep_whole(folder.path, part_of)

    if part_of is not None:
        name += f"-{part_of.shard.index}of{part_of.shard.number}"
    return create_folder(
        out, name, prepared.plan.cases, said, fill, argv=argv, text=prepared.text
    )  # fmt: skip


def create_folder(
    out: Path | None, name: str, cases: Sequence[CaseSpec], said: Mapping[str, Any],
    fill: Callable[[RunFolder], None], *, argv: Sequence[str], text: str = "",
) -> RunFolder:  # fmt: skip
    """A new run folder, `out` or one under `out/` that begins with `name`; raises as `make_folder`.

    Its manifest has `said`, with `scenario` and `why`. Without a `text`, scenario.yaml is no
    scenario to run: it only names the folder for the report.
    """
    now = datetime.now(UTC)
    path = out or unused(DEFAULT_OUT / f"{name}-{now:%Y%m%dT%H%M%SZ}")
    created = now.isoformat(timespec="milliseconds")
    manifest = {"id": uuid.uuid4().hex, "created": created, "command": list(argv), **said}
    text = text or f"name: {json.dumps(said['scenario'])}\nwhy: {json.dumps(said['why'])}\n"
    return RunFolder.create(path, manifest, text, cases, fill=fill)


def provenance_of(here: Machine, cases: Sequence[CaseSpec]) -> Mapping[str, Any]:
    """What a manifest says of the environment in which the runs of cases are made now."""
    configs = [spec.config for spec in unique_runs(cases).values()]
    return record(json.loads(dumps(here)), codes_of(configs), commit=commit_of_configs(configs))
