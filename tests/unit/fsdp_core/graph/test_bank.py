"""Banks of graphs: captured largest first, installed together, dropped together."""

import gc
import weakref

import pytest
import torch

from fsdp_core.graph.bank import GraphBank
from fsdp_core.model.rope import RopeTable


class Set:
    """Graphs that only tell what happens to them; like a CUDA graph they hold no tensor."""

    def __init__(self, value: int, log: list[str]) -> None:
        self.value, self._log = value, log
        log.append(f"capture {value}")

    def reset(self) -> None:
        """See `GraphSet`."""
        self._log.append(f"reset {self.value}")


def bank_of(*values: int) -> GraphBank[Set]:
    """An empty bank."""
    return GraphBank(values, "context size")


def test_captures_the_largest_first() -> None:
    """Sets are captured by falling value, ranks are brought together before each."""
    log: list[str] = []
    bank = bank_of(1, 8, 2)
    bank.capture(lambda value: Set(value, log), lambda: log.append("meet"))
    assert log == ["meet", "capture 8", "meet", "capture 2", "meet", "capture 1"]
    assert [each.value for each in bank.sets] == [8, 2, 1]
    assert bank.select(2).value == 2


def test_no_set_can_be_selected_before_all_are_there() -> None:
    """While a later set is captured no earlier one may be replayed."""
    seen: list[str] = []
    bank = bank_of(1, 2)

    def capture(value: int) -> Set:
        with pytest.raises(RuntimeError, match="Expected captured graphs for context size 2"):
            bank.select(2)
        assert bank.sets == ()
        return Set(value, seen)

    bank.capture(capture)
    assert bank.select(2).value == 2


def test_a_failure_leaves_no_set() -> None:
    """What was captured before it is dropped, newest first, and so is what was kept for it."""
    log: list[str] = []
    bank = bank_of(4, 2, 1)
    rope = RopeTable(4, 2, 10.0)
    held = weakref.ref(rope.cos)
    bank.keep(*rope.buffers())

    def capture(value: int) -> Set:
        if value == 1:
            raise ValueError("no room")
        return Set(value, log)

    with pytest.raises(ValueError, match="no room"):
        bank.capture(capture)
    assert log[2:] == ["reset 2", "reset 4"]
    assert bank.sets == ()
    with pytest.raises(RuntimeError, match="got none"):
        bank.select(4)
    del rope
    gc.collect()
    assert held() is None
    # Nothing stands in the way of a second try.
    bank.capture(lambda value: Set(value, log))
    assert bank.select(1).value == 1


def test_refuses_values_it_has_no_graphs_for() -> None:
    """The message has what there is."""
    bank = bank_of(1, 4)
    bank.capture(lambda value: Set(value, []))
    with pytest.raises(ValueError, match=r"context size that graphs .* \(4, 1\), got 2"):
        bank.select(2)


def test_is_captured_once() -> None:
    """A second capture would leave the first one's graphs behind."""
    bank = bank_of(1)
    bank.capture(lambda value: Set(value, []))
    with pytest.raises(RuntimeError, match="Expected an empty bank"):
        bank.capture(lambda value: Set(value, []))


@pytest.mark.parametrize("values", [(), (2, 2)])
def test_refuses_what_are_no_values(values: tuple[int, ...]) -> None:
    """None, or one twice."""
    with pytest.raises(ValueError, match="Expected a context size or more, each once"):
        bank_of(*values)


def test_tables_live_as_long_as_graphs_and_no_longer() -> None:
    """A table that the model replaces stays while graphs may read it, and goes with them."""
    bank = bank_of(1)
    rope = RopeTable(8, 4, 100.0)
    table = weakref.ref(rope.cos)
    bank.capture(lambda value: Set(value, []))
    bank.keep(*rope.buffers())
    # Away and back: the model now has tables of its own somewhere else.
    rope.to("meta")
    rope.to_empty(device="cpu")
    gc.collect()
    assert table() is not None
    assert torch.equal(table(), rope.cos)  # type: ignore[arg-type]
    bank.reset()
    gc.collect()
    assert table() is None
    with pytest.raises(RuntimeError, match="got none"):
        bank.select(1)
