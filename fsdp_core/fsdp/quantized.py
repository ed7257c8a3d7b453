"""Weights that are kept, gathered and computed with as TransformerEngine's fp8 tensors.

    main_weight float32, a shard  --quantise, one scale a tensor or block over all ranks-->
    model_weight, fp8 bytes, a shard  --gather bytes-->  the module's own QuantizedTensor

A unit's parameters that are quantised when it is wrapped (modules made inside TransformerEngine's
`quantized_model_init`) form a group of their own. The parameter that the module was made with goes
on as the unsharded one: its bytes come from the group's gathered buffer, its scales are its own and
equal on every rank. What TransformerEngine derives from the bytes, the transposed copy that its
backward reads on Hopper, goes when the bytes do.

Which formats travel as one buffer of a byte an element, and so work: delayed and current scaling (a
scale a tensor) and scaling by blocks of 128 x 128.
"""

import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

_RAW = {"Float8Tensor": "_data", "Float8BlockwiseQTensor": "_rowwise_data"}
"""Where each supported tensor class keeps its bytes."""

HIDDEN = ("_", "get_high_precision_init_val", "clear_high_precision_init_val")
"""How attributes begin that belong to the quantised tensor and to nobody else."""

QuantizedPiece = tuple[torch.Tensor, int, torch.Tensor] | tuple[None, None, None]
"""Elements of a main weight, flat; the number of the first; their bytes, flat uint8. Or nothing."""


def is_quantized(parameter: torch.Tensor) -> bool:
    """Whether a parameter is one of TransformerEngine's quantised tensors."""
    module = sys.modules.get("transformer_engine.pytorch.quantized_tensor")
    return module is not None and isinstance(parameter, module.QuantizedTensor)


def check_supported(name: str, parameter: torch.Tensor) -> None:
    """Refuse formats that do not travel as one buffer of bytes.

    Raises:
        ValueError: MXFP8 on a GPU that cannot compute with it, blocks of 1 x 128.
        NotImplementedError: another format.
    """
    kind = type(parameter).__name__
    if kind == "MXFP8Tensor":
        capability = torch.cuda.get_device_capability(parameter.device)
        if capability < (10, 0):
            raise ValueError(
                f"Expected {name} in a format of this GPU, got MXFP8, which needs compute "
                f"capability 10.0, this one has {capability[0]}.{capability[1]}: use delayed, "
                "current or block scaling."
            )
    if kind not in _RAW:
        raise NotImplementedError(
            f"Expected {name} in one of {sorted(_RAW)} (delayed, current or block scaling), got "
            f"{kind}."
        )
    if not getattr(parameter, "_is_2D_scaled", True):
        raise ValueError(f"Expected {name} scaled in blocks of 128 x 128, got 1 x 128.")


def announce(module: nn.Module) -> None:
    """Tell a module of TransformerEngine that its weights are gathered anew for backward.

    It then quantises them anew, too, and keeps no full copy from forward to backward.
    """
    if hasattr(type(module), "is_fsdp2"):
        module._is_fsdp2 = True  # type: ignore[assignment]


def initial_value(parameter: torch.Tensor) -> torch.Tensor:
    """What a parameter holds; if quantised, what it was made from, if that was kept."""
    if not is_quantized(parameter):
        return parameter.detach()
    kept = getattr(parameter, "_high_precision_init_val", None)
    return cast("Any", parameter).dequantize() if kept is None else cast("torch.Tensor", kept)


class QuantizedWeights:
    """The quantised parameters of one group; bytes in, bytes out."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters: list[Any] = list(parameters)
        for parameter in self._parameters:
            if hasattr(parameter, "clear_high_precision_init_val"):
                parameter.clear_high_precision_init_val()
            empty = torch.empty(parameter.shape, dtype=torch.uint8, device=parameter.device)
            self.bind(parameter, empty)
            empty.untyped_storage().resize_(0)  # its shape is asked for also at rest
        self.drop_derived()

    @staticmethod
    def bind(parameter: Any, raw: torch.Tensor) -> None:
        """Make a parameter read its bytes from `raw` [its shape], uint8."""
        setattr(parameter, _RAW[type(parameter).__name__], raw)

    def drop_derived(self) -> None:
        """Free what was derived from the bytes."""
        for parameter in self._parameters:
            parameter.update_usage(rowwise_usage=True, columnwise_usage=False)

    def quantize(self, pieces: list[QuantizedPiece], group: dist.ProcessGroup) -> None:
        """Set scales over all ranks of `group`, and this rank's bytes; a collective.

        Args:
            pieces: of each parameter, this rank's.
            group: the ranks that hold the other elements.
        """
        from transformer_engine.pytorch.tensor.utils import quantize_master_weights

        mains, starts, raws = (list(column) for column in zip(*pieces, strict=True))
        quantize_master_weights(self._parameters, mains, starts, group, raws)
