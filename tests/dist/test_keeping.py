"""Kept contents: what was digested, in graphs and outside, and where it lies in the whole model."""

from dataclasses import replace

import pytest

from tests.dist.keeping_programs import Run, bits, keep_all
from tests.dist.rank_pool import RankPool

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
    run = replace(run, taps=TAPS, names=(*run.names, *ROWS))
    runs = [replace(run, graph=graph) for graph in ((), *scopes)]
    for eager, *graphed in warm_ranks.run(keep_all, runs, world_size=2):
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
