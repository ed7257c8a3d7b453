"""From a request on the command line to verdicts: the rooms wired together.

    request -> scenario -> cases -> plan -> run folder -> engine -> verdicts -> reports

`prepare` does everything that can fail on the user's account, before a folder is made; `carry_out`
does the rest.
"""

import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from harness import machine
from harness.engine.base import Engine, shared
from harness.engine.local import LocalEngine
from harness.engine.slurm import (
    MANIFEST_KEY,
    SlurmEngine,
    SlurmOptions,
    device_on_slurm,
    slots_on_slurm,
    stored_options,
)
from harness.errors import HarnessError, InternalError, Interrupted, NothingSelected, UsageError
from harness.machine import Machine
from harness.masking import Masker
from harness.program.launch import make_environments
from harness.program.spec import codes_of, program_of
from harness.provenance import changes, deciding, record
from harness.records import CaseSpec, dumps
from harness.repeats import unique_runs
from harness.runner.expectations import expected_anywhere, expected_here, kind_of
from harness.runner.leftovers import clear_leftovers
from harness.runner.occupancy import keep, metered
from harness.runner.plan import make_plan, resume_plan
from harness.runner.planned import check_whole, refuse_secrets
from harness.runner.progress import View
from harness.runner.request import Carried, CutShort, Prepared, Request
from harness.runner.retries import MANIFEST_KEY as RETRIES_KEY
from harness.runner.retries import Retries, stored_limit
from harness.runner.run import execution, is_left, keep_trace, open_repeats, whole
from harness.runner.schedule import Seconds
from harness.runner.shards import take_shard
from harness.scenario.schema import Overrides
from harness.scenario.suite import load_suite
from harness.store import RunFolder, load_case
from harness.store.merge import keep_whole
from harness.store.verify import DEFAULT_OUT, unused

__all__ = [
    "Carried", "CutShort", "Prepared", "Request", "carry_out", "make_engine", "make_folder",
    "prepare", "prepare_rerun", "provenance_of", "rounds",
]  # fmt: skip

DEFAULT_SCENARIOS = Path("scenarios")
NOTES_KEY = "notes"
"""Of the manifest: what selections left out, a line each."""
SESSION_KEY = "session"
"""Of the manifest: the session of pytest that made the folder, "" for none."""


def prepare(request: Request) -> Prepared:
    """Check a request and plan it.

    Raises:
        HarnessError: it cannot be carried out.
    """
    here = machine.describe()
    if request.resume is not None:
        return _prepare_resume(request, request.resume, here)
    suite = load_suite(_paths(request), tiers=request.tiers, overrides=_overrides(request))
    slurm = suite.launch.slurm if suite.launch.engine == "slurm" else None
    device = _device(request.device or suite.launch.device, slurm, here)
    chosen, selected = suite.cases(
        device,
        forced=request.device is not None,
        keyword=request.keyword,
        how=request.select,
        picked=request.picked,
    )
    refuse_secrets(chosen, () if slurm is None else slurm.args)
    part_of = None
    if request.shard is not None:
        chosen, part_of = take_shard(chosen, request.shard, _costs(request))
    if slurm is None:
        wanted = request.slots or suite.slots(machine.default_slots(here))
        slots, devices = _slots(wanted, device, here, request.ranks_per_gpu)
    else:
        wanted = request.slots or suite.slots(slots_on_slurm(None, chosen))
        slots, devices = _slots_on_slurm(wanted, chosen, request), ()
    seconds = expected_here(request.costs or request.history, kind_of(here))
    return Prepared(
        name=suite.name,
        why=suite.why,
        text=suite.text,
        plan=make_plan(
            chosen,
            slots=slots,
            jobs=request.jobs if slurm is None else 1,
            seconds=seconds,
            memory_bytes=None if slurm else _memory_bytes(device, here),
        ),
        device=device,
        devices=devices,
        machine=here,
        slurm=slurm,
        retries=suite.launch.retries,
        selected=selected,
        tiers=suite.tiers,
        whole=part_of,
        session=request.session,
    )


def _costs(request: Request) -> Seconds:
    """What shards are cut by; it must not change from shard to shard."""
    costs, history = request.costs, request.history
    if costs is not None and history is not None and costs.resolve() == history.resolve():
        raise UsageError(
            f"--costs {costs}: expected a history that this run does not add to, or the next "
            f"shard is cut otherwise; copy it, or record elsewhere with --history"
        )
    return expected_anywhere(costs)


def _paths(request: Request) -> tuple[Path, ...]:
    paths = request.paths or ((request.scenario,) if request.scenario else ())
    if not paths and request.tiers:
        paths = (DEFAULT_SCENARIOS,)
    if not paths:
        raise UsageError("run: expected a SCENARIO, --tier or --resume RUN, got none")
    return paths


def _overrides(request: Request) -> Overrides:
    sets = [f"launch.slurm.{text}" for text in request.slurm]
    if request.engine is not None:
        sets.append(f"launch.engine={request.engine}")
    return dataclasses.replace(request.overrides, sets=(*request.overrides.sets, *sets))


def _device(wanted: str, slurm: SlurmOptions | None, here: Machine) -> Literal["cpu", "cuda"]:
    if slurm is not None:
        return device_on_slurm(wanted, slurm)
    return machine.resolve_device(wanted, here)


def _slots_on_slurm(wanted: int | None, cases: Sequence[CaseSpec], request: Request) -> int:
    if request.ranks_per_gpu is not None:
        raise UsageError("--ranks-per-gpu: expected runs on this machine, these go to Slurm")
    return slots_on_slurm(wanted, cases)


def _prepare_resume(request: Request, path: Path, here: Machine) -> Prepared:
    refused = {
        "-k": request.keyword, "--device": request.device, "--out": request.out,
        "--set": request.overrides.sets, "--axis": request.overrides.axes,
        "--engine": request.engine, "--slurm": request.slurm, "--tier": request.tiers,
        "--select": request.select, "--shard": request.shard, "--costs": request.costs,
    }  # fmt: skip
    for option, value in refused.items():
        if value:
            raise UsageError(
                f"--resume: expected no {option}, the cases of {path} stand as planned"
            )
    folder = RunFolder.open(path)
    given = request.paths or ((request.scenario,) if request.scenario else ())
    if given and not _is_text_of(load_suite(given).text, folder):
        raise UsageError(
            f"--resume: expected the scenario that {path} was made from, "
            f"got {', '.join(map(str, given))}, which differs; leave it out to go on with the old "
            f"one"
        )
    if not folder.cases:
        raise NothingSelected(f"{path} holds no case")
    check_whole(path, folder.cases)
    _refuse_other_code(folder, here, request)
    device = folder.cases[0].candidate.device
    slurm = stored_options(folder.manifest)
    _device(device, slurm, here)
    if slurm is None:
        slots, devices = _slots(
            request.slots or _stored_slots(folder),
            device,
            here,
            request.ranks_per_gpu or _stored_ranks_per_gpu(folder),
        )
    else:
        slots, devices = _slots_on_slurm(request.slots, folder.cases, request), ()
    retries = Retries(folder, stored_limit(folder.manifest))
    left = {
        key for key, spec in unique_runs(folder.cases).items() if is_left(folder, spec, retries)
    }
    return Prepared(
        name=str(folder.manifest.get("scenario", "")),
        why=str(folder.manifest.get("why", "")),
        text=folder.scenario_text,
        plan=resume_plan(
            folder.cases,
            slots=slots,
            jobs=request.jobs if slurm is None else 1,
            finished=lambda key: key not in left,
            seconds=expected_here(request.history, kind_of(here)),
            repeats=open_repeats(folder, retries),
        ),
        device=device,
        devices=devices,
        machine=here,
        slurm=slurm,
        retries=retries.limit,
        resumed=folder,
    )


def _refuse_other_code(folder: RunFolder, here: Machine, request: Request) -> None:
    """Runs of two codes or environments compare these, and not what the scenario asks.

    Raises:
        UsageError: the folder's runs were made by other code, packages or variables.
    """
    if request.mixed or "code" not in folder.manifest:  # made before it was recorded
        return
    before, now = deciding(folder.manifest), deciding(provenance_of(here, folder.cases))
    if told := changes(before, now):
        raise UsageError(
            f"--resume {folder.path}: expected the code, packages and variables of its runs, but "
            f"{told}; run it anew, or make the rest as it is now with --mixed: a case with runs of "
            "both is incomparable"
        )


def _is_text_of(text: str, folder: RunFolder) -> bool:
    """Whether a folder was made from a scenario, which it stores without secrets."""
    return folder.scenario_text in (text, Masker(os.environ).text(text))


def _stored_slots(folder: RunFolder) -> int | None:
    stored = folder.manifest.get("slots")
    cuda = folder.cases[0].candidate.device == "cuda"
    return stored if isinstance(stored, int) and not cuda else None


def _stored_ranks_per_gpu(folder: RunFolder) -> int | None:
    devices = folder.manifest.get("devices")
    return max(map(devices.count, devices)) if isinstance(devices, list) and devices else None


def prepare_rerun(
    case_folder: Path, *, slots: int | None, ranks_per_gpu: int | None, jobs: int | None
) -> Prepared:
    """Plan one case again, from its folder and nothing else.

    Raises:
        HarnessError: not a case folder, or the case cannot run here.
    """
    case = load_case(case_folder).case
    if case.reference.recorded:
        raise UsageError(
            f"{case_folder}: expected a case that can be run, its runs were recorded by hand: "
            "record them again and compare them with harness compare-runs"
        )
    fresh = dataclasses.replace(case, skip_reason="")
    check_whole(case_folder, [fresh])
    why = f"Case {case.id} of {case.scenario}, run again."
    return prepare_cases(
        [fresh], name=case.scenario, why=why, slots=slots, ranks_per_gpu=ranks_per_gpu, jobs=jobs
    )


def prepare_cases(
    cases: Sequence[CaseSpec],
    *,
    name: str,
    why: str,
    slots: int | None = None,
    ranks_per_gpu: int | None = None,
    jobs: int | None = None,
) -> Prepared:
    """Plan cases of one device that come from no scenario file.

    Raises:
        HarnessError: the machine cannot run them.
    """
    here = machine.describe()
    device = cases[0].candidate.device
    machine.resolve_device(device, here)
    count, devices = _slots(slots, device, here, ranks_per_gpu)
    return Prepared(
        name=name,
        why=why,
        # Not a scenario to run: it only names this for the report. cases.json holds the cases.
        text=f"name: {json.dumps(name)}\nwhy: {json.dumps(why)}\n",
        plan=make_plan(cases, slots=count, jobs=jobs, memory_bytes=_memory_bytes(device, here)),
        device=device,
        devices=devices,
        machine=here,
    )


def _slots(
    wanted: int | None,
    device: Literal["cpu", "cuda"],
    here: Machine,
    ranks_per_gpu: int | None,
) -> tuple[int, tuple[str, ...]]:
    """Number of slots, and the GPU of each.

    Raises:
        UsageError: GPUs to share where there are none.
    """
    if device == "cpu":
        if ranks_per_gpu is not None:
            raise UsageError(
                f"--ranks-per-gpu {ranks_per_gpu}: expected a run on GPUs, this one is on the CPU"
            )
        return (machine.default_slots(here) if wanted is None else wanted), ()
    devices = shared([gpu.id for gpu in here.gpus], ranks_per_gpu or 1)
    # Fewer GPUs than wanted: the plan skips what does not fit, and says so.
    slots = min(len(devices) if wanted is None else wanted, len(devices))
    return slots, devices[:slots]


def _memory_bytes(device: Literal["cpu", "cuda"], here: Machine) -> int:
    if device == "cpu":
        return here.memory_bytes
    return sum(gpu.memory_bytes for gpu in here.gpus)


def rounds(
    prepared: Prepared,
    view: View,
    *,
    out: Path | None,
    exit_first: bool,
    argv: Sequence[str],
    engine: Engine | None = None,
) -> Generator[None, None, Carried]:
    """Make the runs and judge the cases in rounds; closing them closes folder and engine, too.

    Args:
        prepared: what to do.
        view: where progress goes.
        out: run folder to make; None for a new one under `out/`.
        exit_first: stop at the first case that does not pass.
        argv: the command line, for the manifest.
        engine: makes the runs; None for this machine's own.

    Raises:
        CutShort: it was interrupted.
        HarnessError: the machine or our own code failed.
    """
    started_s = time.monotonic()
    folder = prepared.resumed or make_folder(prepared, out, argv)
    interrupted = None
    with folder, view:
        if prepared.resumed is not None:
            clear_leftovers(folder)
        view.planned(prepared.plan)
        programs = filter(None, (program_of(run.spec.config) for run in prepared.plan.runs))
        make_environments(programs, lambda text: print(text, file=sys.stderr))
        engine = engine or make_engine(prepared)
        meter = metered(view, prepared.plan)
        known = {run.key: run.estimate_s for run in prepared.plan.runs}
        try:
            verdicts = yield from execution(
                folder, prepared.plan.cases, engine, meter, exit_first=exit_first,
                retries=prepared.retries, seconds=lambda spec: known.get(spec.key, 0.0),
            )  # fmt: skip
        except Interrupted as error:
            interrupted, verdicts = error, error.verdicts
        except HarnessError:
            raise
        except Exception as error:
            # Kept with the run that it spoiled, where whoever looks into it will look first.
            trace = folder.path / "internal_error.txt"
            told = keep_trace(trace, error)
            raise InternalError(f"internal error: {told} (traceback: {trace})") from error
        finally:
            engine.close()
            keep(folder.path, meter.read())
    done = Carried(
        folder=folder.path, verdicts=verdicts, num_cases=len(prepared.plan.cases),
        wall_s=time.monotonic() - started_s, occupancy=meter.read(),
    )  # fmt: skip
    if interrupted is not None:
        raise CutShort(str(interrupted), done)
    return done


carry_out = whole(rounds)
"""All rounds of a launch."""


def make_engine(prepared: Prepared) -> Engine:
    """What makes the runs: this machine or Slurm; whoever asks closes it."""
    slots, jobs = prepared.plan.slots, prepared.plan.jobs
    if prepared.slurm is not None:
        return SlurmEngine(prepared.slurm, slots=slots)
    return LocalEngine(slots=slots, jobs=jobs, devices=prepared.devices)


def make_folder(prepared: Prepared, out: Path | None, argv: Sequence[str]) -> RunFolder:
    """A new run folder, locked: `out`, or one under `out/` that is named after the scenario.

    Raises:
        UsageError: there is something else at `out`.
        Infrastructure: it cannot be written.
    """
    now = datetime.now(UTC)
    shard = prepared.whole.shard if prepared.whole is not None else None
    name = prepared.name if shard is None else f"{prepared.name}-{shard.index}of{shard.number}"
    path = out or unused(DEFAULT_OUT / f"{name}-{now:%Y%m%dT%H%M%SZ}")

    def fill(folder: RunFolder) -> None:
        if prepared.whole is not None:
            keep_whole(folder.path, prepared.whole)

    manifest = _manifest(prepared, now, argv)
    return RunFolder.create(path, manifest, prepared.text, prepared.plan.cases, fill=fill)


def _manifest(prepared: Prepared, now: datetime, argv: Sequence[str]) -> Mapping[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "scenario": prepared.name,
        "why": prepared.why,
        "created": now.isoformat(timespec="seconds"),
        "command": list(argv),
        "device": prepared.device,
        "slots": prepared.plan.slots,
        "devices": list(prepared.devices),
        RETRIES_KEY: prepared.retries,
        "tier": prepared.tiers,
        "shard": "" if prepared.whole is None else str(prepared.whole.shard),
        "selected": [part.to_json() for part in prepared.selected],
        NOTES_KEY: list(prepared.notes),
        SESSION_KEY: prepared.session,
        MANIFEST_KEY: None if prepared.slurm is None else prepared.slurm.to_json(),
        **provenance_of(prepared.machine, prepared.plan.cases),
    }


def provenance_of(here: Machine, cases: Sequence[CaseSpec]) -> dict[str, Any]:
    """What a manifest says of the environment in which the runs of cases are made now."""
    configs = {spec.key: spec.config for spec in unique_runs(cases).values()}
    machine: dict[str, Any] = json.loads(dumps(here))
    return record(machine, codes_of(configs.values()))
