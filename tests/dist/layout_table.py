"""Tables of comparisons between layouts: sound ones, and ones with a fault.

    python -m tests.dist.layout_table [--ranks 4] [--dtype fp32 bf16] [--steps 0 2]

prints the farthest tensor of each comparison in units of its bound, and for faults the first tensor
that is past it with its element and ranks. Exit code 1 if a sound one is wrong, or a fault passes.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from tests.dist.layout_legs import Comparer, Layout
from tests.dist.rank_pool import RankPool

SP: dict[str, object] = {"sequence_parallel": True}
MOE, MLA = "moe_tiny", "mla_moe_tiny"
PAIRS: tuple[tuple[str, str, dict[str, object], dict[str, object]], ...] = (
    ("dense_tiny", "TP2", {}, {"tp": 2}),
    ("dense_tiny", "TP2 SP", {}, {"tp": 2} | SP),
    ("dense_tiny", "PP2", {}, {"pp": 2}),
    ("dense_tiny", "CP2", {}, {"cp": 2}),
    ("dense_tiny", "DP2 to HSDP", {"dp": 2}, {"dp_outer": 2}),
    ("dense_tiny", "TP2 to CP2", {"tp": 2}, {"cp": 2}),
    ("dense_tiny", "TP2xPP2", {}, {"tp": 2, "pp": 2}),
    ("dense_tiny", "TP2xCP2 SP", {}, {"tp": 2, "cp": 2} | SP),
    ("dense_tiny", "DP2xTP2", {"dp": 2}, {"dp": 2, "tp": 2}),
    ("dense_tiny", "DP2xPP2", {"dp": 2}, {"dp": 2, "pp": 2}),
    (MOE, "EP2", {"dp": 2}, {"dp": 2, "ep": 2}),
    (MOE, "ETP2", {"dp": 2}, {"dp": 2, "etp": 2}),
    (MOE, "DP2xTP2 EP2xETP2 SP", {"dp": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2} | SP),
    (MLA, "EP2", {"dp": 2}, {"dp": 2, "ep": 2}),
    (MLA, "TP2 SP", {}, {"tp": 2} | SP),
    (MLA, "DP2xPP2xEP2", {"dp": 2}, {"dp": 2, "pp": 2, "ep": 2}),
)
FAULTS: tuple[tuple[str, str, str], ...] = (
    ("sum for mean", "dense_tiny", "DP2xTP2"),
    ("norm not summed", "dense_tiny", "TP2 SP"),
    ("two rows swapped", "dense_tiny", "TP2"),
    ("one element", "dense_tiny", "TP2"),
    ("half the gradients", "dense_tiny", "DP2xPP2"),
    ("swapped heads", "dense_tiny", "PP2"),
    ("scaled branch", "dense_tiny", "TP2"),
    ("skipped update", "dense_tiny", "TP2"),
    ("expert lost", MOE, "EP2"),
    ("aux loss twice", MOE, "EP2"),
)


def cells(
    dtypes: list[str], steps: list[int], most: int
) -> Iterator[tuple[str, Layout, Layout]]:  # fmt: skip
    """Name, reference and candidate of every comparison; sound ones first."""
    known = {(model, name): (one, other) for model, name, one, other in PAIRS}
    chosen = [("", model, name) for model, name, _, _ in PAIRS] + list(FAULTS)
    for fault, model, name in chosen:
        one, other = known[model, name]
        for dtype in dtypes:
            for step in steps:
                reference = Layout(dict(one), model, dtype=dtype, step=step)
                candidate = replace(reference, degrees=dict(other), fault=fault)
                if candidate.spec.world_size <= most:
                    yield f"{model} {name}", reference, candidate


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", nargs="+", type=int, default=[0])
    chosen = parser.parse_args()
    bad = 0
    sys.stdout.write(
        "| layouts | dtype | step | fault | farthest, of its bound | first wrong | s |\n"
    )
    sys.stdout.write("| --- " * 7 + "|\n")
    with contextlib.closing(RankPool(chosen.ranks, timeout_s=300.0)) as pool:
        compare = Comparer(pool)
        for name, reference, candidate in cells(chosen.dtype, chosen.steps, chosen.ranks):
            began = time.perf_counter()
            answer = compare(reference, candidate)
            worst = max((each.units for each in answer.tensors), default=float("nan"))
            bad += (answer.location is None) == bool(candidate.fault) or not answer.tensors
            shown = (
                answer.location.evidence[:2]
                if answer.location
                else (answer.message,) * (not answer.tensors)
            )
            sys.stdout.write(
                f"| {name} | {reference.dtype} | {reference.step} | {candidate.fault} | "
                f"{worst:.3g} | {'; '.join(shown)} | {time.perf_counter() - began:.0f} |\n"
            )
            sys.stdout.flush()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
