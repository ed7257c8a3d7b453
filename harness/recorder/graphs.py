"""Watches the CUDA graphs that a training program captures, whoever captures them.

Host graphs (`harness.recorder.capture`) are watched in the same way.

    capture_begin   who captures and where; a dispatch mode lists what operators use and make
    capture_end     storages that are used and do not lie in the graph's memory pool: its ledger
    replay          compare the ledger, look at gradients, disturb memory if asked to, replay, count

Findings are reported; a ledger that no longer holds is raised, too (`StaleGraphAddress`): a replay
would use memory that is somebody else's. Only weak references are held, and all is host work, but
for the stressors' fills. What no operator shows (Triton kernels, library calls) enters a ledger if
the maker of the graph lists its inputs, as both `make_graphed_callables` do. torch.compile's trees
compare their static inputs themselves and record again: their graphs are counted, not checked.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _python_dispatch as modes
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_core.dispatch import opens_itself
from harness.recorder.capture import HostGraph
from harness.recorder.session import patch
from harness.recorder.state import OUTSIDE

Named = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Lists tensors by name as the program has them now; parameters as they are, DTensor included."""
Range = tuple[int, int]
"""First byte of some memory, and the byte past the last one."""

TREES = "torch.compile's cudagraph trees"
METHODS = ("capture_begin", "capture_end", "replay", "reset")
_ATTRIBUTE = "_harness_graph"
_CONTEXTS = {
    "torch/cuda/graphs.py": "torch.cuda.graph",
    "harness/recorder/capture.py": "harness.recorder.capture.graph",
}
_USES_NO_DATA = frozenset({"aten::record_stream", "aten::is_pinned", "aten::set_"})
_MOST_FRAMES = 3
_SMALL_BYTES = 1 << 20  # requests up to this come from a pool of their own


class StaleGraphAddress(RuntimeError):
    """A graph was about to be replayed over memory that is not what it captured: `names`."""

    deltazero_what = "stale_address"

    def __init__(self, names: list[str], detail: str) -> None:
        self.names = names
        super().__init__(detail)


@dataclass(eq=False)
class GraphInfo:
    """One CUDA graph: who captured it last and where in the program; replays of all captures.

    `externals`: storages outside of its memory pool that the last capture uses, as far as seen.
    """

    index: int
    maker: str = ""
    place: str = ""
    captures: int = 0
    replays: int = 0
    externals: int = 0
    optimizer_steps: int = 0


@dataclass(eq=False)
class Memory:
    """A storage that a capture uses or makes, by weak reference.

    `pointers`: of the tensors on it that the capture used. Of one that an operator allocated:
    the `tensor`, and whether the operator wrote all of it (`computed`).
    """

    address: int
    nbytes: int
    storage: Any
    first_use: str = ""
    pointers: set[int] = field(default_factory=set)
    name: str = ""
    tensor: Any = None
    computed: bool = False
    version: int = 0

    @property
    def range(self) -> Range:
        return self.address, self.address + self.nbytes


@dataclass(eq=False)
class _Graph:
    """What is kept of one capture into a `CUDAGraph` object; `real`: it is one of a GPU's."""

    info: GraphInfo
    real: bool
    sight: "Sight | None" = None
    before: list[Range] = field(default_factory=list)
    parameters: list[tuple[Any, str]] = field(default_factory=list)
    forward: "_Graph | None" = None
    nodes: set[int] = field(default_factory=set)
    ledger: "Ledger | None" = None
    static: set[int] = field(default_factory=set)
    designed: dict[int, int] | None = None
    results: list[Memory] = field(default_factory=list)
    scratch: list[Range] = field(default_factory=list)
    pool: Any = None
    device: Any = "cpu"
    reported: set[str] = field(default_factory=set)


class GraphWatch:
    """Watches all graphs of this process, once it is installed.

    Args:
        report: is called with each finding and fact: `graph_captured`, `stale_address`,
            `static_gradient`, `static_activation`.
        named: tensors by name, looked up at the end of a capture and when something is wrong.
        stress: between replays. `poison` fills what a graph is about to write with NaN: memory that
            its capture took and gave back, and results that operators computed in it, unless the
            program wrote them since. Not: buffers of `torch.empty` that the program holds, which
            may keep values between replays, and gradients. `scramble` fills the free memory of the
            current stream with other bits each time; the CPU has none.
        graphs: the classes to watch.
        replayed: is called after each replay.
    """

    def __init__(
        self,
        report: Callable[[str, dict[str, Any]], None],
        named: Named = lambda: (),
        stress: Sequence[str] = (),
        graphs: Sequence[type] = (torch.cuda.CUDAGraph, HostGraph),
        replayed: Callable[[GraphInfo], None] = lambda info: None,
    ) -> None:
        self._report, self._named, self._graphs, self._replayed = report, named, graphs, replayed
        self._poisons, self._scrambles = "poison" in stress, "scramble" in stress
        self._infos: list[GraphInfo] = []
        self._open: list[_Graph] = []
        self._captured: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._turn = 0

    def install(self) -> None:
        for kind in self._graphs:
            for name in METHODS:
                ours = getattr(self, f"_{name.removeprefix('capture_')}")
                patch(name, ours, kind)
        register_optimizer_step_post_hook(self._stepped)

    def capturing(self) -> GraphInfo | None:
        return self._open[-1].info if self._open else None

    def summary(self) -> dict[str, Any]:
        """All graphs as `{"graphs": [{index, maker, place, captures, replays, ...}]}`."""
        return {"graphs": [dict(vars(info)) for info in self._infos]}

    # ---- captures

    def _begin(self, begin: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        maker = _maker_of(graph, sys._getframe(2))
        if maker is None:
            begin(graph, *args, **kwargs)
            return
        pool = args[0] if args else kwargs.get("pool")
        real = isinstance(graph, torch.cuda.CUDAGraph)
        before = _memory_of(pool)[1] if real and pool is not None else []
        sight = Sight(real=real)
        for tensor in tensors_in(maker.inputs):
            sight.use(tensor, maker.name)
        begin(graph, *args, **kwargs)
        sight.own.begin()
        with sight.own:
            if (held := getattr(graph, _ATTRIBUTE, None)) is None:
                self._infos.append(GraphInfo(len(self._infos)))
            info = self._infos[-1] if held is None else held.info
            info.maker, info.place, info.optimizer_steps = maker.name, maker.place, 0
            leaves = (t for t in tensors_in(maker.inputs) if t.is_leaf and t.requires_grad)
            kept = _Graph(info, real, sight, before, [(weakref.ref(t), "") for t in leaves])
            kept.forward = getattr(maker.forward, _ATTRIBUTE, None)
            setattr(graph, _ATTRIBUTE, kept)
            self._open.append(kept)
            sight.__enter__()

    def _end(self, end: Any, graph: Any) -> None:
        kept: _Graph | None = getattr(graph, _ATTRIBUTE, None)
        sight = kept.sight if kept is not None else None
        if kept is None or sight is None:
            end(graph)
            return
        sight.take_off()
        kept.sight = None
        self._open.remove(kept)
        try:
            end(graph)
        finally:
            sight.own.end()
        self._enter(graph, kept, sight)

    def _enter(self, graph: Any, kept: _Graph, sight: "Sight") -> None:
        """After a capture: its ledger, and which memory is its own."""
        info, segments, blocks = kept.info, list[Range](), list[Range]()
        if kept.real:
            kept.pool, kept.device = graph.pool(), torch.device("cuda", torch.cuda.current_device())
            segments, blocks = _memory_of(kept.pool)
        uses = [use for use in sight.uses.values() if not within(use.address, segments)]
        info.captures, info.externals = info.captures + 1, len(uses)
        if info.maker != TREES:
            kept.ledger = Ledger(uses, self._named)
            alive = {each.address for each in sight.made.values() if each.storage() is not None}
            kept.static = alive | {first for first, _ in set(blocks) - set(kept.before)}
            # Whose gradients may lie in the graph's memory, and whose do since the capture.
            leaves = [(n, t) for n, t in self._named() if t.is_leaf and t.requires_grad]
            names = {id(tensor): name for name, tensor in leaves}
            own = [t for ref, _ in kept.parameters if (t := ref()) is not None]
            parameters = own or [t for _, t in leaves]
            kept.parameters = [(weakref.ref(t), names.get(id(t), "")) for t in parameters]
            kept.designed = {id(t): _gradient_address(t) for t in parameters}
            if self._poisons:
                self._enter_poison(kept, sight, segments, blocks)
                if isinstance(graph, HostGraph):
                    kept.scratch = list(graph.scratch())
        kept.before = []
        self._report("graph_captured", dict(vars(info)))

    def _enter_poison(
        self, kept: _Graph, sight: "Sight", segments: list[Range], blocks: list[Range]
    ) -> None:
        # What was there when the capture began may be read before it is written again.
        earlier = [*kept.before, *(use.range for use in sight.uses.values())]
        dead = list(sight.former.items())
        for made in sight.made.values():
            tensor = made.tensor()
            if made.storage() is None:
                dead.append(made.range)
            elif not made.computed or tensor is None or tensor.is_inference():
                continue
            elif without([made.range], earlier) == [made.range]:
                made.version = tensor._version
                kept.results.append(made)
        kept.scratch = without([each for each in dead if within(each[0], segments)], earlier)
        self._captured.add(kept)
        for other in self._captured:  # graphs that share the pool: what is held is not scratch
            if other.pool == kept.pool:
                other.scratch = without(other.scratch, blocks)

    def _reset(self, reset: Any, graph: Any) -> None:
        reset(graph)
        kept: _Graph | None = getattr(graph, _ATTRIBUTE, None)
        if kept is not None and kept.sight is None:  # else a capture is under way
            setattr(graph, _ATTRIBUTE, _Graph(kept.info, kept.real))

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for kept in self._open:
            kept.info.optimizer_steps += 1

    # ---- replays

    def _replay(self, replay: Any, graph: Any) -> None:
        kept: _Graph | None = getattr(graph, _ATTRIBUTE, None)
        if kept is None:
            replay(graph)
            return
        if kept.ledger is not None:
            if not kept.ledger.holds() and (found := kept.ledger.stale(self._named)):
                self._refuse(kept, found)
            kept.nodes.clear()  # a forward; a backward has none of its own
            if kept.parameters:
                self._look_at_gradients(kept)
            node = torch._C._current_autograd_node()
            if kept.forward is not None and node is not None:
                # Whose forward was replayed again since reads the later one's activations.
                kept.forward.nodes.add(id(node))
                if len(kept.forward.nodes) > 1:
                    self._tell("static_activation", kept, forward=kept.forward.info.index)
            self._stress(kept)
        replay(graph)
        kept.info.replays += 1
        self._replayed(kept.info)

    def _refuse(self, kept: _Graph, found: list[tuple[str, str]]) -> None:
        tensors = [f"{name}: {why}" for name, why in found[:8]]
        self._tell("stale_address", kept, tensors=tensors, count=len(found))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        where = f"graph {kept.info.index} of {kept.info.maker}, captured at {kept.info.place}"
        raise StaleGraphAddress([name for name, _ in found], f"{tensors[0]}{more}; {where}")

    def _look_at_gradients(self, kept: _Graph) -> None:
        """Report gradients that the replay overwrites while autograd is to add to them."""
        first, kept.designed = kept.designed, None
        if first:
            # Still where the capture itself put them: accumulated inside of the graph.
            kept.parameters = [
                (ref, name)
                for ref, name in kept.parameters
                if (p := ref()) is not None
                and not (first[id(p)] in kept.static and first[id(p)] == _gradient_address(p))
            ]
        if torch._C._current_autograd_node() is None:
            return  # the program means its graph to write them
        for ref, name in kept.parameters:
            if (p := ref()) is not None and _gradient_address(p) in kept.static:
                name = name or f"parameter of shape {tuple(p.shape)}"
                self._tell("static_gradient", kept, parameter=name)

    def _tell(self, finding: str, kept: _Graph, **detail: Any) -> None:
        if (key := f"{finding} {detail}") not in kept.reported:
            kept.reported.add(key)
            info = kept.info
            about = {"graph": info.index, "maker": info.maker, "place": info.place}
            self._report(finding, {**about, "replay": info.replays, **detail})

    def _stress(self, kept: _Graph) -> None:
        is_asked = self._poisons or self._scrambles
        if not is_asked or (kept.real and torch.cuda.is_current_stream_capturing()):
            return
        with modes._disable_current_modes(), torch.no_grad():
            fresh = (it for it in kept.results if (t := it.tensor()) is not None
                     and t._version == it.version)  # fmt: skip
            for first, end in (*kept.scratch, *(it.range for it in fresh)):
                _fill(first, end - first, kept.device)
            if self._scrambles and kept.real:
                self._turn += 1
                _scramble((53 * self._turn + 1) & 0xFF)


class GraphCounter(GraphWatch):
    """Sees captures and replays, and checks nothing: a job of days must not end by a finding."""

    def _begin(self, begin: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        if (kept := getattr(graph, _ATTRIBUTE, None)) is None:
            self._infos.append(GraphInfo(len(self._infos)))
            kept = _Graph(self._infos[-1], isinstance(graph, torch.cuda.CUDAGraph))
            setattr(graph, _ATTRIBUTE, kept)
        kept.info.captures, kept.info.optimizer_steps = kept.info.captures + 1, 0
        self._open.append(kept)

    def _end(self, end: Any, graph: Any) -> None:
        if (kept := getattr(graph, _ATTRIBUTE, None)) in self._open:
            self._open.remove(kept)
        end(graph)


class _Maker(NamedTuple):
    """Who captures; `inputs`: tensors that it says the graph uses; `forward`: of a backward."""

    name: str
    place: str
    inputs: Sequence[Any] = ()
    forward: Any = None


def _maker_of(graph: Any, frame: FrameType | None) -> _Maker | None:
    """From the stack; None for the empty graph by which the trees hold their pool."""
    lines = user_lines(frame)
    place, name = lines[0] if lines else "an unknown place", "unknown"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("cudagraph_trees.py"):
            if code.co_name != "_record":
                return None
            # Parameters and the like that a recording of the trees relies on.
            held, inputs = frame.f_locals["self"].wrapped_function, frame.f_locals["inputs"]
            static = [inputs[index] for index in held.static_input_idxs]
            return _Maker(TREES, place, [*static, *held.constants])
        if code.co_name in ("make_graphed_callables", "_make_graphed_callables"):
            found = _of_callables(graph, frame, place)
            if found is not None:
                return found
        name = next((n for f, n in _CONTEXTS.items() if code.co_filename.endswith(f)), name)
        frame = frame.f_back
    return _Maker(name, place)


def _of_callables(graph: Any, frame: FrameType, place: str) -> _Maker | None:
    variables, file = frame.f_locals, frame.f_code.co_filename
    library = "TransformerEngine" if "transformer_engine" in file else "torch.cuda"
    keys = {"forward": "fwd_graphs", "backward": "bwd_graphs", "backward_dw": "bwd_dw_graphs"}
    for kind, key in keys.items():
        held = [id(each) for each in variables.get(key, ())]
        if id(graph) in held:
            number = held.index(id(graph))
            surfaces = variables.get("per_callable_static_input_surfaces", ())
            inputs = list(tensors_in(surfaces[number])) if number < len(surfaces) else []
            forward = variables["fwd_graphs"][number] if kind == "backward" else None
            name = f"{library}.make_graphed_callables {kind} {number}"
            return _Maker(name, place, inputs, forward)
    return None


def _gradient_address(parameter: torch.Tensor) -> int:
    found = next(tensors_in(parameter.grad), None)
    return 0 if found is None else found.untyped_storage().data_ptr()


# ---- what a capture uses and makes, and whether it is still there


class Uncounted:
    """Inside of it, what the watch allocates brings no garbage collection nearer, and none runs.

    A graph that the collector destroys breaks the capture under way (pytorch #195397), which is to
    be seen if the program does it, and not to be caused by its watch. So the threshold is higher by
    the watch's own objects until they leave the young generation.
    """

    def begin(self) -> None:
        self._ours, self._threshold = 0, gc.get_threshold()
        gc.callbacks.append(self._collected)

    def end(self) -> None:
        gc.callbacks.remove(self._collected)
        self._collected("start", None)

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()
        self._count = gc.get_count()[0]

    def __exit__(self, *error: object) -> None:
        self._ours = max(self._ours + gc.get_count()[0] - self._count, 0)
        first, *others = self._threshold
        if first:  # a threshold of 0 collects nothing anyway
            gc.set_threshold(first + self._ours, *others)
        if self._was_on:
            gc.enable()

    def _collected(self, phase: str, info: object) -> None:
        if phase == "start":
            self._ours = 0
            gc.set_threshold(*self._threshold)


class Sight(TorchDispatchMode):
    """Lists the storages that operators use and make, until it is taken off."""

    supports_higher_order_operators = True

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        self.uses: dict[int, Memory] = {}
        self.made: dict[int, Memory] = {}
        self.former: dict[int, int] = {}  # ranges that were made, given back and made anew
        self.own = Uncounted()
        self._real = real
        self._kinds: dict[Any, tuple[bool, bool, bool]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(opens_itself, types)):
            return NotImplemented  # the wrapper opens itself up first
        kwargs = kwargs or {}
        if self._real and not torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        with self.own:
            if func not in self._kinds:
                self._kinds[func] = _kind(func)
            uses, makes, computes = self._kinds[func]
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
        # Copies read pinned memory of the host at each replay; other host memory is read once.
        if self._real and not (tensor.is_cuda or tensor.is_pinned()):
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self.made:
            return
        if address not in self.uses:
            node = torch._C._current_autograd_node()
            unseen = "an unknown place" if node is None else f"of {node.name()}"
            place = " < ".join(user_lines(sys._getframe(1))) or unseen
            first_use = f"first used by {by} at {place}"
            self.uses[address] = Memory(address, storage.nbytes(), weakref.ref(storage), first_use)
        self.uses[address].pointers.add(tensor.data_ptr())

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
        self.made[address] = Memory(
            address, storage.nbytes(), weakref.ref(storage), tensor=weakref.ref(tensor),
            computed=computed,
        )  # fmt: skip

    def take_off(self) -> None:
        stack = modes._get_current_dispatch_mode_stack()
        if self in stack:
            above = [modes._pop_mode() for _ in stack[stack.index(self) + 1 :]]
            self.__exit__(None, None, None)
            for mode in reversed(above):
                modes._push_mode(mode)


class Ledger:
    """Addresses that a graph relies on: of named tensors, else of storages."""

    def __init__(self, uses: Iterable[Memory], named: Named) -> None:
        by_pointer: dict[int, tuple[str, torch.Tensor]] = {}
        by_storage: dict[int, str] = {}
        for name, tensor in _local_parts(named):
            if tensor.numel():
                by_pointer.setdefault(tensor.data_ptr(), (name, tensor))
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), name)
        entries: list[tuple[Any, int, str, Memory]] = []
        for use in uses:
            use.name = by_storage.get(use.address, "")
            found = [(p, *by_pointer[p]) for p in sorted(use.pointers) if p in by_pointer]
            entries += [(weakref.ref(tensor), p, name, use) for p, name, tensor in found]
            if not found:
                entries.append((use.storage, use.address, "", use))
        self._keep(entries)

    def _keep(self, entries: list[tuple[Any, int, str, Memory]]) -> None:
        self._entries = entries
        self._references = [entry[0] for entry in entries]
        self._addresses = [entry[1] for entry in entries]

    def holds(self) -> bool:
        """Whether all is alive and where it was; this is what a replay costs."""
        try:
            return [ref().data_ptr() for ref in self._references] == self._addresses
        except AttributeError:  # None: something died
            return False

    def stale(self, named: Named) -> list[tuple[str, str]]:
        """What is at fault and why; entries whose memory is the right one all the same are kept."""
        now = dict(_local_parts(named))
        stale, kept = [], []
        for ref, address, name, use in self._entries:
            held = ref()
            if held is None and (held := now.get(name)) is not None:
                ref = weakref.ref(held)
            elif held is None and (held := use.storage()) is not None:
                ref, address = use.storage, use.address
            elif held is None and _in_private_memory(use.address):
                continue  # of another graph, which still holds its pool
            at = 0 if held is None else held.data_ptr()
            if at != address:
                described = f"storage of {use.nbytes} bytes ({use.first_use})"
                why = f"captured at {address:#x}, now " + (f"at {at:#x}" if at else "freed")
                why = "freed since the capture" if held is None else why
                stale.append((name or use.name or described, why))
            kept.append((ref, address, name, use))
        self._keep(kept)
        return stale


def user_lines(frame: FrameType | None) -> list[str]:
    """`file:line` of the innermost frames that belong to the program."""
    found: list[str] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith(OUTSIDE) and "transformer_engine/" not in file:
            path = Path(file)
            inside = path.is_relative_to(Path.cwd())
            short = path.relative_to(Path.cwd()) if inside else Path(*path.parts[-2:])
            found.append(f"{short}:{frame.f_lineno}")
        frame = frame.f_back
    return found


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
        if local.layout is torch.strided and not opens_itself(type(local)):
            yield local
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value)


def _local_parts(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of this rank's part of each tensor."""
    return ((name, tensor) for name, value in named() for tensor in tensors_in(value))


# ---- memory


def _memory_of(pool: Any = None) -> tuple[list[Range], list[Range]]:
    """Segments of a graph memory pool, or of all that graphs hold; what is allocated in them."""
    segments, blocks = list[Range](), list[Range]()
    for segment in torch.cuda.memory_snapshot(pool, include_traces=False):
        own, first = tuple(segment["segment_pool_id"]), segment["address"]
        if own == tuple(pool) if pool is not None else own != (0, 0):
            segments.append((first, first + segment["total_size"]))
            held = (each for each in segment["blocks"] if each["state"] != "inactive")
            blocks += [(each["address"], each["address"] + each["size"]) for each in held]
    return segments, blocks


def _in_private_memory(address: int) -> bool:
    return torch.cuda.is_initialized() and within(address, _memory_of()[0])


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


def _fill(address: int, nbytes: int, device: Any) -> None:
    """Write NaN of every floating-point type over raw memory, on the current stream."""
    device = torch.device(device)
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    torch.empty(0, dtype=torch.uint8, device=device).set_(storage).fill_(0xFF)


def _scramble(byte: int) -> None:
    """Take the free blocks that the current stream may have, write them, and give them back."""
    stream, sizes = torch.cuda.current_stream(), list[int]()
    for segment in torch.cuda.memory_snapshot(include_traces=False):
        place = segment["device"], segment["stream"], tuple(segment["segment_pool_id"])
        if place == (stream.device_index, stream.cuda_stream, (0, 0)):
            least = _SMALL_BYTES if segment["segment_type"] == "large" else 0
            free = (block["size"] for block in segment["blocks"] if block["state"] == "inactive")
            sizes += [size for size in free if size > least]
    with contextlib.suppress(torch.OutOfMemoryError):
        sizes.sort(reverse=True)
        held = [torch.full((n,), byte, dtype=torch.uint8, device=stream.device) for n in sizes]
        del held
