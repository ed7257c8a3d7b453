"""`harness faults`: what it lists, what it runs, and when it ends with 0."""

import json
from pathlib import Path

import pytest

from harness.faults.catalogue import CATALOGUE
from harness.records import RunSpec, StepRecord
from tests.support.fake_engine import Cli, FakeEngine, other_bits

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


def test_a_fault_that_is_seen_ends_with_0(plants: FakeEngine, cli: Cli) -> None:
    """The row says by which check, in which step and place."""
    plain = cli.json("faults", *RAN, "ulp")
    assert plain["exit_code"] == 0
    (row,) = plain["rows"]
    assert (row["status"], row["check"], row["what"]) == ("detected", "state", "diverged")
    assert (row["planted_step"], row["detected_step"], row["planted_rank"]) == (3, 3, 1)
    assert row["location"]["step"] == 3
    assert (len(plain["clean"]), plain["alarms"]) == (3, [])
    assert plain["rates"]["detected"]["successes"] == 1
    made = Path("made")
    assert json.loads((made / "matrix.json").read_text())["rows"] == plain["rows"]
    assert "| ulp |" in (made / "matrix.md").read_text()


def test_a_fault_that_nobody_sees_ends_with_1(plants: FakeEngine, cli: Cli) -> None:
    """A planted fault without a word is a failure of the harness, said as such."""
    plain = cli.json("faults", *RAN, "ulp", "nan", code=1)
    status = {row["fault"]: row["status"] for row in plain["rows"]}
    assert status == {"ulp": "detected", "nan": "missed"}
    assert plain["rates"]["detected"]["successes"] == 1


def test_a_clean_case_that_fails_ends_with_1(plants: FakeEngine, cli: Cli) -> None:
    """A false alarm is a failure, and named."""
    quiet = plants.spoil

    def noisy(spec: RunSpec, record: StepRecord) -> StepRecord:
        record = quiet(spec, record)
        is_quiet = not spec.config["stress"] or spec.plant is not None
        return record if is_quiet else other_bits(record, "grads")

    plants.spoil = noisy
    plain = cli.json("faults", *RAN, "ulp", code=1)
    assert plain["alarms"]
    assert plain["rates"]["false alarms on clean cases"]["successes"] == len(plain["alarms"])


def test_faults_of_other_devices_are_not_run_and_not_counted(plants: FakeEngine, cli: Cli) -> None:
    """Alone they end with 5: nothing ran, so nothing may pass."""
    plain = cli.json("faults", "run", "illegal_access", "--device", "cpu", code=5)
    (row,) = plain["rows"]
    assert row["status"] == "not run"
    assert "cuda" in row["reason"]
    assert plain["rates"]["detected"]["trials"] == 0


def test_a_matrix_that_was_finished_is_the_same_when_resumed(plants: FakeEngine, cli: Cli) -> None:
    """Everything is read back from the folder; no run is made again."""
    first = cli.json("faults", *RAN, "ulp", "illegal_access")
    made = list(plants.made)
    again = cli.json("faults", "run", "--resume", "made")
    assert plants.made == made
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
    cli: Cli, words: tuple[str, ...], code: int, said: str
) -> None:
    """Expected and got, the nearest name, and exit code 4 or 5."""
    assert said in cli.refused("faults", *words, code=code)


def test_the_list_has_every_fault(cli: Cli) -> None:
    """All of them, or those whose name, class, source, words or stressors match."""
    assert [entry["name"] for entry in cli.json("faults", "list")] == list(CATALOGUE)
    some = cli.json("faults", "list", "-k", "streams and races")
    assert some
    assert {entry["kind"] for entry in some} == {"streams"}
    shown = cli("faults", "list").out
    assert all(name in shown for name in CATALOGUE)


def test_an_entry_is_shown_with_a_scenario_that_runs(
    plants: FakeEngine, cli: Cli, tmp_path: Path
) -> None:
    """What `show` prints is a file for `harness run`."""
    shown = cli("faults", "show", "ulp").out
    assert cli.json("faults", "show", "ulp")["scenario"] in shown
    file = tmp_path / "shown.yaml"
    file.write_text(shown)  # with the comments
    cli("run", str(file), "--no-history", "--device", "cpu", code=1)
