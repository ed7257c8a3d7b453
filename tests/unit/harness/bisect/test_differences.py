"""What differs between legs, and which changes of it go together."""

import dataclasses
import itertools
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig, TrainConfig, model_from_preset
from harness.bisect.differences import (
    LegChanges,
    config_of,
    leaves_of,
    plants_of,
    why_illegal,
    with_plants,
)
from harness.records import PlantSpec, RunSpec

PARALLEL = ParallelConfig(dp=2)


def run(plant: PlantSpec | None = None, **settings: Any) -> RunSpec:
    """A run of two ranks, or of as many as its layout has."""
    given: dict[str, Any] = {"parallel": PARALLEL, "steps": 6}
    config = TrainConfig(**(given | settings))
    plain = RunSpec(
        config=config.to_dict(), device="cpu", world_size=config.parallel.world_size, timeout_s=60.0
    )
    return plain if plant is None else with_plants(plain, (plant,))


ULP = PlantSpec(fault="ulp", step=3)


def test_every_leaf_scope_stressor_and_plant_is_one_change() -> None:
    """Lists are changed entry by entry, all else leaf by leaf."""
    legs = LegChanges(
        run(seed=1, stress=("races",)),
        run(ULP, seed=2, stress=("jitter", "poison"), graph=("attn", "mlp"), ledger=False),
    )
    assert set(legs.names) == {
        "graph: attn", "graph: mlp", "seed: 1 -> 2", "ledger: true -> false", "stress: jitter",
        "stress: poison", "stress: no races", "plant: ulp in step 3 on the last rank",
    }  # fmt: skip


def test_all_changes_are_the_candidate_and_none_the_reference() -> None:
    """The ends of the search are the runs that the case has: not even their keys differ."""
    reference = run(stress=("races", "jitter"))
    candidate = run(ULP, graph=("mlp", "attn"), stress=("poison", "jitter"))
    legs = LegChanges(reference, candidate)
    assert legs.run_with(legs.names).key == candidate.key
    assert legs.run_with(()).key == reference.key


def test_each_subset_changes_what_it_says_and_nothing_else() -> None:
    """Of the 16 subsets, each differs from the reference by just its own changes."""
    reference = run(seed=1)
    legs = LegChanges(reference, run(ULP, seed=2, graph=("attn", "mlp")))
    for size in range(5):
        for subset in itertools.combinations(legs.names, size):
            made = legs.run_with(subset)
            assert set(LegChanges(reference, made).names) == set(subset)


def test_scopes_that_do_not_go_together_are_refused_without_a_run() -> None:
    """The rule of the configuration is named."""
    experts = model_from_preset("moe_tiny", {})
    legs = LegChanges(
        run(model=experts), run(model=experts, graph=("moe_router", "moe_preprocess"))
    )
    assert "preprocess_follows_router" in legs.why_illegal(["graph: moe_preprocess"])
    assert legs.why_illegal(["graph: moe_router"]) == ""
    assert legs.why_illegal(legs.names) == ""


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"steps": 8}, "steps 8 against 6"), ({"microbatches": 2}, "microbatches 2 against 1"),
     ({"parallel": ParallelConfig(dp=4)}, "4 ranks against 2"),
     ({"compile": ("mlp",)}, "compile [mlp] against []")],
)  # fmt: skip
def test_runs_without_a_partner_for_each_record_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    """Steps, microbatches, ranks and compiled parts are those of the reference."""
    legs = LegChanges(run(), run(graph=("attn",), **settings))
    assert told in legs.why_illegal(legs.names)
    assert legs.why_illegal(["graph: attn"]) == ""


def test_degrees_change_together_or_not_at_all() -> None:
    """Half of a change of layout would have another number of ranks."""
    legs = LegChanges(run(), run(parallel=ParallelConfig(tp=2)))
    assert set(legs.names) == {"parallel.dp: 2 -> 1", "parallel.tp: 1 -> 2"}
    assert [bool(legs.why_illegal([name])) for name in legs.names] == [True, True]
    assert legs.why_illegal(legs.names) == ""


def test_a_fault_is_refused_where_it_cannot_be_planted() -> None:
    """Without its scope or layout, past the steps or ranks, on another device: no run is made."""
    legs = LegChanges(run(), run(PlantSpec(fault="capture_raise"), graph=("attn",)))
    (planted,) = (name for name in legs.names if name.startswith("plant"))
    assert "graph scopes attn" in legs.why_illegal([planted])
    assert legs.why_illegal(legs.names) == ""
    norm = PlantSpec(fault="norm_sum_missing", step=1)
    assert "a layout with tp 2 or more and sequence_parallel" in why_illegal(run(norm))
    both = ParallelConfig(tp=2, sequence_parallel=True)
    assert why_illegal(run(norm, parallel=both)) == ""
    assert "step 9 of 6" in why_illegal(run(PlantSpec(fault="ulp", step=9)))
    assert "rank 2 of 2" in why_illegal(run(PlantSpec(fault="ulp", step=1, rank=2)))
    assert "on cpu" in why_illegal(run(PlantSpec(fault="illegal_access", step=1)))


def test_a_fault_and_its_counterpart_are_one_change() -> None:
    """Taking one without the other would be another experiment."""
    plus = PlantSpec(fault="positive_zero", step=2, legs=("reference",))
    minus = PlantSpec(fault="negative_zero", step=2)
    legs = LegChanges(run(plus), run(minus, graph=("attn",)))
    assert len(legs.names) == 2
    assert plants_of(legs.run_with(["graph: attn"])) == (plus,)
    assert plants_of(legs.run_with(legs.names)) == (minus,)


def test_a_plant_of_both_legs_is_no_change() -> None:
    """What both have stays in every subset."""
    legs = LegChanges(run(ULP), run(ULP, seed=2))
    assert legs.names == ("seed: 1234 -> 2",)
    assert plants_of(legs.run_with(())) == (ULP,)


def test_faults_that_are_planted_together_are_changes_of_their_own() -> None:
    """Each can be planted without the other, and both are the plant that they came from."""
    nan = PlantSpec(fault="nan", step=4, rank=0)
    candidate = with_plants(run(), (ULP, nan))
    legs = LegChanges(run(), candidate)
    assert len(legs.names) == 2
    assert {plants_of(legs.run_with([name])) for name in legs.names} == {(ULP,), (nan,)}
    assert legs.run_with(legs.names).key == candidate.key


def test_flat_and_nested_are_inverse() -> None:
    """No leaf is lost, and none shares memory with the configuration that it came from."""
    config = run(graph=("attn",)).config
    again = config_of(leaves_of(config))
    assert again == config
    again["graph"].append("mlp")
    assert config["graph"] == ["attn"]


def test_device_and_limits_stay_those_of_the_candidate() -> None:
    """What is no setting of the training is not mixed."""
    candidate = dataclasses.replace(run(graph=("attn",)), timeout_s=5.0)
    assert LegChanges(run(), candidate).run_with(()).timeout_s == 5.0
