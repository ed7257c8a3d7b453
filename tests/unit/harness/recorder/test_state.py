"""Which tensors are recorded and what they are called."""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, Adam, Optimizer

from harness.recorder import record
from harness.records import RankRecords
from tests.unit.harness.recorder.recorded import all_digests, digests, names, recorded

PARAMS = ("0.weight", "0.bias", "1.weight", "1.bias")


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()


class Wrapper(nn.Module):
    """Holds a module as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", disable=True)


def checkpointed(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    for place, part in enumerate(model):
        model[place] = checkpoint_wrapper(part)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "one": Wrapper,
    "compiled": compiled,
    "compiled wrapper": lambda model: compiled(Wrapper(model)),
    "wrapped compiled": lambda model: Wrapper(compiled(model)),
    "checkpoint": checkpointed,
}


@pytest.mark.parametrize("made", ["before", "after", "told"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_names_are_those_without_wrappers(
    wrap: Callable[[nn.Module], nn.Module], made: str, tmp_path: Path
) -> None:
    """Wrappers change no name and double nothing, whenever the optimizer is made or told of."""

    def program() -> None:
        model: nn.Module = model_of()
        model[0].register_buffer("scale", torch.ones(2))  # type: ignore[index]
        early = SGD(model.parameters(), 0.1) if made != "after" else None
        model = wrap(model)
        optimizer = early or SGD(model.parameters(), 0.1)
        if made == "told":
            record(model, optimizer)
        train(model, optimizer)

    records = recorded(program, tmp_path)
    assert names(records, "weights") == names(records, "grads") == PARAMS
    assert names(records, "buffers") == ("0.scale",)


class Named(nn.Module):
    """Two layers by name, of which the second may share the first one's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embed(x))


def test_two_networks_are_told_apart(tmp_path: Path) -> None:
    """Names begin with the network's class, numbered where it is the same, and are final."""

    def program() -> None:
        first, second, third = Named(), Named(), nn.Linear(3, 1)
        optimizers = [SGD(each.parameters(), 0.1) for each in (first, second, third)]
        third(second(first(torch.ones(3)))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    assert names(recorded(program, tmp_path), "weights") == (
        "Named0.embed.weight", "Named0.head.weight", "Named1.embed.weight", "Named1.head.weight",
        "Linear.weight", "Linear.bias",
    )  # fmt: skip


def test_one_optimizer_of_two_networks_names_them_in_its_order(tmp_path: Path) -> None:
    """The order in which networks were made, or moved in memory, decides nothing."""

    def program() -> None:
        second, first = Named(), Named()
        with torch.no_grad():
            second.embed.weight.zero_()
        optimizer = SGD([*first.parameters(), *second.parameters()], 0.1)
        second(first(torch.ones(3))).sum().backward()
        optimizer.step()

    records = recorded(program, tmp_path)
    zeros = recorded(lambda: train(m := nn.Linear(3, 3, bias=False), SGD(m.parameters(), 0)),
                     tmp_path / "b")  # fmt: skip
    assert names(records, "weights")[0] == "Named0.embed.weight"
    before = digests(records, "weights", -1)
    assert before["Named0.embed.weight"] != before["Named1.embed.weight"]
    assert digests(zeros, "weights", -1)["weight"] != before["Named1.embed.weight"]


def test_a_part_that_becomes_part_of_a_whole_has_the_wholes_names(tmp_path: Path) -> None:
    """An optimizer made for a part before the whole exists does not name it by the part."""

    def program() -> None:
        part = Named()
        optimizer = SGD(part.parameters(), 0.1)
        whole = nn.Sequential(part, nn.Linear(3, 1))
        second = SGD(whole[1].parameters(), 0.1)
        whole(torch.ones(3)).sum().backward()
        optimizer.step()
        second.step()

    expected = ("0.embed.weight", "0.head.weight", "1.weight", "1.bias")
    assert names(recorded(program, tmp_path), "weights") == expected


def test_a_tied_parameter_is_recorded_once(tmp_path: Path) -> None:
    """It has the name of its first place, in weights, gradients and state."""

    def program() -> None:
        model = Named(tied=True)
        train(model, Adam(model.parameters()))

    records = recorded(program, tmp_path)
    assert names(records, "weights") == names(records, "grads") == ("embed.weight",)
    assert {"embed.weight.exp_avg", "embed.weight.exp_avg_sq", "embed.weight.step"} <= set(
        names(records, "optim")
    )


def test_a_parameter_of_two_optimizers_is_recorded_for_each(tmp_path: Path) -> None:
    """Its values once; the second optimizer's state has a number and takes nobody's place."""

    def program() -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizers = [SGD(model.parameters(), 0.1, momentum=0.9) for _ in range(2)]
        model(torch.ones(3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    records = recorded(program, tmp_path)
    assert names(records, "weights") == ("weight",)
    assert {"weight.momentum_buffer", "weight.momentum_buffer#2"} <= set(names(records, "optim"))


class Counting(SGD):
    """Keeps a plain number for each parameter."""

    def __init__(self, params: Any, start: float) -> None:
        super().__init__(params, 0.1)
        for param in params:
            self.state[param]["count"] = start


@pytest.mark.parametrize("place", [0, 1])
def test_numbers_of_two_optimizers_are_both_recorded(place: int, tmp_path: Path) -> None:
    """Of two optimizers with a number each for one parameter, a change of either is seen."""

    def program(*starts: float) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(3, 1, bias=False)
            optimizers = [Counting(list(model.parameters()), start) for start in starts]
            model(torch.ones(3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

        return run

    starts = [1.0, 1.0]
    starts[place] = 2.0
    first = recorded(program(1.0, 1.0), tmp_path / "a")
    second = recorded(program(*starts), tmp_path / "b")
    changed = ("weight.count", "weight.count#2")[place]
    for step in (-1, 0):
        ours, theirs = digests(first, "optim", step), digests(second, "optim", step)
        assert {name for name in ours if ours[name] != theirs[name]} == {changed}


@pytest.mark.parametrize("make", [float, np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_state(make: Callable[[float], Any], tmp_path: Path) -> None:
    """A rate that NumPy computed decides the update as one of Python does."""

    def program(rate: float) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(3, 1)
            optimizer = Counting(list(model.parameters()), make(rate))
            (model(torch.ones(3)).sum() * 0).backward()
            optimizer.step()

        return run

    first, second = (recorded(program(rate), tmp_path / f"{rate}") for rate in (1.0, 2.0))
    assert digests(first, "optim", 0)["bias.count"] != digests(second, "optim", 0)["bias.count"]


class Scaled(Tensor):
    """As a quantized weight of TransformerEngine: bytes, and by what each is multiplied."""

    _data: Tensor
    _scale_inv: Tensor

    def detach(self) -> Any:
        return self


@pytest.mark.parametrize("part", ["_data", "_scale_inv"])
def test_all_of_a_quantized_tensor_is_digested(part: str, tmp_path: Path) -> None:
    """Equal bytes under another scale are another tensor."""

    def program(**parts: float) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(3, 1)
            held = torch.zeros(3).as_subclass(Scaled)
            held._data, held._scale_inv = (
                torch.full((3,), parts.get(name, 1.0)) for name in ("_data", "_scale_inv")
            )
            recorder = record(model, SGD(model.parameters(), 0.1))
            recorder.state("own", {"held": held})
            with recorder.step():
                model(torch.ones(3)).sum().backward()

        return run

    first = recorded(program(), tmp_path / "a")
    second = recorded(program(**{part: 2.0}), tmp_path / "b")
    ours, theirs = digests(first, "own", 0), digests(second, "own", 0)
    assert {name for name in ours if ours[name] != theirs[name]} == {f"held.{part}"}


class Container(Optimizer):
    """Holds an optimizer a part, and may change the weights after they have stepped."""

    def __init__(self, parts: Iterable[nn.Module], factor: float = 1.0) -> None:
        params = [list(part.parameters()) for part in parts]
        self.inner, self.factor = [SGD(held, 0.1, momentum=0.9) for held in params], factor
        super().__init__([param for held in params for param in held], {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.inner:
            optimizer.step()
        if self.factor != self.factor:
            raise ValueError("no factor")
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param *= self.factor


def contained(factor: float, looks: Path | None = None, is_held: bool = True) -> None:
    """Two steps of a model's two layers; `looks` lists how many tensors each call digests."""
    from fsdp_core.graph.digest import Digester

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    container = Container(model, factor)
    steppers: list[Any] = [container] if is_held else container.inner
    original = Digester.__call__

    def count(self: Digester, tensors: Any, out: Tensor) -> None:
        original(self, tensors, out)
        if looks is not None and tensors:
            with looks.open("a") as file:
                file.write("".join(f"{tensor.data_ptr()} " for tensor in tensors))

    Digester.__call__ = count  # type: ignore[method-assign]
    for step in range(2):
        container.zero_grad()
        model(torch.ones(3)).sum().backward()
        if looks is not None and step == 1:
            looks.write_text("")  # who holds others is known once all have stepped
        for stepper in steppers:
            stepper.step()
        if looks is not None and step == 1:
            seen = looks.read_text().split()
            assert sorted(map(seen.count, set(seen))) == [1] * 12, seen


def test_an_optimizer_that_holds_others_costs_no_second_look(tmp_path: Path) -> None:
    """Four gradients, weights and momenta are digested once a step, with the right digests."""
    held = recorded(lambda: contained(1.0, tmp_path / "looks"), tmp_path / "a")
    alone = recorded(lambda: contained(1.0, is_held=False), tmp_path / "b")
    assert len(held.steps) == len(alone.steps) == 2
    for group in ("grads", "weights"):
        for step in range(2):
            assert digests(held, group, step) == digests(alone, group, step)
    momenta = digests(alone, "optim", 1)
    ours = digests(held, "optim", 1)
    for name in ("0.weight.momentum_buffer", "1.bias.momentum_buffer"):
        assert ours[name] == momenta[name]


def test_what_a_holder_does_after_those_it_holds_is_recorded(tmp_path: Path) -> None:
    """The weights of a step are those that its outermost optimizer leaves."""
    first = recorded(lambda: contained(1.0), tmp_path / "a")
    second = recorded(lambda: contained(0.5), tmp_path / "b")
    assert digests(first, "grads", 0) == digests(second, "grads", 0)
    ours, theirs = digests(first, "weights", 0), digests(second, "weights", 0)
    assert all(ours[name] != theirs[name] for name in ours)


def test_a_holder_that_failed_takes_nobodys_state(tmp_path: Path) -> None:
    """After an error that the program caught, what it held steps on its own and is recorded."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        container = Container(model)
        model(torch.ones(3)).sum().backward()
        container.factor = float("nan")
        with contextlib.suppress(ValueError):
            container.step()
        for _ in range(2):
            model(torch.ones(3)).sum().backward()
            for optimizer in container.inner:
                optimizer.step()

    records = recorded(program, tmp_path)
    weights = [digests(records, "weights", step) for step in (-1, 1, 2)]
    assert weights[1].keys() == weights[0].keys()
    assert all(weights[1][name] != weights[2][name] for name in weights[0])


def test_lazy_state_appears_under_its_parameters_name(tmp_path: Path) -> None:
    """State that the first step makes is absent before it; learning rates are there from then."""

    def program() -> None:
        model = model_of()
        train(model, Adam(model.parameters()), steps=2)

    records = recorded(program, tmp_path)
    assert "group0.lr" in digests(records, "optim", -1)
    assert "0.bias.exp_avg" not in digests(records, "optim", -1)
    assert "0.bias.exp_avg" in digests(records, "optim", 0)


def test_state_that_was_loaded_is_in_the_initial_record(tmp_path: Path) -> None:
    """A resumed optimizer's moments count from before step 0."""

    def program() -> None:
        model = model_of()
        before = Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before.step()
        optimizer = Adam(model.parameters())
        optimizer.load_state_dict(before.state_dict())
        del before
        train(model, optimizer)

    assert {name for name in digests(recorded(program, tmp_path), "optim", -1)
            if name.startswith("0.bias.")} == {
        "0.bias.step", "0.bias.exp_avg", "0.bias.exp_avg_sq"
    }  # fmt: skip


def test_a_learning_rate_is_state(tmp_path: Path) -> None:
    """Two rates that no weight shows differ all the same."""

    def program(rate: float) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(3, 1)
            optimizer = SGD(model.parameters(), rate)
            (model(torch.ones(3)).sum() * 0).backward()
            optimizer.step()

        return run

    first, second = (recorded(program(rate), tmp_path / f"{rate}") for rate in (0.1, 0.2))
    assert digests(first, "weights", 0) == digests(second, "weights", 0)
    assert digests(first, "optim", 0)["group0.lr"] != digests(second, "optim", 0)["group0.lr"]


def test_frozen_parameters_and_buffers_are_groups(tmp_path: Path) -> None:
    """What no optimizer has is recorded as well, and moves to weights once it is trained."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = SGD(model[1].parameters(), 0.1)
        for step in range(2):
            if step:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            optimizer.zero_grad()
            model(torch.eye(3)).sum().backward()
            optimizer.step()

    records = recorded(program, tmp_path)
    assert digests(records, "frozen", 0).keys() == {"0.weight", "0.bias"}
    assert digests(records, "frozen", 1) == {}
    assert digests(records, "weights", 1).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert digests(records, "buffers", 0).keys() == buffers
    assert digests(records, "buffers", 0) != digests(records, "buffers", -1)


def test_a_parameter_without_a_gradient_is_absent_in_that_step(tmp_path: Path) -> None:
    """No gradient is not a gradient of zeros."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            out = model[1](torch.ones(3)) if step == 1 else model(torch.ones(3))
            out.sum().backward()
            optimizer.step()

    records = recorded(program, tmp_path)
    held = [digests(records, "grads", step).keys() for step in range(3)]
    assert held == [set(PARAMS), {"1.weight", "1.bias"}, set(PARAMS)]


def test_zeroed_gradients_are_there(tmp_path: Path) -> None:
    """`set_to_none=False` leaves zeros, which differ from no gradient."""

    def program(set_to_none: bool) -> Callable[[], None]:
        def run() -> None:
            model = model_of()
            optimizer = SGD(model.parameters(), 0.1)
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            model[1](torch.ones(3)).sum().backward()
            optimizer.step()

        return run

    none = recorded(program(True), tmp_path / "none")
    zeros = recorded(program(False), tmp_path / "zeros")
    assert digests(none, "grads", 1).keys() == {"1.weight", "1.bias"}
    assert digests(zeros, "grads", 1).keys() == set(PARAMS)
    assert digests(none, "weights", 1) == digests(zeros, "weights", 1)


def test_parameters_and_optimizer_may_be_replaced(tmp_path: Path) -> None:
    """A layer and its optimizer that are exchanged in mid-training keep the layer's names."""

    def program() -> None:
        model = model_of()
        train(model, SGD(model.parameters(), 0.1))
        model[1] = nn.Linear(3, 1)
        train(model, SGD(model.parameters(), 0.1), steps=2)

    records = recorded(program, tmp_path)
    assert len(records.steps) == 3
    assert not records.problems
    assert digests(records, "weights", 2).keys() == set(PARAMS)
    assert digests(records, "frozen", 2) == {}


@pytest.mark.parametrize("kept", [False, True])
def test_another_optimizer_takes_over_the_same_parameters(kept: bool, tmp_path: Path) -> None:
    """Weights and gradients stay on record under their names, though the first one is kept."""

    def program() -> None:
        model = model_of()
        first = Adam(model.parameters())
        train(model, first)
        second = SGD(model.parameters(), 0.1)
        if not kept:
            del first
        train(model, second, steps=2)

    records = recorded(program, tmp_path)
    for step in range(3):
        assert digests(records, "weights", step).keys() == set(PARAMS)
        assert digests(records, "grads", step).keys() == set(PARAMS)
    assert digests(records, "weights", 1) != digests(records, "weights", 2)


def test_a_parameter_that_is_trained_in_place_of_another_has_its_name(tmp_path: Path) -> None:
    """As megatron-fsdp trains shards, each of which holds its parameter as `orig_param`."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(2, 1))
        optimizer = SGD(model.parameters(), 0.1)
        shards = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        for shard, original in zip(shards, model.parameters(), strict=True):
            shard.orig_param = original  # type: ignore[attr-defined]
        optimizer.param_groups[0]["params"] = shards
        model(torch.ones(1, 2)).sum().backward()
        for shard, original in zip(shards, model.parameters(), strict=True):
            shard.grad = original.grad
        optimizer.step()

    records = recorded(program, tmp_path)
    assert names(records, "weights") == ("0.weight", "0.bias")
    assert names(records, "frozen") == ()


def test_parameters_of_no_module_have_numbers(tmp_path: Path) -> None:
    """A bare tensor that an optimizer trains is recorded under a number."""

    def program() -> None:
        bare = [torch.ones(2, requires_grad=True) for _ in range(2)]
        optimizer = SGD(bare, 0.1)
        (bare[0] * bare[1]).sum().backward()
        optimizer.step()

    assert names(recorded(program, tmp_path), "weights") == ("unnamed.0", "unnamed.1")


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))


def step_of(model: nn.Module, x: Any, optimizer: Optimizer | None = None) -> None:
    optimizer = optimizer or SGD(model.parameters(), 0.1)
    out = model(x).sum()
    (out.abs() if out.is_complex() else out).backward()
    optimizer.step()


class Odd(nn.Module):
    """One parameter of any kind."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x + self.empty.sum()


def test_sparse_gradients_are_recorded_with_their_places(tmp_path: Path) -> None:
    """A sparse gradient has indices and values, in one order however it was summed."""

    def program(order: list[int]) -> Callable[[], None]:
        def run() -> None:
            model = sparse()
            step_of(model, torch.tensor(order))

        return run

    first = recorded(program([1, 2]), tmp_path / "a")
    second = recorded(program([2, 1]), tmp_path / "b")
    third = recorded(program([2, 3]), tmp_path / "c")
    parts = {"0.weight.indices", "0.weight.values"}
    assert parts <= digests(first, "grads", 0).keys()
    assert digests(first, "grads", 0) == digests(second, "grads", 0)
    assert digests(first, "grads", 0) != digests(third, "grads", 0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_of_any_kind(dtype: torch.dtype, tmp_path: Path) -> None:
    """Complex, wide, narrow and empty tensors have digests, and one changed element another."""

    def program(change: float) -> Callable[[], None]:
        def run() -> None:
            value = torch.ones(2, 2, dtype=dtype).t()
            value[1, 0] += change
            step_of(Odd(value), torch.ones(2, 2, dtype=dtype).conj())

        return run

    first, second = (recorded(program(change), tmp_path / f"{change}") for change in (0.0, 0.5))
    assert digests(first, "weights", 0).keys() == {"value", "empty"}
    ours, theirs = digests(first, "weights", -1), digests(second, "weights", -1)
    assert ours["value"] != theirs["value"]
    assert ours["empty"] == theirs["empty"]


def test_a_conjugate_is_digested_by_its_values(tmp_path: Path) -> None:
    """Lazy conjugation is no other value."""

    def program() -> None:
        model = Odd(torch.ones(2, dtype=torch.complex64))
        model.register_buffer("lazy", torch.tensor([1 + 2j]).conj())
        model.register_buffer("eager", torch.tensor([1 - 2j]))
        step_of(model, torch.ones(2, dtype=torch.complex64))

    held = digests(recorded(program, tmp_path), "buffers", 0)
    assert held["lazy"] == held["eager"]


def test_memory_layout_is_no_difference(tmp_path: Path) -> None:
    """A transposed and a contiguous tensor of the same values have the same digest."""

    def program() -> None:
        model = Odd(torch.ones(2))
        model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        model.register_buffer("plain", torch.arange(6.0).view(2, 3).t().contiguous())
        step_of(model, torch.ones(2))

    held = digests(recorded(program, tmp_path), "buffers", 0)
    assert held["turned"] == held["plain"]


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_implementations_of_adam_have_the_same_names(flags: dict[str, Any], tmp_path: Path) -> None:
    """How Adam is computed is not state; what it starts from and its gradients are the same."""

    def program(**chosen: Any) -> Callable[[], None]:
        def run() -> None:
            model = model_of()
            step_of(model, torch.ones(3), Adam(model.parameters(), **chosen))

        return run

    plain, other = recorded(program(), tmp_path / "a"), recorded(program(**flags), tmp_path / "b")
    assert names(plain, "optim") == names(other, "optim")
    assert digests(plain, "optim", -1) == digests(other, "optim", -1)
    assert digests(plain, "grads", 0) == digests(other, "grads", 0)
    steps = [digests(each, "optim", 0)["0.weight.step"] for each in (plain, other)]
    assert steps[0] == steps[1]


def test_shards_are_recorded_as_the_rank_holds_them(tmp_path: Path) -> None:
    """The local part of a DTensor has the digest of the plain tensor with the same values."""

    def program(sharded: bool) -> Callable[[], None]:
        def run() -> None:
            model = nn.Linear(3, 2)
            if sharded:
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
                torch.distributed.init_process_group(
                    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
                )
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            optimizer = Adam(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        return run

    plain = recorded(program(False), tmp_path / "plain")
    sharded = recorded(program(True), tmp_path / "sharded")
    for group in ("weights", "optim"):
        assert names(plain, group) == names(sharded, group)
    assert digests(plain, "weights", -1) == digests(sharded, "weights", -1)
    assert digests(plain, "grads", 0) == digests(sharded, "grads", 0)
    assert [step.grad_norm for step in plain.steps] == [step.grad_norm for step in sharded.steps]


def test_two_runs_of_a_program_are_equal(tmp_path: Path) -> None:
    """Nothing of the process, such as addresses, is in what is compared."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        optimizer = Adam(model.parameters())
        for _ in range(2):
            step_of(model, torch.rand(4, 3), optimizer)

    first, second = (recorded(program, tmp_path / name) for name in "ab")
    assert all_digests(first) == all_digests(second)
    assert without_start(first) == without_start(second)


def without_start(records: RankRecords) -> list[Any]:
    return [(step.loss, step.grad_norm, step.nonfinite) for step in records.steps]
