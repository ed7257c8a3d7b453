"""One verdict for one case: which of its answers decides, and in which words.

    records of each leg -> legs alike -> environment -> control -> requested checks -> decision

Order of the decision: a reference or control that is not whole (error); a reference that differs
from its own control (incomparable); a candidate that is not whole (failed); legs that ran in
different environments (incomparable); then the requested checks, a failure before a missing answer.
Every answer is kept in the verdict, whichever decided. Within a tolerance the check `loss` asks it,
and digests are informative; recorded runs without a control differ with no verdict (incomparable).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from harness.checks import exact, speed
from harness.checks.complete import (
    NO_BLAME,
    Flaw,
    failure_of_machine,
    find_flaw,
    missed_turns,
    steps_due,
)
from harness.checks.environment import alike, cause_of
from harness.checks.evidence import Options, Runs, error, failed, not_run, passed
from harness.checks.registry import CHECKS, refusal
from harness.checks.soak import withdrawn
from harness.checks.taps import taps
from harness.checks.within import informative
from harness.infrastructure import SHARED_GPU
from harness.records import (
    CaseSpec,
    CheckResult,
    Difference,
    ExitCode,
    Outcome,
    RunResult,
    Verdict,
    What,
)
from harness.store.streams import aligned
from harness.tolerance import LossGap, tolerance_of

NO_CONTROL: What = "no_control"
GATES = (
    "plan", "records:reference", "records:control", "environment:control", "control",
    "records:candidate", "environment:candidate",
)  # fmt: skip
"""Answers that come before those of the requested checks, in the order in which they decide."""
TROUBLES: dict[What, str] = {
    "missing_step": "left incomplete records",
    "missing_rank": "left incomplete records",
    "record_after_end": "left records that contradict themselves",
    "corrupt_record": "left records that cannot be trusted",
    "empty_run": "recorded nothing that can be compared",
    SHARED_GPU: "is not judged",
    "not_replayed": "did not use its graphs as asked",
    "not_compiled": "was not compiled as asked",
}
"""What a run did, by the flaw of its records; of any other flaw, it did not finish."""
Flaws = Mapping[str, Flaw | None]
"""By leg."""


def judge(
    case: CaseSpec,
    reference: RunResult,
    control: RunResult,
    candidate: RunResult,
    *,
    samples: Sequence[RunResult] = (),
    repeats: Sequence[RunResult] = (),
    wall_s: float = 0.0,
) -> Verdict:
    """Judge one case from the records of its three runs.

    Args:
        case: what was planned, the requested checks included.
        reference: the run that is trusted.
        control: the reference, run a second time.
        candidate: the run in question.
        samples: runs of the reference that round at random (`harness.samples`).
        repeats: timed runs, of reference and candidate in turn (`harness.repeats`).
        wall_s: seconds that the case took, kept in the verdict.

    Returns:
        A verdict that is `passed` only if all runs are whole, the reference equals its control, if
        there is one, and every requested check, at least one, ran and said yes; `state` and
        `finite` are requested of every case.
    """
    if case.skip_reason:
        decided = CheckResult(
            check="case", outcome="skipped", what="unsupported", message=case.skip_reason
        )
        results = [decided]
    else:
        ours, again, theirs = aligned(reference, control, candidate)
        runs = Runs(
            case=case, reference=ours, control=again, candidate=theirs, samples=samples,
            repeats=repeats,
        )  # fmt: skip
        results = _answers(runs)
        decided = _decide(case, results)
    others = [
        result.check
        for result in results
        if result.outcome == "failed" and result is not decided and decided.outcome == "failed"
    ]
    also = f" (also failed: {', '.join(others)})" if others else ""
    return Verdict(
        case_id=case.id, outcome=decided.outcome, what=decided.what,
        message=decided.message + also, checks=tuple(results), wall_s=wall_s,
        runs={leg: getattr(case, leg).key for leg in ("reference", "control", "candidate")},
        difference=decided.difference, check=decided.check, ending=decided.ending,
    )  # fmt: skip


def exit_code(verdicts: Iterable[Verdict]) -> ExitCode:
    """Exit code of a set of verdicts; a failure outranks a missing verdict."""
    outcomes: set[Outcome] = {verdict.outcome for verdict in verdicts}
    if "failed" in outcomes:
        return ExitCode.FAILED
    if outcomes & {"error", "incomparable"}:
        return ExitCode.NO_VERDICT
    return ExitCode.PASSED if "passed" in outcomes else ExitCode.NOTHING_RAN


def _answers(runs: Runs) -> list[CheckResult]:
    case, reference, control, candidate = runs.case, runs.reference, runs.control, runs.candidate
    plan = _plan_flaw(runs)
    flaws = {leg: find_flaw(run) for leg, run in runs.legs.items()}
    results = [] if plan is None else [plan]
    results += [
        dataclasses.replace(_records_answer(leg, run, flaws[leg]), ending=run.outcome.ending)
        for leg, run in runs.legs.items()
    ]
    results.append(alike(reference, control, "control"))
    results.append(alike(reference, candidate, "candidate"))
    results.append(_control_answer(runs, flaws))
    if flaws["candidate"] is None and (missed := missed_turns(candidate)) is not None:
        results.append(missed)
    whole = (exact.same_data(run, leg) for leg, run in runs.legs.items() if not flaws[leg])
    results += [same for same in whole if same is not None][:1]
    if case.repeats:
        results.append(speed.same_bits(runs))
    checks: dict[str, Options] = dict(case.checks)
    always = ("case",) if candidate.spec.is_builtin else ("case", "program")
    for name, check in CHECKS.items() if checks else ():
        if check.always in always:
            checks.setdefault(name, {})
    # Not in the order given: a case read back from its file must be answered in the same words.
    for name in sorted(checks, key=lambda name: (*CHECKS, name).index(name)):
        answer = _requested(runs, name, checks[name], flaws)
        # The last of the checks: what it states stands on all the others.
        results.append(withdrawn(answer, results) if name == "soak" else answer)
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
    if incomplete and result.outcome != "failed" and result.what != exact.OTHER_PARTS:
        return not_run(name, f"the records of the {incomplete[0]} are incomplete")
    return result


def _plan_flaw(runs: Runs) -> CheckResult | None:
    """An error if the legs cannot prove anything, whatever their records say."""
    case = runs.case
    specs = {"reference": case.reference, "control": case.control, "candidate": case.candidate}
    for leg, spec in specs.items():
        if runs.legs[leg].spec.key != spec.key:
            got = f"{runs.legs[leg].spec.key}, expected {spec.key}"
            return error("plan", "corrupt_record", f"the records of the {leg} belong to run {got}")
    for second in ("candidate",) if case.reference.recorded else ("control", "candidate"):
        if specs["reference"].key == specs[second].key:
            message = f"the {second} is the reference itself: nothing was compared"
            return error("plan", "not_run", message)
    ref, control, candidate = specs.values()
    # Who recorded a run by hand says what is its control: commands differ in folders of logs.
    same = ref.config == control.config or bool(ref.recorded and control.recorded)
    if not same or (ref.device, ref.world_size) != (control.device, control.world_size):
        return error("plan", "not_run", "the control is not a second run of the reference")
    for name, left, right in (
        ("ranks", ref.world_size, candidate.world_size),
        ("steps", ref.config.get("steps"), candidate.config.get("steps")),
        ("microbatches", ref.config.get("microbatches"), candidate.config.get("microbatches")),
    ):
        if left != right:
            message = f"the reference has {left} {name}, the candidate {right}: "
            return error("plan", "unsupported", message + "they cannot be compared one by one")
    tolerance, steps = tolerance_of(case.expect), ref.config.get("steps")
    if isinstance(tolerance, LossGap) and isinstance(steps, int) and steps < tolerance.over:
        message = f"the runs have {steps} steps, the tolerance is over {tolerance.over}"
        return error("plan", "unsupported", message)
    return None


def _records_answer(leg: str, run: RunResult, flaw: Flaw | None) -> CheckResult:
    name = f"records:{leg}"
    if flaw is None:
        all_of_it = f"all {steps_due(run)} steps on all {run.spec.world_size} ranks"
        return passed(name, f"the {leg} recorded {all_of_it}")
    trouble = TROUBLES.get(flaw.what, "did not finish")
    if leg != "candidate":
        return error(name, flaw.what, f"the {leg} {trouble}: {flaw.message}")
    # Who reads one line reads the cause.
    message = f"{flaw.message}; the candidate {trouble}"
    if failure := failure_of_machine(run, flaw):
        return error(name, flaw.what, f"the machine failed ({failure}): {message}")
    if flaw.what in NO_BLAME:
        return error(name, flaw.what, message)
    place = flaw.difference
    if place is None and flaw.rank is not None and flaw.step is not None:
        place = Difference(step=flaw.step, rank=flaw.rank, quantity="records")
    return failed(name, flaw.what, message, place)


def _control_answer(runs: Runs, flaws: Flaws) -> CheckResult:
    reference, control = runs.reference, runs.control
    for leg in ("reference", "control") if runs.case.has_control else ("reference",):
        if flaws[leg] is not None:
            return not_run("control", f"the records of the {leg} are incomplete")
    if not runs.case.has_control:
        # Of recorded runs: the reference itself may be what does not repeat.
        message = "there is no control: whether the reference repeats itself is not known"
        return CheckResult(check="control", outcome="skipped", what=NO_CONTROL, message=message)
    bad = unequal(reference, control)
    if not bad:
        return passed("control", "the reference equals its second run bit for bit")
    first = min(bad, key=_step)
    why = ""
    if not reference.spec.is_builtin and first.difference is not None:
        why = f"; {cause_of(reference, control, first.difference)}"
    message = "the reference differs from its own second run, so the candidate is not judged: "
    return dataclasses.replace(
        first, check="control", outcome="incomparable", what="nondeterministic_reference",
        message=message + first.message + why,
    )  # fmt: skip


def unequal(run: RunResult, repeat: RunResult) -> list[CheckResult]:
    """Every check of bits that does not find two runs equal: losses, state, and taps if any."""
    answers = [exact.loss(run, repeat), exact.state(run, repeat)]
    if any(records.start and records.start.taps for records in run.ranks):
        answers.append(taps(run, repeat))
    return [answer for answer in answers if answer.outcome != "passed"]


def _decide(case: CaseSpec, results: Sequence[CheckResult]) -> CheckResult:
    by_name = {result.check: result for result in results}
    for name in GATES:
        if name not in by_name or by_name[name].what == NO_CONTROL:
            continue
        if by_name[name].outcome != "passed":
            return by_name[name]
    requested = [result for result in results if result.check not in GATES]
    if (bad := first_failure(requested)) is not None:
        return _without_control(bad) if by_name["control"].what == NO_CONTROL else bad
    requested = [result for result in requested if result.what != exact.OTHER_PARTS]
    for result in requested:
        if result.outcome == "incomparable":
            return result
        if result.outcome != "passed":
            return error("case", result.what, f"{result.check} gave no answer: {result.message}")
    if not requested:
        return error("case", "not_run", "no check was requested: nothing was compared")
    names = ", ".join(result.check for result in requested)
    proven = f"; {by_name['soak'].message}" if "soak" in by_name else ""
    if case.expect != "bitwise" and "loss" in by_name:
        proven += f"; {by_name['loss'].message}"
    return passed("case", f"every check said yes ({names}); {by_name['control'].message}{proven}")


def _without_control(result: CheckResult) -> CheckResult:
    """A failure, but no verdict where the reference may be what does not repeat itself."""
    if result.what != "diverged":
        return result
    message = (
        f"{result.message}; it is not known whether the reference repeats itself: record it twice "
        "and give the second run as --control"
    )
    return dataclasses.replace(result, outcome="incomparable", what=NO_CONTROL, message=message)


def first_failure(results: Iterable[CheckResult]) -> CheckResult | None:
    """Of the failures the one that explains most; None if there is none."""
    failures = [result for result in results if result.outcome == "failed"]
    return min(failures, key=_explains, default=None)


def _explains(result: CheckResult) -> tuple[int, int, int]:
    """Sort key: the failure that explains most first; a named tensor before a bare loss.

    What went through a module was computed before the gradients and weights of its step.
    """
    if result.what in ("static_buffer", "nonfinite"):
        return (0, _step(result), 0)
    bits = ("taps", "state", "loss")
    if result.check in bits:
        return (1, _step(result), bits.index(result.check))
    return (2, 0, 0)


def _step(result: CheckResult) -> int:
    return result.difference.step if result.difference is not None else 0
