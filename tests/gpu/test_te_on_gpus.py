"""TransformerEngine's fused gradients under sharding, bit for bit."""

import importlib.util
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard
from fsdp_core.model.decoder import make_layers
from fsdp_core.model.te.layers import fuses
from tests.dist.rank_pool import RankPool
from tests.gpu.test_fsdp_on_gpus import device_here

WIDTH, INNER, ROWS, LAYERS = 256, 384, 128, 3


def fuses_delayed() -> bool:
    """Whether this machine has grouped kernels for delayed scaling that take device sizes."""
    te = cast("Any", make_layers("te")).te  # loads the right cuDNN first
    from transformer_engine.common import recipe

    return fuses(te, recipe.DelayedScaling(), torch.bfloat16)


class Mlp(nn.Module):
    """Two linears with a residual; the second has a bias, which is never quantised."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        make_layers("te")
        import transformer_engine.pytorch as te

        options |= {"params_dtype": torch.bfloat16, "device": device_here().torch_device}
        self.up = te.Linear(WIDTH, INNER, bias=False, **options)
        self.down = te.Linear(INNER, WIDTH, bias=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, WIDTH]."""
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Input of a step, [ROWS, WIDTH]."""
    device = device_here().torch_device
    generator = torch.Generator(device).manual_seed(100 * rank + step)
    return torch.randn(ROWS, WIDTH, device=device, generator=generator).bfloat16()


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


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_fused_gradients(gpu_ranks: RankPool, strategy: str) -> None:
    """Kernels that add to `main_grad` give the bits that they give unsharded."""
    (found,) = gpu_ranks.run(fused_gradients, strategy, world_size=1)
    assert found["wrong"] == []
    assert found["norm"] > 0


@pytest.mark.gpu(1)
def test_delayed_scaling_fuses_no_experts(gpu_ranks: RankPool) -> None:
    """It has no grouped kernels that take sizes on the device, on any machine."""
    assert gpu_ranks.run(fuses_delayed, world_size=1) == [False]
