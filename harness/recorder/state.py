"""Which tensors a training program has, by name, and what records have of them: digests, contents.

A parameter is named by its module's path from the outermost module that holds it, without what
wrappers add (`module.` of DDP, `_orig_mod.` of torch.compile). Modules are found among the objects
that the garbage collector tracks, as optimizers are made, when parameters are still where the
program put them: later a sharding engine may have replaced them for the time of a forward pass.
"""

import contextlib
import gc
import hashlib
import itertools
import numbers
import os
import random
import re
import resource
import struct
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fsdp_core.graph.digest import digest_hex
from harness.recorder.session import Session

Named = list[tuple[str, Tensor]]
OUTSIDE = (
    "<frozen", contextlib.__file__,
    *(f"{Path(each).parent}{os.sep}" for each in (torch.__file__, __file__)),
)  # fmt: skip
"""How paths of files begin that are no program's."""
PAGE_BYTES = 4096
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of module paths that are not the program's own; of all but the first, the wrapper calls
what it wraps as a module, which is not to be seen twice."""
OTHERS = "others"
"""Group of modules that no optimizer trains; `harness.records` has the name, too."""
HOLDERS_OF_GRADIENTS = ("grad", "main_grad", "decoupled_grad")
"""Attributes of a parameter in which engines keep its gradient; the first that is not None."""
ORIGINAL, MAIN = "orig_param", "main_param"
"""Attributes: of a parameter trained in another's place, that one (megatron-fsdp), and of one in
whose place another is trained, the other (megatron-core)."""

_NUMBER = re.compile(r"#\d+")

_frozen: list[weakref.ref[Any]] = []


def freeze(original: Any) -> None:
    """In the place of `gc.freeze`, which hides what there is from `gc.get_objects`."""
    _frozen[:] = map(weakref.ref, tracked(nn.Module, torch.optim.Optimizer))
    original()


def tracked(*kinds: type) -> list[Any]:
    """Objects of classes that the garbage collector tracks, or did before `freeze`."""
    objects = itertools.chain(gc.get_objects(), (ref() for ref in _frozen))
    return list({id(x): x for x in objects if issubclass(type(x), kinds)}.values())


@dataclass
class Root:
    """An outermost module, without its wrappers.

    `prefix` is that of its names; None of one that was made in mid-training and not asked for yet.
    `had_optimizer`: whether an optimizer trained a part of it.
    """

    module: weakref.ref[nn.Module]
    kind: str
    prefix: str | None = ""
    had_optimizer: bool = False


class Names:
    """Names of parameters and modules; holds none of them alive.

    Until recording begins a name may change, as further modules are made; then it stays. A module
    that is made anew, to be loaded from a checkpoint, has the names of the one that it replaces.
    `optimizers`: those that there are when it is called.
    """

    def __init__(self, optimizers: Callable[[], Iterable[Any]]) -> None:
        self._optimizers = optimizers
        self._known: dict[int, tuple[weakref.ref[Any], Root | None, str]] = {}
        self._roots: list[Root] = []
        self._others: list[tuple[weakref.ref[nn.Module], str]] = []
        self._unnamed = 0
        self.is_settled = False

    def scan(self, params: Iterable[Tensor], roots: Iterable[nn.Module] = ()) -> None:
        """Name everything in `roots` and in the outermost modules that hold one of `params`."""
        places = {id(param): number for number, param in enumerate(params)}
        held = _holding(places)
        if len(held) > 1:
            gc.collect()  # a wrapper that nobody has any more must not count as a root
            held = _holding(places)
        found = self.roots
        compiled: list[tuple[nn.Module, nn.Module]] = []
        trained: set[int] = set()
        for outer in (*roots, *held):
            *around, module = _around(outer)
            compiled += [(part, module) for part in around if WRAPPED[0] in part._modules]
            if not any(module is each for each in found):
                found.append(module)
            if any(outer is each for each in held):
                trained.add(id(module))
        inside = {id(part) for module in found for part in module.modules() if part is not module}
        learned: set[int] = set()
        for module in found:
            if id(module) not in inside:
                root = self._root(module)
                root.had_optimizer |= id(module) in trained
                self._learn(root, module, learned)
        for outer, module in compiled:
            if (known := self._known.get(id(module))) is not None:
                self._known[id(outer)] = (weakref.ref(outer), *known[1:])
        if not self.is_settled:
            # No prefix for a single root; the names of their classes, numbered, for several.
            live = ((root, root.module()) for root in self._roots)
            self._roots = [root for root, it in live if it is not None and id(it) not in inside]
            kinds = [root.kind for root in self._roots]
            for place, (root, kind) in enumerate(zip(self._roots, kinds, strict=True)):
                number = "" if kinds.count(kind) == 1 else str(kinds[:place].count(kind))
                root.prefix = kind + number if len(kinds) > 1 else ""

    def _root(self, module: nn.Module) -> Root:
        for root in self._roots:
            if root.module() is module:
                return root
        first, *others = type(module).__bases__
        # Its class without what FSDP2 makes of it.
        kind = others[0] if others and first.__name__ == "FSDPModule" else type(module)
        root = Root(weakref.ref(module), kind.__name__, None if self.is_settled else "")
        self._roots.append(root)
        return root

    def _learn(self, root: Root, inner: nn.Module, learned: set[int]) -> None:
        def learn(held: Any, path: str) -> None:
            path = ".".join(part for part in path.split(".") if part not in WRAPPED)
            self._known[id(held)] = (weakref.ref(held), root, path)

        for path, module in inner.named_modules():
            if not any(name in module._modules for name in WRAPPED[1:]):
                learn(module, path)
        for path, param in inner.named_parameters(remove_duplicate=False):
            if id(param) not in learned and not (self.is_settled and self.knows(param)):
                learned.add(id(param))
                learn(param, path)
            if isinstance(main := getattr(param, MAIN, None), Tensor):
                learn(main, path)

    def knows(self, held: Any) -> bool:
        known = self._known.get(id(held))
        return known is not None and known[0]() is held

    def of(self, param: Tensor) -> str:
        """The parameter's name; `unnamed.N` for one that no module holds."""
        if not self.knows(param):
            original = getattr(param, ORIGINAL, None)
            if original is not None and self.knows(original):
                _, *named = self._known[id(original)]
            else:
                named = [None, f"unnamed.{self._unnamed}"]
                self._unnamed += 1
            self._known[id(param)] = (weakref.ref(param), *named)  # type: ignore[assignment]
        return self._name(param)

    def of_module(self, module: nn.Module) -> str | None:
        """The module's path, "" for a root; None if it is not known."""
        return self._name(module) if self.knows(module) else None

    def is_root(self, module: nn.Module) -> bool:
        """Whether it is an outermost module, or wraps one."""
        return self.knows(module) and not self._known[id(module)][2]

    def _name(self, held: Any) -> str:
        _, root, path = self._known[id(held)]
        return path if root is None else _join(self._prefix(root), path)

    def _prefix(self, root: Root) -> str:
        """Prefix of the root's names. A module made in mid-training takes that of a module of its
        class which is freed, or not trained any more: the graph of the last loss may hold it.
        """
        if root.prefix is None:
            gc.collect()  # what it replaces may be in a cycle, as DDP's reducer is
            named = [x for x in self._roots if x.kind == root.kind and x.prefix is not None]
            if gone := next(filter(self._is_replaced, named), None):
                root.prefix = gone.prefix
                self._roots.remove(gone)
                # If it is still alive, as a teacher is, it is compared as the other modules are.
                self._known = {i: each for i, each in self._known.items() if each[1] is not gone}
            else:
                root.prefix = root.kind + (str(len(named)) if named else "")
        assert root.prefix is not None
        return root.prefix

    def _is_replaced(self, root: Root) -> bool:
        if (module := root.module()) is None or not root.had_optimizer:
            return module is None
        trained = _ids(param for each in self._optimizers() for param in parameters(each))
        return trained.isdisjoint(map(id, module.parameters()))

    @property
    def roots(self) -> list[nn.Module]:
        return [module for root in self._roots if (module := root.module()) is not None]

    def buffers(self) -> Named:
        return [
            each
            for root in self.roots
            for module in root.modules()
            if (path := self.of_module(module)) is not None
            for name, buffer in module._buffers.items()
            for each in plain(_join(path, name), buffer)
        ]

    def frozen(self, trained: Iterable[Tensor]) -> Named:
        """Parameters of all roots that no optimizer has, nor another in their place."""
        seen = _ids(trained)
        return [
            each
            for root in self.roots
            for param in root.parameters()
            if id(param) not in seen and self.knows(param)
            for each in plain(self.of(param), param)
        ]

    def find_others(self) -> None:
        """Look for outermost modules of which no optimizer trains a part: an EMA, a teacher."""
        for module in self._new_others():
            kind = type(module).__name__
            number = sum(kind == known.partition("#")[0] for _, known in self._others) + 1
            self._others.append((weakref.ref(module), kind if number == 1 else f"{kind}#{number}"))

    def _new_others(self) -> list[nn.Module]:
        held = {id(module()) for module, _ in self._others}
        inner = [list(_around(outer))[-1] for outer in _outermost()]
        new = [each for each in inner if id(each) not in held and not self.knows(each)]
        return [each for each in new if not isinstance(each, fx.GraphModule)]

    @property
    def other_modules(self) -> list[nn.Module]:
        return [module for ref, _ in self._others if (module := ref()) is not None]

    def others(self) -> Named:
        """Parameters and buffers of those modules, `EMA.layers.0.weight`; of twins `EMA#2...`."""
        return [
            each
            for ref, prefix in self._others
            if (module := ref()) is not None
            if not any(map(self.knows, (*module.modules(), *module.parameters())))
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            for each in plain(_join(prefix, name), tensor)
        ]


def _ids(params: Iterable[Tensor]) -> set[int]:
    """Of parameters, and of the originals of those that stand for another."""
    return {id(each) for param in params for each in (param, getattr(param, ORIGINAL, param))}


def _outermost() -> Iterator[nn.Module]:
    modules = tracked(nn.Module)
    parts = {id(child) for each in modules for child in vars(each).get("_modules", {}).values()}
    return (each for each in modules if id(each) not in parts and "_modules" in vars(each))


def _holding(place: Mapping[int, int]) -> list[nn.Module]:
    """Outermost modules that hold one of the parameters, in the order of those."""
    found = []
    for module in _outermost():
        first = min((place.get(id(p), len(place)) for p in module.parameters()), default=None)
        if first is not None and first < len(place):
            found.append((first, type(module).__qualname__, module))
    return [module for *_, module in sorted(found, key=lambda each: each[:2])]


def _around(module: nn.Module) -> Iterator[nn.Module]:
    """A module's wrappers, such as DDP, from the outermost on, and what they wrap."""
    yield module
    while len(module._modules) == 1 and not module._parameters:
        ((name, inner),) = module._modules.items()
        if inner is None or name not in ("module", *WRAPPED):
            return
        module = inner
        yield module


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def plain(name: str, value: Any) -> Named:
    """The plain tensors of a value, by name: a DTensor's shard, the parts of a quantized tensor."""
    kind = type(value)
    if (kind is Tensor or kind is nn.Parameter) and value.layout is torch.strided:
        if not value.is_complex():
            return [] if value.is_meta else [(name, value)]
    elif not isinstance(value, Tensor):
        return []
    if isinstance(local := getattr(value, "_local_tensor", None), Tensor):
        return plain(name, local)
    if parts := _parts(value):
        return [each for part, held in parts for each in plain(f"{name}.{part}", held)]
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return [] if value.device.type == "meta" else [(name, value)]


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a tensor is made of that is no plain one."""
    if type(value) not in (Tensor, nn.Parameter) and hasattr(type(value), "__tensor_flatten__"):
        return [(part, getattr(value, part)) for part in value.__tensor_flatten__()[0]]
    value = value.detach()
    if isinstance(getattr(value, "_data", None), Tensor):  # TransformerEngine's fp8 weights
        return [(part, getattr(value, part, None)) for part in ("_data", "_scale_inv")]
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return [("indices", value.indices()), ("values", value.values())]
    return []


def gradient(param: Tensor) -> Any:
    """A parameter's gradient, wherever its engine keeps it; None if it has none."""
    held = (getattr(param, holder, None) for holder in HOLDERS_OF_GRADIENTS)
    return next((each for each in held if each is not None), None)


def parameters(optimizer: Any) -> list[Tensor]:
    """What an optimizer trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_gradient(optimizer: Any) -> bool:
    """Whether a gradient is not zero; it waits for the device."""
    held = (each for p in parameters(optimizer) for _, each in plain("", gradient(p)))
    return any(bool(each.any()) for each in held)


class ByHand:
    """Stands in for an optimizer where the program updates the parameters of its modules itself."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = [weakref.ref(each) for each in models]
        self.state: dict[Tensor, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        live = [model for ref in self._models if (model := ref()) is not None]
        trained = (p for each in live for p in each.parameters() if p.requires_grad)
        return [{"params": list(dict.fromkeys(trained))}]


def next_number() -> int:
    """The sequence number of the node that autograd makes next in this thread."""
    with torch.enable_grad():
        node = torch.ones((), requires_grad=True, device="cpu").clone().grad_fn
    assert node is not None
    return node._sequence_nr() + 1


def least_number(roots: Iterable[Tensor]) -> int:
    """The least sequence number of the nodes of a graph: that of the first one made."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, least = set(nodes), sys.maxsize
    while nodes:
        node = nodes.pop()
        least = min(least, node._sequence_nr())
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        nodes += new
    return least


def optimizer_state(optimizer: Any, names: Names, prefix: str) -> tuple[Named, dict[str, Any]]:
    """What an optimizer keeps: tensors by parameter, `layers.0.weight.exp_avg`, and numbers.

    Numbers decide its update: learning rates, step counts, ... Flags choose between
    implementations (`foreach`, `fused`), which a scenario may compare: they are left out.
    """
    tensors: Named = []
    plain_numbers: dict[str, Any] = {}

    def take(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.extend(plain(name, value))
        elif _is_number(value):
            plain_numbers[name] = value
        elif isinstance(value, list | tuple | Mapping):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, each in pairs:
                take(f"{name}.{key}", each)

    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                take(f"{prefix}group{number}.{key}", value)
    for param in parameters(optimizer):
        if isinstance(held := optimizer.state.get(param), Mapping):
            take(names.of(param), held)
    return tensors, plain_numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's, too


def cuda_is_used() -> bool:
    """Whether this process has used a GPU; asking does not make it use one."""
    return bool(torch.cuda.is_initialized())


def random_states(wanted: Container[str]) -> dict[str, bytes | None]:
    """State of every default random generator as bytes; None for one that is not wanted."""
    states: dict[str, bytes | None] = {"cpu": torch.get_rng_state().numpy().tobytes()}
    if cuda_is_used():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    states |= {"python": None, "numpy": None}
    if "python" in wanted:
        states["python"] = repr(random.getstate()).encode()
    if "numpy" in wanted:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = kind.encode() + keys.tobytes() + repr(rest).encode()
    return states


def memory() -> tuple[int, int]:
    """Bytes in use and the most so far: of torch on the GPU, else of the process."""
    if cuda_is_used():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# --- what records have of a step: of programs, and of the built-in trainer ----------------------

HEX_CHARS = 32
"""Of a digest."""
Rows = tuple[Sequence[str], Tensor, Sequence[str]]
"""Names, their digests, int32 [n, 5] on the host or on their way to it, and shapes for people."""


def hashed(data: bytes) -> str:
    """128 bits of BLAKE2b as hex: of what lies on the host and is no tensor."""
    return hashlib.blake2b(data, digest_size=HEX_CHARS // 2).hexdigest()


def seconds_between(before: Any, after: Any) -> float:
    """Between two marks, CUDA's events that the device has passed or times of the host's clock.

    0 if the first one is none of the kind of the second.
    """
    if isinstance(after, torch.cuda.Event):
        return 1e-3 * before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else 0.0
    return float(after - before) if isinstance(before, float) else 0.0


def write_kept(folder: Path, run: str, rank: int, step: int, kept: Iterable[Any]) -> None:
    """Write tensors that a run keeps, as `entry_of` takes them, whole or not at all."""
    from harness.store.contents import write_contents

    write_contents(folder, run, rank, step, map(entry_of, kept))


def entry_of(kept: Any) -> tuple[Any, bytes]:
    """A `fsdp_core.train.taps.Snapshot`, or its like, as `harness.store.contents` has it."""
    from harness.store.contents import KeptTensor, Place

    about = KeptTensor(
        name=kept.name, part=kept.part, dtype=str(kept.tensor.dtype).removeprefix("torch."),
        shape=tuple(kept.tensor.shape), as_digested=kept.as_digested,
        places=tuple(Place(**vars(place)) for place in kept.places),
    )  # fmt: skip
    return about, kept.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def row_of(data: bytes | None) -> list[int]:
    """A row for what is no tensor; zeros for a generator that no two runs could have alike."""
    return [*struct.unpack(">4i", bytes.fromhex(hashed(data))), 0] if data is not None else [0] * 5


def found_in(group: str, sections: Mapping[str, list[Rows]]) -> dict[str, tuple[str, int, str]]:
    """Digests of a group in hex, whether not all is finite, and shapes, by unique names."""
    looks = [[each for rows in held for each in _read(*rows)] for held in sections.values()]
    if group == "optim":
        # Each optimizer has a state of its own for a parameter they share, and numbers for it.
        looks = [list(itertools.chain(*looks))]
    # Optimizers may share a parameter, or one only hold another: the last look counts.
    found: dict[str, tuple[str, int, str]] = {}
    for look in looks:
        found |= zip(_unique([name for name, _ in look]), [row for _, row in look], strict=True)
    return found


def kind_of(module: str) -> str:
    """Of a twin's name, `EMA#2`, the class."""
    return module.partition("#")[0]


def names_of_twins(found: Mapping[str, tuple[str, int, str]]) -> dict[str, str]:
    """Modules of one class numbered by their digests, old names and new: which one was found first
    tells nothing."""
    modules: dict[str, list[tuple[str, Any]]] = {}
    for name, row in found.items():
        module, _, path = name.partition(".")
        modules.setdefault(module, []).append((path, row))
    numbers, names = dict[str, int](), dict[str, str]()
    for module, rows in sorted(modules.items(), key=lambda each: (kind_of(each[0]), each[1])):
        kind = kind_of(module)
        number = numbers[kind] = numbers.get(kind, 0) + 1
        shown = f"{kind}#{number}" if number > 1 else kind
        names |= {f"{module}.{path}": f"{shown}.{path}" for path, _ in rows}
    return names


def _read(
    names: Sequence[str], rows: Tensor, shapes: Sequence[str]
) -> Iterator[tuple[str, tuple[str, int, str]]]:
    text, flags = digest_hex(rows)
    texts = (text[i : i + HEX_CHARS] for i in range(0, len(text), HEX_CHARS))
    return zip(names, zip(texts, flags, shapes, strict=True), strict=True)


def _unique(names: Iterable[str]) -> list[str]:
    """Names, those that come again with a number."""
    last: dict[str, int] = {}
    found: dict[str, None] = {}
    for name in names:
        number, shown = last.get(name, 1), name
        while shown in found:
            number += 1
            shown = f"{name}#{number}"
        last[name] = number
        found[shown] = None
    return list(found)


def as_tensor(value: Any) -> Tensor:
    """A loss or a norm as the program gives it; a number is a float64, as Python's are."""
    value = getattr(value, "_local_tensor", value)
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def float_bits(value: Tensor) -> dict[str, Any]:
    """A float64 or a whole number by its 64 bits, what is narrower by those of a float32."""
    is_wide = value.dtype == torch.float64 or not value.is_floating_point()
    value = value.double() if is_wide else value.float()
    # By the integer view: a Python float may not keep the pattern of a NaN.
    pattern = int(value.view(torch.int64 if is_wide else torch.int32))
    bits = f"{pattern & (1 << 64) - 1:016x}" if is_wide else f"{pattern & (1 << 32) - 1:08x}"
    number = float(value)
    return {"bits": bits, "value": number if number - number == 0 else None}


def mean(losses: Sequence[Tensor]) -> Mapping[str, Any] | None:
    """What curves show of a step: its only loss, or the mean of its microbatches on this rank."""
    if len(losses) < 2:
        return float_bits(losses[0]) if losses else None
    found = torch.stack([loss.double() for loss in losses]).mean()
    is_wide = any(loss.dtype == torch.float64 for loss in losses)
    return float_bits(found if is_wide else found.float())


# --- sketches: how far is a tensor from another whose bits differ by design? ----------------------

# sketch(x) = (elements, |x|, <s1, x>, ..., <s16, x>)     s: signs, a fixed function of the place
#
# The difference of two sketches is the sketch of the difference, and over random signs the mean of
# <s, d>^2 is |d|^2 (Achlioptas, Database-friendly random projections, 2003). So a wrong direction
# shows as well as a wrong length does. `harness.checks.gradients` compares.
NUM_SIGNS = 16
_WIDTH, _CHUNK = 4096, 1 << 24
_MULTIPLIER = 0x2545F4914F6CDD1D  # of xorshift64* (Vigna, 2016)


def _signs(first: int, count: int, salt: int, device: torch.device) -> Tensor:
    """+1 or -1 by place, float64 [count, NUM_SIGNS]; the same on every device."""
    start = first * NUM_SIGNS + 1
    number = torch.arange(start, start + count * NUM_SIGNS, device=device) + (salt << 40)
    for _ in range(2):
        number = number ^ (number >> 12)
        number = number ^ (number << 25)
        number = (number ^ (number >> 27)) * _MULTIPLIER
    return (1 - 2 * (number >> 41 & 1)).double().view(count, NUM_SIGNS)


def sketch(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """Float64 [2 + NUM_SIGNS] on the tensor's device, made without waiting for it.

    `scale`: what a `GradScaler` has multiplied the tensor by, where the optimizer itself undoes it.
    A tensor is read as rows of `_WIDTH`; the sign of an element is that of its row times that of
    its column. In float64, which no setting of float32 products changes.
    """
    flat = tensor.detach().reshape(-1)
    columns = _signs(0, _WIDTH, 1, flat.device)
    total = torch.zeros(1 + NUM_SIGNS, dtype=torch.float64, device=flat.device)
    for number, chunk in enumerate(flat.split(_CHUNK)):
        padded = torch.nn.functional.pad(chunk.double(), (0, -len(chunk) % _WIDTH))
        rows = padded.view(-1, _WIDTH)
        outer = _signs(number * (_CHUNK // _WIDTH), len(rows), 2, flat.device)
        sums = ((rows @ columns) * outer).sum(0)
        total += torch.cat([padded.square().sum()[None], sums])
    elements = torch.full_like(total[:1], flat.numel())
    numbers = torch.cat([total[:1].sqrt(), total[1:]])
    if scale is not None:
        numbers /= scale.to(numbers)
    return torch.cat([elements, numbers])


class Keeper:
    """Copies the tensors that a run is asked to keep, as `KeepSpec` says, and writes them."""

    def __init__(self, session: Session, keep: Mapping[str, Any]) -> None:
        self._session, self._step = session, keep["step"]
        self._left, self._held = int(keep["max_bytes"]), list[Any]()
        self._names = _any_of(keep["names"])
        # Which of the twins has which number is known once their digests are.
        self._unnumbered = _any_of(_NUMBER.sub("", name) for name in keep["names"])

    def take(self, step: int, name: str, values: Sequence[Any]) -> None:
        """Copy what is of that name, if asked for in this step (`ValueError`: too many bytes)."""
        if step != self._step or not self._unnumbered.fullmatch(_NUMBER.sub("", name)):
            return
        for part, each in enumerate(values):
            tensor = each if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64)
            self._left -= tensor.nbytes
            if self._left < 0:
                raise ValueError(f"Expected fewer bytes to keep at step {step}; at {name}.")
            copy = tensor.detach().to("cpu", copy=True)
            self._held.append(SimpleNamespace(
                name=name, part=part, tensor=copy, places=(), as_digested=True
            ))  # fmt: skip

    def write(self, step: int, twins: Mapping[str, str]) -> None:
        if step == self._step:
            session = self._session
            for kept in self._held:
                group, _, name = kept.name.partition(":")
                kept.name = f"{group}:{twins.get(name, name)}" if group == OTHERS else kept.name
            kept = [each for each in self._held if self._names.fullmatch(each.name)]
            write_kept(session.folder, session.key, session.rank, step, kept)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    texts = (".*".join(map(re.escape, name.split("*"))) for name in names)
    return re.compile("|".join(f"(?:{text})" for text in texts), re.DOTALL)


def is_there(tensor: Tensor) -> bool:
    """Whether its memory was not freed below it, as sharding engines do."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a tensor on a device, one that is under way."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
