"""One verdict for one case: which of its answers decides, and in which words.

    records of each run -> runs alike -> environment -> control -> requested checks -> decision

Order of the decision: a reference or control that is not whole (error); a reference that differs
from its own control (incomparable); a candidate that is not whole (failed); runs of different
environments (incomparable); then the requested checks, a failure before a missing answer. Every
answer is kept in the verdict, whichever decided. Within a tolerance the check `loss` asks it, and
digests are informative; recorded runs without a control differ with no verdict (incomparable).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.checks import CHECKS, exact, refusal, speed
from harness.checks.complete import (
    NO_BLAME,
    Flaw,
    failure_of_machine,
    find_flaw,
    missed_turns,
    steps_due,
)
from harness.checks.evidence import (
    BEFORE,
    DETERMINISTIC,
    ENVIRONMENT,
    LEGS,
    Options,
    Runs,
    alike,
    error,
    failed,
    incomparable,
    not_run,
    passed,
    state_table,
    step_table,
)
from harness.checks.taps import taps
from harness.checks.within import informative, loss
from harness.infrastructure import SHARED_GPU
from harness.program.spec import program_of
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
"""By name of the run in the case."""


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
    """Judge one case from the records of its three runs; `control` is the reference's second run.

    Args:
        samples, repeats: runs that round at random, and timed ones (`harness.repeats`).
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
        sides = dict(zip(LEGS, aligned(reference, control, candidate), strict=True))
        results = _answers(Runs(case=case, samples=samples, repeats=repeats, **sides))
        decided = _decide(case, results)
    bad = [result.check for result in results if result.outcome == "failed"]
    others = [name for name in bad if name != decided.check and decided.outcome == "failed"]
    also = f" (also failed: {', '.join(others)})" if others else ""
    return Verdict(
        case_id=case.id, outcome=decided.outcome, what=decided.what,
        message=decided.message + also, checks=tuple(results), wall_s=wall_s,
        runs={leg: getattr(case, leg).key for leg in LEGS},
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
    results += [_records_answer(leg, run, flaws[leg]) for leg, run in runs.legs.items()]
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
        is_claim = name in CHECKS and CHECKS[name].is_claim
        results.append(_withdrawn(answer, results) if is_claim else answer)
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


def _withdrawn(claim: CheckResult, others: Iterable[CheckResult]) -> CheckResult:
    """The same answer, unless it is a claim that another check's answer takes the ground from."""
    for other in others if claim.outcome == "passed" else ():
        if other.outcome != "passed":
            return not_run(claim.check, f"{other.check} did not pass: there is no bound to state")
    return claim


def _plan_flaw(runs: Runs) -> CheckResult | None:
    """An error if the runs cannot prove anything, whatever their records say."""
    case = runs.case
    specs = {leg: getattr(case, leg) for leg in LEGS}
    ref, control, candidate = case.reference, case.control, case.candidate
    for leg, spec in specs.items():
        if runs.legs[leg].spec.key != spec.key:
            got = f"{runs.legs[leg].spec.key}, expected {spec.key}"
            return error("plan", "corrupt_record", f"the records of the {leg} belong to run {got}")
    for second in ("candidate",) if ref.recorded else ("control", "candidate"):
        if ref.key == specs[second].key:
            message = f"the {second} is the reference itself: nothing was compared"
            return error("plan", "not_run", message)
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
        result = passed(name, f"the {leg} recorded {all_of_it}")
    elif leg != "candidate":
        trouble = TROUBLES.get(flaw.what, "did not finish")
        result = error(name, flaw.what, f"the {leg} {trouble}: {flaw.message}")
    else:
        # Who reads one line reads the cause.
        message = f"{flaw.message}; the candidate {TROUBLES.get(flaw.what, 'did not finish')}"
        place = flaw.difference
        if place is None and flaw.rank is not None and flaw.step is not None:
            place = Difference(step=flaw.step, rank=flaw.rank, quantity="records")
        if failure := failure_of_machine(run, flaw):
            result = error(name, flaw.what, f"the machine failed ({failure}): {message}")
        elif flaw.what in NO_BLAME:
            result = error(name, flaw.what, message)
        else:
            result = failed(name, flaw.what, message, place)
    return replace(result, ending=run.outcome.ending)


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
    first, why = min(bad, key=_step), ""
    if not reference.spec.is_builtin and first.difference is not None:
        why = f"; {cause_of(reference, control, first.difference)}"
    message = "the reference differs from its own second run, so the candidate is not judged: "
    other = incomparable("control", "nondeterministic_reference", message + first.message + why)
    return replace(other, difference=first.difference, figures=first.figures)


def unequal(run: RunResult, repeat: RunResult) -> list[CheckResult]:
    """Every check of bits that does not find two runs equal: losses, state, and taps if any."""
    answers = [loss(run, repeat), exact.state(run, repeat)]
    if any(records.start and records.start.taps for records in run.ranks):
        answers.append(taps(run, repeat))
    return [answer for answer in answers if answer.outcome != "passed"]


def _decide(case: CaseSpec, results: Sequence[CheckResult]) -> CheckResult:
    by_name = {result.check: result for result in results}
    is_controlled = by_name["control"].what != NO_CONTROL
    for name in GATES if is_controlled else (gate for gate in GATES if gate != "control"):
        if name in by_name and by_name[name].outcome != "passed":
            return by_name[name]
    requested = [result for result in results if result.check not in GATES]
    if (bad := first_failure(requested)) is not None:
        return bad if is_controlled else _without_control(bad)
    requested = [result for result in requested if result.what != exact.OTHER_PARTS]
    for result in requested:
        if result.outcome == "incomparable":
            return result
        if result.outcome != "passed":
            return error("case", result.what, f"{result.check} gave no answer: {result.message}")
    if not requested:
        return error("case", "not_run", "no check was requested: nothing was compared")
    names = ", ".join(result.check for result in requested)
    proven = [r.message for r in requested if r.check in CHECKS and CHECKS[r.check].is_claim]
    if case.expect != "bitwise" and "loss" in by_name:
        proven.append(by_name["loss"].message)
    says = "; ".join([f"every check said yes ({names})", by_name["control"].message, *proven])
    return passed("case", says)


def _without_control(result: CheckResult) -> CheckResult:
    """A failure, but no verdict where the reference may be what does not repeat itself."""
    if result.what != "diverged":
        return result
    message = (
        f"{result.message}; it is not known whether the reference repeats itself: record it twice "
        "and give the second run as --control"
    )
    return replace(result, outcome="incomparable", what=NO_CONTROL, message=message)


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
    return (1, _step(result), bits.index(result.check)) if result.check in bits else (2, 0, 0)


def _step(result: CheckResult) -> int:
    return result.difference.step if result.difference is not None else 0


# --- why a program does not repeat itself -----------------------------------------------------

Kind = Literal["seed", "initialisation", "data", "forward", "backward", "update", "draws"]
_CAUSES: dict[Kind, str] = {
    "seed": "random generators are not seeded",
    "initialisation": "weights are drawn from an unseeded generator, or loaded from elsewhere",
    "data": "the program read other data: unseeded shuffling, or workers in another order",
    "forward": "the program read other data, or an operator of the forward pass varies",
    "backward": "an operator of the backward pass is not deterministic",
    "update": "an operator of the optimizer is not deterministic",
    "draws": "random numbers are drawn by the clock, by threads or by library code",
}
"""By what differs first: generators before step 0, weights before it, inputs of a module; then
losses from equal state, gradients from equal losses, weights from equal gradients; generators."""


@dataclass(frozen=True)
class Cause:
    """The likely cause, in words, and what to do about it."""

    kind: Kind
    told: str
    remedy: str

    def __str__(self) -> str:
        return f"likely cause: {self.told}; {self.remedy}"


def cause_of(reference: RunResult, control: RunResult, first: Difference) -> Cause:
    """The likely cause of the first difference between a program's own two runs."""
    kind = _kind(reference, control, first)
    told = _CAUSES[kind]
    if kind == "backward" and reference.spec.world_size > 1:
        told += ", or a collective adds its parts in another order (NCCL_ALGO)"
    program = program_of(reference.spec.config)
    events = [event for records in reference.ranks for event in records.events]
    is_asked = any(e.name == ENVIRONMENT and e.detail.get(DETERMINISTIC) is True for e in events)
    remedy = "set determinism: enforce, which seeds the generators and asks for such operators"
    if program is not None and program.determinism == "enforce":
        remedy = (
            "determinism is enforced already: look for generators of the program's own, worker "
            "processes, and what depends on time"
        )
    elif kind in ("backward", "update", "forward") and is_asked:
        remedy = "torch is asked for deterministic operators already: look for kernels of others"
    return Cause(kind, told, remedy)


def _kind(reference: RunResult, control: RunResult, first: Difference) -> Kind:
    if first.quantity.startswith("taps."):
        is_backward = first.quantity.endswith("gradient")
        return (
            "data" if first.quantity == "taps.input" else "backward" if is_backward else "forward"
        )
    key = (first.step, first.rank)
    left, right = state_table(reference).get(key), state_table(control).get(key)
    ours, theirs = left.digests if left and right else {}, right.digests if right else {}
    groups = {group for group, text in ours.items() if text != theirs.get(group)}
    if first.step == BEFORE:
        return "initialisation" if "weights" in groups else "seed"
    mine, other = step_table(reference).get(key), step_table(control).get(key)
    if mine is None or other is None or mine.microbatch_losses != other.microbatch_losses:
        return "forward"
    if groups & {"grads", "losses", "buffers"}:
        return "backward"
    return "update" if groups & {"weights", "optim"} else "draws"
