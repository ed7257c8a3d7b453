"""Degrees: single values and derived sizes. The rules have their examples in test_rules."""

from typing import Any

import pytest

from fsdp_core.config import DEGREES, ParallelConfig
from tests.unit.fsdp_core.config.refusals import Refusal, bools, check, integers, name_of

REFUSALS: list[Refusal] = [
    *(r for key in (*DEGREES, "pp_chunks") for r in integers(ParallelConfig, key, 1)),
    *bools(ParallelConfig, "sequence_parallel"),
    (ParallelConfig, {"dp": 4, "dynamic_cp": [1, 2]}, "dynamic_cp", "a tuple of integers",
     [1, 2], ()),
    (ParallelConfig, {"dp": 4, "dynamic_cp": (0,)}, "dynamic_cp", "an integer >= 1", 0, ()),
    (ParallelConfig, {"dp": 4, "dynamic_cp": (True,)}, "dynamic_cp", "an integer >= 1", True, ()),
    (ParallelConfig, {"dp": 12, "dynamic_cp": (1, 3)}, "dynamic_cp",
     "powers of two that divide dp * cp = 12", [1, 3], (1, 2, 4)),
    (ParallelConfig, {"dp": 4, "ep": 3}, "ep",
     "ep * etp = 3 to divide dp_outer * dp * cp * tp = 4", 3, ()),
    (ParallelConfig, {"dp": 4, "ep": 4, "etp": 2}, "etp",
     "ep * etp = 8 to divide dp_outer * dp * cp * tp = 4", 2, ()),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=name_of)
def test_refusal(refusal: Refusal) -> None:
    """A refused value names its key, what was expected, what was got, and what is legal."""
    check(refusal)


@pytest.mark.parametrize(
    ("values", "world_size", "stage_size", "edp"),
    [
        ({}, 1, 1, 1),
        ({"dp": 4096}, 4096, 4096, 4096),
        ({"dp": 8, "dp_outer": 3}, 24, 24, 24),
        ({"dp": 2, "cp": 2, "tp": 2, "pp": 3}, 24, 8, 8),
        ({"dp": 2, "cp": 2, "tp": 2, "pp": 3, "ep": 2, "etp": 2}, 24, 8, 2),
        ({"dp_outer": 2, "tp": 4, "ep": 8}, 8, 8, 1),
    ],
)
def test_sizes(values: dict[str, Any], world_size: int, stage_size: int, edp: int) -> None:
    """Expert degrees cut the ranks of a stage anew, and add none."""
    parallel = ParallelConfig(**values)
    assert (parallel.world_size, parallel.stage_size, parallel.edp) == (
        world_size, stage_size, edp,
    )  # fmt: skip
