"""Configuration: every rule names its key, round trips are exact, and no torch is needed."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_core import config
from fsdp_core.config import (
    ConfigError,
    DataConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)
from harness.scenario.legal_layouts import legal_layouts
from tests.unit.fsdp_core.config.refusals import (
    NAN,
    Refusal,
    check,
    integers,
    name_of,
    numbers,
    words,
)

DYNAMIC = FsdpConfig(pool="dynamic")
DYNAMIC_OUTSIDE = FsdpConfig(
    strategy="no_shard", outer_strategy="optim_grads_params", pool="dynamic"
)
NO_PERSISTENCE = FsdpConfig(persistent_on_miss=False)
SMALL_VOCABULARY = ModelConfig(vocab_size=255)
TEXT = DataConfig(kind="text")

REFUSALS: list[Refusal] = [
    *words(FsdpConfig, "strategy", config.STRATEGIES),
    *words(FsdpConfig, "outer_strategy", config.STRATEGIES),
    *words(FsdpConfig, "pool", config.POOLS),
    *words(FsdpConfig, "reduce_dtype", config.DTYPES),
    *integers(FsdpConfig, "overlap", 0),
    *integers(TrainConfig, "evaluate_every", 0),
    *(
        rule
        for key in ("lr", "weight_decay", "clip_grad_norm")
        for rule in numbers(OptimConfig, key, "a number >= 0", [-1e-9, NAN])
    ),
    *numbers(OptimConfig, "eps", "a number > 0", [0.0, -1.0, NAN]),
    *numbers(OptimConfig, "beta1", "a number in [0, 1)", [1.0, -0.1, NAN]),
    *numbers(OptimConfig, "beta2", "a number in [0, 1)", [1.0, -0.1, NAN]),
    *words(DataConfig, "kind", config.DATA_KINDS),
    (DataConfig, {"path": "/x"}, "path", "no path unless kind is text", "/x", ()),
    *(
        rule
        for key in ("steps", "microbatches", "micro_batch_size", "flush_every")
        for rule in integers(TrainConfig, key, 1)
    ),
    *integers(TrainConfig, "seed", 0),
    (TrainConfig, {"seed": 2**64}, "seed", f"an integer <= {2**64 - 1}", 2**64, ()),
    *integers(TrainConfig, "graph_warmup_steps", 1),
    *words(TrainConfig, "backend", config.BACKENDS),
    *words(TrainConfig, "dtype", config.DTYPES),
    *words(TrainConfig, "fp8", config.EIGHT_BITS),
    (
        TrainConfig,
        {"graph": ("atn",)},
        "graph",
        "graph scopes",
        "atn",
        ("eager", *config.SCOPES),
    ),
    (
        TrainConfig,
        {"graph": ("attn", "attn")},
        "graph",
        "each scope once",
        ["attn", "attn"],
        (),
    ),
    (
        TrainConfig,
        {"graph": ("attn", "full_iteration")},
        "graph",
        "full_iteration alone, it holds every other",
        ["attn", "full_iteration"],
        (),
    ),
    (
        TrainConfig,
        {"graph": ("attn",), "steps": 2},
        "steps",
        "more than resume_at=0 + graph_warmup_steps=2, or no graph is ever replayed",
        2,
        (),
    ),
    (
        TrainConfig,
        {"graph": ("attn",), "fsdp": DYNAMIC},
        "fsdp.pool",
        "stable buffers for partial graph scopes",
        "dynamic",
        ("double", "traced"),
    ),
    (
        TrainConfig,
        {"graph": ("attn",), "fsdp": DYNAMIC_OUTSIDE},
        "fsdp.pool",
        "stable buffers for partial graph scopes",
        "dynamic",
        ("double", "traced"),
    ),
    (
        TrainConfig,
        {"graph": ("attn",), "fsdp": NO_PERSISTENCE},
        "fsdp.persistent_on_miss",
        "true for partial graph scopes",
        False,
        (True,),
    ),
    (
        TrainConfig,
        {"model": SMALL_VOCABULARY, "data": TEXT},
        "model.vocab_size",
        ">= 256 for byte-level text",
        255,
        (),
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=name_of)
def test_refusal(refusal: Refusal) -> None:
    """A refused value names its key, what was expected, what was got, and what is legal."""
    check(refusal)


@pytest.mark.parametrize(
    ("owner", "values"),
    [
        (OptimConfig, {"lr": 0.0, "weight_decay": 0.0, "clip_grad_norm": 0.0, "beta1": 0.0}),
        (DataConfig, {"kind": "text", "path": "/x"}),
        (TrainConfig, {"steps": 1}),
        (TrainConfig, {"seed": 2**64 - 1}),
        (TrainConfig, {"graph": ("attn",), "steps": 3}),
        (TrainConfig, {"graph": ("full_iteration",), "fsdp": DYNAMIC}),
        *(
            (TrainConfig, {"graph": ("attn",), "fsdp": FsdpConfig(strategy=whole, pool="dynamic")})
            for whole in ("no_shard", "optim", "optim_grads")
        ),
        (
            TrainConfig,
            {
                "graph": ("attn",),
                "fsdp": FsdpConfig(strategy="optim", pool="dynamic", persistent_on_miss=False),
            },
        ),
        (TrainConfig, {"graph": ("attn",), "fsdp": FsdpConfig(pool="traced")}),
        (TrainConfig, {"model": ModelConfig(vocab_size=256), "data": TEXT}),
    ],
)
def test_edge_of_a_rule_is_legal(owner: Callable[..., Any], values: dict[str, Any]) -> None:
    """The value next to each limit is accepted as it is."""
    built = owner(**values)
    assert {key: getattr(built, key) for key in values} == values


def test_frozen_and_keyword_only() -> None:
    """A configuration cannot change after its rules were checked, and takes no positions."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        ParallelConfig(2)  # type: ignore[call-arg]


legal_configs = st.builds(
    TrainConfig,
    model=st.builds(
        ModelConfig,
        dropout=st.floats(0, 1, exclude_max=True),
        rope_theta=st.floats(1e-3, 1e9),
        heads=st.sampled_from([2, 4, 8]),
    ),
    parallel=st.builds(ParallelConfig, dp=st.integers(1, 4096), dp_outer=st.integers(1, 64)),
    fsdp=st.builds(
        FsdpConfig,
        strategy=st.sampled_from(config.STRATEGIES),
        outer_strategy=st.sampled_from(config.STRATEGIES),
        pool=st.sampled_from(("double", "traced")),
        reshard_after_forward=st.booleans(),
        reduce_dtype=st.sampled_from(config.DTYPES),
    ),
    optim=st.builds(OptimConfig, lr=st.floats(0, 1), beta1=st.floats(0, 1, exclude_max=True)),
    data=st.sampled_from([DataConfig(), TEXT, DataConfig(kind="text", path="/corpus")]),
    graph=st.sampled_from([(), ("attn",), ("full_iteration",)]),
    steps=st.integers(5, 10**6),
    seed=st.integers(0, 2**64 - 1),
)


@given(legal_configs)
def test_round_trip(built: TrainConfig) -> None:
    """A configuration comes back equal from its plain form, through JSON text too."""
    text = json.dumps(built.to_dict(), allow_nan=False)
    assert TrainConfig.from_dict(json.loads(text)) == built


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


def test_from_dict_checks_rules() -> None:
    """Values read from a file obey the same rules as values given in code."""
    plain = TrainConfig().to_dict()
    with pytest.raises(ConfigError, match="strategy"):
        TrainConfig.from_dict(plain | {"fsdp": {"strategy": "zero"}})
    with pytest.raises(ConfigError, match="graph"):
        TrainConfig.from_dict(plain | {"graph": ["atn"]})
    with pytest.raises(ConfigError, match="stress_seed: expected an integer >= 0, got -1"):
        TrainConfig.from_dict(plain | {"stress_seed": -1})


def test_strategies_are_listed_by_how_much_they_cut() -> None:
    """A strategy's place in the list is the number of things it cuts; placements rely on it."""
    assert config.STRATEGIES == ("no_shard", "optim", "optim_grads", "optim_grads_params")


def test_needs_no_torch() -> None:
    """A laptop without torch can validate any layout: importing the module imports only stdlib."""
    program = (
        "import sys, fsdp_core.config, fsdp_core.layouts\n"
        "heavy = {'torch', 'numpy', 'yaml', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(fsdp_core.config.ParallelConfig(dp=4096).world_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "4096", "")
