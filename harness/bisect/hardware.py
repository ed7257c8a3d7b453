"""Is it the hardware or the software: the guilty steps again, on other devices.

    trial       the two runs that part, up to that step, alone on the machine, on devices that are
                said rank by rank (`RunSpec.placed`): GPUs, or sets of CPU cores to which ranks are
                pinned; where it passes, whole runs follow
    placements  as it was; every rank where its neighbour was; halves of the devices alone
    answer      what explains best in which trials which ranks differed first (`weigh`)

Both runs of a trial have the same devices, because NCCL may add in another order on others. Clocks
are not touched: a driver lets only root lock them.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from harness.bisect.differences import between_environments
from harness.bisect.divergence import RNG, RunPair
from harness.bisect.experiments import CONFIDENCE, Asker, judged_by, question_of
from harness.bisect.found import Location
from harness.bisect.locate import EVERYWHERE, SELDOM, failure_of_two, how_it_ended, shortened
from harness.checks.evidence import count, show_ranks
from harness.engine.machine import core_set
from harness.program.spec import program_of
from harness.provenance import host
from harness.records import SAMPLES, WHATS, CaseSpec, RunResult, RunSpec, StartRecord
from harness.repeats import FIRST_REPEAT
from harness.store import CaseRuns
from harness.values import Json

Kind = Literal["device", "rank", "program", "nothing"]
MIN_ROUNDS, MAX_TRIALS = 2, 24
UPDATED = ("optim", "weights")
STRAY = 0.01
"""Of trials that go another way than a suspect has it: something else happened."""
RATES = tuple(SELDOM + (1 - SELDOM) * number / 14 for number in range(15))
"""How often a fault that repeats itself fires in a run, all alike before anything is known."""


@dataclass(frozen=True, kw_only=True)
class Trial(Json):
    """The pair once more: `placed` is the device of each rank, () where the engine had room.

    `failed` is None where it gave no answer, `told` says why, or where it failed; `ranks` are those
    on which it began, () if that is not known.
    """

    placed: tuple[str, ...]
    failed: bool | None
    ranks: tuple[int, ...] = ()
    step: int | None = None
    told: str = ""


@dataclass(frozen=True, kw_only=True)
class Suspect(Json):
    """What a failure may follow, and how probable that is after all trials."""

    kind: Kind
    device: str = ""
    rank: int | None = None
    probability: float = 0.0

    def may_fail(self, placed: Sequence[str], world_size: int) -> frozenset[int]:
        everyone = frozenset(range(world_size))
        if self.kind == "device" and placed:
            return frozenset(rank for rank in everyone if placed[rank] == self.device)
        if self.kind == "rank":
            return frozenset({self.rank or 0})
        return frozenset() if self.kind == "nothing" else everyone

    def __str__(self) -> str:
        return {
            "device": named(self.device), "rank": f"rank {self.rank}",
            "program": "the program", "nothing": "nothing: it does not repeat",
        }[self.kind]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traced(Json):
    """What a failure follows: a kind of suspect, or `undecided`, with what it was decided by.

    `suspects` are the likeliest first; `host` is the machine's, as records have it; `advice` is
    what to do next, `notes` say what the answer does not hold for.
    """

    follows: Kind | Literal["undecided"]
    suspects: tuple[Suspect, ...] = ()
    trials: tuple[Trial, ...] = ()
    devices: tuple[str, ...] = ()
    host: str = ""
    advice: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.suspects:
            return "undecided: no trial gave an answer"
        if self.follows == "undecided":
            likely = [s for s in self.suspects if s.probability >= STRAY][:MOST_NAMED]
            told = ", ".join(f"{suspect} ({suspect.probability:.0%})" for suspect in likely)
            return f"undecided: {told}"
        best = self.suspects[0]
        return f"{best} ({best.probability:.1%}); {self._counts(best)}"

    def _counts(self, best: Suspect) -> str:
        held = [trial for trial in self.trials if trial.failed is not None]
        if best.kind != "device":
            return f"{_failures(held)}, on {count(len({t.placed for t in held}), 'placement')}"
        on = [trial for trial in held if not trial.placed or best.device in trial.placed]
        off = [trial for trial in held if trial not in on]
        ranks = {r for t in on if t.failed and _is_single(t, len(t.placed)) for r in t.ranks}
        told = f", on {show_ranks(ranks)} in turn as each had it" if len(ranks) > 1 else ""
        return f"{_failures(on)} with it{told}" + (f", {_failures(off)} without" if off else "")

    @property
    def rows(self) -> tuple[str, ...]:
        """A line for each placement: how often it failed there, and where."""
        found: list[str] = []
        for placed in dict.fromkeys(trial.placed for trial in self.trials):
            here = [trial for trial in self.trials if trial.placed == placed]
            held = [trial for trial in here if trial.failed is not None]
            told = Counter(trial.told for trial in here if trial.told)
            words = "; ".join(f"{text} ({n} times)" if n > 1 else text for text, n in told.items())
            found.append(f"{where(placed)}: {_failures(held)}{f': {words}' if words else ''}")
        return tuple(found)


MOST_NAMED, GPU = 3, "GPU-"


def where(placed: Sequence[str]) -> str:
    """A placement for people."""
    if not placed:
        return "ranks as the system puts them"
    return ", ".join(f"rank {rank} on {named(device)}" for rank, device in enumerate(placed))


def named(device: str) -> str:
    """A device for people."""
    if device.isdecimal():
        return f"core {device}"
    return device if device.startswith(GPU) else f"cores {device}"


def _failures(trials: Sequence[Trial]) -> str:
    failed = sum(trial.failed is True for trial in trials)
    return f"{failed} of {count(len(trials), 'trial')} failed"


# --- the decision ------------------------------------------------------------------------------


def weigh(
    trials: Sequence[Trial], devices: Iterable[str], world_size: int
) -> tuple[Suspect, ...]:  # fmt: skip
    """Bayes' rule over what the failure may follow, the likeliest first; () without an answer.

    Kinds are alike before the trials, and so are devices, and ranks that some failure singled out.
    A trial in which a suspect is active fails at a rate that is one of `RATES`, first on any of the
    ranks that it may make fail; all else happens in `STRAY` of trials, first on any rank.
    """
    held = [trial for trial in trials if trial.failed is not None]
    if not held:
        return ()
    singled = {
        rank for t in held if t.failed and _is_single(t, world_size) for rank in t.ranks
    }  # fmt: skip
    kinds = [
        [Suspect(kind="device", device=device) for device in dict.fromkeys(devices)],
        [Suspect(kind="rank", rank=rank) for rank in sorted(singled)],
        [Suspect(kind="program")], [Suspect(kind="nothing")],
    ]  # fmt: skip
    weights = [
        (suspect, _likelihood(held, suspect, world_size) / len(kind))
        for kind in kinds for suspect in kind
    ]  # fmt: skip
    whole = sum(weight for _, weight in weights)
    found = (replace(suspect, probability=weight / whole) for suspect, weight in weights)
    return tuple(sorted(found, key=lambda suspect: -suspect.probability))


def _is_single(trial: Trial, world_size: int) -> bool:
    return 0 < len(trial.ranks) < world_size


def _likelihood(held: Sequence[Trial], suspect: Suspect, world_size: int) -> float:
    def of_trial(trial: Trial, rate: float) -> float:
        active = suspect.may_fail(trial.placed, world_size)
        # At rate 1, too, a trial may pass: a stray one.
        fires = min(rate, 1 - STRAY) if active else STRAY
        if not trial.failed:
            return 1 - fires
        ranks = frozenset(trial.ranks) or frozenset(range(world_size))
        expected = len(ranks & active) / len(active) if active else 0.0
        anywhere = len(ranks) / world_size
        return fires * ((1 - STRAY) * expected + STRAY * anywhere if active else anywhere)

    total = 0.0
    for rate in RATES:
        product = 1.0
        for trial in held:
            product *= of_trial(trial, rate)
        total += product
    return total / len(RATES)


def decide(
    trials: Sequence[Trial], devices: Sequence[str], world_size: int, *, moved: bool = False
) -> Traced:  # fmt: skip
    """What trials say. `moved`: the failure was seen on another machine than this one."""
    suspects = weigh(trials, devices, world_size)
    notes = list[str]()
    open_trials = [trial for trial in trials if trial.failed is None]
    if open_trials:
        notes.append(f"{len(open_trials)} of {len(trials)} trials gave no answer")
    found = Traced(
        follows="undecided", suspects=suspects, trials=tuple(trials), devices=tuple(devices),
        host=host(), notes=tuple(notes), advice=MORE,
    )  # fmt: skip
    if not suspects or 2 * len(open_trials) > len(trials):
        return found
    best = suspects[0]
    if moved and best.kind == "nothing":
        told = "the failure was seen on another machine, and not on this one: run it there"
        return replace(found, notes=(*notes, told), advice=told)
    if best.probability < CONFIDENCE:
        alone = len(set(devices)) == 1
        return replace(found, advice=ONE_DEVICE if alone else MORE)
    if best.kind == "nothing":
        tried = sum(trial.failed is False for trial in trials)
        most = 1 - (1 - CONFIDENCE) ** (1 / tried)
        told = f"a failure of less than {most:.0%} of runs is not excluded"
        notes.append(f"{told} ({CONFIDENCE:.0%})")
    advice = _advice(best, found.host)
    return replace(found, follows=best.kind, notes=tuple(notes), advice=advice)


MORE = "undecided: free another device, or run the same command again later with another --out"
ONE_DEVICE = "run it where there is a second device: this one is all that could be tried"


def _advice(best: Suspect, machine: str) -> str:
    if best.kind == "device" and best.device.startswith(GPU):
        return (
            f"take {best.device} of host {machine} out of use; look at its errors (nvidia-smi -q "
            f"-i {best.device}; dmesg | grep Xid), run dcgmi diag -r 3, and replace it"
        )
    if best.kind == "device":
        return (
            f"keep work off {best} of host {machine}; of several, narrow it down: taskset -c "
            f"{best.device} harness bisect --hardware ..."
        )
    return {
        "rank": f"the hardware is not to blame: look at what rank {best.rank} alone does, its data "
        "and its part of the model; without --hardware the command goes on to the cause",
        "program": "the hardware is not to blame: file a bug of the program; without --hardware "
        "the command goes on to the cause",
        "nothing": "it happened once: keep the run folder, and look for errors of that time "
        "(nvidia-smi -q, dmesg)",
    }[best.kind]


# --- placements --------------------------------------------------------------------------------


def devices_of(runs: CaseRuns, gpus: Iterable[str], cores: Iterable[int]) -> list[str]:
    """What ranks may be placed on, those that the failed run had first.

    GPUs, or the cores of this process in as many sets as there are ranks, at least two.
    """
    spec = runs.candidate.spec
    if spec.device == "cuda":
        here = dict.fromkeys(gpus)
        had = (str(start.environment.get("gpu", "")) for start in _starts(runs.candidate))
        return list(dict.fromkeys([*(gpu for gpu in had if gpu in here), *here]))
    held = sorted(cores)
    parts = min(len(held), max(2, spec.world_size))
    cuts = [len(held) * part // parts for part in range(parts + 1)]
    return [core_set(held[a:b]) for a, b in itertools.pairwise(cuts)]


def placements(
    devices: Sequence[str], world_size: int, *, hidden: bool, pinned: bool
) -> list[tuple[str, ...]]:  # fmt: skip
    """Devices of each rank, each placement once; of ranks that are `pinned`, first not so.

    Halves are by each binary digit of a device's number, so that any two devices are told apart.
    They are crowded only if the ranks that fail are `hidden`: nothing else tells devices then.
    """

    def over(some: Sequence[str]) -> tuple[str, ...]:
        return tuple(some[rank % len(some)] for rank in range(world_size))

    def found() -> Iterator[tuple[str, ...]]:
        yield from [()] if pinned else []
        yield (base := over(devices))
        yield base[1:] + base[:1]
        for bit in range((len(devices) - 1).bit_length()):
            for side in (0, 1):
                half = [device for i, device in enumerate(devices) if i >> bit & 1 == side]
                if hidden or len(half) >= world_size:
                    yield over(half)

    return list(dict.fromkeys(found()))


# --- the search --------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two runs that part, or one that fails by itself, twice."""

    reference: RunResult
    other: RunResult


def _failing_pair(runs: CaseRuns) -> Pair:
    """What failed first: the reference by itself, against its control, or the candidate."""
    reference, control = runs.reference, runs.control
    if how_it_ended(reference) is not None:
        return Pair(reference, reference)
    if failure_of_two(reference, control) is not None:
        return Pair(reference, control)
    return Pair(reference, runs.candidate)


def began_on(pair: Pair, place: Location) -> tuple[int, ...]:
    """Ranks on which a failure began, all of them; () where another one may have brought it in.

    That is so of losses (of a later stage) and of gradients, which were reduced before.
    """
    if _kind(place) or place.quantity == "digests" or place.quantity.startswith("taps."):
        return place.ranks
    program = program_of(pair.other.spec.config)
    is_update = place.quantity in UPDATED and place.phase == "optimizer"
    if program is not None and program.every > 1:
        return ()
    if place.step is None or not (is_update or place.quantity in (SAMPLES, RNG)):
        return ()
    groups = UPDATED if is_update else (place.quantity,)
    both = RunPair(*pair)
    return tuple(sorted({t.rank for group in groups for t in both.different(place.step, group)}))


def _kind(place: Location) -> str:
    """How a run ended; "" where runs part."""
    return place.quantity if not place.tensor and place.quantity in WHATS else ""


def follow(
    runs: CaseRuns, asker: Asker, gpus: Iterable[str], cores: Iterable[int]
) -> Traced:  # fmt: skip
    """Make trials until one suspect has `CONFIDENCE`, or `MAX_TRIALS` were made."""
    pair = _failing_pair(runs)
    place, world_size = failure_of_two(*pair), pair.other.spec.world_size
    if place is None:
        return Traced(follows="undecided", notes=("the records of the runs are whole and equal",))
    if between_environments(*pair):
        return Traced(follows="undecided", notes=("the runs were made in other environments",))
    devices = devices_of(runs, gpus, cores)
    hidden = world_size > 1 and len(began_on(pair, place)) in (0, world_size)
    places = placements(
        devices, world_size, hidden=hidden, pinned=pair.other.spec.device == "cpu"
    )  # fmt: skip
    hosts = {str(start.environment.get("host", "")) for start in _starts(pair.other)} - {""}
    how = {"moved": bool(hosts) and host() not in hosts}
    trials: list[Trial] = []
    found = decide(trials, devices, world_size, **how)
    for number in range(max(MIN_ROUNDS, MAX_TRIALS // len(places))):
        # The guilty steps alone, unless it takes more for the failure to come back; where all ranks
        # fail at once, every other time with every call digested, which may tell who was first.
        comes_back = number == 0 or any(trial.failed for trial in trials)
        taps = {"taps": list(EVERYWHERE)} if hidden and comes_back and number % 2 else {}
        specs = [pair.reference.spec, pair.other.spec]
        if comes_back and place.step is not None:
            specs = shortened(specs, max(place.step, 0), **taps)
        trials += [_trial(runs.case, specs, each, number, asker, _kind(place)) for each in places]
        found = decide(trials, devices, world_size, **how)
        if number + 1 >= MIN_ROUNDS and found.follows != "undecided":
            break
    return found


def _trial(
    case: CaseSpec, specs: Sequence[RunSpec], placed: tuple[str, ...], number: int, asker: Asker,
    kind: str,
) -> Trial:  # fmt: skip
    first, second = FIRST_REPEAT + 2 * number, FIRST_REPEAT + 2 * number + 1
    candidate = replace(specs[1], placed=placed, replica=second)
    # What ends by itself needs nothing beside it.
    reference = candidate if kind else replace(specs[0], placed=placed, replica=first)
    question = question_of(case, "place", reference, candidate)
    words = f"does it fail with {where(placed)}?" + f" trial {number + 1}" * (number > 0)
    asked = asker.ask(
        question, words,
        judge=judged_by(lambda *pair: str(failure_of_two(*pair) or "")),
        answer=lambda verdict: verdict.message,
    ).runs  # fmt: skip
    pair = Pair(asked.reference, asked.candidate)
    place = failure_of_two(*pair)
    if any(run.outcome.undecided for run in pair):
        return Trial(placed=placed, failed=None, told="it is not known what ended it")
    if place is None:
        return Trial(placed=placed, failed=False)
    if _kind(place) != kind:
        told = f"it failed in another way: {_kind(place) or 'diverged'}, {place}"
        return Trial(placed=placed, failed=None, told=told)
    began = began_on(pair, place)
    return Trial(placed=placed, failed=True, ranks=began, step=place.step, told=str(place))


def _starts(run: RunResult) -> list[StartRecord]:
    return [records.start for records in run.ranks if records.start is not None]
