"""Runs that the machine failed are made again, and nothing that a program did is forgiven."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.cli import report as report_commands
from harness.infrastructure import SIGNATURES, machine_failure, signature_of
from harness.records import (
    Ending,
    ErrorRecord,
    InitialRecord,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StepRecord,
    What,
    dumps,
    parse_record,
)
from harness.runner import launch
from harness.runner.retries import earlier_attempts, stored_limit
from harness.store import RunFolder, save_outcome
from tests.unit.harness.fake_engine import SCENARIO, FakeEngine, run_json

TAKEN = "DistNetworkError: EADDRINUSE, address already in use"
BUSY = "CUDA-capable device(s) is/are busy or unavailable"
CUDA = "AcceleratorError: CUDA error: "
NCCL = "DistBackendError: NCCL error: unhandled system error, ncclSystemError"
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/listener.cc:61] bind: "


def error(told: str, rank: int = 0, **more: Any) -> ErrorRecord:
    """What a rank records of 'Type: words'."""
    kind, _, message = told.partition(": ")
    plain: dict[str, Any] = {"step": -1, "what": "crashed", "traceback": ""} | more
    return ErrorRecord(rank=rank, type=kind, message=message, **plain)


def outcome(what: What, message: str) -> RunOutcome:
    return RunOutcome(
        key="k", what=what, message=message, culprit_rank=0, ranks=(), started_unix_s=0.0,
        wall_s=1.0,
    )  # fmt: skip


class FailingEngine(FakeEngine):
    """Fails the first `times` attempts of the candidates that are graphed as `graph` says.

    Rank 0 records 'Type: words' as its end, unless it is said to have `recorded` nothing.
    """

    def __init__(self, message: str, *, what: What = "crashed", times: int = 1) -> None:
        super().__init__()
        self.message, self.what, self.times, self.graph = message, what, times, ["attn"]
        self.steps_before, self.recorded = 2, True
        self.bits_before: Callable[[Any], Any] = lambda record: record

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        super().start(spec, folder, attempt=attempt)
        if spec.config["graph"] != self.graph or spec.world_size != 2 or attempt >= self.times:
            return
        ended = dataclasses.replace(
            self.ended.pop(), what=self.what, message=self.message, culprit_rank=0
        )
        save_outcome(folder, ended)
        for path in folder.glob("rank*.jsonl"):
            lines = path.read_text().splitlines()[: 2 + self.steps_before]
            plain = [parse_record(line) for line in lines[1:]]
            told = [dumps(self.bits_before(record)) for record in plain]
            if path.name == "rank0.jsonl" and self.recorded:
                told.append(json.dumps(error(self.message).to_json()))
            path.write_text("\n".join([lines[0], *told]) + "\n")
        self.ended.append(ended)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run the small scenario with an engine; the arguments of the command."""

    def args(engine: FakeEngine, retries: int, out: str = "run") -> list[str]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "s.yaml").write_text(SCENARIO)
        monkeypatch.setattr(launch, "LocalEngine", engine)
        # They take seconds.
        monkeypatch.setattr(report_commands, "build_reports", lambda folder, *_: {})
        sets = ["--set", f"launch.retries={retries}"] if retries else []
        return ["run", "s.yaml", "--out", out, "--slots", "2", "--no-history", *sets]

    return args


def attempts_in(folder: Path, graph: str = "attn") -> dict[str, list[str]]:
    opened = RunFolder.open(folder)
    return {
        case.id: [a.signature for a in earlier_attempts(opened, case.candidate)]
        for case in opened.cases
        if case.candidate.world_size == 2 and case.candidate.config["graph"] == [graph]
    }


def test_a_failure_of_the_machine_is_tried_again(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that the machine failed once passes on its second attempt, and the first is kept."""
    engine = FailingEngine(NCCL)
    code, done = run_json(capsys, *small(engine, 2))
    assert code == 0
    assert {verdict["outcome"] for verdict in done["verdicts"]} == {"passed"}
    assert list(attempts_in(Path("run")).values()) == [["nccl_system_error"]]
    assert len(engine.made) == len(set(engine.made)) + 1


def test_the_history_counts_what_the_machine_failed(
    small: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass on the second attempt is a pass, and in the flaky ledger; the last attempt is not."""
    args = [arg for arg in small(FailingEngine(NCCL), 2) if arg != "--no-history"]
    database = ("--history", "history.sqlite")
    assert run_json(capsys, *args)[0] == 0
    code, found = run_json(capsys, "history", "--flaky", *database)
    assert code == 0
    told = [(entry["case_id"], entry["retried"], entry["changes"]) for entry in found]
    assert told == [("dp2-attn", {"nccl_system_error": 1}, 0)]
    args[args.index("--out") + 1] = "beyond"
    launch.LocalEngine.times = 9  # type: ignore[attr-defined]
    assert run_json(capsys, *args)[0] == 6
    (entry,) = run_json(capsys, "history", "--flaky", *database)[1]
    assert entry["retried"] == {"nccl_system_error": 3}
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["history", "--flaky", *database]) == 0
    assert "3 x nccl_system_error" in capsys.readouterr().out


def test_without_retries_it_stands_and_accuses_nobody(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is tried again unless the scenario says so, and a machine is no candidate's fault."""
    engine = FailingEngine(NCCL)
    code, done = run_json(capsys, *small(engine, 0))
    assert code == 6
    (bad,) = [verdict for verdict in done["verdicts"] if verdict["outcome"] != "passed"]
    assert (bad["outcome"], bad["what"]) == ("error", "crashed")
    assert bad["message"].startswith("the machine failed (nccl_system_error): ")
    assert len(engine.made) == len(set(engine.made))


def test_retries_are_counted_across_resumes(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that fails more often than allowed is not tried for ever, nor on `--resume`."""
    engine = FailingEngine(NCCL, times=9)
    assert run_json(capsys, *small(engine, 2))[0] == 6
    assert list(attempts_in(Path("run")).values()) == [["nccl_system_error"] * 2]
    made = len(engine.made)
    assert main(["run", "--resume", "run", "--no-history"]) == 6
    assert len(engine.made) == made


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("illegal_access", f"CUDA illegal memory access; {NCCL}"),
        ("oom", f"out of memory; {NCCL}"),
        ("stale_address", NCCL),
        ("crashed", "RuntimeError: a tensor is NaN"),
        ("crashed", TAKEN),  # two steps are recorded
        ("killed", NCCL),
        # The words alone, from somebody who has no business to say them.
        ("crashed", NCCL.replace("DistBackendError", "RuntimeError")),
        ("crashed", "ValueError: uncorrectable ECC error encountered"),
        ("crashed", "RuntimeError: uncorrectable ECC error encountered"),
    ],
)
def test_what_a_program_did_stands(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], what: What, message: str
) -> None:
    """No other ending is tried again, whatever words of machines it holds."""
    engine = FailingEngine(message, what=what)
    assert run_json(capsys, *small(engine, 5))[0] == 1
    assert len(engine.made) == len(set(engine.made))


def test_what_a_program_printed_is_not_forgiven(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that exits with words of machines as its last line, and no record, has failed."""
    engine = FailingEngine(f"rank 0 exited with code 1 after step 1: {NCCL}")
    engine.recorded = False
    assert run_json(capsys, *small(engine, 5))[0] == 1
    assert len(engine.made) == len(set(engine.made))


@pytest.mark.parametrize(
    ("step", "group", "tensor"),
    [(1, "weights", "w"), (1, "samples", "tokens"), (-1, "optim", "w")],
)
def test_a_pass_does_not_stand_beside_an_attempt_with_other_bits(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str],
    step: int, group: str, tensor: str,
) -> None:  # fmt: skip
    """A first attempt that diverged before the machine failed it is not washed away by a second,
    in whatever group of digests, the state before step 0 included.
    """
    engine = FailingEngine(NCCL)

    def spoilt(record: StepRecord | InitialRecord) -> StepRecord | InitialRecord:
        at = record.step if isinstance(record, StepRecord) else -1
        if (at, record.rank) != (step, 1):
            return record
        return dataclasses.replace(record, digests=record.digests | {group: "0" * 32})

    engine.bits_before = spoilt
    code, done = run_json(capsys, *small(engine, 1))
    assert code == 1
    (bad,) = [verdict for verdict in done["verdicts"] if verdict["outcome"] != "passed"]
    assert (bad["outcome"], bad["what"]) == ("failed", "diverged")
    place = bad["difference"]
    assert (place["step"], place["rank"], place["quantity"], place["tensor"]) == (
        step, 1, group, tensor,
    )  # fmt: skip


def test_records_of_a_program_overrule_the_words() -> None:
    """A NaN on record, or one rank's illegal access, makes the whole run the program's."""
    other = error("E: m", rank=1, what="illegal_access")
    assert machine_failure(ended(error(NCCL))) == "nccl_system_error"
    assert machine_failure(ended(error(NCCL), other)) == ""


def test_only_the_rank_at_fault_is_heard() -> None:
    """Not one that lost its network because another failed, nor one that quotes the other."""
    assert machine_failure(ended(error("ValueError: mine"), error(NCCL, rank=1))) == ""
    quoting = error(f"DistBackendError: lost; before that, rank 1 failed: {NCCL}", blames=1)
    assert machine_failure(ended(quoting)) == ""


def ended(*errors: ErrorRecord) -> RunResult:
    """A crashed run whose rank 0 is at fault, and what its ranks recorded as their ends."""
    spec = RunSpec(config={}, device="cpu", world_size=2, timeout_s=1.0)
    ranks = [
        RankRecords(rank=e.rank, start=None, steps=(), events=(), error=e, end=None, problems=())
        for e in errors
    ]
    return RunResult(spec=spec, outcome=outcome("crashed", "it crashed"), ranks=tuple(ranks))


def test_a_nan_on_record_is_not_tried_again(
    small: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that recorded a non-finite tensor before the machine failed it is not made again."""
    engine = FailingEngine(NCCL)
    engine.bits_before = lambda record: dataclasses.replace(record, nonfinite={"grads": ("w",)})
    assert run_json(capsys, *small(engine, 5))[0] == 1
    assert len(engine.made) == len(set(engine.made))


@pytest.mark.parametrize(
    ("name", "what", "told"),
    [
        ("port_in_use", "crashed", TAKEN),
        ("port_in_use", "crashed", f"{GLOO}Address already in use"),
        ("rendezvous_timeout", "crashed", "DistStoreError: 1/2 clients joined"),
        ("rendezvous_timeout", "hang", "DistNetworkError: The client socket has timed out"),
        ("nccl_system_error", "crashed", NCCL),
        ("memory_error", "crashed", f"{CUDA}uncorrectable ECC error encountered"),
        ("device_unavailable", "crashed", CUDA + BUSY),
        ("", "crashed", f"ValueError: {BUSY}"),
        ("", "crashed", "OSError: [Errno 98] Address already in use"),
        ("", "crashed", "AssertionError: "),
    ],
)  # fmt: skip
def test_every_signature_is_told_by_its_exception(name: str, what: What, told: str) -> None:
    """A failure of libraries is known by their exception; the harness' own words say nothing."""
    assert signature_of(outcome(what, "it failed"), [error(told)]) == name
    assert signature_of(outcome(what, told)) == ""


@pytest.mark.parametrize(
    ("name", "what"),
    [("no_process", "not_run"), ("forkserver_died", "interrupted"),
     ("node_failure", "interrupted")],
)  # fmt: skip
def test_what_the_engine_saw_is_a_field(name: str, what: What) -> None:
    """Its words say nothing: a message that sounds like it is no failure of the machine."""
    words = "the forkserver died; ended as NODE_FAIL; Errno 11: Resource temporarily unavailable"
    assert signature_of(outcome(what, words)) == ""
    seen = dataclasses.replace(outcome(what, ""), ending=Ending(machine=name))
    assert signature_of(seen) == name
    assert signature_of(dataclasses.replace(seen, what="crashed")) == ""
    assert len(SIGNATURES) == 8


@pytest.mark.parametrize(("step", "name"), [(-1, "device_unavailable"), (0, "device_unavailable"),
                                            (15, "")])  # fmt: skip
def test_steps_that_waited_to_be_written_were_taken(step: int, name: str) -> None:
    """Before any step is what the error's own step says, though no step is on record."""
    ended = error(CUDA + BUSY, step=step)
    records = RankRecords(
        rank=0, start=None, steps=(), events=(), error=ended, end=None, problems=()
    )
    spec = RunSpec(config={"graph": []}, device="cuda", world_size=1, timeout_s=1.0)
    run = RunResult(spec=spec, outcome=outcome("crashed", ""), ranks=(records,))
    assert machine_failure(run) == name


def test_a_stored_limit_is_a_count() -> None:
    """A manifest may say anything; only a positive integer allows an attempt."""
    values = [3, 0, -1, True, "3", None, 2.0]
    assert [stored_limit({"retries": value}) for value in values] == [3, 0, 0, 0, 0, 0, 0]
    assert stored_limit({}) == 0
