"""A run folder as a nightly of many cases leaves it, and a history of the two weeks before it."""

import dataclasses
import datetime
import itertools
import math
import random
from pathlib import Path
from typing import Any

from harness.history.ledger import HISTORY_FOLDER, CaseEntry, FolderEntry, History, RunEntry, gather
from harness.store import RunFolder
from tests.unit.reports.folders import Edit, Writer, drift, nan_at_12

SCENARIO = """\
name: nightly
why: Every layout that a night has room for, eager against graphed, bit for bit.
compare: {axis: graph, reference: eager, expect: bitwise}
"""
MODELS = ("dense_tiny", "dense_small", "moe_tiny", "moe_small", "moe_shared")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
POOLS = ("dynamic", "double", "traced")
GRAPHS = ("attn", "mlp", "attn+mlp", "layer", "full_iteration")
STEPS = 8
NIGHTS = 14
FIRST = datetime.datetime(2031, 2, 1, 3, tzinfo=datetime.UTC)


HANG = {
    "what": "hang", "culprit": 1, "stop": 4,
    "printed": "".join(f"step {n} took 12 ms\n" for n in range(60)),
    "message": "time was up after 300 s; the others waited for rank 1 in all_gather",
}  # fmt: skip


def _early(edit: Edit) -> Edit:
    """An edit that is written for twenty steps, six steps earlier."""
    return lambda record: (
        None
        if (changed := edit(dataclasses.replace(record, step=record.step + 6))) is None
        else dataclasses.replace(changed, step=record.step)
    )


def _changes(draw: float, failing: float) -> dict[str, Any]:
    """What becomes of a case: some of the failing part each."""
    share = draw / failing if failing else math.inf
    for limit, changes in (
        (0.5, {"candidate": {"edit": _early(drift)}}),
        (0.7, {"candidate": {"edit": _early(nan_at_12)}}), (0.8, {"candidate": HANG}),
        (0.9, {"candidate": {"peak": 100 << 20}}), (1.0, {"control": {"edit": _early(drift)}}),
    ):  # fmt: skip
        if share < limit:
            return changes
    if draw > 0.97:
        return {"skip_reason": "needs GPUs for 8 ranks, this machine has them for 4"}
    return {}


def write_nightly(folder: Path, num_cases: int, *, failing: float = 0.06) -> Path:
    """A run folder of `num_cases` cases of which a part fails, some as one of three causes."""
    rng = random.Random(num_cases)
    writer = Writer(folder, scenario=SCENARIO, steps=STEPS, created=_created(NIGHTS))
    every = itertools.product(range(num_cases), MODELS, STRATEGIES, POOLS, GRAPHS)
    for seed, model, strategy, pool, graph in itertools.islice(every, num_cases):
        labels = {
            "model": model, "strategy": strategy, "pool": pool, "seed": str(seed), "graph": graph,
        }  # fmt: skip
        name = "-".join([model, strategy, pool, f"s{seed}", graph])
        changes = _changes(rng.random(), failing)
        writer.add(name, 2, graph, labels=labels, scenario="nightly", **changes)
    return writer.write()


def _created(night: int) -> str:
    return (FIRST + datetime.timedelta(days=night)).isoformat(timespec="seconds")


def write_history(folder: Path) -> Path:
    """Nights before the folder's own: values that vary, some failures, and the night itself."""
    entry, rng = gather(RunFolder.open(folder)), random.Random(NIGHTS)
    path = folder.parent / HISTORY_FOLDER
    history = History.open(path, create=True)
    for night in range(NIGHTS + 1):
        history.record(_night(entry, night, rng))
    return path


def _night(entry: FolderEntry, night: int, rng: random.Random) -> FolderEntry:
    slow = 1.3 if night >= 9 else 1.0

    def case(plain: CaseEntry, place: int) -> CaseEntry:
        # Failures are of different ages, and some come and go.
        fails = night >= (place % 11) + 3 or (place % 7 == 0 and night % 5 == 0)
        if night == NIGHTS or plain.outcome in ("passed", "skipped") or fails:
            return plain
        return dataclasses.replace(
            plain, outcome="passed", what="", message="", causes=(), difference=None
        )

    def run(plain: RunEntry) -> RunEntry:
        step_s = 0.0125 * slow * rng.uniform(0.99, 1.01)
        return plain if plain.step_s is None else dataclasses.replace(plain, step_s=step_s)

    return dataclasses.replace(
        entry, id=f"{night:016x}", created=_created(night), commit=f"{night // 2:012x}",
        environment={"cores": 8}, runs=tuple(map(run, entry.runs)),
        cases=tuple(case(c, place) for place, c in enumerate(entry.cases)),
    )  # fmt: skip
