"""Which answer decides a case; the registry of checks; environments."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks import CHECKS, Check, check, defaults, exit_code, judge, refusal, table
from harness.checks.evidence import alike, count, rank_table, show_float, state_table
from harness.cli import main
from harness.records import (
    OUTCOMES,
    CheckResult,
    ErrorRecord,
    ExitCode,
    FloatBits,
    RunResult,
    Verdict,
)
from tests.unit.harness.checks.conftest import (
    CANDIDATE,
    CONTROL,
    LAB,
    NAN,
    REFERENCE,
    Lab,
    answers,
    configured,
    edit_outcome,
    edit_rank,
    edit_step,
    flip,
    place,
    said,
    verdict_of,
)

LEGS = (REFERENCE, CONTROL, CANDIDATE)
README = Path(__file__).resolve().parents[4] / "scenarios" / "README.md"
Edit = Callable[[RunResult], RunResult]


def crash(what: Any, **more: Any) -> Edit:
    return lambda run: edit_outcome(run, what=what, message="rank 1", culprit_rank=1, **more)


def ulp(rank: int, step: int) -> Edit:
    def edit(run: RunResult) -> RunResult:
        loss = run.ranks[rank].steps[step].loss
        assert loss is not None
        return edit_step(run, rank, step, loss=FloatBits.from_bits(int(loss.bits, 16) ^ 1))

    return edit


def moved(rank: int, environment: dict[str, Any]) -> Edit:
    """The rank ran in another environment."""
    return lambda run: edit_rank(run, rank, start={"environment": environment})


def bit(rank: int, step: int, group: str) -> Edit:
    return lambda run: flip(run, rank, step, group)


def same(run: RunResult) -> RunResult:
    return run


ELSEWHERE = {"torch": "2.13"}


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 1), (4, 2, 2), (3, 16, 3)])
def test_identical_runs_pass(size: tuple[int, int, int]) -> None:
    """Whole and equal runs pass, with every answer kept and the run keys named."""
    lab = Lab(*size)
    verdict = judge(lab.case(), *lab.legs(), wall_s=2.5)
    assert (verdict.outcome, verdict.what, verdict.wall_s) == ("passed", "", 2.5)
    assert {result.outcome for result in verdict.checks} == {"passed"}
    assert set(lab.case().checks) <= set(answers(verdict))
    assert verdict.runs["control"] == lab.case().control.key


NONDETERMINISTIC = ("incomparable", "nondeterministic_reference")
DECISIONS: dict[str, tuple[tuple[Edit, Edit, Edit], tuple[str, str], str]] = {
    # how reference, control and candidate are edited; outcome and kind; the check that decides
    **{
        f"candidate {what}": ((same, same, crash(what)), ("failed", what), "records:candidate")
        for what in ("hang", "oom", "illegal_access", "crashed", "killed")
    },
    **{
        f"candidate {what}": ((same, same, crash(what)), ("error", what), "records:candidate")
        for what in ("interrupted", "not_run", "unsupported", "shared_gpu")
    },
    # Others' ends are never the candidate's fault, whatever became of it.
    "reference": ((crash("hang"), same, crash("oom")), ("error", "hang"), "records:reference"),
    "control": ((same, crash("hang"), ulp(0, 1)), ("error", "hang"), "records:control"),
    "undecided": ((same, same, crash("", undecided=True)), ("error", "shared_gpu"),
                  "records:candidate"),
    "undecided crash": ((same, crash("oom", undecided=True), same), ("error", "shared_gpu"),
                        "records:control"),
    # A reference that differs from its control is named before the candidate's end.
    "control's loss": ((same, ulp(1, 2), crash("hang")), NONDETERMINISTIC, "control"),
    "control's state": ((same, bit(1, 2, "optim"), same), NONDETERMINISTIC, "control"),
    "candidate's environment": ((same, same, lambda run: moved(0, ELSEWHERE)(ulp(0, 1)(run))),
                                ("incomparable", "different_environment"), "environment:candidate"),
    "control's environment": ((same, moved(1, ELSEWHERE), same),
                              ("incomparable", "different_environment"), "environment:control"),
    "end before environment": ((same, same, lambda run: moved(0, ELSEWHERE)(crash("oom")(run))),
                               ("failed", "oom"), "records:candidate"),
    "a named tensor before the loss": (
        (same, same, lambda run: ulp(0, 2)(bit(1, 2, "weights")(run))), ("failed", "diverged"),
        "state"),
    "an earlier loss before a tensor": (
        (same, same, lambda run: ulp(0, 1)(bit(1, 2, "weights")(run))), ("failed", "diverged"),
        "loss"),
    "not finite before all": (
        (same, same, lambda run: edit_step(ulp(0, 1)(run), 1, 3, grad_norm=NAN)),
        ("failed", "nonfinite"), "finite"),
    "missing step before all": (
        (same, same, lambda run: edit_rank(edit_step(run, 1, 1, grad_norm=NAN), 0,
                                           steps=run.ranks[0].steps[:-1])),
        ("failed", "missing_step"), "records:candidate"),
    "memory last": (
        (same, same, lambda run: edit_step(bit(0, 3, "rng")(run), 1, 1, peak_bytes=9999)),
        ("failed", "diverged"), "state"),
    "memory": ((same, same, lambda run: edit_step(run, 1, 1, peak_bytes=9999)),
               ("failed", "memory_regression"), "peak_memory"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_which_answer_decides(name: str) -> None:
    """In the order of the design; all failures are named in the message."""
    edits, decided, by = DECISIONS[name]
    verdict = judge(LAB.case(), *(edit(run) for edit, run in zip(edits, LEGS, strict=True)))
    assert (said(verdict), verdict.check) == (decided, by), verdict.message
    for result in verdict.checks:
        is_other = verdict.outcome == result.outcome == "failed" and result.check != by
        assert (f"{result.check}" in verdict.message.partition("also failed")[2]) == is_other
    if by.startswith("records:"):
        assert by.removeprefix("records:") in verdict.message


def test_an_incomplete_run_is_compared_with_nothing() -> None:
    """Checks over what is left of it are not run, rather than passed; contradictions are told."""
    short = edit_rank(REFERENCE, 1, steps=REFERENCE.ranks[1].steps[:-1])
    for runs in ((short, CONTROL, CANDIDATE), (REFERENCE, CONTROL, crash("oom")(CANDIDATE))):
        found = answers(judge(LAB.case(), *runs))
        assert {found[name].outcome for name in LAB.case().checks} == {"skipped"}
    error = ErrorRecord(rank=0, step=1, message="", traceback="", what="crashed", type="ValueError")
    verdict = judge(LAB.case(), REFERENCE, CONTROL, edit_rank(CANDIDATE, 0, error=error))
    assert said(verdict) == ("failed", "record_after_end")
    assert "incomplete" not in verdict.message


def with_case(**changes: Any) -> Verdict:
    return judge(LAB.case(**changes), *LEGS)


@pytest.mark.parametrize(
    "checks", [{}, {"los": {}}, {"loss": {}, "peak_memory": {}}, {"loss": {"rtol": 1}}]
)
def test_nothing_passes_unasked(checks: Any) -> None:
    """No checks, an unknown one, or one without a limit give no verdict."""
    assert with_case(checks=checks).outcome == "error"
    if checks:
        bad = judge(
            LAB.case(checks=checks | {"taps": {}}), REFERENCE, CONTROL, ulp(0, 1)(CANDIDATE)
        )
        assert bad.outcome == ("failed" if "los" not in checks and "rtol" not in str(checks)
                               else "error")  # fmt: skip


def test_state_and_finite_run_without_being_asked() -> None:
    """A digest that differs fails a case that asks for the loss alone; so do equal NaNs."""
    case = LAB.case(checks={"loss": {}})
    verdict = judge(case, REFERENCE, CONTROL, bit(1, 2, "weights")(CANDIDATE))
    assert (said(verdict), verdict.check) == (("failed", "diverged"), "state")
    bad = [edit_step(run, 0, 1, nonfinite={"grads": ("head.weight",)}) for run in LEGS]
    assert said(judge(case, *bad)) == ("failed", "nonfinite")


def test_a_check_that_did_not_run_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its reason, whole runs have no verdict without its answer."""
    for outcome in ("skipped", "error", "incomparable"):
        answer = CheckResult(check="loss", outcome=outcome, what="not_run", message="")
        found = Check(run=lambda *_, answer=answer: answer, doc="")
        monkeypatch.setitem(CHECKS, "loss", found)
        assert with_case().outcome == ("incomparable" if outcome == "incomparable" else "error")


def test_skip_reason_is_passed_on() -> None:
    """A case that was skipped stays skipped, with its reason."""
    verdict = with_case(skip_reason="needs 8 GPUs")
    assert (verdict.outcome, verdict.message) == ("skipped", "needs 8 GPUs")


CASE = LAB.case()
WIDE = Lab(world_size=3).run(replace(LAB.spec(replica=1), world_size=3))


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        (replace(CASE, control=CASE.reference), (REFERENCE, REFERENCE, CANDIDATE)),
        (replace(CASE, candidate=CASE.reference), (REFERENCE, CONTROL, REFERENCE)),
        (CASE, (REFERENCE, CONTROL, CONTROL)), (CASE, (CANDIDATE, CONTROL, CANDIDATE)),
        (replace(CASE, control=CASE.candidate), (REFERENCE, CANDIDATE, CANDIDATE)),
        (replace(CASE, control=WIDE.spec), (REFERENCE, WIDE, CANDIDATE)),
        *((replace(CASE, candidate=other.spec), (REFERENCE, CONTROL, other)) for other in (
            Lab(world_size=3).legs()[2], Lab(steps=5).legs()[2], Lab(microbatches=1).legs()[2],
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
        ({"engine": "fsdp2"}, False),
        ({"parallel": {"dp": 1, "tp": 2}}, False),
        ({"fsdp": {"strategy": "no_shard"}}, False),
        ({"fsdp": {"strategy": "optim"}}, True),
        ({"parallel": {"dp": 2, "sequence_parallel": False}}, True),
    ],
)
def test_state_of_other_parts_is_said_not_to_be_compared(change: Any, is_compared: bool) -> None:
    """Ranks of two engines or layouts hold other parts: the verdict says so as data, and passes."""
    base = {"parallel": {"dp": 2}, "fsdp": {"strategy": "optim_grads_params"}}
    sides = [configured(run, **base) for run in LEGS[:2]]
    candidate = configured(bit(1, 2, "weights")(REFERENCE), **(base | change))
    verdict = verdict_of(*sides, candidate, checks={"loss": {}})
    state = ("failed", "diverged") if is_compared else ("skipped", "other_parts")
    assert said(answers(verdict)["state"]) == state
    assert verdict.outcome == ("failed" if is_compared else "passed")


# --- exit codes -------------------------------------------------------------------------------


def of(outcome: Any) -> Verdict:
    return Verdict(case_id="c", outcome=outcome, what="", message="", checks=(), runs={}, wall_s=0)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [([], 5), (["skipped"], 5), (["passed"], 0), (["passed", "skipped"], 0),
     (["passed", "error"], 6), (["skipped", "incomparable"], 6),
     (["passed", "error", "failed"], 1)],
)  # fmt: skip
def test_exit_codes(outcomes: list[str], code: int) -> None:
    """The exit code of a set of verdicts is as the design's table says."""
    assert exit_code(map(of, outcomes)) == code


@given(st.lists(st.sampled_from(OUTCOMES)))
def test_zero_only_if_something_passed_and_nothing_else_went_wrong(outcomes: list[str]) -> None:
    """Exit code 0 needs a pass and allows only skips with it."""
    good = "passed" in outcomes and set(outcomes) <= {"passed", "skipped"}
    assert (exit_code(map(of, outcomes)) == 0) == good


# --- the registry -----------------------------------------------------------------------------

RATIO = {"max_ratio": 2.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lost", {}), ("loss", {"rtol": 1e-5}), ("state", {"groups": ["grads"]}),
        ("taps", {"max": 1}), ("finite", {"": 1}), ("peak_memory", {}),
        ("peak_memory", {"max_ration": 2.0}), ("peak_memory", RATIO | {"max_bytes": None}),
        ("peak_memory", {"max_unexplained": 0.1}), ("throughput", {"slow": 1}),
        ("throughput", {"repeats": 5}), ("throughput", {"repeats": 51}),
        ("soak", {"limit": 1}), ("graphs", {"min_replays": 0.5}),
        *(("peak_memory", {"max_ratio": wrong}) for wrong in (True, "2", 0, -1.0, math.inf)),
        *(("throughput", {"max_slowdown": wrong}) for wrong in (0, True, math.nan, "5%")),
        *(("throughput", {"skip_steps": wrong}) for wrong in (-1, 1.5, True)),
        *(("soak", {"max_leak_bytes": wrong}) for wrong in (-1, True)),
    ],
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
    assert {"state": "case", "finite": "case", "graphs": "program"}.items() <= {
        name: found.always for name, found in CHECKS.items()
    }.items()
    assert [*CHECKS][:3] == ["loss", "state", "taps"]
    for name in ("loss", "state", "taps", "finite"):
        assert CHECKS[name].compares == (name != "finite")
        assert CHECKS[name].is_exact == (name in ("state", "taps"))
    assert [*CHECKS][-1] == "soak"
    assert "\n".join(table()) in README.read_text()


def test_a_check_enters_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function under `check` is in the table, may be asked for, and decides."""
    for name, found in [*CHECKS.items()]:
        monkeypatch.setitem(CHECKS, name, found)

    @check("always_no", "says no")
    def no(runs: Any, options: Any) -> CheckResult:
        del runs, options
        return CheckResult(check="always_no", outcome="failed", what="diverged", message="no")

    assert "| `always_no` | | | says no |" in table()
    assert said(with_case(checks={"state": {}, "always_no": {}})) == ("failed", "diverged")
    del CHECKS["always_no"]


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`harness list --checks` needs no scenario."""
    assert main(["list", "--checks"]) == ExitCode.PASSED
    assert capsys.readouterr().out.splitlines() == list(table())


# --- environments, tables, words --------------------------------------------------------------

HERE = {"torch": "2.12", "threads": 1}
FULL = {"processor": "Xeon 1f2e", "driver": "580.1.0", "code": "abcd", "environment": {"A": "1"}}


@pytest.mark.parametrize(
    ("ours", "theirs", "leaf"),
    [
        (HERE, HERE | {"torch": "2.13"}, "torch"), (HERE, {"threads": 1}, "torch"),
        (HERE, HERE | {"gpu": None}, "gpu"), (HERE, HERE | {"threads": 1.0}, "threads"),
        (HERE, HERE | {"threads": True}, "threads"), (HERE, {"torch": "2.12", "threads": 1}, ""),
        *((FULL, FULL | {name: "other"}, name) for name in ("processor", "driver", "code")),
        (FULL, FULL | {"environment": {"A": "1", "C": "3"}}, "environment.C"),
        (FULL, FULL | {"environment": {}}, "environment.A"),
        ({"flags": {"a": 1, "b": 2}}, {"flags": {"b": 2, "a": 1}}, ""),
        ({"x": "x" * 500}, {"x": "y" * 500}, "x"), ({}, HERE, "threads"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_any_key_of_any_rank_makes_it_incomparable(
    ours: Any, theirs: Any, leaf: str, rank: int
) -> None:
    """Another value or type, a lost or new key, nested ones by name; nothing outside of them."""
    reference = moved(rank, {"fingerprint": ours, "host": "a"})(REFERENCE)
    candidate = moved(rank, {"fingerprint": theirs, "host": "b", "pid": 7})(CANDIDATE)
    answer = alike(reference, candidate, "candidate")
    assert answer.check == "environment:candidate"
    assert said(answer) == (("incomparable", "different_environment") if leaf else ("passed", ""))
    if leaf:
        name = leaf if leaf.startswith("environment.") else f"environment.{leaf}"
        assert place(answer)[1:3] == (rank, name)
        assert f"rank {rank} differs in " in answer.message
        assert len(answer.message) < 400


def test_environments_without_a_mark_or_a_start() -> None:
    """All of it is compared; a rank without a start record is another check's."""
    odd = moved(0, {"fingerprint": "x" * 500})(REFERENCE), moved(0, {"fingerprint": "y"})(CANDIDATE)
    assert alike(*odd, "candidate").outcome == "incomparable"
    headless = edit_rank(CANDIDATE, 0, start=None)
    assert alike(REFERENCE, headless, "candidate").outcome == "passed"


def test_tables_hold_every_rank_and_step() -> None:
    """Of 16 ranks each, in the order of steps and then ranks, the state before step 0 first."""
    run = Lab(world_size=16).legs()[0]
    table = state_table(run)
    assert list(table) == [(step, rank) for step in range(-1, 4) for rank in range(16)]
    assert list(rank_table(replace(run, ranks=run.ranks[::-1]))) == list(range(16))
    for (step, rank), record in table.items():
        held = run.ranks[rank]
        assert record is (held.initial if step < 0 else held.steps[step])


def test_words() -> None:
    """Nouns that end in a hiss take -es; digits tell neighbours apart, what is no number a word."""
    for number, noun, told in ((1, "microbatch", "1 microbatch"), (0, "tensor", "0 tensors"),
                               (2, "microbatch", "2 microbatches")):  # fmt: skip
        assert count(number, noun) == told
    single, double = FloatBits.from_hex("3dcccccd"), FloatBits.from_hex("3fb999999999999a")
    assert show_float(single) == "0.100000001 (0x3dcccccd)"
    assert show_float(double) != show_float(FloatBits.from_hex("3fb999999999999b"))
    bits = ("7f800000", "ff800000", "7fc00000", "fff0000000000000", "80000000")
    shown = [show_float(FloatBits.from_hex(each)).split()[0] for each in bits]
    assert shown == ["inf", "-inf", "nan", "-inf", "-0"]
