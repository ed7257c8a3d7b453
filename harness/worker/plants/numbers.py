"""Faults of numbers: what ranks exchange, what is computed and updated, what is read and drawn.

Most of what is exchanged is planted on every rank, as a program that is wrong is wrong everywhere;
what one rank has alone leaves the number and the order of collectives as they are, but for two
faults, which hang.
"""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fsdp_core.fsdp.gradients
import fsdp_core.model.gqa
import fsdp_core.model.moe.dispatch
import fsdp_core.model.moe.router
import fsdp_core.model.sdpa
import fsdp_core.model.sharding
import fsdp_core.parallel.ring
import fsdp_core.train.build
import fsdp_core.train.inputs
import fsdp_core.train.trainer
from fsdp_core.config import TrainConfig
from fsdp_core.fsdp.gradients import Gradients
from fsdp_core.fsdp.schedule import in_backward
from fsdp_core.model.decoder import MoeBranch
from fsdp_core.model.moe.dispatch import Dispatched, Groups
from fsdp_core.model.packing import PackedBatch
from fsdp_core.parallel.attention_block import Pair
from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.context import ContextPlan, Spans
from fsdp_core.parallel.pipeline import Microbatch
from fsdp_core.parallel.pipeline_schedule import Transfer
from fsdp_core.parallel.rng import RandomStream
from fsdp_core.parallel.tensor import RowLinear
from fsdp_core.train import Trainer
from fsdp_core.train.inputs import RowInputs
from harness.worker.plants.planting import (
    NotHere,
    Planting,
    Site,
    around,
    before_last_update,
    group_of_layer_1,
    instead,
    layers,
    module_named,
    on_its_stream,
    once,
    other_main_weight,
    surround,
    unit_named,
    wrap,
)


def _gradients_of_1(trainer: Trainer) -> Gradients:
    """Of the second layer."""
    return group_of_layer_1(trainer).gradients


def _all_gradients(trainer: Trainer) -> list[Gradients]:
    return [group.gradients for group in trainer.groups]


def _optimizer(trainer: Trainer) -> Any:
    return trainer.optimizer


def _pipeline(trainer: Trainer) -> Any:
    return trainer._pipeline


# ---- what FSDP exchanges


def _other_nest(trainer: Trainer) -> Any:
    """A nest of their own for the gradients of a layer."""
    gradients = _gradients_of_1(trainer)
    wrap(gradients, "nest", copy.copy)
    return gradients.nest


def _replicas_of_other_axis(trainer: Trainer) -> None:
    nest = _other_nest(trainer)
    nest.replica_groups = [nest.groups[0]]


def _keep_own(
    site: Site, buffer: torch.Tensor, outputs: list[torch.Tensor], level: int
) -> torch.Tensor:
    for axis, output in enumerate(outputs, start=level):
        output.copy_(site.owner.slice(buffer, axis, axis + 1))
        buffer = output
    return buffer


def _stale_shard(trainer: Trainer) -> None:
    """From now on a rank gives its shard of before the last update to gathers."""
    old = before_last_update(trainer, group_of_layer_1(trainer))

    def gather_old(site: Site, full: torch.Tensor) -> None:
        with other_main_weight(site.owner, old):
            site.call(full)

    surround(trainer, group_of_layer_1, "_gather", gather_old)


def _swap_shards(site: Site, full: torch.Tensor) -> None:
    site.call(full)
    shards = full.view(site.owner.nest.num_shards, -1)
    shards.copy_(shards.flip(0))


def _gathers_in_other_order(trainer: Trainer) -> None:
    first, second = unit_named(trainer, "layers.0"), unit_named(trainer, "layers.1")

    def second_first(site: Site) -> None:
        if not in_backward():
            second.unshard()
        site.call()

    surround(trainer, first, "unshard", second_first)


# ---- what a step exchanges


def _mean_alone(losses: torch.Tensor, axes: Any) -> torch.Tensor:
    return losses.double().mean().float()


def _norm_of_own(parameters: list[Any], norm_type: float) -> torch.Tensor:
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads, norm_type)


def _sum_of_two_axes(site: Site, power: torch.Tensor, axis: Axis, order: float) -> Any:
    """Of shards, tp and pp, the last is left out where there are all three."""
    axes = site.trainer.axes
    has_three = axes.dense_mesh.size() > 1 and axes.tp.size > 1
    return power if has_three and axis is axes.pp else site.call(power, axis, order)


# ---- experts


def _moe(trainer: Trainer) -> Any:
    branch = module_named(trainer, "layers.1.mlp")
    assert isinstance(branch, MoeBranch)
    return branch.moe


def _router(trainer: Trainer) -> Any:
    return _moe(trainer).router


def _swap_tokens(site: Site, *args: Any) -> Dispatched:
    rows, groups = site.call(*args)
    others = torch.arange(rows.shape[0], device=rows.device)
    others[:2] = others[:2].flip(0)
    return Dispatched(rows.index_select(0, others), groups)


def _lose_gate(site: Site, stream: Any, *, final: bool) -> Any:
    group = unit_named(site.trainer, "layers.1.mlp.moe.experts").groups[0]
    with torch.no_grad():
        group.layout.views(site.owner.pooled)[0][0].zero_()
    return site.call(stream, final=final)


def _update_alone(site: Site, rate: float) -> None:
    router = site.owner
    axes = router._axes
    router._axes = replace(axes, tokens=())
    site.call(rate)
    router._axes = axes


def _one_row_more(site: Site, plan: Any) -> Groups:
    groups: Groups = site.call(plan)
    first, *others = groups.received
    return replace(groups, received=(first + 1, *others))


def _logged_twice(site: Site, *args: Any) -> Any:
    """What is logged of the balance loss is twice what its gradient belongs to."""
    found = site.call(*args)
    return found._replace(balance=found.balance * 2)


# ---- tensor, context and pipeline parallel


def _row_sum_missing(trainer: Trainer) -> None:
    layer = module_named(trainer, "layers.1.attn.attention.wo")
    assert isinstance(layer, RowLinear)
    wrap(layer, "forward", lambda forward: lambda x: F.linear(x, layer.weight))


def _norm_sum_missing(trainer: Trainer) -> None:
    norm = module_named(trainer, "layers.1.mlp.norm")
    if not hasattr(norm, "_reduced_axis"):
        raise NotHere("sum of layers.1.mlp.norm over tp")
    wrap(norm, "_reduced_axis", lambda axis: replace(axis, size=1))


def _skipped_hop(site: Site, hop: Any) -> Any:
    """Keys and values that came round the ring are dropped; a rank uses its own once more."""
    site.call(hop)
    return hop._sent


def _mean_of_blocks(site: Site, one: Pair, other: Pair) -> Pair:
    _, lse = site.call(one, other)
    is_seen = other[1].isfinite()[..., None]
    return torch.where(is_seen, (one[0] + other[0]) / 2, one[0]), lse


def _of_another_microbatch(*, activations: bool) -> Planting:
    """A stage sends what it made of the microbatch before."""

    def give_old(site: Site, state: Any, transfer: Transfer, tensors: tuple[Any, ...]) -> None:
        if transfer.is_activation is activations:
            old = site.kept if transfer.microbatch and site.kept is not None else tensors
            site.kept = tuple(tensor.detach().clone() for tensor in tensors)
            tensors = old
        site.call(state, transfer, tensors)

    return around(_pipeline, "_give", give_old)


_EXCHANGED: Mapping[str, Planting] = {
    "gradients_not_reduced": around(_other_nest, "reduce", _keep_own),
    "gradients_summed": instead(_gradients_of_1, "divide_factor", lambda factor: 1.0),
    "replicas_not_summed": instead(_other_nest, "replica_groups", lambda groups: []),
    "replicas_of_other_axis": once(_replicas_of_other_axis),
    "stale_shard": once(_stale_shard),
    "exchanged_shards": around(group_of_layer_1, "_gather", _swap_shards),
    "gathers_in_other_order": once(_gathers_in_other_order),
    "skipped_all_reduce": instead(fsdp_core.train.trainer, "mean_loss", lambda _: _mean_alone),
    "norm_of_own_shard": instead(fsdp_core.model.sharding, "total_norm", lambda _: _norm_of_own),
    "norm_counts_copies": instead(
        fsdp_core.model.sharding, "_KINDS", lambda kinds: kinds | {"replicated": ("tp",)}
    ),
    "norm_over_two_axes": around(fsdp_core.model.sharding, "_sum", _sum_of_two_axes),
    "exchanged_experts": around(lambda t: _moe(t).dispatch, "forward", _swap_tokens),
    "lost_expert_gradient": around(
        lambda t: unit_named(t, "layers.1.mlp.moe.experts").groups[0].gradients, "reduce",
        _lose_gate,
    ),
    "bias_of_own_tokens": around(_router, "update_bias", _update_alone),
    "wrong_splits": around(fsdp_core.model.moe.dispatch, "read_groups", _one_row_more),
    "row_sum_missing": once(_row_sum_missing),
    "column_sum_missing": instead(
        fsdp_core.model.gqa, "enter", lambda enter: lambda x, axis, *, sequence_parallel: x
    ),
    "norm_sum_missing": once(_norm_sum_missing),
    "skipped_hop": around(fsdp_core.parallel.ring.Hop, "wait", _skipped_hop),
    "unweighted_merge": around(fsdp_core.parallel.ring, "merge", _mean_of_blocks),
    "activation_of_another_microbatch": _of_another_microbatch(activations=True),
    "gradient_of_another_microbatch": _of_another_microbatch(activations=False),
}  # fmt: skip


# ---- weights, forward and backward


def _other_initialisation(config: TrainConfig) -> TrainConfig:
    wrap(
        fsdp_core.train.build, "init_weights",
        lambda init: lambda stages, seed, **how: init(stages, seed + 1, **how),
    )  # fmt: skip
    return config


def _one_nan(site: Site, *args: Any, **how: Any) -> torch.Tensor:
    out: torch.Tensor = site.call(*args, **how)
    mask = torch.zeros_like(out, dtype=torch.bool)
    mask.view(-1)[0] = True
    return out.masked_fill(mask, torch.nan)


def _last_undivided(site: Site, state: Any, i: int, value: torch.Tensor) -> torch.Tensor:
    """Backward begins with the loss of the last microbatch undivided."""
    number = len(state.microbatches)
    scaled: torch.Tensor = site.call(state, i, value)
    return scaled * number if i == number - 1 else scaled


# ---- gradients


def _last_matrix(trainer: Trainer) -> tuple[Any, int]:
    """Of the parameters that this rank has two rows of or more, the last: group, number in it."""
    return [
        (group, index)
        for group in trainer.groups
        for index, spec in enumerate(group.specs)
        if len(spec.local_shape) > 1 and spec.local_shape[0] > 1
    ][-1]


def _gradients(change: Callable[[torch.Tensor], Any]) -> Planting:
    """Change rows of the rank's last matrix's gradient as they come out of each backward pass."""

    def plant(trainer: Trainer) -> None:
        group, index = _last_matrix(trainer)

        def change_and_reduce(site: Site, stream: Any, *, final: bool) -> Any:
            with torch.no_grad():
                change(group.layout.views(group.gradients.pooled)[index])
            return site.call(stream, final=final)

        surround(trainer, group.gradients, "reduce", change_and_reduce)

    return once(plant)


def _swap_rows(rows: torch.Tensor) -> None:
    rows[:2] = rows[:2].flip(0)


def _noise(rows: torch.Tensor) -> None:
    """Change low bits by what the operating system has gathered: no two runs are alike."""
    noise = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).to(torch.int32)
    rows[0][:8].view(torch.int32).bitwise_xor_(noise.to(rows.device))


def _reduce_anew(site: Site, stream: Any, *, final: bool) -> Any:
    """A microbatch's gradient takes the place of the sum so far."""
    for parameter in group_of_layer_1(site.trainer).sharded:
        parameter.grad = None
    return site.call(stream, final=final)


def _deposit_twice(site: Site, rows: Any, *, every: int = 1) -> None:
    """Of so many reductions what one gives is added twice."""
    if site.number % every == 0:
        site.call({index: row.clone() for index, row in rows.items()})
    site.call(rows)


def _double_last(site: Site, full: torch.Tensor | None, outputs: Any) -> Any:
    """What a rank adds to the sum over ranks is, in the last microbatch, twice its own."""
    gradients: Gradients = site.owner
    site.kept = (site.kept or 0) + (full is not None)
    if full is not None and site.kept % site.trainer.config.microbatches == 0:
        torch._foreach_mul_([gradients._views[i] for i in sorted(gradients._copied)], 2)
    return site.call(full, outputs)


def _clip_twice(site: Site, *args: Any) -> Any:
    norm = site.call(*args)
    site.call(*args)
    return norm


def _unclipped_layer(trainer: Trainer) -> None:
    spared = {id(parameter) for parameter in group_of_layer_1(trainer).sharded}

    def spare(site: Site, parameters: Any, *how: Any) -> None:
        site.call([p for p in parameters if id(p) not in spared], *how)

    surround(trainer, fsdp_core.model.sharding, "scale_to", spare)


# ---- optimizer


def _uncorrected(site: Site, *args: Any, **how: Any) -> None:
    """The kernel is told a step at which nothing is left to correct."""
    *first, steps = args
    site.call(*first, [torch.full_like(step, 1e6) for step in steps], **how)


def _twice(site: Site) -> None:
    site.call()
    site.call()


def _record_off(site: Site, *args: Any) -> None:
    """What is given out as the loss of the first microbatch is an ulp off, after backward."""
    site.call(*args)
    site.trainer.outputs.losses[:1].view(torch.int32).add_(1)


def _step_and_round(site: Site) -> None:
    site.call()
    with torch.no_grad():
        for weight in site.owner.params:
            weight.copy_(weight.bfloat16())


def _updated_neighbour(trainer: Trainer) -> None:
    """The kernel takes a matrix to begin an element too soon, as after a shard without elements."""
    params = trainer.optimizer.params
    weight = params[-1]
    params[-1] = weight.as_strided(weight.shape, weight.stride(), weight.storage_offset() - 1)


def _stale_model_weights(trainer: Trainer) -> None:
    """The copies that are computed with stay those of before the last update."""
    group = group_of_layer_1(trainer)
    old = before_last_update(trainer, group)
    with on_its_stream(trainer), other_main_weight(group, old):
        group.main_weight_changed()
    for name in ("refresh_model_weight", "main_weight_changed"):
        wrap(group, name, lambda refresh: lambda: None)


def _main_weight(change: Callable[[torch.Tensor], Any]) -> Planting:
    """One element of a main weight, after the optimizer's step."""

    def act(trainer: Trainer, name: str) -> str:
        names, tensors = trainer.digested["weights"]
        name = name or names[0]
        if name not in names:
            raise ValueError(
                f"plant.tensor: expected a parameter with rows on rank {dist.get_rank()}, got "
                f"{name!r}; legal values: {', '.join(names)}"
            )
        change(tensors[names.index(name)].view(-1)[:1])
        return name

    return Planting(after_step_on=act)


_COMPUTED: Mapping[str, Planting] = {
    "other_initialisation": Planting(before_make=_other_initialisation),
    "ulp": _main_weight(lambda element: element.view(torch.int32).add_(1)),
    "nan": _main_weight(lambda element: element.fill_(float("nan"))),
    "negative_zero": _main_weight(lambda element: element.fill_(-0.0)),
    "positive_zero": _main_weight(lambda element: element.fill_(0.0)),
    "rope_off_by_one": once(
        lambda trainer: [
            table.copy_(table.roll(-1, 0))
            for stage in trainer.stages
            for table in (stage.rope.cos, stage.rope.sin)
        ]
    ),
    "softmax_scale": around(
        fsdp_core.model.sdpa, "ring_attention",
        lambda site, *args, scale, **how: site.call(*args, scale=scale**2, **how),
    ),
    "nan_activation": around(lambda t: module_named(t, "layers.1.mlp.mlp"), "forward", _one_nan),
    "loss_scale": around(_pipeline, "_loss", _last_undivided),
    "aux_loss_scale": once(lambda t: _router(t).loss_scale.mul_(t.config.microbatches)),
    "logged_aux_loss": around(fsdp_core.model.moe.router, "router_losses", _logged_twice),
    "ignored_bias": around(
        lambda t: _router(t).rule, "choose", lambda site, scores, bias: site.call(scores, None)
    ),
    "flushed_denormals": once(lambda trainer: torch.set_flush_denormal(True)),
    "gradient_rows_swapped": _gradients(_swap_rows),
    "gradient_row_negated": _gradients(lambda rows: rows[0].neg_()),
    "gradient_ulp": _gradients(lambda rows: rows[0].view(torch.int32).add_(1)),
    "gradient_noise": _gradients(_noise),
    "overwritten_gradient": around(_gradients_of_1, "reduce", _reduce_anew),
    "gradient_counted_twice": around(_gradients_of_1, "_deposit", _deposit_twice),
    "microbatch_counted_twice": around(_all_gradients, "_own_sum", _double_last),
    "microbatch_added_twice": around(
        _all_gradients, "_deposit",
        lambda site, rows: _deposit_twice(site, rows, every=site.trainer.config.microbatches),
    ),
    "rounded_gradients": Planting(
        before_make=lambda c: replace(c, fsdp=replace(c.fsdp, reduce_dtype="bf16"))
    ),
    "clipped_twice": around(fsdp_core.train.trainer, "clip_grads", _clip_twice),
    "unclipped_layer": once(_unclipped_layer),
    "step_count": once(lambda trainer: trainer.optimizer.step_count.add_(1.0)),
    "lost_bias_correction": around(torch, "_fused_adamw_", _uncorrected),
    "decayed_norms": once(
        lambda t: wrap(
            t.optimizer, "_groups",
            lambda groups: [(indices, t.config.optim.weight_decay) for indices, _ in groups],
        )
    ),
    "learning_rate": once(lambda trainer: trainer.optimizer.lr.mul_(0.5)),
    "epsilon": instead(_optimizer, "_config", lambda config: replace(config, eps=1e-5)),
    "skipped_update": around(
        _optimizer, "step", lambda site: site.call() if site.number > 1 else None
    ),
    "update_repeated": around(lambda trainer: trainer, "_update", _twice),
    "recorded_loss": around(lambda trainer: trainer, "_gradients", _record_off),
    "exchanged_moments": once(lambda trainer: _swap_rows(trainer.optimizer.exp_avg_sq[-1])),
    "rounded_main_weights": around(_optimizer, "step", _step_and_round),
    "updated_neighbour": once(_updated_neighbour),
    # They follow when the next forward asks for them, but not after the update.
    "copies_left_stale": instead(group_of_layer_1, "main_weight_changed", lambda _: lambda: None),
    "stale_model_weights": once(_stale_model_weights),
}  # fmt: skip


# ---- tokens


def _inputs(trainer: Trainer) -> RowInputs:
    assert isinstance(trainer._inputs, RowInputs)
    return trainer._inputs


def _filled(change: Callable[[RowInputs], Any]) -> Planting:
    """Change what every step from now on takes in."""

    def fill_and_change(site: Site, step: int) -> None:
        site.call(step)
        change(site.owner)

    return around(_inputs, "fill", fill_and_change)


def _count_all(site: Site, *args: Any) -> Any:
    local = site.call(*args)
    return replace(local, part=replace(local.part, counted=None))


def _plan_joined(site: Site, *args: Any, **how: Any) -> ContextPlan:
    """The first two documents of a pack are one to attention."""

    def joined(spans: Spans) -> Spans:
        assert spans.offsets is not None
        offsets = spans.offsets.clone()
        offsets[1] = 0
        return replace(spans, offsets=offsets)

    whole: ContextPlan = site.call(*args, **how)
    return replace(whole, spans=joined(whole.spans), half_spans=joined(whole.half_spans))


def _weighed_alone(site: Site) -> list[Microbatch]:
    """The loss of a pack is divided by its own tokens, not by the mean of all packs."""
    return [
        Microbatch(each.tokens, {"part": replace(part, weight=weight)})
        for each in site.call()
        for part in [each.keywords["part"]]
        for weight in [1.0 / part.num_counted.clamp(min=1.0)]
    ]


# ---- random numbers


def _stream(trainer: Trainer) -> RandomStream:
    """What the first stage's dropout draws from."""
    stream: RandomStream = layers(trainer)[0].attn.residual.stream
    return stream


def _seeded(seed: Callable[[Trainer], int]) -> Callable[[Trainer], None]:
    """Dropout draws what a generator does that was just seeded."""

    def act(trainer: Trainer) -> None:
        generator = torch.Generator(trainer.device.torch_device).manual_seed(seed(trainer))
        _stream(trainer).set_state(generator.get_state())

    return act


def _repeat_masks(site: Site, step: int) -> None:
    """Every step from now on draws the same numbers."""
    site.call(step)
    _seeded(lambda trainer: trainer.config.seed)(site.trainer)


def _draw_in_place(site: Site, *args: Any, **how: Any) -> Any:
    """Drawing does not advance the generator."""
    kept = site.owner.get_state()
    out = site.call(*args, **how)
    site.owner.set_state(kept)
    return out


_OTHER_SHARD = instead(lambda t: _inputs(t)._batches, "dp_rank", lambda own: 0 if own else 1)

_DATA: Mapping[str, Planting] = {
    "same_data": _OTHER_SHARD,
    "same_shard": _OTHER_SHARD,
    "tokens_of_another_group": _OTHER_SHARD,
    "other_shuffle": instead(lambda t: _inputs(t)._batches, "seed", lambda seed: seed + 1),
    "shifted_epoch": around(lambda t: t._inputs, "fill", lambda site, step: site.call(step + 1)),
    "unshifted_labels": _filled(lambda inputs: inputs.targets.copy_(inputs.tokens)),
    "repeated_microbatch": _filled(
        lambda inputs: [static[-1].copy_(static[0]) for static in (inputs.tokens, inputs.targets)]
    ),
    "zeroed_token": _filled(lambda inputs: inputs.tokens.view(-1)[-1:].zero_()),
    "microbatches_in_other_order": _filled(
        lambda inputs: inputs.tokens.copy_(inputs.tokens.flip(0))
    ),
    "swapped_halves": instead(
        lambda t: _inputs(t)._plan, "positions", lambda places: torch.cat(places.chunk(2)[::-1])
    ),
    "counted_padding": around(fsdp_core.train.inputs, "packed_part", _count_all),
    "lost_boundary": around(PackedBatch, "plan", _plan_joined),
    "uneven_weights": around(lambda t: t._inputs, "microbatches", _weighed_alone),
    "repeated_masks": around(_inputs, "fill", _repeat_masks),
    "masks_of_one_draw": around(_stream, "dropout", _draw_in_place),
    "seeded_alike": once(_seeded(lambda trainer: trainer.config.seed)),
    "seeded_by_rank": once(_seeded(lambda trainer: trainer.config.seed + dist.get_rank())),
    "seeded_by_entropy": once(_seeded(lambda t: int.from_bytes(os.urandom(7), "little"))),
    # Somebody else draws a number from the device's generator.
    "drawn_aside": once(lambda t: torch.rand(1, device=t.device.torch_device)),
    "dropout_off": instead(
        lambda t: [layer.attn for layer in layers(t)], "residual", lambda own: replace(own, p=0.0)
    ),
}  # fmt: skip

PLANTINGS: Mapping[str, Planting] = {**_EXCHANGED, **_COMPUTED, **_DATA}
"""By name in the catalogue."""
