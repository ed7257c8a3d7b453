"""Whose a collective is: asked in eager steps, learned for replays, never guessed."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.engine.whereabouts import Place
from harness.worker import collectives
from harness.worker.collectives import Notes

GATHER, REDUCE, WAIT = (
    SimpleNamespace(_schema=SimpleNamespace(name=name))
    for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", collectives._WAIT)
)
SEND = SimpleNamespace(_schema=SimpleNamespace(name="c10d::send"))


class Rank:
    """Runs collectives of (0, 1) as a rank would, with `unit` at work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, self.unit = 0, ""
        self.places: list[Place] = []
        self.notes = Notes(self, lambda: self.step, eager_steps=2)  # type: ignore[arg-type]
        monkeypatch.setattr(collectives, "_unit_at_work", lambda: self.unit)
        monkeypatch.setattr(self.notes, "_group", lambda args: (0, 1))

    def write(self, place: Place) -> None:
        self.places.append(place)

    def take(self, step: int, *calls: tuple[Any, str]) -> list[str]:
        """Labels of the collectives of a step."""
        self.step, labels = step, []
        for func, self.unit in calls:
            self.notes.entering(func, ())
            labels.append(self.places[-1].label)
            self.notes.left()
        return labels


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_replay_has_the_labels_of_the_last_eager_step(rank: Rank) -> None:
    """Not those of the first one, which does more, nor those of the step that captures."""
    rank.take(0, (GATHER, "once"), (GATHER, "root"), (GATHER, "layers.0"), (REDUCE, "layers.0"))
    rank.take(1, (GATHER, "root"), (GATHER, "layers.0"), (REDUCE, "layers.0"))
    captured = rank.take(2, (GATHER, ""), (GATHER, "root"), (GATHER, "layers.0"))
    assert captured[1:] == ["root", "layers.0"]
    assert rank.take(3, (GATHER, ""), (GATHER, ""), (REDUCE, ""), (REDUCE, "")) == [
        "root", "layers.0", "layers.0", "",
    ]  # fmt: skip


def test_another_order_has_no_labels(rank: Rank) -> None:
    """From the first operator on that is not the learned one; the next step is looked at anew."""
    rank.take(1, (GATHER, "root"), (REDUCE, "layers.0"), (GATHER, "layers.1"))
    assert rank.take(3, (GATHER, ""), (GATHER, ""), (GATHER, "")) == ["root", "", ""]
    assert rank.take(4, (GATHER, ""), (REDUCE, "")) == ["root", "layers.0"]


def test_what_is_entered_is_counted_and_what_came_back_is_not_inside(rank: Rank) -> None:
    """Waiting for a result is inside of the collective that gives it; messages do not count."""
    rank.take(0, (GATHER, "root"), (SEND, ""))
    rank.step = 1
    rank.notes.entering(REDUCE, ())
    rank.notes.left()
    rank.notes.entering(WAIT, ())
    seen = [(p.operator.partition("::")[2], p.is_inside, p.entered["0,1"]) for p in rank.places]
    assert seen == [
        ("_allgather_base_", True, 1), ("_allgather_base_", False, 1),
        ("send", False, 1), ("send", False, 1),
        ("_reduce_scatter_base_", True, 2), ("_reduce_scatter_base_", False, 2),
        ("_reduce_scatter_base_", True, 2),
    ]  # fmt: skip
