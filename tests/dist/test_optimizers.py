"""Optimizers over sharded parameters: the bits of one process, or a refusal that says why."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist import optimizer_programs as programs
from tests.dist.rank_pool import RankPool

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
    for said in warm_ranks.run(programs.what_a_step_says, built, world_size=2):
        assert "Expected an optimizer of the parameters at rest" in said
        assert WRONG[built] in said
        assert "call reshard() first" in said


def test_a_right_optimizer_steps_whatever_is_gathered(warm_ranks: RankPool) -> None:
    """Built at rest it trains, with plain parameters beside, also while units are gathered."""
    warm_ranks.run(programs.steps_rightly, world_size=2)


def test_a_copy_of_what_was_sharded_may_be_trained(warm_ranks: RankPool) -> None:
    """Parameters from before sharding that have gradients of their own are nobody's mistake."""
    warm_ranks.run(programs.trains_a_copy_of_what_was_sharded, world_size=2)


def test_parameters_that_were_given_memory_can_be_trained(warm_ranks: RankPool) -> None:
    """After to_empty an optimizer of the parameters that modules hold now steps."""
    warm_ranks.run(programs.replaces_parameters_and_steps, world_size=2)


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
    first, second = warm_ranks.run(programs.row_counts, world_size=2)
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
    args = (programs.wrongly_trained, name, options, "optim_grads_params")
    assert warm_ranks.run(*args, world_size=2) == [[], []]


@pytest.mark.parametrize("name", ["AdamW", "FusedAdam"])
def test_steps_over_two_axes_have_the_bits_of_one_process(warm_ranks: RankPool, name: str) -> None:
    """The same where the optimizer's states are cut over two mesh axes."""
    axes = ("optim", "optim_grads_params")
    assert warm_ranks.run(programs.wrongly_trained, name, {}, axes, world_size=4) == [[]] * 4


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_of_whole_tensors_are_refused(warm_ranks: RankPool, name: str) -> None:
    """They raise before anything is written or sent, on every rank, with rows or without."""
    for said in warm_ranks.run(programs.what_whole_tensors_say, name, world_size=2):
        assert f"got {name}, which needs whole tensors" in said


# --- kernels that take addresses -------------------------------------------------------------


def test_a_kernel_never_gets_the_address_of_what_has_none(warm_ranks: RankPool) -> None:
    """An optimizer that is not known to take addresses, and takes them, raises."""
    warm_ranks.run(programs.blind_kernels_are_refused, world_size=2)


@pytest.mark.parametrize("how", ["closure", "scaler", "dtype"])
def test_what_a_step_over_rows_cannot_do_is_refused(warm_ranks: RankPool, how: str) -> None:
    """Arguments and dtypes of states that would be lost on the way to the rows raise."""
    warm_ranks.run(programs.what_rows_cannot_do, how, world_size=2)


def test_a_step_over_rows_leaves_a_usual_optimizer(warm_ranks: RankPool) -> None:
    """Its states are sharded as its parameters, after an error and through a state dict too."""
    warm_ranks.run(programs.steps_on_after_an_error_and_a_reload, world_size=2)


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
    args = (programs.compiles_steps, cls, options)
    assert warm_ranks.run(*args, world_size=1, timeout_s=COMPILING_S) == [[]]


@pytest.mark.parametrize("kind", list(programs.PENALTIES))
def test_a_compiled_penalty_has_its_gradient(warm_ranks: RankPool, kind: str) -> None:
    """What a compiled function computes from parameters at rest is as differentiable as before."""
    if kind == "norm" and not issubclass(RowSharded, DTensor):
        pytest.skip("there torch cannot differentiate DTensor results")
    args = (programs.compiles_penalties, kind)
    assert warm_ranks.run(*args, world_size=1, timeout_s=COMPILING_S) == [[]]
