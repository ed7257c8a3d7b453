"""One engine for executions that go on at the same time: slots are given once, runs made once.

    execution of case A - SharedEngine \
    execution of case B - SharedEngine  > RunPool: a queue, and the one thread that has the engine
    execution of case C - SharedEngine /

A run that two cases read belongs to whoever asks first; the others wait for its outcome, which
stands for as long as the pool lives, so no run is set aside while somebody reads it. Runs that the
machine failed are made again in here, before anybody is told.

Runs start in the order in which they were asked for. One that does not fit may be overtaken, so
that no slot idles, but only `MAX_OVERTAKEN` times: then nothing starts until enough slots have come
free for it. Every run ends at its own `timeout_s` at the latest, so every run gets its turn. Timed
runs (`harness.repeats`) have the machine to themselves here as elsewhere.
"""

import queue
import threading
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from harness.engine.base import Engine
from harness.errors import Interrupted
from harness.records import RunOutcome, RunSpec
from harness.repeats import is_timed
from harness.retries import Retries
from harness.store import RunFolder

MAX_OVERTAKEN = 8
"""How many runs may start before one that waits for more slots."""
LOOK_S = 0.02
"""How long a new wish may wait for the engine's thread while runs are under way."""


@dataclass(eq=False)
class Wish:
    """A run that somebody asked for. `attempt` is that of the engine's next start."""

    folder: RunFolder
    spec: RunSpec
    retries: Retries
    attempt: int = 0
    outcome: "Future[RunOutcome]" = field(default_factory=Future)


class RunPool:
    """Owns an engine and a thread; `SharedEngine` is how executions use it."""

    def __init__(self, engine: Engine) -> None:
        """Take over `engine`: nobody else may use it, and `close` closes it."""
        self.engine = engine
        self._lock = threading.Lock()
        self._known: dict[Path, Wish] = {}
        self._new: queue.SimpleQueue[Wish | None] = queue.SimpleQueue()
        self._waiting: list[Wish] = []
        self._under_way: dict[str, Wish] = {}
        self._num_overtaken = 0
        self._closing = False
        # The engine's processes die with the thread that started them: this one, and no earlier.
        self._thread = threading.Thread(target=self._serve, name="harness-runs", daemon=True)
        self._thread.start()

    def claim(self, folder: RunFolder, spec: RunSpec, retries: Retries) -> tuple[Wish, bool]:
        """The run's wish, and whether it is new: then the caller has to `submit` or `drop` it."""
        with self._lock:
            if self._closing:
                raise Interrupted("the session is over")
            path = folder.run_folder(spec.key)
            known = self._known.get(path)
            if known is not None:
                return known, False
            wish = self._known[path] = Wish(folder, spec, retries)
            return wish, True

    def submit(self, wish: Wish) -> None:
        """Queue a claimed run."""
        self._new.put(wish)

    def drop(self, wish: Wish, why: BaseException) -> None:
        """Tell whoever waits for a claimed run that it will not be made."""
        with self._lock:
            self._known.pop(wish.folder.run_folder(wish.spec.key), None)
        _fail([wish], why)

    def close(self) -> None:
        """Kill every run, close the engine; whoever still waits gets `Interrupted`."""
        with self._lock:
            self._closing = True
        self._new.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            while self._take_new():
                self._start_what_fits()
                self._hear()
        finally:
            with self._lock:
                self._closing = True
                _fail(self._known.values(), Interrupted("the session is over"))
            self.engine.close()

    def _take_new(self) -> bool:
        """Queue what has been asked for, after waiting for it where nothing else is to do."""
        idle = not self._under_way and not self._waiting
        while True:
            try:
                wish = self._new.get(block=idle)
            except queue.Empty:
                return True
            if wish is None:
                return False
            self._waiting.append(wish)
            idle = False

    def _start_what_fits(self) -> None:
        while (wish := self._next()) is not None:
            spec, folder = wish.spec, wish.folder.run_folder(wish.spec.key)
            self._under_way[spec.key] = wish
            try:
                self.engine.start(spec, folder, attempt=wish.attempt)
            except BaseException as error:  # noqa: BLE001 - raised where the outcome is waited for
                _fail([self._under_way.pop(spec.key)], error)

    def _next(self) -> Wish | None:
        for place, wish in enumerate(self._waiting):
            if self._may_start(wish.spec):
                self._num_overtaken = self._num_overtaken + 1 if place else 0
                return self._waiting.pop(place)
            if self._num_overtaken >= MAX_OVERTAKEN:
                return None
        return None

    def _may_start(self, spec: RunSpec) -> bool:
        if is_timed(spec) and self._under_way:
            return False
        if any(is_timed(wish.spec) for wish in self._under_way.values()):
            return False
        # Two scenarios may ask for the same work, each in a folder of its own.
        return spec.key not in self._under_way and self.engine.can_start(spec)

    def _hear(self) -> None:
        if not self._under_way:
            return
        try:
            for outcome in self.engine.wait(LOOK_S):
                self._ended(self._under_way.pop(outcome.key), outcome)
        except BaseException as error:  # noqa: BLE001 - raised where the outcomes are waited for
            # Which run it was is not said: the answers of all that are under way are lost.
            _fail(list(self._under_way.values()), error)
            self._under_way.clear()
            self.engine.cancel()

    def _ended(self, wish: Wish, outcome: RunOutcome) -> None:
        try:
            again = wish.retries.why_again(wish.spec)
            if again:
                wish.folder.set_aside(wish.spec.key)
                wish.attempt = wish.folder.num_attempts(wish.spec.key)
        except BaseException as error:  # noqa: BLE001 - raised where the outcome is waited for
            _fail([wish], error)
            return
        if again:
            self._waiting.insert(0, wish)
        else:
            wish.outcome.set_result(outcome)


def _fail(wishes: Iterable[Wish], why: BaseException) -> None:
    for wish in wishes:
        if not wish.outcome.done():
            wish.outcome.set_exception(why)


class SharedEngine:
    """An engine for one execution, over a pool that others use as well."""

    def __init__(self, pool: RunPool, folder: RunFolder, *, retries: int) -> None:
        """Runs of `folder` on `pool`; those that the machine failed are made again in there."""
        self._pool = pool
        self._folder = folder
        self._retries = Retries(folder, retries)
        self._claimed: dict[str, Wish] = {}
        self._waited: dict[str, Wish] = {}

    @property
    def slots(self) -> int:
        """How many ranks may run at the same time, those of others included."""
        return self._pool.engine.slots

    def check(self, spec: RunSpec) -> None:
        """Refuse a run that could never start here (`UsageError`)."""
        self._pool.engine.check(spec)

    def can_start(self, spec: RunSpec) -> bool:
        """Always: whatever is started waits in the pool, where all executions' runs are seen."""
        return True

    def adopt(self, spec: RunSpec, folder: Path) -> bool:
        """Share a run that another execution asked for; if there is none, it is ours to start."""
        wish, mine = self._pool.claim(self._folder, spec, self._retries)
        (self._claimed if mine else self._waited)[spec.key] = wish
        return not mine

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        """Queue the run that `adopt` left to us."""
        wish = self._claimed.pop(spec.key)
        wish.attempt = attempt
        self._waited[spec.key] = wish
        self._pool.submit(wish)

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended; see `Engine.wait`.

        Raises:
            HarnessError: the engine failed, or the session is over.
        """
        futures = [wish.outcome for wish in self._waited.values()]
        wait(futures, timeout_s, return_when=FIRST_COMPLETED)
        done = [key for key, wish in self._waited.items() if wish.outcome.done()]
        return [self._waited.pop(key).outcome.result() for key in done]

    def cancel(self) -> None:
        """Want nothing any more. Runs under way end by themselves: others may read them."""
        for wish in self._claimed.values():
            self._pool.drop(wish, Interrupted("whoever was to start the run was stopped"))
        self._claimed.clear()
        self._waited.clear()

    def close(self) -> None:
        """Want nothing any more; the pool stays."""
        self.cancel()
