"""The address ledger: a graph may only be replayed while everything it reads is where it was.

A GPU that replays over a freed parameter does not fault, it reads what the allocator put there. So
each external storage is entered at capture with its address, size and name: a name of its owner,
which is looked up anew before each replay, or the operator and module that used it first, whose
storage is watched itself. What is neither is counted as unnamed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fsdp_core.dispatch import TensorError
from fsdp_core.graph.recorder import Recording, StorageEntry

Resolver = Callable[[], Mapping[str, torch.Tensor]]
"""Returns every named tensor that a graph may use, as the program would find it now."""

Getter = Callable[[], torch.Tensor | None]
"""Looks one tensor up where the program keeps it; None if there is none now."""


class StaleAddress(TensorError):
    """A graph was about to be replayed over memory that is no longer what it captured; `names` are
    in the order in which the graph's owner names them.
    """

    def __init__(self, names: list[str], detail: str) -> None:
        others = f" (and {', '.join(names[1:])})" if len(names) > 1 else ""
        super().__init__(f"{names[0]}: {detail}{others}", *names)


class AddressBook(Mapping[str, torch.Tensor]):
    """Tensors by name, each looked up when it is asked for; `now` is a `Resolver`."""

    def __init__(self) -> None:
        self._getters: dict[str, Getter] = {}
        self._holders: dict[str, Callable[[], bool]] = {}

    def enter(self, name: str, getter: Getter, is_held: Callable[[], bool] | None = None) -> None:
        """Add a name that is not taken. `is_held` says whether the owner holds the tensor's memory
        now, if others use it in turn.
        """
        if name in self._getters:
            raise ValueError(f"Expected a name of one tensor, got {name} again.")
        self._getters[name] = getter
        if is_held is not None:
            self._holders[name] = is_held

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that the program never replaces."""
        self.enter(name, lambda: tensor)

    def is_held(self, name: str) -> bool:
        """Whether what lies at the tensor's address now is the tensor's."""
        holder = self._holders.get(name)
        return holder is None or holder()

    def now(self) -> "AddressBook":
        return self

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name as it is now; `KeyError` if there is none."""
        tensor = self.get(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def get(self, name: str, default: object = None) -> torch.Tensor | None:  # type: ignore[override]
        """The tensor of that name as it is now, or None."""
        getter = self._getters.get(name)
        return None if getter is None else getter()

    def __iter__(self) -> Iterator[str]:
        return (name for name, getter in self._getters.items() if getter() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    address: int
    numel: int
    dtype: torch.dtype
    storage_address: int
    storage_bytes: int
    is_held: bool


class Ledger:
    """Addresses that one graph relies on.

    resolve: looks names up again; called now and before every replay.
    partner: recording of a graph that owns memory this one uses (forward, for a backward).
    own: names of what the graph's owner made for it alone, such as static inputs.
    relied: tensors that the graph reads whether or not an operator showed it.
    within: name of what was captured, for places inside of it.
    """

    def __init__(
        self,
        recording: Recording,
        resolve: Resolver,
        partner: Recording | None = None,
        *,
        own: Resolver | None = None,
        relied: Iterable[torch.Tensor] = (),
        within: str = "",
    ) -> None:
        entries = _external(recording, partner)
        addresses = set(entries) | {t.untyped_storage().data_ptr() for t in relied}
        addresses.discard(0)
        self._sources = [(each, _named(each(), addresses)) for each in (resolve, own) if each]
        found = {each.storage_address for _, named in self._sources for each in named}
        self._watched = [
            (_described(entry, within), entry) for at, entry in entries.items() if at not in found
        ]

    @property
    def names(self) -> list[str]:
        return [each.name for _, named in self._sources for each in named]

    @property
    def places(self) -> list[str]:
        return [name for name, entry in self._watched if entry.place]

    @property
    def num_unnamed(self) -> int:
        return sum(not entry.place for _, entry in self._watched)

    def check(self) -> None:
        """Compare every address with what it was at capture; no device work. `StaleAddress` names
        every tensor that moved, shrank, vanished, was freed, or whose memory its owner does not
        hold.
        """
        stale: list[tuple[str, str]] = []
        for resolve, named in self._sources:
            if named:
                now = resolve()
                stale += [(each.name, why) for each in named if (why := _change(each, now))]
        for name, entry in self._watched:
            storage = entry.reference()
            if storage is None:
                stale.append((name, "freed since the capture"))
            elif storage.data_ptr() != entry.address or storage.nbytes() < entry.nbytes:
                moved = f"captured at {entry.address:#x}, now at {storage.data_ptr():#x}"
                stale.append((name, moved))
        if stale:
            raise StaleAddress([name for name, _ in stale], stale[0][1])


def _external(recording: Recording, partner: Recording | None) -> dict[int, StorageEntry]:
    """Storages that the graph uses and neither it nor its partner owns, by address."""
    partners = partner.storages if partner else ()
    # By identity: memory of what died in the partner may be an external tensor's by now.
    owned = {s._cdata for e in partners if e.internal and (s := e.reference()) is not None}
    entries: dict[int, StorageEntry] = {}
    for entry in recording.external():
        storage = entry.reference()
        # What died during the capture was a library's own buffer, in the graph's memory pool.
        if storage is not None and entry.address and storage._cdata not in owned:
            entries[entry.address] = entry
    return entries


def _named(now: Mapping[str, torch.Tensor], addresses: set[int]) -> list[_Named]:
    """Tensors whose storages lie at the addresses; of those that use one in turn, who holds it."""
    entered = []
    for name, tensor in now.items():
        storage = tensor.untyped_storage()
        if tensor.numel() and storage.data_ptr() in addresses:
            seen = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
            entered.append(
                _Named(name, *seen, storage.data_ptr(), storage.nbytes(), _is_held(now, name))
            )
    return entered


def _is_held(now: Mapping[str, torch.Tensor], name: str) -> bool:
    return not isinstance(now, AddressBook) or now.is_held(name)


def _change(named: _Named, now: Mapping[str, torch.Tensor]) -> str:
    """Why a tensor is no longer what was captured; empty if it is."""
    tensor = now.get(named.name)
    if named.is_held and not _is_held(now, named.name):
        return "captured while its owner held its memory, which others may use now"
    if tensor is None:
        return "captured, but the program no longer has it"
    address = tensor.data_ptr()
    if address != named.address:
        freed = "" if address else " (its storage was freed)"
        return f"captured at {named.address:#x}, now at {address:#x}{freed}"
    if tensor.numel() != named.numel or tensor.dtype != named.dtype:
        return f"captured as {named.numel} x {named.dtype}, now {tensor.numel()} x {tensor.dtype}"
    if tensor.untyped_storage().nbytes() < named.storage_bytes:
        return "its storage has shrunk since the capture"
    return ""


def _described(entry: StorageEntry, within: str) -> str:
    """`storage of 400 bytes that aten.sum.default uses in layers.3.attn.norm`."""
    place = entry.place
    if within and place.startswith("in "):
        place = f"in {within}.{place[3:]}"
    elif within and place:
        place = f"{place} in {within}"
    return f"storage of {entry.nbytes} bytes that {entry.made_by} uses {place}".rstrip()
