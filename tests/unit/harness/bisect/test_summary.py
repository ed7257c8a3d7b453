"""Screen and page: the answer is in the first lines, in 80 columns, and all of it is text."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.bisect.causes import FoundCause, FoundCauses
from harness.bisect.commits import Commit, CommitSearch
from harness.bisect.experiments import AskedQuestion, Failure
from harness.bisect.found import Element, Location, Numbers, Operator, Value
from harness.bisect.render import (
    Findings,
    LiveSearch,
    element,
    page,
    print_findings,
)
from harness.bisect.repro import MinimalCase
from harness.records import OperatorCall
from tests.support import records

ELEMENT = Element(
    index=(3, 17), local=49, dtype="float32", reference_bits="3f8a21c4", candidate_bits="3f8a21c5",
    reference="1.0791554", candidate="1.0791556", num_different=1, numel=1024, ulps=1,
)  # fmt: skip
NUMBERS = Numbers(dtype="float32", shape=(4,), least=0.0, greatest=1.0, mean=0.5, num_infinite=1)
OPERATOR = Operator(
    reference=OperatorCall(operator="add", stack=("a.py:1 main", "a.py:3 f")),
    candidate=OperatorCall(operator="add", stack=("a.py:1 main", "a.py:2 f")),
    values=(
        Value(name="input 0", of="w", is_equal=True, reference=NUMBERS, candidate=NUMBERS,
              element=None),
        Value(name="output 0", of="", is_equal=False, reference=None, candidate=NUMBERS,
              element=ELEMENT),
    ),
)  # fmt: skip
PLACE = Location(
    step=7, phase="backward", microbatch=1, module="layers.0.attn", tensor="layers.0.attn:gradient",
    quantity="taps.gradient", rank=3, ranks=(3,), near="before", collective="reduce-scatter",
    element=ELEMENT, operator=OPERATOR, unknown=("rank: `not` known",),
    evidence=tuple(f"sentence {n} [red]x[/red]" for n in range(30)),
)  # fmt: skip
DIVERGED = Failure(outcome="failed", what="diverged")
CAUSE = FoundCause(changes=("graph: attn",), unproven=(), failure=DIVERGED)
CAUSES = FoundCauses(
    candidates=("graph: attn", "stress: jitter"), complete=True, notes=("a note",), causes=(CAUSE,)
)
ALONE = MinimalCase(path="repro/x.yaml", ranks=2, layers=1, steps=4, made=("steps 8 -> 4",))
BAD = Commit(hash="3f1c0a9" * 5, subject="break it")
FINDINGS = Findings(
    case_id="dp4-ulp_s7-attn", scenario="planted", outcome="failed", what="diverged",
    message="w differs | first", command="harness bisect dp4", place=PLACE, causes=CAUSES,
    least_case=ALONE, num_runs=2, seconds=1.5,
    commits=CommitSearch(
        first=BAD, suspects=(BAD,), skipped=(), num_commits=8, num_runs=5
    ),
    questions=(AskedQuestion(words="does it fail?", answer="failed", runs=2, seconds=1.5),),
)  # fmt: skip


def test_the_answer_is_in_the_first_lines_of_one_screen() -> None:
    """What, where, and the first wrong element with both bit patterns; 40 lines of 80 columns."""
    file = io.StringIO()
    print_findings(Console(file=file, width=200, highlight=False), FINDINGS, Path("bisect.md"))
    lines = file.getvalue().splitlines()
    for word in ("failed diverged", "dp4-ulp_s7-attn", "step 7", "backward", "microbatch 1",
                 "layers.0.attn", "rank 3", "layers.0.attn:gradient"):  # fmt: skip
        assert word in "\n".join(lines[:3])
    assert "0x3f8a21c4 became 0x3f8a21c5" in "\n".join(lines[:4])
    assert len(lines) <= 40
    assert all(len(line.rstrip()) <= 80 for line in lines[1:-2])
    assert "[red]x[/red]" in "\n".join(lines)


def test_the_page_has_all_of_it() -> None:
    """Every sentence, every question, the command; all of it is text, in an indented block."""
    text = page(FINDINGS)
    assert all(line.startswith("    ") or not line for line in text.splitlines()[1:])
    for part in (
        "sentence 29", "1. does it fail? failed (2 runs, 1.5 s)", "again: harness bisect dp4",
        "rank: `not` known", "graph: attn (failed diverged); 1 of 2 differences between",
        "a note", "harness run repro/x.yaml (2 ranks, 1 layer, 4 steps)", "steps 8", "break it",
        "w differs | first",
        "stack        a.py:1 main", "stack        a.py:2 f", "stack (ref)  a.py:3 f",
        "input 0      w; equal: float32[4] from 0 to 1, mean 0.5, 1 not finite",
        "output 0     [3, 17]: 0x3f8a21c4 became 0x3f8a21c5",
    ):  # fmt: skip
        assert part in text
    assert Findings.from_json(FINDINGS.to_json()) == FINDINGS


@pytest.mark.parametrize(
    ("lows", "highs", "num", "told"),
    [
        ((0, 0, 63), (0, 31, 63), 32, "32 of 2,048 elements differ: [0, :, 63] of [1, 32, 64]"),
        ((0, 2, 0), (0, 5, 63), 9, "9 of 2,048 elements differ, within [0, 2:6, :] of [1, 32, 64]"),
        ((0, 0, 0), (0, 31, 63), 2048, "2,048 of 2,048 elements differ"),
        ((0, 3, 7), (0, 3, 7), 1, "1 of 2,048 elements differ"),
    ],
)
def test_a_pattern_of_elements_is_told(lows: Any, highs: Any, num: int, told: str) -> None:
    """A column, rows, or a box that holds them: whoever reads it need not divide."""
    found = replace(ELEMENT, numel=2048, shape=(1, 32, 64), lows=lows, highs=highs)
    assert element(replace(found, num_different=num)).endswith(f"; {told}")
    assert element(ELEMENT).endswith("differ")


def test_on_a_terminal_runs_are_counted_against_no_total() -> None:
    """How many questions follow is not known; answers stand above what is under way."""
    now, file = [0.0], io.StringIO()
    view = LiveSearch(Console(file=file, force_terminal=True, width=80), lambda: now[0])
    with view:
        view.run_finished(records.outcome("w2-x", what="crashed", message="boom"))
        now[0] = 12.0
        view.answered(3, replace(FINDINGS.questions[0], answer="failed crashed", runs=1))
        live = Console(file=io.StringIO(), width=80, record=True)
        live.print(view.render())
    assert "1 run made, 12 s" in live.export_text()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "  3. does it fail? failed crashed (1 run, 1.5 s)" in plain
    assert "boom" not in plain
