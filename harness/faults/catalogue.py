"""The planted faults by name: what each does, what it takes, what must be reported.

Data only, no torch: the scenario decoder validates `plant` entries against it, and the worker
implements each fault under the same name. A module holds the faults of one kind. A fault is planted
in the candidate unless the scenario says otherwise; a fault with a `counterpart` puts that other
fault into every leg it is not in itself, so that the legs differ in one thing only.
"""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from harness.faults import (
    addresses,
    capture,
    collectives,
    data,
    hooks,
    infrastructure,
    numerics,
    streams,
)
from harness.faults.fault import Fault

LEGS = ("candidate", "reference", "control")

BASE: Mapping[str, Any] = MappingProxyType(
    {
        "model": "dense_tiny",
        "dtype": "fp32",
        "parallel": MappingProxyType({"dp": 2}),
        "steps": 6,
        "microbatches": 2,
        "seed": 1234,
    }
)
"""What cells build on, as `base` of a scenario has it. A key of a cell takes the place of the whole
key here: {"parallel": {"tp": 2}} is two ranks, not four."""

_KINDS = (
    hooks, addresses, streams, capture, collectives, numerics, data, infrastructure,
)  # fmt: skip

_OF_ANY_ENGINE = ("ulp", "nan", "negative_zero", "positive_zero")

CATALOGUE: Mapping[str, Fault] = MappingProxyType(
    {fault.name: fault for fault in itertools.chain(*(kind.FAULTS for kind in _KINDS))}
)
"""Every fault by its name."""


def is_of_any_engine(fault: Fault) -> bool:
    """Whether a fault needs nothing of our engine: it is in data, weights, records or processes."""
    return fault.kind in ("data", "infrastructure") or fault.name in _OF_ANY_ENGINE
