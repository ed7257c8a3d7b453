"""Taps over ranks by stage, and kept contents with their places in the whole model.

That taps are alike in every graph scope is shown by scenarios: `nightly/all_axes`, `pr/`.
"""

from collections.abc import Iterable

import pytest
import torch

from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from fsdp_core.train.taps import Snapshot
from tests.dist.rank_pool import RankError, RankPool
from tests.dist.train_layout_programs import DEVICE, Run

GROUPS = ("grads:*", "weights:*", "optim:*")


def trainer_of(run: Run) -> Trainer:
    """The trainer of a run on this rank."""
    return Trainer(run.config, build_axes(run.parallel, DEVICE), DEVICE)


def stages_of(taps: tuple[str, ...]) -> dict[str, int]:
    """Stage by module of a trainer of two stages."""
    found = trainer_of(Run({"pp": 2}, taps=taps)).taps
    return {
        name.partition(":")[0]: stage for name, stage in zip(found.names, found.stages, strict=True)
    }


def test_stages_are_those_of_the_model(warm_ranks: RankPool) -> None:
    """By the number in the whole pipeline; a module of no stage is refused on every rank."""
    taps = ("layers.*:output", "embedding", "head")
    assert warm_ranks.run(stages_of, taps, world_size=2) == [
        {"embedding": 0, "layers.0": 0}, {"layers.1": 1, "head": 1},
    ]  # fmt: skip
    refused = r"expected a pattern that means a module .*, got 'layers\.9:output'"
    with pytest.raises(RankError, match=refused):
        warm_ranks.run(stages_of, ("head", "layers.9"), world_size=2)


def keep(run: Run, names: tuple[str, ...] = GROUPS, most: int = 1 << 24) -> list[list[Snapshot]]:
    """What a rank has kept of every step; at most so many bytes."""
    trainer = trainer_of(run)
    keeping = trainer.keep(names, most)
    found = []
    for step in range(run.steps):
        outputs = trainer.step(step)
        found.append(keeping.read(outputs.digests))
    assert not trainer.counts.external_places
    trainer.close()
    return found


def initial(runs: list[Run]) -> list[list[Snapshot]]:
    """The weights that each of some runs begins with."""
    found = []
    for run in runs:
        trainer = trainer_of(run)
        keeping = trainer.keep(("weights:*",), 1 << 24)
        trainer.redigest_state()
        found.append(keeping.read(trainer.outputs.digests))
        assert all(kept.as_digested for kept in found[-1])
        trainer.close()
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(ranks: Iterable[list[Snapshot]]) -> dict[str, torch.Tensor]:
    """Whole tensors of float32 out of every rank's pieces, by group and global name.

    Where two ranks have the same element they must agree; every element must be had by some rank.
    """
    found: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for kept in (each for rank in ranks for each in rank):
        group = kept.name.partition(":")[0]
        for place in kept.places:
            name = f"{group}:{place.name}"
            tensor = found.setdefault(name, torch.zeros(place.shape))
            seen = covered.setdefault(name, torch.zeros(place.shape, dtype=torch.bool))
            into, out = boxes(place.offsets, place.sizes), boxes(place.local_offsets, place.sizes)
            mine = kept.tensor[out].float()
            twice = seen[into]
            assert torch.equal(tensor[into][twice], mine[twice]), name
            tensor[into] = mine
            seen[into] = True
    assert all(bool(seen.all()) for seen in covered.values())
    return found


def boxes(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


MOE, MLA = "moe_tiny", "mla_moe_tiny"
LAYOUTS = {
    1: [Run({}), Run({}, preset=MOE), Run({}, preset=MLA)],
    2: [
        Run({"dp": 2}), Run({"tp": 2}), Run({"pp": 2}), Run({"cp": 2}),
        Run({"dp": 2}, fsdp={"strategy": "no_shard"}), Run({"tp": 2, "sequence_parallel": True}),
        Run({"dp": 2}, preset=MOE), Run({"dp": 2, "ep": 2}, preset=MOE),
        Run({"dp": 2, "etp": 2}, preset=MLA), Run({"dp": 2, "ep": 2}, preset=MLA),
    ],
    4: [
        Run({"dp": 2, "tp": 2}), Run({"dp": 2, "dp_outer": 2}), Run({"tp": 2, "pp": 2}),
        Run({"dp": 4, "ep": 2, "etp": 2}, preset=MOE),
        Run({"dp": 2, "tp": 2, "ep": 2, "etp": 2}, preset=MLA),
        Run({"dp": 2, "pp": 2, "ep": 2}, preset=MLA),
    ],
}  # fmt: skip


def test_pieces_of_every_layout_make_the_whole_model(warm_ranks: RankPool) -> None:
    """Put together, first weights of each layout have every element, and the bits of one rank."""
    wholes: dict[str, dict[str, torch.Tensor]] = {}
    for world_size, runs in LAYOUTS.items():
        ranks = warm_ranks.run(initial, runs, world_size=world_size)
        for run, *pieces in zip(runs, *ranks, strict=True):
            found = whole(pieces)
            expected = wholes.setdefault(run.preset, found)
            assert found.keys() == expected.keys(), run
            for name, tensor in expected.items():
                assert bits(found[name]) == bits(tensor), (run, name)
    layers = wholes[MOE]
    assert layers["weights:layers.1.mlp.moe.experts.gate.weight"].shape == (8, 32, 32)


def test_a_rank_without_room_says_so(warm_ranks: RankPool) -> None:
    """The cap is a rank's own, in bytes."""
    with pytest.raises(RankError, match="Expected copies of at most 4000 bytes on a rank"):
        warm_ranks.run(keep, Run({"dp": 2}), GROUPS, 4000, world_size=2)
