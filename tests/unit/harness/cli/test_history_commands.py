"""Contracts of `harness history`, `harness compare` and of what `harness run` records."""

import shutil
from pathlib import Path
from statistics import mode
from typing import Any

import pytest

from harness import provenance
from harness.cli import main
from harness.history import History
from harness.history.ledger import RunEntry
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
