"""Checkpoints over ranks: every bit back, in any layout."""

import itertools
from pathlib import Path

import pytest

from tests.dist import checkpoint_programs as programs
from tests.dist.checkpoint_layouts import LAYOUTS, OPTIMIZERS, world_of
from tests.dist.fsdp_sides import same_bits
from tests.dist.rank_pool import RankPool

HUBS = ("plain", "more units")
"""Every layout is loaded into these; into others the first of these and the layout before it."""

Saved = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def saved(warm_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of each layout: a folder with a checkpoint, and the seed of its values."""
    found = {}
    for seed, layout in enumerate(LAYOUTS):
        folder = str(tmp_path_factory.mktemp("saved"))
        warm_ranks.run(programs.fill_and_save, folder, seed, layout, world_size=world_of(layout))
        found[layout] = folder, seed
    return found


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_checkpoint_loads_into_other_layouts_bit_for_bit(
    warm_ranks: RankPool, saved: Saved, layout: str
) -> None:
    """Weights, buffers, optimizer states and hyperparameters are those saved, on every rank."""
    names = list(LAYOUTS)
    before = names[names.index(layout) - 1]
    sources = [saved[n] for n in LAYOUTS if layout in HUBS or n in (HUBS[0], before)]
    for rank in warm_ranks.run(programs.load_each, sources, layout, world_size=world_of(layout)):
        assert rank == [(3, {"tokens": [seed, 0.1]}, []) for _, seed in sources]


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "NAdam", "ASGD"])
def test_states_of_any_optimizer_load_into_other_layouts(
    warm_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """Cut and single states alike, of matrices and of numbers, both ways."""
    sources = [(str(tmp_path / "cut"), 1), (str(tmp_path / "whole"), 2)]
    warm_ranks.run(programs.fill_and_save, *sources[0], "params", optimizer, world_size=3)
    warm_ranks.run(programs.fill_and_save, *sources[1], "plain", optimizer, world_size=1)
    for layout in ("plain", "optim_grads"):
        for rank in warm_ranks.run(
            programs.load_each, sources, layout, optimizer, world_size=world_of(layout)
        ):
            assert [wrong for _, _, wrong in rank] == [[], []]


CONTINUED = [("AdamW", name) for name in ("plain", "no_shard", "optim", "params", "hfsdp")]
OTHERS = [name for name in OPTIMIZERS if name != "AdamW"]
CONTINUED += zip(OTHERS, itertools.cycle(("more units", "optim_grads", "alone")), strict=False)


@pytest.mark.parametrize(("optimizer", "layout"), CONTINUED)
def test_continued_training_is_uninterrupted_training(
    warm_ranks: RankPool, tmp_path: Path, optimizer: str, layout: str
) -> None:
    """Two steps after a load give the bits of two steps after the save; live memory stays put."""
    for found in warm_ranks.run(
        programs.continue_or_not, str(tmp_path), layout, optimizer, world_size=world_of(layout)
    ):
        assert found == []


def test_buffers_that_differ_between_ranks_come_back_to_their_rank(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """BatchNorm's statistics of each rank are its own again."""
    ranks = warm_ranks.run(programs.rank_statistics, str(tmp_path), True, world_size=2)
    assert ranks[0] != ranks[1]
    assert warm_ranks.run(programs.rank_statistics, str(tmp_path), False, world_size=2) == ranks


def test_buffers_of_other_ranks_are_the_firsts_with_a_warning(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """On another number of ranks BatchNorm's statistics are the first rank's, and that is said."""
    first, _ = warm_ranks.run(programs.rank_statistics, str(tmp_path), True, world_size=2)
    for statistics, texts in warm_ranks.run(
        programs.warned_statistics, str(tmp_path), world_size=3
    ):
        assert statistics == first
        assert any("model.norm.running_mean differed between the ranks" in t for t in texts)


def test_parameters_that_differ_between_ranks_load_on_as_many_only(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """A parameter of each rank's own is its own again, and is refused on other numbers of ranks."""
    warm_ranks.run(programs.own_parameters, str(tmp_path), True, world_size=2)
    loaded = warm_ranks.run(programs.own_parameters, str(tmp_path), False, world_size=2)
    assert loaded == ["0.0", "1.0"]
    for text in warm_ranks.run(programs.own_parameters, str(tmp_path), False, world_size=3):
        assert "Expected the 2 ranks that saved, as model.weight differed" in text


@pytest.mark.parametrize("layout", ["no_shard", "optim_grads", "more units", "hfsdp"])
def test_units_may_be_gathered_while_saved_and_loaded(
    warm_ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Main weights are saved, not their bfloat16 copies, and copies follow a load at once."""
    for changed, outs in warm_ranks.run(
        programs.gathered, str(tmp_path), layout, world_size=world_of(layout)
    ):
        assert changed == []
        assert not same_bits(outs[0], outs[1])
        assert same_bits(outs[0], outs[2])


def test_torchs_own_load_reads_the_folder(warm_ranks: RankPool, saved: Saved) -> None:
    """`torch.distributed.checkpoint.load` of the model's state_dict loads the same weights."""
    for wrong in warm_ranks.run(programs.read_with_dcp, *saved["hsdp"], world_size=3):
        assert wrong == []
