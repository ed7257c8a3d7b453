"""Which runs `--resume` makes again, and what it tells of them, before and after."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.cli import report as report_commands
from harness.records import RunSpec, What
from harness.runner import launch
from harness.runner.retries import earlier_attempts, stored_limit
from harness.store import RunFolder, begin_run, kept_folder, merge, save_outcome
from reports.reading import summarise
from tests.unit.harness.fake_engine import SCENARIO, FakeEngine, run_json
from tests.unit.harness.runner.test_retries import NCCL, FailingEngine


class EndingEngine(FakeEngine):
    """Ends the first attempt of one candidate as it is told."""

    def __init__(self, what: What, message: str = "it died", *, from_outside: bool = False) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"what": what, "message": message, "from_outside": from_outside}

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        super().start(spec, folder, attempt=attempt)
        if spec.config["graph"] == ["attn"] and spec.world_size == 2 and not attempt:
            ended = dataclasses.replace(self.ended.pop(), culprit_rank=0, **self.how)
            save_outcome(folder, ended)
            self.ended.append(ended)


Start = Callable[..., list[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Arguments of a run of the small scenario with an engine."""

    def args(engine: FakeEngine, *more: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "s.yaml").write_text(SCENARIO)
        monkeypatch.setattr(launch, "LocalEngine", engine)
        # They take seconds.
        monkeypatch.setattr(report_commands, "build_reports", lambda folder, *_: {})
        return ["run", "s.yaml", "--out", "run", "--slots", "2", "--no-history", *more]

    return args


def test_a_run_that_somebody_killed_is_made_again_and_told(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails its case at first; --resume makes it alone, and its pass is told as a second one."""
    engine = EndingEngine("killed", from_outside=True)
    assert run_json(capsys, *start(engine))[0] == 1
    made = len(engine.made)
    code, plan = run_json(capsys, "run", "--resume", "run", "--dry-run")
    assert (code, len(plan["runs"])) == (0, 1)
    code, done = run_json(capsys, "run", "--resume", "run", "--no-history")
    assert code == 0
    assert engine.made[made:] == [plan["runs"][0]["key"]]
    assert {verdict["outcome"] for verdict in done["verdicts"]} == {"passed"}
    words = {case.spec.id: case.attempt_words for case in summarise(Path("run")).cases}
    assert words["dp2-attn"] == "passed on attempt 2 (candidate: killed)"
    assert sum(map(bool, words.values())) == 1


def test_a_run_that_the_kernel_may_have_killed_stands_until_somebody_asks(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have used too much memory: only --again-killed makes it again."""
    engine = EndingEngine("killed")
    assert run_json(capsys, *start(engine))[0] == 1
    made = len(engine.made)
    assert main(["run", "--resume", "run", "--no-history"]) == 1
    assert len(engine.made) == made
    assert main(["run", "--resume", "run", "--no-history", "--again-killed"]) == 0
    assert len(engine.made) == made + 1


def test_the_plan_of_a_resume_holds_what_the_machine_failed(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """A harness was stopped before its retry: the plan that is printed is what is then made."""
    engine = FailingEngine(NCCL)
    args = start(engine, "--set", "launch.retries=1")
    engine.on_start = lambda spec: stop_at_the_second(engine, spec)
    assert main(args) == 2
    capsys.readouterr()
    # As if it had been stopped a moment earlier: the failed run is not yet set aside.
    folder = RunFolder.open(Path("run"))
    (candidate,) = (case.candidate for case in folder.cases if case.id == "dp2-attn")
    current = folder.run_folder(candidate.key)
    kept_folder(current, 0).rename(current)
    engine.on_start = lambda spec: None
    engine.ended.clear()
    planned = run_json(capsys, "run", "--resume", "run", "--dry-run")[1]["runs"]
    made = len(engine.made)
    assert main(["run", "--resume", "run", "--no-history"]) == 0
    assert sorted(engine.made[made:]) == sorted(run["key"] for run in planned)
    assert candidate.key in engine.made[made:]
    assert [a.signature for a in earlier_attempts(folder, candidate)] == ["nccl_system_error"]


def test_a_retry_that_was_cut_short_is_not_counted_and_allows_no_more(start: Start) -> None:
    """Killed in the middle of a retry, the harness makes that again, and as many as it had left."""
    engine = FailingEngine(NCCL, times=9)

    def cut_short(spec: RunSpec) -> None:
        if spec.key in engine.made:
            begin_run(RunFolder.open(Path("run")).run_folder(spec.key), spec)
            raise KeyboardInterrupt

    engine.on_start = cut_short
    assert main(start(engine, "--set", "launch.retries=2")) == 2
    engine.on_start = lambda spec: None
    engine.ended.clear()
    for _ in range(2):
        assert main(["run", "--resume", "run", "--no-history"]) == 6
    folder = RunFolder.open(Path("run"))
    (candidate,) = (case.candidate for case in folder.cases if case.id == "dp2-attn")
    told = [(a.what, a.signature) for a in earlier_attempts(folder, candidate)]
    failed = ("crashed", "nccl_system_error")
    assert told == [failed, ("interrupted", ""), failed]


def test_attempts_and_their_limit_are_in_the_merged_folder(start: Start) -> None:
    """What the machine failed in a shard is told of the whole, and resuming it allows as many."""
    args = start(FailingEngine(NCCL), "--set", "launch.retries=1", "--shard", "1/2")
    args[args.index("--out") + 1] = "shard"
    assert main(args) == 0
    assert main(["merge", "shard", "--out", "merged"]) == 6
    folder = RunFolder.open(Path("merged"))
    assert stored_limit(folder.manifest) == 1
    words = {case.spec.id: case.attempt_words for case in summarise(folder.path).cases}
    assert words["dp2-attn"] == "passed on attempt 2 (candidate: nccl_system_error)"


def test_a_merge_that_was_cut_short_is_no_run_folder(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not linked yet is not made anew by --resume: it says that nothing has begun."""
    assert main(start(FakeEngine())) == 0
    with monkeypatch.context() as patch:
        patch.setattr(merge, "_link_all", lambda *_: cut())
        assert main(["merge", "run", "--out", "merged"]) == 2
    assert main(["run", "--resume", "merged"]) == 4
    assert main(["merge", "run", "--out", "merged"]) == 0


def cut() -> None:
    raise KeyboardInterrupt


def test_attempts_that_ended_alike_are_counted(start: Start) -> None:
    """A run that was killed again and again is one cause and a number, not a line of words."""
    assert main(start(EndingEngine("killed", from_outside=True))) == 1
    folder = RunFolder.open(Path("run"))
    (key,) = [case.candidate.key for case in folder.cases if case.id == "dp2-attn"]
    for _ in range(2):
        kept = folder.set_aside(key)
        assert kept is not None
        shutil.copytree(kept, folder.run_folder(key))
    (told,) = [c.attempt_words for c in summarise(folder.path).cases if c.attempt_words]
    assert told == "failed on attempt 3 (candidate: 2 x killed)"


def stop_at_the_second(engine: FakeEngine, spec: RunSpec) -> None:
    """Ctrl-C as a run is about to be made again."""
    if spec.key in engine.made:
        raise KeyboardInterrupt
