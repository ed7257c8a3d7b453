"""Contracts of `harness history`, `harness compare` and of what `harness run` records."""

import dataclasses
import io
import shutil
from pathlib import Path
from statistics import mode
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fsdp_core.config import TrainConfig
from harness import provenance
from harness.cli import main, suite
from harness.cli.suite import conclude, look
from harness.engine.machine import Gpu, Machine
from harness.history.ledger import History, RunEntry
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
from tests.support.fake_engine import Capsys, Cli, FakeEngine, Patch, run_json, unequal
from tests.unit.harness.history.nights import ENVIRONMENT, FAILED, night


def slow(run: RunEntry, leg: str) -> dict[str, Any]:
    return {"step_s": 0.03}


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: Patch) -> Path:
    """out/history with 30 nights: torch changes at 5, times at 20, a failure at 28."""
    monkeypatch.chdir(tmp_path)
    history = History.open(tmp_path / "out" / "history", create=True)
    for number in range(30):
        history.record(
            night(
                number, cases=2, commit=f"{number // 2:08x}c0ffee",
                answers={1: FAILED} if number in (9, 28, 29) else None,
                values=slow if number >= 20 else None,
                environment=ENVIRONMENT | ({"python": "3.11.9"} if number >= 5 else {}),
            )
        )  # fmt: skip
    return tmp_path / "out" / "history"


@pytest.fixture(autouse=True)
def wide(monkeypatch: Patch) -> None:
    """No cell is folded."""
    monkeypatch.setenv("COLUMNS", "250")


def said(capsys: Capsys, *args: str, code: int = 0) -> str:
    """What a command prints, all of it."""
    capsys.readouterr()
    assert main(list(args)) == code
    out, err = capsys.readouterr()
    return out + err


def test_a_run_is_in_the_history_beside_its_folder(
    engine: FakeEngine, cli: Cli, monkeypatch: Patch
) -> None:
    """`run` and `rerun` record, at the default place and at another; the commit is known."""
    engine.spoil = unequal
    monkeypatch.setattr(provenance, "describe", lambda: "3f1c")
    cli("run", "small.yaml", code=1)
    cli("rerun", "dp1-attn", "--history", "other", code=1)
    history = History.open(Path("out") / "history")
    (entry,) = history.entries()
    assert len(entry.cases) == 4
    assert entry.commit == "3f1c"
    assert entry.machine
    assert len(entry.id) == 32
    history = History.open(Path("other"))
    assert [len(entry.cases) for entry in history.entries()] == [1]


def test_what_the_history_says(filled: Path, capsys: Capsys) -> None:
    """Overview, scenario, case and flaky ledger, in words and as JSON."""
    assert "1 passed, 1 failed" in said(capsys, "history")
    cases = said(capsys, "history", "nightly")
    assert "2031-01-29" in cases
    assert "0000000d" in cases
    one = said(capsys, "history", "dp2-attn")
    assert one == said(capsys, "history", "nightly/dp2-attn")
    assert "first bad run 2031-01-29 03:00 at 0000000e, last good 2031-01-28 03:00" in one
    assert "B is not compared with the series before it: python 3.11.7 became 3.11.9" in one
    assert "step time +50.0% since 2031-01-21 03:00 (series B): 20.00 ms became 30.00 ms" in one
    assert "nightly/dp2-attn" in said(capsys, "history", "--flaky")
    code, answer = run_json(capsys, "history", "dp2-attn", "--days", "3")
    assert code == 0
    assert [entry["outcome"] for entry in answer[0]["answers"]] == ["passed", "failed", "failed"]
    code, answer = run_json(capsys, "history", "--flaky")
    assert (answer[0]["case_id"], answer[0]["changes"]) == ("dp2-attn", 1)


def test_what_is_not_there_is_said(filled: Path, tmp_path: Path, capsys: Capsys) -> None:
    """An unknown name is usage, an empty history is nothing, a missing one is usage."""
    assert "did you mean nightly" in said(capsys, "history", "nightli", code=4)
    assert "expected a history, got nothing" in said(capsys, "history", "--history", "none", code=4)
    history = History.open(filled)
    begin = mode(entry.id[0] for entry in history.entries())
    told = said(capsys, "compare", begin, begin, "--history", str(filled), code=4)
    assert f"'{begin}': expected a run folder or an id, got several runs of" in told
    History.open(tmp_path / "empty", create=True)
    assert "holds no run yet" in said(capsys, "history", "--history", "empty", code=5)
    newest = max(filled.iterdir())
    newest.write_text(newest.read_text().replace('"failed"', '"passed"'))
    assert "is damaged: " in said(capsys, "history", "dp2-attn", code=6)


def test_runs_are_compared_by_folder_and_by_id(engine: FakeEngine, capsys: Capsys) -> None:
    """Folders, or ids of the history where folders are gone; exit codes as everywhere."""
    for name, spoiled in (("a", False), ("b", True), ("c", False)):
        if spoiled:
            engine.spoil = unequal
        else:
            engine.spoil = lambda spec, record: record
        main(["run", "small.yaml", "--out", name, "--history", "h"])
    assert "4 cases: 4 alike" in said(capsys, "compare", "a", "c")
    added = [run_json(capsys, "history", "--add", "a", "--history", "b_history") for _ in range(2)]
    assert [(code, answer["folders"]) for code, answer in added] == [(0, 1), (0, 0)]
    told = said(capsys, "compare", "a", "b", code=1)
    assert told.index("environment: the same") < told.index("passed became failed diverged")
    code, answer = run_json(capsys, "compare", "b", "a")
    assert (code, answer["exit_code"]) == (1, 1)  # the bits of the spoiled leg changed back
    assert answer["cases"][0]["bits"] == ["candidate: state bits"]
    history = History.open(Path("h"))
    ids = [entry.id for entry in history.entries()]
    for name in ("a", "b", "c"):
        shutil.rmtree(name)
    codes = {run_json(capsys, "compare", one, two, "--history", "h")[0]
             for one in ids for two in ids}  # fmt: skip
    assert codes == {0, 1}
    assert "'zz': expected a run folder or an id, got nothing, also in h" in said(
        capsys, "compare", "zz", ids[0], "--history", "h", code=4
    )


# --- contracts of harness.cli.suite ---------------------------------------------------------------


GPUS = tuple(Gpu(id=f"GPU-{name}", name="H", memory_bytes=1) for name in "ab")
CPU, TWO = "device: cpu, 8 rank slots", "device: cuda, 2 GPUs"


def machine(gpus: tuple[Gpu, ...], torch: str) -> Machine:
    return Machine(
        cores=2, memory_bytes=1, system="s", python="3.12", gpus=gpus, gpu_driver="580",
        gpu_note="" if gpus else "no NVIDIA driver", versions={"torch": torch} if torch else {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "torch", "te", "can", "lacks"),
    [
        ((), "2.13.0", "", [CPU],
         ["device: cuda (GPU: no NVIDIA driver)", "transformer-engine: not installed"]),
        (GPUS, "2.13.0", "2.17", [CPU, TWO, "backend: te"], []),
        (GPUS, "2.13.0+cpu", "2.17", [CPU],
         ["torch 2.13.0+cpu is not built for it", "backend: te (GPU: "]),
        (GPUS, "", "2.17", [], ["torch: not installed"] * 3),
    ],
)  # fmt: skip
def test_what_can_run_and_what_is_missing(
    gpus: tuple[Gpu, ...], torch: str, te: str, can: list[str], lacks: list[str],
    monkeypatch: Patch, tmp_path: Path,
) -> None:  # fmt: skip
    """Slots of each device; of what cannot run, what it lacks."""
    versions = {"torch": torch, "transformer-engine": te}
    monkeypatch.setattr(suite, "package_version", lambda name: versions.get(name, ""))
    here = machine(gpus, torch)
    can_run, cannot_run = conclude(look(here, tmp_path), here)
    assert can_run == can
    assert all(why in line for why, line in zip(lacks, cannot_run, strict=True))


@pytest.mark.parametrize(
    ("name", "patches", "state"),
    [
        ("torch", {"package_version": lambda name: "3.0.1"}, "warn"),
        ("disk", {"shutil.disk_usage": lambda _: SimpleNamespace(free=10 << 20, total=1)}, "warn"),
        ("disk", {"shutil.disk_usage": lambda _: SimpleNamespace(free=10 << 30, total=1)}, "ok"),
        ("disk", {"os.access": lambda place, mode: False}, "missing"),
    ],
)  # fmt: skip
def test_each_finding_has_its_state(
    name: str, patches: dict[str, Any], state: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    """An untested torch and a full disk are warnings; nothing runs where nothing can be stored."""
    for place, value in patches.items():
        monkeypatch.setattr(f"harness.cli.suite.{place}", value)
    here = machine((), "2.13.0")
    found = list(look(here, tmp_path / "not" / "yet"))
    assert next(each for _, known, each, _ in found if known == name) == state
    assert bool(conclude(found, here)[0]) == (state != "missing")


# --- what the terminal shows of runs: everything is said, nothing is taken for markup -------------


SPEC = records.run_spec(2, config=TrainConfig().to_dict(), timeout_s=60.0)
EVIL = "[red]x[/red]\n[/] \x1b[31m :smile:"
CASE = records.case_spec("dp2-attn", SPEC, SPEC, SPEC, checks={"loss": {}})
FAILED_CASE = records.verdict(
    "dp2-attn", outcome="failed", what="diverged", message=f"differs {EVIL}",
    checks=(CheckResult(check="state", outcome="failed", what="diverged", message=EVIL),),
    difference=Difference(
        step=7, rank=1, quantity="weights", tensor="layers.0.w", reference="aa", candidate="bb",
        ulps=1,
    ),
)  # fmt: skip
PASSED = dataclasses.replace(FAILED_CASE, case_id="green", outcome="passed", what="")


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
        view.judged(FAILED_CASE)
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
    print_case(target, CASE, FAILED_CASE, {"candidate": (tmp_path, run)})
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
    skipped = dataclasses.replace(FAILED_CASE, case_id="yellow", outcome="skipped")
    error = dataclasses.replace(FAILED_CASE, case_id="magenta", outcome="error")
    target, text = console()
    print_outcome(target, [PASSED, FAILED_CASE, skipped, error], 4)
    *table, counts = text.getvalue().splitlines()
    assert [line.split()[0] for line in table if line.split()][2:] == ["dp2-attn", "magenta"]
    assert counts == "1 passed, 1 failed, 1 error, 1 skipped"
    assert counts_line([FAILED_CASE], 3).plain == "1 failed, 2 without a verdict"
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
