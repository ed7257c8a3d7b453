"""What is counted of a run's graphs: the memory of all of them, named or not."""

from types import SimpleNamespace
from typing import Any

from fsdp_core.train.scopes import GraphCounts


def test_unnamed_memory_of_every_graph_counts() -> None:
    """A storage that nobody names is seen whichever graph uses it, at whichever capture."""
    counts = GraphCounts()
    found: list[Any] = [
        SimpleNamespace(names=["a"], places=["mm"], num_unnamed=2),
        SimpleNamespace(names=["b"], places=[], num_unnamed=1),
        SimpleNamespace(names=[], places=["add"], num_unnamed=0),
    ]
    counts.enter(found[:2])
    counts.enter(found[2:])
    assert counts.external_names == ["a", "b"]
    assert counts.external_places == ["mm", "add"]
    assert counts.unnamed_externals == 3
