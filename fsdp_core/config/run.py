"""One training run: all parts together, and what joins them."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.config.compiled import COMPILE_RULES, COMPILERS
from fsdp_core.config.eight_bits import EIGHT_BITS, EIGHT_BITS_RULES
from fsdp_core.config.engines import ENGINE_RULES, ENGINES
from fsdp_core.config.model import ModelConfig
from fsdp_core.config.parallel import LAYOUT_RULES, ParallelConfig
from fsdp_core.config.rule import (
    ConfigError,
    Rule,
    are_names,
    at_least,
    fraction,
    is_bool,
    not_negative,
    obey,
    one_of,
    positive,
)
from fsdp_core.config.scopes import CAPTURE_BY, GRAPH_RULES
from fsdp_core.config.sharding import DTYPES, FsdpConfig
from fsdp_core.config.stressors import STRESS_RULES
from fsdp_core.config.taps import TAP_RULES

BACKENDS = ("torch", "te")
RECOMPUTE = ("none", "full", "attn")
DATA_KINDS = ("synthetic", "text")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with decoupled weight decay on matrices; `clip_grad_norm` 0 means no clipping."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for key in ("lr", "weight_decay", "clip_grad_norm"):
            not_negative(key, getattr(self, key))
        positive("eps", self.eps)
        fraction("beta1", self.beta1, below=1.0)
        fraction("beta2", self.beta2, below=1.0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token source: `synthetic` (hash of position) or `text` (bytes of files).

    `path` names a file or a folder of the text corpus; without it the corpus is the sorted `.py`
    sources of the running Python's standard library.
    """

    kind: str = "synthetic"
    path: str | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, DATA_KINDS)
        if not isinstance(self.path, str | None):
            raise ConfigError("path", expected="a path", got=self.path)
        if self.path is not None and self.kind != "text":
            raise ConfigError("path", expected="no path unless kind is text", got=self.path)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the bits of one training run, but the device it runs on.

    `stress` and `stress_seed` must not: they decide what happens around the steps. `graph_layers`
    are the first and the last layer of which partial scopes are captured; empty: all. `capture_by`
    says who captures these: this package, TransformerEngine or torch, by their
    `make_graphed_callables`.

    `recompute` is what each layer computes again in its backward pass, in place of keeping it:
    nothing, all of it, or its attention branch. `fused_experts` has one kernel compute both layers
    of the experts, each of which is then an FSDP unit whose hooks run around the kernel; without it
    the backend decides, and the experts are one unit.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    graph: tuple[str, ...] = ()
    graph_layers: tuple[int, ...] = ()
    capture_by: str = "ours"
    compile: tuple[str, ...] = ()
    compile_backend: str = "inductor"
    engine: str = "ours"
    backend: str = "torch"
    dtype: str = "bf16"
    fp8: str = "none"
    recompute: str = "none"
    fused_experts: bool = False
    steps: int = 20
    microbatches: int = 1
    micro_batch_size: int = 1
    seed: int = 1234
    flush_every: int = 1
    graph_warmup_steps: int = 2
    graph_optimizer: bool = True
    ledger: bool = True
    stress: tuple[str, ...] = ()
    stress_seed: int = 0
    taps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("steps", "microbatches", "micro_batch_size", "flush_every"):
            at_least(key, getattr(self, key), 1)
        for key in ("seed", "stress_seed"):
            at_least(key, getattr(self, key), 0, most=math.inf)
            if getattr(self, key) >= 2**64:
                raise ConfigError(key, expected="an integer < 2**64", got=getattr(self, key))
        at_least("graph_warmup_steps", self.graph_warmup_steps, 1)
        one_of("engine", self.engine, ENGINES)
        one_of("backend", self.backend, BACKENDS)
        one_of("capture_by", self.capture_by, CAPTURE_BY)
        one_of("compile_backend", self.compile_backend, COMPILERS)
        one_of("dtype", self.dtype, DTYPES)
        one_of("fp8", self.fp8, EIGHT_BITS)
        one_of("recompute", self.recompute, RECOMPUTE)
        for key in ("graph_optimizer", "ledger", "fused_experts"):
            is_bool(key, getattr(self, key))
        for key in ("graph", "compile", "stress", "taps"):
            are_names(key, getattr(self, key))
        if not isinstance(self.graph_layers, tuple):
            raise ConfigError(
                "graph_layers", expected="a tuple of two numbers", got=self.graph_layers
            )
        for number in self.graph_layers:
            at_least("graph_layers", number, 0)
        obey(LAYOUT_RULES, self)
        obey(GRAPH_RULES, self)
        obey(COMPILE_RULES, self)
        obey(EIGHT_BITS_RULES, self)
        obey(STRESS_RULES, self)
        obey(ENGINE_RULES, self)
        obey(TAP_RULES, self)
        obey(RUN_RULES, self)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready plain values; `from_dict` is its inverse."""
        return {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "TrainConfig":
        """Rebuild a configuration from `to_dict`'s output.

        Raises:
            ConfigError: unknown or missing key, or a rule broken.
        """
        parts: dict[str, type[Any]] = {
            "model": ModelConfig, "parallel": ParallelConfig, "fsdp": FsdpConfig,
            "optim": OptimConfig, "data": DataConfig,
        }  # fmt: skip
        values = {key: _from_plain(value) for key, value in plain.items()}
        names = tuple(f.name for f in dataclasses.fields(cls))
        for key in values:
            if key not in names:
                raise ConfigError(key, expected="a key of the run", got=key, legal=names)
        for key, part in parts.items():
            if key in values:
                known = tuple(f.name for f in dataclasses.fields(part))
                for name in values[key]:
                    if name not in known:
                        raise ConfigError(
                            f"{key}.{name}", expected=f"a key of {key}", got=name, legal=known
                        )
                values[key] = part(**values[key])
        return cls(**values)


def to_plain(value: Any) -> Any:
    """A configuration, or one value of it, as JSON would give it back: tuples are lists."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: to_plain(getattr(value, f.name)) for f in fields}
    return list(value) if isinstance(value, tuple) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _from_plain(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _text_fits_vocabulary(run: TrainConfig) -> ConfigError | None:
    if run.data.kind != "text" or run.model.vocab_size >= 256:
        return None
    return ConfigError(
        "model.vocab_size", expected=">= 256 for byte-level text", got=run.model.vocab_size
    )


def _recompute_is_eager_or_captured_whole(run: TrainConfig) -> ConfigError | None:
    """A layer that is computed again would enter the graphs of its parts twice."""
    inside = [s for s in run.graph if s not in ("layer", "full_iteration")]
    if run.recompute != "full" or not inside:
        return None
    return ConfigError(
        "recompute", expected=f"none or attn, as graph scope {inside[0]} is a part of a layer",
        got=run.recompute,
    )  # fmt: skip


def _recompute_draws_outside_of_graphs(run: TrainConfig) -> ConfigError | None:
    captured = set(run.graph) & {"attn", "layer", "full_iteration"}
    if run.recompute == "none" or not captured or not run.model.dropout:
        return None
    return ConfigError(
        "recompute", got=run.recompute,
        expected=f"none, as model.dropout is {run.model.dropout} and graph scope "
        f"{min(captured)} cannot draw the same numbers twice",
    )  # fmt: skip


def _recompute_is_of_eager_torch(run: TrainConfig) -> ConfigError | None:
    if run.recompute == "none":
        return None
    for key, plain in (("compile", ()), ("fp8", "none"), ("capture_by", "ours")):
        if getattr(run, key) != plain:
            return ConfigError(
                "recompute", expected=f"none, as {key} is {getattr(run, key)}", got=run.recompute
            )
    return None


def _fused_experts_have_a_kernel(run: TrainConfig) -> ConfigError | None:
    if not run.fused_experts or (run.model.experts and run.fp8 != "block"):
        return None
    why = "the model has no experts" if not run.model.experts else "fp8 is block"
    return ConfigError("fused_experts", expected=f"false, as {why}", got=True)


RUN_RULES: tuple[Rule[TrainConfig], ...] = (
    Rule("text_fits_vocabulary", "Text is read byte by byte: 256 tokens.", _text_fits_vocabulary),
    Rule("recompute_is_eager_or_captured_whole",
         "Graphs of parts of a layer are replayed once forward, so they hold no whole layer again.",
         _recompute_is_eager_or_captured_whole),
    Rule("recompute_draws_outside_of_graphs", "A graph cannot draw the same numbers twice.",
         _recompute_draws_outside_of_graphs),
    Rule("recompute_is_of_eager_torch",
         "Compilers and others' captures decide what they keep; scales of fp8 would move twice.",
         _recompute_is_of_eager_torch),
    Rule("fused_experts_have_a_kernel", "Grouped products in blocks of fp8 have no fused kernel.",
         _fused_experts_have_a_kernel),
)  # fmt: skip
