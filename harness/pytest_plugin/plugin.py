"""pytest's entry point: options, and nothing else until `--harness` or `harness = true` is given.

Every pytest on the machine imports this module, so it imports nothing of the harness by itself.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and settings of ini files."""
    add = parser.getgroup("harness", "scenario files of deltazero").addoption
    add("--harness", action="store_true", help="Collect scenario files: each case is a test.")
    add("--harness-out", metavar="FOLDER",
        help="Where run folders go, a new or empty place; out/pytest-TIME by default.")  # fmt: skip
    add("--harness-device", choices=["auto", "cpu", "cuda"],
        help="Device of every run; overrides launch.device.")  # fmt: skip
    add("--harness-slots", type=_positive, metavar="N", help="Ranks that run at the same time.")
    add("--harness-ranks-per-gpu", type=_positive, metavar="N", help="Let N ranks share a GPU.")
    add("--harness-incomparable", choices=["fail", "xfail"], default="fail",
        help="What a case whose runs cannot be compared is to pytest.")  # fmt: skip
    add("--harness-history", metavar="FOLDER", help="History to record in; none by default.")
    parser.addini("harness", "As --harness, for every run.", type="bool", default=False)
    parser.addini(
        "harness_files", "Patterns of scenario files.", type="args", default=["*.yaml", "*.yml"]
    )


def _positive(text: str) -> int:
    from argparse import ArgumentTypeError

    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Load the rest, if it is wanted (`pytest.UsageError`: under pytest-xdist)."""
    if config.getoption("harness") or config.getini("harness"):
        if getattr(config.option, "dist", "no") != "no":
            raise pytest.UsageError("-n: expected -n 0 with --harness, which runs cases in parallel"
                                    " by itself (--harness-slots)")  # fmt: skip
        from harness.pytest_plugin.session import register

        register(config)
