"""`python -m harness.worker serve | job | node | join`: how engines and launchers start ranks.

serve  a forkserver on this machine     started by the local engine
job    the batch script of a Slurm job  started by Slurm
node   the agent of one of its nodes    started by `job` through srun
join   one rank of a run                started by people through torchrun
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.engine.ranks import Limits
from harness.errors import HarnessError

ENTRY = "harness.worker.main:rank_main"


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and do what it says; the exit code."""
    chosen = _parser().parse_args(arguments)
    limits = Limits(
        grace_s=chosen.grace_s,
        stacks_s=chosen.stacks_s,
        leave_s=chosen.leave_s,
        output_cap_bytes=chosen.output_cap_bytes,
    )
    try:
        return _do(chosen, limits, list(arguments))
    except HarnessError as error:
        sys.stderr.write(f"harness: {error}\n")
        return error.exit_code


def _do(chosen: argparse.Namespace, limits: Limits, arguments: list[str]) -> int:
    # Each imports only what it needs: the batch script of a job is there in a moment.
    if chosen.command == "serve":
        from harness.worker.serve import serve

        return serve(chosen.fd, chosen.entry, limits)
    if chosen.command == "job":
        from harness.worker.job import run_job

        node = ["node", *arguments[1:]]
        agent = [sys.executable, "-P", "-m", "harness.worker", *node]
        return run_job(chosen.folder, chosen.name, agent)
    from harness.worker.node import run_node, run_torchrun_rank

    if chosen.command == "node":
        return run_node(chosen.folder, chosen.name, chosen.entry, limits)
    return run_torchrun_rank(chosen.folder.absolute(), chosen.spec, chosen.entry, limits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    patience = argparse.ArgumentParser(add_help=False)
    defaults = Limits()
    patience.add_argument("--entry", default=ENTRY)
    patience.add_argument("--grace-s", type=float, default=defaults.grace_s)
    patience.add_argument("--stacks-s", type=float, default=defaults.stacks_s)
    patience.add_argument("--leave-s", type=float, default=defaults.leave_s)
    patience.add_argument("--output-cap-bytes", type=int, default=defaults.output_cap_bytes)
    serving = commands.add_parser(
        "serve", help="fork runs for the harness at the other end of FD", parents=[patience]
    )
    serving.add_argument("--fd", type=int, required=True)
    for name, text in (("job", "a job of Slurm"), ("node", "the ranks of a node of a job")):
        one = commands.add_parser(name, help=text, parents=[patience])
        one.add_argument("--folder", type=Path, required=True)
        one.add_argument("--name", required=True)
    joining = commands.add_parser(
        "join", help="one rank of a run on several machines, under torchrun", parents=[patience]
    )
    joining.add_argument("folder", type=Path, help="run folder, on a file system that all share")
    joining.add_argument("--spec", type=Path, help="spec.json of the run, if not there already")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
