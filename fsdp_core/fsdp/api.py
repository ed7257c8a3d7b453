"""`fully_shard`: turn modules into FSDP units, innermost first, the root last.

Signature and methods are torch FSDP2's, so code written for it runs with another import;
`strategy`, `placements`, `pool`, `overlap` and `keep_grads` are on top. What differs is in
DESIGN.md beside this package.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp.collectives import Nest
from fsdp_core.fsdp.fsdp_module import FSDPModule, fsdp_class, units_in
from fsdp_core.fsdp.param_group import Owned, ParamGroup
from fsdp_core.fsdp.placement import Placements, placements_of
from fsdp_core.fsdp.pool import Pool, make_pool
from fsdp_core.fsdp.precision import GroupDtypes, MixedPrecisionPolicy
from fsdp_core.fsdp.quantized import check_supported, is_quantized
from fsdp_core.fsdp.schedule import Overlap, Schedule
from fsdp_core.fsdp.unit import Unit

_HELD = "_fsdp_held"
"""Set on a parameter that a unit has copied from: a second unit would train a second copy."""


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: None = None,
    ignored_params: set[nn.Parameter] | None = None,
    strategy: str | Sequence[str] = "optim_grads_params",
    placements: Placements | None = None,
    pool: Pool | str = "dynamic",
    overlap: Overlap | bool = True,
    keep_grads: bool = False,
) -> Any:
    """Make `module` an FSDP unit of the parameters that no inner unit holds, and return it.

    Args:
        module: gets the class `FSDP<its class>`; wrap inner modules first. A list of modules, none
            inside another, becomes one unit.
        mesh: one axis, or two: outer and inner. None: all ranks on one axis.
        reshard_after_forward: release gathered parameters between forward and backward. None: yes,
            except for the root.
        shard_placement_fn, offload_policy: of torch FSDP2; must be None.
        mp_policy: dtypes.
        ignored_params: parameters that stay as they are.
        strategy: what is cut over the mesh, see `placement`; one name, or one an axis.
        placements: the same spelled out, in place of `strategy`.
        pool: where full buffers come from: `dynamic`, `double`, `traced`, or a pool object; the
            root's pool serves all its units.
        overlap: two side streams, or what `Overlap` says; False: none. The root's holds.
        keep_grads: gradients keep their memory for ever, for graphs that outlive `zero_grad`.

    Raises:
        ValueError: an argument out of range; a module that is a unit, twice in the list, or inside
            another of it; a parameter that another unit holds, or that is not of floating point.
        RuntimeError: an inner unit is gathered, or has reductions under way.
        NotImplementedError: a parameter that does not travel as one buffer.
    """
    _refuse(shard_placement_fn, offload_policy, reshard_after_forward)
    modules = _listed(module)
    inner = units_in(*modules)
    _check_at_rest(inner)
    owned = _own_parameters(modules, ignored_params or set())
    mesh = mesh or _whole_mesh(owned)
    policy, device = mp_policy or MixedPrecisionPolicy(), _device_of(mesh)
    chosen = make_pool(pool, device, persistent_on_miss=True) if isinstance(pool, str) else pool
    nest = Nest(mesh, placements or placements_of(strategy, mesh.ndim))
    make = functools.partial(
        ParamGroup, nest=nest, device=device, pool=chosen, keep_grads=keep_grads
    )
    groups = [make(part, dtypes=dtypes) for dtypes, part in _partition(owned, policy).items()]
    unit = Unit(modules, groups, policy=policy, reshard_after_forward=reshard_after_forward)
    streams = overlap if isinstance(overlap, Overlap) else Overlap(2 if overlap else 0)
    schedule = Schedule([unit, *inner], device, chosen, streams)
    for each in modules:
        _become_unit(each, unit, device)
    _name_units(modules, schedule)
    return module


def _become_unit(module: nn.Module, unit: Unit, device: Device) -> None:
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            if buffer is not None and not buffer.is_meta:
                holder._buffers[name] = buffer.to(device.torch_device)
    module.__class__ = fsdp_class(cast("Any", type(module)))
    cast("FSDPModule", module)._fsdp_unit = unit


def _refuse(shard_placement_fn: object, offload_policy: object, reshard: object) -> None:
    if shard_placement_fn is not None:
        raise ValueError("Expected shard_placement_fn=None: parameters are cut by whole rows.")
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise ValueError(f"Expected offload_policy=None, got {offload_policy}.")
    if reshard is not None and not isinstance(reshard, bool):
        raise ValueError(
            f"Expected reshard_after_forward to be True, False or None, got {reshard!r}; for "
            "parameters cut inside a node only, use a mesh of two axes (HSDP, HFSDP)."
        )


def _device_of(mesh: DeviceMesh) -> Device:
    if mesh.ndim > 2:
        raise ValueError(f"Expected a mesh of one or two axes, got {mesh.ndim}.")
    is_cuda = mesh.device_type == "cuda"
    return Device(mesh.device_type, torch.cuda.current_device() if is_cuda else 0)


def _whole_mesh(owned: list[Owned]) -> DeviceMesh:
    """All ranks on one axis, of the accelerator if there is one and the parameters allow it."""
    has_accelerator = torch.cuda.is_available() and dist.get_backend() != "gloo"
    is_cuda = has_accelerator or any(o.current.is_cuda for o in owned)
    return init_device_mesh("cuda" if is_cuda else "cpu", (dist.get_world_size(),))


def _listed(given: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = list(given) if isinstance(given, list | tuple) else [given]
    if not modules:
        raise ValueError("Expected a module or several, got an empty list.")
    if len(set(modules)) != len(modules):
        raise ValueError("Expected each module once in the list, got one twice.")
    for module in modules:
        if isinstance(module, FSDPModule):
            raise ValueError(f"Expected a module that is no unit yet, got {type(module).__name__}.")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"Expected a module with a forward, got {type(module).__name__}.")
        if not set(module.modules()).isdisjoint(set(modules) - {module}):
            raise ValueError("Expected modules that do not hold each other in the list.")
    return modules


def _check_at_rest(inner: list[Unit]) -> None:
    for unit in inner:
        if unit.holds_buffers or unit.schedule.has_reductions:
            raise RuntimeError(
                f"Expected inner units at rest, got {type(unit.modules[0]).__name__} gathered or "
                "with gradients to reduce; reshard it, or finish the backward pass, before "
                "wrapping around it."
            )


def _own_parameters(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[Owned]:
    """Parameters of the modules that no inner unit holds, with every place that holds each."""
    # Modules that have been seen to, or that an inner unit has: not visited.
    seen: set[nn.Module] = {
        m for top in modules for m in top.modules() if isinstance(m, FSDPModule)
    }
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for top in modules:
        for prefix, holder in top.named_modules(memo=seen):
            for attribute, parameter in holder._parameters.items():
                if parameter is not None and parameter not in ignored:
                    places.setdefault(parameter, []).append((holder, attribute))
                    names.setdefault(parameter, f"{prefix}.{attribute}".lstrip("."))
    for parameter, name in names.items():
        if is_quantized(parameter):
            check_supported(name, parameter)
        elif hasattr(parameter, "fsdp_pre_all_gather"):
            raise NotImplementedError(
                f"Expected {name} to be gathered as it is, got a {type(parameter).__name__} with "
                "an all-gather extension, which would be ignored."
            )
        if not parameter.is_floating_point():
            raise ValueError(f"Expected {name} to be of floating point, got {parameter.dtype}.")
        if hasattr(parameter, _HELD):
            raise ValueError(
                f"Expected {name} to be held by one unit, got a parameter shared with another; "
                "wrap the modules that share it as one unit: fully_shard([a, b])."
            )
    return [Owned(tuple(where)) for where in places.values()]


def _partition(owned: list[Owned], policy: MixedPrecisionPolicy) -> dict[GroupDtypes, list[Owned]]:
    """A group of parameters for each set of dtypes that the policy gives them; marks them held."""
    groups: dict[GroupDtypes, list[Owned]] = {}
    for held in owned:
        parameter = held.current
        setattr(parameter, _HELD, True)
        is_fp8 = is_quantized(parameter)
        compute = policy.param_dtype or parameter.dtype
        # What fp8 is made from is gone after a step, so the main weight is exact: float32.
        main = policy.main_dtype or (torch.float32 if is_fp8 else parameter.dtype)
        reduce = policy.reduce_dtype or compute
        dtypes = GroupDtypes(main, torch.uint8 if is_fp8 else compute, reduce)
        groups.setdefault(dtypes, []).append(held)
    return groups


def _name_units(roots: list[nn.Module], schedule: Schedule) -> None:
    """Give every unit and parameter its dotted name from the root wrapped so far."""
    names = {module: name for root in reversed(roots) for name, module in root.named_modules()}
    for unit in schedule.units:
        unit.name = names[unit.modules[0]] or "root"
        for number, group in enumerate(unit.groups):
            group.name = f"{unit.name} group {number}" if number else unit.name
            first = [owned.places[0] for owned in group.owned]
            group.names = [f"{names[module]}.{name}".lstrip(".") for module, name in first]
