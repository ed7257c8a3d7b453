"""Several planted faults at once, faults of chance, and what becomes of lines of records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from harness.plant_spec import PlantSpec
from harness.records import EventRecord, Record, RunSpec, dumps
from harness.worker.plant import Plant
from harness.worker.plants.infrastructure import ALTERATIONS
from harness.worker.record_file import RecordFile

Spec = Callable[..., RunSpec]
STEP = 3


def planted_events(records: list[Record]) -> list[EventRecord]:
    """What the plants said they did."""
    return [r for r in records if isinstance(r, EventRecord) and r.name == "planted"]


LINES = [
    dumps({"kind": "start", "run": "w1-a"}),
    *(
        dumps({"kind": "step", "step": n, "rank": 0, "digests": {"grads": str(n)}})
        for n in range(6)
    ),
    dumps({"kind": "end"}),
]


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        ("drop_step", LINES[:4] + LINES[5:]),
        ("corrupt_record", [*LINES[:4], LINES[4][: len(LINES[4]) // 2], *LINES[5:]]),
        ("repeated_record", [*LINES[:4], LINES[4], *LINES[4:]]),
        ("records_out_of_order", [*LINES[:4], LINES[5], LINES[4], *LINES[6:]]),
        (
            "record_of_another_rank",
            [*LINES[:4], LINES[4].replace('"rank":0', '"rank":1'), *LINES[5:]],
        ),
        (
            "record_of_the_step_before",
            [*LINES[:4], LINES[4].replace('"grads":"3"', '"grads":"2"'), *LINES[5:]],
        ),
        ("record_of_another_run", [LINES[0].replace("w1-a", "w1-x"), *LINES[1:]]),
        ("end_record_lost", LINES[:-1]),
        ("drop_rank", []),
    ],
)
def test_alterations_change_what_they_say(fault: str, changed: list[str]) -> None:
    """Each fault of records changes the lines of its step, or its kind, and no others."""
    alter = ALTERATIONS[fault](PlantSpec(fault=fault, step=STEP))
    assert [written for line in LINES for written in alter(line)] == changed


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
