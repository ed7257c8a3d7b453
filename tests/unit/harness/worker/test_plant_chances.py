"""Several faults planted at once, and faults that fire in some runs only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from harness.records import EventRecord, PlantSpec, Record, RunSpec
from harness.worker.plant import Plant
from harness.worker.record_file import RecordFile

Spec = Callable[..., RunSpec]
STEP = 3


def planted_events(records: list[Record]) -> list[EventRecord]:
    """What the plant said it did."""
    return [r for r in records if isinstance(r, EventRecord) and r.name == "planted"]


def test_two_faults_are_two_causes(rank: Any, spec: Spec) -> None:
    """Faults planted together both act, each at its step and on its tensor."""
    plant = PlantSpec(
        fault="ulp",
        step=STEP,
        beside=(PlantSpec(fault="nan", step=STEP + 1, tensor="norm.weight"),),
    )
    events = planted_events(rank.run(spec(plant)))
    assert [(event.step, event.detail["fault"]) for event in events] == [
        (STEP, "ulp"), (STEP + 1, "nan"),
    ]  # fmt: skip


@pytest.mark.parametrize("draw", [0.29, 0.31])
def test_a_chance_decides_for_the_whole_run(
    rank: Any, spec: Spec, monkeypatch: pytest.MonkeyPatch, draw: float
) -> None:
    """Below its chance a fault acts, else the run is clean; its records say which it was."""
    monkeypatch.setattr("random.SystemRandom.random", lambda self: draw)
    plant = PlantSpec(fault="ulp", step=STEP, chance=0.3)
    records = rank.run(spec(plant))
    fires = draw < 0.3
    (event,) = (r for r in records if isinstance(r, EventRecord) and r.name == "chance")
    assert event.detail == {"fault": "ulp", "fires": fires}
    assert len(planted_events(records)) == fires


def test_ranks_agree_on_a_chance(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 decides once a run; every rank plants, or none does."""
    draws = iter([0.4, 0.6])
    monkeypatch.setattr("random.SystemRandom.random", lambda self: next(draws))
    chosen = spec(PlantSpec(fault="skip_graphs", chance=0.5), world_size=3, graph=("attn",))
    config = TrainConfig.from_dict(chosen.config)
    for run, expected in enumerate([(), ("attn",)]):
        store = dist.HashStore()
        for rank in range(3):
            plant = Plant(chosen, rank, RecordFile(tmp_path / f"{run}{rank}"))
            plant.draw(store)
            assert plant.before_train(config).graph == expected
