"""One training run: its parts, and all of them together."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.config.model import ModelConfig
from fsdp_core.config.parallel import ParallelConfig
from fsdp_core.config.rule import (
    ConfigError,
    bools,
    integer_tuples,
    integers,
    name_tuples,
    numbers,
    words,
)
from fsdp_core.config.rules import CAPTURE_BY, COMPILERS, EIGHT_BITS, ENGINES, SCOPES, obey_all

BACKENDS = ("torch", "te")
RECOMPUTE = ("none", "full", "attn", "full_reentrant", "attn_reentrant")
DATA_KINDS = ("synthetic", "text")
TAILS = ("none", "dummy", "hidden")
DTYPES = ("bf16", "fp32")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What is cut over the ranks of an axis; each cuts all that the one before does."""
POOLS = ("dynamic", "double", "traced")
SAME_LAYOUT = ParallelConfig()


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How parameters are sharded and where gathered buffers come from. `overlap` is the number of
    side streams of communication: 2, gathers and reductions on one each; 1, both on one; 0, on the
    stream of compute, with nothing gathered ahead.
    """

    strategy: str = "optim_grads_params"
    outer_strategy: str = "no_shard"
    pool: str = "double"
    persistent_on_miss: bool = True
    reshard_after_forward: bool = True
    reduce_dtype: str = "fp32"
    overlap: int = 2

    def __post_init__(self) -> None:
        words(self, strategy=STRATEGIES, outer_strategy=STRATEGIES, pool=POOLS, reduce_dtype=DTYPES)
        bools(self, "persistent_on_miss", "reshard_after_forward")
        integers(self, 0, "overlap", most=2)


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
        numbers(self, ">= 0", "lr", "weight_decay", "clip_grad_norm")
        numbers(self, "> 0", "eps")
        numbers(self, "in [0, 1)", "beta1", "beta2")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token source: `synthetic` (hash of position) or `text` (bytes of files).

    `path` names a file or a folder of the text corpus; without it the corpus is the sorted `.py`
    sources of the running Python's standard library. Samples are numbered as `ranks` data-parallel
    ranks read them, so that dp 4 can read in one microbatch what dp 2 reads in two; 0: as many
    ranks as there are. `tail` is what the last quarter of a pack is: full of documents, a dummy
    sequence of padding, or hidden: no offset tells of it.
    """

    kind: str = "synthetic"
    path: str | None = None
    ranks: int = 0
    tail: str = "none"

    def __post_init__(self) -> None:
        words(self, kind=DATA_KINDS, tail=TAILS)
        integers(self, 0, "ranks")
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
    nothing, all of it, or its attention branch; torch's checkpoints are reentrant where it says so.
    `fused_experts` has one kernel compute both layers of the experts, each of which is then an FSDP
    unit whose hooks run around the kernel; without it the backend decides, and the experts are one
    unit. `fused_rope` has one kernel turn queries and keys, which finds positions from the offsets
    of a pack. `evaluate_every` has the loss of one batch that is never trained on evaluated after
    every so many steps; 0: never. `resume_at` is the number of steps after which the run is saved,
    ends its processes and goes on in new ones; 0: never. `resume_from` is the layout of these first
    steps, which train eagerly on as many ranks and the same samples, and are not recorded; of one
    rank: that of `parallel`. `skip_nonfinite` leaves out the update of AdamW, on all ranks, where
    the gradient norm is not finite.
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
    fused_rope: bool = False
    skip_nonfinite: bool = False
    steps: int = 20
    resume_at: int = 0
    resume_from: ParallelConfig = SAME_LAYOUT
    microbatches: int = 1
    micro_batch_size: int = 1
    seed: int = 1234
    flush_every: int = 1
    evaluate_every: int = 0
    graph_warmup_steps: int = 2
    graph_optimizer: bool = True
    ledger: bool = True
    stress: tuple[str, ...] = ()
    stress_seed: int = 0
    taps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        integers(self, 1, "steps", "microbatches", "micro_batch_size", "flush_every")
        integers(self, 1, "graph_warmup_steps")
        integers(self, 0, "evaluate_every", "resume_at")
        integers(self, 0, "seed", "stress_seed", most=2**64 - 1)
        words(self, engine=ENGINES, backend=BACKENDS, capture_by=CAPTURE_BY)
        words(self, compile_backend=COMPILERS, dtype=DTYPES, fp8=EIGHT_BITS, recompute=RECOMPUTE)
        bools(self, "graph_optimizer", "ledger", "fused_experts", "fused_rope", "skip_nonfinite")
        name_tuples(self, "graph", "compile", "stress", "taps")
        integer_tuples(self, 0, "graph_layers")
        obey_all(self)

    def evaluates_after(self, step: int) -> bool:
        return self.evaluate_every > 0 and (step + 1) % self.evaluate_every == 0

    @property
    def begins_elsewhere(self) -> bool:
        return self.resume_at > 0 and self.resume_from != SAME_LAYOUT

    @property
    def first_recorded(self) -> int:
        """The first step that is recorded: those in another layout are not."""
        return self.resume_at if self.begins_elsewhere else 0

    def before_resuming(self) -> "TrainConfig":
        """The run in the layout that it resumes from (`ConfigError`: it is not legal there)."""
        ranks = self.parallel.readers
        return dataclasses.replace(
            self, parallel=self.resume_from, resume_from=SAME_LAYOUT, resume_at=0,
            microbatches=self.microbatches * ranks // self.resume_from.readers,
            data=dataclasses.replace(self.data, ranks=self.data.ranks or ranks),
            graph=(), graph_layers=(), stress=(), taps=(), evaluate_every=0,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready plain values; `from_dict` is its inverse."""
        return {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "TrainConfig":
        """The inverse of `to_dict` (`ConfigError`: unknown or missing key, or a rule broken)."""
        values = {key: _from_plain(value) for key, value in plain.items()}
        _require_known(cls, values, "the run")
        for key, part in _PARTS.items():
            if key in values:
                _require_known(part, values[key], key, f"{key}.")
                values[key] = part(**values[key])
        return cls(**values)


def scope_sets(model: ModelConfig) -> list[tuple[str, ...]]:
    """Every set of graph scopes that a model can have."""

    def is_legal(scopes: tuple[str, ...]) -> bool:
        try:
            TrainConfig(model=model, graph=scopes)
        except ConfigError:
            return False
        return True

    sets = (s for size in range(1, len(SCOPES)) for s in itertools.combinations(SCOPES, size))
    return [scopes for scopes in sets if is_legal(scopes)]


_PARTS: dict[str, type[Any]] = {
    "model": ModelConfig, "parallel": ParallelConfig, "fsdp": FsdpConfig, "optim": OptimConfig,
    "data": DataConfig, "resume_from": ParallelConfig,
}  # fmt: skip


def _require_known(kind: type[Any], keys: Iterable[str], what: str, prefix: str = "") -> None:
    known = tuple(field.name for field in dataclasses.fields(kind))
    for key in keys:
        if key not in known:
            raise ConfigError(prefix + key, expected=f"a key of {what}", got=key, legal=known)


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
