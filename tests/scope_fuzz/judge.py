"""Runs cases on warm ranks and says what is wrong with each: in one word, and in full."""

from collections import Counter
from dataclasses import dataclass, field

from harness.errors import ScenarioError
from tests.dist.rank_pool import RankError, RankPool
from tests.scope_fuzz.case import Case
from tests.scope_fuzz.programs import run_case

MOST_CHARS = 6000


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        kind: of the failure, in a word or two; empty: all is well.
        text: all that is known.
        rule: that refused it, or its key where a single value is out of range; empty: it ran.
    """

    kind: str = ""
    text: str = ""
    rule: str = ""


@dataclass
class Judge:
    """Judges cases, and counts.

    Attributes:
        ran: cases that ran.
        refused: by rule, or by key for values out of range.
        uncaptured: cases whose scopes no layer had.
    """

    pool: RankPool
    timeout_s: float
    ran: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    uncaptured: int = 0

    def __call__(self, case: Case) -> Verdict:
        """Run it, unless a rule says no."""
        refusal = refusal_of(case)
        if refusal.kind or refusal.rule:
            self.refused[refusal.rule] += not refusal.kind
            return refusal
        ranks = case.config().parallel.world_size
        if ranks > self.pool.num_ranks:
            return Verdict(rule="more ranks than there are")
        self.ran += 1
        try:
            reports = self.pool.run(
                run_case, case.to_json(), world_size=ranks, timeout_s=self.timeout_s
            )
        except RankError as error:
            return Verdict(f"raised {error.kind}", str(error)[-MOST_CHARS:])
        problems = list(dict.fromkeys(p for report in reports for p in report.problems))
        if problems:
            return Verdict(problems[0].partition(":")[0], "\n".join(problems))
        if not any(report.captured for report in reports) and not _never_captures(case):
            return Verdict("nothing captured", "no rank has captured anything")
        return Verdict()


def refusal_of(case: Case) -> Verdict:
    """What rules say: nothing, a refusal with a key, or a failure where it is no refusal."""
    try:
        case.config()
    except ScenarioError as error:
        return Verdict(rule=error.rule or error.key) if error.key else Verdict("no key", str(error))
    except Exception as error:  # noqa: BLE001  (whatever else is raised is what is looked for)
        return Verdict(f"config raised {type(error).__name__}", repr(error))
    return Verdict()


def _never_captures(case: Case) -> bool:
    """Whether no trainer of the case takes a step after its warm-up, before it drops graphs."""
    warmup = whole = case.settings.get("graph_warmup_steps", 2)
    for kind, *_ in case.events:
        if kind == "resume":
            whole = warmup
        elif kind == "drop":
            whole = -1
        elif kind == "step" and whole == 0:
            return False
        elif kind == "step":
            whole -= 1
    return True
