"""Programs on the host graph: a replay gives eager's bits, a capture leaves no trace."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.device import Device
from fsdp_core.graph.host_graph import HostGraph

State = dict[str, torch.Tensor]
Program = Callable[[State], Any]


def fresh_state() -> State:
    """The static tensors of a program, the same bits each time."""
    generator = torch.Generator().manual_seed(3)
    state = {
        "x": torch.randn(4, 6, generator=generator),
        "y": torch.randn(4, 6, generator=generator),
        "bf16": torch.randn(6, 6, generator=generator).bfloat16(),
        "index": torch.tensor([3, 0, 2], dtype=torch.int64),
        "empty": torch.zeros(0, 6),
        "out": torch.zeros(4, 6),
        "wide": torch.randn(8, 12, generator=generator),
        "count": torch.zeros((), dtype=torch.int64),
    }
    state["w"] = torch.randn(6, 6, generator=generator).requires_grad_()
    state["w"].grad = torch.zeros(6, 6)
    return state


def in_place(s: State) -> Any:
    s["x"].mul_(0.5).add_(s["y"], alpha=2)
    s["count"] += 1
    return s["x"].sum()


def out_argument(s: State) -> Any:
    torch.mul(s["x"], s["y"], out=s["out"])
    torch.cumsum(s["x"], 0, out=s["wide"][:4, ::2])
    return s["out"] + 1


def views(s: State) -> Any:
    s["wide"][2:6, 1:7].add_(s["x"])
    s["wide"].t()[3].zero_()
    first, second = s["wide"].chunk(2)
    return (first * second).view(2, -1), s["wide"].unfold(0, 2, 2).sum(-1)


def non_contiguous(s: State) -> Any:
    t = s["x"].t() * 3
    u = torch.empty_strided((6, 4), (1, 6)).copy_(t)
    return u, (t + u.t().t()).as_strided((3, 2), (2, 5), 1), s["wide"][::2, ::3].clone()


def foreach_lists(s: State) -> Any:
    torch._foreach_mul_([s["x"], s["y"]], 0.9)
    sums = torch._foreach_add([s["x"], s["wide"]], 1.0)
    norms = torch._foreach_norm(sums)
    torch._foreach_addcdiv_([s["out"]], [s["x"]], [s["y"].abs() + 1], 0.1)
    return sums, norms


def several_outputs(s: State) -> Any:
    values, indices = s["x"].topk(3, dim=1)
    variance, mean = torch.var_mean(s["wide"], dim=0)
    split = torch.split(s["wide"] * 2, [3, 5])
    return values, indices, variance, mean, split, torch.stack(torch.unbind(s["y"] + 1))


def zero_size(s: State) -> Any:
    s["empty"].add_(1)
    joined = torch.cat([s["empty"], s["x"]])
    return joined, s["empty"] @ s["w"].detach(), torch.zeros(3, 0).sum(1)


def indexing(s: State) -> Any:
    s["out"].index_add_(0, s["index"], s["x"][:3])
    s["out"].scatter_(1, s["index"][None].expand(4, 3), 7.0)
    return (
        s["x"][s["index"]],
        F.embedding(s["index"], s["wide"]),
        s["x"].gather(1, s["index"][None]),
    )


def mixed_dtypes(s: State) -> Any:
    low = s["x"].bfloat16() @ s["bf16"]
    return low, low.float().softmax(-1), s["x"].double().norm(), (s["x"] > 0).to(torch.int32).sum()


def complex_numbers(s: State) -> Any:
    z = torch.complex(s["x"], s["y"])
    return torch.view_as_real(z.conj() * z + z.imag), z.real.clone(), z.conj().imag + 1


def random_draws(s: State) -> Any:
    s["x"].add_(torch.randn(4, 6))
    return F.dropout(s["y"], 0.3), torch.rand(5), torch.randint(0, 9, (4,)), s["x"].bernoulli(0.5)


def random_in_place(s: State) -> Any:
    s["out"].normal_().clamp_(-1, 1)
    s["wide"].uniform_()
    return F.dropout(s["out"], 0.5, inplace=True)


def training(s: State) -> Any:
    loss = F.dropout((s["x"] @ s["w"]).relu(), 0.4).square().mean()
    loss.backward()
    assert s["w"].grad is not None
    with torch.no_grad():
        s["w"].sub_(s["w"].grad, alpha=0.1)
        s["w"].grad.zero_()
    return loss.detach()


def attention(s: State) -> Any:
    q = s["x"].view(1, 2, 4, 3)
    mixed = F.scaled_dot_product_attention(q, q * 0.5, q + 1, is_causal=True)
    return mixed, F.layer_norm(mixed, (3,)), F.cross_entropy(s["x"], s["index"].repeat(2)[:4] % 6)


def chained_temporaries(s: State) -> Any:
    h = s["x"]
    for _ in range(12):
        h = torch.tanh(h @ s["bf16"].float()) + s["y"]
    return h


PROGRAMS: list[Program] = [
    in_place, out_argument, views, non_contiguous, foreach_lists, several_outputs, zero_size,
    indexing, mixed_dtypes, complex_numbers, random_draws, random_in_place, training, attention,
    chained_temporaries,
]  # fmt: skip
REPLAYS = 4


def bits(value: Any) -> Any:
    """Everything in `value`, copied, as bytes: NaN, -0.0 and layout of values count."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return tuple(value.shape), value.dtype, plain.view(-1).view(torch.uint8).tolist()
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    assert value is None
    return None


def snapshot(state: State) -> Any:
    """Bits of all static tensors, their gradients and the generator."""
    grads = [tensor.grad for tensor in state.values()]
    return bits([*state.values(), *grads, torch.get_rng_state()])


def run_eager(program: Program, times: int) -> list[Any]:
    """Results and state after each of `times` eager calls."""
    torch.manual_seed(11)
    state, seen = fresh_state(), []
    for _ in range(times):
        result = program(state)
        seen.append((bits(result), snapshot(state)))
    return seen


@pytest.mark.parametrize("counting", [False, True], ids=["plain", "counted"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_replay_is_bit_identical_to_eager(program: Program, counting: bool) -> None:
    """Results, static tensors and generator equal eager's after each of several replays."""
    expected = run_eager(program, REPLAYS)
    device = Device("cpu")
    if counting:
        with device.counting_memory():
            check_replays(device, program, expected)
            assert device.peak_bytes() > 0
    else:
        check_replays(device, program, expected)


def check_replays(device: Device, program: Program, expected: list[Any]) -> None:
    torch.manual_seed(11)
    state = fresh_state()
    before = snapshot(state)
    graph = HostGraph(device)
    result = graph.capture(lambda: program(state))
    assert snapshot(state) == before, "the capture left a trace"
    for step in range(REPLAYS):
        graph.replay()
        assert (bits(result), snapshot(state)) == expected[step], step


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_capture_that_raises_leaves_no_trace(program: Program) -> None:
    """An exception at the end of the function undoes all that it wrote, and passes through."""
    state = fresh_state()
    before = snapshot(state)

    def function() -> None:
        program(state)
        raise KeyError("mine")

    device = Device("cpu")
    with pytest.raises(KeyError, match="mine"):
        HostGraph(device).capture(function)
    assert snapshot(state) == before
    assert device.storage_watchers == ()


def test_module_with_optimizer_over_many_replays() -> None:
    """A captured training step with dropout and momentum stays on eager's bits for 20 replays."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
        return model, optimizer, torch.zeros(8, 6)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def inputs(number: int) -> torch.Tensor:
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))

    losses = []
    for graphed in (False, True):
        model, optimizer, x = build()
        graph, result = HostGraph(Device("cpu")), torch.zeros(())
        seen = []
        for number in range(23):
            x.copy_(inputs(number))
            if graphed and number == 3:
                result = graph.capture(functools.partial(step, model, optimizer, x))
            if graphed and number >= 3:
                graph.replay()
            else:
                result = step(model, optimizer, x)
            seen.append(bits(result))
        losses.append((seen, bits(list(model.parameters()))))
    assert losses[0] == losses[1]
