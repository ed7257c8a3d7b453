"""Which differences between the runs of a failing case make it fail, and the least such case.

    all changes fail -> one minimal set, by halving -> leave a change of it out: does it still fail?
      -> yes, in this or in another way: search again among what is left -> no: all are known
    a cause -> steps -> ranks -> layers, microbatches -> captured layers -> plain settings

A question is the reference with some of the changes as its candidate, judged as the case was. What
rules refuse is asked of nobody. The set in hand has been seen to fail at every moment: an answer
that is `unresolved`, or luck, makes a search longer and never its result untrue.

After each cause, one change of every known cause is left out, in every way. What still fails holds
another cause, also where two causes share a change; what fails in another way (NaN hides a
divergence) is searched for that failure. Where every way passes, nothing but the causes fails.

The least case: reference and candidate are made smaller alike, so what they differ in stays. A step
is kept if the case still fails as it did; one that passes, fails otherwise or is illegal is not.
Sizes are halved, the least one first, as most faults need little.
"""

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_core.config import DEGREES, TrainConfig
from harness.bisect.differences import (
    LegChanges,
    config_of,
    leaves_of,
    plants_of,
    why_illegal,
    with_plants,
    with_steps,
    world_size_of,
)
from harness.bisect.experiments import (
    FAILS,
    NONDETERMINISTIC,
    PASSES,
    UNRESOLVED,
    Answer,
    Asker,
    Failure,
    Judged,
    NeverFails,
    OutOfBudget,
    RepeatPolicy,
    brief,
    failure_of,
)
from harness.codec import Json
from harness.faults.catalogue import CATALOGUE
from harness.program.spec import capabilities_of, program_of
from harness.records import CaseSpec, RunSpec, Verdict
from harness.scenario.settings import LAST_RANK

Changes = frozenset[str]
MAX_CAUSES = 8
MAX_WAYS = 32
"""Ways to leave a change of each cause out that are asked."""


@dataclass(frozen=True, kw_only=True)
class FoundCause(Json):
    """A smallest set of changes that fails by itself.

    Attributes:
        changes: names, in the order of the configuration; none if nothing need change.
        unproven: those of them without which it cannot be run, so they may not be at fault.
        failure: how it fails: as the case does, or in a way that the case's failure hides.
        message: of the verdict of the reference with these changes alone.
    """

    changes: tuple[str, ...]
    unproven: tuple[str, ...]
    failure: Failure
    message: str

    def __str__(self) -> str:
        """For people: `plant: ulp in step 3 and graph: attn together (failed diverged)`."""
        together = " together" if len(self.changes) > 1 else ""
        return f"{' and '.join(self.changes) or 'none of the changes'}{together} ({self.failure})"


@dataclass(frozen=True, kw_only=True)
class FoundCauses(Json):
    """What a search among the differences of two runs has found.

    Attributes:
        candidates: names of all changes.
        causes: smallest sets, those of the case's own failure first.
        complete: whether nothing but these causes makes it fail.
        num_questions: sets of changes that were asked.
        num_runs: that were made.
        num_illegal: sets that rules refused, at no cost.
        policy: how often the case failed, and how many passes count.
        notes: what could not be found out, a sentence each.
    """

    candidates: tuple[str, ...]
    causes: tuple[FoundCause, ...] = ()
    complete: bool = False
    num_questions: int = 0
    num_runs: int = 0
    num_illegal: int = 0
    policy: RepeatPolicy | None = None
    notes: tuple[str, ...] = ()


def find_causes(case: CaseSpec, verdict: Verdict, asker: Asker) -> FoundCauses:
    """The smallest sets of differences between reference and candidate that still fail.

    Args:
        case: that failed.
        verdict: its answer.
        asker: makes the runs of questions.

    Raises:
        OutOfBudget: `best` has the `FoundCauses` of what was found.
    """
    changes = LegChanges(case.reference, case.candidate)
    why = ""
    if verdict.what == NONDETERMINISTIC:
        why = "the reference differs from its own second run, so no difference is the cause"
    elif not changes.names:
        why = "nothing to search: the configurations do not differ"
    elif verdict.outcome in ("passed", "skipped"):
        why = f"nothing to search: the case {verdict.outcome}"
    if why:
        return FoundCauses(candidates=changes.names, notes=(why,))
    return _Search(case, verdict, asker, changes).carry_out()


class _Search:
    def __init__(self, case: CaseSpec, verdict: Verdict, asker: Asker, changes: LegChanges) -> None:
        self._case, self._asker, self._changes = case, asker, changes
        self._names = changes.names
        self._runs_before = asker.num_runs
        self._judged = self._judge(frozenset(self._names), verdict)
        self._policy: RepeatPolicy | None = None
        self._legal: dict[Changes, bool] = {}
        self._asked: dict[Changes, Answer] = {}
        self._causes: list[FoundCause] = []
        self._notes: list[str] = []

    def carry_out(self) -> FoundCauses:
        complete = False
        try:
            within: Changes | None = frozenset(self._names)
            while within is not None and len(self._causes) < MAX_CAUSES:
                self._search(within)
                within, complete = self._still_failing()
        except NeverFails as error:
            self._notes.append(str(error))
        except OutOfBudget as error:
            failing: list[Changes] = [c for c, answer in self._asked.items() if answer == FAILS]
            self._notes.append(str(error))
            if failing:
                least = self._words(sorted(failing, key=len)[0])
                self._notes.append(f"the smallest set that was seen to fail: {least}")
            error.best = self._found(complete=False)
            raise
        return self._found(complete=complete)

    def _judge(self, changes: Changes, verdict: Verdict) -> Judged:
        """Who answers for a failure that was seen with some of the changes."""
        case = dataclasses.replace(self._case, candidate=self._changes.run_with(changes))
        return Judged(case, failure_of(verdict), self._asker, verdict)

    def _search(self, within: Changes) -> None:
        """One cause, among changes that fail together as `self._judged` was seen to."""
        policy = self._judged.learn(4 * len(within).bit_length() + 4)
        self._policy = self._policy or policy
        changes, unproven = self._trimmed(self._halved(self._ordered(within)))
        verdict = self._judged.verdicts.get(self._changes.run_with(changes).key)
        self._causes.append(
            FoundCause(
                changes=changes, unproven=unproven, failure=self._judged.failure,
                message=verdict.message if verdict is not None else "",
            )
        )  # fmt: skip

    # --- one answer

    def _answer(self, changes: Iterable[str], *, sure: bool = False) -> Answer:
        asked = frozenset(changes)
        if asked not in self._legal:
            self._legal[asked] = not self._changes.why_illegal(asked)
        if not self._legal[asked]:
            return UNRESOLVED
        if not asked and self._judged.policy is not None and self._judged.policy.always:
            return PASSES  # the reference itself, which its control has confirmed
        words = f"does it fail with {self._words(asked)}?"
        answer = self._judged.answer(self._changes.run_with(asked), words=words, sure=sure)
        self._asked[asked] = answer
        return answer

    def _fails(self, changes: Iterable[str], *, sure: bool = False) -> bool:
        return self._answer(changes, sure=sure) == FAILS

    # --- one minimal set

    def _halved(self, whole: tuple[str, ...]) -> tuple[str, ...]:
        """A failing subset: the end of the shortest failing prefix is kept, again and again."""
        kept: tuple[str, ...] = ()
        while whole and not self._fails(kept):
            # Invariant: `kept` with the first `high` of `whole` fails.
            low, high = 0, len(whole)
            while high - low > 1:
                middle = (low + high) // 2
                if self._fails((*kept, *whole[:middle])):
                    high = middle
                else:
                    low = middle
            kept, whole = (*kept, whole[high - 1]), whole[: high - 1]
        return self._ordered(kept)

    def _trimmed(self, failing: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A set of which no change can be left out; those without which it cannot be run."""
        while True:
            whole = frozenset(failing)
            left: tuple[str, ...] | None = next(
                ((c,) for c in failing if self._fails(whole - {c}, sure=True)), None
            )
            unproven = tuple(c for c in failing if self._answer(whole - {c}) == UNRESOLVED)
            if left is None:
                # What cannot go alone may go with others that it needs, or that need it.
                groups = (*itertools.combinations(unproven, 2), unproven)
                left = next((g for g in groups if g and self._fails(whole - set(g))), None)
            if left is None:
                return failing, unproven
            failing = tuple(c for c in failing if c not in left)

    # --- what is left

    def _still_failing(self) -> tuple[Changes | None, bool]:
        """Changes that fail without one of each cause, if any do; whether all are known.

        What fails is what `self._judged` answers for from then on.
        """
        settled, was_asked = True, False
        for number, left_out in enumerate(self._ways()):
            rest = frozenset(self._names) - left_out
            if number == MAX_WAYS:
                self._notes.append(f"not more than {MAX_WAYS} ways to leave causes out were asked")
                return None, False
            answer = self._answer(rest, sure=True)
            if not self._legal[rest]:
                continue
            was_asked = True
            if answer == PASSES:
                continue
            key = self._changes.run_with(rest).key
            verdict = (self._judged.verdicts if answer == FAILS else self._judged.others)[key]
            if verdict.outcome in ("failed", "incomparable"):
                self._judged = self._judge(rest, verdict)
                return rest, False
            settled = False
            self._notes.append(
                f"with {self._words(rest)} it {brief(verdict)}, which no cause explains"
            )
        return None, settled and was_asked

    def _ways(self) -> Iterator[Changes]:
        """One change of each cause, in every way; none has another inside."""
        if not all(cause.changes for cause in self._causes):
            self._notes.append("it fails without any of the changes, so none of them is the cause")
            return iter(())
        ways = set(map(frozenset, itertools.product(*(c.changes for c in self._causes))))
        least = [way for way in ways if not any(other < way for other in ways)]
        return iter(sorted(least, key=lambda way: [n in way for n in self._names], reverse=True))

    def _found(self, *, complete: bool) -> FoundCauses:
        return FoundCauses(
            candidates=self._names, causes=tuple(self._causes), complete=complete,
            num_questions=len(self._asked), num_runs=self._asker.num_runs - self._runs_before,
            num_illegal=sum(not legal for legal in self._legal.values()), policy=self._policy,
            notes=tuple(dict.fromkeys(self._notes)),
        )  # fmt: skip

    def _ordered(self, changes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(changes)
        return tuple(name for name in self._names if name in chosen)

    def _words(self, changes: Iterable[str]) -> str:
        ordered = self._ordered(changes)
        if len(ordered) == len(self._names):
            return "all changes"
        return " + ".join(ordered) or "none of the changes"


# --- the least case --------------------------------------------------------------------------

COUNTS = ("model.layers", "microbatches", "micro_batch_size")
"""Sizes that are made smaller, in this order, after steps and ranks."""
PLAIN = (
    "stress", "graph", "compile", "taps", "fsdp.", "optim.", "data.", "flush_every", "ledger",
    "graph_optimizer", "stress_seed", "fp8", "model.dropout",
)  # fmt: skip
"""Settings that are put back to what they are by default, where both have them alike."""
CAPTURED, RANKS, MAX_LAYOUTS = "graph_layers", "ranks", 12
DEFAULTS = leaves_of(TrainConfig().to_dict())


def first_failing(values: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first of ordered values from which on all fail; None if none was seen to.

    The first one is asked first. A value after the last is taken to fail: where those that are
    asked pass, the answer lies behind them. None is asked twice.
    """
    if not values or fails(values[0]):
        return values[0] if values else None
    place = bisect_left(values, True, lo=1, key=fails)
    return values[place] if place < len(values) else None


@dataclass(frozen=True, kw_only=True)
class LeastCase:
    """What is left of a failing case.

    Attributes:
        reference, candidate: its runs.
        message: of its verdict.
        made: what was made smaller, in words: `steps 8 -> 4`.
        passed: layouts of fewer ranks that do not fail: `dp 2 tp 2`.
        stopped: why the search ended before its end; "" if it did not.
    """

    reference: RunSpec
    candidate: RunSpec
    message: str
    made: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    stopped: str = ""


def find_least(judged: Judged, reference: RunSpec, candidate: RunSpec) -> LeastCase:
    """Make a failing case as small as it goes.

    Args:
        judged: answers whether a case fails in the same way.
        reference, candidate: runs that do.
    """
    return _Shrinking(judged, reference, candidate).carry_out()


class _Shrinking:
    def __init__(self, judged: Judged, reference: RunSpec, candidate: RunSpec) -> None:
        self._judged, self._pair = judged, (reference, candidate)
        self._first = self._leaves
        self._changed = {change.leaf for change in LegChanges(reference, candidate).changes}
        self._passed: list[str] = []

    @property
    def _leaves(self) -> dict[str, Any]:
        """Settings of the candidate; the ranks of a program are no part of its configuration."""
        spec = self._pair[1]
        ranks = {} if capabilities_of(spec.config).layouts else {RANKS: spec.world_size}
        return leaves_of(spec.config) | ranks

    def carry_out(self) -> LeastCase:
        stopped = ""
        try:
            if (program := program_of(self._pair[1].config)) is not None:
                self._declared(program.smaller)
            else:
                self._steps()
                self._ranks()
                for leaf in COUNTS:
                    self._count(leaf)
                self._captured_layers()
                self._settings()
        except OutOfBudget as error:
            stopped = str(error)
        verdict, now = self._judged.verdicts.get(self._pair[1].key), self._leaves
        return LeastCase(
            reference=self._pair[0], candidate=self._pair[1],
            message=verdict.message if verdict is not None else "",
            made=tuple(
                f"{leaf} {_words(value)} -> {_words(now[leaf])}"
                for leaf, value in self._first.items() if now[leaf] != value
            ),
            passed=tuple(self._passed), stopped=stopped,
        )  # fmt: skip

    # --- one try

    def _try(self, **leaves: Any) -> bool:
        """Take other values in both, if the case still fails the same way with them."""
        return self._asked((_with(self._pair[0], leaves), _with(self._pair[1], leaves))) == FAILS

    def _asked(self, pair: tuple[RunSpec, RunSpec]) -> Answer:
        if any(map(why_illegal, pair)) or pair[0].world_size != pair[1].world_size:
            return UNRESOLVED
        if pair[0].key == pair[1].key:
            return UNRESOLVED
        before, ranks = self._leaves, pair[1].world_size
        now = leaves_of(pair[1].config) | ({RANKS: ranks} if RANKS in before else {})
        told = ", ".join(f"{leaf} {_words(v)}" for leaf, v in now.items() if v != before.get(leaf))
        words = f"does it still fail with {told}?"
        answer = self._judged.answer(pair[1], reference=pair[0], words=words)
        if answer == FAILS:
            self._pair = pair
        return answer

    def _is_legal(self, **leaves: Any) -> bool:
        return not any(why_illegal(_with(spec, leaves)) for spec in self._pair)

    def _count(self, leaf: str) -> None:
        """The least value that fails, as far as it is one from which on all do."""
        if leaf not in self._changed:
            legal = [n for n in range(1, int(self._leaves[leaf])) if self._is_legal(**{leaf: n})]
            first_failing(legal, lambda value: self._try(**{leaf: value}))

    # --- what is made smaller

    def _declared(self, smaller: Mapping[str, str]) -> None:
        """What a program says may be smaller: `layers` to `args.n_layers`, `ranks` to `ranks`."""
        for name, leaf in smaller.items():
            if type(self._first.get(leaf)) is int and leaf not in self._changed:
                self._steps() if name == "steps" else self._count(leaf)

    def _steps(self) -> None:
        """Up to the step that was seen to be bad; faults that are planted need theirs."""
        steps = int(self._leaves["steps"])
        verdict = self._judged.verdicts.get(self._pair[1].key)
        found = verdict.difference.step + 1 if verdict and verdict.difference else 0
        if found and found < steps and self._is_legal(steps=found) and self._try(steps=found):
            return
        legal = [n for n in range(max(found, 1), steps) if self._is_legal(steps=n)]
        first_failing(legal, lambda value: self._try(steps=value))

    def _ranks(self) -> None:
        """Fewer ranks, the fewest first: degrees are halved, and what needs them goes."""
        if any(leaf.startswith("parallel.") for leaf in self._changed):
            return
        for layout in sorted(self._smaller_layouts(), key=_size)[:MAX_LAYOUTS]:
            answer = self._asked((_with(self._pair[0], layout), _with(self._pair[1], layout)))
            if answer == FAILS:
                return
            if answer == PASSES:
                self._passed.append(layout_words(layout))

    def _smaller_layouts(self) -> Iterator[dict[str, Any]]:
        now = self._leaves
        degrees = [f"parallel.{axis}" for axis in DEGREES]
        for chosen in itertools.product(*(_halves(int(now[leaf])) for leaf in degrees)):
            layout: dict[str, Any] = dict(zip(degrees, chosen, strict=True))
            if layout["parallel.tp"] == 1:
                layout["parallel.sequence_parallel"] = False
            if layout["parallel.pp"] == 1:
                layout["parallel.pp_chunks"] = 1
            smaller = world_size_of(config_of({**now, **layout})) < self._pair[1].world_size
            if smaller and self._is_legal(**layout):
                yield layout

    def _captured_layers(self) -> None:
        """Where the candidate alone captures: the smallest range of layers that it must capture."""
        if "graph" not in self._changed:
            return
        last = int(self._leaves["model.layers"]) - 1
        first, last = map(int, self._leaves[CAPTURED] or (0, last))

        def fails(first: int, last: int) -> bool:
            smaller = _with(self._pair[1], {CAPTURED: [first, last]})
            return self._asked((self._pair[0], smaller)) == FAILS

        end = first_failing(range(first, last), lambda end: fails(first, end))
        last = last if end is None else end
        first_failing(range(last, first, -1), lambda begin: fails(begin, last))

    def _settings(self) -> None:
        """What both have alike, and need not have: all of it at once, else one by one."""
        plain = {
            leaf: DEFAULTS[leaf]
            for leaf, value in leaves_of(self._pair[0].config).items()
            if leaf.startswith(PLAIN) and leaf != CAPTURED and value != DEFAULTS[leaf]
            and leaf not in self._changed
            and not (leaf == "taps" and "taps" in self._judged.case.checks)
        }  # fmt: skip
        if len(plain) > 1 and self._try(**plain):
            return
        for leaf, value in plain.items():
            self._try(**{leaf: value})


def _with(spec: RunSpec, leaves: Mapping[str, Any]) -> RunSpec:
    if not capabilities_of(spec.config).layouts:
        spec = with_steps(spec, leaves.get("steps", spec.config["steps"]))
        taken = {leaf: value for leaf, value in leaves.items() if leaf not in ("steps", RANKS)}
        config = config_of({**leaves_of(spec.config), **taken})
        return dataclasses.replace(
            spec, config=config, world_size=leaves.get(RANKS, spec.world_size)
        )
    config = config_of({**leaves_of(spec.config), **leaves})
    world_size = world_size_of(config)
    plants = [
        dataclasses.replace(plant, rank=LAST_RANK)
        if "rank" in CATALOGUE[plant.fault].takes and plant.rank >= world_size
        else plant
        for plant in plants_of(spec)
    ]
    return with_plants(dataclasses.replace(spec, config=config, world_size=world_size), plants)


def _halves(degree: int) -> list[int]:
    """A degree and its halves: 8, 4, 2, 1."""
    return [degree, *_halves(degree // 2)] if degree > 1 else [degree]


def layout_words(layout: Mapping[str, Any]) -> str:
    """`dp 2 tp 2`, `one rank`."""
    degrees = {axis: int(layout[f"parallel.{axis}"]) for axis in DEGREES}
    return " ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1) or "one rank"


def _size(layout: dict[str, Any]) -> tuple[int, int]:
    """Sort key: fewest ranks first; of those, the one with the most axes left as they are."""
    degrees = [layout[f"parallel.{axis}"] for axis in DEGREES]
    return world_size_of(config_of(layout)), -sum(degree > 1 for degree in degrees)


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
