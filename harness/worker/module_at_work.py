"""Which module of the model an exception came from, told by the frames that it went through.

A captured segment has the name of the module whose forward it holds.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType

from torch import nn

from fsdp_core.fsdp.backward import UnitBackward
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.segment import GraphedSegment


def module_of_error(error: BaseException, stages: Sequence[nn.Module]) -> str:
    """The innermost module, or unit of sharding, in whose code an exception was raised.

    What it was raised from comes first: a capture that was given up says so from far outside of
    what could not be captured.

    Args:
        stages: whose modules have the names that they have in the whole model.

    Returns:
        The dotted name, "" if no frame belongs to a module or to the whole model only.
    """
    names = {id(module): name for stage in stages for name, module in stage.named_modules()}
    for each in reversed([*chain(error)]):
        found = [name for name in _owners(each.__traceback__, names) if name]
        if found:
            return found[-1]
    return ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes, outermost first."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _owners(trace: TracebackType | None, names: dict[int, str]) -> Iterator[str]:
    """Names of those whose methods the frames are of, outermost first."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        owner = owner.unit if isinstance(owner, UnitBackward) else owner
        if isinstance(owner, Unit | ParamGroup):
            yield "" if owner.name == "root" else owner.name
        elif isinstance(owner, nn.Module):
            yield names.get(id(owner), "")
        elif isinstance(owner, GraphedSegment):
            # What a capture leaves undone is refused at its end, when no module runs any more.
            name = owner.segment.name.partition(" ")[0]  # without the slot
            yield name if name in names.values() else ""
        trace = trace.tb_next
