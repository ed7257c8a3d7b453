"""Runs the legs of a fault on ranks, and says what sees it.

column      the leg with the fault is compared with an eager one without, and without stress
plain       the loss at five decimals, the bits of the loss, the last weights, all digests
ledger      addresses are checked before each replay
others      a stressor each: bits of the loss, and digests
"""

import re
import signal
import struct
from dataclasses import dataclass

from tests.dist.rank_pool import RankError
from tests.graph_faults.catalogue import FAULTS
from tests.graph_faults.programs import Leg, Planting, Shown, make_device, run_leg

STRESS = ("jitter", "poison", "scramble", "races")
COLUMNS = ("plain", "ledger", *STRESS)
PLAIN_ASPECTS = ("loss5", "loss", "weights", "digests")
NOT_SEEN = "·"
MOST_WORDS = 160
"""Characters of a message in the table."""


@dataclass(frozen=True)
class Legs:
    """Runs of one fault: how each rank saw each leg.

    Attributes:
        reference: eager, without the fault.
        clean, planted: graphed, by column.
        refused: with the check that stops the fault, if the plant takes one away.
        lost: how a rank ended that did not come back, so that there is nothing to compare.
        last_words: what is known of its end.
    """

    reference: list[Shown]
    clean: dict[str, list[Shown]]
    planted: dict[str, list[Shown]]
    refused: list[Shown]
    lost: str = ""
    last_words: str = ""


def leg_of(column: str, *, planted: bool) -> Leg:
    """How a column runs its program."""
    stress = (column,) if column in STRESS else ()
    return Leg(planted=planted, ledger=column == "ledger", stress=stress)


def run_on_rank(name: str, columns: tuple[str, ...], device_kind: str, with_clean: bool) -> Legs:
    """All legs of a fault, as this rank sees them (each in a list of one)."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    device = make_device(device_kind)

    def run(leg: Leg, planting: Planting) -> list[Shown]:
        return [run_leg(fault.maker, leg, planting, device)]

    clean = {c: run(leg_of(c, planted=False), fault.right) for c in columns if with_clean}
    planted = {c: run(leg_of(c, planted=True), fault.plant) for c in columns}
    refused = [] if fault.refused is None else run(Leg(planted=True), fault.refused)
    return Legs(run(Leg(graphed=False), fault.right), clean, planted, refused)


def join(of_ranks: list[Legs]) -> Legs:
    """What all ranks saw."""
    first = of_ranks[0]
    return Legs(
        [legs.reference[0] for legs in of_ranks],
        {c: [legs.clean[c][0] for legs in of_ranks] for c in first.clean},
        {c: [legs.planted[c][0] for legs in of_ranks] for c in first.planted},
        [shown for legs in of_ranks for shown in legs.refused],
    )


def lost_legs(columns: tuple[str, ...], error: RankError) -> Legs:
    """What there is of a fault whose ranks did not come back."""
    lost = {"died": "died", "hang": "no answer"}.get(error.kind, f"raised {error.kind}")
    if error.exit_code < 0:
        lost = f"died by {signal.Signals(-error.exit_code).name}"
    elif error.exit_code:
        lost = f"died with exit code {error.exit_code}"
    return Legs([], {}, {column: [] for column in columns}, [], lost, str(error))


# ---- what is seen


def first_difference(aspect: str, reference: list[Shown], other: list[Shown]) -> str:
    """The first step in which an aspect differs on any rank, `stop N`, or that it is not seen."""
    found = [_first(aspect, one, two) for one, two in zip(reference, other, strict=True)]
    seen = [step for step in found if step >= 0]
    stopped = min((s.stopped_at for s in other if s.stopped_at >= 0), default=-1)
    if seen:
        return "end" if aspect == "weights" else str(min(seen))
    return f"stop {stopped}" if stopped >= 0 else NOT_SEEN


def _first(aspect: str, reference: Shown, other: Shown) -> int:
    if aspect == "weights":
        return 0 if other.weights and other.weights != reference.weights else -1
    steps = zip(_aspect(aspect, reference), _aspect(aspect, other), strict=False)
    return next((number for number, (one, two) in enumerate(steps) if one != two), -1)


def _aspect(aspect: str, shown: Shown) -> list[object]:
    if aspect == "loss5":
        return [f"{struct.unpack('f', struct.pack('i', bits))[0]:.5f}" for bits in shown.losses]
    return list(shown.losses if aspect == "loss" else shown.digests)


def cells(legs: Legs, column: str, *, planted: bool = True) -> str:
    """A column's cell: what of its aspects is seen, and in which step."""
    if legs.lost:
        return " | ".join([legs.lost] * (len(PLAIN_ASPECTS) if column == "plain" else 1))
    shown = (legs.planted if planted else legs.clean)[column]
    if column == "ledger":
        stale = [s for s in shown if s.said.startswith("StaleAddress")]
        return f"stop {stale[0].stopped_at}" if stale else NOT_SEEN
    aspects = PLAIN_ASPECTS if column == "plain" else ("loss", "digests")
    found = [first_difference(aspect, legs.reference, shown) for aspect in aspects]
    if len(set(found)) == 1 and found[0].startswith("stop"):
        return found[0] if column != "plain" else " | ".join(found)
    return " | ".join(found) if column == "plain" else " / ".join(found)


def false_alarms(legs: Legs) -> list[str]:
    """Columns that see something in the clean program, or stop it."""
    return [
        column
        for column, shown in legs.clean.items()
        if any(
            first_difference(aspect, legs.reference, shown) != NOT_SEEN for aspect in PLAIN_ASPECTS
        )
    ]


def said(legs: Legs) -> list[tuple[str, str]]:
    """By what, and the message that the first rank got; each message once."""
    if legs.lost:
        return [("the end of a rank", brief(legs.last_words.replace("\n", " ")))]
    found: dict[str, str] = {}
    runs = [*legs.planted.items(), *([("refusal", legs.refused)] if legs.refused else [])]
    for by, shown in runs:
        text = next((s.said for s in shown if s.said), "")
        if text:
            found.setdefault(brief(text), by)
    return [(by, text) for text, by in found.items()]


def brief(text: str) -> str:
    """The first words of a message, without what changes from run to run."""
    line = text.splitlines()[0].replace("|", "\\|")
    line = re.sub(r"CaptureAborted: the capture of \w+ was given up on .*?: rank \d: ", "", line)
    line = re.sub(r"0x[0-9a-f]+", "0x…", line)
    line = re.sub(r"(\w+\.py):\d+", r"\1", line)
    return line if len(line) <= MOST_WORDS else f"{line[:MOST_WORDS].rpartition(' ')[0]} …"
