"""What will run, in which order, on how many slots, for how long (an estimate, and how it is made).

A slot holds one rank: a GPU, or on the CPU one of a stated number. Runs that cases share are made
once, in the order of `harness.runner.schedule`.

What a run takes is what the history says of runs like it. Where it says nothing, the estimate, in
seconds, on the CPU and on CUDA, is

    start      1.0 + 0.05 a rank        6.0 + 0.5 a rank
    a step     0.05 of host time        0.02 of host time
               + arithmetic at 5e9/s    + arithmetic at 1e14/s

where arithmetic is 6 x parameters that a token meets x tokens of a step, spread over the cores on
the CPU and over the ranks on CUDA, and host time on the CPU is multiplied by ranks over cores where
that is above 1. A step that rounds at random takes `SLOWDOWN` times as long. The whole is what a
greedy packing of these runs on the slots would take.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp_core.config import TrainConfig, built, not_built
from harness.collector import held_off
from harness.errors import UsageError
from harness.faults.catalogue import CATALOGUE
from harness.machine import num_cores
from harness.plant_spec import each_of
from harness.provenance import package_version
from harness.records import CaseSpec, Json, RunSpec
from harness.repeats import SLOWDOWN, in_turn, runs_of
from harness.runner.schedule import Job, Seconds, arrange, makespan_s

Device = Literal["cpu", "cuda"]
_START_S = {"cpu": (1.0, 0.05), "cuda": (6.0, 0.5)}
_STEP_S = {"cpu": 0.05, "cuda": 0.02}
_FOREIGN_START_S = 8.0
"""Of a program in a fresh interpreter, most of it the import of torch."""
_PACKAGES_OF_GPUS = (
    ("backend", "te", "transformer-engine"),
    ("engine", "megatron_fsdp", "megatron-fsdp"),
)
"""A setting's key and value, and the package that it needs, on GPUs only."""
GIB = 1 << 30
LEAST_BYTES = 2
"""Of a weight or an element of a hidden state: a bound that no run is below, not an estimate."""
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


def make_plan(
    cases: Iterable[CaseSpec],
    *,
    slots: int,
    jobs: int | None = None,
    seconds: Seconds | None = None,
    memory_bytes: int | None = None,
) -> Plan:
    """Plan the runs of `cases`.

    Args:
        cases: what to run.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time; None: as many as fit on the slots.
        seconds: what a run is expected to take; None for `default_seconds`.
        memory_bytes: of all devices that runs may use together; None if it is not known.

    Raises:
        UsageError: no slot, or no job.
    """
    _check_counts(slots, jobs)
    judged = tuple(_with_reason(case, slots, memory_bytes) for case in cases)
    with held_off():
        return _order(judged, slots=slots, jobs=jobs, seconds=seconds, finished=lambda key: False)


def resume_plan(
    cases: Iterable[CaseSpec],
    *,
    slots: int,
    jobs: int | None = None,
    seconds: Seconds | None = None,
    finished: Callable[[str], bool],
    repeats: Mapping[str, Sequence[RunSpec]] | None = None,
) -> Plan:
    """Plan what is left of `cases`, whose skip reasons stand as they were decided.

    A case that was planned on a larger machine is not skipped on this one, for it may have its
    verdict already: if runs are left that do not fit, the engine refuses the whole.

    Args:
        cases: the cases of the run folder.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time.
        seconds: what a run is expected to take; None for `default_seconds`.
        finished: whether the run of a key need not be made again.
        repeats: by case, runs that are left of a confirmation which was cut short.

    Raises:
        UsageError: no slot, or no job.
    """
    _check_counts(slots, jobs)
    plan = _order(tuple(cases), slots=slots, jobs=jobs, seconds=seconds, finished=finished)
    expected, specs = seconds or default_seconds(), dict[str, RunSpec]()
    serves: dict[str, list[str]] = {}
    for case_id, left in (repeats or {}).items():
        for spec in left:
            specs[spec.key] = spec
            serves.setdefault(spec.key, []).append(case_id)
    more = [
        PlannedRun(key=key, spec=spec, serves=tuple(serves[key]), estimate_s=expected(spec))
        for key, spec in specs.items()
    ]
    jobs_left = [Job(run.spec, run.estimate_s) for run in more]
    more_s = makespan_s(jobs_left, slots=slots, jobs=jobs)
    return dataclasses.replace(
        plan, runs=(*more, *plan.runs), estimate_s=plan.estimate_s + more_s
    )  # fmt: skip


def _check_counts(slots: int, jobs: int | None) -> None:
    for name, value in (("slots", slots), ("jobs", jobs)):
        if value is not None and value < 1:
            raise UsageError(f"--{name}: expected an integer >= 1, got {value}")


def _order(
    cases: tuple[CaseSpec, ...],
    *,
    slots: int,
    jobs: int | None,
    seconds: Seconds | None,
    finished: Callable[[str], bool],
) -> Plan:
    serves: dict[str, list[str]] = {}
    for case in cases:
        if not case.skip_reason:
            for spec in runs_of(case):
                serves.setdefault(spec.key, []).append(case.id)
    expected = seconds or default_seconds()
    order = arrange(cases, expected, left=lambda key: not finished(key))
    alone = [Job(s, expected(s)) for s in in_turn(cases) if not finished(s.key)]
    runs = tuple(
        PlannedRun(
            key=job.spec.key,
            spec=job.spec,
            serves=tuple(dict.fromkeys(serves[job.spec.key])),
            estimate_s=job.seconds,
        )
        for job in (*order, *alone)
    )
    length_s = makespan_s(order, slots=slots, jobs=jobs) + sum(job.seconds for job in alone)
    return Plan(slots=slots, jobs=jobs, runs=runs, cases=cases, estimate_s=length_s)


def default_seconds() -> Seconds:
    """What runs are expected to take where nothing is known but their size."""
    cores = num_cores()
    return lambda spec: estimate_s(spec, cores)


def _with_reason(case: CaseSpec, slots: int, memory_bytes: int | None) -> CaseSpec:
    if case.skip_reason:
        return case
    specs = (case.reference, case.control, case.candidate)
    reason = next((why for spec in specs if (why := _cannot_run(spec, slots, memory_bytes))), "")
    return dataclasses.replace(case, skip_reason=reason) if reason else case


def _cannot_run(spec: RunSpec, slots: int, memory_bytes: int | None) -> str:
    """Why this machine cannot make the run, or ""."""
    if spec.world_size > slots:
        if spec.device == "cuda":
            return f"needs GPUs for {spec.world_size} ranks, this machine has them for {slots}"
        return f"needs {spec.world_size} rank slots, {slots} are stated (--slots)"
    asked = (_lacks_device, _lacks_package, _lacks_compiler)
    if why := next(filter(None, (lacks(spec) for lacks in asked)), ""):
        return why
    return _lacks_for_builtin(spec, memory_bytes) if spec.is_builtin else ""


def _lacks_for_builtin(spec: RunSpec, memory_bytes: int | None) -> str:
    if memory_bytes is not None and (why := _beyond(spec, memory_bytes)):
        return why
    path = spec.config.get("data", {}).get("path")
    if path is not None and not Path(path).exists():
        return f"data.path {path} is not on this machine"
    # Rebuilding ten thousand configurations takes seconds: only where there is a rule to ask.
    error = not_built(TrainConfig.from_dict(spec.config)) if built.NOT_BUILT else None
    return str(error) if error else ""


def _beyond(spec: RunSpec, memory_bytes: int) -> str:
    """Where no memory of this machine can hold the run, whatever is sharded; "" elsewhere."""
    config, model = spec.config, spec.config["model"]
    least = {
        "one copy of the weights": num_parameters(model),
        "a microbatch between two layers":
            config["micro_batch_size"] * model["seq"] * model["hidden"],
    }  # fmt: skip
    for what, elements in least.items():
        if LEAST_BYTES * elements > memory_bytes:
            need, have = (
                f"{size / GIB:,.0f} GiB" for size in (LEAST_BYTES * elements, memory_bytes)
            )
            return f"{what} needs {need} of memory, this machine has {have}"
    return ""


def _lacks_device(spec: RunSpec) -> str:
    for fault in each_of(spec.plant):
        devices = CATALOGUE[fault.fault].devices
        if spec.device not in devices:
            legal = " or ".join(devices)
            return f"the fault {fault.fault} needs {legal}, this run is on {spec.device}"
    if "races" in spec.config.get("stress", ()) and spec.device != "cpu":
        return f"the stressor races needs cpu, this run is on {spec.device}"
    return ""


def _lacks_package(spec: RunSpec) -> str:
    for key, value, package in _PACKAGES_OF_GPUS:
        if spec.config.get(key) != value:
            continue
        if spec.device != "cuda":
            return f"{key} {value} needs a GPU, this run is on {spec.device}"
        if not package_version(package):
            return f"{key} {value} needs {package}, which is not installed"
    return ""


def _lacks_compiler(spec: RunSpec) -> str:
    if not spec.config.get("compile") or spec.config.get("compile_backend") != "inductor":
        return ""
    # Kernels of GPUs are started by compiled C, too.
    if any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return ""
    return "compile_backend inductor needs a C++ compiler, none is installed (aot_eager needs none)"


def estimate_s(spec: RunSpec, cores: int, device: Device | None = None) -> float:
    """Seconds that a run may take, by the model in the module's docstring.

    Args:
        spec: the run.
        cores: of the machine.
        device: where; None for where the run says.
    """
    config, world = spec.config, spec.world_size
    device = device or spec.device
    fixed, each = _START_S[device]
    slowdown = SLOWDOWN if spec.rounding else 1.0
    if not spec.is_builtin:
        # Nothing is known of its size; the history knows after its first run.
        steps_s = slowdown * int(config["steps"]) * _STEP_S[device]
        return float(_FOREIGN_START_S + each * world + steps_s)
    # Ranks of one replica work on the same tokens.
    replicas = config["parallel"]["dp_outer"] * config["parallel"]["dp"]
    sequences = config["microbatches"] * config["micro_batch_size"] * replicas
    work = 6.0 * num_parameters(config["model"], active=True) * sequences * config["model"]["seq"]
    crowd = max(1.0, world / cores) if device == "cpu" else 1.0
    workers = cores if device == "cpu" else world
    step = _STEP_S[device] * crowd + work / (_FLOPS[device] * workers)
    steps_s, soak = slowdown * config["steps"] * step, spec.soak
    if soak is not None and soak.is_open:
        # A step replays once at least: more often, and the soak is over sooner.
        steps_s = max(steps_s, soak.amount * (step if soak.by == "replays" else 1.0))
    return float(fixed + each * world + steps_s)


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
