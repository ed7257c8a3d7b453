"""One rank's training: model, FSDP, optimizer and graphs put together.

    step(i)   fill the static inputs -> iteration, eager or replayed -> static outputs
    iteration zero gradients; for each microbatch forward and backward; digest of gradients;
              gradient norm, clipping, AdamW, cast to model weights; digest of weights and moments

Inputs and outputs are static tensors in every mode, so eager and graphed runs differ in nothing but
who issues the work. Scope `full_iteration` captures the whole iteration, optimizer included; scope
`attn` captures each block's attention branch, forward and backward.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.config import TrainConfig, refuse_not_built
from fsdp_core.data import Batches, mix, token_source
from fsdp_core.determinism import make_deterministic, seed_all
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import make_pool
from fsdp_core.graph.capture import CapturedFunction, CapturedModule, GraphMaker
from fsdp_core.graph.digest import Digester, empty_rows
from fsdp_core.model.backend import Backend, make_backend
from fsdp_core.model.transformer import Block, Decoder
from fsdp_core.optim import AdamW, clip_grads, grad_norm

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class StepOutputs:
    """Static device tensors that every step overwrites.

    Attributes:
        losses: float32 [microbatches].
        loss: float32 scalar, their mean.
        grad_norm: float32 scalar, before clipping.
        digests: per group, int32 [tensors, 5]: four lanes of the digest, and whether any
            element is not finite.
    """

    losses: torch.Tensor
    loss: torch.Tensor
    grad_norm: torch.Tensor
    digests: dict[str, torch.Tensor]


@dataclass
class GraphCounts:
    """What the graphs of a run did: `replays` counts launches of any captured graph."""

    captured: int = 0
    replays: int = 0
    external_names: list[str] = field(default_factory=list)
    unnamed_externals: int = 0


def build_model(config: TrainConfig, backend: Backend, mesh: DeviceMesh, device: Device) -> Decoder:
    """The decoder on `device` with each block and the root as FSDP units."""
    model = Decoder(config.model, backend)
    model.init_weights(config.seed)
    model.to(device.torch_device)
    model.set_rope(device.torch_device)
    fsdp = config.fsdp
    pool = make_pool(fsdp.pool, device, persistent_on_miss=fsdp.persistent_on_miss)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[config.dtype],
        reduce_dtype=TORCH_DTYPES[fsdp.reduce_dtype],
        # The model casts for itself; its RoPE tables are float32 on purpose.
        cast_forward_inputs=False,
    )
    strategy = (fsdp.outer_strategy, fsdp.strategy) if mesh.ndim == 2 else fsdp.strategy
    shard = functools.partial(
        fully_shard, mesh=mesh, strategy=strategy, mp_policy=policy, pool=pool, keep_grads=True
    )
    for block in model.layers:
        shard(block, reshard_after_forward=fsdp.reshard_after_forward)
    # The root's own parameters are needed first and last, so it stays gathered in between.
    shard(model, reshard_after_forward=False)
    return model


class Trainer:
    """Runs steps of one rank, inside a process group; `close` before that is destroyed."""

    def __init__(self, config: TrainConfig, mesh: DeviceMesh, device: Device) -> None:
        refuse_not_built(config)
        self.config, self.device = config, device
        self.stream = device.new_stream()
        self.counts = GraphCounts()
        dp_rank = _flat_rank(mesh)
        # TransformerEngine must be loaded before anything makes torch load its own cuDNN.
        backend = make_backend(config.backend)
        make_deterministic(config.seed)
        with device.on(self.stream):
            self.model = build_model(config, backend, mesh, device)
            self.optimizer = AdamW(self._named_states(), config.optim)
            self._make_static_tensors()
        seed_all(mix(config.seed, dp_rank))
        self._norm_groups = self.groups[0].nest.groups
        self._batches = Batches(
            token_source(config.data, config.model.vocab_size),
            config.seed,
            dp_rank,
            config.microbatches,
            config.micro_batch_size,
            config.model.seq,
        )
        self.data_checksum = self._batches.source.checksum
        self._maker = GraphMaker(device)
        self._iteration_graph: CapturedFunction | None = None
        self._block_graphs: list[CapturedModule] = []

    @property
    def groups(self) -> list[ParamGroup]:
        """The parameter groups of all FSDP units, the root's first."""
        return self.root.fsdp_groups

    @property
    def root(self) -> FSDPModule:
        """The model as what `fully_shard` made of it."""
        return cast("FSDPModule", self.model)

    def _named_states(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, main weight and main gradient of this rank's rows of every parameter."""
        return [
            (name, group.local_rows(group.main_weight, i), group.local_rows(main_grad(group), i))
            for group in self.groups
            for i, name in enumerate(group.names)
        ]

    def _make_static_tensors(self) -> None:
        config, device = self.config, self.device.torch_device
        shape = (config.microbatches, config.micro_batch_size, config.model.seq + 1)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        optimizer = self.optimizer
        self.digested: dict[str, tuple[list[str], list[torch.Tensor]]] = {
            "grads": (optimizer.names, optimizer.grads),
            "weights": (optimizer.names, optimizer.params),
            "optim": (
                [f"{name}.exp_avg" for name in optimizer.names]
                + [f"{name}.exp_avg_sq" for name in optimizer.names]
                + ["step_count"],
                [*optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count],
            ),
        }
        self._digesters = {
            group: Digester(tensors, names) for group, (names, tensors) in self.digested.items()
        }
        self.outputs = StepOutputs(
            losses=torch.zeros(config.microbatches, device=device),
            loss=torch.zeros((), device=device),
            grad_norm=torch.zeros((), device=device),
            digests={
                group: empty_rows(len(names), device) for group, (names, _) in self.digested.items()
            },
        )

    def step(self, index: int) -> StepOutputs:
        """Run step `index`; the outputs are valid, in stream order, until the next call.

        Raises:
            CaptureRefused: the graph scope of the configuration cannot be captured.
            StaleAddress: a graph was about to run over memory that moved.
        """
        with self.device.on(self.stream):
            self._fill_inputs(index)
            if self.config.graph and index == self.config.graph_warmup_steps:
                self._capture()
            if self._iteration_graph is not None:
                self._iteration_graph()
                self.counts.replays += 1
            else:
                self._iteration()
        return self.outputs

    def _fill_inputs(self, index: int) -> None:
        tokens = self._batches.tokens(index)
        if self.device.is_cuda:
            tokens = tokens.pin_memory()
        self._tokens.copy_(tokens, non_blocking=True)

    def _iteration(self) -> None:
        config, outputs = self.config, self.outputs
        self.root.zero_main_grads()
        for number, tokens in enumerate(self._tokens.unbind()):
            self.root.set_is_last_backward(number == config.microbatches - 1)
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            (loss * (1.0 / config.microbatches)).backward()
            outputs.losses[number].copy_(loss.detach())
        outputs.loss.copy_(outputs.losses.mean())
        self._require_grads()
        self._digest("grads")
        grads = [main_grad(group) for group in self.groups]
        outputs.grad_norm.copy_(grad_norm(grads, self._norm_groups))
        clip_grads(grads, outputs.grad_norm, config.optim.clip_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            self.root.refresh_model_weights()
        self._digest("weights")
        self._digest("optim")

    def _require_grads(self) -> None:
        """A parameter that got no gradient would be updated by that of the step before."""
        for group in self.groups:
            for name, parameter in zip(group.names, group.sharded, strict=True):
                if parameter.grad is None and group.holds_rows(parameter):
                    raise RuntimeError(f"Expected a gradient of {name}, got none in this step.")

    def _digest(self, group: str) -> None:
        self._digesters[group](self.digested[group][1], self.outputs.digests[group])

    def redigest_state(self) -> None:
        """Digest weights and moments again, eagerly: for what changed them after the step."""
        with self.device.on(self.stream):
            self._digest("weights")
            self._digest("optim")

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every long-lived tensor that a graph may use, by name, as it is now."""
        found = {"tokens": self._tokens}
        for group in self.groups:
            found.update(zip(group.names, (p.data for p in group.unsharded), strict=True))
            if group.model_weight is not None:
                found[f"{group.name} model_weight"] = group.model_weight
        for name, weight, grad in self._named_states():
            found[f"{name} main_weight"] = weight
            if grad.numel():
                found[f"{name} main_grad"] = grad
        found.update(self.model.named_buffers())
        optimizer, outputs = self.optimizer, self.outputs
        for name, first, second in zip(
            optimizer.names, optimizer.exp_avg, optimizer.exp_avg_sq, strict=True
        ):
            found[f"{name} exp_avg"], found[f"{name} exp_avg_sq"] = first, second
        found |= {"step_count": optimizer.step_count, "lr": optimizer.lr}
        found |= {"losses": outputs.losses, "loss": outputs.loss, "grad_norm": outputs.grad_norm}
        found |= {f"digest of {digested}": rows for digested, rows in outputs.digests.items()}
        for digested, digester in self._digesters.items():
            for number, scratch in enumerate(digester.scratch()):
                found[f"digest scratch {number} of {digested}"] = scratch
        return found

    def _resolver(self) -> Any:
        return self.named_tensors if self.config.ledger else None

    def _capture(self) -> None:
        schedule = self.root.fsdp_schedule
        schedule.quiesce()
        if self.config.graph == ("full_iteration",):
            self._iteration_graph = CapturedFunction(self._maker, self._iteration, self._resolver())
            self.counts.captured = 1
            ledgers = [self._iteration_graph.ledger] if self._iteration_graph.ledger else []
        else:
            self._capture_attention()
            ledgers = [entry for graph in self._block_graphs for entry in graph.ledgers]
        for ledger in ledgers:
            self.counts.external_names.extend(ledger.names)
            self.counts.unnamed_externals += ledger.num_unnamed
        schedule.pool.freeze()
        schedule.quiesce()

    def _capture_attention(self) -> None:
        config = self.config
        shape = (config.micro_batch_size, config.model.seq, config.model.hidden)
        sample = torch.zeros(
            shape, dtype=TORCH_DTYPES[config.dtype], device=self.device.torch_device
        ).requires_grad_()
        constants = (self.model.rope_cos, self.model.rope_sin)
        blocks = [cast("Block", block) for block in self.model.layers]
        for block in blocks:
            fsdp = cast("FSDPModule", block)
            fsdp.unshard()
            graph = CapturedModule(
                self._maker,
                block.attn,
                sample,
                cast("tuple[torch.Tensor, ...]", constants),
                list(block.attn.parameters()),
                resolve=self._resolver(),
            )
            graph.warm_up()
            self.root.fsdp_schedule.quiesce()
            graph.capture_forward()
            fsdp.reshard()
            self._block_graphs.append(graph)
        for block, graph in zip(reversed(blocks), reversed(self._block_graphs), strict=True):
            fsdp = cast("FSDPModule", block)
            fsdp.unshard()
            self.root.fsdp_schedule.quiesce()
            graph.capture_backward()
            fsdp.reshard()
        for block, graph in zip(blocks, self._block_graphs, strict=True):
            self._install(block, graph)
        self.counts.captured = 2 * len(blocks)

    def _install(self, block: Block, graph: CapturedModule) -> None:
        def replay(x: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
            del constants
            self.counts.replays += 2 if torch.is_grad_enabled() else 1
            return graph(x)

        block.attn.forward = replay  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Drop the graphs, then wait; a process group must not be destroyed before this."""
        self.device.synchronize()
        if self._iteration_graph is not None:
            self._iteration_graph.reset()
            self._iteration_graph = None
        for block, graph in zip(self.model.layers, self._block_graphs, strict=False):
            del cast("Block", block).attn.forward
            graph.reset()
        self._block_graphs = []
        self.device.synchronize()


def main_grad(group: ParamGroup) -> torch.Tensor:
    """The kept gradient buffer of a group."""
    kept = group.gradients.main_grad
    assert kept is not None
    return kept


def _flat_rank(mesh: DeviceMesh) -> int:
    """This rank's number among all of the mesh, outer axis first."""
    flat = 0
    for axis in range(mesh.ndim):
        flat = flat * mesh.size(axis) + mesh.get_local_rank(axis)
    return flat
