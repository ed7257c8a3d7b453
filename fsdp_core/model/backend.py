"""The single place that chooses between torch and TransformerEngine modules."""

import importlib.util
import os
from typing import Protocol, cast

import torch
from torch import nn


class Backend(Protocol):
    """Makes the modules that exist in both libraries."""

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer without bias: [..., in] -> [..., out]."""

    def norm(self, hidden: int, eps: float) -> nn.Module:
        """RMSNorm over the last dim (Zhang and Sennrich, 2019)."""


class BackendMissing(RuntimeError):
    """The chosen backend is not installed on this machine."""


class RmsNorm(nn.Module):
    """x / rms(x) * weight, the statistics in float32 whatever the input's dtype."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden] in the input's dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class TorchBackend:
    """Plain torch: runs everywhere."""

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """`nn.Linear` without bias."""
        return nn.Linear(in_features, out_features, bias=False)

    def norm(self, hidden: int, eps: float) -> nn.Module:
        """`RmsNorm`."""
        return RmsNorm(hidden, eps)


class TransformerEngineBackend:
    """TransformerEngine's Linear and RMSNorm; only on Linux with CUDA."""

    def __init__(self) -> None:
        if importlib.util.find_spec("transformer_engine") is None:
            raise BackendMissing(
                "backend: te needs the package transformer-engine, which is not installed here; "
                "install the extra 'te' on Linux with CUDA, or set backend: torch"
            )
        if not torch.cuda.is_available():
            raise BackendMissing(
                "backend: te needs a CUDA device, and torch sees none; set backend: torch"
            )
        _prefer_cudnn_of_torch()
        import transformer_engine.pytorch as te

        self._te = te

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """`te.Linear` without bias, parameters in float32 as FSDP's main weights are."""
        layer = self._te.Linear(in_features, out_features, bias=False, params_dtype=torch.float32)
        return cast("nn.Module", layer)

    def norm(self, hidden: int, eps: float) -> nn.Module:
        """`te.RMSNorm`."""
        return cast("nn.Module", self._te.RMSNorm(hidden, eps=eps))


def _prefer_cudnn_of_torch() -> None:
    """Point TransformerEngine at the cuDNN that torch brings, unless the user chose one.

    It looks for a system cuDNN first; with two versions in one process, whichever library comes
    second fails to load or refuses the other's version.
    """
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if spec is not None and spec.submodule_search_locations:
        os.environ.setdefault("CUDNN_HOME", next(iter(spec.submodule_search_locations)))


def make_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        BackendMissing: `te` where TransformerEngine or CUDA is absent.
    """
    return TransformerEngineBackend() if name == "te" else TorchBackend()
