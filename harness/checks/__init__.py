"""Records in, evidence and verdicts out: pure functions, no files, no torch.

    complete    is a run whole?                  bits      of the state, of losses, NaN; tolerances
    taps        bits of modules' calls           memory    peaks, growth, what a soak states
    speed       is the candidate slower?         judge     which answer decides; does it come again?
    evidence    what all share

This file is the registry: the schema of `checks:`, `harness list --checks` and the table of
`docs/GUIDE.md` are made of `CHECKS`. A new check is a function under `@check` in a module of
this room, a test and a scenario; the table is printed again.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.checks.evidence import Options, Runs, error
from harness.records import CheckResult

__all__ = ["CHECKS", "Check", "Option", "check", "defaults", "exit_code", "judge", "refusal"]

Run = Callable[[Runs, Options], CheckResult]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A limit: an integer from `least` to `most`, a `number` above 0, or `bytes`: an integer from 1
    on, or a formula. `default` is filled in as a scenario is read."""

    doc: str
    kind: Literal["integer", "number", "bytes"] = "integer"
    least: int = 0
    most: int | None = None
    default: float | None = None

    @property
    def expected(self) -> str:
        if self.kind != "integer":
            return "a number > 0" + (" or a formula" if self.kind == "bytes" else "")
        if self.most is not None:
            return f"an integer from {self.least} to {self.most}"
        return f"an integer >= {self.least}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of the candidate.

    Attributes:
        compares: whether it compares values with the reference: a scenario needs one that does.
        is_exact: whether it compares digests, which a tolerance makes informative.
        needs_option: whether it asks nothing without one.
        always: "" if only where asked for; else of every case, or of every `program`'s.
        is_claim: whether it states what holds only if no other check says no: it comes last.
    """

    run: Run
    doc: str
    options: Mapping[str, Option] = field(default_factory=dict)
    compares: bool = False
    is_exact: bool = False
    needs_option: bool = False
    always: Literal["", "case", "program"] = ""
    is_claim: bool = False


CHECKS: dict[str, Check] = {}
"""By name: those that compare values, the others, claims; in each part by the alphabet."""


def check(name: str, doc: str, **about: Any) -> Callable[[Run], Run]:
    """Enter a function as the check `name`; `about` are fields of `Check`."""

    def enter(run: Run) -> Run:
        CHECKS[name] = Check(run=run, doc=doc, **about)
        for key in sorted(CHECKS, key=lambda n: (CHECKS[n].is_claim, not CHECKS[n].compares, n)):
            CHECKS[key] = CHECKS.pop(key)
        return run

    return enter


def refusal(name: str, options: Options) -> CheckResult | None:
    """An error if a stored case, maybe of another version, asks for no check or option here."""
    if (found := CHECKS.get(name)) is None:
        message = f"no check is named {name}; legal names: {', '.join(CHECKS)}"
        return error(name, "unsupported", message)
    wrong = sorted(set(options) - set(found.options))
    if wrong or (found.needs_option and not options):
        legal = " or ".join(found.options) or "no parameters"
        message = f"expected {legal}, got {', '.join(wrong) or 'none'}"
        return error(name, "unsupported", message)
    return None


def defaults(name: str) -> dict[str, float]:
    """What a scenario need not say of a check."""
    options = CHECKS[name].options.items()
    return {key: option.default for key, option in options if option.default is not None}


def table() -> Iterator[str]:
    """The checks and their options, as lines of a Markdown table."""
    yield from ("| check, option | legal values | default | meaning |", "| --- | --- | --- | --- |")
    when = {"": "", "case": "; always runs", "program": "; always runs of a program"}
    for name, found in CHECKS.items():
        yield f"| `{name}` | | | {found.doc}{when[found.always]} |"
        for key, option in found.options.items():
            default = "" if option.default is None else f"{option.default:g}"
            yield f"| `{name}.{key}` | {option.expected} | {default} | {option.doc} |"


for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

from harness.checks.judge import exit_code, judge  # noqa: E402 - it asks for the checks above
