"""What torch.compile did in a program: every frame that dynamo compiled, and the step of it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

METRICS_KEPT = 64
"""How many frames torch remembers."""


@dataclass(frozen=True)
class Frame:
    """A forward frame that dynamo compiled, or tried to.

    Attributes:
        code: see `code_of`.
        path: of the file.
        reason: why it was compiled again.
        stopped: what kept it from being compiled; empty if nothing did.
    """

    code: str
    path: str
    reason: str
    stopped: str


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Dynamo as in a new process, and left so."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    try:
        yield
    finally:
        torch._dynamo.reset()
        counters.clear()
        clear_compilation_metrics()


def code_of(function: Any) -> str:
    """`file:line:function`."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}:{code.co_name}"


def frames() -> list[Frame]:
    """What dynamo has compiled so far; backward graphs belong to their forward's frame."""
    metrics = get_compilation_metrics()
    assert len(metrics) < METRICS_KEPT, "some are forgotten"
    found: list[Frame] = []
    for each in metrics:
        if each.co_name is not None:
            path = Path(each.co_filename or "")
            code = f"{path.name}:{each.co_firstlineno}:{each.co_name}"
            found.append(
                Frame(
                    code,
                    str(path),
                    each.recompile_reason or "",
                    f"{each.fail_type} {each.fail_reason}" if each.fail_type else "",
                )
            )
    return found


@dataclass
class Run:
    """What one training showed: numbers, and what was compiled after each of the steps."""

    numbers: list[Any] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    frames_after: list[int] = field(default_factory=list)
    num_graphs: int = 0
    breaks: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Note what has been compiled by now."""
        self.frames = frames()
        self.frames_after.append(len(self.frames))
        self.num_graphs = counters["stats"]["unique_graphs"]
        self.breaks = sorted(counters["graph_break"])


@dataclass
class Comparison:
    """The same training uncompiled and compiled."""

    eager: Run
    compiled: Run
