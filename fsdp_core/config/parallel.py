"""Degrees of a layout, and the rules that join them to a model.

The world is the product of the dense degrees; the expert degrees cut the same ranks anew:

    dense     pp x dp_outer x dp x cp x tp        tp fastest
    expert    pp x edp x ep x etp                 etp fastest; edp is what is left

`fsdp_core.layouts` has the coordinates of ranks and lists the legal layouts.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fsdp_core.config.model import ModelConfig
from fsdp_core.config.rule import ConfigError, Rule, at_least, divisors, is_bool, obey

DENSE_DEGREES = ("dp", "dp_outer", "tp", "cp", "pp")
"""Their product is the world size."""
DEGREES = (*DENSE_DEGREES, "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the mesh axes; the product of the dense ones is the world size.

    Attributes:
        dp: ranks that share the parameters, each with batches of its own.
        dp_outer: such groups, farther apart, that share what `fsdp.outer_strategy` says.
        tp: tensor parallel: heads, widths of feed-forwards and the vocabulary are cut.
        cp: context parallel: sequences are cut, two chunks a rank.
        ep: expert parallel: experts are dealt out.
        etp: expert tensor parallel: the width of each expert is cut.
        pp: pipeline parallel: layers are dealt out.
        sequence_parallel: between tensor-parallel regions, sequences are cut over tp.
        pp_chunks: stretches of layers that a pipeline rank has; above 1, 1F1B is interleaved.
        dynamic_cp: sizes of context parallel groups that a microbatch may choose from, ascending;
            the groups cut the dp x cp ranks. Empty: every microbatch uses cp.
    """

    dp: int = 1
    dp_outer: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    pp_chunks: int = 1
    dynamic_cp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in (*DEGREES, "pp_chunks"):
            at_least(key, getattr(self, key), 1)
        is_bool("sequence_parallel", self.sequence_parallel)
        if not isinstance(self.dynamic_cp, tuple):
            raise ConfigError("dynamic_cp", expected="a tuple of sizes", got=self.dynamic_cp)
        for size in self.dynamic_cp:
            at_least("dynamic_cp", size, 1)
        obey(PARALLEL_RULES, self)

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.dp_outer * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Expert data parallel: ranks that have the same part of the same experts."""
        return self.stage_size // (self.ep * self.etp)


class Layout(Protocol):
    """What the rules of layouts look at: `TrainConfig` is one."""

    @property
    def model(self) -> ModelConfig:
        """Shapes."""

    @property
    def parallel(self) -> ParallelConfig:
        """Degrees."""

    @property
    def microbatches(self) -> int:
        """Microbatches a step."""


# --- rules of degrees alone -------------------------------------------------------------------


def _edp_is_whole(parallel: ParallelConfig) -> ConfigError | None:
    cut = parallel.ep * parallel.etp
    if parallel.stage_size % cut == 0:
        return None
    key = "ep" if parallel.stage_size % parallel.ep else "etp"
    expected = f"ep * etp = {cut} to divide dp_outer * dp * cp * tp = {parallel.stage_size}"
    return ConfigError(key, expected=expected, got=getattr(parallel, key))


def _sequence_parallel_needs_tp(parallel: ParallelConfig) -> ConfigError | None:
    if not parallel.sequence_parallel or parallel.tp > 1:
        return None
    return ConfigError("sequence_parallel", expected="false, as tp is 1", got=True, legal=(False,))


def _chunks_need_stages(parallel: ParallelConfig) -> ConfigError | None:
    if parallel.pp_chunks == 1 or parallel.pp > 1:
        return None
    return ConfigError("pp_chunks", expected="1, as pp is 1", got=parallel.pp_chunks, legal=(1,))


def _dynamic_cp_ascends(parallel: ParallelConfig) -> ConfigError | None:
    sizes = parallel.dynamic_cp
    if all(low < high for low, high in itertools.pairwise(sizes)):
        return None
    return ConfigError("dynamic_cp", expected="ascending sizes, each once", got=sizes)


def _dynamic_cp_fits(parallel: ParallelConfig) -> ConfigError | None:
    ranks = parallel.dp * parallel.cp
    # Powers of two up to the largest that divides: its lowest bit that is set.
    legal = tuple(1 << power for power in range((ranks & -ranks).bit_length()))
    if set(parallel.dynamic_cp) <= set(legal):
        return None
    expected = f"powers of two that divide dp * cp = {ranks}"
    return ConfigError("dynamic_cp", expected=expected, got=parallel.dynamic_cp, legal=legal)


PARALLEL_RULES: tuple[Rule[ParallelConfig], ...] = (
    Rule(
        "edp_is_whole",
        "ep * etp divides the ranks of a pipeline stage, dp_outer * dp * cp * tp.",
        _edp_is_whole,
    ),
    Rule(
        "sequence_parallel_needs_tp",
        "Sequence parallel cuts over tp: tp is at least 2.",
        _sequence_parallel_needs_tp,
    ),
    Rule("chunks_need_stages", "Interleaving needs a pipeline: pp is at least 2.",
         _chunks_need_stages),
    Rule("dynamic_cp_ascends", "Dynamic cp sizes ascend, each once.", _dynamic_cp_ascends),
    Rule("dynamic_cp_fits", "Dynamic cp sizes are powers of two that divide dp * cp.",
         _dynamic_cp_fits),
)  # fmt: skip


# --- rules that join degrees and a model ------------------------------------------------------


def _divides(
    axis: str, length: str, unless: Callable[[ModelConfig], bool] = lambda model: False
) -> Callable[[Layout], ConfigError | None]:
    """A check that the degree of `axis` divides the model's `length`."""

    def check(layout: Layout) -> ConfigError | None:
        degree, total = getattr(layout.parallel, axis), getattr(layout.model, length)
        if total % degree == 0 or unless(layout.model):
            return None
        return ConfigError(
            f"parallel.{axis}",
            expected=f"a divisor of {length}={total}",
            got=degree,
            legal=divisors(total),
        )

    return check


def _expert_axes_need_experts(layout: Layout) -> ConfigError | None:
    parallel = layout.parallel
    if layout.model.experts or parallel.ep == parallel.etp == 1:
        return None
    axis = "ep" if parallel.ep > 1 else "etp"
    expected = "1, as the model has no experts"
    return ConfigError(
        f"parallel.{axis}", expected=expected, got=getattr(parallel, axis), legal=(1,)
    )


def _experts_under_tp_need_sequence_parallel(layout: Layout) -> ConfigError | None:
    parallel = layout.parallel
    if not layout.model.experts or parallel.sequence_parallel or parallel.tp in (1, parallel.etp):
        return None
    return ConfigError(
        "parallel.sequence_parallel",
        expected=f"true, as there are experts and tp={parallel.tp} is not etp={parallel.etp}",
        got=False,
    )


def _seq_multiple(parallel: ParallelConfig, cp: int) -> int:
    return 2 * cp * (parallel.tp if parallel.sequence_parallel else 1)


def _cp_cuts_seq(layout: Layout) -> ConfigError | None:
    parallel, seq = layout.parallel, layout.model.seq
    if parallel.cp == 1 or seq % _seq_multiple(parallel, parallel.cp) == 0:
        return None
    unit = "2 * cp * tp" if parallel.sequence_parallel else "2 * cp"
    expected = f"{unit} = {_seq_multiple(parallel, parallel.cp)} to divide seq={seq}"
    return ConfigError("parallel.cp", expected=expected, got=parallel.cp)


def _sequence_parallel_cuts_seq(layout: Layout) -> ConfigError | None:
    parallel, seq = layout.parallel, layout.model.seq
    if not parallel.sequence_parallel or seq % parallel.tp == 0:
        return None
    return ConfigError(
        "parallel.tp",
        expected=f"a divisor of seq={seq}, as sequence_parallel is true",
        got=parallel.tp,
        legal=divisors(seq),
    )


def _dynamic_cp_cuts_seq(layout: Layout) -> ConfigError | None:
    parallel, seq = layout.parallel, layout.model.seq
    for size in parallel.dynamic_cp:
        # Of size 1, too: packed sequences are padded to it where one rank has them whole.
        multiple = _seq_multiple(parallel, size)
        if seq % multiple:
            unit = "2 * size * tp" if parallel.sequence_parallel else "2 * size"
            expected = f"{unit} = {multiple} to divide seq={seq} for each size"
            return ConfigError("parallel.dynamic_cp", expected=expected, got=parallel.dynamic_cp)
    return None


def _stages_have_layers(layout: Layout) -> ConfigError | None:
    parallel, layers = layout.parallel, layout.model.layers
    stretches = parallel.pp * parallel.pp_chunks
    if stretches <= layers:
        return None
    key = "pp_chunks" if parallel.pp <= layers else "pp"
    expected = f"pp * pp_chunks = {stretches} to be at most layers={layers}"
    return ConfigError(f"parallel.{key}", expected=expected, got=getattr(parallel, key))


def _interleaving_fills_rounds(layout: Layout) -> ConfigError | None:
    parallel, number = layout.parallel, layout.microbatches
    if parallel.pp_chunks == 1 or number % parallel.pp == 0:
        return None
    expected = f"a multiple of pp={parallel.pp}, as pp_chunks is {parallel.pp_chunks}"
    return ConfigError("microbatches", expected=expected, got=number)


LAYOUT_RULES: tuple[Rule[Layout], ...] = (
    Rule("tp_divides_heads", "Each tp rank has whole query heads, equally many.",
         _divides("tp", "heads"), alone=("tp",)),
    Rule("tp_divides_kv_heads",
         "Each tp rank has whole key-value heads, equally many; they are not replicated.",
         _divides("tp", "kv_heads"), alone=("tp",)),
    Rule("tp_divides_ffn", "Dense feed-forwards are cut evenly over tp.",
         _divides("tp", "ffn", unless=lambda model: not model.has_dense_ffn), alone=("tp",)),
    Rule("tp_divides_shared_expert_ffn", "Shared experts are cut evenly over tp.",
         _divides("tp", "shared_expert_ffn"), alone=("tp",)),
    Rule("tp_divides_vocab_size", "The vocabulary is cut evenly over tp, embedding and head.",
         _divides("tp", "vocab_size"), alone=("tp",)),
    Rule("sequence_parallel_cuts_seq", "Sequence parallel cuts sequences evenly over tp.",
         _sequence_parallel_cuts_seq),
    Rule("cp_cuts_seq",
         "A sequence is 2 * cp equal chunks, each cut again over tp under sequence parallel.",
         _cp_cuts_seq, alone=("cp",)),
    Rule("dynamic_cp_cuts_seq", "The same for every size that dynamic cp may choose.",
         _dynamic_cp_cuts_seq),
    Rule("expert_axes_need_experts", "ep and etp cut experts: a dense model has none.",
         _expert_axes_need_experts, alone=("ep", "etp")),
    Rule("ep_divides_experts", "Each ep rank has equally many experts.",
         _divides("ep", "experts"), alone=("ep",)),
    Rule("etp_divides_expert_ffn", "The width of an expert is cut evenly over etp.",
         _divides("etp", "expert_ffn"), alone=("etp",)),
    Rule("experts_under_tp_need_sequence_parallel",
         "Experts count a token that all tp ranks have once only if etp is tp.",
         _experts_under_tp_need_sequence_parallel),
    Rule("stages_have_layers", "Each pipeline rank has a layer in each of its pp_chunks.",
         _stages_have_layers, alone=("pp",)),
    Rule("interleaving_fills_rounds",
         "Interleaved 1F1B works in rounds of pp microbatches (Narayanan et al., 2021).",
         _interleaving_fills_rounds),
)  # fmt: skip
