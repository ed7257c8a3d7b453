"""Frozen, self-validating configuration of one training run.

Standard library only, so that a laptop without torch can validate a 4,096-GPU layout. A rule that
fails raises `ConfigError`, which carries the key, what was expected, what was got and the legal
values; the scenario decoder adds the file and the line.

    TrainConfig
      model     ModelConfig     shapes of the decoder, a preset with overrides
      parallel  ParallelConfig  degrees of the mesh axes
      fsdp      FsdpConfig      sharding strategy, pool, precision of the reduction
      optim     OptimConfig     AdamW and gradient clipping
      data      DataConfig      where tokens come from
      graph     tuple of scopes, empty means eager
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("bf16", "fp32")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What is cut over the ranks of an axis; each cuts all that the one before does."""
POOLS = ("dynamic", "double", "traced")
SCOPES = ("attn", "full_iteration")
BACKENDS = ("torch", "te")
DATA_KINDS = ("synthetic", "text")
EAGER = "eager"


class ConfigError(ValueError):
    """A configuration value that breaks a rule.

    Attributes:
        key: dotted key of the value at fault, relative to the object that raised.
        expected: what the rule asks for, in words.
        got: the value that was given.
        legal: the legal values, if they can be listed.
    """

    def __init__(
        self, key: str, *, expected: str, got: object, legal: tuple[object, ...] = ()
    ) -> None:
        self.key = key
        self.expected = expected
        self.got = got
        self.legal = legal
        text = f"{key}: expected {expected}, got {got!r}"
        if legal:
            text += f"; legal values: {', '.join(str(value) for value in legal)}"
        super().__init__(text)


def _one_of(key: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigError(key, expected="one of the legal values", got=value, legal=legal)


def _at_least(key: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(key, expected=f"an integer >= {minimum}", got=value)


def _fraction(key: str, value: float, *, below: float) -> None:
    if not 0.0 <= value < below:
        raise ConfigError(key, expected=f"a number in [0, {below:g})", got=value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes of a dense pre-norm decoder. `seq` is the training sequence length in tokens."""

    preset: str = "dense_tiny"
    vocab_size: int = 256
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 160
    seq: int = 32
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for key in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn", "seq"):
            _at_least(key, getattr(self, key), 1)
        if self.hidden % self.heads:
            raise ConfigError(
                "heads", expected=f"a divisor of hidden={self.hidden}", got=self.heads
            )
        if self.head_dim % 2:
            raise ConfigError(
                "heads", expected=f"hidden/heads even (RoPE), hidden={self.hidden}", got=self.heads
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                "kv_heads", expected=f"a divisor of heads={self.heads}", got=self.kv_heads
            )
        for key in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, key) > 0:  # so that NaN fails too
                raise ConfigError(key, expected="a number > 0", got=getattr(self, key))
        _fraction("dropout", self.dropout, below=1.0)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "dense_tiny": {},
    "dense_tiny_dropout": {"dropout": 0.1},
    "dense_small": {
        "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 688, "seq": 128,
    },
    "dense_1b": {
        "vocab_size": 32_000, "hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8,
        "ffn": 8192, "seq": 2048,
    },
}  # fmt: skip


def model_from_preset(preset: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Build a `ModelConfig` from a preset's name and overriding fields.

    Raises:
        ConfigError: unknown preset, unknown field, or a shape rule broken.
    """
    _one_of("preset", preset, tuple(MODEL_PRESETS))
    names = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name != "preset")
    for name in overrides or {}:
        if name not in names:
            raise ConfigError(name, expected="a field of the model", got=name, legal=names)
    return ModelConfig(preset=preset, **(MODEL_PRESETS[preset] | dict(overrides or {})))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the mesh axes; their product is the world size.

    `dp` ranks share the parameters; `dp_outer` such groups, farther apart, share what
    `fsdp.outer_strategy` says.
    """

    dp: int = 1
    dp_outer: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for key in ("dp", "dp_outer", "tp", "cp", "ep", "etp", "pp"):
            _at_least(key, getattr(self, key), 1)
        for key in ("tp", "cp", "ep", "etp", "pp"):
            if getattr(self, key) != 1:
                raise ConfigError(
                    key,
                    expected="1 (only dp and dp_outer are built so far)",
                    got=getattr(self, key),
                    legal=(1,),
                )

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.dp_outer * self.dp * self.tp * self.cp * self.pp


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How parameters are sharded and where gathered buffers come from."""

    strategy: str = "optim_grads_params"
    outer_strategy: str = "no_shard"
    pool: str = "double"
    persistent_on_miss: bool = True
    reshard_after_forward: bool = True
    reduce_dtype: str = "fp32"

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("outer_strategy", self.outer_strategy, STRATEGIES)
        _one_of("pool", self.pool, POOLS)
        _one_of("reduce_dtype", self.reduce_dtype, DTYPES)


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
            if not getattr(self, key) >= 0:
                raise ConfigError(key, expected="a number >= 0", got=getattr(self, key))
        if not self.eps > 0:
            raise ConfigError("eps", expected="a number > 0", got=self.eps)
        _fraction("beta1", self.beta1, below=1.0)
        _fraction("beta2", self.beta2, below=1.0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token source: `synthetic` (hash of position) or `text` (bytes of files).

    `path` names a file or a folder of the text corpus; without it the corpus is the sorted `.py`
    sources of the running Python's standard library.
    """

    kind: str = "synthetic"
    path: str | None = None

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, DATA_KINDS)
        if self.path is not None and self.kind != "text":
            raise ConfigError("path", expected="no path unless kind is text", got=self.path)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the bits of one training run, but the device it runs on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    graph: tuple[str, ...] = ()
    backend: str = "torch"
    dtype: str = "bf16"
    steps: int = 20
    microbatches: int = 1
    micro_batch_size: int = 1
    seed: int = 1234
    flush_every: int = 1
    graph_warmup_steps: int = 2
    ledger: bool = True

    def __post_init__(self) -> None:
        for key in ("steps", "microbatches", "micro_batch_size", "flush_every"):
            _at_least(key, getattr(self, key), 1)
        _at_least("seed", self.seed, 0)
        if self.seed >= 2**64:
            raise ConfigError("seed", expected="an integer < 2**64", got=self.seed)
        _at_least("graph_warmup_steps", self.graph_warmup_steps, 1)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("dtype", self.dtype, DTYPES)
        self._check_graph()
        if self.data.kind == "text" and self.model.vocab_size < 256:
            raise ConfigError(
                "model.vocab_size", expected=">= 256 for byte-level text", got=self.model.vocab_size
            )

    def _check_graph(self) -> None:
        for scope in self.graph:
            if scope not in SCOPES:
                raise ConfigError(
                    "graph", expected="graph scopes", got=scope, legal=(EAGER, *SCOPES)
                )
        if len(set(self.graph)) != len(self.graph):
            raise ConfigError("graph", expected="each scope once", got=list(self.graph))
        if "full_iteration" in self.graph and len(self.graph) > 1:
            raise ConfigError(
                "graph", expected="full_iteration alone, it holds every other", got=list(self.graph)
            )
        if self.graph and self.steps <= self.graph_warmup_steps:
            # A graph that is never replayed would agree with eager by having tested nothing.
            raise ConfigError(
                "steps",
                expected=f"more than graph_warmup_steps={self.graph_warmup_steps}, or no graph is "
                "ever replayed",
                got=self.steps,
            )
        partial = any(scope != "full_iteration" for scope in self.graph)
        sharded = "optim_grads_params" in (self.fsdp.strategy, self.fsdp.outer_strategy)
        if partial and sharded and self.fsdp.pool == "dynamic":
            raise ConfigError(
                "fsdp.pool",
                expected="stable buffers for the partial graph scope " + "+".join(self.graph),
                got="dynamic",
                legal=("double", "traced"),
            )
        if partial and sharded and not self.fsdp.persistent_on_miss:
            raise ConfigError(
                "fsdp.persistent_on_miss",
                expected="true for the partial graph scope " + "+".join(self.graph),
                got=False,
                legal=(True,),
            )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready plain values; `from_dict` is its inverse."""
        plain = dataclasses.asdict(self)
        plain["graph"] = list(self.graph)
        return plain

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
        values = dict(plain)
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
        if "graph" in values:
            values["graph"] = tuple(values["graph"])
        return cls(**values)
