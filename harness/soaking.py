"""What a soak asks of a run: how long it goes on, whose turn it is, how long it may stand still.

    by          amount                      the run ends
    steps       steps                       after so many, as any run
    replays     launches of its graphs      once every rank has made so many
    duration    seconds of training         once rank 0 has trained so long

By replays and by duration a run takes `steps` of its configuration at least, and as many as one
turn of every stressor has; it ends on all ranks at the same step, a multiple of `flush_every`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.codec import Json, RecordError

DEFAULT_STALL_S = 300.0
LEAST_STEPS = 64
"""Of a run whose memory can be tested for growth (`harness.checks.memory`)."""
ALWAYS_ON = ("races",)
"""Stressors that take no turns: who watches the order of accesses must not look away."""
SoakBy = Literal["steps", "replays", "duration"]


@dataclass(frozen=True, kw_only=True)
class SoakSpec(Json):
    """How a run is soaked.

    Attributes:
        by: what `amount` counts: steps, replays or seconds.
        turn_steps: steps until the next stressor's turn; 0: all are at work at all times.
        stall_s: seconds without a record of any rank after which the run counts as hung.
    """

    by: SoakBy
    amount: float
    turn_steps: int = 0
    stall_s: float = DEFAULT_STALL_S

    def __post_init__(self) -> None:
        super().__post_init__()
        # As in `RunSpec`: an int would give another key than the same value read from JSON.
        for name in ("amount", "stall_s"):
            value = float(getattr(self, name))
            if not 0 < value < float("inf"):
                raise RecordError(f"{name}: expected a number > 0, got {value!r}")
            object.__setattr__(self, name, value)

    @property
    def is_open(self) -> bool:
        """Whether the number of steps is known only when the run ends."""
        return self.by != "steps"

    @property
    def asked(self) -> str:
        """The amount in words: `20000 replays`."""
        return f"{self.amount:g} s of training" if self.by == "duration" \
            else f"{self.amount:.0f} {self.by}"  # fmt: skip


def taking_turns(names: Sequence[str]) -> list[str]:
    """Those of some stressors that are at work one at a time."""
    return [name for name in names if name not in ALWAYS_ON]


def turn_of(names: Sequence[str], seed: int, number: int) -> tuple[str, ...]:
    """Who is at work in turn `number`: one stressor, and those that always are.

    Each has one turn a cycle; the order is drawn anew every cycle, the same on all ranks.
    """
    turning = taking_turns(names)
    always = tuple(name for name in names if name in ALWAYS_ON)
    if not turning:
        return always
    cycle, place = divmod(number, len(turning))
    # Text seeds Python's generator by its SHA-512: the same everywhere.
    random.Random(f"{seed}/{cycle}").shuffle(turning)
    return (turning[place], *always)
