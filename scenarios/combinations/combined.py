"""Train a small decoder with one engine, one maker of graphs, recompute, accumulation and compile.

Each option alone is what its package documents. Graphs, recompute and the order of wrapping must
not change one bit. Needs a GPU.

    torchrun --nproc-per-node 1 combined.py --engine fsdp2 --graph torch --microbatches 3
"""

import argparse
import importlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

HIDDEN, HEADS, LENGTH, BATCH, BLOCKS, WARM_UP = 128, 4, 32, 8, 3, 11
ENGINES = ("plain", "ddp", "fsdp2", "fsdp2_kept", "megatron_fsdp", "megatron_fsdp_experimental")
GRAPHS = ("none", "torch", "te", "step")
COMPILE = ("none", "default", "reduce-overhead")


class Block(nn.Module):
    """Attention and a gated MLP, both residual, over `[B, T, H]`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attn, self.norm_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 8 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_attn(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class TEBlock(nn.Module):
    """The same of TransformerEngine's parts, in fp8 where the script enters its context."""

    def __init__(self) -> None:
        super().__init__()
        te: Any = importlib.import_module("transformer_engine.pytorch")
        self.layer = te.TransformerLayer(
            HIDDEN, 4 * HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0,
            attn_input_format="bshd", self_attn_mask_type="causal", activation="swiglu",
            params_dtype=torch.float32, device="cuda",
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


class Model(nn.Module):
    """Blocks and a head; `recompute` drops the activations of each block."""

    def __init__(self, block: type[nn.Module], *, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Options:
    """What is combined. `graph_first`: capture, then wrap, where the engine has units."""

    steps: int = 14
    microbatches: int = 1
    engine: str = "plain"
    graph: str = "none"
    graph_first: bool = False
    recompute: bool = False
    compile: str = "none"
    parts: str = "torch"
    fp8: str = "none"
    import_te: bool = False  # it loads another cuDNN, so both runs of a comparison do


def recipe(options: Options) -> Any:
    """Of fp8, None without it."""
    if options.fp8 == "none":
        return None
    found: Any = importlib.import_module("transformer_engine.common.recipe")
    return found.DelayedScaling() if options.fp8 == "delayed" else found.Float8CurrentScaling()


def capture_blocks(model: Model, options: Options) -> None:
    """Each block in graphs of its own, forward and backward, by torch or TransformerEngine."""
    shape = (BATCH, LENGTH, HIDDEN)
    samples = tuple((torch.zeros(shape, device="cuda", requires_grad=True),) for _ in model.blocks)
    blocks: tuple[Any, ...] = tuple(model.blocks)
    if options.graph == "torch":
        graphed = torch.cuda.make_graphed_callables(blocks, samples)
    else:
        te: Any = importlib.import_module("transformer_engine.pytorch")
        fp8 = {"enabled": True, "recipe": recipe(options)} if options.fp8 != "none" else {}
        graphed = te.make_graphed_callables(blocks, samples, **fp8)
    model.blocks = nn.ModuleList(graphed)


def wrap(
    model: Model, block: type[nn.Module], engine: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under its engine, and its optimizer."""
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True, capturable=True)
    if engine == "plain":
        return model, adamw(model.parameters())
    if engine == "ddp":
        return DistributedDataParallel(model), adamw(model.parameters())
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
    units: Sequence[nn.Module] = (*model.blocks, model)
    if engine.startswith("fsdp2"):
        fully_shard: Any = importlib.import_module("torch.distributed.fsdp").fully_shard
        for unit in units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=engine == "fsdp2")
        return model, adamw(model.parameters())
    if engine == "megatron_fsdp":
        production: Any = importlib.import_module("megatron_fsdp")
        sharded, optimizer = production.fully_shard(
            module=model, optimizer=adamw(model.parameters()), fsdp_unit_modules=[block],
            zero_dp_strategy="optim_grads_params",
        )  # fmt: skip
        return sharded, optimizer
    experimental: Any = importlib.import_module("megatron_fsdp.experimental")
    flat = [experimental.Flat()]
    placements = experimental.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    for unit in units:
        experimental.fully_shard(unit, mesh, placements)
    optimizer = adamw(model.parameters())
    experimental.fully_shard_optimizer(optimizer)
    return model, optimizer


def loss_of(model: nn.Module, options: Options, x: torch.Tensor) -> torch.Tensor:
    """Of one microbatch, input and target in `x`."""
    if options.fp8 == "none":
        return F.mse_loss(model(x[0]), x[1]) / options.microbatches
    te: Any = importlib.import_module("transformer_engine.pytorch")
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe(options)):
        return F.mse_loss(model(x[0]), x[1]) / options.microbatches


def main(**settings: Any) -> None:
    """Train as `Options` say."""
    options = Options(**settings)
    first = "transformer_engine.pytorch" if options.import_te else options.engine[:13]
    if first in ("transformer_engine.pytorch", "megatron_fsdp"):
        importlib.import_module(first)  # before torch loads a cuDNN
    torch.use_deterministic_algorithms(mode=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.cuda.set_stream(torch.cuda.Stream())  # a capture cannot be on the default one
    torch.manual_seed(1)
    block: type[nn.Module] = TEBlock if options.parts == "te" else Block
    model = Model(block, recompute=options.recompute).to(device)
    by_blocks = options.graph in ("torch", "te")
    if by_blocks and options.graph_first:
        capture_blocks(model, options)
    sharded, optimizer = wrap(model, block, options.engine)
    if by_blocks and not options.graph_first:
        capture_blocks(model, options)
    if options.compile != "none":
        for each in model.blocks:
            each.compile(mode=options.compile)
    data = torch.Generator().manual_seed(1000 + dist.get_rank())
    static = torch.zeros(options.microbatches, 2, BATCH, LENGTH, HIDDEN, device=device)

    def train() -> None:
        optimizer.zero_grad(set_to_none=options.graph != "step")
        for x in static:
            torch.compiler.cudagraph_mark_step_begin()
            loss_of(sharded, options, x).backward()
        optimizer.step()

    captured: torch.cuda.CUDAGraph | None = None
    for step in range(options.steps):
        static.copy_(torch.randn(static.shape, generator=data))
        if options.graph == "step" and step == WARM_UP:
            captured = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            # NCCL's watchdog thread asks for events meanwhile.
            with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
                train()
        if captured is None:
            train()
        else:
            captured.replay()
    torch.cuda.synchronize()
    if captured is not None:
        captured.reset()  # before its process group
    dist.destroy_process_group()


def parse_args() -> dict[str, Any]:
    """The settings of `main`."""
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--graph", choices=GRAPHS)
    parser.add_argument("--graph-first", action=on_off)
    parser.add_argument("--recompute", action=on_off)
    parser.add_argument("--compile", choices=COMPILE)
    parser.add_argument("--parts", choices=("torch", "te"))
    parser.add_argument("--fp8", choices=("none", "delayed", "current"))
    parser.add_argument("--import-te", action=on_off)
    parser.set_defaults(**asdict(Options()))
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**parse_args())
