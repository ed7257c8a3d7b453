"""Models and layouts that are drawn at random, their memory predicted and measured."""

import dataclasses
import time
from collections.abc import Iterator

from fsdp_core.config import POOLS, TrainConfig
from harness.errors import ScenarioError
from tests.dist.rank_pool import RankPool
from tests.memory_table.comparison import Row, compare
from tests.memory_table.rehearsal import can_rehearse
from tests.scope_fuzz.draw import Draw

WORLDS = (1, 2, 2, 4)


def drawn(seed: int) -> Iterator[tuple[str, TrainConfig]]:
    """Eager runs that can be rehearsed, named by their place; endless, the same for each seed."""
    draw, number = Draw(seed, WORLDS, is_small=True), 0
    while True:
        case = draw.case()
        number += 1
        try:
            config = case.config(graph=(), stress=(), compile=(), taps=())
        except ScenarioError:
            continue
        # Draws are of graphed runs, which leave out pools that move.
        fsdp = dataclasses.replace(config.fsdp, pool=POOLS[number % len(POOLS)])
        config = dataclasses.replace(config, ledger=False, fsdp=fsdp)
        if can_rehearse(config):
            yield f"{seed}.{number} {told(config)}", config


def told(config: TrainConfig) -> str:
    """A layout and a model in few words."""
    parallel = dataclasses.asdict(config.parallel)
    degrees = [f"{axis}{n}" for axis, n in parallel.items() if type(n) is int and n > 1]
    return " ".join([config.model.preset, *(degrees or ["one rank"]), config.fsdp.strategy,
                     config.fsdp.pool])  # fmt: skip


def rows(pool: RankPool, seed: int, seconds: float) -> Iterator[Row]:
    """Every rank of every run that is drawn within so many seconds."""
    end = time.monotonic() + seconds
    for name, config in drawn(seed):
        if time.monotonic() > end:
            return
        yield from compare(pool, name, config)
