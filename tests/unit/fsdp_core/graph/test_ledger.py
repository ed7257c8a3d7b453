"""The address ledger: names what moved, shrank, vanished or was freed, and never cries wolf."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.graph.recorder import AddressBook, Ledger, Recording, StaleAddress

DEVICE = Device("cpu")
Names = dict[str, torch.Tensor]


def build() -> tuple[Names, Ledger]:
    """A graph over two named tensors of 64 KiB, a named output and an unnamed constant."""
    names = {"weight": torch.ones(1 << 14), "bias": torch.ones(1 << 14), "out": torch.zeros(())}
    names["unused"] = torch.ones(3)
    constant = torch.ones(1 << 14)
    names["constant is held by the program"] = constant[:0]
    graph = HostGraph(DEVICE)

    def function() -> torch.Tensor:
        return names["out"].copy_((names["weight"] * names["bias"] + constant).sum())

    graph.capture(function)
    return names, Ledger(graph.recording, lambda: names)


def recorded(function: Callable[[], object]) -> Recording:
    graph = HostGraph(DEVICE)
    graph.capture(function)
    return graph.recording


def replace(names: Names, name: str) -> None:
    names[name] = names[name].clone()


def free(names: Names, name: str) -> None:
    DEVICE.resize_storage(names[name].untyped_storage(), 0)


def move_storage(names: Names, name: str) -> None:
    """Allocated elsewhere, the tensor object being the same.

    Growing allocates the new block before it frees the old one, so the address must change; freed
    and allocated again, the storage could get its old place back.
    """
    storage = names[name].untyped_storage()
    DEVICE.resize_storage(storage, 2 * storage.nbytes())


def vanish(names: Names, name: str) -> None:
    del names[name]


def fewer(names: Names, name: str) -> None:
    names[name] = names[name][:10]


def retype(names: Names, name: str) -> None:
    names[name] = names[name].view(torch.int32)


def shrink(names: Names, name: str) -> None:
    storage = names[name].untyped_storage()
    DEVICE.resize_storage(storage, storage.nbytes() // 2)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace, r"captured at 0x[0-9a-f]+, now at 0x[0-9a-f]+"),
        (move_storage, r"captured at 0x[0-9a-f]+, now at 0x[0-9a-f]+"),
        (free, r"now at 0x0 \(its storage was freed\)"),
        (vanish, "captured, but the program no longer has it"),
        (fewer, r"captured as 16384 x torch.float32, now 10 x torch.float32"),
        (retype, r"captured as 16384 x torch.float32, now 16384 x torch.int32"),
        (shrink, r"storage has shrunk|now at 0x[0-9a-f]+"),
    ],
)
def test_a_change_is_named(change: Callable[[Names, str], None], why: str, name: str) -> None:
    """Each change of one tensor raises `StaleAddress` with that tensor's name alone, and why."""
    names, ledger = build()
    ledger.check()
    change(names, name)
    with pytest.raises(StaleAddress, match=f"^{name}: .*{why}") as caught:
        ledger.check()
    assert caught.value.names == [name]


def test_a_smaller_storage_at_the_same_address_is_named() -> None:
    """A view of the same place, whose storage now ends earlier than captured, is stale."""
    array = np.ones(100, dtype=np.float32)
    names = {"x": torch.from_numpy(array)[:10], "y": torch.zeros(10)}
    ledger = Ledger(recorded(lambda: names["y"].add_(names["x"])), lambda: names)
    ledger.check()
    names["x"] = torch.from_numpy(array[:10])
    with pytest.raises(StaleAddress, match="x: its storage has shrunk since the capture"):
        ledger.check()


def test_all_changes_are_named() -> None:
    """When several tensors moved, all are named, in the order of the owner's names."""
    names, ledger = build()
    replace(names, "out")
    replace(names, "weight")
    with pytest.raises(StaleAddress, match=r"weight: .*\(and out\)") as caught:
        ledger.check()
    assert caught.value.names == ["weight", "out"]


def test_names_and_count_of_unnamed() -> None:
    """The ledger lists the names that the graph uses, and the places of storages without one."""
    names = build()[1].names
    assert names == ["weight", "bias", "out"]
    x, y = torch.ones(4), torch.ones(4)
    graph = HostGraph(DEVICE)
    graph.capture(lambda: x + y)
    assert len(Ledger(graph.recording, dict).places) == 2
    assert len(Ledger(graph.recording, lambda: {"x": x}).places) == 1
    assert Ledger(graph.recording, lambda: {"x": x, "y": y}).places == []
    for entry in graph.recording.external():
        entry.place = ""
    assert Ledger(graph.recording, lambda: {"x": x}).num_unnamed == 1
    assert Ledger(graph.recording, lambda: {"x": x}).places == []


def test_unnamed_freed() -> None:
    """A storage that no owner names and that died is described by size, operator and place."""
    held, y = [torch.ones(100)], torch.ones(3)
    ledger = Ledger(recorded(lambda: y.add_(held[0].sum())), lambda: {"y": y})
    ledger.check()
    held.clear()
    why = r"storage of 400 bytes that aten.sum.default uses at test_ledger.py:\d+: freed"
    with pytest.raises(StaleAddress, match=why):
        ledger.check()


def test_unnamed_moved() -> None:
    """A storage that no owner names and that moved is described too."""
    x, y = torch.ones(1 << 14), torch.ones(3)
    ledger = Ledger(recorded(lambda: y.add_(x.sum())), lambda: {"y": y})
    move_storage({"x": x}, "x")
    why = r"storage of 65536 bytes that aten\.sum\.default uses at"
    with pytest.raises(StaleAddress, match=why):
        ledger.check()


def test_the_partners_memory_is_no_external() -> None:
    """What a forward graph made and its backward graph reads belongs to the pair."""
    x = torch.ones(8)
    forward, backward = HostGraph(DEVICE), HostGraph(DEVICE)
    saved = forward.capture(lambda: x * 3)
    backward.capture(lambda: x + saved)
    alone = Ledger(backward.recording, lambda: {"x": x})
    paired = Ledger(backward.recording, lambda: {"x": x}, forward.recording)
    assert len(alone.places) == 1
    assert paired.places == []
    assert paired.names == ["x"]


def test_a_stale_graph_does_not_run() -> None:
    """The check comes before the replay: nothing of a stale graph runs."""
    names = {"x": torch.ones(8), "y": torch.zeros(8)}
    captured = CapturedFunction(
        GraphMaker(DEVICE), lambda: names["y"].add_(names["x"]), lambda: names
    )
    held = names["y"]
    captured()
    replace(names, "x")
    with pytest.raises(StaleAddress, match="x: captured at"):
        captured()
    assert (held == 1).all()


def test_an_address_book_looks_up_when_it_is_asked() -> None:
    """A name gives the tensor of now, and one that has none now is no name."""
    book, held = AddressBook(), {"x": torch.ones(2)}
    book.enter("x", lambda: held.get("x"))
    book.hold("y", torch.zeros(3))
    assert book.now() is book
    assert (list(book), len(book)) == (["x", "y"], 2)
    held["x"] = torch.ones(5)
    assert book["x"].numel() == 5
    del held["x"]
    assert (list(book), len(book), book.get("x"), book.get("z")) == (["y"], 1, None, None)
    with pytest.raises(KeyError):
        book["x"]
    with pytest.raises(ValueError, match="Expected a name of one tensor, got y again"):
        book.hold("y", torch.zeros(3))


def test_a_check_looks_up_only_what_the_graph_uses() -> None:
    """However many tensors the program names, a replay asks for those of its graph."""
    asked: list[str] = []
    book, x, y = AddressBook(), torch.ones(4), torch.zeros(4)

    def getter(name: str, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def look() -> torch.Tensor:
            asked.append(name)
            return tensor

        return look

    for name, tensor in {"x": x, "y": y, "other": torch.ones(4)}.items():
        book.enter(name, getter(name, tensor))
    ledger = Ledger(recorded(lambda: y.add_(x)), book.now)
    asked.clear()
    ledger.check()
    assert sorted(asked) == ["x", "y"]


def test_memory_that_its_owner_no_longer_holds_is_named() -> None:
    """The address is right, and what lies there may be another owner's."""
    book, x, y, held = AddressBook(), torch.ones(4), torch.zeros(4), [True]
    book.enter("x", lambda: x, lambda: held[0])
    book.hold("y", y)
    recording = recorded(lambda: y.add_(x))
    ledger = Ledger(recording, book.now)
    ledger.check()
    held[0] = False
    with pytest.raises(StaleAddress, match=r"^x: captured while its owner held its memory"):
        ledger.check()
    # Captured while nobody held it: nothing is expected of it.
    Ledger(recording, book.now).check()


def test_own_tensors_are_named_beside_the_programs() -> None:
    """Static tensors of the graph's owner have names of their own, and are checked too."""
    x, static = torch.ones(1 << 14), torch.ones(1 << 14)
    ledger = Ledger(
        recorded(lambda: x.add_(static)), lambda: {"x": x}, own=lambda: {"input 0": static}
    )
    assert ledger.names == ["x", "input 0"]
    assert ledger.places == []
    ledger.check()
    move_storage({"static": static}, "static")
    with pytest.raises(StaleAddress, match=r"^input 0: captured at"):
        ledger.check()


def test_what_a_kernel_reads_unseen_is_watched_if_it_is_relied_on() -> None:
    """A weight that no operator showed is checked all the same."""
    names = {"weight": torch.ones(1 << 14), "other": torch.ones(3)}
    graph = HostGraph(DEVICE)
    graph.capture(lambda: torch.ones(3) * 2)
    assert Ledger(graph.recording, lambda: names).names == []
    ledger = Ledger(graph.recording, lambda: names, relied=[names["weight"]])
    assert ledger.names == ["weight"]
    move_storage(names, "weight")
    with pytest.raises(StaleAddress, match="weight: captured at"):
        ledger.check()


def test_memory_without_a_name_is_described_by_the_module_that_uses_it() -> None:
    """The operator and the module's name, in what was captured; in a backward pass the node."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.full((4,), 2.0)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table[0]

    model = nn.Sequential(nn.Identity(), Inner())
    x = torch.ones(4, requires_grad=True)
    forward, backward = HostGraph(DEVICE), HostGraph(DEVICE)
    out = forward.capture(lambda: model(x))
    backward.capture(lambda: torch.autograd.grad(out, x, torch.ones(4)))
    found = Ledger(forward.recording, lambda: {"x": x.detach()}, within="layers.3").places
    assert found == ["storage of 16 bytes that aten.mul.Tensor uses in layers.3.1"]
    found = Ledger(backward.recording, dict, forward.recording, within="layers.3").places
    assert found == ["storage of 16 bytes that aten.mul.Tensor uses of MulBackward0 in layers.3"]


def test_memory_of_what_died_in_the_partner_may_be_an_external_tensors() -> None:
    """Who owns an address is asked of the storage that is there, not of who was there once."""
    x = torch.ones(1 << 14)
    forward, backward = HostGraph(DEVICE), HostGraph(DEVICE)
    forward.capture(lambda: (x * 3).sum())
    fresh = torch.ones(1 << 14)
    backward.capture(lambda: fresh * 2)
    for entry in forward.recording.storages:
        if entry.internal:
            entry.address = fresh.data_ptr()
    ledger = Ledger(backward.recording, lambda: {"fresh": fresh}, forward.recording)
    assert ledger.names == ["fresh"]
