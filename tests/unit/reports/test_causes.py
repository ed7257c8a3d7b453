"""Cases that failed are one cause by fields of their verdicts, never by their words."""

from types import SimpleNamespace
from typing import Any

from harness.records import CollectiveFault, Difference, Ending, Entered, Verdict
from reports.report import CaseReport


def case(message: str, ending: Ending | None = None, tensor: str = "") -> Any:
    place = Difference(step=1, rank=0, quantity="grads", tensor=tensor) if tensor else None
    verdict = Verdict(
        case_id="x", outcome="failed", what="crashed", message=message, checks=(), runs={},
        wall_s=0.0, difference=place, ending=ending,
    )  # fmt: skip
    return SimpleNamespace(outcome="failed", verdict=verdict, message=message)


def words(*cases: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in cases:
        told = str(CaseReport.cause.fget(each))  # type: ignore[attr-defined]
        found[told] = found.get(told, 0) + 1
    return found


def test_crashes_are_one_by_exception_module_and_place() -> None:
    """Whatever numbers and addresses their messages have; another place is another cause."""
    at = "unit.py:9 gather"
    one = Ending(exception="RuntimeError", phase="forward", module="layers.3.attn", raised_at=at)
    two = Ending(exception="RuntimeError", phase="forward", module="layers.7.attn", raised_at=at)
    other = Ending(exception="RuntimeError", phase="forward", raised_at="pool.py:2 take")
    found = words(case("0x1 of a", one), case("entirely else", two), case("0x1 of a", other))
    assert found == {
        "RuntimeError in forward layers.N.attn at unit.py:N gather": 2,
        "RuntimeError in forward at pool.py:N take": 1,
    }


def test_hangs_are_one_by_their_collective() -> None:
    """Ranks and steps tell runs from each other, not causes."""
    gather = Entered(operator="allgather_base", label="layers.1")
    faults = [
        CollectiveFault(ranks=(rank,), entered=None, others=(), expected=gather, group=(0, 1),
                        number=rank, step=rank) for rank in (0, 1)
    ]  # fmt: skip
    found = words(*(case(f"rank {f.ranks[0]}", Ending(collective=f)) for f in faults))
    assert found == {"allgather_base of layers.N": 2}


def test_differences_are_one_by_their_tensor() -> None:
    """Layers are taken for one another; what has no fields is told by its own words."""
    found = words(
        case("a", tensor="layers.0.norm"), case("b", tensor="layers.1.norm"), case("12 too many")
    )
    assert found == {"grads of layers.N.norm": 2, "12 too many": 1}
