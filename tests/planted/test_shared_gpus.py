"""Runs that share a GPU under MPS: what fails there is made again, alone, and that counts.

No GPU is needed: the runs say what ranks on one would record, and wait for each other by files.
`acts` says what becomes of each attempt of a run; the last of them also of all later ones.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.checks.complete import find_flaw
from harness.engine.local import LocalEngine
from harness.engine.ranks import Limits
from harness.infrastructure import machine_failure
from harness.records import RunOutcome, RunSpec, What
from harness.runner.run import earlier_attempts, held_against_attempts, says_nothing
from harness.store import RunFolder, num_kept
from tests.planted import stub_ranks
from tests.planted.local_runs import until
from tests.support import records

PATIENCE_S = 30.0

ENTRY = "tests.planted.test_shared_gpus:rank_main"
CUDA = "CUDA error: an illegal memory access was encountered"
REFUSED = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
LAST_WORDS: dict[str, tuple[What, str, str]] = {
    "fault": ("illegal_access", "AcceleratorError", CUDA),
    "refused": ("crashed", "AcceleratorError", REFUSED),
    "victim": ("crashed", "AcceleratorError", "CUDA error: MPS client failed"),
}


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """A stub rank that acts, as its attempt does, before its step 1."""
    acts = spec.config["acts"]
    act = acts[min(num_kept(folder), len(acts) - 1)]
    stream, server = stub_ranks.Stream(folder, rank), Path(spec.config["server"])
    stream.write(stub_ranks.start_record(spec, rank))
    stream.write(stub_ranks.initial_record(rank))
    step = 0 if act == "refused" else 1
    for number in range(spec.config["steps"] if act == "ok" else step):
        stream.write(stub_ranks.step_record(number, rank))
    (server / f"{spec.config['name']}{spec.replica}").touch()
    until(lambda: len(list(server.iterdir())) >= spec.config["beside"], "nobody is beside it")
    stuck = server.with_name("stuck")
    if num_kept(folder) and stuck.exists() and spec.config["name"] in stuck.read_text():
        stub_ranks.sleep_for_ever()
    if act == "ok":
        stream.write(records.end(rank, steps=4))
        return 0
    if act == "victim":
        # Its neighbour's leader has seen it first.
        until(lambda: any(folder.parent.glob("*/outcome.json")), "no fault")
    what, kind, message = LAST_WORDS[act]
    stream.write(records.error(rank, step=step, what=what, type=kind, message=message))
    return 1


class Machine:
    """One GPU that three runs may share, with and without MPS."""

    def __init__(self, server: Path) -> None:
        self.server, self.mps = server, True
        self.engine = LocalEngine(
            3, entry=ENTRY, devices=("0",) * 3, limits=Limits(grace_s=PATIENCE_S),
            mps=lambda: self.mps, recovery_s=(0.01, 0.02),
        )  # fmt: skip

    def run(self, name: str, *acts: str, beside: int = 3) -> RunSpec:
        """A run; `beside` is how many runs, itself included, must have come to act."""
        config = {
            "graph": [], "steps": 4, "microbatches": 1, "name": name, "acts": list(acts),
            "beside": beside, "server": str(self.server),
        }  # fmt: skip
        return RunSpec(config=config, device="cuda", world_size=1, timeout_s=10 * PATIENCE_S)

    def outcomes(self, folder: RunFolder, *runs: RunSpec) -> dict[str, RunOutcome]:
        """What becomes of runs that are started together, by name."""
        for run in runs:
            assert self.engine.can_start(run)
            self.engine.start(run, folder.run_folder(run.key))
        names = {run.key: run.config["name"] for run in runs}
        found: dict[str, RunOutcome] = {}
        while len(found) < len(runs):
            ended = self.engine.wait(PATIENCE_S)
            assert ended, "nothing ended"
            found |= {names[outcome.key]: outcome for outcome in ended}
        for run in runs:
            assert folder.finished(run.key) == found[run.config["name"]]
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("server"))
    with machine.engine:
        yield machine


@pytest.fixture
def machine(shared: Machine, tmp_path: Path) -> Iterator[Machine]:
    shared.server, shared.mps = tmp_path / "server", True
    shared.server.mkdir()
    yield shared
    shared.engine.cancel()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "out", {}, "", ()) as made:
        yield made


Rows = dict[str, tuple[dict[str, tuple[str, ...]], dict[str, str], dict[str, list[str]]]]
SHARED = ["shared_gpu"]
REFUSED_ONCE = ["device_unavailable"]
UNDER_MPS: Rows = {
    "the innocent are cleared": (
        {"a": ("fault",), "b": ("victim", "ok"), "c": ("victim", "ok")},
        {"a": "illegal_access", "b": "", "c": ""}, {"a": SHARED, "b": SHARED, "c": SHARED},
    ),
    "MPS recovers from a fault only by and by": (
        {"a": ("fault", "refused", "refused", "fault"), "b": ("victim", "refused", "ok")},
        {"a": "illegal_access", "b": ""},
        {"a": [*SHARED, *2 * REFUSED_ONCE], "b": [*SHARED, *REFUSED_ONCE]},
    ),
    "a GPU that is never given out is asked for some times": (
        {"a": ("fault", "refused"), "b": ("ok",)}, {"a": "crashed", "b": ""},
        {"a": [*SHARED, *2 * REFUSED_ONCE], "b": []},
    ),
    "one without company has nobody to blame": (
        {"a": ("fault", "ok")}, {"a": "illegal_access"}, {"a": []},
    ),
}  # fmt: skip
WITHOUT_MPS: Rows = {
    "contexts of their own share no fault": (
        {"a": ("fault", "ok"), "b": ("victim",)}, {"a": "illegal_access", "b": "crashed"},
        {"a": [], "b": []},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", [*UNDER_MPS, *WITHOUT_MPS])
def test_what_becomes_of_runs_on_one_gpu(machine: Machine, folder: RunFolder, row: str) -> None:
    """Under MPS what failed in company runs once more alone, and all it was is kept and told."""
    machine.mps = row in UNDER_MPS
    acts, whats, why = (UNDER_MPS | WITHOUT_MPS)[row]
    runs = {name: machine.run(name, *act, beside=len(acts)) for name, act in acts.items()}
    found = machine.outcomes(folder, *runs.values())
    assert {name: outcome.what for name, outcome in found.items()} == whats
    causes = {
        name: [attempt.cause for attempt in earlier_attempts(folder, run)]
        for name, run in runs.items()
    }
    assert causes == why
    for name, outcome in found.items():
        assert (outcome.attempt, outcome.undecided) == (len(why[name]), False)
        if why[name] and outcome.what:
            others = (run.key for n, run in runs.items() if n != name)
            assert all(key in outcome.message for key in others)
        if outcome.what == "crashed" and row in UNDER_MPS:
            assert machine_failure(folder.load_run(runs[name])) == "device_unavailable"


def test_a_fault_on_another_gpu_is_no_company(machine: Machine, folder: RunFolder) -> None:
    """Only who was on the same GPU is made again."""
    acts = {"on 0": ("ok",), "on 1": ("fault", "ok"), "on 0, too": ("ok",)}
    runs = [machine.run(name, *act) for name, act in acts.items()]
    with LocalEngine(
        3, entry=ENTRY, devices=("0", "1", "0"), limits=Limits(grace_s=PATIENCE_S),
        mps=lambda: True,
    ) as two_gpus:  # fmt: skip
        machine.engine, engine = two_gpus, machine.engine
        try:
            found = machine.outcomes(folder, *runs)
        finally:
            machine.engine = engine
    assert [found[name].what for name in acts] == ["", "illegal_access", ""]


def test_what_is_cut_short_is_asked_on(machine: Machine, folder: RunFolder) -> None:
    """Killed as runs are made alone, a failure in company decides nothing: --resume makes it."""
    runs = [machine.run("a", "fault", beside=2), machine.run("b", "victim", "ok", beside=2)]
    stuck = machine.server.with_name("stuck")
    stuck.write_text("a b")
    for run in runs:
        machine.engine.start(run, folder.run_folder(run.key))

    def alone() -> bool:
        files = [folder.run_folder(run.key) / "rank0.jsonl" for run in runs]
        return not machine.engine.wait(0.01) and any(
            num_kept(file.parent) == 1 and file.exists() and '"step"' in file.read_text()
            for file in files
        )

    until(alone, "alone")
    assert not machine.engine.can_start(runs[0])
    machine.engine.cancel()
    stuck.unlink()
    flaws = [find_flaw(folder.load_run(run)) for run in runs]
    assert all(says_nothing(folder.finished(run.key)) for run in runs)
    assert "shared_gpu" in {flaw.what for flaw in flaws if flaw is not None}
    found: dict[str, str] = {}
    for run in runs:
        folder.set_aside(run.key)
        attempt = num_kept(folder.run_folder(run.key))
        machine.engine.start(run, folder.run_folder(run.key), attempt=attempt)
    while len(found) < 2:
        found |= {outcome.key: outcome.what for outcome in machine.engine.wait(PATIENCE_S)}
    assert [found[run.key] for run in runs] == ["illegal_access", ""]


def test_other_bits_before_the_end_are_nobodys(machine: Machine, folder: RunFolder) -> None:
    """An attempt beside a faulty run does not accuse the one after it, and does not let it pass."""
    reference = machine.run("ref", "victim", "ok")
    candidate = machine.run("candidate", "victim", "ok")
    case = records.case_spec("case", reference, reference, candidate, checks={"loss": {}})
    found = machine.outcomes(folder, reference, candidate, machine.run("bad", "fault"))
    assert [found[name].what for name in ("ref", "candidate")] == ["", ""]
    kept = folder.run_folder(case.candidate.key)
    path = kept.with_name(f"{kept.name}.attempt0") / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["digests"]["weights"] = "1" * 32
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = held_against_attempts(folder, case, records.verdict("case"))
    assert (verdict.outcome, verdict.what) == ("incomparable", "shared_gpu"), verdict.message
