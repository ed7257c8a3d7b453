"""Which step an error of a program is recorded with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from harness.recorder import record
from tests.unit.harness.recorder.recorded import recorded
from tests.unit.harness.recorder.test_recorder import model_of, train


class Refuses(SGD):
    """Fails in its second step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = self.__dict__["number"] = self.__dict__.get("number", 0) + 1
        if number == 2:
            raise KeyError("lost")
        super().step()


@pytest.mark.parametrize(
    ("where", "step"),
    [("before", -1), ("forward", 0), ("optimizer", 1), ("lines", 1), ("after", 1)],
)
def test_an_error_is_of_the_step_under_way(where: str, step: int, tmp_path: Path) -> None:
    """Before the first forward pass there is none; after the last step that is due it is that."""

    def program() -> None:
        model = model_of()
        optimizer = (Refuses if where == "optimizer" else SGD)(model.parameters(), 0.1)
        if where == "before":
            raise KeyError("lost")
        if where == "forward":
            model(torch.ones(2, 7))
        if where == "lines":
            recorder = record(model, optimizer)
            for index in range(2):
                with recorder.step():
                    model(torch.ones(2, 3)).sum().backward()
                    optimizer.step()
                    if index == 1:
                        raise KeyError("lost")
        train(model, [optimizer])
        raise KeyError("lost")

    error = recorded(program, tmp_path, code=1).error
    assert error is not None
    assert error.step == step
