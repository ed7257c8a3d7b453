"""Observing: exact bits of every step, the same whatever the flushing, one whole line a record."""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import ParallelConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.graph.digest import Digester, digest_hex, digest_tensors, empty_rows
from fsdp_core.parallel.mesh import build_axes, init_ranks
from fsdp_core.train import Trainer
from harness.recorder import RecordFile
from harness.records import (
    NEVER_RAN,
    ErrorRecord,
    FloatBits,
    KeepSpec,
    RunSpec,
    StartRecord,
    StepRecord,
    parse_record,
)
from harness.store.contents import Contents, read_contents
from harness.worker import observe
from harness.worker.observe import DIGEST_TIMES, SKIPPED, Observer, StepClock, digest_time_event
from tests.support.fake_engine import Patch

Spec = Callable[..., RunSpec]
Watched = Callable[..., tuple[Trainer, Observer]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r"


@pytest.fixture
def watched(spec: Spec, path: Path) -> Watched:
    """Makes a trainer of one rank in a group of its own, and what observes it."""

    def make(device: Device | None = None, **options: Any) -> tuple[Trainer, Observer]:
        device = device or Device("cpu")
        init_ranks(device, dist.HashStore(), 0, 1, timeout_s=300)
        config = TrainConfig.from_dict(spec(**options).config)
        trainer = Trainer(config, build_axes(ParallelConfig(), device), device)
        return trainer, Observer(trainer, 0, RecordFile(path))

    return make


def read(path: Path) -> list[StepRecord]:
    """The step records of a file, which holds no others."""
    records = [parse_record(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) == len(records)
    return steps


def rows_of(text: str) -> list[str]:
    return [text[i : i + 32] for i in range(0, len(text), 32)]


def bits(value: torch.Tensor) -> str:
    """Eight hex digits of a float32 scalar, big-endian."""
    return bytes(value.detach().reshape(1).view(torch.uint8).tolist()[::-1]).hex()


def test_a_record_says_that_its_update_was_skipped(watched: Watched, path: Path) -> None:
    """And why; of the other steps it says nothing."""
    trainer, observer = watched(steps=3, flush_every=3, skip_nonfinite=True)
    for step in range(3):
        outputs = trainer.step(step)
        outputs.skipped.fill_(float(step == 1))
        observer.observe(step)
    assert [record.skipped for record in read(path)] == ["", SKIPPED, ""]


def test_records_hold_the_tensors_bits(watched: Watched, path: Path) -> None:
    """Each record is, bit for bit, what the step's tensors and the generator were at that step."""
    trainer, observer = watched(steps=4, flush_every=3, evaluate_every=2)
    expected: list[dict[str, Any]] = []
    for step in range(4):
        outputs = trainer.step(step)
        states = (torch.get_rng_state(), *trainer.streams.get_states().values())
        hashes = (hashlib.blake2b(each.numpy().tobytes(), digest_size=16) for each in states)
        digests = {group: digest_hex(rows.clone())[0] for group, rows in outputs.digests.items()}
        expected.append({
            "step": step, "rank": 0, "nonfinite": {}, "loss": bits(outputs.loss),
            "microbatch_losses": [bits(v) for v in outputs.losses],
            "grad_norm": bits(outputs.grad_norm),
            "evaluation": bits(outputs.evaluation) if step % 2 else None,
            "digests": digests | {"rng": "".join(each.hexdigest() for each in hashes)},
        })  # fmt: skip
        observer.observe(step)
    observer.flush()
    records = read(path)
    for record, wanted in zip(records, expected, strict=True):
        plain = record.to_json()
        found = {name: plain[name] for name in wanted}
        for name in ("loss", "grad_norm"):
            found[name] = found[name]["bits"]
        found["evaluation"] = found["evaluation"] and found["evaluation"]["bits"]
        found["microbatch_losses"] = [each["bits"] for each in found["microbatch_losses"]]
        assert found == wanted
        assert record.step_s > 0
    assert len({record.loss for record in records}) == 4
    # Digests are 32 characters a tensor, in the order of the names.
    names = observer.tensor_names
    assert names["rng"] == ("cpu", "equal over tp")
    assert names["grads"] == names["weights"]
    for group, of_group in names.items():
        assert len(records[0].digests[group]) == 32 * len(of_group)


def test_the_state_before_step_0_is_recorded(watched: Watched) -> None:
    """Digests of weights, moments and random states as the first step finds them, and no others."""
    trainer, observer = watched(steps=2)
    weights, tensors = trainer.digested["weights"]
    record = observer.initial()
    assert set(record.digests) == {"weights", "optim", "rng"}
    assert (record.rank, record.nonfinite) == (0, {})
    wanted = empty_rows(len(weights), "cpu")
    digest_tensors(tensors, wanted)
    assert record.digests["weights"] == digest_hex(wanted)[0]
    tensors[1].view(-1)[0] = math.nan
    trainer.optimizer.exp_avg[0].view(-1)[0] = 1.0
    torch.rand(1)
    other = observer.initial()
    assert other.nonfinite == {"weights": (weights[1],)}
    for group, place in {"weights": 1, "optim": 0, "rng": 0}.items():
        pairs = zip(rows_of(record.digests[group]), rows_of(other.digests[group]), strict=True)
        assert [i for i, (a, b) in enumerate(pairs) if a != b] == [place]


def test_special_values_keep_their_bits_and_are_named(watched: Watched, path: Path) -> None:
    """NaN payloads, -0.0, infinities and subnormals; a NaN in one weight, one moment infinite."""
    trainer, observer = watched(steps=1)
    outputs = trainer.step(0)
    weights, moments = trainer.digested["weights"], trainer.digested["optim"]
    weights[1][3].view(-1)[-1] = math.nan
    moments[1][5].view(-1)[0] = math.inf
    trainer.redigest_state()
    patterns = [0x7FC00001, -0x80000000, 0x7F800000, 0x00000001]
    outputs.losses.view(torch.int32).copy_(torch.tensor(patterns[:2], dtype=torch.int32))
    outputs.loss.view(torch.int32).fill_(patterns[2])
    outputs.grad_norm.view(torch.int32).fill_(patterns[3])
    observer.observe(0)
    (record,) = read(path)
    assert [m.bits for m in record.microbatch_losses] == ["7fc00001", "80000000"]
    assert record.microbatch_losses[0].value is None
    assert str(record.microbatch_losses[1].value) == "-0.0"
    assert record.loss == FloatBits(bits="7f800000", value=None)
    assert record.grad_norm == FloatBits(bits="00000001", value=math.ldexp(1, -149))
    assert record.nonfinite == {"weights": (weights[0][3],), "optim": (moments[0][5],)}


def test_flushing_and_observing_change_nothing(watched: Watched, path: Path) -> None:
    """Flushing every 1, 3 or 7 of 10 steps, or not observing: same bits, but times and memory."""
    seen, states = [], []
    for flush_every in (1, 3, 7, 0):
        path.unlink(missing_ok=True)
        trainer, observer = watched(steps=10, flush_every=flush_every or 1, dtype="fp32")
        if flush_every:
            observer.initial()
        for step in range(10):
            trainer.step(step)
            if flush_every:
                observer.observe(step)
                written = len(path.read_text().splitlines())
                assert written == (step + 1) // flush_every * flush_every
        observer.flush()
        observer.flush()
        plain = [record.to_json() for record in read(path)]
        for record in plain:
            for name in ("step_s", "live_bytes", "peak_bytes", "host_bytes", "device_bytes"):
                del record[name]
        seen.append(plain)
        states.append(
            [bits(trainer.outputs.loss), *(g.main_weight.tolist() for g in trainer.groups)]
        )
        trainer.close()
        dist.destroy_process_group()
    assert seen[0] == seen[1] == seen[2]
    assert [record["step"] for record in seen[0]] == list(range(10))
    assert states[0] == states[1] == states[2] == states[3]


def test_memory_is_live_and_peak(watched: Watched, path: Path) -> None:
    """Live bytes are storage that lives after the step; the peak only grows and is no less."""
    device = Device("cpu")
    with device.counting_memory():
        trainer, observer = watched(device, steps=3)
        for step in range(3):
            trainer.step(step)
            observer.observe(step)
        state = sum(group.main_weight.numel() * (4 + 4 + 8) for group in trainer.groups)
        named = trainer.named_tensors().items()
        scratch = sum(t.untyped_storage().nbytes() for n, t in named if "digest scratch" in n)
    records = read(path)
    for record in records:
        # Weights, gradients and two moments at least; gathered buffers beside them.
        assert state + scratch <= record.live_bytes <= record.peak_bytes <= 4 * state + scratch
    peaks = [record.peak_bytes for record in records]
    assert peaks == sorted(peaks)
    assert records[1].live_bytes == records[2].live_bytes


def test_memory_of_the_host_is_that_of_the_process(watched: Watched, path: Path) -> None:
    """Each step has it as it was after the step, files that are mapped left out."""
    trainer, observer = watched(steps=3, flush_every=3)
    held, mapped, size = [], path.with_name("mapped"), 64 << 20
    mapped.write_bytes(bytes(size))
    for step in range(3):
        trainer.step(step)
        if step == 1:
            held.append(torch.zeros(size, dtype=torch.uint8).fill_(1))
        if step == 2:
            held.append(torch.from_file(str(mapped), size=size, dtype=torch.uint8))
            held[-1].sum()
        observer.observe(step)
    before, after, read_file = (record.host_bytes or 0 for record in read(path))
    assert size / 2 < after - before < 2 * size
    assert abs(read_file - after) < size / 2


def test_taps_are_recorded_as_they_ran(watched: Watched, path: Path) -> None:
    """Each row of a step is its digest and its place; the names say which call of which module."""
    trainer, observer = watched(
        steps=3, flush_every=2, taps=("layers.*.attn:output", "norm:gradient")
    )
    expected = []
    for step in range(3):
        trainer.step(step)
        rows = trainer.taps.rows
        texts = rows_of(digest_hex(rows[:, :5].contiguous())[0])
        places = [f"{place & 0xFFFFFFFF:08x}" for place in rows[:, 5].tolist()]
        expected.append([text + place for text, place in zip(texts, places, strict=True)])
        observer.observe(step)
    observer.flush()
    names, calls = trainer.taps.names, trainer.config.microbatches
    assert {name.partition("[")[0] for name in names} == {
        *(f"layers.{i}.attn:output" for i in range(trainer.config.model.layers)), "norm:gradient",
    }  # fmt: skip
    assert [record.taps for record in read(path)] == list(map("".join, expected))
    # Each step begins anew: no row of one is left in the next.
    ran = [row for wanted in expected for row in wanted if not row.endswith(NEVER_RAN)]
    assert len(set(ran)) == len(ran) == 3 * len(names) * calls // (calls + 1)


@pytest.mark.parametrize("ledger", [True, False])
def test_moved_pointers_are_counted_with_the_ledger(
    watched: Watched, path: Path, ledger: bool
) -> None:
    """Each step has the number of tensors that moved since the one before, or no number."""
    trainer, observer = watched(steps=3, flush_every=3, ledger=ledger)
    for step in range(3):
        trainer.step(step)
        if step == 1:
            trainer.optimizer.lr = trainer.optimizer.lr.clone()
        observer.observe(step)
    moved = [record.pointer_changes for record in read(path)]
    assert moved == ([0, 1, 0] if ledger else [None] * 3)
    assert observer.pointer_changes == int(ledger)
    assert observer.moved == ({"lr": 1} if ledger else {})


class FakeEvent:
    """An event that remembers when its stream was told to mark it."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        type(self).made += 1
        self.at_ms = -1.0

    def record(self, stream: Any) -> None:
        self.at_ms = stream.now_ms

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert later.at_ms >= self.at_ms >= 0
        return later.at_ms - self.at_ms


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_each_step_has_the_time_since_the_end_of_the_one_before(
    kind: str, monkeypatch: Patch
) -> None:
    """Of every step its own, not a mean of the flush; none is lost between two flushes."""
    stream, FakeEvent.made = SimpleNamespace(now_ms=0.0), 0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock_of_host = SimpleNamespace(perf_counter=lambda: stream.now_ms / 1e3)
    monkeypatch.setattr(observe, "time", clock_of_host)
    device: Any = SimpleNamespace(is_cuda=kind == "cuda")
    clock = StepClock(device, stream, 3)
    for lengths in ((5.0, 1.0, 2.0), (7.0,), (1.0, 1.0, 4.0), (2.0, 3.0, 9.0)):
        for length in lengths:
            stream.now_ms += length
            clock.tick()
        assert clock.drain() == pytest.approx([length / 1e3 for length in lengths])
    assert FakeEvent.made == (4 if kind == "cuda" else 0)


def test_every_group_is_digested_for_its_time_and_nothing_changes(monkeypatch: Any) -> None:
    tensors = [torch.arange(1000.0), torch.ones(3)]
    before = [tensor.clone() for tensor in tensors]
    digested = {"grads": (["a"], tensors[:1]), "weights": (["a", "b"], tensors)}
    seen: list[int] = []
    whole = Digester.__call__

    def noted(self: Any, given: Any, out: torch.Tensor) -> None:
        whole(self, given, out)
        seen.append(int(out.any(dim=1).sum()))

    monkeypatch.setattr(Digester, "__call__", noted)
    device = Device("cpu")
    trainer: Any = SimpleNamespace(device=device, stream=device.new_stream(), digested=digested)
    event = digest_time_event(trainer, 3, 17)
    assert (event.name, event.rank, event.step) == ("digest_time", 3, 17)
    assert 0 < event.detail["seconds"] < 60
    assert seen == [1, 2] * DIGEST_TIMES
    assert all(map(torch.equal, tensors, before))


def keeping(spec: RunSpec, *names: str, step: int = 3, **options: Any) -> RunSpec:
    return dataclasses.replace(spec, keep=KeepSpec(step=step, names=names, **options))


def kept(rank: Any, spec: RunSpec) -> Contents:
    """What the latest run of this rank has kept."""
    latest = max(rank.folder.iterdir(), key=lambda folder: int(folder.name))
    return read_contents(latest, spec)


def test_contents_have_the_digests_of_their_step(rank: Any, spec: Spec) -> None:
    """Every tensor of every group, kept at step 3, digests to what the record of step 3 says."""
    groups = ("grads", "weights", "optim")
    run = keeping(spec(graph=("full_iteration",)), *(f"{group}:*" for group in groups))
    start, *records = rank.run(run)
    assert isinstance(start, StartRecord)
    step = next(r for r in records if isinstance(r, StepRecord) and r.step == 3)
    found = kept(rank, run)
    assert found.problems == ()
    assert list(found.names) == [f"{g}:{name}" for g in groups for name in start.tensors[g]]
    tensors = [
        torch.frombuffer(bytearray(each.data), dtype=getattr(torch, each.about.dtype))
        for each in found.ranks[0]
    ]
    rows = empty_rows(len(tensors), "cpu")
    digest_tensors(
        [t.view(e.about.shape) for t, e in zip(tensors, found.ranks[0], strict=True)], rows
    )
    assert digest_hex(rows)[0] == "".join(step.digests[group] for group in groups)
    # What is kept changes no bit.
    plain = [r for r in rank.run(spec(graph=("full_iteration",))) if isinstance(r, StepRecord)]
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert [(s.loss, s.digests) for s in steps] == [(s.loss, s.digests) for s in plain]
    assert all(each.about.as_digested for each in found.ranks[0])


def test_what_cannot_be_kept_is_said(rank: Any, spec: Spec) -> None:
    """Copies beyond the cap end the rank; a run that ends before the step has kept nothing."""
    records = rank.run(keeping(spec(), "grads:*", max_bytes=1000))
    (error,) = [record for record in records if isinstance(record, ErrorRecord)]
    assert "Expected copies of at most 1000 bytes on a rank, got" in error.message
    assert rank.code == 1
    run = keeping(spec(), "grads:*", step=9)
    rank.run(run)
    assert kept(rank, run).problems == ("rank 0 kept nothing: it did not end step 9",)
