"""What is run together: one scenario file, or several with one schedule and one report.

    files -> those of the tiers -> cases of all, ids led by their scenario's name -> `-k`
      -> what each scenario's `select` (or `--select`) leaves -> the shard
         or the cases that pytest picked

Of several scenarios, a case is `SCENARIO.CASE` and has the label `scenario`; a scenario that is for
another device than this run is skipped, case by case, with the reason. What a selection leaves out
is told: in the plan, in the run folder's manifest and in its report.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, NothingSelected, UsageError, shown
from harness.records import CaseSpec, ExitCode, Json
from harness.scenario.case_id import shortened
from harness.scenario.matrix import Device, expand, expand_marked
from harness.scenario.schema import Overrides, Scenario, load_scenario, read_tier
from harness.scenario.sections import Launch
from harness.scenario.selection import num_pairs, pairwise, select

SUFFIXES = (".yaml", ".yml")
MAX_ID_CHARS = 180
NO_OVERRIDES = Overrides()
Picked = Mapping[Path, Collection[str]]
"""Ids of cases, by the path of their file."""


@dataclass(frozen=True, kw_only=True)
class Selected(Json):
    """What is run of one scenario.

    Attributes:
        scenario: its name.
        why: its sentence.
        tier: its tier, "" for none.
        select: how the cases were chosen, "pytest" by its options.
        num_cases: chosen.
        left_out: by the selection, not by `-k` and not by the shard.
        pairs: of values, covered by a pairwise choice; 0 for others.
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
        if self.select == "pairwise":
            return f"{of} cover all {self.pairs} pairs of values (select: pairwise)"
        return f"{of} were selected by pytest"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Scenarios that are run together.

    Attributes:
        name: of the scenario, the tiers or the folder.
        why: one sentence.
        scenarios: decoded.
        tiers: that were asked for, joined by `+`; "" if none was.
        alone: one scenario, named by its file: ids stay as they are.
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
        head = f"name: {json.dumps(self.name)}\nwhy: {json.dumps(self.why)}\nscenarios:\n"
        return head + "".join(map(_quoted, self.scenarios))

    @property
    def launch(self) -> Launch:
        """Where and how they run; of several, what all of them say.

        Raises:
            UsageError: they do not agree on the engine or its options.
        """
        first = self.scenarios[0].launch
        for scenario in self.scenarios[1:]:
            other = scenario.launch
            if (other.engine, other.slurm) != (first.engine, first.slurm):
                raise UsageError(
                    f"{scenario.path}: launch.engine: expected that of "
                    f"{self.scenarios[0].path}, {first.engine} with the same options, got "
                    f"{other.engine}; say --engine, or run them apart"
                )
        launches = [scenario.launch for scenario in self.scenarios]
        devices = {launch.device for launch in launches}
        return dataclasses.replace(
            first,
            device=devices.pop() if len(devices) == 1 else "auto",
            retries=min(launch.retries for launch in launches),
        )

    def slots(self, default: int) -> int | None:
        """What all of them state, None for nothing; else the most, `default` among it.

        Fewer slots than one of them wants would skip its cases.
        """
        stated = {scenario.launch.slots for scenario in self.scenarios}
        return stated.pop() if len(stated) == 1 else max(default, *filter(None, stated))

    def cases(
        self,
        device: Device,
        *,
        forced: bool,
        keyword: str | None,
        how: str | None,
        picked: Picked | None = None,
    ) -> tuple[tuple[CaseSpec, ...], tuple[Selected, ...]]:
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
            ids = None if picked is None else _there(scenario, held, picked)
            if not self.alone:
                names = {case.id: joined(scenario.name, case.id) for case in held}
                ids = ids and {names[case] for case in ids}
                held = tuple(_named(case, names[case.id]) for case in held)
                kept = tuple(names[name] for name in kept)
            num_all += len(held)
            held = select(held, keyword)
            part, said = _select(scenario, held, kept, how or scenario.select, ids)
            wanted = scenario.launch.device
            if not forced and wanted not in ("auto", device):
                reason = f"its scenario is for {wanted}, this run is on {device}"
                part = tuple(dataclasses.replace(case, skip_reason=reason) for case in part)
            chosen += part
            told.append(said)
        if not chosen:
            raise NothingSelected(
                f"-k {shown(keyword)} selects none of {num_all} cases of {self.name}"
            )
        return tuple(chosen), tuple(told)


def find_scenarios(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The files named, and those in the folders named, sorted within each folder.

    Raises:
        NothingSelected: there is none.
    """
    found: dict[Path, None] = {}
    searched = [str(path) for path in paths]
    for path in map(Path, searched):
        inside = (p for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES and p.is_file())
        found |= dict.fromkeys(inside if path.is_dir() else (path,))
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
    alone = len(paths) == 1 and not tiers and not paths[0].is_dir()
    files: Sequence[Path] = paths if alone else find_scenarios(paths)
    if tiers:
        files = _of_tiers(files, paths, tiers)
    scenarios = tuple(load_scenario(file, overrides=overrides) for file in files)
    names: dict[str, Scenario] = {}
    for scenario in scenarios:
        if scenario.name in names:
            raise UsageError(
                f"{scenario.path}: name: expected one of its own, got {scenario.name}, the name "
                f"of {names[scenario.name].path}"
            )
        names[scenario.name] = scenario
    title = "+".join(dict.fromkeys(tiers))
    if alone:
        return Suite(
            name=scenarios[0].name, why=scenarios[0].why, scenarios=scenarios, tiers="", alone=True
        )
    folder = paths[0].resolve().name if len(paths) == 1 and paths[0].is_dir() else "several"
    what = f"The tier {title}" if title else "Together"
    return Suite(
        name=title or folder or "several",
        why=f"{what}: {', '.join(names)}.",
        scenarios=scenarios,
        tiers=title,
        alone=False,
    )


def _of_tiers(
    files: Sequence[Path], paths: Sequence[Path], tiers: Sequence[str]
) -> tuple[Path, ...]:
    found = {file: read_tier(file) for file in files}
    chosen = tuple(file for file, tier in found.items() if tier in tiers)
    missing = [tier for tier in tiers if tier not in found.values()]
    if missing:
        there = ", ".join(sorted(set(filter(None, found.values())))) or "none has any"
        places = ", ".join(map(str, paths))
        raise NothingSelected(
            f"--tier {missing[0]}: no scenario in {places} has this tier (tiers there: {there})"
        )
    return chosen


def _there(scenario: Scenario, held: Sequence[CaseSpec], picked: Picked) -> set[str]:
    ids = set(picked[Path(scenario.path)])
    if missing := ids.difference(case.id for case in held):
        raise UsageError(f"{scenario.path}: expected one of its cases, got {shown(min(missing))}")
    return ids


def _select(
    scenario: Scenario, held: tuple[CaseSpec, ...], kept: Sequence[str], how: str,
    ids: set[str] | None,
) -> tuple[tuple[CaseSpec, ...], Selected]:  # fmt: skip
    pairs = 0
    chosen = held
    if ids is not None:
        how, chosen = "pytest", tuple(case for case in held if case.id in ids)
    elif how == "pairwise":
        chosen, pairs = pairwise(held, keep=kept), num_pairs(held)
    return chosen, Selected(
        scenario=scenario.name, why=scenario.why, tier=scenario.tier, select=how,
        num_cases=len(chosen), left_out=len(held) - len(chosen), pairs=pairs,
    )  # fmt: skip


def _named(case: CaseSpec, name: str) -> CaseSpec:
    return dataclasses.replace(case, id=name, labels={"scenario": case.scenario} | case.labels)


def joined(scenario: str, case: str) -> str:
    """A case's id among those of several scenarios."""
    name = f"{scenario}.{case}"
    if len(name) <= MAX_ID_CHARS:
        return name
    return shortened(name, name, MAX_ID_CHARS)


def _quoted(scenario: Scenario) -> str:
    """A file as it is, as a text in another."""
    lines = scenario.source.decode().splitlines()
    body = "".join(f"      {line}".rstrip() + "\n" for line in lines)
    return f"  - file: {json.dumps(Path(scenario.path).name)}\n    text: |2\n{body}"


@dataclass(frozen=True, kw_only=True)
class Checked(Json):
    """What came of checking one file: its number of cases, or the error's line and exit code."""

    file: str
    num_cases: int = 0
    error: str = ""
    exit_code: int = ExitCode.PASSED


def check_files(files: Sequence[Path], overrides: Overrides) -> tuple[Checked, ...]:
    """Decode and expand every file; errors become results."""
    results = []
    for file in files:
        try:
            cases = expand(load_scenario(file, overrides=overrides), "cpu")
        except HarnessError as error:
            results.append(Checked(file=str(file), error=str(error), exit_code=error.exit_code))
        else:
            results.append(Checked(file=str(file), num_cases=len(cases)))
    return tuple(results)
