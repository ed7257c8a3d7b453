"""Bisect faults of two causes, and faults that fire in 30 % of runs; print what it took.

    python -m tests.two_causes                  all (an hour on two cores)
    python -m tests.two_causes --only two       the ten with two causes; `flaky` the other five
    python -m tests.two_causes -k ulp --out DIR some, over what DIR holds already

The bound is what any search needs for answers of yes and no: log2 of the number of sets of so many
changes, or of such pairs of sets. Exit codes: 0 all found, 1 not, 4 usage.
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

from harness.bisect.causes import FoundCauses, find_causes
from harness.bisect.experiments import Asker
from harness.engine.base import Engine
from harness.errors import HarnessError
from harness.runner import launch
from harness.store import RunFolder
from tests.two_causes.faults import FLAKY_CAUSES, TWO_CAUSES, TwoCauses

_ROW = "{:34} {:>3} {:>8} {:>6} {:>6} {:>9} {:>6} {:>7}  {}\n"


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.two_causes")
    parser.add_argument("--only", choices=("two", "flaky"))
    parser.add_argument("-k", default="", help="part of a name")
    parser.add_argument("--out", type=Path, help="folder of run folders, kept")
    parser.add_argument("--slots", type=int, default=8)
    asked = parser.parse_args(arguments)
    chosen = [fault for fault in (*TWO_CAUSES, *FLAKY_CAUSES) if asked.k in fault.name]
    if asked.only:
        group = TWO_CAUSES if asked.only == "two" else FLAKY_CAUSES
        chosen = [fault for fault in chosen if fault in group]
    if not chosen:
        sys.stderr.write(f"-k {asked.k}: expected part of a name, got none of them\n")
        return 4
    out = asked.out or Path(tempfile.mkdtemp(prefix="two-causes-"))
    heads = ("fault", "n", "log2(n)", "bound", "found", "questions", "runs", "seconds", "causes")
    sys.stdout.write(_ROW.format(*heads))
    try:
        right = [_bisect(fault, out / fault.slug, asked.slots) for fault in chosen]
    except HarnessError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    sys.stdout.write(f"{sum(right)} of {len(right)} right; run folders: {out}\n")
    return 0 if all(right) else 1


def _bisect(fault: TwoCauses, place: Path, slots: int) -> bool:
    case, began_s = fault.case(), time.monotonic()
    prepared = launch.prepare_cases([case], name="two_causes", why="Two causes.", slots=slots)
    there = (place / "manifest.json").is_file()
    folder = RunFolder.open(place) if there else launch.make_folder(prepared, place, [])
    with folder:
        engine: Engine = launch.make_engine(prepared)
        try:
            asker = Asker(folder, engine)
            verdict = asker.ask(case, "does it fail?").verdict
            for _ in range(200):
                if verdict.outcome != "passed":
                    break
                # A fault of chance: whoever comes with a failing case has seen it fail.
                folder.set_aside(case.candidate.key)
                verdict = asker.ask(case, "does it fail?").verdict
            before = asker.num_runs
            found = find_causes(case, verdict, asker)
        finally:
            engine.close()
    sets = frozenset(frozenset(cause.changes) for cause in found.causes)
    is_right = fault.is_right(sets)
    _tell(fault, found, asker.num_runs - before, is_right, time.monotonic() - began_s)
    return is_right


def _tell(
    fault: TwoCauses, found: FoundCauses, num_runs: int, is_right: bool, seconds: float
) -> None:
    n = len(found.candidates)
    sys.stdout.write(
        _ROW.format(
            fault.name, n, f"{math.log2(n):.1f}", f"{_bound(fault, n):.1f}",
            "yes" if is_right else "NO", found.num_questions, num_runs, f"{seconds:.0f}",
            "; ".join(map(str, found.causes)),
        )
    )  # fmt: skip
    for note in () if is_right and found.complete else (str(found.policy or ""), *found.notes):
        sys.stdout.write(f"    {note}\n")
    sys.stdout.flush()


def _bound(fault: TwoCauses, n: int) -> float:
    """Bits that tell these causes from all others of as many changes each."""
    return sum(math.log2(math.comb(n, len(cause))) for cause in fault.causes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
