"""Ranks of one measurement: fresh processes, ended whatever happens, and what they wrote.

    run_ranks   starts them, waits, and says what went wrong and where
    enter       a rank's first words: its log, its device, its process group

What one program leaves in memory, in NCCL or in torch.compile's caches is not the next one's, so
each measurement has ranks of its own, forked from a server that has torch imported and no device
touched. A rank that raises, dies or hangs becomes an error in words.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.engine.machine import gpu_environment

EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Refused|Interrupt|Unsupported)\b")
MAX_LOG_CHARS = 8000
STACKS_BEFORE_S = 3.0
GIB = 2**30
IDLE_BYTES, IDLE_WAIT_S = 4 * GIB, 30.0
CONTEXT_BYTES = GIB
"""At most what a rank that shares the GPU holds before all have met."""


def run_ranks(
    target: Callable[..., None], arguments: tuple[Any, ...], ranks: int, *, folder: Path,
    timeout_s: float,
) -> tuple[str | None, str]:  # fmt: skip
    """Call `target(*arguments, rank)` in `ranks` processes; none of them is left.

    Args:
        folder: where ranks write `rank<n>.log`.

    Returns:
        What went wrong, or None, and the end of the log of the rank at fault.
    """
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = [
        context.Process(target=target, args=(*arguments, rank), name=f"rank {rank}")
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        failed = _first_failure(processes, timeout_s)
        if failed is None:
            return None, ""
        log = _read_log(folder / f"rank{processes.index(failed)}.log")
        if failed.exitcode is None:
            return f"{failed.name} hung: no end after {timeout_s:.0f} s", log
        return f"{failed.name} ended with {failed.exitcode}: {_telling_line(log)}", log
    finally:
        _end(processes)


def enter(
    rank: int, ranks: int, *, devices: Sequence[str], folder: Path, timeout_s: float
) -> torch.device:
    """Make this process rank `rank`; what goes wrong ends up, as its last line, in its log.

    Shortly before `timeout_s` a rank that is still there writes its stacks to its log.

    Args:
        devices: GPU of each rank, by its number among those that are seen; empty on the CPU.
    """
    os.setsid()  # so that a hung rank can be ended with all that it started
    _redirect_output(folder / f"rank{rank}.log")
    faulthandler.dump_traceback_later(max(1.0, timeout_s - STACKS_BEFORE_S), file=sys.stderr)
    if devices:
        device = _take_gpu(rank, devices)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def interrupt_when_terminated() -> None:
    """Let SIGTERM do what Ctrl-C does: ranks are ended, and what was measured is told."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def settle(device: torch.device) -> None:
    """Wait for this rank's device, then for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
    else:
        dist.barrier()


def _first_failure(processes: Sequence[BaseProcess], timeout_s: float) -> BaseProcess | None:
    """The first process to fail, or one that has not ended in time, or None."""
    deadline = time.monotonic() + timeout_s
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ended = multiprocessing.connection.wait(list(waiting), left)
        if not ended:
            return next(iter(waiting.values()))
        for sentinel in ended:
            assert isinstance(sentinel, int)
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode:
                return process
    return None


def _end(processes: Sequence[BaseProcess]) -> None:
    """Kill what is left, each rank with its own children, and reap it."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # a rank that has no session of its own yet
    for process in processes:
        if process.pid is not None:
            process.join()


def _read_log(path: Path) -> str:
    return path.read_text(errors="replace")[-MAX_LOG_CHARS:] if path.exists() else ""


def _telling_line(log: str) -> str:
    """The last line that an exception begins, or else the last line."""
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    raised = [line for line in lines if EXCEPTION.match(line)]
    return (raised or lines or ["nothing was said"])[-1]


def _redirect_output(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _take_gpu(rank: int, devices: Sequence[str]) -> torch.device:
    """The GPU of this process; if it is shared, NCCL is told of a host apart."""
    environment = gpu_environment(devices, rank)
    # What is seen stays as it is: the numbers count within it.
    environment.pop("CUDA_VISIBLE_DEVICES")
    os.environ.update(environment)
    device = torch.device("cuda", int(environment["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    _await_idle(device, others=devices.count(devices[rank]) - 1)
    return device


def _await_idle(device: torch.device, *, others: int) -> None:
    """Wait for what earlier processes held to be given back; `others` ranks share the GPU.

    Raises:
        RuntimeError: somebody keeps using the GPU.
    """
    deadline = time.monotonic() + IDLE_WAIT_S
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if total - free < IDLE_BYTES + others * CONTEXT_BYTES:
            return
        if time.monotonic() > deadline:
            used = (total - free) / GIB
            raise RuntimeError(f"Expected an idle {device}, got {used:.1f} GiB in use by others.")
        time.sleep(0.2)
