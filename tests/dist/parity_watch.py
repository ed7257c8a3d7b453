"""What one rank saw of a training step, and what all of them saw, put together again."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_core.model.decoder import DecoderStage
from fsdp_core.parallel.mesh import Axis
from tests.dist.parity_batches import Batch, Share

Key = tuple[Any, ...]
Found = dict[Key, torch.Tensor]


@dataclass
class Outcome:
    """What a rank has to show: rows of activations by number, its losses, gradients on rank 0."""

    numbers: dict[Key, torch.Tensor] = field(default_factory=dict)
    rows: Found = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


class Watch:
    """Notes what branches and the last stage give, by microbatch."""

    def __init__(
        self, stages: list[DecoderStage], shares: list[Share], tp: Axis | None, *,
        masks: bool = False,
    ) -> None:  # fmt: skip
        self.outcome, self._shares, self._tp = Outcome(), shares, tp
        self._masks = masks
        for stage in stages:
            watched: dict[str, nn.Module] = {}
            if stage.embedding is not None and not masks:
                watched["embedding"] = stage.embedding
            for number, layer in stage.numbered_layers.items():
                watched |= {f"layers.{number}.attn": layer.attn, f"layers.{number}.mlp": layer.mlp}
            for name, module in watched.items():
                module.register_forward_hook(self._hook(name))
            if stage.head is not None:
                stage.register_forward_hook(self._loss_hook())

    def _hook(self, name: str) -> Any:
        count = iter(range(len(self._shares)))

        def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            del module
            rows = out.detach().cpu()
            if self._masks:
                rows = rows != args[0].detach().cpu()
            key = ("forward", (microbatch := next(count)), name)
            numbers = local_numbers(self._shares[microbatch], self._tp).flatten()
            self.outcome.numbers[key] = numbers[numbers >= 0]
            self.outcome.rows[key] = rows.flatten(0, 1)[numbers >= 0].double()

        return note

    def _loss_hook(self) -> Any:
        count = iter(range(len(self._shares)))

        def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            del module, args
            self.outcome.losses[next(count)] = out.detach().double().cpu()

        return note


def local_numbers(share: Share, tp: Axis | None) -> torch.Tensor:
    """Numbers of a rank's tokens as activations are laid out; `tp` where it cuts the sequence."""
    return share.numbers if tp is None else share.numbers.chunk(tp.size, 1)[tp.rank]


def join(outcomes: list[Outcome], batch: Batch, num_averaged: int) -> Found:
    """What all ranks found, as one. Copies of a token's row must have the same bits.

    Raises:
        ValueError: copies differ, or a token has none; names what it is of.
    """
    found: Found = {}
    for outcome in outcomes:
        for key, rows in outcome.rows.items():
            numbers = outcome.numbers[key]
            shape = (batch.num_tokens(key[1]), rows.shape[1])
            whole = found.setdefault(key, torch.full(shape, torch.nan, dtype=torch.float64))
            seen = whole[numbers]
            if not torch.equal(torch.where(seen.isnan(), rows, seen), rows):
                raise ValueError(f"Expected equal bits of {key} on every rank that has it.")
            whole[numbers] = rows
    for key, whole in found.items():
        if whole.isnan().any():
            raise ValueError(f"Expected all tokens of {key}, got NaN or none.")
    with_loss = [outcome for outcome in outcomes if outcome.losses]
    losses = [torch.stack([o.losses[m] for m in range(batch.number)]) for o in with_loss]
    found["loss",] = torch.stack(losses).mean(0)
    if len(losses) % num_averaged:
        raise ValueError(f"Expected losses of a multiple of {num_averaged} ranks.")
    for outcome in outcomes:
        found |= {("grad", name): grad.double() for name, grad in outcome.grads.items()}
    return found
