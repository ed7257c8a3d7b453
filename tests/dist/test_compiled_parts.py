"""torch.compile inside and beside graph scopes: graphed runs have compiled eager ones' bits."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsdp_core.config import FsdpConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer, make_trainer
from fsdp_core.train.compiled import StaleGuards
from tests.dist.rank_pool import RankPool
from tests.dist.scope_programs import STEPS, WARMUP, act
from tests.dist.train_layout_programs import DEVICE, Run


@dataclass(frozen=True)
class Compiled:
    """One training; of `run` all but these is that of other trainings of it."""

    run: Run
    parts: tuple[str, ...]
    graph: tuple[str, ...] = ()
    backend: str = "aot_eager"
    options: dict[str, Any] = field(default_factory=dict)
    events: tuple[tuple[Any, ...], ...] = tuple(("step", index) for index in range(STEPS))

    @property
    def config(self) -> TrainConfig:
        return replace(
            self.run.config, graph=self.graph, compile=self.parts, compile_backend=self.backend,
            steps=STEPS, graph_warmup_steps=WARMUP, **self.options,
        )  # fmt: skip


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        bits: after every event.
        compilations: part, reason and lateness of each.
        moved: tensors that moved in each step.
    """

    bits: list[Any]
    compilations: list[tuple[str, str, bool]]
    moved: list[int]
    captured: int
    replays: int
    unnamed: int
    names: list[str]


def train(compiled: Compiled, axes: Axes, device: Device = DEVICE) -> Seen:
    torch.set_num_threads(1)
    trainer = make_trainer(compiled.config, axes, device)
    pointers, moved, bits = trainer.pointer_changes(), [], []
    for event in compiled.events:
        bits.append(act(trainer, event))
        moved.append(pointers.count())
    counts = trainer.counts
    found = [(each.part, each.reason, each.late) for each in trainer.compilations]
    trainer.close()
    return Seen(bits, found, moved, counts.captured, counts.replays, counts.unnamed_externals,
                counts.external_names)  # fmt: skip


def train_all(runs: list[Compiled]) -> list[Seen]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].run.parallel, DEVICE)
    return [train(run, axes) for run in runs]


def counted(compiled: Compiled) -> list[tuple[str, str, bool]]:
    """What is compiled while live memory is counted, as the harness does."""
    device = Device("cpu")
    axes = build_axes(compiled.run.parallel, device)
    with device.counting_memory():
        return train(compiled, axes, device).compilations


# ---- planted


Plant = Callable[[Trainer, int], None]


def _change(trainer: Trainer) -> None:
    """A number that the code of a branch reads in Python."""
    norm: Any = trainer.stages[0].numbered_layers["0"].attn.norm
    norm.eps *= 1000.0


def change_before_the_capture(trainer: Trainer, index: int) -> None:
    """In the step that captures, after others have compiled."""
    if index == WARMUP:
        _change(trainer)


def change_after_the_capture(trainer: Trainer, index: int) -> None:
    if index == WARMUP + 1:
        _change(trainer)


@dataclass
class Planted:
    """What became of a run with a plant: the error, its step (-1: none), and what was seen."""

    error: str
    step: int
    bits: list[Any]
    compilations: list[str]


def planted(compiled: Compiled, plant: str) -> Planted:
    """Train with a plant before each step."""
    torch.set_num_threads(1)
    trainer = Trainer(compiled.config, build_axes(compiled.run.parallel, DEVICE), DEVICE)
    found, index = Planted("", -1, [], []), 0
    try:
        for index in range(STEPS):
            globals()[plant](trainer, index)
            found.bits.append(act(trainer, ("step", index)))
    except (CaptureAborted, StaleGuards) as error:
        found.error, found.step = f"{type(error).__name__}: {error}", index
    found.compilations = [str(each) for each in trainer.compilations if each.reason]
    trainer.close()
    return found


def planted_all(runs: list[Compiled], plant: str) -> list[Planted]:
    return [planted(run, plant) for run in runs]


TIMEOUT_S = 240.0
"""The compiler takes seconds on an idle machine."""
ATTN, MLP, FULL = ("attn",), ("mlp",), ("full_iteration",)
DENSE = Run({"dp": 2}, "dense_tiny")


def test_late_work_is_compiled_and_listed(warm_ranks: RankPool) -> None:
    """Evaluation after the capture is other code, by name and reason."""
    run = Run({"dp": 1}, "dense_tiny", micro_batch_size=2)
    events = (("step", 0), ("step", 1), ("evaluate", 7), ("step", 2))
    runs = [Compiled(run, MLP, graph, events=events) for graph in ((), ATTN + MLP)]
    ((eager, graphed),) = warm_ranks.run(train_all, runs, world_size=1, timeout_s=TIMEOUT_S)
    assert graphed.bits == eager.bits
    assert [late for _, _, late in eager.compilations] == [False, False]
    assert [late for _, _, late in graphed.compilations] == [False, True]
    reasons = [reason for _, reason, _ in graphed.compilations]
    assert reasons == [reason for _, reason, _ in eager.compilations]
    assert reasons[0] == ""
    assert "grad_mode" in reasons[1] or "GLOBAL_STATE" in reasons[1]


def test_pointers_of_eager_compiled_runs_are_counted(warm_ranks: RankPool) -> None:
    """Pools that stay move nothing under compiled parts, the dynamic one does: graphs of the
    compiler's own would be recorded again.
    """
    runs = [
        Compiled(DENSE, MLP, options={"fsdp": FsdpConfig(pool=pool)})
        for pool in ("double", "dynamic")
    ]
    for stays, moves in warm_ranks.run(train_all, runs, world_size=2, timeout_s=TIMEOUT_S):
        assert stays.moved == [0] * len(stays.moved)
        assert moves.moved[-1]
        assert moves.bits == stays.bits


def test_compiled_while_memory_is_counted(warm_ranks: RankPool) -> None:
    """What looks on at every operator does not keep the compiler away."""
    (found,) = warm_ranks.run(counted, Compiled(Run({}), MLP), world_size=1, timeout_s=TIMEOUT_S)
    assert [part for part, _, _ in found] == ["layers.0.mlp"]


# ---- planted


def run_planted(pool: RankPool, plant: str, *runs: Compiled) -> list[Planted]:
    (found,) = pool.run(planted_all, list(runs), plant, world_size=1, timeout_s=TIMEOUT_S)
    return list(found)


def test_a_value_that_changes_before_the_capture(warm_ranks: RankPool) -> None:
    """The graph would hold other code than the steps before it: refused, with the guard."""
    run = Run({}, "dense_tiny")
    inside, beside = run_planted(
        warm_ranks, "change_before_the_capture", Compiled(run, ATTN, ATTN), Compiled(run, ATTN, MLP)
    )
    assert inside.step == 1
    assert inside.error.startswith("CaptureAborted: the capture of attn was given up")
    assert "cannot capture layers.0.attn: the warm-up makes torch.compile compile" in inside.error
    assert ".eps == " in inside.error
    # Nobody replays it: it is compiled again, as in an eager run.
    assert beside.step == -1
    assert len(beside.compilations) == 1
    assert ".eps == " in beside.compilations[0]


def test_a_value_that_changes_after_the_capture(warm_ranks: RankPool) -> None:
    """Graphs of compiled code stop at its guards; graphs of plain code go on with the old value."""
    run = Run({}, "dense_tiny")
    eager, compiled, plain, plain_eager = run_planted(
        warm_ranks, "change_after_the_capture", Compiled(run, ATTN), Compiled(run, ATTN, ATTN),
        Compiled(run, (), ATTN), Compiled(run, ()),
    )  # fmt: skip
    assert (eager.step, plain.step, plain_eager.step) == (-1, -1, -1)
    assert ".eps == " in eager.compilations[0]
    assert compiled.step == 2
    assert compiled.error.startswith("StaleGuards: layers.0.attn: ")
    assert ".eps == " in compiled.error
    assert compiled.bits == eager.bits[:2]
    assert plain.bits[:2] == plain_eager.bits[:2]
    assert plain.bits[2] != plain_eager.bits[2]
