"""The trainer over ranks: eager and graphed agree on every bit, whatever the layout."""

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import (
    POOLS,
    STRATEGIES,
    DataConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.ledger import StaleAddress
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from tests.dist.rank_pool import RankPool

STEPS = 6
SHAPES: dict[str, Any] = {
    "vocab_size": 40, "hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24, "seq": 6,
}  # fmt: skip
SHARDED = "optim_grads_params"
MODES: tuple[tuple[str, ...], ...] = ((), ("attn",), ("full_iteration",))


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix. With an outer strategy, two outer groups share the ranks."""

    strategy: str
    pool: str
    dtype: str
    dropout: float
    reduce_dtype: str = "fp32"
    clip_grad_norm: float = 1.0
    reshard_after_forward: bool = True
    outer_strategy: str | None = None
    microbatches: int = 2

    @property
    def modes(self) -> tuple[tuple[str, ...], ...]:
        """Graph scopes that are legal here."""
        partial = SHARDED not in (self.strategy, self.outer_strategy) or self.pool != "dynamic"
        return tuple(mode for mode in MODES if partial or mode != ("attn",))

    def parallel(self, world_size: int) -> ParallelConfig:
        """The layout over this many ranks."""
        if self.outer_strategy is None:
            return ParallelConfig(dp=world_size)
        return ParallelConfig(dp=world_size // 2, dp_outer=2)


def config(cell: Cell, graph: tuple[str, ...], world_size: int) -> TrainConfig:
    """A tiny run."""
    return TrainConfig(
        model=ModelConfig(dropout=cell.dropout, **SHAPES),
        parallel=cell.parallel(world_size),
        fsdp=FsdpConfig(
            strategy=cell.strategy,
            outer_strategy=cell.outer_strategy or "no_shard",
            pool=cell.pool,
            reduce_dtype=cell.reduce_dtype,
            reshard_after_forward=cell.reshard_after_forward,
        ),
        optim=OptimConfig(clip_grad_norm=cell.clip_grad_norm, lr=1e-2),
        data=DataConfig(),
        graph=graph,
        dtype=cell.dtype,
        steps=STEPS,
        microbatches=cell.microbatches,
        seed=5,
        graph_warmup_steps=2,
    )


def observe(trainer: Trainer, step: int) -> tuple[Any, ...]:
    """Everything that a step shows, as bits."""
    outputs = trainer.step(step)
    floats = torch.cat((outputs.losses, outputs.loss[None], outputs.grad_norm[None]))
    digests = tuple(tuple(rows.flatten().tolist()) for rows in outputs.digests.values())
    states = b"".join(state.numpy().tobytes() for state in trainer.rng_states().values())
    rng = hashlib.sha256(states).hexdigest()
    return tuple(floats.view(torch.int32).tolist()), digests, rng


def train(cell: Cell, graph: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], int, int, list[str]]:
    """All steps of one run: what was observed, graphs, replays, memory that no owner names."""
    device = Device("cpu")
    chosen = config(cell, graph, dist.get_world_size())
    trainer = Trainer(chosen, build_axes(chosen.parallel, device), device)
    seen = [observe(trainer, step) for step in range(STEPS)]
    counts = trainer.counts
    trainer.close()
    assert counts.unnamed_externals == 0
    return seen, counts.captured, counts.replays, counts.external_places


Run = tuple[Cell, tuple[str, ...]]


def runs_of(*cells: Cell, control: bool = False) -> list[Run]:
    """All modes of the cells; the first eager one again if `control`."""
    runs = [(cell, mode) for cell in cells for mode in cell.modes]
    return runs + runs[: int(control)]


def train_all(runs: list[Run]) -> list[Any]:
    """One run after another."""
    return [train(cell, graph) for cell, graph in runs]


def check(runs: list[Run], ranks: list[list[Any]]) -> None:
    """Each run has the first one's bits, tested something, and replayed as often as it should."""
    for rank in ranks:
        reference = rank[0][0]
        # No two steps look alike in any group: the comparison compares something.
        for group in zip(*(step[1] for step in reference), strict=True):
            assert len(set(group)) == STEPS
        for (cell, mode), (seen, captured, replays, places) in zip(runs, rank, strict=True):
            for step in range(STEPS):
                assert seen[step] == reference[step], (cell, mode, step)
            replayed_steps = STEPS - 2
            expected = {
                (): (0, 0),
                ("attn",): (2 * 2, replayed_steps * cell.microbatches * 2 * 2),
                ("full_iteration",): (1, replayed_steps),
            }[mode]
            assert (captured, replays) == expected, (cell, mode)
            assert places == [], (cell, mode)
    # Each rank has its own data, and its own dropout.
    assert len({rank[0][0][0][0] for rank in ranks}) == len(ranks)
    assert len({rank[0][0][0][2] for rank in ranks}) == len(ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "dropout"), [("bf16", 0.2), ("fp32", 0.0)])
def test_pools_and_modes_agree_at_two_ranks(
    warm_ranks: RankPool, strategy: str, dtype: str, dropout: float
) -> None:
    """Each pool and graph scope has eager's losses, norm, digests and RNG in every step."""
    runs = runs_of(*(Cell(strategy, pool, dtype, dropout) for pool in POOLS))
    check(runs, warm_ranks.run(train_all, runs, world_size=2))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(SHARDED, "double", "bf16", 0.2),
        Cell(SHARDED, "dynamic", "fp32", 0.2, clip_grad_norm=0.0),
        Cell(SHARDED, "traced", "bf16", 0.0, reduce_dtype="bf16", reshard_after_forward=False),
        Cell("optim_grads", "double", "bf16", 0.0, reduce_dtype="bf16", microbatches=3),
    ],
    ids=["double", "dynamic unclipped", "kept gathered", "three microbatches"],
)
def test_modes_agree_at_four_ranks(warm_ranks: RankPool, cell: Cell) -> None:
    """The same at four ranks, with other reductions and resharding, and eager run again."""
    runs = runs_of(cell, control=True)
    check(runs, warm_ranks.run(train_all, runs, world_size=4))


@pytest.mark.parametrize(
    ("outer", "strategy", "pool"),
    [
        ("no_shard", SHARDED, "double"),
        ("optim", SHARDED, "traced"),
        ("optim_grads", "optim", "dynamic"),
        (SHARDED, SHARDED, "traced"),
        (SHARDED, "no_shard", "double"),
    ],
)
def test_modes_agree_on_two_axes(
    warm_ranks: RankPool, outer: str, strategy: str, pool: str
) -> None:
    """The same on two outer groups of two ranks, whatever the groups share."""
    runs = runs_of(Cell(strategy, pool, "bf16", 0.2, outer_strategy=outer))
    check(runs, warm_ranks.run(train_all, runs, world_size=4))


def eager(cells: list[Cell]) -> list[Any]:
    """What each cell shows that does not depend on who holds what: losses and RNG."""
    return [[(step[0][:-1], step[2]) for step in train(cell, ())[0]] for cell in cells]


@pytest.mark.parametrize(
    ("dtype", "microbatches", "classes"),
    [
        ("bf16", 1, [STRATEGIES]),
        ("fp32", 1, [STRATEGIES]),
        ("fp32", 2, [STRATEGIES[:2], STRATEGIES[2:]]),
    ],
)
def test_strategies_agree_at_two_ranks(
    warm_ranks: RankPool, dtype: str, microbatches: int, classes: list[tuple[str, ...]]
) -> None:
    """Sharding changes no loss bit at two ranks, unclipped: a sum of two has one order.

    Of several microbatches the gradients are summed first over microbatches where they stay whole,
    first over ranks where they are cut. With clipping the norm's own order of summation differs,
    and at four ranks the reductions' do.
    """
    for strategies in classes:
        cells = [
            Cell(s, "double", dtype, 0.2, clip_grad_norm=0.0, microbatches=microbatches)
            for s in strategies
        ]
        for first, *others in warm_ranks.run(eager, cells, world_size=2):
            assert others == [first] * (len(cells) - 1)


def losses_of(cell: Cell) -> list[float]:
    """Mean losses of an eager run with another learning rate for longer."""
    device = Device("cpu")
    chosen = config(cell, (), dist.get_world_size())
    trainer = Trainer(chosen, build_axes(chosen.parallel, device), device)
    return [trainer.step(step).loss.item() for step in range(40)]


def test_training_learns(warm_ranks: RankPool) -> None:
    """The loss falls on learnable data: the bits that agree are those of a training that works."""
    for losses in warm_ranks.run(losses_of, Cell(SHARDED, "double", "bf16", 0.0), world_size=2):
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def move_a_parameter(graph: tuple[str, ...], ledger: bool) -> str:
    """Moves a gathered buffer between two replays; the error's text, or nothing."""
    device = Device("cpu")
    plain = config(Cell(SHARDED, "double", "fp32", 0.0), graph, dist.get_world_size()).to_dict()
    chosen = TrainConfig.from_dict(plain | {"ledger": ledger})
    trainer = Trainer(chosen, build_axes(chosen.parallel, device), device)
    for step in range(4):
        trainer.step(step)
    block = next(group for group in trainer.groups if group.name == "layers.0")
    index = block.names.index("layers.0.attn.attention.wq.weight")
    storage = block.unsharded[index].untyped_storage()
    nbytes = storage.nbytes()
    # Growing allocates before it frees: the one way to move a storage for certain.
    device.resize_storage(storage, 2 * nbytes)
    squatter = torch.full((nbytes // 4,), float("nan"))
    try:
        trainer.step(4)
    except (StaleAddress, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del squatter
    return ""


@pytest.mark.parametrize("graph", MODES[1:], ids=["attn", "full"])
def test_moved_parameter_is_stale(warm_ranks: RankPool, graph: tuple[str, ...]) -> None:
    """A gathered parameter that moved is named by the ledger; without it the replay still stops."""
    for text in warm_ranks.run(move_a_parameter, graph, True, world_size=2):
        assert text.startswith("StaleAddress: layers.0.")
        assert "layers.0.attn.attention.wq.weight" in text
    for text in warm_ranks.run(move_a_parameter, graph, False, world_size=2):
        assert "illegal memory access" in text


def lose_a_gather(graph: tuple[str, ...]) -> str:
    """Takes the hook that gathers the first layer between two replays; the error's text."""
    device = Device("cpu")
    chosen = config(Cell(SHARDED, "double", "fp32", 0.0), graph, dist.get_world_size())
    trainer = Trainer(chosen, build_axes(chosen.parallel, device), device)
    for step in range(4):
        trainer.step(step)
    layer = trainer.stages[0].numbered_layers["0"]
    layer._forward_pre_hooks.clear()
    layer._forward_pre_hooks_with_kwargs.clear()
    with pytest.raises(StaleAddress) as stale:
        trainer.step(4)
    return str(stale.value)


@pytest.mark.parametrize("graph", [("attn",), ("layer",)], ids=["attn", "layer"])
def test_weights_that_nobody_gathered_are_stale(
    warm_ranks: RankPool, graph: tuple[str, ...]
) -> None:
    """At the right address lie the weights of the step before, or of another layer."""
    for text in warm_ranks.run(lose_a_gather, graph, world_size=2):
        assert text.startswith("layers.0.")
        assert "captured while its owner held its memory" in text


def capture_data_dependent_code() -> str:
    """A trainer whose model reads data in Python cannot be captured."""
    device = Device("cpu")
    chosen = config(Cell(SHARDED, "double", "fp32", 0.0), ("full_iteration",), 1)
    trainer = Trainer(chosen, build_axes(chosen.parallel, device), device)
    norm = trainer.stages[0].norm
    assert norm is not None
    norm.register_forward_hook(lambda module, args, out: out * out.mean().item())
    trainer.step(0)
    trainer.step(1)
    try:
        trainer.step(2)
    except CaptureAborted as error:
        return f"{type(error.__cause__).__name__} -> {error}"
    return ""


def test_capture_is_refused_by_name(warm_ranks: RankPool) -> None:
    """A scope that cannot be captured ends the step with the operator and the line."""
    (text,) = warm_ranks.run(capture_data_dependent_code, world_size=1)
    assert text.startswith("CaptureRefused -> ")
    assert "aten._local_scalar_dense.default at test_train_modes.py:" in text
