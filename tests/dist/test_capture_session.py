"""Captures on all ranks or on none: each rank learns which refused and why, and is as it was."""

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.graph.capture_session import CaptureAborted, CaptureLost, CaptureSession
from fsdp_core.graph.graph import GraphedCallable, GraphMaker, Segment
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from tests.dist.rank_pool import RankPool
from tests.dist.scope_programs import WARMUP, Scoped
from tests.dist.train_layout_programs import DEVICE, Run

PHASES = ("warm_up", "capture_forward", "capture_backward")


def captures_in_order(scoped: Scoped) -> list[tuple[str, str]]:
    """Phase and segment of everything that a trainer's capture calls."""
    seen: list[tuple[str, str]] = []

    def noting(phase: str) -> Callable[..., Any]:
        plain = getattr(GraphedCallable, phase)

        def call(graph: GraphedCallable, *args: Any, **kwargs: Any) -> Any:
            seen.append((phase, graph.name))
            return plain(graph, *args, **kwargs)

        return call

    trainer = Trainer(scoped.config, build_axes(scoped.run.parallel, DEVICE), DEVICE)
    patches: dict[str, Any] = {phase: noting(phase) for phase in PHASES}
    with mock.patch.multiple(GraphedCallable, **patches):
        for step in range(WARMUP + 1):
            trainer.step(step)
    trainer.close()
    return seen


PIECES = [f"layers.{layer}.{branch}" for layer in (0, 1) for branch in ("attn", "mlp")]


def test_backwards_are_captured_in_reverse(warm_ranks: RankPool) -> None:
    """All warm-ups, then forwards as layers run, then backwards as autograd runs them."""
    scoped = Scoped(Run({"dp": 1}), ("attn", "mlp"))
    (seen,) = warm_ranks.run(captures_in_order, scoped, world_size=1)
    assert seen == [
        *(("warm_up", name) for name in PIECES),
        *(("capture_forward", name) for name in PIECES),
        *(("capture_backward", name) for name in reversed(PIECES)),
    ]


def branch(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    counts.add_(1)
    return F.dropout(x * weight, 0.5)


def graphed(weight: nn.Parameter, counts: torch.Tensor, *, reads_data: bool) -> GraphedCallable:
    """A segment of `branch`; no graph can hold it if it reads data."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if reads_data:
            x.sum().item()
        return branch(x, weight, counts)

    segment = Segment(
        name="branch", function=function, samples=(torch.ones(8),), parameters=(weight,)
    )
    return GraphedCallable(GraphMaker(DEVICE), segment)


def capture_where_one_refuses(refusing: int | None) -> dict[str, Any]:
    """A session of two segments, between which ranks meet; one rank's first cannot be captured."""
    torch.manual_seed(3)
    rank, counts = dist.get_rank(), torch.zeros(1)
    weight = nn.Parameter(torch.ones(8))
    segments = [
        graphed(weight, counts, reads_data=rank == refusing and number == 0) for number in range(2)
    ]
    ended: list[str] = []
    state, error, cause = torch.get_rng_state(), "", ""
    inside = False
    try:
        with CaptureSession(DEVICE, "branches", state=(counts,)) as session:
            session.at_end(lambda: ended.append("end"))
            for segment in segments:
                session.on_abort(segment.reset)
                session.on_abort(lambda: ended.append("abort"))
                session.attempt(segment.warm_up)
                dist.all_reduce(torch.ones(1))
                session.attempt(lambda s=segment: s.capture_forward())  # type: ignore[misc]
                session.attempt(lambda s=segment: s.capture_backward())  # type: ignore[misc]
            inside = gc.isenabled()
            counts.add_(7)
    except CaptureAborted as aborted:
        error, cause = str(aborted), type(aborted.__cause__).__name__
    drawn = not torch.equal(state, torch.get_rng_state())
    torch.manual_seed(9)
    x = torch.ones(8)
    try:
        result = torch.equal(segments[1](x), graph_free(x, weight))  # type: ignore[arg-type]
    except RuntimeError as refused:
        result = "empty graph" in str(refused)
    return {
        "error": error, "cause": cause, "ended": ended, "right": result,
        "graphs": sum(sum(s.captures) for s in segments), "counts": counts.item(),
        "drawn": drawn,
        "collects": (inside, gc.isenabled()),
    }  # fmt: skip


def graph_free(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Eager, with the numbers that the replay drew."""
    torch.manual_seed(9)
    return branch(x, weight, torch.zeros(1))


def test_all_ranks_keep_their_graphs(warm_ranks: RankPool) -> None:
    """Without a refusal every rank has its graphs, its state as before, and its collector on."""
    for found in warm_ranks.run(capture_where_one_refuses, None, world_size=2):
        assert found["error"] == ""
        assert (found["graphs"], found["ended"], found["right"]) == (4, ["end"], True)
        assert found["counts"] == 1.0  # the one replay
        assert found["collects"] == (False, True)
        assert not found["drawn"]


def test_one_refusal_undoes_all_ranks(warm_ranks: RankPool) -> None:
    """Where one rank's capture is refused no rank has a graph, and all say whose and why."""
    results = warm_ranks.run(capture_where_one_refuses, 1, world_size=3)
    for rank, found in enumerate(results):
        assert "the capture of branches was given up on every rank" in found["error"]
        assert "rank 1: CaptureRefused: cannot capture aten._local_scalar_dense" in found["error"]
        assert "rank 0" not in found["error"]
        assert found["cause"] == ("CaptureRefused" if rank == 1 else "NoneType")
        assert (found["graphs"], found["right"]) == (0, True)
        assert found["ended"] == ["end", *["abort"] * len(found["ended"][1:])]
        assert len(found["ended"]) == 3
        assert found["counts"] == 0.0
        assert found["collects"] == (False, True)
        assert not found["drawn"]


def enter_with(what: list[str], refusals: list[str | None]) -> str:
    """The error of entering a session; what is captured and refused depends on the rank."""
    rank = dist.get_rank()
    try:
        with CaptureSession(DEVICE, what[rank], refusal=refusals[rank]):
            return "entered"
    except CaptureAborted as aborted:
        return str(aborted)


def test_a_rank_refuses_before_anything_is_touched(warm_ranks: RankPool) -> None:
    """A rank that cannot capture keeps the others from it, however long its reason is."""
    args = (["attn"] * 2, [None, "no room for 3 slots " + "x" * 900])
    found = warm_ranks.run(enter_with, *args, world_size=2)
    assert found[0] == found[1]
    assert "rank 1: no room for 3 slots" in found[0]


class Unreadable:
    """In place of a generator whose state cannot be saved."""

    def get_state(self) -> torch.Tensor:
        raise MemoryError("no room for the state")


def enter_without_room(without: int) -> tuple[str, bool]:
    """The error of entering a session on ranks one of which cannot save its state; collection."""
    generators: Any = [Unreadable()] if dist.get_rank() == without else []
    try:
        with CaptureSession(DEVICE, "attn", generators=generators):
            return "entered", gc.isenabled()
    except CaptureAborted as aborted:
        return str(aborted), gc.isenabled()


def test_a_rank_that_cannot_save_its_state_refuses(warm_ranks: RankPool) -> None:
    """The others hear of it instead of waiting, and collection of garbage stays on."""
    for text, collects in warm_ranks.run(enter_without_room, 1, world_size=2):
        assert "rank 1: MemoryError: no room for the state" in text
        assert collects


def test_ranks_that_capture_different_things_refuse(warm_ranks: RankPool) -> None:
    """Another scope than rank 0's is an error on all ranks, not a hang at the first replay."""
    found = warm_ranks.run(enter_with, ["attn", "attn", "mlp"], [None] * 3, world_size=3)
    assert set(found) == {
        "the capture of attn was given up on every rank: rank 2: captures mlp, where rank 0 "
        "captures attn",
        "the capture of mlp was given up on every rank: rank 2: captures mlp, where rank 0 "
        "captures attn",
    }


def fail_where_others_wait(failing: int, communicates: bool) -> tuple[str, list[int], list[str]]:
    """Ranks meet inside of what they capture, but for one that fails before; who fails, and why.

    Once it has given up it comes after all, where a process would end and so release the others.
    """
    rank, done = dist.get_rank(), []

    def function() -> None:
        if rank == failing:
            raise ZeroDivisionError("before the others' collective")
        dist.all_reduce(torch.ones(1))

    session = CaptureSession(
        DEVICE, "attn", communicates=communicates, patience=timedelta(seconds=0.1)
    )
    try:
        with session:
            session.on_abort(lambda: done.append("undone"))
            session.attempt(function)
            done.append("went on")
    except CaptureLost as lost:
        if rank == failing:
            dist.all_reduce(torch.ones(1))
        return str(lost), list(lost.refusals), done
    return "kept", [], done


@pytest.mark.parametrize("communicates", [True, False])
def test_a_rank_that_others_wait_for_inside_gives_up(
    warm_ranks: RankPool, communicates: bool
) -> None:
    """It says for whom it waited; the others, once they are free, say that it failed first."""
    found = warm_ranks.run(fail_where_others_wait, 1, communicates, world_size=3)
    for rank, (text, refusals, done) in enumerate(found):
        assert text.startswith(
            "the capture of attn failed: rank 1: ZeroDivisionError: before the others' collective; "
        )
        assert refusals == [1]
        went_on = [] if rank == 1 and communicates else ["went on"]
        assert done == [*went_on, "undone"]
    assert "without rank 0, 2 at its end, this process has to end" in found[1][0]
    assert "another rank has left" in found[0][0]


def fail_alike_or_not(failing: list[int]) -> str:
    """Ranks that communicate inside of what they capture fail before that, all or none."""

    def function() -> None:
        if dist.get_rank() in failing:
            raise ZeroDivisionError

    try:
        with CaptureSession(DEVICE, "attn", communicates=True) as session:
            session.attempt(function)
    except CaptureAborted as aborted:
        return str(aborted)
    return "kept"


def test_ranks_that_fail_alike_go_on_together(warm_ranks: RankPool) -> None:
    """Where every rank gets to the end nobody is lost, and the next capture is a new one."""
    told = "rank 0: ZeroDivisionError: ; rank 1: ZeroDivisionError: "
    for text in warm_ranks.run(fail_alike_or_not, [0, 1], world_size=2):
        assert text == f"the capture of attn was given up on every rank: {told}"
    assert warm_ranks.run(fail_alike_or_not, [], world_size=2) == ["kept"] * 2


def test_a_lone_process_needs_no_group() -> None:
    """One process without a process group settles with itself, and the cause is kept."""
    with (
        pytest.raises(CaptureAborted, match="rank 0: ZeroDivisionError") as caught,
        CaptureSession(DEVICE, "attn"),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with CaptureSession(DEVICE, "attn"):
        pass


def test_an_interrupt_is_not_talked_over() -> None:
    """Ctrl-C undoes the capture and goes on as it is."""
    undone = []

    def interrupted() -> None:
        with CaptureSession(DEVICE, "attn") as session:
            session.on_abort(lambda: undone.append(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert undone == [1]
    assert gc.isenabled()


def test_a_failing_restore_aborts_and_the_rest_is_restored() -> None:
    """If one of the functions at the end fails the others run, and the capture is given up."""
    ran = []

    def fail() -> None:
        raise RuntimeError("hooks were registered meanwhile")

    def capture() -> None:
        with CaptureSession(DEVICE, "attn") as session:
            session.at_end(lambda: ran.append("first"))
            session.at_end(fail)
            session.on_abort(lambda: ran.append("undone"))

    with pytest.raises(CaptureAborted, match="hooks were registered meanwhile"):
        capture()
    assert ran == ["first", "undone"]
