"""From a red cell to its answer: a fault in each cell of the smoke matrix, run, then bisected.

    python -m benchmarks.red_to_answer                                    an hour on two cores
    python -m benchmarks.red_to_answer --limit 3 --json rows.jsonl
    python -m benchmarks.red_to_answer --device cuda --ranks-per-gpu 2 --slots 8

Each cell is made red by `harness run ... --set plant=...` and bisected by `harness bisect`, as
somebody would type it, start of the interpreter included. Times count from that typing:

    case     the cell itself: reference, control and candidate
    place    until step, phase, module, tensor, rank and element are known
    causes   until the smallest sets of differences that fail are
    answer   until the scenario that fails alone is written, and the search has ended

each also as a ratio to `case`, with the runs made until then. `place is` and `cause` say whether
the answer is right (`harness/campaign/campaign.py` says what exactly and near mean). A row goes
to `--json` as soon as it is known; the same command over the same file makes those that it lacks.
Exit codes: 0 every cell that this machine can run got an answer, 1 not, 4 usage.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.red_to_answer.cells import PLANTED
from benchmarks.red_to_answer.measure import Bench
from benchmarks.red_to_answer.rows import append, heads, read_rows, summary, told
from harness.records import ExitCode


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.red_to_answer")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--ranks-per-gpu", type=int, metavar="N")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N cells")
    parser.add_argument("-k", default="", metavar="PART", help="only cells with it in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line a cell; goes on with it")
    parser.add_argument("--out", type=Path, help="folder of run folders")
    asked = parser.parse_args(arguments)
    chosen = [cell for cell in PLANTED if asked.k in cell][: asked.limit]
    if not chosen:
        sys.stderr.write(f"-k {asked.k}: expected part of a cell's name, got none of them\n")
        return int(ExitCode.USAGE)
    room = [
        word
        for option, value in (("--slots", asked.slots), ("--ranks-per-gpu", asked.ranks_per_gpu))
        if value is not None
        for word in (option, str(value))
    ]
    out = Path(asked.out or tempfile.mkdtemp(prefix="red-to-answer-")).resolve()
    bench = Bench(out=out, room=room, device=asked.device)
    held = {row.cell: row for row in read_rows(asked.json)} if asked.json else {}
    sys.stdout.write(heads())
    rows = []
    for cell in chosen:
        if (row := held.get(cell)) is None:
            # What a killed measurement has left there is no run from a cold start.
            shutil.rmtree(out / cell, ignore_errors=True)
            row = bench.measure(cell, PLANTED[cell])
            if asked.json:
                append(asked.json, row)
        rows.append(row)
        sys.stdout.write(told(row))
        sys.stdout.flush()
    sys.stdout.write(summary(rows) + f"run folders: {out}\n")
    return 0 if all(row.answer is not None or row.verdict == "skipped" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
