"""One rank from start to end: its record lines in order, its exit code, its classified errors."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import DataConfig, ModelConfig
from fsdp_core.graph.capture_session import CaptureAborted, CaptureLost
from fsdp_core.graph.compiled import StaleGuards
from fsdp_core.graph.ledger import StaleAddress
from fsdp_core.graph.recorder import CaptureRefused
from fsdp_core.model.backend import BackendMissing
from fsdp_core.stress.clocks import Clocks
from fsdp_core.stress.races import Access, Race, RaceFound
from fsdp_core.stress.stressors import StressorMissing
from harness import provenance
from harness.engine.outcome import FirstFailure, claim, find
from harness.recorder import UNRECORDED
from harness.records import (
    SCHEMA_VERSION,
    EndRecord,
    ErrorRecord,
    EventRecord,
    InitialRecord,
    PlantSpec,
    RunSpec,
    StartRecord,
    StepRecord,
)
from harness.store.streams import rank_path, read_rank
from harness.worker.main import _Session, classify, rank_main

Spec = Callable[..., RunSpec]


@pytest.mark.parametrize("graph", [(), ("attn",), ("full_iteration",)])
def test_a_good_rank_writes_every_record(rank: Any, spec: Spec, graph: tuple[str, ...]) -> None:
    """Start, one record a step, events of graphs and memory, and the end, in this order; code 0."""
    records = rank.run(spec(graph=graph))
    assert rank.code == 0
    kinds = [type(record) for record in records]
    assert kinds == [StartRecord, InitialRecord, *[StepRecord] * 5, *[EventRecord] * 2, EndRecord]
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1, 2, 3, 4]
    start, (event, memory, end) = records[0], records[-3:]
    assert isinstance(memory, EventRecord)
    at_rest = memory.detail["at_rest"]
    assert (memory.name, memory.detail.get("explained")) == ("memory", None)
    assert at_rest["parameters"] == at_rest["gradients"] == (at_rest["optimizer"] - 8) / 2
    assert isinstance(start, StartRecord)
    assert (start.schema, start.rank, start.world_size, start.device) == (
        SCHEMA_VERSION,
        0,
        1,
        "cpu",
    )
    assert set(start.tensors) == {"samples", "grads", "weights", "optim", "rng"}
    fingerprint = start.environment["fingerprint"]
    assert fingerprint["torch"] == torch.__version__
    assert fingerprint["deterministic"] is True
    assert fingerprint["data"] == "synthetic-1"
    assert fingerprint["environment"] == provenance.variables(os.environ)
    assert fingerprint["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert fingerprint["processor"] == provenance.processor() != ""
    assert fingerprint["code"] == provenance.code()
    assert start.environment["host"] == provenance.host()
    assert isinstance(event, EventRecord)
    assert event.name == "graphs"
    replays = {(): 0, ("attn",): 3 * 2 * 2 * 2, ("full_iteration",): 3}[graph]
    assert event.detail["replays"] == replays
    assert isinstance(end, EndRecord)
    assert end.steps == 5
    assert 0 < end.startup_s <= end.wall_s
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert end.peak_bytes >= steps[-1].peak_bytes > 0


def test_records_without_space_are_told_by_the_exit_code(
    spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that cannot write its records for want of space says so by its exit code alone."""
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert rank_main(spec(), tmp_path, 0, store.port) == UNRECORDED
    assert capsys.readouterr().err == "[Errno 28] cannot write records: No space left on device\n"


def test_runs_of_one_specification_agree(rank: Any, spec: Spec) -> None:
    """Two runs of one specification give the same step records, but times."""
    runs = []
    for graph in ((), (), ("full_iteration",)):
        steps = [r for r in rank.run(spec(graph=graph)) if isinstance(r, StepRecord)]
        runs.append([(s.loss, s.microbatch_losses, s.grad_norm, s.digests) for s in steps])
    assert len(runs[0]) == 5
    assert runs[0] == runs[1] == runs[2]


def test_another_seed_is_another_run(rank: Any, spec: Spec) -> None:
    """The seed reaches weights, data and generators."""
    first, second = (rank.run(spec(seed=seed))[2] for seed in (1, 2))
    assert isinstance(first, StepRecord)
    assert isinstance(second, StepRecord)
    assert first.loss != second.loss
    assert first.digests["rng"] != second.digests["rng"]


def test_steps_before_a_failure_are_not_lost(rank: Any, spec: Spec) -> None:
    """Steps that wait in the ring are written when a later step raises."""
    records = rank.run(spec(PlantSpec(fault="raise", step=3), flush_every=10))
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1, 2]
    assert isinstance(records[-1], ErrorRecord)
    assert rank.code == 1


def test_unflushed_steps_are_written_at_the_end(rank: Any, spec: Spec) -> None:
    """A flush interval that does not divide the steps loses none."""
    records = rank.run(spec(flush_every=4))
    assert [r.step for r in records if isinstance(r, StepRecord)] == [0, 1, 2, 3, 4]


def test_an_exception_is_the_last_record(
    rank: Any, spec: Spec, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that raises writes what, where and the traceback, no end record, and returns 1."""
    records = rank.run(spec(data=text_too_short(rank), model=model_for_text()))
    assert rank.code == 1
    *before, error = records
    assert isinstance(error, ErrorRecord)
    assert not any(isinstance(r, EndRecord) for r in records)
    assert [type(r) for r in before] == [StartRecord, InitialRecord]
    assert (error.what, error.type, error.step) == ("crashed", "ValueError", 0)
    assert error.message.startswith("data.path: expected a corpus of at least 7 bytes")
    assert "in window" in error.traceback
    assert "data.path: expected a corpus" in capfd.readouterr().err


def text_too_short(rank: Any) -> Any:
    """A corpus of three bytes."""
    path = rank.folder.parent / "corpus"
    path.write_text("abc")
    return DataConfig(kind="text", path=str(path))


def test_text_corpus_is_in_the_fingerprint(rank: Any, spec: Spec) -> None:
    """The checksum of the text corpus is what must agree between two runs."""
    checksums = []
    for content in ("a" * 50, "a" * 49 + "b"):
        data = text_too_short(rank)
        (rank.folder.parent / "corpus").write_text(content)
        start = rank.run(spec(data=data, steps=1, model=model_for_text()))[0]
        assert isinstance(start, StartRecord)
        checksums.append(start.environment["fingerprint"]["data"])
    assert len(set(checksums)) == 2


def model_for_text() -> ModelConfig:
    """Tiny, with the bytes' vocabulary."""
    return ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seq=6)


def test_absent_backend_is_unsupported(
    rank: Any, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without the chosen backend says so, before any step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (error,) = rank.run(spec(backend="te"))
    assert isinstance(error, ErrorRecord)
    assert (rank.code, error.what, error.type, error.step) == (
        1,
        "unsupported",
        "BackendMissing",
        -1,
    )


def test_degrees_that_do_not_fit_the_world_are_an_error(rank: Any, spec: Spec) -> None:
    """A layout of other than the joined ranks never trains."""
    plain = spec().config
    wrong = RunSpec(
        config=plain | {"parallel": {"dp": 2}}, device="cpu", world_size=1, timeout_s=30
    )
    (error,) = rank.run(wrong)
    assert isinstance(error, ErrorRecord)
    assert "Expected 2 ranks" in error.message


_STREAM = Clocks().new_stream("gather")
_ACCESS = Access(0, 4, _STREAM, 1, True, "aten::zero_", "a.py:1", None)
_RACE = Race("w", "root", _ACCESS, _ACCESS)
CLASSES: list[tuple[BaseException, str]] = [
    (StaleAddress(["w"], "moved"), "stale_address"),
    (StaleGuards("layers.0.attn", "eps == 1"), "stale_guards"),
    (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
    (MemoryError(), "oom"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal_access"),
    (StressorMissing("races"), "unsupported"),
    (RaceFound([_RACE]), "race"),
    (CaptureRefused("cannot capture aten.item"), "capture_refused"),
    (BackendMissing("backend: te"), "unsupported"),
    (RuntimeError("something else"), "crashed"),
    (KeyError("x"), "crashed"),
]


@pytest.mark.parametrize(("error", "what"), CLASSES, ids=[f"{e!r}"[:40] for e, _ in CLASSES])
def test_classify(error: BaseException, what: str) -> None:
    """An exception is classified by itself, and as the cause or context of a plain one."""
    assert classify(error) == what
    by_cause = RuntimeError("engine failed")
    by_cause.__cause__ = error
    assert classify(by_cause) == what
    by_context = ValueError("while handling")
    by_context.__context__ = by_cause
    assert classify(by_context) == what


def test_classify_of_a_rank_whose_neighbour_refused() -> None:
    """A capture that another rank refused is refused here; what failed on this rank is named."""
    aborted = CaptureAborted("attn", {1: "CaptureRefused: cannot capture aten.item"})
    assert classify(aborted) == "capture_refused"
    aborted.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert classify(aborted) == "oom"


def test_classify_of_a_capture_that_lost_ranks() -> None:
    """What failed on this rank is named; where it is unknown a capture was refused elsewhere."""
    lost = CaptureLost("attn", {1: "PlantedError: x"}, "another rank has left")
    assert classify(lost) == "capture_refused"
    lost.__cause__ = MemoryError()
    assert classify(lost) == "oom"


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
    (CaptureLost("attn", {}, "z"), None, None, "no rank said why"),
]


@pytest.mark.parametrize(("error", "before", "blames", "told"), BLAMES)
def test_a_rank_says_who_failed_before_it(
    spec: Spec, tmp_path: Path, error: Exception, before: FirstFailure | None,
    blames: int | None, told: str,
) -> None:  # fmt: skip
    """A rank that lost another blames it, with its reason; one that failed by itself says so."""
    session = _Session(spec(), tmp_path, 0)
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


def test_classify_prefers_the_outermost_meaning() -> None:
    """What an exception itself says outranks what caused it."""
    refused = CaptureRefused("cannot capture: out of memory")
    refused.__cause__ = MemoryError()
    assert classify(refused) == "capture_refused"
