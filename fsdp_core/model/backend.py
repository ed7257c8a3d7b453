"""The single place that chooses between torch and TransformerEngine modules."""

import ctypes
import importlib.util
from pathlib import Path
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
    """x / rms(x) * weight, the statistics in float32 (float64 for float64)."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden] in the input's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
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
    """Load every part of the cuDNN that torch brings, before TransformerEngine looks for one.

    TransformerEngine finds a system cuDNN first. cuDNN loads its parts by name when they are
    needed, so two versions in one process share parts, and one of the libraries then fails.
    """
    if importlib.util.find_spec("nvidia") is None:
        return
    spec = importlib.util.find_spec("nvidia.cudnn")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def make_backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        BackendMissing: `te` where TransformerEngine or CUDA is absent.
    """
    return TransformerEngineBackend() if name == "te" else TorchBackend()
