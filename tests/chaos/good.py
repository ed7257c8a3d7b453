"""Run folders that nothing is wrong with, made at once by an engine that only writes records."""

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from harness import cli
from harness.cli import run as report_commands
from harness.errors import Infrastructure
from harness.records import FloatBits, RunSpec, StepRecord, What
from harness.runner import launch
from harness.store.files import KEY, with_checksum
from tests.support.fake_engine import FakeEngine, unequal

SCENARIO = """\
name: damaged
why: Whatever becomes of these files, nobody may call them a pass.
base: {steps: 4}
axes: {parallel: [{dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}, finite: {}, peak_memory: {max_ratio: 2.0}}
launch: {device: cpu, timeout_s: 60, slots: 2}
"""
GOOD = ("passed", "diverged", "nan", "crashed")
"""What becomes of the case `dp2-attn`; the other one passes."""


class NoEngine(FakeEngine):
    """Makes no run: what is missing stays missing."""

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        raise Infrastructure(f"run {spec.key} would have to be made again")


class EndlessEngine(FakeEngine):
    """Graphed attention ends before its end record."""

    def _records(self, spec: RunSpec, rank: int) -> list[Any]:
        records = super()._records(spec, rank)
        return records[:-1] if spec.config["graph"] == ["attn"] else records


def with_nan(spec: RunSpec, record: StepRecord) -> StepRecord:
    """Graphed attention computes a NaN at step 2."""
    if spec.config["graph"] != ["attn"] or record.step != 2:
        return record
    return dataclasses.replace(
        record, loss=FloatBits.from_bits(0x7FC00000), nonfinite={"grads": ("w",)}
    )


def engine_of(kind: str) -> FakeEngine:
    """An engine whose runs of graphed attention end as `kind` says."""
    engine = EndlessEngine() if kind == "crashed" else FakeEngine()
    ends: dict[str, What] = {"attn": "crashed"} if kind == "crashed" else {}
    engine.ends = ends
    engine.spoil = {"diverged": unequal, "nan": with_nan}.get(kind, engine.spoil)
    return engine


def make(folder: Path, kind: str) -> Path:
    """A run folder `run` in `folder`, whose case `dp2-attn` ends as `kind` says."""
    engine = engine_of(kind)
    folder.mkdir(parents=True)
    (folder / "s.yaml").write_text(SCENARIO)
    harness("run", str(folder / "s.yaml"), "--out", str(folder / "run"), engine=engine)
    return folder / "run"


def harness(
    *args: str, engine: FakeEngine | None = None, build: Callable[..., Any] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process.

    Args:
        args: the command line.
        engine: makes the runs; None for one that makes none.
        build: makes the reports; None for no reports.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(launch, "LocalEngine", engine or NoEngine()),
        mock.patch.object(report_commands, "build_reports", build or mock.Mock(return_value={})),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli.main([*args, "--no-history"] if args[0] == "run" else args)
    return code, out.getvalue(), err.getvalue()


def rewrite(path: Path, changes: Mapping[str, Any]) -> None:
    """Change an object, and its checksum with it."""
    plain = json.loads(path.read_bytes()) | changes
    plain.pop(KEY, None)
    path.write_text(json.dumps(with_checksum(plain)))


@contextlib.contextmanager
def denied(paths: frozenset[Path]) -> Iterator[None]:
    """`paths` cannot be opened: permissions say nothing to root, who runs tests in containers."""
    real = os.open

    def refuse(path: "os.PathLike[str] | str", *args: int, **more: int) -> int:
        if Path(path) in paths:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **more)

    with mock.patch.object(os, "open", refuse):
        yield
