"""Programs with optimizers over sharded parameters: which ones, built when, stepped how."""

from typing import Any, cast

import torch
from torch import nn

from fsdp_core.fsdp import FSDPModule, fully_shard
from tests.dist.compiled_frames import Frame, frames, fresh_compiler

WIDTH = 5


class Net(nn.Module):
    """Parameters that no number of ranks cuts evenly, one of no dims, and one larger than the rest.

    Over two ranks the gain and the biases lie on one of them, the weights on both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 13)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.down = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        out: torch.Tensor = self.down(torch.tanh(self.up(x)) * self.gain)
        return out


def net(device: str = "cpu") -> Net:
    """The same values everywhere."""
    torch.manual_seed(3)
    with torch.device(device):
        return Net()


def sharded_net(device: str = "cpu", **options: Any) -> tuple[Net, FSDPModule]:
    """The same with two units: `up`, and the root of all else."""
    model = net(device)
    fully_shard(model.up, **options)
    fully_shard(model, **options)
    return model, cast("FSDPModule", model)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    """The same on every rank, so that means over ranks are exact."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(x).square().mean()
    return loss


# --- parameters that modules do not hold at rest ---------------------------------------------


def _built_in_forward() -> torch.optim.Optimizer:
    model, _ = sharded_net()
    built: list[torch.optim.Optimizer] = []
    model.up.register_forward_pre_hook(
        lambda *_: built.append(torch.optim.SGD(model.up.parameters(), lr=0.1))
    )
    loss_of(model).backward()
    return built[0]


def _built_while_gathered() -> torch.optim.Optimizer:
    model, root = sharded_net()
    root.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root.reshard()
    loss_of(model).backward()
    return optimizer


def _built_before_sharding() -> torch.optim.Optimizer:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    loss_of(model).backward()
    return optimizer


def _built_on_meta() -> torch.optim.Optimizer:
    model, _ = sharded_net("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    loss_of(model).backward()
    return optimizer


TOO_EARLY_OR_LATE = {
    "in forward": _built_in_forward,
    "while gathered": _built_while_gathered,
    "before sharding": _built_before_sharding,
    "on meta": _built_on_meta,
}


def what_a_step_says(built: str) -> str:
    """The error of the first step of an optimizer that has other parameters than those at rest."""
    optimizer = TOO_EARLY_OR_LATE[built]()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "stepped"


def steps_rightly() -> None:
    """Optimizers that look like the wrong ones and are not: each trains what it has."""
    model, root = sharded_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [plain]})
    for way in ("at rest", "gathered"):
        loss_of(model).backward()
        plain.grad = torch.ones(2)
        before = [cast("Any", p).full_tensor().detach() for p in model.up.parameters()]
        if way == "gathered":
            root.unshard()
        optimizer.step()
        optimizer.zero_grad()
        root.reshard()
        after = [cast("Any", p).full_tensor().detach() for p in model.up.parameters()]
        assert not any(map(torch.equal, before, after)), way
    assert torch.equal(plain, torch.ones(2).sub(0.1).sub(0.1))


def trains_a_copy_of_what_was_sharded() -> None:
    """Parameters that were there before sharding, kept beside and given gradients by hand."""
    model = net()
    kept = list(model.parameters())
    optimizer = torch.optim.SGD(kept, lr=1.0)
    fully_shard(model)
    before = [p.detach().clone() for p in kept]
    for parameter in kept:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, b - 1) for p, b in zip(kept, before, strict=True))


def replaces_parameters_and_steps() -> None:
    """An optimizer that is built after memory was given steps, also when the old ones are gone."""
    model, root = sharded_net("meta")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    assert all(group.main_weight.ne(0.1).any() for group in root.fsdp_groups)


# --- compiled --------------------------------------------------------------------------------


def compiles_steps(cls: Any, options: dict[str, Any]) -> list[Frame]:
    """Three steps give the bits of uncompiled ones; returns frames of this library compiled."""
    trained, found = [], []
    for is_compiled in (False, True):
        model, _ = sharded_net()
        optimizer: Any = cls(model.parameters(), lr=0.1, **options)
        with fresh_compiler():
            # The same operators in the same order, so bits are due.
            step: Any = optimizer.step
            if is_compiled:
                step = torch.compile(step, backend="aot_eager")
            for number in range(3):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                step()
            found = frames()
        trained.append([cast("Any", p).full_tensor().detach() for p in model.parameters()])
    assert found
    assert all(map(torch.equal, *trained))
    return [frame for frame in found if "fsdp_core" in frame.path]


PENALTIES: dict[str, Any] = {
    "to_local": lambda p: p.to_local().square().sum(),
    "full_tensor": lambda p: p.full_tensor().square().sum(),
    "elementwise": lambda p: (p * p).to_local().sum(),
    "norm": lambda p: p.norm().full_tensor(),
}


def compiles_penalties(kind: str) -> list[str]:
    """A compiled function of parameters at rest has the gradient that it has uncompiled."""
    wrong = []
    model, _ = sharded_net()
    for name, parameter in model.named_parameters():
        grads = []
        for is_compiled in (False, True):
            penalty = PENALTIES[kind]
            if is_compiled:
                torch._dynamo.reset()
                penalty = torch.compile(penalty, backend="aot_eager")
            parameter.grad = None
            penalty(parameter).backward()
            grads.append(cast("Any", parameter.grad).to_local())
        if not torch.equal(*grads) or not grads[0].any():
            wrong.append(name)
    return wrong
