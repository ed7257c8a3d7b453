"""From the records of a case to where its fault entered, and further runs that look closer.

    runs had other environments      what of them differs, on which rank
    verdict blames the reference     reference against its own control
    a run says itself what it is     stale_address, race, a refused capture: outranks its step
    runs part                        `divergence`, in the step that did not end, too
    a run ended, or broke a limit    how, by fields of the outcome and of error records

With an `Asker`, both runs are made again with every call up to the first bad step digested, then
with the operators of the first bad call, then with the tensors of the first bad one kept, then with
the first bad tensor. Where the failure stays away, the case is run as it is some more times: if it
passes then, it comes now and then, and the look is repeated until it comes; if it does not, looking
in keeps it away (it moves addresses and times), and the case's own records stand.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.bisect.differences import different_on_ranks, with_steps
from harness.bisect.divergence import RunPair, first_difference
from harness.bisect.experiments import Asker, again, judged_by, question_of
from harness.bisect.found import Location, module_of
from harness.bisect.operators import (
    keeping,
    kept_name,
    operators_for,
    why_unseen,
    with_element,
    with_operator,
    with_values,
)
from harness.checks.complete import find_flaw, has_lost_its_groups
from harness.checks.evidence import quantity_of, rank_table, shared_pairs, show_ranks, step_table
from harness.engine.evidence import odd_one, rank_names
from harness.errors import cut, one_line
from harness.faults.catalogue import Phase
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    UNFINISHED,
    CaseSpec,
    CollectiveFault,
    Ending,
    ErrorRecord,
    KeepSpec,
    RaceEvidence,
    RankRecords,
    RunResult,
    RunSpec,
    Verdict,
    What,
)
from harness.store import CaseRuns

NAMES_ITS_TENSOR: tuple[What, ...] = ("stale_address", "race", "capture_refused", "stale_guards")
"""What a run ends with that names its own cause: a difference in the same step only follows."""
AT_CAPTURE: tuple[What, ...] = ("capture_refused", "not_replayed", "not_compiled", "stale_guards")
LOST: tuple[What, ...] = (
    "missing_step", "missing_rank", "corrupt_record", "record_after_end", "empty_run",
)  # fmt: skip
MAX_CHARS, MOST_FACTS = 300, 5
IN_A_STEP: tuple[Phase, ...] = ("forward", "backward", "reduce", "optimizer")
_WORST = ("rank", "growth_rank", "leak_rank")
"""Figures of checks that are the number of the worst rank."""


def locate(runs: CaseRuns, verdict: Verdict | None = None) -> Location:
    """Where the fault of a case entered, as far as its records tell.

    Without the verdict no limit of memory or time is known to be broken.
    """
    if (ended := how_it_ended(runs.reference)) is not None:
        return _led("the reference itself failed: the candidate is not to blame", ended)
    for name, run in (("control", runs.control), ("candidate", runs.candidate)):
        if (other := _in_other_environment(runs.reference, run, name)) is not None:
            return other
    if (parted := first_difference(RunPair(runs.reference, runs.control))) is not None:
        told = "the reference differs from its own second run: the candidate is not to blame"
        return _led(told, parted)
    if (ended := how_it_ended(runs.control)) is not None:
        return _led("the control itself failed: the candidate is not to blame", ended)
    return between(runs.reference, runs.candidate, verdict)


def _led(told: str, found: Location) -> Location:
    return replace(found, evidence=(told, *found.evidence))


def between(reference: RunResult, candidate: RunResult, verdict: Verdict | None = None) -> Location:
    """Where a candidate left its reference, or failed by itself."""
    parted, ended = first_difference(RunPair(reference, candidate)), how_it_ended(candidate)
    if ended is None:
        return parted or _beyond_limits(reference, candidate, verdict)
    parted = parted or _parted_before_the_end(reference, candidate, ended)
    names = candidate.outcome.what in NAMES_ITS_TENSOR and ended.step is not None
    if parted is None or (names and (parted.step or 0) >= (ended.step or 0)):
        return ended
    return parted.saying(f"later: {ended.evidence[0]}")


def failure_of_two(reference: RunResult, other: RunResult) -> Location | None:
    """Where two runs went wrong, by their records; None if they did not."""
    found = how_it_ended(reference) or between(reference, other)
    return None if found.phase is None and found.step is None else found


def _in_other_environment(reference: RunResult, other: RunResult, name: str) -> Location | None:
    """Bits of two environments prove nothing of the program, so this comes first."""
    if not (leaves := different_on_ranks(reference, other)):
        return None
    rank, facts = min(leaves.items())
    told = [f"the {name} ran in another environment than the reference, on {show_ranks({*leaves})}"]
    told += [f"{leaf}: {before} became {after}" for leaf, before, after in facts[:MOST_FACTS]]
    parted = first_difference(RunPair(reference, other))
    told.append(
        "every bit of the runs is equal nevertheless" if parted is None
        else f"their records part ({parted}): the environment may be the cause"
    )  # fmt: skip
    return Location(
        phase="outside", quantity=quantity_of(facts[0][0]), rank=rank, ranks=tuple(sorted(leaves)),
        evidence=tuple(told),
    )  # fmt: skip


# --- how a run ended --------------------------------------------------------------------------


def how_it_ended(run: RunResult) -> Location | None:
    """Where a run went wrong, by what ended it; None if it is whole."""
    flaw = find_flaw(run)
    if flaw is None:
        return None
    rank, error = _speaker(run, flaw.rank)
    ending = run.outcome.ending or Ending()
    found = Location(
        step=_step(run, flaw.step, rank, error), rank=rank,
        ranks=flaw.ranks or (() if rank is None else (rank,)),
        phase=_phase(run, flaw.what, error, ending), quantity=flaw.what,
        evidence=(cut(one_line(flaw.message), MAX_CHARS),),
    )  # fmt: skip
    tensor = next(iter(error.tensors), "") if error is not None else ""
    of_tensor = {"tensor": tensor, "module": module_of(tensor)}
    if flaw.module:
        found = found.saying(module=flaw.module)
    elif flaw.what == "stale_address":
        told = [f"a graph was captured over {tensor}, which has moved or gone since"]
        found = found.saying(*told[: bool(tensor)], phase="state", **of_tensor)
    elif flaw.what == "race" and error is not None and error.race is not None:
        found = _race(found, error.race)
    elif flaw.what in ("hang", "crashed") and ending.collective is not None:
        found = _waiting(found, ending.collective, flaw.rank)
    elif error is None:
        found = found.saying(module=ending.module)
    elif has_lost_its_groups(error):
        found = found.saying("its process groups are gone, which no step takes away")
    elif found.phase != "outside":
        found = found.saying(**of_tensor | ({"module": error.module} if error.module else {}))
    return found


def _speaker(run: RunResult, culprit: int | None) -> tuple[int | None, ErrorRecord | None]:
    """The rank that failed first, and what it said."""
    records = rank_table(run)
    if culprit in records:
        return culprit, records[culprit].error
    said = ((rank, each.error) for rank, each in records.items() if each.error is not None)
    own = ((rank, error) for rank, error in said if error.blames in (None, rank))
    return next(own, (culprit, None))


def _step(
    run: RunResult, known: int | None, rank: int | None, error: ErrorRecord | None
) -> int | None:
    """The step that it was in: as it said, else the first whose record is not where it belongs."""
    if known is not None:
        return known
    if error is not None:
        return error.step if error.step >= 0 else None
    records = rank_table(run).get(rank) if rank is not None else None
    if records is None or records.start is None:
        return None
    order = [record.step for record in records.steps]
    # A record that does not decode leaves a hole, one may be there twice, or after that of the next
    # step; a rank that died leaves off.
    right = (s for s in range(len(order) + 1) if order.count(s) != 1 or order.index(s) != s)
    first, steps = next(right), run.spec.config.get("steps")
    return first if isinstance(steps, int) and first < steps else None


def _passed(name: str) -> Phase:
    """The phase of what a rank noted; what fails in the replay of a whole step was captured."""
    if name in ("capture", "replay"):
        return "capture"
    return next((phase for phase in IN_A_STEP if phase == name), "outside")


def _phase(run: RunResult, what: What, error: ErrorRecord | None, ending: Ending) -> Phase:
    if what in AT_CAPTURE:
        return "capture"
    if what in LOST or (error is not None and has_lost_its_groups(error)):
        return "outside"
    if error is None:
        # It left no word; what it noted, or those that waited for it, say what all were doing.
        if ending.phase:
            return _passed(ending.phase)
        others = [_passed(each.error.phase) for each in run.ranks if each.error is not None]
        return "capture" if "capture" in others or ending.module else "outside"
    phase, config = _passed(error.phase), run.spec.config
    # No step failed before it, and what captures leave behind is new in it.
    captures = config.get("graph") and error.step == config.get("graph_warmup_steps")
    return "capture" if captures and phase != "outside" else phase


def _race(found: Location, race: RaceEvidence) -> Location:
    streams = {race.later.stream, race.earlier.stream}
    is_sum = "reduce" in streams or race.is_gradient
    module = module_of(race.tensor) if race.unit in ("", "root") else race.unit
    if race.unit == "root" and not module and not is_sum:
        module = "embedding"  # the first of the root's modules
    uses = [
        f"{when}: {use.operator} {'writes' if use.writes else 'reads'} on stream {use.stream} at "
        f"{use.place}"
        for when, use in (("later", race.later), ("earlier", race.earlier))
    ]
    near = streams & {"gather", "reduce"}
    collective = "reduce-scatter of gradients" if is_sum else "all-gather of weights"
    return found.saying(
        f"the memory of {race.tensor} is used twice, and no wait orders its uses", *uses,
        phase="reduce" if is_sum else "forward", tensor=race.tensor, module=module,
        near="after" if near else "", collective=collective if near else "",
    )  # fmt: skip


def _waiting(found: Location, fault: CollectiveFault, culprit: int | None) -> Location:
    """The collective that ranks wait in for each other, as the engine found it out."""
    if culprit is None or (found.quantity == "crashed" and odd_one(fault) is None):
        ranks = tuple(sorted((*fault.ranks, *fault.others)))
        why = "rank: nothing tells which of two sides is in the wrong collective"
        return found.saying(unknown=why, rank=None, ranks=ranks, phase=None)
    if culprit not in fault.ranks:
        return found  # they wait for others, and these for it
    phase, mine = found.phase, fault.entered or fault.expected
    told = "the others wait in it; the ranks that are missing wait in no collective at all"
    if fault.entered is not None:
        told = f"{fault.expected} is what {rank_names(fault.others)} entered"
        phase = "reduce" if "reduce" in fault.expected.operator else "forward"
    if fault.expected.in_capture or mine.in_capture:
        phase = "capture"
        told += "; some capture graphs there, others do not, or are further"
    return found.saying(
        told, rank=fault.ranks[0], ranks=fault.ranks, phase=phase,
        near="before" if fault.entered is None else "in",
        module=mine.label if mine.label.startswith("layers.") else "",
        step=found.step if fault.step is None else fault.step,
        collective=mine.operator + (f" of {mine.label}" if mine.label else ""),
    )  # fmt: skip


def _parted_before_the_end(
    reference: RunResult, candidate: RunResult, ended: Location
) -> Location | None:
    """Where the step that did not end left its reference; not said of one that captures."""
    config, step = candidate.spec.config, ended.step
    if step is None or (config.get("graph") and step <= config.get("graph_warmup_steps", 0)):
        return None
    whole, ranks = step_table(reference), []
    for rank, records in rank_table(candidate).items():
        rows, ours = _unfinished_rows(records, step), whole.get((step, rank))
        if ours is not None and records.start is not None and rows:
            taps = "".join(_known_rows(rows, ours.taps, records.start.taps))
            if len(taps) == len(ours.taps):
                records = replace(records, steps=(*records.steps, replace(ours, taps=taps)))
        ranks.append(records)
    parted = first_difference(RunPair(reference, replace(candidate, ranks=tuple(ranks))))
    return parted if parted is not None and parted.step == step else None


def _unfinished_rows(records: RankRecords, step: int) -> list[str]:
    events = [e for e in records.events if e.name == UNFINISHED and e.step == step]
    text = next((text for e in events if isinstance(text := e.detail.get("taps"), str)), "")
    return [text[i : i + TAP_HEX_CHARS] for i in range(0, len(text), TAP_HEX_CHARS)]


def _known_rows(rows: list[str], reference: str, names: tuple[str, ...]) -> Iterator[str]:
    """Rows that ran; for others, and the last of a tap, which may lack calls, the reference's."""
    taps = [name.rpartition("[")[0] for name in names]
    for number, row in enumerate(rows):
        ran = row[DIGEST_HEX_CHARS:] != NEVER_RAN
        is_last = number + 1 >= len(taps) or taps[number + 1] != taps[number]
        theirs = reference[number * TAP_HEX_CHARS : (number + 1) * TAP_HEX_CHARS]
        yield row if ran and not is_last else theirs


def _beyond_limits(reference: RunResult, candidate: RunResult, verdict: Verdict | None) -> Location:
    """Nothing differs; a limit of memory or time may be broken, or ranks have the same data."""
    bad = next((c for c in verdict.checks if c.outcome == "failed"), None) if verdict else None
    if bad is None:
        return Location(unknown=("everything: the records of both runs are whole and equal",))
    rank = next((int(bad.figures[name]) for name in _WORST if name in bad.figures), None)
    seen = bad.difference
    rank, step = (seen.rank, seen.step) if seen is not None else (rank, None)
    found = Location(
        step=step, phase="outside", quantity=bad.what, rank=rank,
        ranks=() if rank is None else (rank,),
        evidence=("every bit of the runs is equal", bad.message),
    )  # fmt: skip
    if bad.what == "same_data" and seen is not None:
        return found.saying(phase="input", tensor=seen.tensor)
    if bad.what != "memory_regression" or rank is None:
        return found
    # The first step that leaves more behind, over the reference, than the one before it did: the
    # first steps make what a run keeps, and graphs what they keep.
    ours, theirs = step_table(reference), step_table(candidate)
    steps = [step for step, at in shared_pairs(ours, theirs) if at == rank]
    over = {s: theirs[s, rank].live_bytes - ours[s, rank].live_bytes for s in steps}
    config = candidate.spec.config
    capture = config.get("graph_warmup_steps", 0) if config.get("graph") else 0
    grown = [s for s in steps if s > max(capture, 0) and over[s] > over.get(s - 1, over[s])]
    if not grown:
        return found
    told = f"from step {grown[0]} on, rank {rank} keeps more after a step than the reference does"
    return found.saying(told, step=grown[0])


# --- runs that look closer --------------------------------------------------------------------

EVERYWHERE = ("**:input", "**:output", "**:gradient")
CALLS_TELL = ("", "loss", "grads", "microbatch_losses", "taps")
SELDOM, MISS = 0.3, 0.01
"""A fault that fires this often is met, with `MISS` as the chance to miss it, by `MOST_LOOKS`."""
MOST_LOOKS = math.ceil(math.log(MISS) / math.log1p(-SELDOM))
PLAIN_REPEATS = 3
"""How often the case itself is run again before looking in is what keeps its failure away."""
SELDOM_SEEN = (
    f"it comes now and then, and not in {MOST_LOOKS} looks (a fault of {SELDOM:.0%} of runs is met "
    f"with {1 - MISS:.0%} confidence)"
)
KEPT_AWAY = (
    "the case fails again, but not with every call digested, which moves addresses and times: it "
    "depends on those"
)


def locate_case(
    runs: CaseRuns, asker: Asker | None = None, *, verdict: Verdict | None = None,
    element: bool = True,
) -> Location:  # fmt: skip
    """Where the fault of a failing case entered: by its records, then by runs of an asker.

    Both legs are run twice at most, unless the failure stays away.
    """
    found = locate(runs, verdict)
    if asker is None or found.step is None or found.step < 0:
        return found
    return _Look(found, found.step, runs, asker).carry_out(element=element)


def shortened(specs: Sequence[RunSpec], step: int, **config: Any) -> list[RunSpec]:
    """Runs up to the bad step, but graphs must have replayed once; without a soak."""
    held = [spec.config for spec in specs]
    warm_ups = [c.get("graph_warmup_steps", 0) if c.get("graph") else 0 for c in held]
    steps = min(max(step, *warm_ups) + 1, *(int(c["steps"]) for c in held))
    short = [with_steps(spec, steps) for spec in specs]
    return [replace(spec, config=spec.config | config, soak=None) for spec in short]


_Read = Callable[..., Location]
"""Of a question's case and its two runs, what they show of the place that is known."""


class _Look:
    """One look into a case: what is known of the place gets closer with each step."""

    def __init__(self, found: Location, step: int, runs: CaseRuns, asker: Asker) -> None:
        self._found, self._step, self._case, self._asker = found, step, runs.case, asker
        self._of_control = first_difference(RunPair(runs.reference, runs.control)) is not None
        self._pair = runs.reference, runs.control if self._of_control else runs.candidate
        self._is_flaky: bool | None = None
        self._specs = self._shortened()

    def carry_out(self, *, element: bool) -> Location:
        if self._wants_calls():
            self._look_into_calls()
        if element:
            self._look_at_operators()
            self._look_at_elements()
        told = ["it comes now and then: the same run passes, too"] if self._is_flaky else []
        return self._found.saying(*told)

    def _shortened(self, **config: Any) -> list[RunSpec]:
        return shortened([run.spec for run in self._pair], self._step, **config)

    def _note(self, told: str) -> None:
        self._found = self._found.saying(unknown=told)

    def _wants_calls(self) -> bool:
        """Whether modules can say more: something was computed otherwise in the step."""
        reference, found = self._pair[0], self._found
        has_all = set(EVERYWHERE) <= set(reference.spec.config.get("taps", ()))
        if find_flaw(reference) is not None or (has_all and RunPair(*self._pair).has_taps):
            return False
        if found.quantity == "crashed" and found.phase in IN_A_STEP:
            return True  # what it had computed may have been wrong before it stopped
        return found.quantity.partition("[")[0].partition(".")[0] in CALLS_TELL

    def _ask(
        self, question: CaseSpec, words: str, number: int = 0, read: _Read | None = None
    ) -> CaseRuns:
        if number:
            pair = question.reference, again(question.candidate, number)
            question = question_of(question, question.labels["question"], *pair)
            words += f" run {number + 1}"

        def told(ours: RunResult, theirs: RunResult) -> str:
            if read is None:
                return str(failure_of_two(ours, theirs) or "")
            closer = read(question, ours, theirs)
            return closer.evidence[-1] if closer.evidence != before else closer.unknown[-1]

        before = self._found.evidence

        return self._asker.ask(
            question, words, judge=judged_by(told), answer=lambda verdict: verdict.message
        ).runs

    def _looked_into(self, what: str, taps: tuple[str, ...]) -> tuple[CaseRuns, CaseSpec, str]:
        specs = self._shortened(taps=list(taps))
        question = question_of(self._case, "look", *specs, checks={"taps": {}})
        words = f"which {what} differs first, up to step {self._step}?"
        return self._ask(question, words), question, words

    def _look_into_calls(self) -> None:
        """Both runs again, with every call digested; without inputs where they have no digest."""
        runs, question, words = self._looked_into("call", EVERYWHERE)
        if find_flaw(runs.reference) is not None:
            runs, question, words = self._looked_into("output or gradient", EVERYWHERE[1:])
        if (flaw := find_flaw(runs.reference)) is not None:
            self._note(f"module: looking into modules failed: the reference: {flaw.message}")
            return
        closer, number = _between(runs), 0
        # Three failures in a row are no proof that it always comes: it is looked for as often.
        while closer.step is None and number < self._num_looks(1 + PLAIN_REPEATS) - 1:
            number += 1
            closer = _between(self._ask(question, words, number))
            self._is_flaky = self._is_flaky or closer.step is not None
        if closer.step is None:
            self._note("module: " + (SELDOM_SEEN if self._is_flaky else KEPT_AWAY))
            return
        if closer.quantity != self._found.quantity:
            self._specs = [question.reference, question.candidate]
        if closer.step != self._found.step:
            first = f"without digests of calls it was first seen in step {self._found.step}"
            closer = closer.saying(first)
        # What has to be said first: that the candidate is not to blame.
        self._found = _led(self._found.evidence[0], closer) if self._of_control else closer

    def _num_looks(self, otherwise: int) -> int:
        """How often it is looked for: as often as it takes if the case itself passes, too."""
        if self._is_flaky is None:
            plain = question_of(self._case, "again", *(run.spec for run in self._pair))
            asked = (self._ask(plain, "does the case always fail?", n + 1)
                     for n in range(PLAIN_REPEATS))  # fmt: skip
            self._is_flaky = any(_between(runs).phase is None for runs in asked)
        return MOST_LOOKS if self._is_flaky else otherwise

    def _look_at_operators(self) -> None:
        before, spec = self._found, operators_for(self._found, self._pair[0])
        if spec is None:
            return
        if why := why_unseen(spec, self._pair):
            self._note(why)
            return
        specs, folder = self._shortened(taps=[]), self._asker.folder
        pair = (replace(each, operators=spec) for each in specs)
        question = question_of(self._case, "operators", *pair)
        words = f"which operator of {spec.module} differs first?"
        self._repeated(question, words, lambda _, *pair: with_operator(before, spec, pair))
        if (found := self._found).operator is not None:
            question = question_of(self._case, "values", *keeping(found.operator, spec, specs))
            words = "what did it take and give?"
            self._repeated(question, words, lambda _, *pair: with_values(found, spec, pair, folder))

    def _look_at_elements(self) -> None:
        before = self._found
        if not kept_name(before):
            return
        if before.step is None or before.step not in {s for s, _ in step_table(self._pair[1])}:
            self._note(f"element: step {before.step} did not end, so no contents were kept")
            return
        keep = KeepSpec(step=before.step, names=(kept_name(before),))
        pair = (replace(spec, keep=keep) for spec in self._specs)
        question = question_of(self._case, "keep", *pair)

        def read(asked: CaseSpec, *_: RunResult) -> Location:
            return with_element(before, asked, self._asker.folder)

        self._repeated(question, f"which element of {kept_name(before)} differs first?", read)

    def _repeated(self, question: CaseSpec, words: str, read: _Read) -> None:
        """Look until it was seen, as often as a failure that comes now and then takes."""
        before, number = self._found, 0
        while True:
            runs = self._ask(question, words, number, read)
            self._found = read(runs.case, runs.reference, runs.candidate)
            number += 1
            came = number == 1 and _between(runs).step is not None
            is_seen = self._found.evidence != before.evidence
            if came or is_seen or number >= self._num_looks(1):
                break
            self._found = before


def _between(runs: CaseRuns) -> Location:
    return between(runs.reference, runs.candidate)
