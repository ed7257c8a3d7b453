"""`python -m tests.rough_machine [NAME ...]`: faults of the machine that a harness survives."""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.rough_machine import disks, hostile, signals, surroundings, terminals

FAULTS: dict[str, Callable[[Path], list[str]]] = {
    "full disk": disks.full,
    "read-only output": disks.read_only,
    "two harnesses": disks.two,
    "flood": hostile.flood,
    "secrets": hostile.secrets,
    "jumping clocks": hostile.clocks,
    "signals": signals.each,
    "signals at any moment": signals.at_random,
    "terminals": terminals.widths,
    "streams": surroundings.streams,
    "variables": surroundings.variables,
    "masks": surroundings.masks,
    "paths": surroundings.paths,
    "each write": surroundings.each_write,
}


def main() -> int:
    """Try each; 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}")
    args = parser.parse_args()
    failed = 0
    for name in args.names or FAULTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rough-") as folder:
            try:
                wrong = FAULTS[name](Path(folder))
            except PermissionError as error:
                print(f"{name}: not tried: {error}", flush=True)  # noqa: T201 - a command
                continue
        state = "survived" if not wrong else "NOT survived"
        print(f"{name}: {state} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
        for why in wrong:
            print(f"  {why}", flush=True)  # noqa: T201
        failed += bool(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
