"""An engine without processes: it writes a run's records when the run is started, in no time."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.cli import main
from harness.engine import Engine, Slots
from harness.recorder import RecordFile
from harness.records import (
    DIGEST_GROUPS,
    SAMPLES,
    TOKENS,
    RankExit,
    RunOutcome,
    RunSpec,
    StepRecord,
    What,
)
from harness.runner.launch import Prepared
from harness.store import begin_run, save_outcome
from tests.support.run_records import Lab

TENSORS = dict.fromkeys(DIGEST_GROUPS, ("w",)) | {SAMPLES: (TOKENS,)}
SCENARIO = """\
name: small
why: A sentence with <b>markup</b> and [red]brackets[/red].
base: {steps: 4}
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 60}
"""
Spoil = Callable[[RunSpec, StepRecord], StepRecord]
Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


class FakeEngine(Engine):
    """Makes runs with equal bits, which end in the order in which they were started.

    Attributes:
        made: keys of the runs that were started.
        under_way: started and not ended: specification, outcome, folder.
        jobs: runs that may be under way at a time; None for as many as there are slots.
        ends: how runs end that do not end well, by scopes of graphs joined by `+`.
        spoil: changes a record of a step.
        on_start, on_wait: called before a run is started, or waited for.
    """

    def __init__(self, slots: int = 8, *, jobs: int | None = 1) -> None:
        self.made: list[str] = []
        self.under_way: list[tuple[RunSpec, RunOutcome, Path]] = []
        self.options: dict[str, Any] = {}
        self.slots, self.jobs, self._slots = slots, jobs, Slots(slots)
        self.ends: dict[str, What] = {}
        self.spoil: Spoil = lambda spec, record: record
        self.on_start: Callable[[RunSpec], None] = lambda spec: None
        self.on_wait: Callable[[], None] = lambda: None
        self.environment: dict[str, Any] = {"fingerprint": {"torch": "x"}}
        self.closed = self.cancelled = 0

    def __call__(self, **options: Any) -> "FakeEngine":
        """Stand in for the class of the engine."""
        self.options, self.under_way = options, []
        self.slots = options["slots"]
        self._slots = Slots(self.slots, options.get("devices", ()))
        return self

    def check(self, spec: RunSpec) -> None:
        self._slots.check(spec)

    def can_start(self, spec: RunSpec) -> bool:
        is_full = self.jobs is not None and len(self.under_way) >= self.jobs
        return not is_full and self._slots.fits(spec)

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self.on_start(spec)
        self._slots.take(spec)
        self.made.append(spec.key)
        begin_run(folder, spec)
        for rank in range(spec.world_size if "steps" in spec.config else 0):
            file = RecordFile(folder / f"rank{rank}.jsonl")
            for record in self._records(spec, rank):
                file.write(record)
            file.close()
        self.under_way.append((spec, self.ending(spec, folder, attempt), folder))

    def ending(self, spec: RunSpec, folder: Path, attempt: int) -> RunOutcome:
        """How a run whose records lie in `folder` will have ended."""
        what = self.ends.get("+".join(spec.config["graph"]), "")
        return RunOutcome(
            key=spec.key, what=what, message=f"planted {what}" if what else "",
            culprit_rank=0 if what else None, started_unix_s=0.0, wall_s=0.5, attempt=attempt,
            ranks=tuple(RankExit(rank=r, code=1 if what else 0) for r in range(spec.world_size)),
        )  # fmt: skip

    def _records(self, spec: RunSpec, rank: int) -> list[Any]:
        config = spec.config
        lab = Lab(
            config["steps"], spec.world_size, config["microbatches"], tensors=TENSORS, taps={}
        )
        made = lab.rank(rank, spec)
        assert made.start is not None
        start = dataclasses.replace(made.start, run=spec.key, environment=self.environment)
        spoiled = [self.spoil(spec, step) for step in made.steps]
        return [start, made.initial, *spoiled, made.end]

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        self.on_wait()
        if not self.under_way:
            return []
        spec, outcome, folder = self.under_way.pop(0)
        self._slots.release(spec.key)
        save_outcome(folder, outcome)
        return [outcome]

    def cancel(self) -> None:
        self.cancelled += 1
        while self.under_way:
            self._slots.release(self.under_way.pop()[0].key)

    def close(self) -> None:
        self.closed += 1


def other_bits(record: StepRecord, group: str = "weights", digit: str = "0") -> StepRecord:
    """The record, with another digest of a group."""
    return dataclasses.replace(record, digests=record.digests | {group: digit * 32})


def unequal(spec: RunSpec, record: StepRecord) -> StepRecord:
    """One weight of the last rank of graphed runs differs from step 2 on."""
    last = record.rank == spec.world_size - 1
    is_here = spec.config["graph"] == ["attn"] and last and record.step >= 2
    return other_bits(record) if is_here else record


class PlantingEngine(FakeEngine):
    """Of the faults that are planted in a scenario, `ulp` is other weights, `sigkill` no end."""

    MADE: list[str] = []  # noqa: RUF012 - of all engines

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared.plan.slots, jobs=None)
        self.made = self.MADE
        self.spoil = lambda spec, record: other_bits(record) if _fault(spec) == "ulp" else record

    def ending(self, spec: RunSpec, folder: Path, attempt: int) -> RunOutcome:
        self.ends = {"": "killed"} if _fault(spec) == "sigkill" else {}
        return super().ending(spec, folder, attempt)

    def _records(self, spec: RunSpec, rank: int) -> list[Any]:
        records = super()._records(spec, rank)
        return records[:-1] if _fault(spec) == "sigkill" else records


def _fault(spec: RunSpec) -> str:
    return getattr(spec.plant, "fault", "")


def run_json(capsys: Capsys, *args: str) -> tuple[int, Any]:
    """Exit code and JSON answer of one command."""
    capsys.readouterr()
    code = main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def failed_run(engine: FakeEngine, spoil: Spoil = unequal) -> None:
    """A run folder `r` in which dp2-attn fails: a weight of rank 1 differs from step 2 on."""
    engine.spoil = spoil
    assert main(["run", "small.yaml", "--out", "r", "--no-history"]) == 1
    engine.made.clear()


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str


class Cli:
    """The command line in this process; each call asserts its exit code, if it is not None."""

    def __init__(self, capsys: Capsys) -> None:
        self._capsys = capsys

    def __call__(self, *args: str, code: int | None = 0) -> Said:
        """Run one command; what it printed."""
        self._capsys.readouterr()
        found = main([*args])
        said = Said(*self._capsys.readouterr())
        assert code in (found, None), said
        return said

    def json(self, *args: str, code: int | None = 0) -> Any:
        """The JSON answer of one command."""
        return json.loads(self(*args, "--json", code=code).out)

    def refused(self, *args: str, code: int = 4) -> str:
        """The only line that a command says which is not carried out."""
        err = self(*args, code=code).err
        assert err.count("\n") == 1, err
        return err
