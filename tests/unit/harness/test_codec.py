"""Records go through JSON and back: nothing is lost, nothing is added."""

import dataclasses
from typing import Any

import pytest

from harness.records import EndRecord, ErrorRecord, PlantSpec, RankExit, RunOutcome, RunSpec, dumps
from harness.soaking import SoakSpec

SPEC = RunSpec(
    config={"steps": 2}, device="cpu", world_size=2, timeout_s=5.0,
    plant=PlantSpec(fault="hang", step=1), soak=SoakSpec(by="replays", amount=3.0),
)  # fmt: skip
VALUES: list[Any] = [
    SPEC,
    ErrorRecord(rank=1, step=1, what="oom", type="E", message="m", traceback=""),
    EndRecord(rank=0, steps=1, peak_bytes=1, startup_s=0.5, wall_s=0.5),
    RunOutcome(
        key="k", what="", message="", culprit_rank=None, ranks=(RankExit(rank=0, code=0),),
        started_unix_s=0.0, wall_s=1.0,
    ),
]  # fmt: skip


def without_defaults(value: Any) -> Any:
    """The plain value without the keys whose values are defaults, in what it holds, too."""
    if not dataclasses.is_dataclass(value):
        return [without_defaults(each) for each in value] if isinstance(value, tuple) else value
    return {
        field.name: without_defaults(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_left_out_is_written_again(value: Any) -> None:
    """A default is a value: what is decoded without it is encoded, compared and keyed with it."""
    plain = without_defaults(value)
    assert len(plain) < len(dataclasses.fields(value))
    again = type(value).from_json(plain)
    assert again == value
    assert dumps(again) == dumps(value)
    assert type(value).from_json(again.to_json()) == value
    if isinstance(value, RunSpec):
        assert again.key == value.key
