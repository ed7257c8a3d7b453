"""What a soak says of ranks that stop taking part, each in its own way; minutes.

    python -m tests.hang_kinds [KIND ...] [--ranks 3] [--stall-s 6]

Every kind of `ranks.py` in the real worker, eager and graphed; prints a Markdown table.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from fsdp_core.config import ModelConfig, ParallelConfig, TrainConfig
from harness.engine.local import LocalEngine
from harness.engine.ranks import Limits
from harness.records import RunOutcome, RunSpec
from harness.soaking import SoakSpec
from tests.hang_kinds.ranks import IN_REPLAYS, KINDS


def outcome_of(kind: str, graph: tuple[str, ...], ranks: int, stall_s: float) -> RunOutcome:
    """The outcome of one run whose last rank misbehaves."""
    config = TrainConfig(
        model=ModelConfig(layers=1), parallel=ParallelConfig(dp=ranks), steps=64, flush_every=4,
        graph=graph, graph_warmup_steps=1,
    )  # fmt: skip
    spec = RunSpec(
        config=config.to_dict(), device="cpu", world_size=ranks, timeout_s=600.0,
        soak=SoakSpec(by="steps", amount=64, stall_s=stall_s),
    )  # fmt: skip
    entry, limits = f"tests.hang_kinds.ranks:{kind}", Limits(grace_s=2.0, stacks_s=1.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalEngine(ranks, entry=entry, limits=limits) as e,
    ):
        e.start(spec, Path(folder) / "run")
        (outcome,) = e.wait(900.0)
    return outcome


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.hang_kinds", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--stall-s", type=float, default=6.0, help="more than 4 steps take here")
    options = parser.parse_args()
    sys.stdout.write(
        "| rank | graph | outcome | culprit | words |\n| --- | --- | --- | --- | --- |\n"
    )
    for kind in options.kinds or KINDS:
        # Replays run no Python, so what a rank calls can be changed in eager steps only.
        for graph in ((), ("full_iteration",)) if kind in IN_REPLAYS else ((),):
            told = outcome_of(kind, graph, options.ranks, options.stall_s)
            words = told.message.replace("|", " ")[:200]
            sys.stdout.write(
                f"| {kind} | {', '.join(graph) or 'eager'} | {told.what or 'none'} | "
                f"{told.culprit_rank} | {words} |\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
