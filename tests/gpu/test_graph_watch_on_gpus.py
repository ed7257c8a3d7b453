"""The watch of CUDA graphs over programs as users write them: silent on right ones, else named."""

import importlib.util
from typing import Any

import pytest

from tests.dist.rank_pool import RankPool
from tests.gpu import graph_watch_on_gpus as programs

BOTH = ("poison", "scramble")
STRESS = pytest.mark.parametrize("stress", [(), BOTH], ids=["plain", "stressed"])
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)


def ask(ranks: RankPool, function: Any, *args: Any) -> Any:
    (answer,) = ranks.run(function, *args, world_size=1, timeout_s=240.0)
    return answer


def replays(found: programs.Found, maker: str) -> list[int]:
    """Of each graph that a maker captured."""
    return [graph["replays"] for graph in found["graphs"] if graph["maker"].startswith(maker)]


# --- gradients


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("microbatches", "to_none"), [(3, True), (1, False)], ids=["accumulated", "zeroed"]
)
def test_gradients_in_static_buffers(microbatches: int, to_none: bool, gpu_ranks: RankPool) -> None:
    """pytorch #181723: the gradients are wrong, and each parameter is named once."""
    right, found = ask(gpu_ranks, programs.accumulated, False, microbatches, to_none)
    assert not right
    assert {name for name, _ in found["findings"]} == {"static_gradient"}
    details = [detail for _, detail in found["findings"]]
    assert [d["parameter"] for d in details] == ["0.0.weight (weights)", "0.0.bias (weights)"]
    assert {d["maker"] for d in details} == {"torch.cuda.make_graphed_callables backward 0"}
    assert {d["replay"] for d in details} == {1}


@pytest.mark.gpu(1)
@STRESS
@pytest.mark.parametrize(
    ("clone", "microbatches", "to_none"), [(True, 3, True), (True, 1, False), (False, 1, True)]
)
def test_gradients_that_are_cloned_or_dropped(
    clone: bool, microbatches: int, to_none: bool, stress: tuple[str, ...], gpu_ranks: RankPool
) -> None:
    """Eager's bits, and nothing to say."""
    right, found = ask(gpu_ranks, programs.accumulated, clone, microbatches, to_none, stress)
    assert right
    assert found["findings"] == []
    assert found["stale"] == ""
    count = microbatches * programs.STEPS
    assert replays(found, "torch.cuda.make_graphed_callables") == [count, count]


@pytest.mark.gpu(1)
def test_a_backward_after_a_later_forward(gpu_ranks: RankPool) -> None:
    """Its activations were overwritten: wrong, and reported."""
    right, found = ask(gpu_ranks, programs.overtaken)
    assert not right
    assert "static_activation" in {name for name, _ in found["findings"]}


# --- addresses


@pytest.mark.gpu(1)
@pytest.mark.parametrize("how", ["freed", "parameter", "data", "resized"])
def test_stale_parameters_are_named(how: str, gpu_ranks: RankPool) -> None:
    """The third replay is refused."""
    found = ask(gpu_ranks, programs.made_stale, how, False)
    assert found["result"] == 2
    assert "0.0.weight (weights): " in found["stale"]
    assert [name for name, _ in found["findings"]] == ["stale_address"]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("how", ["freed", "unnamed"])
def test_stale_memory_without_a_name(how: str, gpu_ranks: RankPool) -> None:
    """Told by its size and the line that used it first."""
    found = ask(gpu_ranks, programs.made_stale, how, True)
    nbytes = {"freed": 4 * programs.WIDTH**2, "unnamed": 12000}[how]
    assert f"storage of {nbytes} bytes (first used by aten." in found["stale"]
    assert "graph_watch_on_gpus.py:" in found["stale"]


# --- right programs


@pytest.mark.gpu(1)
@STRESS
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_full_iteration(
    to_none: bool, sharded: bool, stress: tuple[str, ...], gpu_ranks: RankPool
) -> None:
    """Adam inside: eager's bits, no finding, one step in the capture, each replay counted."""
    right, found = ask(gpu_ranks, programs.full_iteration, to_none, stress, sharded)
    assert found["stale"] == ""
    assert found["findings"] == []
    assert right
    (graph,) = found["graphs"]
    assert (graph["optimizer_steps"], graph["captures"]) == (1, 1)
    assert graph["replays"] == programs.STEPS
    assert graph["maker"] == "torch.cuda.graph"
    assert graph["externals"] > 12


@pytest.mark.gpu(1)
@STRESS
@pytest.mark.parametrize("microbatches", [1, 2])
def test_reduce_overhead(microbatches: int, stress: tuple[str, ...], gpu_ranks: RankPool) -> None:
    """Its own bits, no finding, graphs of forward and backward that are replayed."""
    right, found = ask(gpu_ranks, programs.compiled, microbatches, stress)
    assert found["stale"] == ""
    assert found["findings"] == []
    assert right
    counts = replays(found, "torch.compile's cudagraph trees")
    assert len(counts) == len(found["graphs"]) >= 2
    assert sum(counts) >= 2 * programs.STEPS


@pytest.mark.gpu(1)
@STRESS
@pytest.mark.parametrize("name", sorted(programs.RIGHT))
def test_right_programs(name: str, stress: tuple[str, ...], gpu_ranks: RankPool) -> None:
    """The bits that they have without a watch, and nothing to say."""
    right, found = ask(gpu_ranks, programs.compared, name, stress)
    assert found["stale"] == ""
    assert found["findings"] == []
    assert right
    assert sum(graph["replays"] for graph in found["graphs"]) >= programs.STEPS


@needs_te
@pytest.mark.gpu(1)
@STRESS
def test_te_callables(stress: tuple[str, ...], gpu_ranks: RankPool) -> None:
    """TransformerEngine's graphs return clones: eager's bits, no finding."""
    right, found = ask(gpu_ranks, programs.te_callables, stress)
    assert found["stale"] == ""
    assert found["findings"] == []
    assert right
    for kind in ("forward", "backward"):
        maker = f"TransformerEngine.make_graphed_callables {kind}"
        assert replays(found, maker) == [2 * programs.STEPS] * 2


@needs_te
@pytest.mark.gpu(1)
def test_te_callables_that_return_static_gradients(gpu_ranks: RankPool) -> None:
    """With its clones switched off the gradients are wrong, and named."""
    right, found = ask(gpu_ranks, programs.te_callables, (), False)
    assert not right
    assert {name for name, _ in found["findings"]} == {"static_gradient"}
    assert {detail["parameter"].partition(".")[0] for _, detail in found["findings"]} == {"0", "1"}


# --- stressors


@pytest.mark.gpu(1)
def test_poison_shows_what_a_graph_never_writes(gpu_ranks: RankPool) -> None:
    """By luck it was zero; and the other stressor leaves that alone."""
    assert ask(gpu_ranks, programs.half_written, ()) == [16.0] * 3
    assert ask(gpu_ranks, programs.half_written, ("scramble",)) == [16.0] * 3
    assert str(ask(gpu_ranks, programs.half_written, ("poison",))) == "[nan, nan, nan]"


@pytest.mark.gpu(1)
def test_scramble_shows_reads_of_freed_memory(gpu_ranks: RankPool) -> None:
    """Of a kernel that no operator shows; while the memory is held, nothing changes."""
    assert ask(gpu_ranks, programs.unseen_read, False, BOTH) == [3.0] * 3
    assert ask(gpu_ranks, programs.unseen_read, True, ()) == [3.0] * 3
    assert len({str(v) for v in ask(gpu_ranks, programs.unseen_read, True, BOTH)}) > 1
