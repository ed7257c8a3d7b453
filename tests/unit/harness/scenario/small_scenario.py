"""A scenario of a few cases, to be varied by its sections."""

import json
from pathlib import Path
from typing import Any

from harness.records import CaseSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario

GRAPHS: list[Any] = ["eager", ["attn"], ["full_iteration"]]
DPS = [{"dp": 2}, {"dp": 4}]


def cases(folder: Path, **sections: Any) -> tuple[CaseSpec, ...]:
    """Expand a scenario given as plain values (JSON is YAML)."""
    plain = {
        "name": "case", "why": "A sentence.", "base": {"steps": 4}, "checks": {"loss": {}},
        "axes": {"parallel": DPS, "graph": GRAPHS},
        "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
    } | sections  # fmt: skip
    path = folder / "case.yaml"
    path.write_text(json.dumps(plain))
    return expand(load_scenario(path), "cpu")


def ids(folder: Path, **sections: Any) -> list[str]:
    """Ids of `cases`."""
    return [case.id for case in cases(folder, **sections)]
