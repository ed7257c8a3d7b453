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
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from harness import machine
from harness.disk import write_atomic
from harness.engine.base import Engine
from harness.engine.gpus import shared
from harness.engine.local import LocalEngine
from harness.errors import HarnessError, InternalError, NothingSelected, UsageError, shown
from harness.machine import Machine
from harness.matrix import expand
from harness.plan import Plan, make_plan, resume_plan
from harness.progress import View
from harness.records import CaseSpec, Verdict
from harness.run import TO_REPEAT, execute
from harness.schema import Overrides, Scenario, load_scenario
from harness.select import select
from harness.store import RunFolder, load_case

DEFAULT_OUT = Path("out")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. `slots` and `device` override the scenario's."""

    scenario: Path | None = None
    resume: Path | None = None
    keyword: str | None = None
    device: str | None = None
    slots: int | None = None
    ranks_per_gpu: int | None = None
    jobs: int | None = None
    out: Path | None = None
    exit_first: bool = False
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that can be carried out: nothing has been written yet.

    Attributes:
        name: of the scenario.
        why: of the scenario.
        text: what goes into the run folder as scenario.yaml.
        plan: the runs to make and every case.
        device: where they run.
        devices: GPU of each slot, as CUDA_VISIBLE_DEVICES names it; empty on the CPU.
        machine: this machine.
        resumed: the folder to go on with; None to make one.
    """

    name: str
    why: str
    text: str
    plan: Plan
    device: Literal["cpu", "cuda"]
    devices: tuple[str, ...]
    machine: Machine
    resumed: RunFolder | None = None


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What was carried out."""

    folder: Path
    verdicts: tuple[Verdict, ...]
    num_cases: int
    wall_s: float


def prepare(request: Request) -> Prepared:
    """Check a request and plan it.

    Raises:
        HarnessError: it cannot be carried out.
    """
    here = machine.describe()
    if request.resume is not None:
        return _prepare_resume(request, request.resume, here)
    if request.scenario is None:
        raise UsageError("run: expected a SCENARIO or --resume RUN, got neither")
    scenario = load_scenario(request.scenario, overrides=request.overrides)
    device = machine.resolve_device(request.device or scenario.launch.device, here)
    slots, devices = _slots(
        request.slots or scenario.launch.slots, device, here, request.ranks_per_gpu
    )
    cases = expand(scenario, device)
    chosen = select(cases, request.keyword)
    if not chosen:
        raise NothingSelected(
            f"-k {shown(request.keyword)} selects none of {len(cases)} cases of {scenario.name}"
        )
    return Prepared(
        name=scenario.name,
        why=scenario.why,
        text=_source_text(scenario),
        plan=make_plan(chosen, slots=slots, jobs=request.jobs),
        device=device,
        devices=devices,
        machine=here,
    )


def _source_text(scenario: Scenario) -> str:
    return scenario.source.decode("utf-8")


def _prepare_resume(request: Request, path: Path, here: Machine) -> Prepared:
    refused = {
        "-k": request.keyword, "--device": request.device, "--out": request.out,
        "--set": request.overrides.sets, "--axis": request.overrides.axes,
    }  # fmt: skip
    for option, value in refused.items():
        if value:
            raise UsageError(
                f"--resume: expected no {option}, the cases of {path} stand as planned"
            )
    folder = RunFolder.open(path)
    if request.scenario is not None:
        given = load_scenario(request.scenario)
        if _source_text(given) != folder.scenario_text:
            raise UsageError(
                f"--resume: expected the scenario that {path} was made from, "
                f"got {request.scenario}, which differs; leave it out to go on with the old one"
            )
    if not folder.cases:
        raise NothingSelected(f"{path} holds no case")
    device = folder.cases[0].candidate.device
    machine.resolve_device(device, here)
    slots, devices = _slots(
        request.slots or _stored_slots(folder),
        device,
        here,
        request.ranks_per_gpu or _stored_ranks_per_gpu(folder),
    )

    def finished(key: str) -> bool:
        outcome = folder.finished(key)
        return outcome is not None and outcome.what not in TO_REPEAT

    return Prepared(
        name=str(folder.manifest.get("scenario", "")),
        why=str(folder.manifest.get("why", "")),
        text=folder.scenario_text,
        plan=resume_plan(folder.cases, slots=slots, jobs=request.jobs, finished=finished),
        device=device,
        devices=devices,
        machine=here,
        resumed=folder,
    )


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
    here = machine.describe()
    device = case.candidate.device
    machine.resolve_device(device, here)
    count, devices = _slots(slots, device, here, ranks_per_gpu)
    fresh = dataclasses.replace(case, skip_reason="")
    why = f"Case {case.id} of {case.scenario}, run again."
    return Prepared(
        name=case.scenario,
        why=why,
        # Not a scenario to run: it only names this for the report. cases.json holds the case.
        text=f"name: {json.dumps(case.scenario)}\nwhy: {json.dumps(why)}\n",
        plan=make_plan([fresh], slots=count, jobs=jobs),
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


def carry_out(
    prepared: Prepared,
    view: View,
    *,
    out: Path | None,
    exit_first: bool,
    argv: Sequence[str],
    engine: Engine | None = None,
) -> Carried:
    """Make the runs and judge the cases. The folder is released and the engine closed at the end.

    Args:
        prepared: what to do.
        view: where progress goes.
        out: run folder to make; None for a new one under `out/`.
        exit_first: stop at the first case that does not pass.
        argv: the command line, for the manifest.
        engine: makes the runs; None for this machine's own.

    Raises:
        HarnessError: interrupted, or the machine or our own code failed.
    """
    started_s = time.monotonic()
    folder = prepared.resumed or _make_folder(prepared, out, argv)
    cases = prepared.plan.cases
    with folder, view:
        view.planned(prepared.plan)
        engine = engine or LocalEngine(
            slots=prepared.plan.slots, jobs=prepared.plan.jobs, devices=prepared.devices
        )
        try:
            verdicts = execute(folder, cases, engine, view, exit_first=exit_first)
        except HarnessError:
            raise
        except Exception as error:
            # Kept with the run that it spoiled, where whoever looks into it will look first.
            trace = folder.path / "internal_error.txt"
            write_atomic(trace, traceback.format_exc())
            raise InternalError(
                f"internal error: {type(error).__name__}: {error} (traceback: {trace})"
            ) from error
        finally:
            engine.close()
    return Carried(
        folder=folder.path,
        verdicts=verdicts,
        num_cases=len(cases),
        wall_s=time.monotonic() - started_s,
    )


def _make_folder(prepared: Prepared, out: Path | None, argv: Sequence[str]) -> RunFolder:
    now = datetime.now(UTC)
    path = out or _unused(DEFAULT_OUT / f"{prepared.name}-{now:%Y%m%dT%H%M%SZ}")
    return RunFolder.create(
        path, _manifest(prepared, now, argv), prepared.text, prepared.plan.cases
    )


def _manifest(prepared: Prepared, now: datetime, argv: Sequence[str]) -> Mapping[str, Any]:
    return {
        "scenario": prepared.name,
        "why": prepared.why,
        "created": now.isoformat(timespec="seconds"),
        "command": list(argv),
        "device": prepared.device,
        "slots": prepared.plan.slots,
        "devices": list(prepared.devices),
        "machine": prepared.machine,
        "environment": {"python": sys.version.split()[0], "variables": dict(os.environ)},
    }


def _unused(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that is free."""
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


def newest_run(out: Path = DEFAULT_OUT) -> Path:
    """The run folder made last under `out`.

    Raises:
        UsageError: there is none.
    """
    made = [path for path in out.glob("*/manifest.json") if path.is_file()]
    if not made:
        raise UsageError(f"expected a run folder, {out}/ holds none")
    return max(made, key=lambda path: path.stat().st_mtime_ns).parent


def find_case(name: str, run: Path | None) -> tuple[Path, CaseSpec]:
    """A case's folder by its path, or by its id in a run folder (the newest by default).

    Raises:
        UsageError: there is no such case.
    """
    path = Path(name)
    if run is None and (path / "case.json").is_file():
        return path, load_case(path).case
    folder = RunFolder.open(run or newest_run())
    ids = [case.id for case in folder.cases]
    if name not in ids:
        known = ", ".join(ids[:10]) + (", ..." if len(ids) > 10 else "")
        raise UsageError(f"{shown(name)}: expected a case folder or id; {folder.path} has {known}")
    return folder.case_folder(name), folder.cases[ids.index(name)]
