"""Timed repeats through the command line: made alone, in turn, after all others, and judged."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.records import ExitCode, RunOutcome, RunSpec, StepRecord
from harness.repeats import is_timed
from harness.runner import launch
from tests.unit.harness.fake_engine import FakeEngine

SCENARIO = """\
name: timed
why: A graph must not be slower.
base: {steps: 9}
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}, throughput: {max_slowdown: 0.05}}
launch: {device: cpu, slots: 4, timeout_s: 60}
"""

Spoil = Callable[[RunSpec, StepRecord], StepRecord]


class BusyEngine(FakeEngine):
    """Has runs under way side by side, as many as there are slots; notes beside what each began."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[RunSpec, int]] = []
        self.specs: dict[str, RunSpec] = {}

    def can_start(self, spec: RunSpec) -> bool:
        taken = sum(self.specs[outcome.key].world_size for outcome in self.ended)
        return taken + spec.world_size <= self.slots

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self.order.append((spec, len(self.ended)))
        self.specs[spec.key] = spec
        super().start(spec, folder, attempt=attempt)

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        first, self.ended = self.ended[:1], self.ended[1:]
        return first


@pytest.fixture
def busy(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> BusyEngine:
    """In the place of this machine's."""
    made = BusyEngine()
    monkeypatch.setattr(launch, "LocalEngine", made)
    return made


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    """Exit code and answer of the scenario."""
    path = tmp_path / "timed.yaml"
    path.write_text(SCENARIO)
    capsys.readouterr()
    out = ("--out", str(tmp_path / "out"), "--json", "--no-history")
    code = main(["run", str(path), *out, *more])
    return code, json.loads(capsys.readouterr().out)


def test_timed_runs_are_alone_and_last(
    tmp_path: Path, busy: BusyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other runs start side by side; then each repeat starts when nothing is under way."""
    code, answer = run(tmp_path, capsys)
    assert code == ExitCode.PASSED
    timed = [is_timed(spec) for spec, _ in busy.order]
    assert timed == [False] * 8 + [True] * 36  # 2 layouts of 3 legs, 6 of each
    assert max(beside for spec, beside in busy.order if not is_timed(spec)) > 0
    assert all(beside == 0 for spec, beside in busy.order if is_timed(spec))
    rounds = [spec.config["graph"] for spec, _ in busy.order[8:14]]
    assert rounds[:3] == rounds[:2:-1]  # there and back
    for verdict in answer["verdicts"]:
        names = [check["check"] for check in verdict["checks"]]
        assert {"repeats", "throughput"} <= set(names)


def other_bits(graph: list[str], replica: int) -> Spoil:
    """One repeat of one leg has other weights in its step 7."""
    return lambda spec, record: (
        dataclasses.replace(record, digests=record.digests | {"weights": "0" * 32})
        if (spec.replica, spec.config["graph"], record.step) == (replica, graph, 7) else record
    )  # fmt: skip


def slow(factor: float) -> Spoil:
    """Graphed steps take so much longer, on the whole of the run."""
    return lambda spec, record: dataclasses.replace(
        record, step_s=record.step_s * (factor if spec.config["graph"] == ["attn"] else 1.0)
    )


def noise(spec: RunSpec, record: StepRecord) -> StepRecord:
    return dataclasses.replace(record, step_s=0.01 * (1 + int(spec.key[-3:], 16) % 7))


@pytest.mark.parametrize(
    ("spoil", "code", "what"),
    [
        (slow(1.04), 0, ""),
        (slow(1.06), 1, "throughput_regression"),
        (noise, 6, "noisy"),
        (other_bits(["attn"], 4), 1, "diverged"),
        (other_bits([], 3), 6, "nondeterministic_reference"),
    ],
)
def test_what_repeats_say(
    tmp_path: Path, busy: BusyEngine, capsys: pytest.CaptureFixture[str], spoil: Spoil,
    code: int, what: str,
) -> None:  # fmt: skip
    """A slow graph fails past the tolerance, scatter is no verdict, other bits are found."""
    busy.spoil = spoil
    found, answer = run(tmp_path, capsys, "-k", "dp1 and attn")
    (verdict,) = answer["verdicts"]
    assert (found, verdict["what"]) == (code, what)
    if what == "diverged":
        assert verdict["message"].startswith("repeat 2 of the candidate")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("steps: 9", "steps: 7"), "skip_steps + 3 = 8 or more to time"),
        (("max_slowdown: 0.05", "skip_steps: 2"), "3 or more, as graphs are captured"),
        (("max_slowdown: 0.05", "repeats: 5"), "an integer from 6 to 50"),
        (("max_slowdown: 0.05", "max_slowdown: 0"), "a number > 0"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: str
) -> None:
    """Before anything runs: too few steps or repeats, or warm-up among the steps that count."""
    path = tmp_path / "timed.yaml"
    path.write_text(SCENARIO.replace(*change))
    assert main(["run", str(path), "--dry-run"]) == ExitCode.USAGE
    assert words in capsys.readouterr().err
