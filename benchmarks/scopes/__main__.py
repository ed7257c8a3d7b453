"""Step time and memory of each graph scope beside eager, in one run.

    python -m benchmarks.scopes                                  both workloads, all scopes
    python -m benchmarks.scopes --workload launch --only eager full_iteration
    python -m benchmarks.scopes --device cpu --tiny              the flow, without a GPU

Every scope trains the same model on the same data from the same weights, through the trainer that
the harness runs. Each measurement has fresh processes, the order alternates between rounds; times
are of whole steps, optimizer included, on the slowest rank, after the capture. Memory is the most
that torch's allocator held over the whole run, capture included. Losses of all steps must have
eager's bits: a scope that is fast and wrong is a failure.

Exit codes: 0, 1 (a scope failed, or has other bits than eager), 4 (usage), 6 (no GPUs).
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

from benchmarks.scopes.measure import Job, Result, measure
from fsdp_core.config import ConfigError, TrainConfig

EAGER = "eager"
SCOPES = (
    EAGER, "attn", "moe_router", "attn+moe_router", "attn+moe_router+moe_preprocess", "attn+moe",
    "mlp", "attn+mlp", "layer", "full_iteration",
)  # fmt: skip
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
TINY: dict[str, Any] = {
    "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 256, "seq": 32,
}  # fmt: skip
TINY_WIDTHS = {"ffn": 128, "expert_ffn": 32, "experts": 4}
MICROBATCHES = 1


def model_of(workload: str, *, tiny: bool) -> dict[str, Any]:
    """Shapes of a workload, or small ones of the same kind."""
    model = WORKLOADS[workload]
    if not tiny:
        return model
    return model | TINY | {key: TINY_WIDTHS[key] for key in TINY_WIDTHS if key in model}


def config_of(workload: str, scope: str, chosen: argparse.Namespace) -> TrainConfig:
    """The run of a scope.

    Raises:
        ConfigError: the scope cannot be had with this model or layout.
    """
    model = model_of(workload, tiny=chosen.tiny)
    ranks = chosen.ranks
    parallel = {"dp": ranks} | ({"ep": ranks} if model.get("experts") else {})
    return TrainConfig.from_dict({
        "model": model, "parallel": parallel,
        "fsdp": {"strategy": "optim_grads_params", "pool": chosen.pool},
        "graph": () if scope == EAGER else tuple(scope.split("+")),
        "backend": chosen.backend, "fp8": chosen.fp8, "dtype": "bf16",
        "microbatches": MICROBATCHES, "steps": 10**6, "flush_every": 10**6,
    })  # fmt: skip


def jobs(chosen: argparse.Namespace) -> Iterator[tuple[int, Job]]:
    """Every measurement with its round, in order; scopes that a model cannot have are left out."""
    for number in range(chosen.rounds):
        for workload in chosen.workload:
            for scope in chosen.only if number % 2 == 0 else reversed(chosen.only):
                try:
                    config = config_of(workload, scope, chosen)
                except ConfigError as error:
                    if number == 0:
                        print(f"{workload} {scope}: not measured: {error}")
                    continue
                yield number, Job(
                    workload, scope, config.to_dict(), chosen.ranks, chosen.steps, chosen.device,
                    chosen.timeout_s,
                )  # fmt: skip


def table(found: Sequence[Result]) -> list[str]:
    """A Markdown table, ratios against eager of the same workload."""
    head = "| workload | scope | graphs | ms | speed | allocated | of eager's | reserved "
    head += "| of eager's | |"
    lines = [head, "| --- " * 10 + "|"]
    for workload, scope in dict.fromkeys((r.workload, r.scope) for r in found):
        mine = [r for r in found if (r.workload, r.scope) == (workload, scope)]
        peer = [r for r in found if (r.workload, r.scope) == (workload, EAGER) and not r.error]
        good = [r for r in mine if not r.error]
        if not good:
            lines.append(f"| {workload} | {scope} |" + " |" * 7 + f" {mine[0].error} |")
            continue
        ms, allocated, reserved = _middle(good), _most(good, "allocated"), _most(good, "reserved")
        ratios = ["", "", ""]
        if peer:
            of = (_middle(peer) / ms, allocated / (_most(peer, "allocated") or 1),
                  reserved / (_most(peer, "reserved") or 1))  # fmt: skip
            ratios = [f"{ratio:.2f}" for ratio in of]
        note = wrong(good, peer)
        lines.append(
            f"| {workload} | {scope} | {good[0].graphs} | {ms:.2f} | {ratios[0]} "
            f"| {allocated:.3f} | {ratios[1]} | {reserved:.3f} | {ratios[2]} | {note} |"
        )
    return lines


def wrong(mine: Sequence[Result], peer: Sequence[Result]) -> str:
    """What of the losses differs from eager's, or empty."""
    for result in mine:
        for other in peer:
            pairs = zip(result.losses, other.losses, strict=True)
            step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if step is not None:
                return f"LOSS DIFFERS from step {step} on"
    return ""


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
    found.add_argument("--ranks", type=int, help="default: all GPUs up to 4, on the CPU 2")
    found.add_argument("--rounds", type=int, default=2)
    found.add_argument("--steps", type=int, default=20, help="timed steps a round")
    found.add_argument("--json", type=Path, help="all figures, written after each measurement")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="models for a laptop")
    found.add_argument("--timeout-s", type=float, default=120.0, help="of one measurement")
    found.add_argument("--deadline-s", type=float, default=540.0, help="begin nothing after it")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code."""
    try:
        chosen = parser().parse_args(arguments)
    except SystemExit as error:
        return 4 if error.code else 0
    gpus = torch.cuda.device_count() if chosen.device == "cuda" else 0
    chosen.ranks = chosen.ranks or (min(gpus, 4) if chosen.device == "cuda" else 2)
    if chosen.device == "cuda" and not 0 < chosen.ranks <= gpus:
        print(f"needs {max(chosen.ranks, 1)} GPUs, found {gpus}", file=sys.stderr)
        return 6
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.scopes.measure"])
    began, found = time.monotonic(), list[Result]()
    for number, job in jobs(chosen):
        left = chosen.deadline_s - (time.monotonic() - began)
        if left < chosen.timeout_s / 4:
            found.append(Result(job.workload, job.scope, number, "not run: out of time"))
        else:
            found.append(measure(replace(job, timeout_s=min(job.timeout_s, left)), number))
        print(f"round {number + 1}", *table(found[-1:])[2:], flush=True)
        if chosen.json is not None:
            document = [asdict(result) for result in found]
            chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    device = next((r.device for r in found if r.device), chosen.device)
    print(f"\n{device}, {chosen.ranks} ranks, backend {chosen.backend}, fp8 {chosen.fp8}, "
          f"torch {torch.__version__}")  # fmt: skip
    lines = table(found)
    print(*lines, sep="\n")
    return int(any(r.error for r in found) or any("DIFFERS" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
