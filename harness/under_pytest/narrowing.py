"""What -m and -k leave of scenario files, known before pytest has made an item of every case.

    -m  tiers are markers of files: a file of other tiers is left out as a whole, by its tier alone
    -k  a file is left out as a whole if the names of its folders and cases say so; no case is made
    select: pairwise   of what -k leaves, as `harness run -k` does

Both read pytest's expressions with the words of `harness.scenario.selection`, and pytest reads them
again. What they cannot read or decide here stays in, for pytest to decide: markers that a
conftest.py gives to single cases may be any. Keywords that one gives are not known to -k where a
whole file is left out.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.scenario.matrix import named
from harness.scenario.schema import Scenario
from harness.scenario.sections import TIERS
from harness.scenario.selection import Expression, read_expression

_EQUALS = re.compile(r"(?<=[^\s()=])=(?=[^\s()=])")
MAX_UNKNOWN = 6
"""Words of unknown truth that are tried both ways; with more, nothing is decided."""


class Narrowing:
    """-m and -k of one session."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options; words that pytest itself would refuse narrow nothing."""
        self._marks = _read(config.getoption("markexpr"))
        self._words = _read(config.getoption("keyword"))

    def leaves_out(self, file: pytest.File, scenario: Scenario) -> bool:
        """Whether no case of a file can be selected.

        Args:
            file: with the markers that all of its cases have.
            scenario: what is in it.

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
        cases = list(named(scenario))
        return bool(cases) and not any(self._finds(text, *case) for case in cases)

    def wants(self, file: pytest.File, case: str, labels: Mapping[str, str]) -> bool:
        """Whether -k, as far as it is known here, selects a case."""
        return self._words is None or self._finds(_names(file), case, labels)

    def _finds(self, text: str, case: str, labels: Mapping[str, str]) -> bool:
        assert self._words is not None
        known = "\n".join((text, case, *keywords(labels))).lower()
        return self._words.holds(lambda word: word.lower() in known)


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


def keywords(labels: Mapping[str, str]) -> Iterator[str]:
    """What -k finds of a case beside its id: `axis=value`, as pytest can read it."""
    return (f"{axis}:{value}" for axis, value in labels.items())


def readable(expression: str) -> str:
    """-k as it is typed for `harness run`, in pytest's words: there, no word has a `=`."""
    return _EQUALS.sub(":", expression)


def asked_by_name(config: pytest.Config, file: Path) -> frozenset[str]:
    """Cases of a file that the user named, or that --lf and --ff bring back: no choice drops them.

    Args:
        config: pytest's.
        file: absolute.
    """
    found = set()
    for argument in config.args:
        path, _, case = argument.partition("::")
        if case and (config.invocation_params.dir / path).resolve() == file.resolve():
            found.add(case)
    cache = getattr(config, "cache", None)  # -p no:cacheprovider: neither it nor its options
    if cache is not None and (config.getoption("lf") or config.getoption("failedfirst")):
        for node in cache.get("cache/lastfailed", {}):
            path, _, case = str(node).partition("::")
            if (config.rootpath / path).resolve() == file.resolve():
                found.add(case)
    return frozenset(found)
