"""Contracts of gathering: what a run folder holds is told as it is, and damage never as a pass."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.history import gather, machine_kind
from harness.history.ledger import FolderEntry
from harness.records import StepRecord
from harness.store import RunFolder
from tests.chaos.good import rewrite
from tests.unit.harness.history.nights import LEGS
from tests.unit.reports.folders import ENVIRONMENT, Writer, drift, ulp


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
