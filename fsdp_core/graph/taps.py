"""Taps: digests of what goes through modules, taken where it is computed, in graphs and outside.

    input      tensors in the arguments of a call, together
    output     tensors in what it returns, together
    gradient   of its first output that gets one, as the backward pass brings it

A call's digest is written into the next free row of its tap, with the tap's place in the order of
all that ran in the step. Which row is next, and the place, are counted on the device: a graph that
holds a tap counts on at each replay, as a call does. So rows are the same whoever issues the work,
also where one graph serves several microbatches. A module that is called more often than a tap has
rows, as one that layers share, folds further calls into its last row.

Calls are watched at `Module._call_impl`, around hooks and around whatever stands in for `forward`:
a module is seen once a call, be it captured, replaced by a replay, or eager. Hooks would be taken
away while graphs are captured. Only training passes are seen, not those without gradients.

**Cost** of a tap: its tensors are read once, or copied and read once on CUDA, plus some 15 launches
of small kernels. It needs no sync. Nothing is computed with a digest, so no bit of the run changes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.graph.digest import NUM_COLUMNS, Digester, empty_rows
from fsdp_core.graph.digest_words import INT_OF_SIZE, NUM_LANES
from fsdp_core.graph.kept import Calls

NEVER = -1
"""Place of a row that no call has written in this step."""
PLACE_COLUMN = NUM_COLUMNS
_FOLD = 0x01000193
"""Odd, so that what was folded stays in all bits: a row times this plus the next, modulo 2**32."""
MOST_KINDS = 64
"""Shapes whose plans are kept; the longest unused goes. What a graph has captured stays."""


@dataclass(frozen=True)
class Tap:
    """What to watch: a module by its name, and `input`, `output` or `gradient`.

    `stage` is that of the pipeline, for whoever puts ranks in the order of the data.
    """

    name: str
    module: nn.Module
    kind: str
    stage: int = 0


class Taps:
    """Watches modules from its construction to `close`.

    Args:
        taps: what to watch.
        calls: rows of each tap: how often its module is called in a step, and one more for calls
            past those.
        device: of the tensors; they are digested on the stream that computes them, one for all.

    Attributes:
        names: of the rows, `layers.3.attn:output[1]`, each tap's `calls` together.
        stages: of the rows.
        rows: int32 [taps * calls, 6]: the digest's five columns, and the place in the step.
        calls_seen: int32 [taps], calls since `begin`.
        kept: copies of what went through some of them.
    """

    def __init__(self, taps: Sequence[Tap], calls: int, device: torch.device) -> None:
        self._taps, self.calls, self.device = tuple(taps), calls, device
        self.kept: Calls | None = None
        self.names = [f"{t.name}:{t.kind}[{i}]" for t in self._taps for i in range(calls)]
        self.stages = [t.stage for t in self._taps for _ in range(calls)]
        self._blank = torch.zeros(len(self.names), NUM_COLUMNS + 1, dtype=torch.int32)
        self._blank[:, PLACE_COLUMN] = NEVER
        self._blank = self._blank.to(device)
        self.rows = self._blank.clone()
        self.calls_seen = torch.zeros(len(self._taps), dtype=torch.int32, device=device)
        self._clock = torch.zeros(1, dtype=torch.int32, device=device)
        self._numbers = torch.arange(calls, dtype=torch.int32).to(device)[:, None]
        self._is_last = self._numbers == calls - 1
        fold = [[_FOLD] * NUM_LANES + [0, 1], [1] * NUM_COLUMNS + [0]]
        self._keep, self._add = torch.tensor(fold, dtype=torch.int32).to(device)[:, None].unbind()
        self._digests: dict[tuple[Any, ...], _Digest] = {}
        modules = dict.fromkeys(tap.module for tap in self._taps)
        self._watched = list(modules)
        for module in modules:
            self._watch(module)

    @property
    def tap_names(self) -> list[str]:
        """`layers.3.attn:output`, in the order of `calls_seen`."""
        return [f"{tap.name}:{tap.kind}" for tap in self._taps]

    def begin(self) -> None:
        """A step begins: no row is written. Device work alone, so a graph may hold it."""
        if self._taps:
            self.rows.copy_(self._blank)
            self.calls_seen.zero_()
            self._clock.zero_()
        if self.kept is not None:
            self.kept.begin()

    def close(self) -> None:
        """Watch no more; graphs that were captured still do."""
        for module in self._watched:
            del module._call_impl
        self._watched = []

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that live on and that a captured tap reads or writes, by name."""
        if not self._taps:
            return
        yield "taps", self.rows
        yield "taps blank", self._blank
        yield "taps calls seen", self.calls_seen
        yield "taps clock", self._clock
        yield "taps numbers", self._numbers
        yield "taps last", self._is_last
        yield "taps fold", self._keep
        for number, digest in enumerate(self._digests.values()):
            for index, tensor in enumerate(digest.tensors()):
                yield f"taps scratch {index} of kind {number}", tensor
        for index, tensor in enumerate(() if self.kept is None else self.kept.tensors()):
            yield f"taps copy {index}", tensor

    def keep(self, calls: Calls) -> None:
        """From now on copy, too, what goes through some of the taps."""
        self.kept = calls

    def is_digest_of(self, row: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether a row, on the host, is the digest of one call with these tensors, on the host."""
        digest = _Digest(tensors, torch.device("cpu"))(tensors)
        return torch.equal(digest[0], row[:NUM_COLUMNS])

    # ---- watching

    def _watch(self, module: nn.Module) -> None:
        mine = {tap.kind: i for i, tap in enumerate(self._taps) if tap.module is module}
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            again = torch._C._current_graph_task_id() != -1  # recomputed in a backward pass
            if again or not (torch.is_grad_enabled() and module.training):
                return original(*args, **kwargs)
            if "input" in mine:
                self._record(mine["input"], [*tensors_in((args, kwargs), open_records=False)])
            result = original(*args, **kwargs)
            if "output" in mine:
                self._record(mine["output"], [*tensors_in(result)])
            if "gradient" in mine:
                self._watch_gradient(mine["gradient"], result)
            return result

        # The instance's own, which `Module.__call__` finds first.
        module._call_impl = call  # type: ignore[method-assign]

    def _watch_gradient(self, tap: int, result: Any) -> None:
        first = next((t for t in tensors_in(result) if t.requires_grad), None)
        if first is not None:
            first.register_hook(functools.partial(self._gradient, tap))

    def _gradient(self, tap: int, grad: Tensor) -> None:
        self._record(tap, [grad])

    # ---- recording

    def _record(self, tap: int, tensors: list[Tensor]) -> None:
        """Write the digest of one call into its row, by operators that a graph can hold."""
        with torch.no_grad():
            tensors = [tensor.detach() for tensor in tensors]
            digest = self._digest_of(tap, tensors)(tensors)
            line = torch.cat((digest, self._clock[:, None]), dim=1)
            seen = self.calls_seen[tap : tap + 1]
            own = self.rows[tap * self.calls : (tap + 1) * self.calls]
            again = self._is_last & (seen >= self.calls)
            folded = own * self._keep + line * self._add
            own.copy_(torch.where(self._numbers == seen, line, torch.where(again, folded, own)))
            if self.kept is not None:
                self.kept.record(tap, seen[0], tensors)
            seen.add_(1)
            self._clock.add_(1)

    def _digest_of(self, tap: int, tensors: list[Tensor]) -> "_Digest":
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        digest = self._digests.pop(signature, None)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if digest is None:
            if capturing:
                raise RuntimeError(
                    f"Expected {self.tap_names[tap]} to have seen {[*map(str, signature)]} before "
                    "the capture, got it first inside: run a step of these shapes eagerly first."
                )
            try:
                digest = _Digest(tensors, self.device)
            except ValueError as error:
                raise ValueError(
                    f"Expected plain tensors in {self.tap_names[tap]}, got others; leave it out of "
                    f"taps: {error}"
                ) from error
            self._forget_oldest()
        digest.is_captured |= capturing
        self._digests[signature] = digest  # the latest used is last
        return digest

    def _forget_oldest(self) -> None:
        if len(self._digests) >= MOST_KINDS:
            loose = (key for key, digest in self._digests.items() if not digest.is_captured)
            self._digests.pop(next(loose, ()), None)


class _Digest:
    """The digest of a list of tensors of fixed shapes as one row; on CUDA by way of a copy.

    A graph's activations lie where no table can be prepared for, the copies stay where they are.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._copies = [
            torch.empty(t.shape, dtype=INT_OF_SIZE[t.itemsize], device=device)
            for t in (tensors if device.type == "cuda" else ())
        ]
        self._digester = Digester(self._staged(tensors))
        self._each = empty_rows(len(tensors), device)
        self._together = Digester([self._each])
        self._row = empty_rows(1, device)
        self.is_captured = False

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """int32 [1, 5]; overwritten by the next call."""
        self._digester(self._staged(tensors), self._each)
        if len(tensors) == 1:
            return self._each
        # Of several the digest of their digests; flags count as bits.
        self._together([self._each], self._row)
        return self._row

    def _staged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._copies:
            return list(tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.view(copy.dtype))
        return [c.view(t.dtype) for c, t in zip(self._copies, tensors, strict=True)]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a call reads or writes beside its arguments."""
        yield from self._copies
        yield from (self._each, self._row)
        yield from self._digester.scratch()
        yield from self._together.scratch()


def tensors_in(value: Any, *, open_records: bool = True) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dicts, in order.

    Args:
        open_records: and in dataclasses. Among what a module is given they describe its data, as
            plans do; what it returns may be one.
    """
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif open_records and is_dataclass(value):
        items = (getattr(value, field.name) for field in fields(value))
    for item in items:
        yield from tensors_in(item, open_records=open_records)
