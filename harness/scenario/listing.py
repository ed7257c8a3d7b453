"""Finding scenario files and checking many of them, so that one bad file does not hide another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, NothingSelected
from harness.records import ExitCode, Json
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Checked(Json):
    """What came of checking one file: its number of cases, or the error's line and exit code."""

    file: str
    num_cases: int = 0
    error: str = ""
    exit_code: int = ExitCode.PASSED


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
