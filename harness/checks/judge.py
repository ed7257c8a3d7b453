"""One verdict for one case: which of its answers decides, and in which words.

    records of each run -> runs alike -> environment -> control -> requested checks -> decision

Order of the decision: a reference or control that is not whole (error); a reference that differs
from its own control (incomparable); a candidate that is not whole (failed); runs of different
environments (incomparable); then the requested checks, a failure before a missing answer. Every
answer is kept in the verdict, whichever decided. Within a tolerance the check `loss` asks it, and
digests are informative; recorded runs without a control differ with no verdict (incomparable).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.checks import speed
from harness.checks.bits import OTHER_PARTS, informative, loss, same_data, state
from harness.checks.complete import (
    NO_BLAME,
    Flaw,
    failure_of_machine,
    find_flaw,
    first_step,
    steps_due,
)
from harness.checks.evidence import (
    BEFORE,
    CHECKS,
    DETERMINISTIC,
    ENVIRONMENT,
    Options,
    Runs,
    alike,
    error,
    failed,
    incomparable,
    not_run,
    passed,
    refusal,
    when,
)
from harness.checks.memory import missed_turns
from harness.checks.taps import taps
from harness.program.spec import program_of
from harness.records import (
    CaseSpec,
    CheckResult,
    Confirmation,
    Difference,
    ExitCode,
    RunResult,
    Verdict,
    What,
)
from harness.repeats import confirming_runs
from harness.store import LEGS
from harness.store.streams import aligned
from harness.values import LossGap, tolerance_of

NO_CONTROL: What = "no_control"
GATES = (
    "plan", "records:reference", "records:control", "environment:control", "control",
    "records:candidate", "environment:candidate",
)  # fmt: skip
"""Answers that come before those of the requested checks, in the order in which they decide."""
Flaws = Mapping[str, Flaw | None]  # by name of the run in the case


def judge(
    case: CaseSpec, reference: RunResult, control: RunResult, candidate: RunResult, *,
    samples: Sequence[RunResult] = (), repeats: Sequence[RunResult] = (),
) -> Verdict:  # fmt: skip
    """Judge one case from the records of its three runs; `control` is the reference's second run.

    It is `passed` only if all runs are whole, the reference equals its control, if there is one,
    and every requested check, at least one, ran and said yes; `state` and `finite` always are.

    Args:
        samples, repeats: runs that round at random, and timed ones (`harness.repeats`).
    """
    if case.skip_reason:
        decided = replace(not_run("case", ""), what="unsupported", message=case.skip_reason)
        results = [decided]
    else:
        sides = dict(zip(LEGS, aligned(reference, control, candidate), strict=True))
        results = _answers(Runs(case=case, samples=samples, repeats=repeats, **sides))
        decided = _decide(case, results)
    bad = [result.check for result in results if result.outcome == "failed"]
    others = [name for name in bad if name != decided.check and decided.outcome == "failed"]
    also = f" (also failed: {', '.join(others)})" if others else ""
    return Verdict(
        case_id=case.id, outcome=decided.outcome, what=decided.what,
        message=decided.message + also, checks=tuple(results),
        runs={leg: getattr(case, leg).key for leg in LEGS},
        difference=decided.difference, check=decided.check, ending=decided.ending,
    )  # fmt: skip


def exit_code(verdicts: Iterable[Verdict]) -> ExitCode:
    """Exit code of a set of verdicts; a failure outranks a missing verdict."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "failed" in outcomes:
        return ExitCode.FAILED
    if outcomes & {"error", "incomparable"}:
        return ExitCode.NO_VERDICT
    return ExitCode.PASSED if "passed" in outcomes else ExitCode.NOTHING_RAN


def _answers(runs: Runs) -> list[CheckResult]:
    case, reference, candidate = runs.case, runs.reference, runs.candidate
    flaws = {leg: find_flaw(run) for leg, run in runs.legs.items()}
    whole = {leg: run for leg, run in runs.legs.items() if not flaws[leg]}
    found: list[CheckResult | None] = [_plan_flaw(runs)]
    found += [_records_answer(leg, run, flaws[leg]) for leg, run in runs.legs.items()]
    found += [alike(reference, getattr(runs, leg), leg) for leg in LEGS[1:]]
    found.append(_control_answer(runs, flaws))
    found.append(missed_turns(candidate) if "candidate" in whole else None)
    found.append(next(filter(None, (same_data(r, leg) for leg, r in whole.items())), None))
    found.append(speed.same_bits(runs) if case.repeats else None)
    results = [result for result in found if result is not None]
    always = ("case",) if candidate.spec.is_builtin else ("case", "program")
    checks: dict[str, Options] = dict(case.checks)
    for name, check in CHECKS.items() if checks else ():
        if check.always in always:
            checks.setdefault(name, {})
    # Not in the order given: a case read back from its file must be answered in the same words.
    for name in sorted(checks, key=lambda name: (*CHECKS, name).index(name)):
        answer = _requested(runs, name, checks[name], flaws)
        bad = [other.check for other in results if other.outcome != "passed"]
        if bad and name in CHECKS and CHECKS[name].is_claim and answer.outcome == "passed":
            answer = not_run(name, f"{bad[0]} did not pass: there is no bound to state")
        results.append(answer)
    return results


def _requested(runs: Runs, name: str, options: Options, flaws: Flaws) -> CheckResult:
    if (refused := refusal(name, options)) is not None:
        return refused
    check = CHECKS[name]
    result = check.run(runs, options)
    if check.is_exact and tolerance_of(runs.case.expect) is not None:
        result = informative(result)
    incomplete = [leg for leg in ("reference", "candidate") if flaws[leg] is not None]
    # Over part of a run a difference is worth knowing, but its absence proves nothing.
    if incomplete and result.outcome != "failed" and result.what != OTHER_PARTS:
        return not_run(name, f"the records of the {incomplete[0]} are incomplete")
    return result


def _plan_flaw(runs: Runs) -> CheckResult | None:
    """An error if the runs cannot prove anything, whatever their records say."""
    case = runs.case
    ref, control, candidate = case.reference, case.control, case.candidate
    for leg, run in runs.legs.items():
        if run.spec.key != (key := getattr(case, leg).key):
            message = f"the records of the {leg} belong to run {run.spec.key}, expected {key}"
            return error("plan", "corrupt_record", message)
    for second in ("candidate",) if ref.recorded else ("control", "candidate"):
        if ref.key == getattr(case, second).key:
            message = f"the {second} is the reference itself: nothing was compared"
            return error("plan", "not_run", message)
    # Who recorded a run by hand says what is its control: commands differ in folders of logs.
    same = ref.config == control.config or bool(ref.recorded and control.recorded)
    if not same or (ref.device, ref.world_size) != (control.device, control.world_size):
        return error("plan", "not_run", "the control is not a second run of the reference")
    sizes = [
        {"ranks": spec.world_size} | {k: spec.config.get(k) for k in ("steps", "microbatches")}
        for spec in (ref, candidate)
    ]
    for name, left in sizes[0].items():
        if left != (right := sizes[1][name]):
            message = f"the reference has {left} {name}, the candidate {right}: "
            return error("plan", "unsupported", message + "they cannot be compared one by one")
    tolerance, steps = tolerance_of(case.expect), ref.config.get("steps")
    if isinstance(tolerance, LossGap) and isinstance(steps, int) and steps < tolerance.over:
        message = f"the runs have {steps} steps, the tolerance is over {tolerance.over}"
        return error("plan", "unsupported", message)
    return None


def _records_answer(leg: str, run: RunResult, flaw: Flaw | None) -> CheckResult:
    name, failure = f"records:{leg}", failure_of_machine(run, flaw) if flaw else ""
    if flaw is None:
        steps = steps_due(run) - first_step(run)
        message = f"the {leg} recorded all {steps} steps on all {run.spec.world_size} ranks"
        result = passed(name, message)
    elif leg != "candidate" or failure or flaw.what in NO_BLAME:
        blame = f"the machine failed ({failure}): " if failure else ""
        result = error(name, flaw.what, f"{blame}{flaw.message}; the {leg} is not whole")
    else:
        place = flaw.difference
        if place is None and flaw.rank is not None and flaw.step is not None:
            place = Difference(step=flaw.step, rank=flaw.rank, quantity="records")
        result = failed(name, flaw.what, f"{flaw.message}; the {leg} is not whole", place)
    return replace(result, ending=run.outcome.ending)


def _control_answer(runs: Runs, flaws: Flaws) -> CheckResult:
    reference, control = runs.reference, runs.control
    if bad := [leg for leg in LEGS[: 1 + runs.case.has_control] if flaws[leg] is not None]:
        return not_run("control", f"the records of the {bad[0]} are incomplete")
    if not runs.case.has_control:
        why = "there is no control: whether the reference repeats itself is not known"
        return replace(not_run("control", why), what=NO_CONTROL)
    if not (unlike := unequal(reference, control)):
        return passed("control", "the reference equals its second run bit for bit")
    first = min(unlike, key=_step)
    message = "the reference differs from its own second run, so the candidate is not judged: "
    message += first.message
    if not reference.spec.is_builtin and first.difference is not None:
        message += f"; {cause_of(reference, first.difference)}"
    what: What = "nondeterministic_reference"
    return incomparable("control", what, message, first.difference, **first.figures)


def unequal(run: RunResult, repeat: RunResult) -> list[CheckResult]:
    """Every check of bits that does not find two runs equal: losses, state, and taps if any.

    Runs without any loss have their state to compare.
    """
    answers = [loss(run, repeat), state(run, repeat)]
    if any(records.start and records.start.taps for records in run.ranks):
        answers.append(taps(run, repeat))
    has_none = ("loss", "not_run")
    return [a for a in answers if a.outcome != "passed" and (a.check, a.what) != has_none]


def _decide(case: CaseSpec, results: Sequence[CheckResult]) -> CheckResult:
    by_name = {result.check: result for result in results}
    is_controlled = by_name["control"].what != NO_CONTROL
    for name in GATES if is_controlled else (gate for gate in GATES if gate != "control"):
        if name in by_name and by_name[name].outcome != "passed":
            return by_name[name]
    requested = [result for result in results if result.check not in GATES]
    if (bad := first_failure(requested)) is not None:
        if is_controlled or bad.what != "diverged":
            return bad
        # The reference may be what does not repeat itself.
        message = f"{bad.message}; it is not known whether the reference repeats itself: record it "
        message += "twice and give the second run as --control"
        return replace(bad, outcome="incomparable", what=NO_CONTROL, message=message)
    requested = [result for result in requested if result.what != OTHER_PARTS]
    if (missing := next((r for r in requested if r.outcome != "passed"), None)) is not None:
        message = f"{missing.check} gave no answer: {missing.message}"
        is_open = missing.outcome == "incomparable"
        return missing if is_open else error("case", missing.what, message)
    if not requested:
        return error("case", "not_run", "no check was requested: nothing was compared")
    names = ", ".join(result.check for result in requested)
    proven = [r.message for r in requested if r.check in CHECKS and CHECKS[r.check].is_claim]
    if case.expect != "bitwise" and "loss" in by_name:
        proven.append(by_name["loss"].message)
    says = "; ".join([f"every check said yes ({names})", by_name["control"].message, *proven])
    return passed("case", says)


def first_failure(results: Iterable[CheckResult]) -> CheckResult | None:
    """The failure of the earliest step, within a step the one that explains most; else None.

    What went through a module was computed before the gradients and weights of its step.
    """
    order = ("static_buffer", "nonfinite", "taps", "state", "loss")

    def explains(result: CheckResult) -> tuple[bool, int, int]:
        name = result.what if result.what in order else result.check
        return (False, _step(result), order.index(name)) if name in order else (True, 0, 0)

    return min((r for r in results if r.outcome == "failed"), key=explains, default=None)


def _step(result: CheckResult) -> int:
    return result.difference.step if result.difference is not None else 0


# --- why a program does not repeat itself -----------------------------------------------------

_BEFORE = "random generators are not seeded"
_BEFORE_WEIGHTS = "weights are drawn from an unseeded generator, or loaded from elsewhere"
_DATA = "the program read other data: unseeded shuffling, or workers in another order"
_DRAWN = "random numbers are drawn by the clock, by threads or by library code"
_OF_OPERATORS: dict[str, tuple[str, ...]] = {  # by what differs first
    "the program read other data, or an operator of the forward pass varies": (
        "loss", "microbatch_losses", "taps.output", "evaluation"),
    "an operator of the backward pass is not deterministic, or a collective adds its parts in "
    "another order (NCCL_ALGO)": ("grad_norm", "taps.gradient", "grads", "losses", "buffers"),
    "an operator of the optimizer is not deterministic": ("weights", "optim"),
}  # fmt: skip


def cause_of(reference: RunResult, first: Difference) -> str:
    """The likely cause of the first difference between a program's own two runs, and a remedy."""
    quantity, program = first.quantity.partition("[")[0], program_of(reference.spec.config)
    cause = next((text for text, shown_by in _OF_OPERATORS.items() if quantity in shown_by), "")
    if first.step == BEFORE:
        cause = _BEFORE_WEIGHTS if quantity in ("weights", "buffers") else _BEFORE
    cause = cause or (_DATA if quantity in ("samples", "taps.input") else _DRAWN)
    said = [detail for records in reference.ranks for detail in records.said(ENVIRONMENT)]
    is_asked = any(detail.get(DETERMINISTIC) is True for detail in said)
    remedy = "set determinism: enforce, which seeds the generators and asks for such operators"
    if program is not None and program.determinism == "enforce":
        remedy = "determinism is enforced already: look for generators of the program's own, "
        remedy += "worker processes, and what depends on time"
    elif cause in _OF_OPERATORS and is_asked:
        remedy = "torch is asked for deterministic operators already: look for kernels of others"
    return f"likely cause: {cause}; {remedy}"


# --- does a difference come again? Evidence for a failed verdict, which stays failed -------------

# failed for bits -> reference and candidate are run once more -> their repeats are judged
#     the same first difference, in place and bits   came_again           a defect
#     another first difference                       differs_otherwise
#     none                                           did_not_come_again   rare nondeterminism
#     a repeat that is not whole, or elsewhere       not_made
BITS = ("loss", "state", "taps")
_GATES = (
    "records:reference", "records:candidate", "environment:control", "environment:candidate",
)  # fmt: skip


def is_confirmation_due(case: CaseSpec, verdict: Verdict) -> bool:
    """Whether bits of two whole runs differ, by their verdict, and the case wants it confirmed."""
    if not case.confirm or verdict.outcome != "failed" or _first(verdict) is None:
        return False
    # A candidate that did not end differs, too, but its end is what is to be explained.
    return not verdict.check.startswith("records:")


def is_unconfirmed(case: CaseSpec, verdict: Verdict) -> bool:
    """Whether a confirmation is due that was not made, for whatever reason."""
    made = verdict.confirmation is not None and verdict.confirmation.outcome != "not_made"
    return is_confirmation_due(case, verdict) and not made


def unconfirmed(case: CaseSpec) -> Confirmation:
    """What the verdict holds until the repeats have ended."""
    keys = {side: spec.key for side, spec in confirming_runs(case).items()}
    return Confirmation(outcome="not_made", runs=keys)


def confirmation_of(
    case: CaseSpec, verdict: Verdict, first: tuple[RunResult, RunResult],
    again: tuple[RunResult, RunResult],
) -> Confirmation:  # fmt: skip
    """Judge the repeats `again` of the runs `first`, reference and candidate, of a case that failed
    by its verdict, for which `is_confirmation_due` holds."""
    checks = {name: options for name, options in case.checks.items() if name in BITS}
    question = replace(
        case, reference=again[0].spec, control=first[0].spec, candidate=again[1].spec,
        checks=checks or {"state": {}}, repeats=0, confirm=False,
    )  # fmt: skip
    found = judge(question, again[0], first[0], again[1])
    by_name = {result.check: result for result in found.checks}
    for name in _GATES:
        if by_name[name].outcome != "passed":
            return replace(unconfirmed(case), what=by_name[name].what)
    before, now = _first(verdict), _first(found)
    place = None if now is None else now.difference
    same = before is not None and place is not None and place == before.difference
    return replace(
        unconfirmed(case), difference=place,
        outcome="did_not_come_again" if now is None else "came_again" if same
        else "differs_otherwise",
        reference_repeats=by_name["control"].outcome == "passed",
        candidate_repeats=not unequal(*aligned(first[1], again[1])),
    )  # fmt: skip


def confirmation_words(found: Confirmation) -> str:
    """A confirmation in one line, for people."""
    if found.outcome == "not_made":
        why = f"a repeat cannot be compared, {found.what}" if found.what else "it was not made yet"
        return f"not confirmed: {why}"
    repeats = {"reference": found.reference_repeats, "candidate": found.candidate_repeats}
    unlike = " and ".join(side for side, same in repeats.items() if not same)
    if found.outcome == "came_again":
        more = f", other bits of {unlike} did not" if unlike else ", as did every bit of both"
        return f"confirmed: the same difference came again in a second pair of runs{more}"
    where = "no bit differs"
    if (at := found.difference) is not None:
        where = f"{at.tensor or at.quantity} differs first {when(at.step)} on rank {at.rank}, with "
        where += f"{at.reference} and {at.candidate}"
    return f"not confirmed: in a second pair of runs {where}; not deterministic: {unlike}"


def _first(verdict: Verdict) -> CheckResult | None:
    return first_failure(result for result in verdict.checks if result.check in BITS)
