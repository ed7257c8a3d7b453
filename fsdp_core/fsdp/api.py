"""`fully_shard`: turn modules into FSDP units, innermost first, the root last; and its methods.

Signature and methods are torch FSDP2's, so code written for it runs with another import;
`strategy`, `pool`, `overlap` and `keep_grads` are on top. docs/ARCHITECTURE.md says what differs.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core.device import Device
from fsdp_core.dispatch import opens_itself
from fsdp_core.fsdp.dtypes import GroupDtypes, MixedPrecisionPolicy, dtypes_of
from fsdp_core.fsdp.extension import ExtendedGroup, is_extended
from fsdp_core.fsdp.layout import Nest, joined_mesh, placements_of
from fsdp_core.fsdp.param_group import Owned, ParamGroup
from fsdp_core.fsdp.pool import Pool, make_pool
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.fsdp.unit import Schedule, Unit

_HELD = "_fsdp_held"
"""Set on a parameter that a unit has copied from: a second unit would train a second copy."""

_KNOWN = (DTensor, RowSharded, FakeTensor)
"""Tensors that hold others and lose nothing as rows of a flat buffer."""


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: torch_fsdp.MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    strategy: str | Sequence[str] = "optim_grads_params",
    pool: Pool | str = "dynamic",
    overlap: int = 2,
    keep_grads: bool = False,
) -> Any:
    """Make `module` an FSDP unit of the parameters that no inner unit holds, and return it.

    module: gets the class `FSDP<its class>`; wrap inner modules first. A list of modules, none
        inside another, becomes one unit.
    mesh: one axis, or two: outer and inner. None: all ranks on one axis.
    reshard_after_forward: release gathered parameters between forward and backward. None: yes,
        except for the root. A number that divides the inner axis: 1 is False, else True.
    shard_placement_fn: None or a Shard for each: of which dim ranks have slices, in place of 0.
    offload_policy: `OffloadPolicy()`; `CPUOffloadPolicy()` on a mesh of CPU ranks.
    mp_policy: dtypes; torch's own policy, or this one, which has one more.
    ignored_params: parameters that stay as they are.
    strategy: what is cut over the mesh, see `layout`; one name, or one an axis.
    pool: where full buffers come from: `dynamic`, `double`, `traced`, or a pool object; the root's
        pool serves all its units.
    overlap: side streams of communication. 2: gathers and reductions on one each; 1: on one, with
        one gradient buffer in place of two; 0: on the current stream, nothing gathered ahead. The
        root's holds.
    keep_grads: gradients keep their memory for ever, for graphs that outlive `zero_grad`.
    Raises ValueError: an argument, module or parameter that cannot be, see the message.
    Raises RuntimeError: an inner unit is gathered, or has reductions under way.
    Raises NotImplementedError: what the table of docs/ARCHITECTURE.md refuses, naming the
        parameter.
    """
    modules = _listed(module)
    inner = units_in(*modules)
    _check_at_rest(inner)
    mesh = mesh or _whole_mesh(modules)
    nest = Nest(mesh, placements_of(strategy, mesh.ndim))
    owned = _own_parameters(modules, ignored_params or set(), shard_placement_fn, nest)
    _check_options(offload_policy, mesh, overlap)
    reshard_after_forward = _reshards(reshard_after_forward, mesh)
    policy, device = mp_policy or MixedPrecisionPolicy(), _device_of(mesh)
    chosen = make_pool(pool, device, persistent_on_miss=True) if isinstance(pool, str) else pool
    groups = [
        kind(part, nest, device, chosen, policy, keep_grads=keep_grads)
        for kind, part in _partition(owned, policy)
    ]
    unit = Unit(modules, groups, policy=policy, reshard_after_forward=reshard_after_forward)
    schedule = Schedule([unit, *inner], device, chosen, overlap)
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
    # By this torch's composable `replicate` knows whose parameters to leave alone.
    vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = None
    cast("FSDPModule", module)._fsdp_unit = unit


def _dim_of(name: str, parameter: nn.Parameter, cut: Shard | None, ranks: int) -> int:
    """Of which slices are cut over so many ranks, as `shard_placement_fn` says."""
    if cut is None:
        return 0
    num_dims = max(parameter.ndim, 1)
    if not isinstance(cut, Shard):
        raise ValueError(f"Expected a Shard or None for {name}, got {cut!r}.")
    if not -num_dims <= cut.dim < num_dims:
        raise ValueError(f"Expected a dimension of {name} {tuple(parameter.shape)}, got {cut}.")
    dim = cut.dim % num_dims
    if dim and parameter.shape[dim] % ranks:
        raise NotImplementedError(
            f"Expected a dim of {name} {tuple(parameter.shape)} that {ranks} ranks divide, got "
            f"{cut}; only Shard(0) cuts unevenly."
        )
    return dim


def _check_inner(name: str, parameter: DTensor, mesh: DeviceMesh) -> None:
    """A parameter that tensor parallelism has cut."""
    placements = parameter.placements
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise NotImplementedError(
            f"Expected {name} to be cut by Shard and Replicate, as parallelize_module does, got "
            f"{placements}."
        )
    try:
        joined_mesh(mesh, parameter.device_mesh)
    except (RuntimeError, AssertionError, ValueError, TypeError) as wrong:
        raise ValueError(
            f"Expected {name} on an axis of the mesh whose other axes {mesh} has, got "
            f"{parameter.device_mesh}: {wrong}"
        ) from wrong


def _check_options(policy: object, mesh: DeviceMesh, overlap: int) -> None:
    if isinstance(overlap, bool) or overlap not in (0, 1, 2):
        raise ValueError(f"Expected overlap 0, 1 or 2 side streams, got {overlap!r}.")
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise ValueError(f"Expected an OffloadPolicy, got {policy!r}.")
    if isinstance(policy, CPUOffloadPolicy) and mesh.device_type != "cpu":
        raise NotImplementedError(
            f"Expected OffloadPolicy() on {mesh.device_type}, got {policy!r}: weights rest there."
        )


def _reshards(given: bool | int | None, mesh: DeviceMesh) -> bool | None:
    """Whether to release between forward and backward; see `fully_shard`."""
    if given is None or isinstance(given, bool):
        return given
    ranks = mesh.size(mesh.ndim - 1)
    if not isinstance(given, int) or given < 1 or ranks % given:
        raise ValueError(
            f"Expected reshard_after_forward to be a bool, None or a divisor of {ranks} ranks, "
            f"got {given!r}."
        )
    if 1 < given < ranks:
        warnings.warn(
            f"reshard_after_forward={given} releases as True does: backward gathers over all "
            f"{ranks} ranks. Weights cut inside a node only: a mesh of two axes, see `strategy`.",
            stacklevel=3,
        )
    return given > 1


def _device_of(mesh: DeviceMesh) -> Device:
    if mesh.ndim > 2:
        raise ValueError(f"Expected a mesh of one or two axes, got {mesh.ndim}.")
    is_cuda = mesh.device_type == "cuda"
    return Device(mesh.device_type, torch.cuda.current_device() if is_cuda else 0)


def _whole_mesh(modules: list[nn.Module]) -> DeviceMesh:
    """All ranks on one axis, of the accelerator if there is one and the parameters allow it."""
    has_accelerator = torch.cuda.is_available() and dist.get_backend() != "gloo"
    is_cuda = has_accelerator or any(p.is_cuda for m in modules for p in m.parameters())
    return init_device_mesh("cuda" if is_cuda else "cpu", (dist.get_world_size(),))


def _listed(given: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = list(given) if isinstance(given, list | tuple) else [given]
    every = [inner for module in modules for inner in set(module.modules())]
    if not modules or any(every.count(module) > 1 for module in modules):
        raise ValueError("Expected modules that do not hold each other, each once, in the list.")
    for module in modules:
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        lacks_forward = is_container and type(module).forward is nn.Module.forward
        if isinstance(module, FSDPModule) or lacks_forward:
            raise ValueError(
                "Expected a module with a forward that is no unit yet, got "
                f"{type(module).__name__}."
            )
    return modules


def _check_at_rest(inner: list[Unit]) -> None:
    for unit in inner:
        if unit.holds_buffers or unit.schedule.reductions:
            raise RuntimeError(
                f"Expected inner units at rest, got {type(unit.modules[0]).__name__} gathered or "
                "with gradients to reduce; reshard it, or finish the backward pass, first."
            )


def _own_parameters(
    modules: list[nn.Module], ignored: set[nn.Parameter], placement_fn: Any, nest: Nest
) -> list[Owned]:
    """Parameters of the modules that no inner unit holds, with every place that holds each."""
    seen = {m for top in modules for m in top.modules() if isinstance(m, FSDPModule)}
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for top in modules:
        for prefix, holder in top.named_modules(memo=cast("set[nn.Module]", seen)):
            for attribute, parameter in holder._parameters.items():
                if parameter is not None and parameter not in ignored:
                    places.setdefault(parameter, []).append((holder, attribute))
                    names.setdefault(parameter, f"{prefix}.{attribute}".lstrip("."))
    found, mesh = [], nest.mesh
    for parameter, name in names.items():
        gathers_itself = is_extended(name, parameter, nest)
        kind = type(parameter)
        if not gathers_itself and opens_itself(kind) and not issubclass(kind, _KNOWN):
            raise NotImplementedError(
                f"Expected {name} to be gathered as it is, got a {kind.__name__}, whose own form "
                "would be lost: quantised weights need fsdp_pre_all_gather."
            )
        if hasattr(parameter, _HELD):
            raise ValueError(
                f"Expected {name} to be held by one unit, got a parameter shared with another; "
                "wrap the modules that share it as one unit: fully_shard([a, b])."
            )
        dim = 0
        if placement_fn is not None:
            dim = _dim_of(name, parameter, placement_fn(parameter), mesh.size(mesh.ndim - 1))
        if dim and gathers_itself:
            raise NotImplementedError(f"Expected Shard(0) of {name}, which gathers itself.")
        if isinstance(parameter, DTensor):
            _check_inner(name, parameter, mesh)
        found.append(Owned(tuple(places[parameter]), dim, gathers_itself))
    return found


def _partition(
    owned: list[Owned], policy: torch_fsdp.MixedPrecisionPolicy
) -> Iterator[tuple[type[ParamGroup], list[Owned]]]:
    """Groups of parameters: of each set of dtypes that the policy gives; marks them held."""
    groups: dict[GroupDtypes | Owned, list[Owned]] = {}
    for held in owned:
        setattr(held.current, _HELD, True)
        key = held if held.gathers_itself else dtypes_of(policy, held.current.dtype)
        groups.setdefault(key, []).append(held)
    for key, part in groups.items():
        yield ExtendedGroup if isinstance(key, Owned) else ParamGroup, part


def _name_units(roots: list[nn.Module], schedule: Schedule) -> None:
    """Give every unit and parameter its dotted name from the root wrapped so far."""
    names = {module: name for root in reversed(roots) for name, module in root.named_modules()}
    for unit in schedule.units:
        unit.name = names[unit.modules[0]] or "root"
        for number, group in enumerate(unit.groups):
            group.name = f"{unit.name} group {number}" if number else unit.name
            first = [owned.places[0] for owned in group.owned]
            group.names = [f"{names[module]}.{name}".lstrip(".") for module, name in first]


# ---- methods


def _on_stream(stream: Any, hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    """`hook` on `stream`, in the order of the stream that is current when it is called."""

    def hook_on_stream(tensor: torch.Tensor) -> None:
        streams: Any = torch.get_device_module(tensor.device)
        current = streams.current_stream()
        stream.wait_stream(current)
        with streams.stream(stream):
            hook(tensor)
        current.wait_stream(stream)

    return hook_on_stream


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
        """Refused: a copy would share buffers and hooks."""
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
        self.fsdp_schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward communicates gradients; without, they accumulate at full size."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        for unit in self._units(recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by `factor` in place of the number of ranks."""
        for group in self._fsdp_unit.groups:
            group.gradients.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient gets zeros, where another of its unit has one."""
        for unit in self._units(recurse):
            for group in unit.groups:
                group.gradients.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], Any], *, stream: Any = None
    ) -> None:
        """Call `hook` with this unit's flat mean of gradients [n], cut, or their sum, see
        `set_force_sum_reduction_for_comms`. It runs on `stream`, or the reduce stream, after the
        reduction over the mesh, and may write to the mean (`ValueError`: a `stream` on a mesh whose
        outer axis is reduced over anyway).
        """
        for group in self._fsdp_unit.groups:
            if stream is not None and group.nest.replica_groups:
                raise ValueError("Expected stream=None on a mesh of two axes, which all-reduces.")
            group.gradients.sum_hook = hook if stream is None else _on_stream(stream, hook)

    def set_post_optim_event(self, event: Any) -> None:
        """Gathers also wait for `event`; they wait for the current stream in any case."""
        self.fsdp_schedule.gather_stream.wait_event(event)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """All-reduce hooks get the sum, not the mean; collectives sum in any case. In dtypes other
        than float32 and bfloat16 hooks always get the sum, of gradients divided in part.
        """
        for group in self._fsdp_unit.groups:
            group.gradients.gives_sum = enable

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Full gradient buffers in flight: 1, or 2 (the default), of the root and all its units
        (`ValueError`: neither, or 2 units of buffers without side streams; `TypeError`: not an
        int).
        """
        most = min(self.fsdp_schedule.overlap, 2)
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"Expected a number of buffers, got {max_input_buffers!r}.")
        if max_input_buffers not in range(1, max(most, 1) + 1):
            raise ValueError(
                f"Expected 1 to {max(most, 1)} buffers in flight, got {max_input_buffers}."
            )
        self.fsdp_schedule.most_reductions = max_input_buffers

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(
            "Expected the collectives that fsdp_core.fsdp makes itself, in flat buffers from its "
            "pool: custom collectives and memory of a process group are not supported."
        )

    set_custom_all_gather = set_custom_reduce_scatter = _refuse
    set_allocate_memory_from_process_group_for_comm = set_symm_mem_for_comm = _refuse
    set_separate_reduce_scatter_group = _refuse

    def zero_main_grads(self) -> None:
        """Drop every gradient of the root's units, with sums that are not reduced yet."""
        schedule = self.fsdp_schedule
        schedule.drain(keep=0)
        for group in self.fsdp_groups:
            group.gradients.forget(schedule.device.current_stream())
            for parameter in group.sharded:
                parameter.grad = None

    # ---- state

    @property
    def fsdp_schedule(self) -> Schedule:
        return self._fsdp_unit.schedule

    @property
    def fsdp_groups(self) -> list[ParamGroup]:
        return [group for unit in self.fsdp_schedule.units for group in unit.groups]

    def refresh_model_weights(self) -> None:
        """Main weights were changed by who is no `torch.optim.Optimizer`: copies follow now."""
        with torch.no_grad():
            for group in self.fsdp_groups:
                group.main_weight_changed()

    def reset_iter_state(self) -> None:
        """Put right what a pass that raised has left; the root's next forward does so, too."""
        self.fsdp_schedule.recover()
        self.fsdp_schedule.abandon_backward()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
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
    """Treat a method of `module` as a forward: gather before it, release after it. Does nothing for
    a module that is no unit (`ValueError`: no such method).
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


def share_comm_ctx(modules: "Iterable[FSDPModule]") -> None:
    """Let roots that run one after another, such as stages of a pipeline, share side streams."""
    first, *others = [_unit_of(module).schedule for module in modules]
    for schedule in others:
        schedule.side_streams = first.side_streams
