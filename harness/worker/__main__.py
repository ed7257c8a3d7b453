"""`python -m harness.worker serve | node`: how engines start what imports torch.

serve  a forkserver on this machine           started by the local engine
node   the agent of one node of a Slurm step  started by the Slurm engine through srun
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.engine.ranks import Limits
from harness.errors import HarnessError


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and do what it says; the exit code."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--entry", required=True)
    common.add_argument("--limits", required=True, help="of a leader, as JSON")
    parser = argparse.ArgumentParser(prog="python -m harness.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="fork runs for a harness", parents=[common])
    serve.add_argument("--fd", type=int, required=True, help="socket of that harness")
    node = commands.add_parser("node", help="the ranks of a node of a step", parents=[common])
    node.add_argument("--folder", type=Path, required=True)
    node.add_argument("--name", required=True)
    chosen = parser.parse_args(arguments)
    limits = Limits.from_json(json.loads(chosen.limits))
    try:
        # Each imports only what it needs.
        if chosen.command == "serve":
            from harness.worker.serve import serve as serve_runs

            return serve_runs(chosen.fd, chosen.entry, limits)
        from harness.worker.node import run_node

        return run_node(chosen.folder, chosen.name, chosen.entry, limits)
    except HarnessError as error:
        sys.stderr.write(f"harness: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
