"""Do to a harness what machines, people and schedulers do to it; what it does not survive is said.

    python -m tests.chaos [NAME ...] [--seed 0]

    kills      kill -9 of harness, forkserver, leaders and ranks at random, then --resume (--kills)
    jobs       kill -9 of jobs that record themselves (--jobs): `harness diff` reads what is left
    searches   kill -9 of `harness bisect` in each stage, then the same command again
    damage     run folders damaged in 330 ways (-k): none may pass, each is told in a line
    slurm      what schedulers do to allocations, on a real Slurm of two nodes
    full_disk, flood, signals, ...: faults of the machine; disks need root

Without a name all of them, in half an hour. Ends with 1 if something does not hold; its folder is
then left.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.chaos.damage import damage_folders
from tests.chaos.jobs import kill_jobs
from tests.chaos.kills import kill_runs
from tests.chaos.machine import FAULTS
from tests.chaos.searches import kill_searches
from tests.chaos.slurm import slurm


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=20, help="kills of recorded jobs")
    parser.add_argument("--real", type=int, default=0, help="further kills, of the real trainer")
    parser.add_argument("-k", default="", metavar="WORD", help="only damages whose name has it")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    known: dict[str, Callable[[Path], Iterator[str]]] = {
        "kills": partial(kill_runs, seed=args.seed, kills=args.kills, real=args.real),
        "jobs": partial(kill_jobs, seed=args.seed, kills=args.jobs),
        "searches": partial(kill_searches, seed=args.seed),
        "damage": partial(damage_folders, word=args.k),
        **{fault.__name__: fault for fault in (slurm, *FAULTS)},
    }
    if unknown := set(args.names) - set(known):
        parser.error(f"expected names of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    failed = 0
    for name in args.names or known:
        began_s, root = time.monotonic(), Path(tempfile.mkdtemp(prefix=f"{name}-"))
        try:
            wrong = list(known[name](root))
        except PermissionError as error:
            print(f"{name}: not tried: {error}", flush=True)  # noqa: T201 - a command
            continue
        state = f"NOT survived, see {root}" if wrong else "survived"
        print(f"{name}: {state} ({time.monotonic() - began_s:.0f} s)", flush=True)  # noqa: T201
        for why in wrong:
            print(f"  {why}", flush=True)  # noqa: T201
        failed += bool(wrong)
        if not wrong:
            shutil.rmtree(root)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
