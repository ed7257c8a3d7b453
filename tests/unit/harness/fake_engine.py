"""An engine that writes records itself, in no time, for the tests of the command line."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.config import TrainConfig
from harness.checks.complete import OF_INITIAL, launches, owed
from harness.cli import main
from harness.recorder import RecordFile
from harness.records import (
    DIGEST_GROUPS,
    SAMPLES,
    TOKENS,
    EndRecord,
    FloatBits,
    InitialRecord,
    RankExit,
    RunOutcome,
    RunSpec,
    StartRecord,
    StepRecord,
    What,
)
from harness.store import begin_run, save_outcome

GROUPS = (SAMPLES, *DIGEST_GROUPS)
SCENARIO = """\
name: small
why: A sentence with <b>markup</b> and [red]brackets[/red].
base: {steps: 4}
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 60}
"""


class FakeEngine:
    """Makes runs at once, with equal bits; `spoil` changes records, `ends` outcomes by graph."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.options: dict[str, Any] = {}
        self.ends: dict[str, What] = {}
        self.spoil: Callable[[RunSpec, StepRecord], StepRecord] = lambda spec, record: record
        self.on_start: Callable[[RunSpec], None] = lambda spec: None
        self.environment: dict[str, Any] = {"fingerprint": {"torch": "x"}}
        self.ended: list[RunOutcome] = []
        self.closed = 0

    def __call__(self, **options: Any) -> "FakeEngine":
        """Stand in for the class of the engine."""
        self.options = options
        return self

    @property
    def slots(self) -> int:
        return int(self.options["slots"])

    def check(self, spec: RunSpec) -> None:
        assert spec.world_size <= self.slots

    def can_start(self, spec: RunSpec) -> bool:
        return not self.ended

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self.on_start(spec)
        self.made.append(spec.key)
        begin_run(folder, spec)
        for rank in range(spec.world_size):
            file = RecordFile(folder / f"rank{rank}.jsonl")
            for record in self._records(spec, rank):
                file.write(record)
            file.close()
        what = self.ends.get("+".join(spec.config["graph"]), "")
        outcome = RunOutcome(
            key=spec.key, what=what, message=f"planted {what}" if what else "",
            culprit_rank=0 if what else None, started_unix_s=0.0, wall_s=0.5, attempt=attempt,
            ranks=tuple(RankExit(rank=r, code=1 if what else 0) for r in range(spec.world_size)),
        )  # fmt: skip
        save_outcome(folder, outcome)
        self.ended.append(outcome)

    def _records(self, spec: RunSpec, rank: int) -> list[Any]:
        tensors: dict[str, tuple[str, ...]] = {
            group: (TOKENS if group == SAMPLES else "w",) for group in GROUPS
        }
        steps = [
            self.spoil(
                spec,
                StepRecord(
                    step=step, rank=rank, loss=FloatBits.from_bits(0x40000000),
                    microbatch_losses=(FloatBits.from_bits(0x40000000),),
                    grad_norm=FloatBits.from_bits(0x3F000000),
                    digests={group: hashlib.md5(f"{group}{rank}{step}".encode()).hexdigest()
                             for group in GROUPS},
                    nonfinite=dict.fromkeys(GROUPS, ()),
                    step_s=0.01, live_bytes=10, peak_bytes=20,
                ),
            )
            for step in range(spec.config["steps"])
        ]  # fmt: skip
        start = StartRecord(
            schema=1, run=spec.key, rank=rank, world_size=spec.world_size, pid=1, device="cpu",
            tensors=tensors, environment=self.environment,
        )  # fmt: skip
        graphs = tuple(owed(TrainConfig.from_dict(spec.config), rank, len(steps)))
        end = EndRecord(rank=rank, steps=len(steps), peak_bytes=20, startup_s=0.1, wall_s=0.5,
                        replays=launches(graphs), graphs=graphs)  # fmt: skip
        before = {group: hashlib.md5(group.encode()).hexdigest() for group in OF_INITIAL}
        return [start, InitialRecord(rank=rank, digests=before, nonfinite={}), *steps, end]

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        ended, self.ended = self.ended, []
        return ended

    def cancel(self) -> None:
        self.ended = []

    def close(self) -> None:
        self.closed += 1


def unequal(spec: RunSpec, record: StepRecord) -> StepRecord:
    """One weight of the last rank of graphed runs differs from step 2 on."""
    last = record.rank == spec.world_size - 1
    if not (spec.config["graph"] == ["attn"] and last and record.step >= 2):
        return record
    return dataclasses.replace(record, digests=record.digests | {"weights": "0" * 32})


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    """Exit code and JSON answer of one command."""
    capsys.readouterr()
    code = main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def failed_run(engine: FakeEngine) -> None:
    """A run folder `r` in which one weight of dp2-attn differs on rank 1 from step 2 on."""
    engine.spoil = unequal
    assert main(["run", "small.yaml", "--out", "r", "--no-history"]) == 1
    engine.made.clear()
