"""Step time and memory of sharded training: ours, torch FSDP2, megatron-fsdp, no communication.

    python -m benchmarks.fsdp [--workload NAME ...] [--only ENGINE ...] [--reduce bf16|fp32]
    python -m benchmarks.fsdp --workload linear cnn transformer      eager and compiled, small
    python -m benchmarks.fsdp --trace step.json                      how well communication hides
    python -m benchmarks.fsdp --device cpu --tiny                    the flow, without a GPU

Every engine trains the same modules on the same data from the same weights: bf16 compute, float32
main weights, fused AdamW, gradients reduced in one dtype. Each measurement has fresh processes, the
order alternates between rounds, times are of CUDA events on the slowest rank, over all rounds.
Memory is the most that torch's allocator held over the timed steps, what it had cached included.
`speed` and the ratio of reserved memory are against torch FSDP2, compiled against compiled.

Exit codes: 0, 1 (one of ours has failed or has another loss than FSDP2), 4 (usage), 6 (no GPUs).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.fsdp.engines import ENGINES, OF_WORKLOAD
from benchmarks.fsdp.launch import Result, run, start_server
from benchmarks.fsdp.measure import Job
from benchmarks.fsdp.report import rows, table
from benchmarks.fsdp.trace import described, summarise
from benchmarks.fsdp.workloads import FULL, TINY

TRACED = ("ours", "fsdp2")
MIN_TIMEOUT_S = 20.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.fsdp", description=(__doc__ or "").splitlines()[0]
    )
    found.add_argument("--workload", nargs="+", choices=list(FULL), default=["stack", "decoder"])
    found.add_argument("--only", nargs="+", choices=list(ENGINES), help="these engines")
    found.add_argument("--no-compiled", action="store_true", help="leave out compiled engines")
    found.add_argument("--reduce", choices=("bf16", "fp32"), default="bf16")
    found.add_argument("--ranks", type=int, help="default: 4, on the CPU 2")
    found.add_argument("--rounds", type=int, default=2)
    found.add_argument("--steps", type=int, help="timed steps a round; default: by workload")
    found.add_argument("--json", type=Path, help="all figures, written after each measurement")
    found.add_argument("--trace", type=Path, help="profile one step of ours and FSDP2 instead")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="models for a laptop")
    found.add_argument("--compile-backend", default="inductor")
    found.add_argument("--timeout-s", type=float, default=150.0, help="of one measurement")
    found.add_argument("--deadline-s", type=float, default=540.0, help="begin nothing after it")
    return found


def jobs(chosen: argparse.Namespace) -> Iterator[tuple[int, Job]]:
    """Every measurement with its round, in order."""
    sizes = TINY if chosen.tiny else FULL
    for number in range(chosen.rounds):
        for workload in chosen.workload:
            engines = [name for name in OF_WORKLOAD[workload] if wanted(name, chosen)]
            for engine in engines if number % 2 == 0 else reversed(engines):
                yield (
                    number,
                    Job(
                        workload=workload,
                        engine=engine,
                        ranks=chosen.ranks,
                        steps=chosen.steps or sizes[workload].steps,
                        reduce=chosen.reduce,
                        device=chosen.device,
                        tiny=chosen.tiny,
                        compile_backend=chosen.compile_backend,
                        folder="",
                        timeout_s=chosen.timeout_s,
                    ),
                )


def wanted(engine: str, chosen: argparse.Namespace) -> bool:
    """Whether the command line asks for `engine`."""
    if chosen.only is not None:
        return engine in chosen.only
    if chosen.trace is not None:
        return engine in TRACED
    return not (chosen.no_compiled and ENGINES[engine].compiled)


def measure(chosen: argparse.Namespace) -> list[Result]:
    """Run all measurements; prints each as it ends."""
    began, found = time.monotonic(), []
    for number, job in jobs(chosen):
        left = chosen.deadline_s - (time.monotonic() - began)
        if left < MIN_TIMEOUT_S:
            found.append(Result(job.workload, job.engine, number, 0.0, "not run: out of time"))
        else:
            found.append(run(replace(job, timeout_s=min(job.timeout_s, left)), number))
        last = found[-1]
        print(f"round {number + 1} {last.seconds:5.1f} s", *table(rows([last]))[2:], flush=True)
        if chosen.json is not None:
            document = environment(chosen, found) | {
                "results": [asdict(result) for result in found]
            }
            chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    return found


def trace(chosen: argparse.Namespace) -> bool:
    """Write a chrome trace for each engine, print what is in it; whether all went well."""
    path: Path = chosen.trace.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    went_well = True
    for _, job in jobs(chosen):
        file = path.with_name(f"{path.stem}.{job.workload}.{job.engine}{path.suffix or '.json'}")
        result = run(replace(job, trace=str(file)), 0)
        print(f"{job.workload} {job.engine}: {result.error or file}")
        went_well &= result.error is None
        if result.error is None:
            summary = summarise(json.loads(file.read_text())["traceEvents"])
            print(*(f"  {line}" for line in described(summary)), sep="\n", flush=True)
    return went_well


def environment(chosen: argparse.Namespace, found: Sequence[Result]) -> dict[str, Any]:
    """Where and how the figures were taken. This process keeps off the device itself."""
    return {
        "device": next((result.device for result in found if result.device), chosen.device),
        "ranks": chosen.ranks,
        "torch": torch.__version__,
        "reduce": chosen.reduce,
        "tiny": chosen.tiny,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }


def failures(found: Sequence[Result]) -> list[str]:
    """Our engines that have failed, or have another loss than their peer."""
    return [
        f"{row.workload} {row.engine}"
        for row in rows(found)
        if ENGINES[row.engine].is_ours and not row.is_right
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code."""
    try:
        chosen = parser().parse_args(arguments)
    except SystemExit as error:
        return 4 if error.code else 0
    chosen.ranks = chosen.ranks or (4 if chosen.device == "cuda" else 2)
    if chosen.device == "cuda" and torch.cuda.device_count() < chosen.ranks:
        print(f"needs {chosen.ranks} GPUs, found {torch.cuda.device_count()}", file=sys.stderr)
        return 6
    if chosen.trace is not None:
        chosen.rounds = 1
    # For the ranks, which inherit it: they are on one machine, share its processors, and are forked
    # from a process in which no import may touch the driver.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    start_server()
    if chosen.trace is not None:
        return 0 if trace(chosen) else 1
    found = measure(chosen)
    about = environment(chosen, found)
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items() if value))
    for workload in dict.fromkeys(result.workload for result in found):
        print(f"{workload} is {(TINY if chosen.tiny else FULL)[workload].about}")
    print(*table(rows(found)), sep="\n")
    wrong = failures(found)
    if wrong:
        print(f"\nfailed: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
