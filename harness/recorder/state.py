"""Which tensors a training program has, by name: parameters, gradients, optimizer state, buffers.

A parameter is named by its module's path from the outermost module that holds it, without what
wrappers add (`module.` of DDP, `_orig_mod.` of torch.compile). Modules are found among the objects
that the garbage collector tracks, as optimizers are made, when parameters are still where the
program put them: later a sharding engine may have replaced them for the time of a forward pass.
"""

import gc
import random
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Named = list[tuple[str, Tensor]]
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of module paths that are not the program's own."""
HOLDERS_OF_GRADIENTS = ("grad", "main_grad", "decoupled_grad")
"""Attributes of a parameter in which engines keep its gradient, in the order of preference."""


class Names:
    """Names of parameters and modules; holds none of them alive."""

    def __init__(self) -> None:
        self._params: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._modules: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self.roots: list[weakref.ref[nn.Module]] = []
        self._unnamed = 0

    def scan(self, params: Iterable[Tensor], roots: Iterable[nn.Module] = ()) -> None:
        """Learn the names of everything in the outermost modules that hold one of `params`.

        Args:
            params: those that optimizers train.
            roots: modules to name in any case.
        """
        wanted = {id(param) for param in params}
        given = list(roots)
        found = given + [m for m in _outermost() if _holds(m, wanted) and m not in given]
        found += [m for ref in self.roots if (m := ref()) is not None and m not in found]
        names = _root_names([_unwrapped(module) for module in found])
        for root, prefix in zip(found, names, strict=True):
            self._learn(root, prefix)
        self.roots = [weakref.ref(module) for module in found]

    def _learn(self, root: nn.Module, prefix: str) -> None:
        inner = _unwrapped(root)
        for path, module in inner.named_modules():
            self._modules[id(module)] = (weakref.ref(module), _join(prefix, _clean(path)))
        for path, param in inner.named_parameters(remove_duplicate=False):
            known = self._params.get(id(param))
            if known is None or known[0]() is not param:
                self._params[id(param)] = (weakref.ref(param), _join(prefix, _clean(path)))
            main = getattr(param, "main_param", None)  # megatron-core's optimizers train that one
            if isinstance(main, Tensor):
                self._params[id(main)] = (weakref.ref(main), _join(prefix, _clean(path)))

    def knows(self, param: Tensor) -> bool:
        """Whether the parameter has a name."""
        known = self._params.get(id(param))
        return known is not None and known[0]() is param

    def of(self, param: Tensor) -> str:
        """The parameter's name; `unnamed.N` for one that no module holds."""
        if not self.knows(param):
            self._params[id(param)] = (weakref.ref(param), f"unnamed.{self._unnamed}")
            self._unnamed += 1
        return self._params[id(param)][1]

    def of_module(self, module: nn.Module) -> str | None:
        """The module's path, "" for a root; None if it is not known."""
        known = self._modules.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def buffers(self) -> Named:
        """Buffers of all roots, and parameters that are frozen."""
        found: Named = []
        for ref in self.roots:
            if (root := ref()) is None:
                continue
            for module in root.modules():
                path = self.of_module(module)
                if path is None:
                    continue
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        found += plain(_join(path, name), buffer)
        return found

    def frozen(self, trained: Iterable[Tensor]) -> Named:
        """Parameters of all roots that no optimizer has."""
        seen = {id(param) for param in trained}
        return [
            each
            for ref in self.roots
            if (root := ref()) is not None
            for param in root.parameters()
            if id(param) not in seen and self.knows(param)
            for each in plain(self.of(param), param)
        ]


def _outermost() -> list[nn.Module]:
    """Modules that are part of no other, in the order of their making."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    return [module for module in modules if id(module) not in parts and "_modules" in vars(module)]


def _holds(module: nn.Module, wanted: set[int]) -> bool:
    return any(id(param) in wanted for param in module.parameters())


def _unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper such as DDP wraps: its only child, called `module`, where it has no more."""
    while list(module._modules) == ["module"] and not module._parameters:
        inner = module._modules["module"]
        if inner is None:
            break
        module = inner
    return module


def _root_names(roots: list[nn.Module]) -> list[str]:
    """No prefix for a single root; the names of their classes, numbered, for several."""
    if len(roots) < 2:
        return [""] * len(roots)
    kinds = [type(root).__name__ for root in roots]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}{kinds[:place].count(kind)}"
        for place, kind in enumerate(kinds)
    ]


def _clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in WRAPPED)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def plain(name: str, value: Any) -> Named:
    """The plain tensors of a value, by name: a DTensor's shard, the parts of a quantized tensor."""
    if not isinstance(value, Tensor):
        return []
    local = getattr(value, "_local_tensor", None)
    if isinstance(local, Tensor):
        return plain(name, local)
    if type(value) not in (Tensor, nn.Parameter) and hasattr(type(value), "__tensor_flatten__"):
        parts, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return [each for part in parts for each in plain(f"{name}.{part}", getattr(value, part))]
    value = value.detach()
    if isinstance(data := getattr(value, "_data", None), Tensor):  # TransformerEngine's fp8 weights
        name, value = f"{name}._data", data
    if value.layout != torch.strided:
        value = value.coalesce()
        return [(f"{name}.indices", value.indices()), (f"{name}.values", value.values())]
    if value.is_complex():
        value = torch.view_as_real(value)
    return [] if value.device.type == "meta" else [(name, value)]


def gradient(param: Tensor) -> Any:
    """A parameter's gradient, wherever its engine keeps it; None if it has none."""
    for holder in HOLDERS_OF_GRADIENTS:
        if (found := getattr(param, holder, None)) is not None:
            return found
    return None


def parameters(optimizer: Any) -> list[Tensor]:
    """What an optimizer trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(optimizer: Any, names: Names, prefix: str) -> tuple[Named, dict[str, bytes]]:
    """What an optimizer keeps: tensors by parameter, `layers.0.weight.exp_avg`, and numbers.

    Numbers are those that decide its update: learning rates, step counts, ..., as bytes. Flags are
    left out: they choose between implementations (`foreach`, `fused`), which a scenario may well
    compare.
    """
    tensors: Named = []
    numbers: dict[str, bytes] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                _take(f"{prefix}group{number}.{key}", value, tensors, numbers)
    for param in parameters(optimizer):
        held = optimizer.state.get(param)
        if isinstance(held, Mapping):
            name = names.of(param)
            for key, value in held.items():
                _take(f"{name}.{key}", value, tensors, numbers)
    return tensors, numbers


def _take(name: str, value: Any, tensors: Named, numbers: dict[str, bytes]) -> None:
    if isinstance(value, Tensor):
        tensors += plain(name, value)
    elif _is_number(value):
        numbers[name] = repr(value).encode()


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def cuda_is_used() -> bool:
    """Whether this process has used a GPU; asking does not make it use one."""
    return bool(torch.cuda.is_initialized())


def random_states() -> dict[str, bytes]:
    """State of every default random generator, as bytes of the host."""
    states = {"cpu": torch.get_rng_state().numpy().tobytes()}
    if cuda_is_used():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    states["python"] = repr(random.getstate()).encode()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        kind, keys, place, *rest = numpy.random.get_state()
        states["numpy"] = kind.encode() + keys.tobytes() + repr((place, rest)).encode()
    return states
