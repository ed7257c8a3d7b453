"""Kept contents: what was digested, in graphs and outside, and where it lies in the whole model."""

from dataclasses import replace

import pytest
import torch

from tests.dist.keeping_programs import GROUPS, bits, initial, keep, keep_all, whole
from tests.dist.rank_pool import RankError, RankPool
from tests.dist.train_layout_programs import Run

TAPS = ("layers.*.attn:output", "layers.*.mlp:input", "**.norm:output", "layers.*:gradient")
ROWS = ("layers.1.attn:output[1]", "layers.0.mlp:input[0]", "layers.*:gradient[1]")


@pytest.mark.parametrize(
    ("run", "scopes"),
    [
        (Run({"tp": 2}, preset="dense_tiny_dropout"),
         [("layer",), ("full_iteration",)]),
        (Run({"dp": 2, "ep": 2}, preset="moe_tiny", overrides={"capacity_factor": 1.25}),
         [("full_iteration",)]),
    ],
    ids=["tensor parallel", "experts"],
)  # fmt: skip
def test_copies_are_what_was_digested(
    run: Run, scopes: list[tuple[str, ...]], warm_ranks: RankPool
) -> None:
    """In every scope each copy gives the digest of its step, and has eager's bits."""
    run = replace(run, taps=TAPS, steps=3, fsdp={"pool": "double"})
    runs = [replace(run, graph=graph) for graph in ((), *scopes)]
    for eager, *graphed in warm_ranks.run(keep_all, runs, (*GROUPS, *ROWS), world_size=2):
        assert all(kept.as_digested for step in eager for kept in step)
        rows = {kept.name for kept in eager[0] if kept.name.startswith("layers.")}
        gradients = {f"layers.{number}:gradient[1]" for number in range(2)}
        assert rows == {*ROWS[:2], *gradients}
        for seen in graphed:
            for a, b in zip(eager, seen, strict=True):
                assert [(k.name, k.part, bits(k.tensor)) for k in a] == [
                    (k.name, k.part, bits(k.tensor)) for k in b
                ]
                assert all(kept.as_digested for kept in b)


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
