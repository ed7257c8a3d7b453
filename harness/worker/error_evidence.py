"""What an exception says of itself, in fields: by its attributes, and the frames it went through.

A function is known by its code, not by its file or name in a printed traceback: one that is renamed
fails here at import.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp.api import FSDPModule
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.graph import CapturedFunction, Replayed
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.sharding import clip_grads
from fsdp_core.parallel.pipeline import Pipeline
from fsdp_core.stress.races import Race, RaceFound
from fsdp_core.train.build import AdamW
from fsdp_core.train.engines import EngineAdamW
from fsdp_core.train.trainer import Trainer, mean_loss
from harness.recorder.session import raised_at
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

    `module` is the innermost module, or unit of sharding, in whose code the exception was raised;
    "" if no frame belongs to one but the whole model.

    Args:
        stages: whose modules have the names that they have in the whole model.
    """
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    names = {id(module): name for stage in stages for name, module in stage.named_modules()}
    # What it was raised from comes first: a capture that was given up says so from far outside of
    # what could not be captured.
    owners = [_owner(f, names) for each in chain[::-1] for f, _ in reversed([*_frames(each)])]
    places = [
        _CODES[frame.f_code] for e in chain for frame, _ in _frames(e) if frame.f_code in _CODES
    ]
    return {
        "module": next(filter(None, owners), ""),
        "phase": _PHASES[min(places)][0] if places else "",
        "raised_at": raised_at(chain[-1], but=("torch",)),
        "tensors": next((tuple(e.names) for e in chain if isinstance(e, TensorError)), ()),
        "race": next((_race(e.races[0]) for e in chain if isinstance(e, RaceFound)), None),
    }


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Frames of an exception with the lines that they were at, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _owner(frame: FrameType, names: dict[int, str]) -> str:
    """The name of that whose method a frame is of."""
    owner = frame.f_locals.get("self")
    if isinstance(owner, Unit | ParamGroup):
        return "" if owner.name == "root" else owner.name
    if isinstance(owner, Replayed):
        # What a capture leaves undone is refused at its end, when no module runs any more.
        name = owner.name.partition(" ")[0]  # without the slot
        return name if name in names.values() else ""
    return names.get(id(owner), "") if isinstance(owner, nn.Module) else ""


def _race(race: Race) -> RaceEvidence:
    later, earlier = (
        StreamUse(operator=use.operator, writes=use.writes, stream=use.stream.name, place=use.place)
        for use in (race.later, race.earlier)
    )
    return RaceEvidence(
        tensor=race.name, unit=race.unit, is_gradient=race.is_gradient, later=later, earlier=earlier
    )
