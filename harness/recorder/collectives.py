"""Which collective this rank is in, for whoever has to explain a hang.

The methods of torch's process groups are wrapped, where Python calls them: each entry is noted in
a file that is mapped into memory (`harness.engine.whereabouts` reads it), so what was written is
there whatever ends the rank. DDP's reducer and functional collectives call C++ directly and are not
seen; a rank that waits in one is seen by its stack.
"""

import functools
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from harness.recorder.observer import Observer

SIZE_BYTES = 1 << 14
COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce",
    "broadcast": "broadcast", "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor", "gather": "gather",
    "scatter": "scatter", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single", "barrier": "barrier",
}  # fmt: skip
"""Methods of `ProcessGroup`, and what `torch.distributed` calls them."""


class Notes:
    """Keeps one rank's place."""

    def __init__(self, observer: Observer, path: Path) -> None:
        self._observer = observer
        self._entered: dict[str, int] = {}
        self._last: dict[str, Any] = {"operator": "", "label": "", "group": []}
        path.write_bytes(bytes(SIZE_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE_BYTES)

    def install(self) -> None:
        """Wrap the collectives of every process group."""
        for method, name in COLLECTIVES.items():
            original = getattr(dist.ProcessGroup, method, None)
            if original is not None:
                setattr(dist.ProcessGroup, method, self._noting(original, name))
        dist.Work.wait = self._waiting(dist.Work.wait)  # type: ignore[method-assign]

    def _noting(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = _ranks(group)
            key = ",".join(map(str, ranks))
            self._entered[key] = self._entered.get(key, 0) + 1
            self._last = {"operator": name, "label": self._module(), "group": ranks}
            return self._inside(original, group, *args, **kwargs)

        return collective

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            return self._inside(original, work, *args, **kwargs)

        return wait

    def _inside(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._write(is_inside=True)
        result = original(*args, **kwargs)
        # Not after an exception: who waited in vain has not come back from it.
        self._write(is_inside=False)
        return result

    def _module(self) -> str:
        """The innermost module at work, by the stack: a hook a call would cost every program."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return self._observer.names.of_module(owner) or ""
            frame = frame.f_back
        return ""

    def _write(self, *, is_inside: bool) -> None:
        session = self._observer.session
        if not session.is_mine:
            return
        place = self._last | {
            "step": self._observer.num_steps, "is_inside": is_inside, "entered": self._entered,
        }  # fmt: skip
        text = json.dumps(place).encode() + b"\n"
        if len(text) <= SIZE_BYTES:
            self._map[: len(text)] = text


def _ranks(group: Any) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return []
