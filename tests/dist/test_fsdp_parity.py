"""The same program on torch's FSDP2 and on ours gives the same results, to the bit.

A third side, `plain`, averages whole gradients by hand, so that two equal mistakes do not pass.
With one or two ranks an axis every sum has one order and every division is by a power of two, so
bits are due; elsewhere each tolerance is derived where it is used.

torch's FSDP2 runs on CPU ranks over gloo but for `ReduceOp.PREMUL_SUM`, which a divide factor other
than the number of ranks needs unless sums are forced (`set_force_sum_reduction_for_comms`).
"""

import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from fsdp_core.dispatch import IS_2_13
from tests.dist import fsdp_parameter_programs, fsdp_programs
from tests.dist.fsdp_programs import OPTIMIZERS
from tests.dist.fsdp_sides import differences, loss_of, net, rows, run_sides, within
from tests.dist.rank_pool import RankPool

EPS = torch.finfo(torch.float32).eps
SIDES = ("plain", "torch", "ours")
TIMEOUT_S = 30.0


def answers(
    ranks: RankPool, program: str, shape: tuple[int, ...], sides: tuple[str, ...], **options: Any
) -> list[dict[str, Any]]:
    """What each side answered, one dict a rank."""
    homes = (fsdp_programs, fsdp_parameter_programs)
    home = next(module for module in homes if hasattr(module, program))
    found = ranks.run(
        run_sides,
        home.__name__,
        program,
        sides,
        shape,
        options,
        world_size=int(torch.tensor(shape).prod()),
        timeout_s=TIMEOUT_S,
    )
    return cast("list[dict[str, Any]]", found)


def check(
    ranks: RankPool,
    program: str,
    shape: tuple[int, ...] = (2,),
    *,
    sides: tuple[str, ...] = SIDES,
    same: Callable[[torch.Tensor, torch.Tensor], bool] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Every side agrees with the first, which did not raise; returns the answers."""
    found = answers(ranks, program, shape, sides, **options)
    for number, rank in enumerate(found):
        assert "raised" not in rank[sides[0]], rank[sides[0]]
        for side in sides[1:]:
            if "raised" in rank[side]:
                pytest.fail(f"rank {number}, {side} raised {rank[side]['raised']}")
            wrong = differences(rank[sides[0]], rank[side], same=same)
            assert not wrong, f"rank {number}, {side} against {sides[0]}:\n" + "\n".join(wrong)
    return found


def each(program: str, **options: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """The program with every choice of its options."""
    choices = itertools.product(*options.values())
    return [(program, dict(zip(options, chosen, strict=True))) for chosen in choices]


BOTH = [False, True]
PROGRAMS = [
    # Losses, gradients, weights, whatever is kept, on a mesh of one or two axes.
    *each("steps", shape=[(1,), (2,), (2, 2)], num_steps=[5]),
    *each("steps", shape=[(1,), (2,), (2, 2)], num_steps=[5], reshard_after_forward=BOTH),
    # Any torch optimizer over `model.parameters()`, on whole rows, is the whole one in pieces.
    *each("steps", optimizer=["adamw", "adamw_foreach", "adagrad"]),
    # Units in units, a unit of several modules.
    *each("nested"), *each("listed"),
    # Settings of the schedule change no result; the user's divisor is that of the ranks.
    *each("setters", what=["reshard_after_forward", "reshard_after_backward", "prefetch",
                           "unshard_in_backward", "all_reduce"]),
    *each("divide_factor", factor=[1.0, 2.0, 8.0]),
    *each("by_hand"), *each("forward_method"), *each("zeroing", set_to_none=BOTH),
    *each("checkpointed", where=["units", "inside", "model"], reentrant=BOTH),
    # Units that run not at all, twice, are gone back through twice, or in part: as in torch's, a
    # parameter that no backward reached has gradient None.
    *each("skipped"), *each("run_twice"), *each("backward_twice"),
    *each("two_forwards", order=["first", "last", "together"]),
    # Passes without gradients leave training as it was, also between forward and backward.
    *each("evaluation", when=["between", "backward"]),
    # Parameters of fewer rows than ranks, or of rows that do not divide; some that do not train.
    *each("awkward", kind=["one_row", "one_element", "column", "many_dims"]),
    *each("frozen", what=["mixed", "unit", "first", "root", "thawed"]),
    *each("ignored"), *each("names"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "options"), PROGRAMS, ids=lambda v: v if isinstance(v, str) else str(v)
)
def test_programs(warm_ranks: RankPool, program: str, options: dict[str, Any]) -> None:
    """Every side gives the same, to the bit."""
    check(warm_ranks, program, **options)


def reference(world_size: int, num_steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """One process, float64, whole batches: mean loss and, a parameter, gradient and magnitude.

    The magnitude is the mean over the ranks' shares of the gradient's absolute values.
    """
    model = net().double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    losses: list[float] = []
    grads: list[dict[str, Any]] = []
    for step in range(num_steps):
        shares = []
        for rank in range(world_size):
            optimizer.zero_grad()
            loss = model(rows_of(step, rank)).square().mean()
            loss.backward()
            shares.append({n: cast("Any", p.grad).clone() for n, p in model.named_parameters()})
        optimizer.zero_grad()
        batch = torch.cat([rows_of(step, rank) for rank in range(world_size)])
        total = model(batch).square().mean()
        total.backward()
        losses.append(total.item())
        grads.append({})
        for name, parameter in model.named_parameters():
            magnitude = sum(share[name].abs() for share in shares) / world_size
            grads[-1][name] = (cast("Any", parameter.grad).clone(), magnitude)
        optimizer.step()
    return losses, grads


def rows_of(step: int, rank: int) -> torch.Tensor:
    return rows(step, rank).double()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_single_process(warm_ranks: RankPool, world_size: int) -> None:
    """Five steps are those of one process on the whole batch in float64, up to rounding.

    A gradient here is a chain of five products and sums of at most 7 terms on each rank, then a sum
    over the ranks and a division: under 64 roundings. Each step adds as many to the weights, whose
    error a step of learning rate 0.1 on a loss of curvature around 1 does not amplify.
    """
    losses, grads = reference(world_size, 5)
    found = answers(warm_ranks, "steps", (world_size,), SIDES, num_steps=5)
    for side in SIDES:
        assert "raised" not in found[0][side], found[0][side]
        for step in range(5):
            bound = 64 * EPS * (step + 1)
            mean = sum(rank[side]["losses"][step].item() for rank in found) / world_size
            assert abs(mean - losses[step]) <= bound * losses[step], (side, step)
            for name, (grad, magnitude) in grads[step].items():
                far = (found[0][side]["grads"][step][name].double() - grad).abs().max()
                assert far <= bound * magnitude.max(), (side, step, name, far)


def test_three_ranks(warm_ranks: RankPool) -> None:
    """Thirds: sums have orders and a division rounds, so sides agree up to two roundings each.

    The first gradients differ by under 2 (n - 1 sums and a division) eps of the largest addend,
    n = 3, so under 1e-6 of values under 2; three steps of rate 0.1 do not amplify it.
    """
    check(warm_ranks, "steps", (3,), same=within(4 * 3 * EPS))


def test_fused_optimizer(warm_ranks: RankPool) -> None:
    """Fused AdamW: its vector lanes round unlike its tail, so pieces differ by a few roundings.

    Weights are under 2, an update is under 0.01, so a weight is off by one unit in its last place
    and one a step.
    """
    check(warm_ranks, "steps", optimizer="adamw_fused", same=within(4 * 2 * EPS))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_recovery(warm_ranks: RankPool, where: str, reset: bool) -> None:
    """After a step that raised and `zero_grad`, training goes on as if that step had not been.

    torch's FSDP2 keeps gradients of the failed backward on unsharded parameters, even past
    `reset_iter_state`, and adds them to the next step's: it is no reference there.
    """
    sides = SIDES if where == "forward" else ("plain", "ours")
    check(warm_ranks, "recovery", sides=sides, where=where, reset=reset)


@pytest.mark.parametrize("kind", ["one_row", "scalar"])
@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach"])
def test_empty_pieces(warm_ranks: RankPool, kind: str, optimizer: str) -> None:
    """Optimizers over ranks that hold no row of a parameter; tolerance as for any fused one."""
    sides = SIDES if kind == "one_row" else ("plain", "ours")
    bound = within(4 * 2 * EPS)
    check(warm_ranks, "awkward", sides=sides, same=bound, kind=kind, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["scalar", "transposed", "empty", "double", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_torch_refuses(warm_ranks: RankPool, kind: str, world_size: int) -> None:
    """Parameters of no dim, not contiguous, without elements, and of several dtypes in a unit."""
    found = check(warm_ranks, "awkward", (world_size,), sides=("plain", "ours"), kind=kind)
    assert found[0]["ours"]["extra"]["buffers"] == [["calls", False], ["mean", False]]


def test_torch_refuses_them(warm_ranks: RankPool) -> None:
    """The kinds that the test before leaves torch out of are those that its FSDP2 refuses."""
    for kind in ("scalar", "transposed", "empty", "double", "bfloat16"):
        assert "raised" in answers(warm_ranks, "awkward", (1,), ("torch",), kind=kind)[0]["torch"]


@pytest.mark.parametrize("inner", [False, True])
def test_tied(warm_ranks: RankPool, inner: bool) -> None:
    """One parameter under two names: one object still, one name, gradients of both uses."""
    found = check(warm_ranks, "tied", inner=inner)
    assert found[0]["ours"]["extra"]["is one"]


POLICIES: list[dict[str, Any]] = [
    {"param_dtype": "bfloat16"},
    {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    {"param_dtype": "bfloat16", "output_dtype": "float32"},
    {"param_dtype": "bfloat16", "cast_forward_inputs": False},
    {"reduce_dtype": "bfloat16"},
    {"param_dtype": "float16", "reduce_dtype": "float32", "output_dtype": "float64"},
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(map(str, p.values())))
@pytest.mark.parametrize("on_block", [False, True])
def test_precision(warm_ranks: RankPool, policy: dict[str, Any], on_block: bool) -> None:
    """Dtypes met in forward, of outputs, at rest and of gradients, and every value's bits."""
    if on_block and "cast_forward_inputs" in policy:
        policy = {**policy, "param_dtype": None}  # a block of bf16 must be fed bf16
    found = check(warm_ranks, "precision", sides=("torch", "ours"), on_block=on_block, **policy)
    ours = found[0]["ours"]
    assert set(ours["rest"]) == {"torch.float32"}
    assert {g.dtype for g in ours["grads"][0].values()} == {torch.float32}
    if not on_block:  # the weight looked at is the block's otherwise, and at rest
        computed = policy.get("param_dtype") or "float32"
        assert all(line.endswith(f"weight torch.{computed}") for line in ours["seen"])


@pytest.mark.parametrize("frozen", [False, True])
def test_recomputed_twice(warm_ranks: RankPool, frozen: bool) -> None:
    """Each pass inside the pass brings its gradients, which add up in another order; torch 2.13
    has others.
    """
    bound = within(8 * EPS)
    check(warm_ranks, "recomputed_twice", sides=("plain", "ours"), same=bound, frozen=frozen)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    ("shape", "reduce"),
    [((2,), "float32"), ((2,), "float16"), ((2, 2), "float32"), ((2, 2), "float64")],
)
def test_hooked(warm_ranks: RankPool, shape: tuple[int, ...], summed: bool, reduce: str) -> None:
    """An all-reduce hook sees what torch's sees."""
    check(warm_ranks, "hooked", shape, sides=("torch", "ours"), summed=summed, reduce=reduce)


def test_large(warm_ranks: RankPool) -> None:
    """A sum in float16 does not overflow where torch's does not."""
    check(warm_ranks, "large")


def test_loss_is_a_number_that_falls(warm_ranks: RankPool) -> None:
    """The programs train: a loss that stood still would make agreement cheap."""
    seen = answers(warm_ranks, "steps", (2,), ("plain",), num_steps=5)[0]["plain"]["losses"]
    assert loss_of(torch.ones(2)).item() == 1.0
    assert seen[-1] < 0.7 * seen[0]


LIBRARIES = ("torch", "ours")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["copied", "distributed"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_assigned(warm_ranks: RankPool, device: str, kind: str, together: bool) -> None:
    """What `load_state_dict(assign=True)` gives is what is trained, in memory or on meta."""
    check(warm_ranks, "assigned", sides=LIBRARIES, device=device, kind=kind, together=together)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_while_gathered(warm_ranks: RankPool, assign: bool) -> None:
    """States are of the parameters at rest, also where a unit is gathered still."""
    check(warm_ranks, "loaded_while_gathered", sides=LIBRARIES, assign=assign)


@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_states(warm_ranks: RankPool, flat: bool) -> None:
    """A full state has all parameters, and a state can be set into a running optimizer."""
    rank, *_ = check(warm_ranks, "optimizer_states", sides=LIBRARIES, flat=flat)
    assert len(rank["ours"]["complete"]) == 6


@pytest.mark.parametrize("on_meta", [False, True])
def test_optimizer_in_backward(warm_ranks: RankPool, on_meta: bool) -> None:
    """Hooks of `register_post_accumulate_grad_hook` run, in one order on all ranks."""
    for rank in check(warm_ranks, "stepped_in_backward", sides=LIBRARIES, on_meta=on_meta):
        assert len(rank["ours"]["order"]) == 18


def test_loops_over_gradients(warm_ranks: RankPool) -> None:
    """On each rank every parameter has a gradient and states, with rows or without.

    So collectives pair up.
    """
    for rank in check(warm_ranks, "loops_over_gradients", sides=LIBRARIES):
        shapes, *_, states = rank["ours"]
        assert (len(shapes), states) == (6, [3] * 6)


@pytest.mark.skipif(not IS_2_13, reason="before 2.13 torch casts the last module's output alone")
def test_output_dtype_of_several_modules(warm_ranks: RankPool) -> None:
    """A policy's output dtype holds for each module of a unit."""
    for rank in check(warm_ranks, "output_dtypes", sides=LIBRARIES):
        assert rank["ours"] == ["torch.bfloat16"] * 2
