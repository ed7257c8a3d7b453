"""Runs that share a GPU under MPS: a fault in one ends the others, and only it is accused.

No GPU is needed: the runs say what ranks on one would record, and wait for each other by files.
`acts` says what becomes of each attempt of a run; the last of them also of all later ones.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.again import says_nothing
from harness.bisector.experiments import judged_by
from harness.checks.complete import find_flaw
from harness.checks.judge import exit_code
from harness.engine.local import LocalEngine
from harness.engine.watch import Limits
from harness.infrastructure import machine_failure
from harness.records import CaseSpec, EndRecord, ErrorRecord, RunOutcome, RunSpec, Verdict, What
from harness.retries import beside_attempts, earlier_attempts
from harness.run import Silent, execute
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


def test_the_innocent_are_cleared_and_the_culprit_is_named(
    machine: Machine, folder: RunFolder
) -> None:
    """Alone the faulty run fails again; its neighbours finish, and their first ends are kept."""
    runs = [
        machine.run("a", "fault"), machine.run("b", "victim", "ok"),
        machine.run("c", "victim", "ok"),
    ]  # fmt: skip
    found = machine.outcomes(folder, *runs)
    assert [found[name].what for name in "abc"] == ["illegal_access", "", ""]
    assert all(runs[n].key in found["a"].message for n in (1, 2))
    assert [causes(folder, run) for run in runs] == [["shared_gpu"]] * 3
    assert [found[name].attempt for name in "abc"] == [1, 1, 1]


def test_a_fault_that_does_not_come_back_leaves_nobody_passed(
    machine: Machine, folder: RunFolder
) -> None:
    """A culprit that is lucky the second time is not green, and neither is who was beside it."""
    runs = [
        machine.run("a", "fault", "ok", beside=2), machine.run("b", "victim", "ok", beside=2),
    ]  # fmt: skip
    found = machine.outcomes(folder, *runs)
    for run, other in (runs, runs[::-1]):
        outcome = found[run.config["name"]]
        assert outcome.what == "shared_gpu"
        assert other.key in outcome.message
        assert "without MPS" in outcome.message


def test_one_that_fails_alone_elsewhere_explains_nothing(
    machine: Machine, folder: RunFolder
) -> None:
    """It did not get that far beside the others, so another may have ended them all."""
    runs = [
        machine.run("a", "fault", "later_fault", beside=2),
        machine.run("b", "victim", "ok", beside=2),
    ]
    found = machine.outcomes(folder, *runs)
    assert (found["a"].what, found["b"].what) == ("illegal_access", "shared_gpu")


def test_a_lone_run_that_is_refused_its_gpu_is_no_answer(
    machine: Machine, folder: RunFolder
) -> None:
    """MPS recovers from the fault only by and by: the culprit fails again once it gets the GPU."""
    runs = [
        machine.run("a", "fault", "refused", "refused", "fault", beside=2),
        machine.run("b", "victim", "refused", "ok", beside=2),
    ]
    found = machine.outcomes(folder, *runs)
    assert [found[name].what for name in "ab"] == ["illegal_access", ""]
    assert causes(folder, runs[0]) == ["shared_gpu", "device_unavailable", "device_unavailable"]
    assert causes(folder, runs[1]) == ["shared_gpu", "device_unavailable"]


def test_a_run_that_never_got_its_gpu_is_made_again_and_counts(
    machine: Machine, folder: RunFolder
) -> None:
    """It said nothing, so nothing is in doubt once it was made."""
    runs = [machine.run("a", "refused", "ok", beside=2), machine.run("b", "ok", beside=2)]
    found = machine.outcomes(folder, *runs)
    assert [found[name].what for name in "ab"] == ["", ""]
    assert causes(folder, runs[0]) == ["device_unavailable"]


@pytest.mark.parametrize("mps", [False, True])
def test_a_gpu_that_is_never_given_out_is_the_machines_failure(
    machine: Machine, folder: RunFolder, mps: bool
) -> None:
    """It is asked for some more times under MPS, and not for ever."""
    machine.mps = mps
    run = machine.run("a", "refused", beside=1)
    found = machine.outcomes(folder, run)
    assert found["a"].what == "crashed"
    assert causes(folder, run) == (["device_unavailable"] * 2 if mps else [])
    flaw = find_flaw(folder.load_run(run))
    assert flaw is not None
    assert machine_failure(folder.load_run(run)) == "device_unavailable"


def test_an_error_of_the_program_needs_no_second_run(machine: Machine, folder: RunFolder) -> None:
    """Python's exception, before CUDA said a word, names the culprit from the start."""
    runs = [machine.run("a", "raise", beside=2), machine.run("b", "victim", "ok", beside=2)]
    found = machine.outcomes(folder, *runs)
    assert [found[name].what for name in "ab"] == ["crashed", ""]
    assert [causes(folder, run) for run in runs] == [[], ["shared_gpu"]]


def test_two_that_fail_alone_both_stand(machine: Machine, folder: RunFolder) -> None:
    """Each is accused of what it does by itself."""
    runs = [machine.run("a", "fault", beside=2), machine.run("b", "victim", "raise", beside=2)]
    found = machine.outcomes(folder, *runs)
    assert [found[name].what for name in "ab"] == ["illegal_access", "crashed"]


@pytest.mark.parametrize("mps", [False, True])
def test_without_mps_or_company_an_end_stands(
    machine: Machine, folder: RunFolder, mps: bool
) -> None:
    """Contexts of their own share no fault, and one alone has nobody to blame."""
    machine.mps = mps
    if mps:
        runs = [machine.run("a", "fault", "ok", beside=1)]
    else:
        runs = [machine.run("a", "fault", "ok", beside=2), machine.run("b", "victim", beside=2)]
    found = machine.outcomes(folder, *runs)
    assert found["a"].what == "illegal_access"
    assert not any(outcome.undecided or outcome.attempt for outcome in found.values())
    assert [causes(folder, run) for run in runs] == [[]] * len(runs)


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
    runs = [
        machine.run("a", "fault", later, beside=2), machine.run("b", "victim", "ok", beside=2),
    ]  # fmt: skip
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
    runs = [
        machine.run("a", "fault", "ok", beside=2), machine.run("b", "victim", "ok", beside=2),
    ]  # fmt: skip
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
    verdict = beside_attempts(folder, case, passed)
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
