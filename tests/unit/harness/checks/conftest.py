"""Whole synthetic runs, and edits of one record, so that a test states only what is wrong."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.checks.complete import Flaw, find_flaw, launches, owed
from harness.checks.evidence import BEFORE
from harness.records import (
    CaseSpec,
    CheckResult,
    Difference,
    EndRecord,
    FloatBits,
    InitialRecord,
    RankExit,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
    Verdict,
)

TENSORS = {
    "samples": ("tokens", "targets"),
    "grads": ("embed.weight", "head.weight"),
    "weights": ("embed.weight", "head.weight"),
    "optim": ("embed.weight.exp_avg", "head.weight.exp_avg"),
    "rng": ("cpu",),
}
TAPS = {
    # name of the row: (stage, place in the step)
    "layers.0.attn:output[0]": (0, 0), "layers.0.attn:output[1]": (0, 4),
    "layers.1.attn:output[0]": (1, 1), "layers.1.attn:output[1]": (1, 5),
    "layers.0.attn:gradient[0]": (0, 3), "layers.0.attn:gradient[1]": (0, 7),
    "layers.1.attn:gradient[0]": (1, 2), "layers.1.attn:gradient[1]": (1, 6),
}  # fmt: skip


STATE = ("weights", "optim", "rng")
"""Groups that there are before the first step."""


def digests_of(group: str, rank: int, step: int) -> str:
    """Of a group's tensors, in a whole run."""
    each = (hashlib.md5(f"{group}/{n}/{rank}/{step}".encode()) for n in TENSORS[group])
    return "".join(digest.hexdigest() for digest in each)


class Lab:
    """Builds cases of a given size and edits their records."""

    def __init__(self, steps: int = 4, world_size: int = 2, microbatches: int = 2) -> None:
        self.steps, self.world_size, self.microbatches = steps, world_size, microbatches

    def spec(self, replica: int = 0, graph: tuple[str, ...] = ()) -> RunSpec:
        config = {
            "steps": self.steps, "microbatches": self.microbatches, "graph": list(graph),
            "parallel": dataclasses.asdict(ParallelConfig(dp=self.world_size)),
        }  # fmt: skip
        return RunSpec(
            config=config, device="cpu", world_size=self.world_size, timeout_s=60.0, replica=replica
        )

    def candidate(self) -> RunSpec:
        """With graphs, or in a run too short to warm up eager with a key of its own."""
        if self.steps > 2:
            return self.spec(graph=("attn",))
        return dataclasses.replace(self.spec(), timeout_s=61.0)

    def case(self, **changes: Any) -> CaseSpec:
        checks: dict[str, dict[str, Any]] = {
            "loss": {}, "state": {}, "taps": {}, "finite": {}, "peak_memory": {"max_ratio": 2.0},
        }  # fmt: skip
        case = CaseSpec(
            id="dp2-attn",
            scenario="alignment",
            labels={"parallel": "dp2", "graph": "attn"},
            reference=self.spec(),
            control=self.spec(replica=1),
            candidate=self.candidate(),
            expect="bitwise",
            checks=checks,
        )
        return dataclasses.replace(case, **changes)

    def step(self, rank: int, step: int) -> StepRecord:
        losses = tuple(
            FloatBits.from_bits(0x40000000 + 4096 * step + 64 * rank + micro)
            for micro in range(self.microbatches)
        )
        return StepRecord(
            step=step,
            rank=rank,
            loss=losses[0],
            microbatch_losses=losses,
            grad_norm=FloatBits.from_bits(0x3F000000 + step),
            digests={group: digests_of(group, rank, step) for group in TENSORS},
            nonfinite=dict.fromkeys(TENSORS, ()),
            step_s=0.01,
            live_bytes=1000,
            peak_bytes=2000 + rank,
            taps="".join(
                hashlib.md5(f"{name}/{rank}/{step}".encode()).hexdigest() + f"{place:08x}"
                for name, (_, place) in TAPS.items()
            ),
        )

    def rank(self, rank: int, spec: RunSpec) -> RankRecords:
        config = TrainConfig.from_dict(spec.config)
        graphs = tuple(owed(config, rank, self.steps))
        return RankRecords(
            rank=rank,
            start=StartRecord(
                schema=1, rank=rank, world_size=self.world_size, pid=100 + rank, device="cpu",
                tensors=dict(TENSORS),
                environment={"fingerprint": {"torch": "2.12", "threads": 1}, "host": "a"},
                taps=tuple(TAPS), tap_stages=tuple(stage for stage, _ in TAPS.values()),
            ),
            steps=tuple(self.step(rank, step) for step in range(self.steps)),
            events=(),
            error=None,
            end=EndRecord(
                rank=rank, steps=self.steps, peak_bytes=2000 + rank, startup_s=0.1, wall_s=1.0,
                replays=launches(graphs), graphs=graphs,
            ),
            problems=(),
            initial=InitialRecord(
                rank=rank, nonfinite={},
                digests={group: digests_of(group, rank, BEFORE) for group in STATE},
            ),
        )  # fmt: skip

    def run(self, spec: RunSpec) -> RunResult:
        ranks = range(self.world_size)
        return RunResult(
            spec=spec,
            outcome=RunOutcome(
                key=spec.key, what="", message="", culprit_rank=None,
                ranks=tuple(RankExit(rank=rank, code=0) for rank in ranks),
                started_unix_s=0.0, wall_s=1.0,
            ),
            ranks=tuple(self.rank(rank, spec) for rank in ranks),
        )  # fmt: skip

    def legs(self) -> tuple[RunResult, RunResult, RunResult]:
        """Reference, control and candidate of `case()`, equal in every compared bit."""
        case = self.case()
        return self.run(case.reference), self.run(case.control), self.run(case.candidate)


def edit_outcome(run: RunResult, **changes: Any) -> RunResult:
    return dataclasses.replace(run, outcome=dataclasses.replace(run.outcome, **changes))


def edit_rank(run: RunResult, rank: int, /, **changes: Any) -> RunResult:
    ranks = tuple(
        dataclasses.replace(records, **changes) if records.rank == rank else records
        for records in run.ranks
    )
    return dataclasses.replace(run, ranks=ranks)


def edit_step(run: RunResult, rank: int, step: int, /, **changes: Any) -> RunResult:
    steps = tuple(
        dataclasses.replace(record, **changes) if record.step == step else record
        for record in run.ranks[rank].steps
    )
    return edit_rank(run, rank, steps=steps)


def flip_digest(run: RunResult, rank: int, step: int, group: str, bit: int) -> RunResult:
    digests = dict(run.ranks[rank].steps[step].digests)
    number = int(digests[group], 16) ^ (1 << (4 * len(digests[group]) - 1 - bit))
    digests[group] = f"{number:0{len(digests[group])}x}"
    return edit_step(run, rank, step, digests=digests)


def flaw_of(run: RunResult) -> Flaw:
    """The flaw of a run that has one."""
    flaw = find_flaw(run)
    assert flaw is not None
    return flaw


def place_of(answer: CheckResult | Verdict | Flaw) -> Difference:
    """Where a check, a verdict or a flaw saw the first difference."""
    assert answer.difference is not None
    return answer.difference


@dataclasses.dataclass(frozen=True)
class Edits:
    outcome: Callable[..., RunResult] = edit_outcome
    rank: Callable[..., RunResult] = edit_rank
    step: Callable[..., RunResult] = edit_step
    digest: Callable[..., RunResult] = flip_digest


@pytest.fixture(scope="session")
def lab() -> Lab:
    """Two ranks, four steps, two microbatches."""
    return Lab()


@pytest.fixture(scope="session")
def make_lab() -> type[Lab]:
    """For other sizes."""
    return Lab


@pytest.fixture(scope="session")
def edit() -> Edits:
    """Functions that return a run with one thing changed."""
    return Edits()
