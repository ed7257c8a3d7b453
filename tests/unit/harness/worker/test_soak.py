"""All ranks end a soak at the same step, whoever has enough when."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from harness.codec import Json
from harness.records import EventRecord, RunSpec
from harness.soaking import SoakSpec
from harness.worker.soak import Soaking
from tests.support.fake_engine import Patch


class Store:
    """What ranks share, here threads: who asks for a key waits until it is there."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.most = 0
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.held[key] = value.encode()
            self.most = max(self.most, len(self.held))
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.held, timeout=60)
            return self.held[key]

    def delete_key(self, key: str) -> None:
        with self._changed:
            del self.held[key]


def soaking(
    soak: SoakSpec | None, rank: int = 0, world_size: int = 1, store: Any = None, **config: Any
) -> tuple[Soaking, Any, list[Json]]:
    """A rank's soak over a trainer that only counts."""
    config = {"steps": 8, "flush_every": 4, "stress": (), "stress_seed": 1} | config
    spec = RunSpec(config=config, device="cpu", world_size=world_size, timeout_s=9.0, soak=soak)
    counts = SimpleNamespace(replays=0, captured=1)
    trainer: Any = SimpleNamespace(config=SimpleNamespace(**config), counts=counts, stressors=None)
    written: list[Json] = []
    return Soaking(spec, rank, trainer, store, written.append), counts, written


@pytest.mark.parametrize(
    ("amount", "turn_steps", "config", "steps"),
    [
        (None, 0, {}, 8),
        (1, 0, {}, 8),
        (17, 0, {}, 12),
        (24, 0, {}, 12),
        (25, 0, {}, 16),
        (1, 0, {"flush_every": 5}, 10),
        (1, 10, {"stress": ("races",)}, 8),
        (1, 10, {"stress": ("jitter", "poison", "races")}, 20),
    ],
)
def test_a_soak_by_replays_ends_at_a_flush(
    amount: int | None, turn_steps: int, config: dict[str, Any], steps: int
) -> None:
    """The first with enough replays, all steps and a turn of each stressor that takes one."""
    soak = None if amount is None else SoakSpec(by="replays", amount=amount, turn_steps=turn_steps)
    run, counts, written = soaking(soak, **config)
    for step in run.steps():
        counts.replays = 2 * (step + 1)
    run.write_event()
    said = [(e.detail["steps"], e.detail["replays"]) for e in written if isinstance(e, EventRecord)]
    assert said == ([] if amount is None else [(steps, 2 * steps)])
    assert counts.replays == 2 * steps


def test_a_soak_by_duration_asks_the_clock_of_rank_0(monkeypatch: Patch) -> None:
    """Five steps a second for three seconds end at the flush after step 15."""
    now = 100.0
    monkeypatch.setattr("harness.worker.soak.time.monotonic", lambda: now)
    run, _, _ = soaking(SoakSpec(by="duration", amount=3))
    taken = []
    for step in run.steps():
        taken.append(step)
        now += 0.2
    assert len(taken) == 16


def test_ranks_agree_on_the_last_step() -> None:
    """The slowest to have enough decides, no rank goes a step further, keys do not pile up."""
    store, soak = Store(), SoakSpec(by="replays", amount=40)

    def train(rank: int) -> tuple[int, int]:
        run, counts, _ = soaking(soak, rank, 3, store)
        taken = 0
        for _ in run.steps():
            taken, counts.replays = taken + 1, counts.replays + rank + 1
        return taken, counts.replays

    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(train, range(3)))
    assert done == [(40, 40), (40, 80), (40, 120)]
    # Of an answer and the one before it: three votes and a word each.
    assert store.most <= 8
