"""Faults of numbers: see `harness.faults.numerics`.

before step 0       weights that are drawn
forward, backward   a table, a factor, a value of a module
gradients           rows of the last matrix of the rank, once the step's are summed
optimizer           what it is told, what it keeps, what it writes
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

import fsdp_core.model.moe.router
import fsdp_core.model.sdpa
import fsdp_core.model.sharding
import fsdp_core.train.build
import fsdp_core.train.trainer
from fsdp_core.config import TrainConfig
from fsdp_core.fsdp.gradients import Gradients
from fsdp_core.model.decoder import MoeBranch
from fsdp_core.model.moe.router import Router
from fsdp_core.train import Trainer
from harness.worker.plants.planting import Planting
from harness.worker.plants.seams import (
    before_last_update,
    group_named,
    last_matrix,
    module_named,
    other_main_weight,
    wrap,
)

Rows = Callable[[torch.Tensor], None]
"""Changes rows of a matrix in place."""

# ---- before step 0


def _other_initialisation(config: TrainConfig) -> TrainConfig:
    def made(init: Callable[..., None]) -> Callable[..., None]:
        def drawn_otherwise(stages: Any, seed: int, **how: Any) -> None:
            init(stages, seed + 1, **how)

        return drawn_otherwise

    wrap(fsdp_core.train.build, "init_weights", made)
    return config


# ---- forward and backward


def _rope_off_by_one(trainer: Trainer) -> None:
    for stage in trainer.stages:
        for table in (stage.rope.cos, stage.rope.sin):
            table.copy_(table.roll(-1, 0))


def _softmax_scale(trainer: Trainer) -> None:
    del trainer

    def made(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def scaled(*args: Any, scale: float, **kwargs: Any) -> torch.Tensor:
            return attention(*args, scale=scale**2, **kwargs)

        return scaled

    wrap(fsdp_core.model.sdpa, "ring_attention", made)


def _nan_activation(trainer: Trainer) -> None:
    def made(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward_with_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = forward(*args, **kwargs)
            mask = torch.zeros_like(out, dtype=torch.bool)
            mask.view(-1)[0] = True
            return out.masked_fill(mask, torch.nan)

        return forward_with_nan

    wrap(module_named(trainer, "layers.1.mlp.mlp"), "forward", made)


def _loss_scale(trainer: Trainer) -> None:
    """Backward begins with the loss of the last microbatch undivided."""

    def made(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def unscaled(state: Any, i: int, value: torch.Tensor) -> torch.Tensor:
            number = len(state.microbatches)
            scaled = loss(state, i, value)
            return scaled * number if i == number - 1 else scaled

        return unscaled

    wrap(trainer._pipeline, "_loss", made)


def _router(trainer: Trainer) -> Router:
    branch = module_named(trainer, "layers.1.mlp")
    assert isinstance(branch, MoeBranch)
    return branch.moe.router


def _logged_aux_loss(trainer: Trainer) -> None:
    """What is logged of the balance loss is twice what its gradient belongs to."""

    def made(losses: Callable[..., Any]) -> Callable[..., Any]:
        def logged(*args: Any) -> Any:
            found = losses(*args)
            return found._replace(balance=found.balance * 2)

        return logged

    wrap(fsdp_core.model.moe.router, "router_losses", made)


def _aux_loss_scale(trainer: Trainer) -> None:
    _router(trainer).loss_scale.mul_(trainer.config.microbatches)


def _ignored_bias(trainer: Trainer) -> None:
    wrap(_router(trainer).rule, "choose", lambda choose: lambda scores, bias: choose(scores, None))


def _flushed_denormals(trainer: Trainer) -> None:
    del trainer
    torch.set_flush_denormal(True)


# ---- gradients


def _changed_gradients(trainer: Trainer, change: Rows) -> None:
    """Change the gradient of the rank's last matrix as it comes out of each backward pass."""
    group, index = last_matrix(trainer)

    def made(reduce: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def change_and_reduce(stream: Any, *, final: bool) -> list[Any]:
            full = group.gradients.pooled
            assert full is not None
            with torch.no_grad():
                change(group.layout.views(full)[index])
            return reduce(stream, final=final)

        return change_and_reduce

    wrap(group.gradients, "reduce", made)


def _swap_rows(rows: torch.Tensor) -> None:
    rows[:2] = rows[:2].flip(0)


def _negate_row(rows: torch.Tensor) -> None:
    rows[0].neg_()


def _one_ulp(rows: torch.Tensor) -> None:
    rows[0].view(torch.int32).add_(1)


def _noise(rows: torch.Tensor) -> None:
    """Change low bits by what the operating system has gathered: no two runs are alike."""
    noise = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).to(torch.int32)
    rows[0][:8].view(torch.int32).bitwise_xor_(noise.to(rows.device))


def _overwritten_gradient(trainer: Trainer) -> None:
    """A microbatch's gradient takes the place of the sum so far."""
    group = group_named(trainer, "layers.1")

    def made(reduce: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def reduce_anew(stream: Any, *, final: bool) -> list[Any]:
            for parameter in group.sharded:
                parameter.grad = None
            return reduce(stream, final=final)

        return reduce_anew

    wrap(group.gradients, "reduce", made)


def _gradient_counted_twice(trainer: Trainer) -> None:
    """What a reduction gives is added to itself."""
    _add_twice(group_named(trainer, "layers.1").gradients, every=1)


def _add_twice(gradients: Gradients, *, every: int) -> None:
    """Add what each reduction of that many gives twice."""
    calls = itertools.count(1)

    def made(deposit: Callable[[Any], None]) -> Callable[[Any], None]:
        def deposit_twice(rows: Any) -> None:
            if next(calls) % every == 0:
                deposit({index: row.clone() for index, row in rows.items()})
            deposit(rows)

        return deposit_twice

    wrap(gradients, "_deposit", made)


def _microbatch_counted_twice(trainer: Trainer) -> None:
    """What a rank adds to the sum over ranks is, in the last microbatch, twice its own."""
    number = trainer.config.microbatches

    def made(gradients: Gradients) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        calls = itertools.count(1)

        def wrapped(own_sum: Callable[..., Any]) -> Callable[..., Any]:
            def doubled(full: torch.Tensor | None, outputs: list[torch.Tensor]) -> torch.Tensor:
                if full is not None and next(calls) % number == 0:
                    torch._foreach_mul_([gradients._views[i] for i in sorted(gradients._copied)], 2)
                result: torch.Tensor = own_sum(full, outputs)
                return result

            return doubled

        return wrapped

    for group in trainer.groups:
        wrap(group.gradients, "_own_sum", made(group.gradients))


def _microbatch_added_twice(trainer: Trainer) -> None:
    """What the reduction of the last microbatch gives is added twice."""
    for group in trainer.groups:
        _add_twice(group.gradients, every=trainer.config.microbatches)


def _rounded_gradients(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, fsdp=dataclasses.replace(config.fsdp, reduce_dtype="bf16"))


def _clipped_twice(trainer: Trainer) -> None:
    del trainer

    def made(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def twice(*args: Any) -> torch.Tensor:
            norm = clip(*args)
            clip(*args)
            return norm

        return twice

    wrap(fsdp_core.train.trainer, "clip_grads", made)


def _unclipped_layer(trainer: Trainer) -> None:
    spared = {id(parameter) for parameter in group_named(trainer, "layers.1").sharded}

    def made(scale: Callable[..., None]) -> Callable[..., None]:
        return lambda parameters, max_norm, norm: scale(
            [p for p in parameters if id(p) not in spared], max_norm, norm
        )

    wrap(fsdp_core.model.sharding, "scale_to", made)


# ---- optimizer


def _step_count(trainer: Trainer) -> None:
    trainer.optimizer.step_count.add_(1.0)


def _lost_bias_correction(trainer: Trainer) -> None:
    """The kernel is told a step at which nothing is left to correct."""
    del trainer

    def made(kernel: Callable[..., None]) -> Callable[..., None]:
        def uncorrected(*args: Any, **kwargs: Any) -> None:
            *first, steps = args
            kernel(*first, [torch.full_like(step, 1e6) for step in steps], **kwargs)

        return uncorrected

    wrap(torch, "_fused_adamw_", made)


def _decayed_norms(trainer: Trainer) -> None:
    optimizer = trainer.optimizer
    decay = trainer.config.optim.weight_decay
    optimizer._groups = [(indices, decay) for indices, _ in optimizer._groups]


def _learning_rate(trainer: Trainer) -> None:
    trainer.optimizer.lr.mul_(0.5)


def _epsilon(trainer: Trainer) -> None:
    optimizer = trainer.optimizer
    optimizer._config = dataclasses.replace(optimizer._config, eps=1e-5)


def _skipped_update(trainer: Trainer) -> None:
    optimizer = trainer.optimizer
    step = optimizer.step

    def skip_once() -> None:
        optimizer.step = step  # type: ignore[method-assign]

    optimizer.step = skip_once  # type: ignore[method-assign]


def _update_repeated(trainer: Trainer) -> None:
    """All that comes after the gradients is done twice: the norm, the clip and the update."""

    def made(update: Callable[[], None]) -> Callable[[], None]:
        def twice() -> None:
            update()
            update()

        return twice

    wrap(trainer, "_update", made)


def _recorded_loss(trainer: Trainer) -> None:
    """What is given out as the loss of the first microbatch is an ulp off, after backward."""

    def made(gradients: Callable[..., None]) -> Callable[..., None]:
        def off(*args: Any) -> None:
            gradients(*args)
            trainer.outputs.losses[:1].view(torch.int32).add_(1)

        return off

    wrap(trainer, "_gradients", made)


def _exchanged_moments(trainer: Trainer) -> None:
    _swap_rows(trainer.optimizer.exp_avg_sq[-1])


def _rounded_main_weights(trainer: Trainer) -> None:
    optimizer = trainer.optimizer

    def made(step: Callable[[], None]) -> Callable[[], None]:
        def step_and_round() -> None:
            step()
            with torch.no_grad():
                for weight in optimizer.params:
                    weight.copy_(weight.bfloat16())

        return step_and_round

    wrap(optimizer, "step", made)


def _updated_neighbour(trainer: Trainer) -> None:
    """The kernel takes a matrix to begin an element too soon, as after a shard without elements."""
    optimizer = trainer.optimizer
    weight = optimizer.params[-1]
    numel, start = weight.numel(), weight.storage_offset() - 1
    optimizer.params[-1] = weight.as_strided(weight.shape, weight.stride(), start)
    assert optimizer.params[-1].numel() == numel


def _stale_model_weights(trainer: Trainer) -> None:
    """The copies that are computed with stay those of before the last update."""
    group = group_named(trainer, "layers.1")
    with torch.no_grad(), trainer.device.on(trainer.stream):
        old = before_last_update(trainer, group)
        with other_main_weight(group, old):
            group.main_weight_changed()
    for name in ("refresh_model_weight", "main_weight_changed"):
        wrap(group, name, lambda refresh: lambda: None)


def _copies_left_stale(trainer: Trainer) -> None:
    """They follow when the next forward asks for them, but not after the update."""
    wrap(group_named(trainer, "layers.1"), "main_weight_changed", lambda follow: lambda: None)


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


def _filled(value: float) -> Planting:
    return _main_weight(lambda element: element.fill_(value))


def _before(act: Callable[[Trainer], None]) -> Planting:
    return Planting(before_step=act)


def _gradients(change: Rows) -> Planting:
    return _before(functools.partial(_changed_gradients, change=change))


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "other_initialisation": Planting(before_make=_other_initialisation),
        "ulp": _main_weight(lambda element: element.view(torch.int32).add_(1)),
        "nan": _filled(float("nan")),
        "negative_zero": _filled(-0.0),
        "positive_zero": _filled(0.0),
        "rope_off_by_one": _before(_rope_off_by_one),
        "softmax_scale": _before(_softmax_scale),
        "nan_activation": _before(_nan_activation),
        "loss_scale": _before(_loss_scale),
        "aux_loss_scale": _before(_aux_loss_scale),
        "logged_aux_loss": _before(_logged_aux_loss),
        "ignored_bias": _before(_ignored_bias),
        "flushed_denormals": _before(_flushed_denormals),
        "gradient_rows_swapped": _gradients(_swap_rows),
        "gradient_row_negated": _gradients(_negate_row),
        "gradient_ulp": _gradients(_one_ulp),
        "gradient_noise": _gradients(_noise),
        "overwritten_gradient": _before(_overwritten_gradient),
        "gradient_counted_twice": _before(_gradient_counted_twice),
        "microbatch_counted_twice": _before(_microbatch_counted_twice),
        "microbatch_added_twice": _before(_microbatch_added_twice),
        "rounded_gradients": Planting(before_make=_rounded_gradients),
        "clipped_twice": _before(_clipped_twice),
        "unclipped_layer": _before(_unclipped_layer),
        "step_count": _before(_step_count),
        "lost_bias_correction": _before(_lost_bias_correction),
        "decayed_norms": _before(_decayed_norms),
        "learning_rate": _before(_learning_rate),
        "epsilon": _before(_epsilon),
        "skipped_update": _before(_skipped_update),
        "update_repeated": _before(_update_repeated),
        "recorded_loss": _before(_recorded_loss),
        "exchanged_moments": _before(_exchanged_moments),
        "rounded_main_weights": _before(_rounded_main_weights),
        "updated_neighbour": _before(_updated_neighbour),
        "copies_left_stale": _before(_copies_left_stale),
        "stale_model_weights": _before(_stale_model_weights),
    }
)
"""By name in the catalogue."""
