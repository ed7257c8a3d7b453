"""Programs with TransformerEngine modules on GPUs: fp8 weights, gradients that kernels add up."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from fsdp_core.model.backend import make_backend
from tests.gpu.fsdp_on_gpus import device_here

WIDTH, INNER, ROWS, LAYERS = 256, 384, 128, 3


def recipe_of(name: str) -> Any:
    """A recipe of TransformerEngine by a short name."""
    make_backend("te")  # loads the right cuDNN first
    from transformer_engine.common import recipe

    return {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }[name]()


class Mlp(nn.Module):
    """Two linears with a residual; the second has a bias, which is never quantised."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        make_backend("te")
        import transformer_engine.pytorch as te

        options |= {"params_dtype": torch.bfloat16, "device": device_here().torch_device}
        self.up = te.Linear(WIDTH, INNER, bias=False, **options)
        self.down = te.Linear(INNER, WIDTH, bias=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, WIDTH]."""
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def fp8_model(recipe: str) -> nn.Sequential:
    """Weights in fp8, their first values kept in full; the same on every rank."""
    made_from = recipe_of(recipe)
    import transformer_engine.pytorch as te

    torch.manual_seed(5)
    with te.quantized_model_init(
        enabled=True, recipe=made_from, preserve_high_precision_init_val=True
    ):
        return nn.Sequential(*(Mlp() for _ in range(LAYERS)))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Input of a step, [ROWS, WIDTH]."""
    device = device_here().torch_device
    generator = torch.Generator(device).manual_seed(100 * rank + step)
    return torch.randn(ROWS, WIDTH, device=device, generator=generator).bfloat16()


def loss_of(model: nn.Module, recipe: str, x: torch.Tensor) -> torch.Tensor:
    """Forward in fp8 and a loss that depends on all outputs, float32."""
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=recipe_of(recipe)):
        out = model(x)
    return cast("torch.Tensor", out.float().square().mean())


def train_whole(recipe: str, steps: int) -> list[torch.Tensor]:
    """Losses, then main weights, of a model that is whole on every rank, trained by hand."""
    model = fp8_model(recipe)
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    parameters = list(model.parameters())
    quantised = [p for p in parameters if hasattr(p, "get_high_precision_init_val")]
    mains = [
        nn.Parameter((cast("Any", p).get_high_precision_init_val().to(p.device)
         if hasattr(p, "get_high_precision_init_val") else p.detach()).float())
        for p in parameters
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(mains, lr=1e-2, fused=True)
    losses = []

    def refresh() -> None:
        for parameter, main in zip(parameters, mains, strict=True):
            if parameter not in set(quantised):
                parameter.data.copy_(main.data)
        flat = [m.data.flatten() for p, m in zip(parameters, mains, strict=True)
                if p in set(quantised)]  # fmt: skip
        quantize_master_weights(quantised, flat, [0] * len(flat), dist.group.WORLD)

    refresh()
    for step in range(steps):
        loss = loss_of(model, recipe, batch(step))
        loss.backward()
        for parameter, main in zip(parameters, mains, strict=True):
            assert parameter.grad is not None
            main.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            refresh()
        losses.append(loss.detach())
    return losses + [main.data for main in mains]


def train_sharded(
    recipe: str, strategy: str, pool: str, steps: int, graph_from: int | None = None
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The same with sharded fp8 weights, and what they took; graphed from a step on if asked."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, main_dtype=torch.float32
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = fp8_model(recipe)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy, strategy=strategy, pool=pool,
                        keep_grads=graph_from is not None)  # fmt: skip
        fully_shard(model, mesh=mesh, mp_policy=policy, strategy=strategy, pool=pool)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True,
                                      capturable=graph_from is not None)  # fmt: skip
        static = batch(0)
        schedule = cast("Any", model).fsdp_schedule

        def iteration() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, recipe, static)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = iteration
        losses = []
        for step in range(steps):
            static.copy_(batch(step))
            if step == graph_from:
                schedule.quiesce()
                run = CapturedFunction(GraphMaker(device_here()), iteration, None)
                schedule.quiesce()
            losses.append(run().clone())
        groups = cast("Any", model).fsdp_groups
        found = {
            "dtypes": sorted({str(g.dtypes.compute) for g in groups}),
            "columns": [
                name
                for group in groups
                for name, p in zip(group.names, group.unsharded, strict=True)
                if getattr(p, "_transpose", None) is not None
                or getattr(p, "_columnwise_data", None) is not None
            ],
        }
        mains = [cast("Any", p).full_tensor() for p in model.parameters()]
        torch.cuda.synchronize()
        if graph_from is not None:
            run.reset()
    return losses + mains, found


def compare_fp8(recipe: str, strategy: str, pool: str) -> dict[str, Any]:
    """Differences between training whole, sharded, and sharded under one graph."""
    whole = train_whole(recipe, 8)
    sharded, found = train_sharded(recipe, strategy, pool, 8)
    graphed, _ = train_sharded(recipe, strategy, pool, 8, graph_from=4)
    found["losses"] = [loss.item() for loss in whole[:8]]
    found["sharded"] = [
        i for i, (a, b) in enumerate(zip(whole, sharded, strict=True)) if not torch.equal(a, b)
    ]
    found["graphed"] = [
        i for i, (a, b) in enumerate(zip(sharded, graphed, strict=True)) if not torch.equal(a, b)
    ]
    return found


def refuse_mxfp8() -> str:
    """What wrapping MXFP8 weights says."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    try:
        model = fp8_model("mxfp8")
        fully_shard(model, mesh=mesh)
    except Exception as error:  # noqa: BLE001  (what it says is the result)
        return f"{type(error).__name__}: {error}"
    return "accepted"


def fused_gradients(strategy: str) -> dict[str, Any]:
    """Two microbatches whose kernels add to `main_grad`, sharded and by hand; same bits?

    With and without the mark that lets the first kernel overwrite.
    """
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    def build(marked: bool = False) -> nn.Sequential:
        torch.manual_seed(5)
        model = nn.Sequential(*(Mlp(fuse_wgrad_accumulation=True) for _ in range(LAYERS)))
        for parameter in model.parameters() if marked else ():
            parameter.overwrite_main_grad = True  # type: ignore[attr-defined]
        return model

    whole: Any = build()
    for parameter in whole.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    for step in range(2):
        whole(batch(step)).float().square().mean().backward()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrong = []
    for marked in (False, True):
        model: Any = build(marked)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy, strategy=strategy)
        fully_shard(model, mesh=mesh, mp_policy=policy, strategy=strategy)
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            model(batch(step)).float().square().mean().backward()
        for (name, a), b in zip(whole.named_parameters(), model.parameters(), strict=True):
            if "weight" in name:
                grad = b.grad.full_tensor()
                if not torch.equal(a.main_grad.to(grad.dtype), grad):
                    wrong.append((marked, name))
    return {"wrong": wrong, "norm": whole[0].up.weight.main_grad.norm().item()}
