"""Shapes of models: single values, presets, derived widths."""

import dataclasses
from typing import Any

import pytest

from fsdp_core import config
from fsdp_core.config import ConfigError, ModelConfig, model_from_preset
from tests.unit.fsdp_core.config.refusals import (
    INFINITY,
    NAN,
    Refusal,
    bools,
    check,
    integers,
    name_of,
    numbers,
    words,
)

MOE = model_from_preset("moe_tiny")
MLA = model_from_preset("mla_moe_tiny")
BAD_NUMBERS: list[Any] = [-1.0, NAN, INFINITY, True, "1", [1]]

REFUSALS: list[Refusal] = [
    *(
        refusal
        for key in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn", "seq")
        for refusal in integers(ModelConfig, key, 1)
    ),
    *(
        refusal
        for key in (
            "head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "experts", "top_k", "expert_ffn", "shared_expert_ffn", "first_dense_layers",
        )
        for refusal in integers(ModelConfig, key, 0)
    ),
    *(r for r in integers(ModelConfig, "q_lora_rank", 1) if r[4] is not None),
    *(
        refusal
        for key in ("rope_theta", "norm_eps", "init_std", "route_scale")
        for refusal in numbers(ModelConfig, key, "a number > 0", [0.0, None, *BAD_NUMBERS])
    ),
    *(
        refusal
        for key in ("aux_loss", "z_loss", "expert_bias_rate")
        for refusal in numbers(ModelConfig, key, "a number >= 0", [None, *BAD_NUMBERS])
    ),
    *numbers(ModelConfig, "capacity_factor", "a number > 0", [0.0, *BAD_NUMBERS]),
    *numbers(ModelConfig, "dropout", "a number in [0, 1)", [1.0, -0.1, 2.0, NAN]),
    *(r for key in ("qk_norm", "normalise_top_k", "expert_bias") for r in bools(ModelConfig, key)),
    *words(ModelConfig, "attention", config.ATTENTIONS),
    *words(ModelConfig, "score", config.SCORES),
    *words(ModelConfig, "drop", config.DROPS),
    *words(ModelConfig, "dispatcher", config.DISPATCHERS),
    (ModelConfig, {"heads": 3}, "heads", "a divisor of hidden=64", 3, ()),
    (ModelConfig, {"hidden": 12, "heads": 4}, "heads",
     "hidden/heads even (RoPE), hidden=12", 4, ()),
    (ModelConfig, {"head_dim": 15}, "head_dim", "an even number (RoPE)", 15, ()),
    (ModelConfig, {"kv_heads": 3}, "kv_heads", "a divisor of heads=4", 3, ()),
    (ModelConfig, {"kv_heads": 8}, "kv_heads", "a divisor of heads=4", 8, ()),
    (ModelConfig, {"top_k": 2}, "top_k", "0, unless experts > 0", 2, ()),
    (ModelConfig, {"q_lora_rank": 8}, "q_lora_rank", "none, unless attention is mla", 8, ()),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=name_of)
def test_refusal(refusal: Refusal) -> None:
    """A refused value names its key, what was expected, what was got, and what is legal."""
    check(refusal)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden": 8, "heads": 4, "kv_heads": 4},
        {"dropout": 0.0, "vocab_size": 1, "seq": 1},
        {"heads": 3, "kv_heads": 3, "head_dim": 2},
        {"experts": 1, "top_k": 1, "expert_ffn": 1, "first_dense_layers": 1},
        {"experts": 2, "top_k": 2, "expert_ffn": 1, "capacity_factor": 0.5, "drop": "probs"},
        {"experts": 2, "top_k": 1, "expert_ffn": 1, "expert_bias": True, "score": "softmax"},
    ],
)
def test_edge_of_a_rule_is_legal(values: dict[str, Any]) -> None:
    """The value next to each limit is accepted as it is."""
    built = ModelConfig(**values)
    assert {key: getattr(built, key) for key in values} == values


def test_preset_with_overrides() -> None:
    """A preset gives its values, an override wins, everything else is the default."""
    built = model_from_preset("dense_tiny_dropout", {"layers": 5})
    assert built == ModelConfig(preset="dense_tiny_dropout", dropout=0.1, layers=5)
    for preset in config.MODEL_PRESETS:
        assert model_from_preset(preset).preset == preset


def test_presets_of_public_models_shrink() -> None:
    """Layers and width of a large preset are overrides, its proportions stay."""
    small = model_from_preset("qwen3_30b_a3b", {"layers": 2, "hidden": 512, "experts": 16})
    assert (small.layers, small.hidden, small.experts) == (2, 512, 16)
    assert (small.head_dim, small.heads, small.top_k) == (128, 32, 8)
    narrow = model_from_preset("llama3_8b", {"layers": 2, "hidden": 1024})
    assert (narrow.head_dim, narrow.ffn) == (32, 14_336)


def test_preset_mistakes_are_named() -> None:
    """An unknown preset or field lists the legal names; `preset` itself is no field to override."""
    with pytest.raises(ConfigError) as caught:
        model_from_preset("dense_huge")
    assert (caught.value.key, caught.value.got) == ("preset", "dense_huge")
    assert caught.value.legal == tuple(config.MODEL_PRESETS)
    for name in ("hiddne", "preset"):
        with pytest.raises(ConfigError) as caught:
            model_from_preset("dense_tiny", {name: 3})
        assert caught.value.key == name
        assert "hidden" in caught.value.legal
        assert "preset" not in caught.value.legal


def test_widths_of_heads() -> None:
    """GQA shares hidden unless told otherwise, and one width serves all; MLA adds its two parts."""
    plain = ModelConfig(hidden=96, heads=4, kv_heads=1)
    assert (plain.head_dim, plain.v_dim, plain.rope_dim) == (24, 24, 24)
    assert ModelConfig(head_dim=8).head_dim == 8
    assert (MLA.head_dim, MLA.v_dim, MLA.rope_dim) == (24, 16, 8)


def test_the_width_that_is_meant_equals_the_width_that_is_said() -> None:
    """Leaving head_dim out and writing what it comes to are the same model."""
    assert ModelConfig(head_dim=16) == ModelConfig()
    assert dataclasses.replace(MLA) == MLA


def test_which_layers_have_experts() -> None:
    """The first layers may be dense; a model without experts is dense throughout."""
    assert [MLA.has_experts(layer) for layer in range(MLA.layers)] == [False, True]
    assert [MOE.has_experts(layer) for layer in range(MOE.layers)] == [True, True]
    assert not ModelConfig().has_experts(0)
    assert [m.has_dense_ffn for m in (ModelConfig(), MOE, MLA)] == [True, False, True]


def test_the_modules_know_the_words() -> None:
    """What a configuration says goes to the router and the dispatcher as it is."""
    from fsdp_core.model.moe import dispatcher as preprocess
    from fsdp_core.model.moe import router as routing

    assert set(config.SCORES) == set(routing.SCORES)
    assert set(config.DISPATCHERS) == set(preprocess.DISPATCHERS)
    assert set(config.DROPS) == set(preprocess.DROPS)
