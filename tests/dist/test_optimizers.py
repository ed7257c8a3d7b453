"""Optimizers over sharded parameters: the bits of one process, or a refusal that says why."""

import copy
import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp import FSDPModule, fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist.rank_pool import RankPool
from tests.dist.test_compile import Frame, frames, fresh_compiler
from tests.support.tensors import same_bits, whole

WIDTH, INNER = 5, 61


class Net(nn.Module):
    """Parameters that no number of ranks cuts evenly, one of no dims, and one larger than the rest.

    Over two ranks the gain and the biases lie on one of them, the weights on both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.down = nn.Linear(INNER, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, INNER]."""
        out: torch.Tensor = self.down(torch.tanh(self.up(x)) * self.gain)
        return out


def net(device: str = "cpu") -> Net:
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


Built = tuple[torch.optim.Optimizer, nn.Module]
"""With its model: once that is collected, nobody can tell that the optimizer trains nothing."""


def _built_in_forward() -> Built:
    model, _ = sharded_net()
    built: list[torch.optim.Optimizer] = []
    model.up.register_forward_pre_hook(
        lambda *_: built.append(torch.optim.SGD(model.up.parameters(), lr=0.1))
    )
    loss_of(model).backward()
    return built[0], model


def _built_while_gathered() -> Built:
    model, root = sharded_net()
    root.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root.reshard()
    loss_of(model).backward()
    return optimizer, model


def _built_before_sharding() -> Built:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    loss_of(model).backward()
    return optimizer, model


def _built_on_meta() -> Built:
    model, _ = sharded_net("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    loss_of(model).backward()
    return optimizer, model


TOO_EARLY_OR_LATE = {
    "in forward": _built_in_forward,
    "while gathered": _built_while_gathered,
    "before sharding": _built_before_sharding,
    "on meta": _built_on_meta,
}


def what_a_step_says(built: str) -> str:
    """The error of the first step of an optimizer that has other parameters than those at rest."""
    optimizer, model = TOO_EARLY_OR_LATE[built]()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return f"stepped, and {type(model).__name__} was trained by nothing"


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


# --- against one process ---------------------------------------------------------------------

STEPS = 3


def train(model: nn.Module, optimizer: Any) -> None:
    """Some steps, each on other data, the same on every rank."""
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def wrongly_trained(name: str, options: dict[str, Any], strategy: Any) -> list[str]:
    """Parameters and states that differ from those of one process in a bit, or in their layout."""
    cls = getattr(torch.optim, name, None) or globals()[name]
    alone = net()
    shape = (dist.get_world_size(),) if isinstance(strategy, str) else (2, 2)
    model, _ = sharded_net(mesh=init_device_mesh("cpu", shape), strategy=strategy)
    pairs = list(zip(alone.named_parameters(), model.parameters(), strict=True))
    # torch's Rprop indexes by masks, which views a 0-d tensor first; that is refused.
    trained = [[p for p in m.parameters() if p.ndim or name != "Rprop"] for m in (alone, model)]
    optimizers = [cls(parameters, lr=0.05, **options) for parameters in trained]
    if options.get("fused"):
        return _wrong_rows(cls, options, model, optimizers[1])
    for each, optimizer in zip((alone, model), optimizers, strict=True):
        train(each, optimizer)
    wrong = [key for (key, one), other in pairs if not same_bits(one.detach(), whole(other))]
    for (key, one), other in pairs:
        states, ours = optimizers[0].state[one], optimizers[1].state[other]
        is_here = bool(other.to_local().numel())  # type: ignore[attr-defined]
        assert states.keys() == ours.keys() or not is_here
        for state, value in states.items() if is_here else ():
            if isinstance(value, torch.Tensor) and value.shape == one.shape and one.ndim:
                own = other.row_spec.own_rows(value)  # type: ignore[attr-defined]
                if type(ours[state]) is not RowSharded or not same_bits(
                    own, ours[state].to_local()
                ):
                    wrong.append(f"{key}.{state}")
    return wrong


def _wrong_rows(cls: Any, options: Any, model: nn.Module, optimizer: Any) -> list[str]:
    """The same against plain tensors of the same rows.

    torch's fused kernels on the CPU round the elements after the last full vector in another way,
    so bits are those of tensors of the same length.
    """
    parameters: list[Any] = list(model.parameters())
    rows = [nn.Parameter(p.to_local().detach().clone()) for p in parameters]
    reference = cls(rows, lr=0.05, **options)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        for own, parameter in zip(rows, parameters, strict=True):
            own.grad = None if parameter.grad is None else parameter.grad.to_local().clone()
        optimizer.step()
        reference.step()
    return [str(i) for i, (own, p) in enumerate(zip(rows, parameters, strict=True))
            if not same_bits(own.detach(), p.to_local().detach())]  # fmt: skip


def row_counts() -> list[list[int]]:
    """Rows of each parameter on this rank, by unit."""
    _, root = sharded_net()
    return [[int(p.to_local().numel()) for p in g.sharded] for g in root.fsdp_groups]


def what_whole_tensors_say(name: str) -> str:
    """The error of the first step of an optimizer that needs whole tensors."""
    model, _ = sharded_net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    cls: Any = getattr(torch.optim, name)
    optimizer = cls(matrices if name == "Muon" else model.parameters(), lr=0.1)
    loss_of(model).backward()
    try:
        optimizer.step(*([lambda: 0.0] if name == "LBFGS" else []))
    except NotImplementedError as error:
        return str(error)
    return "stepped"


# --- kernels that take addresses -------------------------------------------------------------


def blind_kernels_are_refused() -> None:
    """Who takes the address of what has none raises and writes nothing."""
    model, _ = sharded_net()
    before = [whole(p).clone() for p in model.parameters()]
    optimizer = BlindAdam(model.parameters())
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        optimizer.step()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.data, torch.zeros_like(parameter)):
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                torch.Tensor.data_ptr(tensor)
    assert all(map(torch.equal, before, [whole(p) for p in model.parameters()]))


def what_rows_cannot_do(how: str) -> None:
    """A closure, a scaler and other dtypes of states raise and change nothing."""
    model, _ = sharded_net()
    dtype = torch.bfloat16 if how == "dtype" else torch.float32
    optimizer: Any = FusedAdam(model.parameters(), dtype=dtype)
    loss_of(model).backward()
    before = [whole(p).clone() for p in model.parameters()]
    step: dict[str, Any] = {
        "closure": lambda: optimizer.step(lambda: 0.0),
        "scaler": lambda: optimizer.step(grad_scaler=torch.amp.GradScaler("cpu")),
        "dtype": optimizer.step,
    }
    with pytest.raises(NotImplementedError, match="sharded parameters"):
        step[how]()
    assert all(map(torch.equal, before, [whole(p) for p in model.parameters()]))
    assert "step" not in optimizer.param_groups[0]


def steps_on_after_an_error_and_a_reload() -> None:
    """A step that raised has counted nothing, and a reloaded optimizer goes on; a plain one too."""
    trained = []
    for interrupted in (False, True):
        model, _ = sharded_net()
        plain = nn.Parameter(torch.ones(2))
        parameters = [plain, *model.parameters()]
        optimizer: Any = FusedAdam(parameters)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            if interrupted and number == 1:
                plain.grad = torch.ones(1).expand(2)  # what the kernel does not take
                with pytest.raises(AssertionError):
                    optimizer.step()
            if interrupted and number == 2:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = FusedAdam(parameters)
                optimizer.load_state_dict(state)
            plain.grad = torch.ones(2)
            optimizer.step()
        kinds = {type(s) for p in model.parameters() for s in optimizer.state[p].values()}
        assert kinds == {RowSharded}
        assert type(optimizer.state[plain]["exp_avg"]) is torch.Tensor
        assert all(p.detach().to_local().grad is None for p in model.parameters())  # type: ignore[attr-defined]
        trained.append([whole(p) for p in parameters])
    assert all(map(torch.equal, *trained))


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


BETA1, BETA2, EPS = np.float32(0.9), np.float32(0.99), np.float32(1e-8)


def _memory(tensor: torch.Tensor) -> Any:
    """The float32 at a tensor's address, as many as it has elements; the address is C++'s."""
    assert (tensor.dtype, tensor.is_contiguous()) == (torch.float32, True)
    pointer = ctypes.cast(torch.Tensor.data_ptr(tensor), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, shape=(tensor.numel(),))


def _kernel(tensors: list[torch.Tensor], lr: float, step: int) -> None:
    """Adam of parameter, gradient and moments, in place."""
    parameter, grad, average, square = map(_memory, tensors)
    average[:] = BETA1 * average + (1 - BETA1) * grad
    square[:] = BETA2 * square + (1 - BETA2) * grad * grad
    corrected = average / np.float32(1 - BETA1**step)
    scale = np.sqrt(square / np.float32(1 - BETA2**step)) + EPS
    parameter -= np.float32(lr) * corrected / scale


class BlindAdam(torch.optim.Optimizer):
    """Adam that takes each tensor's address, and knows no DTensor."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
        """One kernel a parameter; states are made for all, also for those without a gradient."""
        del closure, grad_scaler
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {key: self.new_state(p) for key in ("exp_avg", "exp_avg_sq")}
                if p.grad is not None:
                    tensors = [p.data, p.grad.data, *self.state[p].values()]
                    _kernel(self.rows(tensors), group["lr"], group["step"])

    def new_state(self, p: Any) -> torch.Tensor:
        return torch.zeros_like(p)

    def rows(self, tensors: list[Any]) -> list[torch.Tensor]:
        return tensors


class FusedAdam(BlindAdam):
    """The same that looks for rows in DTensors."""

    # By which it is known.
    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(self, parameters: Any, lr: float = 0.1, *, dtype: Any = torch.float32) -> None:
        super().__init__(parameters, lr)
        self.name_to_dtype_map = {"exp_avg": dtype, "exp_avg_sq": dtype}

    def new_state(self, p: Any) -> torch.Tensor:
        if not isinstance(p, DTensor):
            return torch.zeros_like(p)
        zeros = torch.zeros_like(p._local_tensor)
        return DTensor.from_local(
            zeros, p.device_mesh, p.placements, shape=p.size(), stride=p.stride()
        )

    def rows(self, tensors: list[Any]) -> list[torch.Tensor]:
        assert len({isinstance(tensor, DTensor) for tensor in tensors}) == 1
        assert all(tensor.numel() for tensor in tensors)  # TransformerEngine's do wrong over none
        return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


# --- parameters that modules do not hold at rest ---------------------------------------------

WRONG = {
    "in forward": "got gathered ones of up.weight, up.bias:",
    "while gathered": "got gathered ones of gain, down.weight, down.bias:",
    "before sharding": "got the ones from before fully_shard of gain, up.weight, up.bias,",
    "on meta": "got the ones from before to_empty() or to() of gain, up.weight, up.bias,",
}


@pytest.mark.parametrize("built", list(WRONG))
def test_an_optimizer_that_would_train_nothing_is_refused(warm_ranks: RankPool, built: str) -> None:
    """One that holds other parameters than modules hold at rest names them at its first step."""
    for said in warm_ranks.run(what_a_step_says, built, world_size=2):
        assert "Expected an optimizer of the parameters at rest" in said
        assert WRONG[built] in said
        assert "call reshard() first" in said


@pytest.mark.parametrize(
    "program",
    [steps_rightly, trains_a_copy_of_what_was_sharded, replaces_parameters_and_steps,
     blind_kernels_are_refused],
)  # fmt: skip
def test_programs(warm_ranks: RankPool, program: Callable[[], None]) -> None:
    """See each program."""
    warm_ranks.run(program, world_size=2)


# --- against one process ---------------------------------------------------------------------

LOOPS = ({"foreach": False}, {"foreach": True})
ALL = (*LOOPS, {"fused": True})
OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": tuple({"momentum": 0.9, "nesterov": True, **way} for way in ALL),
    "Adam": tuple({"amsgrad": True, "weight_decay": 0.1, **way} for way in ALL),
    "AdamW": ALL,
    "Adagrad": ALL,
    "RMSprop": tuple({"centered": True, "momentum": 0.9, **way} for way in LOOPS),
    "Adamax": LOOPS,
    "NAdam": LOOPS,
    "RAdam": LOOPS,
    "Adadelta": LOOPS,
    "ASGD": LOOPS,
    "Rprop": LOOPS,
    "FusedAdam": ({},),
}
CASES = [(name, options) for name, ways in OPTIMIZERS.items() for options in ways]


def test_the_model_is_cut_unevenly(warm_ranks: RankPool) -> None:
    """Over two ranks there are parameters of which one rank has more, and some has none."""
    first, second = warm_ranks.run(row_counts, world_size=2)
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=True)]
    assert any(0 in pair for pair in pairs)
    assert any(0 not in pair and pair[0] != pair[1] for pair in pairs)


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[1])}") for case in CASES],
)
def test_steps_have_the_bits_of_one_process(
    warm_ranks: RankPool, name: str, options: dict[str, Any]
) -> None:
    """Parameters and states of uneven shards over two ranks are rows of one process's."""
    args = (wrongly_trained, name, options, "optim_grads_params")
    assert warm_ranks.run(*args, world_size=2) == [[], []]


@pytest.mark.parametrize("name", ["AdamW", "FusedAdam"])
def test_steps_over_two_axes_have_the_bits_of_one_process(warm_ranks: RankPool, name: str) -> None:
    """The same where the optimizer's states are cut over two mesh axes."""
    axes = ("optim", "optim_grads_params")
    assert warm_ranks.run(wrongly_trained, name, {}, axes, world_size=4) == [[]] * 4


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_of_whole_tensors_are_refused(warm_ranks: RankPool, name: str) -> None:
    """They raise before anything is written or sent, on every rank, with rows or without."""
    for said in warm_ranks.run(what_whole_tensors_say, name, world_size=2):
        assert f"got {name}, which needs whole tensors" in said


# --- kernels that take addresses -------------------------------------------------------------


@pytest.mark.parametrize("how", ["closure", "scaler", "dtype"])
def test_what_a_step_over_rows_cannot_do_is_refused(warm_ranks: RankPool, how: str) -> None:
    """Arguments and dtypes of states that would be lost on the way to the rows raise."""
    warm_ranks.run(what_rows_cannot_do, how, world_size=2)


def test_a_step_over_rows_leaves_a_usual_optimizer(warm_ranks: RankPool) -> None:
    """Its states are sharded as its parameters, after an error and through a state dict too."""
    warm_ranks.run(steps_on_after_an_error_and_a_reload, world_size=2)


# --- compiled --------------------------------------------------------------------------------

COMPILING_S = 240.0
"""The first program in a rank imports the compiler, which takes seconds on an idle machine."""


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"fused": True})],
    ids=["SGD", "fused AdamW"],
)
def test_a_compiled_step_compiles_nothing_of_ours(
    warm_ranks: RankPool, cls: Any, options: dict[str, Any]
) -> None:
    """It gives the bits of the uncompiled step, and sharded operators stay as they are."""
    args = (compiles_steps, cls, options)
    assert warm_ranks.run(*args, world_size=1, timeout_s=COMPILING_S) == [[]]


@pytest.mark.parametrize("kind", list(PENALTIES))
def test_a_compiled_penalty_has_its_gradient(warm_ranks: RankPool, kind: str) -> None:
    """What a compiled function computes from parameters at rest is as differentiable as before."""
    if kind == "norm" and not issubclass(RowSharded, DTensor):
        pytest.skip("there torch cannot differentiate DTensor results")
    args = (compiles_penalties, kind)
    assert warm_ranks.run(*args, world_size=1, timeout_s=COMPILING_S) == [[]]
