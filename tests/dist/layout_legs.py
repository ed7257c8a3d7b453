"""Trainings on layouts, as legs of a comparison between layouts, with faults planted by hand.

| fault | what is wrong | first tensor that shows it |
| --- | --- | --- |
| sum for mean | gradients are sums over the ranks that have tokens | head |
| norm not summed | norms under sequence parallel keep each rank's part | the last norm |
| two rows swapped | of one projection's gradient on the last rank | that projection |
| expert lost | one expert's gradient is zero | that expert's weight |
| one element | one element of a gradient is 2 % off | that gradient |
| half the gradients | FSDP divides by twice the ranks that have tokens | head |
| swapped heads | values go to the heads of other keys | loss |
| aux loss twice | the balancing loss has twice its scale | router of the last layer |
| scaled branch | attention of layer 1 is 1 % too large | its branch's output |
| skipped update | AdamW leaves one weight as it is | that weight, and no gradient |
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.config import FsdpConfig, ModelConfig, ParallelConfig, TrainConfig, model_from_preset
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.train import Trainer
from harness.bisect.layouts import LayoutAnswer, Leg, compare_layouts, runs_to_compare
from harness.recorder.rows import entry_of
from harness.records import FloatBits, RankRecords, RunOutcome, RunResult, RunSpec, StepRecord
from harness.store.contents import Contents, KeptTensor, Loaded
from harness.worker.main import rounded
from tests.dist import parity_faults
from tests.dist.rank_pool import RankPool

DEVICE = Device("cpu")
SMALL: dict[str, Any] = {"vocab_size": 48, "hidden": 32, "ffn": 48, "seq": 16}
ROUTED = "layers.1.mlp.moe.experts.gate.weight"
PROJECTION = "layers.0.attn.attention.wo.weight"

Answered = tuple[list[tuple[KeptTensor, bytes]], list[int]]
"""What a rank has kept, and the bits of the loss of each step."""


@dataclass(frozen=True)
class Layout:
    """One leg: degrees of a layout, and what is trained on it."""

    degrees: dict[str, Any] = field(default_factory=dict)
    preset: str = "dense_tiny"
    layers: int = 2
    dtype: str = "fp32"
    step: int = 0
    strategy: str = "optim_grads_params"
    fault: str = ""

    @property
    def model(self) -> ModelConfig:
        """A small one."""
        return model_from_preset(self.preset, SMALL | {"layers": self.layers})

    @property
    def spec(self) -> RunSpec:
        """As the harness asks for it."""
        parallel = ParallelConfig(**self.degrees)
        config = TrainConfig(
            model=self.model, parallel=parallel,
            fsdp=FsdpConfig(strategy=self.strategy), dtype=self.dtype, steps=self.step + 1,
            microbatches=2, micro_batch_size=2, seed=5,
        )  # fmt: skip
        return RunSpec(
            config=config.to_dict(), device="cpu", world_size=parallel.world_size, timeout_s=60
        )


def train_leg(spec: RunSpec, fault: str = "") -> Answered:
    """One leg on a rank; it keeps what its specification says."""
    config, keep = TrainConfig.from_dict(spec.config), spec.keep
    assert keep is not None
    losses = []
    with parity_faults.planted(fault):
        trainer = Trainer(config, build_axes(config.parallel, DEVICE), DEVICE)
        keeping = trainer.keep(keep.names, keep.max_bytes)
        _plant(trainer, fault)
        rounding = rounded(spec, dist.get_rank())
        for step in range(keep.step + 1):
            with rounding:
                outputs = trainer.step(step)
            losses.append(int(outputs.loss.view(torch.int32)) & 0xFFFFFFFF)
        kept = keeping.read(trainer.outputs.digests)
        trainer.close()
    return [entry_of(each) for each in kept], losses


def train_legs(specs: list[RunSpec], fault: str = "") -> list[Answered]:
    """Several one after another."""
    return [train_leg(spec, fault) for spec in specs]


# ---- faults


def _grads(trainer: Trainer, name: str) -> torch.Tensor | None:
    named = dict(zip(trainer.optimizer.names, trainer.optimizer.grads, strict=True))
    return named.get(name)


def _scale_all(trainer: Trainer) -> None:
    for grad in trainer.optimizer.grads:
        grad.mul_(2.0)


def _swap_rows(trainer: Trainer) -> None:
    grad = _grads(trainer, PROJECTION)
    if grad is not None and grad.shape[0] > 1 and _is_last():
        grad[:2] = grad[:2].flip(0)


def _lose_expert(trainer: Trainer) -> None:
    grad = _grads(trainer, ROUTED)
    if grad is not None and _is_last():
        grad[0].zero_()


def _one_element(trainer: Trainer) -> None:
    grad = _grads(trainer, PROJECTION)
    if grad is not None and _is_last():
        grad.view(-1)[grad.abs().argmax()] *= 1.02


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


_GRADS: dict[str, Callable[[Trainer], None]] = {
    "sum for mean": _scale_all, "two rows swapped": _swap_rows, "expert lost": _lose_expert,
    "one element": _one_element,
}  # fmt: skip


def _plant(trainer: Trainer, fault: str) -> None:
    """Change gradients once they are reduced, or leave out an update."""
    if fault in _GRADS:
        act, check = _GRADS[fault], trainer._require_grads

        def then_act() -> None:
            check()
            with torch.no_grad():
                act(trainer)

        trainer._require_grads = then_act  # type: ignore[method-assign]
    if fault == "aux loss twice":
        for stage in trainer.stages:
            stage.set_loss_scale(parity_faults.loss_scale(1 / trainer.config.microbatches, fault))
    if fault == "scaled branch":
        for stage in trainer.stages:
            if (layer := stage.numbered_layers.get("1")) is not None:
                wo: Any = layer.attn.attention.wo
                forward = wo.forward
                wo.forward = lambda x, forward=forward: forward(x) * 1.01
    if fault == "skipped update":
        optimizer = trainer.optimizer
        update = optimizer.step

        def step() -> None:
            named = dict(zip(optimizer.names, optimizer.params, strict=True))
            old = named[PROJECTION].clone() if PROJECTION in named else None
            update()
            if old is not None:
                named[PROJECTION].copy_(old)

        optimizer.step = step  # type: ignore[assignment,method-assign]


# ---- legs


def as_leg(spec: RunSpec, ranks: Iterable[Answered]) -> Leg:
    """What the harness would read of the run."""
    ranks, keep = list(ranks), spec.keep
    assert keep is not None
    steps = tuple(_record(step, bits) for step, bits in enumerate(ranks[0][1]))
    record = RankRecords(
        rank=0, start=None, steps=steps, events=(), error=None, end=None, problems=()
    )
    outcome = RunOutcome(
        key=spec.key, what="", message="", culprit_rank=None, ranks=(), started_unix_s=0.0,
        wall_s=0.0,
    )  # fmt: skip
    contents = Contents(
        step=keep.step, problems=(),
        ranks=tuple(
            tuple(Loaded(about=about, data=data) for about, data in kept) for kept, _ in ranks
        ),
    )  # fmt: skip
    return Leg(
        result=RunResult(spec=spec, outcome=outcome, ranks=(record,)), contents=contents
    )  # fmt: skip


def _record(step: int, bits: int) -> StepRecord:
    number = FloatBits.from_bits(bits)
    return StepRecord(
        step=step, rank=0, loss=number, microbatch_losses=(number,), grad_norm=number, digests={},
        nonfinite={}, step_s=0.0, live_bytes=0, peak_bytes=0,
    )  # fmt: skip


class Comparer:
    """Compares layouts on warm ranks; samples are made once for each of model, dtype and data."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._made: dict[str, Leg] = {}

    def __call__(self, reference: Layout, candidate: Layout) -> LayoutAnswer:
        """Both legs, and samples."""
        first, spec, *samples = runs_to_compare(reference.spec, candidate.spec, reference.step)
        for missing in (each for each in (first, *samples) if each.key not in self._made):
            found = self._pool.run(train_leg, missing, world_size=missing.world_size)
            self._made[missing.key] = as_leg(missing, found)
        faulty = as_leg(
            spec, self._pool.run(train_leg, spec, candidate.fault, world_size=spec.world_size)
        )
        samples_made = [self._made[sample.key] for sample in samples]
        return compare_layouts(self._made[first.key], faulty, samples_made)


def with_fault(layout: Layout, fault: str) -> Layout:
    """The same, with a fault."""
    return replace(layout, fault=fault)
