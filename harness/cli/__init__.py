"""The command line: `harness.cli.main` runs one command; a module for each other command."""

from harness.cli.main import main

__all__ = ["main"]
