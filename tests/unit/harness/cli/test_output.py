"""What the terminal shows of runs: everything is said, nothing is taken for markup."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from fsdp_core.config import TrainConfig
from harness.records import CheckResult, Difference, RankExit, RunOutcome, RunResult, RunSpec
from harness.runner.plan import Plan, PlannedRun
from harness.terminal import (
    LiveView,
    PlainView,
    counts_line,
    make_view,
    print_case,
    print_outcome,
    verdict_text,
)
from tests.support import records

SPEC = records.run_spec(2, config=TrainConfig().to_dict(), timeout_s=60.0)
EVIL = "[red]x[/red]\n[/] \x1b[31m :smile:"
CASE = records.case_spec("dp2-attn", SPEC, SPEC, SPEC, checks={"loss": {}})
FAILED = records.verdict(
    "dp2-attn", outcome="failed", what="diverged", message=f"differs {EVIL}",
    checks=(CheckResult(check="state", outcome="failed", what="diverged", message=EVIL),),
    difference=Difference(
        step=7, rank=1, quantity="weights", tensor="layers.0.w", reference="aa", candidate="bb",
        ulps=1,
    ),
)  # fmt: skip
PASSED = dataclasses.replace(FAILED, case_id="green", outcome="passed", what="")


def plan_of(*specs: RunSpec) -> Plan:
    """Of runs of 10 s each on two slots."""
    runs = tuple(PlannedRun(key=s.key, spec=s, serves=("c",), estimate_s=10.0) for s in specs)
    total_s = 10.0 * ((len(specs) + 1) // 2)
    return Plan(slots=2, jobs=None, cases=(CASE,), estimate_s=total_s, start_s=0.0, runs=runs)


def outcome(what: str = "", message: str = "", spec: RunSpec = SPEC, **more: object) -> RunOutcome:
    return records.outcome(spec.key, what=what, message=message, wall_s=2.0, **more)


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    """A console that writes to a string."""
    text = io.StringIO()
    return Console(
        file=text, width=200, force_terminal=terminal, color_system=None, highlight=False
    ), text


@pytest.mark.parametrize("terminal", [True, False])
def test_both_views_say_everything(*, terminal: bool) -> None:
    """Plan, failed run and verdict are said, with texts from logs as they are."""
    target, text = console(terminal=terminal)
    view = make_view(target)
    assert type(view) is (LiveView if terminal else PlainView)

    def shown() -> str:
        if not isinstance(view, LiveView):
            return SPEC.key
        with target.capture() as captured:
            target.print(view.render())
        return captured.get()

    with view:
        view.planned(plan_of(SPEC))
        view.run_started(SPEC)
        assert SPEC.key in shown()
        assert not terminal or "0/1 runs" in shown()
        view.run_finished(outcome("hang", f"rank 1 {EVIL}"))
        assert not terminal or ("1/1 runs" in shown() and SPEC.key not in shown())
        view.judged(FAILED)
    said = text.getvalue()
    if not terminal:  # a line an event
        assert [line.split()[0] for line in said.splitlines()] == ["1", "start", "hang", "failed"]
    for words in ("1 case, 1 run on 2 slots", SPEC.key, "hang", "dp2-attn", "diverged",
                  "[red]x[/red]\\n[/] \\x1b[31m :smile:"):  # fmt: skip
        assert words in said
    assert "\x1b[31m" not in said


def test_a_case_is_shown_with_its_difference_exits_and_last_words(tmp_path: Path) -> None:
    """Verdict, first difference, each rank that ended badly, and what it printed last."""
    (tmp_path / "rank1.stderr").write_text("".join(f"line {i}\n" for i in range(100)) + EVIL)
    error = records.error(1, step=3, type="ValueError", message=EVIL)
    ranks = tuple(records.rank_records(n, error=error if n else None) for n in range(3))
    exits = (RankExit(rank=0, code=3), RankExit(rank=1, code=-9, killed_by_harness=True))
    ended = outcome("crashed", "rank 1", culprit_rank=1, ranks=exits)
    target, text = console()
    run = RunResult(spec=SPEC, outcome=ended, ranks=ranks)
    print_case(target, CASE, FAILED, {"candidate": (tmp_path, run)})
    said = text.getvalue()
    for words in ("step 7, rank 1", "weights layers.0.w", "ulps", "signal 9 (by the harness)",
                  "code 3", "never started", "ValueError: [red]x", "line 99"):  # fmt: skip
        assert words in said
    assert "line 50\n" not in said
    assert "\x1b" not in said
    print_case(target, CASE, None, {})  # never shown as a pass
    assert "no verdict" in text.getvalue()


def test_the_end_repeats_only_what_did_not_pass() -> None:
    """The last table has no case that passed or was skipped; counts have all of them."""
    skipped = dataclasses.replace(FAILED, case_id="yellow", outcome="skipped")
    error = dataclasses.replace(FAILED, case_id="magenta", outcome="error")
    target, text = console()
    print_outcome(target, [PASSED, FAILED, skipped, error], 4)
    *table, counts = text.getvalue().splitlines()
    assert [line.split()[0] for line in table if line.split()][2:] == ["dp2-attn", "magenta"]
    assert counts == "1 passed, 1 failed, 1 error, 1 skipped"
    assert counts_line([FAILED], 3).plain == "1 failed, 2 without a verdict"
    assert counts_line([], 0).plain == "no case"
    target, text = console()
    print_outcome(target, [PASSED], 1)
    assert text.getvalue() == "1 passed"  # nothing is said twice
    proof = CheckResult(check="soak", outcome="passed", what="", message="below 0.1 %")
    soaked = dataclasses.replace(PASSED, checks=(proof,))
    assert verdict_text(soaked).plain == "passed       green  below 0.1 %"


def test_the_end_is_foreseen_by_the_work_that_is_done() -> None:
    """The plan's estimate until a run has ended; runs under way count as far as they were to go."""
    specs = [dataclasses.replace(SPEC, replica=n, world_size=1) for n in range(3)]
    now = [0.0]
    view = LiveView(console(terminal=True)[0], lambda: now[0])
    view.planned(plan_of(*specs))  # 10 s each, on two slots
    view.run_started(specs[0])
    assert (view.total_s(5.0), view.total_s(25.0)) == (20.0, 25.0)
    view.run_finished(outcome(spec=specs[0]))
    assert view.total_s(20.0) == 60.0  # a third took 20 s
    now[0] = 20.0
    view.run_started(specs[1])
    assert view.total_s(25.0) == 50.0  # half of it took 25 s
    for spec in specs[1:]:
        view.run_finished(outcome(spec=spec))
    view.run_finished(outcome(spec=specs[0]))  # one that is repeated says nothing
    assert view.total_s(40.0) == 40.0
