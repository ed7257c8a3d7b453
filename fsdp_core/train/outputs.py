"""What a step shows, in static device tensors that every step overwrites."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fsdp_core.graph.digest import Digester, empty_rows
from fsdp_core.model.batch import num_averaged
from fsdp_core.optim import AdamW
from fsdp_core.parallel.collectives import all_reduce
from fsdp_core.parallel.mesh import Axes
from fsdp_core.train.taps import TensorCopies

Named = tuple[list[str], list[torch.Tensor]]


@dataclass(frozen=True)
class StepOutputs:
    """Static device tensors that every step overwrites.

    Attributes:
        losses: float32 [microbatches], of this rank's tokens; ranks of tp and pp have the same.
            Their mean over microbatches and over the ranks that hold different tokens is `loss`.
        loss: float32 scalar, the mean over all tokens of the step, on every rank the same.
        grad_norm: float32 scalar, of the whole model's gradient, before clipping.
        digests: per group, int32 [tensors, 5]: four lanes of the digest, and whether any
            element is not finite.
    """

    losses: torch.Tensor
    loss: torch.Tensor
    grad_norm: torch.Tensor
    digests: dict[str, torch.Tensor]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them by name."""
        yield from {"losses": self.losses, "loss": self.loss, "grad_norm": self.grad_norm}.items()
        for group, rows in self.digests.items():
            yield f"digest of {group}", rows


def mean_loss(losses: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The loss of the step out of every rank's losses: float32 scalar. A collective.

    In float64, so that the order in which ranks are summed leaves float32 alone.
    """
    total = losses.double().mean()
    for axis in (axes.dp_outer, axes.dp, axes.cp):
        total = all_reduce(total, axis)
    return (total / num_averaged(axes)).float()


def groups_of(optimizer: AdamW, others: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Named]:
    """The groups of `Digests`, with the tensors as they are now."""
    names = optimizer.names
    return {
        "grads": (names, optimizer.grads),
        "weights": (
            [*names, *(name for name, _ in others)],
            [*optimizer.params, *(tensor for _, tensor in others)],
        ),
        "optim": (
            [f"{name}.exp_avg" for name in names]
            + [f"{name}.exp_avg_sq" for name in names]
            + ["step_count"],
            [*optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count],
        ),
    }


class Digests:
    """Digests of the tensors that a run is compared by, in groups.

    Args:
        optimizer: its gradients, weights and moments, this rank's rows, by global names.
        others: further state that a step changes: it goes with the weights.
        further: tensors of further groups, by name; a group of none is left out.

    Attributes:
        digested: names and tensors of each group.
        kept: copies that are taken with the digests of a group.
    """

    def __init__(
        self,
        optimizer: AdamW,
        others: Sequence[tuple[str, torch.Tensor]],
        further: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        self.digested = groups_of(optimizer, others) | {
            group: (list(named), list(named.values())) for group, named in further.items() if named
        }
        self._digesters = {
            group: Digester(tensors, named) for group, (named, tensors) in self.digested.items()
        }
        self.kept: dict[str, TensorCopies] = {}

    def empty(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Rows for the digests of each group."""
        return {g: empty_rows(len(names), device) for g, (names, _) in self.digested.items()}

    def update(self, group: str, outputs: StepOutputs) -> None:
        """Digest a group into its rows."""
        self._digesters[group](self.digested[group][1], outputs.digests[group])
        if group in self.kept:
            self.kept[group].take()

    def scratch(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that digesting needs, by name."""
        for group, digester in self._digesters.items():
            for number, tensor in enumerate(digester.scratch()):
                yield f"digest scratch {number} of {group}", tensor
        for group, copies in self.kept.items():
            for name, buffer in copies.buffers.items():
                yield f"copy of {group}:{name}", buffer
