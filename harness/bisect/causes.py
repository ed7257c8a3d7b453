"""Which differences between the runs of a failing case make it fail, and the least such case.

A question is the reference with some of the changes as its candidate. The set in hand has been seen
to fail at every moment: an answer that is `unresolved`, or luck, makes a search longer and never
its result untrue. After each cause, one change of every known cause is left out, in every way: what
still fails holds another, of this failure or one that it hides; where every way passes, all are
known. The least case has both runs made smaller alike, as long as they fail as they did.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_core.config import DEGREES, TrainConfig
from harness.bisect.differences import (
    RunChanges,
    config_of,
    leaves_of,
    why_illegal,
    with_steps,
    world_size_of,
)
from harness.bisect.experiments import (
    Answer,
    Asker,
    Failure,
    Judged,
    NeverFails,
    RepeatPolicy,
    failure_of,
)
from harness.faults.catalogue import CATALOGUE
from harness.program.spec import program_of
from harness.records import CaseSpec, RunSpec, Verdict, each_of, joined
from harness.scenario.settings import LAST_RANK
from harness.values import Json

Changes = frozenset[str]
MAX_CAUSES = 8
MAX_WAYS = 32
"""Ways to leave a change of each cause out that are asked."""


@dataclass(frozen=True, kw_only=True)
class FoundCause(Json):
    """A smallest set of changes that fails by itself, as the case or in a way that it hides.

    `unproven` are those without which it cannot be run, so they may not be at fault.
    """

    changes: tuple[str, ...]
    unproven: tuple[str, ...]
    failure: Failure

    def __str__(self) -> str:
        """For people: `plant: ulp in step 3 and graph: attn together (failed diverged)`."""
        together = " together" if len(self.changes) > 1 else ""
        return f"{' and '.join(self.changes) or 'none of the changes'}{together} ({self.failure})"


@dataclass(frozen=True, kw_only=True)
class FoundCauses(Json):
    """What a search among the differences of two runs has found.

    `causes` are all there are if it is `complete`, those of the case's own failure first;
    `num_questions` counts sets of changes that were asked, `notes` say what is not known.
    """

    candidates: tuple[str, ...]
    causes: tuple[FoundCause, ...] = ()
    complete: bool = False
    num_questions: int = 0
    policy: RepeatPolicy | None = None
    notes: tuple[str, ...] = ()


def find_causes(case: CaseSpec, verdict: Verdict, asker: Asker) -> FoundCauses:
    """The smallest sets of differences between the runs of a failed case that still fail."""
    changes, why = RunChanges(case.reference, case.candidate), ""
    if verdict.what == "nondeterministic_reference":
        why = "the reference differs from its own second run, so no difference is the cause"
    elif not changes.names:
        why = "nothing to search: the configurations do not differ"
    elif verdict.outcome in ("passed", "skipped"):
        why = f"nothing to search: the case {verdict.outcome}"
    if why:
        return FoundCauses(candidates=changes.names, notes=(why,))
    return _Search(case, verdict, asker, changes).carry_out()


class _Search:
    def __init__(self, case: CaseSpec, verdict: Verdict, asker: Asker, changes: RunChanges) -> None:
        self._case, self._asker, self._changes = case, asker, changes
        self._names = changes.names
        self._judged = self._judge(self._names, verdict)
        self._found = FoundCauses(candidates=self._names)
        self._legal: dict[Changes, bool] = {}
        self._asked: dict[Changes, Answer] = {}

    def carry_out(self) -> FoundCauses:
        try:
            within: Changes | None = frozenset(self._names)
            while within is not None and len(self._found.causes) < MAX_CAUSES:
                self._search(within)
                within = self._still_failing()
        except NeverFails as error:
            self._note(str(error))
        return replace(self._found, num_questions=len(self._asked))

    def _note(self, told: str) -> None:
        self._found = replace(self._found, notes=(*self._found.notes, told))

    def _judge(self, changes: Iterable[str], verdict: Verdict) -> Judged:
        """Who answers for a failure that was seen with some of the changes."""
        case = replace(self._case, candidate=self._changes.run_with(set(changes)))
        return Judged(case, failure_of(verdict), self._asker, verdict)

    def _search(self, within: Changes) -> None:
        """One cause, among changes that fail together as `self._judged` was seen to."""
        policy = self._judged.learn(4 * len(within).bit_length() + 4)
        self._found = replace(self._found, policy=self._found.policy or policy)
        changes, unproven = self._trimmed(self._halved(self._ordered(within)))
        cause = FoundCause(changes=changes, unproven=unproven, failure=self._judged.failure)
        self._found = replace(self._found, causes=(*self._found.causes, cause))

    def _answer(self, changes: Iterable[str], *, sure: bool = False) -> Answer:
        asked = frozenset(changes)
        if asked not in self._legal:
            self._legal[asked] = not self._changes.why_illegal(asked)
        if not self._legal[asked]:
            return "unresolved"
        if not asked and self._judged.policy.always:
            return "passes"  # the reference itself, which its control has confirmed
        words = f"does it fail with {self._words(asked)}?"
        answer = self._judged.answer(self._changes.run_with(asked), words=words, sure=sure)
        self._asked[asked] = answer
        return answer

    def _fails(self, changes: Iterable[str], *, sure: bool = False) -> bool:
        return self._answer(changes, sure=sure) == "fails"

    def _halved(self, whole: tuple[str, ...]) -> tuple[str, ...]:
        """A failing subset: the end of the shortest failing prefix is kept, again and again."""
        kept: tuple[str, ...] = ()
        while whole and not self._fails(kept):
            # Invariant: `kept` with the first `high` of `whole` fails.
            low, high = 0, len(whole)
            while high - low > 1:
                middle = (low + high) // 2
                fails = self._fails((*kept, *whole[:middle]))
                low, high = (low, middle) if fails else (middle, high)
            kept, whole = (*kept, whole[high - 1]), whole[: high - 1]
        return self._ordered(kept)

    def _trimmed(self, failing: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A set of which no change can be left out; those without which it cannot be run."""
        while True:
            whole = frozenset(failing)
            left: tuple[str, ...] | None = next(
                ((c,) for c in failing if self._fails(whole - {c}, sure=True)), None
            )
            unproven = tuple(c for c in failing if self._answer(whole - {c}) == "unresolved")
            if left is None:
                # What cannot go alone may go with others that it needs, or that need it.
                groups = (*itertools.combinations(unproven, 2), unproven)
                left = next((g for g in groups if g and self._fails(whole - set(g))), None)
            if left is None:
                return failing, unproven
            failing = tuple(c for c in failing if c not in left)

    def _still_failing(self) -> Changes | None:
        """Changes that fail without one of each cause, if any do: `self._judged` has how."""
        settled, was_asked = True, False
        for number, left_out in enumerate(self._ways()):
            rest = frozenset(self._names) - left_out
            if number == MAX_WAYS:
                self._note(f"not more than {MAX_WAYS} ways to leave causes out were asked")
                return None
            answer = self._answer(rest, sure=True)
            was_asked |= self._legal[rest]
            if not self._legal[rest] or answer == "passes":
                continue
            verdict = self._judged.seen[self._changes.run_with(rest).key]
            if verdict.outcome in ("failed", "incomparable"):
                self._judged = self._judge(rest, verdict)
                return rest
            settled = False
            self._note(
                f"with {self._words(rest)} it {failure_of(verdict)}, which no cause explains"
            )
        self._found = replace(self._found, complete=settled and was_asked)
        return None

    def _ways(self) -> Sequence[Changes]:
        causes = self._found.causes
        if not all(cause.changes for cause in causes):
            self._note("it fails without any of the changes, so none of them is the cause")
            return ()
        ways = set(map(frozenset, itertools.product(*(c.changes for c in causes))))
        least = [way for way in ways if not any(other < way for other in ways)]
        return sorted(least, key=lambda way: [n in way for n in self._names], reverse=True)

    def _ordered(self, changes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(changes)
        return tuple(name for name in self._names if name in chosen)

    def _words(self, changes: Iterable[str]) -> str:
        ordered = self._ordered(changes)
        all_of_them = len(ordered) == len(self._names)
        return "all changes" if all_of_them else " + ".join(ordered) or "none of the changes"


# --- the least case --------------------------------------------------------------------------

COUNTS = ("model.layers", "microbatches", "micro_batch_size")
"""Sizes that are made smaller, in this order, after steps and ranks."""
PLAIN = (
    "stress", "graph", "compile", "taps", "fsdp.", "optim.", "data.", "flush_every", "ledger",
    "graph_optimizer", "stress_seed", "fp8", "model.dropout", "recompute", "fused_experts",
    "fused_rope", "resume_at", "resume_from.",
)  # fmt: skip
"""Settings that are put back to what they are by default, where both have them alike."""
RANKS, MAX_LAYOUTS = "ranks", 12
DEFAULTS = leaves_of(TrainConfig().to_dict())


def first_failing(values: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first of ordered values from which on all fail; None if none was seen to.

    The first one is asked first, as most faults need little; none is asked twice.
    """
    if not values or fails(values[0]):
        return values[0] if values else None
    place = bisect_left(values, True, lo=1, key=fails)
    return values[place] if place < len(values) else None


class LeastCase:
    """What is left of two runs that fail as `judged` asks, once they are as small as it goes.

    `passed` are layouts of fewer ranks that do not fail (`dp 2 tp 2`).
    """

    def __init__(self, judged: Judged, reference: RunSpec, candidate: RunSpec) -> None:
        self._judged, self.reference, self.candidate = judged, reference, candidate
        self._first = self._leaves
        self._changed = {change.leaf for change in RunChanges(reference, candidate).changes}
        self.passed: list[str] = []
        self._shrink()

    @property
    def made(self) -> tuple[str, ...]:
        """What was made smaller, in words: `steps 8 -> 4`."""
        now = self._leaves
        return tuple(
            f"{leaf} {_words(value)} -> {_words(now[leaf])}"
            for leaf, value in self._first.items() if now[leaf] != value
        )  # fmt: skip

    def _shrink(self) -> None:
        program = program_of(self.candidate.config)
        if program is not None:
            # What it says may be smaller: `layers` to `args.n_layers`, `ranks` to `ranks`.
            for name, leaf in program.smaller.items():
                if type(self._first.get(leaf)) is int and leaf not in self._changed:
                    self._steps() if name == "steps" else self._count(leaf)
            return
        self._steps()
        self._ranks()
        for leaf in COUNTS:
            self._count(leaf)
        self._settings()

    @property
    def _leaves(self) -> dict[str, Any]:
        spec = self.candidate
        ranks = {} if spec.is_builtin else {RANKS: spec.world_size}
        return leaves_of(spec.config) | ranks

    def _try(self, **leaves: Any) -> Answer:
        """Whether the case still fails with other values in both runs, which are kept if so."""
        reference, candidate = _with(self.reference, leaves), _with(self.candidate, leaves)
        is_pair = reference.world_size == candidate.world_size and reference.key != candidate.key
        if not is_pair or why_illegal(reference) or why_illegal(candidate):
            return "unresolved"
        before = self._leaves
        now = leaves_of(candidate.config) | {RANKS: candidate.world_size}
        told = (f"{k} {_words(now[k])}" for k in now if k in before and now[k] != before[k])
        words = f"does it still fail with {', '.join(told)}?"
        answer = self._judged.answer(candidate, reference=reference, words=words)
        if answer == "fails":
            self.reference, self.candidate = reference, candidate
        return answer

    def _fails(self, **leaves: Any) -> bool:
        return self._try(**leaves) == "fails"

    def _is_legal(self, **leaves: Any) -> bool:
        pair = self.reference, self.candidate
        return not any(why_illegal(_with(spec, leaves)) for spec in pair)

    def _count(self, leaf: str) -> None:
        """The least value that fails, as far as it is one from which on all do."""
        if leaf not in self._changed:
            legal = [n for n in range(1, int(self._leaves[leaf])) if self._is_legal(**{leaf: n})]
            first_failing(legal, lambda value: self._fails(**{leaf: value}))

    def _steps(self) -> None:
        """Up to the step that was seen to be bad; faults that are planted need theirs."""
        steps = int(self._leaves["steps"])
        verdict = self._judged.seen.get(self.candidate.key)
        found = verdict.difference.step + 1 if verdict and verdict.difference else 0
        if found and found < steps and self._is_legal(steps=found) and self._fails(steps=found):
            return
        legal = [n for n in range(max(found, 1), steps) if self._is_legal(steps=n)]
        first_failing(legal, lambda value: self._fails(steps=value))

    def _ranks(self) -> None:
        """Fewer ranks, the fewest first: degrees are halved, and what needs them goes."""
        if any(leaf.startswith("parallel.") for leaf in self._changed):
            return
        for layout in sorted(self._smaller_layouts(), key=_size)[:MAX_LAYOUTS]:
            answer = self._try(**layout)
            if answer == "fails":
                return
            if answer == "passes":
                named = ((axis, int(layout[f"parallel.{axis}"])) for axis in DEGREES)
                told = " ".join(f"{axis} {n}" for axis, n in named if n > 1)
                self.passed.append(told or "one rank")

    def _smaller_layouts(self) -> Iterator[dict[str, Any]]:
        now = self._leaves
        degrees = [f"parallel.{axis}" for axis in DEGREES]
        for chosen in itertools.product(*(_halves(int(now[leaf])) for leaf in degrees)):
            layout: dict[str, Any] = dict(zip(degrees, chosen, strict=True))
            layout |= {"parallel.sequence_parallel": False} if layout["parallel.tp"] == 1 else {}
            layout |= {"parallel.pp_chunks": 1} if layout["parallel.pp"] == 1 else {}
            smaller = world_size_of(config_of({**now, **layout})) < self.candidate.world_size
            if smaller and self._is_legal(**layout):
                yield layout

    def _settings(self) -> None:
        """What both have alike, and need not have: all of it at once, else one by one."""
        fixed = {*self._changed, "graph_layers", *({"taps"} & self._judged.case.checks.keys())}
        plain = {
            leaf: DEFAULTS[leaf] for leaf, value in leaves_of(self.reference.config).items()
            if leaf.startswith(PLAIN) and leaf not in fixed and value != DEFAULTS[leaf]
        }  # fmt: skip
        if len(plain) > 1 and self._fails(**plain):
            return
        for leaf, value in plain.items():
            self._try(**{leaf: value})


def _with(spec: RunSpec, leaves: Mapping[str, Any]) -> RunSpec:
    if not spec.is_builtin:
        spec = with_steps(spec, leaves.get("steps", spec.config["steps"]))
        taken = {leaf: value for leaf, value in leaves.items() if leaf not in ("steps", RANKS)}
        config, ranks = config_of(leaves_of(spec.config) | taken), spec.world_size
        return replace(spec, config=config, world_size=leaves.get(RANKS, ranks))
    config = config_of({**leaves_of(spec.config), **leaves})
    world_size = world_size_of(config)
    plants = [
        replace(plant, rank=LAST_RANK)
        if "rank" in CATALOGUE[plant.fault].takes and plant.rank >= world_size else plant
        for plant in each_of(spec.plant)
    ]  # fmt: skip
    return replace(spec, config=config, world_size=world_size, plant=joined(plants))


def _halves(degree: int) -> list[int]:
    return [degree, *_halves(degree // 2)] if degree > 1 else [degree]


def _size(layout: dict[str, Any]) -> tuple[int, int]:
    """Sort key: fewest ranks first; of those, the one with the most axes left as they are."""
    degrees = [layout[f"parallel.{axis}"] for axis in DEGREES]
    return world_size_of(config_of(layout)), -sum(degree > 1 for degree in degrees)


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
