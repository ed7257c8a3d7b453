"""Short constructors of `CheckResult`, so that each check reads as its rule."""

from collections.abc import Mapping

from harness.records import CheckResult, Difference, What


def passed(check: str, message: str, **figures: float) -> CheckResult:
    """The check ran and said yes."""
    return CheckResult(check=check, outcome="passed", what="", message=message, figures=figures)


def failed(
    check: str, what: What, message: str, difference: Difference | None = None, **figures: float
) -> CheckResult:
    """The check ran and said no."""
    return CheckResult(
        check=check, outcome="failed", what=what, message=message,
        difference=difference, figures=figures,
    )  # fmt: skip


def error(check: str, what: What, message: str) -> CheckResult:
    """The check has no answer, through no fault of the candidate."""
    return CheckResult(check=check, outcome="error", what=what, message=message)


def not_run(check: str, why: str) -> CheckResult:
    """The check could not run over the whole of both runs; it never counts as a pass."""
    return CheckResult(check=check, outcome="skipped", what="not_run", message=f"not run: {why}")


def refuse_parameters(check: str, parameters: Mapping[str, object]) -> CheckResult | None:
    """An error if a check that takes no parameters was given some."""
    if not parameters:
        return None
    names = ", ".join(sorted(map(str, parameters)))
    return error(check, "unsupported", f"expected no parameters for {check}, got {names}")
