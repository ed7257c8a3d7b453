"""From a case to its answer, for as many askers at a time as there are.

    file -> prepared once, a run folder of its own, an engine's pool -> one execution a case

A case is answered once in a session: whoever asks again gets the same answer, so that no plugin
that repeats tests makes a failure pass. Runs on this machine share one pool a device, so one set of
slots; each scenario on Slurm has a pool of its own, for Slurm keeps its slots. Cases whose legs are
timed against one reference are carried out together, whichever is asked for first.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness import launch, machine
from harness.engine.base import Engine
from harness.errors import Interrupted, UsageError, shown
from harness.history import remember
from harness.records import CaseSpec, Json, Verdict
from harness.run import Silent, execute
from harness.scenario.schema import load_scenario
from harness.store import RunFolder
from harness.under_pytest.pool import RunPool, SharedEngine

MAX_ASKERS = 1024
"""Cases that may be under way at a time; a thread each."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the options of the command line ask for. Paths are absolute.

    Attributes:
        out: where run folders go, each at its scenario's path from `root`.
        root: pytest's rootdir.
        argv: the command line, for manifests.
        history: the history to record in; None for none.
    """

    out: Path
    root: Path
    argv: tuple[str, ...]
    slots: int | None = None
    device: str | None = None
    ranks_per_gpu: int | None = None
    history: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Answer(Json):
    """A case's verdict, and the folder that it lies in."""

    verdict: Verdict
    folder: str


@dataclass(frozen=True)
class _Opened:
    """A scenario under way."""

    folder: RunFolder
    pool: RunPool
    cases: Mapping[str, CaseSpec]
    retries: int


class CaseService:
    """Answers for the cases of any number of scenario files, all on the same slots."""

    def __init__(
        self, wanted: Wanted, make_engine: Callable[[launch.Prepared], Engine] = launch.make_engine
    ) -> None:
        """Prepare; nothing is read, written or started before the first question."""
        self._wanted = wanted
        self._make_engine = make_engine
        self._lock = threading.RLock()
        self._chosen: dict[Path, frozenset[str]] = {}
        self._opened: dict[Path, _Opened] = {}
        self._pools: dict[str, RunPool] = {}
        self._answers: dict[tuple[Path, str], Future[Answer]] = {}
        self._turns: dict[tuple[Path, str], threading.Lock] = {}
        self._closing = False
        self._threads = ThreadPoolExecutor(MAX_ASKERS, thread_name_prefix="harness-case")

    @property
    def folders(self) -> tuple[Path, ...]:
        """Run folders made so far."""
        return tuple(opened.folder.path for opened in self._opened.values())

    def choose(self, chosen: Mapping[Path, Sequence[str]]) -> None:
        """Say which cases will be asked for: run folders hold these and no others."""
        self._chosen = {path: frozenset(ids) for path, ids in chosen.items()}

    def ask(self, file: Path, case_id: str) -> Answer:
        """The answer for a case, made if it is the first question for it.

        Args:
            file: the scenario, absolute.
            case_id: one of its cases.

        Raises:
            HarnessError: the scenario, the machine or the harness does not allow an answer.
        """
        with self._lock:
            future = self._answers.get((file, case_id))
            if future is None:
                future = self._threads.submit(self._answer, file, case_id)
                self._answers[file, case_id] = future
        return future.result()

    def _answer(self, file: Path, case_id: str) -> Answer:
        opened = self._open(file)
        case = opened.cases.get(case_id)
        if case is None:
            raise UsageError(f"{file}: expected one of its cases, got {shown(case_id)}")
        engine = SharedEngine(opened.pool, opened.folder, retries=opened.retries)
        together = _together(case, opened.cases.values())
        with self._lock:
            turn = self._turns.setdefault((file, together[0].id), threading.Lock())
        with turn:
            # Who comes second finds the verdicts stored.
            verdicts = execute(opened.folder, together, engine, Silent())
        (verdict,) = (verdict for verdict in verdicts if verdict.case_id == case_id)
        return Answer(verdict=verdict, folder=str(opened.folder.case_folder(case_id)))

    def _open(self, file: Path) -> _Opened:
        with self._lock:
            if self._closing:
                raise Interrupted("the session is over")
            if file not in self._opened:
                self._opened[file] = self._opened_now(file)
            return self._opened[file]

    def _opened_now(self, file: Path) -> _Opened:
        request = launch.Request(
            scenario=file,
            select="all",  # pytest selects
            device=self._wanted.device,
            slots=self._slots,
            ranks_per_gpu=self._wanted.ranks_per_gpu,
        )
        prepared = launch.prepare(request)
        chosen = self._chosen.get(file)
        cases = tuple(c for c in prepared.plan.cases if chosen is None or c.id in chosen)
        plan = dataclasses.replace(prepared.plan, cases=cases)
        left_out = len(prepared.plan.cases) - len(cases)
        told = tuple(
            dataclasses.replace(said, select="pytest", num_cases=len(cases), left_out=left_out)
            for said in prepared.selected
        )
        prepared = dataclasses.replace(prepared, plan=plan, selected=told)
        folder = launch.make_folder(prepared, self._place(file), self._wanted.argv)
        name = prepared.device if prepared.slurm is None else str(file)
        if name not in self._pools:
            self._pools[name] = RunPool(self._make_engine(prepared))
        return _Opened(folder, self._pools[name], {c.id: c for c in cases}, prepared.retries)

    @cached_property
    def _slots(self) -> int | None:
        """One number for all scenarios; what the largest of those chosen states, at least."""
        if self._wanted.slots is not None:
            return self._wanted.slots
        stated = [load_scenario(path).launch.slots or 0 for path in self._chosen]
        most = max(stated, default=0)
        return max(most, machine.default_slots(machine.describe())) if most else None

    def _place(self, file: Path) -> Path:
        try:
            inside = file.relative_to(self._wanted.root)
        except ValueError:
            inside = Path(*file.parts[1:])
        return self._wanted.out / inside.with_suffix("")

    def close(self) -> tuple[str, ...]:
        """Kill what runs, give folders free, record in the history; warnings of the latter."""
        with self._lock:
            self._closing = True
        for pool in self._pools.values():
            pool.close()
        self._threads.shutdown()
        for opened in self._opened.values():
            opened.folder.release()
        if self._wanted.history is None:
            return ()
        told = (remember(folder, self._wanted.history) for folder in self.folders)
        return tuple(warning for warning in told if warning)


def _together(case: CaseSpec, cases: Iterable[CaseSpec]) -> list[CaseSpec]:
    """The cases that are carried out with `case`: those that share its timed reference.

    The repeats of a reference stand between those of its candidates, so that a drift of the machine
    favours nobody; made for one case and read by another later, they would not.
    """
    if not case.repeats:
        return [case]
    return [other for other in cases if other.repeats and other.reference.key == case.reference.key]
