"""Faults of graphs are seen as the document says, and clean programs are not wronged."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.rank_pool import RankError, RankPool
from tests.graph_faults import __main__ as faults_command
from tests.graph_faults import table
from tests.graph_faults.__main__ import main
from tests.graph_faults.catalogue import FAULTS, GraphFault
from tests.graph_faults.compare import (
    STRESS,
    Legs,
    brief,
    cells,
    false_alarms,
    join,
    run_on_rank,
)
from tests.graph_faults.programs import Shown
from tests.graph_faults.table import BEGIN, END, HEADERS, document_rows, row_of

REQUIRED = {
    "F01", "F02", "F03", "F05", "F08", "F13", "F14", "F17",
    "F18", "F19", "F31", "F32", "F34", "F47", "F65", "F67",
}  # fmt: skip
QUICK = [fault for fault in FAULTS if fault.quick]
CLEAN = {"F02a", "F13b", "F47"}
"""Whose clean programs are run here, too."""


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_seen_as_documented(fault: GraphFault, warm_ranks: RankPool) -> None:
    """What sees a fault, and in which step, is what the document's table says."""
    legs = join(
        warm_ranks.run(
            run_on_rank, fault.name, fault.quick, "cpu", fault.name in CLEAN,
            world_size=fault.num_ranks,
        )
    )  # fmt: skip
    documented = document_rows()[fault.name]
    seen = row_of(fault, legs)
    assert seen == {name: documented[name] for name in seen}
    assert false_alarms(legs) == []


def test_the_document_has_every_fault() -> None:
    """Its rows are the catalogue's, in order, every cell filled; the required modes are there."""
    rows = document_rows()
    assert list(rows) == [fault.name for fault in FAULTS]
    for fault in FAULTS:
        assert rows[fault.name]["what is wrong"] == fault.what
        assert rows[fault.name]["in"] == f"`{fault.program}`"
        assert all(rows[fault.name][name] not in ("", "–") for name in HEADERS)
    assert {name[:3] for name in rows} >= REQUIRED


def test_stressors_see_what_a_plain_run_cannot() -> None:
    """Of every fault that shows in no digest, some stressor sees it, or FSDP makes it harmless."""
    for name, row in document_rows().items():
        if row["digests"] == "·":
            seen = [column for column in STRESS if set(row[column]) - set("· /")]
            assert seen or name in ("F03b", "F19b"), name


class _LosingPool:
    """Ranks that do not come back."""

    def __init__(self, error: RankError) -> None:
        self._error = error

    def run(self, *_: object, **__: object) -> None:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "cell"),
    [
        (RankError(1, "died", "exit code -6\nframes", -6), "died by SIGABRT"),
        (RankError(0, "died", "exit code 3", 3), "died with exit code 3"),
        (RankError(0, "hang", "no answer within 1 s"), "no answer"),
        (RankError(0, "KeyError", "frames"), "raised KeyError"),
    ],
)
def test_a_lost_rank_has_a_row(
    error: RankError,
    cell: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fails the command, unless the document expects that very end."""
    monkeypatch.setattr(faults_command, "RankPool", lambda *_, **__: _LosingPool(error))
    assert main(["F18", "--columns", "plain,races"]) == 1
    output = capsys.readouterr().out
    assert f"`whole` |{f' {cell} |' * 5}" in output
    assert "Faults: 1." in output
    assert f"\nF18 {cell}.\n" in output

    document = table.DOCUMENT.read_text()
    row = document_rows()["F18"]
    lost = row | dict.fromkeys(HEADERS[3:], cell)
    before, after = (f"| {' | '.join(each.values())} |" for each in (row, lost))
    monkeypatch.setattr(table, "DOCUMENT", tmp_path / "measured.txt")
    table.DOCUMENT.write_text(document.replace(before, after))
    assert main(["F18", "--columns", "plain,races"]) == 0


# ---- what is compared


def _shown(losses: list[float], digests: list[int], **changes: object) -> Shown:
    bits = [struct.unpack("i", struct.pack("f", loss))[0] for loss in losses]
    rows = [{"grads": (value,)} for value in digests]
    return replace(Shown(bits, rows, weights="w"), **changes)  # type: ignore[arg-type]


RIGHT = _shown([2.0, 1.5, 1.0], [1, 2, 3])


@pytest.mark.parametrize(
    ("other", "plain", "stressed"),
    [
        (RIGHT, "· | · | · | ·", "· / ·"),
        (_shown([2.0, 1.5000001, 1.0], [1, 2, 3]), "· | 1 | · | ·", "1 / ·"),
        (_shown([2.0, 1.5, 1.00001], [1, 2, 3]), "2 | 2 | · | ·", "2 / ·"),
        (_shown([2.0, 1.5, 1.0], [1, 0, 3]), "· | · | · | 1", "· / 1"),
        (_shown([2.0, 1.5, 1.0], [1, 2, 3], weights="v"), "· | · | end | ·", "· / ·"),
        (
            _shown([2.0], [1], weights="", stopped_at=1, said="RaceFound: x"),
            "stop 1 | stop 1 | stop 1 | stop 1",
            "stop 1",
        ),
        (
            _shown([2.0], [7], weights="", stopped_at=1, said="E"),
            "stop 1 | stop 1 | stop 1 | 0",
            "stop 1 / 0",
        ),
        (_shown([-0.0], [1]), "0 | 0 | · | ·", "0 / ·"),
    ],
)
def test_cells(other: Shown, plain: str, stressed: str) -> None:
    """A cell names the first step in which an aspect differs on any rank, or the program's stop."""
    legs = Legs([RIGHT, RIGHT], {}, {"plain": [RIGHT, other], "poison": [other, RIGHT]}, [])
    assert cells(legs, "plain") == plain
    assert cells(legs, "poison") == stressed


def test_the_first_step_of_all_ranks_counts() -> None:
    """Ranks that differ from different steps on are named by the earliest."""
    late, early = _shown([2.0, 1.5, 0.5], [1, 2, 0]), _shown([2.0, 0.5, 0.5], [1, 0, 0])
    legs = Legs([RIGHT, RIGHT], {}, {"poison": [late, early]}, [])
    assert cells(legs, "poison") == "1 / 1"


def test_only_the_ledger_is_the_ledger() -> None:
    """A run that stops for another reason under the ledger was not stopped by it."""
    stale = _shown([2.0], [1], stopped_at=1, said="StaleAddress: w: moved")
    other = replace(stale, said="RuntimeError: no")
    legs = Legs([RIGHT], {}, {"ledger": [stale]}, [])
    assert cells(legs, "ledger") == "stop 1"
    assert cells(replace(legs, planted={"ledger": [other]}), "ledger") == "·"


@pytest.mark.parametrize(
    "wrong",
    [
        _shown([2.0, 1.5, 1.0], [1, 2, 4]),
        _shown([2.0, 1.5, 1.0], [1, 2, 3], weights="v"),
        _shown([2.0], [1], weights="", stopped_at=1, said="E"),
    ],
)
def test_false_alarms(wrong: Shown) -> None:
    """A clean run that differs, or stops, on one rank is a false alarm of its column."""
    legs = Legs([RIGHT, RIGHT], {"plain": [RIGHT, RIGHT], "races": [RIGHT, wrong]}, {}, [])
    assert false_alarms(legs) == ["races"]


def test_messages_are_the_same_each_time() -> None:
    """Addresses and lines of files are left out, and what would end a cell of the table."""
    first = "E: a | b at 0x7f12 in x.py:12\nmore"
    assert brief(first) == brief(first.replace("7f12", "55aa").replace(":12", ":99"))
    assert "\n" not in brief(first)
    assert " | " not in brief(first)


@pytest.mark.parametrize("arguments", [["F99"], ["--columns", "loss"], ["F14", "--write"]])
def test_usage_errors(arguments: list[str]) -> None:
    """A misspelt name must not look like a success, nor a part of the table take its place."""
    assert main(arguments) == 4


def test_each_kind_of_device_has_a_table_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing one leaves the other, and what is around them."""
    document = tmp_path / "measured.txt"
    document.write_text(f"a\n{BEGIN['cpu']}\nold\n{END}\nb\n{BEGIN['cuda']}\nolder\n{END}\nc\n")
    monkeypatch.setattr(table, "DOCUMENT", document)
    table.write("new", "cuda")
    lines = [line for line in document.read_text().splitlines() if line]
    assert lines == ["a", BEGIN["cpu"], "old", END, "b", BEGIN["cuda"], "new", END, "c"]
