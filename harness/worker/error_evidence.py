"""What an exception says of itself, in fields: by its attributes, and the frames it went through.

A function is known by its code, not by its file or name in a printed traceback: one that is renamed
fails here at import.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from fsdp_core.errors import TensorError
from fsdp_core.fsdp.backward import UnitBackward
from fsdp_core.fsdp.fsdp_module import FSDPModule
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.capture import CapturedFunction
from fsdp_core.graph.segment import GraphedSegment
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.sharding import clip_grads
from fsdp_core.optim import AdamW
from fsdp_core.parallel.pipeline import Pipeline
from fsdp_core.stress.races import Access, RaceFound
from fsdp_core.train.engines import EngineAdamW
from fsdp_core.train.outputs import mean_loss
from fsdp_core.train.trainer import Trainer
from harness.records import Passed, RaceEvidence, StreamUse

_PHASES: tuple[tuple[Passed, tuple[Callable[..., Any], ...]], ...] = (
    ("capture", (Trainer._capture,)),
    ("replay", (CapturedFunction.__call__,)),
    ("backward", (Pipeline._backward, torch.autograd.backward)),
    ("optimizer", (AdamW.step, EngineAdamW.step)),
    ("forward", (Pipeline._forward, DecoderStage.forward)),
    ("reduce", (clip_grads, Trainer._require_grads, EngineAdamW.require_grads)),
    ("forward", (
        Pipeline.forward_backward, FSDPModule.zero_main_grads, FSDPModule.refresh_model_weights,
        mean_loss,
    )),
)  # fmt: skip
"""Functions of a step by what is done in them; of several that are at work, the first here.

A capture calls all that a step calls, and a backward pass may compute a forward again.
"""
_CODES: dict[CodeType, int] = {
    inspect.unwrap(function).__code__: place
    for place, (_, functions) in enumerate(_PHASES)
    for function in functions
}


def evidence_of(error: BaseException, stages: Sequence[nn.Module]) -> dict[str, Any]:
    """The fields `module`, `phase`, `raised_at`, `tensors` and `race` of an `ErrorRecord`.

    Args:
        stages: whose modules have the names that they have in the whole model.
    """
    return {
        "module": module_of_error(error, stages),
        "phase": _phase(error),
        "raised_at": _raised_at(error),
        "tensors": next((tuple(e.names) for e in chain(error) if isinstance(e, TensorError)), ()),
        "race": next((_race(e) for e in chain(error) if isinstance(e, RaceFound)), None),
    }


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


def _phase(error: BaseException) -> Passed:
    frames = (frame for each in chain(error) for frame, _ in _frames(each))
    places = [_CODES[frame.f_code] for frame in frames if frame.f_code in _CODES]
    return _PHASES[min(places)][0] if places else ""


def _raised_at(error: BaseException) -> str:
    first = [*chain(error)][-1]
    own = [
        (frame.f_code, line)
        for frame, line in _frames(first)
        if frame.f_globals.get("__name__", "").partition(".")[0] != "torch"
    ]
    if not own:
        return ""
    code, line = own[-1]
    return f"{PurePath(code.co_filename).name}:{line} {code.co_name}"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Frames of an exception with the lines that they were at, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _race(error: RaceFound) -> RaceEvidence:
    race = error.races[0]
    return RaceEvidence(
        tensor=race.name, unit=race.unit, is_gradient=race.is_gradient,
        later=_use(race.later), earlier=_use(race.earlier),
    )  # fmt: skip


def _use(access: Access) -> StreamUse:
    return StreamUse(
        operator=access.operator, writes=access.writes, stream=access.stream.name,
        place=access.place,
    )  # fmt: skip
