"""Contracts of `harness predict`, with the worker's answers made up."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.cli import predict as predict_command
from harness.errors import Infrastructure
from harness.records import ExitCode
from tests.unit.harness.fake_engine import SCENARIO

MIB = 1 << 20
KEPT = {"parameters": 3 * MIB, "gradients": MIB, "optimizer": 2 * MIB, "largest_unit": MIB}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """The configurations that the worker was asked for."""
    seen: list[Mapping[str, Any]] = []

    def ask(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        seen.extend(configs)
        peak = {"rank": 0, "peak_bytes": 9 * MIB, "owners": {"activations": 9 * MIB, "rest": 0}}
        return [
            {"at_rest": {"0": KEPT}, "peak": peak if number else None, "why_no_peak": "too large"}
            for number, _ in enumerate(configs)
        ]

    monkeypatch.setattr(predict_command, "ask", ask)
    return seen


def test_each_layout_is_asked_for_once(
    tmp_path: Path, asked: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Graphs do not change what is predicted, so two layouts of six runs are asked for."""
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    assert main(["predict", str(path)]) == ExitCode.PASSED
    assert [config["parallel"]["dp"] for config in asked] == [1, 2]
    out = capsys.readouterr().out
    assert "peak: not known, too large" in out
    assert "parameters 3.0 MiB, gradients 1.0 MiB, optimizer 2.0 MiB, largest unit 1.0 MiB" in out
    assert "peak of eager steps, rank 0: 9.0 MiB: activations 9.0 MiB\n" in out
    assert main(["predict", str(path), "--json", "-k", "dp2"]) == ExitCode.PASSED
    (answer,) = json.loads(capsys.readouterr().out).values()
    assert answer["at_rest"]["0"] == KEPT


def test_no_case_is_exit_5(tmp_path: Path, asked: list[Mapping[str, Any]]) -> None:
    """A keyword that selects nothing predicts nothing."""
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    assert main(["predict", str(path), "-k", "nothing"]) == ExitCode.NOTHING_RAN
    assert asked == []


def test_a_worker_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last line is the reason."""
    command = (sys.executable, "-c", "import sys; sys.stderr.write('x\\nno memory'); sys.exit(3)")
    monkeypatch.setattr(predict_command, "COMMAND", command)
    with pytest.raises(Infrastructure, match="code 3: no memory"):
        predict_command.ask([])
