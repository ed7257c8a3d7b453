"""A page as a list of commands, each with what was printed; and what changed of it.

In a block of kind `console`, a line that begins with `$ ` is a command, which goes on after a
backslash; the lines after it are what was on the screen. `[...]` on a line of its own stands for
any number of lines, in a line for any text. Blank lines and runs of spaces count for nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

GAP = "[...]"
_FENCE = "```"
_NUMBER = r"\d+(?:\.\d+)?"
_ANY = (
    (re.compile(rf"\b{_NUMBER} (?:s|min|h)\b(?: \d+ (?:s|min)\b)?"), "TIME"),
    (re.compile(r"\b(?:look-|keep-|ask-)?w\d+-[\w+]+-r\d+-[0-9a-f]{12}(?:-[0-9a-f]{12})?"), "RUN"),
    (re.compile(r"(?<![\w.])(?:[0-9a-f]{40}|[0-9a-f]{9,12}|[0-9a-f]{7})(?![\w.])"), "COMMIT"),
    (re.compile(r"\b0x[57][0-9a-f]{11}\b"), "ADDRESS"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?"), "DATE"),
    (re.compile(r"(?<![\w.])/[\w./+-]+"), "PATH"),
)
"""What is another in every run: times, names of runs, commits, addresses, dates, paths."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the page.

    Attributes:
        line: of its first line in the page, from 1.
        command: for bash.
        shown: the lines that the page has after it.
        first, last: those lines in the page, from 0, the last not included.
    """

    line: int
    command: str
    shown: tuple[str, ...]
    first: int
    last: int


def read_steps(page: str) -> list[Step]:
    """The commands of a page, in order."""
    steps: list[Step] = []
    lines = page.splitlines()
    is_console = is_inside = False
    number = 0
    while number < len(lines):
        line = lines[number]
        if line.startswith(_FENCE):
            is_inside = not is_inside
            is_console = is_inside and line == f"{_FENCE}console"
        elif is_console and line.startswith("$ "):
            begin, command = number, line[2:]
            while command.endswith("\\"):
                number += 1
                command = command[:-1].rstrip() + " " + lines[number].strip()
            first = number + 1
            while not lines[number + 1].startswith(("$ ", _FENCE)):
                number += 1
            shown = tuple(lines[first : number + 1])
            steps.append(
                Step(line=begin + 1, command=command, shown=shown, first=first, last=number + 1)
            )
        number += 1
    return steps


def plain(line: str) -> str:
    """A line without what is another in every run, nor layout."""
    for pattern, name in _ANY:
        line = pattern.sub(name, line)
    return " ".join(re.sub("[─━]+", "", line).split())


def changes(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Lines of the page that were not printed (`-`), and lines printed that it lacks (`+`)."""
    want = [plain(line) for line in shown if plain(line)]
    have = [plain(line) for line in printed if plain(line)]
    told: list[str] = []
    at, may_skip = 0, False
    for line in want:
        if line == GAP:
            may_skip = True
            continue
        found = next((i for i in range(at, len(have)) if _is_like(line, have[i])), None)
        if found is None:
            told.append(f"- {line}")
            continue
        told += [] if may_skip else [f"+ {other}" for other in have[at:found]]
        at, may_skip = found + 1, False
    return told + ([] if may_skip else [f"+ {other}" for other in have[at:]])


def _is_like(line: str, other: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, line.split(GAP))), other) is not None
