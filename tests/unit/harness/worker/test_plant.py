"""Planted faults: each does what the catalogue says, at its step, on its rank, and nothing else."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.mesh import build_axes, init_ranks
from fsdp_core.train import Trainer
from harness.faults.catalogue import CATALOGUE
from harness.records import (
    EndRecord,
    ErrorRecord,
    EventRecord,
    PlantSpec,
    Record,
    RecordError,
    RunSpec,
    StartRecord,
    StepRecord,
    parse_record,
)
from harness.worker.main import rank_main
from harness.worker.plant import Plant
from harness.worker.record_file import RecordFile

Spec = Callable[..., RunSpec]
STEP = 3


def steps_of(records: list[Record]) -> list[StepRecord]:
    """The step records."""
    return [record for record in records if isinstance(record, StepRecord)]


def planted_events(records: list[Record]) -> list[EventRecord]:
    """What the plant said it did."""
    return [r for r in records if isinstance(r, EventRecord) and r.name == "planted"]


def differing(records: list[Record], clean: list[Record], group: str) -> dict[int, list[str]]:
    """Per step, the names of tensors whose digests differ between two runs."""
    start = clean[0]
    assert isinstance(start, StartRecord)
    found = {}
    for ours, theirs in zip(steps_of(records), steps_of(clean), strict=True):
        a, b = ours.digests[group], theirs.digests[group]
        names = start.tensors[group]
        wrong = [
            name
            for index, name in enumerate(names)
            if a[32 * index : 32 * index + 32] != b[32 * index : 32 * index + 32]
        ]
        if wrong:
            found[ours.step] = wrong
    return found


@pytest.mark.parametrize(
    ("fault", "tensor", "graph"),
    [
        ("ulp", "", ()),
        ("ulp", "layers.1.mlp.mlp.down.weight", ("full_iteration",)),
        ("nan", "layers.1.mlp.mlp.down.weight", ()),
        ("negative_zero", "", ()),
        ("positive_zero", "norm.weight", ()),
    ],
)
def test_weight_faults(
    rank: Any, spec: Spec, fault: str, tensor: str, graph: tuple[str, ...]
) -> None:
    """One weight changes at the named step: that tensor's digest alone, in that step's record."""
    clean = rank.run(spec(graph=graph))
    start = clean[0]
    assert isinstance(start, StartRecord)
    records = rank.run(spec(PlantSpec(fault=fault, step=STEP, tensor=tensor), graph=graph))
    assert rank.code == 0
    name = tensor or start.tensors["weights"][0]
    changed = differing(records, clean, "weights")
    assert min(changed) == STEP
    assert changed[STEP] == [name]
    assert STEP not in differing(records, clean, "grads")
    assert STEP not in differing(records, clean, "optim")
    (event,) = planted_events(records)
    assert (event.step, event.detail) == (STEP, {"fault": fault, "tensor": name})
    nonfinite = steps_of(records)[STEP].nonfinite
    assert nonfinite == ({"weights": (name,)} if fault == "nan" else {})


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
    name = "layers.1.attn.attention.wo.weight"
    plant = plant_of(fault, tmp_path / "r", spec, tensor=name, on=1)
    names, tensors = trainer.digested["weights"]
    before = [tensor.clone() for tensor in tensors]
    plant.after_step(trainer, STEP - 1)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    plant.after_step(trainer, STEP)
    for key, old, new in zip(names, before, tensors, strict=True):
        a, b = old.view(-1).view(torch.int32), new.view(-1).view(torch.int32)
        assert int((a != b).sum()) == (key == name), key
        if key == name:
            assert int(b[0]) == change(int(a[0]))


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
        assert len(records_of(path)) == 1, fault
    after = trainer.digested["weights"][1]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {n: t.data_ptr() for n, t in trainer.named_tensors().items()} == addresses


def records_of(path: Path) -> list[Record]:
    """The records of a file."""
    return [parse_record(line) for line in path.read_text().splitlines()]


def test_the_last_rank_is_the_default(spec: Spec, tmp_path: Path) -> None:
    """Rank -1 is the last rank of the run."""
    chosen = spec(PlantSpec(fault="raise", step=0), world_size=4)
    silent = [Plant(chosen, r, RecordFile(tmp_path / str(r))) for r in range(4)]
    acting = []
    for number, plant in enumerate(silent):
        try:
            plant.before_step(None, 0)  # type: ignore[arg-type]  # a plant that acts needs none
        except RuntimeError:
            acting.append(number)
    assert acting == [3]


def test_drop_step(rank: Any, spec: Spec) -> None:
    """The step's record is missing, every other record is there."""
    records = rank.run(spec(PlantSpec(fault="drop_step", step=STEP)))
    assert [record.step for record in steps_of(records)] == [0, 1, 2, 4]
    assert isinstance(records[-1], EndRecord)
    assert rank.code == 0


def test_drop_rank(rank: Any, spec: Spec) -> None:
    """The rank writes nothing and leaves with 0."""
    assert rank.run(spec(PlantSpec(fault="drop_rank"))) == []
    assert rank.code == 0


def test_corrupt_record(rank: Any, spec: Spec) -> None:
    """The step's line is cut in half and is no record; the lines beside it are whole."""
    with pytest.raises(RecordError):
        rank.run(spec(PlantSpec(fault="corrupt_record", step=STEP)))
    folder = rank.folder / "0"
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    broken = []
    for number, line in enumerate(lines):
        try:
            parse_record(line)
        except RecordError:
            broken.append(number)
    assert broken == [2 + STEP]  # after the start and the state before step 0
    assert lines[2 + STEP].startswith("{")


def test_record_after_end(rank: Any, spec: Spec) -> None:
    """A step record follows the end record."""
    records = rank.run(spec(PlantSpec(fault="record_after_end")))
    assert isinstance(records[-2], EndRecord)
    assert isinstance(records[-1], StepRecord)
    assert records[-1] == steps_of(records)[-2]


def test_raise(rank: Any, spec: Spec) -> None:
    """The rank raises before the step: records up to it, then the error."""
    records = rank.run(spec(PlantSpec(fault="raise", step=STEP)))
    error = records[-1]
    assert isinstance(error, ErrorRecord)
    assert (rank.code, error.what, error.type, error.step) == (1, "crashed", "PlantedError", STEP)
    assert [record.step for record in steps_of(records)] == [0, 1, 2]
    assert [event.step for event in planted_events(records)] == [STEP]


def test_oom(rank: Any, spec: Spec) -> None:
    """The allocator refuses, without the machine's memory being touched."""
    records = rank.run(spec(PlantSpec(fault="oom", step=STEP)))
    error = records[-1]
    assert isinstance(error, ErrorRecord)
    assert (rank.code, error.what, error.step) == (1, "oom", STEP)
    assert len(steps_of(records)) == STEP


def test_skip_graphs(rank: Any, spec: Spec) -> None:
    """Every step runs and agrees, no graph is replayed."""
    clean = rank.run(spec(graph=("attn",)))
    records = rank.run(spec(PlantSpec(fault="skip_graphs"), graph=("attn",)))
    assert rank.code == 0
    replays = [r.replays for log in (clean, records) for r in log if isinstance(r, EndRecord)]
    assert replays[0] > 0
    assert replays[1:] == [0]
    assert differing(records, clean, "weights") == {}


def test_hoard(rank: Any, spec: Spec) -> None:
    """From the step on, live memory is up by twice the peak before it; no bit changes."""
    clean = rank.run(spec())
    records = rank.run(spec(PlantSpec(fault="hoard", step=STEP)))
    assert rank.code == 0
    ours, theirs = steps_of(records), steps_of(clean)
    more = [a.live_bytes - b.live_bytes for a, b in zip(ours, theirs, strict=True)]
    assert more[:STEP] == [0] * STEP
    assert more[STEP:] == [2 * theirs[STEP - 1].peak_bytes] * (len(ours) - STEP)
    assert differing(records, clean, "weights") == {}


def test_leak(rank: Any, spec: Spec) -> None:
    """From the step on, live memory is up by a MiB more after each step; no bit changes."""
    clean = rank.run(spec())
    records = rank.run(spec(PlantSpec(fault="leak", step=STEP)))
    assert rank.code == 0
    assert [event.step for event in planted_events(records)] == [STEP]
    ours, theirs = steps_of(records), steps_of(clean)
    more = [a.live_bytes - b.live_bytes for a, b in zip(ours, theirs, strict=True)]
    assert more == [0] * STEP + [1 << 20, 2 << 20]
    assert differing(records, clean, "weights") == {}


@pytest.mark.parametrize(
    ("graph", "tensor", "strategy"),
    [
        (("attn",), "", "optim_grads_params"),
        (("attn",), "layers.1.attn.attention.wo.weight", "no_shard"),
        (("full_iteration",), "layers.1.attn.attention.wo.weight", "optim_grads_params"),
        (("full_iteration",), "", "no_shard"),
        (("attn",), "", "optim"),
        (("full_iteration",), "layers.1.attn.attention.wo.weight", "optim_grads"),
    ],
)
def test_stale_parameter(
    rank: Any, spec: Spec, graph: tuple[str, ...], tensor: str, strategy: str
) -> None:
    """Every graph refuses to run over the moved parameter, and the error names it."""
    plant = PlantSpec(fault="stale_parameter", step=STEP, tensor=tensor)
    records = rank.run(spec(plant, graph=graph, fsdp=FsdpConfig(strategy=strategy)))
    error = records[-1]
    assert isinstance(error, ErrorRecord)
    assert (rank.code, error.what, error.step) == (1, "stale_address", STEP)
    assert (tensor or "layers.0.attn.attention.wq.weight") in error.message


def test_stale_parameter_leaves_an_eager_run_intact(rank: Any, spec: Spec) -> None:
    """Without a graph the move changes no bit: only who remembers addresses is wrong."""
    clean = rank.run(spec())
    records = rank.run(spec(PlantSpec(fault="stale_parameter", step=STEP)))
    assert rank.code == 0
    for group in ("grads", "weights", "optim", "rng"):
        assert differing(records, clean, group) == {}


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


def test_plants_that_cannot_act_say_so(rank: Any, spec: Spec) -> None:
    """An unknown parameter, or one without memory to move, is an error and not a silent pass."""
    for fault in ("stale_parameter", "ulp"):
        records = rank.run(spec(PlantSpec(fault=fault, step=STEP, tensor="layers.9.w")))
        error = records[-1]
        assert isinstance(error, ErrorRecord)
        assert "plant.tensor: expected a parameter" in error.message
        assert "'layers.9.w'; legal values: " in error.message
        assert "layers.0.attn.attention.wq.weight" in error.message
    records = rank.run(
        spec(
            PlantSpec(fault="stale_parameter", step=STEP),
            graph=("full_iteration",),
            fsdp=FsdpConfig(pool="dynamic"),
        )
    )
    assert isinstance(records[-1], ErrorRecord)
    assert "to have memory between steps" in records[-1].message


def run_rank(spec: RunSpec, folder: Path) -> None:
    """Body of a child process: one rank to its end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os._exit(rank_main(spec, folder, 0, store.port))


def in_child(spec: RunSpec, folder: Path) -> Any:
    """Start a rank in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "harness.worker.main"])
    child = context.Process(target=run_rank, args=(spec, folder))
    child.start()
    return child


def records_in(folder: Path) -> list[Record]:
    """Whole lines written so far."""
    path = folder / "rank0.jsonl"
    return records_of(path) if path.exists() else []


@pytest.mark.parametrize(
    ("fault", "code"), [("sigkill", -signal.SIGKILL), ("exit", 13)], ids=["sigkill", "exit"]
)
def test_deaths(spec: Spec, tmp_path: Path, fault: str, code: int) -> None:
    """The process ends as the fault says, before the step, with all earlier records whole."""
    child = in_child(spec(PlantSpec(fault=fault, step=STEP)), tmp_path)
    child.join(60)
    assert child.exitcode == code
    records = records_in(tmp_path)
    assert [record.step for record in steps_of(records)] == [0, 1, 2]
    assert [event.detail["fault"] for event in planted_events(records)] == [fault]
    assert not any(isinstance(record, ErrorRecord | EndRecord) for record in records)


def test_hang(spec: Spec, tmp_path: Path) -> None:
    """The rank announces itself, stays alive and goes no further."""
    child = in_child(spec(PlantSpec(fault="hang", step=STEP)), tmp_path)
    deadline = time.monotonic() + 60
    while not planted_events(records_in(tmp_path)) and time.monotonic() < deadline:
        child.join(0.05)
    child.join(0.3)
    assert child.is_alive()
    child.kill()
    child.join()
    records = records_in(tmp_path)
    assert [record.step for record in steps_of(records)] == [0, 1, 2]
    assert records[-1] == planted_events(records)[0]
