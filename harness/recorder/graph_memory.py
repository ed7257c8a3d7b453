"""The memory of CUDA graphs: what a capture uses and makes, and whether it is still there.

Host work only, but for the stressors' fills. Nothing here holds a tensor or a storage alive.
"""

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils import _python_dispatch as modes
from torch.utils._python_dispatch import TorchDispatchMode

Named = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Lists tensors by name as the program has them now; parameters as they are, DTensor included."""
Range = tuple[int, int]
"""First byte, and the byte past the last one."""

_NOT_USERS = (
    "<frozen", *(f"{Path(each).parent}{os.sep}" for each in (torch.__file__, __file__)),
    contextlib.__file__,
)  # fmt: skip
_USES_NO_DATA = frozenset({"aten::record_stream", "aten::is_pinned", "aten::set_"})
_MOST_FRAMES = 3
_SMALL_BYTES = 1 << 20  # requests up to this come from a pool of their own


@dataclass(eq=False)
class _Memory:
    """A storage, by weak reference."""

    address: int
    nbytes: int
    storage: Any

    @property
    def range(self) -> Range:
        return self.address, self.address + self.nbytes


@dataclass(eq=False)
class Use(_Memory):
    """A storage that a capture did not make; `pointers`: of the tensors on it that were used."""

    first_use: str
    pointers: set[int] = field(default_factory=set)
    name: str = ""

    @property
    def described(self) -> str:
        return self.name or f"storage of {self.nbytes} bytes ({self.first_use})"


@dataclass(eq=False)
class Made(_Memory):
    """Memory that an operator of a capture allocated; `computed`: and wrote, all of it."""

    tensor: Any
    computed: bool
    version: int = 0


class Uncounted:
    """Inside of it, what the watch allocates brings no garbage collection nearer, and none runs.

    A graph that the collector destroys breaks the capture that is under way (pytorch #195397): what
    a program does there by itself is to be seen, and what its watch allocates should not cause it.
    So the collector stays as the program has it, with a threshold that is higher by the watch's own
    objects until they leave the young generation. What torch allocates to call it is counted.
    """

    def __init__(self) -> None:
        self._ours = self._count = 0
        self._was_on = False
        self._threshold: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """A capture begins; a threshold of 0 collects nothing anyway."""
        self._threshold = gc.get_threshold() if gc.get_threshold()[0] else None
        gc.callbacks.append(self._collected)

    def end(self) -> None:
        """It is over: the threshold is the program's."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collected)
        if self._threshold is not None:
            gc.set_threshold(*self._threshold)
        self._threshold, self._ours = None, 0

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()
        self._count = gc.get_count()[0]

    def __exit__(self, *error: object) -> None:
        if self._threshold is not None:
            self._ours = max(self._ours + gc.get_count()[0] - self._count, 0)
            first, *others = self._threshold
            gc.set_threshold(first + self._ours, *others)
        if self._was_on:
            gc.enable()

    def _collected(self, phase: str, info: object) -> None:
        if phase == "start" and self._threshold is not None:
            self._ours = 0
            gc.set_threshold(*self._threshold)


class Sight(TorchDispatchMode):
    """Lists the storages that operators use and make, until it is taken off."""

    supports_higher_order_operators = True

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        self.uses: dict[int, Use] = {}
        self.made: dict[int, Made] = {}
        self.former: dict[int, int] = {}  # ranges that were made, given back and made anew
        self.own = Uncounted()
        self._real = real
        self._kinds: dict[Any, tuple[bool, bool, bool]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_opens_itself, types)):
            return NotImplemented  # the wrapper opens itself up first
        kwargs = kwargs or {}
        if self._real and not torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        with self.own:
            kind = self._kinds.get(func)
            if kind is None:
                kind = self._kinds[func] = _kind(func)
            uses, makes, computes = kind
            if uses:
                for tensor in tensors_in((args, kwargs)):
                    self.use(tensor, str(func))
        out = func(*args, **kwargs)
        if makes:
            with self.own:
                for tensor in tensors_in(out):
                    self._make(tensor, computed=computes)
        return out

    def use(self, tensor: torch.Tensor, by: str) -> None:
        """Enter what the capture uses, whether or not an operator showed it."""
        # Copies read pinned memory of the host at each replay; other host memory is read once.
        if self._real and not (tensor.is_cuda or tensor.is_pinned()):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self.made:
            return
        use = self.uses.get(address)
        if use is None:
            lines = " < ".join(user_lines(sys._getframe(1)))
            node = torch._C._current_autograd_node()
            place = lines or (f"of {node.name()}" if node is not None else "an unknown place")
            first_use = f"first used by {by} at {place}"
            use = Use(address, storage.nbytes(), weakref.ref(storage), first_use)
            self.uses[address] = use
        use.pointers.add(tensor.data_ptr())

    def _make(self, tensor: torch.Tensor, *, computed: bool) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or (self._real and not tensor.is_cuda):
            return
        # By identity: memory that was used and given back may be made something else of.
        use, known = self.uses.get(address), self.made.get(address)
        if any(each is not None and each.storage() is storage for each in (use, known)):
            return
        if known is not None:
            self.former[address] = max(known.range[1], self.former.get(address, 0))
        references = weakref.ref(storage), weakref.ref(tensor)
        self.made[address] = Made(address, storage.nbytes(), *references, computed)

    def take_off(self) -> None:
        """Leave the stack of modes, also if the program has put others on top since."""
        if self not in modes._get_current_dispatch_mode_stack():
            return
        above = []
        while (mode := modes._pop_mode()) is not self:
            above.append(mode)
        modes._push_mode(self)
        self.__exit__(None, None, None)
        for mode in reversed(above):
            modes._push_mode(mode)


class Ledger:
    """Addresses that a graph relies on: of named tensors, else of storages."""

    def __init__(self, uses: Iterable[Use], named: Named) -> None:
        by_pointer: dict[int, tuple[str, torch.Tensor]] = {}
        by_storage: dict[int, str] = {}
        for name, tensor in local_parts(named):
            if tensor.numel():
                by_pointer.setdefault(tensor.data_ptr(), (name, tensor))
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), name)
        self._entries: list[tuple[Any, int, str, Use]] = []
        for use in uses:
            use.name = by_storage.get(use.address, "")
            found = [(p, *by_pointer[p]) for p in sorted(use.pointers) if p in by_pointer]
            for pointer, name, tensor in found:
                self._entries.append((weakref.ref(tensor), pointer, name, use))
            if not found:
                self._entries.append((use.storage, use.address, "", use))
        self._tabulate()

    def _tabulate(self) -> None:
        self._references = [entry[0] for entry in self._entries]
        self._addresses = [entry[1] for entry in self._entries]

    def holds(self) -> bool:
        """Whether all is alive and where it was; this is what a replay costs."""
        try:
            return [ref().data_ptr() for ref in self._references] == self._addresses
        except AttributeError:  # None: something died
            return False

    def stale(self, named: Named) -> list[tuple[str, str]]:
        """What is at fault and why; entries whose memory is the right one all the same are kept."""
        now = dict(local_parts(named))
        stale, kept = [], []
        for ref, address, name, use in self._entries:
            target, storage, heir = ref(), use.storage(), now.get(name)
            if target is not None:
                why = _moved(address, target.data_ptr())
            elif heir is not None:
                why = _moved(address, heir.data_ptr())
                ref = weakref.ref(heir)
            elif storage is None:
                if _in_private_memory(use.address):
                    continue  # of another graph, which still holds its pool
                why = "freed since the capture"
            else:
                why = _moved(use.address, storage.data_ptr())
                ref, address = use.storage, use.address
            if why:
                stale.append((name or use.described, why))
            kept.append((ref, address, name, use))
        self._entries = kept
        self._tabulate()
        return stale


def user_lines(frame: FrameType | None) -> list[str]:
    """`file:line` of the innermost frames that belong to the program."""
    found: list[str] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_USERS) and "transformer_engine/" not in file:
            path = Path(file)
            inside = path.is_relative_to(Path.cwd())
            short = path.relative_to(Path.cwd()) if inside else Path(*path.parts[-2:])
            found.append(f"{short}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _opens_itself(kind: type) -> bool:
    """Whether operators on a tensor class become operators on the tensors that it holds."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not torch._C._disabled_torch_dispatch_impl


def _kind(func: Any) -> tuple[bool, bool, bool]:
    """Whether an operator uses data of its arguments, makes results, and writes all of them."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True, True, False
    name = schema.name
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    aliases = [result.alias_info is not None for result in schema.returns]
    if name in _USES_NO_DATA or (aliases and all(aliases) and not writes):
        return False, False, False  # a view
    like = name.startswith("aten::new_") or name.endswith("_like")
    return not like, True, "empty" not in name and not any(aliases)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Plain dense tensors in nested lists."""
    if isinstance(values, torch.Tensor):
        local = getattr(values, "_local_tensor", values)
        if local.layout is torch.strided and not _opens_itself(type(local)):
            yield local
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def local_parts(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of this rank's part of each tensor."""
    return ((name, tensor) for name, value in named() for tensor in tensors_in(value))


def _moved(captured: int, now: int) -> str:
    """Why a tensor is at fault; empty if it is where it was."""
    if now == captured:
        return ""
    return f"captured at {captured:#x}, now " + (f"at {now:#x}" if now else "freed")


def memory_of(pool: Any) -> tuple[list[Range], list[Range]]:
    """Segments of a graph memory pool, and what is allocated in them. No device work."""
    segments: list[Range] = []
    blocks: list[Range] = []
    for segment in torch.cuda.memory_snapshot(pool, include_traces=False):
        if tuple(segment["segment_pool_id"]) == tuple(pool):
            segments.append((segment["address"], segment["address"] + segment["total_size"]))
            blocks += [
                (block["address"], block["address"] + block["size"])
                for block in segment["blocks"]
                if block["state"] != "inactive"
            ]
    return segments, blocks


def _in_private_memory(address: int) -> bool:
    """Whether an address lies in a pool that graphs still hold."""
    return torch.cuda.is_initialized() and any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot(include_traces=False)
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def within(address: int, ranges: Iterable[Range]) -> bool:
    """Whether an address lies in one of the ranges."""
    return any(first <= address < end for first, end in ranges)


def without(ranges: Iterable[Range], holes: Iterable[Range]) -> list[Range]:
    """The union of ranges less the holes."""
    found: list[Range] = []
    edges = sorted((point, side, step) for side, group in enumerate((ranges, holes))
                   for first, end in group for point, step in ((first, 1), (end, -1)))  # fmt: skip
    depth, last = [0, 0], 0
    for point, side, step in edges:
        if depth[0] and not depth[1] and point > last:
            start = found.pop()[0] if found and found[-1][1] == last else last
            found.append((start, point))
        depth[side] += step
        last = point
    return found


def fill(address: int, nbytes: int, device: torch.device) -> None:
    """Write NaN of every floating-point type over raw memory, on the current stream."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    torch.empty(0, dtype=torch.uint8, device=device).set_(storage).fill_(0xFF)


def scramble(byte: int) -> None:
    """Take the free blocks that the current stream may have, write them, and give them back."""
    stream, sizes = torch.cuda.current_stream(), []
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        place = segment["device"], segment["stream"], tuple(segment["segment_pool_id"])
        if place == (stream.device_index, stream.cuda_stream, (0, 0)):
            least = _SMALL_BYTES if segment["segment_type"] == "large" else 0
            sizes += [
                block["size"]
                for block in segment["blocks"]
                if block["state"] == "inactive" and block["size"] > least
            ]
    with contextlib.suppress(torch.OutOfMemoryError):
        held = [
            torch.full((size,), byte, dtype=torch.uint8, device=stream.device)
            for size in sorted(sizes, reverse=True)
        ]
        del held
