"""The attention branch of a block: norm, grouped-query causal attention, dropout, residual.

This is what graph scope `attn` captures: input [B, T, H] in, [B, T, H] out, nothing else crosses.
B batch, T time, H hidden, N query heads, K key-value heads, D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.backend import Backend
from fsdp_core.model.rope import apply_rope


class AttentionBranch(nn.Module):
    """x + dropout(wo(attention(norm(x))))."""

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim, self.dropout = config.head_dim, config.dropout
        kv_width = config.kv_heads * config.head_dim
        self.norm = backend.norm(config.hidden, config.norm_eps)
        self.wq = backend.linear(config.hidden, config.hidden)
        self.wk = backend.linear(config.hidden, kv_width)
        self.wv = backend.linear(config.hidden, kv_width)
        self.wo = backend.linear(config.hidden, config.hidden)

    def forward(self, x_BTH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; `cos` and `sin` are the RoPE tables [T, D / 2]."""
        batch, time, _ = x_BTH.shape
        normed = self.norm(x_BTH)
        q = self.wq(normed).view(batch, time, self.heads, self.head_dim)
        k = self.wk(normed).view(batch, time, self.kv_heads, self.head_dim)
        v = self.wv(normed).view(batch, time, self.kv_heads, self.head_dim)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        # Repeating the key-value heads (not enable_gqa) keeps one kernel choice on every device.
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        out = self.wo(mixed.transpose(1, 2).reshape(batch, time, -1))
        return x_BTH + F.dropout(out, self.dropout, self.training)
