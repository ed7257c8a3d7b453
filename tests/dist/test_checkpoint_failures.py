"""Checkpoints whatever fails or dies: complete or absent, known to all, the last one intact."""

import contextlib
import ctypes
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.checkpoint import CheckpointError, files, latest, load, save
from tests.dist.fsdp_sides import differences
from tests.dist.rank_pool import RankPool
from tests.dist.test_checkpoint import (
    OPTIMIZERS,
    build,
    fill,
    fill_and_save,
    misses,
    snapshot,
    train,
)

LIMIT_S = 120.0
_PR_SET_PDEATHSIG = 1


class FreshProcess:
    """Calls functions, each in a process of its own. Starts with the first call.

    Args:
        modules: imported before any call.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._started: tuple[Any, Any] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns; both travel by pickle.

        Raises:
            AssertionError: it raised, died, or did not answer within `LIMIT_S`.
        """
        if self._started is None:
            context = get_context("forkserver")
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._modules), daemon=True)
            process.start()
            theirs.close()
            self._started = process, pipe
        pipe = self._started[1]
        try:
            pipe.send((function, args))
            assert pipe.poll(LIMIT_S), f"{function.__name__} did not answer within {LIMIT_S} s"
            value, error = pipe.recv()
        except BaseException:
            self.close()
            raise
        assert not error, error
        return value

    def close(self) -> None:
        if self._started is not None:
            process, pipe = self._started
            process.kill()
            process.join()
            pipe.close()
            self._started = None


def fork_each(function: Callable[[int], Any], num: int) -> list[int]:
    """Call `function(0)`, ... in `num` processes at once; their exit codes, -n if signal n did it.

    For a process with one thread. An exception is printed and makes the code 1.
    """
    pids = []
    for number in range(num):
        pid = os.fork()
        if not pid:
            _end_with(function, number)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _end_with(function: Callable[[int], Any], number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        function(number)
    except BaseException:  # noqa: BLE001  (whatever it was, this copy of the caller ends here)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(pipe: Any, modules: tuple[str, ...]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test session's own interrupt ends us
    # The math library's idle threads count as threads: 3.12 warns, and they are of no matter.
    warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
    torch.set_num_threads(1)
    for name in modules:
        importlib.import_module(name)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        code = fork_each(partial(_answer, pipe, task), 1)[0]
        if code:
            pipe.send((None, f"the process ended with code {code}"))


def _answer(pipe: Any, task: tuple[Callable[..., Any], tuple[Any, ...]], _: int) -> None:
    function, args = task
    try:
        answer = function(*args), ""
    except BaseException:  # noqa: BLE001  (whatever ended it is the answer)
        answer = None, traceback.format_exc()
    pipe.send(answer)


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def attempt(action: Any, *args: Any) -> str:
    try:
        action(*args)
    except (ValueError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- one rank fails ---------------------------------------------------------------------------


def fail_then_save(folder: str, how: str) -> dict[str, Any]:
    """A save that fails on rank 1 alone, and what comes after."""
    model, made = build("optim")
    train(model, made, range(1))
    fill(model, made, 1)
    save(folder, 1, model, made)
    fill(model, made, 2)
    extra: dict[str, Any] = {"rank": 0}

    with planted(how, extra):
        text = attempt(save, folder, 2, model, made, extra)
    dist.barrier()
    names = names_in(folder)
    step = load(folder, model, made).step
    misfits = misses(model, made, "AdamW", 1)
    save(folder, 2, model, made)
    after = names_in(folder)
    return {"text": text, "names": names, "step": step, "after": after, "misses": misfits}


@contextlib.contextmanager
def planted(how: str, extra: dict[str, Any]) -> Iterator[None]:
    if dist.get_rank() != 1:
        yield
        return
    if how == "full disk":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    elif how == "unlike extra":
        extra["rank"] = 1
        yield
    else:
        extra["odd"] = {1, 2}
        yield


def refusals(folder: str, kinds: list[str]) -> list[tuple[str, list[str]]]:
    """For each kind of misfit: the error, and what it changed."""
    found = []
    for kind in kinds:
        model, made = build("more units", seed=4)
        if kind == "damaged":
            path = next(Path(folder).glob("step-*/__1_0.distcp"))
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            dist.barrier()
            path.write_bytes(bytes(data))
        if kind == "optimizer on one rank" and dist.get_rank() == 1:
            made = OPTIMIZERS["SGD"](list(model.parameters()))
        before = snapshot(model, made)
        text = attempt(load, folder, model, made)
        found.append((text, differences(before, snapshot(model, made))))
    return found


# --- ranks are killed -------------------------------------------------------------------------

NUM_MORTALS = 4
"""Where one dies, another lives that never talks to it: gloo gathers in a ring."""


def kill_while_saving(
    folder: str, victims: list[int], where: str
) -> tuple[list[int], list[tuple[str, float]]]:
    """A save of step 2 over step 1 in which ranks die: exit codes, and what the others report.

    For a process of its own. Reports are the error, or the path, and the time that it took in s.
    """
    body = partial(_save_and_die, folder, victims, where)
    codes = fork_each(body, NUM_MORTALS)
    texts = [path.read_text() for path in sorted(Path(folder).glob("report*"))]
    return codes, [(text, float(seconds)) for seconds, text in (t.split(" ", 1) for t in texts)]


def _save_and_die(folder: str, victims: list[int], where: str, rank: int) -> None:
    store = dist.FileStore(f"{folder}/store", NUM_MORTALS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_MORTALS, timeout=timedelta(seconds=60)
    )
    alive = [r for r in range(NUM_MORTALS) if r not in victims]
    saved = f"{folder}/saved"

    def meet(name: str) -> None:
        store.set(f"{name}{rank}", "")
        store.wait([f"{name}{r}" for r in alive])

    model, made = build("hfsdp")
    train(model, made, range(1))
    fill(model, made, 1)
    save(saved, 1, model, made)
    fill(model, made, 2)
    if rank in victims:
        owner, name = {"writing": (files._SummedFile, "write"), "renaming": (Path, "rename")}[where]
        setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    text = attempt(save, saved, 2, model, made)
    Path(folder, f"report{rank}").write_text(f"{time.monotonic() - start} {text}")
    # Others must not learn of it from this process's end.
    meet("end")


def load_and_save(folder: str, seed: int) -> tuple[int, list[str], list[str]]:
    """What is left after a crash: the step, what is wrong in it, and what the next save leaves."""
    model, made = build("optim_grads", seed=4)
    step = load(folder, model, made).step
    wrong = misses(model, made, "AdamW", seed)
    save(folder, 9, model, made)
    return step, wrong, names_in(folder)


# --- a single process is killed ---------------------------------------------------------------


def die_everywhere(folder: Path) -> list[int]:
    """Save step 2 after step 1, killed at each point on the way; steps that were left.

    For a process of its own.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    model, made = build_small()
    model(torch.ones(2, 3)).square().sum().backward()
    made.step()
    fill(model, made, 1)
    save(folder / "before", 1, model, made)
    fill(model, made, 2)
    left: list[int] = []
    for point in count():
        here = folder / f"{point}"
        shutil.copytree(folder / "before", here)

        def save_and_die(_: int, here: Path = here, point: int = point) -> None:
            die_at(point)
            save(here, 2, model, made)

        code = fork_each(save_and_die, 1)[0]
        step = latest(here)
        assert step is not None, point
        complete = files.complete_steps(here)
        check_complete(here, complete)
        assert complete == list(range(1, step + 1))
        assert names_in(here) == [f"step-{s:08d}" for s in (*complete, 3)]
        if code != -signal.SIGKILL:
            assert code == 0
            return left
        left.append(step)
    raise AssertionError


def build_small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model with one tensor of each kind."""
    return build("plain", "SGD", factory=partial(nn.Linear, 3, 2))


def check_complete(folder: Path, steps: list[int]) -> None:
    """All that seem complete hold what was saved, and the next save works."""
    model, made = build_small()
    for step in steps:
        load(folder, model, made, step=step)
        assert misses(model, made, "SGD", step) == [], (folder, step)
    save(folder, 3, model, made)


def die_at(tick_to_die_at: int) -> None:
    """Kill this process before its n-th change of the disk, or write or sync of a file."""
    ticks = count()
    writes = count()

    def tick(*_: Any) -> None:
        if next(ticks) == tick_to_die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, _: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            tick()

    def watched(function: Any, *, every: int) -> Any:
        def watch(*args: Any) -> Any:
            if next(writes) % every == 0:
                tick()
            return function(*args)

        return watch

    # For good: the process ends with the save.
    sys.addaudithook(audit)
    file_type: Any = files._SummedFile
    file_type.write = watched(file_type.write, every=16)
    os.fsync = watched(os.fsync, every=1)


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[FreshProcess]:
    process = FreshProcess(__name__)
    yield process
    process.close()


# --- one rank fails ---------------------------------------------------------------------------

FAILURES = {
    "full disk": r"CheckpointError: Saving step 2 into \S+ failed on rank 1 .*Errno 27\] File too",
    "unlike extra": r"ValueError: .*rank 0.*same extra on all ranks, got on rank 1 ",
    "odd extra": r"ValueError: .* failed on rank 1 .*extra\.odd, got a set\.",
}


@pytest.mark.parametrize("how", list(FAILURES))
def test_a_failure_on_one_rank_is_known_to_all(
    warm_ranks: RankPool, tmp_path: Path, how: str
) -> None:
    """All ranks raise and name rank and cause; the last checkpoint stands; the next save works."""
    for found in warm_ranks.run(fail_then_save, str(tmp_path), how, world_size=3):
        assert re.match(FAILURES[how], found["text"]), found["text"]
        assert "step-00000002" not in found["names"]
        assert (found["step"], found["misses"]) == (1, [])
        assert found["after"] == ["step-00000001", "step-00000002"]


def test_what_one_rank_finds_wrong_stops_all(warm_ranks: RankPool, tmp_path: Path) -> None:
    """A misfit or damage that one rank sees raises on all, before anything is changed."""
    folder = str(tmp_path)
    warm_ranks.run(fill_and_save, folder, 1, "more units", world_size=2)
    kinds = ["optimizer on one rank", "damaged"]
    for misfit, damage in warm_ranks.run(refusals, folder, kinds, world_size=2):
        assert re.match(
            r"ValueError: Loading \S+ failed on rank 1 .*Expected SGD with 1 .*got AdamW with 2",
            misfit[0],
        )
        assert re.match(r"CheckpointError: .*__1_0.distcp is damaged", damage[0])
        assert misfit[1] == damage[1] == []


# --- processes are killed ---------------------------------------------------------------------

DEATHS = {
    "rank writing": ([1], "writing"),
    "all writing": ([0, 1, 2, 3], "writing"),
    "coordinator renaming": ([0], "renaming"),
}


@pytest.mark.parametrize("death", list(DEATHS))
def test_a_killed_rank_leaves_the_last_checkpoint(
    warm_ranks: RankPool, fresh_process: FreshProcess, tmp_path: Path, death: str
) -> None:
    """Ranks that live learn of it before any timeout, and what is complete loads bit for bit."""
    victims, where = DEATHS[death]
    codes, reports = fresh_process.run(kill_while_saving, str(tmp_path), victims, where)
    ranks = range(NUM_MORTALS)
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in ranks]
    assert len(reports) == len(ranks) - len(victims)
    for text, seconds in reports:
        assert re.match(r"CheckpointError: Saving step 2 into ", text)
        assert "another rank died or did not answer" in text
        assert seconds < 30
    folder = tmp_path / "saved"
    assert latest(folder) == 1
    for step, wrong, names in warm_ranks.run(load_and_save, str(folder), 1, world_size=2):
        assert (step, wrong) == (1, [])
        assert names == ["step-00000001", "step-00000009"]


def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(
    fresh_process: FreshProcess, tmp_path: Path
) -> None:
    """The old one before the rename, the new one after it; all that seem complete load."""
    left = fresh_process.run(die_everywhere, tmp_path)
    assert left == sorted(left)
    assert left.count(1) > 15
    assert 2 in left
