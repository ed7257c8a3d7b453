"""The table of parity: every layout of the matrix, every model, every precision.

    python -m tests.dist.parity_table [--ranks 8] [--dtype fp64 fp32 bf16] [--model ...]
    python -m tests.dist.parity_table --ranks 4 --device cuda --backend te --dtype bf16 fp8

prints, of each comparison, the worst error of any activation, loss or gradient in units of its
bound and what of, and the first tensor that is past its bound; exit code 1 if any is. `--out`
writes the same to FOLDER/parity.md and FOLDER/parity.csv.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from tests.dist.parity_check import (
    ALL,
    BY_RANKS,
    MODELS,
    Cell,
    Comparison,
    cells,
    judge,
    prepare,
    reference,
)
from tests.dist.parity_programs import DTYPES, run_cases
from tests.dist.rank_pool import RankError, RankPool

TINY = ("dense_tiny", "moe_tiny", "mla_moe_tiny")
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("cpu", "torch"): {
        "ranks": 8, "dtype": ["fp64", "fp32", "bf16"], "model": (*TINY, "qwen_tiny"),
    },
    ("cuda", "torch"): {"ranks": 4, "dtype": ["bf16", "fp32"], "model": TINY},
    # Widths that TransformerEngine's kernels take.
    ("cuda", "te"): {
        "ranks": 4, "dtype": ["bf16", "fp8"], "model": ("dense_tiny", "moe_tiny", "mla_moe_even"),
    },
}  # fmt: skip
WIDTHS = (13, 25, 5, 9, 45)


@dataclass(frozen=True)
class Row:
    """A line of the table; `error` where there was nothing to compare."""

    model: str
    layout: str
    dtype: str
    units: float
    worst: str
    first_wrong: str
    seconds: float
    backend: str
    device: str
    error: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether a tensor is past its bound, or there is none."""
        return not self.units <= 1


def run_cells(chosen: list[Cell], pool: RankPool) -> list[Row]:
    """Cells of one layout, on ranks that have its process groups; alone where one of them failed.

    On the CPU ranks are replaced afterwards: they keep threads of groups that they have left.
    """
    began = time.perf_counter()
    cases = [(cell.problem, cell.layout, reference(cell.problem)[1]) for cell in chosen]
    try:
        found = pool.run(run_cases, cases, world_size=chosen[0].layout.parallel.world_size)
    except RankError as error:
        if len(chosen) > 1:
            return [row for cell in chosen for row in run_cells([cell], pool)]
        return [_row(chosen[0], error, time.perf_counter() - began)]
    finally:
        if pool.device == "cpu":
            pool.stop()
    seconds = (time.perf_counter() - began) / len(chosen)
    rows = []
    for number, cell in enumerate(chosen):
        outcomes = [of_rank[number] for of_rank in found]
        result: Comparison | ValueError
        try:
            result = judge(cell.problem, cell.layout, outcomes)
        except ValueError as error:
            result = error
        rows.append(_row(cell, result, seconds))
    return rows


def _row(cell: Cell, result: Comparison | Exception, seconds: float) -> Row:
    layout = cell.layout
    if isinstance(result, Comparison):
        (units, worst), error = result.worst, ""
        first = result.first_wrong[0] if result.first_wrong else ""
    else:
        units, worst = float("inf"), ""
        error = first = str(result).strip().splitlines()[-1]
    return Row(
        cell.model, cell.name, layout.dtype, units, worst, first, seconds, layout.backend,
        layout.device, error,
    )  # fmt: skip


def _line(model: str, layout: str, dtype: str, units: str, worst: str, first: str) -> str:
    columns = zip((model, layout, dtype, units, worst), WIDTHS, strict=True)
    return " ".join([*(text.ljust(width) for text, width in columns), first]).rstrip() + "\n"


def _show(row: Row) -> str:
    first = f"FIRST WRONG: {row.first_wrong}" if row.is_wrong else ""
    return _line(row.model, row.layout, row.dtype, f"{row.units:9.2e}", row.worst, first)


def write_report(rows: list[Row], folder: Path, title: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Row)]
    with Path(folder, "parity.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(astuple(row) for row in rows)
    head = "| model | layout | dtype | worst error, units of its bound | of | first wrong |"
    lines = [f"# {title}", "", head, "| --- " * 6 + "|"]
    lines += [
        f"| {r.model} | {r.layout} | {r.dtype} | {r.units:.2e} | {r.worst} | {r.first_wrong} |"
        for r in rows
    ]
    Path(folder, "parity.md").write_text("\n".join(lines) + "\n")


def table(groups: Iterable[list[Cell]], pool: RankPool) -> list[Row]:
    sys.stdout.write(_line("model", "layout", "dtype", "    units", "worst tensor", ""))
    rows = []
    for chosen in groups:
        for row in run_cells(chosen, pool):
            sys.stdout.write(_show(row))
            rows.append(row)
        sys.stdout.flush()
    return rows


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; what is left out depends on the device and the backend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=sorted(BY_RANKS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, metavar="N")
    parser.add_argument("--backend", choices=["torch", "te"], default="torch")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES))
    parser.add_argument("--model", nargs="+", choices=MODELS)
    parser.add_argument("--layout", nargs="+", choices=list(ALL))
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    if (chosen.device, chosen.backend) not in DEFAULTS:
        parser.error("--backend te needs --device cuda")
    if chosen.backend == "torch" and "fp8" in (chosen.dtype or ()):
        parser.error("--dtype fp8 needs --backend te")
    for key, value in DEFAULTS[chosen.device, chosen.backend].items():
        setattr(chosen, key, getattr(chosen, key) or value)
    chosen.layout = chosen.layout or list(BY_RANKS[chosen.ranks])
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    began = time.perf_counter()
    groups = list(cells(
        chosen.model, chosen.layout, chosen.dtype, backend=chosen.backend, device=chosen.device
    ))  # fmt: skip
    # The pool first: what it has its fork server import serves the processes of `prepare`, too.
    pool = RankPool(8, timeout_s=120.0, device=chosen.device, ranks_per_gpu=chosen.ranks_per_gpu)
    try:
        prepare([(cell.problem, cell.layout.arithmetic) for group in groups for cell in group])
        rows = table(groups, pool)
    finally:
        pool.close()
    wrong = sum(row.is_wrong for row in rows)
    title = (
        f"{len(rows)} comparisons with one process, {wrong} wrong, on {chosen.device}, backend "
        f"{chosen.backend}, in {time.perf_counter() - began:.0f} s"
    )
    sys.stdout.write(f"{title}\n")
    if chosen.out:
        write_report(rows, chosen.out, title)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
