"""A graphed run proves each scope of each layer, forward and backward; part of it is not enough."""

import dataclasses
from typing import Any

import pytest

from harness.checks.complete import Flaw, find_flaw, launches
from harness.checks.judge import judge
from harness.records import EndRecord, GraphUse

EXPERTS = {"layers": 3, "experts": 4, "top_k": 2, "expert_ffn": 32, "first_dense_layers": 1}
MOE = {"model": EXPERTS}


def with_uses(lab: Any, edit: Any, graph: tuple[str, ...], change: Any, **config: Any) -> Any:
    """A run of those scopes whose rank 1 states the uses that `change` makes of those owed."""
    spec = lab.spec(graph=graph)
    run = lab.run(dataclasses.replace(spec, config=spec.config | config))
    end: EndRecord = run.ranks[1].end
    uses = tuple(changed for use in end.graphs if (changed := change(use)) is not None)
    return edit.rank(run, 1, end=dataclasses.replace(end, graphs=uses, replays=launches(uses)))


def difference(flaw: Flaw | None) -> tuple[Any, ...]:
    assert flaw is not None
    assert (flaw.what, flaw.rank) == ("not_replayed", 1)
    found = flaw.difference
    assert found is not None
    return found.tensor, found.quantity, found.reference, found.candidate


@pytest.mark.parametrize(
    ("graph", "config"),
    [
        (("attn",), {}),
        (("attn", "mlp"), {}),
        (("layer",), {"parallel": {"pp": 2}}),
        (("attn", "moe_router", "moe_preprocess"), MOE),
        (("mlp", "moe"), {"model": {**EXPERTS, "capacity_factor": 2.0}}),
        (("full_iteration",), {}),
        (("full_iteration",), {"graph_optimizer": False}),
        (("attn",), {"graph_layers": [1, 1]}),
    ],
)
def test_all_that_is_owed_is_enough(lab: Any, edit: Any, graph: Any, config: Any) -> None:
    """A rank that captured and replayed everything has no flaw, on any kind of layer."""
    assert find_flaw(with_uses(lab, edit, graph, lambda use: use, **config)) is None


def test_layer_that_was_never_captured(lab: Any, edit: Any) -> None:
    """One layer left eager is named, with its scope."""
    run = with_uses(lab, edit, ("attn",), lambda use: use if use.layer != 1 else None)
    assert difference(find_flaw(run)) == ("layers.1 attn", "captures.forward", "1", "0")


def test_scope_that_was_never_captured(lab: Any, edit: Any) -> None:
    """`mlp` of `[attn, mlp]` left eager is named."""
    run = with_uses(lab, edit, ("attn", "mlp"), lambda use: use if use.scope == "attn" else None)
    assert difference(find_flaw(run)) == ("layers.0 mlp", "captures.forward", "1", "0")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_calls_that_ran_eagerly(lab: Any, edit: Any, direction: str) -> None:
    """Three calls of four eager, in one direction of one layer."""

    def change(use: GraphUse) -> GraphUse:
        is_it = (use.layer, use.direction) == (1, direction)
        return dataclasses.replace(use, replays=1) if is_it else use

    run = with_uses(lab, edit, ("attn",), change)
    assert difference(find_flaw(run)) == ("layers.1 attn", f"replays.{direction}", "4", "1")


def test_layer_in_place_of_another(lab: Any, edit: Any) -> None:
    """One layer's graph replayed for another's, too: the sum is right, the parts are not."""

    def change(use: GraphUse) -> GraphUse:
        return dataclasses.replace(use, replays=8 if use.layer == 0 else 0)

    run = with_uses(lab, edit, ("attn",), change)
    assert difference(find_flaw(run)) == ("layers.0 attn", "replays.forward", "4", "8")


def test_optimizer_outside_of_the_whole_step(lab: Any, edit: Any) -> None:
    """A graph of the whole step without the optimizer's part, where that is asked for."""
    run = with_uses(
        lab, edit, ("full_iteration",), lambda use: use if use.direction == "gradients" else None
    )
    assert difference(find_flaw(run)) == ("full_iteration", "captures.optimizer", "1", "0")


def test_optimizer_that_was_to_stay_outside(lab: Any, edit: Any) -> None:
    """What nobody asked to be captured is a difference, too."""
    spec = lab.spec(graph=("full_iteration",))
    inside = lab.run(spec).ranks[1].end
    outside = lab.run(dataclasses.replace(spec, config=spec.config | {"graph_optimizer": False}))
    run = edit.rank(outside, 1, end=inside)
    assert difference(find_flaw(run)) == ("full_iteration", "replays.optimizer", "0", "2")


@pytest.mark.parametrize("layer", [0, 2])
def test_stages_owe_their_own_layers(lab: Any, edit: Any, layer: int) -> None:
    """A rank of the second stage owes layers 2 and 3, not those of the first."""
    config = {"parallel": {"pp": 2}, "model": {"layers": 4}}

    def change(use: GraphUse) -> GraphUse | None:
        assert use.layer in (2, 3)
        return use if use.layer != layer else None

    flaw = find_flaw(with_uses(lab, edit, ("attn",), change, **config))
    assert (flaw is None) == (layer == 0)


def test_verdict_of_a_partial_fallback(lab: Any, edit: Any) -> None:
    """The verdict is a failure that carries scope and layer as fields."""
    case = lab.case()
    reference, control, candidate = lab.legs()
    end = candidate.ranks[0].end
    broken = dataclasses.replace(
        end, graphs=tuple(u for u in end.graphs if u.layer == 0), replays=end.replays // 2
    )
    verdict = judge(case, reference, control, edit.rank(candidate, 0, end=broken))
    assert (verdict.outcome, verdict.what) == ("failed", "not_replayed")
    assert verdict.difference is not None
    assert (verdict.difference.rank, verdict.difference.tensor) == (0, "layers.1 attn")


def test_sums_must_fit(lab: Any, edit: Any) -> None:
    """Launches that no part states are a flaw."""
    run = lab.run(lab.spec(graph=("attn",)))
    end = run.ranks[1].end
    run = edit.rank(run, 1, end=dataclasses.replace(end, replays=end.replays + 1))
    assert difference(find_flaw(run)) == ("", "replays", "16", "17")


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [(("attn", "mlp"), None), (("attn",), "mlp"), ((), "attn")],
)
def test_parts_must_be_compiled(lab: Any, edit: Any, compiled: Any, expected: Any) -> None:
    """A part that the compiler made no code of is named, also in a run that replays all else."""
    spec = lab.spec(graph=("attn",))
    run = lab.run(dataclasses.replace(spec, config=spec.config | {"compile": ["attn", "mlp"]}))
    for rank in (0, 1):
        said = compiled if rank else ("attn", "mlp")
        run = edit.rank(run, rank, end=dataclasses.replace(run.ranks[rank].end, compiled=said))
    flaw = find_flaw(run)
    if expected is None:
        assert flaw is None
    else:
        assert flaw is not None
        assert flaw.difference is not None
        assert (flaw.what, flaw.rank, flaw.difference.tensor) == ("not_compiled", 1, expected)


def test_stages_owe_parts_that_their_layers_have(lab: Any, edit: Any) -> None:
    """The first stage has no experts here, the second no dense feed-forward."""
    config = {
        "parallel": {"pp": 2}, "compile": ["mlp", "experts"],
        "model": {**EXPERTS, "layers": 2, "capacity_factor": 2.0},
    }  # fmt: skip
    spec = lab.spec()
    run = lab.run(dataclasses.replace(spec, config=spec.config | config))
    for rank, part in enumerate(("mlp", "experts")):
        run = edit.rank(run, rank, end=dataclasses.replace(run.ranks[rank].end, compiled=(part,)))
    assert find_flaw(run) is None
