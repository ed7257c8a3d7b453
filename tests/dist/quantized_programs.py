"""Quantised weights without TransformerEngine: a stand-in of its tensors, and programs with it.

The stand-in has what `fsdp_core.fsdp.quantized` uses of the real ones: class names, bytes in
`_data`, one scale a tensor in `_scale_inv`, a derived copy in `_transpose`, and the function that
quantises shards of main weights with a scale over all ranks. Its bytes are int8 numbers.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.pool import make_pool

ROWS, WIDTH, LARGEST = 4, 6, 127.0


class QuantizedTensor(torch.Tensor):
    """The base class, as `isinstance` asks for it."""


class Float8Tensor(QuantizedTensor):
    """Looks like bf16 of the shape of its bytes."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor) -> "Float8Tensor":
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        self._data, self._scale_inv, self._transpose = data, scale_inv, None
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten  # autograd's own: its edges are asked for by a view
        assert func in (aten.detach.default, aten.view.default), f"nobody should call {func}"
        return cls(args[0]._data, args[0]._scale_inv)

    def dequantize(self) -> torch.Tensor:
        """What the bytes stand for, bf16."""
        return (self._data.view(torch.int8).float() * self._scale_inv).bfloat16()

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        """Make or drop the derived copy."""
        assert rowwise_usage
        self._transpose = self._data.t().contiguous() if columnwise_usage else None


class MXFP8Tensor(Float8Tensor):
    """A format that the stand-in's GPU cannot do."""


class NVFP4Tensor(Float8Tensor):
    """A format that nobody knows."""


def to_bytes(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Quantised with one scale."""
    return (values.float() / (amax / LARGEST)).round().to(torch.int8).view(torch.uint8)


def quantize_master_weights(
    weights: list[Any], mains: list[Any], starts: list[Any], group: Any, raws: list[Any]
) -> None:
    """A scale over all ranks, then this rank's bytes."""
    for weight, main, start, raw in zip(weights, mains, starts, raws, strict=True):
        amax = torch.zeros(1) if main is None else main.bfloat16().float().abs().amax().reshape(1)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        weight._scale_inv.copy_(amax / LARGEST)
        if main is None:
            assert (start, raw) == (None, None)
        else:
            assert start % WIDTH == 0
            raw.copy_(to_bytes(main.bfloat16(), amax))


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """`transformer_engine`, as far as it goes."""
    names = [
        "",
        ".pytorch",
        ".pytorch.quantized_tensor",
        ".pytorch.tensor",
        ".pytorch.tensor.utils",
    ]
    modules: dict[str, Any] = {f"transformer_engine{n}": ModuleType(n or "te") for n in names}
    modules["transformer_engine.pytorch.quantized_tensor"].QuantizedTensor = QuantizedTensor
    utils = modules["transformer_engine.pytorch.tensor.utils"]
    utils.quantize_master_weights = quantize_master_weights
    with patch.dict(sys.modules, modules):
        yield


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y: torch.Tensor = x @ weight.dequantize().t()
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)  # derived, as on Hopper
        return grad @ weight.dequantize(), grad.t() @ x


class Linear(nn.Module):
    """A layer with a quantised weight and, beside it, a plain bias."""

    is_fsdp2 = False

    def __init__(self, rows: int, kind: type[Float8Tensor] = Float8Tensor) -> None:
        super().__init__()
        first = torch.randn(rows, WIDTH).bfloat16()
        amax = first.float().abs().amax().reshape(1)
        weight: Any = nn.Parameter(kind(to_bytes(first, amax), amax / LARGEST))
        weight._high_precision_init_val = first + 2**-9  # not what the bytes stand for
        weight.clear_high_precision_init_val = lambda: delattr(weight, "_high_precision_init_val")
        weight.mark = "kept"
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(rows, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, WIDTH] -> [n, rows]."""
        y: torch.Tensor = _Matmul.apply(x, self.weight) + self.bias
        return y


def build() -> nn.Sequential:
    """Three layers, two of them one unit, the same on every rank."""
    torch.manual_seed(3)
    first = nn.Sequential(Linear(WIDTH), nn.Tanh(), Linear(WIDTH))
    return nn.Sequential(first, nn.Tanh(), Linear(2))


def batch(step: int) -> torch.Tensor:
    """The same on every rank, so that sums over ranks are exact up to the last division."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()


def train_whole(steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and main weights, by hand."""
    with stand_in():
        model = build()
        parameters: list[Any] = list(model.parameters())
        mains = [
            nn.Parameter(getattr(p, "_high_precision_init_val", p.detach()).float())
            for p in parameters
        ]
        optimizer, losses = torch.optim.Adam(mains, lr=0.05), []
        for step in range(steps):
            for parameter, main in zip(parameters, mains, strict=True):
                if isinstance(parameter, Float8Tensor):
                    raw, flat = parameter._data.view(-1), main.detach().flatten()
                    quantize_master_weights([parameter], [flat], [0], None, [raw])
                else:
                    parameter.data.copy_(main.data)
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            for parameter, main in zip(parameters, mains, strict=True):
                main.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            losses.append(loss.detach())
    return losses, [main.data for main in mains]


def train_sharded(
    strategy: Any, pool: str, shape: tuple[int, ...], steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
    """The same, sharded; and what the group of the first layer's weight held."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    policy = MixedPrecisionPolicy(main_dtype=torch.float32, reduce_dtype=torch.float32)
    shared = make_pool(pool, Device("cpu"), persistent_on_miss=True)
    with stand_in():
        model = build()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy, strategy=strategy, pool=shared)
        root: Any = fully_shard(model, mesh=mesh, mp_policy=policy, strategy=strategy, pool=shared)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
        for step in range(steps):
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        group = next(g for g in root.fsdp_groups if g.dtypes.compute == torch.uint8)
        gathered: Any = group.unsharded[0]
        first = cast("Any", model[0])[0]
        found = {
            "bytes": gathered._data.dtype,
            "main": group.main_weight.dtype,
            "derived": gathered._transpose is not None,
            "at rest": gathered._data.untyped_storage().nbytes(),
            "kept": hasattr(gathered, "_high_precision_init_val"),
            "mark": first.weight.mark,
            "private": sorted(n for n in vars(first.weight) if n in ("_data", "_transpose")),
            "told": getattr(first, "_is_fsdp2", False),
        }
        mains = [cast("Any", p).full_tensor() for p in model.parameters()]
    return losses, mains, found


def compare(strategy: Any, pool: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Whether sharded training is whole training, bit for bit."""
    losses, mains = train_whole(6)
    sharded_losses, sharded_mains, found = train_sharded(strategy, pool, shape, 6)
    found["losses"] = torch.equal(torch.stack(losses), torch.stack(sharded_losses))
    found["mains"] = [torch.equal(a, b) for a, b in zip(mains, sharded_mains, strict=True)]
    found["trains"] = len({loss.item() for loss in losses})
    return found


def refuse(kind: str) -> str:
    """What wrapping a weight of this class says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = {each.__name__: each for each in (MXFP8Tensor, NVFP4Tensor)}
    with stand_in(), patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        model = nn.Sequential(Linear(2, kinds[kind]))
        try:
            fully_shard(model, mesh=mesh)
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"
