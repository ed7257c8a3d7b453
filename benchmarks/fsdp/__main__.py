"""Step time and memory of sharded training: ours, torch FSDP2, megatron-fsdp, no communication.

    python -m benchmarks.fsdp [--workload NAME ...] [--only ENGINE ...] [--reduce bf16|fp32]
    python -m benchmarks.fsdp --ranks 8 --ranks-per-gpu 4            8 ranks on 2 GPUs, untimed
    python -m benchmarks.fsdp --workload linear cnn transformer      eager and compiled, small
    python -m benchmarks.fsdp --trace step.json                      how well communication hides
    python -m benchmarks.fsdp --device cpu --tiny                    the flow, without a GPU

Every engine trains the same modules on the same data from the same weights: bf16 compute, float32
main weights, fused AdamW, gradients reduced in one dtype. Each measurement has fresh processes, the
order alternates between rounds, times are of CUDA events on the slowest rank, over all rounds.
Memory is the most that torch's allocator held over the timed steps, what it had cached included.
`speed` and the ratio of reserved memory are against torch FSDP2, compiled against compiled. Ranks
that share a GPU show that so many ranks run, over NCCL; their times mean nothing and are so marked.

Exit codes: 0, 1 (one of ours has failed, has another loss than FSDP2, or FSDP2 has none to compare
with; nothing was measured), 4 (usage), 6 (no GPUs).
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
from benchmarks.ranks import interrupt_when_terminated
from benchmarks.room import NoGpus, Room, add_options, find_room
from harness.errors import UsageError
from harness.store.files import write_atomic

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
    add_options(found)
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


def jobs(chosen: argparse.Namespace, room: Room) -> Iterator[tuple[int, Job]]:
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
                        ranks=room.num_ranks,
                        steps=chosen.steps or sizes[workload].steps,
                        reduce=chosen.reduce,
                        devices=room.devices,
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


def measure(chosen: argparse.Namespace, room: Room, found: list[Result]) -> None:
    """Run all measurements; each is printed, and added to `found` and the JSON, as it ends."""
    began = time.monotonic()
    for number, job in jobs(chosen, room):
        left = chosen.deadline_s - (time.monotonic() - began)
        if left < MIN_TIMEOUT_S:
            found.append(Result(job.workload, job.engine, number, 0.0, "not run: out of time"))
        else:
            found.append(run_until(chosen.deadline_s, left, job, number))
        last = found[-1]
        lines = table(rows([last]), shares_gpus=room.shares_gpus)[2:]
        print(f"round {number + 1} {last.seconds:5.1f} s {last.workload}", *lines, flush=True)
        if chosen.json is not None:
            document = environment(chosen, room, found) | {
                "results": [asdict(result) for result in found]
            }
            write_atomic(chosen.json, json.dumps(document, indent=1) + "\n")


def run_until(deadline_s: float, left_s: float, job: Job, number: int) -> Result:
    """Run `job`, but no longer than is left; an end that the deadline made is called so."""
    result = run(replace(job, timeout_s=min(job.timeout_s, left_s)), number)
    if result.error and result.seconds >= left_s:
        return replace(result, error=f"cut off by --deadline-s {deadline_s:g}: {result.error}")
    return result


def trace(chosen: argparse.Namespace, room: Room) -> bool:
    """Write a chrome trace for each engine, print what is in it; whether all went well."""
    path: Path = chosen.trace.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    went_well = True
    for _, job in jobs(chosen, room):
        file = path.with_name(f"{path.stem}.{job.workload}.{job.engine}{path.suffix or '.json'}")
        result = run(replace(job, trace=str(file)), 0)
        print(f"{job.workload} {job.engine}: {result.error or file}")
        went_well &= result.error is None
        if result.error is None:
            summary = summarise(json.loads(file.read_text())["traceEvents"])
            print(*(f"  {line}" for line in described(summary)), sep="\n", flush=True)
    return went_well


def environment(chosen: argparse.Namespace, room: Room, found: Sequence[Result]) -> dict[str, Any]:
    """Where and how the figures were taken. This process keeps off the device itself."""
    return {
        "device": next((result.device for result in found if result.device), chosen.device),
        **room.described(),
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
    try:
        room = find_room(chosen.device, chosen.ranks, chosen.ranks_per_gpu)
    except (UsageError, NoGpus) as error:
        print(error, file=sys.stderr)
        return 4 if isinstance(error, UsageError) else 6
    if chosen.trace is not None:
        chosen.rounds = 1
    # For the ranks, which inherit it: they are on one machine, share its processors, and are forked
    # from a process in which no import may touch the driver.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    interrupt_when_terminated()
    start_server()
    if chosen.trace is not None:
        return 0 if trace(chosen, room) else 1
    found, was_cut = list[Result](), False
    try:
        measure(chosen, room, found)
    except KeyboardInterrupt:
        was_cut = True
    tell(chosen, room, found)
    wrong = failures(found)
    if wrong:
        print(f"\nfailed: {', '.join(wrong)}")
    if was_cut:
        print("\ninterrupted: what is missing above was not measured")
    return 1 if wrong or was_cut or not found else 0


def tell(chosen: argparse.Namespace, room: Room, found: Sequence[Result]) -> None:
    """Print where the figures were taken, and all of them as a table."""
    about = environment(chosen, room, found)
    print("\n" + ", ".join(f"{key} {value}" for key, value in about.items() if value))
    for workload in dict.fromkeys(result.workload for result in found):
        print(f"{workload} is {(TINY if chosen.tiny else FULL)[workload].about}")
    print(*table(rows(found), shares_gpus=room.shares_gpus), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
