"""Every error that the harness raises on purpose, each with the exit code that it ends in.

    HarnessError
      UsageError       4  the user asked for something that cannot be
        ScenarioError  4  a scenario file or option says something wrong, and where
      NothingSelected  5  the request is legal and selects no case
      Infrastructure   6  the machine, not the program under test, stopped us
      Interrupted      2  Ctrl-C or SIGTERM
      InternalError    3  our own mistake

The text of an error is always one line: it is what the command line prints.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar

from harness.records import ExitCode, Verdict

MAX_SHOWN_CHARS = 80


def one_line(text: str) -> str:
    """`text` with line breaks and unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object) -> str:
    """`value` as an error message shows it: quoted, on one line, cut to a readable length."""
    words = {"True": "true", "False": "false", "None": "nothing"}
    text = words.get(text := repr(value)) or one_line(text)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[: MAX_SHOWN_CHARS - 1]}… ({len(text)} characters)"


def cut(text: str, most: int) -> str:
    """`text`, or its first words in at most that many characters, and that there were more."""
    if len(text) <= most:
        return text
    kept = text[: most - 2]
    words, space, _ = kept.rpartition(" ")
    return f"{words if space and not text[most - 2].isspace() else kept} …"


class HarnessError(Exception):
    """Base of the tree. `exit_code` is what the process ends with."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(HarnessError, ValueError):
    """The user's request cannot be carried out as written."""

    exit_code = ExitCode.USAGE


class ScenarioError(UsageError):
    """A value in a scenario file, or in an option, that cannot be.

    `file` is the path as given, or the option's name; `line` counts from 1, None for a whole file
    or an option; `got` is rendered (`shown`); `rule` names the broken rule of the configuration.
    """

    def __init__(
        self, *, file: str, line: int | None, key: str, expected: str, got: str,
        legal: Iterable[object] = (), rule: str = "",
    ) -> None:  # fmt: skip
        self.file, self.line, self.key, self.expected, self.got = file, line, key, expected, got
        self.legal, self.rule = tuple(legal), rule
        where = file if line is None else f"{file}:{line}"
        text = f"{where}: {key}: expected {expected}, got {got}"
        if self.legal:
            words = (v if isinstance(v, str) else shown(v) for v in self.legal)
            text += f"; legal values: {', '.join(words)}"
        super().__init__(text + (f"; rule: {rule}" if rule else ""))


class NothingSelected(HarnessError):
    """A legal request that selects no case: nothing would run, so nothing may pass."""

    exit_code = ExitCode.NOTHING_RAN


class Infrastructure(HarnessError):
    """The machine or its software stopped the harness; no verdict about the program."""

    exit_code = ExitCode.NO_VERDICT


class Interrupted(HarnessError):
    """The user or the system asked the harness to stop; `verdicts` are those of cases done."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, text: str, verdicts: Sequence[Verdict] = ()) -> None:
        self.verdicts = tuple(verdicts)
        super().__init__(text)


class InternalError(HarnessError):
    """A mistake of the harness itself, as `HarnessError` says of any."""


def did_you_mean(word: str, legal: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest legal word, or nothing."""
    close = difflib.get_close_matches(word, list(legal), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
