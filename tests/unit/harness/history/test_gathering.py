"""Contracts of gathering: what a run folder holds is told as it is, and damage never as a pass."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.history import gather, machine_kind
from harness.history.entries import FolderEntry, name_of
from harness.records import StepRecord
from harness.store import RunFolder
from harness.store.files import KEY
from tests.damaged_folders.rewrite import rewrite
from tests.unit.reports.folders import ENVIRONMENT, HOSTILE, Writer, drift, ulp


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


def test_answers_and_measurements_are_told(made: Path) -> None:
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
    assert (reference.steps, reference.timed_steps, reference.step_s) == (10, 8, 0.01)
    assert reference.peak_bytes == (40 << 20) + 4096
    assert (reference.startup_s, reference.wall_s, reference.problems) == (0.1, 1.25, 0)
    assert reference.loss_bits == runs[failed.control].loss_bits != candidate.loss_bits
    assert reference.state_bits == runs[failed.control].state_bits != candidate.state_bits
    assert reference.work == runs[failed.control].work != candidate.work
    assert entry.fingerprints == {reference.fingerprint: {"ranks": [ENVIRONMENT]}}
    assert entry.num_cases == 3


def test_gathering_is_the_same_wherever_the_folder_lies(made: Path, folder: Path) -> None:
    """A copy of a folder is the same folder: equal entries, id included."""
    assert gathered(folder) == gathered(made)
    shutil.rmtree(folder / "runs")
    alone = gathered(folder)
    assert alone == gathered(made)


def test_the_manifest_says_what_the_verdicts_depend_on(folder: Path) -> None:
    """Environment, commit, shard and tier come from it; which equal GPUs were used does not."""

    def told(**changes: Any) -> FolderEntry:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest |= {
            "id": "abc", "commit": "3f1c", "shard": "1/2", "tier": "nightly", "slots": 8,
            "machine": {
                "cores": 8, "memory_bytes": (32 << 30) + 7, "system": "Linux", "python": "3.11",
                "versions": {"torch": "2.12"}, "gpu_driver": "580",
                "gpus": [{"id": "GPU-1", "name": "H200", "memory_bytes": 1}] * 2,
            },
            "environment": {"variables": {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0,1"}},
        } | changes  # fmt: skip
        rewrite(folder / "manifest.json", manifest)
        return gathered(folder)

    entry = told()
    assert (entry.id, entry.commit, entry.shard, entry.tier) == ("abc", "3f1c", "1/2", "nightly")
    assert (entry.machine, entry.slots) == ("8 cores, 2 x H200", 8)
    assert entry.environment["variables"] == {"NCCL_ALGO": "Ring"}
    assert entry.environment["memory_gib"] == 32
    other = told(environment={"variables": {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "2,3"}})
    assert other.environment_id == entry.environment_id
    assert told(environment={"variables": {}}).environment_id != entry.environment_id
    assert told(machine=None).environment_id == ""
    assert machine_kind({"cores": 2, "gpus": []}) == "2 cores"


def without(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def cut_short(run: Path) -> None:
    text = (run / "rank0.jsonl").read_text()
    (run / "rank0.jsonl").write_text(text[: len(text) // 2])


def wrong_key(run: Path) -> None:
    outcome = json.loads((run / "outcome.json").read_text())
    rewrite(run / "outcome.json", outcome | {"key": "w1-other"})


def crashed(run: Path) -> None:
    outcome = json.loads((run / "outcome.json").read_text())
    rewrite(run / "outcome.json", outcome | {"what": "crashed"})


def one_bit(run: Path) -> None:
    path = run / "rank0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":2', 1))


@pytest.mark.parametrize(
    "spoil", [without("rank0.jsonl"), without("outcome.json"), cut_short, wrong_key, crashed,
              one_bit, lambda run: shutil.rmtree(run)],
    ids=["no records", "no outcome", "cut", "another run's", "crashed", "doubled step", "gone"],
)  # fmt: skip
@pytest.mark.parametrize("leg", ["reference", "control", "candidate"])
def test_a_pass_over_damaged_records_is_not_recorded_as_one(
    leg: str, spoil: Callable[[Path], Any], folder: Path
) -> None:
    """If a run of a passed case is not whole, wherever it is read from, the case is corrupt."""
    case = RunFolder.open(folder).cases[0]
    for place in (folder / "runs" / getattr(case, leg).key, folder / "cases" / case.id / leg):
        # The sealed run is the same file by a hard link, until it is taken apart.
        copy = shutil.copytree(place, folder / "copy")
        shutil.rmtree(place)
        shutil.move(copy, place)
        spoil(place)
    answer = gathered(folder).cases[0]
    is_gone = not (folder / "runs" / getattr(case, leg).key).exists()
    assert (answer.outcome, answer.what) == ("error", "not_run" if is_gone else "corrupt_record")
    assert answer.message.startswith(f"runs/{getattr(case, leg).key}/")


@pytest.mark.parametrize("changes", [{"outcome": "succeeded"}, {"case_id": "dp2-attn"}])
def test_a_verdict_that_cannot_be_is_not_believed(changes: dict[str, Any], folder: Path) -> None:
    """A verdict of another case, or of no outcome, is recorded as corrupt."""
    rewrite(folder / "cases" / "dp1-attn" / "verdict.json", changes)
    answer = gathered(folder).cases[0]
    assert (answer.outcome, answer.what) == ("error", "corrupt_record")
    assert "does not decode" in answer.message


def test_a_pass_of_a_skipped_case_is_not_believed(folder: Path) -> None:
    """A case that was to be skipped has no runs to have passed with."""
    path = folder / "cases" / "dp6-attn" / "verdict.json"
    rewrite(path, {"outcome": "passed", "what": ""})
    answer = gathered(folder).cases[2]
    assert (answer.outcome, answer.what) == ("error", "corrupt_record")


def test_what_is_not_final_is_left_for_later(folder: Path) -> None:
    """A case without a verdict and a run without an outcome are not recorded, only counted."""
    case = RunFolder.open(folder).cases[0]
    shutil.rmtree(folder / "cases" / case.id)
    (folder / "runs" / case.candidate.key / "outcome.json").unlink()
    entry = gathered(folder)
    assert [answer.case_id for answer in entry.cases] == ["dp2-attn", "dp6-attn"]
    assert case.candidate.key not in {run.key for run in entry.runs}
    assert entry.num_cases == 3


def test_earlier_attempts_are_kept(folder: Path) -> None:
    """Runs and answers that were set aside are attempts of their own, the current one last."""
    case = RunFolder.open(folder).cases[0]
    run, answers = folder / "runs" / case.candidate.key, folder / "cases" / case.id
    shutil.copytree(run, run.with_name(f"{run.name}.attempt0"))
    (run.with_name(f"{run.name}.attempt0") / "outcome.json").unlink()
    kept = Path(shutil.copytree(answers, answers.with_name(f"{answers.name}.attempt0")))
    rewrite(kept / "verdict.json", {"outcome": "error", "what": "oom"})
    entry = gathered(folder)
    assert [(c.attempt, c.outcome) for c in entry.cases if c.case_id == case.id] == [
        (0, "error"), (1, "passed"),
    ]  # fmt: skip
    attempts = [(r.attempt, r.what) for r in entry.runs if r.key == case.candidate.key]
    assert attempts == [(0, "interrupted"), (1, "")]


def test_an_earlier_pass_that_its_own_records_contradict_is_not_recorded_as_one(
    folder: Path,
) -> None:
    """A verdict that was forged and then set aside is told as what its records say."""
    case = next(case for case in RunFolder.open(folder).cases if not case.skip_reason)
    answers = folder / "cases" / case.id
    kept = Path(shutil.copytree(answers, answers.with_name(f"{answers.name}.attempt0")))
    records = kept / "candidate" / "rank0.jsonl"
    lines = records.read_text().splitlines()
    records.unlink()
    records.write_text("\n".join(lines[:-2]) + "\n")
    told = {c.attempt: c.outcome for c in gathered(folder).cases if c.case_id == case.id}
    assert told[0] != "passed"
    assert told[1] == "passed"


def test_a_step_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    """Whichever rank is late, its time is the step's; the first fifth of the steps is warm-up."""

    def timed(record: StepRecord) -> StepRecord:
        slow = {0: 9.0, 1: 9.0, 2: 0.3, 3: 0.5}.get(record.step, 0.4)
        late = record.rank == record.step % 2
        return dataclasses.replace(record, step_s=slow if late else 0.1)

    writer = Writer(tmp_path / "run", steps=10)
    writer.add("a", 2, "attn", **{leg: {"edit": timed} for leg in ("reference", "candidate")})
    run = next(run for run in gathered(writer.write()).runs if "attn" in run.key)
    assert (run.timed_steps, run.step_s) == (8, 0.4)
    assert run.step_spread_s == pytest.approx(0.0)
    assert (run.startup_s, run.peak_bytes) == (0.1, (40 << 20) + 4096)


def test_bits_tell_one_ulp_on_one_rank(tmp_path: Path) -> None:
    """One ulp in one loss of one step, or one digit of one digest, is another digest of bits."""

    def one_ulp(record: StepRecord) -> StepRecord:
        if (record.rank, record.step) != (1, 3):
            return record
        return dataclasses.replace(record, loss=ulp(record.loss, 1))

    def one_digit(record: StepRecord) -> StepRecord:
        if (record.rank, record.step) != (1, 3):
            return record
        weights = record.digests["weights"]
        other = ("0" if weights[-1] != "0" else "1") + weights[:-1][::-1]
        return dataclasses.replace(record, digests=record.digests | {"weights": other[::-1]})

    writer = Writer(tmp_path / "run", steps=5)
    writer.add("plain", 2, "attn", candidate={})
    writer.add("ulp", 2, "attn", candidate={"edit": one_ulp}, control={"edit": one_digit})
    # The seed of a case is its number; equal seeds give equal bits.
    entry = gathered(writer.write())
    reference, control, candidate = (
        next(run for run in entry.runs if run.key == getattr(entry.cases[1], leg))
        for leg in ("reference", "control", "candidate")
    )
    assert reference.loss_bits == control.loss_bits != candidate.loss_bits
    assert reference.state_bits == candidate.state_bits != control.state_bits


def test_hostile_texts_and_numbers_are_stored(tmp_path: Path) -> None:
    """Surrogates, control characters and numbers past all bounds become text that can be kept."""
    writer = Writer(tmp_path / "run", steps=3)
    writer.add("a", 1, "attn", labels={"graph": HOSTILE}, environment={"x": HOSTILE},
               candidate={"peak": 0, "environment": {"n": 1 << 70}})  # fmt: skip
    path = writer.write()
    verdict_path = path / "cases" / "a" / "verdict.json"
    verdict = json.loads(verdict_path.read_text())
    verdict.pop(KEY)
    hostile = json.dumps(verdict | {"message": HOSTILE, "wall_s": 7}).replace(": 7", ": Infinity")
    verdict_path.write_text(hostile)
    rewrite(path / "manifest.json", {"commit": HOSTILE})
    entry = gathered(path)
    assert entry.commit.isprintable()
    (answer,) = entry.cases
    assert answer.message.isprintable()
    assert answer.wall_s == 0.0
    assert {run.peak_bytes for run in entry.runs if "attn" in run.key} == {None}
    assert name_of(entry.to_json())
