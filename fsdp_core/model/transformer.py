"""A dense pre-norm decoder: embedding, blocks, final norm, untied head, cross entropy.

B batch, T time, H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.attention import AttentionBranch
from fsdp_core.model.backend import Backend
from fsdp_core.model.rope import rope_tables


class MlpBranch(nn.Module):
    """x + dropout(down(silu(gate(norm(x))) * up(norm(x)))): SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.norm = backend.norm(config.hidden, config.norm_eps)
        self.gate = backend.linear(config.hidden, config.ffn)
        self.up = backend.linear(config.hidden, config.ffn)
        self.down = backend.linear(config.ffn, config.hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        normed = self.norm(x_BTH)
        out = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x_BTH + F.dropout(out, self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention branch, then MLP branch. The FSDP unit."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.attn = AttentionBranch(config, backend)
        self.mlp = MlpBranch(config, backend)

    def forward(self, x_BTH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        return self.mlp(self.attn(x_BTH, cos, sin))


class Decoder(nn.Module):
    """Tokens to mean cross entropy. Weights are float32 until FSDP gives them a compute dtype."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.norm = backend.norm(config.hidden, config.norm_eps)
        self.head = backend.linear(config.hidden, config.vocab_size)

    def init_weights(self, seed: int) -> None:
        """Initialise in the order of names, from a generator of its own on the CPU.

        Matrices are normal with `init_std`, those that write to the residual stream divided by
        sqrt(2 * layers) (Radford et al., 2019); norm weights are one. Every rank draws the same
        bits, on any device.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.config.init_std / (2 * self.config.layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                    continue
                std = residual_std if name.endswith(("wo.weight", "down.weight")) else None
                drawn = torch.empty(parameter.shape).normal_(
                    0.0, std or self.config.init_std, generator=generator
                )
                parameter.copy_(drawn)

    def set_rope(self, device: torch.device) -> None:
        """Make the RoPE tables; they are buffers so that the ledger knows their names."""
        config = self.config
        cos, sin = rope_tables(config.seq, config.head_dim, config.rope_theta, device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] tokens and targets -> float32 scalar, the mean loss."""
        x_BTH = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTH = layer(x_BTH, self.rope_cos, self.rope_sin)
        logits_BTV = self.head(self.norm(x_BTH)).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
