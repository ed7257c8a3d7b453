"""The training step of one rank, eager or graphed, on any layout.

    step(i)   fill the static inputs -> iteration, eager or replayed -> static outputs
    iteration
      gradients  zero gradients; forward and backward of all microbatches through the pipeline;
                 digest of tokens and gradients
      update     gradient norm, clipping, AdamW, experts' biases, cast to model weights; digest of
                 weights, moments, copies that are computed with, and losses of routers

Inputs and outputs are static tensors in every mode, so eager and graphed runs differ in nothing but
who issues the work. Scope `full_iteration` captures the whole iteration, all collectives included,
with the update or without; partial scopes capture parts of layers, forward and backward.

A run that stops after a step and goes on in new processes: everything of a trainer that lasts.

    weights, routers' biases, what libraries' modules keep   of the stages' state_dicts
    AdamW's moments, step count and learning rate            states of an optimizer, by parameter
    random states of this rank                               `extra`, rank by rank

Data needs no position: a batch is a function of the step's number. Gradients, losses and digests
are made anew in each step, graphs are captured anew.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core import checkpoint
from fsdp_core.config import TrainConfig
from fsdp_core.data import mix
from fsdp_core.device import Device, make_deterministic, seed_all
from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.graph.digest import Digester, empty_rows
from fsdp_core.graph.recorder import AddressBook
from fsdp_core.model.decoder import DecoderStage, make_layers
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.moe.router import Router, watches_load
from fsdp_core.model.sharding import clip_grads
from fsdp_core.parallel.mesh import Axes, all_reduce
from fsdp_core.parallel.pipeline import Pipeline, TensorSpec
from fsdp_core.parallel.pipeline_schedule import make_schedule, slots_needed
from fsdp_core.stress import races
from fsdp_core.stress.stressors import Stressors
from fsdp_core.train.build import (
    TORCH_DTYPES,
    AdamW,
    PointerChanges,
    build_stages,
    enter_attributes,
    enter_optimizer,
    enter_stage,
    holds_gradients,
    make_streams,
    named_states,
    require_same,
    roots,
)
from fsdp_core.train.compiled import Compilation, compile_parts
from fsdp_core.train.graphs import Graphs
from fsdp_core.train.inputs import make_inputs
from fsdp_core.train.scopes import GraphCounts, GraphUse
from fsdp_core.train.taps import Snapshots, TensorCopies, branch_places, open_taps, places_of

OF_GRADIENTS = ("samples", "grads")
"""Groups that are digested once the gradients are there; all others follow the update."""
EVALUATED = 2**32
"""Step whose batch `evaluate_every` evaluates: one that no run trains on."""
STATE = ("weights", "optim")
"""Groups that last from step to step."""

Named = tuple[list[str], list[torch.Tensor]]


@dataclass(frozen=True)
class StepOutputs:
    """What a step shows, in static device tensors that every step overwrites.

    losses: float32 [microbatches], of this rank's tokens; ranks of tp and pp have the same. Their
        mean over microbatches and over the ranks that hold different tokens is `loss`.
    loss: float32 scalar, the mean over all tokens of the step, on every rank the same.
    grad_norm: float32 scalar, of the whole model's gradient, before clipping.
    evaluation: float32 scalar, the loss of the last evaluation that `evaluate_every` asked for.
    skipped: float32 scalar, 1 if `skip_nonfinite` left the update out, else 0.
    digests: per group, int32 [tensors, 5]: four lanes of the digest, and whether any element is not
        finite.
    """

    losses: torch.Tensor
    loss: torch.Tensor
    grad_norm: torch.Tensor
    evaluation: torch.Tensor
    skipped: torch.Tensor
    digests: dict[str, torch.Tensor]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("losses", "loss", "grad_norm", "evaluation", "skipped"):
            yield name, getattr(self, name)
        for group, rows in self.digests.items():
            yield f"digest of {group}", rows


def mean_loss(losses: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The loss of the step out of every rank's losses: float32 scalar. A collective. In float64, so
    that the order in which ranks are summed leaves float32 alone.
    """
    total = losses.double().mean()
    for axis in axes.averaged:
        total = all_reduce(total, axis)
    return (total / axes.num_averaged).float()


def groups_of(optimizer: AdamW, others: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Named]:
    """The groups of `Digests`, with the tensors as they are now."""
    names = optimizer.names
    return {
        "grads": (names, optimizer.grads),
        "weights": (
            [*names, *(name for name, _ in others)],
            [*optimizer.params, *(tensor for _, tensor in others)],
        ),
        "optim": (
            [f"{name}.exp_avg" for name in names]
            + [f"{name}.exp_avg_sq" for name in names]
            + ["step_count"],
            [*optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count],
        ),
    }


class Digests:
    """Digests of the tensors that a run is compared by, in groups.

    optimizer: its gradients, weights and moments, this rank's rows, by global names.
    others: further state that a step changes: it goes with the weights.
    further: tensors of further groups, by name; a group of none is left out.
    digested: names and tensors of each group.
    kept: copies that are taken with the digests of a group.
    """

    def __init__(
        self,
        optimizer: AdamW,
        others: Sequence[tuple[str, torch.Tensor]],
        further: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> None:
        self.digested = groups_of(optimizer, others) | {
            group: (list(named), list(named.values())) for group, named in further.items() if named
        }
        self._digesters = {
            group: Digester(tensors, named) for group, (named, tensors) in self.digested.items()
        }
        self.kept: dict[str, TensorCopies] = {}

    def empty(self, device: torch.device) -> dict[str, torch.Tensor]:
        return {g: empty_rows(len(names), device) for g, (names, _) in self.digested.items()}

    def update(self, group: str, outputs: StepOutputs) -> None:
        names, tensors = self.digested[group]
        self._digesters[group](tensors, outputs.digests[group])
        if group in self.kept:
            self.kept[group].take(zip(names, tensors, strict=True))

    def scratch(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that digesting needs, by name."""
        for group, digester in self._digesters.items():
            for number, tensor in enumerate(digester.scratch()):
                yield f"digest scratch {number} of {group}", tensor
        for group, copies in self.kept.items():
            for name, buffer in copies.buffers.items():
                yield f"copy of {group}:{name}", buffer


class Trainer:
    """Runs steps of one rank, inside a process group; `close` before that is destroyed.

    With stressors all its work is under stress: it is built under it, and is so `at_work`; what
    touches memory on two streams in no order then raises `RaceFound`.

    axes: of `config.parallel`, from `mesh.build_axes`.
    stages: this rank's stages of the decoder.
    streams: what dropout draws from.
    outputs: of the last step.
    taps: digests of what went through modules in the last step.
    stressors: those of the configuration; None without.
    Raises ValueError: axes of another layout.
    Raises StressorMissing: the device lacks one of the stressors.
    """

    def __init__(self, config: TrainConfig, axes: Axes, device: Device) -> None:
        require_same(config, axes)
        self.config, self.axes, self.device = config, axes, device
        self.stressors: Stressors | None = None
        if config.stress:
            self.stressors = Stressors(
                config.stress, device=device, seed=config.stress_seed, rank=dist.get_rank()
            )
        with contextlib.nullcontext() if self.stressors is None else self.stressors.active():
            self._build()
            for root in self._roots if self.stressors else ():
                # Made at their first use, which is to be in here.
                _ = root.fsdp_schedule.gather_stream, root.fsdp_schedule.reduce_stream
        if self.stressors is not None:
            self._watch(self.stressors)

    def _build(self) -> None:
        config, axes, device = self.config, self.axes, self.device
        self.stream = device.new_stream()
        # TransformerEngine must be loaded before anything makes torch load its own cuDNN.
        backend = make_layers(
            config.backend, fp8=config.fp8, dtype=TORCH_DTYPES[config.dtype],
            fused_experts=config.fused_experts or None, fused_rope=config.fused_rope,
        )  # fmt: skip
        make_deterministic(config.seed)
        with device.on(self.stream):
            self.streams = make_streams(config, axes, device)
            self.stages = self._build_stages(backend)
            self.taps = open_taps(config, self.stages, axes.pp, device.torch_device)
            self._compiler = compile_parts(config, self.stages)
            self._inputs = make_inputs(config, axes, device)
            self.optimizer, self._digests = self._build_state()
            self.outputs = self._empty_outputs()
            self._whole_steps = 0
            self._captured_at: int | None = None
            self._is_closed = False
        seed_all(mix(config.seed, dist.get_rank()))
        self._graphs = Graphs(
            config, device, self.stages, self.streams, self.named_tensors, self._compiler
        )  # fmt: skip

    def _watch(self, stressors: Stressors) -> None:
        """Have stressors see the buffers of pools, and races the names of what they find."""
        for root in self._roots:
            schedule = root.fsdp_schedule
            schedule.pool = stressors.watched(schedule.pool)
            for unit in schedule.units:
                for group in unit.groups:
                    group.pool = schedule.pool
        if stressors.races is not None:
            stressors.races.named = self._named
            stressors.races.units = {group.owner: group.name for group in self.groups}
            self.stream.name = "main"

    def _named(self) -> Iterator[races.Named]:
        units = {name: group.name for group in self.groups for name in (*group.names, group.name)}
        for name, tensor in self.named_tensors().items():
            unit = units.get(name.split(" ")[0], "")
            yield races.Named(name, unit, tensor, holds_gradients(name))

    @property
    def counts(self) -> GraphCounts:
        return self._graphs.counts

    @property
    def graph_uses(self) -> list[GraphUse]:
        """What graphs did by scope, layer and direction; until `close`."""
        return self._graphs.uses

    @property
    def compilations(self) -> list[Compilation]:
        """What torch.compile compiled so far, and what of it again; until `close`."""
        return self._compiler.compilations

    @property
    def parts_compiled(self) -> tuple[str, ...]:
        """Parts of the configuration that the compiler made code of; until `close`."""
        return tuple(part for part in self.config.compile if part in self._compiler.parts)

    @property
    def data_checksum(self) -> str:
        return self._inputs.checksum

    @property
    def digested(self) -> dict[str, Named]:
        return self._digests.digested

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for root in self._roots for group in root.fsdp_groups]

    def rng_states(self) -> dict[str, torch.Tensor]:
        """Copies of every random state of this rank, on the host: generators, then streams."""
        states = dict(zip(("cpu", "cuda"), self.device.rng_states(), strict=False))
        # On CUDA, too, the host holds a generator's state.
        return states | {
            stream.name.partition(" at ")[0]: stream.get_state() for stream in self.streams.streams
        }

    def set_rng_states(self, states: dict[str, torch.Tensor]) -> None:
        """Put back what `rng_states` returned, on a rank of the same place in the layout."""
        self.device.set_rng_states([states[key] for key in ("cpu", "cuda") if key in states])
        for stream in self.streams.streams:
            stream.set_state(states[stream.name.partition(" at ")[0]])

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, work is issued on the trainer's stream, and under stress if it has any. What
        races showed is raised at the end, unless something else was.
        """
        if self.stressors is None:
            with self.device.on(self.stream):
                yield
            return
        with self.stressors.active(), self.device.on(self.stream):
            self.stressors.before_step()
            yield
        self.stressors.after_step()

    # ---- a step

    def step(self, index: int) -> StepOutputs:
        """Run step `index`; the outputs are valid, in stream order, until the next call.

        Scopes are captured once the trainer has taken `graph_warmup_steps` whole steps itself,
        also where it goes on with a run that another one began.

        Raises CaptureAborted: the graph scope of the configuration cannot be captured, on this rank
            or another; no rank has graphs. The trainer can go on eagerly with another step, or try
            the same step again.
        Raises StaleAddress: a graph was about to run over memory that moved.
        """
        with self.at_work():
            self._inputs.fill(index)
            if self._is_capture_due(index):
                self._capture(index)
            if self._graphs.iteration is not None:
                self._graphs.iteration()
                self.counts.launched()
                if not self.config.graph_optimizer:
                    self._update()
            else:
                self._iteration()
            if self.config.evaluates_after(index):
                self.outputs.evaluation.copy_(self._evaluate(EVALUATED))
        return self.outputs

    def evaluate(self, index: int) -> torch.Tensor:
        """The mean loss over the tokens of step `index`, trained on or not: float32 scalar.
        Eagerly, without dropout or gradients; outputs, weights and random states stay as they are.
        """
        with self.at_work():
            return self._evaluate(index)

    def _evaluate(self, index: int) -> torch.Tensor:
        self._inputs.fill(index)
        for stage in self.stages:
            stage.eval()
        try:
            losses = self._pipeline.forward_only(self._inputs.microbatches())
        finally:
            for stage in self.stages:
                stage.train()
        return mean_loss(losses, self.axes)

    def _iteration(self) -> None:
        self._gradients()
        self._update()

    def _gradients(self) -> None:
        outputs = self.outputs
        self.taps.begin()
        for root in self._roots:
            root.zero_main_grads()
        outputs.losses.copy_(self._pipeline.forward_backward(self._inputs.microbatches()))
        outputs.loss.copy_(mean_loss(outputs.losses, self.axes))
        self._require_grads()
        self._after_gradients()

    def _after_gradients(self) -> None:
        for group in OF_GRADIENTS:
            self._digests.update(group, self.outputs)
        self._whole_steps += 1

    def _update(self) -> None:
        config, outputs = self.config, self.outputs
        outputs.grad_norm.copy_(clip_grads(self.stages, self.axes, config.optim.clip_grad_norm))
        if config.skip_nonfinite:
            # The norm is the same on all ranks, and nobody waits for the device to look at it.
            outputs.skipped.copy_(outputs.grad_norm.isfinite().logical_not())
            self.optimizer.step(outputs.skipped)
        else:
            self.optimizer.step()
        for _, router in self._biased_routers():
            router.update_bias(config.model.expert_bias_rate)
        with torch.no_grad():
            for root in self._roots:
                root.refresh_model_weights()
        for group in self._digests.digested:
            if group not in OF_GRADIENTS:
                self._digests.update(group, outputs)

    def _require_grads(self) -> None:
        """A parameter that got no gradient would be updated by that of the step before."""
        for group in self.groups:
            for name, parameter in zip(group.names, group.sharded, strict=True):
                if parameter.grad is None:
                    message = f"Expected a gradient of {name}, got none in this step."
                    raise TensorError(message, name)

    def redigest_state(self) -> None:
        """Digest weights and moments again, eagerly: for what changed them after the step."""
        with self.at_work():
            for group in STATE:
                self._digests.update(group, self.outputs)

    def digest_state(self) -> dict[str, torch.Tensor]:
        """Digests of weights and moments as they are now, on the host: rows of `StepOutputs`.
        Between steps, and outside of what stressors see. It waits for the device.
        """
        with self.device.on(self.stream):
            for group in STATE:
                self._digests.update(group, self.outputs)
            return {group: self.outputs.digests[group].cpu() for group in STATE}

    def keep(self, names: Sequence[str], max_bytes: int) -> Snapshots:
        """Copy tensors as they are digested: see `taps.Snapshots`. Before the first step."""
        assert not self._whole_steps
        with self.device.on(self.stream):
            return Snapshots(
                names, max_bytes, digested=self._digests.digested, copies=self._digests.kept,
                taps=self.taps,
                places=places_of(self.stages, self.groups),
                row_places=branch_places(self.config, self.axes),
            )  # fmt: skip

    # ---- parts

    def _build_stages(self, backend: LayerFactory) -> list[DecoderStage]:
        stages = build_stages(self.config, self.axes, backend, self.streams, self.device)
        self._roots = list(roots(stages))
        return stages

    def _build_state(self) -> tuple[AdamW, Digests]:
        optimizer = AdamW(named_states(self.groups), self.config.optim)
        copies = {name: t for group in self.groups for name, t in group.copies_at_rest()}
        further = {"buffers": dict(self._router_losses()), "copies": copies, **self._samples()}
        return optimizer, Digests(optimizer, list(self._expert_biases()), further)

    def _samples(self) -> dict[str, dict[str, torch.Tensor]]:
        inputs = self._inputs
        return {"samples": {"tokens": inputs.tokens, "targets": inputs.targets}}

    def _routers(self) -> Iterator[tuple[str, Router]]:
        for stage in self.stages:
            for name, router in stage.routers.items():
                yield f"{name}.router", router

    def _biased_routers(self) -> Iterator[tuple[str, Router]]:
        return ((n, router) for n, router in self._routers() if router.expert_bias is not None)

    def _router_losses(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing is computed from their values, so that no other digest would differ."""
        for name, router in self._routers():
            if watches_load(router.model):
                yield f"{name}.balance_loss", router.balance_loss
                yield f"{name}.z_loss", router.z_loss

    def _expert_biases(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, router in self._biased_routers():
            assert router.expert_bias is not None
            yield f"{name}.expert_bias", router.expert_bias

    def _empty_outputs(self) -> StepOutputs:
        device = self.device.torch_device
        return StepOutputs(
            losses=torch.zeros(self.config.microbatches, device=device),
            loss=torch.zeros((), device=device),
            grad_norm=torch.zeros((), device=device),
            evaluation=torch.zeros((), device=device),
            skipped=torch.zeros((), device=device),
            digests=self._digests.empty(device),
        )

    def _activation(self) -> TensorSpec:
        """What goes from layer to layer."""
        rows, tokens = self._inputs.shape
        tokens //= self.axes.tp.size if self.axes.tp.cuts_sequence else 1
        shape = (rows, tokens, self.config.model.hidden)
        return TensorSpec(shape, TORCH_DTYPES[self.config.dtype])

    @property
    def _num_slots(self) -> int:
        """Microbatches between forward and backward at a time, on the rank that has most."""
        return slots_needed(
            make_schedule(self.axes.pp.size, len(self.stages), self.config.microbatches)
        )

    @functools.cached_property
    def _pipeline(self) -> Pipeline:
        # Graphs give memory that their next replay overwrites, while a send may be under way.
        copy_sent = self.config.graph not in ((), ("full_iteration",))
        return Pipeline(
            self.stages, self.axes.pp, self._activation(), self.device.torch_device,
            num_slots=self._num_slots, copy_sent=copy_sent,
        )  # fmt: skip

    def named_tensors(self) -> AddressBook:
        """Every long-lived tensor that a graph may use, by name, looked up when it is asked for."""
        book = AddressBook()
        for number, stage in enumerate(self.stages):
            suffix = f" of chunk {number}" if number else ""
            groups = self._roots[number].fsdp_groups if self._roots else ()
            enter_stage(book, stage, groups, suffix)
        enter_optimizer(book, self.optimizer)
        for stream in self.streams.streams:
            if stream.state is not None:
                getter = functools.partial(getattr, stream, "state")
                book.enter(f"random state {stream.name}", getter)
        enter_attributes(book, self._inputs, self._inputs.named_tensors())
        enter_attributes(book, self.outputs, self.outputs.named_tensors())
        enter_attributes(book, self._digests, self._digests.scratch())
        enter_attributes(book, self.taps, self.taps.named_tensors())
        return book

    def pointer_changes(self) -> PointerChanges:
        return PointerChanges(self.named_tensors(), self.groups)

    # ---- graphs

    def _is_capture_due(self, index: int) -> bool:
        """After warming up, once; again where the attempt failed and the step is taken again."""
        has_graphs = self._graphs.iteration is not None or bool(self._graphs.parts)
        if not self.config.graph or self._is_closed or has_graphs:
            return False
        if self._captured_at is None:
            return self._whole_steps >= self.config.graph_warmup_steps
        return self._captured_at == index

    def _capture(self, index: int) -> None:
        self._captured_at = index
        if self.config.graph == ("full_iteration",):
            whole = self._iteration if self.config.graph_optimizer else self._gradients
            opt = self.optimizer
            moments = (opt.step_count, *opt.exp_avg, *opt.exp_avg_sq)
            self._graphs.capture_iteration(whole, moments)
            return
        spec = self._activation()
        sample = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device.torch_device)
        self._graphs.capture_parts(self._inputs, sample, self._num_slots)

    def take_turn(self, names: Sequence[str]) -> None:
        """Between steps: these stressors alone from now on; the next step captures anew. What
        others did while graphs were captured went into these. Every rank calls this, as all of them
        capture together.
        """
        assert self.stressors is not None
        self.stressors.only(names)
        with self.device.on(self.stream):
            self.device.synchronize()
            self._graphs.drop()
            self._captured_at = None

    @property
    def stress_bytes(self) -> int:
        """Of the live bytes of the device, those that stressors hold between steps."""
        scramble = None if self.stressors is None else self.stressors.scramble
        return 0 if scramble is None else scramble.held_bytes

    def close(self) -> None:
        """Drop the graphs, then wait; a process group must not be destroyed before this. The
        trainer goes on eagerly, should it be used again.
        """
        try:
            with self.at_work():
                self._is_closed = True
                self.device.synchronize()
                self._graphs.drop()
                self._compiler.close()
                self.device.synchronize()
        finally:
            if self.stressors is not None:
                self.stressors.close()


# ---- a run that goes on in new processes


class _States(torch.optim.Optimizer):
    """The trainer's AdamW as a checkpoint takes optimizers: its states, by parameter at rest."""

    def __init__(self, trainer: Trainer) -> None:
        ours, groups = trainer.optimizer, trainer.groups
        self._lr = ours.lr
        parameters = {n: p for g in groups for n, p in zip(g.names, g.sharded, strict=True)}
        super().__init__([{"params": list(parameters.values()), "lr": ours.lr}], {})
        for name, *moments in zip(ours.names, ours.exp_avg, ours.exp_avg_sq, strict=True):
            parameter = parameters[name]
            exp_avg, exp_avg_sq = (_like(parameter, moment) for moment in moments)
            self.state[parameter] = {
                "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": ours.step_count
            }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the learning rate; moments were read into their places."""
        self._lr.copy_(state_dict["param_groups"][0]["lr"])


def _like(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, RowSharded):
        return RowSharded.make(rows, parameter.row_spec)
    return rows


def save_state(trainer: Trainer, folder: Path, step: int) -> None:
    """Save a trainer that has taken `step` steps. A collective; raises as `checkpoint.save`."""
    with trainer.device.on(trainer.stream):
        trainer.device.synchronize()
        extra = {"random": trainer.rng_states()}
        checkpoint.save(folder, step, list(trainer.stages), _States(trainer), extra)


def load_state(trainer: Trainer, folder: Path) -> int:
    """Put the latest of `folder` into a new trainer; the steps that were taken. A collective. Of
    another layout random states say nothing: those of a new trainer stay as they are (`ValueError`,
    `CheckpointError`: as `checkpoint.load`; other ranks than those that saved).
    """
    with trainer.device.on(trainer.stream):
        loaded = checkpoint.load(folder, list(trainer.stages), _States(trainer))
        if not trainer.config.begins_elsewhere:
            trainer.set_rng_states(loaded.extra["random"])
        trainer.device.synchronize()
    return loaded.step
