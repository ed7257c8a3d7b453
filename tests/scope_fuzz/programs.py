"""What a rank does with a case: the eager run, the graphed run, and what differs."""

import contextlib
import gc
import hashlib
import warnings
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer, make_trainer
from fsdp_core.train.taps import PLACE_COLUMN
from tests.scope_fuzz.case import Case, Event


@dataclass
class Seen:
    """One run on one rank.

    Attributes:
        shown: bits after every event, by what they are of.
        left: bytes that live on after `close`, but for what pools hold, as they keep what the order
            of replays needs.
        gone: bytes that live on once the trainer is gone.
    """

    shown: list[dict[str, Any]] = field(default_factory=list)
    captured: int = 0
    replays: int = 0
    unnamed: int = 0
    left: int = 0
    gone: int = 0
    stand_ins: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a rank found.

    Attributes:
        problems: each in one line; none if all is well.
    """

    problems: list[str]
    captured: int
    replays: int


def run_case(text: str) -> Report:
    """Both runs of a case, as JSON, on this rank."""
    case = Case.from_json(text)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = case.config()
        device = Device("cpu")
        axes = build_axes(config.parallel, device)
        # Under stress, too, where memory is counted: stressors hold some.
        stress = config.stress if case.weighs else ()
        plain = case.config(graph=(), graph_optimizer=True, stress=stress)
        eager = _train(plain, axes, device, case)
        graphed = _train(config, axes, device, case)
    problems = [*_compared(case, eager, graphed)]
    problems += [f"warning: {each.category.__name__}: {each.message}" for each in warned]
    return Report(problems, graphed.captured, graphed.replays)


def _train(config: TrainConfig, axes: Axes, device: Device, case: Case) -> Seen:
    seen = Seen()
    gc.collect()
    with device.counting_memory() if case.weighs else contextlib.nullcontext():
        trainer = make_trainer(config, axes, device)
        for event in case.events:
            if event[0] == "resume":
                state = _state_of(trainer)
                _end(trainer, seen)
                del trainer
                trainer = make_trainer(config, axes, device)
                _put(trainer, state)
                del state
            seen.shown.append(_act(trainer, event))
        _end(trainer, seen)
        gc.collect()
        if case.weighs:
            held = (root.fsdp_schedule.pool.reserved_bytes() for root in trainer._roots)
            seen.left = device.live_bytes() - sum(held)
        named = chain.from_iterable(stage.named_modules() for stage in trainer.stages)
        seen.stand_ins += [name for name, module in named if "forward" in vars(module)]
        del trainer, named
        gc.collect()
        seen.gone = device.live_bytes() if case.weighs else 0
    return seen


def _end(trainer: Trainer, seen: Seen) -> None:
    counts = trainer.counts
    seen.captured += counts.captured
    seen.replays += counts.replays
    seen.unnamed += counts.unnamed_externals
    trainer.close()


def _act(trainer: Trainer, event: Event) -> dict[str, Any]:
    kind, *values = event
    found: dict[str, Any] = {}
    if kind == "step":
        trainer.step(values[0])
    elif kind == "evaluate":
        found["evaluated"] = trainer.evaluate(values[0]).view(1).view(torch.int32).tolist()
    elif kind == "drop":
        trainer.close()
    outputs = trainer.outputs
    for name, tensor in (("losses", outputs.losses), ("loss", outputs.loss),
                         ("norm", outputs.grad_norm)):  # fmt: skip
        found[name] = tensor.view(-1).view(torch.int32).tolist()
    names = {group: named for group, (named, _) in trainer.digested.items()}
    for group, digests in outputs.digests.items():
        found |= {f"{group} {n}": r for n, r in zip(names[group], digests.tolist(), strict=True)}
    for name, state in trainer.rng_states().items():
        found[f"random {name}"] = hashlib.sha256(state.numpy().tobytes()).hexdigest()
    taps = trainer.taps
    rows = dict(zip(taps.names, taps.rows.tolist(), strict=True))
    # Not the place: of experts whose router is captured apart there are no calls as one module.
    return found | {
        f"tap {name}": row[:PLACE_COLUMN] for name, row in rows.items()
        if not name.partition(":")[0].endswith("mlp.moe")
    }  # fmt: skip


# ---- a resume


def _state_tensors(trainer: Trainer) -> list[torch.Tensor]:
    return [*trainer.digested["weights"][1], *trainer.digested["optim"][1]]


def _state_of(trainer: Trainer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights, moments and random states, apart."""
    states = [stream.get_state() for stream in trainer.streams.streams]
    return [tensor.clone() for tensor in _state_tensors(trainer)], states


def _put(trainer: Trainer, state: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    for mine, saved in zip(_state_tensors(trainer), state[0], strict=True):
        mine.copy_(saved)
    for stream, saved in zip(trainer.streams.streams, state[1], strict=True):
        stream.set_state(saved)
    with torch.no_grad():
        for root in trainer._roots:
            root.refresh_model_weights()


# ---- what differs


def _compared(case: Case, eager: Seen, graphed: Seen) -> list[str]:
    problems = []
    for event, expected, got in zip(case.events, eager.shown, graphed.shown, strict=True):
        differ = [key for key in expected if got.get(key) != expected[key]]
        if differ or got.keys() != expected.keys():
            problems.append(f"bits: after {event} of {len(differ)} things, first {differ[:3]}")
            break
    if graphed.unnamed:
        problems.append(f"ledger: {graphed.unnamed} unnamed storages")
    if graphed.left != eager.left:
        problems.append(f"memory: {graphed.left} bytes after close, {eager.left} of eager training")
    problems += [
        f"memory: {gone} bytes are held by nobody's trainer, of {what} training"
        for what, gone in (("graphed", graphed.gone), ("eager", eager.gone))
        if gone
    ]
    if graphed.stand_ins:
        problems.append(f"stand-ins: left on {graphed.stand_ins[:3]}")
    if graphed.captured and not graphed.replays:
        problems.append("replays: none of what was captured")
    return problems
