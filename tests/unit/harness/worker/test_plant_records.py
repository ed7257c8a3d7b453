"""Planted faults of records: each changes what it says and no other line."""

import pytest

from harness.records import PlantSpec, dumps
from harness.worker.plants import PLANTINGS

STEP = 3

LINES = [
    dumps({"kind": "start", "run": "w1-a"}),
    *(
        dumps({"kind": "step", "step": n, "rank": 0, "digests": {"grads": str(n)}})
        for n in range(6)
    ),
    dumps({"kind": "end"}),
]


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        ("drop_step", LINES[:4] + LINES[5:]),
        ("corrupt_record", [*LINES[:4], LINES[4][: len(LINES[4]) // 2], *LINES[5:]]),
        ("repeated_record", [*LINES[:4], LINES[4], *LINES[4:]]),
        ("records_out_of_order", [*LINES[:4], LINES[5], LINES[4], *LINES[6:]]),
        (
            "record_of_another_rank",
            [*LINES[:4], LINES[4].replace('"rank":0', '"rank":1'), *LINES[5:]],
        ),
        (
            "record_of_the_step_before",
            [*LINES[:4], LINES[4].replace('"grads":"3"', '"grads":"2"'), *LINES[5:]],
        ),
        ("record_of_another_run", [LINES[0].replace("w1-a", "w1-x"), *LINES[1:]]),
        ("end_record_lost", LINES[:-1]),
        ("drop_rank", []),
    ],
)
def test_alterations_change_what_they_say(fault: str, changed: list[str]) -> None:
    """Each fault of records changes the lines of its step, or its kind, and no others."""
    make = PLANTINGS[fault].alter
    assert make is not None
    alter = make(PlantSpec(fault=fault, step=STEP))
    assert [written for line in LINES for written in alter(line)] == changed
