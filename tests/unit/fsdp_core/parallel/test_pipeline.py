"""What a pipeline refuses before anything runs, and what makes its programs torch-free."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline import Pipeline, PipelineOptions
from fsdp_core.parallel.pipeline_p2p import TensorSpec, check_tensors

SPEC = TensorSpec((2, 3), torch.float32)
# Nothing here communicates: construction only looks at numbers.
NO_GROUP = cast("dist.ProcessGroup", None)
CPU = torch.device("cpu")


def build(*, size: int = 2, rank: int = 0, stages: int = 1, **options: Any) -> Pipeline:
    """A pipeline of linear layers."""
    modules = [nn.Linear(3, 3) for _ in range(stages)]
    boundaries = options.pop("boundaries", SPEC)
    return Pipeline(modules, Axis("pp", size, rank, NO_GROUP), boundaries, CPU, **options)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: build(stages=0), "at least one stage on each rank, got none"),
        (lambda: build(stages=2, boundaries={0: (SPEC,)}), r"got none of \[1, 2\]"),
        (lambda: build(size=3, rank=1, tied=[nn.Parameter(torch.ones(1))]), "got 1 on rank 1 of 3"),
        (lambda: PipelineOptions(num_slots=0), "num_slots >= 1, got 0"),
        (lambda: PipelineOptions(gradient_sync=cast("Any", "never")), "last or every, got 'never'"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(call: Callable[[], Any], rule: str) -> None:
    """Each by the rule that it breaks."""
    with pytest.raises(ValueError, match=rule):
        call()


def test_one_weight_given_twice_is_one_end() -> None:
    """A rank that is first and last may share one parameter; there is then nothing to add up."""
    weight = nn.Parameter(torch.ones(1))
    assert build(size=1, tied=[weight, weight]).peak_live == 0


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (torch.ones(2, 4),),
        (torch.ones(2, 3, dtype=torch.bfloat16),),
        (torch.ones(2, 3, requires_grad=True),),
        (torch.ones(2, 3), torch.ones(2, 3)),
    ],
)
def test_tensors_that_were_not_agreed(tensors: tuple[torch.Tensor, ...]) -> None:
    """Number, shape, dtype and need of a gradient are checked; a gradient only in training."""
    check_tensors("it", (torch.ones(2, 3),), (SPEC,), is_training=False)
    check_tensors("it", (torch.ones(2, 3, requires_grad=True),), (SPEC,), is_training=True)
    with pytest.raises(ValueError, match=r"Expected it to be float32 \[2, 3\] without gradient"):
        check_tensors("it", tensors, (SPEC,), is_training=False)


def test_schedules_need_no_torch() -> None:
    """A laptop without torch can check a pipeline's layout."""
    code = (
        "import sys, fsdp_core.parallel.pipeline_schedule, fsdp_core.parallel.pipeline_schedule\n"
        "print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[4]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
