"""The decoder on layouts: faults are found by name; dropout, weights and norms are one process's.

That layouts have the tensors of one process is shown by `python -m tests.dist.parity_table`."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.config import ParallelConfig
from fsdp_core.device import Device
from fsdp_core.model.decoder import make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import clip_grads, init_weights, shard_stage
from fsdp_core.parallel.mesh import build_axes
from tests.dist import parity_faults
from tests.dist.parity_bounds import (
    WIDE,
    Bounded,
    bounded,
    cross_entropy,
    exact_and_magnitudes,
    gamma,
    product,
    unit_roundoff,
)
from tests.dist.parity_check import compare, packs_of, problem_of, reference
from tests.dist.parity_programs import (
    Layout,
    Outcome,
    Problem,
    Routes,
    join,
    run_case,
    sharding_of,
    streams_of,
    take_step,
    whole_model,
)
from tests.dist.rank_pool import RankError, RankPool
from tests.support.global_weights import gather_global, gather_global_grads, load_global


def run_clipped(
    problem: Problem, layout: Layout, routes: Routes | None, max_norm: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm of the step's gradients, and the gradients after they were clipped."""
    stages, axes, _ = take_step(problem, layout, routes)
    norm = clip_grads(stages, axes, max_norm)
    return norm.item(), gather_global_grads(stages, axes)


def run_weights(problem: Problem, layouts: tuple[Layout, ...]) -> list[dict[str, torch.Tensor]]:
    """Weights of the first layout as drawn, then carried from each layout to the next."""
    found: list[dict[str, torch.Tensor]] = []
    for layout in layouts:
        axes = build_axes(layout.parallel, Device("cpu"))
        stages = make_stages(
            problem.model, axes, LayerFactory(), streams_of(axes),
            chunks=layout.parallel.pp_chunks,
        )  # fmt: skip
        init_weights(
            stages, problem.seed if not found else 0, layers=problem.model.layers,
            init_std=problem.init_std,
        )  # fmt: skip
        for stage in stages:
            shard_stage(stage, axes, **sharding_of(layout, torch.float32))
        if found:
            load_global(stages, found[-1])
        found.append(gather_global(stages, axes))
    return found


def run_masks(problem: Problem, layout: Layout) -> Outcome:
    """Which elements each branch dropped of each token: rows of 0 and 1."""
    with parity_faults.planted(layout.fault):
        stages, _, watch = take_step(problem, layout, None, masks=True)
    del stages
    return watch.outcome


DENSE, MLA = "dense_tiny", "mla_moe_tiny"


CP2: dict[str, Any] = {"cp": 2}
FAULTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("experts divided by edp", MLA, {"dp": 4, "ep": 2}, "layers.1.mlp.moe.experts"),
    ("plain chunks", DENSE, {"cp": 4}, "layers.0.attn forward"),
    ("swapped etp", MLA, {"dp": 4, "ep": 2, "etp": 2}, "layers.1.mlp.moe.experts"),
    ("aux loss twice", MLA, {"dp": 4, "ep": 2}, "layers.1.mlp.moe.router.weight"),
    # Faults that touch few tokens, those of one token in packs.
    ("half the gradients", DENSE, CP2, "gradient of head.weight"),
    ("swapped halves", DENSE, CP2, "layers.0.attn forward"),
    ("swapped heads", DENSE, CP2, "layers.0.attn forward"),
    ("one prediction", DENSE, CP2, "loss"),
    ("one position", DENSE, CP2, "layers.0.attn forward"),
    ("one boundary", DENSE, CP2, "layers.0.attn forward"),
]


@pytest.mark.parametrize(("fault", "model", "degrees", "first"), FAULTS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
def test_fault_is_found_by_name(
    fault: str, model: str, degrees: dict[str, Any], first: str, dtype: str, warm_ranks: RankPool
) -> None:
    """A planted fault exceeds the bound tenfold, first in the tensor that it makes wrong."""
    parallel = ParallelConfig(**degrees)
    packs = packs_of(parallel, packed=fault.startswith("one "))
    layout = Layout(parallel, dtype, fault=fault)
    wrong = compare(problem_of(model, packs), layout, warm_ranks).first_wrong
    assert wrong is not None
    assert first in wrong[0]
    assert wrong[1] > 10


def test_norm_that_is_not_summed_over_tp_is_found_by_name(warm_ranks: RankPool) -> None:
    """Under sequence parallel a norm's weight has a part of its gradient, other on each rank."""
    layout = Layout(ParallelConfig(tp=2, sequence_parallel=True), fault="norm not summed")
    problem = problem_of(DENSE, ())
    with pytest.raises(RankError, match=r"layers\.0\.attn\.norm\.weight.*every rank of tp"):
        warm_ranks.run(run_case, problem, layout, None, world_size=2)


# ---- dropout


def mask_faults(outcomes: list[Outcome]) -> list[str]:
    """Branches that drop the same elements of two tokens, or other ones of a token's copies."""
    found = []
    for key in outcomes[0].rows:
        seen: dict[bytes, int] = {}
        copies: dict[int, bytes] = {}
        for outcome in outcomes:
            if key not in outcome.rows:
                continue
            for number, row in zip(
                outcome.numbers[key].tolist(), outcome.rows[key].bool(), strict=True
            ):
                mask = row.numpy().tobytes()
                is_other = copies.setdefault(number, mask) != mask
                if is_other or seen.setdefault(mask, number) != number:
                    found.append(key[2])
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_each_tokens_own(sequence_parallel: bool, warm_ranks: RankPool) -> None:
    """Copies of a token lose the same elements on every rank, other tokens lose others."""
    problem = problem_of(DENSE, (), (("dropout", 0.5),))
    parallel = ParallelConfig(cp=2, tp=2, sequence_parallel=sequence_parallel)
    assert mask_faults(warm_ranks.run(run_masks, problem, Layout(parallel), world_size=4)) == []


def test_stream_shared_over_tp_is_found_by_name(warm_ranks: RankPool) -> None:
    """Under sequence parallel, tp ranks that draw the same drop the same of other tokens."""
    problem = problem_of(DENSE, (), (("dropout", 0.5),))
    parallel = ParallelConfig(tp=2, sequence_parallel=True)
    layout = Layout(parallel, fault="one stream for tp")
    found = mask_faults(warm_ranks.run(run_masks, problem, layout, world_size=2))
    assert found[0] == "layers.0.attn"


# ---- weights and norms


def test_weights_are_the_same_in_every_layout(warm_ranks: RankPool) -> None:
    """What a layout draws is what one process draws, and carries over to any other layout."""
    problem = problem_of(MLA, ())
    layouts = (
        Layout(ParallelConfig(dp=2, ep=2, etp=2, tp=2, pp=2)),
        Layout(ParallelConfig(dp=8, ep=8)),
        Layout(ParallelConfig(dp=2, cp=2, tp=2, etp=2), strategy="no_shard"),
    )
    model = whole_model(problem)
    init_weights([model], problem.seed, layers=problem.model.layers, init_std=problem.init_std)
    expected = dict(model.named_parameters())
    for found in itertools.chain(*warm_ranks.run(run_weights, problem, layouts, world_size=8)):
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name


def test_clipping_counts_every_element_once(warm_ranks: RankPool) -> None:
    """Norm and clipped gradients are those of one process, whatever is cut over which axis."""
    problem = problem_of(MLA, ())
    exact, routes = reference(problem)
    grads = {key[1]: value for key, value in exact.items() if key[0] == "grad"}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    layout = Layout(ParallelConfig(dp=2, pp=2, tp=2, ep=2, sequence_parallel=True))
    for got, clipped in warm_ranks.run(
        run_clipped, problem, layout, routes, norm / 3, world_size=8
    ):
        # FSDP's norms of float64 are float64; 1e-6 is what clipping adds to the norm.
        assert got == pytest.approx(norm, rel=1e-12)
        for name, grad in grads.items():
            expected = grad * (norm / 3 / (norm + 1e-6))
            assert float((clipped[name] - expected).norm()) <= 1e-12 * float(grad.norm()), name


def test_loss_is_that_of_all_ranks(warm_ranks: RankPool) -> None:
    """Ranks with other numbers of tokens that count still have the mean over all tokens."""
    parallel = ParallelConfig(dp=2, cp=2)
    problem = problem_of(DENSE, packs_of(parallel, packed=True))
    exact, routes = reference(problem)
    outcomes = warm_ranks.run(run_case, problem, Layout(parallel), routes, world_size=4)
    losses = join(outcomes, problem.batch, 4)["loss",]
    assert torch.allclose(losses, exact["loss",], rtol=1e-14, atol=0)


# --- the bounds themselves: they hold, are nearly reached, and let nothing that is no number pass -


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "bits"), list(zip(DTYPES, (53, 24, 8), strict=True)))
def test_the_unit_roundoff_is_the_largest_relative_rounding(dtype: torch.dtype, bits: int) -> None:
    """Half a gap above 1 rounds to 1 (to even), a little more does not."""
    u = unit_roundoff(dtype)
    assert u == 2.0**-bits
    one = torch.ones((), dtype=dtype)
    assert one + torch.full((), u, dtype=dtype) == 1
    assert one + torch.full((), u * 1.5, dtype=dtype) > 1
    assert gamma(10, dtype) == 10 * u / (1 - 10 * u)
    with pytest.raises(ValueError, match="Expected n u below 1"):
        gamma(2**bits, dtype)


def quadratic(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(named["x"], named["a"]) * F.linear(named["x"], named["b"])


def test_magnitudes_are_sums_of_the_terms() -> None:
    """The second pass gives the sum of each term's absolute value, of output and gradients."""
    torch.manual_seed(0)
    named = {"x": torch.randn(5), "a": torch.randn(1, 5), "b": torch.randn(1, 5)}
    cotangent = torch.randn(1)
    exact, magnitudes = exact_and_magnitudes(quadratic, named, cotangent)
    x, a, b = (named[n].double() for n in ("x", "a", "b"))
    terms = torch.outer(x * a[0], x * b[0])
    assert torch.allclose(exact["output"], terms.sum())
    assert torch.allclose(magnitudes["output"], terms.abs().sum())
    grad_terms = cotangent.double() * torch.outer(x, x * b[0])
    assert torch.allclose(exact["a"][0], grad_terms.sum(1))
    assert torch.allclose(magnitudes["a"][0], grad_terms.abs().sum(1))
    assert magnitudes.keys() == {"output", "x", "a", "b"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_stay_in_their_bound_and_faults_do_not(dtype: torch.dtype) -> None:
    """A product over 4 ranks is in; one rank's part missing, or a mean, is ten bounds out."""
    torch.manual_seed(0)
    named = {"x": torch.rand(6, 64) - 0.2, "weight": torch.rand(10, 64) - 0.2}
    named = {name: t.to(dtype) for name, t in named.items()}
    cotangent = (torch.rand(6, 10) - 0.2).to(dtype)
    counts = {"output": product(16, 4), "x": product(10), "weight": product(6)}
    expected = bounded(lambda n: F.linear(n["x"], n["weight"]), named, cotangent, counts, dtype)[
        "output"
    ]
    shards = zip(*(t.chunk(4, 1) for t in named.values()), strict=True)
    parts = torch.stack([F.linear(x, weight) for x, weight in shards])
    right = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert expected.units(right) <= 1
    assert expected.units(parts[:3].sum(0)) >= 10
    assert expected.units(right / 4) >= 10


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_stays_in_its_bound(dtype: torch.dtype, ranks: int) -> None:
    """Torch's loss and gradient are in, and come within a factor of the bound: it is tight.

    Of float64 there is no wider format: on some processors torch's loss has the very bits.
    """
    torch.manual_seed(0)
    logits = (torch.randn(400, 16) * 3 + 50).to(dtype)
    targets = torch.randint(0, 16, (400,))
    loss, grad = cross_entropy(logits, targets, ranks, dtype)
    wide = logits.to(WIDE[dtype]).requires_grad_()
    theirs = F.cross_entropy(wide, targets, reduction="none")
    (their_grad,) = torch.autograd.grad(theirs.sum(), wide)
    assert (0.01 if WIDE[dtype] != dtype else -1) < loss.units(theirs) <= 1
    assert 0.05 < grad.units(their_grad.to(dtype)) <= 1
    assert loss.units(theirs * (1 + 300 * unit_roundoff(WIDE[dtype]))) > 1


def test_what_is_no_number_is_no_match() -> None:
    """NaN and infinities are right only where they are due; no bound, no error."""
    nan, inf = math.nan, math.inf
    exact, bound = torch.tensor([1.0, inf, -inf, nan, 2.0]), torch.tensor([0.5, 1, 1, 1, 0.0])
    expected = Bounded(exact.double(), bound.double())
    assert expected.units(exact) == 0
    assert expected.units(exact + torch.tensor([0.25, 0, 0, 0, 0])) == pytest.approx(0.5)
    for index, value in [(0, nan), (0, inf), (1, 5.0), (1, -inf), (2, inf), (3, 0.0), (4, 2.0001)]:
        wrong = exact.clone()
        wrong[index] = value
        assert expected.units(wrong) == inf, (index, value)
    with pytest.raises(ValueError, match=r"Expected \(5,\), got \(1, 5\)"):
        expected.units(exact[None])
    assert Bounded(torch.zeros(0), torch.zeros(0)).units(torch.zeros(0)) == 0


def test_underflow_is_allowed_for() -> None:
    """A result below the normal numbers may be flushed to zero, where any rounding may be."""
    tiny = torch.finfo(torch.float32).tiny
    exact = torch.tensor([tiny / 3], dtype=torch.float64)
    assert Bounded(exact, exact * 1e-7).units(torch.zeros(1)) <= 1
    assert Bounded(exact, exact * 0).units(torch.zeros(1)) == math.inf
