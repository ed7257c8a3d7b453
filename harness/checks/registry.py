"""The checks that a scenario may ask for: the schema of `checks:`, `harness list --checks` and the
table of `scenarios/README.md` are made of `CHECKS`.

To add one: write its function in a file of this room, an entry here, a test, and let the table be
printed again. A check takes the runs of a case and its options, which are legal, and answers.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.checks import exact, within
from harness.checks.complete import graphs
from harness.checks.evidence import Options, Runs, error
from harness.checks.memory import FORMULA_NAMES, peak_memory
from harness.checks.soak import soak
from harness.checks.speed import LEAST_PAIRS, MAX_SLOWDOWN, SKIP_STEPS, throughput
from harness.checks.taps import taps
from harness.records import CheckResult

MAX_REPEATS = 50


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
        """What is legal, in words."""
        if self.kind != "integer":
            return "a number > 0" + (" or a formula" if self.kind == "bytes" else "")
        if self.most is not None:
            return f"an integer from {self.least} to {self.most}"
        return f"an integer >= {self.least}"

    def accepts(self, value: object) -> bool:
        """Whether a value is legal; a formula is only known to be text."""
        if isinstance(value, str):
            return self.kind == "bytes"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind == "integer":
            return isinstance(value, int) and self.least <= value <= (self.most or math.inf)
        return 0 < value < math.inf


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of the candidate.

    Attributes:
        compares: whether it compares values with the reference: a scenario needs one that does.
        is_exact: whether it compares digests, which a tolerance makes informative.
        needs_option: whether it asks nothing without one.
        always: "" if only where asked for; else of every case, or of every `program`'s.
    """

    run: Callable[[Runs, Options], CheckResult]
    doc: str
    options: Mapping[str, Option] = field(default_factory=dict)
    compares: bool = False
    is_exact: bool = False
    needs_option: bool = False
    always: Literal["", "case", "program"] = ""


def _state(runs: Runs) -> CheckResult:
    found = exact.other_parts(runs.reference, runs.candidate)
    return exact.state(runs.reference, runs.candidate) if found is None else found


CHECKS: dict[str, Check] = {
    "loss": Check(
        run=lambda runs, _: within.loss(runs), compares=True,
        doc="bits of losses and gradient norm, or within the tolerance of `compare.expect`",
    ),
    "state": Check(
        run=lambda runs, _: _state(runs), compares=True, is_exact=True, always="case",
        doc="digests of all state, tensor by tensor, the state before step 0 included",
    ),
    "taps": Check(
        run=lambda runs, _: taps(runs.reference, runs.candidate), compares=True, is_exact=True,
        doc="digests of what went through the modules of `taps`, call by call",
    ),
    "finite": Check(
        run=lambda runs, _: exact.finite(runs.reference, runs.candidate), always="case",
        doc="no NaN and no infinity in losses, gradient norm and tensors",
    ),
    "peak_memory": Check(
        run=lambda runs, options: peak_memory(runs.reference, runs.candidate, options),
        doc="peak memory of the worst rank", needs_option=True,
        options={
            "max_ratio": Option(kind="number", doc="candidate's peak over the reference's"),
            "max_bytes": Option(
                kind="bytes", doc=f"the formula is over {', '.join(FORMULA_NAMES)}, KiB, MiB, GiB"
            ),
            "max_growth_bytes": Option(
                least=1, doc="what steps leave, from the second quarter of the run to the last"
            ),
        },
    ),
    "throughput": Check(
        run=throughput, doc="step time of timed runs made alone, in pairs",
        options={
            "max_slowdown": Option(kind="number", default=MAX_SLOWDOWN, doc="as a fraction"),
            "skip_steps": Option(default=SKIP_STEPS, doc="of every run, captures among them"),
            "repeats": Option(
                least=LEAST_PAIRS, most=MAX_REPEATS, default=LEAST_PAIRS,
                doc="pairs of runs; an interval of fewer is not as sure as the verdict says",
            ),
        },
    ),
    "soak": Check(
        run=lambda runs, options: soak(runs.reference, runs.candidate, options),
        doc="a bound on the rate of failures, and memory that does not grow; with section `soak`",
        options={"max_leak_bytes": Option(doc="growth a step that is let pass; 0 if left out")},
    ),
    "graphs": Check(
        run=lambda runs, options: graphs(runs.candidate, options), always="program",
        doc="a program's CUDA graphs were replayed, and no replay overwrote memory in use",
        options={"min_replays": Option(default=1, doc="of every rank")},
    ),
}  # fmt: skip


def refusal(name: str, options: Options) -> CheckResult | None:
    """An error if a stored case asks for no check that there is, or with no legal options."""
    if name not in CHECKS:
        message = f"no check is named {name}; legal names: {', '.join(CHECKS)}"
        return error(name, "unsupported", message)
    check = CHECKS[name]
    legal = " or ".join(check.options) or "no parameters"
    if wrong := sorted(set(options) - set(check.options)):
        return error(name, "unsupported", f"expected {legal}, got {', '.join(wrong)}")
    if check.needs_option and not options:
        return error(name, "unsupported", f"expected {legal}, got none")
    for option, value in options.items():
        if not check.options[option].accepts(value):
            expected = check.options[option].expected
            return error(name, "unsupported", f"{option}: expected {expected}, got {value!r}")
    return None


def defaults(name: str) -> dict[str, float]:
    """What a scenario need not say of a check."""
    options = CHECKS[name].options.items()
    return {key: option.default for key, option in options if option.default is not None}


def table() -> Iterator[str]:
    """The checks and their options, as lines of a Markdown table."""
    yield from ("| check, option | legal values | default | meaning |", "| --- | --- | --- | --- |")
    when = {"": "", "case": "; always runs", "program": "; always runs of a program"}
    for name, check in CHECKS.items():
        yield f"| `{name}` | | | {check.doc}{when[check.always]} |"
        for key, option in check.options.items():
            default = "" if option.default is None else f"{option.default:g}"
            yield f"| `{name}.{key}` | {option.expected} | {default} | {option.doc} |"
