"""The choice of module library, and torch's own RMSNorm and linear."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.model.decoder import make_layers
from fsdp_core.model.layers import BackendMissing, LayerFactory, RmsNorm


def test_rms_norm_statistics_are_float32() -> None:
    """In bf16 only the result is rounded, no square and no sum."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = RmsNorm(64, 1e-5).bfloat16()
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected.bfloat16())


def test_torch_backend_makes_plain_modules() -> None:
    """The torch backend's linear has no bias, and its norm starts at one."""
    backend = make_layers("torch")
    assert isinstance(backend, LayerFactory)
    linear, norm = backend.linear(3, 5), backend.rms_norm(7, 1e-6)
    assert isinstance(linear, nn.Linear)
    assert dict(linear.named_parameters()).keys() == {"weight"}
    assert linear.weight.shape == (5, 3)
    assert isinstance(norm, RmsNorm)
    assert norm.weight.tolist() == [1.0] * 7


def test_te_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend te without its package says what to install or set."""
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "transformer_engine" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(
        BackendMissing, match="transformer-engine, which is not installed"
    ) as caught:
        make_layers("te")
    assert "backend: torch" in str(caught.value)


def test_te_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend te without a CUDA device is refused before the package is imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendMissing, match="needs a CUDA device"):
        make_layers("te")
