"""Contracts of the files: what is recorded comes back, once, whoever writes; damage is no fact."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError, UsageError
from harness.history.ledger import (
    NOT_WRITTEN_FILE,
    Damaged,
    FolderEntry,
    History,
    gather,
    machine_kind,
    remember,
    work_of,
)
from harness.program.spec import ProgramSpec
from harness.records import Difference, FloatBits, RunSpec, StepRecord, dumps
from harness.store import RunFolder
from harness.store.files import read_object, with_checksum, write_atomic
from reports.reading import summarise
from tests.chaos.good import rewrite
from tests.unit.harness.history.nights import FAILED, LEGS, case, night, run
from tests.unit.reports.folders import ENVIRONMENT, Writer, drift, ulp

DIFFERENCE = Difference(
    step=3, rank=1, quantity="weights", tensor="a.b", reference="0x1", candidate="0x2", ulps=1
)
NIGHTS = [
    night(n, cases=2, answers={1: FAILED | {"difference": DIFFERENCE}} if n == 2 else None)
    for n in range(4)
]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of four runs; tests work on copies."""
    history = History.open(tmp_path_factory.mktemp("full") / "history", create=True)
    for entry in NIGHTS:
        history.record(entry)
    return history.path


@pytest.fixture
def path(full: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(full, tmp_path / "copy"))


def read(path: Path) -> list[FolderEntry]:
    return list(History.open(path).entries())


def test_what_is_recorded_comes_back_once(path: Path, history: History) -> None:
    """Field by field, and however often it is recorded."""
    assert read(path) == NIGHTS
    assert sum(map(history.record, NIGHTS), Counter()) == Counter(folders=4, cases=8, runs=24)
    assert sum(map(history.record, NIGHTS), Counter()) == Counter()
    differing = night(0, cases=2, answers={0: FAILED}, values=lambda run, leg: {"step_s": 0.5})
    assert history.record(differing) == Counter(differing=7)
    assert list(history.entries()) == NIGHTS
    assert [entry.id for entry in history.entries(NIGHTS[2].id[:8])] == [NIGHTS[2].id]
    again = run(0, attempt=1)
    later = dataclasses.replace(
        NIGHTS[3], cases=(*NIGHTS[3].cases, case(0, attempt=1)), runs=(*NIGHTS[3].runs, again)
    )
    assert history.record(later) == Counter(cases=1, runs=1)
    assert next(history.entries(later.id)) == later


@pytest.mark.parametrize(
    ("old", "new"), [('"failed"', '"passed"'), ('"attempt":0', '"attempt":3'), ("a.b", "a.c")]
)
def test_an_entry_that_is_not_what_was_written_is_damage(old: str, new: str, path: Path) -> None:
    """An answer, an attempt, a place; what comes before it is read all the same."""
    place = sorted(path.iterdir())[2]
    place.write_text(place.read_text().replace(old, new))
    entries = History.open(path).entries()
    assert [next(entries), next(entries)] == NIGHTS[:2]
    with pytest.raises(Damaged):
        next(entries)


@pytest.mark.parametrize("changed", [{"attempt": -1}, {"outcome": "fine"}, {"labels": [1]}])
def test_what_no_harness_writes_is_damage_whatever_its_checksum(
    changed: object, path: Path
) -> None:
    """Values that cannot be."""
    place = sorted(path.iterdir())[0]
    plain = read_object(place)
    plain["cases"][0] |= changed
    write_atomic(place, dumps(with_checksum(plain)))
    with pytest.raises(Damaged):
        read(path)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_flipped_bytes_never_become_facts(
    data: st.DataObject, full: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a file with changed bytes either all is as it was, or it is said to be damaged."""
    path = Path(shutil.copytree(full, tmp_path_factory.mktemp("flip") / "history"))
    place = sorted(path.iterdir())[data.draw(st.integers(0, 3))]
    content = bytearray(place.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    place.write_bytes(content)
    with suppress(HarnessError):
        assert read(path) == NIGHTS


def test_what_is_damaged_or_no_history_stays_as_it_is(path: Path) -> None:
    """An error in one line; not a byte of it changes, and no other file is left."""
    place, names = sorted(path.iterdir())[3], sorted(path.iterdir())
    for content in (b"", place.read_bytes()[:900], b"text" * 500):
        place.write_bytes(content)
        with pytest.raises(Damaged):
            History.open(path).record(NIGHTS[3])
        assert place.read_bytes() == content
    assert sorted(path.iterdir()) == names
    for create in (False, True):
        with pytest.raises(HarnessError):
            History.open(place, create=create)
    with pytest.raises(UsageError):
        History.open(path / "none")


WRITER = """
import sys
from pathlib import Path
from harness.history.ledger import History
from tests.unit.harness.history.nights import night
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    History.open(Path(sys.argv[1]), create=True).record(night(number, cases=2))
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from harness.history.ledger import History
from tests.unit.harness.history.nights import night
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
History.open(Path(sys.argv[1])).record(night(9, cases=200))
"""


def test_two_processes_write_at_once_and_one_is_killed(tmp_path: Path) -> None:
    """Harnesses that begin one history and add to it at the same time lose nothing."""
    place = tmp_path / "history"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(first), str(last)])
        for first, last in ((30, 42), (38, 50))
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    whole = [night(number, cases=2) for number in range(30, 50)]
    assert read(place) == whole
    gone = subprocess.run([sys.executable, "-c", KILLED, str(place)], check=False)
    assert gone.returncode == -9
    assert read(place) == whole
    assert History.open(place).record(night(9))["folders"] == 1


def test_a_run_is_recorded_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning and one entry, however often; else one line, and a note until it is recorded."""
    (tmp_path / "out").mkdir()
    writer = Writer(tmp_path / "out" / "run", steps=3)
    writer.add("dp1-attn", 1, "attn")
    folder, database = writer.write(), tmp_path / "out" / "history"
    (tmp_path / "file").write_text("")
    database.write_bytes(b"no history")

    def broken(self: History, entry: object) -> None:
        raise ZeroDivisionError("a\nb")

    with monkeypatch.context() as patched:
        patched.setattr(History, "record", broken)
        internal = remember(folder, tmp_path / "other")
    for warning in (
        internal, remember(folder, tmp_path / "file" / "history"), remember(folder, database)
    ):  # fmt: skip
        assert len(warning.splitlines()) == 1
        assert (folder / NOT_WRITTEN_FILE).exists()
    assert summarise(folder).history_note == warning
    assert database.read_bytes() == b"no history"
    database.unlink()
    assert [remember(folder, database) for _ in range(2)] == ["", ""]
    assert not (folder / NOT_WRITTEN_FILE).exists()
    assert [entry.scenario for entry in read(database)] == ["fsdp_cudagraph_alignment"]
    shutil.rmtree(folder)
    assert remember(folder, database)


def test_a_folder_is_recorded_by_one_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who read an earlier state of it would take back what a later one has written."""
    record, second = History.record, list[str]()

    def while_another_comes(self: History, entry: FolderEntry) -> Counter[str]:
        monkeypatch.setattr(History, "record", record)
        second.append(remember(folder, self.path))
        return record(self, entry)

    monkeypatch.setattr(History, "record", while_another_comes)
    assert remember(folder, tmp_path / "history") == ""
    assert "in use" in second[0]
    assert remember(folder, tmp_path / "history") == ""
    assert len(read(tmp_path / "history")) == 1


# --- contracts of gathering: what a run folder holds is told as it is, and damage never as a pass -


def gathered(path: Path) -> FolderEntry:
    return gather(RunFolder.open(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three cases: a pass, a divergence, a skip. Tests work on copies."""
    writer = Writer(tmp_path_factory.mktemp("made") / "run", steps=10)
    writer.add("dp1-attn", 1, "attn")
    writer.add("dp2-attn", 2, "attn", candidate={"edit": drift})
    writer.add("dp6-attn", 6, "attn", skip_reason="needs 6 GPUs")
    return writer.write()


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_answers_and_measurements_are_told(made: Path, folder: Path) -> None:
    """Each case with its causes and first difference, each run with its times, peak and bits."""
    entry = gathered(made)
    assert [(c.case_id, c.outcome, c.what) for c in entry.cases] == [
        ("dp1-attn", "passed", ""), ("dp2-attn", "failed", "diverged"),
        ("dp6-attn", "skipped", "unsupported"),
    ]  # fmt: skip
    failed = entry.cases[1]
    assert failed.causes == ("loss: failed diverged", "state: failed diverged")
    assert failed.difference is not None
    assert failed.difference.step == 7
    runs = {run.key: run for run in entry.runs}
    assert len(runs) == 6
    reference, candidate = runs[failed.reference], runs[failed.candidate]
    assert (reference.steps, reference.step_s, reference.startup_s) == (10, 0.01, 0.1)
    assert (reference.peak_bytes, reference.wall_s) == ((40 << 20) + 4096, 1.25)
    assert reference.loss_bits == runs[failed.control].loss_bits != candidate.loss_bits
    assert reference.state_bits == runs[failed.control].state_bits != candidate.state_bits
    assert reference.work == runs[failed.control].work != candidate.work
    assert entry.fingerprints == {reference.fingerprint: {"ranks": [ENVIRONMENT]}}
    assert entry.num_cases == 3
    assert gathered(folder) == entry
    shutil.rmtree(folder / "runs")
    assert gathered(folder) == entry


def test_the_manifest_says_what_the_verdicts_depend_on(folder: Path) -> None:
    """Environment, commit, shard and tier come from it; which equal GPUs were used does not."""

    def told(devices: str = "0,1", algorithm: str = "Ring", **changes: Any) -> FolderEntry:
        manifest = json.loads((folder / "manifest.json").read_text())
        variables = {"NCCL_ALGO": algorithm, "CUDA_VISIBLE_DEVICES": devices}
        manifest |= {
            "id": "abc", "commit": "3f1c", "shard": "1/2", "tier": "nightly", "slots": 8,
            "machine": {
                "cores": 8, "memory_bytes": (32 << 30) + 7, "system": "Linux", "python": "3.11",
                "versions": {"torch": "2.12"}, "gpu_driver": "580",
                "gpus": [{"id": "GPU-1", "name": "H200", "memory_bytes": 1}] * 2,
            },
            "environment": {"variables": variables},
        } | changes  # fmt: skip
        rewrite(folder / "manifest.json", manifest)
        return gathered(folder)

    entry = told()
    assert (entry.id, entry.commit, entry.shard, entry.tier) == ("abc", "3f1c", "1/2", "nightly")
    assert (entry.machine, entry.slots) == ("8 cores, 2 x H200", 8)
    assert entry.environment["variables"] == {"NCCL_ALGO": "Ring"}
    assert entry.environment["memory_gib"] == 32
    assert told(devices="2,3").environment_id == entry.environment_id
    assert told(algorithm="Tree").environment_id != entry.environment_id
    assert told(machine=None).environment_id == ""
    assert machine_kind({"cores": 2, "gpus": []}) == "2 cores"


@pytest.mark.parametrize("leg", ["reference", "control", "candidate"])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [(lambda run: (run / "rank0.jsonl").unlink(), "corrupt_record"),
     (lambda run: rewrite(run / "outcome.json", {"what": "crashed"}), "corrupt_record"),
     (shutil.rmtree, "not_run")],
    ids=["no records", "crashed", "gone"],
)  # fmt: skip
def test_a_pass_over_damaged_records_is_not_recorded_as_one(
    leg: str, spoil: Callable[[Path], Any], what: str, folder: Path
) -> None:
    """If a run of a passed case is not whole, wherever it is read from, the case is corrupt."""
    case = RunFolder.open(folder).cases[0]
    key = getattr(case, leg).key
    for place in (folder / "runs" / key, folder / "cases" / case.id / leg):
        # The sealed run is the same file by a hard link, until it is taken apart.
        copy = shutil.copytree(place, folder / "copy")
        shutil.rmtree(place)
        shutil.move(copy, place)
        spoil(place)
    answer = gathered(folder).cases[0]
    assert (answer.outcome, answer.what) == ("error", what)
    assert answer.message.startswith(f"runs/{key}/")


def test_earlier_attempts_are_kept(folder: Path) -> None:
    """Runs and answers that were set aside are attempts of their own, the current one last."""
    case = RunFolder.open(folder).cases[0]
    run, answers = folder / "runs" / case.candidate.key, folder / "cases" / case.id
    shutil.copytree(run, run.with_name(f"{run.name}.attempt0"))
    (run.with_name(f"{run.name}.attempt0") / "outcome.json").unlink()
    for number in (0, 1):
        shutil.copytree(answers, answers.with_name(f"{answers.name}.attempt{number}"))
    rewrite(answers.with_name(f"{answers.name}.attempt0") / "verdict.json",
            {"outcome": "error", "what": "oom"})  # fmt: skip
    records = answers.with_name(f"{answers.name}.attempt1") / "candidate" / "rank0.jsonl"
    lines = records.read_text().splitlines()
    records.unlink()
    records.write_text("\n".join(lines[:-2]) + "\n")
    entry = gathered(folder)
    assert [(c.attempt, c.outcome, c.what) for c in entry.cases if c.case_id == case.id] == [
        (0, "error", "oom"), (1, "error", "corrupt_record"), (2, "passed", ""),
    ]  # fmt: skip
    attempts = [(r.attempt, r.what) for r in entry.runs if r.key == case.candidate.key]
    assert attempts == [(0, "interrupted"), (1, "")]


@pytest.mark.parametrize("key", ["code", "program"])
def test_runs_of_two_commits_are_compared(tmp_path: Path, key: str) -> None:
    """The code that ran, of the trainer or of a program, is no part of the environment."""
    folders = []
    for code in ("0216", "1c0e"):
        writer = Writer(tmp_path / code)
        writer.add("a", 1, "attn", **{leg: {"environment": {key: code}} for leg in LEGS})
        folders.append(writer.write())
    before, after = ({run.key: run.fingerprint for run in gathered(f).runs} for f in folders)
    assert before == after
    assert all(before.values())


def test_a_program_does_the_same_work_wherever_it_is_checked_out() -> None:
    """Its script within the folder counts, and its module by its name."""

    def work(kind: Any, target: str, folder: str) -> str:
        program = ProgramSpec(kind=kind, target=target, folder=folder).to_json()
        config = {"program": program, "steps": 4, "taps": []}
        return work_of(RunSpec(config=config, device="cpu", world_size=2, timeout_s=9.0))

    here = work("script", "/a/ci/train.py", "/a/ci")
    assert here == work("script", "/b/train.py", "/b")
    others = [work("script", "/b/src/train.py", "/b"), work("module", "train.py", "/b")]
    assert len({here, *others}) == 3
    assert work("module", "own.train", "/a") == work("module", "own.train", "/b")


def test_every_rank_and_bit_is_looked_at(tmp_path: Path) -> None:
    """A step takes as long as its slowest rank, their first half is warm-up."""

    def changed(leg: str) -> Callable[[StepRecord], StepRecord]:
        def edit(record: StepRecord) -> StepRecord:
            slow = {5: 0.5, 6: 0.5, 7: 0.5}.get(record.step, 9.0 if record.step < 5 else 0.4)
            late = record.rank == record.step % 2
            changes: dict[str, Any] = {"step_s": slow if late else 0.1}
            if (leg, record.rank, record.step) == ("candidate", 1, 3):
                changes["loss"] = ulp(record.loss, 1)
            if (leg, record.rank, record.step) == ("control", 1, 3):
                weights = record.digests["weights"]
                other = weights[:-1] + ("0" if weights[-1] != "0" else "1")
                changes["digests"] = record.digests | {"weights": other}
            return dataclasses.replace(record, **changes)

        return edit

    writer = Writer(tmp_path / "run", steps=10)
    writer.add("a", 2, "attn", **{leg: {"edit": changed(leg)} for leg in LEGS})
    entry = gathered(writer.write())
    runs = {run.key: run for run in entry.runs}
    reference, control, candidate = (runs[getattr(entry.cases[0], leg)] for leg in LEGS)
    assert reference.loss_bits == control.loss_bits != candidate.loss_bits
    assert reference.state_bits == candidate.state_bits != control.state_bits
    assert candidate.step_s == pytest.approx(0.5)  # of 0.5 x 3, 0.4 x 2


@pytest.mark.parametrize(
    "changes", [{"evaluation": FloatBits.from_bits(1)}, {"taps": "a" * 40}, {"skipped": "inf"}]
)
def test_all_that_is_compared_in_a_run_is_a_bit_of_it(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """An evaluation, a call of a tapped module and a step left out, too."""
    writer = Writer(tmp_path / "run", steps=3)
    writer.add("a", 1, "attn", candidate={"edit": lambda r: dataclasses.replace(r, **changes)})
    entry = gathered(writer.write())
    runs = {run.key: run for run in entry.runs}
    both = (runs[key] for key in (entry.cases[0].reference, entry.cases[0].candidate))
    assert len({(run.loss_bits, run.state_bits) for run in both}) == 2
