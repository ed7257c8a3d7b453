"""Observing: exact bits of every step, the same whatever the flushing, one whole line a record."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import ParallelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph.digest import digest_hex, digest_tensors, empty_rows
from fsdp_core.mesh import build_axes, init_ranks
from fsdp_core.train import Trainer
from harness.recorder import RecordsUnwritable
from harness.records import (
    NEVER_RAN,
    EventRecord,
    FloatBits,
    PlantSpec,
    RunSpec,
    StepRecord,
    parse_record,
)
from harness.worker.observe import Observer
from harness.worker.record_file import RecordFile

Spec = Callable[..., RunSpec]


def make_trainer(spec: RunSpec) -> Trainer:
    """A trainer of one rank in a group of its own."""
    device = Device("cpu")
    init_ranks(device, dist.HashStore(), 0, 1, timeout_s=300)
    return Trainer(TrainConfig.from_dict(spec.config), build_axes(ParallelConfig(), device), device)


def read(path: Path) -> list[StepRecord]:
    """The step records of a file."""
    records = [parse_record(line) for line in path.read_text().splitlines()]
    assert all(isinstance(record, StepRecord) for record in records)
    return [record for record in records if isinstance(record, StepRecord)]


def bits(value: torch.Tensor) -> str:
    """Eight hex digits of a float32 scalar, big-endian."""
    return bytes(value.detach().reshape(1).view(torch.uint8).tolist()[::-1]).hex()


def test_records_hold_the_tensors_bits(spec: Spec, tmp_path: Path) -> None:
    """Each record is, bit for bit, what the step's tensors and the generator were at that step."""
    trainer = make_trainer(spec(steps=4, flush_every=3))
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    expected: list[dict[str, Any]] = []
    for step in range(4):
        outputs = trainer.step(step)
        expected.append(
            {
                "loss": bits(outputs.loss),
                "microbatch_losses": [bits(v) for v in outputs.losses],
                "grad_norm": bits(outputs.grad_norm),
                "digests": {g: digest_hex(r.clone())[0] for g, r in outputs.digests.items()},
                "rng": "".join(
                    hashlib.blake2b(state.numpy().tobytes(), digest_size=16).hexdigest()
                    for state in (torch.get_rng_state(), *trainer.streams.get_states().values())
                ),
            }
        )
        observer.observe(step)
    observer.flush()
    records = read(tmp_path / "r")
    assert [record.step for record in records] == [0, 1, 2, 3]
    for record, wanted in zip(records, expected, strict=True):
        assert record.loss is not None
        assert record.grad_norm is not None
        assert record.loss.bits == wanted["loss"]
        assert [m.bits for m in record.microbatch_losses] == wanted["microbatch_losses"]
        assert record.grad_norm.bits == wanted["grad_norm"]
        assert record.digests == wanted["digests"] | {"rng": wanted["rng"]}
        assert record.nonfinite == {}
        assert record.rank == 0
        assert record.step_s > 0
    assert len({record.loss for record in records}) == 4
    # Digests are 32 characters a tensor, in the order of the names.
    names = observer.tensor_names
    assert names["rng"] == ("cpu", "equal over tp")
    assert names["grads"] == names["weights"]
    for group, found in names.items():
        assert len(records[0].digests[group]) == 32 * len(found)


def test_the_state_before_step_0_is_recorded(spec: Spec, tmp_path: Path) -> None:
    """Digests of weights, moments and random states as the first step finds them, and no others."""
    trainer = make_trainer(spec(steps=2))
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    weights, _ = trainer.digested["weights"]
    record = observer.initial()
    assert set(record.digests) == {"weights", "optim", "rng"}
    assert (record.rank, record.nonfinite) == (0, {})
    wanted = empty_rows(len(weights), "cpu")
    digest_tensors(trainer.digested["weights"][1], wanted)
    assert record.digests["weights"] == digest_hex(wanted)[0]
    trainer.digested["weights"][1][1].view(-1)[0] = math.nan
    trainer.optimizer.exp_avg[0].view(-1)[0] = 1.0
    torch.rand(1)
    other = observer.initial()
    assert other.nonfinite == {"weights": (weights[1],)}
    for group, text in record.digests.items():
        rows = [text[i : i + 32] for i in range(0, len(text), 32)]
        found = [other.digests[group][i : i + 32] for i in range(0, len(text), 32)]
        changed = {"weights": 1, "optim": 0, "rng": 0}[group]
        assert [i for i, (a, b) in enumerate(zip(rows, found, strict=True)) if a != b] == [changed]


def test_special_floats_keep_their_bits(spec: Spec, tmp_path: Path) -> None:
    """NaN payloads, -0.0, infinities and subnormals arrive as they were."""
    trainer = make_trainer(spec(steps=1))
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    patterns = [0x7FC00001, -0x80000000, 0x7F800000, 0x00000001]
    outputs = trainer.outputs
    outputs.losses.view(torch.int32).copy_(torch.tensor(patterns[:2], dtype=torch.int32))
    outputs.loss.view(torch.int32).fill_(patterns[2])
    outputs.grad_norm.view(torch.int32).fill_(patterns[3])
    observer.observe(0)
    (record,) = read(tmp_path / "r")
    assert [m.bits for m in record.microbatch_losses] == ["7fc00001", "80000000"]
    assert record.microbatch_losses[0].value is None
    assert str(record.microbatch_losses[1].value) == "-0.0"
    assert record.loss == FloatBits(bits="7f800000", value=None)
    assert record.grad_norm == FloatBits(bits="00000001", value=math.ldexp(1, -149))


def test_nonfinite_tensors_are_named(spec: Spec, tmp_path: Path) -> None:
    """A NaN in one weight and an infinity in one moment are reported by name and group."""
    trainer = make_trainer(spec(steps=1))
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    trainer.step(0)
    weights, moments = trainer.digested["weights"], trainer.digested["optim"]
    weights[1][3].view(-1)[-1] = math.nan
    moments[1][5].view(-1)[0] = math.inf
    trainer.redigest_state()
    observer.observe(0)
    (record,) = read(tmp_path / "r")
    assert record.nonfinite == {"weights": (weights[0][3],), "optim": (moments[0][5],)}


def test_flushing_changes_nothing_but_times(spec: Spec, tmp_path: Path) -> None:
    """Flushing every 1, 3 or 7 of 10 steps gives the same records, but step time and memory."""
    seen = []
    for flush_every in (1, 3, 7):
        path = tmp_path / str(flush_every)
        trainer = make_trainer(spec(steps=10, flush_every=flush_every, dtype="fp32"))
        observer = Observer(trainer, 0, RecordFile(path))
        for step in range(10):
            trainer.step(step)
            observer.observe(step)
            written = len(path.read_text().splitlines())
            assert written == (step + 1) // flush_every * flush_every
        observer.flush()
        observer.flush()
        plain = [record.to_json() for record in read(path)]
        for record in plain:
            for name in ("step_s", "live_bytes", "peak_bytes", "host_bytes"):
                del record[name]
        seen.append(plain)
        trainer.close()
        dist.destroy_process_group()
    assert seen[0] == seen[1] == seen[2]
    assert [record["step"] for record in seen[0]] == list(range(10))


def test_observing_changes_no_bit_of_the_run(spec: Spec, tmp_path: Path) -> None:
    """A run that is observed has the losses and weights of one that is not."""
    results = []
    for observed in (False, True):
        trainer = make_trainer(spec(steps=4))
        observer = Observer(trainer, 0, RecordFile(tmp_path / "r")) if observed else None
        if observer is not None:
            observer.initial()
        for step in range(4):
            trainer.step(step)
            if observer is not None:
                observer.observe(step)
        weights = [group.main_weight.clone() for group in trainer.groups]
        results.append([trainer.outputs.loss.clone(), *weights])
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_memory_is_live_and_peak(spec: Spec, tmp_path: Path) -> None:
    """Live bytes are storage that lives after the step; the peak only grows and is no less."""
    chosen = spec(steps=3)
    device = Device("cpu")
    init_ranks(device, dist.HashStore(), 0, 1, timeout_s=300)
    with device.counting_memory():
        config = TrainConfig.from_dict(chosen.config)
        trainer = Trainer(config, build_axes(ParallelConfig(), device), device)
        observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
        for step in range(3):
            trainer.step(step)
            observer.observe(step)
        state = sum(group.main_weight.numel() * (4 + 4 + 8) for group in trainer.groups)
        named = trainer.named_tensors().items()
        scratch = sum(t.untyped_storage().nbytes() for n, t in named if "digest scratch" in n)
    records = read(tmp_path / "r")
    for record in records:
        # Weights, gradients and two moments at least; gathered buffers beside them.
        assert state + scratch <= record.live_bytes <= record.peak_bytes <= 4 * state + scratch
    peaks = [record.peak_bytes for record in records]
    assert peaks == sorted(peaks)
    assert records[1].live_bytes == records[2].live_bytes


def test_memory_of_the_host_is_that_of_the_process(spec: Spec, tmp_path: Path) -> None:
    """Each step has it as it was after the step, files that are mapped left out."""
    trainer = make_trainer(spec(steps=3, flush_every=3))
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    held, mapped, size = [], tmp_path / "mapped", 64 << 20
    mapped.write_bytes(bytes(size))
    for step in range(3):
        trainer.step(step)
        if step == 1:
            held.append(torch.zeros(size, dtype=torch.uint8).fill_(1))
        if step == 2:
            held.append(torch.from_file(str(mapped), size=size, dtype=torch.uint8))
            held[-1].sum()
        observer.observe(step)
    before, after, read_file = (record.host_bytes or 0 for record in read(tmp_path / "r"))
    assert size / 2 < after - before < 2 * size
    assert abs(read_file - after) < size / 2


def test_file_appends_whole_lines(tmp_path: Path) -> None:
    """Each record is one line that is in the file at once; raw text goes in as it is."""
    path = tmp_path / "r"
    file = RecordFile(path)
    event = EventRecord(name="a\nb", rank=0, step=1)
    file.write(event)
    assert parse_record(path.read_text()) == event
    assert path.read_text().count("\n") == 1
    file.write_raw("half")
    assert path.read_text().endswith("\nhalf")
    file.alter = lambda line: [line, line]
    file.write_raw("\n")
    file.write(event)
    assert len(path.read_text().splitlines()) == 4


def test_full_disk_is_an_error() -> None:
    """A line that cannot be written raises, it is not lost in silence."""
    with pytest.raises(RecordsUnwritable, match="No space left"):
        RecordFile(Path("/dev/full")).write(EventRecord(name="x", rank=0, step=0))


def test_taps_are_recorded_as_they_ran(spec: Spec, tmp_path: Path) -> None:
    """Each row of a step is its digest and its place; the names say which call of which module."""
    chosen = spec(steps=3, flush_every=2, taps=("layers.*.attn:output", "norm:gradient"))
    trainer = make_trainer(chosen)
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    expected = []
    for step in range(3):
        trainer.step(step)
        rows = trainer.taps.rows
        text, _ = digest_hex(rows[:, :5].contiguous())
        places = [f"{place & 0xFFFFFFFF:08x}" for place in rows[:, 5].tolist()]
        expected.append([text[32 * i : 32 * i + 32] + place for i, place in enumerate(places)])
        observer.observe(step)
    observer.flush()
    names, calls = trainer.taps.names, trainer.config.microbatches
    assert {name.partition("[")[0] for name in names} == {
        *(f"layers.{i}.attn:output" for i in range(trainer.config.model.layers)), "norm:gradient",
    }  # fmt: skip
    for record, wanted in zip(read(tmp_path / "r"), expected, strict=True):
        assert record.taps == "".join(wanted)
    # Each step begins anew: no row of one is left in the next.
    ran = [row for wanted in expected for row in wanted if not row.endswith(NEVER_RAN)]
    assert len(set(ran)) == len(ran) == 3 * len(names) * calls // (calls + 1)


@pytest.mark.parametrize("ledger", [True, False])
def test_moved_pointers_are_counted_with_the_ledger(
    spec: Spec, tmp_path: Path, ledger: bool
) -> None:
    """Each step has the number of tensors that moved since the one before, or no number."""
    trainer = make_trainer(spec(steps=3, flush_every=3, ledger=ledger))
    observer = Observer(trainer, 0, RecordFile(tmp_path / "r"))
    for step in range(3):
        trainer.step(step)
        if step == 1:
            trainer.optimizer.lr = trainer.optimizer.lr.clone()
        observer.observe(step)
    moved = [record.pointer_changes for record in read(tmp_path / "r")]
    assert moved == ([0, 1, 0] if ledger else [None] * 3)
    assert observer.pointer_changes == int(ledger)
    assert observer.moved == ({"lr": 1} if ledger else {})


@pytest.mark.parametrize("graph", [(), ("attn",), ("full_iteration",)])
def test_memory_is_counted_in_the_steps_that_can_raise_its_peak(
    rank: Any, spec: Callable[..., RunSpec], graph: tuple[str, ...]
) -> None:
    """The peak is that of a run that counts every step; a tensor that is kept shows at the end."""
    held = PlantSpec(fault="hoard", step=6)
    peaks = {
        (plant, counts): rank.run(
            replace(spec(plant, graph=graph, steps=10), counts_memory=counts)
        )[-1].peak_bytes
        for plant in (None, held)
        for counts in (False, True)
    }
    assert peaks[None, False] == peaks[None, True]
    assert peaks[held, False] == peaks[held, True] > 2 * peaks[None, True]
