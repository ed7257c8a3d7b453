"""Frozen, self-validating configuration of one training run.

Standard library only, so that a laptop without torch can validate a 4,096-GPU layout. A rule that
fails raises `ConfigError`; `RULES` has every rule by what it is about.
"""

from fsdp_core.config.model import (
    ATTENTIONS,
    DISPATCHERS,
    DROPS,
    MODEL_PRESETS,
    MODEL_RULES,
    SCORES,
    ModelConfig,
    model_from_preset,
)
from fsdp_core.config.parallel import (
    DEGREES,
    DENSE_DEGREES,
    LAYOUT_RULES,
    PARALLEL_RULES,
    Layout,
    ParallelConfig,
)
from fsdp_core.config.rule import ConfigError, Rule, broken, divisors
from fsdp_core.config.rules import (
    BEGINS_AT,
    COMPILERS,
    EAGER,
    EIGHT_BITS,
    ENGINES,
    NO_COMPILE,
    NO_STRESS,
    PARTS,
    RUN_RULES,
    SCOPES,
    STRESSORS,
    TAP_KINDS,
    TapPattern,
    captured_layers,
    layers_with,
    tap_pattern,
)
from fsdp_core.config.run import (
    BACKENDS,
    DATA_KINDS,
    DTYPES,
    POOLS,
    RECOMPUTE,
    SAME_LAYOUT,
    STRATEGIES,
    DataConfig,
    FsdpConfig,
    OptimConfig,
    TrainConfig,
    scope_sets,
    to_plain,
)

__all__ = [
    "ATTENTIONS", "BACKENDS", "BEGINS_AT", "COMPILERS", "DATA_KINDS", "DEGREES", "DENSE_DEGREES",
    "DISPATCHERS", "DROPS", "DTYPES", "EAGER", "EIGHT_BITS", "ENGINES", "LAYOUT_RULES",
    "MODEL_PRESETS", "NO_COMPILE", "NO_STRESS", "PARALLEL_RULES", "PARTS", "POOLS", "RECOMPUTE",
    "RULES", "SAME_LAYOUT", "SCOPES", "SCORES", "STRATEGIES", "STRESSORS", "TAP_KINDS",
    "ConfigError", "DataConfig", "FsdpConfig", "Layout", "ModelConfig", "OptimConfig",
    "ParallelConfig", "Rule", "TapPattern", "TrainConfig", "broken", "captured_layers",
    "divisors", "layers_with", "model_from_preset", "scope_sets", "tap_pattern", "to_plain",
]  # fmt: skip

RULES: dict[str, tuple[Rule, ...]] = {
    "model": MODEL_RULES, "parallel": PARALLEL_RULES, "layout": LAYOUT_RULES, **RUN_RULES,
}  # fmt: skip
