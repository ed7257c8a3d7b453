"""Which answer decides a case; the registry of checks; environments; programs of others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.checks import CHECKS, Check, defaults, exit_code, judge, refusal, table
from harness.checks.evidence import alike, show_float
from harness.program.spec import ProgramSpec
from harness.records import CheckResult, FloatBits, RunResult, Verdict
from tests.support import records
from tests.support import run_records as lab
from tests.support.run_records import (
    CANDIDATE,
    CONTROL,
    LAB,
    NAN,
    REFERENCE,
    Edit,
    answers,
    at,
    bit,
    both,
    configured,
    edit,
    place,
    said,
    same,
)

LEGS = (REFERENCE, CONTROL, CANDIDATE)
GUIDE = Path(__file__).resolve().parents[4] / "docs" / "GUIDE.md"


def crash(what: Any, **more: Any) -> Edit:
    return lambda run: edit(run, what=what, message="rank 1", culprit_rank=1, **more)


def ulp(rank: int, step: int) -> Edit:
    loss = REFERENCE.ranks[rank].steps[step].loss
    assert loss is not None
    return at(rank, step, loss=FloatBits.from_bits(int(loss.bits, 16) ^ 1))


def moved(rank: int, fingerprint: Any) -> Edit:
    """The rank ran in another environment."""
    return lambda run: edit(run, rank, start={"environment": {"fingerprint": fingerprint}})


ELSEWHERE = {"torch": "2.13"}


@pytest.mark.parametrize("size", [(1, 1, 1), (4, 2, 2), (3, 16, 3)])
def test_identical_runs_pass(size: tuple[int, int, int]) -> None:
    """Whole and equal runs pass, with every answer kept and the run keys named."""
    size_of = lab.Lab(*size)
    verdict = judge(size_of.case(), *size_of.legs())
    assert (verdict.outcome, verdict.what) == ("passed", "")
    assert {result.outcome for result in verdict.checks} == {"passed"}
    assert set(size_of.case().checks) <= set(answers(verdict))
    assert verdict.runs["control"] == size_of.case().control.key


FAULTY = "failed", "diverged"
NONDETERMINISTIC = ("incomparable", "nondeterministic_reference")
OTHER = ("incomparable", "different_environment")


def tapped_otherwise(run: RunResult) -> RunResult:
    """One digest of a tap differs, and nothing else."""
    rows = run.ranks[1].steps[2].taps
    return edit(run, 1, 2, taps=("1" if rows[0] == "0" else "0") + rows[1:])


DECISIONS: list[tuple[Edit, Edit, Edit, tuple[str, str], str]] = [
    # how reference, control and candidate are edited; outcome and kind; the check that decides
    *((same, same, crash(what), ("failed", what), "records:candidate")
      for what in ("hang", "oom", "killed")),
    *((same, same, crash(what), ("error", what), "records:candidate")
      for what in ("interrupted", "not_run", "unsupported", "shared_gpu")),
    # Others' ends are never the candidate's fault, whatever became of it.
    (crash("hang"), same, crash("oom"), ("error", "hang"), "records:reference"),
    (same, crash("hang"), ulp(0, 1), ("error", "hang"), "records:control"),
    (same, same, crash("", undecided=True), ("error", "shared_gpu"), "records:candidate"),
    (same, crash("oom", undecided=True), same, ("error", "shared_gpu"), "records:control"),
    # A reference that differs from its control is named before the candidate's end.
    (same, ulp(1, 2), crash("hang"), NONDETERMINISTIC, "control"),
    (same, bit(1, 2, "optim"), same, NONDETERMINISTIC, "control"),
    (same, tapped_otherwise, same, NONDETERMINISTIC, "control"),
    (same, same, both(moved(0, ELSEWHERE), ulp(0, 1)), OTHER, "environment:candidate"),
    (same, moved(1, ELSEWHERE), same, OTHER, "environment:control"),
    # The candidate's end comes before its environment.
    (same, same, both(moved(0, ELSEWHERE), crash("oom")), ("failed", "oom"), "records:candidate"),
    # The earliest step; in one step what is not finite, then a named tensor, then the loss.
    (same, same, both(ulp(0, 2), bit(1, 2, "weights")), FAULTY, "state"),
    (same, same, both(ulp(0, 1), bit(1, 2, "weights")), FAULTY, "loss"),
    (same, same, both(at(1, 3, grad_norm=NAN), ulp(0, 1)), FAULTY, "loss"),
    (same, same, both(at(1, 3, grad_norm=NAN), bit(0, 3, "grads")), ("failed", "nonfinite"),
     "finite"),
    (same, same, both(lambda run: edit(run, 0, steps=run.ranks[0].steps[:-1]),
                      at(1, 1, grad_norm=NAN)), ("failed", "missing_step"), "records:candidate"),
    (same, same, both(at(1, 1, peak_bytes=9999), bit(0, 3, "rng")), FAULTY, "state"),
    (same, same, at(1, 1, peak_bytes=9999), ("failed", "memory_regression"), "peak_memory"),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "control", "candidate", "decided", "by"), DECISIONS)
def test_which_answer_decides(
    reference: Edit, control: Edit, candidate: Edit, decided: tuple[str, str], by: str
) -> None:
    """In the order of the design; all failures are named in the message."""
    edits = (reference, control, candidate)
    verdict = judge(LAB.case(), *(edit(run) for edit, run in zip(edits, LEGS, strict=True)))
    assert (said(verdict), verdict.check) == (decided, by), verdict.message
    for result in verdict.checks:
        is_other = verdict.outcome == result.outcome == "failed" and result.check != by
        assert (f"{result.check}" in verdict.message.partition("also failed")[2]) == is_other
    assert by.partition(":")[2] in verdict.message


def test_an_incomplete_run_is_compared_with_nothing() -> None:
    """Checks over what is left of it are not run, rather than passed; contradictions are told."""
    short = edit(REFERENCE, 1, steps=REFERENCE.ranks[1].steps[:-1])
    for runs in ((short, CONTROL, CANDIDATE), (REFERENCE, CONTROL, crash("oom")(CANDIDATE))):
        found = answers(judge(LAB.case(), *runs))
        assert {found[name].outcome for name in LAB.case().checks} == {"skipped"}
    error = records.error(type="ValueError")
    verdict = judge(LAB.case(), REFERENCE, CONTROL, edit(CANDIDATE, 0, error=error))
    assert said(verdict) == ("failed", "record_after_end")
    assert "incomplete" not in verdict.message


@pytest.mark.parametrize(
    "checks", [{}, {"los": {}}, {"loss": {}, "peak_memory": {}}, {"loss": {"rtol": 1}}]
)
def test_nothing_passes_unasked(checks: Any) -> None:
    """No checks, an unknown one, or one without a limit give no verdict."""
    assert judge(LAB.case(checks=checks), *LEGS).outcome == "error"
    skipped = judge(LAB.case(checks=checks, skip_reason="needs 8 GPUs"), *LEGS)
    assert (skipped.outcome, skipped.message) == ("skipped", "needs 8 GPUs")


def test_state_and_finite_run_without_being_asked() -> None:
    """A digest that differs fails a case that asks for the loss alone; so do equal NaNs."""
    case = LAB.case(checks={"loss": {}})
    verdict = judge(case, REFERENCE, CONTROL, bit(1, 2, "weights")(CANDIDATE))
    assert (said(verdict), verdict.check) == (FAULTY, "state")
    bad = [edit(run, 0, 1, nonfinite={"grads": ("head.weight",)}) for run in LEGS]
    assert said(judge(case, *bad)) == ("failed", "nonfinite")


def test_a_check_that_did_not_run_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its reason, whole runs have no verdict without its answer."""
    for outcome in ("skipped", "error", "incomparable"):
        answer = CheckResult(check="loss", outcome=outcome, what="not_run", message="")
        found = Check(run=lambda *_, answer=answer: answer, doc="")
        monkeypatch.setitem(CHECKS, "loss", found)
        expected = "incomparable" if outcome == "incomparable" else "error"
        assert judge(LAB.case(), *LEGS).outcome == expected


CASE = LAB.case()
WIDE = lab.Lab(world_size=3).run(replace(LAB.spec(replica=1), world_size=3))


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        (replace(CASE, control=CASE.reference), (REFERENCE, REFERENCE, CANDIDATE)),
        (replace(CASE, candidate=CASE.reference), (REFERENCE, CONTROL, REFERENCE)),
        (CASE, (REFERENCE, CONTROL, CONTROL)), (CASE, (CANDIDATE, CONTROL, CANDIDATE)),
        (replace(CASE, control=CASE.candidate), (REFERENCE, CANDIDATE, CANDIDATE)),
        (replace(CASE, control=WIDE.spec), (REFERENCE, WIDE, CANDIDATE)),
        *((replace(CASE, candidate=other.spec), (REFERENCE, CONTROL, other)) for other in (
            size.legs()[2] for size in (lab.Lab(world_size=3), lab.Lab(5), lab.Lab(microbatches=1))
        )),
    ],
)  # fmt: skip
def test_vacuous_plans_are_refused(case: Any, runs: tuple[RunResult, ...]) -> None:
    """A run against itself, stray records, a control or candidate of another size prove nothing."""
    verdict = judge(case, *runs)
    assert (verdict.outcome, verdict.check) == ("error", "plan")


@pytest.mark.parametrize(
    ("change", "is_compared"),
    [
        ({"engine": "fsdp2"}, False), ({"parallel": {"dp": 1, "tp": 2}}, False),
        ({"fsdp": {"strategy": "no_shard"}}, False), ({"fsdp": {"strategy": "optim"}}, True),
        ({"parallel": {"dp": 2, "sequence_parallel": False}}, True),
    ],
)  # fmt: skip
def test_state_of_other_parts_is_said_not_to_be_compared(change: Any, is_compared: bool) -> None:
    """Ranks of two engines or layouts hold other parts: the verdict says so as data, and passes."""
    base = {"parallel": {"dp": 2}, "fsdp": {"strategy": "optim_grads_params"}}
    sides = [configured(run, **base) for run in LEGS[:2]]
    candidate = configured(bit(1, 2, "weights")(REFERENCE), **(base | change))
    verdict = lab.verdict_of(*sides, candidate, checks={"loss": {}})
    state = FAULTY if is_compared else ("skipped", "other_parts")
    assert said(answers(verdict)["state"]) == state
    assert verdict.outcome == ("failed" if is_compared else "passed")


def test_the_same_data_in_every_run_fails_the_case() -> None:
    """No comparison sees it: the cause is a field of the verdict."""
    runs = [lab.edit_all(run, digests=lambda step, rank: {"samples": f"{step:064x}"})
            for run in LEGS]  # fmt: skip
    verdict = lab.verdict_of(*runs)
    assert (*said(verdict), verdict.check) == ("failed", "same_data", "samples")


def test_without_a_control_a_difference_is_no_verdict() -> None:
    """Of runs recorded by hand: named and incomparable; a NaN is a failure all the same."""
    reference = LAB.run(replace(CASE.reference, recorded="by-hand"))
    candidate = LAB.run(replace(CASE.candidate, recorded="by-hand-too"))

    def verdict(run: RunResult) -> Verdict:
        return lab.verdict_of(reference, reference, run, checks={"loss": {}})

    assert verdict(candidate).outcome == "passed"
    differs = verdict(ulp(1, 2)(candidate))
    assert (said(differs), place(differs)[:2]) == (("incomparable", "no_control"), (2, 1))
    assert said(verdict(edit(candidate, 1, 2, loss=NAN))) == ("failed", "nonfinite")


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [([], 5), (["skipped"], 5), (["passed"], 0), (["passed", "skipped"], 0),
     (["passed", "error"], 6), (["skipped", "incomparable"], 6), (["passed", "incomparable"], 6),
     (["passed", "error", "failed"], 1)],
)  # fmt: skip
def test_exit_codes(outcomes: list[Any], code: int) -> None:
    """Of a set of verdicts; 0 needs a pass and allows only skips with it."""
    assert exit_code(records.verdict(outcome=outcome) for outcome in outcomes) == code


# --- the registry -----------------------------------------------------------------------------

RATIO = {"max_ratio": 2.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [("lost", {}), ("loss", {"rtol": 1e-5}), ("peak_memory", {}),
     ("peak_memory", {"max_ration": 2.0})],
)  # fmt: skip
def test_what_is_no_option_is_refused(name: str, options: dict[str, Any]) -> None:
    """A limit that says nothing gives no verdict."""
    answer = refusal(name, options)
    assert answer is not None
    assert (answer.check, *said(answer)) == (name, "error", "unsupported")


def test_what_is_registered() -> None:
    """Defaults are legal; `state` and `finite` always run, claims come last, the docs say so."""
    for name, found in CHECKS.items():
        assert found.needs_option or refusal(name, defaults(name)) is None
    assert refusal("peak_memory", RATIO) is None
    always = {name: found.always for name, found in CHECKS.items() if found.always}
    assert always == {"state": "case", "finite": "case", "graphs": "program"}
    assert [name for name, found in CHECKS.items() if found.compares] == ["loss", "state", "taps"]
    assert [name for name, found in CHECKS.items() if found.is_exact] == ["state", "taps"]
    assert [*CHECKS][:3] == ["loss", "state", "taps"]
    assert [*CHECKS][-1] == "soak"
    assert "\n".join(table()) in GUIDE.read_text()


# --- environments -----------------------------------------------------------------------------

HERE = {"torch": "2.12", "threads": 1, "cuda": "12", "environment": {"A": "1"}, "packages": {}}
NCCL = {"environment": {"A": "1", "NCCL_ALGO": "Ring"}}
CUBLAS = {"environment": {"A": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}
OMP = {"threads": 2, "environment": {"A": "1", "OMP_NUM_THREADS": "2"}}


@pytest.mark.parametrize(
    ("theirs", "leaf"),
    [
        (HERE | {"torch": "2.13"}, "torch"), (HERE | {"gpu": None}, "gpu"),
        ({k: v for k, v in HERE.items() if k != "torch"}, "torch"),
        (HERE | {"threads": 1.0}, "threads"), (HERE | {"threads": True}, "threads"),
        (dict(reversed(HERE.items())), ""), (HERE | {"code": "x" * 500}, "code"),
        (HERE | {"environment": {"A": "1", "C": "3"}}, "environment.C"),
        (HERE | {"environment": {}}, "environment.A"), ({}, "cuda"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_any_key_of_any_rank_makes_it_incomparable(theirs: Any, leaf: str, rank: int) -> None:
    """Another value or type, a lost or new key, nested ones by name; nothing outside of them."""
    reference, candidate = moved(rank, HERE)(REFERENCE), moved(rank, theirs)(CANDIDATE)
    candidate = edit(candidate, rank, start={"environment": {"host": "b", "pid": 7}})
    answer = alike(reference, candidate, "candidate")
    assert answer.check == "environment:candidate"
    assert said(answer) == (OTHER if leaf else ("passed", ""))
    if leaf:
        name = leaf if leaf.startswith("environment.") else f"environment.{leaf}"
        assert place(answer)[1:3] == (rank, name)
        assert f"rank {rank} differs in " in answer.message
        assert len(answer.message) < 400


def program(run: RunResult, **about: Any) -> RunResult:
    """The run as one of a program that the harness did not write."""
    spec = ProgramSpec(kind="script", target="/train.py", folder="/", **about)
    return configured(run, program=spec.to_json())


@pytest.mark.parametrize(
    ("leaf", "about", "outcome"),
    [
        (NCCL, {"env": {"NCCL_ALGO": "Ring"}}, "passed"),
        (NCCL, {"env": {"OTHER": "1"}}, "incomparable"),
        (OMP, {"env": {"OMP_NUM_THREADS": "2"}}, "passed"),
        ({"packages": {"x": "2"}}, {"packages": {"x": "2"}}, "passed"),
        ({"torch": "3", "cuda": "13"}, {"packages": {"torch": "3"}}, "passed"),
        ({"torch": "3"}, {"packages": {"x": "2"}}, "incomparable"),
        (CUBLAS, {"determinism": "enforce"}, "passed"), (CUBLAS, {}, "incomparable"),
    ],
)  # fmt: skip
def test_only_what_a_scenario_states_may_differ(leaf: Any, about: Any, outcome: str) -> None:
    """Variables, versions and determinism of the scenario differ by intent; nothing else may."""
    reference = program(moved(1, HERE)(REFERENCE))
    candidate = program(moved(1, HERE | leaf)(REFERENCE), **about)
    assert alike(reference, candidate, "candidate").outcome == outcome


def test_facts_of_the_device_count_though_they_come_late() -> None:
    """What a rank says once it has begun is compared; whether it is deterministic is not."""
    reference = lab.told(REFERENCE, 1, ("environment", {"device": "A", "deterministic": True}))
    for device, outcome in (("A", "passed"), ("B", "incomparable")):
        detail = {"device": device, "deterministic": False}
        other = lab.told(CANDIDATE, 1, ("environment", detail))
        assert alike(reference, other, "candidate").outcome == outcome


# --- programs of others -----------------------------------------------------------------------


def test_runs_without_a_loss_are_compared_by_their_state() -> None:
    """It is no difference between the reference and its control; `loss` has no answer."""
    none: dict[str, Any] = {"loss": None, "microbatch_losses": (), "grad_norm": None}
    runs = [configured(program(lab.edit_all(run, **none)), microbatches=0) for run in LEGS]
    assert lab.verdict_of(*runs, checks={"state": {}}).outcome == "passed"
    asked = lab.verdict_of(*runs, checks={"loss": {}})
    assert (said(asked), answers(asked)["control"].outcome) == (("error", "not_run"), "passed")
    unlike = lab.verdict_of(runs[0], bit(1, 2, "optim")(runs[1]), runs[2], checks={"state": {}})
    assert said(unlike) == NONDETERMINISTIC


@pytest.mark.parametrize(
    ("change", "told"),
    [(bit(0, -1, "rng"), "not seeded"), (bit(0, 1, "grads"), "operator of the backward pass"),
     (both(bit(0, -1, "rng"), bit(0, -1, "weights")), "weights are drawn"),
     (at(0, 1, microbatch_losses=(NAN, NAN)), "operator of the forward pass"),
     *((bit(0, 1, group), "operator of the optimizer") for group in ("weights", "optim")),
     (bit(0, 1, "rng"), "random numbers")],
)  # fmt: skip
def test_why_a_program_does_not_repeat_itself(change: Edit, told: str) -> None:
    """The likely cause follows from what differs first; no verdict on the candidate."""
    for about, remedy in (({}, "set determinism: enforce"),
                          ({"determinism": "enforce"}, "enforced already")):  # fmt: skip
        runs = [program(run, **about) for run in (REFERENCE, change(REFERENCE), CANDIDATE)]
        spec = replace(runs[1].spec, replica=1)
        runs[1] = edit(replace(runs[1], spec=spec), key=spec.key)
        verdict = lab.verdict_of(*runs, checks={"state": {}, "loss": {}})
        assert said(verdict) == NONDETERMINISTIC
        assert told in verdict.message
        assert remedy in verdict.message


def test_a_finding_on_graphs_fails_without_being_asked() -> None:
    """A gradient in a graph's static memory fails a program whose bits are equal."""
    runs = [program(run) for run in LEGS]
    found = lab.told(runs[2], 0, ("static_gradient", {"parameter": "w"}))
    verdict = lab.verdict_of(*runs[:2], found, checks={"state": {}})
    assert (said(verdict), place(verdict)[0]) == (("failed", "static_buffer"), 2)


def test_digits_tell_neighbours_from_each_other() -> None:
    """Of both widths; what is no number is a word."""
    for bits, text in (
        ("3dcccccd", "0.100000001"), ("3fb9999999999999", "0.099999999999999992"),
        ("3fb999999999999a", "0.10000000000000001"), ("ff800000", "-inf"), ("7fc00000", "nan"),
        ("80000000", "-0"),
    ):  # fmt: skip
        assert show_float(FloatBits.from_hex(bits)).split() == [text, f"(0x{bits})"]
