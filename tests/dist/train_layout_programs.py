"""Runs of the trainer on layouts, and what of a run can be compared bit by bit."""

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.config import FsdpConfig, OptimConfig, ParallelConfig, TrainConfig, model_from_preset
from fsdp_core.data import Batches, PackedDocuments, token_source
from fsdp_core.device import Device
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import init_weights
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.parallel.rng import RandomStreams
from fsdp_core.train import Trainer
from tests.dist.parity_programs import single_axes
from tests.support.dense_parts import dense_part
from tests.support.global_weights import gather_global

STEPS, WARMUP = 4, 2
SMALL: dict[str, Any] = {"vocab_size": 48, "hidden": 32, "ffn": 48, "seq": 16}
DEVICE = Device("cpu")


@dataclass(frozen=True)
class Run:
    """One training: a model on a layout, in a mode."""

    degrees: dict[str, Any]
    preset: str = "dense_tiny"
    overrides: dict[str, Any] = field(default_factory=dict)
    graph: tuple[str, ...] = ()
    capture_by: str = "ours"
    dtype: str = "fp32"
    backend: str = "torch"
    fp8: str = "none"
    microbatches: int = 2
    micro_batch_size: int = 1
    fsdp: dict[str, Any] = field(default_factory=dict)
    clip: float = 1.0
    lr: float = 1e-2
    steps: int = STEPS
    taps: tuple[str, ...] = ()

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**self.degrees)

    @property
    def config(self) -> TrainConfig:
        """The run as the trainer takes it."""
        return TrainConfig(
            model=model_from_preset(self.preset, SMALL | self.overrides),
            parallel=self.parallel,
            fsdp=FsdpConfig(**self.fsdp),
            optim=OptimConfig(clip_grad_norm=self.clip, lr=self.lr),
            graph=self.graph,
            capture_by=self.capture_by,
            dtype=self.dtype,
            backend=self.backend,
            fp8=self.fp8,
            steps=self.steps,
            taps=self.taps,
            microbatches=self.microbatches,
            micro_batch_size=self.micro_batch_size,
            seed=5,
            graph_warmup_steps=WARMUP,
        )


@dataclass
class Seen:
    """What a rank saw: bits of every step, names, graphs' counts, memory that no owner names."""

    floats: list[tuple[int, ...]]
    digests: list[dict[str, tuple[int, ...]]]
    rng: list[dict[str, str]]
    names: dict[str, list[str]]
    captured: int
    replays: int
    places: list[str]


def bits(
    trainer: Trainer, step: int
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]], dict[str, str]]:
    """One step: losses, loss and norm; digests; random states."""
    outputs = trainer.step(step)
    trainer.device.synchronize()  # on CUDA they are read on another stream than they are made on
    floats = torch.cat((outputs.losses, outputs.loss[None], outputs.grad_norm[None]))
    digests = {group: tuple(rows.flatten().tolist()) for group, rows in outputs.digests.items()}
    rng = {
        name: hashlib.sha256(state.numpy().tobytes()).hexdigest()
        for name, state in trainer.rng_states().items()
    }
    return tuple(floats.view(torch.int32).tolist()), digests, rng


def train(run: Run, axes: Axes) -> Seen:
    trainer = Trainer(run.config, axes, DEVICE)
    steps = [bits(trainer, step) for step in range(run.steps)]
    floats, digests, rng = (list(each) for each in zip(*steps, strict=True))
    counts = trainer.counts
    names = {group: named for group, (named, _) in trainer.digested.items()}
    trainer.close()
    assert counts.unnamed_externals == 0
    return Seen(floats, digests, rng, names, counts.captured, counts.replays,
                counts.external_places)  # fmt: skip


def train_all(runs: list[Run]) -> list[Seen]:
    """Runs of one layout, one after another."""
    axes = build_axes(runs[0].parallel, DEVICE)
    return [train(run, axes) for run in runs]


# ---- against one process


@dataclass
class Shown:
    """What a layout shows of a training, whatever it cuts.

    Attributes:
        floats: loss and gradient norm of every step.
        weights: global weights after the last step, on rank 0.
        biases: of experts after the last step, this rank's.
    """

    floats: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]


def show(run: Run) -> Shown:
    axes = build_axes(run.parallel, DEVICE)
    trainer = Trainer(run.config, axes, DEVICE)
    floats = []
    for step in range(run.steps):
        outputs = trainer.step(step)
        floats.append((outputs.loss.item(), outputs.grad_norm.item()))
    weights = gather_global(trainer.stages, axes)
    names, tensors = trainer.digested["weights"]
    found = dict(zip(names, tensors, strict=True))
    biases = {name: t.clone() for name, t in found.items() if name.endswith("expert_bias")}
    return Shown(floats, weights if dist.get_rank() == 0 else {}, biases)


def first_loss(run: Run) -> float:
    trainer = Trainer(run.config, build_axes(run.parallel, DEVICE), DEVICE)
    return trainer.step(0).loss.item()


def sequences(run: Run, step: int) -> list[list[torch.Tensor]]:
    """All sequences of a step over all ranks, by microbatch, each with the token after its last."""
    config, parallel = run.config, run.parallel
    source = token_source(config.data, config.model.vocab_size)
    if not parallel.dynamic_cp:
        tokens = [
            Batches(source, config.seed, replica, config.microbatches, config.micro_batch_size,
                    config.model.seq).tokens(step)
            for replica in range(parallel.dp * parallel.dp_outer)
        ]  # fmt: skip
        return [list(torch.cat(rows)) for rows in zip(*tokens, strict=True)]
    sizes, tp = parallel.dynamic_cp, parallel.tp if parallel.sequence_parallel else 1
    local = config.micro_batch_size * config.model.seq // sizes[-1]
    multiples = {size: 2 * size * tp for size in sizes}
    documents = PackedDocuments(source, config.seed, sizes, local, multiples, config.model.seq)
    return [
        [
            torch.from_numpy(ids)
            for number in range(parallel.dp_outer * parallel.dp * parallel.cp
                                // documents.size(step, m))
            for ids in documents.pack(step, m, number)
        ]
        for m in range(config.microbatches)
    ]  # fmt: skip


def one_process_loss(run: Run) -> float:
    """The mean over all tokens of a step, each sequence alone through the model that is not cut."""
    axes, model = single_axes(), run.config.model
    streams = RandomStreams(0, (axes.tp,), torch.device("cpu"))
    stage = DecoderStage(model, axes, LayerFactory(), streams)
    init_weights([stage], run.config.seed, layers=model.layers, init_std=model.init_std)
    total, number = 0.0, 0
    for ids in itertools.chain(*sequences(run, 0)):
        count = len(ids) - 1
        whole = dense_part(ids[None, :-1], ids[None, 1:], axes.cp)
        with torch.no_grad():
            total += stage(whole.tokens, whole.part).item() * count
        number += count
    return total / number
