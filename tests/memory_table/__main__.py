"""The table of predicted and measured memory.

    python -m tests.memory_table [-k WORD] [--fuzz SECONDS] [--seed N]

runs every layout of `comparison.layouts` on 1 to 4 ranks of the CPU, rehearses each of its ranks in
this process, and prints both peaks. With `--fuzz`, models and layouts are drawn at random instead.
Exit code 1 if anything at rest is not exact to the byte, a peak is off by more than 1 %, or more
than 1 % of a peak (no less than 16 KiB) has no owner.
"""

import argparse
import sys
from collections.abc import Iterator

from tests.dist.rank_pool import RankPool
from tests.memory_table import fuzz
from tests.memory_table.comparison import Row, compare, layouts

MOST_ERROR, MOST_UNEXPLAINED, SMALL_BYTES = 0.01, 0.01, 16 << 10
HEAD = "| layout | rank | measured KiB | predicted KiB | error | at rest exact | worst owner |"


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.memory_table")
    parser.add_argument("-k", dest="word", default="", help="only layouts with this in their name")
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="draw layouts at random")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    told = parser.parse_args()
    sys.stdout.write(f"{HEAD}\n|{' --- |' * 7}\n")
    worst, rest, lead, wrong, ranks = 0.0, 0.0, 0.0, 0, 0
    first: dict[str, int] = {}
    pool = RankPool(4)
    try:
        drawn = fuzz.rows(pool, told.seed, told.fuzz) if told.fuzz else _fixed(pool, told.word)
        for row in drawn:
            _show(row)
            ranks += 1
            worst = max(worst, abs(row.error))
            rest = max(rest, row.unexplained / row.measured)
            more = row.measured / first.setdefault(row.layout, row.measured) - 1
            # Stages of a pipeline differ by more than their ranks do.
            lead = max(lead, 0.0 if " pp" in row.layout else more)
            wrong += _is_wrong(row)
    finally:
        pool.close()
    sys.stdout.write(
        f"\n{ranks} ranks of {len(first)} layouts: worst error of a peak {worst:.2%}, largest part "
        f"without an owner {rest:.2%}, most that a rank takes more than the first of its stage "
        f"{lead:.1%}; {wrong} wrong\n"
    )
    return 1 if wrong else 0


def _fixed(pool: RankPool, word: str) -> Iterator[Row]:
    for name, config in layouts().items():
        if word in name:
            yield from compare(pool, name, config)


def _show(row: Row) -> None:
    cells = (
        row.layout, row.rank, f"{row.measured / 1024:.1f}", f"{row.predicted / 1024:.1f}",
        f"{100 * row.error:+.2f} %", "yes" if row.is_exact_at_rest else "NO",
        f"{row.worst_owner} {row.worst_owner_bytes:+d} B",
    )  # fmt: skip
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def _is_wrong(row: Row) -> bool:
    allowed = max(MOST_UNEXPLAINED * row.measured, SMALL_BYTES)
    is_off = abs(row.error) > MOST_ERROR or row.unexplained > allowed
    return is_off or not row.is_exact_at_rest


if __name__ == "__main__":
    sys.exit(main())
