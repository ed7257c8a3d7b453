"""Faults of addresses and of who owns memory when: see `harness.faults.addresses`."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from fsdp_core.device import Device
from fsdp_core.fsdp.dynamic_pool import DynamicPool
from fsdp_core.fsdp.fsdp_module import units_in
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import SlotPool
from fsdp_core.fsdp.traced_pool import Key
from fsdp_core.stress.pools import WatchedPool
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from harness.worker.plants.planting import Act, Planting
from harness.worker.plants.seams import keep


class _RestlessPool(DynamicPool):
    """A dynamic pool whose allocator gives no block twice.

    The allocator itself often would, to one key or another as luck has it; what is freed here is
    taken at once, and kept.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._taken: list[torch.Tensor] = []

    def release(self, key: Key, stream: Any) -> None:
        """See `DynamicPool`."""
        tensor = self._buffers[key].tensor
        numel, dtype = tensor.numel(), tensor.dtype
        super().release(key, stream)
        self._taken.append(torch.empty(numel, dtype=dtype, device=tensor.device))


def unstable_buffers(trainer: Trainer) -> None:
    """Gathered weights get other memory each time."""
    for schedule in (root.fsdp_schedule for root in roots(trainer.stages)):
        unstable, pool = _RestlessPool(schedule.device), schedule.pool
        if isinstance(pool, WatchedPool):
            pool.inner = unstable
            continue
        schedule.pool = unstable
        for unit in schedule.units:
            for group in unit.groups:
                group.pool = unstable


# ---- tensors that others take the place of


def _quiet(act: Act) -> Act:
    """On the trainer's stream, without gradients, and done when it returns."""

    def quietly(trainer: Trainer) -> None:
        with torch.no_grad(), trainer.device.on(trainer.stream):
            act(trainer)
            trainer.device.synchronize()

    return quietly


def _weights_assigned(trainer: Trainer) -> None:
    """As a checkpoint that is loaded by assignment: the same values in other memory."""
    optimizer = trainer.optimizer
    for group in trainer.groups:
        group.main_weight = group.main_weight.clone()
        for index, name in enumerate(group.names):
            rows = group.local_rows(group.main_weight, index)
            if name in optimizer.names:
                optimizer.params[optimizer.names.index(name)] = rows


def _replace_all(tensors: list[torch.Tensor]) -> None:
    tensors[:] = [tensor.clone() for tensor in tensors]


def _gradients_replaced(trainer: Trainer) -> None:
    _replace_all(trainer.optimizer.grads)


def _moments_replaced(trainer: Trainer) -> None:
    _replace_all(trainer.optimizer.exp_avg)
    _replace_all(trainer.optimizer.exp_avg_sq)


def _replaced(owner: Callable[[Trainer], Any], *names: str) -> Act:
    """Attributes of an owner are other tensors with the same values."""

    def act(trainer: Trainer) -> None:
        for name in names:
            setattr(owner(trainer), name, getattr(owner(trainer), name).clone())

    return act


def _random_state_replaced(trainer: Trainer) -> None:
    for stream in trainer.streams.streams:
        if stream.state is not None:
            stream.state = stream.state.clone()


# ---- memory that moves, or has two owners


def _move_parameter(trainer: Trainer, name: str) -> str:
    """Free the memory behind a parameter and let its storage live on somewhere else.

    Its contents come along, so a program that looks the parameter up finds it intact; only who
    remembers the old address is wrong. A tensor of NaN takes the old place.

    Raises:
        ValueError: no such parameter, or its storage has no memory between steps.
    """
    held = {
        name: parameter
        for group in trainer.groups
        for name, parameter in zip(group.names, group.unsharded, strict=True)
    }
    # The first that every graph scope reads: attention's, of this rank's first layer.
    name = name or next(name for name in held if ".attn.attention." in name)
    if name not in held:
        raise ValueError(
            f"plant.tensor: expected a parameter, got {name!r}; legal values: {', '.join(held)}"
        )
    device = trainer.device
    device.synchronize()
    storage = held[name].data.untyped_storage()
    nbytes, address = storage.nbytes(), storage.data_ptr()
    if not nbytes:
        raise ValueError(
            f"plant.fault: expected {name} to have memory between steps, which stale_parameter "
            "moves; with fsdp.pool dynamic it has none"
        )
    # Growing allocates the new block before it frees the old one, so the address must change.
    # Freed and allocated again at its old size, the storage could get its old place back.
    device.resize_storage(storage, 2 * nbytes)
    assert storage.data_ptr() != address
    keep(trainer, torch.full((nbytes // 4,), float("nan"), device=device.torch_device))
    device.synchronize()
    return name


def _first_groups(trainer: Trainer) -> Iterable[ParamGroup]:
    """Of this rank's first layer."""
    return units_in(next(iter(trainer.stages[0].numbered_layers.values())))[0].groups


def _gradient_buffer_moved(trainer: Trainer) -> None:
    """As `stale_parameter`, of the buffer that the first layer's gradients are reduced from."""
    for group in _first_groups(trainer):
        pooled = group.gradients.pooled
        assert pooled is not None
        storage = pooled.untyped_storage()
        # Grown, it gets other memory before its own is free.
        trainer.device.resize_storage(storage, 2 * storage.nbytes())


def _slots_of(trainer: Trainer) -> SlotPool:
    pool: Any = next(roots(trainer.stages)).fsdp_schedule.pool
    pool = pool.inner if isinstance(pool, WatchedPool) else pool
    assert isinstance(pool, SlotPool)
    return pool


def _buffer_given_twice(role: str) -> Act:
    """Two layers get one buffer while both need it."""

    def act(trainer: Trainer) -> None:
        pool = _slots_of(trainer)
        layers = [units_in(each)[0] for each in trainer.stages[0].numbered_layers.values()]
        first, second = (
            next(
                home
                for key, home in pool._homes.items()
                if key.owner == unit.groups[0].owner and key.role == role
            )
            for unit in layers[:2]
        )
        # What the pool believes stays: two slots, and whoever asks for the second gets the first.
        second.tensor = first.tensor[: second.tensor.numel()]

    return act


def _microbatch_slot_frozen(trainer: Trainer) -> None:
    for stage in trainer.stages:
        told: Any = stage.on_microbatch
        stage.on_microbatch = lambda part, slot, told=told: told(part, 0)


PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "stale_parameter": Planting(before_step_on=_move_parameter),
        "unstable_buffers": Planting(before_step=unstable_buffers),
    }
    | {
        name: Planting(before_step=_quiet(act))
        for name, act in {
            "weights_assigned": _weights_assigned,
            "gradients_replaced": _gradients_replaced,
            "moments_replaced": _moments_replaced,
            "learning_rate_replaced": _replaced(lambda trainer: trainer.optimizer, "lr"),
            "rope_replaced": _replaced(lambda trainer: trainer.stages[0].rope, "cos", "sin"),
            "tokens_replaced": _replaced(lambda trainer: trainer._inputs, "tokens", "targets"),
            "random_state_replaced": _random_state_replaced,
            "gradient_buffer_moved": _gradient_buffer_moved,
            "gather_buffer_given_twice": _buffer_given_twice("gather"),
            "gradient_buffer_given_twice": _buffer_given_twice("grad"),
            "microbatch_slot_frozen": _microbatch_slot_frozen,
        }.items()
    }
)
"""By name in the catalogue."""
