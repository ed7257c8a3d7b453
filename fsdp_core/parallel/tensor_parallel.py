"""Layers that are cut over the tensor-parallel axis, with or without sequence parallel.

                 input                weight            output
    column       [B, T, in]           [out / tp, in]    [B, T, out / tp]
    row          [B, T, in / tp]      [out, in / tp]    [B, T, out]
    embedding    int64 [B, T]         [V / tp, H]       [B, T, H]
    loss         [B, T, V / tp]                         float32 [B, T], the same on every rank

and under sequence parallel what is whole between the pairs is cut along T: a column layer's input
is [B, T / tp, in], gathered before the product, a row layer's output is [B, T / tp, out], summed
and scattered after it. B batch, T time, H hidden, V vocabulary. (Shoeybi et al., 2019; Korthikanti
et al., 2022.)

Column layers of one input (q, k and v; gate and up) share one gather, and one sum of gradients:

    whole = enter(x, axis)
    gate, up = layer_gate(whole, entered=True), layer_up(whole, entered=True)

Weights are NaN until they are initialised or loaded: a layer that was forgotten shows.

Which part of which global tensors a rank's parameter is.

    global [6, 4]  --Cut("tp", dim=0, axis_size=2, index=1)-->  rows 3, 4, 5
                   --then Cut("etp", dim=1, axis_size=2, index=0)-->  of those, columns 0 and 1

Cuts are applied in order, also where two cut the same dim. Without any, a parameter is replicated.

A checkpoint, a seed and a comparison know the names and shapes of the whole model as torch has it,
`layers.7.attn.attention.wq.weight`. Some parameters of libraries are made of several such tensors:

    te.LayerNormMLP     fc1_weight [2 F / tp, H]     rows 0 to F / tp       part of gate.weight
                                                     the other rows         part of up.weight
    fused experts       gate_up.weight [L, 2 F, H]   likewise, along dim 1

Modules remember cuts and `Stretch`es by the names of their parameters, not the parameters: FSDP,
`copy.deepcopy` and `Module.to_empty` put others in their place.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fsdp_core.parallel.mesh import (
    Axis,
    all_gather,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_to,
)


@dataclass(frozen=True)
class Cut:
    """Dim `dim` is cut into `axis_size` equal chunks, one a rank of `axis`; ours is `index`."""

    axis: str
    dim: int
    axis_size: int
    index: int


Cuts = tuple[Cut, ...]


def chunk_of(total: int, what: str, axis_name: str, axis_size: int) -> int:
    """Length of one rank's chunk of `total`; rules of layouts see that it is a whole number."""
    assert not total % axis_size, f"{what} {total} over {axis_size} ranks of {axis_name}"
    return total // axis_size


def take(whole: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """This rank's part of a global tensor, as a contiguous copy."""
    part = whole
    for cut in cuts:
        what = f"dim {cut.dim} of {tuple(whole.shape)}"
        length = chunk_of(part.shape[cut.dim], what, cut.axis, cut.axis_size)
        part = part.narrow(cut.dim, cut.index * length, length)
    return part.clone(memory_format=torch.contiguous_format)


class CutModule(nn.Module):
    """A module whose own parameters are parts of global tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._stretches: dict[str, Stretches] = {}

    def register_cut(self, name: str, parameter: nn.Parameter, *cuts: Cut) -> None:
        """Register `parameter` as attribute `name`, with its cuts."""
        self.register_parameter(name, parameter)
        self._stretches[name] = (Stretch(name, cuts),)


@dataclass(frozen=True)
class Stretch:
    """A stretch of a parameter that is a rank's part of a global tensor.

    name: of the global tensor; in a module's table relative to that module, "../norm.weight" for
        one of the module around it.
    cuts: of the global tensor.
    dim, start, length: the stretch; a length of None: all of the parameter.
    """

    name: str
    cuts: Cuts = ()
    dim: int = 0
    start: int = 0
    length: int | None = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stretch, as a view."""
        if self.length is None:
            return parameter
        return parameter.narrow(self.dim, self.start, self.length)


Stretches = tuple[Stretch, ...]


def consecutive(named: Mapping[str, int], cuts: Cuts, dim: int = 0) -> Stretches:
    """Stretches one after another along `dim`: names and lengths on this rank, cut alike."""
    found, start = [], 0
    for name, length in named.items():
        found.append(Stretch(name, cuts, dim, start, length))
        start += length
    return tuple(found)


def set_stretches(module: nn.Module, table: Mapping[str, Stretch | Stretches]) -> None:
    """Say what the parameters inside `module` are made of, by their names in it."""
    parameters = dict(module.named_parameters())
    checked: dict[str, Stretches] = {}
    for name, stretches in table.items():
        checked[name] = made_of = (stretches,) if isinstance(stretches, Stretch) else stretches
        lengths = {each.name: each.length for each in made_of if each.length is not None}
        due, shape = consecutive(lengths, made_of[0].cuts, made_of[0].dim), parameters[name].shape
        is_whole = len(made_of) == 1 and not lengths
        # Else weights would be lost, or there twice.
        is_all = due == made_of and sum(lengths.values()) == shape[made_of[0].dim]
        assert is_whole or is_all, (name, made_of, shape)
    module._stretches = checked  # type: ignore[assignment]


def named_stretches(stage: nn.Module) -> dict[str, Stretches]:
    """The stretches of every parameter, by each of its names in `stage`; theirs are global."""
    tables: dict[str, Stretches] = {}
    for prefix, module in stage.named_modules(remove_duplicate=False):
        table: Mapping[str, Stretches] = getattr(module, "_stretches", {})
        for name, stretches in table.items():
            made_of = (replace(each, name=_join(prefix, each.name)) for each in stretches)
            tables.setdefault(_join(prefix, name), tuple(made_of))  # the outermost module's word
    names = (name for name, _ in stage.named_parameters(remove_duplicate=False))
    return {name: tables.get(name) or (Stretch(name),) for name in names}


def named_cuts(model: nn.Module) -> dict[str, Cuts]:
    """The cuts of every parameter by each of its names; () for one that is replicated."""
    return {name: made_of[0].cuts for name, made_of in named_stretches(model).items()}


def _join(prefix: str, name: str) -> str:
    while name.startswith("../"):
        prefix, name = prefix.rpartition(".")[0], name.removeprefix("../")
    return f"{prefix}.{name}" if prefix else name


# ---- layers


SEQUENCE_DIM = 1
"""Dim of [B, T, H] that sequence parallel cuts."""

IGNORED = -100
"""The target of a token that has no loss, as in `F.cross_entropy`."""

BLOCK_NUMEL = 2**22
"""Elements of logits that are widened to float32 at a time: 16 MiB, enough to keep a GPU busy."""


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """What a column layer multiplies: [B, T, H] whole, out of [B, T / tp, H] or [B, T, H]."""
    return gather_from(x, axis, SEQUENCE_DIM) if axis.cuts_sequence else copy_to(x, axis)


def leave(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's `partial` [B, T, H]: [B, T / tp, H] or [B, T, H]."""
    if axis.cuts_sequence:
        return reduce_scatter_to(partial, axis, SEQUENCE_DIM)
    return reduce_from(partial, axis)


class _CutLayer(CutModule):
    """One weight [rows, columns], of which each rank of `axis` has a chunk along `dim`."""

    dim: int
    what: str
    weight: nn.Parameter

    def __init__(self, columns: int, rows: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        local = [rows, columns]
        local[self.dim] = chunk_of(local[self.dim], self.what, axis.name, axis.size)
        weight = nn.Parameter(torch.full(local, torch.nan))
        self.register_cut("weight", weight, Cut(axis.name, self.dim, axis.size, axis.rank))

    def extra_repr(self) -> str:
        axis, shape = self.axis, list(self.weight.shape)
        return f"weight={shape}, {axis.name}={axis.size}, sequence_parallel={axis.cuts_sequence}"


class ColumnLinear(_CutLayer):
    """A linear layer, of in and out features and no bias, whose outputs are cut over `axis`."""

    dim, what = 0, "out_features"

    def forward(self, x: torch.Tensor, *, entered: bool = False) -> torch.Tensor:
        """[..., in] -> [..., out / tp]; with `entered`, of what `enter` returned."""
        return F.linear(x if entered else enter(x, self.axis), self.weight)


class RowLinear(_CutLayer):
    """As `ColumnLinear`, but inputs are cut over `axis`, and outputs are summed over it."""

    dim, what = 1, "in_features"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in / tp] -> [..., out]."""
        return leave(F.linear(x, self.weight), self.axis)


class VocabEmbedding(_CutLayer):
    """An embedding whose rows are cut over `axis`, with the bits of the whole one. All ranks but
    one add a negative zero, which alone changes no number. A token outside the vocabulary is the
    error that `F.embedding` makes of it.
    """

    dim, what = 0, "the vocabulary"

    def __init__(self, vocab: int, hidden: int, axis: Axis) -> None:
        super().__init__(hidden, vocab, axis)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> [B, T, H], or [B, T / tp, H] under sequence parallel."""
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        row, is_here = _local(tokens, self.weight.shape[0], self.axis)
        partial = F.embedding(row, self.weight).masked_fill(~is_here[..., None], -0.0)
        return leave(partial, self.axis)


def _local(index: torch.Tensor, rows: int, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of this rank, of `rows` a rank, for each global `index`, and whether the rank has it.
    Others read row 0. An index outside the vocabulary reads past the end on every rank: the
    operator that reads complains, on a GPU too, without a sync.
    """
    row = index - axis.rank * rows
    is_here = (row >= 0) & (row < rows)
    is_legal = (index >= 0) & (index < rows * axis.size)
    return row.masked_fill(~is_here, 0).masked_fill(~is_legal, rows), is_here


def reduce_replicated(parameter: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A stand-in for a replicated parameter, whose gradient is summed over `axis`. For a forward
    that uses it on a part of what the whole model uses it on, as a norm under sequence parallel.
    The sum is in the backward pass, so graphs hold it, and before FSDP's.
    """
    return copy_to(parameter, axis)


def reduce_replicated_of(module: nn.Module, name: str, axis: Axis) -> None:
    """Make a module of any library use `reduce_replicated` for its own parameter `name`. It becomes
    of a subclass whose forward runs with the stand-in in place of the parameter.
    """
    kind = type(module)
    assert module._parameters.get(name) is not None, f"no parameter {name} of {kind.__name__}"
    assert not isinstance(module, _UsesStandIn), f"{kind.__name__} was given before"
    module._reduced_name, module._reduced_axis = name, axis  # type: ignore[assignment]
    module.__class__ = type(f"Reduced{kind.__name__}", (_UsesStandIn, kind), {})


class _UsesStandIn(nn.Module):
    _reduced_name: str
    _reduced_axis: Axis

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name = self._reduced_name
        held = cast("nn.Parameter", self._parameters[name])
        self._parameters[name] = cast("Any", reduce_replicated(held, self._reduced_axis))
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters[name] = held


def vocab_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    *,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of each token over a vocabulary of which every rank has V / tp columns.

    Of its columns a rank finds the largest logit, the sum of exponentials relative to it, and the
    target's logit; one all-gather of these three numbers a token brings them together in rank
    order, so every rank has the same bits. `BLOCK_NUMEL` elements at a time are widened to float32
    (float64 stays); nothing as large as the logits is made but their gradient, in their dtype.

    Logits may be -inf (masked out of the vocabulary). Where the target is `IGNORED` or the mask is
    off, loss and gradient are zero whatever the logits are, NaN included. A target outside the
    vocabulary is the error that `torch.gather` makes of it.

    logits: [..., V / tp], this rank's columns; copied unless contiguous.
    targets: int64 [...], the same on every rank, in the whole vocabulary or `IGNORED`.
    loss_mask: bool [...], True where a token counts; None: all that are not `IGNORED`.
    Returns float32 [...] (float64 for float64 logits), the same on every rank; not their mean.
    """
    shape = logits.shape[:-1]
    assert (targets.shape, targets.dtype) == (shape, torch.int64), (targets.shape, shape)
    if loss_mask is not None:
        assert (loss_mask.shape, loss_mask.dtype) == (shape, torch.bool), (loss_mask.shape, shape)
        targets = targets.masked_fill(~loss_mask, IGNORED)
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropy.apply(flat, targets.reshape(-1), axis).view(targets.shape)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, BLOCK_NUMEL // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, axis: Axis) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        columns = logits.shape[1]
        counts = targets != IGNORED
        legal = targets.masked_fill(~counts, 0)
        column, is_here = _local(legal, columns, axis)
        top = logits.amax(dim=1).to(wide)
        total = torch.empty_like(top)
        for rows in _blocks(logits):
            total[rows] = _exponentials(logits[rows], top[rows], wide).sum(dim=1)
        hit = logits.gather(1, column[:, None])[:, 0].to(wide).masked_fill(~is_here, -math.inf)
        top, total, hit = _joined(torch.stack((top, total, hit)), axis)
        log_total = total.log()
        ctx.save_for_backward(logits, column, is_here, counts, top, log_total)
        return (log_total - (hit - top)).masked_fill(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, column, is_here, counts, top, log_total = ctx.saved_tensors
        grad = grad.masked_fill(~counts, 0.0)
        out = torch.empty_like(logits)
        for rows in _blocks(logits):
            block = logits[rows].to(top.dtype, copy=True)
            block.sub_(top[rows, None]).sub_(log_total[rows, None]).exp_()
            # Not scatter_add_, which has no deterministic kernel: each row has one place.
            hit = block.gather(1, column[rows, None])
            block.scatter_(1, column[rows, None], hit - is_here[rows, None].to(hit.dtype))
            block.mul_(grad[rows, None]).masked_fill_(~counts[rows, None], 0.0)
            out[rows] = block
        return out, None, None


def _exponentials(logits: torch.Tensor, top: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """exp(logits - top) in the wide dtype; a row that is all -inf has no top, and gives zeros."""
    safe = top.masked_fill(top == -math.inf, 0.0)
    return logits.to(wide, copy=True).sub_(safe[:, None]).exp_()


def _joined(mine: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top, total relative to it, and target's logit of all columns, from each rank's [3, N]."""
    parts = all_gather(mine[None], axis, 0)  # [tp, 3, N]
    tops, totals, hits = parts.unbind(1)
    top = tops.amax(dim=0)
    # A rank whose columns are all -inf adds nothing, also where every rank's are.
    scale = (tops - top).exp().masked_fill(tops == -math.inf, 0.0)
    return top, (totals * scale).sum(dim=0), hits.amax(dim=0)
