"""Compute in fp8: by which recipe, and which models and layouts have widths for it.

| fp8 | scales |
| --- | --- |
| none | compute in `dtype` |
| delayed | one a tensor, from the largest values of earlier steps |
| current | one a tensor, from its values now |
| block | one each block of 128 or 128 x 128 values |

fp8's matrix products take operands whose sides are multiples of 16 on every rank: widths after tp
or etp has cut them, and tokens after cp (and tp under sequence parallel) has. Rows of experts are
padded by whoever computes them. MXFP8 is not among the recipes: it needs compute capability 10.0.
"""

from collections.abc import Iterator
from typing import Protocol

from fsdp_core.config.model import ModelConfig
from fsdp_core.config.parallel import ParallelConfig
from fsdp_core.config.rule import ConfigError, Rule

EIGHT_BITS = ("none", "delayed", "current", "block")
MULTIPLE = 16


class EightBits(Protocol):
    """What the rules of fp8 look at: `TrainConfig` is one."""

    @property
    def model(self) -> ModelConfig:
        """Shapes."""

    @property
    def parallel(self) -> ParallelConfig:
        """Degrees."""

    @property
    def backend(self) -> str:
        """Who computes."""

    @property
    def fp8(self) -> str:
        """The recipe."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a microbatch."""


def _needs_te(run: EightBits) -> ConfigError | None:
    if run.fp8 == "none" or run.backend == "te":
        return None
    return ConfigError("fp8", expected=f"none, as backend is {run.backend}", got=run.fp8,
                       legal=("none",))  # fmt: skip


def _takes_widths(run: EightBits) -> ConfigError | None:
    return _first_uneven(run, _widths(run.model))


def _takes_tokens(run: EightBits) -> ConfigError | None:
    """Of each size of cp that a microbatch may have."""
    if run.fp8 == "none":
        return None
    parallel, tokens = run.parallel, run.micro_batch_size * run.model.seq
    for size in parallel.dynamic_cp or (parallel.cp,):
        cut = size * (parallel.tp if parallel.sequence_parallel else 1)
        if tokens % (cut * MULTIPLE):
            over = f"cp={size}" + (f", tp={parallel.tp}" if parallel.sequence_parallel else "")
            return _error(run, f"micro_batch_size * seq = {tokens} tokens over {over}")
    return None


def _widths(model: ModelConfig) -> Iterator[tuple[str, int, str]]:
    """Name, value and axis of all widths that a matrix product has; no axis: not cut."""
    yield "hidden", model.hidden, ""
    if model.attention == "mla":
        nope_rope = model.qk_nope_head_dim + model.qk_rope_head_dim
        yield "heads * (qk_nope_head_dim + qk_rope_head_dim)", model.heads * nope_rope, "tp"
        yield "heads * qk_nope_head_dim", model.heads * model.qk_nope_head_dim, "tp"
        yield "heads * v_head_dim", model.heads * model.v_head_dim, "tp"
        yield "kv_lora_rank", model.kv_lora_rank, ""
        if model.q_lora_rank is not None:
            yield "q_lora_rank", model.q_lora_rank, ""
    else:
        yield "heads * head_dim", model.heads * model.head_dim, "tp"
        yield "kv_heads * head_dim", model.kv_heads * model.head_dim, "tp"
    if model.has_dense_ffn:
        yield "ffn", model.ffn, "tp"
    if model.experts:
        yield "expert_ffn", model.expert_ffn, "etp"
        yield "shared_expert_ffn", model.shared_expert_ffn, "tp"


def _first_uneven(run: EightBits, widths: Iterator[tuple[str, int, str]]) -> ConfigError | None:
    if run.fp8 == "none":
        return None
    for name, width, axis in widths:
        ranks = getattr(run.parallel, axis) if axis else 1
        if width % (ranks * MULTIPLE):
            return _error(run, f"{name} = {width}" + (f" over {axis}={ranks}" if axis else ""))
    return None


def _error(run: EightBits, what: str) -> ConfigError:
    expected = f"none, as {what} is no multiple of {MULTIPLE} on a rank"
    return ConfigError("fp8", expected=expected, got=run.fp8, legal=("none",))


EIGHT_BITS_RULES: tuple[Rule[EightBits], ...] = (
    Rule("fp8_needs_te", "Only TransformerEngine computes in fp8.", _needs_te),
    Rule("fp8_takes_widths", "Widths are multiples of 16 on every rank, for fp8's products.",
         _takes_widths),
    Rule("fp8_takes_tokens", "So are the tokens of a microbatch, whichever cp it has.",
         _takes_tokens),
)  # fmt: skip
