"""The real road without a process for the command line: one warm engine for many scenarios."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.engine.local import LocalEngine
from harness.records import CaseSpec, Verdict
from harness.runner.launch import Request, make_folder, prepare
from harness.runner.run import View, execute
from harness.scenario.schema import Overrides

SLOTS = 8
Judged = list[tuple[CaseSpec, Verdict]]
RunScenario = Callable[..., Judged]


@pytest.fixture(scope="session")
def warm_engine() -> Iterator[LocalEngine]:
    """This machine's engine: its forkserver imports torch once for all tests of a worker."""
    with LocalEngine(SLOTS, entry="tests.planted.hasty_worker:rank_main") as engine:
        yield engine


@pytest.fixture
def run_scenario(
    warm_engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunScenario:
    """`run_scenario(path, sets=..., axes=..., keyword=...)`: cases and verdicts, on the CPU.

    What `harness run` does, but for reports, history and a process and an engine of its own.
    """

    # Coverage would measure the ranks, which are many and slow then.
    for name in [name for name in os.environ if name.startswith("COV")]:
        monkeypatch.delenv(name)

    def run(
        path: Path, *, sets: tuple[str, ...] = (), axes: tuple[str, ...] = (), keyword: str = ""
    ) -> Judged:
        overrides = Overrides(sets, axes)
        prepared = prepare(
            Request(
                paths=(path,), device="cpu", slots=SLOTS, keyword=keyword or None,
                overrides=overrides,
            )
        )  # fmt: skip
        cases = prepared.plan.cases
        with make_folder(prepared, tmp_path / "run", ["test"]) as folder:
            verdicts = execute(folder, cases, warm_engine, View(), retries=prepared.retries)
        assert [case.id for case in cases] == [verdict.case_id for verdict in verdicts]
        return list(zip(cases, verdicts, strict=True))

    return run
