"""The steps of a run: as many as its configuration says, or as a soak asks for.

A soak by replays or by duration ends on all ranks at the same step, though ranks count for
themselves. Every `flush_every` steps, when the host waits for the device anyway, each rank says in
the run's store whether it has enough, and goes on or stops as rank 0 answers:

    rank r    soak/<step>/<r> = 0 | 1     then waits for the answer
    rank 0    reads all of these          soak/<step> = go | stop

No collective and no tensor is involved, so what is computed does not change. Keys of an answer are
deleted at the next one: by then every rank has read it.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_core.train import Trainer
from harness.codec import Json
from harness.records import EventRecord, RunSpec
from harness.soaking import SoakSpec, taking_turns, turn_of


class Soaking:
    """Counts the steps of one rank, and says whose turn it is; a rank alone needs no store."""

    def __init__(
        self, spec: RunSpec, rank: int, trainer: Trainer, store: Any,
        write: Callable[[Json], None], first: int = 0,
    ) -> None:  # fmt: skip
        self._soak, self._world_size, self._rank = spec.soak, spec.world_size, rank
        self._trainer, self._store, self._write = trainer, store, write
        self._began_s = time.monotonic()
        self._done, self._turns = first, 0
        self._asked = ""

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to take; whoever asks for the next has taken the last."""
        config, soak = self._trainer.config, self._soak
        while self._done < config.steps or (soak is not None and soak.is_open):
            is_asked = self._done >= config.steps and self._done % config.flush_every == 0
            if soak is not None and is_asked and self._is_enough(soak):
                return
            if soak is not None and soak.turn_steps and self._done % soak.turn_steps == 0:
                self._take_turn(soak.turn_steps)
            yield self._done
            self._done += 1

    def write_event(self) -> None:
        """Say what was done, for who judges whether it was as much as was asked."""
        if self._soak is None:
            return
        counts = self._trainer.counts
        detail = {
            "steps": self._done, "replays": counts.replays, "captured": counts.captured,
            "trained_s": time.monotonic() - self._began_s, "turns": self._turns,
        }  # fmt: skip
        self._write(EventRecord(name="soaked", rank=self._rank, step=self._done - 1, detail=detail))

    def _take_turn(self, turn_steps: int) -> None:
        trainer = self._trainer
        if trainer.stressors is None:
            return
        config = trainer.config
        names = turn_of(config.stress, config.stress_seed, self._done // turn_steps)
        trainer.take_turn(names)
        self._turns += 1
        detail = {"stress": list(names)}
        self._write(EventRecord(name="turn", rank=self._rank, step=self._done, detail=detail))

    def _is_enough(self, soak: SoakSpec) -> bool:
        stressors = taking_turns(self._trainer.config.stress)
        if self._done < soak.turn_steps * len(stressors):
            return False  # on every rank alike
        if soak.by == "duration":
            mine = self._rank != 0 or time.monotonic() - self._began_s >= soak.amount
        else:
            mine = self._trainer.counts.replays >= soak.amount
        return mine if self._world_size == 1 else self._agree(mine)

    def _agree(self, mine: bool) -> bool:  # noqa: FBT001 - what the store is told
        store, key = self._store, f"soak/{self._done}"
        store.set(f"{key}/{self._rank}", "1" if mine else "0")
        if self._rank == 0:
            votes = [f"/{rank}" for rank in range(self._world_size)]
            said = [store.get(key + vote) for vote in votes]  # of every rank: it is deleted later
            store.set(key, "stop" if set(said) == {b"1"} else "go")
            for vote in ("", *votes) if self._asked else ():
                store.delete_key(self._asked + vote)
            self._asked = key
        return bool(store.get(key) == b"stop")
