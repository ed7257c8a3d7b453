"""Values of configurations: refused by key with the legal ones, round trips, no torch."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_core import config
from fsdp_core.config import (
    DEGREES,
    ConfigError,
    DataConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)
from harness.scenario.schema import legal_layouts

NAN, INFINITY = float("nan"), float("inf")
BAD_NUMBERS: list[Any] = [-1.0, NAN, True, "1", [1]]
Refusal = tuple[Any, str, Any, str, tuple[object, ...]]
"""Owner, key, value, what is expected, legal values."""


def integers(owner: Any, minimum: int, *keys: str) -> list[Refusal]:
    bad = [minimum - 1, -7, True, float(minimum), str(minimum)]
    return [(owner, k, value, f"an integer >= {minimum}", ()) for k in keys for value in bad]


def numbers(owner: Any, expected: str, bad: list[Any], *keys: str) -> list[Refusal]:
    return [(owner, k, value, expected, ()) for k in keys for value in bad]


def words(owner: Any, **legal: tuple[str, ...]) -> list[Refusal]:
    return [
        (owner, k, value, "one of the legal values", those)
        for k, those in legal.items()
        for value in ("nonsense", "", None, those[0].upper())
    ]


def bools(owner: Any, *keys: str) -> list[Refusal]:
    return [(owner, k, value, "a bool", (True, False)) for k in keys for value in (1, "no", None)]


MOE = model_from_preset("moe_tiny")
MLA = model_from_preset("mla_moe_tiny")
REFUSALS: list[Refusal] = [
    *integers(ModelConfig, 1, "vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn", "seq",
              "q_lora_rank"),
    *integers(ModelConfig, 0, "head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
              "v_head_dim", "experts", "top_k", "expert_ffn", "shared_expert_ffn",
              "first_dense_layers"),
    *numbers(ModelConfig, "a number > 0", [0.0, INFINITY, *BAD_NUMBERS],
             "rope_theta", "norm_eps", "init_std", "route_scale", "capacity_factor"),
    *numbers(ModelConfig, "a number >= 0", [None, INFINITY, *BAD_NUMBERS],
             "aux_loss", "z_loss", "expert_bias_rate"),
    *numbers(ModelConfig, "a number in [0, 1)", [1.0, -0.1, 2.0, NAN], "dropout"),
    *bools(ModelConfig, "qk_norm", "normalise_top_k", "expert_bias"),
    *words(ModelConfig, attention=config.ATTENTIONS, score=config.SCORES, drop=config.DROPS,
           dispatcher=config.DISPATCHERS),
    *integers(ParallelConfig, 1, *DEGREES, "pp_chunks"),
    *bools(ParallelConfig, "sequence_parallel"),
    *words(FsdpConfig, strategy=config.STRATEGIES, outer_strategy=config.STRATEGIES,
           pool=config.POOLS, reduce_dtype=config.DTYPES),
    *integers(FsdpConfig, 0, "overlap"),
    *numbers(OptimConfig, "a number >= 0", [-1e-9, NAN], "lr", "weight_decay", "clip_grad_norm"),
    *numbers(OptimConfig, "a number > 0", [0.0, -1.0, NAN], "eps"),
    *numbers(OptimConfig, "a number in [0, 1)", [1.0, -0.1, NAN], "beta1", "beta2"),
    *words(DataConfig, kind=config.DATA_KINDS),
    *integers(DataConfig, 0, "ranks"),
    (DataConfig, "path", "/x", "no path unless kind is text", ()),
    *integers(TrainConfig, 1, "steps", "microbatches", "micro_batch_size", "flush_every",
              "graph_warmup_steps"),
    *integers(TrainConfig, 0, "evaluate_every", "resume_at", "seed", "stress_seed"),
    (TrainConfig, "seed", 2**64, f"an integer <= {2**64 - 1}", ()),
    *words(TrainConfig, backend=config.BACKENDS, dtype=config.DTYPES, fp8=config.EIGHT_BITS,
           engine=config.ENGINES),
]  # fmt: skip


def test_a_value_is_refused_by_its_key() -> None:
    """A refused value names its key, what was expected, what was got, and what is legal."""
    for owner, key, value, expected, legal in REFUSALS:
        told = (owner.__name__, key, value)
        error = None
        try:
            owner(**{key: value})
        except ConfigError as raised:
            error = raised
        assert error is not None, told
        assert (error.key, error.expected, error.legal) == (key, expected, legal), told
        assert repr(error.got) == repr(value), told
        assert str(error).startswith(f"{key}: expected {expected}, got {value!r}")
        assert all(str(each) in str(error) for each in legal), told
        assert "\n" not in str(error)


LAYOUTS: list[tuple[dict[str, Any], str, str, Any, tuple[int, ...]]] = [
    ({"dp": 4, "dynamic_cp": [1, 2]}, "dynamic_cp", "a tuple of integers", [1, 2], ()),
    ({"dp": 4, "dynamic_cp": (0,)}, "dynamic_cp", "an integer >= 1", 0, ()),
    ({"dp": 4, "dynamic_cp": (True,)}, "dynamic_cp", "an integer >= 1", True, ()),
    ({"dp": 12, "dynamic_cp": (1, 3)}, "dynamic_cp",
     "powers of two that divide dp * cp = 12", [1, 3], (1, 2, 4)),
    ({"dp": 4, "ep": 3}, "ep", "ep * etp = 3 to divide dp_outer * dp * cp * tp = 4", 3, ()),
    ({"dp": 4, "ep": 4, "etp": 2}, "etp",
     "ep * etp = 8 to divide dp_outer * dp * cp * tp = 4", 2, ()),
]  # fmt: skip


@pytest.mark.parametrize(("values", "key", "expected", "got", "legal"), LAYOUTS)
def test_degrees_that_do_not_fit_are_refused(
    values: dict[str, Any], key: str, expected: str, got: Any, legal: tuple[int, ...]
) -> None:
    """What depends on several degrees names the one at fault."""
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**values)
    found = caught.value
    assert (found.key, found.expected, found.got, found.legal) == (key, expected, got, legal)


TEXT = DataConfig(kind="text")
WHOLE = ("no_shard", "optim", "optim_grads")
LEGAL: list[tuple[Any, dict[str, Any]]] = [
    (ModelConfig, {"hidden": 8, "heads": 4, "kv_heads": 4}),
    (ModelConfig, {"dropout": 0.0, "vocab_size": 1, "seq": 1}),
    (ModelConfig, {"heads": 3, "kv_heads": 3, "head_dim": 2}),
    (ModelConfig, {"experts": 1, "top_k": 1, "expert_ffn": 1, "first_dense_layers": 1}),
    (ModelConfig, {"experts": 2, "top_k": 2, "expert_ffn": 1, "capacity_factor": 0.5,
                   "drop": "probs"}),
    (ModelConfig, {"experts": 2, "top_k": 1, "expert_ffn": 1, "expert_bias": True,
                   "score": "softmax"}),
    (OptimConfig, {"lr": 0.0, "weight_decay": 0.0, "clip_grad_norm": 0.0, "beta1": 0.0}),
    (DataConfig, {"kind": "text", "path": "/x"}),
    (TrainConfig, {"steps": 1}),
    (TrainConfig, {"seed": 2**64 - 1}),
    (TrainConfig, {"graph": ("attn",), "steps": 3}),
    (TrainConfig, {"graph": ("full_iteration",), "fsdp": FsdpConfig(pool="dynamic")}),
    *((TrainConfig, {"graph": ("attn",), "fsdp": FsdpConfig(strategy=s, pool="dynamic")})
      for s in WHOLE),
    (TrainConfig, {"graph": ("attn",), "fsdp": FsdpConfig(
        strategy="optim", pool="dynamic", persistent_on_miss=False)}),
    (TrainConfig, {"graph": ("attn",), "fsdp": FsdpConfig(pool="traced")}),
    (TrainConfig, {"model": ModelConfig(vocab_size=256), "data": TEXT}),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "values"), LEGAL)
def test_the_value_next_to_a_limit_is_legal(owner: Any, values: dict[str, Any]) -> None:
    """It is accepted as it is."""
    built = owner(**values)
    assert {key: getattr(built, key) for key in values} == values


def test_stable_pools_are_asked_of_the_outer_axis_too() -> None:
    """Weights that only the outer axis cuts are gathered, so a partial scope needs their place."""
    outside = FsdpConfig(strategy="no_shard", outer_strategy="optim_grads_params", pool="dynamic")
    with pytest.raises(ConfigError) as caught:
        TrainConfig(graph=("attn",), fsdp=outside)
    assert (caught.value.key, caught.value.legal) == ("fsdp.pool", ("double", "traced"))


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


def test_frozen_and_keyword_only() -> None:
    """A configuration cannot change after its rules were checked, and takes no positions."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        ParallelConfig(2)  # type: ignore[call-arg]


@pytest.mark.parametrize("preset", config.MODEL_PRESETS)
def test_every_preset_and_layout_round_trips(preset: str) -> None:
    """Lists of JSON become the tuples that they were, whatever the model and the layout."""
    model = model_from_preset(preset)
    sizes: dict[str, list[Any]] = {"dynamic_cp": [(), (1, 2)], "cp": [1, 2], "dp_outer": [1]}
    layouts = list(legal_layouts(4, model, only=sizes))
    assert len({layout.dynamic_cp for layout in layouts}) == 2
    for layout in layouts:
        built = TrainConfig(model=model, parallel=layout)
        plain = json.loads(json.dumps(built.to_dict(), allow_nan=False))
        assert plain == built.to_dict()
        again = TrainConfig.from_dict(plain)
        assert again == built
        assert hash(again) == hash(built)


def test_from_dict_refuses_unknown_keys() -> None:
    """An unknown key is named with its section, and never dropped."""
    plain = TrainConfig().to_dict()
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(plain | {"stpes": 3})
    assert (caught.value.key, caught.value.got) == ("stpes", "stpes")
    assert "steps" in caught.value.legal
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(plain | {"optim": {"learning_rate": 1.0}})
    assert caught.value.key == "optim.learning_rate"
    assert "lr" in caught.value.legal


def test_strategies_are_listed_by_how_much_they_cut() -> None:
    """A strategy's place in the list is the number of things it cuts; placements rely on it."""
    assert config.STRATEGIES == ("no_shard", "optim", "optim_grads", "optim_grads_params")


def test_needs_no_torch() -> None:
    """A laptop without torch can validate any layout: importing the module imports only stdlib."""
    program = (
        "import sys, fsdp_core.config, fsdp_core.config.parallel\n"
        "heavy = {'torch', 'numpy', 'yaml', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(fsdp_core.config.ParallelConfig(dp=4096).world_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "4096", "")


VALUES: tuple[Any, ...] = (
    None, "x", "", -1, 0, 1.5, float("nan"), float("inf"), 2**31, 2**62, 2**70, True, (), ("a",),
    (1,), [1], {}, b"x", ["attn"], -1.0,
)  # fmt: skip
PARTS: dict[str, Any] = {
    "parallel": ParallelConfig, "fsdp": FsdpConfig, "optim": OptimConfig, "data": DataConfig,
    "resume_from": ParallelConfig,
}  # fmt: skip
MODELS = ("dense_tiny", "mla_moe_tiny")


def built(key: str, value: Any) -> Iterator[TrainConfig]:
    part, _, name = key.partition(".")
    values: list[dict[str, Any]] = [{key: value}]
    if part == "model" and name:
        values = [{part: model_from_preset(preset, {name: value})} for preset in MODELS]
    elif name:
        values = [{part: PARTS[part](**{name: value})}]
    for each in values:
        yield TrainConfig(**each)


def keys() -> list[str]:
    found = [f.name for f in dataclasses.fields(TrainConfig) if f.name not in ("model", *PARTS)]
    for part, kind in {"model": type(TrainConfig().model), **PARTS}.items():
        found += [f"{part}.{f.name}" for f in dataclasses.fields(kind) if f.name != "preset"]
    return found


def refused_with(key: str, value: Any) -> ConfigError | None:
    try:
        list(built(key, value))
    except ConfigError as error:
        return error
    return None


def test_values_of_all_types_are_taken_or_refused() -> None:
    """No other exception, and no search through the divisors of a number that none has."""
    for key in keys():
        said = [refused_with(key, value) for value in VALUES]
        assert all(error is None or error.key for error in said), key
        assert any(said), key


@pytest.mark.parametrize("key", ["graph", "compile", "stress", "taps"])
def test_lists_are_no_tuples(key: str) -> None:
    """A list of scopes would be equal to no tuple of the same ones, wherever they are compared."""
    error = refused_with(key, ["layer"])
    assert error is not None
    assert error.expected == "a tuple of names"
