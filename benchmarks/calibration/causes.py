"""Bisect faults of two causes, and faults that fire in 30 % of runs; print what it took.

    python -m benchmarks.calibration.causes                  all (an hour on two cores)
    python -m benchmarks.calibration.causes -k ulp --out DIR some, over what DIR holds already

The bound is what any search needs for answers of yes and no: log2 of the number of sets of so many
changes, or of such pairs of sets. Exit codes: 0 all found, 1 not, 4 usage.
"""

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig
from harness.bisect.causes import find_causes
from harness.bisect.differences import RunChanges
from harness.bisect.experiments import Asker
from harness.engine import Engine
from harness.errors import HarnessError
from harness.records import CaseSpec, PlantSpec, RunSpec, joined
from harness.runner import launch
from harness.store import RunFolder, set_aside

_ROW = "{:34} {:>3} {:>8} {:>6} {:>6} {:>9} {:>6} {:>7}  {}\n"
STEP, STEPS = 3, 5
FLAKY = 0.3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One case, and what must be found.

    Attributes:
        name: for the table.
        plants: in the candidate.
        causes: each a set of words, one for each change of the cause: the fault, scope or stressor.
        graph, stress: of the candidate.
        dp: ranks.
    """

    name: str
    plants: tuple[PlantSpec, ...]
    causes: tuple[frozenset[str], ...]
    graph: tuple[str, ...] = ("attn", "mlp")
    stress: tuple[str, ...] = ("jitter", "poison")
    dp: int = 1

    @property
    def slug(self) -> str:
        """The name as a file may have it."""
        return "".join(c if c.isalnum() else "_" for c in self.name)

    def case(self) -> CaseSpec:
        """Runs that differ in the causes and in half a dozen changes that do nothing."""
        plain = TrainConfig(
            parallel=ParallelConfig(dp=self.dp), steps=STEPS, microbatches=2, dtype="fp32"
        )
        wide = dataclasses.replace(
            plain, graph=self.graph, stress=self.stress, stress_seed=7, flush_every=2,
            graph_warmup_steps=1, fsdp=FsdpConfig(pool="traced", reshard_after_forward=False),
        )  # fmt: skip
        reference, candidate = (
            RunSpec(config=config.to_dict(), device="cpu", world_size=self.dp, timeout_s=600.0)
            for config in (plain, wide)
        )
        return CaseSpec(
            id=self.slug, scenario="causes", labels={},
            reference=reference, control=dataclasses.replace(reference, replica=1),
            candidate=dataclasses.replace(candidate, plant=joined(self.plants)),
            expect="bitwise", checks={"loss": {}, "state": {}, "finite": {}},
        )  # fmt: skip

    def is_right(self, found: frozenset[frozenset[str]]) -> bool:
        """Whether just the causes were found, told by the names of their changes."""
        case = self.case()
        names = RunChanges(case.reference, case.candidate).names
        wanted = {
            frozenset(next(n for n in names if word in n.split()) for word in cause)
            for cause in self.causes
        }
        return found == wanted


def _fault(words: str, causes: str, *, chance: float = 1.0, **more: Any) -> Fault:
    """A fault of plants `name[@step]`, and its causes, each of words."""
    plants = []
    for word in words.split():
        name, _, step = word.partition("@")
        always = name in ("capture_raise", "skip_graphs")
        plants.append(
            PlantSpec(fault=name) if always
            else PlantSpec(fault=name, step=int(step or STEP), chance=chance)
        )  # fmt: skip
    sets = tuple(frozenset(cause.split()) for cause in causes.split(", "))
    name = causes.replace(" ", "+").replace(",+", ", ") + (" in 30 %" if chance < 1 else "")
    return Fault(name=name, plants=tuple(plants), causes=sets, **more)


ATTN: dict[str, Any] = {"graph": ("attn",)}
RACING: dict[str, Any] = {"stress": ("jitter", "races"), "dp": 2}
FAULTS = (
    _fault("ulp nan", "ulp, nan"), _fault("ulp drop_step", "ulp, drop_step"),
    _fault("raise@4 nan", "raise, nan"),
    _fault("ulp stale_parameter", "ulp, stale_parameter attn", **ATTN),
    _fault("ulp capture_raise", "ulp, capture_raise attn"),
    _fault("unstable_buffers@0", "unstable_buffers attn", **ATTN),
    _fault("skip_graphs", "skip_graphs attn, skip_graphs mlp"),
    _fault("gather_ignores_writes", "gather_ignores_writes races", **RACING),
    _fault("reduction_freed_early ulp", "reduction_freed_early races, ulp", **RACING),
    _fault("early_release", "early_release poison", dp=2),
    *(_fault(name, name, chance=FLAKY) for name in ("ulp", "nan", "drop_step", "raise")),
    _fault("stale_parameter", "stale_parameter attn", chance=FLAKY, **ATTN),
)  # fmt: skip


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration.causes")
    parser.add_argument("-k", default="", help="part of a name")
    parser.add_argument("--out", type=Path, help="folder of run folders, kept")
    parser.add_argument("--slots", type=int, default=8)
    asked = parser.parse_args()
    chosen = [fault for fault in FAULTS if asked.k in fault.name]
    if not chosen:
        sys.stderr.write(f"-k {asked.k}: expected part of a name, got none of them\n")
        return 4
    out = asked.out or Path(tempfile.mkdtemp(prefix="causes-"))
    heads = ("fault", "n", "log2(n)", "bound", "found", "questions", "runs", "seconds", "causes")
    sys.stdout.write(_ROW.format(*heads))
    try:
        right = [_bisect(fault, out / fault.slug, asked.slots) for fault in chosen]
    except HarnessError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    sys.stdout.write(f"{sum(right)} of {len(right)} right; run folders: {out}\n")
    return 0 if all(right) else 1


def _bisect(fault: Fault, place: Path, slots: int) -> bool:
    case, began_s = fault.case(), time.monotonic()
    prepared = launch.prepare_cases([case], name="causes", why="Two causes.", slots=slots)
    there = (place / "manifest.json").is_file()
    with RunFolder.open(place) if there else launch.make_folder(prepared, place, []) as folder:
        engine: Engine = launch.make_engine(prepared)
        try:
            asker = Asker(folder, engine)
            verdict = asker.ask(case, "does it fail?").verdict
            for _ in range(200):
                if verdict.outcome != "passed":
                    break
                # A fault of chance: whoever comes with a failing case has seen it fail.
                set_aside(folder.run_folder(case.candidate.key))
                verdict = asker.ask(case, "does it fail?").verdict
            before = asker.num_runs
            found = find_causes(case, verdict, asker)
        finally:
            engine.close()
    is_right = fault.is_right(frozenset(frozenset(cause.changes) for cause in found.causes))
    n, seconds = len(found.candidates), time.monotonic() - began_s
    bound = sum(math.log2(math.comb(n, len(cause))) for cause in fault.causes)
    sys.stdout.write(_ROW.format(
        fault.name, n, f"{math.log2(n):.1f}", f"{bound:.1f}", "yes" if is_right else "NO",
        found.num_questions, asker.num_runs - before, f"{seconds:.0f}",
        "; ".join(map(str, found.causes)),
    ))  # fmt: skip
    for note in () if is_right and found.complete else (str(found.policy or ""), *found.notes):
        sys.stdout.write(f"    {note}\n")
    sys.stdout.flush()
    return is_right


if __name__ == "__main__":
    sys.exit(main())
