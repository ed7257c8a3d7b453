"""Records in, evidence and verdicts out: pure functions, no files, no torch.

registry      the checks that a scenario may ask for: name, options, function, doc
evidence      what they share: runs, tables of records, answers, words
complete      is a run whole?               (a flaw is a failure of its own)
environment   did two runs have the same?   why does a program not repeat itself?
exact, taps   bits, step by step: losses, state, modules; NaN and infinity
within        losses within a stated tolerance, or that of rounding
memory        peak memory
speed         is the candidate slower?      (of pairs of timed runs)
soak          nothing failed in N replays, and memory did not grow
judge         which answer decides the case
confirmation  does a difference come again?
"""

from harness.checks.judge import exit_code, judge
from harness.checks.registry import CHECKS

__all__ = ["CHECKS", "exit_code", "judge"]
