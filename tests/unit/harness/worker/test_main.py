"""One rank from start to end: records, exit code, errors, graphs, and the end of a soak."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import DataConfig, ModelConfig, TrainConfig
from fsdp_core.graph.capture_session import CaptureAborted, CaptureLost
from fsdp_core.graph.recorder import CaptureRefused, StaleAddress
from fsdp_core.model.layers import BackendMissing
from fsdp_core.stress.races import Access, Clocks, Race, RaceFound
from fsdp_core.stress.stressors import StressorMissing
from fsdp_core.train.compiled import StaleGuards
from fsdp_core.train.graphs import StageGraphs
from harness import provenance
from harness.checks.complete import not_as_owed
from harness.engine.outcome import FirstFailure, claim, find
from harness.recorder import UNRECORDED
from harness.records import (
    SCHEMA_VERSION,
    EndRecord,
    ErrorRecord,
    EventRecord,
    FinalRecord,
    InitialRecord,
    PlantSpec,
    Record,
    RunSpec,
    StartRecord,
    StepRecord,
)
from harness.store.streams import rank_path, read_rank
from harness.values import Json, SoakSpec
from harness.worker.forkserver import open_torch_store
from harness.worker.main import Part, Soaking, _Session, classify, join_store, rank_main
from tests.support.fake_engine import Capsys, Patch
from tests.unit.harness.worker.conftest import TINY

Spec = Callable[..., RunSpec]


def only(kind: type[Any], records: list[Record]) -> Any:
    """The only record of a kind."""
    (found,) = (record for record in records if isinstance(record, kind))
    return found


def steps_of(records: list[Record]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


@pytest.mark.parametrize(
    ("graph", "replays"), [((), 0), (("attn",), 3 * 2 * 2 * 2), (("full_iteration",), 3)]
)
def test_a_good_rank_writes_every_record(
    rank: Any, spec: Spec, graph: tuple[str, ...], replays: int
) -> None:
    """Start, one record a step, events of graphs and memory, and the end, in this order; code 0."""
    records = rank.run(spec(graph=graph, flush_every=4))
    assert rank.code == 0
    kinds = [type(record) for record in records]
    assert kinds == [StartRecord, InitialRecord, *[StepRecord] * 5, FinalRecord,
                     *[EventRecord] * 2, EndRecord]  # fmt: skip
    steps = steps_of(records)
    assert [record.step for record in steps] == [0, 1, 2, 3, 4]
    graphs, memory = records[-3:-1]
    assert isinstance(graphs, EventRecord)
    assert isinstance(memory, EventRecord)
    assert (graphs.name, graphs.detail["replays"]) == ("graphs", replays)
    at_rest = memory.detail["at_rest"]
    assert (memory.name, memory.detail.get("explained")) == ("memory", None)
    assert at_rest["parameters"] == at_rest["gradients"] == (at_rest["optimizer"] - 8) / 2
    start, end = only(StartRecord, records), only(EndRecord, records)
    about = (start.schema, start.rank, start.world_size, start.device)
    assert about == (SCHEMA_VERSION, 0, 1, "cpu")
    assert set(start.tensors) == {"samples", "grads", "weights", "optim", "rng"}
    fingerprint = start.environment["fingerprint"]
    assert fingerprint | {
        "torch": torch.__version__, "deterministic": True, "data": "synthetic-1",
        "environment": provenance.variables(os.environ), "processor": provenance.processor(),
        "code": provenance.code(),
    } == fingerprint  # fmt: skip
    assert fingerprint["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert fingerprint["processor"] != ""
    assert start.environment["host"] == provenance.host()
    assert end.steps == 5
    assert 0 < end.startup_s <= end.wall_s
    assert end.peak_bytes >= steps[-1].peak_bytes > 0


def test_records_without_space_are_told_by_the_exit_code(
    spec: Spec, tmp_path: Path, capsys: Capsys
) -> None:
    """A rank that cannot write its records for want of space says so by its exit code alone."""
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert rank_main(spec(), tmp_path, 0, store.port) == UNRECORDED
    assert capsys.readouterr().err == "[Errno 28] cannot write records: No space left on device\n"


BYTES = ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seq=6)


def test_an_exception_is_the_last_record(
    rank: Any, spec: Spec, capfd: Capsys, tmp_path: Path
) -> None:
    """A rank that raises writes what, where and the traceback, no end record, and returns 1."""
    path = tmp_path / "corpus"
    path.write_text("abc")
    records = rank.run(spec(data=DataConfig(kind="text", path=str(path)), model=BYTES))
    assert [type(record) for record in records] == [StartRecord, InitialRecord, ErrorRecord]
    error = only(ErrorRecord, records)
    assert (rank.code, error.what, error.type, error.step) == (1, "crashed", "ValueError", 0)
    assert error.message.startswith("data.path: expected a corpus of at least 7 bytes")
    assert "in window" in error.traceback
    assert "data.path: expected a corpus" in capfd.readouterr().err


def test_what_cannot_be_built_is_said_before_any_step(
    rank: Any, spec: Spec, monkeypatch: Patch
) -> None:
    """A backend that is not there; a layout of other than the joined ranks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (error,) = rank.run(spec(backend="te"))
    told = (rank.code, error.what, error.type, error.step)
    assert told == (1, "unsupported", "BackendMissing", -1)
    config = spec().config | {"parallel": {"dp": 2}}
    (error,) = rank.run(RunSpec(config=config, device="cpu", world_size=1, timeout_s=30))
    assert "Expected 2 ranks" in error.message


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


_STREAM = Clocks().new_stream("gather")
_ACCESS = Access(0, 4, _STREAM, 1, True, "aten::zero_", "a.py:1")
ABORTED = CaptureAborted("attn", {1: "CaptureRefused: cannot capture aten.item"})
CLASSES: list[tuple[BaseException, str]] = [
    (StaleAddress(["w"], "moved"), "stale_address"),
    (StaleGuards("layers.0.attn", "eps == 1"), "stale_guards"),
    (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
    (MemoryError(), "oom"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal_access"),
    (StressorMissing("races"), "unsupported"),
    (RaceFound([Race("w", "root", _ACCESS, _ACCESS)]), "race"),
    (CaptureRefused("cannot capture aten.item"), "capture_refused"),
    (BackendMissing("backend: te"), "unsupported"),
    (RuntimeError("something else"), "crashed"),
    (KeyError("x"), "crashed"),
    # A capture that another rank refused is refused here; what failed on this rank is named.
    (ABORTED, "capture_refused"),
    (CaptureLost("attn", {1: "PlantedError: x"}, "another rank has left"), "capture_refused"),
    (caused(CaptureAborted("attn", {1: "x"}), MemoryError()), "oom"),
    (caused(CaptureLost("attn", {1: "x"}, "y"), MemoryError()), "oom"),
    # What an exception itself says outranks what caused it.
    (caused(CaptureRefused("out of memory"), MemoryError()), "capture_refused"),
]


@pytest.mark.parametrize(("error", "what"), CLASSES, ids=[f"{e!r}"[:40] for e, _ in CLASSES])
def test_classify(error: BaseException, what: str) -> None:
    """An exception is classified by itself, and as the cause or context of a plain one."""
    assert classify(error) == what
    by_cause = caused(RuntimeError("engine failed"), error)
    assert classify(by_cause) == what
    by_context = ValueError("while handling")
    by_context.__context__ = by_cause
    assert classify(by_context) == what


LOST = RuntimeError("Connection closed by peer [127.0.0.1]:80")
BEFORE = FirstFailure(3, "died by SIGKILL")
BLAMES: list[tuple[Exception, FirstFailure | None, int | None, str]] = [
    (LOST, BEFORE, 3, "rank 3 failed: died by SIGKILL"),
    (LOST, None, None, "Connection closed"),
    (RuntimeError("something else"), BEFORE, None, "something else"),
    (CaptureAborted("attn", {1: "KeyError: x"}), None, 1, "rank 1: KeyError: x"),
    (CaptureAborted("attn", {0: "KeyError: x", 1: "KeyError: y"}), None, None, "rank 1: KeyErr"),
    (CaptureLost("attn", {1: "KeyError: x", 0: "OSError: y"}, "z"), None, 1, "rank 1: KeyError"),
    (CaptureLost("attn", {0: "OSError: y"}, "z"), None, None, "rank 0: OSError"),
    (CaptureLost("attn", {}, "z"), None, None, "on another rank"),
]


@pytest.mark.parametrize(("error", "before", "blames", "told"), BLAMES)
def test_a_rank_says_who_failed_before_it(
    spec: Spec, tmp_path: Path, error: Exception, before: FirstFailure | None,
    blames: int | None, told: str,
) -> None:  # fmt: skip
    """A rank that lost another blames it, with its reason; one that failed by itself says so."""
    session = _Session(spec(), tmp_path, 0, Part())
    store = session.store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    if before is not None:
        claim(store, before)
    session.fail(error)
    record = read_rank(rank_path(tmp_path, 0), 0).error
    assert record is not None
    assert record.blames == blames
    assert told in record.message
    first = find(store, timedelta(milliseconds=1))
    assert first == before or (blames is None and first is not None and first.rank == 0)


@pytest.mark.parametrize(
    ("restart", "prefix"), [(None, ""), ("0", "harness/0/"), ("1", "harness/1/")]
)
def test_the_store_is_that_of_the_first_node(
    monkeypatch: Patch, restart: str | None, prefix: str
) -> None:
    """At MASTER_ADDR; under torchrun, whose store lives longer, apart from an earlier attempt."""
    # Where nothing else listens: a rank that asks this machine's usual address finds nobody.
    address = "127.0.0.2"
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = open_torch_store(listener)
    assert isinstance(store, dist.TCPStore)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if restart is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    join_store(port).set("key", "value")
    assert store.get(f"{prefix}key") == b"value"


EXPERTS = replace(
    TINY, layers=3, experts=4, top_k=2, expert_ffn=8, shared_expert_ffn=8, first_dense_layers=1,
    capacity_factor=2.0,
)  # fmt: skip
FAULTS = [
    ("layer_not_captured", ("attn", "mlp"), ("layers.1 attn", "captures.forward", "1", "0")),
    ("scope_not_captured", ("attn", "mlp"), ("layers.0 mlp", "captures.forward", "1", "0")),
    ("microbatches_not_replayed", ("layer",), ("layers.0 layer", "replays.forward", "6", "3")),
    ("optimizer_not_captured", ("full_iteration",),
     ("full_iteration", "captures.optimizer", "1", "0")),
]  # fmt: skip


def short_of(rank: Any, run: RunSpec) -> Any:
    """The first graphs that are not as owed; None if all are."""
    (end,) = (record for record in rank.run(run) if isinstance(record, EndRecord))
    return not_as_owed(TrainConfig.from_dict(run.config), 0, end.steps, end)


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (("attn", "mlp"), {}),
        (("layer",), {"graph_layers": (1, 1)}),
        (("full_iteration",), {}),
        (("full_iteration",), {"graph_optimizer": False}),
        (("attn", "mlp", "moe_router", "moe_preprocess"), {"model": EXPERTS}),
        (("mlp", "moe"), {"model": EXPERTS, "graph_warmup_steps": 1}),
    ],
)
def test_right_runs_state_all_that_they_owe(
    rank: Any, spec: Spec, graph: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Captures and replays of each scope, layer and direction are exactly those of the config."""
    assert short_of(rank, spec(graph=graph, **options)) is None


@pytest.mark.parametrize("graph", [("attn", "mlp"), ("full_iteration",)])
def test_graphs_that_were_captured_anew_count_together(
    rank: Any, spec: Spec, graph: tuple[str, ...]
) -> None:
    """A soak captures at each stressor's turn; what the graphs before did is not forgotten."""
    run = spec(graph=graph, stress=("poison", "scramble"), steps=8)
    assert short_of(rank, replace(run, soak=SoakSpec(by="steps", amount=8, turn_steps=3))) is None


@pytest.mark.parametrize(("fault", "graph", "expected"), FAULTS)
def test_what_is_left_eager_is_named(
    rank: Any, spec: Spec, fault: str, graph: tuple[str, ...], expected: tuple[str, ...],
    monkeypatch: Patch,
) -> None:  # fmt: skip
    """A layer, scope, microbatch or optimizer that runs beside the graphs is named."""
    monkeypatch.setattr(StageGraphs, "_begin", StageGraphs._begin)  # a fault undoes nothing
    found = short_of(rank, spec(PlantSpec(fault=fault), graph=graph)).difference
    assert (found.tensor, found.quantity, found.reference, found.candidate) == expected


class Store:
    """What ranks share, here threads: who asks for a key waits until it is there."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.most = 0
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.held[key] = value.encode()
            self.most = max(self.most, len(self.held))
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.held, timeout=60)
            return self.held[key]

    def delete_key(self, key: str) -> None:
        with self._changed:
            del self.held[key]


def soaking(
    soak: SoakSpec | None, rank: int = 0, world_size: int = 1, store: Any = None, **config: Any
) -> tuple[Soaking, Any, list[Json]]:
    """A rank's soak over a trainer that only counts."""
    config = {"steps": 8, "flush_every": 4, "stress": (), "stress_seed": 1} | config
    spec = RunSpec(config=config, device="cpu", world_size=world_size, timeout_s=9.0, soak=soak)
    counts = SimpleNamespace(replays=0, captured=1)
    trainer: Any = SimpleNamespace(config=SimpleNamespace(**config), counts=counts, stressors=None)
    written: list[Json] = []
    return Soaking(spec, rank, trainer, store, written.append), counts, written


@pytest.mark.parametrize(
    ("amount", "turn_steps", "config", "steps"),
    [
        (None, 0, {}, 8),
        (1, 0, {}, 8),
        (17, 0, {}, 12),
        (24, 0, {}, 12),
        (25, 0, {}, 16),
        (1, 0, {"flush_every": 5}, 10),
        (1, 10, {"stress": ("races",)}, 8),
        (1, 10, {"stress": ("jitter", "poison", "races")}, 20),
    ],
)
def test_a_soak_by_replays_ends_at_a_flush(
    amount: int | None, turn_steps: int, config: dict[str, Any], steps: int
) -> None:
    """The first with enough replays, all steps and a turn of each stressor that takes one."""
    soak = None if amount is None else SoakSpec(by="replays", amount=amount, turn_steps=turn_steps)
    run, counts, written = soaking(soak, **config)
    for step in run.steps():
        counts.replays = 2 * (step + 1)
    run.write_event()
    said = [(e.detail["steps"], e.detail["replays"]) for e in written if isinstance(e, EventRecord)]
    assert said == ([] if amount is None else [(steps, 2 * steps)])
    assert counts.replays == 2 * steps


def test_a_soak_by_duration_asks_the_clock_of_rank_0(monkeypatch: Patch) -> None:
    """Five steps a second for three seconds end at the flush after step 15."""
    now = 100.0
    monkeypatch.setattr("harness.worker.main.time.monotonic", lambda: now)
    run, _, _ = soaking(SoakSpec(by="duration", amount=3))
    taken = []
    for step in run.steps():
        taken.append(step)
        now += 0.2
    assert len(taken) == 16


def test_ranks_agree_on_the_last_step() -> None:
    """The slowest to have enough decides, no rank goes a step further, keys do not pile up."""
    store, soak = Store(), SoakSpec(by="replays", amount=40)

    def train(rank: int) -> tuple[int, int]:
        run, counts, _ = soaking(soak, rank, 3, store)
        taken = 0
        for _ in run.steps():
            taken, counts.replays = taken + 1, counts.replays + rank + 1
        return taken, counts.replays

    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(train, range(3)))
    assert done == [(40, 40), (40, 80), (40, 120)]
    # Of an answer and the one before it: three votes and a word each.
    assert store.most <= 8
