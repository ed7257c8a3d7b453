"""Faults of tokens and random numbers: see `harness.faults.data`."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

import fsdp_core.train.inputs
from fsdp_core.model.packing import PackedBatch
from fsdp_core.parallel.context import ContextPlan, Spans
from fsdp_core.parallel.pipeline import Microbatch
from fsdp_core.train import Trainer
from fsdp_core.train.inputs import RowInputs
from harness.worker.plants.planting import Planting
from harness.worker.plants.seams import dropout_stream, random_state, wrap

# ---- tokens


def _rows(trainer: Trainer) -> RowInputs:
    inputs = trainer._inputs
    assert isinstance(inputs, RowInputs)
    return inputs


def _same_shard(trainer: Trainer) -> None:
    wrap(_rows(trainer)._batches, "dp_rank", lambda own: 0 if own else 1)


def _other_shuffle(trainer: Trainer) -> None:
    wrap(_rows(trainer)._batches, "seed", lambda seed: seed + 1)


def _shifted_epoch(trainer: Trainer) -> None:
    wrap(trainer._inputs, "fill", lambda fill: lambda step: fill(step + 1))


def _after_fill(trainer: Trainer, change: Callable[[RowInputs], None]) -> None:
    """Change what every step from now on takes in."""
    inputs = _rows(trainer)

    def made(fill: Callable[[int], None]) -> Callable[[int], None]:
        def fill_and_change(step: int) -> None:
            fill(step)
            change(inputs)

        return fill_and_change

    wrap(inputs, "fill", made)


def _unshifted_labels(inputs: RowInputs) -> None:
    inputs.targets.copy_(inputs.tokens)


def _repeated_microbatch(inputs: RowInputs) -> None:
    for static in (inputs.tokens, inputs.targets):
        static[-1] = static[0]


def _zeroed_token(inputs: RowInputs) -> None:
    inputs.tokens.view(-1)[-1] = 0


def _other_order(inputs: RowInputs) -> None:
    inputs.tokens.copy_(inputs.tokens.flip(0))


def _swapped_halves(trainer: Trainer) -> None:
    wrap(_rows(trainer)._plan, "positions", lambda places: torch.cat(places.chunk(2)[::-1]))


# ---- packs


def _counted_padding(trainer: Trainer) -> None:
    del trainer

    def made(part: Callable[..., Any]) -> Callable[..., Any]:
        def part_that_counts_all(*args: Any) -> Any:
            local = part(*args)
            return dataclasses.replace(local, part=dataclasses.replace(local.part, counted=None))

        return part_that_counts_all

    wrap(fsdp_core.train.inputs, "packed_part", made)


def _lost_boundary(trainer: Trainer) -> None:
    """The first two documents of a pack are one to attention."""
    del trainer

    def joined(spans: Spans) -> Spans:
        assert spans.offsets is not None
        offsets = spans.offsets.clone()
        offsets[1] = 0
        return dataclasses.replace(spans, offsets=offsets)

    def made(plan: Callable[..., ContextPlan]) -> Callable[..., ContextPlan]:
        def plan_joined(*args: Any, **how: Any) -> ContextPlan:
            whole = plan(*args, **how)
            spans, halves = joined(whole.spans), joined(whole.half_spans)
            return dataclasses.replace(whole, spans=spans, half_spans=halves)

        return plan_joined

    wrap(PackedBatch, "plan", made)


def _uneven_weights(trainer: Trainer) -> None:
    """The loss of a pack is divided by its own tokens, not by the mean of all packs."""

    def made(microbatches: Callable[[], list[Microbatch]]) -> Callable[[], list[Microbatch]]:
        def weighed_alone() -> list[Microbatch]:
            return [
                Microbatch(each.tokens, {"part": dataclasses.replace(part, weight=weight)})
                for each in microbatches()
                for part in [each.keywords["part"]]
                for weight in [1.0 / part.num_counted.clamp(min=1.0)]
            ]

        return weighed_alone

    wrap(trainer._inputs, "microbatches", made)


# ---- random numbers


def _repeated_masks(trainer: Trainer) -> None:
    """Every step from now on draws the same numbers."""
    stream, kept = dropout_stream(trainer), random_state(trainer, trainer.config.seed)
    _after_fill(trainer, lambda inputs: stream.set_state(kept))


def _masks_of_one_draw(trainer: Trainer) -> None:
    """Drawing does not advance the generator."""
    stream = dropout_stream(trainer)

    def made(dropout: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def draw_in_place(*args: Any, **kwargs: Any) -> torch.Tensor:
            kept = stream.get_state()
            out = dropout(*args, **kwargs)
            stream.set_state(kept)
            return out

        return draw_in_place

    wrap(stream, "dropout", made)


def _seeded_alike(trainer: Trainer) -> None:
    """All ranks draw the same numbers from now on."""
    dropout_stream(trainer).set_state(random_state(trainer, trainer.config.seed))


def _seeded_by_rank(trainer: Trainer) -> None:
    """Each rank draws its own numbers, those too that hold copies of one activation."""
    seed = trainer.config.seed + dist.get_rank()
    dropout_stream(trainer).set_state(random_state(trainer, seed))


def _seeded_by_entropy(trainer: Trainer) -> None:
    seed = int.from_bytes(os.urandom(7), "little")
    dropout_stream(trainer).set_state(random_state(trainer, seed))


def _drawn_aside(trainer: Trainer) -> None:
    """Somebody else draws a number from the device's generator."""
    torch.rand(1, device=trainer.device.torch_device)


def _dropout_off(trainer: Trainer) -> None:
    for stage in trainer.stages:
        for layer in stage.numbered_layers.values():
            layer.attn.residual = dataclasses.replace(layer.attn.residual, p=0.0)


def _before(act: Callable[[Trainer], None]) -> Planting:
    return Planting(before_step=act)


def _changed(change: Callable[[RowInputs], None]) -> Planting:
    return _before(functools.partial(_after_fill, change=change))


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "same_data": _before(_same_shard),
        "same_shard": _before(_same_shard),
        "other_shuffle": _before(_other_shuffle),
        "shifted_epoch": _before(_shifted_epoch),
        "unshifted_labels": _changed(_unshifted_labels),
        "repeated_microbatch": _changed(_repeated_microbatch),
        "zeroed_token": _changed(_zeroed_token),
        "microbatches_in_other_order": _changed(_other_order),
        "tokens_of_another_group": _before(_same_shard),
        "swapped_halves": _before(_swapped_halves),
        "counted_padding": _before(_counted_padding),
        "lost_boundary": _before(_lost_boundary),
        "uneven_weights": _before(_uneven_weights),
        "repeated_masks": _before(_repeated_masks),
        "masks_of_one_draw": _before(_masks_of_one_draw),
        "seeded_alike": _before(_seeded_alike),
        "seeded_by_rank": _before(_seeded_by_rank),
        "seeded_by_entropy": _before(_seeded_by_entropy),
        "drawn_aside": _before(_drawn_aside),
        "dropout_off": _before(_dropout_off),
    }
)
"""By name in the catalogue."""
