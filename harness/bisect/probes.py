"""Runs that look closer: every module's calls up to the first bad step, then the first bad tensor.

    records          -> step, phase                          no run
    taps everywhere  -> microbatch, module, tensor, rank     both legs, as far as the first bad step
    contents         -> element, both bit patterns           both legs again

Fewer steps change nothing before the last of them. What a run takes over from the case: its plant,
stressors, scopes, layout, device. Where the failure stays away, the case is run as it is some more
times: if it passes then, it comes now and then, and the look is repeated until it comes; if it does
not, looking in keeps it away (it moves addresses and times), and the case's own records stand.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.bisect.aligned import Legs
from harness.bisect.chance import passes_needed
from harness.bisect.differences import with_steps
from harness.bisect.elements import contents_case, kept_name, with_element
from harness.bisect.experiments import Asker, OutOfBudget, judged_by, message
from harness.bisect.found import Location
from harness.bisect.locate import between, failing_pair, locate
from harness.checks.complete import find_flaw
from harness.faults.fault import Phase
from harness.records import CaseSpec, RunResult, RunSpec, Verdict
from harness.repeats import FIRST_REPEAT
from harness.store import CaseRuns

EVERYWHERE = ("**:input", "**:output", "**:gradient")
RESULTS_ONLY = ("**:output", "**:gradient")
"""For modules that are given what has no digest."""
CALLS_TELL = ("", "loss", "grads", "microbatch_losses", "taps")
IN_A_STEP: tuple[Phase, ...] = ("forward", "backward", "reduce", "optimizer")
SELDOM = 0.3
"""A fault that fires this often is met, with `MISS` as the chance to miss it, by `MOST_LOOKS`."""
MISS = 0.01
MOST_LOOKS = passes_needed(SELDOM, MISS)
PLAIN_REPEATS = 3
"""How often the case itself is run again before looking in is what keeps its failure away."""
_TAPPED = "which call differs first, up to step {}?"
_RESULTS = "which output or gradient differs first, up to step {}?"


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
        asker: makes further runs, both legs twice at most unless the failure stays away; None to
            use the records alone.
        verdict: of the case.
        element: whether to look for the first differing element.

    Raises:
        Interrupted: somebody stopped it; the runs that were made are kept.
    """
    found = locate(runs, verdict)
    if asker is None or found.step is None or found.step < 0:
        return found
    return _Look(found, runs.case, failing_pair(runs), asker).carry_out(element=element)


class _Look:
    """One look into a case: what is known of the place gets closer with each step."""

    def __init__(
        self, found: Location, case: CaseSpec, pair: Sequence[RunResult], asker: Asker
    ) -> None:
        assert found.step is not None
        self._found, self._case, self._pair, self._asker = found, case, pair, asker
        self._specs = [shortened(run.spec, found.step, pair) for run in pair]
        self._is_flaky: bool | None = None
        is_control = pair[1].spec.key == case.control.key
        self._lead = found.evidence[:1] if is_control else ()
        """What has to be said first: that the candidate is not to blame."""

    def carry_out(self, *, element: bool) -> Location:
        missing = "module"
        try:
            if wants_calls(self._found, self._pair):
                self._look_into_calls()
            missing = "element"
            if element and kept_name(self._found) and self._is_ended():
                self._look_at_elements()
        except OutOfBudget as error:
            self._note(f"{missing}: not looked at, {error}")
        if self._is_flaky:
            told = "it comes now and then: the same run passes, too"
            self._found = replace(self._found, evidence=(*self._found.evidence, told))
        return self._found

    def _note(self, told: str) -> None:
        self._found = replace(self._found, unknown=(*self._found.unknown, told))

    def _is_ended(self) -> bool:
        """Whether the step was ended in the failing run: contents are written after it only."""
        steps = {record.step for rank in self._pair[1].ranks for record in rank.steps}
        if self._found.step not in steps:
            self._note(f"element: step {self._found.step} did not end, so no contents were kept")
        return self._found.step in steps

    def _look_into_calls(self) -> None:
        """Both legs again, with every call digested."""
        step = self._found.step
        assert step is not None
        why = ""
        for patterns in (EVERYWHERE, RESULTS_ONLY):
            question = look_case(self._case, self._pair, patterns, step)
            words = (_TAPPED if patterns is EVERYWHERE else _RESULTS).format(step)
            asked = self._asker.ask(question, words, judge=judged_by(_told), answer=message)
            if find_flaw(asked.runs.reference) is None:
                break
            why = asked.verdict.message
        else:
            self._note(f"module: looking into modules failed: {why}")
            return
        closer = between(asked.runs.reference, asked.runs.candidate)
        if closer.step is None:
            again = self._until(
                asked.runs.case, words, lambda legs: between(legs[0], legs[1]).step is not None
            )
            if again is None:
                self._note_stays_away()
                return
            closer = between(again[0], again[1])
        if closer.quantity != self._found.quantity:
            self._specs = [question.reference, question.candidate]
        self._take(closer)

    def _take(self, closer: Location) -> None:
        evidence = (*self._lead, *closer.evidence)
        if closer.step != self._found.step:
            first = f"without digests of calls it was first seen in step {self._found.step}"
            evidence = (*evidence, first)
        self._found = replace(closer, evidence=evidence)

    def _note_stays_away(self) -> None:
        if self._is_flaky:
            rate = f"a fault of {SELDOM:.0%} of runs is met with {1 - MISS:.0%} confidence"
            self._note(f"module: it comes now and then, and not in {MOST_LOOKS} looks ({rate})")
        else:
            self._note(
                "module: the case fails again, but not with every call digested, which moves "
                "addresses and times: it depends on those"
            )

    def _until(
        self, question: CaseSpec, words: str, shows: Callable[[list[RunResult]], bool]
    ) -> list[RunResult] | None:
        """Repeat a question until it shows the failure; both legs, None if it stays away."""
        # Three failures in a row are no proof that it always comes: it is looked for as often.
        looks = MOST_LOOKS if self._comes_now_and_then() else 1 + PLAIN_REPEATS
        for number in range(1, looks):
            repeat = repeated(question, number)
            asked = self._asker.ask(
                repeat, f"{words} run {number + 1}", judge=judged_by(_told), answer=message
            )
            legs = [asked.runs.reference, asked.runs.candidate]
            if shows(legs):
                self._is_flaky = True
                return legs
        return None

    def _comes_now_and_then(self) -> bool:
        """Whether the case itself passes, too."""
        if self._is_flaky is None:
            reference, candidate = (run.spec for run in self._pair)
            plain = replace(
                self._case, id=f"again-{candidate.key}", labels={"question": "again"},
                reference=reference, control=reference, candidate=candidate, repeats=0,
            )  # fmt: skip
            self._is_flaky = False
            for number in range(1, PLAIN_REPEATS + 1):
                words = f"does the case always fail? run {number + 1}"
                asked = self._asker.ask(
                    repeated(plain, number), words, judge=judged_by(_told), answer=message
                )
                if between(asked.runs.reference, asked.runs.candidate).phase is None:
                    self._is_flaky = True
                    break
        return self._is_flaky

    def _look_at_elements(self) -> None:
        """Both legs again, with the bytes of the first wrong tensor."""
        question = contents_case(self._found, self._case, self._specs)
        words = f"which element of {kept_name(self._found)} differs first?"
        found, stayed_away = self._element(question, words)
        if stayed_away and self._comes_now_and_then():
            for number in range(1, MOST_LOOKS):
                found, _ = self._element(repeated(question, number), f"{words} run {number + 1}")
                if found.element is not None:
                    break
        self._found = found

    def _element(self, question: CaseSpec, words: str) -> tuple[Location, bool]:
        """The place with its element, or with why there is none; whether nothing differed."""

        def told(reference: RunResult, candidate: RunResult) -> str:
            del reference, candidate
            found = with_element(self._found, question, self._asker.folder)
            return found.unknown[-1] if found.element is None else found.evidence[-1]

        legs = self._asker.ask(question, words, judge=judged_by(told), answer=message).runs
        stayed_away = between(legs.reference, legs.candidate).step is None
        return with_element(self._found, question, self._asker.folder), stayed_away


def wants_calls(found: Location, pair: Sequence[RunResult]) -> bool:
    """Whether a look into modules can say more: something was computed otherwise in the step."""
    if find_flaw(pair[0]) is not None:
        return False
    wide = set(EVERYWHERE) <= set(pair[0].spec.config.get("taps", ()))
    if wide and Legs(*pair).has_taps:
        return False
    if found.quantity == "crashed" and found.phase in IN_A_STEP:
        return True  # what it had computed may have been wrong before it stopped
    return found.quantity.partition("[")[0].partition(".")[0] in CALLS_TELL


def _told(reference: RunResult, candidate: RunResult) -> str:
    """The place in a line; "" where the legs are equal."""
    found = between(reference, candidate)
    return "" if found.phase is None and found.step is None else str(found)


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


def repeated(question: CaseSpec, number: int) -> CaseSpec:
    """The question with another run of its candidate."""
    candidate = replace(question.candidate, replica=FIRST_REPEAT + number)
    kind = question.id.partition("-")[0]
    return replace(question, id=f"{kind}-{candidate.key}", candidate=candidate)


def shortened(spec: RunSpec, step: int, pair: Sequence[RunResult]) -> RunSpec:
    """The same run as far as a step, if its program can be told to take fewer."""
    return look_spec(with_steps(spec, num_steps(pair, step)))


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
    return dataclasses.replace(spec, config=spec.config | config, soak=None)
