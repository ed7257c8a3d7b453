"""Warm ranks for distributed tests: started once, each call in a process group of its own.

    test -> RankPool.run(function, world_size=n, args=...) -> ranks 0..n-1
         <- one result a rank, or `RankError` with the traceback of the first rank that failed

A rank is a process with torch imported and one thread, forked from a server that has never used
torch. For each call the ranks join a fresh gloo group of exactly `world_size`, so a test sees its
own world and nobody else's. Ranks with GPUs join one NCCL group, once, and serve its size alone:
in torch 2.11 a process that left a default group crashes as it splits the next, and
TransformerEngine reduces the amaxes of dead models over all ranks, so that ranks of different
pasts would wait for each other for ever. The function travels as module and name:
it is a plain function at the top of an importable module; arguments and results are pickled. After
a failure, a hang or a death every rank is replaced, so one test's wreck is not the next one's
start; so it is once a rank has gathered many threads.
"""

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engine.machine import gpu_environment, shared

if TYPE_CHECKING:
    import torch

START_TIMEOUT_S = 120.0
GRACE_S = 1.0  # for the other ranks to answer, once one has failed
MOST_THREADS = 100
"""Of a rank: gloo keeps threads of every group that was left, and hundreds of them are slow."""
STACKS_SIGNAL = signal.SIGUSR1


class RankError(AssertionError):
    """A rank raised, died or did not answer; the message holds its traceback.

    Attributes:
        rank: the first rank that failed.
        kind: name of the exception's type, or `died`, or `hang`.
        exit_code: of a rank that died; negative: the signal that ended it.
    """

    def __init__(self, rank: int, kind: str, text: str, exit_code: int = 0) -> None:
        super().__init__(f"rank {rank}: {kind}\n{text}")
        self.rank = rank
        self.kind = kind
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Task:
    module: str
    name: str
    args: tuple[Any, ...]
    world_size: int
    store_path: str
    timeout_s: float
    device: str
    ranks_per_gpu: int


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    kind: str = ""
    text: str = ""
    at: float = 0.0
    num_threads: int = 0
    exit_code: int = 0


@dataclass
class _Rank:
    process: Any
    pipe: "connection.Connection[Any, Any]"


class RankPool:
    """Up to `num_ranks` warm ranks. Not for use from several threads.

    Args:
        num_ranks: the largest world; ranks start when a call first needs them.
        timeout_s: default limit of a call.
        device: `cpu`, or `cuda`, where each rank has a GPU or a share of one.
        ranks_per_gpu: of a `cuda` pool; ranks that share a GPU are of different hosts to NCCL.
    """

    def __init__(
        self, num_ranks: int, timeout_s: float = 60.0, device: str = "cpu", ranks_per_gpu: int = 1
    ) -> None:
        self.num_ranks = num_ranks
        self.device = device
        self.ranks_per_gpu = ranks_per_gpu
        self.timeout_s = timeout_s
        self.starts = 0
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0
        # Inherited by the fork server: one thread a rank, and gloo on the loopback device.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "torch.distributed.checkpoint", "fsdp_core.fsdp", __name__]
        )

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call `function(*args)` on ranks 0..world_size-1 and return their results in order.

        Raises:
            RankError: a rank raised, died, or did not answer within `timeout_s`.
            ValueError: world size out of range, or a function that cannot travel by name.
        """
        if not 1 <= world_size <= self.num_ranks:
            raise ValueError(f"Expected world_size in 1..{self.num_ranks}, got {world_size}.")
        if "<" in function.__qualname__ or "." in function.__qualname__:
            raise ValueError(f"Expected a function at the top of a module, got {function}.")
        if self.device == "cuda" and len(self._ranks) != world_size:
            self.stop()
        self._start(world_size)
        self._calls += 1
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        task = _Task(
            module=function.__module__,
            name=function.__name__,
            args=args,
            world_size=world_size,
            store_path=f"{self._folder.name}/store{self._calls}",
            timeout_s=limit_s,
            device=self.device,
            ranks_per_gpu=self.ranks_per_gpu,
        )
        message = pickle.dumps(task)
        for rank in self._ranks[:world_size]:
            rank.pipe.send_bytes(message)
        try:
            return self._collect(world_size, limit_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill every rank; the next call starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks = []

    def close(self) -> None:
        """Kill every rank and remove the rendezvous files."""
        self.stop()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run now."""
        return [rank.process.pid for rank in self._ranks]

    def _start(self, world_size: int) -> None:
        fresh = range(len(self._ranks), world_size)
        for number in fresh:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(number, theirs, self._folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))
            self.starts += 1
        for number in fresh:
            if not self._ranks[number].pipe.poll(START_TIMEOUT_S):
                self.stop()
                raise RankError(number, "hang", f"did not start within {START_TIMEOUT_S} s")
            self._ranks[number].pipe.recv_bytes()

    def _collect(self, world_size: int, limit_s: float) -> list[Any]:
        """Answers of all ranks; once one has failed the others get a short grace."""
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < world_size:
            waiting = {self._ranks[r].pipe: r for r in range(world_size) if r not in answers}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                answer = self._receive(waiting[pipe])
                answers[waiting[pipe]] = answer
                if answer.kind:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                break
        failed = [(a.at, rank) for rank, a in answers.items() if a.kind]
        if failed:
            first = min(failed)[1]
            answer = answers[first]
            raise RankError(first, answer.kind, answer.text, answer.exit_code)
        silent = [rank for rank in range(world_size) if rank not in answers]
        if silent:
            text = f"no answer within {limit_s} s from ranks {silent}\n{self._stacks(silent)}"
            raise RankError(silent[0], "hang", text)
        if max(answer.num_threads for answer in answers.values()) > MOST_THREADS:
            self.stop()
        return [answers[rank].value for rank in range(world_size)]

    def _receive(self, number: int) -> _Answer:
        rank = self._ranks[number]
        try:
            answer = pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            rank.process.join()
            # No time of its own: a death comes before the errors of those that it left alone.
            code = rank.process.exitcode
            text = f"exit code {code}\n{self._stack_text(number)}"
            return _Answer(kind="died", text=text, exit_code=code)
        assert isinstance(answer, _Answer)
        return answer

    def _stacks(self, silent: Sequence[int]) -> str:
        for number in silent:
            os.kill(self._ranks[number].process.pid, STACKS_SIGNAL)
        # The handler runs at once, in C; a rank that died instead ends the wait.
        connection.wait([self._ranks[n].process.sentinel for n in silent], timeout=0.2)
        return "\n".join(f"rank {n}:\n{self._stack_text(n)}" for n in silent)

    def _stack_text(self, number: int) -> str:
        """What a rank's fault handler has written: where it was when asked, or when it crashed."""
        return Path(self._folder.name, f"stacks{number}").read_text()


def _serve(number: int, pipe: "connection.Connection[Any, Any]", folder: str) -> None:
    """Body of a rank's process: answer tasks until the pipe closes."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test session's own interrupt ends us
    stacks = Path(folder, f"stacks{number}").open("w")  # noqa: SIM115  (open for life)
    faulthandler.enable(file=stacks)  # a crash in C names its Python frame
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    _die_with_parent()
    # What was imported is no garbage: every capture collects it, which took longer than to capture.
    gc.freeze()
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        answer = _answer(number, message)
        answer = replace(answer, num_threads=_num_threads())
        try:
            data = pickle.dumps(answer)
        except Exception:  # noqa: BLE001  (whatever a result's own pickling raises)
            data = pickle.dumps(_failure())
        pipe.send_bytes(data)


def _answer(number: int, message: bytes) -> _Answer:
    import torch.distributed as dist

    try:
        task = pickle.loads(message)
        function = getattr(importlib.import_module(task.module), task.name)
        if not dist.is_initialized():
            gpu = _own_gpu(number, task) if task.device == "cuda" else None
            dist.init_process_group(
                "gloo" if gpu is None else "nccl",
                device_id=gpu,
                store=dist.FileStore(task.store_path, task.world_size),
                rank=number,
                world_size=task.world_size,
                timeout=timedelta(seconds=task.timeout_s),
            )
    except BaseException:  # noqa: BLE001  (a rank reports whatever ended its function)
        return _failure()
    try:
        value = function(*task.args)
        # Nobody leaves while another rank may still talk to it.
        dist.barrier()
        answer = _Answer(value=value)
    except BaseException:  # noqa: BLE001  (as above)
        # Noted before the group is left, which makes the other ranks fail too, later.
        answer = _failure()
    _leave_groups(keep_default=task.device == "cuda")
    return answer


def _leave_groups(keep_default: bool) -> None:
    import torch.distributed as dist

    if "torch.distributed.tensor" in sys.modules:
        # DTensor keeps results by mesh; the next call's mesh is equal, and its groups are others.
        from torch.distributed.tensor import _redistribute, debug

        getattr(debug, "_clear_sharding_prop_cache", int)()
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", int)()
    if not keep_default:
        dist.destroy_process_group()
        return
    default = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)


def _own_gpu(number: int, task: _Task) -> "torch.device":
    """The rank's GPU, made the current one."""
    import torch

    visible = [str(index) for index in range(torch.cuda.device_count())]
    devices = shared(visible, task.ranks_per_gpu)[: task.world_size]
    environment = gpu_environment(devices, number)
    # CUDA has looked already, and every process of the pool sees every GPU.
    environment.pop("CUDA_VISIBLE_DEVICES")
    os.environ.update(environment)
    gpu = torch.device("cuda", int(environment["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    return gpu


def _num_threads() -> int:
    """Threads of this process, those of libraries included; 0 where the system has no /proc."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _failure() -> _Answer:
    kind = sys.exc_info()[0]
    assert kind is not None
    return _Answer(kind=kind.__name__, text=traceback.format_exc(), at=time.time())


def _die_with_parent() -> None:
    """End this process when its parent's sentinel pipe closes, whatever its main thread does."""
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
