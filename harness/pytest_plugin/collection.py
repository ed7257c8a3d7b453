"""Scenario files and their cases as pytest collects and reports them.

passed        passed
failed        failed, with the verdict's words and the command that repeats the case
error         failed: no verdict is no pass
incomparable  failed, or xfailed with --harness-incomparable=xfail
skipped       skipped, with the reason

Expanding tens of thousands of cases takes seconds, in each worker of pytest-xdist: a file of which
-m, by the file's own markers, its tier among them, leaves no case is left out as a whole. Of
`select: pairwise`, the choice is of what -k and -m leave, as that of `harness run -k` is.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from harness.checks import confirmation
from harness.errors import HarnessError, UsageError
from harness.records import Verdict
from harness.scenario.matrix import expand_marked
from harness.scenario.schema import TIERS, Scenario, load_scenario
from harness.scenario.suite import pairwise, read_expression

EQUALS = re.compile(r"(?<=[^\s()=])=(?=[^\s()=])")
"""Of `axis=value` as typed for `harness run -k`: in pytest's expressions no word has a `=`."""


class NotPassed(Exception):
    """What a case that did not pass says, in lines."""


class ScenarioFile(pytest.File):
    """One scenario file; `wanted` are the cases that its include entries add."""

    scenario: Scenario
    wanted: frozenset[str] = frozenset()

    def collect(self) -> Iterator["CaseItem"]:
        """One item a case, in the order of the matrix; none that -m leaves out with the file.

        Collecting reads the file and no more.
        """
        try:
            self.scenario = load_scenario(Path(os.path.relpath(self.path)))
            if self.scenario.tier:
                self.add_marker(self.scenario.tier)
            if self.config.pluginmanager.hasplugin("timeout"):
                # A run has its own limit, which does not count the wait for slots.
                self.add_marker(pytest.mark.timeout(0))
            if self._is_left_out():
                return
            cases, wanted = expand_marked(self.scenario, "cpu")
        except HarnessError as error:
            raise self.CollectError(str(error)) from error
        self.wanted = frozenset(wanted)
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, labels=case.labels)

    def _is_left_out(self) -> bool:
        marks = {mark.name for mark in self.iter_markers()}
        with suppress(
            UsageError
        ):  # pytest refuses it, too, and a conftest.py may give more markers
            expression = read_expression(self.config.getoption("markexpr") or "and")
            if marks.union(TIERS).issuperset(expression.words):
                return not expression.holds(marks.__contains__)
        return False


class CaseItem(pytest.Item):
    """One case, run and judged with all others that were selected."""

    parent: ScenarioFile

    def __init__(self, *, labels: Mapping[str, str], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.id, self.labels = self.name, labels
        self.extra_keyword_matches.update(f"{axis}:{value}" for axis, value in labels.items())

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


def choose_pairwise(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what `select: pairwise` leaves out of a file's cases."""
    dropped = set[pytest.Item]()
    by_file: dict[ScenarioFile, list[CaseItem]] = {}
    for item in items:
        if isinstance(item, CaseItem) and item.parent.scenario.select == "pairwise":
            by_file.setdefault(item.parent, []).append(item)
    for file, held in by_file.items():
        chosen = pairwise(held, keep=file.wanted | _asked_by_name(config, file.path))
        dropped |= {*held} - {*chosen}
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
