"""Dense feed-forwards by TransformerEngine: norm, gate, up and down in one module, or split.

`LayerNormMLP` keeps gate above up as one parameter: gate.weight is the first half of a rank's rows,
up.weight the second, each with its own cut, so the names and cuts are those of torch's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.model.te.order import columns, layer_options, rows
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Stretch, chunk_of, consecutive, set_stretches
from fsdp_core.parallel.tensor_parallel import reduce_replicated_of


class Mlp(nn.Module):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (Shazeer, 2020), its width cut over tp.

    Args:
        te: the module `transformer_engine.pytorch`.

    Raises:
        ValueError: tp does not divide the width.
    """

    def __init__(
        self, te: Any, hidden: int, ffn: int, eps: float, tp: Axis, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        width = chunk_of(ffn, "ffn", tp.name, tp.size)
        self.fused = te.LayerNormMLP(
            hidden,
            ffn,
            eps=eps,
            normalization="RMSNorm",
            zero_centered_gamma=False,
            activation="swiglu",
            set_parallel_mode=True,
            **layer_options(tp, sequence_parallel=sequence_parallel),
        )
        if sequence_parallel and tp.size > 1:
            reduce_replicated_of(self.fused, ["layer_norm_weight"], tp)
        halves = {"gate.weight": width, "up.weight": width}
        set_stretches(self, {
            "fused.layer_norm_weight": Stretch("../norm.weight"),
            "fused.fc1_weight": consecutive(halves, columns(tp)),
            "fused.fc2_weight": Stretch("down.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        result: torch.Tensor = self.fused(x_BTH)
        return result


class SharedExperts(nn.Module):
    """The same without the norm, which the router shares: two layers and torch's activation."""

    def __init__(
        self, te: Any, hidden: int, ffn: int, tp: Axis, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        chunk_of(ffn, "shared_expert_ffn", tp.name, tp.size)
        options = layer_options(tp, sequence_parallel=sequence_parallel)
        self.gate_up = te.Linear(
            hidden,
            2 * ffn,
            parallel_mode="column",
            parameters_split={"gate": ffn, "up": ffn},
            **options,
        )
        self.down = te.Linear(ffn, hidden, parallel_mode="row", **options)
        set_stretches(self, {
            "gate_up.gate_weight": Stretch("gate.weight", columns(tp)),
            "gate_up.up_weight": Stretch("up.weight", columns(tp)),
            "down.weight": Stretch("down.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        gate, up = self.gate_up(x_BTH).chunk(2, -1)
        result: torch.Tensor = self.down(F.silu(gate) * up)
        return result
