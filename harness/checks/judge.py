"""One verdict for one case: which of its answers decides, and in which words.

    records of each leg -> legs alike -> environment -> control -> requested checks -> decision

Order of the decision: a reference or control that is not whole (error); a reference that differs
from its own control (incomparable); a candidate that is not whole (failed); legs that ran in
different environments (incomparable); then the requested checks, a failure before a missing answer.
Every answer is kept in the verdict, whichever decided. Within a tolerance the check `loss` asks it,
and digests are informative; recorded runs without a control differ with no verdict (incomparable).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.checks import (
    environment,
    finite,
    graphs,
    memory,
    repeated,
    soak,
    soaked,
    state,
    taps,
    throughput,
    within,
)
from harness.checks import (
    exact as loss,
)
from harness.checks.answer import error, failed, not_run, passed
from harness.checks.complete import NO_BLAME, Flaw, failure_of_machine, find_flaw
from harness.checks.nondeterminism import cause_of
from harness.checks.samples import same_data
from harness.checks.soaked import missed_turns
from harness.naming import aligned
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
from harness.samples import samples_of
from harness.shared_gpus import SHARED_GPU
from harness.tolerance import LossGap, tolerance_of

Check = Callable[[RunResult, RunResult, Mapping[str, object]], CheckResult]

CHECKS: dict[str, Check] = {
    loss.NAME: loss.check,
    state.NAME: state.check,
    taps.NAME: taps.check,
    finite.NAME: finite.check,
    memory.NAME: memory.check,
    soak.NAME: soak.check,
    graphs.NAME: graphs.check,
}
"""Checks that a scenario may ask for, by name."""

EXACT = (state.NAME, taps.NAME)
"""Checks of digests, which a tolerance makes informative."""
NO_CONTROL: What = "no_control"

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
    named = aligned(reference, control, candidate)
    runs = dict(zip(("reference", "control", "candidate"), named, strict=True))
    if case.skip_reason:
        reason = CheckResult(
            check="case", outcome="skipped", what="unsupported", message=case.skip_reason
        )
        return _verdict(case, reason, (reason,), wall_s)
    results = _answers(case, runs, samples, repeats)
    return _verdict(case, _decide(case, results), tuple(results), wall_s)


def exit_code(verdicts: Iterable[Verdict]) -> ExitCode:
    """Exit code of a set of verdicts; a failure outranks a missing verdict."""
    outcomes: set[Outcome] = {verdict.outcome for verdict in verdicts}
    if "failed" in outcomes:
        return ExitCode.FAILED
    if outcomes & {"error", "incomparable"}:
        return ExitCode.NO_VERDICT
    return ExitCode.PASSED if "passed" in outcomes else ExitCode.NOTHING_RAN


def _answers(
    case: CaseSpec,
    runs: dict[str, RunResult],
    samples: Sequence[RunResult],
    repeats: Sequence[RunResult],
) -> list[CheckResult]:
    reference, control, candidate = runs["reference"], runs["control"], runs["candidate"]
    plan = _plan_flaw(case, runs)
    flaws = {leg: find_flaw(run) for leg, run in runs.items()}
    results = [] if plan is None else [plan]
    results += [
        dataclasses.replace(_records_answer(leg, run, flaws[leg]), ending=run.outcome.ending)
        for leg, run in runs.items()
    ]
    results.append(environment.check(reference, control, "control"))
    results.append(environment.check(reference, candidate, "candidate"))
    results.append(
        _control_answer(reference, control, flaws) if case.has_control else _no_control(flaws)
    )
    if flaws["candidate"] is None and (missed := missed_turns(candidate)) is not None:
        results.append(missed)
    whole = (same_data(run, leg) for leg, run in runs.items() if not flaws[leg])
    results += [same for same in whole if same is not None][:1]
    if case.repeats:
        results.append(repeated.check(case, reference, repeats))
    # Not in the order given: a case read back from its file must be answered in the same words.
    checks = dict(case.checks)
    for name in _always(candidate) if checks else ():
        checks.setdefault(name, {})
    for name in sorted(checks, key=lambda name: (*CHECKS, name).index(name)):
        if name == state.NAME and (parts := state.other_parts(reference, candidate)) is not None:
            answer = parts
        elif name == throughput.NAME:
            answer = throughput.check(repeats[0::2], repeats[1::2], checks[name])
        else:
            answer = _requested(case, name, checks[name], (reference, candidate, samples), flaws)
        # The last of the checks: what it states stands on all the others.
        results.append(soak.withdrawn(answer, results) if name == soak.NAME else answer)
    return results


def _always(candidate: RunResult) -> tuple[str, ...]:
    """Checks that a scenario may set limits of, and not leave out."""
    names = (state.NAME, finite.NAME)
    # Of other programs what the recorder found of graphs counts, too.
    return names if candidate.spec.is_builtin else (*names, graphs.NAME)


def _plan_flaw(case: CaseSpec, runs: dict[str, RunResult]) -> CheckResult | None:
    """An error if the legs cannot prove anything, whatever their records say."""
    specs = {"reference": case.reference, "control": case.control, "candidate": case.candidate}
    for leg, spec in specs.items():
        if runs[leg].spec.key != spec.key:
            return error(
                "plan",
                "corrupt_record",
                f"the records of the {leg} belong to run {runs[leg].spec.key}, expected {spec.key}",
            )
    pairs = [("reference", "control"), ("reference", "candidate")]
    if case.reference.recorded:
        pairs = pairs[1:]
    for first, second in pairs:
        if specs[first].key == specs[second].key:
            return error(
                "plan", "not_run", f"the {second} is the {first} itself: nothing was compared"
            )
    ref, control = case.reference, case.control
    # Who recorded a run by hand says what is its control: commands differ in folders of logs.
    same = ref.config == control.config or bool(ref.recorded and control.recorded)
    if not same or (ref.device, ref.world_size) != (control.device, control.world_size):
        return error("plan", "not_run", "the control is not a second run of the reference")
    return _unlike(case)


def _unlike(case: CaseSpec) -> CheckResult | None:
    """An error if reference and candidate have not the same steps to compare, or too few."""
    ref, candidate = case.reference, case.candidate
    for name, left, right in (
        ("ranks", ref.world_size, candidate.world_size),
        ("steps", ref.config.get("steps"), candidate.config.get("steps")),
        ("microbatches", ref.config.get("microbatches"), candidate.config.get("microbatches")),
    ):
        if left != right:
            return error(
                "plan",
                "unsupported",
                f"the reference has {left} {name}, the candidate {right}: "
                f"they cannot be compared one by one",
            )
    tolerance, steps = tolerance_of(case.expect), ref.config.get("steps")
    if isinstance(tolerance, LossGap) and isinstance(steps, int) and steps < tolerance.over:
        message = f"the runs have {steps} steps, the tolerance is over {tolerance.over}"
        return error("plan", "unsupported", message)
    return None


def _records_answer(leg: str, run: RunResult, flaw: Flaw | None) -> CheckResult:
    name, spec = f"records:{leg}", run.spec
    if flaw is None:
        return passed(
            name,
            f"the {leg} recorded all {soaked.steps_due(run)} steps on all {spec.world_size} ranks",
        )
    trouble = TROUBLES.get(flaw.what, "did not finish")
    message = f"the {leg} {trouble}: {flaw.message}"
    if leg == "candidate":
        # Who reads one line reads the cause.
        message = f"{flaw.message}; the candidate {trouble}"
        if failure := failure_of_machine(run, flaw):
            return error(name, flaw.what, f"the machine failed ({failure}): {message}")
    if leg != "candidate" or flaw.what in NO_BLAME:
        return error(name, flaw.what, message)
    if flaw.difference is not None:
        return failed(name, flaw.what, message, flaw.difference)
    if flaw.rank is None or flaw.step is None:
        return failed(name, flaw.what, message)
    return failed(
        name, flaw.what, message, Difference(step=flaw.step, rank=flaw.rank, quantity="records")
    )


def _control_answer(
    reference: RunResult, control: RunResult, flaws: dict[str, Flaw | None]
) -> CheckResult:
    for leg in ("reference", "control"):
        if flaws[leg] is not None:
            return not_run("control", f"the records of the {leg} are incomplete")
    bad = unequal(reference, control)
    if not bad:
        return passed("control", "the reference equals its second run bit for bit")
    first = min(bad, key=_step)
    why = ""
    if not reference.spec.is_builtin and first.difference is not None:
        why = f"; {cause_of(reference, control, first.difference)}"
    return CheckResult(
        check="control",
        outcome="incomparable",
        what="nondeterministic_reference",
        message=f"the reference differs from its own second run, so the candidate is not judged: "
        f"{first.message}{why}",
        difference=first.difference,
        figures=first.figures,
    )


def unequal(run: RunResult, repeat: RunResult) -> list[CheckResult]:
    """Every check of bits that does not find two runs equal: losses, state, and taps if any."""
    answers = [loss.check(run, repeat, {}), state.check(run, repeat, {})]
    if any(records.start and records.start.taps for records in run.ranks):
        answers.append(taps.check(run, repeat, {}))
    return [answer for answer in answers if answer.outcome != "passed"]


def first_failure(results: Iterable[CheckResult]) -> CheckResult | None:
    """Of the failures the one that explains most; None if there is none."""
    failures = [result for result in results if result.outcome == "failed"]
    return min(failures, key=_explains, default=None)


def _no_control(flaws: dict[str, Flaw | None]) -> CheckResult:
    """Of recorded runs: what differs is the reference's own doing, as far as anybody knows."""
    if flaws["reference"] is not None:
        return not_run("control", "the records of the reference are incomplete")
    message = "there is no control: whether the reference repeats itself is not known"
    return CheckResult(check="control", outcome="skipped", what=NO_CONTROL, message=message)


def _requested(
    case: CaseSpec,
    name: str,
    parameters: Mapping[str, object],
    runs: tuple[RunResult, RunResult, Sequence[RunResult]],
    flaws: dict[str, Flaw | None],
) -> CheckResult:
    reference, candidate, samples = runs
    check = CHECKS.get(name)
    if check is None:
        legal = ", ".join(CHECKS)
        return error(name, "unsupported", f"no check is named {name}; legal names: {legal}")
    tolerance = tolerance_of(case.expect)
    if tolerance is not None and name == loss.NAME:
        due = [spec.key for spec in samples_of(case)]
        if [run.spec.key for run in samples] != due:
            return error(name, "not_run", f"expected the {len(due)} samples of the reference")
        result = within.check(reference, candidate, tolerance, samples)
    else:
        result = check(reference, candidate, parameters)
    if tolerance is not None and name in EXACT:
        result = within.informative(result)
    incomplete = [leg for leg in ("reference", "candidate") if flaws[leg] is not None]
    # Over part of a run a difference is worth knowing, but its absence proves nothing.
    if incomplete and result.outcome != "failed":
        return not_run(name, f"the records of the {incomplete[0]} are incomplete")
    return result


def _decide(case: CaseSpec, results: list[CheckResult]) -> CheckResult:
    by_name = {result.check: result for result in results}
    gates = (
        "plan", "records:reference", "records:control", "environment:control", "control",
        "records:candidate", "environment:candidate",
    )  # fmt: skip
    for name in gates:
        if name not in by_name or by_name[name].what == NO_CONTROL:
            continue
        if by_name[name].outcome != "passed":
            return by_name[name]
    requested = [result for result in results if result.check not in gates]
    if (bad := first_failure(requested)) is not None:
        return _without_control(bad) if by_name["control"].what == NO_CONTROL else bad
    requested = [result for result in requested if result.what != state.OTHER_PARTS]
    for result in requested:
        if result.outcome == "incomparable":
            return result
        if result.outcome != "passed":
            return error("case", result.what, f"{result.check} gave no answer: {result.message}")
    if not requested:
        return error("case", "not_run", "no check was requested: nothing was compared")
    names = ", ".join(result.check for result in requested)
    proven = f"; {by_name[soak.NAME].message}" if soak.NAME in by_name else ""
    if case.expect != "bitwise" and loss.NAME in by_name:
        proven += f"; {by_name[loss.NAME].message}"
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


def _explains(result: CheckResult) -> tuple[int, int, int]:
    """Sort key: the failure that explains most first; a named tensor before a bare loss.

    What went through a module was computed before the gradients and weights of its step.
    """
    if result.what in ("static_buffer", "nonfinite"):
        return (0, _step(result), 0)
    if result.check == taps.NAME:
        return (1, _step(result), 0)
    if result.check == state.NAME:
        return (1, _step(result), 1)
    if result.check == loss.NAME:
        return (1, _step(result), 2)
    return (2, 0, 0)


def _step(result: CheckResult) -> int:
    return result.difference.step if result.difference is not None else 0


def _verdict(
    case: CaseSpec, decided: CheckResult, results: tuple[CheckResult, ...], wall_s: float
) -> Verdict:
    others = [
        result.check
        for result in results
        if result.outcome == "failed" and result is not decided and decided.outcome == "failed"
    ]
    also = f" (also failed: {', '.join(others)})" if others else ""
    return Verdict(
        case_id=case.id,
        outcome=decided.outcome,
        what=decided.what,
        message=decided.message + also,
        checks=results,
        runs={
            "reference": case.reference.key,
            "control": case.control.key,
            "candidate": case.candidate.key,
        },
        wall_s=wall_s,
        difference=decided.difference,
        check=decided.check,
        ending=decided.ending,
    )
