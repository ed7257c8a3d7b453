"""fp8 in configurations: which it needs, and which widths of which layout it refuses."""

import dataclasses
from typing import Any

import pytest

from fsdp_core.config import (
    EIGHT_BITS,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)

EVEN = ModelConfig(hidden=128, heads=8, kv_heads=4, head_dim=32, ffn=256, seq=64)


def run(model: ModelConfig = EVEN, fp8: str = "current", **options: Any) -> TrainConfig:
    """A configuration of backend te."""
    degrees = options.pop("parallel", {})
    return TrainConfig(
        model=model, fp8=fp8, backend="te", parallel=ParallelConfig(**degrees), **options
    )


@pytest.mark.parametrize("fp8", EIGHT_BITS)
def test_every_recipe_is_taken(fp8: str) -> None:
    """A recipe with even widths is legal, and goes through plain values and back."""
    config = run(fp8=fp8, parallel={"tp": 2, "cp": 2, "sequence_parallel": True})
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_default_is_none() -> None:
    """Nobody computes in fp8 without asking."""
    assert TrainConfig().fp8 == "none"


def test_unknown_recipe_is_refused() -> None:
    """MXFP8 is not for these GPUs: the legal names are listed."""
    with pytest.raises(ConfigError, match="delayed, current, block"):
        run(fp8="mxfp8")


def test_torch_is_refused() -> None:
    """Another backend would train in another precision than it was told."""
    with pytest.raises(ConfigError, match="none, as backend is torch") as caught:
        TrainConfig(model=EVEN, fp8="current")
    assert (caught.value.key, caught.value.rule) == ("fp8", "fp8_needs_te")


@pytest.mark.parametrize(
    ("change", "degrees", "said"),
    [
        ({"hidden": 120}, {}, "hidden = 120"),
        ({"head_dim": 34}, {"tp": 2}, "heads * head_dim = 272 over tp=2"),
        ({"head_dim": 36}, {"tp": 4}, "heads * head_dim = 288 over tp=4"),
        ({"head_dim": 8}, {"tp": 4}, "kv_heads * head_dim = 32 over tp=4"),
        ({"ffn": 248}, {}, "ffn = 248"),
        ({"ffn": 240}, {"tp": 2}, "ffn = 240 over tp=2"),
        ({"experts": 4, "top_k": 2, "expert_ffn": 48}, {"dp": 2, "etp": 2},
         "expert_ffn = 48 over etp=2"),
        ({"experts": 4, "top_k": 2, "expert_ffn": 64, "shared_expert_ffn": 24}, {},
         "shared_expert_ffn = 24"),
    ],
)  # fmt: skip
def test_uneven_widths_are_named(
    change: dict[str, Any], degrees: dict[str, int], said: str
) -> None:
    """The error says which width it is, and the degree that made it uneven."""
    model = dataclasses.replace(EVEN, **change)
    degrees = degrees | ({"sequence_parallel": True} if degrees.get("tp", 1) > 1 else {})
    with pytest.raises(ConfigError) as caught:
        run(model, parallel=degrees)
    assert said in str(caught.value)
    assert (caught.value.key, caught.value.rule) == ("fp8", "fp8_takes_widths")
    assert run(model, fp8="none", parallel=degrees).fp8 == "none"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank = 24"),
        ({"q_lora_rank": 40}, "q_lora_rank = 40"),
        ({"v_head_dim": 6}, "v_head_dim = 24 over tp=2"),
        ({"qk_nope_head_dim": 18, "qk_rope_head_dim": 14}, "qk_nope_head_dim = 72 over tp=2"),
    ],
)
def test_latents_have_widths_too(change: dict[str, Any], said: str) -> None:
    """MLA multiplies by its latents; the narrow key part is left out of fp8."""
    even = {
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "heads": 4, "kv_heads": 4, "first_dense_layers": 0,
    }  # fmt: skip
    parallel = {"tp": 2, "sequence_parallel": True}
    assert run(model_from_preset("mla_moe_tiny", even), parallel=parallel).fp8 == "current"
    with pytest.raises(ConfigError) as caught:
        run(model_from_preset("mla_moe_tiny", even | change), parallel=parallel)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("seq", "parallel", "said"),
    [
        (24, {}, "24 tokens over cp=1"),
        (48, {"cp": 2}, "48 tokens over cp=2"),
        (32, {"cp": 2, "tp": 2, "sequence_parallel": True}, "32 tokens over cp=2, tp=2"),
        (32, {"dp": 4, "dynamic_cp": (1, 2, 4)}, "32 tokens over cp=4"),
    ],
)
def test_uneven_tokens_are_named(seq: int, parallel: dict[str, Any], said: str) -> None:
    """Tokens of a rank are a side of a product as well, for every cp that there may be."""
    with pytest.raises(ConfigError) as caught:
        run(dataclasses.replace(EVEN, seq=seq), parallel=parallel)
    assert said in str(caught.value)
    assert caught.value.rule == "fp8_takes_tokens"
    options: dict[str, Any] = {"micro_batch_size": 4}
    assert run(dataclasses.replace(EVEN, seq=seq), parallel=parallel, **options).fp8 == "current"
