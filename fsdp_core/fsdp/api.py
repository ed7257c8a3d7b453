"""`fully_shard`: turn modules into FSDP units, innermost first, the root last.

The signature keeps torch FSDP2's first arguments; `strategy` and `pool` are ours. Differences from
FSDP2 that matter here: parameters at rest are plain (not DTensor) views of a float32 main-weight
shard with whole rows, `grad` is a persistent view that `zero_grad` zeroes in place, and the compute
dtype's copy is refreshed by `refresh_model_weights` after an optimizer step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.config import STRATEGIES
from fsdp_core.device import Device
from fsdp_core.fsdp.module import Schedule, Unit
from fsdp_core.fsdp.param_group import GroupPolicy, Owned, ParamGroup
from fsdp_core.fsdp.pool import Pool, make_pool

_TAKEN = "_fsdp_taken"
"""Set on a parameter that a unit has copied from: a second unit would train a second copy."""


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """`param_dtype` computes and is gathered, `reduce_dtype` is reduced; None means float32."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class FSDPModule:
    """What `fully_shard` adds to a module's class."""

    _fsdp_unit: Unit

    def unshard(self) -> None:
        """Gather this unit's parameters and wait for them."""
        self._fsdp_unit.unshard()
        self._fsdp_unit.wait_unshard()

    def reshard(self) -> None:
        """Release this unit's gathered parameters."""
        self._fsdp_unit.reshard()

    @property
    def fsdp_schedule(self) -> Schedule:
        """Streams, pool and units of the root that this unit belongs to."""
        return self._fsdp_unit.schedule

    def zero_main_grads(self) -> None:
        """Zero the gradients of all units of the root, in place."""
        for unit in self.fsdp_schedule.units:
            unit.group.zero_grad()

    def refresh_model_weights(self) -> None:
        """Cast main weights to the compute dtype in all units of the root."""
        for unit in self.fsdp_schedule.units:
            unit.group.refresh_model_weight()


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    strategy: str = "optim_grads_params",
    pool: Pool | None = None,
) -> nn.Module:
    """Make `module` an FSDP unit of the parameters that no inner unit holds, and return it.

    Args:
        module: gets the class `FSDP<its class>`; wrap inner modules first.
        mesh: one-axis mesh whose ranks share the unit.
        reshard_after_forward: release gathered parameters between forward and backward.
        mp_policy: dtypes of compute and of the reduction.
        strategy: `no_shard` or `optim_grads_params`.
        pool: where full buffers come from; the root's pool serves all its units. Default: double.

    Raises:
        ValueError: unknown strategy, a mesh of several axes, wrapped twice, no parameters, or
            parameters that are frozen, not of floating point, or shared between modules.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"Expected a strategy of {STRATEGIES}, got {strategy!r}.")
    if mesh.ndim != 1:
        raise ValueError(f"Expected a mesh of one axis, got {mesh.ndim} axes.")
    if isinstance(module, FSDPModule):
        raise ValueError(f"Expected a module that is no unit yet, got {type(module).__name__}.")
    inner = [m._fsdp_unit for m in module.modules() if isinstance(m, FSDPModule)]
    owned = list(_unheld_parameters(module, inner))
    if not owned:
        raise ValueError(f"Expected {type(module).__name__} to hold parameters of its own.")
    _check_trainable(module, owned)
    policy = mp_policy or MixedPrecisionPolicy()
    device = Device(mesh.device_type, torch.cuda.current_device() if _on_cuda(mesh) else 0)
    schedule = Schedule(device, pool or make_pool("double", device, persistent_on_miss=True))
    group = ParamGroup(
        owned,
        group=mesh.get_group(),
        device=device,
        pool=schedule.pool,
        policy=GroupPolicy(
            sharded=strategy == "optim_grads_params",
            compute_dtype=policy.param_dtype or torch.float32,
            reduce_dtype=policy.reduce_dtype or torch.float32,
        ),
    )
    unit = Unit(module, group, schedule, reshard_after_forward=reshard_after_forward)
    for other in inner:
        schedule.adopt(other)
    module.__class__ = type(f"FSDP{type(module).__name__}", (FSDPModule, type(module)), {})
    cast("FSDPModule", module)._fsdp_unit = unit
    _name_units(module, schedule)
    return module


def _on_cuda(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cuda"


def _unheld_parameters(module: nn.Module, inner: list[Unit]) -> Iterator[Owned]:
    held = {id(owned.module): owned.module for unit in inner for owned in unit.group.owned}
    for child in module.modules():
        if id(child) in held:
            continue
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                yield Owned(child, attribute)


def _check_trainable(module: nn.Module, owned: list[Owned]) -> None:
    """Refuse what would silently change its meaning, then mark the parameters as taken."""
    names = {id(child): name for name, child in module.named_modules()}
    seen: set[int] = set()
    for held in owned:
        name, parameter = f"{names[id(held.module)]}.{held.attribute}".lstrip("."), held.current
        if not (parameter.requires_grad and parameter.is_floating_point()):
            raise ValueError(
                f"Expected {name} to be of floating point with requires_grad, got "
                f"{parameter.dtype} with requires_grad={parameter.requires_grad}."
            )
        if id(parameter) in seen or hasattr(parameter, _TAKEN):
            raise ValueError(
                f"Expected {name} to be held once, got a parameter shared with another."
            )
        seen.add(id(parameter))
    for held in owned:
        setattr(held.current, _TAKEN, True)


def _name_units(root: nn.Module, schedule: Schedule) -> None:
    """Give every unit and parameter its dotted name from the root wrapped so far."""
    names = {id(module): name for name, module in root.named_modules()}
    for unit in schedule.units:
        unit.name = names[id(unit.module)] or "root"
        unit.group.names = [
            f"{names[id(o.module)]}.{o.attribute}".lstrip(".") for o in unit.group.owned
        ]
