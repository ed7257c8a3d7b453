"""The taps check names the first call in program order that differs; how rows become calls."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from harness.bisect.divergence import RunPair
from harness.records import NEVER_RAN, TAP_HEX_CHARS, RunResult
from tests.support import run_records as lab
from tests.support.run_records import CANDIDATE, REFERENCE, ask, edit, place, said
from tests.unit.harness.bisect.small_model import run_of, tapped

NAMES = tuple(lab.TAPS)
NEVER = "0" * 32 + NEVER_RAN
At = tuple[int, int]
"""Rank and step."""


def row(run: RunResult, rank: int, step: int, name: str) -> str:
    start = NAMES.index(name) * TAP_HEX_CHARS
    return run.ranks[rank].steps[step].taps[start : start + TAP_HEX_CHARS]


def rewrite(run: RunResult, at: At, rows: dict[str, str]) -> RunResult:
    """The run with rows of one (rank, step) replaced."""
    text = "".join(rows.get(name, row(run, *at, name)) for name in NAMES)
    return edit(run, *at, taps=text)


def other(run: RunResult, changes: dict[At, list[str]]) -> RunResult:
    """The run with other digests of the named calls, in the same places."""
    for at, names in changes.items():
        run = rewrite(run, at, {name: "ab" * 16 + row(run, *at, name)[32:] for name in names})
    return run


def silenced(run: RunResult, steps: range, *taps: str) -> RunResult:
    """The run with modules that never ran in these steps, on any rank."""
    gone = dict.fromkeys((name for name in NAMES if name.partition("[")[0] in taps), NEVER)
    for records in run.ranks:
        for step in steps:
            run = rewrite(run, (records.rank, step), gone)
    return run


OUT, GRAD = "layers.{}.attn:output[{}]", "layers.{}.attn:gradient[{}]"


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        # A later step never comes first, whatever differs in it.
        ({(0, 1): [GRAD.format(1, 1)], (0, 2): [OUT.format(0, 0)]}, (1, 0, GRAD.format(1, 1))),
        # Forward comes before backward, though it ran later.
        ({(0, 1): [GRAD.format(1, 0), OUT.format(1, 1)]}, (1, 0, OUT.format(1, 1))),
        # The first microbatch comes first.
        ({(0, 1): [OUT.format(0, 1), OUT.format(1, 0)]}, (1, 0, OUT.format(1, 0))),
        # Stages in the order of the data: forward up, backward down, whatever rank holds them.
        ({(0, 1): [OUT.format(1, 0)], (1, 1): [OUT.format(0, 0)]}, (1, 1, OUT.format(0, 0))),
        ({(0, 1): [GRAD.format(0, 0)], (1, 1): [GRAD.format(1, 0)]}, (1, 1, GRAD.format(1, 0))),
        # Of equals the first rank.
        ({(1, 3): [OUT.format(0, 0)], (0, 3): [OUT.format(0, 0)]}, (3, 0, OUT.format(0, 0))),
    ],
)
def test_the_first_in_program_order_is_named(changes: dict[At, list[str]], first: Any) -> None:
    """Step, then direction, then microbatch, then stage, then rank; with both digests."""
    answer = ask("taps", REFERENCE, other(CANDIDATE, changes))
    found = answer.difference
    assert found is not None
    assert said(answer) == ("failed", "diverged")
    assert (found.step, found.rank, found.tensor) == first
    assert found.reference == row(REFERENCE, first[1], first[0], first[2])[:32]
    assert found.candidate == "ab" * 16
    assert answer.figures["differing_pairs"] == len(changes)


def test_each_rank_and_the_last_row_is_compared() -> None:
    """Of 16 ranks, in the last step; in a stage the place in the step decides, as it ran."""
    reference, _, candidate = lab.Lab(world_size=16).legs()
    for rank in (0, 8, 15):
        answer = ask("taps", reference, other(candidate, {(rank, 3): [NAMES[-1]]}))
        assert place(answer)[:2] == (3, rank)
    runs = [REFERENCE, other(CANDIDATE, {(0, 0): [GRAD.format(0, 0), GRAD.format(1, 0)]})]
    for rank in (0, 1):
        runs = [edit(run, rank, start={"tap_stages": (0,) * len(NAMES)}) for run in runs]
    answer = ask("taps", *runs)
    assert place(answer)[3] == GRAD.format(1, 0)
    assert "the gradient of the output of layers.1.attn, call 0" in answer.message


@pytest.mark.parametrize("side", [0, 1])
def test_a_call_too_few_or_a_module_in_one_run_only_differs(side: int) -> None:
    """Nothing takes it apart: it is a difference where the other run called it."""
    for steps, rows, told in (
        (range(2, 3), {OUT.format(1, 1): NEVER}, (2, 1, OUT.format(1, 1))),
        (range(2, 4), {name: NEVER for name in NAMES if "1.attn:output" in name},
         (2, 1, OUT.format(1, 0))),
    ):  # fmt: skip
        runs = [REFERENCE, CANDIDATE]
        for step in steps:
            runs[side] = rewrite(runs[side], (1, step), rows)
        found = ask("taps", *runs).difference
        assert found is not None
        assert (found.step, found.rank, found.tensor) == told
        assert (found.reference, found.candidate)[side] == "never ran"


def of_router(run: RunResult, **config: Any) -> RunResult:
    """The run with experts in place of the second layer's attention, graphs of their router."""
    graph = ["moe_router"] if run.spec.config["graph"] else []
    for rank in (0, 1):
        names = tuple(name.replace("1.attn", "1.mlp.moe") for name in NAMES)
        run = edit(run, rank, start={"taps": names})
    return lab.configured(run, graph=graph, **config)


@pytest.mark.parametrize(
    ("side", "tap", "config", "outcome"),
    [
        (1, "layers.1.attn:output", {}, "passed"),
        (1, "layers.1.attn:output", {"graph_layers": [0, 1]}, "passed"),
        # The layer past the captured ones, another module of one, and the eager run itself.
        (1, "layers.1.attn:output", {"graph_layers": [0, 0]}, "failed"),
        (1, "layers.0.attn:output", {}, "failed"), (0, "layers.1.attn:output", {}, "failed"),
    ],
)  # fmt: skip
def test_a_graph_takes_apart_what_it_holds_and_nothing_else(
    side: int, tap: str, config: Any, outcome: str
) -> None:
    """The router's graph calls what is inside of the experts: that is said and not failed."""
    runs = [of_router(REFERENCE), of_router(CANDIDATE, **config)]
    runs[side] = silenced(runs[side], range(4), tap)
    answer = ask("taps", *runs)
    assert answer.outcome == outcome
    if outcome == "passed":
        assert answer.figures == {"calls": 2 * 4 * 6, "unseen": 1}
        assert "1 tap ran in one run only, layers.1.mlp.moe:output" in answer.message


# --- what compares nothing --------------------------------------------------------------------


def of_program(run: RunResult) -> RunResult:
    """The run as one of a program, of whose graphs nothing is known."""
    return lab.configured(run, program={"target": "train.py"})


def asked(run: RunResult, scenario: Sequence[str], script: str = "") -> RunResult:
    """The run of a scenario with these patterns, whose rank 0 asks for one more."""
    events = [("taps", {"patterns": [script]})] if script else []
    return lab.told(lab.configured(run, taps=list(scenario)), 0, *events)


BOTH = ("layers.*.attn", "layers.*.attn:gradient")
GONE = ("layers.0.attn:output", "layers.1.attn:output")


@pytest.mark.parametrize(
    ("patterns", "gone", "steps", "told"),
    [
        # Steps before the capture are eager in both runs: they are no evidence of graphs.
        (BOTH, (GONE, ()), range(2, 4), "step 3 layers.0.attn:output ran in the candidate alone"),
        (BOTH, ((), GONE), range(2, 4), "step 3 layers.0.attn:output ran in the reference alone"),
        (BOTH, (GONE, GONE), range(4), "ran in neither run"),
        (BOTH[::-1], (GONE, GONE), range(4), "ran in neither run"),
        (BOTH, ((), GONE[:1]), range(2, 4), ""), (BOTH, ((), GONE), range(2), ""),
        ((), (GONE, GONE), range(4), ""),
        ((), ((), (*GONE, *(tap.replace("output", "gradient") for tap in GONE))), range(4),
         "no tapped module ran in both runs"),
    ],
)  # fmt: skip
def test_a_pattern_that_looked_at_nothing_is_an_error(
    patterns: Any, gone: Any, steps: range, told: str
) -> None:
    """In the last step each pattern has a module that ran in both runs."""
    runs = [of_program(REFERENCE), asked(of_program(CANDIDATE), patterns)]
    runs = [silenced(run, steps, *taps) for run, taps in zip(runs, gone, strict=True)]
    answer = ask("taps", *runs)
    assert said(answer) == (("error", "not_run") if told else ("passed", ""))
    assert told in answer.message


NOTHING = ("x.*:output",)
FIRST = ("layers.0.attn",)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (((*FIRST, *NOTHING),), ((*FIRST, *NOTHING),), "x.*:output"),
        ((FIRST, "nothing"), (FIRST,), "nothing"), (((), ""), ((), "nothing"), "nothing"),
        ((FIRST, *FIRST), (FIRST,), ""),
    ],
)  # fmt: skip
def test_a_pattern_without_a_module_compares_nothing(ours: Any, theirs: Any, told: str) -> None:
    """Whoever states it, a scenario or the script of one run."""
    answer = ask("taps", asked(REFERENCE, *ours), asked(CANDIDATE, *theirs))
    assert said(answer) == (("error", "not_run") if told else ("passed", ""))
    assert told in answer.message


def test_other_taps_or_none_are_no_pass() -> None:
    """Rows are matched by place: the same names in another order would be other modules."""
    bare: dict[str, Any] = {"taps": (), "tap_stages": ()}
    untapped = [edit(edit(r, 0, start=bare), 1, start=bare) for r in (REFERENCE, CANDIDATE)]
    turned = edit(CANDIDATE, 1, start={"taps": NAMES[::-1]})
    for pair in (untapped, (REFERENCE, untapped[1]), (REFERENCE, turned)):
        assert said(ask("taps", *pair)) == ("error", "unsupported")
    assert said(ask("taps", asked(untapped[0], BOTH), untapped[1])) == ("error", "not_run")


# --- rows of modules that are called more often -----------------------------------------------

# Two layers that share `rope`, which each calls twice; one microbatch, a row past it.
ORDER = (
    "layers.0:input", "rope:input", "rope:output", "rope:input", "rope:output", "layers.0:output",
    "layers.1:input", "rope:input", "rope:output", "rope:input", "rope:output", "layers.1:output",
    "layers.1:gradient", "rope:gradient", "layers.0:gradient", "rope:gradient",
)  # fmt: skip


def run_with(
    microbatches: int, calls: Sequence[str], other: Sequence[int] = (), stage: int = 0
) -> RunResult:
    """A run whose every step makes these calls; those at the places of `other` saw other things."""
    held: dict[str, tuple[str, int]] = {}
    seen: dict[str, int] = {}
    for at, tap in enumerate(calls):
        name = f"{tap}[{min(seen.get(tap, 0), microbatches)}]"
        seen[tap] = seen.get(tap, 0) + 1
        before, first = held.get(name, ("", at))
        held[name] = (f"{before}{at}{'!' if at in other else ''}", first)
    names = [f"{tap}[{row}]" for tap in dict.fromkeys(calls) for row in range(microbatches + 1)]
    rows = {
        n: hashlib.md5(held[n][0].encode()).hexdigest() + f"{held[n][1]:08x}"
        if n in held
        else NEVER
        for n in names
    }
    return tapped(run_of(), microbatches, rows, stages=[stage] * len(rows))


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        # A layer and all after it: the shared module's row, begun before, is not blamed.
        (range(5, 16), "layers.0:output[0]"),
        # The first call of a shared module is known: what it was given differs first.
        (range(1, 16), "rope:input[0]"),
        # All that it was given is equal, what it returned is not: it, not its user.
        ([8, 10, *range(11, 16)], "rope:output[1]"),
        # Backward makes its calls in another order: which one a row is of is not known.
        ([13, 14, 15], "layers.0:gradient[0]"),
    ],
)
def test_the_first_row_of_shared_modules(wrong: Sequence[int], first: str) -> None:
    """The check and the search name the same."""
    runs = run_with(1, ORDER), run_with(1, ORDER, wrong)
    assert place(ask("taps", *runs))[3] == first
    assert next(row.name for row in RunPair(*runs).rows(0) if row.differs) == first
