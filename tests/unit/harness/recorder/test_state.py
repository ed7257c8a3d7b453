"""What differs between two programs' weights, gradients, optimizers and buffers, and its names."""

import copy
import gc
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
from harness.records import AFTER
from tests.unit.harness.recorder.recorded import (
    PARAMS,
    changed,
    digests,
    model_of,
    names,
    pair,
    recorded,
    step_of,
    train,
)


class Counting(SGD):
    """Keeps a plain number for each parameter."""

    def __init__(self, params: Any, start: Any) -> None:
        super().__init__(params, 0.1)
        for param in params:
            self.state[param]["count"] = start


class Scaled(Tensor):
    """As a quantized weight of TransformerEngine: bytes, and by what each is multiplied."""

    _data: Tensor
    _scale_inv: Tensor

    def detach(self) -> Any:
        return self


class Holder(Optimizer):
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


class Odd(nn.Module):
    """One parameter of any kind."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value, self.empty = nn.Parameter(value), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x + self.empty.sum()


def numbers_of_a_group(value: float) -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), value)
    optimizer.param_groups[0]["of_a_schedule"] = value
    step_of(model, None, optimizer, 0.0)


def number_in_a_list(value: float) -> None:
    model = nn.Linear(3, 1)
    optimizer = Counting(list(model.parameters()), [torch.ones(2), {"x": torch.full((1,), value)}])
    step_of(model, None, optimizer)


def number_of(make: Callable[[float], Any], place: int = 0) -> Callable[[float], None]:
    """One of two optimizers of the same parameter, each with a number for it."""

    def program(value: float) -> None:
        model = nn.Linear(3, 1, bias=False)
        starts = [make(value if number == place else 3.0) for number in range(2)]
        optimizers = [Counting(list(model.parameters()), start) for start in starts]
        model(torch.ones(3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return program


def quantized(part: str) -> Callable[[float], None]:
    def program(value: float) -> None:
        model = nn.Linear(3, 1)
        held: Any = torch.zeros(3).as_subclass(Scaled)
        held._data, held._scale_inv = (
            torch.full((3,), value if name == part else 5.0) for name in ("_data", "_scale_inv")
        )
        recorder = record(model, SGD(model.parameters(), 0.1))
        recorder.state("own", {"held": held})
        with recorder.step():
            model(torch.ones(3)).sum().backward()

    return program


def after_those_it_holds(value: float) -> None:
    model = model_of()
    train(model, Holder(model, value))


def idle_optimizer(value: float) -> None:
    """Its weights change by hand, after the pass."""
    first, second = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    optimizer, idle = (SGD(each.parameters(), 0.1) for each in (first, second))
    first(torch.ones(3)).sum().backward()
    with torch.no_grad():
        second.weight.fill_(value)
    optimizer.step()
    idle.zero_grad()


def gradient_in(attribute: str) -> Callable[[float], None]:
    """As TransformerEngine's and Megatron's optimizers have it; weights are as they were."""

    def program(value: float) -> None:
        model = nn.Linear(3, 1, bias=False)
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.ones(3)).sum().backward()
        for param in model.parameters():
            setattr(param, attribute, torch.full_like(param, value))
            param.grad = None
        optimizer.step()

    return program


def imaginary_part(value: float) -> None:
    model = nn.Linear(3, 1)
    phase = torch.complex(torch.ones(2), torch.full((2,), value))
    model.register_parameter("phase", nn.Parameter(phase))
    step_of(model)


def element_of(dtype: torch.dtype) -> Callable[[float], None]:
    def program(value: float) -> None:
        held = torch.ones(2, 2, dtype=dtype).t()
        held[1, 0] += value
        model = Odd(held)
        step_of(model, torch.ones(2, 2, dtype=dtype).conj(), SGD(model.parameters(), 0.0))

    return program


def sparse(place: float = 1, factor: float = 1.0) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(embedding.weight)
    optimizer = SGD(embedding.parameters(), 0.0)
    step_of(embedding, torch.tensor([3, int(place)]), optimizer, factor)


def frozen_weight(value: float) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    model = nn.Sequential(first, second)
    optimizer = SGD(second.parameters(), 0.1)
    nn.init.constant_(first.bias, value)
    model(torch.zeros(3)).sum().backward()
    second.weight.grad = torch.ones(1, 3)  # not what the frozen one gives
    optimizer.step()


class Average(nn.Module):
    """Keeps a copy of a model, as a mean over steps does."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.held = copy.deepcopy(of)


class Traced(nn.Linear):
    """What torch.fx makes of it is another such module."""


def average(value: float, number: int = 1, places: tuple[int, int] = (-1, -1)) -> None:
    """Biases of copies change after the first step; torch.fx's own modules do not count."""
    model = model_of()
    averages = [Average(model) for _ in range(number)]
    root = Traced(3, 3)
    traced = torch.fx.symbolic_trace(root)
    for _ in range(2):
        step_of(model)
        for place, bias in zip(places, ("1.bias", "0.bias"), strict=True):
            nn.init.constant_(averages[place].held.get_parameter(bias), value)
    del root, traced


DIFFERENCES: dict[str, tuple[Callable[[float], None], set[str]]] = {
    "group": (numbers_of_a_group, {"optim:group0.lr", "optim:group0.of_a_schedule"}),
    "in a list": (number_in_a_list, {"optim:weight.count.1.x", "optim:bias.count.1.x"}),
    "number": (number_of(float), {"optim:weight.count"}),
    "of the second": (number_of(float, 1), {"optim:weight.count#2"}),
    "last digit": (number_of(lambda value: 1 + value * 2.0**-40), {"optim:weight.count"}),
    "NumPy float32": (number_of(np.float32), {"optim:weight.count"}),
    "NumPy int64": (number_of(np.int64), {"optim:weight.count"}),
    "quantized data": (quantized("_data"), {"own:held._data"}),
    "quantized scale": (quantized("_scale_inv"), {"own:held._scale_inv"}),
    "holder": (after_those_it_holds, {f"weights:{name}" for name in PARAMS}),
    "idle": (idle_optimizer, {"frozen:Linear1.weight"}),
    "imaginary part": (imaginary_part, {"weights:phase"}),
    "sparse place": (sparse, {"grads:weight.indices"}),
    "sparse value": (lambda value: sparse(factor=value), {"grads:weight.values"}),
    "frozen": (frozen_weight, {"frozen:0.bias"}),
} | {
    attribute: (gradient_in(attribute), {"grads:weight"})
    for attribute in ("main_grad", "decoupled_grad")
} | {
    str(dtype): (element_of(dtype), {"weights:value"})
    for dtype in (torch.complex64, torch.float64, torch.bfloat16, torch.float16)
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Equal programs have equal digests; one value more or less changes those that hold it."""
    program, expected = DIFFERENCES[name]
    first, again, other = pair(program, tmp_path, 1.0, 1.0, 2.0)
    assert not first.problems
    assert changed(first, again, 0) == set()
    assert changed(first, other, 0) == expected


def with_adam(**flags: Any) -> None:
    model = model_of()
    step_of(model, None, Adam(model.parameters(), **flags), 0.0)


def of_places(*places: int) -> None:
    step_of(nn.Sequential(nn.Embedding(4, 2, sparse=True)), torch.tensor(places))


def with_buffer(held: Tensor) -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("held", held)
    step_of(model)


WIDE, CONJUGATE = torch.arange(6.0).view(2, 3), torch.tensor([1 + 2j]).conj()


def sharded(*, by_torch: bool) -> None:
    model = nn.Linear(3, 2)
    if by_torch:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


SAME: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "foreach": (with_adam, lambda: with_adam(foreach=True)),
    "fused": (with_adam, lambda: with_adam(fused=True)),
    "for loops": (with_adam, lambda: with_adam(foreach=False)),
    "order of a sparse sum": (lambda: of_places(1, 2), lambda: of_places(2, 1)),
    "memory layout": (
        lambda: with_buffer(WIDE.t()), lambda: with_buffer(WIDE.t().contiguous())
    ),
    "lazy conjugation": (
        lambda: with_buffer(CONJUGATE), lambda: with_buffer(CONJUGATE.resolve_conj())
    ),
    "shards": (lambda: sharded(by_torch=False), lambda: sharded(by_torch=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_how_it_is_held_is_no_difference(name: str, tmp_path: Path) -> None:
    """The same values by another implementation, in another layout or as a shard."""
    first, second = pair(lambda program: program(), tmp_path, *SAME[name])
    for step in (-1, 0):
        assert changed(first, second, step) == set()
    assert first.start.tensors == second.start.tensors
    assert first.steps[0].grad_norm == second.steps[0].grad_norm


def test_state_appears_when_it_is_made(tmp_path: Path) -> None:
    """Learning rates are there before step 0, lazy state is not, and loaded state is."""

    def program(loads: bool) -> None:
        model = model_of()
        before = Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before.step()
        optimizer = Adam(model.parameters())
        if loads:
            optimizer.load_state_dict(before.state_dict())
        del before
        train(model, optimizer)

    lazy, loaded = pair(program, tmp_path, False, True)
    moments = {"0.bias.step", "0.bias.exp_avg", "0.bias.exp_avg_sq"}
    assert "group0.lr" in digests(lazy, "optim", -1)
    for records, step, expected in ((lazy, -1, set()), (lazy, 0, moments), (loaded, -1, moments)):
        held = digests(records, "optim", step).keys()
        assert {each for each in held if each.startswith("0.bias.")} == expected


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
    assert digests(records, "weights", 1).keys() == set(PARAMS)
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert digests(records, "buffers", 0).keys() == buffers
    assert digests(records, "buffers", 0) != digests(records, "buffers", -1)


def test_modules_that_no_optimizer_trains_are_a_group(tmp_path: Path) -> None:
    """A mean over steps is found by its class, twins by number; a change shows in the next step.

    Which of the twins is made first is no change; a tensor in the other one's place is.
    """
    first, other, turned, swapped = pair(
        lambda about: average(about[0], 2, about[1:]), tmp_path,
        (1.0, -1, -1), (2.0, -1, -1), (1.0, 0, 0), (1.0, 0, 1),
    )  # fmt: skip
    for step in (-1, 0, 1):
        held = digests(first, "others", step)  # this process may have left more modules
        for kind in ("Average", "Average#2"):
            assert {f"{kind}.held.{name}" for name in PARAMS} <= held.keys()
        assert not [name for name in held if name.startswith("Traced#")]
    assert changed(first, other, 0) == set()
    for records in (other, swapped):
        found = changed(first, records, 1)
        assert found
        assert {name.partition(".")[0].partition("#")[0] for name in found} == {"others:Average"}
    assert changed(first, turned, 1) == set()


def test_what_is_kept_from_the_collector_is_named(tmp_path: Path) -> None:
    """`gc.freeze` before the optimizer is made hides no name, buffer or other module."""

    def program(mean: float) -> None:
        model, twin = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(2, 2)
        gc.freeze()
        train(model, Adam(model.parameters()))
        nn.init.constant_(model.get_buffer("1.running_mean"), mean)
        nn.init.constant_(twin.bias, mean)
        train(model, Adam(model.parameters()))

    first, second = pair(program, tmp_path, 1.0, 2.0)
    assert changed(first, second, 1) == {"buffers:1.running_mean", "others:Linear.bias"}


def ending(how: str) -> None:
    model, twins = model_of(), [nn.Linear(2, 2), nn.Linear(2, 2)]
    train(model, Adam(model.parameters()), steps=2)
    with torch.no_grad():
        if how == "changed":
            nn.init.ones_(model.get_parameter("0.weight"))
            nn.init.ones_(twins[1].bias)
        elif how == "cast":
            model.half()
        elif how == "freed":
            model.get_parameter("0.weight").untyped_storage().resize_(0)
    if how == "failed":
        raise ZeroDivisionError


def test_the_state_after_the_last_step_is_recorded(tmp_path: Path) -> None:
    """As the process ends, though the program's variables are gone: what is what it was."""
    same, other, cast, freed = pair(ending, tmp_path, "", "changed", "cast", "freed")
    left = f"weights{AFTER}"
    assert digests(same, left, 1) == digests(same, "weights", 1)
    assert digests(same, f"optim{AFTER}", 1) == digests(same, "optim", 1)
    assert digests(same, left, 0) == {}
    ours, theirs = digests(same, left, 1), digests(other, left, 1)
    assert {name for name in ours if ours[name] != theirs[name]} == {"0.weight"}
    assert digests(same, f"others{AFTER}", 1) != digests(other, f"others{AFTER}", 1)
    assert changed(same, other, 1) == set()
    assert digests(cast, left, 1) == {}
    assert digests(freed, left, 1).keys() == {*PARAMS} - {"0.weight"}
    failed = recorded(lambda: ending("failed"), tmp_path / "failed", code=1)
    assert failed.start is not None
    assert left not in failed.start.tensors


@pytest.mark.parametrize(("to_none", "held"), [(True, set(PARAMS[2:])), (False, set(PARAMS))])
def test_no_gradient_is_not_a_gradient_of_zeros(
    to_none: bool, held: set[str], tmp_path: Path
) -> None:
    """A parameter without one is absent in that step, and back in the next."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            (model[1] if step == 1 else model)(torch.ones(3)).sum().backward()
            optimizer.step()

    records = recorded(program, tmp_path)
    seen = [digests(records, "grads", step).keys() for step in range(3)]
    assert seen == [set(PARAMS), held, set(PARAMS)]


def exchange_a_layer() -> None:
    model = model_of()
    train(model, SGD(model.parameters(), 0.1))
    model[1] = nn.Linear(3, 1)
    train(model, SGD(model.parameters(), 0.1), steps=2)


def exchange_the_optimizer(*, kept: bool) -> None:
    model = model_of()
    first = Adam(model.parameters())
    train(model, first)
    second = SGD(model.parameters(), 0.1)
    if not kept:
        del first
    train(model, second, steps=2)


def exchange_all(*, late: bool = False, kept: bool = False) -> None:
    """As a program does that goes on from a checkpoint, before it drops what it had or after.

    `kept`: somebody holds the model, as the graph of a loss holds one that FSDP2 shards.
    """

    def made() -> tuple[nn.Module, Adam]:
        model = model_of()
        model.__dict__["itself"] = model  # only the garbage collector frees it
        return model, Adam(model.parameters())

    model, optimizer = made()
    train(model, optimizer)
    held = [model] * kept
    if not late:
        del model, optimizer
    model, optimizer = made()
    train(model, optimizer, steps=2)
    assert len(held) == kept


@pytest.mark.parametrize(
    "program",
    [exchange_a_layer, lambda: exchange_all(late=False), lambda: exchange_all(late=True),
     lambda: exchange_all(kept=True),
     lambda: exchange_the_optimizer(kept=True), lambda: exchange_the_optimizer(kept=False)],
)  # fmt: skip
def test_what_takes_over_keeps_the_names(program: Callable[[], None], tmp_path: Path) -> None:
    """A layer, an optimizer or all of it that is exchanged in mid-training, whoever is kept."""
    records = recorded(program, tmp_path)
    assert len(records.steps) == 3
    assert not records.problems
    for step in range(3):
        assert digests(records, "weights", step).keys() == set(PARAMS)
        assert digests(records, "grads", step).keys() == set(PARAMS)
        assert digests(records, "frozen", step) == {}
    assert digests(records, "weights", 1) != digests(records, "weights", 2)


def test_who_is_replaced_and_held_is_compared_as_others_are(tmp_path: Path) -> None:
    """The teacher of a student of its class, once its own training is over."""

    def program(is_written: bool) -> None:
        teacher = model_of()
        train(teacher, Adam(teacher.parameters()))
        student = model_of()
        optimizer = Adam(student.parameters())
        for step in range(4):
            if is_written and step == 3:
                with torch.no_grad():
                    teacher.get_parameter("1.weight")[0, 0] += 1.0
            train(student, optimizer)

    first, second = pair(program, tmp_path, False, True)
    assert digests(first, "weights", 4) == digests(second, "weights", 4)
    ours, theirs = (digests(each, "others", 4) for each in (first, second))
    assert [name for name in ours if ours[name] != theirs[name]] == ["Sequential.1.weight"]


def test_the_initial_state_is_that_before_the_first_forward_pass(tmp_path: Path) -> None:
    """Data of step 0 in running means, and its random draws, are no difference before step 0."""

    def program(value: float) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
        step_of(model, value * torch.arange(9.0).view(3, 3))

    first, second = pair(program, tmp_path, 1.0, 2.0)
    assert first.initial == second.initial
    assert digests(first, "buffers", 0) != digests(second, "buffers", 0)
    assert digests(first, "rng", -1) != digests(first, "rng", 0)


def test_a_backward_pass_before_there_is_an_optimizer_is_no_training(tmp_path: Path) -> None:
    """A warm-up, as before a capture, changes no name, loss or state before step 0."""

    def program(is_warm: bool) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        if is_warm:
            state = torch.get_rng_state()
            model(torch.ones(2, 3)).sum().backward()
            model.zero_grad()
            torch.set_rng_state(state)
        train(model, SGD(model.parameters(), 0.1), steps=2)

    first, second = pair(program, tmp_path, False, True)
    assert first.initial == second.initial
    assert names(first, "weights")[0] == "0.weight"
    for one, other in zip(first.steps, second.steps, strict=True):
        assert (one.digests, one.microbatch_losses) == (other.digests, other.microbatch_losses)
    assert names(first, "weights") == names(second, "weights")


class Wrapper(nn.Module):
    """Holds a module as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", disable=True)


def checkpointed(model: Any) -> nn.Module:
    for place, part in enumerate(model):
        model[place] = checkpoint_wrapper(part)
    return model  # type: ignore[no-any-return]


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
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


def three_networks() -> None:
    first, second, third = Named(), Named(), nn.Linear(3, 1)
    optimizers = [SGD(each.parameters(), 0.1) for each in (first, second, third)]
    train(lambda x: third(second(first(x))), *optimizers)  # type: ignore[arg-type]


def in_the_optimizers_order() -> None:
    """Whatever the order in which networks were made."""
    second, first = Named(), nn.Linear(3, 3, bias=False)
    optimizer = SGD([*first.parameters(), *second.parameters()], 0.1)
    second(first(torch.ones(3))).sum().backward()
    optimizer.step()


def a_part_before_its_whole() -> None:
    part = Named()
    optimizer = SGD(part.parameters(), 0.1)
    whole = nn.Sequential(part, nn.Linear(3, 1))
    second = SGD(whole[1].parameters(), 0.1)
    train(whole, optimizer, second)


def tied() -> None:
    model = Named(tied=True)
    train(model, SGD(model.parameters(), 0.1, momentum=0.9))


def two_optimizers_of_one() -> None:
    model = nn.Linear(3, 1, bias=False)
    train(model, *(SGD(model.parameters(), 0.1, momentum=0.9) for _ in range(2)))


def trained_in_place_of_another() -> None:
    """As megatron-fsdp trains shards, each of which holds its parameter as `orig_param`."""
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


def of_no_module() -> None:
    bare = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizer = SGD(bare, 0.1)
    (bare[0] * bare[1]).sum().backward()
    optimizer.step()


NAMES: dict[str, tuple[Callable[[], None], str, str]] = {
    "three networks": (three_networks, "Named0.embed.weight Named0.head.weight Named1.embed.weight "
                       "Named1.head.weight Linear.weight Linear.bias", ""),
    "order": (in_the_optimizers_order, "Linear.weight Named.embed.weight Named.head.weight", ""),
    "part": (a_part_before_its_whole, "0.embed.weight 0.head.weight 1.weight 1.bias", ""),
    "tied": (tied, "embed.weight", "embed.weight.momentum_buffer"),
    "shared": (two_optimizers_of_one, "weight", "weight.momentum_buffer weight.momentum_buffer#2"),
    "in place": (trained_in_place_of_another, "0.weight 0.bias", ""),
    "bare": (of_no_module, "unnamed.0 unnamed.1", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tmp_path: Path) -> None:
    """Networks by class and number, parameters by their first place, state for each optimizer."""
    program, weights, state = NAMES[name]
    records = recorded(program, tmp_path)
    assert names(records, "weights") == tuple(weights.split())
    assert set(names(records, "grads")) == set(weights.split())
    assert names(records, "frozen") == ()
    tensors = [each for each in names(records, "optim") if "momentum_buffer" in each]
    assert tensors == state.split()
