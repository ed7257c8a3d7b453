"""What checkpoints hold: JSON values and tensors, under names that wrappers do not change."""

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core.checkpoint import latest, load, save
from tests.unit.fsdp_core.checkpoint.small_models import bits, model_of, trained


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    """JSON values, and tuples, tensors, infinities and keys that are no strings."""
    extra = {
        "list": [1, 2.5, None, True, "x"],
        "best": math.inf,
        "small": 5e-324,
        "betas": (0.9, (1, [2])),
        "epochs": {1: "a", (2, 3): {"$tensor": "no"}},
        "noise": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    }
    save(tmp_path, 1, model_of(), extra=extra)
    found = load(tmp_path, model_of()).extra
    noise, expected = found.pop("noise"), cast("torch.Tensor", extra.pop("noise"))
    assert found == extra
    assert type(found["betas"]) is tuple
    assert noise.dtype == expected.dtype
    assert torch.equal(noise.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", 1j])
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value: Any) -> None:
    """Nothing is pickled; the error names the place."""
    with pytest.raises(ValueError, match=rf"extra\.a\.0, got a {type(value).__name__}"):
        save(tmp_path, 1, model_of(), extra={"a": [value]})
    assert latest(tmp_path) is None


def test_names_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    """A compiled block has the parameters that it has without."""
    model, optimizer = trained()
    save(tmp_path, 1, model, optimizer)
    other = model_of()
    wrapped = nn.Sequential(
        cast("nn.Module", torch.compile(other[0], backend="eager")), other[1], other[2]
    )
    wrapped_optimizer = torch.optim.AdamW(wrapped.parameters())
    load(tmp_path, wrapped, wrapped_optimizer)
    assert list(bits(wrapped, wrapped_optimizer).values()) == list(bits(model, optimizer).values())
    save(tmp_path, 2, wrapped, wrapped_optimizer)
    assert load(tmp_path, model, optimizer).step == 2


class Counter(nn.Module):
    """Keeps state that is no tensor."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = seen

    def get_extra_state(self) -> Any:
        """See torch."""
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        """See torch."""
        self.seen = state


@pytest.mark.parametrize("seen", [{"n": (3, 4)}, torch.arange(5, dtype=torch.uint8)])
def test_extra_state_of_modules_comes_back(tmp_path: Path, seen: Any) -> None:
    """`get_extra_state` is stored, whatever its shape, and `set_extra_state` gets it."""
    save(tmp_path, 1, nn.Sequential(Counter(seen)))
    model = nn.Sequential(Counter(torch.zeros(0)))
    load(tmp_path, model)
    found = cast("Counter", model[0]).seen
    assert torch.equal(found, seen) if torch.is_tensor(seen) else found == seen
