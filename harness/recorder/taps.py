"""What goes through modules of somebody else's program: a digest of each call, and kept contents.

    input      tensors in the arguments of a call, together
    output     tensors in what it returns, together
    gradient   of its first output that gets one

Global hooks of torch see every call of every module; those whose name a pattern means are digested
where they are. Calls without gradients and calls that a backward pass makes again, as checkpointing
does, are passed over. A reentrant checkpoint makes its first pass without gradients, and those of
its second one: both are seen as one call, of torch's `CheckpointFunction`, not of other libraries'.
Inside of a capture nothing is seen, and a replay calls no module.
"""

import contextlib
import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction

from fsdp_core.graph.digest import NUM_COLUMNS, Digester
from harness.recorder.observer import Observer
from harness.recorder.state import plain

INPUT, OUTPUT, GRADIENT = "input", "output", "gradient"
ROOT = "(root)"
"""Name of a module that is part of no other, where it is the only one."""
_FOLD = 0x01000193
"""Odd, so that what was folded stays in all bits; as in `fsdp_core.graph.taps`."""
_WILD = re.compile(r"\*\*|\*")
_PATTERN = re.compile(r"([\w*]+(?:\.[\w*]+)*)(?::(input|output|gradient))?")
"""As `fsdp_core.config.tap_pattern`, which takes more files than a script's environment has."""


@dataclass(eq=False)
class _Pass:
    """A pass of a reentrant checkpoint; `rows` of gradients go from its first to its second."""

    is_first: bool
    rows: deque[str] = field(default_factory=deque)


class Taps:
    """Digests the calls of the modules that patterns mean: `layers.*.attn:output`."""

    def __init__(self, observer: Observer, is_quiet: Callable[[], bool]) -> None:
        self._observer, self._is_quiet = observer, is_quiet
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        self._kinds: dict[str, frozenset[str]] = {}
        self._digests: dict[tuple[Any, ...], tuple[Digester, Tensor, Tensor]] = {}
        self._calls: dict[str, int] = {}
        self._step: object = None
        self._passes: list[_Pass] = []

    def add(self, patterns: Iterable[str]) -> None:
        """Digest what these mean, too; the first ones hook every module of the process.

        Raises:
            ValueError: one is no pattern.
        """
        added = [_pattern(text) for text in patterns]
        if added and not self._patterns:
            torch_modules.register_module_forward_pre_hook(self._before)
            torch_modules.register_module_forward_hook(self._after)
            self._hook_checkpoints()
        self._patterns += added
        self._kinds.clear()

    def _before(self, module: nn.Module, args: Any) -> None:
        if INPUT in (name_kinds := self._asked(module))[1]:
            self._take(name_kinds[0], INPUT, args)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        name, kinds = self._asked(module)
        if OUTPUT in kinds:
            self._take(name, OUTPUT, result)
        if GRADIENT in kinds:
            is_first = bool(self._passes) and self._passes[-1].is_first
            wants = Tensor.is_floating_point if is_first else lambda each: each.requires_grad
            first = next(filter(wants, _tensors(result)), None)
            if first is None or (row := self._gradient_row(name)) is None:
                return
            if is_first:
                self._passes[-1].rows.append(row)
            else:
                first.register_hook(functools.partial(self._take_gradient, row))

    def _gradient_row(self, name: str) -> str | None:
        """The row is the call's, in the order of the forward passes."""
        again = next((each for each in reversed(self._passes) if not each.is_first), None)
        if again is None:
            return self._row(name, GRADIENT)
        is_its = bool(again.rows) and again.rows[0].rpartition("[")[0] == f"{name}:{GRADIENT}"
        return again.rows.popleft() if is_its else None

    def _hook_checkpoints(self) -> None:
        apply, forward = vars(torch.autograd.Function)["apply"], CheckpointFunction.forward
        backward = CheckpointFunction.backward
        with_gradients = [False]  # inside of `forward` nobody can tell

        def applied(cls: Any, *args: Any) -> Any:
            with_gradients[0] = torch.is_grad_enabled()
            return apply.__get__(None, cls)(*args)

        def first(ctx: Any, *args: Any) -> Any:
            if not with_gradients[0]:  # an evaluation, or part of another's first pass
                return forward(ctx, *args)
            with self._passing(_Pass(is_first=True)) as made:
                ctx._harness_rows = made.rows
                return forward(ctx, *args)

        def second(ctx: Any, *gradients: Any) -> Any:
            rows = deque(getattr(ctx, "_harness_rows", ()))
            with self._passing(_Pass(is_first=False, rows=rows)):
                return backward(ctx, *gradients)

        CheckpointFunction.apply = classmethod(applied)  # type: ignore[assignment]
        CheckpointFunction.forward = staticmethod(first)  # type: ignore[method-assign]
        CheckpointFunction.backward = staticmethod(second)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _passing(self, each: _Pass) -> Iterator[_Pass]:
        self._passes.append(each)
        try:
            yield each
        finally:
            self._passes.remove(each)

    def _asked(self, module: nn.Module) -> tuple[str, frozenset[str]]:
        observer = self._observer
        is_first = bool(self._passes) and self._passes[-1].is_first
        if self._is_quiet() or not (is_first or torch.is_grad_enabled()):
            return "", frozenset()
        if observer.is_in_backward and not self._passes:
            return "", frozenset()
        name = observer.names.of_module(module)
        if name is None:
            return "", frozenset()
        name = name or ROOT
        if name not in self._kinds:
            self._kinds[name] = frozenset(
                kind for pattern, kind in self._patterns if pattern.fullmatch(name)
            )
        kinds = self._kinds[name]
        return name, kinds & {GRADIENT} if observer.is_in_backward else kinds

    def _take_gradient(self, row: str, gradient: Tensor) -> None:
        self._digest(row, [gradient])

    def _take(self, name: str, kind: str, value: Any) -> None:
        self._digest(self._row(name, kind), list(_tensors(value)))

    def _row(self, name: str, kind: str) -> str:
        step = self._observer.step_of_calls()
        if step is not self._step:
            self._step, self._calls = step, {}
        tap = f"{name}:{kind}"
        number = self._calls[tap] = self._calls.get(tap, -1) + 1
        return f"{tap}[{number}]"

    def _digest(self, row: str, tensors: Sequence[Tensor]) -> None:
        held = [each for tensor in tensors for _, each in plain("", tensor)]
        devices = {each.device for each in held}
        if len(devices) != 1 or self._is_quiet():
            return
        kind = tuple((each.shape, each.dtype, each.device) for each in held)
        if kind not in self._digests:
            self._digests[kind] = _planned(held)
        digester, rows, weights = self._digests[kind]
        digester(held, rows)
        self._observer.tap(row, (rows * weights).sum(0, dtype=torch.int32), held)


def _planned(tensors: Sequence[Tensor]) -> tuple[Digester, Tensor, Tensor]:
    """A digester, its rows, and by what each row is multiplied as they become one."""
    device, number = tensors[0].device, len(tensors)
    factors = [pow(_FOLD, number - 1 - place, 1 << 32) for place in range(number)]
    signed = [(factor ^ 0x8000_0000) - 0x8000_0000 for factor in factors]
    rows = torch.zeros(number, NUM_COLUMNS, dtype=torch.int32, device=device)
    return Digester(tensors), rows, torch.tensor(signed, dtype=torch.int32, device=device)[:, None]


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _pattern(text: str) -> tuple[re.Pattern[str], str]:
    if (parts := _PATTERN.fullmatch(text)) is None:
        expected = "a module's dotted name, * and ** in it, and :input, :output or :gradient"
        raise ValueError(f"taps: expected {expected}, got {text!r}")
    escaped = parts[1].replace(".", r"\.")
    wild = _WILD.sub(lambda found: ".*" if found[0] == "**" else "[^.]*", escaped)
    return re.compile(wild), parts[2] or OUTPUT


def module_of(error: BaseException, observer: Observer) -> str:
    """Name of the innermost module at work where an error was raised, "" if there was none."""
    name, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            name = observer.names.of_module(owner) or name
        trace = trace.tb_next
    return name


class Keeper:
    """Copies the tensors that a run is asked to keep, and writes them: `harness.store.contents`.

    Args:
        keep: `KeepSpec` as JSON: the step, and names such as `grads:layers.0.weight`.
    """

    def __init__(self, observer: Observer, keep: Mapping[str, Any]) -> None:
        self._observer, self._step = observer, keep["step"]
        self._left, self._held = int(keep["max_bytes"]), list[tuple[str, int, Tensor]]()
        texts = (".*".join(map(re.escape, name.split("*"))) for name in keep["names"])
        self._names = re.compile("|".join(f"(?:{text})" for text in texts), re.DOTALL)

    def take(self, step: int, name: str, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of that name, if they are asked for in this step."""
        if step != self._step or not self._names.fullmatch(name):
            return
        for part, tensor in enumerate(tensors):
            self._left -= tensor.nbytes
            if self._left < 0:
                raise ValueError(f"Expected fewer bytes to keep at step {step}; at {name}.")
            self._held.append((name, part, tensor.detach().to("cpu", copy=True).contiguous()))

    def write(self, step: int) -> None:
        """Write the file once the step to keep is over."""
        if step != self._step:
            return
        from harness.store.contents import KeptTensor, write_contents

        entries = []
        for name, part, tensor in self._held:
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            about = KeptTensor(
                name=name, part=part, dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape), as_digested=True,
            )  # fmt: skip
            entries.append((about, data))
        session = self._observer.session
        write_contents(session.folder, session.key, session.rank, step, entries)
