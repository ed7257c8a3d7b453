"""Processor time in paces: a limit in them means the same on a slow machine as on a fast one.

A pace is one run of a fixed piece of work (records made, sorted, written as JSON and read
back) right before and right after the work that is measured, so that a processor shared with
others slows both. About a tenth of a second on a laptop.
"""

import gc
import json
import time
from collections.abc import Callable

RECORDS = 10_000


def one_pace() -> None:
    """The fixed piece of work."""
    records = [
        {"id": f"case-{n * 7919 % RECORDS}", "at": n, "of": [n, n + 1]} for n in range(RECORDS)
    ]
    records.sort(key=lambda record: str(record["id"]))
    assert json.loads(json.dumps(records, indent=1)) == records


def in_paces(work: Callable[[], object], times: int = 3) -> float:
    """Processor time of `work()` in paces (no unit): the least of `times` runs.

    Other work on the machine only adds to a run, or to the paces beside it for a moment: the
    least ratio is the nearest to the program's own.
    """
    ratios = []
    for _ in range(times):
        before = _seconds_of_a_pace()
        taken = _seconds(work)
        after = _seconds_of_a_pace()
        ratios.append(2 * taken / (before + after))
    return min(ratios)


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _seconds_of_a_pace() -> float:
    # The collector walks all that lives: what the work leaves behind must not slow its own ruler.
    gc.disable()
    try:
        return _seconds(one_pace)
    finally:
        gc.enable()
