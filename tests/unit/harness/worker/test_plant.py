"""Planted faults: each does what the catalogue says, at its step, on its rank, and nothing else.

What ends a process is planted in tests/planted, through the real engine.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.mesh import build_axes, init_ranks
from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.tensor import reduce_replicated_of
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
from harness.worker.plant import Plant
from harness.worker.plants import PLANTINGS
from harness.worker.plants.planting import NotHere, Planting, module_named, wrap
from tests.unit.harness.worker.conftest import TINY, Rank, run_spec

Spec = Callable[..., RunSpec]
STEP = 3
WO, DOWN = "layers.1.attn.attention.wo.weight", "layers.1.mlp.mlp.down.weight"


def steps_of(records: list[Record]) -> list[StepRecord]:
    """The step records."""
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
    for ours, theirs in zip(steps_of(records), steps_of(clean), strict=True):
        for group in DIGEST_GROUPS:
            a, b = ours.digests[group], theirs.digests[group]
            names = start.tensors[group]
            wrong = [n for i, n in enumerate(names) if a[32 * i :][:32] != b[32 * i :][:32]]
            if wrong:
                found[ours.step, group] = wrong
    return found


def records_of(path: Path) -> list[Record]:
    """The records of a file."""
    return [parse_record(line) for line in path.read_text().splitlines()]


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


def plant_of(fault: str, path: Path, spec: Spec, *, tensor: str = "", on: int = 0) -> Plant:
    """A plant for rank 1 of 2, looked at from rank `on`."""
    chosen = spec(PlantSpec(fault=fault, step=STEP, tensor=tensor, rank=1), world_size=2)
    return Plant(chosen, on, RecordFile(path))


def test_every_fault_of_the_catalogue_can_be_planted_and_does_something() -> None:
    """A fault that is planted and does nothing would pass for one that is missed."""
    assert set(PLANTINGS) == set(CATALOGUE)
    assert [name for name, planting in PLANTINGS.items() if planting == Planting()] == []


# ---- numbers


@pytest.mark.parametrize(
    ("fault", "tensor", "graph"),
    [("ulp", "", ()), ("ulp", DOWN, ("full_iteration",)), ("nan", DOWN, ())],
)
def test_weight_faults_show_in_their_step(
    rank: Rank, spec: Spec, fault: str, tensor: str, graph: tuple[str, ...]
) -> None:
    """One weight changes at the named step: that tensor's digest alone, in that step's record."""
    clean = rank.run(spec(graph=graph))
    start = clean[0]
    assert isinstance(start, StartRecord)
    records = rank.run(spec(PlantSpec(fault=fault, step=STEP, tensor=tensor), graph=graph))
    name = tensor or start.tensors["weights"][0]
    changed = differing(records, clean)
    first = {key: names for key, names in changed.items() if key[0] <= STEP}
    assert (rank.code, first) == (0, {(STEP, "weights"): [name]})
    (event,) = planted_events(records)
    assert (event.step, event.detail) == (STEP, {"fault": fault, "tensor": name})
    nonfinite = steps_of(records)[STEP].nonfinite
    assert nonfinite == ({"weights": (name,)} if fault == "nan" else {})


@pytest.mark.parametrize(
    ("fault", "change"),
    {
        "ulp": lambda bits: bits + 1,
        "nan": lambda bits: 0x7FC00000,
        "negative_zero": lambda bits: -(2**31),
        "positive_zero": lambda bits: 0,
    }.items(),
)
def test_weight_faults_touch_one_element(
    trainer: Trainer, spec: Spec, tmp_path: Path, fault: str, change: Callable[[int], int]
) -> None:
    """Exactly one element of exactly one main weight changes, by exactly the bits it should."""
    plant = plant_of(fault, tmp_path / "r", spec, tensor=WO, on=1)
    names, tensors = trainer.digested["weights"]
    before = [tensor.clone() for tensor in tensors]
    plant.after_step(trainer, STEP - 1)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    plant.after_step(trainer, STEP)
    for key, old, new in zip(names, before, tensors, strict=True):
        a, b = old.view(-1).view(torch.int32), new.view(-1).view(torch.int32)
        assert int((a != b).sum()) == (key == WO), key
        if key == WO:
            assert int(b[0]) == change(int(a[0]))


@pytest.mark.parametrize(
    ("fault", "group", "names"),
    [
        ("gradient_rows_swapped", "grads", [DOWN]),
        ("gradient_row_negated", "grads", [DOWN]),
        ("gradient_ulp", "grads", [DOWN]),
        ("exchanged_moments", "weights", [DOWN]),
        ("decayed_norms", "weights", [f"layers.{i}.{x}.norm.weight" for i in (0, 1)
                                      for x in ("attn", "mlp")] + ["norm.weight"]),
        ("repeated_masks", "grads", None),
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
    assert names is None or set(wrong) == set(names) or set(wrong) == set(names[:-1])


# ---- which ranks, and when


def test_other_ranks_are_left_alone(trainer: Trainer, spec: Spec, tmp_path: Path) -> None:
    """On a rank that the plant does not name nothing happens and every line is written."""
    before = [tensor.clone() for tensor in trainer.digested["weights"][1]]
    addresses = {n: t.data_ptr() for n, t in trainer.named_tensors().items()}
    for fault in (name for name, each in CATALOGUE.items() if not each.everywhere):
        path = tmp_path / fault
        file = RecordFile(path)
        chosen = spec(PlantSpec(fault=fault, step=STEP, rank=1), world_size=2)
        plant = Plant(chosen, 0, file)
        for step in range(5):
            plant.before_step(trainer, step)
            plant.after_step(trainer, step)
        plant.after_end()
        assert path.read_text() == "", fault
        file.write(EventRecord(name="x", rank=0, step=STEP))
        assert len(path.read_text().splitlines()) == 1, fault
    after = trainer.digested["weights"][1]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {n: t.data_ptr() for n, t in trainer.named_tensors().items()} == addresses


def test_the_last_rank_is_the_default(spec: Spec, tmp_path: Path) -> None:
    """Rank -1 is the last rank of the run."""
    chosen = spec(PlantSpec(fault="raise", step=0), world_size=4)
    acting = []
    for number in range(4):
        try:
            Plant(chosen, number, RecordFile(tmp_path / str(number))).before_step(cast("Any", 0), 0)
        except RuntimeError:
            acting.append(number)
    assert acting == [3]


def first_stage(**layers: nn.Module) -> Trainer:
    """A trainer of the first stage of a pipeline, without layer 1 if it is not given."""
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Identity(), **layers})})
    config = SimpleNamespace(graph_warmup_steps=2)
    return cast("Trainer", SimpleNamespace(stages=[stage], config=config))


def planted_on(trainer: Trainer, fault: str, path: Path) -> list[str]:
    """What rank 0 says once the fault was planted there."""
    Plant(run_spec(PlantSpec(fault=fault, step=STEP, rank=0)), 0, RecordFile(path)).before_step(
        trainer, STEP
    )
    return [event.detail["fault"] for event in planted_events(records_of(path))]


def test_a_fault_of_all_ranks_acts_where_its_part_is(tmp_path: Path) -> None:
    """A stage without the part goes on, and does not say that it planted anything."""
    norm = nn.LayerNorm(2)
    summed = nn.ModuleDict({"mlp": nn.ModuleDict({"norm": norm})})
    alone = nn.ModuleDict({"mlp": nn.ModuleDict({"norm": nn.Identity()})})
    axis = Axis(name="tp", size=2, rank=0, group=cast("Any", None))
    reduce_replicated_of(norm, ["weight"], axis)
    assert planted_on(first_stage(), "row_sum_missing", tmp_path / "a") == []
    assert planted_on(first_stage(**{"1": alone}), "norm_sum_missing", tmp_path / "b") == []
    trainer = first_stage(**{"1": summed})
    assert planted_on(trainer, "norm_sum_missing", tmp_path / "c") == ["norm_sum_missing"]
    assert cast("Any", norm)._reduced_axis.size == 1
    assert isinstance(module_named(trainer, "layers.0"), nn.Identity)


def test_a_fault_of_one_rank_says_that_the_rank_does_not_hold_its_part(tmp_path: Path) -> None:
    """`nan_activation` names a rank: the wrong one is a mistake, said in one line."""
    with pytest.raises(NotHere, match=r"holds no layers\.1\.mlp\.mlp: plant the fault on one"):
        planted_on(first_stage(), "nan_activation", tmp_path / "r")


def test_two_faults_are_two_causes(rank: Rank, spec: Spec) -> None:
    """Faults planted together both act, each at its step and on its tensor."""
    second = PlantSpec(fault="nan", step=STEP + 1, tensor="norm.weight")
    events = planted_events(rank.run(spec(PlantSpec(fault="ulp", step=STEP, beside=(second,)))))
    assert [(event.step, event.detail["fault"]) for event in events] == [
        (STEP, "ulp"), (STEP + 1, "nan"),
    ]  # fmt: skip


@pytest.mark.parametrize("draw", [0.29, 0.31])
def test_a_chance_decides_for_the_whole_run(
    rank: Rank, spec: Spec, monkeypatch: pytest.MonkeyPatch, draw: float
) -> None:
    """Below its chance a fault acts, else the run is clean; its records say which it was."""
    monkeypatch.setattr("random.SystemRandom.random", lambda self: draw)
    records = rank.run(spec(PlantSpec(fault="ulp", step=STEP, chance=0.3)))
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
        for number in range(3):
            plant = Plant(chosen, number, RecordFile(tmp_path / f"{run}{number}"))
            plant.draw(store)
            assert plant.before_train(config).graph == expected


@dataclasses.dataclass(frozen=True)
class _Frozen:
    """What nobody may assign to."""

    number: int = 1


@pytest.mark.parametrize("owner", [_Frozen(), types.SimpleNamespace(number=1), ModuleType("m")])
def test_an_attribute_is_wrapped_wherever_it_is(owner: Any) -> None:
    """Frozen objects, plain ones and modules have what was made of the attribute."""
    vars(owner)["number"] = 1
    wrap(owner, "number", lambda number: number + 1)
    assert owner.number == 2


# ---- records

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
    make = PLANTINGS[fault].alter
    assert make is not None
    alter = make(PlantSpec(fault=fault, step=STEP))
    assert [written for line in LINES for written in alter(line)] == changed


def test_lines_are_altered_on_their_way_to_the_file(rank: Rank, spec: Spec) -> None:
    """The step's record is missing, every other record is there; or all are."""
    records = rank.run(spec(PlantSpec(fault="drop_step", step=STEP)))
    assert [record.step for record in steps_of(records)] == [0, 1, 2, 4]
    assert isinstance(records[-1], EndRecord)
    assert rank.run(spec(PlantSpec(fault="drop_rank"))) == []
    assert rank.code == 0


# ---- memory and graphs


@pytest.mark.parametrize(
    ("fault", "what", "kind"), [("raise", "crashed", "PlantedError"), ("oom", "oom", None)]
)
def test_a_rank_that_raises(
    rank: Rank, spec: Spec, fault: str, what: str, kind: str | None
) -> None:
    """Before the step: records up to it, then the error; no memory of the machine is touched."""
    records = rank.run(spec(PlantSpec(fault=fault, step=STEP)))
    error = error_of(records)
    assert (rank.code, error.what, error.step) == (1, what, STEP)
    assert kind in (None, error.type)
    assert [record.step for record in steps_of(records)] == [0, 1, 2]
    assert [event.step for event in planted_events(records)] == [STEP]


@pytest.mark.parametrize("fault", ["hoard", "leak"])
def test_memory_that_is_held(rank: Rank, spec: Spec, fault: str) -> None:
    """From the step on: twice the peak before it, or a MiB more after each; no bit changes."""
    clean = rank.run(spec())
    records = rank.run(spec(PlantSpec(fault=fault, step=STEP)))
    assert [event.step for event in planted_events(records)] == [STEP]
    ours, theirs = steps_of(records), steps_of(clean)
    more = [a.live_bytes - b.live_bytes for a, b in zip(ours, theirs, strict=True)]
    peak = 2 * theirs[STEP - 1].peak_bytes
    held = [peak, peak] if fault == "hoard" else [1 << 20, 2 << 20]
    assert more == [0] * STEP + held
    assert (rank.code, differing(records, clean)) == (0, {})


@pytest.mark.parametrize(
    ("graph", "tensor", "strategy"),
    [
        (("attn",), "", "optim_grads_params"),
        (("attn",), WO, "no_shard"),
        (("full_iteration",), WO, "optim_grads_params"),
        (("full_iteration",), "", "no_shard"),
        (("attn",), "", "optim"),
        (("full_iteration",), WO, "optim_grads"),
    ],
)
def test_stale_parameter(
    rank: Rank, spec: Spec, graph: tuple[str, ...], tensor: str, strategy: str
) -> None:
    """Every graph refuses to run over the moved parameter, and the error names it."""
    plant = PlantSpec(fault="stale_parameter", step=STEP, tensor=tensor)
    error = error_of(rank.run(spec(plant, graph=graph, fsdp=FsdpConfig(strategy=strategy))))
    assert (rank.code, error.what, error.step) == (1, "stale_address", STEP)
    assert (tensor or "layers.0.attn.attention.wq.weight") in error.message


def test_stale_parameter_leaves_an_eager_run_intact(rank: Rank, spec: Spec) -> None:
    """Without a graph the move changes no bit: only who remembers addresses is wrong."""
    clean = rank.run(spec())
    records = rank.run(spec(PlantSpec(fault="stale_parameter", step=STEP)))
    assert (rank.code, differing(records, clean)) == (0, {})


def test_stale_parameter_moves_every_time(trainer: Trainer, spec: Spec, tmp_path: Path) -> None:
    """However often it is planted, the address changes and the contents do not."""
    plant = plant_of("stale_parameter", tmp_path / "r", spec, on=1)
    group = next(group for group in trainer.groups if group.name == "layers.0")
    parameter = group.unsharded[group.names.index("layers.0.attn.attention.wq.weight")]
    for _ in range(10):
        address, values = parameter.data_ptr(), parameter.detach().clone()
        plant.before_step(trainer, STEP)
        assert parameter.data_ptr() != address
        assert torch.equal(parameter, values)


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


def test_a_fault_of_records_that_does_not_fire_changes_no_line(
    rank: Rank, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By chance, as any other."""
    monkeypatch.setattr("random.SystemRandom.random", lambda self: 0.9)
    records = rank.run(spec(PlantSpec(fault="drop_step", step=STEP, chance=0.3)))
    assert [record.step for record in steps_of(records)] == [0, 1, 2, 3, 4]
