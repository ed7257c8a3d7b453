"""Trainers of other engines: the same decoder, data and update, sharded by `config.engine`.

    ours           `Trainer`
    fsdp2          torch's `fully_shard`: each layer a unit, the root with the rest
    ddp            torch's `DistributedDataParallel`; gradients are reduced with the last microbatch
    megatron_fsdp  `megatron_fsdp.fully_shard_model` and `fully_shard_optimizer`, as users get them

What is the same: initial weights, microbatches by rank, loss, float32 main weights and compute in
`config.dtype`, the mean over ranks and microbatches, clipping (`clip_grads`), AdamW with decay of
matrices alone. Losses, norms and taps of two engines can be compared bit by bit; the state cannot,
for a rank digests what it holds: its rows as the engine cuts them, or with ddp whole tensors.

Which bits are equal is in docs/ARCHITECTURE.md, "Engines".
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_core.config import OptimConfig, TrainConfig
from fsdp_core.device import Device
from fsdp_core.dispatch import TensorError
from fsdp_core.model.decoder import DecoderStage, Layer, make_stages
from fsdp_core.model.layers import BackendMissing, LayerFactory
from fsdp_core.model.sharding import init_weights
from fsdp_core.model.te.layers import prefer_cudnn_of_torch
from fsdp_core.parallel.mesh import Axes
from fsdp_core.train.build import TORCH_DTYPES, AdamW
from fsdp_core.train.taps import GlobalBox, Snapshots
from fsdp_core.train.trainer import (
    Digests,
    StepOutputs,
    Trainer,
    groups_of,
    mean_loss,
)


@dataclass(frozen=True)
class Sharded:
    """A stage in the hands of an engine.

    module: takes what the stage takes.
    optimizer: over the stage's parameters as the engine holds them.
    before_last: what all microbatches of a step but the last run in.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    before_last: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def _adamw(parameters: Iterable[nn.Parameter], options: OptimConfig) -> torch.optim.AdamW:
    """torch's, fused, with the rate as a float32 tensor: the arithmetic of `build.AdamW`."""
    listed = list(parameters)
    decays = {True: options.weight_decay, False: 0.0}
    groups = [
        {"params": [p for p in listed if (p.dim() >= 2) is matrix], "weight_decay": decay}
        for matrix, decay in decays.items()
    ]
    lr = torch.full((), options.lr, device=listed[0].device)
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(
        groups, lr=lr, betas=betas, eps=options.eps, fused=True, capturable=lr.is_cuda
    )


def fsdp2(stage: DecoderStage, config: TrainConfig, axes: Axes) -> Sharded:
    """torch FSDP2, with its defaults but for the precision."""
    policy = torch_fsdp.MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[config.dtype],
        reduce_dtype=TORCH_DTYPES[config.fsdp.reduce_dtype],
        # The model casts for itself; its RoPE tables are float32 on purpose.
        cast_forward_inputs=False,
    )
    shard = functools.partial(torch_fsdp.fully_shard, mesh=axes.dense_mesh, mp_policy=policy)
    for layer in stage.numbered_layers.values():
        shard(layer, reshard_after_forward=config.fsdp.reshard_after_forward)
    shard(stage)
    return Sharded(stage, _adamw(stage.parameters(), config.optim))


class _Cast(nn.Module):
    """Runs a stage with its parameters in another dtype: what keeps DDP's main weights float32."""

    def __init__(self, stage: DecoderStage, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage, self._dtype = stage, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cast_ = {name: p.to(self._dtype) for name, p in self.stage.named_parameters()}
        return torch.func.functional_call(self.stage, cast_, args, kwargs)


def ddp(stage: DecoderStage, config: TrainConfig, axes: Axes) -> Sharded:
    """torch DDP; but for the last microbatch under `no_sync`, as its users accumulate."""
    module = DistributedDataParallel(
        _Cast(stage, TORCH_DTYPES[config.dtype]),
        process_group=axes.dp.group,
        # Routers count the slots of their own rank in buffers.
        broadcast_buffers=False,
    )
    return Sharded(module, _adamw(stage.parameters(), config.optim), module.no_sync)


def megatron_fsdp(stage: DecoderStage, config: TrainConfig, axes: Axes) -> Sharded:
    """megatron-fsdp, ZeRO-3, as its users get it. Its `fully_shard_optimizer` takes a step with
    zero gradients before training (Megatron-LM #5974): weights have decayed once and the step count
    is one ahead. That is left as it is (`BackendMissing`: it is not installed, or there is no GPU,
    which it cannot do without).
    """
    if next(stage.parameters()).device.type != "cuda":
        raise BackendMissing("engine megatron_fsdp needs a GPU")
    prefer_cudnn_of_torch()  # it imports TransformerEngine where that is installed
    try:
        api = importlib.import_module("megatron_fsdp")
    except ImportError as error:
        raise BackendMissing(f"engine megatron_fsdp needs megatron-fsdp: {error}") from error
    for parameter in stage.parameters():
        whole = parameter.detach().clone()
        parameter.data = parameter.data.to(TORCH_DTYPES[config.dtype])
        # Main weights are made of these where there are any, else of weights that are rounded.
        given: Any = parameter
        given.get_high_precision_init_val = lambda whole=whole: whole
        given.clear_high_precision_init_val = functools.partial(
            delattr, parameter, "get_high_precision_init_val"
        )
    mesh = init_device_mesh("cuda", (axes.dp.size, 1), mesh_dim_names=("dp", "tp"))
    module = api.fully_shard_model(
        stage,
        device_mesh=mesh,
        expt_device_mesh=mesh,  # of what has "experts" in its name
        dp_shard_dim="dp",
        tp_dim="tp",
        cuda_graph_mode=bool(config.graph),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=api.MixedPrecisionPolicy(
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.float32,
            grad_comm_dtype=TORCH_DTYPES[config.fsdp.reduce_dtype],
        ),
    )
    module._replace_param_with_distributed_if_needed()
    optimizer = api.fully_shard_optimizer(_adamw(stage.parameters(), config.optim))
    return Sharded(module, optimizer)


_MAKERS: dict[str, Callable[[DecoderStage, TrainConfig, Axes], Sharded]] = {
    "fsdp2": fsdp2, "ddp": ddp, "megatron_fsdp": megatron_fsdp,
}  # fmt: skip


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor: the very memory."""
    held: torch.Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return held.detach()


class EngineAdamW(AdamW):
    """An engine's optimizer as `build.AdamW` shows itself: this rank's parts, by name.
    Parts are looked up again by `refresh`, as an engine may put them elsewhere.
    """

    def __init__(self, stage: nn.Module, torchs: torch.optim.Optimizer) -> None:
        self._torchs = torchs
        own = {name: p for name, p in stage.named_parameters() if local(p).numel()}
        self.names, self._own = list(own), list(own.values())
        self.lr = torchs.param_groups[0]["lr"]
        for parameter in self._own:
            self._make_state(parameter)
        self.grads = [torch.zeros_like(local(p)) for p in self._own]
        self.refresh()

    def _make_state(self, parameter: nn.Parameter) -> None:
        """What the first step would make, so that it has a digest from the beginning."""
        state = self._torchs.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    def refresh(self) -> None:
        """Look up where everything is now; gradients that were dropped stay what they were."""
        states = [self._torchs.state[p] for p in self._own]
        self.params = [local(p) for p in self._own]
        self.exp_avg = [local(state["exp_avg"]) for state in states]
        self.exp_avg_sq = [local(state["exp_avg_sq"]) for state in states]
        self.grads = [
            kept if p.grad is None else local(p.grad)
            for kept, p in zip(self.grads, self._own, strict=True)
        ]
        self.step_count = local(states[0]["step"])

    def require_grads(self) -> None:
        for name, parameter in zip(self.names, self._own, strict=True):
            if parameter.grad is None:
                raise TensorError(f"Expected a gradient of {name}, got none in this step.", name)

    def zero_grad(self) -> None:
        # Gradients stay where they are: a digest in a graph reads the addresses of the step before.
        self._torchs.zero_grad(set_to_none=False)

    def step(self, skipped: torch.Tensor | None = None) -> None:
        assert skipped is None  # a rule refuses `skip_nonfinite`
        self._torchs.step()


class EngineDigests(Digests):
    """Digests of what an engine's optimizer holds, looked up anew each time."""

    def __init__(
        self,
        optimizer: EngineAdamW,
        others: Sequence[tuple[str, torch.Tensor]],
        further: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> None:
        super().__init__(optimizer, others, further)
        self._optimizer, self._others = optimizer, others

    def update(self, group: str, outputs: StepOutputs) -> None:
        self._optimizer.refresh()
        if (found := groups_of(self._optimizer, self._others).get(group)) is not None:
            self.digested[group][1][:] = found[1]
        super().update(group, outputs)


class EngineTrainer(Trainer):
    """One rank's training by another engine, over dp alone: eagerly, or on a GPU as one graph
    (`BackendMissing`: the engine is not installed, or a graph is asked for without a GPU).
    """

    optimizer: EngineAdamW

    def _build_stages(self, backend: LayerFactory) -> list[DecoderStage]:
        config = self.config
        stages = make_stages(config.model, self.axes, backend, self.streams)
        layers, init_std = config.model.layers, config.model.init_std
        init_weights(stages, config.seed, layers=layers, init_std=init_std)
        (stage,) = stages
        stage.set_loss_scale(1.0 / config.microbatches)
        stage.to(self.device.torch_device)
        self._sharded = _MAKERS[config.engine](stage, config, self.axes)
        self._roots = []
        return stages

    def _build_state(self) -> tuple[AdamW, Digests]:
        optimizer = EngineAdamW(self.stages[0], self._sharded.optimizer)
        further = {"buffers": dict(self._router_losses()), **self._samples()}
        return optimizer, EngineDigests(optimizer, list(self._expert_biases()), further)

    def _gradients(self) -> None:
        outputs, number = self.outputs, self.config.microbatches
        self.taps.begin()
        self.optimizer.zero_grad()
        for index, batch in enumerate(self._inputs.microbatches()):
            is_last = index == number - 1
            with contextlib.nullcontext() if is_last else self._sharded.before_last():
                loss = self._sharded.module(batch.tokens, **batch.keywords)
                outputs.losses[index].copy_(loss.detach())
                (loss * (1.0 / number)).backward()
        outputs.loss.copy_(mean_loss(outputs.losses, self.axes))
        self.optimizer.require_grads()
        self._after_gradients()

    def _capture(self, index: int) -> None:
        if not self.device.is_cuda:
            # Their buffers move as storages are freed and made again, which a host graph cannot.
            raise BackendMissing(f"a graph of engine {self.config.engine} needs a GPU")
        super()._capture(index)

    def evaluate(self, index: int) -> torch.Tensor:
        raise NotImplementedError(f"Expected engine ours to evaluate, got {self.config.engine}.")

    def keep(self, names: Sequence[str], max_bytes: int) -> Snapshots:
        with self.device.on(self.stream):
            places = self._places()
            return Snapshots(
                names, max_bytes, digested=self._digests.digested, copies=self._digests.kept,
                taps=self.taps, places=places,
            )  # fmt: skip

    def _places(self) -> Iterator[tuple[str, tuple[GlobalBox, ...]]]:
        for name, parameter in self.stages[0].named_parameters():
            shape, zeros = tuple(parameter.shape), (0,) * parameter.dim()
            boxes = [(zeros, shape)]
            if isinstance(parameter, DTensor):
                chunks = parameter.__create_chunk_list__()
                boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
            yield name, tuple(GlobalBox(name, shape, start, zeros, sizes) for start, sizes in boxes)


def make_trainer(config: TrainConfig, axes: Axes, device: Device) -> Trainer:
    """The trainer that a configuration asks for: of our engine, or of another one."""
    kind = Trainer if config.engine == "ours" else EngineTrainer
    return kind(config, axes, device)
