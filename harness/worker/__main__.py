"""`python -m harness.worker serve | node | join`: how engines and launchers start ranks.

serve  a forkserver on this machine          started by the local engine
node   the agent of one node of a Slurm step  started by the Slurm engine through srun
join   one rank of a run                     started by people through torchrun

`predict` starts none: it tells the memory of configurations on stdin (`harness predict`).
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
        return _do(chosen, limits)
    except HarnessError as error:
        sys.stderr.write(f"harness: {error}\n")
        return error.exit_code


def _do(chosen: argparse.Namespace, limits: Limits) -> int:
    if chosen.command == "serve":
        from harness.worker.serve import serve

        return serve(chosen.fd, chosen.entry, limits)
    if chosen.command == "predict":
        from harness.worker.predict import predict

        return predict()
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
    one = commands.add_parser("node", help="the ranks of a node of a step", parents=[patience])
    one.add_argument("--folder", type=Path, required=True)
    one.add_argument("--name", required=True)
    commands.add_parser("predict", help="memory of configurations on stdin", parents=[patience])
    joining = commands.add_parser(
        "join", help="one rank of a run on several machines, under torchrun", parents=[patience]
    )
    joining.add_argument("folder", type=Path, help="run folder, on a file system that all share")
    joining.add_argument("--spec", type=Path, help="spec.json of the run, if not there already")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
