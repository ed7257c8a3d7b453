"""What torch FSDP2's interface has beside wrapping, on two ranks; docs/ARCHITECTURE.md has the
differences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

from fsdp_core.dispatch import IS_2_13
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from tests.dist.fsdp_sides import WIDTH, Api, api_of, loss_of, net, rows, shard
from tests.dist.rank_pool import RankPool
from tests.dist.test_fsdp_regressions import whole_mesh


def _wrapped(**options: Any) -> FSDPModule:
    return cast("FSDPModule", shard(api_of("ours"), net(), whole_mesh(), **options))


def _grads(model: Any) -> list[torch.Tensor]:
    model(rows(1)).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def hooks_change_gradients() -> None:
    """Each unit's hook may change its whole gradient; on the stream that was asked for."""
    expected = [grad * 3 for grad in _grads(_wrapped())]
    for stream in (None, torch.cpu.Stream()):
        model: Any = _wrapped()
        seen: set[Any] = set()
        due_on = stream or torch.cpu.current_stream()

        def times_three(total: torch.Tensor, seen: set[Any] = seen) -> None:
            seen.add(torch.cpu.current_stream())
            total.mul_(3)

        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_all_reduce_hook(times_three, stream=stream)
        for grad, due in zip(_grads(model), expected, strict=True):
            torch.testing.assert_close(grad, due)
        assert seen == {due_on}


def frozen_numbers_travel() -> None:
    """fp8 and integer parameters that are not trained arrive as they are."""
    model: Any = nn.Linear(4, 4)
    tables = torch.arange(-3, 3).reshape(6, 1), torch.arange(5.0).to(torch.float8_e4m3fn)
    model.numbers, model.small = (nn.Parameter(t, requires_grad=False) for t in tables)
    fully_shard(model)
    model.unshard()
    assert torch.equal(model.numbers, tables[0])
    assert torch.equal(model.small.view(torch.uint8), tables[1].view(torch.uint8))
    model.reshard()
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None


def numbers_of_ranks() -> None:
    """A number releases as a bool does; one that does not fit is refused."""
    for given, kept in ((1, True), (2, False)):
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4)), reshard_after_forward=given)
        model(torch.ones(1, 4))
        assert hasattr(model[0].weight, "full_tensor") != kept
    with pytest.raises(ValueError, match="a divisor of 2 ranks, got 3"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=3)


def a_parameter_is_set_on_meta() -> None:
    """One that the user sets in place of one on the meta device, of another layout, is taken."""
    model: Any = nn.Sequential(nn.Linear(3, 3)).to("meta")
    model.register_parameter("scale", nn.Parameter(torch.empty(3, device="meta")))
    fully_shard(model[0])
    fully_shard(model)
    model[0].to_empty(device="cpu")
    nn.init.constant_(model[0].weight, 2.0)
    nn.init.zeros_(model[0].bias)
    with torch.no_grad():
        model.scale = nn.Parameter(torch.linalg.norm(model[0].weight, dim=1))
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 3), 6.0))
    model.unshard()
    torch.testing.assert_close(model.scale.detach(), torch.full((3,), 12.0).sqrt())


def refuses_cuts() -> None:
    """Another dimension that the ranks do not divide, and what is no number of buffers."""
    with pytest.raises(NotImplementedError, match=r"a dim of .*weight .* that 2 ranks"):
        _wrapped(shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(TypeError, match=r"a number of buffers, got 1\.5"):
        _wrapped().set_reduce_scatter_max_input_buffers(cast("Any", 1.5))


def stages_share_streams() -> None:
    """Roots that share streams, and wait for an event of the user's, compute the same bits."""
    expected, first, second = _grads(_wrapped()), _wrapped(), _wrapped()
    share_comm_ctx([first, second])
    assert first.fsdp_schedule.gather_stream is second.fsdp_schedule.gather_stream
    stream: Any = torch.cpu.current_stream()
    second.set_post_optim_event(stream.record_event())
    second.set_reduce_scatter_max_input_buffers(1)
    second.set_force_sum_reduction_for_comms(True)
    assert all(map(torch.equal, _grads(second), expected))
    with pytest.raises(ValueError, match="1 to 2 buffers"):
        second.set_reduce_scatter_max_input_buffers(3)


def gathers_under_a_transform() -> None:
    """A unit that is gathered inside `torch.func.jvp` first is gathered as anywhere else."""
    expected, model, x = cast("Any", _wrapped())(rows(1)), cast("Any", _wrapped()), torch.ones(3)
    out, tangent = cast("Any", torch.func.jvp)(lambda _: model(rows(1)), (x,), (x,))
    assert torch.equal(out, expected)
    assert not tangent.any()


def scales(api: Api) -> list[torch.Tensor]:
    """A GradScaler skips a step of all ranks if one rank has a number that is not finite."""
    model: Any = shard(api, net(), whole_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(3):
        scaler.scale(loss_of(model(rows(step)))).backward()
        if step == 1 and dist.get_rank() == 1:
            model.head.weight.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [64.0, 32.0, 32.0]
    return [*model.parameters()]


def converts(api: Api) -> list[torch.Tensor]:
    """A wrapped model can be given another dtype; its optimizer goes on."""
    model: Any = shard(api, net(), whole_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    for step in range(2):
        loss_of(model(rows(step).double())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters()]


@contextmanager
def _swapping() -> Iterator[None]:
    """Within, `Module.to` and `load_state_dict` swap parameters instead of setting their data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def converts_by_swaps(api: Api) -> list[torch.Tensor]:
    """As `converts`."""
    with _swapping():
        return converts(api)


def differentiates_inputs(api: Api) -> list[torch.Tensor]:
    """`torch.autograd.grad` of inputs, leaves or not; training goes on."""
    model, x = cast("Any", shard(api, net(), whole_mesh())), rows(1).requires_grad_()
    hidden = x * 2
    found = torch.autograd.grad(model(hidden).sum(), [x, hidden])
    found += torch.autograd.grad(model(x).sum(), x)
    return [*found, *_grads(model)]


def penalises_weights(api: Api) -> list[torch.Tensor]:
    """A loss of the blocks' weights at rest, which are whole to no module between the passes."""
    model: Any = shard(api, net(), whole_mesh())
    found = []
    for step in range(3):
        loss = loss_of(model(rows(step)))
        for block in model.blocks:
            for parameter in block.parameters():
                loss = loss + parameter.full_tensor().square().sum()
        loss.backward()
        found.append(loss.detach())
    return [*found, *(p.grad for p in model.parameters())]


def clips_rows(api: Api) -> list[torch.Tensor]:
    """Gradients are centred and clipped a row, weights bounded, as users' loops do."""
    model: Any = shard(api, net(), whole_mesh())
    loss_of(model(rows(1))).backward()
    for parameter in (p for p in model.parameters() if p.ndim > 1):
        grad, weight = parameter.grad, parameter.detach()
        grad.sub_(grad.mean(dim=1, keepdim=True))
        most = weight.norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
        norms = grad.norm(dim=1, keepdim=True)
        grad.copy_(torch.where(norms > most, grad * (most / norms), grad))
        weight.div_(weight.std(0))
    return [*(p.grad for p in model.parameters()), *model.parameters()]


def trains_complex(api: Api) -> list[torch.Tensor]:
    """Complex parameters are trained."""
    model: Any = nn.Module()
    model.weight = nn.Parameter(torch.view_as_complex(rows(1, 0)[:, :4].reshape(4, 2, 2).clone()))
    model.forward = lambda x: torch.view_as_real(x @ model.weight)
    api.fully_shard(model, mesh=whole_mesh())
    model(rows(2)[:2, :4].to(torch.complex64)).square().sum().backward()
    return [model.weight, model.weight.grad]


def replicates_around(api: Api) -> list[torch.Tensor]:
    """Torch's composable `replicate` leaves units inside alone."""
    model: Any = nn.Sequential(net(), nn.Linear(3, 3))
    nn.init.eye_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    shard(api, model[0], whole_mesh())
    replicate(model)
    loss_of(model(rows(1))).backward()
    return [parameter.grad for parameter in model.parameters()]


def loads_whole_states(api: Api) -> list[torch.Tensor]:
    """A new optimizer goes on with the whole state of another."""
    models = [cast("Any", shard(api, net(), whole_mesh())) for _ in range(2)]
    first, second = (torch.optim.Adam(model.parameters(), lr=0.1) for model in models)
    whole, found = StateDictOptions(full_state_dict=True), []
    for model, optimizer in zip(models, (first, second), strict=True):
        loss_of(model(rows(1))).backward()
        if optimizer is second:
            states = get_optimizer_state_dict(models[0], first, options=whole)
            optimizer.zero_grad()
            set_optimizer_state_dict(model, optimizer, states, options=whole)
            loss_of(model(rows(2))).backward()
        optimizer.step()
        found += [*model.parameters()]
    return found


def cuts_other_dims(api: Api) -> list[torch.Tensor]:
    """Columns are cut where they are even: parameters, gradients, states, loading and saving."""

    def even(parameter: nn.Parameter) -> Shard | None:
        return Shard(parameter.ndim - 1) if parameter.shape[-1] % 2 == 0 else None

    models = [
        cast("Any", shard(api, net(width=4), whole_mesh(), shard_placement_fn=even))
        for _ in range(2)
    ]
    model, other = models
    assert [p.placements[0].dim for p in model.parameters()].count(1) == 5
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.1), []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        found += [p.grad.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight * 3)
    other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    whole = StateDictOptions(full_state_dict=True)
    states: Any = get_optimizer_state_dict(model, optimizer, options=whole)
    found += [state["exp_avg"] for state in states["state"].values()]
    found += [p.norm().full_tensor() for p in model.parameters()]
    return [*found, *model.parameters(), *other.parameters()]


class Halves(torch.Tensor):
    """A float32 weight that travels as two bfloat16 tensors, its rows padded."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Halves":
        options: Any = {"dtype": held.dtype, "device": held.device, "strides": held.stride()}
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, **options)
        self.held = held
        return self

    held: torch.Tensor

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert (mesh.size(), size[1], stride[1], module.bias.dim()) == (2, WIDTH, 1, 1)
        padded = self.held.new_zeros(-(-size[0] // 2), WIDTH)
        padded[: len(self.held)] = self.held
        high = padded.bfloat16()
        return (high, (padded - high).bfloat16()), policy.param_dtype

    def fsdp_post_all_gather(
        self, halves: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata is None
        whole = (halves[0].float() + halves[1].float()).to(dtype)
        if out is None:
            return whole, (*halves, whole)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            return out.copy_(whole[: len(out)])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def gathers_in_its_own_form(api: Api) -> list[torch.Tensor]:
    """Weights and gradients of steps, with weights released between forward and backward or not."""
    found: list[Any] = []
    mesh = whole_mesh()
    if mesh.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for keeps in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))
        model[0].weight = nn.Parameter(Halves(model[0].weight.detach()))
        model[0].weight.mark = "kept"
        api.fully_shard(model[0], mesh=mesh, reshard_after_forward=not keeps)
        api.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                loss = loss_of(model(rows(2 * step + part)))
                loss.backward()
                found.append(loss.detach())
            found += [p.grad.full_tensor().clone() for p in model.parameters()]
            optimizer.step()
        whole = [p.detach().full_tensor() for p in model.parameters()]
        found += [getattr(weight, "held", weight) for weight in whole]
    return found


def as_torch(program: Callable[[Api], list[Any]]) -> None:
    """The same bits as with torch's `fully_shard`, but for products of transposed weights."""
    rounds = 1e-6 if program is cuts_other_dims else 0.0
    sides = [program(api_of(side)) for side in ("torch", "ours")]
    for pair in zip(*sides, strict=True):
        due, got = (t.full_tensor() if hasattr(t, "placements") else t for t in pair)
        torch.testing.assert_close(got, due, rtol=rounds, atol=rounds)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            clips_rows,
            marks=pytest.mark.skipif(
                not IS_2_13, reason="a DTensor comes before ours in an operator"
            ),
        ),
        converts,
        converts_by_swaps,
        cuts_other_dims,
        differentiates_inputs,
        gathers_in_its_own_form,
        loads_whole_states,
        penalises_weights,
        replicates_around,
        scales,
        trains_complex,
    ],
)
def test_as_torch(warm_ranks: RankPool, program: Any) -> None:
    """See each program."""
    warm_ranks.run(as_torch, program, world_size=2, timeout_s=60.0)


def test_own_forms_on_two_axes(warm_ranks: RankPool) -> None:
    """Weights are gathered over the inner axis alone."""
    warm_ranks.run(as_torch, gathers_in_its_own_form, world_size=4, timeout_s=60.0)


def refuses_replaced_parameters() -> None:
    """A parameter that was replaced, dropped or swapped for a call is named, not put back."""
    replace: dict[str, Callable[[Any], Any]] = {
        "replaced": lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(3, 5))),
        "dropped": lambda m: setattr(m.head, "bias", None),
        "swapped": lambda m: torch.func.functional_call(
            m, {"head.bias": torch.ones(3)}, (rows(0),)
        ),
    }
    for change in replace.values():
        model = _wrapped()
        with pytest.raises(RuntimeError, match=r"Expected head.* to be the parameter that"):
            cast("Any", change(model) or model)(rows(0))


def tied_parameters_are_assigned() -> None:
    """Of a parameter with two names both are assigned, one after the other; it stays one."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)).to("meta")
    model[1].weight = model[0].weight
    fully_shard(model)
    mesh, ones = whole_mesh(), {name: torch.ones(p.shape) for name, p in model.state_dict().items()}
    given = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in ones.items()}
    model.load_state_dict(given, assign=True)
    assert model[1].weight is model[0].weight
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 3), 12.0))


def trains_after_a_load_by_swaps() -> None:
    """An optimizer's step is seen that raises no version counter, as kernels given addresses do."""
    lowered = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = fully_shard(nn.Linear(2, 2, bias=False), strategy="optim", mp_policy=lowered)
    optimizer, weight = torch.optim.SGD(model.parameters()), model.weight
    with _swapping():
        model.load_state_dict({"weight": torch.ones_like(weight)})
    assert model(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    weight.to_local().detach().data.fill_(2.0)
    optimizer.step()
    assert model(torch.ones(1, 2)).tolist() == [[4.0, 4.0]]


def refuses_second_derivatives() -> None:
    """They would need weights that are released, and gradients that are not reduced."""
    model, x = cast("Any", _wrapped()), rows(1).requires_grad_()
    with pytest.raises(NotImplementedError, match="create_graph=False"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="create_graph=False"):
        model(x).square().sum().backward(create_graph=True)
    assert len(_grads(model)) == len([*model.parameters()])


def refuses_sparse_gradients() -> None:
    """By the name of the parameter."""
    model: Any = fully_shard(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(NotImplementedError, match=r"dense gradient of weight, .* sparse=True"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize(
    "program",
    [
        refuses_replaced_parameters,
        refuses_sparse_gradients,
        tied_parameters_are_assigned,
        trains_after_a_load_by_swaps,
        refuses_second_derivatives,
        a_parameter_is_set_on_meta,
        gathers_under_a_transform,
        refuses_cuts,
        hooks_change_gradients,
        frozen_numbers_travel,
        numbers_of_ranks,
        stages_share_streams,
    ],
)
def test_interface(warm_ranks: RankPool, program: Any) -> None:
    """See each program."""
    warm_ranks.run(program, world_size=2, timeout_s=60.0)


def one_rank_is_silent() -> None:
    with CommDebugMode() as seen:
        _grads(_wrapped())
    assert seen.get_total_counts() == 0


def test_one_rank_issues_no_collective(warm_ranks: RankPool) -> None:
    """A world of one rank gathers and reduces by copies."""
    warm_ranks.run(one_rank_is_silent, world_size=1, timeout_s=60.0)
