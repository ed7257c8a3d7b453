"""Where full-size buffers come from: one interface, three allocators.

    pool      memory it holds             addresses of a key   graphs it may serve
    dynamic   what is acquired now        new at each acquire  full_iteration
    double    two buffers a class,        fixed, from first    all, with persistent_on_miss
              one a miss                  acquire on
    traced    the plan of one training    fixed, once planned  all, with persistent_on_miss,
              pass, one buffer a miss                          captured after the first pass

A key is (owner, role); a class is (role, dtype, numel). A miss, a key whose buffer another key
holds, moves the key into a buffer of its own for ever; in a pass without gradients only until its
end, so evaluation leaves addresses alone. A fixed buffer has the event of its last release, and the
next acquire waits for that; all of it is legal inside a capture.

A key keeps its storage while autograd may hold views of it: a matmul saves the transposed view of a
parameter, and reads through it in backward. So from the first acquire or release under grad mode
until `end_of_pass`, a miss of a key other than a gradient's raises.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdp_core.device import Device

GATHER, GRAD = "gather", "grad"


class Key(NamedTuple):
    """Identity of a buffer: whose it is and what it is for (`GATHER` or `GRAD`)."""

    owner: int
    role: str


class Pool:
    """Hands out full-size buffers; what an allocator does not say holds for all."""

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """A 1-d buffer for `key`, safe to write on `stream`. What it holds is undefined.

        New memory comes from the stream that is current: call this while that is the compute
        stream. Acquiring a held key returns the buffer that it has; one release gives it back.

        Raises ValueError: the key had another numel or dtype before.
        Raises RuntimeError: the key cannot have its buffer, and must not have another one now.
        """
        raise NotImplementedError

    def release(self, key: Key, stream: Any) -> None:
        """Give the buffer of a held key back once the work issued on `stream` so far is done."""
        raise NotImplementedError

    def can_acquire(self, key: Key) -> bool:
        """Whether `acquire` would give the key a buffer now: ask before a gather ahead."""
        return True

    def end_of_pass(self) -> None:
        """A pass is over, its buffers are released, and no graph that saved views of them lives."""

    def freeze(self) -> None:
        """From now on no key of gathered parameters may change its address: graphs hold it.
        Gradients' keys may: what a partial graph makes is copied to where they are, and several
        units' may come at once out of a replay, which no plan knows.
        """

    def forget_events(self) -> None:
        """Drop recorded events; legal only when the device is idle or a capture begins or ends."""

    def reserved_bytes(self) -> int:
        raise NotImplementedError


def _empty(numel: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Memory from the current stream; an ordinary tensor also in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device.torch_device)


def _check_size(key: Key, numel: int, dtype: torch.dtype, had: torch.Tensor) -> None:
    if (had.numel(), had.dtype) != (numel, dtype):
        before = f"{had.numel()} x {had.dtype}"
        raise ValueError(f"Expected {key} to have {before} as before, got {numel} x {dtype}.")


# ---- the timeline of a pass, and a plan made of it


class Interval(NamedTuple):
    """One holding of a key's buffer, from tick `start` up to, but without, tick `stop`."""

    key: Key
    numel: int
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class PlannedSlot(NamedTuple):
    """Memory of `nbytes` that `keys` share; no two of them are ever held at once."""

    nbytes: int
    keys: tuple[Key, ...]


@dataclass
class Timeline:
    """Who held a buffer when, in ticks: each acquire and each release is one tick."""

    intervals: list[Interval] = field(default_factory=list)
    open: dict[Key, tuple[int, torch.dtype, int]] = field(default_factory=dict)
    tick: int = 0

    def acquired(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Note an acquire; one of a key that is held already changes nothing."""
        self.tick += 1
        self.open.setdefault(key, (numel, dtype, self.tick))

    def released(self, key: Key) -> None:
        """Note the release of a held key."""
        self.tick += 1
        numel, dtype, start = self.open.pop(key)
        self.intervals.append(Interval(key, numel, dtype, start, self.tick))


def plan_slots(intervals: Sequence[Interval]) -> tuple[PlannedSlot, ...]:
    """Give each key a slot of its role, so that no two keys of a slot are ever held at once.
    Left-edge greedy (Hashimoto and Stevens, 1971): keys by size, largest first, then by first
    acquire; each goes into the first slot in which it overlaps nobody. With equal sizes and one
    interval a key this uses the fewest slots. Memory stays with its role, that is its stream.
    """
    held: dict[Key, list[Interval]] = {}
    for interval in sorted(intervals, key=lambda interval: interval.start):
        held.setdefault(interval.key, []).append(interval)
    slots: list[list[Interval]] = []
    # Sorting is stable, and `held` is in the order of first acquires.
    for mine in sorted(held.values(), key=lambda mine: (mine[0].key.role, -mine[0].nbytes)):
        shared = next((slot for slot in slots if _can_share(slot, mine)), None)
        if shared is None:
            slots.append([*mine])
        else:
            shared.extend(mine)
    return tuple(
        PlannedSlot(slot[0].nbytes, tuple(dict.fromkeys(each.key for each in slot)))
        for slot in slots
    )


def _can_share(slot: list[Interval], mine: list[Interval]) -> bool:
    """Whether a slot is of the role of `mine`, and free whenever those are held."""
    return slot[0].key.role == mine[0].key.role and not any(
        a.start < b.stop and b.start < a.stop for a in slot for b in mine
    )


# ---- memory that comes and goes


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of one key of the dynamic pool; `home` is the stream it came from while held."""

    tensor: torch.Tensor
    home: Any = None


class DynamicPool(Pool):
    """Frees a key's storage on release; the tensor and the storage object stay for ever. All memory
    comes from the stream that is current at the acquire, whatever stream it is for: a caching
    allocator cannot give what activations freed to a side stream. The user's stream comes after the
    current one, and at the release the current one after the user's; no event is kept.
    """

    def __init__(self, device: Device, timeline: Timeline | None = None) -> None:
        self._device = device
        self._timeline = timeline
        self._buffers: dict[Key, _Buffer] = {}

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        buffer = self._buffers.get(key)
        current = self._device.current_stream()
        if buffer is None:
            buffer = self._buffers[key] = _Buffer(_empty(numel, dtype, self._device), current)
        _check_size(key, numel, dtype, buffer.tensor)
        if buffer.home is None:
            nbytes = numel * dtype.itemsize
            self._device.resize_storage(buffer.tensor.untyped_storage(), nbytes)
            buffer.home = current
        if stream != current:
            stream.wait_stream(current)
        if self._timeline is not None:
            self._timeline.acquired(key, numel, dtype)
        return buffer.tensor

    def release(self, key: Key, stream: Any) -> None:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.home is None:
            raise RuntimeError(f"Expected {key} to be held, got a release without an acquire.")
        # The allocator gives the block to the next work of the stream that it came from, as a rule
        # the current one. Both must come after the last use.
        current = self._device.current_stream()
        if stream != current or stream != buffer.home:
            event = stream.record_event()
            current.wait_event(event)
            if buffer.home != current:
                buffer.home.wait_event(event)
        buffer.home = None
        self._device.resize_storage(buffer.tensor.untyped_storage(), 0)
        if self._timeline is not None:
            self._timeline.released(key)

    def holds(self, key: Key) -> bool:
        return key in self._buffers and self._buffers[key].home is not None

    def reserved_bytes(self) -> int:
        return sum(buffer.tensor.untyped_storage().nbytes() for buffer in self._buffers.values())


# ---- memory that stays


@dataclass(slots=True, eq=False)
class _Slot:
    """Fixed memory; `event` is its last release, `since` the number of its last acquire."""

    memory: torch.Tensor
    event: Any
    holder: "_Home | None" = None
    num_keys: int = 0
    since: int = 0


@dataclass(slots=True, eq=False)
class _Home:
    """Where a key lives, and its `refuge` while the slot is taken. In pass `grad_pass` autograd may
    have saved views of it.
    """

    key: Key
    size: tuple[int, torch.dtype]
    tensor: torch.Tensor
    slot: _Slot
    is_grad: bool
    grad_pass: int = -1
    refuge: "_Home | None" = None


class SlotPool(Pool):
    """Fixed slots, and keys that live in them: the base of `double` and `traced`. A subclass says
    where a new key lives (`_choose_slot`). A key without a slot, or whose slot another key holds,
    is a miss: `persistent_on_miss` gives it a slot of its own, else it is served dynamically, at
    least until the end of the pass: autograd may have saved views.
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
        self._pass = self._num_acquires = 0
        self._is_training = False

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        home = self._homes.get(key)
        if home is None:
            home = self._find_home(key, numel, dtype)
        elif home.size != (numel, dtype):
            _check_size(key, numel, dtype, home.tensor)
        elif home.slot.holder is not None and home.slot.holder is not home:
            home = self._leave_home(home, home.slot.holder.key)
        if home is None:
            return self._overflow.acquire(key, numel, dtype, stream)
        slot = home.slot
        if slot.event is not None:
            stream.wait_event(slot.event)
        if slot.holder is None:
            self._num_acquires += 1
            slot.since = self._num_acquires
        slot.holder = home
        if home.is_grad:
            self._is_training = True
        elif torch.is_grad_enabled():
            home.grad_pass = self._pass
        return home.tensor

    def release(self, key: Key, stream: Any) -> None:
        home = self._homes.get(key)
        if home is None or home.slot.holder is not home:
            return self._overflow.release(key, stream)
        home.slot.event = stream.record_event()
        home.slot.holder = None
        # A gather ahead of its use may be issued without grad mode, and the use be under it.
        if not home.is_grad and torch.is_grad_enabled():
            home.grad_pass = self._pass

    def can_acquire(self, key: Key) -> bool:
        home = self._homes.get(key)
        if home is None or home.slot.holder is None or home.slot.holder is home:
            return True
        return not (self._frozen or home.grad_pass == self._pass)

    def end_of_pass(self) -> None:
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
        for slot in self._slots:
            slot.event = None

    def reserved_bytes(self) -> int:
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
        memory = _empty(nbytes, torch.uint8, self._device)
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
    """Two slots a class, shared by its keys in turn; a key keeps the slot that it got first. Who
    stays while others come and go, such as a root of a layer's size, has its slot alone.
    """

    def __init__(self, device: Device, *, persistent_on_miss: bool) -> None:
        super().__init__(device, persistent_on_miss=persistent_on_miss)
        self._classes: dict[tuple[str, torch.dtype, int], list[_Slot]] = {}

    def _choose_slot(self, key: Key, numel: int, dtype: torch.dtype) -> _Slot | None:
        pair = self._classes.setdefault((key.role, dtype, numel), [])
        if len(pair) == 2:
            older, newer = sorted(pair, key=lambda slot: slot.since)
            if older.holder is not None and newer.holder is None:
                pair.remove(older)
        if len(pair) < 2:
            # Fill both before sharing, so that neighbours in the order alternate.
            pair.append(self._new_slot(numel * dtype.itemsize))
            return pair[-1]
        free = [slot for slot in pair if slot.holder is None]
        return min(free, key=lambda slot: slot.num_keys, default=None)


class TracedPool(SlotPool):
    """The slots that one training pass needs, found by watching it. The first pass is served as by
    `dynamic`, and its timeline written. At its end the plan is made (`plan_slots`): from then on a
    key always gets its slot, in training and in evaluation.
    """

    def __init__(self, device: Device, *, persistent_on_miss: bool) -> None:
        super().__init__(device, persistent_on_miss=persistent_on_miss)
        self._timeline: Timeline | None = Timeline()
        self._overflow = DynamicPool(device, self._timeline)
        self._roles: set[str] = set()

    def end_of_pass(self) -> None:
        """See `Pool`. The first time after a whole training pass, with nothing held: plan."""
        super().end_of_pass()
        timeline = self._timeline
        if timeline is None or timeline.open:
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
            if self._timeline.tick:
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
    """The pool called `name`: `dynamic`, `double` or `traced`; ValueError for another."""
    if name == "dynamic":
        return DynamicPool(device)
    slots = {"double": DoublePool, "traced": TracedPool}
    if name not in slots:
        raise ValueError(f"Expected pool dynamic, double or traced, got {name!r}.")
    return slots[name](device, persistent_on_miss=persistent_on_miss)
