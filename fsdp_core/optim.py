"""AdamW on shards, with no host synchronisation, so graphs can hold it.

AdamW (Loshchilov and Hutter, 2019) with bias correction; the arithmetic is torch's own fused
kernel, fed with a step and a learning rate that are tensors on the device.
"""

from collections.abc import Sequence

import torch

from fsdp_core.config import OptimConfig


class AdamW:
    """One step over (name, weight, gradient) that stay where they are. Empty ones are left out.

    lr: float32 scalar tensor on the device; write it in place.
    step_count: float32 scalar tensor, the number of steps taken.
    names, params, grads, exp_avg, exp_avg_sq: of the weights that are left, in order.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor, torch.Tensor]], config: OptimConfig
    ) -> None:
        kept = [(name, weight, grad) for name, weight, grad in named if weight.numel()]
        self.names = [name for name, _, _ in kept]
        self.params = [weight for _, weight, _ in kept]
        self.grads = [grad for _, _, grad in kept]
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
    def step(self, skipped: torch.Tensor | None = None) -> None:
        """Update every weight in place from its gradient. `skipped`, float32 scalar on the device,
        is 1 where this step must change nothing, else 0.
        """
        self.step_count.add_(1.0 if skipped is None else 1.0 - skipped)
        for indices, weight_decay in self._groups:
            if not indices:
                continue
            torch._fused_adamw_(
                [self.params[i] for i in indices],
                [self.grads[i] for i in indices],
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
                found_inf=skipped,
            )
