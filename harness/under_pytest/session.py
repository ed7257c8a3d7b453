"""pytest's hooks for scenario files, in a process of its own, a controller or a worker of xdist."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.scenario.sections import TIERS
from harness.scenario.suite import SUFFIXES
from harness.store.find import DEFAULT_OUT, unused
from harness.under_pytest.items import ASK, NARROWING, ScenarioFile, narrow
from harness.under_pytest.narrowing import Narrowing, readable
from harness.under_pytest.service import CaseService, Wanted
from harness.under_pytest.sockets import CaseServer, ask_at

ADDRESS_KEY = "harness_address"


def register(config: pytest.Config) -> None:
    """Collect scenario files in this session."""
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: cases of scenarios with this tier")
    config.option.keyword = readable(config.getoption("keyword"))
    config.stash[NARROWING] = Narrowing(config)
    address = getattr(config, "workerinput", {}).get(ADDRESS_KEY)
    if address is not None:
        config.stash[ASK] = ask_at(address)
        config.pluginmanager.register(ScenarioFiles(config), "harness-files")
    elif not hasattr(config, "workerinput"):
        session = HarnessSession(config)
        config.stash[ASK] = session.service.ask
        config.pluginmanager.register(session, "harness-session")


class ScenarioFiles:
    """Collects them; all that a worker has to do."""

    def __init__(self, config: pytest.Config) -> None:
        self._patterns: list[str] = config.getini("harness_files")

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> ScenarioFile | None:
        """YAML files that match `harness_files`."""
        if file_path.suffix not in SUFFIXES or not any(map(file_path.match, self._patterns)):
            return None
        return ScenarioFile.from_parent(parent, path=file_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Before all others: what is left is what they choose from."""
        narrow(config, items)


class HarnessSession(ScenarioFiles):
    """The process that has the engine."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._config = config
        self._server: CaseServer | None = None
        self._closed = False
        self._warnings: tuple[str, ...] = ()
        self.service = CaseService(_wanted(config))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: what is selected is known."""
        self._choose(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist: each worker says what it selected, and all the same."""
        self._choose(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist where to ask."""
        if self._server is None:
            self._server = CaseServer(self.service.ask)
        node.workerinput[ADDRESS_KEY] = self._server.address

    def _choose(self, ids: Iterable[str]) -> None:
        chosen: dict[Path, list[str]] = {}
        for nodeid in ids:
            file, _, case = nodeid.partition("::")
            if Path(file).suffix in SUFFIXES:
                chosen.setdefault((self._config.rootpath / file).resolve(), []).append(case)
        self.service.choose(chosen)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End what still runs, before anybody is told."""
        self._close()

    def pytest_unconfigure(self) -> None:
        """The same for sessions that end otherwise."""
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._warnings = self.service.close()
        if self._server is not None:
            self._server.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where the run folders are."""
        folders = self.service.folders
        if folders:
            terminalreporter.section("harness")
            for folder in folders:
                terminalreporter.line(f"run folder: {folder} (harness report makes its report)")
        for warning in self._warnings:
            terminalreporter.line(f"harness: {warning}")


def _wanted(config: pytest.Config) -> Wanted:
    out, history = config.getoption("harness_out"), config.getoption("harness_history")
    fresh = DEFAULT_OUT / f"pytest-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    return Wanted(
        out=(Path(out) if out else unused(fresh)).absolute(),
        root=config.rootpath,
        argv=("pytest", *map(str, config.invocation_params.args)),
        slots=config.getoption("harness_slots"),
        device=config.getoption("harness_device"),
        ranks_per_gpu=config.getoption("harness_ranks_per_gpu"),
        history=Path(history).absolute() if history else None,
    )
