"""Plant the faults of graphs under FSDP and print what sees them.

    python -m tests.graph_faults [NAME ...] [--device cuda] [--columns plain,ledger] [--write]

Rows come as they are done, on the standard error stream, then the table. On GPUs as many ranks may
share one as RANKS_PER_GPU says. `--write` puts the table into `measured.txt`, where each
kind of device has its own; it takes all faults and all columns. A fault whose rank dies or
does not answer has a row that says so. Exit codes: 0, 1 a clean program was wronged or the document
does not expect a rank to be lost, 4 usage.
"""

import argparse
import sys
from collections.abc import Sequence

from tests.conftest import RANKS_PER_GPU
from tests.dist.rank_pool import RankError, RankPool
from tests.graph_faults.catalogue import FAULTS, GraphFault
from tests.graph_faults.compare import COLUMNS, Legs, false_alarms, join, lost_legs, run_on_rank
from tests.graph_faults.table import is_expected, names, render, row_of, write

MAX_RANKS = 4


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.graph_faults", exit_on_error=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one fault")
    try:
        asked = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        _tell(error)
        return 4
    columns = tuple(c for c in COLUMNS if c in asked.columns.split(","))
    unknown = (set(asked.names) - set(names())) | (set(asked.columns.split(",")) - set(COLUMNS))
    if unknown:
        _tell(f"no such fault or column: {', '.join(sorted(unknown))}")
        return 4
    if asked.device == "cuda":
        columns = tuple(c for c in columns if c != "races")
    if asked.write and (asked.names or asked.columns != ",".join(COLUMNS)):
        _tell("--write takes all faults and all columns")
        return 4
    chosen = [fault for fault in FAULTS if not asked.names or fault.name in asked.names]
    results, failed = _run(chosen, columns, asked.device, asked.timeout_s)
    table = render(results)
    sys.stdout.write(f"{table}\n")
    if asked.write and not failed:
        write(table, asked.device)
    return int(failed or any(false_alarms(legs) for _, legs in results))


def _tell(text: object) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _run(
    chosen: list[GraphFault], columns: tuple[str, ...], device: str, timeout_s: float
) -> tuple[list[tuple[GraphFault, Legs]], bool]:
    results, failed = [], False
    # Faults of one program have one clean run beside them.
    clean = set()
    pool = RankPool(MAX_RANKS, timeout_s=timeout_s, device=device, ranks_per_gpu=RANKS_PER_GPU)
    try:
        # By the number of ranks: GPU ranks begin anew where it changes.
        for fault in sorted(chosen, key=lambda each: each.num_ranks):
            try:
                is_first = (fault.program, fault.right) not in clean
                ranks = pool.run(
                    run_on_rank, fault.name, columns, device, is_first, world_size=fault.num_ranks
                )
                clean.add((fault.program, fault.right))
                results.append((fault, join(ranks)))
            except RankError as error:
                results.append((fault, lost_legs(columns, error)))
                _tell(f"{fault.name}: {error}")
            row = row_of(*results[-1])
            failed |= bool(results[-1][1].lost) and not is_expected(row, device)
            _tell(" | ".join(row.values()))
            for column in false_alarms(results[-1][1]):
                words = [shown.said for shown in results[-1][1].clean[column]]
                _tell(f"{fault.name}: the clean program is wronged by {column}: {words}")
    finally:
        pool.close()
    return sorted(results, key=lambda result: chosen.index(result[0])), failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
