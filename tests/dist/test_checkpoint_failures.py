"""Checkpoints whatever fails or dies: complete or absent, known to all, the last one intact."""

import contextlib
import os
import re
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

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


def exit_codes(function: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> list[int]:
    """Call a function in processes of their own, all at once; -n where signal n ended one."""
    context = get_context("forkserver")
    processes = [context.Process(target=function, args=args, daemon=True) for args in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in processes]
    assert None not in codes, f"no end within {LIMIT_S} s"
    return cast("list[int]", codes)


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


def save_and_die(folder: str, victims: list[int], where: str, rank: int) -> None:
    """A rank of a save of step 2 over step 1 in which ranks die; the others leave a report.

    It is the time that the save took in s, and the error.
    """
    torch.set_num_threads(1)
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


def save_until(point: int, folder: Path) -> None:
    """Save step 2, killed at a point on the way, if there are so many."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    model, made = trained_small(2)
    save(folder.with_name(f"{folder.name} first"), 2, model, made)  # imports what a save needs
    die_at(point)
    save(folder, 2, model, made)


def trained_small(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with states, and known values in all of it."""
    model, made = build_small()
    model(torch.ones(2, 3)).square().sum().backward()
    made.step()
    fill(model, made, seed)
    return model, made


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
    warm_ranks: RankPool, tmp_path: Path, death: str
) -> None:
    """Ranks that live learn of it before any timeout, and what is complete loads bit for bit."""
    victims, where = DEATHS[death]
    ranks = range(NUM_MORTALS)
    codes = exit_codes(save_and_die, [(str(tmp_path), victims, where, rank) for rank in ranks])
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in ranks]
    reports = [path.read_text().split(" ", 1) for path in tmp_path.glob("report*")]
    assert len(reports) == len(ranks) - len(victims)
    for seconds, text in reports:
        assert re.match(r"CheckpointError: Saving step 2 into ", text)
        assert "another rank died or did not answer" in text
        assert float(seconds) < 30
    folder = tmp_path / "saved"
    assert latest(folder) == 1
    for step, wrong, names in warm_ranks.run(load_and_save, str(folder), 1, world_size=2):
        assert (step, wrong) == (1, [])
        assert names == ["step-00000001", "step-00000009"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """The old one before the rename, the new one after it; all that seem complete load."""
    save(tmp_path / "before", 1, *trained_small(1))
    left: list[int] = []
    for point in count():
        here = tmp_path / f"{point}"
        shutil.copytree(tmp_path / "before", here)
        (code,) = exit_codes(save_until, [(point, here)])
        step = latest(here)
        assert step is not None, point
        complete = files.complete_steps(here)
        check_complete(here, complete)
        assert complete == list(range(1, step + 1))
        assert names_in(here) == [f"step-{s:08d}" for s in (*complete, 3)]
        if code == 0:
            break
        assert code == -signal.SIGKILL
        left.append(step)
    assert left == sorted(left)
    assert left.count(1) > 15
    assert 2 in left
