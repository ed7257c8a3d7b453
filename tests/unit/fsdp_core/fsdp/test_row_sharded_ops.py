"""Operators on `RowSharded` as one rank of three runs them: what works, what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.fsdp.row_sharded import RowSharded
from tests.unit.fsdp_core.fsdp.row_pieces import filled, parameter_of, spec

REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.mm": lambda t: t @ t,
    "aten.select": lambda t: t[0],
    "aten.view": lambda t: t.view(-1),
    "aten.t": lambda t: t.t(),
    "aten.cat": lambda t: torch.cat([t, t]),
    "aten.max": lambda t: t.max(),
    "aten.mean": lambda t: t.mean(),
    "aten.sum": lambda t: t.sum(0),
    "aten.linalg_vector_norm": lambda t: t.norm(dim=1),
    "aten._foreach_max": lambda t: torch._foreach_max([t]),
    "aten._foreach_mul": lambda t: torch._foreach_mul([t], t),
    "aten.rand_like": torch.rand_like,
    "aten.bernoulli": lambda t: t.bernoulli(),
    "aten.normal": lambda t: torch.normal(t, t),
    "aten.bernoulli_": lambda t: t.bernoulli_(t),
    "aten.bernoulli_.Tensor": lambda t: torch.zeros(7, 2).bernoulli_(t),
    "aten.new_zeros": lambda t: t.new_zeros(7, 2),
    "aten.new_empty": lambda t: t.new_empty(4, 2),
    "aten.eye": lambda t: nn.init.eye_(t),
    "aten.cumsum": lambda t: t.cumsum(1),
    "aten.index_put_": lambda t: t.__setitem__(t > 0, torch.ones(3)),
    "aten.index_put_.default": lambda t: t.__setitem__((t > 0).to_local(), 1.0),
    "order -1": lambda t: t.norm(-1),
}


@pytest.mark.parametrize("operator", list(REFUSED))
def test_what_needs_other_ranks_rows_is_refused(trio: DeviceMesh, operator: str) -> None:
    """An operator that is not elementwise raises, names itself and says what to use instead."""
    tensor = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    with pytest.raises(NotImplementedError, match=r"use \.full_tensor\(\)") as caught:
        REFUSED[operator](tensor)
    assert operator in str(caught.value)


def test_another_memory_format_is_refused(trio: DeviceMesh) -> None:
    """Rows lie one after another, so a copy in channels-last order has no place for them."""
    tensor = filled(spec(trio, (7, 2, 3, 3), 0, 1, 5, 7))
    with pytest.raises(NotImplementedError, match="memory format"):
        tensor.to(torch.float64, memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="memory format"):
        tensor.clone(memory_format=torch.channels_last)
    assert tensor.to(torch.float64, memory_format=torch.contiguous_format).dtype == torch.float64


@pytest.mark.parametrize("shape", [(4, 2), (1, 2), (2,), (7, 1), (8, 2), (1, 1, 1), (2, 7)])
def test_a_plain_tensor_of_another_shape_is_refused(
    trio: DeviceMesh, shape: tuple[int, ...]
) -> None:
    """Not even a shape that fits this rank's rows passes, because it fits no other rank's."""
    tensor = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    plain = torch.ones(shape)
    for call in (
        lambda: tensor.mul_(plain),
        lambda: tensor * plain,
        lambda: tensor.copy_(plain),
        lambda: torch._foreach_add_([tensor], [plain]),
        lambda: torch.where(tensor > 0, tensor, plain),
    ):
        with pytest.raises(ValueError, match="one element or of the global shape"):
            call()
    assert tensor.to_local().eq(2.0).all()


def test_a_plain_tensor_of_the_global_shape_gives_its_rows(trio: DeviceMesh) -> None:
    """Beside a tensor of the global shape each rank uses its own rows of it."""
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    full = torch.arange(14.0).view(7, 2)
    tensor = filled(layout)
    assert (tensor * full).to_local().equal(full[1:5] * 2)
    assert tensor.copy_(full) is tensor
    assert tensor.to_local().equal(full[1:5])
    torch._foreach_mul_([tensor, filled(layout)], [full, full])
    assert tensor.to_local().equal(full[1:5] ** 2)
    assert tensor.add_(torch.tensor([1.0])).to_local().equal(full[1:5] ** 2 + 1)


def test_tensors_of_different_layouts_do_not_mix(trio: DeviceMesh) -> None:
    """The same global shape and even the same local shape are not enough."""
    here, there = spec(trio, (7, 2), 0, 1, 5, 7), spec(trio, (7, 2), 0, 2, 6, 7)
    one, other = filled(here), filled(there)
    assert one.to_local().shape == other.to_local().shape
    for call in (
        lambda: one + other,
        lambda: one.copy_(other),
        lambda: torch._foreach_add_([one, one], [one, other]),
        lambda: torch.lerp(one, one, other),
    ):
        with pytest.raises(ValueError, match="one layout"):
            call()
    assert (one + filled(spec(trio, (7, 2), 0, 1, 5, 7))).to_local().eq(4.0).all()


def test_a_plain_tensor_is_never_written_to(trio: DeviceMesh) -> None:
    """A sharded argument cannot fill a plain tensor, which would get some rows on each rank."""
    tensor, plain = filled(spec(trio, (7, 2), 0, 1, 5, 7)), torch.zeros(7, 2)
    for call in (
        lambda: plain.copy_(tensor),
        lambda: plain.add_(tensor),
        lambda: torch.add(tensor, 1.0, out=plain),
        lambda: torch._foreach_copy_([plain], [tensor]),
        lambda: torch._foreach_add_([tensor, plain], [tensor, tensor]),
    ):
        with pytest.raises(ValueError, match="write to"):
            call()
    assert plain.eq(0).all()


def test_lists_may_hold_plain_tensors_at_places_of_their_own(trio: DeviceMesh) -> None:
    """Optimizers group plain and sharded parameters of a dtype into the same lists."""
    tensor, plain = filled(spec(trio, (7, 2), 0, 1, 5, 7)), torch.ones(3)
    torch._foreach_add_([tensor, plain], [tensor.clone(), plain.clone()])
    assert tensor.to_local().eq(4.0).all()
    assert plain.eq(2.0).all()
    doubled = torch._foreach_mul([plain, tensor], 2.0)
    assert [type(t) for t in doubled] == [torch.Tensor, RowSharded]


def test_a_scalar_that_lies_elsewhere_promotes_as_one_that_is_here(trio: DeviceMesh) -> None:
    """A result has the same dtype and shape where a 0-d parameter is and where it is not."""
    here, elsewhere = spec(trio, (), 0, 0, 1, 1), spec(trio, (), 0, 1, 1, 1)
    for other in (torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64), 3.0):
        present = filled(here, dtype=torch.bfloat16) * other
        absent = filled(elsewhere, dtype=torch.bfloat16) * other
        assert (present.dtype, present.shape) == (absent.dtype, absent.shape)
        assert present.to_local().shape == ()
        assert absent.to_local().shape == (0,)
    with pytest.raises(ValueError, match="one element"):
        filled(elsewhere) * torch.ones(1)


@pytest.mark.parametrize("empty_grads", [True, False], ids=["empty gradients", "no gradients"])
@pytest.mark.parametrize("mode", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_optimizers_step_over_parameters_without_rows(
    trio: DeviceMesh, mode: dict[str, Any], empty_grads: bool
) -> None:
    """Parameters with rows move as alone, whether those without have a gradient or None."""
    alone = parameter_of(torch.full((4, 2), 2.0))
    parameters = [
        parameter_of(filled(spec(trio, shape, *bounds)))
        for shape, bounds in [
            ((3, 2), (0, 3, 3, 3)),
            ((7, 2), (0, 1, 5, 7)),
            ((), (0, 1, 1, 1)),
            ((), (0, 0, 1, 1)),
        ]
    ]
    for parameter in [alone, *parameters]:
        has_rows = parameter is alone or bool(parameter.to_local().numel())
        parameter.grad = torch.full_like(parameter, 0.3) if has_rows or empty_grads else None
    for group in ([alone], parameters):
        optimizer = torch.optim.AdamW(group, lr=0.1, **mode)
        for _ in range(2):
            optimizer.step()
    assert parameters[1].to_local().equal(alone.detach())
    assert parameters[3].to_local().equal(alone.detach()[0, 0])
    assert [p.to_local().numel() for p in parameters] == [0, 8, 0, 1]


def test_no_fused_kernel_sees_a_piece_without_elements(
    trio: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused step over nothing but empty pieces runs no kernel at all."""
    from fsdp_core.fsdp import row_sharded

    empty = parameter_of(filled(spec(trio, (3, 2), 0, 3, 3, 3)))
    full = parameter_of(filled(spec(trio, (3, 2), 0, 0, 3, 3)))
    seen: list[list[int]] = []

    class Kernel:
        def __init__(self, func: Any) -> None:
            self.func, self._schema = func, func._schema

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append([t.numel() for t in args[0]])
            return self.func(*args, **kwargs)

    fused = torch.ops.aten._fused_adamw_.default
    rule = row_sharded._rule_of(fused)
    monkeypatch.setitem(row_sharded._rules, fused, rule._replace(func=Kernel(fused)))
    for group in ([empty, full, empty], [empty]):
        for parameter in group:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(list(dict.fromkeys(group)), fused=True).step()
    assert seen == [[6]]


def test_a_mask_of_its_layout_sets_elements(trio: DeviceMesh) -> None:
    """`tensor[mask] = number` writes where the mask of this rank's rows holds."""
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    tensor = filled(layout).copy_(torch.arange(14.0).view(7, 2))
    for number in (-1.0, torch.tensor([-1.0])):
        tensor[tensor > 4] = number
    assert tensor.to_local().flatten().tolist() == [2, 3, 4, -1, -1, -1, -1, -1]


def test_autograd_sees_elementwise_operators(trio: DeviceMesh) -> None:
    """Gradients of elementwise operators and of .to_local() are tensors of the layout."""
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    for loss in (
        lambda p: (p * p).to_local().sum(),
        lambda p: p.to_local().square().sum(),
    ):
        parameter = parameter_of(filled(layout, 3.0))
        loss(parameter).backward()
        assert isinstance(parameter.grad, RowSharded)
        assert parameter.grad.to_local().eq(6.0).all()
