"""Watches the CUDA graphs that a training program captures, whoever captures them.

Host graphs (`harness.recorder.capture`) are watched in the same way.

    capture_begin   who captures and where; a dispatch mode lists what operators use and make
    capture_end     storages that are used and do not lie in the graph's memory pool: its ledger
    replay          compare the ledger, look at gradients, disturb memory if asked to, replay, count

Findings are reported. A ledger that no longer holds is also raised (`StaleGraphAddress`), because a
replay would read and write memory that is somebody else's by now. Only weak references are held.

What no operator shows (Triton kernels, library calls) enters a ledger if the maker of the graph
lists its inputs: both `make_graphed_callables` do. torch.compile's trees compare the addresses of
their static inputs themselves and record again, and they know which outputs live: their graphs are
counted, not checked.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from harness.recorder.capture import HostGraph
from harness.recorder.graph_memory import (
    Ledger,
    Made,
    Named,
    Range,
    Sight,
    fill,
    memory_of,
    scramble,
    tensors_in,
    user_lines,
    within,
    without,
)

STRESSORS = ("poison", "scramble")
TREES = "torch.compile's cudagraph trees"
_ATTRIBUTE = "_harness_graph"
_CONTEXTS = {
    "torch/cuda/graphs.py": "torch.cuda.graph",
    "harness/recorder/capture.py": "harness.recorder.capture.graph",
}
_METHODS = ("capture_begin", "capture_end", "replay", "reset")


class StaleGraphAddress(RuntimeError):
    """A graph was about to be replayed over memory that is not what it captured.

    Attributes:
        names: tensors at fault; what has no name is described by size and first use.
        deltazero_what: how the recorder's error record calls it.
    """

    deltazero_what = "stale_address"

    def __init__(self, names: list[str], detail: str) -> None:
        self.names = names
        super().__init__(detail)


@dataclass(eq=False)
class GraphInfo:
    """One CUDA graph.

    Attributes:
        index: in order of first capture.
        maker: who captured it, such as `torch.cuda.make_graphed_callables backward 2`.
        place: `file:line` of the program that had it captured last.
        captures, replays: how often; replays of all captures.
        externals: storages outside of its memory pool that the last capture uses, as far as seen.
        optimizer_steps: steps of optimizers inside the last capture.
    """

    index: int
    maker: str
    place: str
    captures: int = 0
    replays: int = 0
    externals: int = 0
    optimizer_steps: int = 0


class _Graph:
    """What is kept of one `CUDAGraph` object; `real`: it is one of a GPU's."""

    def __init__(self, info: GraphInfo, *, real: bool) -> None:
        self.info, self.real = info, real
        self.sight: Sight | None = None
        self.before: list[Range] = []
        self.parameters: list[tuple[Any, str]] = []
        self.forward: _Graph | None = None
        self.nodes: set[int] = set()
        self.clear()

    def clear(self) -> None:
        """Forget the capture."""
        self.ledger: Ledger | None = None
        self.static: set[int] = set()
        self.designed: dict[int, int] | None = None
        self.results: list[Made] = []
        self.scratch: list[Range] = []
        self.pool: Any = None
        self.device = torch.device("cpu")
        self.reported: set[str] = set()


class GraphWatch:
    """Watches all graphs of this process between `install` and `uninstall`.

    Args:
        report: is called with each finding and fact: `graph_captured`, `stale_address`,
            `static_gradient`, `static_activation`.
        named: tensors by name, looked up at the end of a capture and when something is wrong.
        stress: stressors between replays, of `STRESSORS`. `poison` fills what a graph is about to
            write with NaN: memory that its capture took and gave back, and results that operators
            computed in it, unless the program wrote them since. Not: buffers of `torch.empty` that
            the program holds, which may keep values between replays, and gradients. `scramble`
            fills the free memory of the current stream with other bits each time; the CPU has none.
        graphs: the classes to watch.

    Raises:
        ValueError: an unknown stressor.
    """

    def __init__(
        self,
        report: Callable[[str, dict[str, Any]], None],
        named: Named = lambda: (),
        stress: Sequence[str] = (),
        graphs: Sequence[type] = (torch.cuda.CUDAGraph, HostGraph),
    ) -> None:
        if unknown := [name for name in stress if name not in STRESSORS]:
            raise ValueError(f"Expected stressors of {STRESSORS}, got {unknown[0]!r}.")
        self.on_replayed: list[Callable[[GraphInfo], None]] = []
        self._report, self._named, self._graphs = report, named, graphs
        self._poisons, self._scrambles = (name in stress for name in STRESSORS)
        self._infos: list[GraphInfo] = []
        self._open: list[_Graph] = []
        self._captured: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._patches: list[tuple[type, str, Any, Any]] = []
        self._hook: Any = None
        self._turn = 0

    def install(self) -> None:
        """Begin to watch; a second call does nothing."""
        if self._patches:
            return
        for kind in self._graphs:
            for name, patch in self._watched(*(getattr(kind, each) for each in _METHODS)).items():
                self._patches.append((kind, name, getattr(kind, name), patch))
                setattr(kind, name, patch)
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _watched(self, begin: Any, end: Any, replay: Any, reset: Any) -> dict[str, Any]:
        """What takes the place of a class's methods."""

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._begin(graph, begin, args, kwargs)

        def capture_end(graph: Any) -> None:
            self._end(graph, end)

        def watched_replay(graph: Any) -> None:
            kept = getattr(graph, _ATTRIBUTE, None)
            if kept is None:
                replay(graph)
            else:
                self._replay(graph, kept, replay)

        def watched_reset(graph: Any) -> None:
            reset(graph)
            if (kept := getattr(graph, _ATTRIBUTE, None)) is not None:
                kept.clear()

        patches = (capture_begin, capture_end, watched_replay, watched_reset)
        return dict(zip(_METHODS, patches, strict=True))

    def uninstall(self) -> None:
        """Stop to watch. What others have patched since stays."""
        for kind, name, original, patch in self._patches:
            if getattr(kind, name) is patch:
                setattr(kind, name, original)
        self._patches = []
        if self._hook is not None:
            self._hook.remove()

    def capturing(self) -> GraphInfo | None:
        """The graph whose capture is under way, None if none is."""
        return self._open[-1].info if self._open else None

    def summary(self) -> dict[str, Any]:
        """All graphs as `{"graphs": [{index, maker, place, captures, replays, ...}]}`."""
        return {"graphs": [dict(vars(info)) for info in self._infos]}

    # ---- captures

    def _begin(self, graph: Any, begin: Any, args: Any, kwargs: Any) -> None:
        maker = _Maker.of(graph, sys._getframe(2))
        if maker is None:
            begin(graph, *args, **kwargs)
            return
        pool = args[0] if args else kwargs.get("pool")
        real = isinstance(graph, torch.cuda.CUDAGraph)
        before = memory_of(pool)[1] if real and pool is not None else []
        sight = Sight(real=real)
        for tensor in tensors_in(maker.inputs):
            sight.use(tensor, maker.name)
        begin(graph, *args, **kwargs)
        sight.own.begin()
        with sight.own:
            kept: _Graph | None = getattr(graph, _ATTRIBUTE, None)
            if kept is None:
                kept = _Graph(GraphInfo(len(self._infos), maker.name, maker.place), real=real)
                self._infos.append(kept.info)
                setattr(graph, _ATTRIBUTE, kept)
            kept.clear()
            kept.before, kept.sight = before, sight
            kept.info.maker, kept.info.place, kept.info.optimizer_steps = maker.name, maker.place, 0
            kept.forward = getattr(maker.forward, _ATTRIBUTE, None)
            leaves = (t for t in tensors_in(maker.inputs) if t.is_leaf and t.requires_grad)
            kept.parameters = [(weakref.ref(t), "") for t in leaves]
            self._open.append(kept)
            sight.__enter__()

    def _end(self, graph: Any, end: Any) -> None:
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

    def _enter(self, graph: Any, kept: _Graph, sight: Sight) -> None:
        """After a capture: its ledger, and which memory is its own."""
        info = kept.info
        segments: list[Range] = []
        blocks: list[Range] = []
        if kept.real:
            kept.pool, kept.device = graph.pool(), torch.device("cuda", torch.cuda.current_device())
            segments, blocks = memory_of(kept.pool)
        uses = [use for use in sight.uses.values() if not within(use.address, segments)]
        info.captures, info.externals = info.captures + 1, len(uses)
        if info.maker != TREES:
            kept.ledger = Ledger(uses, self._named)
            alive = [made for made in sight.made.values() if made.storage() is not None]
            kept.static = {first for first, _ in set(blocks) - set(kept.before)}
            kept.static |= {made.address for made in alive}
            self._enter_gradients(kept)
            if self._poisons:
                self._enter_poison(kept, sight, segments, blocks)
                if isinstance(graph, HostGraph):
                    kept.scratch = list(graph.scratch())
        kept.before = []
        self._report("graph_captured", dict(vars(info)))

    def _enter_gradients(self, kept: _Graph) -> None:
        """Whose gradients may lie in the graph's memory, and whose do since the capture."""
        leaves = [(n, t) for n, t in self._named() if t.is_leaf and t.requires_grad]
        names = {id(tensor): name for name, tensor in leaves}
        own = [ref() for ref, _ in kept.parameters]
        parameters = [t for t in own if t is not None] or [t for _, t in leaves]
        kept.parameters = [(weakref.ref(t), names.get(id(t), "")) for t in parameters]
        kept.designed = {id(t): _gradient_address(t) for t in parameters}

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        for kept in self._open:
            kept.info.optimizer_steps += 1

    # ---- replays

    def _replay(self, graph: Any, kept: _Graph, replay: Any) -> None:
        info = kept.info
        if kept.ledger is not None:
            if not kept.ledger.holds():
                self._refuse(kept, kept.ledger)
            kept.nodes.clear()  # a forward; a backward has none of its own
            if kept.parameters:
                self._look_at_gradients(kept)
            if kept.forward is not None:
                self._look_at_activations(kept, kept.forward)
            self._stress(kept)
        replay(graph)
        info.replays += 1
        for callback in self.on_replayed:
            callback(info)

    def _refuse(self, kept: _Graph, ledger: Ledger) -> None:
        found = ledger.stale(self._named)
        if not found:
            return
        tensors = [f"{name}: {why}" for name, why in found[:8]]
        self._tell("stale_address", kept, tensors=tensors, count=len(found))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        where = f"graph {kept.info.index} of {kept.info.maker}, captured at {kept.info.place}"
        raise StaleGraphAddress([name for name, _ in found], f"{tensors[0]}{more}; {where}")

    def _look_at_gradients(self, kept: _Graph) -> None:
        """Report gradients that the replay overwrites while autograd is to add to them.

        Where no backward runs, the program means its graph to write them.
        """
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
            return
        for ref, name in kept.parameters:
            parameter = ref()
            if parameter is None or parameter.grad is None:
                continue
            if _gradient_address(parameter) in kept.static:
                name = name or f"parameter of shape {tuple(parameter.shape)}"
                self._tell_once("static_gradient", kept, parameter=name)

    def _look_at_activations(self, kept: _Graph, forward: _Graph) -> None:
        """Report a backward whose forward was replayed again since: it reads the later one's."""
        node = torch._C._current_autograd_node()
        if node is not None:
            forward.nodes.add(id(node))
            if len(forward.nodes) > 1:
                self._tell_once("static_activation", kept, forward=forward.info.index)

    def _tell_once(self, finding: str, kept: _Graph, **detail: Any) -> None:
        key = f"{finding} {detail}"
        if key not in kept.reported:
            kept.reported.add(key)
            self._tell(finding, kept, **detail)

    def _tell(self, finding: str, kept: _Graph, **detail: Any) -> None:
        info = kept.info
        about = {"graph": info.index, "maker": info.maker, "place": info.place}
        self._report(finding, {**about, "replay": info.replays, **detail})

    # ---- stressors

    def _enter_poison(
        self, kept: _Graph, sight: Sight, segments: list[Range], blocks: list[Range]
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

    def _stress(self, kept: _Graph) -> None:
        if not (self._poisons or self._scrambles):
            return
        if kept.real and torch.cuda.is_current_stream_capturing():
            return
        with _disable_current_modes(), torch.no_grad():
            if self._poisons:
                for first, end in kept.scratch:
                    fill(first, end - first, kept.device)
                for made in kept.results:
                    tensor = made.tensor()
                    if tensor is not None and tensor._version == made.version:
                        fill(made.address, made.nbytes, kept.device)
            if self._scrambles and kept.real:
                self._turn += 1
                scramble((53 * self._turn + 1) & 0xFF)


@dataclass
class _Maker:
    """Who captures; `inputs`: tensors that it says the graph uses; `forward`: of a backward."""

    name: str
    place: str
    inputs: list[Any] = field(default_factory=list)
    forward: Any = None

    @classmethod
    def of(cls, graph: Any, frame: FrameType | None) -> "_Maker | None":
        """From the stack; None for the empty graph by which the trees hold their pool."""
        lines = user_lines(frame)
        place, name = lines[0] if lines else "an unknown place", "unknown"
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith("cudagraph_trees.py"):
                return (
                    cls(TREES, place, _static_inputs(frame)) if code.co_name == "_record" else None
                )
            if code.co_name in ("make_graphed_callables", "_make_graphed_callables"):
                found = cls._of_callables(graph, frame, place)
                if found is not None:
                    return found
            name = next((n for f, n in _CONTEXTS.items() if code.co_filename.endswith(f)), name)
            frame = frame.f_back
        return cls(name, place)

    @classmethod
    def _of_callables(cls, graph: Any, frame: FrameType, place: str) -> "_Maker | None":
        variables, file = frame.f_locals, frame.f_code.co_filename
        library = "TransformerEngine" if "transformer_engine" in file else "torch.cuda"
        for kind, key in (
            ("forward", "fwd_graphs"), ("backward", "bwd_graphs"), ("backward_dw", "bwd_dw_graphs"),
        ):  # fmt: skip
            for number, each in enumerate(variables.get(key, ())):
                if each is graph:
                    name = f"{library}.make_graphed_callables {kind} {number}"
                    surfaces = variables.get("per_callable_static_input_surfaces", ())
                    inputs = surfaces[number] if number < len(surfaces) else ()
                    forward = variables["fwd_graphs"][number] if kind == "backward" else None
                    return cls(name, place, list(tensors_in(inputs)), forward)
        return None


def _static_inputs(frame: FrameType) -> list[Any]:
    """Parameters and the like that a recording of the trees relies on."""
    variables = frame.f_locals
    function, inputs = variables["self"].wrapped_function, variables["inputs"]
    return [*(inputs[index] for index in function.static_input_idxs), *function.constants]


def _gradient_address(parameter: torch.Tensor) -> int:
    """Where the gradient's storage lies; 0 without one."""
    found = list(tensors_in(parameter.grad))
    return found[0].untyped_storage().data_ptr() if found else 0
