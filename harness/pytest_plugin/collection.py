"""Scenario files and their cases as pytest collects and reports them.

passed        passed
failed        failed, with the verdict's words and the command that repeats the case
error         failed: no verdict is no pass
incomparable  failed, or xfailed with --harness-incomparable=xfail
skipped       skipped, with the reason

What -m and -k leave is known before every case is an item:

    -m  tiers are markers of files: a file of other tiers is left out as a whole, by its tier alone
    -k  a file is left out as a whole if the names of its folders and cases say so; no case is made
    select: pairwise   of what -k leaves, as `harness run -k` does

Both read pytest's expressions with the words of `harness.scenario.suite`, and pytest reads them
again. What they cannot read or decide here stays in, for pytest to decide: markers that a
conftest.py gives to single cases may be any. Keywords that one gives are not known to -k where a
whole file is left out.
"""

import itertools
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from harness.checks import confirmation
from harness.errors import HarnessError, UsageError
from harness.records import Verdict
from harness.scenario.matrix import expand_marked, named
from harness.scenario.schema import TIERS, Scenario, load_scenario
from harness.scenario.suite import Expression, pairwise, read_expression

_EQUALS = re.compile(r"(?<=[^\s()=])=(?=[^\s()=])")
MAX_UNKNOWN = 6
"""Words of unknown truth that are tried both ways; with more, nothing is decided."""


class NotPassed(Exception):
    """What a case that did not pass says, in lines."""


class ScenarioFile(pytest.File):
    """One scenario file; collecting it only reads it.

    Attributes:
        scenario: once it was read.
        wanted: cases that are chosen in any case: whoever wrote the file wants these.
    """

    scenario: Scenario
    wanted: frozenset[str] = frozenset()

    def collect(self) -> Iterator["CaseItem | LeftOut"]:
        """One item a case, in the order of the matrix; one for all of them that -m or -k leave out.

        Expanding tens of thousands of cases takes seconds, in each worker of pytest-xdist.
        """
        try:
            self.scenario = load_scenario(Path(os.path.relpath(self.path)))
            if self.scenario.tier:
                self.add_marker(self.scenario.tier)
            if self.config.pluginmanager.hasplugin("timeout"):
                # Of pytest-timeout. A run has its own limit, which does not count the wait for
                # slots.
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
    """One case, run and judged with all others that were selected.

    Attributes:
        id: of the case in its file.
        labels: the case's value of each axis.
    """

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
        self.user_properties += [
            ("outcome", verdict.outcome),
            ("what", verdict.what),
            ("folder", str(folder)),
        ]
        if verdict.outcome == "skipped":
            raise pytest.skip.Exception(verdict.message, _use_item_location=True)
        may_be = self.config.getoption("harness_incomparable") == "xfail"
        if verdict.outcome == "incomparable" and may_be:
            pytest.xfail(_first_line(verdict))
        if verdict.outcome != "passed":
            raise NotPassed("\n".join(_words(verdict, folder)))

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


def _first_line(verdict: Verdict) -> str:
    kind = f"{verdict.outcome}: {verdict.what}" if verdict.what else verdict.outcome
    return f"{kind}: {verdict.message}"


def _words(verdict: Verdict, folder: Path) -> Iterator[str]:
    yield _first_line(verdict)
    for check in verdict.checks:
        if check.outcome != "passed" and check.message != verdict.message:
            yield f"{check.check}: {check.outcome}: {check.message}"
    if verdict.confirmation is not None:
        yield confirmation.words(verdict.confirmation)
    case = shlex.quote(os.path.relpath(folder))
    yield f"look at it: harness show {case}"
    yield f"repeat it:  harness rerun {case}"


class Narrowing:
    """-m and -k of one session."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options; words that pytest itself would refuse narrow nothing."""
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
            if _could_be(self._marks, marks, known=TIERS) == {False}:
                return True
        if self._words is None:
            return False
        text = _names(file)
        inside = {word for word in self._words.words if word.lower() in text}
        could_be = _could_be(self._words, inside, known=inside)
        if could_be != {True, False}:
            return could_be == {False}
        cases = list(named(file.scenario))
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


def _could_be(expression: Expression, true: Collection[str], *, known: Iterable[str]) -> set[bool]:
    """The values that an expression may have; words that are neither true nor known are open."""
    unknown = [word for word in expression.words if word not in {*true, *known}]
    if len(unknown) > MAX_UNKNOWN:
        return {True, False}
    return {
        expression.holds({*true, *itertools.compress(unknown, chosen)}.__contains__)
        for chosen in itertools.product((False, True), repeat=len(unknown))
    }


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


def _keywords(labels: Mapping[str, str]) -> Iterator[str]:
    """What -k finds of a case in addition to its id: `axis=value`, as pytest can read it."""
    return (f"{axis}:{value}" for axis, value in labels.items())


def narrow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not to be run: files left out, and what `select: pairwise` leaves out.

    A pairwise choice is of what -k selects, as that of `harness run -k` is, and made before --lf,
    --sw or the order of other plugins, so that it is the same in every worker and every session.
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
