"""Records in, evidence and verdicts out: pure functions, no files, no torch.

    complete    is a run whole?                  bits      of the state, of losses, NaN; tolerances
    taps        bits of modules' calls           memory    peaks, growth, what a soak states
    speed       is the candidate slower?         judge     which answer decides; does it come again?
    evidence    the registry, and what all share

The schema of `checks:`, `harness list --checks` and the table of `docs/GUIDE.md` are made of the
registry. A new check is a function under `@check` in a module of this room, a test and a scenario;
the table is printed again.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

from harness.checks.evidence import CHECKS, Check, Option, check, defaults, refusal, table  # noqa: E402
from harness.checks.judge import exit_code, judge  # noqa: E402

__all__ = [
    "CHECKS", "Check", "Option", "check", "defaults", "exit_code", "judge", "refusal", "table",
]  # fmt: skip
