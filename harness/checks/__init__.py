"""Records in, verdicts out: pure functions, no files, no torch.

    complete     is a run whole?                 (a flaw is a failure of its own)
    environment  did two legs run alike?
    loss         loss and gradient norm, bits
    state        digests, tensor by tensor
    taps         digests of what went through modules
    finite       no NaN, no infinity
    memory       peak memory
    samples      do data-parallel ranks read different ones?
    throughput   is the candidate slower?        (of pairs of timed runs)
    repeated     have these runs the same bits?
    soak         nothing failed in N replays, and memory did not grow
    judge        which answer decides the case

A check's module has `NAME` and `check(reference, candidate, parameters) -> CheckResult`.
"""

from harness.checks.judge import CHECKS, exit_code, judge

__all__ = ["CHECKS", "exit_code", "judge"]
