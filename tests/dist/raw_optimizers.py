"""Optimizers whose kernels are given addresses, on the CPU: numpy over the memory at `data_ptr()`.

    BlindAdam    takes every parameter for the memory that it says it has
    FusedAdam    finds rows as TransformerEngine's FusedAdam does: in DTensors, by their
                 `_local_tensor`, and lays its states out as DTensors by the parameter's placements

What they compute is the same, element by element in float32, so bits are due between them.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

BETA1, BETA2, EPS = np.float32(0.9), np.float32(0.99), np.float32(1e-8)


def _memory(tensor: torch.Tensor) -> Any:
    """The float32 at a tensor's address, as many as it has elements; the address is C++'s."""
    assert (tensor.dtype, tensor.is_contiguous()) == (torch.float32, True)
    pointer = ctypes.cast(torch.Tensor.data_ptr(tensor), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, shape=(tensor.numel(),))


def _kernel(tensors: list[torch.Tensor], lr: float, step: int) -> None:
    """Adam of parameter, gradient and moments, in place."""
    parameter, grad, average, square = map(_memory, tensors)
    average[:] = BETA1 * average + (1 - BETA1) * grad
    square[:] = BETA2 * square + (1 - BETA2) * grad * grad
    corrected = average / np.float32(1 - BETA1**step)
    scale = np.sqrt(square / np.float32(1 - BETA2**step)) + EPS
    parameter -= np.float32(lr) * corrected / scale


class BlindAdam(torch.optim.Optimizer):
    """Adam that takes each tensor's address, and knows no DTensor."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        """One kernel a parameter; states are made for all, also for those without a gradient."""
        del closure, grad_scaler
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {key: self.new_state(p) for key in ("exp_avg", "exp_avg_sq")}
                if p.grad is not None:
                    tensors = [p.data, p.grad.data, *self.state[p].values()]
                    _kernel(self.rows(tensors), group["lr"], group["step"])

    def new_state(self, p: Any) -> torch.Tensor:
        """Zeros laid out as a parameter."""
        return torch.zeros_like(p)

    def rows(self, tensors: list[Any]) -> list[torch.Tensor]:
        """What the kernel gets."""
        return tensors


class FusedAdam(BlindAdam):
    """The same that looks for rows in DTensors."""

    # By which it is known.
    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(self, parameters: Any, lr: float = 0.1, *, dtype: Any = torch.float32) -> None:
        super().__init__(parameters, lr)
        self.name_to_dtype_map = {"exp_avg": dtype, "exp_avg_sq": dtype}

    def new_state(self, p: Any) -> torch.Tensor:
        """Zeros laid out as a parameter."""
        if not isinstance(p, DTensor):
            return torch.zeros_like(p)
        zeros = torch.zeros_like(p._local_tensor)
        return DTensor.from_local(
            zeros, p.device_mesh, p.placements, shape=p.size(), stride=p.stride()
        )

    def rows(self, tensors: list[Any]) -> list[torch.Tensor]:
        """What the kernel gets."""
        assert len({isinstance(tensor, DTensor) for tensor in tensors}) == 1
        assert all(tensor.numel() for tensor in tensors)  # TransformerEngine's do wrong over none
        return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
