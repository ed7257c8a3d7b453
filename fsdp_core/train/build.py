"""A rank's stages of the decoder, made and sharded from a configuration, and their optimizer.

Names of everything long-lived on a rank, and how much of it moved in a step.

Each name is looked up where the program keeps the tensor, when somebody asks: a parameter in its
group, a buffer in its module, moments in the optimizer. So whoever replaces one is found out.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from fsdp_core.config import OptimConfig, TrainConfig
from fsdp_core.config.parallel import AXES
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import make_pool
from fsdp_core.graph.recorder import AddressBook
from fsdp_core.model.decoder import DecoderStage, make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import init_weights, shard_stage
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.rng import RandomStreams

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def require_same(config: TrainConfig, axes: Axes) -> None:
    """See that axes are those of a configuration (`ValueError`)."""
    for name in AXES:
        expected, got = getattr(config.parallel, name), getattr(axes, name).size
        if got != expected:
            raise ValueError(f"Expected axes with {name}={expected}, as configured, got {got}.")


def make_streams(config: TrainConfig, axes: Axes, device: Device) -> RandomStreams:
    """What dropout draws from: ranks agree or differ by where they stand on the dense axes."""
    dense = (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp)
    return RandomStreams(config.seed, dense, device.torch_device)


def build_stages(
    config: TrainConfig, axes: Axes, backend: LayerFactory, streams: RandomStreams, device: Device
) -> list[DecoderStage]:
    """This rank's stages, FSDP roots; weights depend on the seed and names alone. Where the default
    device is `meta` they have no memory, and no weights.
    """
    model, parallel, fsdp = config.model, config.parallel, config.fsdp
    stages = make_stages(
        model, axes, backend, streams, chunks=parallel.pp_chunks, recompute=config.recompute
    )
    is_meta = torch.get_default_device().type == "meta"
    if not is_meta:
        init_weights(stages, config.seed, layers=model.layers, init_std=model.init_std)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[config.dtype],
        reduce_dtype=TORCH_DTYPES[fsdp.reduce_dtype],
        # The model casts for itself; its RoPE tables are float32 on purpose.
        cast_forward_inputs=False,
    )
    for stage in stages:
        if not is_meta:
            stage.to(device.torch_device)
        stage.set_loss_scale(1.0 / config.microbatches)
        # A pool of its own: a pool follows the order of one root.
        pool = make_pool(fsdp.pool, device, persistent_on_miss=fsdp.persistent_on_miss)
        shard_stage(
            stage, axes, fsdp, policy=policy, pool=pool, keep_grads=True,
            splits_experts=config.fused_experts,
        )  # fmt: skip
    return stages


def roots(stages: Iterable[DecoderStage]) -> Iterator[FSDPModule]:
    """The stages that our `fully_shard` wrapped; none of another engine's."""
    return (stage for stage in stages if isinstance(stage, FSDPModule))


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with bias correction, on shards: one step over (name,
    weight, gradient) that stay where they are. Empty ones are left out. The arithmetic is torch's
    fused kernel, fed with a step and a rate on the device: no host synchronisation, so graphs can
    hold it.

    lr: float32 scalar tensor on the device; write it in place.
    step_count: float32 scalar tensor, the number of steps taken.
    names, params, grads, exp_avg, exp_avg_sq: of the weights that are left, in order.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor, torch.Tensor]], config: OptimConfig
    ) -> None:
        kept = [(name, weight, grad) for name, weight, grad in named if weight.numel()]
        self.names = [name for name, _, _ in kept]
        self.params = [weight for _, weight, _ in kept]
        self.grads = [grad for _, _, grad in kept]
        self._config = config
        device = self.params[0].device if kept else torch.device("cpu")
        self.lr = torch.full((), config.lr, dtype=torch.float32, device=device)
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)
        self.exp_avg = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.params]
        matrices = [i for i, p in enumerate(self.params) if p.dim() >= 2]
        others = [i for i, p in enumerate(self.params) if p.dim() < 2]
        self._groups = [(matrices, config.weight_decay), (others, 0.0)]

    @torch.no_grad()
    def step(self, skipped: torch.Tensor | None = None) -> None:
        """Update every weight in place from its gradient. `skipped`, float32 scalar on the device,
        is 1 where this step must change nothing, else 0.
        """
        self.step_count.add_(1.0 if skipped is None else 1.0 - skipped)
        for indices, weight_decay in self._groups:
            if not indices:
                continue
            torch._fused_adamw_(
                [self.params[i] for i in indices],
                [self.grads[i] for i in indices],
                [self.exp_avg[i] for i in indices],
                [self.exp_avg_sq[i] for i in indices],
                [],
                [self.step_count] * len(indices),
                lr=self.lr,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=weight_decay,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
                found_inf=skipped,
            )


def named_states(groups: Iterable[ParamGroup]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, main weight and main gradient of this rank's rows of every parameter."""
    found = []
    for group in groups:
        main_grad = group.gradients.main_grad
        assert main_grad is not None
        for i, name in enumerate(group.names):
            rows = group.local_rows(group.main_weight, i), group.local_rows(main_grad, i)
            found.append((name, *rows))
    return found


_FLAT = ("main_weight", "model_weight", "gathered")
_FLAT_GRADS = {"main_grad": "main_grad", "pooled": "full gradient"}


def holds_gradients(name: str) -> bool:
    """Whether a tensor of this name has gradients in it."""
    return name.partition(" ")[2].startswith(tuple(_FLAT_GRADS.values()))


def enter_stage(
    book: AddressBook, stage: nn.Module, groups: Iterable[ParamGroup], suffix: str
) -> None:
    """Names of a stage's gathered parameters, flat buffers, module buffers and scales of fp8.
    `suffix`: tells stages of one rank apart where names of tensors do not.
    """
    for group in groups:
        # Before the gather was waited for, the address is right and the weights are not.
        is_held = partial(getattr, group, "is_registered")
        for index, name in enumerate(group.names):
            book.enter(name, partial(group.unsharded.__getitem__, index), is_held)
        for kind in _FLAT:
            book.enter(f"{group.name} {kind}{suffix}", partial(getattr, group, kind))
        for kind, shown in _FLAT_GRADS.items():
            book.enter(f"{group.name} {shown}{suffix}", partial(getattr, group.gradients, kind))
    for path, module in stage.named_modules():
        for name in module._buffers:
            book.enter(f"{path}.{name}".lstrip(".") + suffix, partial(module._buffers.get, name))
    if isinstance(stage, DecoderStage):
        for name, getter in stage.around.state(stage):
            book.enter(name + suffix, getter)


def enter_optimizer(book: AddressBook, optimizer: AdamW) -> None:
    """Names of this rank's rows: weights, gradients and moments, and of the scalars."""
    parts: dict[str, Sequence[torch.Tensor]] = {
        "main_weight": optimizer.params, "main_grad": optimizer.grads,
        "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq,
    }  # fmt: skip
    for part, tensors in parts.items():
        for index, name in enumerate(optimizer.names):
            book.enter(f"{name} {part}", partial(tensors.__getitem__, index))
    for scalar in ("step_count", "lr"):
        book.enter(scalar, partial(getattr, optimizer, scalar))


def enter_attributes(
    book: AddressBook, owner: object, named: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Names that an owner gives; looked up again where they are names of its attributes."""
    for name, tensor in named:
        if getattr(owner, name, None) is tensor:
            book.enter(name, partial(getattr, owner, name))
        else:
            book.hold(name, tensor)


class PointerChanges:
    """Counts per step how many long-lived tensors moved: what makes recorded graphs be made anew.
    Gathered parameters are counted at each gather, all else once, between two counts. `moved`:
    names of what moved before the last count, but for gathered parameters.
    """

    def __init__(self, book: AddressBook, groups: Sequence[ParamGroup]) -> None:
        gathered = {name for group in groups if group.nest.weight_level for name in group.names}
        self._book, self._groups = book, groups
        self._names = [
            name for name in book
            if name not in gathered and " gathered" not in name and " full gradient" not in name
        ]  # fmt: skip
        self._num_moved, self._addresses = self._now()
        self.moved: list[str] = []

    def _now(self) -> tuple[int, dict[str, int]]:
        addresses = {name: self._book[name].data_ptr() for name in self._names}
        return sum(group.num_moved for group in self._groups), addresses

    def count(self) -> int:
        """Changes since the last count, or since construction."""
        num_before, before = self._num_moved, self._addresses
        self._num_moved, self._addresses = self._now()
        self.moved = [name for name in self._names if self._addresses[name] != before[name]]
        return self._num_moved - num_before + len(self.moved)
