"""Step records of a run by (step, rank), and how compared values are written for people."""

from harness.records import FloatBits, RankRecords, RunResult, StepRecord

StepTable = dict[tuple[int, int], StepRecord]
"""Step records by (step, rank), in the order of steps, then ranks."""


def step_table(run: RunResult) -> StepTable:
    """The first record of every (step, rank) of a run."""
    table: StepTable = {}
    for rank in run.ranks:
        for record in rank.steps:
            table.setdefault((record.step, rank.rank), record)
    return dict(sorted(table.items()))


def rank_table(run: RunResult) -> dict[int, RankRecords]:
    """The first records of every rank, in rank order."""
    table: dict[int, RankRecords] = {}
    for records in run.ranks:
        table.setdefault(records.rank, records)
    return dict(sorted(table.items()))


def shared_pairs(a: StepTable, b: StepTable) -> list[tuple[int, int]]:
    """The (step, rank) keys that both tables hold, in order."""
    return [key for key in a if key in b]


def show_float(value: FloatBits) -> str:
    """Nine digits, which tell any two float32 apart, and the bit pattern."""
    return f"{show_value(value)} (0x{value.bits})"


def show_value(value: FloatBits) -> str:
    """The number alone: `2.5`, `-0`, `nan`, `-inf`."""
    if value.value is not None:
        return f"{value.value:.9g}"
    pattern = int(value.bits, 16)
    if pattern & 0x007FFFFF:
        return "nan"
    return "-inf" if pattern & 0x80000000 else "inf"


def show_ranks(ranks: set[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 3`, or a count past eight."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 8:
        return f"{len(ordered)} ranks ({ordered[0]} to {ordered[-1]})"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def count(number: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`, `2 microbatches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"
