import dataclasses
from pathlib import Path

import pytest

from benchmarks.red_to_answer.__main__ import main
from benchmarks.red_to_answer.cells import PLANTED, SMOKE, Planted, exactly
from benchmarks.red_to_answer.measure import Bench
from benchmarks.red_to_answer.rows import Reached, Row, append, read_rows
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.suite import find_scenarios, select

ROW = Row(
    cell=next(iter(PLANTED)), fault="ulp", verdict="failed diverged", case_s=2.0,
    place=Reached(seconds=3.0, runs=4), answer=Reached(seconds=9.5, runs=12), localised="exactly",
)  # fmt: skip


def test_every_smoke_cell_has_a_fault() -> None:
    """The table has the cells of the smoke matrix, no more and no fewer."""
    scenarios = [load_scenario(path) for path in find_scenarios([Path(SMOKE)])]
    cells = {f"{s.name}.{case.id}" for s in scenarios for case in expand(s, "cpu")}
    assert cells == set(PLANTED)


@pytest.mark.parametrize("cell", PLANTED)
def test_planted_cells_can_be_asked_for(cell: str) -> None:
    """With its fault set, `-k` finds exactly the cell, and the fault is in its candidate alone."""
    scenario, _, name = cell.partition(".")
    overrides = Overrides((PLANTED[cell].as_setting(),), ())
    loaded = load_scenario(f"{SMOKE}::{scenario}", overrides=overrides)
    (case,) = select(expand(loaded, "cpu"), exactly(name))
    planted = case.candidate.plant
    assert planted is not None
    assert (planted.fault, case.reference.plant) == (PLANTED[cell].fault, None)


def test_killed_measurements_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole rows of the file are believed; one that was cut short is made again."""
    file, made = tmp_path / "rows.jsonl", []
    append(file, ROW)
    with file.open("a") as cut:
        cut.write('{"cell": "fsdp_cu')

    def measure(_: Bench, cell: str, planted: Planted) -> Row:
        made.append(cell)
        return dataclasses.replace(ROW, cell=cell, fault=planted.fault)

    monkeypatch.setattr(Bench, "measure", measure)
    assert main(["--limit", "3", "--json", str(file), "--out", str(tmp_path)]) == 0
    cells = list(PLANTED)[:3]
    assert made == cells[1:]
    assert [row.cell for row in read_rows(file)] == cells
    assert read_rows(file)[0] == ROW
    assert (
        "3 of 3 cells have an answer, 3 places exactly, 0 causes named" in capsys.readouterr().out
    )


def test_cells_without_an_answer_end_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell that stayed green is no answer: its row says so, and the command fails."""
    note = "not red: the fault does not bite"
    green = Row(cell=ROW.cell, fault="ulp", verdict="passed", case_s=2.0, note=note)
    monkeypatch.setattr(Bench, "measure", lambda *_: green)
    assert main(["--limit", "1", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert note in printed
    assert "0 of 1 cells have an answer" in printed
