"""A scenario file and its cases as pytest sees them.

passed        passed
failed        failed, with the verdict's words and the command that repeats the case
error         failed: no verdict is no pass
incomparable  failed, or xfailed with --harness-incomparable=xfail
skipped       skipped, with the reason
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.checks import confirmation
from harness.errors import HarnessError
from harness.records import Verdict
from harness.scenario.matrix import expand_marked
from harness.scenario.schema import load_scenario
from harness.scenario.selection import pairwise
from harness.under_pytest.narrowing import Narrowing, asked_by_name, keywords
from harness.under_pytest.service import Answer

ASK = pytest.StashKey[Callable[[Path, str], Answer]]()
"""On pytest's config: who answers for a case, given its file and id."""
NARROWING = pytest.StashKey[Narrowing]()
"""On pytest's config: its -m and -k."""


class NotPassed(Exception):
    """What a case that did not pass says, in lines."""


class ScenarioFile(pytest.File):
    """One scenario file; collecting it only reads it.

    Attributes:
        select: what the scenario says, "" until it was read.
        wanted: cases that are chosen in any case: whoever wrote the file wants these.
    """

    select = ""
    wanted: frozenset[str] = frozenset()

    def collect(self) -> Iterator["CaseItem | LeftOut"]:
        """One item a case, in the order of the matrix; one for all of them that -m or -k leave out.

        Expanding tens of thousands of cases takes seconds, in each worker of pytest-xdist.
        """
        path = Path(os.path.relpath(self.path))
        try:
            scenario = load_scenario(path)
            self.select = scenario.select
            if scenario.tier:
                self.add_marker(scenario.tier)
            if self.config.pluginmanager.hasplugin("timeout"):
                # Of pytest-timeout. A run has its own limit, which does not count the wait for
                # slots.
                self.add_marker(pytest.mark.timeout(0))
            if self.config.stash[NARROWING].leaves_out(self, scenario):
                yield LeftOut.from_parent(self, name="all of its cases")
                return
            cases, wanted = expand_marked(scenario, "cpu")
        except HarnessError as error:
            raise self.CollectError(str(error)) from error
        self.wanted = frozenset(wanted)
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, labels=case.labels)


class LeftOut(pytest.Item):
    """A file without a case that -m or -k select; deselected before pytest looks at it."""

    def runtest(self) -> None:
        """Never called; if it were, its cases must not be missed."""
        raise NotPassed("not one of its cases was collected")


class CaseItem(pytest.Item):
    """One case: run and judged by the session's service."""

    parent: ScenarioFile

    def __init__(self, *, labels: Mapping[str, str], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.labels = labels
        self.extra_keyword_matches.update(keywords(labels))

    def runtest(self) -> None:
        """Ask for the case's answer, and say it as pytest does."""
        try:
            answer = self.config.stash[ASK](self.path, self.name)
        except HarnessError as error:
            raise NotPassed(f"no verdict: {error}") from error
        verdict = answer.verdict
        self.user_properties += [
            ("outcome", verdict.outcome),
            ("what", verdict.what),
            ("folder", answer.folder),
        ]
        if verdict.outcome == "skipped":
            raise pytest.skip.Exception(verdict.message, _use_item_location=True)
        may_be = self.config.getoption("harness_incomparable") == "xfail"
        if verdict.outcome == "incomparable" and may_be:
            pytest.xfail(_first_line(verdict))
        if verdict.outcome != "passed":
            raise NotPassed("\n".join(_words(verdict, answer.folder)))

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
        """File, line from 0, name."""
        return self.path, 0, self.name


@dataclass(frozen=True)
class _Known:
    """What a pairwise choice asks of a case."""

    id: str
    labels: Mapping[str, str]


def narrow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not to be run: files left out, and what `select: pairwise` leaves out.

    A pairwise choice is of what -k selects, as that of `harness run -k` is, and made before --lf,
    --sw or the order of other plugins, so that it is the same in every worker and every session.
    """
    wants = config.stash[NARROWING].wants
    dropped: set[pytest.Item] = {item for item in items if isinstance(item, LeftOut)}
    by_file: dict[ScenarioFile, list[CaseItem]] = {}
    for item in items:
        if isinstance(item, CaseItem) and item.parent.select == "pairwise":
            by_file.setdefault(item.parent, []).append(item)
    for file, held in by_file.items():
        left = [
            _Known(item.name, item.labels) for item in held if wants(file, item.name, item.labels)
        ]
        chosen = pairwise(left, keep=file.wanted | asked_by_name(config, file.path))
        unchosen = {case.id for case in left}.difference(case.id for case in chosen)
        dropped.update(item for item in held if item.name in unchosen)
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def _first_line(verdict: Verdict) -> str:
    kind = f"{verdict.outcome}: {verdict.what}" if verdict.what else verdict.outcome
    return f"{kind}: {verdict.message}"


def _words(verdict: Verdict, folder: str) -> Iterator[str]:
    yield _first_line(verdict)
    for check in verdict.checks:
        if check.outcome != "passed" and check.message != verdict.message:
            yield f"{check.check}: {check.outcome}: {check.message}"
    if verdict.confirmation is not None:
        yield confirmation.words(verdict.confirmation)
    case = shlex.quote(os.path.relpath(folder))
    yield f"look at it: harness show {case}"
    yield f"repeat it:  harness rerun {case}"
