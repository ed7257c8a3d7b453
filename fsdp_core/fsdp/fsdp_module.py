"""What `fully_shard` adds to a module: torch FSDP2's methods, and a few of our own."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.schedule import Schedule
from fsdp_core.fsdp.unit import Unit


class UnshardHandle:
    """A gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Let the current stream use the gathered parameters."""
        if self._unit is not None:
            self._unit.wait_unshard()
            self._unit = None


class FSDPModule:
    """A module whose parameters are sharded. Methods named in torch FSDP2 do what they do there."""

    _fsdp_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the wrapped class: `model.layers[1:]` makes a new container of its own type."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refused: a copy would share buffers and hooks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "Expected a plain module to copy, got an FSDP unit; copy before sharding."
        )

    # ---- weights

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; with `async_op` only begin to, and return a handle."""
        self._fsdp_unit.unshard()
        if async_op:
            return UnshardHandle(self._fsdp_unit)
        self._fsdp_unit.wait_unshard()
        return None

    def reshard(self) -> None:
        """Release this unit's gathered parameters."""
        self._fsdp_unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are released between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"Expected a bool, got {reshard_after_forward!r}.")
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are released after backward."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this unit's parameters (an embedding's does not)."""
        self._fsdp_unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """Units to gather ahead when this one's forward begins, in place of the recorded next."""
        self._fsdp_unit.forward_prefetch = [_unit_of(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: "list[FSDPModule]") -> None:
        """Units to gather ahead when this one's backward begins, in place of the recorded next."""
        self._fsdp_unit.backward_prefetch = [_unit_of(module) for module in modules]

    # ---- gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward pass is the last before the optimizer."""
        self.fsdp_schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward communicates gradients; without, they accumulate at full size."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward goes on from the inner to the outer mesh axis."""
        for unit in self._units(recurse):
            unit.requires_all_reduce = requires_all_reduce

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not communicate gradients."""
        units = self._units(recurse=True)
        before = [(unit.requires_gradient_sync, unit.requires_all_reduce) for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, (sync, all_reduce) in zip(units, before, strict=True):
                unit.requires_gradient_sync, unit.requires_all_reduce = sync, all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by `factor` in place of the number of ranks."""
        for group in self._fsdp_unit.groups:
            group.gradients.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient gets zeros, where another of its unit has one."""
        for unit in self._units(recurse):
            for group in unit.groups:
                group.gradients.reduce_unused = reduce_scatter_unused_params

    def set_check_finite_grads(self, check: bool, *, recurse: bool = True) -> None:
        """Whether the end of backward raises if a gradient is not finite, naming it; waits."""
        for unit in self._units(recurse):
            unit.check_finite_grads = check

    def zero_main_grads(self) -> None:
        """Drop every gradient of the root's units, with sums that are not reduced yet.

        Each `grad` is None then; memory that `keep_grads` keeps stays.
        """
        schedule = self.fsdp_schedule
        schedule.drain(keep=0)
        for group in self.fsdp_groups:
            group.gradients.forget(schedule.device.current_stream())
            for parameter in group.sharded:
                parameter.grad = None

    # ---- state

    @property
    def fsdp_schedule(self) -> Schedule:
        """Streams, pool and units of the root that this unit belongs to."""
        return self._fsdp_unit.schedule

    @property
    def fsdp_groups(self) -> list[ParamGroup]:
        """Parameter groups of all units of the root."""
        return [group for unit in self.fsdp_schedule.units for group in unit.groups]

    def refresh_model_weights(self) -> None:
        """Tell all units of the root that main weights have changed; copies of them follow now.

        A `torch.optim.Optimizer` does so by itself.
        """
        with torch.no_grad():
            for group in self.fsdp_groups:
                group.main_weight_changed()

    def reset_iter_state(self) -> None:
        """Put right what a forward or backward that raised has left behind.

        The next forward of the root does the same by itself.
        """
        self.fsdp_schedule.recover()
        self.fsdp_schedule.abandon_backward()

    @contextlib.contextmanager
    def synchronized_init(self) -> Iterator[None]:
        """Parameters initialised inside are those that the first rank of the mesh would have.

        Initialising a sharded parameter draws the whole one, so equal generators give every rank
        its rows of one tensor. Inside, all ranks have the first rank's generators; afterwards each
        has its own again.
        """
        schedule = self.fsdp_schedule
        device, own = schedule.device, schedule.device.rng_states()
        mesh = self.fsdp_groups[0].nest.mesh
        shared = [state.to(device.torch_device, copy=True) for state in own]
        for state, axis in itertools.product(shared, range(mesh.ndim)):
            group = mesh.get_group(axis)
            dist.broadcast(state, src=dist.get_global_rank(group, 0), group=group)
        device.set_rng_states([state.cpu() for state in shared])
        try:
            yield
        finally:
            device.set_rng_states(own)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """See `torch.nn.Module._apply`: `to`, `to_empty` and the like."""
        self.reshard()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        with torch.no_grad():
            for group in self._fsdp_unit.groups:
                group.readopt()
        return result

    def _units(self, recurse: bool) -> list[Unit]:
        return units_in(cast("nn.Module", self)) if recurse else [self._fsdp_unit]


def units_in(*modules: nn.Module) -> list[Unit]:
    """The units in `modules`, outermost first, each once."""
    inside = (m for module in modules for m in module.modules())
    return list(dict.fromkeys(m._fsdp_unit for m in inside if isinstance(m, FSDPModule)))


@functools.cache
def fsdp_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The class `FSDP<plain>`."""
    return type(f"FSDP{plain.__name__}", (FSDPModule, plain), {})


def _unit_of(module: object) -> Unit:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"Expected FSDP units to prefetch, got {type(module).__name__}.")
    return module._fsdp_unit


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method of `module` as a forward: gather before it, release after it.

    Does nothing for a module that is no unit.

    Raises:
        ValueError: no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"Expected a method {method_name!r} of {type(module).__name__}, got none.")
    method, unit = getattr(module, method_name), module._fsdp_unit
    pre, post = torch.compiler.disable(unit.pre_forward), torch.compiler.disable(unit.post_forward)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pre(args, kwargs)
        return post(method(*args, **kwargs))

    setattr(module, method_name, wrapped)
