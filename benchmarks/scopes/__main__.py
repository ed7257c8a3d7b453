"""Step time and memory of each graph scope beside eager, in one run.

    python -m benchmarks.scopes                                  both workloads, all scopes
    python -m benchmarks.scopes --workload launch --only eager full_iteration
    python -m benchmarks.scopes --workload launch --parallel '{dp: 8}' '{dp: 4, tp: 2, etp: 2}'
    python -m benchmarks.scopes --ranks 8 --ranks-per-gpu 4      8 ranks on 2 GPUs, untimed
    python -m benchmarks.scopes --device cpu --tiny              the flow, without a GPU

Every scope trains the same model on the same data from the same weights, through the trainer that
the harness runs. Each measurement has fresh processes, the order alternates between rounds; times
are of whole steps, optimizer included, on the slowest rank, after the capture. Memory is the most
that torch's allocator held over the whole run, capture included. Losses of all steps must have
eager's bits on every rank: a scope that is fast and wrong is a failure. Without `--parallel` the
layout is data parallel over all ranks, with experts dealt out over them too. Ranks that share a GPU
show that so many ranks run, over NCCL; their times mean nothing and are so marked.

Exit codes: 0, 1 (a scope failed, or has other bits than eager; nothing of a workload or of a layout
can be measured), 4 (usage), 6 (no GPUs).
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import interrupt_when_terminated
from benchmarks.room import MEANINGLESS, NoGpus, Room, add_options, find_room
from benchmarks.scopes.layouts import Layout, read_layouts, usual_layout
from benchmarks.scopes.measure import Job, Result, measure
from fsdp_core.config import ConfigError, ModelConfig, TrainConfig, scope_sets
from harness.errors import UsageError
from harness.store.files import write_atomic

EAGER = "eager"
EXPERTS: dict[str, Any] = {"experts": 16, "top_k": 2, "capacity_factor": 1.25}
WORKLOADS: dict[str, dict[str, Any]] = {
    "launch": {"hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 4, "expert_ffn": 512,
               "vocab_size": 32_000, "seq": 1024} | EXPERTS,
    "compute": {"hidden": 4096, "layers": 4, "heads": 32, "kv_heads": 8, "expert_ffn": 4096,
                "vocab_size": 32_000, "seq": 4096} | EXPERTS,
    "dense": {"hidden": 4096, "layers": 8, "heads": 32, "kv_heads": 8, "ffn": 11_008,
              "vocab_size": 32_000, "seq": 4096},
}  # fmt: skip
"""Bound by launches, bound by kernels, and the latter without experts."""
_MODELS = [ModelConfig(**model) for model in WORKLOADS.values()]
_SETS = [scopes for model in _MODELS for scopes in scope_sets(model)]
SCOPES = (EAGER, *dict.fromkeys("+".join(scopes) for scopes in _SETS))
TINY: dict[str, Any] = {
    "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 256, "seq": 32,
}  # fmt: skip
TINY_WIDTHS = {"ffn": 128, "expert_ffn": 32, "experts": 8}
MIN_TIMEOUT_S = 20.0


def model_of(workload: str, *, tiny: bool) -> dict[str, Any]:
    """Shapes of a workload, or small ones of the same kind."""
    model = WORKLOADS[workload]
    if not tiny:
        return model
    return model | TINY | {key: TINY_WIDTHS[key] for key in TINY_WIDTHS if key in model}


def config_of(workload: str, layout: Layout, scope: str, chosen: argparse.Namespace) -> TrainConfig:
    """The run of a scope.

    Raises:
        ConfigError: the scope cannot be had with this model or layout.
    """
    model = model_of(workload, tiny=chosen.tiny)
    return TrainConfig.from_dict({
        "model": model, "parallel": layout.degrees,
        "fsdp": {"strategy": "optim_grads_params", "pool": chosen.pool},
        "graph": () if scope == EAGER else tuple(scope.split("+")),
        "backend": chosen.backend, "fp8": chosen.fp8, "dtype": "bf16",
        "microbatches": chosen.microbatches, "steps": 10**6, "flush_every": 10**6,
    })  # fmt: skip


def jobs(
    chosen: argparse.Namespace, room: Room, layouts: Sequence[Layout]
) -> Iterator[tuple[int, Job]]:
    """Every measurement with its round, in order; scopes that a model cannot have are left out.

    Args:
        chosen: the options.
        room: the ranks.
        layouts: those to measure; none: the usual one of each workload.
    """
    wanted: dict[tuple[str, str], dict[str, TrainConfig]] = {}
    for workload in chosen.workload:
        usual = usual_layout(room.num_ranks, has_experts="experts" in WORKLOADS[workload])
        for layout in layouts or [usual]:
            wanted[workload, layout.name] = configs_of(workload, layout, chosen)
    for number in range(chosen.rounds):
        for (workload, name), configs in wanted.items():
            for scope in configs if number % 2 == 0 else reversed(configs):
                yield number, Job(
                    workload, name, scope, configs[scope].to_dict(), room.num_ranks, chosen.steps,
                    room.devices, chosen.timeout_s,
                )  # fmt: skip


def configs_of(workload: str, layout: Layout, chosen: argparse.Namespace) -> dict[str, TrainConfig]:
    """The runs of the scopes that can be had; why others cannot is printed, once if none can."""
    found: dict[str, TrainConfig] = {}
    for scope in dict.fromkeys((EAGER, *chosen.only)):
        try:
            found[scope] = config_of(workload, layout, scope, chosen)
        except ConfigError as error:
            name = f"{workload} {layout.name}" + (f" {scope}" if scope != EAGER else "")
            print(f"{name}: not measured: {error}", flush=True)
            if scope == EAGER:
                return {}
    return {scope: found[scope] for scope in chosen.only if scope in found}


def table(found: Sequence[Result], *, shares_gpus: bool = False) -> list[str]:
    """A Markdown table, ratios against eager of the same workload and layout.

    Args:
        found: the results.
        shares_gpus: several ranks share a GPU: times are said to mean nothing, and have no ratio.
    """
    speed = "" if shares_gpus else " speed |"
    ms = f"ms ({MEANINGLESS})" if shares_gpus else "ms"
    head = (
        f"| workload | layout | scope | graphs | {ms} |{speed} allocated | of eager's | reserved "
    )
    head += "| of eager's | |"
    lines = [head, "| --- " * (head.count("|") - 1) + "|"]
    for place in dict.fromkeys((r.workload, r.layout, r.scope) for r in found):
        mine = [r for r in found if (r.workload, r.layout, r.scope) == place]
        peer = [r for r in found if (r.workload, r.layout, r.scope) == (*place[:2], EAGER)]
        lines.append(f"| {' | '.join(place)} | {_cells(mine, peer, has_speed=not shares_gpus)} |")
    return lines


def _cells(mine: Sequence[Result], peer: Sequence[Result], *, has_speed: bool) -> str:
    """What of a line of the table comes after its scope."""
    notes = [f"round {r.number + 1}: {r.error}" for r in mine if r.error]
    good, peer = [r for r in mine if not r.error], [r for r in peer if not r.error]
    if not good:
        return " | ".join([""] * (7 if has_speed else 6) + ["; ".join(notes)])
    ms, allocated, reserved = _middle(good), _most(good, "allocated"), _most(good, "reserved")
    speed, of_allocated, of_reserved = "", "", ""
    if peer:
        speed = f"{_middle(peer) / ms:.2f}"
        of_allocated = f"{allocated / (_most(peer, 'allocated') or 1):.2f}"
        of_reserved = f"{reserved / (_most(peer, 'reserved') or 1):.2f}"
    notes = [note for note in (wrong(good, peer), *notes) if note]
    cells = [str(good[0].graphs), f"{ms:.2f}", *([speed] if has_speed else [])]
    cells += [f"{allocated:.3f}", of_allocated, f"{reserved:.3f}", of_reserved, "; ".join(notes)]
    return " | ".join(cells)


def wrong(mine: Sequence[Result], peer: Sequence[Result]) -> str:
    """What of the losses differs from eager's, or empty."""
    for result in mine:
        for other in peer:
            pairs = zip(result.losses, other.losses, strict=True)
            step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if step is not None:
                return f"LOSS DIFFERS from step {step} on"
    return ""


def compared(found: Sequence[Result]) -> list[str]:
    """What is wrong with the losses of all measurements that went well, a line each."""
    good = [r for r in found if not r.error]
    lines = []
    for result in good:
        place = (result.workload, result.layout)
        peer = [r for r in good if (r.workload, r.layout) == place and r.scope == EAGER]
        if note := wrong([result], peer):
            lines.append(f"{result.workload} {result.layout} {result.scope}: {note}")
    return lines


def _middle(results: Sequence[Result]) -> float:
    return statistics.median([ms for result in results for ms in result.times_ms])


def _most(results: Sequence[Result], kind: str) -> float:
    return max(float(getattr(result, f"{kind}_gib")) for result in results)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.scopes", description=(__doc__ or "").splitlines()[0]
    )
    found.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    found.add_argument("--only", nargs="+", choices=SCOPES, default=list(SCOPES), metavar="SCOPE")
    found.add_argument("--backend", choices=("torch", "te"), default="torch")
    found.add_argument("--fp8", choices=("none", "delayed", "current", "block"), default="none")
    found.add_argument("--pool", choices=("double", "traced"), default="double")
    add_options(found)
    found.add_argument(
        "--parallel", nargs="+", metavar="DEGREES",
        help="layouts, each as a scenario's `parallel`: '{dp: 4, tp: 2, sequence_parallel: true}'",
    )  # fmt: skip
    found.add_argument("--microbatches", type=int, default=1, help="of a step")
    found.add_argument("--rounds", type=int, default=2)
    found.add_argument("--steps", type=int, default=20, help="timed steps a round")
    found.add_argument("--json", type=Path, help="all figures, written after each measurement")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="models for a laptop")
    found.add_argument("--timeout-s", type=float, default=120.0, help="of one measurement")
    found.add_argument("--deadline-s", type=float, default=540.0, help="begin nothing after it")
    return found


def find_layouts(chosen: argparse.Namespace) -> tuple[Room, tuple[Layout, ...]]:
    """The ranks and the layouts that the options ask for.

    Raises:
        UsageError: options that cannot be.
        NoGpus: too few for them.
    """
    ranks, layouts = chosen.ranks, tuple[Layout, ...]()
    if chosen.parallel:
        ranks, layouts = read_layouts(chosen.parallel)
        if chosen.ranks not in (None, ranks):
            raise UsageError(f"--ranks {chosen.ranks}: expected {ranks}, as --parallel says")
    return find_room(chosen.device, ranks, chosen.ranks_per_gpu), layouts


def run_all(
    chosen: argparse.Namespace, room: Room, layouts: Sequence[Layout], found: list[Result]
) -> None:
    """Run all measurements; each is printed, and added to `found` and the JSON, as it ends."""
    began = time.monotonic()
    for number, job in jobs(chosen, room, layouts):
        left = chosen.deadline_s - (time.monotonic() - began)
        if left < MIN_TIMEOUT_S:
            error = "not run: out of time"
            found.append(Result(job.workload, job.layout, job.scope, number, error=error))
        else:
            result = measure(replace(job, timeout_s=min(job.timeout_s, left)), number)
            if result.error and result.seconds >= left:
                error = f"cut off by --deadline-s {chosen.deadline_s:g}: {result.error}"
                result = replace(result, error=error)
            found.append(result)
        lines = table(found[-1:], shares_gpus=room.shares_gpus)[2:]
        print(f"round {number + 1}", *lines, flush=True)
        if chosen.json is not None:
            document = environment(chosen, room, found) | {"results": [asdict(r) for r in found]}
            write_atomic(chosen.json, json.dumps(document, indent=1) + "\n")


def environment(chosen: argparse.Namespace, room: Room, found: Sequence[Result]) -> dict[str, Any]:
    """Where and how the figures were taken. This process keeps off the device itself."""
    return {
        "device": next((r.device for r in found if r.device), chosen.device),
        **room.described(),
        "backend": chosen.backend, "fp8": chosen.fp8, "pool": chosen.pool,
        "microbatches": chosen.microbatches, "torch": torch.__version__, "tiny": chosen.tiny,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code."""
    try:
        chosen = parser().parse_args(arguments)
    except SystemExit as error:
        return 4 if error.code else 0
    try:
        room, layouts = find_layouts(chosen)
    except (UsageError, NoGpus) as error:
        print(error, file=sys.stderr)
        return 4 if isinstance(error, UsageError) else 6
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    interrupt_when_terminated()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.scopes.measure"])
    found, problems = list[Result](), list[str]()
    try:
        run_all(chosen, room, layouts, found)
    except KeyboardInterrupt:
        problems.append("interrupted: what is missing above was not measured")
    about = environment(chosen, room, found)
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items() if value))
    print(*table(found, shares_gpus=room.shares_gpus), sep="\n")
    for what, wanted, had in (
        ("workload", chosen.workload, {r.workload for r in found}),
        ("layout", [layout.name for layout in layouts], {r.layout for r in found}),
    ):
        problems += [f"{what} {name}: nothing was measured" for name in wanted if name not in had]
    problems += compared(found)
    if EAGER not in chosen.only:
        print("losses were compared with nothing: eager was not measured")
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems) or any(r.error for r in found))


if __name__ == "__main__":
    sys.exit(main())
