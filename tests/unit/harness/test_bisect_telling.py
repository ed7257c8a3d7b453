"""What `harness bisect` tells as it goes, counts as runs, and makes of faults that seldom fire."""

import dataclasses
import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from harness.bisect.experiments import AskedQuestion
from harness.bisect.render import LiveSearch, asked
from harness.cli import main
from harness.records import RunOutcome, RunSpec, StepRecord
from tests.support.fake_engine import FakeEngine, run_json, unequal


def failed_run(
    engine: FakeEngine, spoil: Callable[[RunSpec, StepRecord], StepRecord] = unequal
) -> None:
    """A run folder `r` in which dp2-attn fails."""
    engine.spoil = spoil
    assert main(["run", "small.yaml", "--out", "r", "--no-history"]) == 1
    engine.made.clear()


def test_a_line_a_question_with_its_answer_and_its_number_on_the_page(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run and no made-up case is named on the way; what was asked, and what came of it, is."""
    failed_run(engine)
    capsys.readouterr()
    assert main(["bisect", "dp2-attn", "r", "--out", "b", "--until", "causes"]) == 1
    out = capsys.readouterr().out
    told = re.findall(r"^ *(\d+)\. (.*\?.*)$", out.partition("failed diverged  dp2-attn")[0], re.M)
    assert [int(number) for number, _ in told] == list(range(1, len(told) + 1))
    assert told[0][1] == "does the case itself fail? failed diverged"
    assert not re.search(r"w2-|ask-|^start|^done", out, re.M)
    _, found = run_json(capsys, "bisect", "dp2-attn", "r", "--out", "b", "--until", "causes")
    assert len(found["questions"]) == len(told)
    for question, (_, line) in zip(found["questions"], told, strict=True):
        assert line.startswith(f"{asked(AskedQuestion.from_json(question))} {question['answer']}")


def test_every_run_is_counted_once(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are made side by side before they are asked for cost as much as others."""
    failed_run(engine)
    _, found = run_json(capsys, "bisect", "dp2-attn", "r", "--out", "b", "--until", "causes")
    assert any("runs 2 to" in question["words"] for question in found["questions"])
    free = [question["words"] for question in found["questions"] if not question["runs"]]
    assert free == ["does the case itself fail?"]
    assert found["num_runs"] == len(engine.made) == len(set(engine.made))
    assert sum(question["runs"] for question in found["questions"]) == found["num_runs"]


def fires_in(
    runs: range | tuple[int, ...], engine: FakeEngine
) -> Callable[[RunSpec, StepRecord], StepRecord]:
    """A gradient of rank 1 that is wrong from step 2 on, in these of the graphed runs."""
    fired: dict[str, bool] = {}

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        if spec.config["graph"] != ["attn"] or spec.world_size == 1:
            return record
        fires = fired.setdefault(engine.made[-1], len(fired) in runs)
        if not fires or record.rank == 0 or record.step < 2:
            return record
        return dataclasses.replace(record, digests=record.digests | {"grads": "0" * 32})

    return spoil


def test_a_fault_that_seldom_fires_is_met_and_its_runs_are_counted(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look that it stays away from is repeated until it comes; that it may not is said."""
    failed_run(engine, fires_in(range(0, 20, 4), engine))
    code, found = run_json(
        capsys, "bisect", "dp2-attn", "r", "--out", "b", "--until", "place", "--no-element"
    )
    place = found["place"]
    assert (code, place["step"], place["tensor"], place["ranks"]) == (1, 2, "w", [1])
    assert "it comes now and then: the same run passes, too" in place["evidence"]
    assert found["num_runs"] == len(engine.made) > 3
    looks = [q for q in found["questions"] if q["words"].startswith("which call")]
    assert [q["answer"].startswith("step 2") for q in looks] == [False] * (len(looks) - 1) + [True]


def test_a_fault_that_stays_away_from_the_look_at_elements_is_met_there_too(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first look showed it, the next one does not: whether it always comes is asked then."""
    failed_run(engine, fires_in((0, 1), engine))
    _, found = run_json(capsys, "bisect", "dp2-attn", "r", "--out", "b", "--until", "place")
    words = [question["words"] for question in found["questions"]]
    assert [each.partition("?")[0] for each in words[1:4]] == [
        "which call differs first, up to step 2", "which element of grads:w differs first",
        "does the case always fail",
    ]  # fmt: skip
    assert words[-1] == "which element of grads:w differs first? run 13"
    assert found["place"]["tensor"] == "w"


def test_three_failures_in_a_row_do_not_prove_that_looking_keeps_it_away(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The look is repeated as often as the case was before that is concluded."""
    command = ["bisect", "dp2-attn", "r", "--until", "place", "--no-element", "--out"]
    failed_run(engine, fires_in((0, 2, 3, 4, 6), engine))
    place = run_json(capsys, *command, "b")[1]["place"]
    assert "it comes now and then: the same run passes, too" in place["evidence"]
    engine.spoil = fires_in((1, 2, 3), engine)
    place = run_json(capsys, *command, "c")[1]["place"]
    assert "not with every call digested" in place["unknown"][-1]


def test_on_a_terminal_runs_are_counted_against_no_total() -> None:
    """How many questions follow is not known; answers stand above what is under way."""
    now = [0.0]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    view = LiveSearch(console, lambda: now[0])
    with view:
        view.run_finished(RunOutcome(
            key="w2-x", what="crashed", message="boom", culprit_rank=0, ranks=(),
            started_unix_s=0.0, wall_s=1.0,
        ))  # fmt: skip
        now[0] = 12.0
        view.answered(
            3, AskedQuestion(words="does it fail", answer="failed crashed", runs=1, seconds=2.0)
        )
        live = Console(file=io.StringIO(), width=80, record=True)
        live.print(view.render())
    assert "1 run made, 12 s" in live.export_text()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "  3. does it fail: failed crashed (1 run, 2.0 s)" in plain
    assert "boom" not in plain
