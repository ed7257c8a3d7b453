"""Planted faults: each does what the catalogue says, at its step, on its rank, and nothing else.

`harness faults run` plants all of them through the real engine, and says what saw each.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes, init_ranks
from fsdp_core.train import Trainer
from harness.faults.catalogue import CATALOGUE
from harness.recorder import RecordFile
from harness.records import (
    DIGEST_GROUPS,
    EndRecord,
    ErrorRecord,
    EventRecord,
    PlantSpec,
    Record,
    RunSpec,
    StartRecord,
    StepRecord,
    dumps,
    parse_record,
)
from harness.worker.plant import NotHere, Plant, alteration, injections, parsed, places_at
from tests.support.fake_engine import Patch
from tests.unit.harness.worker.conftest import TINY, Rank, run_spec

Spec = Callable[..., RunSpec]
STEP = 3
WO, DOWN = "layers.1.attn.attention.wo.weight", "layers.1.mlp.mlp.down.weight"


def steps_of(records: list[Record]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def planted_events(records: list[Record]) -> list[EventRecord]:
    """What the plant said it did."""
    return [r for r in records if isinstance(r, EventRecord) and r.name == "planted"]


def error_of(records: list[Record]) -> ErrorRecord:
    """The last record, which must be an error."""
    assert isinstance(records[-1], ErrorRecord)
    return records[-1]


def differing(records: list[Record], clean: list[Record]) -> dict[tuple[int, str], list[str]]:
    """By step and group, the names of tensors whose digests differ between two runs."""
    start = clean[0]
    assert isinstance(start, StartRecord)
    found = {}
    for (ours, theirs), group in itertools.product(
        zip(steps_of(records), steps_of(clean), strict=True), DIGEST_GROUPS
    ):
        a, b = ours.digests[group], theirs.digests[group]
        names = enumerate(start.tensors[group])
        if wrong := [n for i, n in names if a[32 * i :][:32] != b[32 * i :][:32]]:
            found[ours.step, group] = wrong
    return found


@pytest.fixture
def trainer(spec: Spec) -> Iterator[Trainer]:
    """A trainer that has run three steps, graphed."""
    device = Device("cpu")
    init_ranks(device, dist.HashStore(), 0, 1, timeout_s=300)
    config = TrainConfig.from_dict(spec(graph=("attn",)).config)
    trainer = Trainer(config, build_axes(ParallelConfig(), device), device)
    for step in range(STEP):
        trainer.step(step)
    yield trainer
    trainer.close()


def test_every_entry_names_injectors_that_there_are() -> None:
    """And its moments: a misspelled one would never act, and pass for a fault that is missed."""
    moments = {"", "early", "capture", "each", "after", "end"}
    for name in CATALOGUE:
        found = injections(PlantSpec(fault=name))
        assert found or alteration(PlantSpec(fault=name)), name
        assert moments >= set(found), name
        for word in (word.removeprefix("@") for _, _, words in parsed(name) for word in words):
            assert word[0] in "{[" or ":" not in word or places_at(None, word), (name, word)
    used = {injector for name in CATALOGUE for _, injector, _ in parsed(name)}
    assert len(used) < 45
    assert "record" in used


@pytest.mark.parametrize(
    ("fault", "group", "names"),
    [
        ("ulp", "weights", ["embedding.weight"]),
        ("nan", "weights", ["embedding.weight"]),
        ("gradient_rows_swapped", "grads", [DOWN]),
        ("gradient_row_negated", "grads", [DOWN]),
        ("exchanged_moments", "weights", [DOWN]),
        ("decayed_norms", "weights", [f"layers.{i}.{x}.norm.weight" for i in (0, 1)
                                      for x in ("attn", "mlp")]),
        ("repeated_masks", "grads", None),
        ("microbatch_counted_twice", "grads", None),
    ],
)  # fmt: skip
def test_a_quiet_fault_shows_first_in_its_step_and_tensor(
    rank: Rank, fault: str, group: str, names: list[str] | None
) -> None:
    """Steps before are the same; in it the tensors that the catalogue means differ first."""
    model = dataclasses.replace(TINY, dropout=0.5 if fault == "repeated_masks" else 0.0)
    clean = rank.run(run_spec(model=model))
    faulty = rank.run(run_spec(PlantSpec(fault=fault, step=STEP), model=model))
    key, wrong = next(iter(differing(faulty, clean).items()))
    assert key == (STEP, group)
    assert names is None or set(wrong) - {"norm.weight"} == set(names)
    (event,) = planted_events(faulty)
    assert (event.step, event.detail["fault"]) == (STEP, fault)


def test_other_ranks_are_left_alone(trainer: Trainer, spec: Spec, tmp_path: Path) -> None:
    """On a rank that the plant does not name, by default the last, nothing happens."""
    before = [tensor.clone() for tensor in trainer.digested["weights"][1]]
    addresses = {n: t.data_ptr() for n, t in trainer.named_tensors().items()}
    for fault in (name for name, each in CATALOGUE.items() if not each.everywhere):
        path = tmp_path / fault
        file = RecordFile(path)
        plant = Plant(spec(PlantSpec(fault=fault, step=STEP), world_size=2), 0, file)
        for step in range(5):
            plant.before_step(trainer, step)
            plant.after_step(trainer, step)
        plant.after_end()
        file.write(EventRecord(name="x", rank=0, step=STEP))
        assert len(path.read_text().splitlines()) == 1, fault
    after = trainer.digested["weights"][1]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {n: t.data_ptr() for n, t in trainer.named_tensors().items()} == addresses
    last = Plant(spec(PlantSpec(fault="raise"), world_size=4), 3, RecordFile(tmp_path / "last"))
    with pytest.raises(RuntimeError, match="planted exception"):
        last.before_step(trainer, 0)


class _Stage(nn.ModuleDict):
    """The first stage of a pipeline: what is planted in layer 1 is not here."""

    @property
    def numbered_layers(self) -> dict[str, Any]:
        return {}


def test_a_fault_acts_where_its_part_is(tmp_path: Path) -> None:
    """One of all ranks is silent elsewhere; of one rank the wrong one is a mistake, said so."""
    config = SimpleNamespace(graph_warmup_steps=2)
    stages = [_Stage({"layers": nn.ModuleDict({"0": nn.Identity()})})]
    trainer = cast("Trainer", SimpleNamespace(stages=stages, config=config))
    for fault in ("row_sum_missing", "nan_activation"):
        file = RecordFile(tmp_path / fault)
        plant = Plant(run_spec(PlantSpec(fault=fault, step=STEP, rank=0)), 0, file)
        if CATALOGUE[fault].everywhere:
            plant.before_step(trainer, STEP)
            assert not (tmp_path / fault).read_text()
        else:
            with pytest.raises(NotHere, match=r"holds no layers\.1\.mlp\.mlp: plant the fault on"):
                plant.before_step(trainer, STEP)


@pytest.mark.parametrize("fault", ["gather_buffer_given_twice", "graphs_exchanged"])
def test_a_fault_of_two_layers_says_that_there_is_one(rank: Rank, fault: str) -> None:
    """A stage of a pipeline may hold no second one."""
    one = dataclasses.replace(TINY, layers=1)
    error = error_of(rank.run(run_spec(PlantSpec(fault=fault, step=STEP), model=one,
                                       graph=("attn",))))  # fmt: skip
    assert (error.type, error.step) == ("NotHere", STEP)


@pytest.mark.parametrize("draw", [0.29, 0.31])
@pytest.mark.parametrize("fault", ["ulp", "drop_step"])
def test_a_chance_decides_for_the_whole_run(
    rank: Rank, spec: Spec, monkeypatch: Patch, draw: float, fault: str
) -> None:
    """Below its chance a fault acts, else the run is clean; its records say which it was."""
    monkeypatch.setattr("random.SystemRandom.random", lambda self: draw)
    records = rank.run(spec(PlantSpec(fault=fault, step=STEP, chance=0.3)))
    fires = draw < 0.3
    (event,) = (r for r in records if isinstance(r, EventRecord) and r.name == "chance")
    assert event.detail == {"fault": fault, "fires": fires}
    if fault == "ulp":
        assert len(planted_events(records)) == fires
    else:
        assert len(steps_of(records)) == 5 - fires


def test_ranks_agree_on_a_chance(spec: Spec, tmp_path: Path, monkeypatch: Patch) -> None:
    """Rank 0 decides once a run; every rank plants, or none does."""
    draws = iter([0.4, 0.6])
    monkeypatch.setattr("random.SystemRandom.random", lambda self: next(draws))
    chosen = spec(PlantSpec(fault="skip_graphs", chance=0.5), world_size=3, graph=("attn",))
    config = TrainConfig.from_dict(chosen.config)
    for run, expected in enumerate([(), ("attn",)]):
        store = dist.HashStore()
        for number in range(3):
            plant = Plant(chosen, number, RecordFile(tmp_path / f"{run}{number}"))
            plant.draw(store)
            assert plant.before_train(config).graph == expected


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
        ("record_after_end", [*LINES, LINES[6]]),
        ("record_of_another_rank",
         [*LINES[:4], LINES[4].replace('"rank":0', '"rank":1'), *LINES[5:]]),
        ("record_of_the_step_before",
         [*LINES[:4], LINES[4].replace('"grads":"3"', '"grads":"2"'), *LINES[5:]]),
        ("record_of_another_run", [LINES[0].replace("w1-a", "w1-x"), *LINES[1:]]),
        ("end_record_lost", LINES[:-1]),
        ("drop_rank", []),
    ],
)  # fmt: skip
def test_alterations_change_what_they_say(fault: str, changed: list[str]) -> None:
    """Each fault of records changes the lines of its step, or its kind, and no others."""
    alter = alteration(PlantSpec(fault=fault, step=STEP))
    assert alter is not None
    assert [written for line in LINES for written in alter(line)] == changed


def test_lines_are_altered_on_their_way_to_the_file(rank: Rank, spec: Spec) -> None:
    """By two faults, one of which leaves no JSON to the other."""
    second = PlantSpec(fault="end_record_lost")
    with pytest.raises(ValueError, match="JSON"):  # half a line
        rank.run(spec(PlantSpec(fault="corrupt_record", step=STEP, beside=(second,))))
    kinds = [parse_record(line) for line in rank.lines if line.endswith("}")]
    assert [record.step for record in steps_of(kinds)] == [0, 1, 2, 4]
    assert not [record for record in kinds if isinstance(record, EndRecord)]


def test_plants_that_cannot_act_say_so(rank: Rank, spec: Spec) -> None:
    """An unknown parameter, or one without memory to move, is an error and not a silent pass."""
    for fault in ("stale_parameter", "ulp"):
        error = error_of(rank.run(spec(PlantSpec(fault=fault, step=STEP, tensor="layers.9.w"))))
        assert "plant.tensor: expected a parameter" in error.message
        assert "'layers.9.w'; legal values: " in error.message
        assert "layers.0.attn.attention.wq.weight" in error.message
    dynamic = {"graph": ("full_iteration",), "fsdp": FsdpConfig(pool="dynamic")}
    error = error_of(rank.run(spec(PlantSpec(fault="stale_parameter", step=STEP), **dynamic)))
    assert "to have memory between steps" in error.message
