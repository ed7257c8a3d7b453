"""`python -m tests.kill_and_resume`: kill -9 at random moments, --resume, and nothing is lost."""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.kill_and_resume.matrix import Killed, Matrix, torment, torment_the_end

PER_MATRIX = 40
"""Kills of one matrix at most: then it is let end, and looked at."""
ENDING = 6
"""Further ones of those, of harnesses that have nothing left to run."""


def main() -> int:
    """Kill as often as asked, over as many matrices as it takes; 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--real", type=int, default=0, help="so many more over the real trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-s", type=float, default=2.0, help="longest time between kills")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="killed-"))
    total, harnesses, problems = Counter[str](), 0, 0
    began = time.monotonic()
    for real, kills in ((False, args.kills), (True, args.real)):
        if not kills:
            continue
        whole = Matrix(root / f"whole-{real}", real=real)
        if why := whole.to_the_end(reported=True):
            print(why)  # noqa: T201 - a command
            return 1
        expected, number, done = whole.reports(), 0, 0
        while done < kills:
            rng = random.Random(f"{args.seed}/{real}/{number}")
            matrix = Matrix(root / f"{number:03}-{real}", real=real)
            longest_s = args.longest_s * (8 if real else 1)
            most = min(kills - done, PER_MATRIX)
            found = torment(matrix, most, rng, longest_s=longest_s, expected=expected)
            if not found.problems and (left := min(ENDING, kills - done - _number(found))) > 0:
                ends = torment_the_end(matrix, left, rng, expected=expected)
                found = Killed(
                    found.kills + ends.kills, found.harnesses + ends.harnesses, ends.problems
                )
            number, done = number + 1, done + _number(found)
            total, harnesses = total + found.kills, harnesses + found.harnesses
            problems += len(found.problems)
            took = time.monotonic() - began
            print(  # noqa: T201
                f"matrix {number}: {dict(found.kills)}; {done}/{kills} kills, {took:.0f} s",
                flush=True,
            )
            for why in found.problems:
                print(f"  {matrix.run}: {why}", flush=True)  # noqa: T201
    kinds = ", ".join(f"{count} {kind}" for kind, count in total.most_common())
    print(f"{sum(total.values())} kills ({kinds}), {harnesses} harnesses, {problems} problems")  # noqa: T201
    if not problems:
        shutil.rmtree(root)
    return int(problems > 0)


def _number(found: Killed) -> int:
    return sum(found.kills.values())


if __name__ == "__main__":
    raise SystemExit(main())
