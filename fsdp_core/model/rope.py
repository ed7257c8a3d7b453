"""Rotary position embedding (Su et al., 2021), halves convention: pairs are (i, i + d/2)."""

import torch


def rope_tables(
    seq: int, head_dim: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables, float32 [seq, head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), theta**-exponent)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x_BTND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [batch, time, heads, head_dim] by position; computed in float32."""
    a, b = x_BTND.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTND.dtype)
