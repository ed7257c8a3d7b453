"""Where full-size buffers come from: one interface, three allocators.

    pool      memory it holds             addresses of a key   graphs it may serve
    dynamic   what is acquired now        new at each acquire  full_iteration
    double    two buffers a class,        fixed, from first    all, with persistent_on_miss
              one a miss                  acquire on
    traced    the plan of one training    fixed, once planned  all, with persistent_on_miss,
              pass, one buffer a miss                          captured after the first pass

A key is (owner, role); a class is (role, dtype, numel). The phases and the plan of `traced` are in
`traced_pool`. A miss, a key whose buffer another key holds, moves the key into a buffer of its own
for ever; in a pass without gradients only until its end, so evaluation leaves addresses alone.

**Ordering.** No memory is handed on by `record_stream`. A fixed buffer has the event of its last
release, and the next acquire waits for that. For `dynamic` see `dynamic_pool`. All of it is legal
inside a capture.

**A key keeps its storage while autograd may hold views of it.** A matmul saves the transposed view
of a parameter, not the parameter, and reads through it in backward; if the key were given another
buffer by then, that view would read what the first buffer holds now. So from the first acquire or
release under grad mode until `end_of_pass`, a miss of a key other than a gradient's raises.

**Cost.** Acquire and release of a fixed buffer: half a microsecond of Python, one wait, one record;
no allocation. `dynamic`: 2 microseconds, one allocation and one free by the caching allocator, and
four stream calls. Its gathers start after all work that the current stream was given before, so
issue them early.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_core.device import Device
from fsdp_core.fsdp.dynamic_pool import DynamicPool, check_size, empty_buffer
from fsdp_core.fsdp.traced_pool import Key as Key  # part of the interface
from fsdp_core.fsdp.traced_pool import Timeline, plan_slots

GATHER, GRAD = "gather", "grad"


class Pool(Protocol):
    """Hands out full-size buffers."""

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """A 1-d buffer for `key`, safe to write on `stream`. What it holds is undefined.

        New memory comes from the stream that is current: call this while that is the compute
        stream. Acquiring a held key returns the buffer that it has; one release gives it back.

        Raises:
            ValueError: the key had another numel or dtype before.
            RuntimeError: the key cannot have its buffer, and must not have another one now.
        """

    def release(self, key: Key, stream: Any) -> None:
        """Give the buffer back once the work issued on `stream` so far is done.

        Raises:
            RuntimeError: the key is not held.
        """

    def can_acquire(self, key: Key) -> bool:
        """Whether `acquire` would give the key a buffer now, not raise for want of one.

        Ask before a gather ahead of its use: the key's buffer may be free when it is needed.
        """

    def end_of_pass(self) -> None:
        """A backward pass or a forward-only pass is over, and its buffers were released.

        Call it only when no autograd graph waits for its backward that saved views of gathered
        buffers: where several forwards come before their backwards, after the last backward.
        """

    def freeze(self) -> None:
        """From now on no key of gathered parameters may change its address: graphs hold it.

        Gradients' keys may. What a partial graph makes is copied to where they are; a graph of a
        whole iteration holds buffers that nothing frees, and asks for no key when it is replayed.
        Several units' gradients may come at once out of a replay, which the plan knows nothing of.
        """

    def forget_events(self) -> None:
        """Drop recorded events; legal only when the device is idle or a capture begins or ends."""

    def reserved_bytes(self) -> int:
        """Bytes that the pool itself holds now."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Fixed memory; `event` is its last release."""

    memory: torch.Tensor
    event: Any
    holder: "_Home | None" = None
    num_keys: int = 0


@dataclass(slots=True, eq=False)
class _Home:
    """Where a key lives; in pass `grad_pass` autograd may have saved views of it.

    `refuge` is where the key lives while its slot is taken, once that has happened.
    """

    key: Key
    size: tuple[int, torch.dtype]
    tensor: torch.Tensor
    slot: _Slot
    is_grad: bool
    grad_pass: int = -1
    refuge: "_Home | None" = None


class SlotPool:
    """Fixed slots, and keys that live in them: the base of `double` and `traced`.

    A subclass says where a new key lives (`_choose_slot`). A key without a slot, or whose slot
    another key holds, is a miss. With `persistent_on_miss` it gets a slot of its own, else it is
    served dynamically. Either lasts until the end of the pass at least, not only until the release:
    autograd may have saved views. `misses` counts.
    """

    def __init__(self, device: Device, *, persistent_on_miss: bool) -> None:
        self.misses = 0
        self._device = device
        self._persistent_on_miss = persistent_on_miss
        self._slots: list[_Slot] = []
        self._homes: dict[Key, _Home] = {}
        self._overflow = DynamicPool(device)
        self._displaced: dict[Key, _Home | None] = {}
        self._frozen = False
        self._pass = 0
        self._is_training = False

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """See `Pool`."""
        home = self._homes.get(key)
        if home is None:
            home = self._find_home(key, numel, dtype)
        elif home.size != (numel, dtype):
            check_size(key, numel, dtype, home.tensor)
        elif home.slot.holder is not None and home.slot.holder is not home:
            home = self._leave_home(home, home.slot.holder.key)
        if home is None:
            return self._overflow.acquire(key, numel, dtype, stream)
        slot = home.slot
        if slot.event is not None:
            stream.wait_event(slot.event)
        slot.holder = home
        if home.is_grad:
            self._is_training = True
        elif torch.is_grad_enabled():
            home.grad_pass = self._pass
        return home.tensor

    def release(self, key: Key, stream: Any) -> None:
        """See `Pool`."""
        home = self._homes.get(key)
        if home is None or home.slot.holder is not home:
            return self._overflow.release(key, stream)
        home.slot.event = stream.record_event()
        home.slot.holder = None
        # A gather ahead of its use may be issued without grad mode, and the use be under it.
        if not home.is_grad and torch.is_grad_enabled():
            home.grad_pass = self._pass

    def can_acquire(self, key: Key) -> bool:
        """See `Pool`."""
        home = self._homes.get(key)
        if home is None or home.slot.holder is None or home.slot.holder is home:
            return True
        return not (self._frozen or home.grad_pass == self._pass)

    def end_of_pass(self) -> None:
        """See `Pool`."""
        stays = self._is_training and self._persistent_on_miss
        for key in [key for key in self._displaced if not self._holds(key)]:
            home = self._displaced.pop(key)
            if home is not None and not stays:
                self._homes[key] = home
        self._pass += 1
        self._is_training = False

    def freeze(self) -> None:
        """See `Pool`. A key without a home, whose address no graph holds, may still get one."""
        self._frozen = True

    def forget_events(self) -> None:
        """See `Pool`."""
        for slot in self._slots:
            slot.event = None

    def reserved_bytes(self) -> int:
        """See `Pool`."""
        return sum(slot.memory.numel() for slot in self._slots) + self._overflow.reserved_bytes()

    def _choose_slot(self, key: Key, numel: int, dtype: torch.dtype) -> _Slot | None:
        """A slot that nobody holds, for a key that has no home; None is a miss."""
        return None

    def _find_home(self, key: Key, numel: int, dtype: torch.dtype) -> _Home | None:
        """Where a key without a home lives from now on; None: served dynamically."""
        if key in self._displaced:
            return None
        slot = self._choose_slot(key, numel, dtype)
        return self._settle(key, numel, dtype, slot) if slot else self._miss(key, numel, dtype)

    def _leave_home(self, home: _Home, holder: Key) -> _Home | None:
        """Another home for a key whose slot is taken; None: served dynamically in this pass."""
        key = home.key
        if self._frozen and not home.is_grad:
            raise RuntimeError(
                f"Expected the captured buffer of {key} to be free, but {holder} holds it; "
                "a graph would read foreign data."
            )
        if home.grad_pass == self._pass:
            raise RuntimeError(
                f"Expected the buffer of {key} to be free, but {holder} holds it, and views that "
                "autograd saved in this pass would read foreign data; let go of outputs of "
                "forwards that had no backward, or use pool dynamic."
            )
        return self._miss(key, *home.size)

    def _miss(self, key: Key, numel: int, dtype: torch.dtype) -> _Home | None:
        self.misses += 1
        home = self._displaced[key] = self._homes.pop(key, None)
        if not self._persistent_on_miss:
            return None
        if home is None or home.refuge is None:
            refuge = self._settle(key, numel, dtype, self._new_slot(numel * dtype.itemsize))
        else:
            refuge = self._homes[key] = home.refuge
        if home is not None:
            home.refuge = refuge
        return refuge

    def _holds(self, key: Key) -> bool:
        home = self._homes.get(key)
        return self._overflow.holds(key) if home is None else home.slot.holder is home

    def _new_slot(self, nbytes: int) -> _Slot:
        memory = empty_buffer(nbytes, torch.uint8, self._device)
        # The block may have been used by earlier work of the stream that it comes from.
        return _Slot(memory, self._device.current_stream().record_event())

    def _settle(self, key: Key, numel: int, dtype: torch.dtype, slot: _Slot) -> _Home:
        # `.data`: a version counter for each key of a slot, or writing one would look to autograd
        # like an in-place change of another.
        with torch.inference_mode(False):
            tensor = slot.memory[: numel * dtype.itemsize].view(dtype).data
        if slot.num_keys == 0:
            self._slots.append(slot)
        slot.num_keys += 1
        home = self._homes[key] = _Home(key, (numel, dtype), tensor, slot, key.role == GRAD)
        return home


class DoublePool(SlotPool):
    """Two slots a class, shared by its keys in turn; a key keeps the slot that it got first."""

    def __init__(self, device: Device, *, persistent_on_miss: bool) -> None:
        super().__init__(device, persistent_on_miss=persistent_on_miss)
        self._classes: dict[tuple[str, torch.dtype, int], list[_Slot]] = {}

    def _choose_slot(self, key: Key, numel: int, dtype: torch.dtype) -> _Slot | None:
        pair = self._classes.setdefault((key.role, dtype, numel), [])
        if len(pair) < 2:
            # Fill both before sharing, so that neighbours in the order alternate.
            pair.append(self._new_slot(numel * dtype.itemsize))
            return pair[-1]
        free = [slot for slot in pair if slot.holder is None]
        return min(free, key=lambda slot: slot.num_keys, default=None)


class TracedPool(SlotPool):
    """The slots that one training pass needs, found by watching it. See `traced_pool`."""

    def __init__(self, device: Device, *, persistent_on_miss: bool) -> None:
        super().__init__(device, persistent_on_miss=persistent_on_miss)
        self._timeline: Timeline | None = Timeline()
        self._overflow = DynamicPool(device, self._timeline)
        self._roles: set[str] = set()

    def end_of_pass(self) -> None:
        """See `Pool`. The first time after a whole training pass, with nothing held: plan."""
        super().end_of_pass()
        timeline = self._timeline
        if timeline is None or not timeline.at_rest:
            return
        roles = {interval.key.role for interval in timeline.intervals}
        self._roles |= roles
        # Gradients mark a training pass. Where parameters are gathered, it gathers too.
        if GRAD in roles and (GATHER in roles or GATHER not in self._roles):
            self._plan(timeline)
        else:
            timeline.intervals.clear()

    def freeze(self) -> None:
        """See `Pool`. RuntimeError if buffers were handed out and there is no plan yet."""
        if self._timeline is not None:
            if self._timeline.has_begun:
                raise RuntimeError(
                    "Expected a whole training pass before pool traced is frozen, got none; "
                    "addresses are fixed at its end, so run one before the capture, and let go of "
                    "outputs of forwards under grad mode that had no backward: no pass ends while "
                    "one may still come."
                )
            self._plan(self._timeline)
        super().freeze()

    def _find_home(self, key: Key, numel: int, dtype: torch.dtype) -> _Home | None:
        return None if self._timeline is not None else super()._find_home(key, numel, dtype)

    def _plan(self, timeline: Timeline) -> None:
        """Fix slots for every key of the timeline; from now on replay."""
        planned = plan_slots(timeline.intervals)
        sizes = {each.key: (each.numel, each.dtype) for each in timeline.intervals}
        # All memory before any home: if it does not suffice, tracing just goes on.
        slots = [self._new_slot(plan.nbytes) for plan in planned]
        for slot, plan in zip(slots, planned, strict=True):
            for key in plan.keys:
                self._settle(key, *sizes[key], slot)
        self._timeline, self._overflow = None, DynamicPool(self._device)


def make_pool(name: str, device: Device, *, persistent_on_miss: bool) -> Pool:
    """The pool called `name`: `dynamic`, `double` or `traced`.

    Raises:
        ValueError: no pool has that name.
    """
    if name == "dynamic":
        return DynamicPool(device)
    slots = {"double": DoublePool, "traced": TracedPool}
    if name not in slots:
        raise ValueError(f"Expected pool dynamic, double or traced, got {name!r}.")
    return slots[name](device, persistent_on_miss=persistent_on_miss)
