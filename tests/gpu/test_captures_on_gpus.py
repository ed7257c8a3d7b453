"""Captures on a GPU leave nothing: neither those that CUDA refuses, nor those that are dropped."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.config import FsdpConfig, TrainConfig, model_from_preset
from fsdp_core.device import Device
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.graph import GraphMaker
from fsdp_core.graph.recorder import CaptureRefused
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.train import Trainer
from tests.dist.rank_pool import RankPool
from tests.gpu.test_fsdp_on_gpus import device_here

WARMUP, STEPS = 2, 5
Step = dict[str, bytes]


def config_of(preset: str) -> TrainConfig:
    """A tiny model on one rank, two microbatches a step."""
    overrides = {"capacity_factor": 1.25} if preset.startswith("moe") else {}
    return TrainConfig(
        model=model_from_preset(preset, overrides), fsdp=FsdpConfig(pool="double"), steps=STEPS,
        microbatches=2, micro_batch_size=4, graph_warmup_steps=WARMUP, seed=5,
    )  # fmt: skip


def look(trainer: Trainer) -> Step:
    """Bits of the last step's outputs and random states, once the device is done with it."""
    trainer.device.synchronize()
    seen = dict(trainer.outputs.named_tensors()) | trainer.rng_states()
    return {name: t.detach().cpu().numpy().tobytes() for name, t in seen.items()}


def train(config: TrainConfig, axes: Axes, device: Device) -> list[Step]:
    """What every step looks like."""
    trainer, steps = Trainer(config, axes, device), []
    for index in range(config.steps):
        trainer.step(index)
        steps.append(look(trainer))
    trainer.close()
    return steps


def drawn(*, refused: bool) -> tuple[str, list[list[float]]]:
    """What a refused capture says, and what is drawn after it, eagerly and by graphs."""
    device, said = device_here(), ""
    generator = torch.Generator(device.torch_device).manual_seed(3)
    torch.manual_seed(5)
    maker = GraphMaker(device, (generator,))
    with device.on(device.new_stream()):
        x = torch.ones(64, device=device.torch_device)

        def reads() -> torch.Tensor:
            return F.dropout(x, 0.5) * x.sum().item()

        before, after = maker.new(), maker.new()
        doubled = before.capture(lambda: x * 2.0)
        if refused:
            try:
                maker.new().capture(reads)
            except CaptureRefused as error:
                said = str(error)
        seen = [F.dropout(x, 0.5), torch.rand(8, device=x.device, generator=generator)]
        torch.cuda.empty_cache()
        result = after.capture(lambda: F.dropout(x, 0.5) + doubled)
        for _ in range(2):
            before.replay()
            after.replay()
            seen.append(result.clone())
        device.synchronize()
        before.reset()
        after.reset()
    return said, [each.tolist() for each in seen]


def drawn_with_and_without() -> tuple[str, bool]:
    """What the refusal said, and whether it changed what was drawn."""
    _, expected = drawn(refused=False)
    said, got = drawn(refused=True)
    return said, got != expected


def _read(module: Any, args: Any, output: torch.Tensor) -> None:
    del module, args
    output.sum().item()


_read._cuda_graph_capturable = True  # type: ignore[attr-defined]


def refused_then_captured(scope: str) -> tuple[str, bool]:
    """A trainer whose first capture reads on the host: what it said, and if bits are eager's."""
    device = device_here()
    eager = config_of("dense_tiny_dropout")
    axes = build_axes(eager.parallel, device)
    expected = train(eager, axes, device)
    config = replace(eager, graph=tuple(scope.split("+")))
    trainer, said, steps = Trainer(config, axes, device), "", []
    for index in range(STEPS):
        if index == WARMUP:
            norm = trainer.stages[-1].get_submodule("layers.1.attn.norm")
            handle = norm.register_forward_hook(_read)
            try:
                trainer.step(index)
            except CaptureAborted as error:
                said = str(error)
            handle.remove()
        trainer.step(index)
        steps.append(look(trainer))
    trainer.close()
    return said, steps == expected


def _left_after(config: TrainConfig, axes: Axes, device: Device) -> int:
    """Bytes in use once a trainer has come and gone."""
    train(config, axes, device)
    gc.collect()
    # One for each stream that was ever multiplied on: no memory of a trainer.
    torch._C._cuda_clearCublasWorkspaces()
    device.synchronize()
    return device.live_bytes()


def memory_left(scopes: tuple[str, ...]) -> dict[str, int]:
    """By scope, bytes that a run with graphs leaves in use beyond what an eager one does."""
    device = device_here()
    eager = config_of("moe_tiny")
    axes = build_axes(eager.parallel, device)
    _left_after(eager, axes, device)
    base = _left_after(eager, axes, device)
    return {
        scope: _left_after(replace(eager, graph=tuple(scope.split("+"))), axes, device) - base
        for scope in scopes
    }


NOT_PERMITTED = "not permitted when stream is capturing"


@pytest.mark.gpu(1)
def test_a_refused_capture_leaves_torch_as_it_was(gpu_ranks: RankPool) -> None:
    """Eager dropout, other generators, freeing memory and the next capture, as without it."""
    ((said, changed),) = gpu_ranks.run(drawn_with_and_without, world_size=1)
    assert NOT_PERMITTED in said
    assert not changed


@pytest.mark.gpu(1)
@pytest.mark.parametrize("scope", ["attn", "full_iteration"])
def test_a_trainer_captures_after_a_refusal(gpu_ranks: RankPool, scope: str) -> None:
    """It names the cause, and goes on with the bits of an eager run."""
    ((said, is_equal),) = gpu_ranks.run(refused_then_captured, scope, world_size=1)
    assert NOT_PERMITTED in said
    assert is_equal


@pytest.mark.gpu(1)
def test_graphs_give_their_memory_back(gpu_ranks: RankPool) -> None:
    """All but a MiB, of every kind of scope."""
    scopes = ("attn+moe_router+moe_preprocess", "layer", "full_iteration")
    (left,) = gpu_ranks.run(memory_left, scopes, world_size=1)
    assert {scope: nbytes for scope, nbytes in left.items() if abs(nbytes) > 2**20} == {}
