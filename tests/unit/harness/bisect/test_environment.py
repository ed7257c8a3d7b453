"""What two runs, or two nights, ran in."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.bisect.environment import (
    KINDS,
    of_legs,
    of_nights,
)
from harness.provenance import facts
from harness.records import (
    CaseSpec,
    RankExit,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
)
from harness.store import RunFolder, begin_run, save_outcome
from harness.worker.record_file import RecordFile

FINGERPRINT: dict[str, Any] = {
    "torch": "2.12", "data": "d1", "cpu_capability": "AVX2", "environment": {"NCCL_ALGO": "Ring"},
}  # fmt: skip
SPEC = RunSpec(config={"graph": []}, device="cpu", world_size=2, timeout_s=60.0)
MANIFEST: dict[str, Any] = {
    "commit": "c1", "packages": {"rich": "13"}, "environment": {"variables": {"NCCL_ALGO": "x"}},
    "machine": {"cores": 8, "memory_bytes": 2**34, "system": "Linux", "python": "3.11",
                "versions": {"torch": "2.12"}, "gpus": [{"name": "H200"}], "gpu_driver": "580"},
}  # fmt: skip


def _start(rank: int, fingerprint: dict[str, Any]) -> StartRecord:
    return StartRecord(
        schema=1, rank=rank, world_size=2, pid=1, device="cpu", tensors={}, run=SPEC.key,
        environment={"fingerprint": fingerprint},
    )  # fmt: skip


def _run(
    fingerprints: tuple[dict[str, Any], ...] = (FINGERPRINT, FINGERPRINT),
) -> RunResult:
    outcome = RunOutcome(
        key=SPEC.key, what="", message="", culprit_rank=None, ranks=(), started_unix_s=0.0,
        wall_s=1.0,
    )  # fmt: skip
    ranks = tuple(
        RankRecords(
            rank=rank, start=_start(rank, fingerprint), steps=(),
            events=(), error=None, end=None, problems=(),
        )
        for rank, fingerprint in enumerate(fingerprints)
    )  # fmt: skip
    return RunResult(spec=SPEC, outcome=outcome, ranks=ranks)


def test_equal_legs_differ_in_nothing() -> None:
    """Every kind that both recorded is the same."""
    found = of_legs(_run(), _run())
    assert found.facts == ()
    assert found.same == ("packages", "variables", "hardware", "data")
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("torch", "2.13", "packages"), ("data", "d2", "data"), ("cpu_capability", "x", "hardware"),
     ("environment", {"NCCL_ALGO": "Tree"}, "variables")],
)  # fmt: skip
def test_a_fact_of_all_ranks_is_said_once_by_its_kind(name: str, value: Any, kind: str) -> None:
    """What every rank shares has no rank in its name."""
    other = FINGERPRINT | {name: value}
    (fact,) = of_legs(_run(), _run((other, other))).facts
    assert fact.kind == kind
    assert fact.name.startswith(name)
    assert fact.before != fact.after


def test_a_fact_of_one_rank_names_it() -> None:
    """One rank on another machine is seen beside those that are alike."""
    found = of_legs(_run(), _run((FINGERPRINT, FINGERPRINT | {"cpu_capability": "SSE"})))
    assert {fact.name for fact in found.facts} >= {"rank 1: cpu_capability"}
    assert all(fact.kind == "hardware" for fact in found.facts)


@pytest.mark.parametrize(
    ("kind", "change"),
    [("commit", {"commit": "c2"}), ("packages", {"packages": {"rich": "14"}}),
     ("driver", {"machine": MANIFEST["machine"] | {"gpu_driver": "590"}}),
     ("variables", {"environment": {"variables": {}}}),
     ("hardware", {"machine": MANIFEST["machine"] | {"cores": 4}})],
)  # fmt: skip
def test_each_part_of_a_manifest_is_compared(
    tmp_path: Path, kind: str, change: dict[str, Any]
) -> None:
    """A night on another commit, package, driver, variable or machine says so, and only so."""
    found = of_nights(_night(tmp_path / "a", {}), _night(tmp_path / "b", change))
    assert {fact.kind for fact in found.facts} == {kind}
    assert set(found.same) == set(KINDS) - {kind}
    assert "a and b ran in other environments" in found.sentence


def test_nights_are_compared_in_what_their_ranks_recorded(tmp_path: Path) -> None:
    """Other data under the same name is found in the records."""
    before, after = (
        _night(tmp_path / "a", {}),
        _night(tmp_path / "b", {}, FINGERPRINT | {"data": "d2"}),
    )
    assert {fact.kind for fact in of_nights(before, after).facts} == {"data"}


def test_what_a_damaged_manifest_does_not_say_is_unknown() -> None:
    """A manifest without machine, commit or variables claims nothing."""
    assert facts({"machine": "x", "environment": 3}) == {}


def _night(
    path: Path,
    change: dict[str, Any],
    fingerprint: dict[str, Any] = FINGERPRINT,
) -> RunFolder:
    case = CaseSpec(
        id="dp2-attn", scenario="s", labels={}, reference=SPEC,
        control=dataclasses.replace(SPEC, replica=1),
        candidate=dataclasses.replace(SPEC, config={"graph": ["attn"]}), expect="bitwise",
        checks={"loss": {}},
    )  # fmt: skip
    folder = RunFolder.create(path, MANIFEST | change, "name: s\n", [case])
    with folder:
        run = folder.run_folder(SPEC.key)
        begin_run(run, SPEC)
        for rank in range(2):
            file = RecordFile(run / f"rank{rank}.jsonl")
            file.write(_start(rank, fingerprint))
            file.close()
        ranks = tuple(RankExit(rank=rank, code=0) for rank in range(2))
        save_outcome(run, RunOutcome(
            key=SPEC.key, what="", message="", culprit_rank=None, ranks=ranks, started_unix_s=0.0,
            wall_s=1.0,
        ))  # fmt: skip
    return RunFolder.open(path)
