"""Scenario files as pytest collects them, their cases as items, all carried out together.

    selected items -> one request -> `launch.rounds`
      -> the item whose turn it is goes on with them until its case has a verdict

    passed        passed
    failed        failed, with the verdict's words and the commands that look for its cause
    error         failed: no verdict is no pass
    incomparable  failed, or xfailed with --harness-incomparable=xfail
    skipped       skipped, with the reason

Rounds advance while an item waits, and verdicts of other cases are kept for their items. All files
are one suite, as those of `harness run`, with one run folder.

Expanding tens of thousands of cases takes seconds: a file of which -m, by the file's own markers,
its tier among them, leaves no case is left out as a whole.
"""

import os
import re
import shlex
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness.checks.judge import confirmation_words
from harness.errors import HarnessError, InternalError, Interrupted, UsageError
from harness.history.ledger import remember
from harness.records import CaseSpec, ExitCode, Verdict
from harness.runner import launch
from harness.runner.run import View, advance
from harness.scenario.matrix import expand_marked
from harness.scenario.schema import Scenario, load_scenario
from harness.scenario.suite import SUFFIXES, find_scenarios, joined, pairwise, read_expression
from harness.store import MANIFEST_FILE
from harness.store.folder import DEFAULT_OUT, bisect_line, unused
from harness.values import TIERS

EQUALS = re.compile(r"(?<=[^\s()=])=(?=[^\s()=])")
"""Of `axis=value` as typed for `harness run -k`: in pytest's expressions no word has a `=`."""


def register(config: pytest.Config) -> None:
    """Collect scenario files in this session."""
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: cases of scenarios with this tier")
    config.option.keyword = EQUALS.sub(":", config.getoption("keyword"))
    config.stash[SESSION] = HarnessSession(config)
    config.pluginmanager.register(config.stash[SESSION], "harness-session")


class NotPassed(Exception):
    """What a case that did not pass says, in lines."""


class ScenarioNode(pytest.Collector):
    """One of a file's scenarios."""

    scenario: Scenario

    @property
    def address(self) -> Path:
        """What `harness run` takes."""
        return Path(f"{self.path}::{self.name}")

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        """An item for each case that `harness run` would run of it; none that -m leaves out."""
        try:
            self.scenario = load_scenario(Path(os.path.relpath(self.address)))
            if self.scenario.tier:
                self.add_marker(self.scenario.tier)
            if self.config.pluginmanager.hasplugin("timeout"):
                # A run has its own limit, which does not count the wait for slots.
                self.add_marker(pytest.mark.timeout(0))
            if self._is_left_out():
                return
            cases, included = expand_marked(self.scenario, "cpu")
        except HarnessError as error:
            raise self.CollectError(str(error)) from error
        if self.scenario.select == "pairwise":
            cases = pairwise(cases, keep=included)
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, case=case)

    def _is_left_out(self) -> bool:
        marks = {mark.name for mark in self.iter_markers()}
        # pytest refuses what cannot be read, too, and a conftest.py may give more markers.
        with suppress(UsageError):
            expression = read_expression(self.config.getoption("markexpr") or "and")
            if marks.union(TIERS).issuperset(expression.words):
                return not expression.holds(marks.__contains__)
        return False


class ScenarioFile(ScenarioNode, pytest.File):
    """A file that is one scenario, or holds several."""

    @property
    def address(self) -> Path:
        return self.path

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        *several, last = (str(each).partition("::")[2] for each in find_scenarios([self.path]))
        if not several:
            yield from super().collect()
        for name in (*several, last) if several else ():
            yield ScenarioNode.from_parent(self, name=name)


class CaseItem(pytest.Item):
    """One case, run and judged with all others that were selected."""

    parent: ScenarioNode

    def __init__(self, *, case: CaseSpec, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.case = case
        self.extra_keyword_matches.update(f"{axis}:{value}" for axis, value in case.labels.items())

    def runtest(self) -> None:
        """Ask for the case's verdict, and say it as pytest does."""
        try:
            verdict, folder = self.config.stash[SESSION].ask(self)
        except HarnessError as error:
            raise NotPassed(f"no verdict: {error}") from error
        properties = {"outcome": verdict.outcome, "what": verdict.what, "folder": str(folder)}
        self.user_properties += properties.items()
        if verdict.outcome == "skipped":
            raise pytest.skip.Exception(verdict.message, _use_item_location=True)
        # Where the commands will be typed: a test may have left for another folder.
        typed_in = self.config.invocation_params.dir
        lines = list(_words(self.case, verdict, Path(os.path.relpath(folder, typed_in))))
        may_be = self.config.getoption("harness_incomparable") == "xfail"
        if verdict.outcome == "incomparable" and may_be:
            pytest.xfail(lines[0])
        if verdict.outcome != "passed":
            raise NotPassed("\n".join(lines))

    def repr_failure(  # type: ignore[override]
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> object:
        """The words of the verdict; a traceback for anything else."""
        if not isinstance(excinfo.value, NotPassed):
            return super().repr_failure(excinfo)
        shown = excinfo.getrepr(style="value", chain=False)
        crash = shown.reprcrash
        assert crash is not None
        # Summary lines and JUnit quote this, not the place in here where it was raised.
        crash.path, crash.lineno = str(self.path), 1
        crash.message = str(excinfo.value).partition("\n")[0]
        return shown

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def _words(spec: CaseSpec, verdict: Verdict, folder: Path) -> Iterator[str]:
    yield ": ".join(filter(None, (verdict.outcome, verdict.what, verdict.message)))
    for check in verdict.checks:
        if check.outcome != "passed" and check.message != verdict.message:
            yield f"{check.check}: {check.outcome}: {check.message}"
    if verdict.confirmation is not None:
        yield confirmation_words(verdict.confirmation)
    case = shlex.quote(str(folder))
    yield f"look at it: harness show {case}"
    yield f"repeat it:  harness rerun {case}"
    if command := bisect_line(spec, verdict, folder):
        yield f"find the cause: {command}"


class HarnessSession(View):
    """pytest's hooks of one session; `judged` is told of verdicts, whoever waits for them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        fresh = DEFAULT_OUT / f"pytest-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        self._out = Path(config.getoption("harness_out") or unused(fresh)).absolute()
        self._picked: dict[Path, dict[str, None]] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._rounds: Generator[None, None, object] | None = None
        self._error: HarnessError | None = None
        self._said: list[str] = []

    def judged(self, verdict: Verdict) -> None:
        self._verdicts[verdict.case_id] = verdict

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

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in (item for item in session.items if isinstance(item, CaseItem)):
            self._picked.setdefault(item.parent.address, {})[item.name] = None

    def ask(self, item: CaseItem) -> tuple[Verdict, Path]:
        """The verdict of an item's case and the case's folder (`HarnessError`: there is none)."""
        is_alone = len(self._picked) == 1
        case_id = item.name if is_alone else joined(item.parent.scenario.name, item.name)
        try:
            self._rounds = self._rounds or self._begin()
            advance(self._rounds, lambda: case_id in self._verdicts)
        except Interrupted as error:
            pytest.exit(str(error), returncode=ExitCode.INTERRUPTED)
        except HarnessError as error:
            self._error = error
        if case_id not in self._verdicts:
            raise self._error or InternalError("the execution has ended")
        return self._verdicts[case_id], self._out / "cases" / case_id

    def _begin(self) -> Generator[None, None, object]:
        option = self._config.getoption
        prepared = launch.prepare(launch.Request(
            paths=tuple(self._picked), picked=self._picked, device=option("harness_device"),
            slots=option("harness_slots"), ranks_per_gpu=option("harness_ranks_per_gpu"),
        ))  # fmt: skip
        argv = ("pytest", *map(str, self._config.invocation_params.args))
        return launch.rounds(prepared, self, out=self._out, exit_first=False, argv=argv)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End what still runs, and record what was made."""
        if self._rounds is not None:
            self._rounds.close()
        if self._verdicts:
            self._said = [f"run folder: {self._out} (harness report makes its report)"]
            history = self._config.getoption("harness_history")
            if history and (warning := remember(self._out, Path(history).absolute())):
                self._said.append(f"harness: {warning}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._said:
            terminalreporter.section("harness")
        for line in self._said:
            terminalreporter.line(line)


SESSION = pytest.StashKey[HarnessSession]()
