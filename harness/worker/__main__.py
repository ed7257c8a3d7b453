"""`python -m harness.worker serve`: started by the local engine, not by people."""

import argparse
import sys
from collections.abc import Sequence

from harness.engine.leader import Limits
from harness.worker.serve import serve


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.worker")
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve", help="fork runs for the harness at the other end of FD")
    serving.add_argument("--fd", type=int, required=True)
    serving.add_argument("--entry", required=True)
    serving.add_argument("--grace-s", type=float, required=True)
    serving.add_argument("--stacks-s", type=float, required=True)
    serving.add_argument("--output-cap-bytes", type=int, required=True)
    chosen = parser.parse_args(arguments)
    limits = Limits(
        grace_s=chosen.grace_s,
        stacks_s=chosen.stacks_s,
        output_cap_bytes=chosen.output_cap_bytes,
    )
    return serve(chosen.fd, chosen.entry, limits)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
