"""Scenario files and their cases as pytest collects and reports them.

passed        passed
failed        failed, with the verdict's words and the command that repeats the case
error         failed: no verdict is no pass
incomparable  failed, or xfailed with --harness-incomparable=xfail
skipped       skipped, with the reason

Expanding tens of thousands of cases takes seconds, in each worker of pytest-xdist: a file of which
-m (by markers of the file, its tier among them) or -k (by names and labels) leave no case is left
out as a whole. Both are read with the words of `harness.scenario.suite`, and pytest reads them
again: it decides what cannot be decided here, as markers that a conftest.py gives to single cases.
Of `select: pairwise`, the choice is of what -k leaves, as that of `harness run -k` is.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from harness.checks import confirmation
from harness.errors import HarnessError, UsageError
from harness.records import Verdict
from harness.scenario.matrix import expand_marked, named
from harness.scenario.schema import TIERS, Scenario, load_scenario
from harness.scenario.suite import Expression, pairwise, read_expression

_EQUALS = re.compile(r"(?<=[^\s()=])=(?=[^\s()=])")


class NotPassed(Exception):
    """What a case that did not pass says, in lines."""


class ScenarioFile(pytest.File):
    """One scenario file; `wanted` are the cases that its include entries add."""

    scenario: Scenario
    wanted: frozenset[str] = frozenset()

    def collect(self) -> Iterator["CaseItem | LeftOut"]:
        """One item a case, in the order of the matrix; one for all of them that -m or -k leave out.

        Collecting reads the file and no more.
        """
        try:
            self.scenario = load_scenario(Path(os.path.relpath(self.path)))
            if self.scenario.tier:
                self.add_marker(self.scenario.tier)
            if self.config.pluginmanager.hasplugin("timeout"):
                # A run has its own limit, which does not count the wait for slots.
                self.add_marker(pytest.mark.timeout(0))
            if self.config.stash[NARROWING].leaves_out(self):
                yield LeftOut.from_parent(self, name="all of its cases")
                return
            cases, wanted = expand_marked(self.scenario, "cpu")
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
    """One case, run and judged with all others that were selected."""

    parent: ScenarioFile

    def __init__(self, *, labels: Mapping[str, str], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.id, self.labels = self.name, labels
        self.extra_keyword_matches.update(_keywords(labels))

    def runtest(self) -> None:
        """Ask for the case's verdict, and say it as pytest does."""
        try:
            verdict, folder = self.config.stash[ASK](self)
        except HarnessError as error:
            raise NotPassed(f"no verdict: {error}") from error
        properties = {"outcome": verdict.outcome, "what": verdict.what, "folder": str(folder)}
        self.user_properties += properties.items()
        if verdict.outcome == "skipped":
            raise pytest.skip.Exception(verdict.message, _use_item_location=True)
        lines = list(_words(verdict, folder))
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
        """File, line from 0, name."""
        return self.path, 0, self.name


ASK = pytest.StashKey[Callable[[CaseItem], tuple[Verdict, Path]]]()
"""On pytest's config: gives a case's verdict and its folder."""


def _words(verdict: Verdict, folder: Path) -> Iterator[str]:
    yield ": ".join(filter(None, (verdict.outcome, verdict.what, verdict.message)))
    for check in verdict.checks:
        if check.outcome != "passed" and check.message != verdict.message:
            yield f"{check.check}: {check.outcome}: {check.message}"
    if verdict.confirmation is not None:
        yield confirmation.words(verdict.confirmation)
    case = shlex.quote(os.path.relpath(folder))
    yield f"look at it: harness show {case}"
    yield f"repeat it:  harness rerun {case}"


class Narrowing:
    """-m and -k of one session; words that pytest itself would refuse narrow nothing."""

    def __init__(self, config: pytest.Config) -> None:
        # As it is typed for `harness run`: in pytest's expressions no word has a `=`.
        config.option.keyword = _EQUALS.sub(":", config.getoption("keyword"))
        self._marks = _read(config.getoption("markexpr"))
        self._words = _read(config.getoption("keyword"))

    def leaves_out(self, file: ScenarioFile) -> bool:
        """Whether no case of a file, with the markers that all of them have, can be selected.

        Raises:
            ScenarioError: see `harness.scenario.matrix.named`.
        """
        if self._marks is not None:
            marks = {mark.name for mark in file.iter_markers()}
            is_known = marks.union(TIERS).issuperset(self._marks.words)
            if is_known and not self._marks.holds(marks.__contains__):
                return True
        if self._words is None:
            return False
        text, cases = _names(file), list(named(file.scenario))
        return bool(cases) and not any(self._finds(text, *case) for case in cases)

    def wants(self, item: CaseItem) -> bool:
        """Whether -k, as far as it is known here, selects a case."""
        return self._words is None or self._finds(_names(item.parent), item.name, item.labels)

    def _finds(self, text: str, case: str, labels: Mapping[str, str]) -> bool:
        assert self._words is not None
        known = "\n".join((text, case, *_keywords(labels))).lower()
        return self._words.holds(lambda word: word.lower() in known)


NARROWING = pytest.StashKey[Narrowing]()
"""On pytest's config: its -m and -k."""


def _read(text: str) -> Expression | None:
    try:
        return read_expression(text) if text.strip() else None
    except UsageError:
        return None


def _keywords(labels: Mapping[str, str]) -> Iterator[str]:
    """What -k finds of a case in addition to its id: `axis=value`, as pytest can read it."""
    return (f"{axis}:{value}" for axis, value in labels.items())


def _names(file: pytest.File) -> str:
    """Where -k looks for every case of a file, in lower case: see `pytest --help`, -k."""
    names = [
        node.name
        for node in file.listchain()
        if not isinstance(node, pytest.Session)
        and not (isinstance(node, pytest.Directory) and isinstance(node.parent, pytest.Session))
    ]
    marks = (mark.name for mark in file.iter_markers())
    return "\n".join((*names, *file.listextrakeywords(), *marks)).lower()


def narrow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not to be run: files left out, and what `select: pairwise` leaves out.

    Before --lf, --sw or the order of other plugins, so that it is the same in every worker.
    """
    wants = config.stash[NARROWING].wants
    dropped: set[pytest.Item] = {item for item in items if isinstance(item, LeftOut)}
    by_file: dict[ScenarioFile, list[CaseItem]] = {}
    for item in items:
        if isinstance(item, CaseItem) and item.parent.scenario.select == "pairwise":
            by_file.setdefault(item.parent, []).append(item)
    for file, held in by_file.items():
        left = [item for item in held if wants(item)]
        chosen = pairwise(left, keep=file.wanted | _asked_by_name(config, file.path))
        dropped |= {*left} - {*chosen}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def _asked_by_name(config: pytest.Config, file: Path) -> frozenset[str]:
    """Cases that the user named, or that --lf and --ff bring back: no choice drops them."""
    nodes = [(config.invocation_params.dir, argument) for argument in config.args]
    cache = getattr(config, "cache", None)  # -p no:cacheprovider: neither it nor its options
    if cache is not None and (config.getoption("lf") or config.getoption("failedfirst")):
        nodes += [(config.rootpath, str(node)) for node in cache.get("cache/lastfailed", {})]
    parts = ((root, *node.partition("::")[::2]) for root, node in nodes)
    return frozenset(
        case for root, path, case in parts if case and (root / path).resolve() == file.resolve()
    )
