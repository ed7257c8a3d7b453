"""Every operator inside the calls of one module in one step: who called it, digests of its tensors.

    forward     from the module's hook before its forward pass to the one after it
    backward    operators of the autograd nodes that the module's forward pass has made, known by
                their numbers in the order in which nodes are made

Nothing is computed with a digest. Compiled code and replays of graphs dispatch no operators. What
lies in memory that was never written as a whole, as in the buffer of a gather, has no digest.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp_core.dispatch import ObservingMode, is_fake, opens_itself, program_frames
from fsdp_core.graph.digest import Digester, digest_hex, empty_rows
from harness.recorder.rounding import num_compiled

HERE, OURS = (f"{Path(__file__).parents[up]}/" for up in (0, 1))
MOST, MOST_FRAMES, MOST_CHARS = 4096, 8, 200
"""Operators of a rank that are written down; frames and characters of settings of each."""
UNWRITTEN = ("empty", "new_empty", "resize", "_resize")
"""Begin names of operators that return memory nobody has written."""
UNDER_WAY, INTO_BUFFER, WAITED = ("c10d", "_c10d"), "all_gather_copy_in", "wait_tensor"
"""Begin namespaces of collectives, which write on after they return; FSDP2's, which writes its own
part of what a gather fills; the one that waits."""
FILLS = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "cauchy_",
         "exponential_", "geometric_", "log_normal_")  # fmt: skip
"""Operators that write all of a tensor whatever it held."""


class Operators(ObservingMode):
    """What `OperatorSpec` asks for, of one rank. `keep` takes the tensors of the one that is to be
    kept, each with its name.

    Attributes:
        calls: of the module in the step so far.
        found: what was seen: fields of `harness.records.OperatorCall`, digests still as rows.
    """

    def __init__(self, spec: Mapping[str, Any], keep: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.step, self.module = int(spec["step"]), str(spec["module"])
        self._call, self.is_backward = spec["call"], bool(spec["backward"])
        self._kept, self._keep = spec["kept"], keep
        self.calls, self.found, self._more = 0, list[dict[str, Any]](), False
        self._inside: list[nn.Module | None] = []
        self._first_node = 0
        self._nodes: list[range] = []
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._names: dict[int, str] = {}
        self._digesters: dict[Any, Digester] = {}
        self._unwritten: set[int] = set()  # addresses of memory

    def enter(self, module: nn.Module, args: Any) -> None:
        wanted = self._call in (None, self.calls) and not any(self._inside)
        self.calls += 1
        self._inside.append(module if wanted else None)
        if wanted:
            named = [*module.named_parameters(), *module.named_buffers()]
            names = {t.data_ptr(): name for name, t in named if not opens_itself(type(t))}
            names |= {t.data_ptr(): f"input {n}" for n, t in enumerate(_tensors(args))
                      if not opens_itself(type(t))}  # fmt: skip
            # Memory may be another's by the time of the backward pass.
            self._names = {} if self.is_backward else names
            self._first_node = torch.autograd._get_sequence_nr()
            self.__enter__()

    def leave(self) -> None:
        if self._inside and self._inside.pop() is not None:
            self.__exit__(None, None, None)
            self._nodes.append(range(self._first_node, torch.autograd._get_sequence_nr()))

    def around(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.enter(module, (args, kwargs))
            try:
                return call(*args, **kwargs)
            finally:
                self.leave()

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and write down what went in and came out."""
        kwargs = kwargs or {}
        if any(map(opens_itself, types)):  # what the wrapper holds comes by itself
            return func(*args, **kwargs) if is_fake(types) else NotImplemented
        schema = func._schema.arguments
        named = dict(zip((each.name for each in schema), args, strict=False)) | kwargs
        is_asked, stack = self._place()
        self._more |= is_asked and len(self.found) >= MOST
        if not is_asked or self._more:
            return self._run(func, args, kwargs, named)[0]
        given = _tensors([named[x.name] for x in schema if x.name in named and not x.is_out])
        inputs = [self._digest(x, f"input {n}") for n, x in enumerate(given)]
        names = [self._names.get(x.data_ptr(), "") for x in given]
        out, made = self._run(func, args, kwargs, named)
        returns = [each.alias_info for each in func._schema.returns]
        # A view makes no value; what it is of may be memory that is filled later.
        is_view = bool(returns) and all(x is not None and not x.is_write for x in returns)
        if not given and not made:
            return out
        outputs = [None if is_view else self._digest(x, f"output {n}") for n, x in enumerate(made)]
        self.found.append({
            "operator": str(func), "number": len(self.found), "stack": stack, "names": names,
            "settings": _settings(named), "inputs": inputs, "outputs": outputs,
        })  # fmt: skip
        return out

    def _place(self) -> tuple[bool, tuple[str, ...]]:
        """Whether the operator at work is asked for, and the frames of the program around it."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            stack = _stack() if any(self._inside) else ()
            if stack:
                self._stacks.setdefault(torch.autograd._get_sequence_nr() - 1, stack)
            return any(self._inside) and not self.is_backward, stack
        number = node._sequence_nr()
        is_asked = self.is_backward and any(number in each for each in self._nodes)
        if is_asked and getattr(node, "_forward_cls", None) is not None:
            return True, _stack()
        return is_asked, self._stacks.get(number, ())  # the engine has no line of its own

    def _run(
        self, func: Any, args: Any, kwargs: Any, named: Mapping[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """What it returns, and all that it has made; notes memory that nobody has written whole."""
        out, name = func(*args, **kwargs), func.overloadpacket.__name__
        written = [x for x in func._schema.arguments if x.name in named
                   if x.alias_info is not None and x.alias_info.is_write]  # fmt: skip
        is_new = all(each.alias_info is None for each in func._schema.returns)
        new = {_memory(x) for x in _tensors(out)} if is_new else set[int]()
        filled = _tensors([named[x.name] for x in written if x.is_out or name in FILLS])
        whole = {_memory(x) for x in filled if x.nbytes == x.untyped_storage().nbytes()}
        made = list(dict.fromkeys(_tensors((out, [named[x.name] for x in written]))))
        is_collective = func.namespace.startswith(UNDER_WAY) and name != WAITED
        if is_collective or name == INTO_BUFFER:
            self._unwritten |= set(map(_memory, made))
        else:
            self._unwritten -= new | whole
            self._unwritten |= new if name.startswith(UNWRITTEN) else set()
        return out, made

    def _digest(self, tensor: Tensor, name: str) -> Tensor | None:
        """Its row; None of what has no digest. Of the operator that is to be kept, it is."""
        if _memory(tensor) in self._unwritten:
            return None
        if len(self.found) == self._kept:
            self._keep(f"operator:{name}", tensor)
        kind = (tensor.shape, tensor.dtype, tensor.device)
        with torch.no_grad():
            try:
                if kind not in self._digesters:
                    self._digesters[kind] = Digester([tensor])
                rows = empty_rows(1, tensor.device)
                self._digesters[kind]([tensor.detach()], rows)
            except (ValueError, NotImplementedError):
                return None
        return rows

    def detail(self) -> dict[str, Any]:
        """Of the event; it waits for the device."""
        why = "torch.compile has made code of parts of the program" if num_compiled() else ""

        def texts(rows: Sequence[Tensor | None]) -> list[str]:
            return ["" if row is None else digest_hex(row.cpu())[0] for row in rows]

        calls = [
            each | {"inputs": texts(each["inputs"]), "outputs": texts(each["outputs"])}
            for each in self.found
        ]
        return {"calls": calls, "num_calls": self.calls, "is_cut": self._more, "why": why}


def _stack() -> tuple[str, ...]:
    """The program's frames, the outermost first; what injects a fault is its innermost one."""
    frames = [(line, frame.f_code) for line, frame in program_frames(sys._getframe())
              if not frame.f_code.co_filename.startswith(HERE)]  # fmt: skip
    told = [f"{line} {code.co_qualname}" for n, (line, code) in enumerate(frames)
            if not n or not code.co_filename.startswith(OURS)][::-1]  # fmt: skip
    return (*told[:1], "...", *told[2 - MOST_FRAMES :]) if len(told) > MOST_FRAMES else (*told,)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.layout == torch.strided]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _settings(named: Mapping[str, Any]) -> str:
    """Arguments that are no tensors: `dim=-1, half_to_float=False`."""
    kinds = (bool, int, float, str, torch.dtype, torch.memory_format)
    told = (
        f"{name}={value}" for name, value in named.items()
        if (leaves := tree_leaves(value)) and all(isinstance(leaf, kinds) for leaf in leaves)
    )  # fmt: skip
    return ", ".join(told)[:MOST_CHARS]
