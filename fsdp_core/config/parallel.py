"""Degrees of a layout, the rules that join them to a model, and coordinates of its ranks; no torch.

The world is the product of the dense degrees; the expert degrees cut the same ranks anew:

    dense     rank = (((pp * DP_OUTER + dp_outer) * DP + dp) * CP + cp) * TP + tp
    expert    rank = ((pp * EDP + edp) * EP + ep) * ETP + etp

The group of a rank on an axis is the ranks that differ from it in that coordinate alone, in the
order of the coordinate. Example, dp 2, cp 2, tp 2, ep 2, etp 2:

    rank      0  1  2  3  4  5  6  7
    dense     dp 0        dp 1              tp groups 01 23 45 67, cp groups 02 13 46 57
              cp 0  cp 1  cp 0  cp 1
    expert    edp 0       edp 1             etp groups 01 23 45 67, ep groups 02 13 46 57
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_core.config.model import ModelConfig
from fsdp_core.config.rule import Rule, bools, divisors, integer_tuples, integers, obey, refuse

DENSE_DEGREES = ("dp", "dp_outer", "tp", "cp", "pp")
"""Their product is the world size."""
DEGREES = (*DENSE_DEGREES, "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the mesh axes; the product of the dense ones is the world size.

    dp: ranks that share the parameters, each with batches of its own.
    dp_outer: such groups, farther apart, that share what `fsdp.outer_strategy` says.
    tp: tensor parallel: heads, widths of feed-forwards and the vocabulary are cut.
    cp: context parallel: sequences are cut, two chunks a rank.
    ep: expert parallel: experts are dealt out.
    etp: expert tensor parallel: the width of each expert is cut.
    pp: pipeline parallel: layers are dealt out.
    sequence_parallel: between tensor-parallel regions, sequences are cut over tp.
    pp_chunks: stretches of layers that a pipeline rank has; above 1, 1F1B is interleaved.
    dynamic_cp: sizes of context parallel groups that a microbatch may choose from, ascending; the
        groups cut the dp x cp ranks. Empty: every microbatch uses cp.
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
        integers(self, 1, *DEGREES, "pp_chunks")
        bools(self, "sequence_parallel")
        integer_tuples(self, 1, "dynamic_cp")
        obey(PARALLEL_RULES, self)

    @property
    def world_size(self) -> int:
        return self.pp * self.stage_size

    @property
    def readers(self) -> int:
        return self.dp_outer * self.dp

    @property
    def stage_size(self) -> int:
        return self.dp_outer * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        return self.stage_size // (self.ep * self.etp)


class Layout(NamedTuple):
    """What joins degrees and a model."""

    model: ModelConfig
    parallel: ParallelConfig
    microbatches: int = 1


def _edp_is_whole(parallel: ParallelConfig) -> None:
    cut, ranks = parallel.ep * parallel.etp, parallel.stage_size
    if ranks % cut:
        key = "ep" if ranks % parallel.ep else "etp"
        refuse(parallel, key, f"ep * etp = {cut} to divide dp_outer * dp * cp * tp = {ranks}")


def _dynamic_cp_fits(parallel: ParallelConfig) -> None:
    ranks = parallel.dp * parallel.cp
    # Powers of two up to the largest that divides: its lowest bit that is set.
    legal = tuple(1 << power for power in range((ranks & -ranks).bit_length()))
    if not set(parallel.dynamic_cp) <= set(legal):
        refuse(parallel, "dynamic_cp", f"powers of two that divide dp * cp = {ranks}", legal)


PARALLEL_RULES: tuple[Rule[ParallelConfig], ...] = (
    Rule("edp_is_whole", "ep * etp divides the ranks of a pipeline stage, dp_outer * dp * cp * tp.",
         _edp_is_whole),
    Rule("sequence_parallel_needs_tp", "Sequence parallel cuts over tp: tp is at least 2.",
         lambda p: p.sequence_parallel and p.tp == 1,
         "sequence_parallel", "false, as tp is 1", (False,)),
    Rule("chunks_need_stages", "Interleaving needs a pipeline: pp is at least 2.",
         lambda p: p.pp_chunks > 1 and p.pp == 1, "pp_chunks", "1, as pp is 1", (1,)),
    Rule("dynamic_cp_ascends", "Dynamic cp sizes ascend, each once.",
         lambda p: any(low >= high for low, high in itertools.pairwise(p.dynamic_cp)),
         "dynamic_cp", "ascending sizes, each once"),
    Rule("dynamic_cp_fits", "Dynamic cp sizes are powers of two that divide dp * cp.",
         _dynamic_cp_fits),
)  # fmt: skip


_EVEN = (
    ("tp", "heads", "Each tp rank has whole query heads, equally many."),
    ("tp", "kv_heads",
     "Each tp rank has whole key-value heads, equally many; they are not replicated."),
    ("tp", "ffn", "Dense feed-forwards are cut evenly over tp."),
    ("tp", "shared_expert_ffn", "Shared experts are cut evenly over tp."),
    ("tp", "vocab_size", "The vocabulary is cut evenly over tp, embedding and head."),
    ("ep", "experts", "Each ep rank has equally many experts."),
    ("etp", "expert_ffn", "The width of an expert is cut evenly over etp."),
)  # fmt: skip
"""Axes whose degree divides a length of the model."""


def _divides(layout: Layout, *, axis: str, length: str) -> None:
    total = getattr(layout.model, length)
    if length == "ffn" and not layout.model.has_dense_ffn:
        return
    if total % getattr(layout.parallel, axis):
        expected = f"a divisor of {length}={total}"
        refuse(layout, f"parallel.{axis}", expected, divisors(total))


def _sequence_parallel_cuts_seq(layout: Layout) -> None:
    parallel, seq = layout.parallel, layout.model.seq
    if parallel.sequence_parallel and seq % parallel.tp:
        expected = f"a divisor of seq={seq}, as sequence_parallel is true"
        refuse(layout, "parallel.tp", expected, divisors(seq))


def _cuts_seq(layout: Layout, key: str, unit: str) -> None:
    cut, seq = layout.parallel, layout.model.seq
    # Packs are padded to two chunks also where one rank has them whole.
    sizes = {"cp": (cut.cp,) if cut.cp > 1 else (), "dynamic_cp": cut.dynamic_cp}[key]
    unit += " * tp" if cut.sequence_parallel else ""
    for size in sizes:
        multiple = 2 * size * (cut.tp if cut.sequence_parallel else 1)
        if seq % multiple:
            refuse(layout, f"parallel.{key}", f"{unit} = {multiple} to divide seq={seq}")


def _expert_axes_need_experts(layout: Layout) -> None:
    for axis in ("ep", "etp"):
        if not layout.model.experts and getattr(layout.parallel, axis) > 1:
            refuse(layout, f"parallel.{axis}", "1, as the model has no experts", (1,))


def _stages_have_layers(layout: Layout) -> None:
    cut, layers = layout.parallel, layout.model.layers
    if (stretches := cut.pp * cut.pp_chunks) > layers:
        key = "pp_chunks" if cut.pp <= layers else "pp"
        expected = f"pp * pp_chunks = {stretches} to be at most layers={layers}"
        refuse(layout, f"parallel.{key}", expected)


LAYOUT_RULES: tuple[Rule[Layout], ...] = (
    *(
        Rule(f"{axis}_divides_{length}", message,
             functools.partial(_divides, axis=axis, length=length), alone=(axis,))
        for axis, length, message in _EVEN
    ),
    Rule("sequence_parallel_cuts_seq", "Sequence parallel cuts sequences evenly over tp.",
         _sequence_parallel_cuts_seq),
    Rule("cp_cuts_seq",
         "A sequence is 2 * cp equal chunks, each cut again over tp under sequence parallel.",
         lambda at: _cuts_seq(at, "cp", "2 * cp"), alone=("cp",)),
    Rule("dynamic_cp_cuts_seq", "The same for every size that dynamic cp may choose.",
         lambda at: _cuts_seq(at, "dynamic_cp", "2 * size")),
    Rule("expert_axes_need_experts", "ep and etp cut experts: a dense model has none.",
         _expert_axes_need_experts, alone=("ep", "etp")),
    Rule("experts_under_tp_need_sequence_parallel",
         "Experts count a token that all tp ranks have once only if etp is tp.",
         lambda at: at.model.experts and not at.parallel.sequence_parallel
         and at.parallel.tp not in (1, at.parallel.etp), "parallel.sequence_parallel",
         "true, as there are experts and tp={0.parallel.tp} is not etp={0.parallel.etp}"),
    Rule("stages_have_layers", "Each pipeline rank has a layer in each of its pp_chunks.",
         _stages_have_layers, alone=("pp",)),
    Rule("interleaving_fills_rounds",
         "Interleaved 1F1B works in rounds of pp microbatches (Narayanan et al., 2021).",
         lambda at: at.parallel.pp_chunks > 1 and at.microbatches % at.parallel.pp, "microbatches",
         "a multiple of pp={0.parallel.pp}, as pp_chunks is {0.parallel.pp_chunks}"),
)  # fmt: skip


# ---- coordinates of ranks


class Dense(NamedTuple):
    """A place in the dense mesh, or its sizes."""

    pp: int
    dp_outer: int
    dp: int
    cp: int
    tp: int


class Expert(NamedTuple):
    """A place in the expert mesh, or its sizes."""

    pp: int
    edp: int
    ep: int
    etp: int


AXES = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")


def dense_sizes(parallel: ParallelConfig) -> Dense:
    """Sizes of the dense mesh."""
    return Dense(*(getattr(parallel, axis) for axis in Dense._fields))


def expert_sizes(parallel: ParallelConfig) -> Expert:
    """Sizes of the expert mesh."""
    return Expert(*(getattr(parallel, axis) for axis in Expert._fields))


def dense_coordinates(parallel: ParallelConfig, rank: int) -> Dense:
    """Where `rank` is in the dense mesh."""
    return Dense(*_unravel(rank, dense_sizes(parallel)))


def axis_rank(parallel: ParallelConfig, axis: str, rank: int) -> int:
    """The coordinate of `rank` on `axis`."""
    sizes = dense_sizes(parallel) if axis in Dense._fields else expert_sizes(parallel)
    return _unravel(rank, sizes)[sizes._fields.index(axis)]


def groups(parallel: ParallelConfig, axes: str | tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """All groups of `axes`, one or several of a mesh: ranks that differ on these alone."""
    names = {axes} if isinstance(axes, str) else set(axes)
    sizes = dense_sizes(parallel) if names <= set(Dense._fields) else expert_sizes(parallel)
    assert names <= set(sizes._fields), f"{axes} are not of one mesh"
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(parallel.world_size):
        place = zip(sizes._fields, _unravel(rank, sizes), strict=True)
        others = tuple(coordinate for axis, coordinate in place if axis not in names)
        found.setdefault(others, []).append(rank)
    return tuple(map(tuple, found.values()))


def _unravel(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    place, rest = [], rank
    for size in reversed(sizes):
        rest, coordinate = divmod(rest, size)
        place.append(coordinate)
    if rest:  # of records, which may be anybody's
        raise ValueError(f"Expected a rank below {math.prod(sizes)}, got {rank}.")
    return tuple(reversed(place))
