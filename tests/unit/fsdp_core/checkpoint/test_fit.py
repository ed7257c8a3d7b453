"""Where what was stored goes: the same dtypes and memory, and one line on what does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.checkpoint import load, save
from tests.unit.fsdp_core.checkpoint.small_models import bits, first_of, model_of, trained


def test_states_keep_their_dtype(tmp_path: Path) -> None:
    """A state of another dtype than its parameter is not cast on the way."""
    model, optimizer = trained()
    states = optimizer.state[first_of(model)]
    states["exp_avg"] = states["exp_avg"].double() / 3
    states["seen"] = torch.tensor([2**40 + 1])
    expected = bits(model, optimizer)
    save(tmp_path, 1, model, optimizer)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path, model, optimizer)
    assert bits(model, optimizer) == expected


def test_hyperparameters_are_loaded_but_for_how_to_compute(tmp_path: Path) -> None:
    """Learning rates and the like are those saved, into the same memory; `foreach` is as built."""
    model, optimizer = trained(lr=torch.tensor(1 / 3), betas=(0.8, 0.7), foreach=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save(tmp_path, 1, model, optimizer)
    rate = torch.tensor(0.5)
    model, other = trained(lr=rate, amsgrad=False, foreach=None)
    other.param_groups[0]["mine"] = "stays"
    load(tmp_path, model, other)
    group = other.param_groups[0]
    assert group["lr"] is rate
    assert rate.item() == torch.tensor(1 / 3).item()
    assert (group["betas"], group["foreach"], group["mine"]) == ((0.8, 0.7), None, "stays")
    assert torch.equal(group["initial_lr"], rate)


# --- what does not fit ------------------------------------------------------------------------


class Adam2(torch.optim.Adam):
    """Another class."""


def with_state_key() -> tuple[nn.Module, torch.optim.Optimizer]:
    """An optimizer with states of another key."""
    model, optimizer = trained()
    optimizer.state[first_of(model)]["mine"] = torch.zeros(3, 4)
    return model, optimizer


MISFITS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "missing": (
        lambda: (nn.Sequential(*model_of(), nn.Linear(2, 2)), None),
        "without 3.bias, 3.weight and with nothing",
    ),
    "unexpected": (lambda: (model_of(bias=False), None), "without nothing and with 0.bias besides"),
    "shape": (lambda: (model_of(5), None), r"0.weight of torch.float32 \(5, 4\), got .*\(3, 4\)"),
    "dtype": (
        lambda: (model_of().double(), None),
        "0.weight of torch.float64 .*, got torch.float32",
    ),
    "meta": (lambda: (model_of().to("meta"), None), "0.weight in memory, got a meta tensor"),
    "optimizer": (lambda: trained(Adam2), "Expected Adam2 with 1 .*, got AdamW with 1"),
    "states": (with_state_key, "same states of 0.weight.*without mine and with nothing"),
    "foreign": (
        lambda: (model_of(), torch.optim.AdamW(model_of().parameters())),
        "Expected an optimizer over parameters of this model at rest",
    ),
    "fewer": (
        lambda: (lambda m: (m, torch.optim.AdamW(list(m.parameters())[1:])))(model_of()),
        "parameters in group 0.*with 0.weight besides",
    ),
}


@pytest.mark.parametrize("kind", list(MISFITS))
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, kind: str) -> None:
    """One line says what differs, and nothing is changed."""
    save(tmp_path, 1, *trained())
    make, message = MISFITS[kind]
    model, optimizer = make()
    before = {} if kind == "meta" else bits(model, optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, model, optimizer)
    assert "\n" not in str(caught.value)
    assert kind == "meta" or bits(model, optimizer) == before


def test_a_checkpoint_without_optimizer_loads_into_models_only(tmp_path: Path) -> None:
    """Weights alone load; an optimizer asks for its states in vain."""
    model, optimizer = trained()
    save(tmp_path, 1, model)
    load(tmp_path, model)
    with pytest.raises(ValueError, match="Expected an optimizer's state, got a checkpoint saved"):
        load(tmp_path, model, optimizer)
