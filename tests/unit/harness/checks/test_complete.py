"""A run that is not whole is found, by its own name; and what graphs and soaks owe."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig, to_plain
from harness.checks.complete import find_flaw, launches
from harness.records import ABSENT, GraphUse, RankExit, RunResult
from harness.values import SoakSpec
from tests.support import run_records as lab
from tests.support.records import error
from tests.support.run_records import CANDIDATE, LAB, REFERENCE, at, edit, flaw_of, place

Break = Callable[[Any], Any]
LATE = "line 7: step record after end"


def rank(number: int, **changes: Any) -> Break:
    return lambda run: edit(run, number, **changes)


def ended(**changes: Any) -> Break:
    return lambda run: edit(run, **changes)


def steps(change: Callable[[Any], Any], rank: int = 0, **more: Any) -> Break:
    return lambda run: edit(run, rank, steps=tuple(change(run.ranks[rank].steps)), **more)


def exits(*codes: int | None) -> Break:
    return ended(ranks=tuple(RankExit(rank=rank, code=code) for rank, code in enumerate(codes)))


def of_start(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Break:
    """Rank 1 names other tensors; it has the digests of them."""

    def broken(run: RunResult) -> RunResult:
        start = run.ranks[1].start
        assert start is not None
        tensors = change(start.tensors)
        texts = {group: "0" * 32 * len(names) for group, names in tensors.items()}
        run = steps(lambda s: [replace(each, digests=texts) for each in s], 1)(run)
        return edit(run, 1, start=replace(start, tensors=tensors))

    return broken


def without(group: str, ranks: tuple[int, ...]) -> Break:
    """Ranks that hold no tensor of a group."""

    def broken(run: RunResult) -> RunResult:
        for number in ranks:
            run = edit(run, number, start={"tensors": {group: ()}})
            before = {group: ""} if group in lab.STATE else {}
            run = edit(run, number, -1, digests=before)
            for step in range(len(run.ranks[number].steps)):
                run = edit(run, number, step, digests={group: ""})
        return run

    return broken


def absent(group: str) -> Break:
    """Every rank names the group's tensors, and holds none at any step."""

    def broken(run: RunResult) -> RunResult:
        for number, records in enumerate(run.ranks):
            assert records.start is not None
            none = {group: ABSENT * len(records.start.tensors[group])}
            for step in range(len(records.steps)):
                run = edit(run, number, step, digests=none)
        return run

    return broken


def initial(*groups: str) -> Break:
    return lambda run: edit(run, 1, initial=replace(
        run.ranks[1].initial, digests={g: lab.digests_of(g, 1, -1) for g in groups}
    ))  # fmt: skip


FLAWS: dict[str, tuple[Break, tuple[Any, ...]]] = {
    # what is broken in a whole run, and the flaw's (what, rank, step) as far as they are told
    "hang": (ended(what="hang", culprit_rank=1), ("hang", 1)),
    "stale": (ended(what="stale_address", culprit_rank=1), ("stale_address", 1)),
    "outcome of another run": (ended(key="w2-r0-0"), ("corrupt_record",)),
    "undecided": (ended(undecided=True), ("shared_gpu",)),
    "missing step": (steps(lambda s: s[:2] + s[3:], 1), ("missing_step", 1, 2)),
    "missing last step": (steps(lambda s: s[:3], 1), ("missing_step", 1, 3)),
    "rank absent": (lambda run: replace(run, ranks=run.ranks[:1]), ("missing_rank", 1)),
    "rank empty": (rank(1, steps=(), start=None, end=None), ("missing_rank", 1)),
    "no steps": (lambda run: rank(0, steps=())(rank(1, steps=())(run)), ("empty_run",)),
    "no ranks": (lambda run: replace(run, ranks=()), ("empty_run",)),
    "line after end": (rank(0, problems=("line 7: step 3 follows", LATE), after_end=(LATE,)),
                       ("record_after_end", 0)),
    "step past the last": (steps(lambda s: (*s, LAB.step(0, 4))), ("record_after_end", 0)),
    "error and end": (rank(1, error=error(1, what="oom")), ("record_after_end", 1)),
    "error": (rank(1, error=error(1, step=3, what="oom"), end=None), ("oom", 1, 3)),
    "error without name": (rank(1, error=error(1, step=3, what=""), end=None), ("crashed", 1, 3)),
    "exit 3": (exits(0, 3), ("crashed", 1)), "exit -9": (exits(0, -9), ("killed", 1)),
    "exit unknown": (exits(0, None), ("missing_rank", 1)),
    "exit missing": (exits(0), ("missing_rank", 1)),
    "exit of nobody": (exits(0, 0, 0), ("corrupt_record",)),
    "exit twice": (ended(ranks=(RankExit(rank=1, code=0),) * 2), ("corrupt_record",)),
    **{f"no {g}": (without(g, (0, 1)), ("empty_run",)) for g in ("grads", "weights", "optim")},
    **{f"absent {g}": (absent(g), ("empty_run",)) for g in ("grads", "weights", "optim")},
    **{name: (broken, ("corrupt_record",)) for name, broken in {
        "problem": rank(0, problems=("line 3: not JSON",)), "no start": rank(0, start=None),
        "schema": rank(0, start={"schema": 99}), "start rank": rank(0, start={"rank": 1}),
        "world size": rank(0, start={"world_size": 3}), "run": rank(0, start={"run": "another"}),
        "groups": of_start(lambda t: {"grads": t["grads"]}),
        "taps without stages": rank(0, start={"tap_stages": (0,)}),
        "no tokens": of_start(lambda t: t | {"samples": ("targets",)}),
        "no samples": of_start(lambda t: {g: n for g, n in t.items() if g != "samples"}),
        "no end": rank(0, end=None), "end steps": rank(0, end={"steps": 3}),
        "end rank": rank(0, end={"rank": 1}), "step rank": at(0, 1, rank=1),
        "repeated step": steps(lambda s: (*s[:2], s[1], *s[2:])),
        "swapped steps": steps(lambda s: (s[1], s[0], *s[2:])),
        "microbatches": at(0, 1, microbatch_losses=()),
        "digest group": steps(lambda s: (replace(s[0], digests={"grads": "0" * 64}), *s[1:])),
        "digest length": at(0, 1, digests={"optim": "0" * 32}),
        "digest long": at(0, 1, digests={"optim": "0" * 96}),
        "digest text": at(0, 1, digests={"rng": "Z" * 32}),
        "last digest": at(0, 3, digests={"optim": "0" * 32}),
        "other rank's digest": at(1, 2, digests={"optim": "0" * 32}),
        "taps short": at(1, 2, taps="0" * 319), "taps text": at(1, 2, taps="G" * 320),
        "extra rank": lambda run: replace(run, ranks=(*run.ranks, LAB.rank(2, run.spec))),
        "twin rank": lambda run: replace(run, ranks=(*run.ranks, LAB.rank(0, run.spec))),
        "config steps": lambda run: lab.configured(run, steps=None),
        "config microbatches": lambda run: lab.configured(run, microbatches=True),
        "config graph": lambda run: lab.configured(run, graph=["no_scope"]),
    }.items()},
    **{f"initial, {name}": (broken, ("corrupt_record", 1, None)) for name, broken in {
        "none": rank(1, initial=None), "rank": at(1, -1, rank=0),
        "without weights": initial("optim", "rng"), "without optim": initial("weights", "rng"),
        "without rng": initial("weights", "optim"), "short": at(1, -1, digests={"weights": ""}),
        "text": at(1, -1, digests={"weights": "g" * 64}),
        "more": at(1, -1, digests={"more": "0" * 32}),
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", FLAWS)
def test_each_flaw_has_its_name(name: str) -> None:
    """One slip less than whole; whatever is malformed is `corrupt_record`, never an exception."""
    broken, expected = FLAWS[name]
    flaw = flaw_of(broken(REFERENCE))
    assert (flaw.what, flaw.rank, flaw.step)[: len(expected)] == expected


def test_too_many_steps_are_counted() -> None:
    """A scenario that says a smaller number than the program makes is told both."""
    flaw = flaw_of(steps(lambda s: (*s, LAB.step(0, 4)))(REFERENCE))
    assert flaw.message == "rank 0 recorded 5 steps, expected 4"


@pytest.mark.parametrize(
    "whole",
    [lambda run: run, without("rng", (0,)), without("optim", (0,)),
     *(lambda run, it=it: lab.configured(it(run), program={"target": "train.py"})
       for it in (without("samples", (1,)), without("optim", (0, 1))))],
)  # fmt: skip
def test_what_is_whole_has_no_flaw(whole: Break) -> None:
    """A rank may own no row of a group, or no generator; a user's optimizer may keep nothing."""
    assert find_flaw(whole(REFERENCE)) is None


def elsewhere(run: RunResult, first: int) -> RunResult:
    """A run that resumes in the layout `first` from another, with the records that it has then."""
    for number in range(2):
        run = steps(lambda s: s[first:], number)(run)
    return lab.configured(run, resume_at=2, resume_from=to_plain(ParallelConfig(pp=2)))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (elsewhere(REFERENCE, 2), None),
        (elsewhere(REFERENCE, 3), ("missing_step", 0, 2)),
        (elsewhere(REFERENCE, 1), ("corrupt_record", 0, 1)),
        (elsewhere(REFERENCE, 4), ("empty_run", None, None)),
        (lab.configured(elsewhere(REFERENCE, 2), resume_from=to_plain(ParallelConfig())),
         ("missing_step", 0, 0)),
        (lab.configured(elsewhere(REFERENCE, 2), resume_at=0), ("missing_step", 0, 0)),
        (lab.configured(elsewhere(REFERENCE, 2), resume_at="2"), ("missing_step", 0, 0)),
    ],
)  # fmt: skip
def test_steps_in_another_layout_have_no_records(run: RunResult, expected: Any) -> None:
    """And all that follow do; a run that resumes in its own layout has all."""
    flaw = find_flaw(run)
    assert (flaw and (flaw.what, flaw.rank, flaw.step)) == expected


@pytest.mark.parametrize("number", [8, 11])
def test_ranks_above_7_are_looked_at(number: int) -> None:
    """One that is gone, silent, short, or whose digest is damaged."""
    run = lab.Lab(world_size=12).legs()[2]
    gone = replace(run, ranks=tuple(each for each in run.ranks if each.rank != number))
    for broken, expected in (
        (gone, ("missing_rank", number, None)),
        (edit(run, number, start=None, steps=(), end=None), ("missing_rank", number, None)),
        (steps(lambda s: s[:-1], number)(run), ("missing_step", number, 3)),
        (edit(run, number, 3, digests={"optim": ""}), ("corrupt_record", number, 3)),
    ):
        flaw = flaw_of(broken)
        assert (flaw.what, flaw.rank, flaw.step) == expected


# --- graphs and compiled parts ----------------------------------------------------------------

EXPERTS = {"layers": 3, "experts": 4, "top_k": 2, "expert_ffn": 32, "first_dense_layers": 1}


def graphed(graph: tuple[str, ...], change: Callable[[GraphUse], Any], **config: Any) -> RunResult:
    """A run of those scopes whose rank 1 states the uses that `change` makes of those owed."""
    run = LAB.run(LAB.spec(graph=graph, **config))
    assert run.ranks[1].end is not None
    uses = tuple(u for use in run.ranks[1].end.graphs if (u := change(use)) is not None)
    return edit(run, 1, end={"graphs": uses, "replays": launches(uses)})


def only(wanted: Callable[[GraphUse], bool]) -> Callable[[GraphUse], GraphUse | None]:
    return lambda use: use if wanted(use) else None


def replays(number: Callable[[GraphUse], int]) -> Callable[[GraphUse], GraphUse]:
    return lambda use: replace(use, replays=number(use))


def once(layer: int, direction: str) -> Callable[[GraphUse], GraphUse]:
    """One replay where four are owed."""
    return replays(lambda use: 1 if (use.layer, use.direction) == (layer, direction) else 4)


@pytest.mark.parametrize(
    ("graph", "change", "config", "expected"),
    [
        *((graph, lambda use: use, config, None) for graph, config in (
            (("attn", "mlp"), {}), (("layer",), {"parallel": {"pp": 2}}),
            (("attn", "moe_router", "moe_preprocess"), {"model": EXPERTS}),
            (("mlp", "moe"), {"model": {**EXPERTS, "capacity_factor": 2.0}}),
            (("full_iteration",), {}), (("full_iteration",), {"graph_optimizer": False}),
            (("attn",), {"graph_layers": [1, 1]}),
        )),
        (("attn",), only(lambda use: use.layer != 1), {},
         ("layers.1 attn", "captures.forward", 1, 0)),
        (("attn", "mlp"), only(lambda use: use.scope == "attn"), {},
         ("layers.0 mlp", "captures.forward", 1, 0)),
        (("attn",), once(1, "forward"), {}, ("layers.1 attn", "replays.forward", 4, 1)),
        (("attn",), once(1, "backward"), {}, ("layers.1 attn", "replays.backward", 4, 1)),
        # One layer's graph in place of another's: the sum is right, the parts are not.
        (("attn",), replays(lambda use: 8 if use.layer == 0 else 0), {},
         ("layers.0 attn", "replays.forward", 4, 8)),
        (("full_iteration",), only(lambda use: use.direction == "gradients"), {},
         ("full_iteration", "captures.optimizer", 1, 0)),
        (("full_iteration",), replays(lambda use: 1), {},
         ("full_iteration", "replays.gradients", 2, 1)),
        # A rank of the second stage owes layers 2 and 3, not those of the first.
        *((("attn",), only(lambda use, layer=layer: use.layer != layer),  # type: ignore[misc]
           {"parallel": {"pp": 2}, "model": {"layers": 4}}, expected)
          for layer, expected in ((0, None), (2, ("layers.2 attn", "captures.forward", 1, 0)))),
    ],
)  # fmt: skip
def test_what_ran_eagerly_is_named(graph: Any, change: Any, config: Any, expected: Any) -> None:
    """A layer, a scope, calls of one direction, the optimizer's part of a whole step."""
    flaw = find_flaw(graphed(graph, change, **config))
    assert (flaw is None) == (expected is None)
    if flaw is not None and flaw.difference is not None:
        found = flaw.difference
        assert (flaw.what, flaw.rank, found.rank) == ("not_replayed", 1, 1)
        got = found.tensor, found.quantity, int(found.reference), int(found.candidate)
        assert got == expected


def test_replays_that_nobody_asked_for_are_a_flaw() -> None:
    """Of an eager run, of an optimizer that was to stay outside, of no part at all, of one more."""
    inside = LAB.run(LAB.spec(graph=("full_iteration",))).ranks[1].end
    outside = LAB.run(LAB.spec(graph=("full_iteration",), graph_optimizer=False))
    assert place(flaw_of(edit(outside, 1, end=inside)))[2] == "replays.optimizer"
    assert flaw_of(edit(REFERENCE, 1, end=CANDIDATE.ranks[1].end)).what == "not_replayed"
    for run, number in ((REFERENCE, 1), (CANDIDATE, 0), (CANDIDATE, 17)):
        assert flaw_of(edit(run, 1, end={"replays": number})).what == "not_replayed"


@pytest.mark.parametrize(
    ("config", "compiled", "missing"),
    [
        *(({"graph": ("attn",), "compile": ["attn", "mlp"]}, (("attn", "mlp"), own), missing)
          for own, missing in ((("attn", "mlp"), ""), (("attn",), "mlp"), ((), "attn"))),
        # The first stage has no experts here, the second no dense feed-forward.
        ({"parallel": {"pp": 2}, "compile": ["mlp", "experts"],
          "model": {**EXPERTS, "layers": 2, "capacity_factor": 2.0}}, (("mlp",), ("experts",)), ""),
    ],
)  # fmt: skip
def test_parts_must_be_compiled(config: Any, compiled: Any, missing: str) -> None:
    """A part that the compiler made no code of is named, also in a run that replays all else."""
    run = LAB.run(LAB.spec(**config))
    for number in (0, 1):
        run = edit(run, number, end={"compiled": compiled[number]})
    flaw = find_flaw(run)
    assert (flaw is None) == (missing == "")
    if flaw is not None:
        assert (flaw.what, place(flaw)) == ("not_compiled", (0, 1, "compiled", missing))


# --- graphs of another program ----------------------------------------------------------------

FOUND = {"graph": 1, "maker": "torch.cuda.graph", "place": "train.py:7", "parameter": "w"}
NONE = edit(CANDIDATE, 0, end={"replays": 0})


@pytest.mark.parametrize(
    ("run", "least", "expected", "says"),
    [
        (CANDIDATE, 16, 32, ""), (CANDIDATE, None, 32, ""), (REFERENCE, None, 0, ""),
        (CANDIDATE, 17, (0, 0, "replays", ""), "16 times, expected at least 17"),
        (edit(CANDIDATE, 1, end={"replays": 2}), 3, (0, 1, "replays", ""), ""),
        (edit(CANDIDATE, 1, end=None), 3, (0, 1, "replays", ""), "captured none"),
        (NONE, 1, (0, 0, "replays", ""), "captured none"),
        (lab.told(NONE, 0, ("cuda_graphs", {"graphs": [{}, {}]})), 1, (0, 0, "replays", ""),
         "captured 2 graphs"),
        *((lab.told(NONE, 1, (name, FOUND)), least, (2, 1, name, "w"), "train.py:7")
          for name in ("static_gradient", "static_activation") for least in (3, None)),
    ],
)  # fmt: skip
def test_graphs_of_a_program(run: RunResult, least: int | None, expected: Any, says: str) -> None:
    """Each rank replays at least so often; memory in use is a failure, asked for or not."""
    answer = lab.ask("graphs", REFERENCE, run, **({} if least is None else {"min_replays": least}))
    assert says in answer.message
    assert ("captured" in answer.message) == ("captured" in says)
    if isinstance(expected, int):
        assert (answer.outcome, answer.figures["replays"]) == ("passed", expected)
    else:
        what = "not_replayed" if expected[2] == "replays" else "static_buffer"
        assert (lab.said(answer), place(answer)) == (("failed", what), expected)
    assert lab.ask("graphs", REFERENCE, replace(run, ranks=())).outcome == "error"


# --- soaks ------------------------------------------------------------------------------------


def soaked(by: Any, amount: float, *changes: Break, trained_s: Any = 12.0) -> RunResult:
    """The candidate as a soak of its 4 steps and 16 replays, whose ranks say how long it was."""
    spec = replace(CANDIDATE.spec, soak=SoakSpec(by=by, amount=amount))
    run = edit(replace(CANDIDATE, spec=spec), key=spec.key)
    for number in (0, 1):
        run = lab.told(run, number, ("soaked", {"trained_s": trained_s}))
    for change in changes:
        run = change(run)
    return run


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (soaked("duration", 12.0), None), (soaked("duration", 12.1), ("missing_step", 0)),
        (soaked("replays", 16), None), (soaked("replays", 17), ("not_replayed", 0)),
        (soaked("steps", 4), None), (soaked("steps", 5), ("missing_step", 0)),
        (soaked("duration", 12, trained_s="long"), ("corrupt_record", 0)),
        (soaked("duration", 12, trained_s=True), ("corrupt_record", 0)),
        (soaked("replays", 16, rank(1, events=())), ("corrupt_record", 1)),
        (soaked("duration", 9, steps(lambda s: s[:3], 1), rank(1, end={"steps": 3})),
         ("missing_step", 1)),
    ],
)  # fmt: skip
def test_what_a_soak_asked_for_is_what_counts(run: RunResult, told: Any) -> None:
    """Seconds of rank 0, replays of every rank, as each states them; all end at one step."""
    flaw = find_flaw(run)
    assert (flaw and (flaw.what, flaw.rank)) == told


@pytest.mark.parametrize(
    ("asked", "skipped", "steps"),
    [("none", 0, []), ("first", 0, [0]), ("first", 2, [2]), ("all", 0, [0, 1, 2, 3])],
)
def test_sketches_that_a_run_owes_are_there(asked: Any, skipped: int, steps: list[int]) -> None:
    """Without them gradients would be within any tolerance; the first step is one that is taken."""
    spec = replace(CANDIDATE.spec, sketch=asked)
    run = edit(replace(CANDIDATE, spec=spec), key=spec.key)
    for step in range(skipped):
        run = edit(edit(run, 0, step, skipped="inf"), 1, step, skipped="inf")
    numbers = {"a.weight": (1.0, 2.0, 2.0)}
    for step in steps:
        flaw = flaw_of(run)
        assert (flaw.what, flaw.rank, flaw.step) == ("corrupt_record", 0, step)
        run = edit(run, 0, step, sketches=numbers)
    for step in steps:
        run = edit(run, 1, step, sketches=numbers)
    assert find_flaw(run) is None
