"""What the terminal shows of runs: everything is said, nothing is taken for markup."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_core.config import TrainConfig
from harness import terminal
from harness.cli import output
from harness.records import (
    CaseSpec,
    CheckResult,
    Difference,
    ErrorRecord,
    RankExit,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
)
from harness.runner.plan import Plan, PlannedRun
from harness.terminal import (
    Forecast,
    LiveView,
    PlainView,
    View,
    duration,
    make_view,
)

SPEC = RunSpec(config=TrainConfig().to_dict(), device="cpu", world_size=2, timeout_s=60.0)
EVIL = "[red]x[/red]\n[/] \x1b[31m :smile:"
CASE = CaseSpec(
    id="dp2-attn", scenario="s", labels={}, reference=SPEC, control=SPEC, candidate=SPEC,
    expect="bitwise", checks={"loss": {}},
)  # fmt: skip
DIFFERENCE = Difference(
    step=7, rank=1, quantity="weights", tensor="layers.0.w", reference="aa", candidate="bb", ulps=1
)
FAILED = Verdict(
    case_id="dp2-attn", outcome="failed", what="diverged", message=f"differs {EVIL}",
    checks=(CheckResult(check="state", outcome="failed", what="diverged", message=EVIL),),
    runs={}, wall_s=1.0, difference=DIFFERENCE,
)  # fmt: skip
PLAN = Plan(
    slots=8, jobs=None, cases=(CASE,), estimate_s=75.0,
    runs=(PlannedRun(key=SPEC.key, spec=SPEC, serves=("dp2-attn",), estimate_s=2.0),),
)  # fmt: skip


def outcome(what: str = "", message: str = "") -> RunOutcome:
    """How the run of SPEC ended."""
    return RunOutcome(
        key=SPEC.key, what=what, message=message, culprit_rank=None, ranks=(),  # type: ignore[arg-type]
        started_unix_s=0.0, wall_s=2.0,
    )  # fmt: skip


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    """A console that writes to a string."""
    text = io.StringIO()
    return Console(
        file=text, width=200, force_terminal=terminal, color_system=None, highlight=False
    ), text


def drive(view: View) -> None:
    """The calls of a small execution."""
    with view:
        view.planned(PLAN)
        view.run_started(SPEC)
        view.run_finished(outcome("hang", f"rank 1 {EVIL}"))
        view.judged(FAILED)


@pytest.mark.parametrize("terminal", [True, False])
def test_both_views_say_everything(*, terminal: bool) -> None:
    """Plan, failed run and verdict are said, with texts from logs as they are, on one line each."""
    target, text = console(terminal=terminal)
    view = make_view(target)
    assert isinstance(view, LiveView if terminal else PlainView)
    drive(view)
    said = text.getvalue()
    if not terminal:  # a line an event
        assert [line.split()[0] for line in said.splitlines()] == ["1", "start", "hang", "failed"]
    for words in ("1 case, 1 run on 8 slots", SPEC.key, "hang", "dp2-attn", "diverged",
                  "[red]x[/red]\\n[/] \\x1b[31m :smile:"):  # fmt: skip
        assert words in said
    assert "\x1b[31m" not in said


def test_the_live_view_shows_what_is_under_way() -> None:
    """The bar counts finished runs; active ones are listed until they end."""
    target, _ = console(terminal=True)
    view = LiveView(target, clock=lambda: 5.0)

    def shown() -> str:
        with target.capture() as captured:
            target.print(view.render())
        return captured.get()

    view.planned(PLAN)
    view.run_started(SPEC)
    assert "0/1 runs" in shown()
    assert SPEC.key in shown()
    view.run_finished(outcome())
    assert "1/1 runs" in shown()
    assert SPEC.key not in shown()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (12.4, "12 s"), (59.6, "1 min"), (185, "3 min 5 s"),
     (7800, "2 h 10 min")],
)  # fmt: skip
def test_durations_read_well(seconds: float, text: str) -> None:
    """Seconds, then minutes, then hours."""
    assert duration(seconds) == text


def test_a_case_is_shown_with_its_difference_exits_and_last_words(tmp_path: Path) -> None:
    """Verdict, first difference, each rank that ended badly, and what it printed last."""
    (tmp_path / "rank1.stderr").write_text("".join(f"line {i}\n" for i in range(100)) + EVIL)
    error = ErrorRecord(
        rank=1, step=3, what="crashed", type="ValueError", message=EVIL, traceback=""
    )
    ranks = tuple(
        RankRecords(rank=rank, start=None, steps=(), events=(), error=error if rank else None,
                    end=None, problems=())
        for rank in range(3)
    )  # fmt: skip
    exits = (
        RankExit(rank=0, code=0),
        RankExit(rank=1, code=-9, killed_by_harness=True),
    )
    ended = RunOutcome(
        key=SPEC.key, what="crashed", message="rank 1", culprit_rank=1, ranks=exits,
        started_unix_s=0.0, wall_s=2.0,
    )  # fmt: skip
    run = RunResult(spec=SPEC, outcome=ended, ranks=ranks)
    target, text = console(terminal=False)
    output.print_case(target, CASE, FAILED, {"candidate": (tmp_path, run)})
    said = text.getvalue()
    for words in ("step 7, rank 1", "weights layers.0.w", "ulps", "signal 9 (by the harness)",
                  "never started", "ValueError: [red]x", "line 99"):  # fmt: skip
        assert words in said
    assert "line 50\n" not in said
    assert "\x1b" not in said
    output.print_case(target, CASE, None, {})  # never shown as a pass
    assert "no verdict" in text.getvalue()


def test_the_end_repeats_only_what_did_not_pass() -> None:
    """The last table has no case that passed or was skipped; counts have all of them."""
    passed = dataclasses.replace(FAILED, case_id="green", outcome="passed", what="")
    skipped = dataclasses.replace(FAILED, case_id="yellow", outcome="skipped")
    error = dataclasses.replace(FAILED, case_id="magenta", outcome="error")
    target, text = console(terminal=False)
    output.print_outcome(target, [passed, FAILED, skipped, error], 4)
    *table, counts = text.getvalue().splitlines()
    assert [line.split()[0] for line in table if line.split()][2:] == ["dp2-attn", "magenta"]
    assert counts == "1 passed, 1 failed, 1 error, 1 skipped"
    assert output.counts_line([FAILED], 3).plain == "1 failed, 2 without a verdict"
    assert output.counts_line([], 0).plain == "no case"
    target, text = console(terminal=False)
    output.print_outcome(target, [passed], 1)
    assert text.getvalue() == "1 passed"  # nothing is said twice


@pytest.mark.parametrize(
    ("columns", "width"), [(None, 100), ("140", 140), ("wide", 100), ("0", 100)]
)
def test_what_is_piped_is_as_wide_as_columns_says(
    columns: str | None,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """100 columns if it says nothing; a table is folded, whole, with no blanks at line ends."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    words = [f"word{number}" for number in range(200)]
    verdict = dataclasses.replace(FAILED, message=" ".join(words))
    output.print_outcome(terminal.make_console(), [verdict, FAILED], 2)
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert width - 20 < max(map(len, lines)) <= width
    assert lines == [line.rstrip() for line in lines]
    assert [word for word in said.split() if word.startswith("word")] == words


def test_a_table_that_is_piped_breaks_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever searches a log for the id of a case finds it; no column is left out."""
    monkeypatch.setenv("COLUMNS", "40")
    words = [f"{number}{'x' * 30}{number}" for number in range(16)]
    table = terminal.plain_table(*(f"h{number}" for number in range(16)))
    table.add_row(*(terminal.cell(f"{word} {word}") for word in words))
    target = terminal.make_console()
    target.print(table)
    assert [w for w in capsys.readouterr().out.split() if "x" in w] == words * 2
    target.print("one two " * 20)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_the_end_is_that_of_the_schedule_that_is_left() -> None:
    """Three runs on two slots after a start-up; slow runs slow the rest down, a crash does not."""
    specs = [dataclasses.replace(SPEC, replica=n, world_size=1) for n in range(3)]
    runs = tuple(
        PlannedRun(key=spec.key, spec=spec, serves=(), estimate_s=10.0) for spec in specs
    )  # fmt: skip
    plan = Plan(slots=2, jobs=None, cases=(), estimate_s=24.0, start_s=4.0, runs=runs)
    forecast, keys = Forecast(plan), [spec.key for spec in specs]
    assert forecast.total_s(1.0, {}) == plan.estimate_s
    assert forecast.total_s(6.0, {}) == 26.0  # the start-up takes longer
    assert forecast.total_s(5.0, {keys[0]: 3.0, keys[1]: 1.0}) == 5.0 + 7.0 + 10.0
    assert forecast.total_s(25.0, {keys[0]: 21.0, keys[1]: 21.0}) == 35.0
    crashed = dataclasses.replace(outcome("crashed"), key=keys[0], wall_s=1.0)
    forecast.ended(crashed)
    assert forecast.total_s(5.0, {keys[1]: 1.0}) == 15.0  # both are left, on two slots
    forecast.ended(dataclasses.replace(outcome(), key=keys[1], wall_s=30.0))
    assert forecast.total_s(34.0, {keys[2]: 12.0}) == 34.0 + 18.0
    forecast.ended(dataclasses.replace(outcome(), key=keys[2], wall_s=30.0))
    assert forecast.total_s(60.0, {}) == 60.0
