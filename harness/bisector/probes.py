"""Runs that look closer: every module's calls up to the first bad step, then the first bad tensor.

    records          -> step, phase                          no run
    taps everywhere  -> microbatch, module, tensor, rank     both legs, as far as the first bad step
    contents         -> element, both bit patterns           both legs again

Fewer steps change nothing before the last of them. What a run takes over from the case: its plant,
stressors, scopes, layout, device. Looking in costs memory and moves addresses: where the failure
stays away then, that is said, and the records of the case itself stand.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.bisector.asking import Asked, Asker, judged_by
from harness.bisector.contents_probe import look_at_elements
from harness.bisector.found import Location
from harness.bisector.legs import Legs
from harness.bisector.locate import between, failing_pair, locate
from harness.bisector.questions import OutOfBudget
from harness.checks.complete import find_flaw
from harness.records import CaseSpec, RunResult, RunSpec, Verdict
from harness.store import CaseRuns

EVERYWHERE = ("**:input", "**:output", "**:gradient")
RESULTS_ONLY = ("**:output", "**:gradient")
"""For modules that are given what has no digest."""
CALLS_TELL = ("", "loss", "grads", "microbatch_losses")


def locate_case(
    runs: CaseRuns,
    asker: Asker | None = None,
    *,
    verdict: Verdict | None = None,
    element: bool = True,
) -> Location:
    """Where the fault of a failing case entered.

    Args:
        runs: the case, with the records of its three runs.
        asker: makes further runs, at most three times both legs; None to use the records alone.
        verdict: of the case.
        element: whether to look for the first differing element.

    Raises:
        Interrupted: somebody stopped it; the runs that were made are kept.
    """
    found = locate(runs, verdict)
    if asker is None:
        return found
    pair = failing_pair(runs)
    specs = [shortened(run.spec, found.step, pair) for run in pair]
    missing = "module"
    try:
        if wants_calls(found, pair):
            found, specs = _look_into_calls(found, runs.case, pair, asker)
        missing = "element"
        if element:
            found = look_at_elements(found, runs.case, specs, asker)
    except OutOfBudget as error:
        found = replace(found, unknown=(*found.unknown, f"{missing}: not looked at, {error}"))
    return found


def wants_calls(found: Location, pair: Sequence[RunResult]) -> bool:
    """Whether a look into modules can say more: something was computed otherwise in the step."""
    if found.step is None or find_flaw(pair[0]) is not None:
        return False
    is_known = found.quantity.startswith("taps.") and Legs(*pair).has_taps
    wide = set(EVERYWHERE) <= set(pair[0].spec.config.get("taps", ()))
    if is_known and wide:
        return False
    quantity = found.quantity.partition("[")[0].partition(".")[0]
    return quantity in (*CALLS_TELL, "taps")


def _look_into_calls(
    found: Location, case: CaseSpec, pair: Sequence[RunResult], asker: Asker
) -> tuple[Location, list[RunSpec]]:
    """Both legs again, with every call digested; the place, and the legs that show it."""
    assert found.step is not None
    plain = [shortened(run.spec, found.step, pair) for run in pair]
    why = ""
    for patterns in (EVERYWHERE, RESULTS_ONLY):
        asked = asker.ask(
            look_case(case, pair, patterns, found.step),
            f"which call differs first, up to step {found.step}? (taps {', '.join(patterns)})",
            judge=judged_by(_told),
        )
        if find_flaw(asked.runs.reference) is None:
            closer = _taken(found, asked)
            seen = [asked.runs.case.reference, asked.runs.case.candidate]
            return closer, plain if closer.quantity == found.quantity else seen
        why = asked.verdict.message
    told = f"module: looking into modules failed: {why}"
    return replace(found, unknown=(*found.unknown, told)), plain


def _taken(found: Location, asked: Asked) -> Location:
    closer = between(asked.runs.reference, asked.runs.candidate)
    if closer.step is None:
        told = (
            "module: with every call digested the failure did not come back: it may come now and "
            "then, or depend on addresses and times, which digests move"
        )
        return replace(found, unknown=(*found.unknown, told))
    if not asked.runs.candidate.spec.config.get("taps") or closer.quantity == found.quantity:
        return closer
    if closer.step != found.step:
        told = f"without digests of calls it was first seen in step {found.step}"
        return replace(closer, evidence=(*closer.evidence, told))
    return closer


def _told(reference: RunResult, candidate: RunResult) -> str:
    found = between(reference, candidate)
    return found.evidence[-1] if found.evidence else ""


def look_case(
    case: CaseSpec, pair: Sequence[RunResult], taps: Sequence[str], step: int
) -> CaseSpec:
    """The case with taps, up to a step; its control is the reference, as nothing is in question."""
    reference, candidate = (
        look_spec(shortened(run.spec, step, pair), taps=list(taps)) for run in pair
    )
    return replace(
        case, id=f"look-{candidate.key}", labels={"question": "calls"}, reference=reference,
        control=reference, candidate=candidate, checks={"taps": {}}, repeats=0, skip_reason="",
    )  # fmt: skip


def shortened(spec: RunSpec, step: int | None, pair: Sequence[RunResult]) -> RunSpec:
    """The same run as far as a step; whole if no step is known."""
    if step is None:
        return spec
    return look_spec(spec, steps=num_steps(pair, step))


def num_steps(pair: Sequence[RunResult], step: int) -> int:
    """Steps that a look takes: the bad one is the last, but graphs must have replayed once."""
    counts = []
    for run in pair:
        config = run.spec.config
        warm_up = config.get("graph_warmup_steps", 0) if config.get("graph") else 0
        counts.append(max(step, warm_up) + 1)
    return min(max(counts), *(int(run.spec.config["steps"]) for run in pair))


def look_spec(spec: RunSpec, **config: Any) -> RunSpec:
    """The same run with another configuration, and no soak."""
    return dataclasses.replace(spec, config=spec.config | config, soak=None, explain=False)
