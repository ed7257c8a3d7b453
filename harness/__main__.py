"""`python -m harness`, and what the installed command calls."""

import sys


def main() -> int:
    """Run one command; the exit code. Ctrl-C while modules are still read is an answer too."""
    try:
        from harness.outlet import secure_streams

        secure_streams()
        from harness.cli import main as run_command
    except KeyboardInterrupt:
        sys.stderr.write("harness: interrupted\n")
        return 2
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
