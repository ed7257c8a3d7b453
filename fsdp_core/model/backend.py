"""The single place that chooses between torch and TransformerEngine."""

import ctypes
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.around import Around, Plain
from fsdp_core.parallel.mesh import Axes

if TYPE_CHECKING:
    from fsdp_core.model.parts import Parts
    from fsdp_core.model.rope import RopeTable


class Backend(Protocol):
    """Makes the modules that exist in both libraries."""

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer without bias: [..., in] -> [..., out]."""

    def norm(self, hidden: int, eps: float) -> nn.Module:
        """RMSNorm over the last dim (Zhang and Sennrich, 2019)."""

    def parts(self, config: ModelConfig, axes: Axes, rope: "RopeTable") -> "Parts":
        """What makes the parts of a decoder's layers on a layout."""

    def around(self, axes: Axes) -> Around:
        """What a stage's layers compute in. All ranks call it together."""


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
    """Plain torch: runs everywhere.

    Args:
        fused_experts: gate, up and down of experts as one autograd function.
    """

    def __init__(self, *, fused_experts: bool = False) -> None:
        self._fused_experts = fused_experts

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """`nn.Linear` without bias."""
        return nn.Linear(in_features, out_features, bias=False)

    def norm(self, hidden: int, eps: float) -> nn.Module:
        """`RmsNorm`."""
        return RmsNorm(hidden, eps)

    def parts(self, config: ModelConfig, axes: Axes, rope: "RopeTable") -> "Parts":
        """Those of `parts.TorchParts`."""
        from fsdp_core.model.parts import TorchParts

        return TorchParts(config, axes, rope, self, fused_experts=self._fused_experts)

    def around(self, axes: Axes) -> Around:
        """Nothing."""
        del axes
        return Plain()


class TransformerEngineBackend:
    """TransformerEngine's modules; only on Linux with CUDA.

    Args:
        fp8: none, delayed, current or block: see `te.precision`.
        fused_experts: experts by its operators over both layers, not layer by layer; None: where it
            has grouped kernels for that, see `te.experts.fuses`.
        dtype: compute dtype.

    Raises:
        BackendMissing: TransformerEngine or CUDA is absent.
        ValueError: an unknown `fp8`.
    """

    def __init__(
        self, *, fp8: str = "none", fused_experts: bool | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("transformer_engine") is None:
            raise BackendMissing(
                "backend: te needs the package transformer-engine, which is not installed here; "
                "install the extra 'te' on Linux with CUDA, or set backend: torch"
            )
        if not torch.cuda.is_available():
            raise BackendMissing(
                "backend: te needs a CUDA device, and torch sees none; set backend: torch"
            )
        prefer_cudnn_of_torch()
        import transformer_engine.pytorch as te

        from fsdp_core.model.te.fp8 import recipe_of
        from fsdp_core.model.te.layers import fuses

        self._te: Any = te
        recipe = None if fp8 == "none" else recipe_of(fp8)
        if fused_experts is None:
            # In blocks its operators found no kernel at any width (2.20.2 on Hopper).
            fused_experts = fp8 != "block" and fuses(te, recipe, dtype)
        self._fp8, self._fused_experts = fp8, fused_experts

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """`te.Linear` without bias, parameters in float32 as FSDP's main weights are."""
        layer = self._te.Linear(in_features, out_features, bias=False, params_dtype=torch.float32)
        return cast("nn.Module", layer)

    def norm(self, hidden: int, eps: float) -> nn.Module:
        """`te.RMSNorm`."""
        return cast("nn.Module", self._te.RMSNorm(hidden, eps=eps))

    def parts(self, config: ModelConfig, axes: Axes, rope: "RopeTable") -> "Parts":
        """Those of `te.parts.TeParts`."""
        from fsdp_core.model.te.layers import TeParts

        return TeParts(
            self._te, config, axes, rope, self, fp8=self._fp8, fused_experts=self._fused_experts
        )

    def around(self, axes: Axes) -> Around:
        """fp8, if it was asked for."""
        from fsdp_core.model.te.fp8 import autocast

        return autocast(self._te, self._fp8, axes)


def prefer_cudnn_of_torch() -> None:
    """Load every part of the cuDNN that torch brings, before TransformerEngine looks for one.

    TransformerEngine finds a system cuDNN first. cuDNN loads its parts by name when they are
    needed, so two versions in one process share parts, and one of the libraries then fails.

    Raises:
        BackendMissing: a part of another cuDNN was loaded before; both are named.
    """
    if importlib.util.find_spec("nvidia") is None:
        return
    spec = importlib.util.find_spec("nvidia.cudnn")
    for folder in (spec and spec.submodule_search_locations) or ():
        # Those that others are linked to come first, or the loader would look for them itself.
        found = sorted(
            Path(folder, "lib").glob("libcudnn*.so*"), key=lambda path: "graph" not in path.name
        )
        for library in found:
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise BackendMissing(
                    f"backend: te needs the cuDNN of torch, which cannot be loaded ({error}); "
                    f"this process has loaded {', '.join(_loaded_cudnn()) or 'no other'}"
                ) from error


def _loaded_cudnn() -> list[str]:
    """Files of cuDNN that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "libcudnn" in line})


def make_backend(
    name: str, *, fp8: str = "none", fused_experts: bool | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Backend:  # fmt: skip
    """The backend called `name`.

    Args:
        fp8: none, delayed, current or block; of `te` only.
        fused_experts: compute an expert's layers at once; None: where the backend has kernels of
            its own for it, which `te` has for some recipes, on some machines.
        dtype: compute dtype.

    Raises:
        BackendMissing: `te` where TransformerEngine or CUDA is absent.
        ValueError: fp8 of another backend than `te`, or an unknown one; fused experts in blocks.
    """
    if name == "te":
        if fp8 == "block" and fused_experts:
            raise ValueError(
                "Expected fused_experts False for fp8 block, got True: TransformerEngine's grouped "
                "operators find no kernel for it (2.20.2 on Hopper, at any width)."
            )
        return TransformerEngineBackend(fp8=fp8, fused_experts=fused_experts, dtype=dtype)
    if fp8 != "none":
        raise ValueError(f"Expected backend te for fp8, got backend {name} and fp8 {fp8}.")
    return TorchBackend(fused_experts=fused_experts is True)
