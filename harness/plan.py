"""What will run, in which order, on how many slots, for how long (an estimate, and how it is made).

A slot holds one rank: a GPU, or on the CPU one of a stated number. Runs that cases share are made
once. Large worlds go first, so that small ones fill the gaps at the end, and the runs of one case
stay together, so that its verdict does not wait for the whole matrix.

The estimate of a run, in seconds, on the CPU and on CUDA:

    start      1.0 + 0.05 a rank        6.0 + 0.5 a rank
    a step     0.05 of host time        0.02 of host time
               + arithmetic at 5e9/s    + arithmetic at 1e14/s

where arithmetic is 6 x parameters that a token meets x tokens of a step, spread over the cores on
the CPU and over the ranks on CUDA, and host time on the CPU is multiplied by ranks over cores where
that is above 1. The whole is what a greedy packing of these runs on the slots would take.
"""

import dataclasses
import heapq
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_core.config import TrainConfig, not_built
from harness.errors import UsageError
from harness.faults.catalogue import CATALOGUE
from harness.machine import num_cores, package_version
from harness.records import CaseSpec, Json, RunSpec

_START_S = {"cpu": (1.0, 0.05), "cuda": (6.0, 0.5)}
_STEP_S = {"cpu": 0.05, "cuda": 0.02}
_FLOPS = {"cpu": 5e9, "cuda": 1e14}


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Json):
    """A run to make once. `serves` holds the ids of the cases that read it."""

    key: str
    spec: RunSpec
    serves: tuple[str, ...]
    estimate_s: float


@dataclass(frozen=True, kw_only=True)
class Plan(Json):
    """Runs in execution order, and every case, those that cannot run here with their reason."""

    slots: int
    jobs: int | None
    runs: tuple[PlannedRun, ...]
    cases: tuple[CaseSpec, ...]
    estimate_s: float

    @property
    def skipped(self) -> tuple[CaseSpec, ...]:
        """The cases that cannot run on this machine."""
        return tuple(case for case in self.cases if case.skip_reason)


def make_plan(cases: Iterable[CaseSpec], *, slots: int, jobs: int | None = None) -> Plan:
    """Plan the runs of `cases`.

    Args:
        cases: what to run.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time; None: as many as fit on the slots.

    Raises:
        UsageError: no slot, or no job.
    """
    _check_counts(slots, jobs)
    judged = tuple(_with_reason(case, slots) for case in cases)
    return _order(judged, slots=slots, jobs=jobs, finished=lambda key: False)


def resume_plan(
    cases: Iterable[CaseSpec],
    *,
    slots: int,
    jobs: int | None = None,
    finished: Callable[[str], bool],
) -> Plan:
    """Plan what is left of `cases`, whose skip reasons stand as they were decided.

    A case that was planned on a larger machine is not skipped on this one, for it may have its
    verdict already: if runs are left that do not fit, the engine refuses the whole.

    Args:
        cases: the cases of the run folder.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time.
        finished: whether the run of a key need not be made again.

    Raises:
        UsageError: no slot, or no job.
    """
    _check_counts(slots, jobs)
    return _order(tuple(cases), slots=slots, jobs=jobs, finished=finished)


def _check_counts(slots: int, jobs: int | None) -> None:
    for name, value in (("slots", slots), ("jobs", jobs)):
        if value is not None and value < 1:
            raise UsageError(f"--{name}: expected an integer >= 1, got {value}")


def _order(
    cases: tuple[CaseSpec, ...],
    *,
    slots: int,
    jobs: int | None,
    finished: Callable[[str], bool],
) -> Plan:
    serves: dict[str, list[str]] = {}
    specs: dict[str, RunSpec] = {}
    keys: dict[int, str] = {}
    for case in sorted(cases, key=lambda case: -case.candidate.world_size):
        if case.skip_reason:
            continue
        for spec in (case.reference, case.control, case.candidate):
            # A key is a hash of the whole specification: worth making once an object.
            key = keys.get(id(spec)) or spec.key
            keys[id(spec)] = key
            specs.setdefault(key, spec)
            serves.setdefault(key, []).append(case.id)
    cores = num_cores()
    runs = tuple(
        PlannedRun(
            key=key, spec=spec, serves=tuple(serves[key]), estimate_s=estimate_s(spec, cores)
        )
        for key, spec in specs.items()
        if not finished(key)
    )
    return Plan(
        slots=slots, jobs=jobs, runs=runs, cases=cases, estimate_s=_makespan_s(runs, slots, jobs)
    )


def _with_reason(case: CaseSpec, slots: int) -> CaseSpec:
    if case.skip_reason:
        return case
    specs = (case.reference, case.control, case.candidate)
    reason = next((why for spec in specs if (why := _cannot_run(spec, slots))), "")
    return dataclasses.replace(case, skip_reason=reason) if reason else case


def _cannot_run(spec: RunSpec, slots: int) -> str:
    """Why this machine cannot make the run, or ""."""
    if spec.world_size > slots:
        if spec.device == "cuda":
            return f"needs GPUs for {spec.world_size} ranks, this machine has them for {slots}"
        return f"needs {spec.world_size} rank slots, {slots} are stated (--slots)"
    if why := _lacks_device(spec) or _lacks_te(spec) or _lacks_compiler(spec):
        return why
    path = spec.config.get("data", {}).get("path")
    if path is not None and not Path(path).exists():
        return f"data.path {path} is not on this machine"
    error = not_built(TrainConfig.from_dict(spec.config))
    return str(error) if error else ""


def _lacks_device(spec: RunSpec) -> str:
    if spec.plant is not None and spec.device not in CATALOGUE[spec.plant.fault].devices:
        legal = " or ".join(CATALOGUE[spec.plant.fault].devices)
        return f"the fault {spec.plant.fault} needs {legal}, this run is on {spec.device}"
    if "races" in spec.config.get("stress", ()) and spec.device != "cpu":
        return f"the stressor races needs cpu, this run is on {spec.device}"
    return ""


def _lacks_te(spec: RunSpec) -> str:
    if spec.config.get("backend") != "te":
        return ""
    if spec.device != "cuda":
        return f"backend te needs a GPU, this run is on {spec.device}"
    if not package_version("transformer-engine"):
        return "backend te needs transformer-engine, which is not installed"
    return ""


def _lacks_compiler(spec: RunSpec) -> str:
    if not spec.config.get("compile") or spec.config.get("compile_backend") != "inductor":
        return ""
    # Kernels of GPUs are started by compiled C, too.
    if any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return ""
    return "compile_backend inductor needs a C++ compiler, none is installed (aot_eager needs none)"


def estimate_s(spec: RunSpec, cores: int) -> float:
    """Seconds that a run may take, by the model in the module's docstring."""
    config, world = spec.config, spec.world_size
    fixed, each = _START_S[spec.device]
    # Ranks of one replica work on the same tokens.
    replicas = config["parallel"]["dp_outer"] * config["parallel"]["dp"]
    sequences = config["microbatches"] * config["micro_batch_size"] * replicas
    work = 6.0 * num_parameters(config["model"], active=True) * sequences * config["model"]["seq"]
    crowd = max(1.0, world / cores) if spec.device == "cpu" else 1.0
    workers = cores if spec.device == "cpu" else world
    step = _STEP_S[spec.device] * crowd + work / (_FLOPS[spec.device] * workers)
    return float(fixed + each * world + config["steps"] * step)


def num_parameters(model: Mapping[str, Any], *, active: bool = False) -> int:
    """Parameters of the decoder, embedding and head included, norms and biases left out.

    Args:
        model: plain `ModelConfig`.
        active: count of the experts only those that one token goes to.
    """
    hidden, experts, dense = model["hidden"], model["experts"], model["first_dense_layers"]
    used = model["top_k"] if active else experts
    branch = 3 * hidden * model["ffn"]
    routed = hidden * (experts + 3 * (used * model["expert_ffn"] + model["shared_expert_ffn"]))
    dense = dense if experts else model["layers"]
    return int(
        model["layers"] * _attention_parameters(model)
        + dense * branch
        + (model["layers"] - dense) * routed
        + 2 * model["vocab_size"] * hidden
    )


def _attention_parameters(model: Mapping[str, Any]) -> int:
    hidden, heads, head = model["hidden"], model["heads"], model["head_dim"]
    if model["attention"] == "gqa":
        return int(hidden * head * 2 * (heads + model["kv_heads"]))
    latent, rope, value = model["kv_lora_rank"], model["qk_rope_head_dim"], model["v_head_dim"]
    query = hidden * heads * head
    if model["q_lora_rank"] is not None:
        query = model["q_lora_rank"] * (hidden + heads * head)
    keys = hidden * (latent + rope) + latent * heads * (model["qk_nope_head_dim"] + value)
    return int(query + keys + heads * value * hidden)


def _makespan_s(runs: Iterable[PlannedRun], slots: int, jobs: int | None) -> float:
    """When the last run ends if each starts, in order, as soon as its slots are free."""
    running: list[tuple[float, int]] = []
    free, now, last = slots, 0.0, 0.0
    for run in runs:
        wanted = min(run.spec.world_size, slots)
        while wanted > free or (jobs is not None and len(running) >= jobs):
            now, released = heapq.heappop(running)
            free += released
        free -= wanted
        end = now + run.estimate_s
        last = max(last, end)
        heapq.heappush(running, (end, wanted))
    return last
