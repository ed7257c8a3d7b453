"""Program order: which microbatch a call is of, and what comes last as nobody knows when it was."""

import hashlib
from collections.abc import Mapping, Sequence

from harness.bisector.legs import Legs
from harness.checks.taps import Both, in_program_order, shared_rows, taps
from harness.records import NEVER_RAN, RunResult
from tests.unit.harness.bisector.small_model import run_of, tapped

# Two layers that share `rope`, which each calls twice; one microbatch, a row past it.
ORDER = (
    "layers.0:input", "rope:input", "rope:output", "rope:input", "rope:output", "layers.0:output",
    "layers.1:input", "rope:input", "rope:output", "rope:input", "rope:output", "layers.1:output",
    "layers.1:gradient", "rope:gradient", "layers.0:gradient", "rope:gradient",
)  # fmt: skip


def run_with(microbatches: int, calls: Sequence[str], other: Sequence[int] = ()) -> RunResult:
    """A run whose every step makes these calls; those at the places of `other` saw other things."""
    rows: dict[str, tuple[str, int]] = {}
    seen: dict[str, int] = {}
    for place, tap in enumerate(calls):
        name = f"{tap}[{min(seen.get(tap, 0), microbatches)}]"
        seen[tap] = seen.get(tap, 0) + 1
        before, first = rows.get(name, ("", place))
        rows[name] = (f"{before}{place}{'!' if place in other else ''}", first)
    names = [f"{tap}[{row}]" for tap in dict.fromkeys(calls) for row in range(microbatches + 1)]
    return tapped(run_of(), microbatches, {name: _row(rows.get(name)) for name in names})


def _row(held: tuple[str, int] | None) -> str:
    if held is None:
        return "0" * 32 + NEVER_RAN
    return hashlib.md5(held[0].encode()).hexdigest() + f"{held[1]:08x}"


def first_of(microbatches: int, calls: Sequence[str], other: Sequence[int]) -> str:
    """The first row that differs; the check and the search must name the same."""
    legs = run_with(microbatches, calls), run_with(microbatches, calls, other)
    difference = taps(*legs).difference
    assert difference is not None
    rows = Legs(*legs).rows(0)
    assert next(row.name for row in rows if row.differs) == difference.tensor
    return difference.tensor


def test_calls_past_the_rows_come_last() -> None:
    """A layer went wrong and all after it: the shared module's row, begun before, is not blamed."""
    assert first_of(1, ORDER, range(5, len(ORDER))) == "layers.0:output[0]"


def test_a_row_of_one_call_stands_in_its_place() -> None:
    """The first call of a shared module is known: what it was given differs first."""
    assert first_of(1, ORDER, range(1, len(ORDER))) == "rope:input[0]"


def test_wrong_output_of_right_inputs_is_the_modules_own() -> None:
    """All that a shared module was given is equal, what it returned is not: it, not its user."""
    wrong = [8, 10, *range(11, len(ORDER))]
    assert first_of(1, ORDER, wrong) == "rope:output[1]"


def test_gradients_of_a_shared_module_come_last() -> None:
    """Backward makes its calls in another order: which one a row stands for is not known."""
    assert first_of(1, ORDER, [13, 14, 15]) == "layers.0:gradient[0]"


def test_a_call_before_its_microbatch_is_of_an_earlier_one() -> None:
    """Rows of a shared module are numbered by calls; its microbatch is that in which it ran."""
    calls = [*ORDER, *ORDER]
    rows = rows_of(run_with(2, calls), run_with(2, calls))
    held = {row.call.name: row.call for row in rows if row.call.place}
    assert held["rope:input[1]"].microbatch == 0
    assert held["layers.1:output[1]"].microbatch == 1
    assert {name for name, call in held.items() if call.is_folded} == {
        "rope:input[2]", "rope:output[2]", "rope:gradient[2]",
    }  # fmt: skip


def test_a_pipeline_orders_by_microbatch_though_ranks_work_at_others() -> None:
    """With stages, forward comes first, then the microbatch; without, the place in the step."""
    calls = ["layers.0:output", "layers.0:gradient", "layers.0:output", "layers.0:gradient"]
    run = run_with(2, calls)
    assert names_in_order(run) == [
        "layers.0:output[0]", "layers.0:gradient[0]", "layers.0:output[1]", "layers.0:gradient[1]",
    ]  # fmt: skip
    assert names_in_order(run, stage=1) == [
        "layers.0:output[0]", "layers.0:output[1]", "layers.0:gradient[0]", "layers.0:gradient[1]",
    ]  # fmt: skip


def names_in_order(run: RunResult, *, stage: int = 0) -> list[str]:
    """Calls of rank 0 that ran in step 0."""
    rows = rows_by_name(run)
    staged = tapped(run, 2, rows, stages=[stage] * len(rows))
    ordered = in_program_order(rows_of(staged, staged))
    return [row.call.name for row in ordered if row.call.place]


def rows_of(reference: RunResult, candidate: RunResult) -> list[Both]:
    """Rows of step 0 on rank 0."""
    start = reference.ranks[0].start
    assert start is not None
    records = reference.ranks[0].steps[0], candidate.ranks[0].steps[0]
    return shared_rows(*records, start, (reference.spec, candidate.spec))[0]


def rows_by_name(run: RunResult) -> Mapping[str, str]:
    """Rows as they were written."""
    records = run.ranks[0]
    assert records.start is not None
    text = records.steps[0].taps
    return {name: text[40 * i : 40 * i + 40] for i, name in enumerate(records.start.taps)}
