"""AdamW and gradient clipping on shards, with no host synchronisation, so graphs can hold them.

AdamW (Loshchilov and Hutter, 2019) with bias correction; the arithmetic is torch's own fused
kernel, fed with a step and a learning rate that are tensors on the device.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import OptimConfig


class AdamW:
    """One step over parameters whose gradients are persistent. Empty parameters are left out.

    Attributes:
        names: of the parameters that are updated, in order.
        lr: float32 scalar tensor on the device; write it in place.
        step_count: float32 scalar tensor, the number of steps taken.
        exp_avg, exp_avg_sq: first and second moments, like the parameters.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        kept = [(name, p) for name, p in named if p.numel()]
        self.names = [name for name, _ in kept]
        self.params = [p for _, p in kept]
        self._config = config
        device = self.params[0].device if kept else torch.device("cpu")
        self.lr = torch.full((), config.lr, dtype=torch.float32, device=device)
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)
        self.exp_avg = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.params]
        matrices = [i for i, p in enumerate(self.params) if p.dim() >= 2]
        others = [i for i, p in enumerate(self.params) if p.dim() < 2]
        self._groups = [(matrices, config.weight_decay), (others, 0.0)]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter in place from its `grad`."""
        self.step_count.add_(1.0)
        for indices, weight_decay in self._groups:
            if not indices:
                continue
            torch._fused_adamw_(
                [self.params[i] for i in indices],
                [_grad(self.params[i]) for i in indices],
                [self.exp_avg[i] for i in indices],
                [self.exp_avg_sq[i] for i in indices],
                [],
                [self.step_count] * len(indices),
                lr=self.lr,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=weight_decay,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
            )


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("Expected a persistent gradient, got None; was grad set to none?")
    return parameter.grad


@torch.no_grad()
def grad_norm(grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Global L2 norm, float32 scalar: local squares summed in float64, then over `group`.

    Args:
        grads: this rank's flat shards; padding must be zero.
        group: ranks that hold the other shards; None if `grads` is everything.
    """
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    total = torch.stack(norms).square().sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt().float()


@torch.no_grad()
def clip_grads(grads: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale `grads` in place so that their global norm is at most `max_norm` (0: leave them)."""
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
