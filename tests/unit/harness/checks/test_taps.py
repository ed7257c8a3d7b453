"""The taps check names the first call in program order that differs; how rows become calls."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from harness.bisect.aligned import Legs
from harness.checks.judge import judge
from harness.checks.taps import Both, in_program_order, shared_rows, taps
from harness.records import NEVER_RAN, TAP_HEX_CHARS, EventRecord, RunResult
from tests.unit.harness.bisect.small_model import run_of, tapped
from tests.unit.harness.checks.conftest import place_of

if TYPE_CHECKING:
    from tests.unit.harness.checks.conftest import Edits, Lab


NAMES = (
    "layers.0.attn:output[0]", "layers.0.attn:output[1]", "layers.1.attn:output[0]",
    "layers.1.attn:output[1]", "layers.0.attn:gradient[0]", "layers.0.attn:gradient[1]",
    "layers.1.attn:gradient[0]", "layers.1.attn:gradient[1]",
)  # fmt: skip


def rewrite(run: RunResult, edit: "Edits", place: tuple[int, int], rows: dict[str, str]) -> Any:
    """The run with rows of one (rank, step) replaced."""
    rank, step = place
    text = run.ranks[rank].steps[step].taps
    for name, row in rows.items():
        start = NAMES.index(name) * TAP_HEX_CHARS
        text = text[:start] + row + text[start + TAP_HEX_CHARS :]
    return edit.step(run, rank, step, taps=text)


def row(run: RunResult, rank: int, step: int, name: str) -> str:
    """One row as it is."""
    start = NAMES.index(name) * TAP_HEX_CHARS
    return run.ranks[rank].steps[step].taps[start : start + TAP_HEX_CHARS]


def other(run: RunResult, edit: "Edits", changes: dict[tuple[int, int], list[str]]) -> RunResult:
    """The run with other digests of the named calls by (rank, step), in the same places."""
    for place, names in changes.items():
        rows = {name: "ab" * 16 + row(run, *place, name)[32:] for name in names}
        run = rewrite(run, edit, place, rows)
    return run


def test_equal_taps_pass(lab: "Lab") -> None:
    """Equal calls are counted over all ranks, steps and rows."""
    reference, _, candidate = lab.legs()
    result = taps(reference, candidate)
    assert result.outcome == "passed"
    assert result.figures == {"calls": 2 * 4 * 8, "unseen": 0}


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        # A later step never comes first, whatever differs in it.
        ({(0, 1): ["layers.1.attn:gradient[1]"], (0, 2): ["layers.0.attn:output[0]"]},
         (1, 0, "layers.1.attn:gradient[1]")),
        # Forward comes before backward, though it ran later.
        ({(0, 1): ["layers.1.attn:gradient[0]", "layers.1.attn:output[1]"]},
         (1, 0, "layers.1.attn:output[1]")),
        # The first microbatch comes first.
        ({(0, 1): ["layers.0.attn:output[1]", "layers.1.attn:output[0]"]},
         (1, 0, "layers.1.attn:output[0]")),
        # Stages in the order of the data: forward up, backward down, whatever rank holds them.
        ({(0, 1): ["layers.1.attn:output[0]"], (1, 1): ["layers.0.attn:output[0]"]},
         (1, 1, "layers.0.attn:output[0]")),
        ({(0, 1): ["layers.0.attn:gradient[0]"], (1, 1): ["layers.1.attn:gradient[0]"]},
         (1, 1, "layers.1.attn:gradient[0]")),
        # Of equals the first rank.
        ({(1, 3): ["layers.0.attn:output[0]"], (0, 3): ["layers.0.attn:output[0]"]},
         (3, 0, "layers.0.attn:output[0]")),
    ],
)  # fmt: skip
def test_the_first_in_program_order_is_named(
    lab: "Lab", edit: "Edits", changes: dict[tuple[int, int], list[str]],
    first: tuple[int, int, str],
) -> None:  # fmt: skip
    """Step, then direction, then microbatch, then stage, then rank; with both digests."""
    reference, _, candidate = lab.legs()
    result = taps(reference, other(candidate, edit, changes))
    assert (result.outcome, result.what) == ("failed", "diverged")
    difference = result.difference
    assert difference is not None
    assert (difference.step, difference.rank, difference.tensor) == first
    assert difference.reference == row(reference, first[1], first[0], first[2])[:32]
    assert difference.candidate == "ab" * 16
    assert result.figures["differing_pairs"] == len(changes)


def test_within_a_stage_the_place_in_the_step_decides(lab: "Lab", edit: "Edits") -> None:
    """Calls of one microbatch and stage are ordered as the reference ran them."""
    reference, _, candidate = lab.legs()
    stages = (0,) * len(NAMES)

    def flat(run: RunResult) -> RunResult:
        for records in run.ranks:
            assert records.start is not None
            start = records.start.__class__(**(vars(records.start) | {"tap_stages": stages}))
            run = edit.rank(run, records.rank, start=start)
        return run

    changes = {(0, 0): ["layers.0.attn:gradient[0]", "layers.1.attn:gradient[0]"]}
    result = taps(flat(reference), flat(other(candidate, edit, changes)))
    where = place_of(result)
    assert where.tensor == "layers.1.attn:gradient[0]"
    assert "the gradient of the output of layers.1.attn, call 0" in result.message


def test_the_place_itself_is_not_compared(lab: "Lab", edit: "Edits") -> None:
    """A graph may run calls in another order: what went through is the same."""
    reference, _, candidate = lab.legs()
    name = "layers.0.attn:output[0]"
    rows = {name: row(candidate, 0, 1, name)[:32] + "0000abcd"}
    assert taps(reference, rewrite(candidate, edit, (0, 1), rows)).outcome == "passed"


def test_a_call_too_few_is_a_failure(lab: "Lab", edit: "Edits") -> None:
    """A module that ran once where the reference ran it twice is named."""
    reference, _, candidate = lab.legs()
    never = "0" * 32 + NEVER_RAN
    lost = rewrite(candidate, edit, (1, 2), {"layers.1.attn:output[1]": never})
    result = taps(reference, lost)
    assert (result.outcome, result.what) == ("failed", "diverged")
    where = place_of(result)
    assert where.tensor == "layers.1.attn:output[1]"
    assert where.candidate == "never ran"


def test_a_module_taken_apart_is_said_and_not_failed(lab: "Lab", edit: "Edits") -> None:
    """One whose inside a graph of the router calls is no difference, and no evidence either."""
    reference, _, candidate = map(of_router, lab.legs())
    never = "0" * 32 + NEVER_RAN
    for rank in range(2):
        for step in range(4):
            rows = {name: never for name in NAMES if name.startswith("layers.1.attn:output")}
            candidate = rewrite(candidate, edit, (rank, step), rows)
    result = taps(reference, candidate)
    assert result.outcome == "passed"
    assert result.figures == {"calls": 2 * 4 * 6, "unseen": 1}
    assert "1 tap ran in one leg only, layers.1.mlp.moe:output first by name" in result.message


@pytest.mark.parametrize("side", [0, 1])
def test_a_module_that_ran_in_one_run_only_differs(lab: "Lab", edit: "Edits", side: int) -> None:
    """A module that nothing takes apart, and that one run never calls, is a difference there."""
    runs = list(lab.legs())
    runs[2 * side] = silenced(runs[2 * side], edit, range(2, 4), "layers.1.attn:output")
    result = taps(runs[0], runs[2])
    assert (result.outcome, result.what) == ("failed", "diverged")
    found = result.difference
    assert found is not None
    assert (found.step, found.rank, found.tensor) == (2, 0, "layers.1.attn:output[0]")
    assert (found.reference, found.candidate)[side] == "never ran"


def test_only_the_graph_that_holds_it_takes_a_module_apart(lab: "Lab", edit: "Edits") -> None:
    """The eager run calls experts as one module, whatever the other one captures."""
    reference, _, candidate = map(of_router, lab.legs())
    reference = silenced(reference, edit, range(4), "layers.1.attn:output")
    assert taps(reference, candidate).what == "diverged"


def test_a_graph_takes_apart_what_it_holds_and_nothing_else(lab: "Lab", edit: "Edits") -> None:
    """Another module of the layer, and experts of a layer past the captured ones, differ."""
    reference, _, candidate = map(of_router, lab.legs())
    attention = silenced(candidate, edit, range(4), "layers.0.attn:output")
    assert taps(reference, attention).what == "diverged"
    experts = silenced(candidate, edit, range(4), "layers.1.attn:output")
    for last, outcome in ((0, "failed"), (1, "passed")):
        config = experts.spec.config | {"graph_layers": [0, last]}
        run = replace(experts, spec=replace(experts.spec, config=config))
        assert taps(reference, run).outcome == outcome


def test_taps_in_another_order_are_not_compared(lab: "Lab", edit: "Edits") -> None:
    """Rows are matched by place: the same names in another order would be other modules."""
    reference, _, candidate = lab.legs()
    start = candidate.ranks[1].start
    assert start is not None
    turned = edit.rank(candidate, 1, start=replace(start, taps=start.taps[::-1]))
    result = taps(reference, turned)
    assert (result.outcome, result.what) == ("error", "unsupported")


def of_router(run: RunResult) -> RunResult:
    """The run with experts in place of the second layer's attention, graphs of their router."""
    graph = ["moe_router"] if run.spec.config["graph"] else []
    ranks = []
    for records in run.ranks:
        assert records.start is not None
        taps = tuple(name.replace("1.attn", "1.mlp.moe") for name in records.start.taps)
        ranks.append(replace(records, start=replace(records.start, taps=taps)))
    spec = replace(run.spec, config=run.spec.config | {"graph": graph})
    return replace(run, spec=spec, ranks=tuple(ranks))


def of_program(run: RunResult) -> RunResult:
    """The run as one of a program, of whose graphs nothing is known."""
    spec = replace(run.spec, config=run.spec.config | {"program": {"target": "train.py"}})
    return replace(run, spec=spec)


def with_patterns(run: RunResult, *patterns: str) -> RunResult:
    """The run as it was asked for with these taps."""
    spec = replace(run.spec, config={**run.spec.config, "taps": list(patterns)})
    return replace(run, spec=spec)


def silenced(run: RunResult, edit: "Edits", steps: range, *taps: str) -> RunResult:
    """The run with modules that never ran in these steps, on either rank."""
    for rank in range(2):
        for step in steps:
            names = [name for name in NAMES if name.partition("[")[0] in taps]
            run = rewrite(run, edit, (rank, step), dict.fromkeys(names, "0" * 32 + NEVER_RAN))
    return run


def test_a_pattern_that_looked_at_nothing_is_an_error(lab: "Lab", edit: "Edits") -> None:
    """Steps before the capture are eager in both legs: what they show is no evidence of graphs."""
    reference, _, candidate = map(of_program, lab.legs())
    both = ("layers.*.attn", "layers.*.attn:gradient")
    gone = ("layers.0.attn:output", "layers.1.attn:output")
    result = taps(reference, silenced(with_patterns(candidate, *both), edit, range(2, 4), *gone))
    assert (result.outcome, result.what) == ("error", "not_run")
    assert "the tap layers.*.attn compares nothing: at step 3 layers.0.attn:output ran in the " in (
        result.message
    )
    assert "in the reference alone" in result.message
    # One module of the pattern is enough, and so is a pattern that means both.
    result = taps(reference, silenced(with_patterns(candidate, *both), edit, range(2, 4), gone[0]))
    assert result.outcome == "passed"
    first, second = (silenced(run, edit, range(4), *gone) for run in (reference, candidate))
    result = taps(first, with_patterns(second, *both))
    assert result.what == "not_run"
    assert "ran in neither leg" in result.message
    assert taps(first, second).outcome == "passed"


def test_nothing_seen_is_no_pass(lab: "Lab", edit: "Edits") -> None:
    """If no tap ran in both legs, or none was asked for, there is no answer."""
    reference, _, candidate = map(of_program, lab.legs())
    silent = candidate
    for rank in range(2):
        for step in range(4):
            rows = dict.fromkeys(NAMES, "0" * 32 + NEVER_RAN)
            silent = rewrite(silent, edit, (rank, step), rows)
    result = taps(reference, silent)
    assert (result.outcome, result.what) == ("error", "not_run")

    def untapped(run: RunResult) -> RunResult:
        for records in run.ranks:
            assert records.start is not None
            plain = vars(records.start) | {"taps": (), "tap_stages": ()}
            run = edit.rank(run, records.rank, start=records.start.__class__(**plain))
        return run

    result = taps(untapped(reference), untapped(candidate))
    assert (result.outcome, result.what) == ("error", "unsupported")
    assert "taps: [...]" in result.message
    result = taps(reference, untapped(candidate))
    assert (result.outcome, result.what) == ("error", "unsupported")
    assert "different modules on rank 0" in result.message


def test_taps_decide_before_what_follows_from_them(lab: "Lab", edit: "Edits") -> None:
    """In one step what went through a module explains the weights, not the other way round."""
    reference, control, candidate = lab.legs()
    bad = other(candidate, edit, {(0, 2): ["layers.0.attn:output[1]"]})
    bad = edit.digest(bad, 0, 2, "grads", 3)
    verdict = judge(lab.case(), reference, control, bad)
    assert verdict.outcome == "failed"
    where = place_of(verdict)
    assert where.tensor == "layers.0.attn:output[1]"
    earlier = edit.digest(bad, 0, 1, "optim", 3)
    verdict = judge(lab.case(), reference, control, earlier)
    where = place_of(verdict)
    assert where.quantity == "optim"


def test_a_reference_whose_taps_differ_from_its_own_is_not_trusted(
    lab: "Lab", edit: "Edits"
) -> None:
    """What went through differs between two runs of the reference: the candidate is not blamed."""
    reference, control, candidate = lab.legs()
    control = other(control, edit, {(1, 1): ["layers.0.attn:output[0]"]})
    verdict = judge(lab.case(), reference, control, candidate)
    assert (verdict.outcome, verdict.what) == ("incomparable", "nondeterministic_reference")


@pytest.mark.parametrize(
    ("taps", "why"),
    [
        (lambda text: text[:-1], "the taps: 319 characters, expected 320"),
        (lambda text: "", "the taps: 0 characters"),
        (lambda text: text[:-1] + "G", "not lower-case hex"),
    ],
)
def test_damaged_taps_are_a_flaw(lab: "Lab", edit: "Edits", taps: Any, why: str) -> None:
    """Rows that cannot be read are never compared."""
    reference, control, candidate = lab.legs()
    text = candidate.ranks[1].steps[2].taps
    damaged = edit.step(candidate, 1, 2, taps=taps(text))
    verdict = judge(lab.case(), reference, control, damaged)
    assert (verdict.outcome, verdict.what) == ("failed", "corrupt_record")
    assert "rank 1, step 2: " in verdict.message
    assert why in verdict.message


def asked(run: RunResult, edit: "Edits", scenario: tuple[str, ...], script: str = "") -> RunResult:
    """The run of a scenario with these patterns, whose rank 0 asks for one more."""
    events = (EventRecord(name="taps", rank=0, step=-1, detail={"patterns": [script]}),)
    config = run.spec.config | {"taps": scenario}
    run = replace(run, spec=replace(run.spec, config=config))
    return edit.rank(run, 0, events=(*run.ranks[0].events, *(events if script else ())))


@pytest.mark.parametrize("script", [False, True])
def test_a_pattern_without_a_module_compares_nothing(
    lab: "Lab", edit: "Edits", script: bool
) -> None:
    """A pattern that means no call of either run has no answer, whoever states it."""
    reference, _, candidate = lab.legs()
    first, second = "layers.0.attn", "layers.*.atn:output"
    stated = ((first,), second) if script else ((first, second), "")
    runs = [asked(run, edit, *stated) for run in (reference, candidate)]
    result = taps(runs[0], runs[1])
    assert (result.outcome, result.what) == ("error", "not_run")
    assert second in result.message
    ours, theirs = (asked(each, edit, (first,), first) for each in (reference, candidate))
    whole = taps(ours, theirs)
    assert whole.outcome == "passed"


@pytest.mark.parametrize("which", [0, 1])
def test_a_pattern_of_one_run_is_judged_by_the_rows(lab: "Lab", edit: "Edits", which: int) -> None:
    """What only one script asks for, and neither run has, has no answer either."""
    reference, _, candidate = lab.legs()
    runs = [reference, candidate]
    runs[which] = asked(runs[which], edit, (), "nothing")
    assert taps(runs[0], runs[1]).outcome == "error"


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
