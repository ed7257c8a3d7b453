"""Checkpoints between layouts: every bit of weights and states, by the names of the whole model."""

from pathlib import Path

import pytest

from fsdp_core.config import ParallelConfig
from tests.dist import layout_checkpoint_programs as programs
from tests.dist import stretch_checkpoint_programs as stretched
from tests.dist.parity_programs import Layout
from tests.dist.rank_pool import RankError, RankPool

LAYOUTS: dict[str, Layout | None] = {
    "one process": None,
    "DP2xTP2xPP2 SP": Layout(ParallelConfig(dp=2, tp=2, pp=2, sequence_parallel=True)),
    "DP2xCP4xEP4": Layout(ParallelConfig(dp=2, cp=4, ep=4), strategy="optim_grads"),
    "HSDP2xTP2xPP2 interleaved EP2xETP2": Layout(
        ParallelConfig(dp_outer=2, tp=2, pp=2, pp_chunks=2, ep=2, etp=2)
    ),
}
FEW = Layout(ParallelConfig(tp=2, pp=2, sequence_parallel=True))
"""Few ranks: quick to start again after a failure."""


def world_of(name: str) -> int:
    """Ranks of a layout."""
    layout = LAYOUTS[name]
    return 1 if layout is None else layout.parallel.world_size


Saved = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def saved(warm_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of each layout: a folder with a checkpoint, and the seed of its values."""
    found = {}
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        folder = str(tmp_path_factory.mktemp("saved"))
        what = programs.problem()
        warm_ranks.run(
            programs.fill_and_save, folder, seed, what, layout, world_size=world_of(name)
        )
        found[name] = folder, seed
    return found


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_loads_what_any_other_saved(
    warm_ranks: RankPool, saved: Saved, name: str
) -> None:
    """Weights, router biases and moments are those saved, cut as this layout cuts them."""
    names = list(saved)
    sources = [saved[n] for n in dict.fromkeys([names[0], names[names.index(name) - 1], name])]
    if name == names[0]:
        sources = list(saved.values())
    world = world_of(name)
    ranks = warm_ranks.run(
        programs.load_each, sources, programs.problem(), LAYOUTS[name], world_size=world
    )
    for found in ranks:
        assert [(names, compared > 20) for names, compared in found] == [([], True)] * len(sources)


def test_copies_that_drifted_apart_are_not_saved(warm_ranks: RankPool, tmp_path: Path) -> None:
    """A replicated weight with other bits on another rank of tp stops the save, by its name."""
    what = programs.problem(2)
    match = r"same model\.layers\.0\.attn\.norm\.weight.* on rank 1 than on rank 0"
    with pytest.raises(RankError, match=match):
        warm_ranks.run(programs.drift_and_save, str(tmp_path), what, FEW, world_size=4)
    assert not list(tmp_path.glob("step-*"))


def test_stages_without_a_layer_do_not_load(warm_ranks: RankPool, saved: Saved) -> None:
    """Stages may each have a part of the names, but all together must have all of them."""
    folder, what = saved["one process"][0], programs.problem()
    with pytest.raises(RankError, match=r"ValueError: .*over all stages.*layers\.3\."):
        warm_ranks.run(programs.load_part, folder, what, FEW, "3", world_size=4)


def test_other_sizes_are_refused(warm_ranks: RankPool, saved: Saved) -> None:
    """A model of fewer layers is told what the checkpoint has besides, in one process too."""
    sources = [saved["DP2xTP2xPP2 SP"]]
    with pytest.raises(RankError, match=r"ValueError: .*with layers\.2\."):
        warm_ranks.run(programs.load_each, sources, programs.problem(2), None, world_size=1)


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_of_several_tensors(warm_ranks: RankPool, tmp_path: Path, dim: int) -> None:
    """Gate and up in one parameter are stored apart, and loaded so, whatever cuts them."""
    folders = [str(tmp_path / name) for name in ("tp 2", "tp 1", "apart")]
    warm_ranks.run(stretched.save_fused, folders[0], 2, dim, world_size=4)
    warm_ranks.run(stretched.save_fused, folders[1], 1, dim, world_size=3)
    warm_ranks.run(stretched.save_apart, folders[2], world_size=1)
    assert warm_ranks.run(stretched.load_apart, folders, world_size=1) == [[]]
    assert warm_ranks.run(stretched.load_fused, folders, 2, dim, world_size=4) == [[]] * 4
    assert warm_ranks.run(stretched.load_fused, folders, 4, dim, world_size=4) == [[]] * 4
    assert warm_ranks.run(stretched.load_fused, folders, 1, dim, world_size=3) == [[]] * 3


def test_states_that_one_library_alone_has(warm_ranks: RankPool, tmp_path: Path) -> None:
    """Layers without scales take none; layers that find none keep theirs, and say so once."""
    ((wrong, scale, said),) = warm_ranks.run(stretched.change_library, str(tmp_path), world_size=1)
    assert (wrong, scale) == ([], 3.0)
    assert len(said) == 1
    assert "has no _extra_state: these stay as they are" in said[0]
