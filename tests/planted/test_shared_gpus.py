"""Runs that share a GPU under MPS: a fault in one ends the others, and only it is accused.

No GPU is needed: the runs say what ranks on one would record, and wait for each other by files.
`acts` says what becomes of each attempt of a run; the last of them also of all later ones.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.bisect.experiments import judged_by
from harness.checks.complete import find_flaw
from harness.checks.judge import exit_code
from harness.engine import gpus
from harness.engine.local import LocalEngine
from harness.engine.ranks import Limits
from harness.infrastructure import machine_failure
from harness.records import CaseSpec, EndRecord, ErrorRecord, RunOutcome, RunSpec, Verdict, What
from harness.runner.retries import earlier_attempts, held_against_attempts, says_nothing
from harness.runner.run import Silent, execute
from harness.store import RunFolder, num_kept
from tests.planted import stub_ranks
from tests.planted.local_runs import until

PATIENCE_S = 30.0

ENTRY = "tests.planted.test_shared_gpus:rank_main"
CUDA = "CUDA error: an illegal memory access was encountered"
REFUSED = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
LAST_WORDS: dict[str, tuple[What, str, str]] = {
    "fault": ("illegal_access", "AcceleratorError", CUDA),
    "later_fault": ("illegal_access", "AcceleratorError", CUDA),
    "raise": ("crashed", "ValueError", "planted"),
    "refused": ("crashed", "AcceleratorError", REFUSED),
    "victim": ("crashed", "AcceleratorError", "CUDA error: MPS client failed"),
}


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """A stub rank that acts, as its attempt does, before its step 1, or 3 if it is `later`."""
    acts = spec.config["acts"]
    act = acts[min(num_kept(folder), len(acts) - 1)]
    stream, server = stub_ranks.Stream(folder, rank), Path(spec.config["server"])
    stream.write(stub_ranks.start_record(spec, rank))
    stream.write(stub_ranks.initial_record(rank))
    step = {"later_fault": 3, "refused": 0}.get(act, 1)
    for number in range(spec.config["steps"] if act == "ok" else step):
        stream.write(stub_ranks.step_record(number, rank))
    (server / f"{spec.config['name']}{spec.replica}").touch()
    until(lambda: len(list(server.iterdir())) >= spec.config["beside"], "nobody is beside it")
    stuck = server.with_name("stuck")
    if num_kept(folder) and stuck.exists() and spec.config["name"] in stuck.read_text():
        stub_ranks.sleep_for_ever()
    if act == "ok":
        stream.write(EndRecord(rank=rank, steps=4, peak_bytes=1, startup_s=0.0, wall_s=0.0))
        return 0
    if act == "victim":
        # Its neighbour's leader has seen it first.
        until(lambda: any(folder.parent.glob("*/outcome.json")), "no fault")
    what, kind, message = LAST_WORDS[act]
    stream.write(ErrorRecord(rank=rank, step=step, what=what, type=kind, message=message,
                             traceback=""))  # fmt: skip
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

    def pair(self, *acts: str) -> list[RunSpec]:
        """A run that faults first and one that falls with it, and ends well alone."""
        return [
            self.run("a", "fault", *acts, beside=2), self.run("b", "victim", "ok", beside=2),
        ]  # fmt: skip

    def runs(self, *acts: str) -> CaseSpec:
        """A case whose legs end as victims of its candidate, if at all."""
        reference = self.run("ref", "victim", "ok")
        control = replace(reference, replica=1)
        return CaseSpec(
            id="case", scenario="s", labels={}, reference=reference, control=control,
            candidate=self.run("candidate", *acts), expect="bitwise", checks={"loss": {}},
        )  # fmt: skip

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


def causes(folder: RunFolder, run: RunSpec) -> list[str]:
    return [attempt.cause for attempt in earlier_attempts(folder, run)]


Rows = dict[str, tuple[dict[str, tuple[str, ...]], dict[str, str], dict[str, list[str]]]]
SHARED = ["shared_gpu"]
UNDER_MPS: Rows = {
    "the innocent are cleared and the culprit is named": (
        {"a": ("fault",), "b": ("victim", "ok"), "c": ("victim", "ok")},
        {"a": "illegal_access", "b": "", "c": ""}, {"a": SHARED, "b": SHARED, "c": SHARED},
    ),
    "a fault that does not come back leaves nobody passed": (
        {"a": ("fault", "ok"), "b": ("victim", "ok")},
        {"a": "shared_gpu", "b": "shared_gpu"}, {"a": SHARED, "b": SHARED},
    ),
    "one that fails alone elsewhere explains nothing": (
        {"a": ("fault", "later_fault"), "b": ("victim", "ok")},
        {"a": "illegal_access", "b": "shared_gpu"}, {"a": SHARED, "b": SHARED},
    ),
    "two that fail alone both stand": (
        {"a": ("fault",), "b": ("victim", "raise")},
        {"a": "illegal_access", "b": "crashed"}, {"a": SHARED, "b": SHARED},
    ),
    "an error of the program needs no second run": (
        {"a": ("raise",), "b": ("victim", "ok")}, {"a": "crashed", "b": ""}, {"a": [], "b": SHARED},
    ),
    "MPS recovers from a fault only by and by": (
        {"a": ("fault", "refused", "refused", "fault"), "b": ("victim", "refused", "ok")},
        {"a": "illegal_access", "b": ""},
        {"a": [*SHARED, *2 * ["device_unavailable"]], "b": [*SHARED, "device_unavailable"]},
    ),
    "a run that got no GPU said nothing": (
        {"a": ("refused", "ok"), "b": ("ok",)}, {"a": "", "b": ""},
        {"a": ["device_unavailable"], "b": []},
    ),
    "a GPU that is never given out is asked for some times": (
        {"a": ("refused",)}, {"a": "crashed"}, {"a": 2 * ["device_unavailable"]},
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
    "a GPU that is not given out is the machine's failure": (
        {"a": ("refused",)}, {"a": "crashed"}, {"a": []},
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
    assert {name: causes(folder, run) for name, run in runs.items()} == why
    for name, outcome in found.items():
        assert outcome.attempt == len(why[name])
        assert not outcome.undecided
        if SHARED[0] in why[name]:
            assert all(run.key in outcome.message for n, run in runs.items() if n != name)
        assert ("without MPS" in outcome.message) == (outcome.what == "shared_gpu")
        if outcome.what == "crashed" and acts[name] == ("refused",):
            assert machine_failure(folder.load_run(runs[name])) == "device_unavailable"


def test_a_fault_long_before_explains_nothing(
    machine: Machine, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends that are too far apart are not each other's doing, though the runs met on the GPU."""
    monkeypatch.setattr(gpus, "NOTICE_S", -10 * PATIENCE_S)
    found = machine.outcomes(folder, *machine.pair())
    assert [found[name].what for name in "ab"] == ["illegal_access", "shared_gpu"]


def test_a_fault_on_another_gpu_explains_nothing(machine: Machine, folder: RunFolder) -> None:
    """Only who was on the same GPU can have ended a run; `c` and `d` were on one of their own."""
    acts = {"a": ("fault",), "b": ("victim", "ok"), "c": ("fault", "ok"), "d": ("ok",)}
    runs = [machine.run(name, *act, beside=4) for name, act in acts.items()]
    with LocalEngine(
        4, entry=ENTRY, devices=("0", "0", "1", "1"), limits=Limits(grace_s=PATIENCE_S),
        mps=lambda: True,
    ) as two_gpus:  # fmt: skip
        machine.engine, engine = two_gpus, machine.engine
        try:
            found = machine.outcomes(folder, *runs)
        finally:
            machine.engine = engine
    assert [found[name].what for name in "abcd"] == ["illegal_access", "", "shared_gpu", ""]


def judged(machine: Machine, folder: RunFolder, *cases: CaseSpec) -> list[Verdict]:
    """Retries of what the machine failed are left: none may make a run without an answer green."""
    return list(execute(folder, cases, machine.engine, Silent(), retries=3))


@pytest.mark.parametrize(
    ("acts", "outcome", "what", "code"),
    [(("fault",), "failed", "illegal_access", 1), (("fault", "ok"), "error", "shared_gpu", 6)],
)
def test_a_case_is_judged_by_what_its_runs_do_alone(
    machine: Machine, folder: RunFolder, acts: tuple[str, ...], outcome: str, what: str, code: int
) -> None:
    """Its reference and control are cleared by a culprit; without one there is no verdict."""
    (verdict,) = judged(machine, folder, machine.runs(*acts))
    assert (verdict.outcome, verdict.what) == (outcome, what), verdict.message
    assert exit_code([verdict]) == code
    assert folder.load_verdict("case") == verdict


@pytest.mark.parametrize("later", ["fault", "ok"])
def test_what_is_cut_short_is_asked_on(machine: Machine, folder: RunFolder, later: str) -> None:
    """Killed as runs are made alone, a resumed harness decides nothing from what was half known."""
    runs = machine.pair(later)
    stuck = machine.server.with_name("stuck")
    stuck.write_text("a b")
    for run in runs:
        machine.engine.start(run, folder.run_folder(run.key))
    until(lambda: not machine.engine.wait(0.01) and any(map(again, paths(folder, runs))), "alone")
    machine.engine.cancel()
    stuck.unlink()
    assert all(says_nothing(folder.finished(run.key)) for run in runs)
    for run in runs:
        folder.set_aside(run.key)
        machine.engine.start(run, folder.run_folder(run.key), attempt=num(folder, run))
    found: dict[str, str] = {}
    while len(found) < 2:
        ended = machine.engine.wait(PATIENCE_S)
        assert ended, "nothing ended"
        found |= {outcome.key: outcome.what for outcome in ended}
    expected = ["illegal_access", ""] if later == "fault" else ["shared_gpu"] * 2
    assert [found[run.key] for run in runs] == expected


def test_who_ends_well_alone_has_not_passed_until_all_are_known(
    machine: Machine, folder: RunFolder
) -> None:
    """What lies on the disk before another of the group was made alone is no outcome."""
    runs = machine.pair("ok")
    machine.server.with_name("stuck").write_text("b")
    for run in runs:
        machine.engine.start(run, folder.run_folder(run.key))
    until(lambda: not machine.engine.wait(0.01) and again(paths(folder, runs)[1]), "alone")
    machine.engine.cancel()
    flaw = find_flaw(folder.load_run(runs[0]))
    assert flaw is not None
    assert flaw.what == "shared_gpu"
    assert says_nothing(folder.finished(runs[0].key))


def paths(folder: RunFolder, runs: list[RunSpec]) -> list[Path]:
    return [folder.run_folder(run.key) for run in runs]


def again(folder: Path) -> bool:
    """Whether a second attempt of a run has come to where it acts."""
    file = folder / "rank0.jsonl"
    return num_kept(folder) == 1 and file.exists() and '"step"' in file.read_text()


def num(folder: RunFolder, run: RunSpec) -> int:
    return folder.num_attempts(run.key)


def test_no_answer_is_asked_for_again_and_a_culprit_clears_the_others(
    machine: Machine, folder: RunFolder
) -> None:
    """--resume makes runs without a verdict alone once more, and believes no pass before that."""
    case = machine.runs("fault", "ok", "fault")
    (verdict,) = judged(machine, folder, case)
    assert verdict.outcome == "error"
    (verdict,) = judged(machine, folder, case)
    assert (verdict.outcome, verdict.what) == ("failed", "illegal_access")


def test_other_bits_before_the_end_are_nobodys(machine: Machine, folder: RunFolder) -> None:
    """An attempt beside a faulty run does not accuse the one after it, and does not let it pass."""
    case = machine.runs("victim", "ok")
    bad = machine.run("bad", "fault")
    found = machine.outcomes(folder, case.reference, case.candidate, bad)
    assert [found[name].what for name in ("ref", "candidate")] == ["", ""]
    kept = folder.run_folder(case.candidate.key)
    path = kept.with_name(f"{kept.name}.attempt0") / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["digests"]["weights"] = "1" * 32
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    passed = Verdict(case_id="case", outcome="passed", what="", message="", checks=(), runs={},
                     wall_s=0.0)  # fmt: skip
    verdict = held_against_attempts(folder, case, passed)
    assert (verdict.outcome, verdict.what) == ("incomparable", "shared_gpu"), verdict.message


def test_a_search_takes_no_answer_from_a_run_without_one(
    machine: Machine, folder: RunFolder
) -> None:
    """A candidate that finished alone, with no culprit known, did not show that all is well."""
    case = machine.runs("fault", "ok")
    judge = judged_by(lambda reference, candidate: "")
    (verdict,) = execute(folder, [case], machine.engine, Silent(), judge=judge)
    assert (verdict.outcome, verdict.what) == ("error", "shared_gpu"), verdict.message
    candidate = folder.load_run(case.candidate)
    whole = replace(candidate, outcome=replace(candidate.outcome, what=""))
    assert judge(case, whole, whole, candidate).outcome == "error"
    assert judge(case, whole, whole, whole).outcome == "passed"
