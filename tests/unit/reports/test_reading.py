"""One report for all formats: failures first, and nothing missing looks green."""

import base64
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from harness.checks.evidence import BEFORE
from harness.errors import UsageError
from harness.history.ledger import History
from harness.records import (
    DIGEST_HEX_CHARS,
    FOLDER_VERSION,
    NEVER_RAN,
    TAP_HEX_CHARS,
    CollectiveFault,
    Difference,
    Ending,
    Entered,
    EventRecord,
    FloatBits,
    RunResult,
)
from harness.store import RunFolder
from reports.compared import LOSS, MISSING, GroupMap, StateMap, loss_curve, state_map
from reports.html import loss_figure, state_figure
from reports.reading import (
    COST_HEAD,
    CaseReport,
    Past,
    Report,
    addresses,
    cost_rows,
    look_back,
    summarise,
)
from tests.support import records
from tests.support.run_records import CANDIDATE, REFERENCE, TAPS, configured, edit
from tests.unit.harness.history.nights import FAILED, night, only
from tests.unit.reports.folders import Writer, drift

JOINED = """\
name: several
scenarios:
  - {file: a.yaml, text: "{name: a, compare: {axis: graph, reference: eager}}"}
  - {file: b.yaml, text: "{name: b, compare: {axis: %s, reference: eager}}"}
"""
CREATED = "2031-01-15T00:00:00+00:00"


def test_every_outcome_is_counted_and_failures_lead(summary: Report) -> None:
    """Cases come worst first, each with its checks worst first."""
    assert dict(summary.counts) == {
        "failed": 6, "error": 2, "incomparable": 2, "passed": 2, "skipped": 1,
    }  # fmt: skip
    assert (summary.exit_code, summary.wall_s) == (1, 1.25)  # runs at the same time count once
    order = list(summary.counts).index
    listed: list[Any] = [summary.cases, *(case.checks for case in summary.cases)]
    for found in listed:
        outcomes = [each.outcome for each in found]
        assert outcomes == sorted(outcomes, key=order)
    assert {case.spec.id: case.verdict.what for case in summary.cases} == {
        "dp1-attn": "", "dp1-full_iteration": "", "dp2-attn": "diverged",
        "dp2-full_iteration": "nonfinite", "dp3-attn": "hang",
        "dp3-full_iteration": "memory_regression", "dp4-attn": "missing_step",
        "dp4-full_iteration": "nondeterministic_reference", "dp5-attn": "oom",
        "dp5-full_iteration": "different_environment", "dp6-attn": "unsupported",
        "dp6-full_iteration": "not_run", "dp7-attn": "diverged",
    }  # fmt: skip


def test_what_cannot_be_read_is_an_error_not_a_pass(writer: Writer, tmp_path: Path) -> None:
    """No verdict, a damaged one, no cases, a scenario that does not parse, no run folder."""
    assert summarise(Writer(tmp_path / "empty").write()).headline == "nothing ran"
    writer.scenario = "{[" * 100
    writer.add("a", 1, "attn", unjudged=True)
    writer.add("b", 1, "attn")
    folder = writer.write()
    (folder / "cases" / "b" / "verdict.json").write_text("{")
    report = summarise(folder)
    assert [case.verdict.what for case in report.cases] == ["not_run", "corrupt_record"]
    assert (report.exit_code, report.scenario) == (6, "fsdp_cudagraph_alignment")
    with pytest.raises(UsageError, match="not a run folder"):
        summarise(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": FOLDER_VERSION}))
    with pytest.raises(UsageError, match="damaged"):
        summarise(tmp_path)


@pytest.mark.parametrize(("axis", "column"), [("graph", "graph"), ("stress", "scenario")])
def test_the_matrix_has_the_compared_axis_across(
    summary: Report, writer: Writer, axis: str, column: str
) -> None:
    """Of several scenarios the one that all compare, else the scenario."""
    matrix = summary.matrix
    assert (matrix.axis, matrix.row_axes) == ("graph", ("parallel",))
    assert matrix.columns[:2] == ("attn", "full_iteration")
    assert [case.spec.id for case in matrix.cases["dp2", "attn"]] == ["dp2-attn"]
    writer.scenario = JOINED % axis
    labels = {"parallel": "dp1", "graph": "attn", "scenario": "a"}
    writer.add("a.dp1-attn", 1, "attn", labels=labels)
    assert summarise(writer.write()).matrix.axis == column


def test_each_measured_case_has_its_costs(summary: Report) -> None:
    """How many losses and digests were compared, or differ, and what the candidate takes."""
    rows = {row[0]: dict(zip(COST_HEAD, row, strict=True)) for row in cost_rows(summary)}
    assert rows["dp1-attn"] == {
        "case": "dp1-attn", "losses": "20 equal", "digests": "289 equal", "speed": "1.00",
        "peak, MiB": "40.0 → 40.0", "peak ratio": "1.00", "step, ms": "10 → 10",
        "A/A speed": "1.00",
    }  # fmt: skip
    assert rows["dp3-full_iteration"]["peak ratio"] == "2.50"
    assert rows["dp2-attn"]["losses"] == "22 of 40 pairs differ"
    assert rows["dp2-attn"]["digests"] == "13 of 42 pairs differ"
    assert rows["dp5-attn"]["step, ms"] == "? → 10"
    assert "dp6-attn" not in rows


def failing(message: str, ending: Ending | None = None, tensor: str = "") -> Any:
    place = Difference(step=1, rank=0, quantity="grads", tensor=tensor) if tensor else None
    said: dict[str, Any] = {"outcome": "failed", "what": "crashed", "message": message}
    verdict = records.verdict(difference=place, ending=ending, **said)
    return Failing(outcome="failed", verdict=verdict, message=message)


class Failing(SimpleNamespace):
    cause, reason, _fields = CaseReport.cause, CaseReport.reason, CaseReport._fields


def crash(module: str, at: str) -> Ending:
    return Ending(exception="RuntimeError", phase="forward", module=module, raised_at=at)


def hang(rank: int) -> Ending:
    gather = Entered(operator="allgather_base", label="layers.1")
    return Ending(collective=CollectiveFault(
        ranks=(rank,), entered=None, others=(), expected=gather, group=(0, 1), number=rank,
        step=rank,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("cases", "causes"),
    [
        ([failing("0x1 of a", crash("layers.3.attn", "unit.py:9 gather")),
          failing("entirely else", crash("layers.7.attn", "unit.py:9 gather")),
          failing("0x1 of a", crash("", "pool.py:2 take"))],
         {"RuntimeError in forward layers.N.attn at unit.py:N gather": 2,
          "RuntimeError in forward at pool.py:2 take": 1}),
        ([failing("rank 0", hang(0)), failing("rank 1", hang(1))],
         {"allgather_base of layers.1": 2}),
        ([failing("a", tensor="layers.0.norm"), failing("b", tensor="layers.1.norm"),
          failing("12 too many")], {"grads of layers.N.norm": 2, "12 too many": 1}),
    ],
    ids=["exception, module and place", "collective", "tensor, or the message"],
)  # fmt: skip
def test_cases_are_one_cause_by_fields_of_their_verdicts(cases: Any, causes: Any) -> None:
    """Numbers, ranks and steps tell runs from each other, not causes; said if all agree."""
    found = Report.causes.fget(SimpleNamespace(cases=cases))  # type: ignore[attr-defined]
    assert {cause.words: len(cause.cases) for cause in found} == causes


def of_run(whole: RunResult, *ranks: tuple[list[int | None], dict[str, Any] | None]) -> str:
    """What is said of ranks by the pointers that moved in their steps, and what of graphs."""
    made = []
    for own, (moved, detail) in zip(whole.ranks, ranks, strict=False):
        steps = tuple(
            dataclasses.replace(record, pointer_changes=count)
            for record, count in zip(own.steps, moved, strict=False)
        )
        events = (EventRecord(name="graphs", rank=0, step=1, detail=detail or {}),) * bool(detail)
        made.append(dataclasses.replace(own, steps=steps, events=events))
    return addresses(dataclasses.replace(whole, ranks=tuple(made)))


def test_addresses_are_those_of_the_rank_that_has_most(everything: Path) -> None:
    """Counts and moved pointers step by step; what was not counted is not zero."""
    with RunFolder.open(everything) as folder:
        case = next(case for case in folder.cases if case.id == "dp2-attn")
        whole = folder.load_run(case.reference)
    detail: dict[str, Any] = {
        "captured": 4,
        "ledger_names": 78,
        "ledger_places": ["a", "b"],
        "ledger_unnamed": 1,
    }
    more = {"ledger_names": 80, "moved": ["lr (step 1)", "x (step 0)"]}
    first = detail | {"moved": ["lr (step 1)"]}
    assert of_run(whole, ([0, 5, 0], first), ([2, 3, 0], detail | more)) == (
        "4 graphs rely on 80 named tensors, 2 storages known by place and 1 unnamed; "
        "7 pointers moved, at most 5 in a step, last in step 1; "
        "the first of them lr (step 1), x (step 0)"
    )
    assert of_run(whole, ([0, 0], None)) == "no pointer moved"
    assert of_run(whole, ([None, None], None)) == "moved pointers were not counted"


# --- what the history says --------------------------------------------------------------------


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Two cases over eighteen nights, of which the last four come after the report."""
    place = tmp_path_factory.mktemp("nights")
    history = History.open(place / "history", create=True)
    for n in range(18):
        answers = {
            0: FAILED if n >= 9 else {},
            1: {"retried": ("candidate: port_in_use",)} if n == 6 else {},
        }
        slower = only("candidate", step_s=0.02 if n < 7 else 0.03)
        history.record(night(n, cases=2, answers=answers, values=slower))
    return look_back(place / "history", "nightly", CREATED, 2)


def test_the_history_says_since_when_and_what_changed(past: Past) -> None:
    """A letter an answer, oldest first, up to the report's own; first bad, last good, shifts."""
    known, again = past.cases["dp1-attn"], past.cases["dp2-attn"]
    assert (known.letters, again.letters) == ("pppppppppfffff", "p" * 14)
    assert known.step_us == (20_000,) * 7 + (30_000,) * 7
    assert known.peak_kib == (40 << 10,) * 14
    assert known.words[0].startswith("first bad run 2031-01-10 ")
    assert ", last good 2031-01-09 " in known.words[0]
    assert any(text.startswith("step time +50.0% since 2031-01-08") for text in known.words)
    assert "tried again in 1 run: candidate: port_in_use" in again.words
    assert [(f.case_id, f.retried) for f in past.flaky] == [("dp2-attn", {"port_in_use": 1})]


def test_no_history_and_a_damaged_one(tmp_path: Path) -> None:
    """Without a history nothing is said; of one that cannot be read, why."""
    place = tmp_path / "history"
    assert look_back(place, "nightly", CREATED, 2) == Past(cases={}, flaky=())
    place.write_text("no database" * 100)
    told = look_back(place, "nightly", CREATED, 2)
    assert told.note.startswith("no history is shown: ")


# --- losses and state of two runs: differences that a rounded plot would hide ---


ONE, PLUS3, ZERO, MINUS_ZERO = 0x3F800000, 0x3F800003, 0, 0x80000000
NAN, OTHER_NAN, HUGE = 0x7FC00000, 0x7FC00001, 0x7F000000


def losses(changed: dict[tuple[int, int], int | None]) -> dict[tuple[int, int], FloatBits]:
    """Two ranks, three steps of 1.0; by rank and step, others, or none."""
    plain = {(rank, step): ONE for rank in (0, 1) for step in (0, 1, 2)} | changed
    found = {place[::-1]: pattern for place, pattern in plain.items() if pattern is not None}
    return {place: FloatBits.from_bits(pattern) for place, pattern in found.items()}


@pytest.mark.parametrize(
    ("left", "right", "differing", "ulps", "words"),
    [
        ({}, {}, (), 0.0, "Δloss is zero: the same bits in 3 shared steps on 2 ranks."),
        ({}, {(1, 2): PLUS3}, (2,), 3.0, "at most 3 ulp (step 2, rank 1)"),
        ({(0, 1): ZERO}, {(0, 1): MINUS_ZERO}, (1,), 0.0, "by the sign of a zero"),
        ({(0, 1): NAN}, {(0, 1): OTHER_NAN}, (1,), 0.0, "1 is NaN or infinite"),
        ({}, {(1, 2): None}, (), 0.0, "without a counterpart in the other run: 1."),
    ],
    ids=["equal", "another rank", "signed zero", "two NaNs", "lost"],
)  # fmt: skip
def test_differing_losses_are_in_words(
    left: Any, right: Any, differing: tuple[int, ...], ulps: float, words: str
) -> None:
    """A flat zero is stated with how much it covers; what no distance shows is a difference."""
    curve = loss_curve(losses(left), losses(right), 7)
    assert curve is not None
    assert (curve.rank, curve.differing, max(curve.delta_ulps, default=0.0)) == (0, differing, ulps)
    assert words in curve.words
    assert loss_curve(losses(left), {}, 0) is None


def test_the_loss_picture_follows_the_scheme_and_fetches_nothing() -> None:
    """Dark and light are both inside; NaN and huge distances are drawn as plain text."""
    curve = loss_curve(losses({}), losses({(1, 1): NAN, (0, 2): HUGE}), 0)
    assert curve is not None
    uri = loss_figure(curve)
    assert uri == loss_figure(curve)
    text = base64.b64decode(uri.partition(",")[2]).decode()
    words = " ".join(ET.fromstring(text).itertext())
    for word in ("differs first at step 1", "NaN or infinite"):
        assert word in words
    assert "prefers-color-scheme:dark" in text
    assert not any(word in text for word in ("#01020", "<!DOCTYPE", "mathdefault"))


def test_the_map_counts_tensors_that_differ_by_step_and_rank(tmp_path: Path) -> None:
    """The state before step 0 first."""
    writer = Writer(tmp_path / "run")
    writer.add("a", 2, "attn", candidate={"edit": drift})
    writer.add("b", 2, "attn", candidate={"stop": 18, "what": "hang", "message": "m", "culprit": 1})
    folder = RunFolder.open(writer.write())
    maps, places = [], []
    for case in folder.cases:
        runs = folder.load_run(case.reference), folder.load_run(case.candidate)
        found = state_map(*runs, "candidate")
        assert found is not None
        maps.append(found)
        places.append({g.group: {p: n for p, n in g.counts.items() if n} for g in found.groups})
    found, differing = maps[0], places[0]
    assert (found.steps[0], found.ranks, found.equal) == (BEFORE, (0, 1), ("samples", "rng"))
    assert list(differing) == [LOSS, "grads", "weights", "optim"]
    assert differing["weights"] == {(step, 1): 1 for step in range(7, 20)}
    assert (min(differing["grads"]), min(differing[LOSS])) == ((8, 1), (9, 0))
    (words,) = (group.words for group in found.groups if group.group == "weights")
    assert "first at step 7 on rank 1, in 13 of 42" in words
    missing = {(step, rank): MISSING for step in (18, 19) for rank in (0, 1)}
    assert places[1] == dict.fromkeys(
        (LOSS, "samples", "grads", "weights", "optim", "rng"), missing
    )


def test_modules_that_differ_are_mapped_in_the_order_of_the_program() -> None:
    """Calls by step and rank, as the check compares them: a place counts only of a lost call."""
    rows = list(TAPS)
    held = [text[at : at + TAP_HEX_CHARS] for text in [CANDIDATE.ranks[1].steps[2].taps]
            for at in range(0, len(text), TAP_HEX_CHARS)]  # fmt: skip
    for name in ("layers.0.attn:gradient[0]", "layers.1.attn:output[1]"):
        place = rows.index(name)
        held[place] = "0" * DIGEST_HEX_CHARS + held[place][DIGEST_HEX_CHARS:]
    moved = rows.index("layers.0.attn:output[0]")
    held[moved] = held[moved][:DIGEST_HEX_CHARS] + "0000000a"
    lost = rows.index("layers.1.attn:gradient[0]")
    held[lost] = held[lost][:DIGEST_HEX_CHARS] + NEVER_RAN
    found = state_map(REFERENCE, edit(CANDIDATE, 1, 2, taps="".join(held)), "candidate")
    assert found is not None
    assert [group.group for group in found.groups] == [
        "layers.1.attn:output", "layers.1.attn:gradient", "layers.0.attn:gradient",
    ]  # fmt: skip
    for group in found.groups:
        assert {place: n for place, n in group.counts.items() if n} == {(2, 1): 1}
        assert (group.noun, group.num_tensors) == ("call", 2)
    assert (found.equal[-1], found.num_more) == ("1 tap", 0)
    assert state_map(REFERENCE, CANDIDATE, "candidate").groups == ()  # type: ignore[union-attr]


def test_a_module_that_only_one_run_calls_is_mapped_as_the_check_compares_it() -> None:
    """Replays of a program's graphs call no module, which is no difference; nor is it equal."""
    reference, candidate = (
        configured(run, program={"target": "x.py"}) for run in (REFERENCE, CANDIDATE)
    )
    for rank, record in ((r.rank, step) for r in CANDIDATE.ranks for step in r.steps):
        held = [record.taps[at * TAP_HEX_CHARS :][:TAP_HEX_CHARS] for at in range(len(TAPS))]
        never = [row[:DIGEST_HEX_CHARS] + NEVER_RAN if name.startswith("layers.1.") else row
                 for name, row in zip(TAPS, held, strict=True)]  # fmt: skip
        candidate = edit(candidate, rank, record.step, taps="".join(never))
    found = state_map(reference, candidate, "candidate")
    assert found is not None
    assert (found.groups, found.equal[-1]) == ((), "2 taps")


@pytest.mark.parametrize(("ranks", "steps"), [(2, 20), (64, 40), (3, 900)])
def test_a_map_is_drawn_with_a_title_for_every_place(ranks: int, steps: int) -> None:
    """However many steps and ranks, the first difference is in a title and the picture is small."""
    shown = StateMap(role="candidate", steps=tuple(range(BEFORE, steps)), equal=(), groups=(),
                     ranks=tuple(range(ranks)))  # fmt: skip
    counts = {(step, rank): int(step >= 7 and rank == 1) for step in shown.steps
              for rank in shown.ranks}  # fmt: skip
    group = GroupMap(group="weights", noun="tensor", num_tensors=4, counts=counts)
    picture = ET.fromstring(state_figure(shown, group))
    assert picture.get("aria-label") == group.words
    assert float(str(picture.get("width"))) <= 44 + 120 * 9 + 1
    titles = [title.text or "" for title in picture.iter("title")]
    told = [title.split()[1].rstrip(",:") for title in titles if "rank 1: 1 of 4 ten" in title]
    assert any(word == "init" or int(word) <= 7 for word in told)
    assert any(title.startswith(("step init", "steps init to")) for title in titles)
