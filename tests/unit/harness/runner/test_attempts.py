"""Runs that are made again: which, how often, by whose code, and what earlier attempts prove."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import provenance
from harness.checks.complete import SIGNATURES, machine_failure, signature_of
from harness.cli import main
from harness.history.ledger import FolderEntry, History
from harness.program.spec import codes_of
from harness.records import (
    Ending,
    ErrorRecord,
    InitialRecord,
    RunOutcome,
    RunResult,
    RunSpec,
    StepRecord,
    What,
    dumps,
    parse_record,
)
from harness.runner import launch
from harness.runner.run import clear_leftovers, earlier_attempts, stored_limit
from harness.store import RunFolder, kept_folder, merge, set_aside
from reports.reading import summarise
from tests.support import records
from tests.support.fake_engine import Cli, FakeEngine, Patch, other_bits

TAKEN = "DistNetworkError: EADDRINUSE, address already in use"
BUSY = "CUDA-capable device(s) is/are busy or unavailable"
CUDA = "AcceleratorError: CUDA error: "
NCCL = "DistBackendError: NCCL error: unhandled system error, ncclSystemError"
FAILING = "dp2-attn"
RUN = ("run", "small.yaml", "--out", "run", "--slots", "2", "--no-history")
RESUME = ("run", "--resume", "run", "--no-history")


def error(text: str, rank: int = 0, **more: Any) -> ErrorRecord:
    """What a rank records of 'Type: words'."""
    kind, _, message = text.partition(": ")
    return records.error(rank, **({"type": kind, "message": message, "step": -1} | more))


def outcome(what: What, message: str = "") -> RunOutcome:
    return records.outcome(what=what, message=message, culprit_rank=0)


class FailingEngine(FakeEngine):
    """The first `times` attempts of the candidate of dp2-attn end as `how` says after two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"what": "crashed", "message": NCCL, "culprit_rank": 0}
        self.times, self.recorded = 1, True
        self.bits: Callable[[Any], Any] = lambda record: record

    def ending(self, spec: RunSpec, folder: Path, attempt: int) -> RunOutcome:
        ended = super().ending(spec, folder, attempt)
        if spec.config["graph"] != ["attn"] or spec.world_size != 2 or attempt >= self.times:
            return ended
        for path in folder.glob("rank*.jsonl"):
            start, *lines = path.read_text().splitlines()[:4]
            lines = [dumps(self.bits(parse_record(line))) for line in lines]
            if path.name == "rank0.jsonl" and self.recorded:
                lines.append(json.dumps(error(self.how["message"]).to_json()))
            path.write_text("\n".join([start, *lines]) + "\n")
        return dataclasses.replace(ended, **self.how)

    @property
    def num_repeated(self) -> int:
        return len(self.made) - len(set(self.made))


@pytest.fixture
def failing(engine: FakeEngine, monkeypatch: Patch) -> FailingEngine:
    """In place of this machine's engine; the working folder holds the small scenario."""
    made = FailingEngine()
    monkeypatch.setattr(launch, "LocalEngine", made)
    return made


def go(retries: int) -> int:
    return main([*RUN, "--set", f"launch.retries={retries}"])


def signatures(folder: str = "run") -> list[str]:
    opened = RunFolder.open(Path(folder))
    return [attempt.signature for attempt in earlier_attempts(opened, candidate(opened))]


def candidate(folder: RunFolder) -> RunSpec:
    return next(case.candidate for case in folder.cases if case.id == FAILING)


def words(folder: str = "run") -> dict[str, str]:
    """What reports say of attempts, by case."""
    cases = summarise(Path(folder)).cases
    return {case.spec.id: case.attempt_words for case in cases if case.attempt_words}


def only_bad(answer: Any) -> Any:
    """The only verdict that is no pass."""
    (bad,) = [verdict for verdict in answer["verdicts"] if verdict["outcome"] != "passed"]
    return bad


def test_a_failure_of_the_machine_is_tried_again_and_counted(
    failing: FailingEngine, cli: Cli
) -> None:
    """It passes on its second attempt, the first is kept, in the history, too; limits hold."""
    args = ["run", "small.yaml", "--slots", "2", "--set", "launch.retries=2", "--history", "h.db"]
    assert {v["outcome"] for v in cli.json(*args, "--out", "run")["verdicts"]} == {"passed"}
    assert (signatures(), failing.num_repeated) == (["nccl_system_error"], 1)
    flaky = ("history", "--flaky", "--history", "h.db")
    (entry,) = cli.json(*flaky, code=None)
    found = (entry["case_id"], entry["retried"], entry["changes"])
    assert found == (FAILING, {"nccl_system_error": 1}, 0)
    failing.times = 9
    cli(*args, "--out", "beyond", code=6)
    assert cli.json(*flaky, code=None)[0]["retried"] == {"nccl_system_error": 3}
    assert signatures("beyond") == ["nccl_system_error"] * 2
    made = len(failing.made)
    cli("run", "--resume", "beyond", "--no-history", code=6)
    assert len(failing.made) == made + 1  # resuming asks once more, and once only


def test_without_retries_only_resuming_asks_again_and_nobody_is_at_fault(
    failing: FailingEngine, cli: Cli
) -> None:
    """Nothing is tried again by itself unless the scenario says so; the first attempt is kept."""
    bad = only_bad(cli.json(*RUN, code=6))
    assert (bad["outcome"], bad["what"]) == ("error", "crashed")
    assert bad["message"].startswith("the machine failed (nccl_system_error): ")
    assert failing.num_repeated == 0
    assert {v["outcome"] for v in cli.json(*RESUME)["verdicts"]} == {"passed"}
    assert (signatures(), failing.num_repeated) == (["nccl_system_error"], 1)


@pytest.mark.parametrize(
    ("what", "message", "recorded"),
    [
        ("illegal_access", f"CUDA illegal memory access; {NCCL}", True),
        ("oom", f"out of memory; {NCCL}", True),
        ("crashed", "RuntimeError: a tensor is NaN", True),
        ("crashed", TAKEN, True),  # two steps are recorded
        # The words alone, from somebody who has no business to say them.
        ("crashed", NCCL.replace("DistBackendError", "RuntimeError"), True),
        ("crashed", f"rank 0 exited with code 1 after step 1: {NCCL}", False),
        ("nan", NCCL, True),
    ],
)
def test_what_a_program_did_is_final(
    failing: FailingEngine, what: str, message: str, recorded: bool
) -> None:
    """No other ending is tried again, whatever words of machines it holds, or with a NaN."""
    failing.how |= {"what": "crashed" if what == "nan" else what, "message": message}
    failing.recorded = recorded
    if what == "nan":
        failing.bits = lambda record: dataclasses.replace(record, nonfinite={"grads": ("w",)})
    assert go(5) == 1
    assert main([*RESUME]) == 1
    assert failing.num_repeated == 0


@pytest.mark.parametrize(
    ("step", "group", "tensor"),
    [(1, "weights", "w"), (1, "samples", "tokens"), (-1, "optim", "w")],
)
def test_no_pass_after_an_attempt_with_other_bits(
    failing: FailingEngine, cli: Cli, step: int, group: str, tensor: str
) -> None:
    """Whatever group of digests it was in, the state before step 0 included; `check` says so."""

    def spoilt(record: StepRecord | InitialRecord) -> StepRecord | InitialRecord:
        at = record.step if isinstance(record, StepRecord) else -1
        if (at, record.rank) != (step, 1):
            return record
        return dataclasses.replace(record, digests=record.digests | {group: "0" * 32})

    failing.bits = spoilt
    assert go(1) == 1
    bad = only_bad(cli.json("check", "run", code=1))
    place = bad["difference"]
    assert (bad["outcome"], bad["what"]) == ("failed", "diverged")
    found = (place["step"], place["rank"], place["quantity"], place["tensor"])
    assert found == (step, 1, group, tensor)


@pytest.mark.parametrize("differs", [False, True])
def test_what_failed_beside_another_run_is_repeated_at_once(
    failing: FailingEngine, cli: Cli, differs: bool
) -> None:
    """Without any retries; other bits that it had before are held against nobody."""
    failing.how = {"what": "oom", "message": "E: no memory", "culprit_rank": 0, "undecided": True}
    if differs:
        failing.bits = lambda record: other_bits(record) if record.kind == "step" else record
    code = go(0)
    assert failing.num_repeated == 1
    assert signatures() == ["shared_gpu"]
    found = {v.outcome: v.what for v in RunFolder.open(Path("run")).verdicts()}
    assert found.get("incomparable", "") == ("shared_gpu" if differs else "")
    assert (code == 0) == (not differs)


def ended(*errors: ErrorRecord) -> RunResult:
    """A crashed run whose rank 0 is at fault, and what its ranks recorded as their ends."""
    ranks = tuple(records.rank_records(e.rank, error=e) for e in errors)
    return RunResult(spec=records.run_spec(2), outcome=outcome("crashed"), ranks=ranks)


QUOTING = f"DistBackendError: lost; before that, rank 1 failed: {NCCL}"


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (ended(error(NCCL)), "nccl_system_error"),
        (ended(error(NCCL), error("E: m", rank=1, what="illegal_access")), ""),
        (ended(error("ValueError: mine"), error(NCCL, rank=1)), ""),
        (ended(error(QUOTING, blames=1)), ""),
        # Before any step is what the error's own step says, though no step is on record.
        (ended(error(CUDA + BUSY)), "device_unavailable"),
        (ended(error(CUDA + BUSY, step=0)), "device_unavailable"),
        (ended(error(CUDA + BUSY, step=15)), ""),
    ],
)
def test_only_the_rank_at_fault_is_heard(run: RunResult, name: str) -> None:
    """Not one that lost its network because another failed, nor one that quotes the other."""
    assert machine_failure(run) == name


@pytest.mark.parametrize(
    ("name", "what", "text"),
    [
        ("port_in_use", "crashed", TAKEN),  # the words of each are those of the recorder's table
        ("rendezvous_timeout", "hang", "DistNetworkError: The client socket has timed out"),
        ("", "crashed", f"ValueError: {BUSY}"),
        ("no_process", "not_run", ""),
        ("forkserver_died", "interrupted", ""),
        ("node_failure", "interrupted", ""),
    ],
)
def test_every_signature_is_known_by_its_exception_or_field(
    name: str, what: What, text: str
) -> None:
    """What the engine saw is a field; the harness' own words say nothing."""
    if text:
        assert signature_of(outcome(what, "it failed"), [error(text)]) == name
        assert signature_of(outcome(what, text)) == ""
    else:
        seen = dataclasses.replace(outcome(what), ending=Ending(machine=name))
        assert signature_of(seen) == name
        assert signature_of(dataclasses.replace(seen, what="crashed")) == ""
        assert signature_of(outcome(what, "the forkserver died; NODE_FAIL; Errno 11")) == ""
    assert len(SIGNATURES) == 8


@pytest.mark.parametrize("from_outside", [True, False])
def test_a_run_that_was_killed(failing: FailingEngine, cli: Cli, *, from_outside: bool) -> None:
    """By somebody: --resume makes it, alone. By the kernel, maybe: only with --again-killed."""
    failing.how = {"what": "killed", "message": "it died", "from_outside": from_outside}
    failing.times = 3 if from_outside else 1
    assert main([*RUN]) == 1
    made = len(failing.made)
    keys = [
        run["key"] for run in cli.json("run", "--resume", "run", "--dry-run", code=None)["runs"]
    ]
    if from_outside:
        assert [main([*RESUME]) for _ in range(3)] == [1, 1, 0]
        assert failing.made[made:] == keys * 3
        assert words() == {FAILING: "passed on attempt 4 (candidate: 3 x killed)"}
    else:
        assert main([*RESUME]) == 1
        assert (failing.made[made:], keys) == ([], [])
        assert main([*RESUME, "--again-killed", "--device", "cpu"]) == 4
        # What was refused has set nothing aside.
        assert cli.json("check", "run", code=1)["damage"] == []
        assert main([*RESUME, "--again-killed"]) == 0
        assert len(failing.made) == made + 1
        assert words() == {FAILING: "passed on attempt 2 (candidate: killed)"}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_plan_of_a_resume_holds_what_the_machine_failed(
    failing: FailingEngine, cli: Cli
) -> None:
    """A harness was stopped before its retry: the plan that is printed is what is then made."""
    failing.on_start = lambda spec: interrupt() if spec.key in failing.made else None
    assert go(1) == 2
    # As if it had been stopped a moment earlier: the failed run is not yet set aside.
    folder = RunFolder.open(Path("run"))
    current = folder.run_folder(candidate(folder).key)
    kept_folder(current, 0).rename(current)
    failing.on_start = lambda spec: None
    planned = cli.json("run", "--resume", "run", "--dry-run")["runs"]
    made = len(failing.made)
    assert main([*RESUME]) == 0
    assert sorted(failing.made[made:]) == sorted(run["key"] for run in planned)
    assert candidate(folder).key in failing.made[made:]
    assert signatures() == ["nccl_system_error"]


def test_attempts_and_their_limit_are_in_the_merged_folder(
    failing: FailingEngine, monkeypatch: Patch
) -> None:
    """Resuming the whole allows as many; a merge that was cut short is no run folder."""
    shard = ("--set", "launch.retries=1", "--shard", "1/2")
    assert main([*RUN, *shard]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(merge, "_link_all", interrupt)
        assert main(["merge", "run", "--out", "merged"]) == 2
    assert main(["run", "--resume", "merged"]) == 4
    assert main(["merge", "run", "--out", "merged"]) == 6
    assert stored_limit(RunFolder.open(Path("merged")).manifest) == 1
    assert words("merged") == {FAILING: "passed on attempt 2 (candidate: nccl_system_error)"}


@pytest.fixture
def half_done(engine: FakeEngine, monkeypatch: Patch) -> FakeEngine:
    """A folder of which one case is half done, made by code that is called old."""
    monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.12"})
    monkeypatch.setattr(provenance, "code", lambda: "old")
    monkeypatch.setattr("harness.provenance.describe", lambda root=None: "a" * 40)
    engine.environment |= {"commit": "a" * 40}
    assert main([*RUN]) == 0
    with RunFolder.open(Path("run")) as folder:
        set_aside(folder.run_folder(candidate(folder).key))
    engine.made.clear()
    return engine


def other_code(engine: FakeEngine, monkeypatch: Patch) -> None:
    monkeypatch.setattr(provenance, "code", lambda: "new")
    monkeypatch.setattr("harness.provenance.describe", lambda root=None: "b" * 40)
    engine.environment = {"fingerprint": {"torch": "x", "code": "new"}, "commit": "b" * 40}


@pytest.mark.parametrize(
    ("name", "words"),
    [("code", "code old became new"), ("packages", "package torch 2.12 became 2.13"),
     ("variables", "variable TORCHDYNAMO_DISABLE absent became 1")],
)  # fmt: skip
def test_what_differs_is_refused_in_one_line(
    name: str, words: str, half_done: FakeEngine, monkeypatch: Patch, cli: Cli
) -> None:
    """Other code, packages or variables: exit 4, nothing is run, the way out is named."""
    if name == "code":
        other_code(half_done, monkeypatch)
    elif name == "packages":
        monkeypatch.setattr(provenance, "installed_packages", lambda: {"torch": "2.13"})
    else:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    said = cli.refused(*RESUME)
    assert (words in said, "--mixed" in said, half_done.made) == (True, True, [])


def test_another_commit_of_the_same_code_goes_on(
    half_done: FakeEngine, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Nor does another GPU matter; a script next to a program's own is code of it."""
    monkeypatch.setattr("harness.provenance.describe", lambda root=None: "b" * 40)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert (main([*RESUME]), len(half_done.made)) == (0, 1)
    script = tmp_path / "train.py"
    config = {"program": {"kind": "script", "target": str(script), "folder": str(tmp_path)}}
    before = codes_of([config, config])
    (tmp_path / "model.py").write_text("layers = 2")
    assert provenance.changes(before, codes_of([config])).startswith(f"program {script} ")


def test_a_verdict_does_not_outlive_its_runs(half_done: FakeEngine, monkeypatch: Patch) -> None:
    """While a run of a case is repeated, the case has no answer: killed then, it is asked again."""
    found, ending = [], half_done.ending

    def looked(*args: Any) -> RunOutcome:
        found.append(RunFolder.open(Path("run")).load_verdict(FAILING))
        return ending(*args)

    monkeypatch.setattr(half_done, "ending", looked)
    assert (main([*RESUME]), found) == (0, [None])


def test_mixed_runs_are_incomparable_and_booked_under_their_own_commit(
    half_done: FakeEngine, monkeypatch: Patch, cli: Cli
) -> None:
    """The case with runs of both has no verdict about the code; the history knows who made what."""
    other_code(half_done, monkeypatch)
    mixed = ("run", "--resume", "run", "--mixed", "--history", "h")
    verdicts = cli.json(*mixed, code=6)["verdicts"]
    assert {v["what"] for v in verdicts if v["case_id"] == FAILING} == {"different_environment"}
    history = History.open(Path("h"))
    (entry,) = history.entries()
    assert isinstance(entry, FolderEntry)
    assert entry.commit == "a" * 40
    made = half_done.made[0]
    assert {run.commit for run in entry.runs if run.key == made} == {"", "b" * 40}
    assert {case.case_id for case in entry.cases if case.commit == "b" * 40} == {FAILING}
    assert {run.commit for run in entry.runs if run.key != made} == {""}
    assert "expected --resume" in cli("run", "small.yaml", "--mixed", code=4).err


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    """Files of dead processes and half-sealed cases go; runs, whole files and files of the living
    stay, so do links' targets."""
    folder = RunFolder.create(tmp_path / "run", {}, "", [])
    for name in ("report", "replies", "cases/a/reference", "cases/.a.tmp/reference", "runs/k"):
        (folder.path / name).mkdir(parents=True)
    dead, living = 2**22 + 1, os.getpid()  # the first is no process: it is beyond pid_max
    gone = [f".verdict.json.{dead}.tmp", f"report/.index.html.{dead}.tmp",
            f"replies/.commit-0.json.{dead}.tmp", f"cases/a/.verdict.json.{dead}.tmp"]  # fmt: skip
    kept = [f"report/.report.md.{living}.tmp", f"runs/k/.node0.json.{dead}.tmp",
            "cases/a/case.json", ".mine.tmp"]  # fmt: skip
    for name in (*gone, *kept):
        (folder.path / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    (folder.path / "cases/.b.tmp").symlink_to(tmp_path / "elsewhere")
    clear_leftovers(folder)
    assert not [name for name in gone if (folder.path / name).exists()]
    assert [name for name in kept if not (folder.path / name).exists()] == []
    assert {path.name for path in folder.path.glob("cases/*")} == {"a", ".b.tmp"}
    assert (tmp_path / "elsewhere/file").exists()
