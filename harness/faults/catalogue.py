"""The planted faults by name: what each does, what it takes, what must be reported.

Data only, no torch: the scenario decoder validates `plant` entries against it. A fault is planted
in the candidate unless the scenario says otherwise; a fault with a counterpart puts that other
fault into every run it is not in itself, so that they differ in one thing only.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.faults.fault import Fault, read_table

LEGS = ("candidate", "reference", "control")

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "model": "dense_tiny", "dtype": "fp32", "parallel": MappingProxyType({"dp": 2}),
        "steps": 6, "microbatches": 2, "seed": 1234,
    }
)  # fmt: skip
"""What setups build on, as `base` of a scenario has it. A key of a setup takes the place of the
whole key here: {"parallel": {"tp": 2}} is two ranks, not four."""


def is_of_any_engine(fault: Fault) -> bool:
    """Whether a fault needs nothing of our engine: it is in data, weights, records or processes."""
    in_weights = ("ulp", "nan", "negative_zero", "positive_zero")
    return fault.kind in ("data", "infrastructure") or fault.name in in_weights


CATALOGUE: Mapping[str, Fault] = MappingProxyType(
    read_table(Path(__file__).with_name("catalogue.txt").read_text(encoding="utf-8"))
)
"""Every fault by its name."""
