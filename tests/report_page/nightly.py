"""A run folder as a nightly of many cases leaves it, and a history of the two weeks before it."""

import dataclasses
import datetime
import random
from pathlib import Path
from typing import Any

from harness.history import DATABASE_FILE, History, gather
from harness.history.ledger import CaseEntry, FolderEntry, RunEntry
from harness.store import RunFolder
from tests.unit.reports.folders import Edit, Writer, drift, nan_at_12, same

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


def write_nightly(folder: Path, num_cases: int, *, failing: float = 0.06) -> Path:
    """A run folder of `num_cases` cases of which a part fails, some as one of three causes."""
    rng = random.Random(num_cases)
    writer = Writer(folder, scenario=SCENARIO, steps=STEPS, created=_created(NIGHTS))
    names = [
        (model, strategy, pool, seed, graph)
        for seed in range(num_cases)
        for model in MODELS
        for strategy in STRATEGIES
        for pool in POOLS
        for graph in GRAPHS
    ][:num_cases]
    for model, strategy, pool, seed, graph in names:
        labels = {
            "model": model, "strategy": strategy, "pool": pool, "seed": str(seed), "graph": graph,
        }  # fmt: skip
        name = "-".join([model, strategy, pool, f"s{seed}", graph])
        draw = rng.random()
        changes: dict[str, Any] = {}
        if draw < failing * 0.5:
            changes["candidate"] = {"edit": _early(drift)}
        elif draw < failing * 0.7:
            changes["candidate"] = {"edit": _early(nan_at_12)}
        elif draw < failing * 0.8:
            printed = "".join(f"step {n} took 12 ms\n" for n in range(60))
            changes["candidate"] = {
                "what": "hang", "culprit": 1, "stop": 4, "printed": printed,
                "message": "time was up after 300 s; the others waited for rank 1 in all_gather",
            }  # fmt: skip
        elif draw < failing * 0.9:
            changes["candidate"] = {"peak": 100 << 20}
        elif draw < failing:
            changes["control"] = {"edit": _early(drift)}
        elif draw > 0.97:
            changes["skip_reason"] = "needs GPUs for 8 ranks, this machine has them for 4"
        writer.add(name, 2, graph, labels=labels, scenario="nightly", **changes)
    return writer.write()


def _early(edit: Edit) -> Edit:
    """An edit that is written for twenty steps, six steps earlier."""
    if edit is same:
        return edit
    return lambda record: (
        None
        if (changed := edit(dataclasses.replace(record, step=record.step + 6))) is None
        else dataclasses.replace(changed, step=record.step)
    )


def _created(night: int) -> str:
    return (FIRST + datetime.timedelta(days=night)).isoformat(timespec="seconds")


def write_history(folder: Path, *, nights: int = NIGHTS) -> Path:
    """Nights before the folder's own: values that vary, some failures, and the night itself."""
    entry = gather(RunFolder.open(folder))
    path = folder.parent / DATABASE_FILE
    rng = random.Random(nights)
    with History.open(path, create=True) as history:
        for night in range(nights + 1):
            history.record(_night(entry, night, rng, last=night == nights))
    return path


def _night(entry: FolderEntry, night: int, rng: random.Random, *, last: bool) -> FolderEntry:
    slow = 1.3 if night >= 9 else 1.0

    def run(plain: RunEntry) -> RunEntry:
        if plain.step_s is None:
            return plain
        return dataclasses.replace(plain, step_s=0.0125 * slow * rng.uniform(0.99, 1.01))

    def case(plain: CaseEntry, place: int) -> CaseEntry:
        if last or plain.outcome in ("passed", "skipped"):
            return plain
        # Failures are of different ages, and some come and go.
        if night >= (place % 11) + 3 or (place % 7 == 0 and night % 5 == 0):
            return plain
        return dataclasses.replace(
            plain, outcome="passed", what="", message="", causes=(), difference=None
        )

    return dataclasses.replace(
        entry,
        id=f"{night:016x}",
        created=_created(night),
        commit=f"{night // 2:012x}",
        environment={"cores": 8},
        cases=tuple(case(c, place) for place, c in enumerate(entry.cases)),
        runs=tuple(run(r) for r in entry.runs),
    )
