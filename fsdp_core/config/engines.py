"""Who shards the model: our FSDP, or another engine over the same decoder, data and optimizer.

| engine | who | ranks hold |
| --- | --- | --- |
| ours | `fsdp_core.fsdp` | rows, by one flat buffer a unit |
| fsdp2 | torch `fully_shard` | rows, by each parameter |
| ddp | torch `DistributedDataParallel` | everything |
| megatron_fsdp | the package `megatron-fsdp` | rows, by one flat buffer a unit |

Other engines train dense models over dp, eagerly, by torch's modules. An option that means nothing
to an engine must keep its default: it would be ignored.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from fsdp_core.config.compiled import Compiled
from fsdp_core.config.parallel import ParallelConfig
from fsdp_core.config.rule import ConfigError, Rule
from fsdp_core.config.sharding import FsdpConfig

ENGINES = ("ours", "fsdp2", "ddp", "megatron_fsdp")
_TAKES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fsdp2": ("reshard_after_forward", "reduce_dtype"), "megatron_fsdp": ("reduce_dtype",)}
)
"""Of `fsdp`, what an engine takes beside ours, which takes all."""
_EAGER = (
    "graph", "graph_layers", "capture_by", "graph_warmup_steps", "graph_optimizer", "compile",
    "compile_backend", "backend", "stress", "recompute",
)  # fmt: skip
"""Options of graphs, compiled parts, layers, stressors and of what is computed again."""


class Sharded(Compiled, Protocol):
    """What the rules of engines look at: `TrainConfig` is one."""

    @property
    def engine(self) -> str:
        """One of `ENGINES`."""


def _is_plain(
    run: Sharded, part: Any, names: Iterable[str], prefix: str = ""
) -> ConfigError | None:
    """The error of the first of these fields of `part` that has not its default."""
    if run.engine == "ours":
        return None
    fields = {field.name: field.default for field in dataclasses.fields(part)}
    for name in names:
        got, default = getattr(part, name), fields[name]
        if got != default:
            words = ("eager" if name == "graph" else "none") if default == () else str(default)
            return ConfigError(
                prefix + name,
                expected=f"{words.lower()}, as engine is {run.engine}",
                got=list(got) if isinstance(got, tuple) else got,
            )
    return None


def _others(part: type[Any], but: Iterable[str]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(part) if f.name not in but)


def _other_engines_run_eagerly(run: Sharded) -> ConfigError | None:
    return _is_plain(run, run, _EAGER)


def _other_engines_cut_over_dp(run: Sharded) -> ConfigError | None:
    return _is_plain(run, run.parallel, _others(ParallelConfig, ("dp",)), "parallel.")


def _other_engines_shard_their_way(run: Sharded) -> ConfigError | None:
    return _is_plain(run, run.fsdp, _others(FsdpConfig, _TAKES.get(run.engine, ())), "fsdp.")


def _other_engines_train_dense_models(run: Sharded) -> ConfigError | None:
    return _is_plain(run, run.model, ("experts",), "model.")


ENGINE_RULES: tuple[Rule[Sharded], ...] = (
    Rule("other_engines_run_eagerly",
         "Graphs, compiled parts, TransformerEngine and stressors are of our engine.",
         _other_engines_run_eagerly),
    Rule("other_engines_cut_over_dp", "Other engines have dp alone.", _other_engines_cut_over_dp),
    Rule("other_engines_shard_their_way",
         "Strategies and pools are of our engine; others take what they have an option for.",
         _other_engines_shard_their_way),
    Rule("other_engines_train_dense_models", "Experts are sharded by our engine alone.",
         _other_engines_train_dense_models),
)  # fmt: skip
