"""Entries of nights as a matrix would leave them, made without running anything."""

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

from harness.history.ledger import CaseEntry, FolderEntry, RunEntry, name_of

FIRST = datetime.datetime(2031, 1, 1, 3, tzinfo=datetime.UTC)
ENVIRONMENT: dict[str, Any] = {
    "cores": 8, "memory_gib": 64, "gpus": ["NVIDIA H200"], "variables": {}, "gpu_driver": "580",
    "system": "Linux 6.1", "python": "3.11.7", "versions": {"torch": "2.12.0"},
}  # fmt: skip
RANKS: dict[str, Any] = {"ranks": [{"torch": "2.12.0", "device": "cuda"}]}
MACHINE = "8 cores, 1 x NVIDIA H200"
LEGS = ("reference", "control", "candidate")
FAILED: dict[str, Any] = {
    "outcome": "failed", "what": "diverged", "message": "weights differ first at step 7",
    "causes": ("state: failed diverged",),
}  # fmt: skip
Values = Callable[[RunEntry, str], dict[str, Any]]


def run(number: int = 0, leg: str = "candidate", **changes: Any) -> RunEntry:
    """One attempt of a run that ended well."""
    graph = "attn" if leg == "candidate" else "eager"
    facts: dict[str, Any] = {
        "key": f"w2-{graph}-r{int(leg == 'control')}-{number:012d}", "attempt": 0,
        "work": name_of([number, graph]), "what": "", "device": "cuda", "world_size": 2,
        "preset": "dense_tiny", "steps": 20, "started_unix_s": 1.0e9, "wall_s": 4.0,
        "fingerprint": name_of(RANKS), "startup_s": 1.0, "step_s": 0.02, "peak_bytes": 40 << 20,
        "loss_bits": name_of([number, "loss"]), "state_bits": name_of([number, "state"]),
    }  # fmt: skip
    return RunEntry(**(facts | changes))


def case(number: int = 0, **changes: Any) -> CaseEntry:
    """One answer: a pass."""
    facts: dict[str, Any] = {
        "case_id": f"dp{2**number}-attn", "attempt": 0, "outcome": "passed", "what": "",
        "message": "every check said yes", "labels": {"parallel": f"dp{2**number}"},
        "wall_s": 12.0, **{leg: run(number, leg).key for leg in LEGS},
    }  # fmt: skip
    return CaseEntry(**(facts | changes))


def only(leg: str, **changes: Any) -> Values:
    """Changes of one leg's runs."""
    return lambda run, of: changes if of == leg else {}


def night(
    number: int = 0, *, cases: int = 1, answers: dict[int, dict[str, Any]] | None = None,
    values: Values | None = None, **changes: Any,
) -> FolderEntry:  # fmt: skip
    """A run folder of one night. Args: number: days after the first night."""
    plain = [(run(of, leg), leg) for of in range(cases) for leg in LEGS]
    facts: dict[str, Any] = {
        "id": name_of([number, "night"]), "scenario": "nightly", "num_cases": cases,
        "created": (FIRST + datetime.timedelta(days=number)).isoformat(timespec="seconds"),
        "commit": name_of([number, "commit"]), "tier": "nightly", "device": "cuda",
        "machine": MACHINE, "slots": 8, "environment": ENVIRONMENT,
        "fingerprints": {name_of(RANKS): RANKS},
        "cases": tuple(case(n, **(answers or {}).get(n, {})) for n in range(cases)),
        "runs": tuple(
            dataclasses.replace(each, **(values(each, leg) if values else {}))
            for each, leg in plain
        ),
    }  # fmt: skip
    return FolderEntry(**(facts | changes))
