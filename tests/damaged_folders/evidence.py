"""What verdicts rest on, so that a test can tell whether damage has touched it."""

import json
from pathlib import Path
from typing import Any


def evidence(run: Path) -> dict[str, Any]:
    """What verdicts rest on in a run's folder: lines byte by byte, the outcome by what it says."""
    found: dict[str, Any] = {}
    for path in sorted(run.glob("rank*.jsonl")) if run.is_dir() else []:
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
        found[path.name] = path.read_bytes() if plain else None
    try:
        outcome = json.loads((run / "outcome.json").read_bytes())
        # Which attempt it was, and so the checksum, is not of the run.
        found["outcome"] = {k: v for k, v in outcome.items() if k not in ("attempt", "sha256")}
    except (OSError, ValueError, AttributeError, RecursionError):
        found["outcome"] = None
    return found
