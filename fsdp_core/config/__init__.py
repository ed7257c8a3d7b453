"""Frozen, self-validating configuration of one training run.

Standard library only, so that a laptop without torch can validate a 4,096-GPU layout. A rule that
fails raises `ConfigError`, which carries the key, what was expected, what was got, the legal
values and the rule's name; the scenario decoder adds the file and the line.

    TrainConfig
      model     ModelConfig     shapes of the decoder, a preset with overrides
      parallel  ParallelConfig  degrees of the mesh axes
      fsdp      FsdpConfig      sharding strategy, pool, precision of the reduction
      optim     OptimConfig     AdamW and gradient clipping
      data      DataConfig      where tokens come from
      engine    who shards the model
      graph     tuple of scopes, empty means eager
      compile   tuple of parts, empty means none
      stress    tuple of stressors, empty means none
      taps      tuple of patterns, modules that are looked into

`RULES` has every rule by what it is about, for documents and for people who ask why.
"""

from fsdp_core.config.built import NOT_BUILT, not_built, refuse_not_built
from fsdp_core.config.compiled import COMPILE_RULES, COMPILERS, NO_COMPILE, PARTS
from fsdp_core.config.eight_bits import EIGHT_BITS, EIGHT_BITS_RULES
from fsdp_core.config.engines import ENGINE_RULES, ENGINES
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
from fsdp_core.config.run import (
    BACKENDS,
    DATA_KINDS,
    RECOMPUTE,
    RUN_RULES,
    DataConfig,
    OptimConfig,
    TrainConfig,
    to_plain,
)
from fsdp_core.config.scopes import EAGER, GRAPH_RULES, SCOPES
from fsdp_core.config.sharding import DTYPES, POOLS, STRATEGIES, FsdpConfig
from fsdp_core.config.stressors import NO_STRESS, STRESS_RULES, STRESSORS
from fsdp_core.config.taps import TAP_KINDS, TAP_RULES, TapPattern, tap_pattern

__all__ = [
    "ATTENTIONS", "BACKENDS", "COMPILERS", "COMPILE_RULES", "DATA_KINDS", "DEGREES",
    "DENSE_DEGREES", "DISPATCHERS", "DROPS", "DTYPES", "EAGER", "EIGHT_BITS", "EIGHT_BITS_RULES",
    "ENGINES", "ENGINE_RULES", "GRAPH_RULES", "LAYOUT_RULES", "MODEL_PRESETS", "MODEL_RULES",
    "NOT_BUILT", "NO_COMPILE",
    "NO_STRESS", "PARALLEL_RULES", "PARTS", "POOLS", "RECOMPUTE", "RULES", "RUN_RULES", "SCOPES",
    "SCORES",
    "STRATEGIES", "STRESSORS", "STRESS_RULES", "TAP_KINDS", "TAP_RULES",
    "ConfigError", "DataConfig", "FsdpConfig", "Layout", "ModelConfig", "OptimConfig",
    "ParallelConfig", "Rule", "TapPattern", "TrainConfig", "broken", "divisors",
    "model_from_preset", "not_built", "refuse_not_built", "tap_pattern", "to_plain",
]  # fmt: skip

RULES: dict[str, tuple[Rule, ...]] = {
    "model": MODEL_RULES,
    "parallel": PARALLEL_RULES,
    "layout": LAYOUT_RULES,
    "graph": GRAPH_RULES,
    "compile": COMPILE_RULES,
    "fp8": EIGHT_BITS_RULES,
    "stress": STRESS_RULES,
    "engine": ENGINE_RULES,
    "taps": TAP_RULES,
    "run": RUN_RULES,
    "not built": NOT_BUILT,
}
