"""Replays of what TransformerEngine captured of a module, and what is checked before each.

For `fsdp_core.graph.te_callables`, which captures.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fsdp_core.graph.ledger import Ledger
from fsdp_core.graph.slot import Pending, Tensors, check_inputs


class Library(Protocol):
    """What is used of the module `transformer_engine.pytorch.graph`."""

    def make_graphed_callables(self, modules: Any, sample_args: Any, **options: Any) -> Any:
        """Capture; forwards by chunk, microbatch and module."""

    def get_all_rng_states(self) -> dict[str, Any]:
        """Generators that its graphs draw from, to add to."""

    def save_fp8_tensors(self, modules: Any, recipe: Any) -> Any:
        """State of delayed scaling."""

    def restore_fp8_tensors(self, modules: Any, fp8_tensors: Any) -> None:
        """Put it back."""

    def set_capture_end(self) -> None:
        """Tell its modules that no capture is under way."""

    @property
    def FP8GlobalStateManager(self) -> Any:  # noqa: N802  (as it is called there)
        """Knows whether fp8 is on."""


@dataclass(frozen=True)
class Precision:
    """Whether a module was captured in fp8, which replays cannot choose anew."""

    te: Library
    is_fp8: bool

    def check(self, name: str) -> None:
        """Refuse a replay outside of an autocast, where its scales would never move."""
        if self.te.FP8GlobalStateManager.is_fp8_enabled() != self.is_fp8:
            expected, got = ("in", "outside of") if self.is_fp8 else ("outside of", "in")
            raise RuntimeError(
                f"Expected replays of {name} {expected} an autocast for fp8, as it was captured, "
                f"got one {got} it."
            )


class Replays:
    """Replays of a module that it captured, by slot."""

    def __init__(
        self,
        name: str,
        forwards: Sequence[Any],
        samples: Tensors,
        ledger: Ledger | None,
        on_replay: Callable[[int], None],
        precision: Precision,
    ) -> None:
        self._precision = precision
        self._name, self._forwards, self._ledger = name, list(forwards), ledger
        self._samples, self._on_replay = samples, on_replay
        self._pending: list[weakref.ref[Pending] | None] = [None] * len(self._forwards)

    def __call__(self, *tensors: torch.Tensor, slot: int = 0) -> Any:
        """Replay a slot."""
        if not 0 <= slot < len(self._forwards):
            raise ValueError(
                f"Expected a slot of {self._name} below {len(self._forwards)}, got {slot}."
            )
        check_inputs(self._name, self._samples, tensors)
        self._precision.check(self._name)
        last = self._pending[slot]
        pending = last() if last is not None else None
        if pending is not None and not pending.is_done:
            raise RuntimeError(
                f"Expected slot {slot} of {self._name} to be free, got one whose forward still "
                "awaits its backward. Capture as many slots as there are microbatches between "
                "forward and backward."
            )
        if self._ledger is not None:
            self._ledger.check()
        results = self._forwards[slot](*map(_with_cloned_grad, tensors))
        self._on_replay(1)
        flat = results if isinstance(results, tuple) else (results,)
        node = next((result.grad_fn for result in flat if result.grad_fn is not None), None)
        if node is not None:
            self._pending[slot] = self._await(node)
        return results

    def _await(self, node: Any) -> weakref.ref[Pending]:
        """Mark the slot until the node has run or is gone."""
        pending = Pending()
        node.metadata["slot"] = pending
        known = weakref.ref(pending)

        def begins(*_: object) -> None:
            awaited = known()
            if awaited is not None and awaited.is_done:
                raise RuntimeError(
                    f"Expected one backward of {self._name} for each forward, got a second."
                )
            if self._ledger is not None:
                self._ledger.check()

        def ends(*_: object) -> None:
            awaited = known()
            if awaited is not None:
                awaited.is_done = True
            self._on_replay(1)

        node.register_prehook(begins)
        node.register_hook(ends)
        return known

    def reset(self) -> None:
        """Drop the graphs of all slots."""
        for forward in self._forwards:
            forward.reset()
        self._forwards = []


class _CloneGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone()


def _with_cloned_grad(x: torch.Tensor) -> torch.Tensor:
    """The tensor, its gradient a copy of what it gets."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    cloned: torch.Tensor = _CloneGrad.apply(x)
    return cloned
