"""pytest's hooks: files collected, cases carried out by one `harness run`, folders shown.

    selected items -> one request -> `launch.rounds`
      -> the item whose turn it is goes on with them until its case has a verdict

Rounds advance while an item waits, and verdicts of other cases are kept for their items. Of
pytest-xdist's workers one gets all cases, so that slots are given once; if it dies, the worker that
gets the rest goes on with its run folder. Scenarios that cannot run together (of another device or
engine, or of the same name) have run folders of their own in that of the session.
"""

import importlib
import uuid
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError, InternalError, Interrupted
from harness.history import remember
from harness.machine import describe, resolve_device
from harness.pytest_plugin.collection import ASK, EQUALS, CaseItem, ScenarioFile, choose_pairwise
from harness.records import ExitCode, Verdict
from harness.runner import launch
from harness.runner.run import Silent, advance
from harness.scenario.schema import TIERS
from harness.scenario.suite import SUFFIXES, joined
from harness.store import MANIFEST_FILE, RunFolder
from harness.store.verify import DEFAULT_OUT, unused

INPUT_KEY = "harness"
"""Of what a worker of pytest-xdist is given: place and id of the session."""


def register(config: pytest.Config) -> None:
    """Collect scenario files in this session."""
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: cases of scenarios with this tier")
    config.option.keyword = EQUALS.sub(":", config.getoption("keyword"))
    session = HarnessSession(config)
    config.stash[ASK] = session.ask
    config.pluginmanager.register(session, "harness-session")


@dataclass(eq=False)
class _Together(Silent):
    """Cases that are carried out together; `verdicts` are by the ids of the run folder `out`."""

    kind: tuple[object, ...]
    picked: dict[Path, dict[str, None]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    out: Path = Path()
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    rounds: Generator[None, None, object] | None = None
    error: HarnessError | None = None

    def judged(self, verdict: Verdict) -> None:
        """A case has its verdict, whoever waits for it."""
        self.verdicts[verdict.case_id] = verdict

    def case_id(self, item: CaseItem) -> str:
        """The id of an item's case in the run folder."""
        return item.id if len(self.picked) == 1 else joined(item.parent.scenario.name, item.id)


class HarnessSession:
    """A session of pytest, or a worker's part of it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        given: list[str] | None = getattr(config, "workerinput", {}).get(INPUT_KEY)
        fresh = DEFAULT_OUT / f"pytest-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        out, self._id = given or (
            config.getoption("harness_out") or unused(fresh), uuid.uuid4().hex
        )  # fmt: skip
        self._out = Path(out).absolute()
        self._by_file: dict[Path, _Together] = {}
        self._folders: list[Path] = []
        self._warnings: list[str] = []

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> ScenarioFile | None:
        """YAML files that match `harness_files`; not the copy that a run folder keeps."""
        patterns = self._config.getini("harness_files")
        if file_path.suffix not in SUFFIXES or not any(map(file_path.match, patterns)):
            return None
        if file_path.with_name(MANIFEST_FILE).exists():
            return None
        # pytest has no name for what is not in its root: cases of two files would be one test.
        inside = file_path.is_relative_to(self._config.rootpath)
        named: dict[str, Any] = {} if inside else {"nodeid": file_path.as_posix()}
        return ScenarioFile.from_parent(parent, path=file_path, **named)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """After -k and -m, which say what is chosen from; --lf and --ff come later, as wrappers."""
        choose_pairwise(config, items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What is selected is known: who is carried out with whom."""
        if self._config.option.collectonly:
            return
        for item in (item for item in session.items if isinstance(item, CaseItem)):
            if item.path not in self._by_file:
                kind, name = self._kind(item.parent), item.parent.scenario.name
                known = self._by_file.values()
                fitting = (t for t in known if t.kind == kind and name not in t.names)
                together = self._by_file[item.path] = next(fitting, None) or _Together(kind)
                together.names.add(name)
            self._by_file[item.path].picked.setdefault(item.path, {})[item.id] = None
        groups = list(dict.fromkeys(self._by_file.values()))
        for number, together in enumerate(groups, 1):
            own = self._out / f"{number}-{together.kind[-1]}"
            together.out = self._out if len(groups) == 1 else own

    def ask(self, item: CaseItem) -> tuple[Verdict, Path]:
        """The verdict of an item's case and the case's folder.

        Raises:
            HarnessError: the scenario, the machine or the harness does not allow a verdict.
        """
        together = self._by_file[item.path]
        case_id = together.case_id(item)
        try:
            together.rounds = together.rounds or self._rounds(together)
            advance(together.rounds, lambda: case_id in together.verdicts)
        except Interrupted as error:
            pytest.exit(str(error), returncode=ExitCode.INTERRUPTED)
        except HarnessError as error:
            together.error = error
        if case_id not in together.verdicts:
            raise together.error or InternalError("the execution has ended")
        return together.verdicts[case_id], together.out / "cases" / case_id

    def _kind(self, file: ScenarioFile) -> tuple[object, ...]:
        wanted = file.scenario.launch
        device = self._config.getoption("harness_device") or wanted.device
        if device == "auto" and wanted.engine == "local":
            with suppress(HarnessError):  # raised again where its cases are prepared
                device = resolve_device(device, describe())
        return wanted.engine, wanted.slurm, device

    def _rounds(self, together: _Together) -> Generator[None, None, object]:
        option = self._config.getoption
        what: dict[str, Any] = {"resume": together.out}
        if not self._is_ours(together.out):
            what = {"paths": tuple(together.picked), "picked": together.picked,
                    "session": self._id, "device": option("harness_device")}  # fmt: skip
        prepared = launch.prepare(launch.Request(
            slots=option("harness_slots"), ranks_per_gpu=option("harness_ranks_per_gpu"), **what
        ))  # fmt: skip
        argv = ("pytest", *map(str, self._config.invocation_params.args))
        return launch.rounds(prepared, together, out=together.out, exit_first=False, argv=argv)

    def _is_ours(self, folder: Path) -> bool:
        """Whether a run folder was made in this session: another worker's, which is dead."""
        try:
            return bool(RunFolder.open(folder).manifest.get(launch.SESSION_KEY) == self._id)
        except HarnessError:
            return False

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End what still runs, and record what was made."""
        for together in self._by_file.values():
            if together.rounds is not None:
                together.rounds.close()
        if hasattr(self._config, "workerinput"):
            return
        found = [*self._out.glob(MANIFEST_FILE), *sorted(self._out.glob(f"*/{MANIFEST_FILE}"))]
        self._folders = [path.parent for path in found if self._is_ours(path.parent)]
        if history := self._config.getoption("harness_history"):
            noted = (remember(folder, Path(history).absolute()) for folder in self._folders)
            self._warnings = [warning for warning in noted if warning]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where the run folders are."""
        if self._folders:
            terminalreporter.section("harness")
        for folder in self._folders:
            terminalreporter.line(f"run folder: {folder} (harness report makes its report)")
        for warning in self._warnings:
            terminalreporter.line(f"harness: {warning}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker of pytest-xdist this session's place and id."""
        node.workerinput[INPUT_KEY] = [str(self._out), self._id]

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """The scheduler that --dist names, but all cases go to one worker."""
        dist = config.getvalue("dist")
        if dist == "each":
            raise pytest.UsageError("--dist each: expected another with --harness: one worker has "
                                    "all slots, and runs each case once")  # fmt: skip
        xdist: Any = importlib.import_module("xdist.scheduler")
        by_name = {"loadscope": xdist.LoadScopeScheduling, "loadfile": xdist.LoadFileScheduling}
        # The rest gives each test its own scope, but for groups.
        base: Any = by_name.get(dist, xdist.LoadGroupScheduling)

        class CasesTogether(base):  # type: ignore[misc]
            def _split_scope(self, nodeid: str) -> str:
                is_case = Path(nodeid.partition("::")[0]).suffix in SUFFIXES
                return "scenario files" if is_case else str(super()._split_scope(nodeid))

        return CasesTogether(config, log)
