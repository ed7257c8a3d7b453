"""What is run together: one scenario, or several with one schedule and one report.

    scenarios -> those of the tiers -> cases of all, ids led by their scenario's name -> `-k`
      -> what each scenario's `select` (or `--select`) leaves, or the cases that pytest picked

Of several scenarios, a case is `SCENARIO.CASE` and has the label `scenario`; a scenario that is for
another device than this run is skipped, case by case, with the reason. What a selection leaves out
is said in the plan, in the run folder's manifest and in its report.

`-k` is an expression of words with `and`, `or`, `not` and brackets. A word selects the cases whose
id contains it, or one of whose labels does, written `axis=value`; letter case does not matter.

`pairwise` leaves cases that still have every pair of values that any case has; with one axis, every
value. The choice is greedy: the case with the most pairs that are not covered yet, the first in the
file's order among equals (V. Chvatal, Mathematics of Operations Research 4(3), 1979). What a case
would add only shrinks, so only the best by its last known count is counted again (M. Minoux, 1978).
"""

import ast
import dataclasses
import heapq
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, NothingSelected, ScenarioError, UsageError, shown
from harness.records import CaseSpec, Device, ExitCode, Json
from harness.scenario.matrix import expand, expand_marked, shortened
from harness.scenario.schema import Launch, Overrides, Scenario, load_scenario, read_tier
from harness.scenario.yaml_source import documents

SUFFIXES = (".yaml", ".yml")
MAX_ID_CHARS = 180
NO_OVERRIDES = Overrides()
Picked = Mapping[Path, Collection[str]]
"""Ids of cases, by the path of their scenario."""


@dataclass(frozen=True, kw_only=True)
class Selected(Json):
    """What is run of one scenario.

    `select` is how cases were chosen, "pytest" by its options; `left_out` counts those that the
    choice left, `-k` and the shard not counted; `pairs` of values are covered by a pairwise choice.
    """

    scenario: str
    why: str
    tier: str
    select: str
    num_cases: int
    left_out: int
    pairs: int = 0

    def note(self) -> str:
        """What was left out, for people; "" for nothing."""
        if not self.left_out:
            return ""
        of = f"{self.scenario}: {self.num_cases} of {self.num_cases + self.left_out} cases"
        if self.select == "pytest":
            return f"{of} were selected by pytest"
        return f"{of} cover all {self.pairs} pairs of values (select: pairwise)"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Scenarios that are run together; `alone` is one named by its path, whose ids stay.

    `tiers` are those asked for, joined by `+`; "" if none was.
    """

    name: str
    why: str
    scenarios: tuple[Scenario, ...]
    tiers: str
    alone: bool

    @property
    def text(self) -> str:
        """What goes into the run folder as scenario.yaml."""
        if self.alone:
            return self.scenarios[0].source.decode()
        text = f"name: {json.dumps(self.name)}\nwhy: {json.dumps(self.why)}\nscenarios:\n"
        for scenario in self.scenarios:
            lines = (f"      {line}".rstrip() for line in scenario.source.decode().splitlines())
            text += f"  - file: {json.dumps(Path(scenario.path).name)}\n    text: |2\n"
            text += "".join(f"{line}\n" for line in lines)
        return text

    @property
    def launch(self) -> Launch:
        """Where and how they run (`UsageError`: they disagree on the engine or its options)."""
        start, *others = self.scenarios
        first = start.launch
        for path, other in ((each.path, each.launch) for each in others):
            if (other.engine, other.slurm) != (first.engine, first.slurm):
                raise UsageError(
                    f"{path}: launch.engine: expected that of {start.path}, {first.engine} with "
                    f"the same options, got {other.engine}; say --engine, or run them one by one"
                )
        launches = [scenario.launch for scenario in self.scenarios]
        devices = {launch.device for launch in launches}
        device, retries = devices.pop(), min(launch.retries for launch in launches)
        return dataclasses.replace(first, device="auto" if devices else device, retries=retries)

    def slots(self, default: int) -> int | None:
        """What all of them state, None for nothing; else the most, `default` among it.

        Fewer slots than one of them wants would skip its cases.
        """
        stated = {scenario.launch.slots for scenario in self.scenarios}
        return stated.pop() if len(stated) == 1 else max(default, *filter(None, stated))

    def cases(
        self, device: Device, *, forced: bool, keyword: str | None, how: str | None,
        picked: Picked | None = None,
    ) -> tuple[tuple[CaseSpec, ...], tuple[Selected, ...]]:  # fmt: skip
        """The cases to run, and what is left out of each scenario.

        Args:
            device: where.
            forced: the user named the device: scenarios that are for another go there, too.
            keyword: `-k`.
            how: `--select`, over what the scenarios say.
            picked: these and no others.

        Raises:
            ScenarioError: see `harness.scenario.matrix.expand`.
            UsageError: one that is picked is not there.
            NothingSelected: nothing is left.
        """
        chosen: list[CaseSpec] = []
        told: list[Selected] = []
        num_all = 0
        for scenario in self.scenarios:
            held, kept = expand_marked(scenario, device)
            num_all += len(held)
            ids = None if picked is None else set(picked[Path(scenario.path)])
            if lost := (ids or set()).difference(case.id for case in held):
                got = shown(min(lost))
                raise UsageError(f"{scenario.path}: expected one of its cases, got {got}")
            if not self.alone:
                held = tuple(_named(case) for case in held)
                kept = tuple(joined(scenario.name, name) for name in kept)
                ids = ids and {joined(scenario.name, name) for name in ids}
            held = select(held, keyword)
            part, said = _select(scenario, held, kept, how or scenario.select, ids)
            wanted = scenario.launch.device
            if not forced and wanted not in ("auto", device):
                reason = f"its scenario is for {wanted}, this run is on {device}"
                part = tuple(dataclasses.replace(case, skip_reason=reason) for case in part)
            chosen += part
            told.append(said)
        if not chosen:
            none = f"-k {shown(keyword)} selects none of {num_all} cases of {self.name}"
            raise NothingSelected(none)
        return tuple(chosen), tuple(told)


def _select(
    scenario: Scenario, held: tuple[CaseSpec, ...], kept: Sequence[str], how: str,
    ids: set[str] | None,
) -> tuple[tuple[CaseSpec, ...], Selected]:  # fmt: skip
    chosen, pairs = held, 0
    if ids is not None:
        how, chosen = "pytest", tuple(case for case in held if case.id in ids)
    elif how == "pairwise":
        chosen, pairs = pairwise(held, keep=kept), num_pairs(held)
    return chosen, Selected(
        scenario=scenario.name, why=scenario.why, tier=scenario.tier, select=how,
        num_cases=len(chosen), left_out=len(held) - len(chosen), pairs=pairs,
    )  # fmt: skip


def _named(case: CaseSpec) -> CaseSpec:
    labels = {"scenario": case.scenario} | case.labels
    return dataclasses.replace(case, id=joined(case.scenario, case.id), labels=labels)


def joined(scenario: str, case: str) -> str:
    """A case's id among those of several scenarios."""
    name = f"{scenario}.{case}"
    return name if len(name) <= MAX_ID_CHARS else shortened(name, name, MAX_ID_CHARS)


def whole_id(scenario: str, case_id: str) -> str:
    """`SCENARIO.CASE`, which is what a case of several scenarios in one run is called anyway."""
    return case_id if case_id.startswith(f"{scenario}.") else f"{scenario}.{case_id}"


# --- files ------------------------------------------------------------------------------------


def find_scenarios(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The scenarios of the files named and of those in the folders named, sorted in each folder.

    Each is a file, or `FILE::NAME` where the file holds several.

    Raises:
        NothingSelected: there is none.
    """
    found: dict[Path, None] = {}
    searched = [str(path) for path in paths]
    for path in map(Path, searched):
        inside = (p for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES and p.is_file())
        for file in inside if path.is_dir() else (path,):
            try:
                found |= dict.fromkeys(documents(file))
            except ScenarioError:  # told where it is loaded
                found[file] = None
    if not found:
        raise NothingSelected(f"no scenario file in {', '.join(searched)}")
    return tuple(found)


def load_suite(
    paths: Sequence[Path], *, tiers: Sequence[str] = (), overrides: Overrides = NO_OVERRIDES
) -> Suite:
    """Read the scenarios of files and folders, those of the tiers if any is given.

    Raises:
        ScenarioError: one of them cannot be used.
        UsageError: two have one name.
        NothingSelected: there is none.
    """
    files: Sequence[Path] = find_scenarios(paths)
    alone = len(paths) == len(files) == 1 and not tiers and not paths[0].is_dir()
    if tiers:
        found = {file: read_tier(file) for file in files}
        if missing := [tier for tier in tiers if tier not in found.values()]:
            there = ", ".join(sorted(set(filter(None, found.values())))) or "none has any"
            raise NothingSelected(
                f"--tier {missing[0]}: no scenario in {', '.join(map(str, paths))} has this tier "
                f"(tiers there: {there})"
            )
        files = [file for file, tier in found.items() if tier in tiers]
    scenarios = tuple(load_scenario(file, overrides=overrides) for file in files)
    names: dict[str, Scenario] = {}
    for each in scenarios:
        if (other := names.setdefault(each.name, each)) is not each:
            raise UsageError(
                f"{each.path}: name: expected one of its own, got {each.name}, the name of "
                f"{other.path}"
            )
    title = "+".join(dict.fromkeys(tiers))
    name, why = scenarios[0].name, scenarios[0].why
    if not alone:
        only = paths[0].resolve()
        named = (only.name if only.is_dir() else only.stem) if len(paths) == 1 else "several"
        name = title or named
        why = f"{f'The tier {title}' if title else 'Together'}: {', '.join(names)}."
    return Suite(name=name, why=why, scenarios=scenarios, tiers=title, alone=alone)


@dataclass(frozen=True, kw_only=True)
class Checked(Json):
    """What came of checking a scenario: its number of cases, or the error's line and exit code."""

    file: str
    num_cases: int = 0
    error: str = ""
    exit_code: int = ExitCode.PASSED


def check_files(files: Sequence[Path], overrides: Overrides) -> tuple[Checked, ...]:
    """Decode and expand every scenario; errors become results."""
    results = []
    for file in map(str, files):
        try:
            num_cases = len(expand(load_scenario(file, overrides=overrides), "cpu"))
            results.append(Checked(file=file, num_cases=num_cases))
        except HarnessError as error:
            results.append(Checked(file=file, error=str(error), exit_code=error.exit_code))
    return tuple(results)


# --- -k ---------------------------------------------------------------------------------------

Predicate = Callable[[str], bool]
Holds = Callable[[Predicate], bool]
MAX_EXPRESSION_CHARS, MAX_DEPTH = 2000, 50
_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")
_OPERATORS = ("and", "or", "not", "(", ")")


@dataclass(frozen=True)
class Expression:
    """An expression that was read: its words, each once, and from a function that says which words
    are true to whether the expression is."""

    words: tuple[str, ...]
    holds: Holds


def select(cases: Iterable[CaseSpec], expression: str | None) -> tuple[CaseSpec, ...]:
    """The cases that the expression selects, in their order; all of them for None.

    Raises:
        UsageError: the expression cannot be read.
    """
    if expression is None:
        return tuple(cases)
    matches = compile_expression(expression)

    def known_as(case: CaseSpec) -> str:
        labels = (f"{axis}={value}" for axis, value in case.labels.items())
        return "\n".join((case.id, *labels)).lower()  # no word can hold a line break

    return tuple(case for case in cases if matches(known_as(case)))


def compile_expression(expression: str) -> Predicate:
    """A function from a case's lower-case texts to yes or no (`UsageError`: as above)."""
    holds = read_expression(expression).holds
    return lambda text: holds(lambda word: word.lower() in text)


def read_expression(expression: str) -> Expression:
    """Read an expression, whatever its words stand for (`UsageError`: it cannot be read)."""
    tokens = _TOKEN.findall(expression[: MAX_EXPRESSION_CHARS + 1])
    words = tuple(dict.fromkeys(token for token in tokens if token not in _OPERATORS))
    names = {word: f"w{number}" for number, word in enumerate(words)}
    try:
        if len(expression) > MAX_EXPRESSION_CHARS:
            raise SyntaxError
        tree = ast.parse(" ".join(names.get(token, token) for token in tokens), mode="eval")
        return Expression(words, _holds(tree.body, dict(zip(names.values(), words, strict=True))))
    except (SyntaxError, RecursionError, MemoryError):
        raise UsageError(
            f"-k {shown(expression)}: expected words with and, or, not and brackets, at most "
            f"{MAX_EXPRESSION_CHARS} characters, got something else"
        ) from None


def _holds(tree: ast.expr, words: Mapping[str, str], depth: int = 1) -> Holds:
    if depth > MAX_DEPTH:  # as on the report's page
        raise SyntaxError
    match tree:
        case ast.Name(id=name):
            return lambda is_true: is_true(words[name])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _holds(operand, words, depth + 1)
            return lambda is_true: not inner(is_true)
        case ast.BoolOp(op=op, values=values):
            parts = [_holds(each, words, depth + 1) for each in values]
            whole = all if isinstance(op, ast.And) else any
            return lambda is_true: whole(part(is_true) for part in parts)
        case _:
            raise SyntaxError


# --- pairwise ---------------------------------------------------------------------------------


def pairwise(cases: Sequence[CaseSpec], *, keep: Collection[str] = ()) -> tuple[CaseSpec, ...]:
    """Cases that cover every pair of values that any of `cases` has, in their order.

    Cases whose ids are in `keep` are chosen in any case.
    """
    covers = _elements(cases)
    chosen = {place for place, case in enumerate(cases) if case.id in keep}
    left = set(itertools.chain(*covers)).difference(*(covers[place] for place in chosen))
    queue = [(-len(held), place) for place, held in enumerate(covers) if place not in chosen]
    heapq.heapify(queue)
    while left:
        _, place = heapq.heappop(queue)
        gain = sum(element in left for element in covers[place])
        if queue and (-gain, place) > queue[0]:
            heapq.heappush(queue, (-gain, place))
            continue
        chosen.add(place)
        left.difference_update(covers[place])
    return tuple(cases[place] for place in sorted(chosen))


def num_pairs(cases: Sequence[CaseSpec]) -> int:
    """How many pairs of values the cases have; of one axis, values."""
    return len(set(itertools.chain(*_elements(cases))))


def _elements(cases: Sequence[CaseSpec]) -> list[list[tuple[int, ...]]]:
    """What each case covers, by numbers: its pairs of values, or its values where it has but one.

    Values may read alike. Cases that do are told apart by their ids, and so all stay.
    """
    labels = [tuple(case.labels.items()) for case in cases]
    alike = Counter(labels)
    numbers: dict[tuple[str, str], int] = {}
    found = []
    for case, held in zip(cases, labels, strict=True):
        named = held if alike[held] == 1 else (*held, ("", case.id))
        values = sorted(numbers.setdefault(value, len(numbers)) for value in named)
        pairs: list[tuple[int, ...]] = list(itertools.combinations(values, 2))
        found.append(pairs or [(value,) for value in values])
    return found
