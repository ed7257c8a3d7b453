"""`harness faults`: what it lists, what it runs, and when it ends with 0."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.faults.catalogue import CATALOGUE
from harness.records import RunSpec, StepRecord
from tests.support.fake_engine import FakeEngine, other_bits, run_json

RAN = ("run", "--clean", "3", "--out", "made")


@pytest.fixture
def plants(engine: FakeEngine) -> FakeEngine:
    """An engine in which `ulp` acts and nothing else does."""

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        plant, is_last = spec.plant, record.rank == spec.world_size - 1
        acts = plant is not None and plant.fault == "ulp" and is_last and record.step >= plant.step
        return other_bits(record) if acts else record

    engine.spoil = spoil
    return engine


def test_a_fault_that_is_seen_ends_with_0(plants: FakeEngine, capsys: Any) -> None:
    """The row says by which check, in which step and place."""
    code, plain = run_json(capsys, "faults", *RAN, "ulp")
    assert code == plain["exit_code"] == 0
    (row,) = plain["rows"]
    assert (row["status"], row["check"], row["what"]) == ("detected", "state", "diverged")
    assert (row["planted_step"], row["detected_step"], row["planted_rank"]) == (3, 3, 1)
    assert row["location"]["step"] == 3
    assert (len(plain["clean"]), plain["alarms"]) == (3, [])
    assert plain["rates"]["detected"]["successes"] == 1
    made = Path("made")
    assert json.loads((made / "matrix.json").read_text())["rows"] == plain["rows"]
    assert "| ulp |" in (made / "matrix.md").read_text()


def test_a_fault_that_nobody_sees_ends_with_1(plants: FakeEngine, capsys: Any) -> None:
    """A planted fault without a word is a failure of the harness, said as such."""
    code, plain = run_json(capsys, "faults", *RAN, "ulp", "nan")
    assert code == 1
    status = {row["fault"]: row["status"] for row in plain["rows"]}
    assert status == {"ulp": "detected", "nan": "missed"}
    assert plain["rates"]["detected"]["successes"] == 1


def test_a_clean_case_that_fails_ends_with_1(plants: FakeEngine, capsys: Any) -> None:
    """A false alarm is a failure, and named."""
    quiet = plants.spoil

    def noisy(spec: RunSpec, record: StepRecord) -> StepRecord:
        record = quiet(spec, record)
        is_quiet = not spec.config["stress"] or spec.plant is not None
        return record if is_quiet else other_bits(record, "grads")

    plants.spoil = noisy
    code, plain = run_json(capsys, "faults", *RAN, "ulp")
    assert code == 1
    assert plain["alarms"]
    assert plain["rates"]["false alarms on clean cases"]["successes"] == len(plain["alarms"])


def test_faults_of_other_devices_are_not_run_and_not_counted(
    plants: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone they end with 5: nothing ran, so nothing may pass."""
    code, plain = run_json(capsys, "faults", "run", "illegal_access", "--device", "cpu")
    assert code == 5
    (row,) = plain["rows"]
    assert row["status"] == "not run"
    assert "cuda" in row["reason"]
    assert plain["rates"]["detected"]["trials"] == 0


def test_a_matrix_that_was_finished_is_the_same_when_resumed(
    plants: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything is read back from the folder; no run is made again."""
    _, first = run_json(capsys, "faults", *RAN, "ulp", "illegal_access")
    made = list(plants.made)
    code, again = run_json(capsys, "faults", "run", "--resume", "made")
    assert (code, plants.made) == (0, made)
    for plain in (first, again):
        del plain["wall_s"], plain["exit_code"]
    assert again == first


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "ulpp"), 4, "did you mean ulp?"),
        (("run", "earlyrelease"), 4, "did you mean early_release?"),
        (("list", "-k", "zzz"), 5, "selects none"),
        (("run", "--resume", "nowhere", "--clean", "3"), 4, "expected no names"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int,
    said: str,
) -> None:  # fmt: skip
    """Expected and got, the nearest name, and exit code 4 or 5."""
    assert main(["faults", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_list_has_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, or those whose name, class, source, words or stressors match."""
    code, plain = run_json(capsys, "faults", "list")
    assert (code, [entry["name"] for entry in plain]) == (0, list(CATALOGUE))
    _, some = run_json(capsys, "faults", "list", "-k", "streams and races")
    assert some
    assert {entry["kind"] for entry in some} == {"streams"}
    assert main(["faults", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in CATALOGUE)


def test_an_entry_is_shown_with_a_scenario_that_runs(
    plants: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What `show` prints is a file for `harness run`."""
    code, plain = run_json(capsys, "faults", "show", "ulp")
    assert code == 0
    assert main(["faults", "show", "ulp"]) == 0
    shown = capsys.readouterr().out
    assert plain["scenario"] in shown
    file = tmp_path / "shown.yaml"
    file.write_text(shown)  # with the comments
    assert main(["run", str(file), "--no-history", "--device", "cpu"]) == 1


def test_the_table_has_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """A row an entry, in the order of the catalogue, with what must catch it."""
    assert main(["faults", "table"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == len(CATALOGUE) + 2  # the heading and its rule
    for row, (name, fault) in zip(rows[2:], CATALOGUE.items(), strict=True):
        assert row.startswith(f"| {name} | {fault.kind} |")
        assert ", ".join(fault.expects) in row
