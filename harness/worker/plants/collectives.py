"""Faults of what ranks exchange: see `harness.faults.collectives`.

Most are planted on every rank, as a program that is wrong is wrong everywhere; those that one rank
has alone leave the number and the order of collectives as they are, but for two, which hang.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

import fsdp_core.fsdp.gradients
import fsdp_core.model.gqa
import fsdp_core.model.moe.dispatch
import fsdp_core.model.sharding
import fsdp_core.parallel.ring
import fsdp_core.train.trainer
from fsdp_core.fsdp.collectives import Nest
from fsdp_core.fsdp.schedule import in_backward
from fsdp_core.model.decoder import MoeBranch
from fsdp_core.model.moe.dispatch import Dispatched, Groups
from fsdp_core.parallel.attention_block import Pair
from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.pipeline_schedule import Transfer
from fsdp_core.parallel.tensor import RowLinear
from fsdp_core.train import Trainer
from harness.worker.plants.planting import Planting
from harness.worker.plants.seams import (
    NotHere,
    before_last_update,
    group_named,
    module_named,
    other_main_weight,
    unit_named,
    wrap,
)

# ---- FSDP


def _other_nest(trainer: Trainer, unit: str) -> Nest:
    """A nest of their own for the gradients of a unit."""
    gradients = group_named(trainer, unit).gradients
    wrap(gradients, "nest", copy.copy)
    return gradients.nest


def _gradients_not_reduced(trainer: Trainer) -> None:
    nest = _other_nest(trainer, "layers.1")

    def keep_own(buffer: torch.Tensor, outputs: list[torch.Tensor], level: int) -> torch.Tensor:
        for axis, output in enumerate(outputs, start=level):
            output.copy_(nest.slice(buffer, axis, axis + 1))
            buffer = output
        return buffer

    nest.reduce = keep_own  # type: ignore[method-assign]


def _gradients_summed(trainer: Trainer) -> None:
    group_named(trainer, "layers.1").gradients.divide_factor = 1.0


def _replicas_not_summed(trainer: Trainer) -> None:
    _other_nest(trainer, "layers.1").replica_groups = []


def _replicas_of_other_axis(trainer: Trainer) -> None:
    nest = _other_nest(trainer, "layers.1")
    nest.replica_groups = [nest.groups[0]]


def _stale_shard(trainer: Trainer) -> None:
    """From now on a rank gives its shard of before the last update to gathers."""
    group = group_named(trainer, "layers.1")
    with torch.no_grad(), trainer.device.on(trainer.stream):
        old = before_last_update(trainer, group)

    def made(gather: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def gather_old(full: torch.Tensor) -> None:
            with other_main_weight(group, old):
                gather(full)

        return gather_old

    wrap(group, "_gather", made)


def _exchanged_shards(trainer: Trainer) -> None:
    group = group_named(trainer, "layers.1")

    def made(gather: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def gather_and_swap(full: torch.Tensor) -> None:
            gather(full)
            shards = full.view(group.nest.num_shards, -1)
            shards.copy_(shards.flip(0))

        return gather_and_swap

    wrap(group, "_gather", made)


def _gathers_in_other_order(trainer: Trainer) -> None:
    first, second = unit_named(trainer, "layers.0"), unit_named(trainer, "layers.1")

    def made(unshard: Callable[[], None]) -> Callable[[], None]:
        def second_then_first() -> None:
            if not in_backward():
                second.unshard()
            unshard()

        return second_then_first

    wrap(first, "unshard", made)


# ---- the step


def _skipped_all_reduce(trainer: Trainer) -> None:
    del trainer

    def alone(losses: torch.Tensor, axes: Any) -> torch.Tensor:
        del axes
        return losses.double().mean().float()

    wrap(fsdp_core.train.trainer, "mean_loss", lambda _: alone)


def _norm_of_own_shard(trainer: Trainer) -> None:
    del trainer

    def own(parameters: list[Any], norm_type: float) -> torch.Tensor:
        grads = [p.grad.to_local() for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    wrap(fsdp_core.model.sharding, "total_norm", lambda _: own)


def _norm_counts_copies(trainer: Trainer) -> None:
    del trainer
    wrap(fsdp_core.model.sharding, "_KINDS", lambda kinds: kinds | {"replicated": ("tp",)})


def _norm_over_two_axes(trainer: Trainer) -> None:
    """Of shards, tp and pp, the last is left out where there are all three."""
    pp = trainer.axes.pp
    has_three = trainer.axes.dense_mesh.size() > 1 and trainer.axes.tp.size > 1

    def made(add_up: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def add_up_two(power: torch.Tensor, axis: Axis, order: float) -> torch.Tensor:
            return power if has_three and axis is pp else add_up(power, axis, order)

        return add_up_two

    wrap(fsdp_core.model.sharding, "_sum", made)


# ---- experts


def _moe(trainer: Trainer, layer: int) -> Any:
    branch = module_named(trainer, f"layers.{layer}.mlp")
    assert isinstance(branch, MoeBranch)
    return branch.moe


def _exchanged_experts(trainer: Trainer) -> None:
    def made(forward: Callable[..., Dispatched]) -> Callable[..., Dispatched]:
        def forward_and_swap(*args: Any) -> Dispatched:
            rows, groups = forward(*args)
            others = torch.arange(rows.shape[0], device=rows.device)
            others[:2] = others[:2].flip(0)
            return Dispatched(rows.index_select(0, others), groups)

        return forward_and_swap

    wrap(_moe(trainer, 1).dispatch, "forward", made)


def _lost_expert_gradient(trainer: Trainer) -> None:
    group = group_named(trainer, "layers.1.mlp.moe.experts")
    gradients = group.gradients

    def made(reduce: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def lose_and_reduce(stream: Any, *, final: bool) -> list[Any]:
            assert gradients.pooled is not None
            with torch.no_grad():
                group.layout.views(gradients.pooled)[0][0].zero_()
            return reduce(stream, final=final)

        return lose_and_reduce

    wrap(gradients, "reduce", made)


def _bias_of_own_tokens(trainer: Trainer) -> None:
    router = _moe(trainer, 1).router

    def made(update: Callable[[float], None]) -> Callable[[float], None]:
        def update_alone(rate: float) -> None:
            axes = router._axes
            router._axes = dataclasses.replace(axes, tokens=())
            update(rate)
            router._axes = axes

        return update_alone

    wrap(router, "update_bias", made)


def _wrong_splits(trainer: Trainer) -> None:
    del trainer

    def made(read: Callable[..., Groups]) -> Callable[..., Groups]:
        def read_wrong(plan: Any) -> Groups:
            groups = read(plan)
            first, *others = groups.received
            return dataclasses.replace(groups, received=(first + 1, *others))

        return read_wrong

    wrap(fsdp_core.model.moe.dispatch, "read_groups", made)


# ---- tensor and context parallel


def _row_sum_missing(trainer: Trainer) -> None:
    layer = module_named(trainer, "layers.1.attn.attention.wo")
    assert isinstance(layer, RowLinear)
    layer.forward = lambda x: F.linear(x, layer.weight)  # type: ignore[method-assign]


def _column_sum_missing(trainer: Trainer) -> None:
    """The gradient of what q, k and v are made of is this rank's part of it."""
    del trainer
    wrap(
        fsdp_core.model.gqa, "enter",
        lambda enter: lambda x, axis, *, sequence_parallel: x,
    )  # fmt: skip


def _norm_sum_missing(trainer: Trainer) -> None:
    norm: Any = module_named(trainer, "layers.1.mlp.norm")
    if not hasattr(norm, "_reduced_axis"):
        raise NotHere("sum of layers.1.mlp.norm over tp")
    norm._reduced_axis = dataclasses.replace(norm._reduced_axis, size=1)


def _skipped_hop(trainer: Trainer) -> None:
    """Keys and values that came round the ring are dropped; a rank uses its own once more."""
    del trainer

    def made(wait: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        def wait_in_vain(hop: Any) -> torch.Tensor:
            wait(hop)
            sent: torch.Tensor = hop._sent
            return sent

        return wait_in_vain

    wrap(fsdp_core.parallel.ring.Hop, "wait", made)


def _unweighted_merge(trainer: Trainer) -> None:
    del trainer

    def made(merge: Callable[[Pair, Pair], Pair]) -> Callable[[Pair, Pair], Pair]:
        def mean(one: Pair, other: Pair) -> Pair:
            _, lse = merge(one, other)
            is_seen = other[1].isfinite()[..., None]
            return torch.where(is_seen, (one[0] + other[0]) / 2, one[0]), lse

        return mean

    wrap(fsdp_core.parallel.ring, "merge", made)


# ---- pipelines


def _of_another_microbatch(trainer: Trainer, *, activations: bool) -> None:
    """A stage sends what it made of the microbatch before."""

    def made(give: Callable[..., None]) -> Callable[..., None]:
        before: dict[str, tuple[torch.Tensor, ...]] = {}

        def give_old(state: Any, transfer: Transfer, tensors: tuple[torch.Tensor, ...]) -> None:
            if transfer.is_activation is not activations:
                give(state, transfer, tensors)
                return
            old = before.get("tensors", tensors) if transfer.microbatch else tensors
            before["tensors"] = tuple(t.detach().clone() for t in tensors)
            give(state, transfer, old)

        return give_old

    wrap(trainer._pipeline, "_give", made)


_ACTS: Mapping[str, Callable[[Trainer], None]] = {
    "gradients_not_reduced": _gradients_not_reduced,
    "gradients_summed": _gradients_summed,
    "replicas_not_summed": _replicas_not_summed,
    "replicas_of_other_axis": _replicas_of_other_axis,
    "stale_shard": _stale_shard,
    "exchanged_shards": _exchanged_shards,
    "gathers_in_other_order": _gathers_in_other_order,
    "skipped_all_reduce": _skipped_all_reduce,
    "norm_of_own_shard": _norm_of_own_shard,
    "norm_counts_copies": _norm_counts_copies,
    "norm_over_two_axes": _norm_over_two_axes,
    "exchanged_experts": _exchanged_experts,
    "lost_expert_gradient": _lost_expert_gradient,
    "bias_of_own_tokens": _bias_of_own_tokens,
    "wrong_splits": _wrong_splits,
    "row_sum_missing": _row_sum_missing,
    "column_sum_missing": _column_sum_missing,
    "norm_sum_missing": _norm_sum_missing,
    "skipped_hop": _skipped_hop,
    "unweighted_merge": _unweighted_merge,
    "activation_of_another_microbatch": functools.partial(_of_another_microbatch, activations=True),
    "gradient_of_another_microbatch": functools.partial(_of_another_microbatch, activations=False),
}

PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {name: Planting(before_step=act) for name, act in _ACTS.items()}
)
"""By name in the catalogue."""
