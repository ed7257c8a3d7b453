"""torch.compile in and around FSDP units: the same bits, one graph a block, no recompilation.

The compiler here is dynamo with aot_eager, which runs the operators that the uncompiled program
runs, in its order: bits are due. A block's code is compiled twice, for training and, at the first
evaluation, without gradients; all blocks of one class share both.
"""

from typing import Any

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from tests.dist import compile_programs as programs
from tests.dist.compile_programs import Setting
from tests.dist.compiled_frames import Comparison, code_of
from tests.dist.fsdp_models import Block
from tests.dist.fsdp_sides import differences, within
from tests.dist.rank_pool import RankPool

TIMEOUT_S = 240.0
"""The first program in a rank imports the compiler, which takes seconds on an idle machine."""

BLOCK, UP = code_of(Block.forward), code_of(programs.Up.forward)


def on_ranks(ranks: RankPool, program: Any, *args: Any, world_size: int = 1) -> list[Comparison]:
    """What each rank answered."""
    return ranks.run(program, *args, world_size=world_size, timeout_s=TIMEOUT_S)


def assert_same_numbers(found: Comparison) -> None:
    """Losses, evaluations, weights and buffers, to the bit."""
    wrong = differences(found.eager.numbers, found.compiled.numbers)
    assert not wrong, "\n".join(wrong)


def assert_settled(found: Comparison) -> None:
    """Nothing is compiled after the first step and evaluation."""
    after = found.compiled.frames_after
    late = found.compiled.frames[after[0] :]
    assert not late, late


def assert_one_graph(found: Comparison, code: str) -> None:
    """`code` is all that is compiled: whole, once for training and once for evaluation."""
    compiled = found.compiled
    assert [frame.code for frame in compiled.frames] == [code, code]
    assert not any(frame.stopped for frame in compiled.frames)
    assert "grad_mode" in compiled.frames[1].reason
    assert (compiled.num_graphs, compiled.breaks) == (2, [])
    assert_settled(found)


WAYS = {
    "compile_then_shard": BLOCK,
    "shard_then_compile": BLOCK,
    "wrap_then_shard": BLOCK,
    "shard_then_wrap": BLOCK,
    "inner_compiled": UP,
    "inner_wrapped": UP,
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_compile(warm_ranks: RankPool, way: str) -> None:
    """Blocks or modules in them compiled in place or wrapped, before or after: one graph each."""
    for found in on_ranks(
        warm_ranks, programs.compare, Setting(getattr(programs, way)), world_size=2
    ):
        assert_same_numbers(found)
        assert_one_graph(found, WAYS[way])


CELLS = {
    "double": Setting(programs.compile_then_shard, pool="double"),
    "traced": Setting(programs.compile_then_shard, pool="traced"),
    "no_shard": Setting(programs.compile_then_shard, strategy="no_shard"),
    "two axes": Setting(programs.compile_then_shard, shape=(2, 1)),
    "bf16, microbatches": Setting(programs.compile_then_shard, bf16=True, microbatches=3),
    "batch norm": Setting(programs.compile_then_shard, norm=True),
    "recompute outside": Setting(programs.compile_then_shard, recompute="outside"),
    "recompute inside": Setting(programs.compile_then_shard, recompute="inside", pool="double"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_compiled_blocks(warm_ranks: RankPool, cell: str) -> None:
    """Pools that move or share memory, dtypes, accumulation, buffers, recomputation: one graph."""
    for found in on_ranks(warm_ranks, programs.compare, CELLS[cell], world_size=2):
        assert_same_numbers(found)
        assert_one_graph(found, BLOCK)


def test_compiled_checkpoint_wrapper(warm_ranks: RankPool) -> None:
    """Blocks in torch's checkpoint wrapper, compiled and then sharded with it: one graph."""
    setting = Setting(programs.compile_then_shard, recompute="wrapped")
    for found in on_ranks(warm_ranks, programs.compare, setting, world_size=2):
        assert_same_numbers(found)
        assert_one_graph(found, code_of(CheckpointWrapper.forward))


def ours(found: Comparison) -> list[str]:
    """Code of the library that was compiled: it knows no such life."""
    return [f.code for f in found.compiled.frames if "fsdp_core" in f.path]


def assert_breaks_at_units(found: Comparison) -> None:
    """What stops the compiler is the hooks of units, or `backward`, and nothing else."""
    stops = [*found.compiled.breaks, *(f.stopped for f in found.compiled.frames if f.stopped)]
    assert stops
    for stop in stops:
        assert "FSDP gathers or releases here" in stop or "Tensor.backward" in stop, stop


def test_unit_in_a_compiled_unit(warm_ranks: RankPool) -> None:
    """A compiled block breaks where a unit in it gathers and releases, and computes the same."""
    for found in on_ranks(warm_ranks, programs.compare, Setting(programs.nested), world_size=2):
        assert_same_numbers(found)
        assert_settled(found)
        assert_breaks_at_units(found)
        assert not ours(found)


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
@pytest.mark.parametrize("straight", [False, True], ids=["loop", "straight"])
def test_compiled_root(warm_ranks: RankPool, straight: bool, in_place: bool) -> None:
    """A compiled model breaks at its units, each of which is one graph, and computes the same.

    Between calls in a row everything is compiled; a loop over the units is left uncompiled.
    """
    setting = Setting(programs.blocks_sharded)
    args = (setting, straight, in_place)
    for found in on_ranks(warm_ranks, programs.compare_whole, *args, world_size=2):
        assert_same_numbers(found)
        assert_settled(found)
        assert_breaks_at_units(found)
        assert not ours(found)
        blocks = [f for f in found.compiled.frames if f.code == BLOCK and not f.stopped]
        assert len(blocks) == 2


def test_one_graph_of_a_model_with_units_is_refused(warm_ranks: RankPool) -> None:
    """`fullgraph=True` over units is an error that says what to do."""
    (text,) = warm_ranks.run(programs.refuse_fullgraph, world_size=1, timeout_s=TIMEOUT_S)
    assert "FSDP gathers or releases here: compile the modules of units" in text


@pytest.mark.parametrize("kind", ["compiled_step", "compiled_method", "compiled_backward"])
def test_compiled_around_units(warm_ranks: RankPool, kind: str) -> None:
    """A step with its backward pass, a registered forward, a compiled backward pass: the same.

    No code of the library is compiled, whatever calls it: hooks, the end of the backward pass. What
    `register_fsdp_forward_method` makes is, since the method is in the middle of it.
    """
    for found in on_ranks(warm_ranks, programs.compare_step, kind):
        assert_same_numbers(found)
        assert found.compiled.frames
        assert [code for code in ours(found) if not code.startswith("fsdp_module.py")] == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_captured(warm_ranks: RankPool, backend: str) -> None:
    """Steps of compiled blocks, captured when they are warm and replayed, are eager ones."""
    for found in on_ranks(warm_ranks, programs.compare_captured, backend, world_size=2):
        assert_same_numbers(found)
        assert [frame.code for frame in found.compiled.frames] == [BLOCK]
        assert_settled(found)


def test_errors_leave_compiled_units_whole(warm_ranks: RankPool) -> None:
    """After a shape that cannot be compiled and a hook that raises, training is the same."""
    ((found, raised),) = warm_ranks.run(
        programs.train_after_errors, world_size=1, timeout_s=TIMEOUT_S
    )
    assert raised == ["TorchRuntimeError", "ValueError"]
    assert_same_numbers(found)


def test_inductor(warm_ranks: RankPool) -> None:
    """Machine code for the blocks gives the same losses up to rounding.

    Against the uncompiled block its tanh and the order of at most 7 terms of a sum differ: some
    ulp of values around 1 in each of two steps.
    """
    for found in on_ranks(warm_ranks, programs.compare_step, "inductor_blocks"):
        same = within(64 * 2**-24)
        assert not differences(found.eager.numbers, found.compiled.numbers, same=same)
        assert [frame.code for frame in found.compiled.frames] == [BLOCK]
