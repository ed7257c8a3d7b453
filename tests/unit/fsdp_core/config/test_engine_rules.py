"""What other engines take of a configuration, and that nothing else is ignored."""

import dataclasses
from typing import Any

import pytest

from fsdp_core.config import ENGINES, ConfigError, FsdpConfig, ParallelConfig, TrainConfig

OTHERS = ENGINES[1:]
TAKEN: dict[str, Any] = {
    "steps": 3, "microbatches": 2, "micro_batch_size": 2, "seed": 5, "flush_every": 2,
    "dtype": "fp32", "ledger": False, "stress_seed": 3, "taps": ("norm",),
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "graph": ("attn",), "graph_layers": (0, 1), "graph_warmup_steps": 3, "graph_optimizer": False,
    "capture_by": "te",
    "compile": ("attn",), "compile_backend": "aot_eager", "backend": "te", "fp8": "current",
    "evaluate_every": 2, "stress": ("jitter",), "recompute": "full", "resume_at": 1,
    "fused_experts": True,
}  # fmt: skip
PARTS = ("model", "parallel", "fsdp", "optim", "data", "engine")


def test_every_field_is_taken_or_refused() -> None:
    """A field that is added to the configuration must be decided on for other engines."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names == {*TAKEN, *REFUSED, *PARTS}


@pytest.mark.parametrize("engine", OTHERS)
def test_what_an_engine_would_ignore_is_refused(engine: str) -> None:
    """Each option that means nothing to it, by its key; what it takes is legal."""
    TrainConfig(engine=engine, **TAKEN)
    for key, value in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            TrainConfig(engine=engine, **{key: value})
        assert caught.value.key == key
    for degrees in ({"dp_outer": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dynamic_cp": (1,)}):
        with pytest.raises(ConfigError) as caught:
            TrainConfig(engine=engine, parallel=ParallelConfig(dp=2, **degrees))
        assert caught.value.key == f"parallel.{next(iter(degrees))}"
        assert caught.value.rule == "other_engines_cut_over_dp"


@pytest.mark.parametrize(
    ("engine", "takes"),
    [("ddp", ()), ("megatron_fsdp", ("reduce_dtype",)),
     ("fsdp2", ("reduce_dtype", "reshard_after_forward"))],
)  # fmt: skip
def test_options_of_sharding(engine: str, takes: tuple[str, ...]) -> None:
    """Strategies and pools are of our engine; an engine takes what it has an option for."""
    others: dict[str, Any] = {
        "strategy": "optim", "outer_strategy": "optim", "pool": "traced",
        "persistent_on_miss": False, "reshard_after_forward": False, "reduce_dtype": "bf16",
        "overlap": 0,
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(FsdpConfig)}
    for key, value in others.items():
        fsdp = FsdpConfig(**{key: value})
        if key in takes:
            assert TrainConfig(engine=engine, fsdp=fsdp).fsdp == fsdp
            continue
        with pytest.raises(ConfigError) as caught:
            TrainConfig(engine=engine, fsdp=fsdp)
        assert (caught.value.key, caught.value.rule) == (
            f"fsdp.{key}", "other_engines_shard_their_way"
        )  # fmt: skip


def test_an_engine_is_one_of_those_listed() -> None:
    """A word that is none is refused with the list."""
    with pytest.raises(ConfigError) as caught:
        TrainConfig(engine="fsdp1")
    assert (caught.value.key, caught.value.legal) == ("engine", ENGINES)
