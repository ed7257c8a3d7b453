"""Taps over ranks: the same rows in every graph scope, on every layout, and no bit changed."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from fsdp_core.train.taps import NEVER, PLACE_COLUMN
from tests.dist.rank_pool import RankError, RankPool
from tests.dist.train_layout_programs import DEVICE, STEPS, Run

PAST = f"[{Run({}).microbatches}]"
"""Rows for calls of a module that others share; none of those looked into here is."""
LOOK = (
    "layers.*:input", "layers.*.*:output", "layers.*.*:gradient", "**.norm:output",
    "embedding:output", "head:gradient",
)  # fmt: skip
ROUTER = ("attn", "moe_router", "moe_preprocess")


def run_of(degrees: dict[str, Any], preset: str = "dense_tiny_dropout", **options: Any) -> Run:
    """One training that is looked into."""
    return Run(degrees, preset, fsdp={"pool": "double"}, **({"taps": LOOK} | options))


@dataclass
class Seen:
    """What a rank saw: digests by step, rows of taps by step and name, stages, unnamed memory."""

    digests: list[Any]
    rows: list[dict[str, list[int]]]
    stages: dict[str, int]
    places: list[str]


def train_all(runs: list[Run]) -> list[Seen]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].config.parallel, DEVICE)
    found = []
    for run in runs:
        trainer = Trainer(run.config, axes, DEVICE)
        seen = Seen([], [], dict(zip(trainer.taps.names, trainer.taps.stages, strict=True)), [])
        for step in range(STEPS):
            outputs = trainer.step(step)
            seen.digests.append({g: r.flatten().tolist() for g, r in outputs.digests.items()})
            rows = dict(zip(trainer.taps.names, trainer.taps.rows.tolist(), strict=True))
            past = [rows.pop(name) for name in trainer.taps.names if name.endswith(PAST)]
            assert all(row[PLACE_COLUMN] == NEVER for row in past)
            seen.rows.append(rows)
        seen.places = trainer.counts.external_places
        trainer.close()
        found.append(seen)
    return found


@pytest.mark.parametrize(
    ("run", "scopes"),
    [
        (run_of({"tp": 2, "pp": 2}), [("layer",), ("full_iteration",)]),
        (run_of({"dp": 2, "ep": 2}, "moe_tiny", overrides={"capacity_factor": 1.25},
             taps=(*LOOK, "**.moe:input", "**.router")),
         [ROUTER, ("full_iteration",)]),
    ],
    ids=["pipeline of tensor parallel ranks", "experts"],
)  # fmt: skip
def test_graphs_show_what_eager_shows(
    run: Run, scopes: list[tuple[str, ...]], warm_ranks: RankPool
) -> None:
    """Each call that both run has eager's digest, in every step, on every rank; none is lost."""
    runs = [replace(run, graph=graph) for graph in ((), *scopes)]
    plain = replace(run, taps=())
    world_size = run.config.parallel.world_size
    for untapped, eager, *graphed in warm_ranks.run(
        train_all, [plain, *runs], world_size=world_size
    ):
        assert untapped.digests == eager.digests
        assert all(row[PLACE_COLUMN] != NEVER for rows in eager.rows for row in rows.values())
        # Two steps and two calls of a module are never alike: what is compared says something.
        outputs = [row[:4] for rows in eager.rows for name, row in rows.items() if "attn:" in name]
        assert len({tuple(row) for row in outputs}) == len(outputs)
        for seen, scope in zip(graphed, scopes, strict=True):
            assert seen.digests == eager.digests, scope
            assert seen.places == [], scope
            for a, b in zip(eager.rows, seen.rows, strict=True):
                lost = {name for name, row in b.items() if row[PLACE_COLUMN] == NEVER}
                # Where the router is captured apart, experts are not called as one module.
                assert {name.partition(":")[0] for name in lost} <= (
                    {f"layers.{i}.mlp.moe" for i in range(2)} if scope == ROUTER else set()
                )
                for name in a.keys() - lost:
                    assert a[name][:5] == b[name][:5], (scope, name)


def test_stages_are_those_of_the_model(warm_ranks: RankPool) -> None:
    """Ranks of a pipeline say which stage a module is in, by the number in the whole pipeline."""
    run = run_of({"pp": 2}, taps=("layers.*:output", "embedding", "head"))
    first, second = (ranks[0] for ranks in warm_ranks.run(train_all, [run], world_size=2))
    assert {n.partition(":")[0]: stage for n, stage in first.stages.items()} == {
        "embedding": 0, "layers.0": 0,
    }  # fmt: skip
    assert {n.partition(":")[0]: stage for n, stage in second.stages.items()} == {
        "layers.1": 1, "head": 1,
    }  # fmt: skip


def look_for(taps: tuple[str, ...]) -> None:
    """A trainer of two stages."""
    run = run_of({"pp": 2}, taps=taps)
    Trainer(run.config, build_axes(run.config.parallel, DEVICE), DEVICE)


def test_a_pattern_may_mean_modules_of_one_rank_alone(warm_ranks: RankPool) -> None:
    """A module of another stage is found there; one of no stage is refused on every rank."""
    warm_ranks.run(look_for, ("head", "embedding"), world_size=2)
    refused = r"expected a pattern that means a module .*, got 'layers\.9:output'"
    with pytest.raises(RankError, match=refused):
        warm_ranks.run(look_for, ("head", "layers.9"), world_size=2)
