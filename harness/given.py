"""What a rank gave to the collectives of a step, as its records have it."""

from dataclasses import dataclass

from harness.codec import Json, RecordError
from harness.records import RankRecords

GIVEN = "given"
"""Name of the event."""


@dataclass(frozen=True, kw_only=True)
class GivenCall(Json):
    """One collective that a rank entered.

    Attributes:
        operator: `allgather_base`.
        label: whose it is, as far as that is known: `layers.1`.
        group: global ranks that take part in it.
        digest: of the tensors that the rank brought along, in hex.
    """

    operator: str
    label: str
    group: tuple[int, ...]
    digest: str


def given_in(records: RankRecords, step: int) -> tuple[GivenCall, ...]:
    """In the order in which the rank entered them; empty where nothing was written down."""
    for event in records.events:
        if event.name == GIVEN and event.step == step:
            calls = event.detail.get("calls")
            try:
                return tuple(GivenCall.from_json(each) for each in calls or ())
            except (RecordError, TypeError):
                return ()
    return ()
