"""Who shards the model: ours, torch FSDP2, megatron-fsdp, and no communication at all.

Every engine trains the same modules from the same weights with `torch.optim.AdamW(fused=True)`,
bf16 compute, float32 main weights and gradients reduced in one dtype. They import what they measure
when they are built, so that one that is missing or broken costs its own row only.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.fsdp.workloads import Model, Tensors, Workload, materialise

Step = Callable[[], torch.Tensor]
"""One step of training: returns the loss that it started from."""

LEARNING_RATE = 1e-4
EAGER_STEPS = 4
"""Steps that a graphed engine runs eagerly before it captures; warm-ups are longer than this."""


@dataclass(frozen=True)
class Setting:
    """What every engine is given.

    Attributes:
        reduce: gradients are reduced in this dtype.
        compile_backend: compile each layer with it; None: eager.
    """

    workload: Workload
    mesh: DeviceMesh
    device: torch.device
    reduce: torch.dtype
    compile_backend: str | None = None

    def batch(self) -> Tensors:
        """This rank's inputs."""
        generator = torch.Generator(self.device).manual_seed(1000 + self.mesh.get_rank())
        return self.workload.batch(self.device, generator)


def assemble(
    setting: Setting, wrap_layer: Callable[[nn.Module], Any], wrap_root: Callable[[Model], Any]
) -> Model:
    """Build the model layer by layer, each wrapped before the next one takes memory."""
    with torch.device("meta"):
        model = setting.workload.model()
    for number, layer in enumerate(model.layers):
        materialise(layer, setting.device, number)
        if setting.compile_backend is not None:
            compiled: Any = torch.compile(layer, backend=setting.compile_backend)
            model.layers[number] = compiled
        wrap_layer(model.layers[number])
    materialise(model, setting.device, len(model.layers))
    wrap_root(model)
    return model


def adamw(parameters: Iterable[nn.Parameter], *, capturable: bool = False) -> torch.optim.AdamW:
    """The optimizer of every engine. Without weight decay a step with zero gradients is none."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True, capturable=capturable
    )


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensors) -> Step:
    """The step of every engine, as a user writes it."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ---- ours and torch FSDP2: one program, two imports


def sharded(
    setting: Setting, module: str, *, capturable: bool = False, **extra: Any
) -> tuple[Step, Any]:
    """A program for torch FSDP2 and for whatever has its interface: its step and its model.

    Args:
        module: where `fully_shard` and `MixedPrecisionPolicy` come from.
        extra: further arguments of `fully_shard`.
    """
    api = importlib.import_module(module)
    reduce = None if setting.reduce is torch.bfloat16 else setting.reduce
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)

    def wrap(part: nn.Module) -> None:
        api.fully_shard(part, mesh=setting.mesh, mp_policy=policy, **extra)

    model = assemble(setting, wrap, wrap)
    optimizer = adamw(model.parameters(), capturable=capturable)
    return training_step(model, optimizer, setting.batch()), model


def fsdp2(setting: Setting) -> Step:
    """`torch.distributed.fsdp.fully_shard`."""
    return sharded(setting, "torch.distributed.fsdp")[0]


def ours(setting: Setting) -> Step:
    """`fsdp_core.fsdp.fully_shard`, buffers from torch's allocator."""
    return sharded(setting, "fsdp_core.fsdp", pool="dynamic")[0]


def ours_traced(setting: Setting) -> Step:
    """The same with planned buffers."""
    return sharded(setting, "fsdp_core.fsdp", pool="traced")[0]


def ours_graph(setting: Setting) -> Step:
    """The same, forward, backward, reductions and optimizer in one graph; buffers do not move."""
    on_cuda = setting.device.type == "cuda"
    step, model = sharded(setting, "fsdp_core.fsdp", capturable=on_cuda, pool="double")
    return Graphed(step, model.fsdp_schedule.device, model.fsdp_schedule.quiesce)


def fsdp2_graph(setting: Setting) -> Step:
    """`torch.distributed.fsdp.fully_shard`, the whole step in one graph by the same maker."""
    if setting.device.type != "cuda":
        raise ValueError("Expected CUDA: on a CPU the buffers of torch FSDP2 move after a capture.")
    step, _ = sharded(setting, "torch.distributed.fsdp", capturable=True)
    return graphed(step, setting.device)


def graphed(step: Step, where: torch.device) -> Step:
    """A program of torch's alone in one graph."""
    device = importlib.import_module("fsdp_core.device").Device(where.type, where.index or 0)
    return Graphed(step, device, device.synchronize)


class Graphed:
    """A step that is captured after a few eager runs, and replayed from then on.

    `quiesce`: finishes all work, before and after the capture.
    """

    def __init__(self, step: Step, device: Any, quiesce: Callable[[], None]) -> None:
        self._step, self._device, self._quiesce = step, device, quiesce
        self._eager_left = EAGER_STEPS
        self._captured: Step | None = None

    def __call__(self) -> torch.Tensor:
        """One step."""
        if self._eager_left:
            self._eager_left -= 1
            return self._step()
        if self._captured is None:
            self._captured = self._capture()
        return self._captured()

    def _capture(self) -> Step:
        capture = importlib.import_module("fsdp_core.graph.graph")
        self._quiesce()
        if self._device.is_cuda:
            torch.cuda.empty_cache()  # what the eager steps cached is of no use to the graph
        captured: Step = capture.CapturedFunction(
            capture.GraphMaker(self._device), self._step, None
        )
        self._quiesce()
        return captured


# ---- megatron-fsdp


def megatron(setting: Setting) -> Step:
    """`megatron_fsdp.fully_shard`, as its users get it: ZeRO-3, both overlaps, no double buffer.

    Weights are bf16 with a float32 main copy. Its gradients stay in the dtype that is reduced and
    are cast when they are handed to the optimizer.
    """
    api = importlib.import_module("megatron_fsdp")
    model = assemble(setting, nn.Module.bfloat16, nn.Module.bfloat16)
    policy = api.MixedPrecisionPolicy(
        main_params_dtype=torch.float32,
        main_grads_dtype=setting.reduce,
        grad_comm_dtype=setting.reduce,
    )
    wrapped, optimizer = api.fully_shard(
        module=model,
        optimizer=adamw(model.parameters()),
        fsdp_unit_modules=[type(model.layers[0])],
        zero_dp_strategy="optim_grads_params",
        mixed_precision_policy=policy,
    )
    # It has taken a step with zero gradients to make the state of the optimizer: forget that one.
    # https://github.com/NVIDIA/Megatron-LM/issues/5974, see scenarios/public_bugs.
    for state in optimizer.state.values():
        state["step"].zero_()
    return training_step(wrapped, optimizer, setting.batch())


def megatron_experimental(setting: Setting) -> Step:
    """`megatron_fsdp.experimental.fully_shard`, with its defaults.

    Raises:
        ValueError: it reduces gradients in the dtype that they are computed in, and no other.
    """
    if setting.reduce is not torch.bfloat16:
        raise ValueError(f"Expected a reduction in bf16, got {setting.reduce}: it has no other.")
    api = importlib.import_module("megatron_fsdp.experimental")
    policy = importlib.import_module("megatron_fsdp").MixedPrecisionPolicy()
    flat = [api.Flat()]
    placements = api.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)

    def wrap(part: nn.Module) -> None:
        for parameter in part.parameters():
            if not isinstance(parameter, DTensor):  # those of inner units are sharded by now
                parameter.data = parameter.data.bfloat16()
        api.fully_shard(part, setting.mesh, placements, policy)

    model = assemble(setting, wrap, wrap)
    optimizer = adamw(model.parameters())
    api.fully_shard_optimizer(optimizer)
    return training_step(model, optimizer, setting.batch())


# ---- no communication


def limit(setting: Setting, *, capturable: bool = False) -> Step:
    """Whole bf16 weights on every rank and a rank's share of the optimizer's work.

    All the work of a step but the communication. The weights never change, so its loss is that of
    the first step.
    """
    model = assemble(setting, nn.Module.bfloat16, nn.Module.bfloat16)
    share = -(-sum(p.numel() for p in model.parameters()) // setting.mesh.size())
    main = nn.Parameter(torch.zeros(share, device=setting.device))
    main.grad = torch.zeros_like(main)
    optimizer, batch = adamw([main], capturable=capturable), setting.batch()

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def limit_graph(setting: Setting) -> Step:
    """The same in one graph: what is more than this in a graph with communication is exposed."""
    on_cuda = setting.device.type == "cuda"
    return graphed(limit(setting, capturable=on_cuda), setting.device)


@dataclass(frozen=True)
class Engine:
    """How an engine is built and what it is compared with.

    Attributes:
        trains: whether its weights change, so that its last loss means something.
        peer: the engine in the same run that its figures are divided by.
        is_ours: whether its failure fails the benchmark.
    """

    build: Callable[[Setting], Step]
    peer: str = "fsdp2"
    compiled: bool = False
    trains: bool = True
    is_ours: bool = False


ENGINES: dict[str, Engine] = {
    "ours": Engine(ours, is_ours=True),
    "ours_traced": Engine(ours_traced, is_ours=True),
    "ours_graph": Engine(ours_graph, is_ours=True),
    "fsdp2": Engine(fsdp2),
    "fsdp2_graph": Engine(fsdp2_graph),
    "megatron": Engine(megatron),
    "megatron_exp": Engine(megatron_experimental),
    "limit": Engine(limit, trains=False),
    "limit_graph": Engine(limit_graph, trains=False),
    "ours_compiled": Engine(ours, "fsdp2_compiled", compiled=True, is_ours=True),
    "fsdp2_compiled": Engine(fsdp2, "fsdp2_compiled", compiled=True),
    "limit_compiled": Engine(limit, "fsdp2_compiled", compiled=True, trains=False),
}

UNCOMPILED = tuple(name for name, engine in ENGINES.items() if not engine.compiled)

OF_WORKLOAD: dict[str, tuple[str, ...]] = {
    "stack": UNCOMPILED,
    "decoder": tuple(ENGINES),
    "thin": UNCOMPILED,
    "linear": ("ours", "fsdp2", "ours_compiled", "fsdp2_compiled"),
    "cnn": ("ours", "fsdp2", "ours_compiled", "fsdp2_compiled"),
    "transformer": ("ours", "fsdp2", "ours_compiled", "fsdp2_compiled"),
}
"""Which engines run on which workload."""
