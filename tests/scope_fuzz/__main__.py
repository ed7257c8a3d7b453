"""Draw cases at random, compare each graphed run with its eager one, and print what fails.

    python -m tests.scope_fuzz --seconds 120 --ranks 1
    python -m tests.scope_fuzz --seconds 300 --ranks 2,4 --seed 7
    python -m tests.scope_fuzz --replay '{"settings": ...}'      one case, as it was printed

A failing case is printed as the line that `--replay` takes, and as a scenario for `harness run` and
`harness bisect`, which makes it smaller. Exit codes: 0, 1 a case failed, 4 usage.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from harness.errors import ScenarioError
from tests.dist.rank_pool import RankPool
from tests.scope_fuzz.case import Case
from tests.scope_fuzz.draw import Draw
from tests.scope_fuzz.judge import Judge, Verdict


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.scope_fuzz", exit_on_error=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", default="1", help="world sizes to draw from: 1,2,4")
    parser.add_argument("--case-seconds", type=float, default=90.0, help="a case is hung then")
    parser.add_argument("--small", action="store_true", help="few layers and steps, no stress")
    parser.add_argument("--replay", help="one case, as it was printed")
    try:
        asked = parser.parse_args(arguments)
        worlds = tuple(int(size) for size in asked.ranks.split(","))
        replayed = None if asked.replay is None else Case.from_json(asked.replay)
    except (argparse.ArgumentError, ScenarioError, ValueError, KeyError) as error:
        sys.stderr.write(f"{error}\n")
        return 4
    size = max(worlds) if replayed is None else replayed.config().parallel.world_size
    pool = RankPool(size)
    judge = Judge(pool, asked.case_seconds)
    failed = 0
    try:
        if replayed is not None:
            verdict = judge(replayed)
            _tell(f"{verdict.kind or verdict.rule or 'all is well'}\n{verdict.text}")
            return int(bool(verdict.kind))
        draw, deadline = (
            Draw(asked.seed, worlds, is_small=asked.small),
            time.monotonic() + asked.seconds,
        )
        while time.monotonic() < deadline:
            case = draw.case()
            verdict = judge(case)
            if verdict.kind:
                failed += 1
                _show(case, verdict)
    finally:
        pool.close()
    refused = ", ".join(f"{rule} {number}" for rule, number in judge.refused.most_common())
    _tell(f"ran {judge.ran}, failed {failed}, refused {judge.refused.total()}: {refused}")
    return int(bool(failed))


def _show(case: Case, verdict: Verdict) -> None:
    _tell(f"FAILED {verdict.kind}\n{verdict.text}\n{case.to_json()}\n{case.scenario()}")


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
