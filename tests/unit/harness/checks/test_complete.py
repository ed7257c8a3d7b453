"""A run that is not whole is found, by its own name; and what graphs owe."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.checks.complete import find_flaw, launches
from harness.records import ErrorRecord, EventRecord, GraphUse, RankExit, RunResult
from harness.soaking import SoakSpec
from tests.unit.harness.checks.conftest import (
    CANDIDATE,
    LAB,
    REFERENCE,
    Lab,
    ask,
    configured,
    edit_outcome,
    edit_rank,
    edit_step,
    flaw_of,
    place,
    said,
)

Break = Callable[[Any], Any]
LATE = "line 7: step record after end"


def of(name: str, rank: int = 0, /, **changes: Any) -> Break:
    """Change the start, end or initial record of a rank."""
    return lambda run: edit_rank(run, rank, **{name: changes})


def rank(number: int, **changes: Any) -> Break:
    return lambda run: edit_rank(run, number, **changes)


def steps(change: Callable[[Any], Any], rank: int = 0, **more: Any) -> Break:
    return lambda run: edit_rank(run, rank, steps=tuple(change(run.ranks[rank].steps)), **more)


def digest(group: str, change: Callable[[str], str], step: int = 1, rank: int = 0) -> Break:
    def broken(run: RunResult) -> RunResult:
        text = run.ranks[rank].steps[step].digests[group]
        return edit_step(run, rank, step, digests={group: change(text)})

    return broken


def initial(change: Callable[[dict[str, str]], dict[str, str]]) -> Break:
    return lambda run: of("initial", 1, digests=change(run.ranks[1].initial.digests))(run)


def exits(*codes: int | None) -> Break:
    states = tuple(RankExit(rank=rank, code=code) for rank, code in enumerate(codes))
    return lambda run: edit_outcome(run, ranks=states)


def ended(what: Any, **more: Any) -> Break:
    return lambda run: edit_outcome(run, what=what, **more)


def error(what: Any) -> ErrorRecord:
    return ErrorRecord(rank=1, step=3, what=what, type="E", message="m", traceback="")


def twice(run: RunResult) -> RunResult:
    states = (*run.outcome.ranks, RankExit(rank=1, code=0))
    return edit_outcome(run, ranks=states)


def without(groups: str, ranks: tuple[int, ...]) -> Break:
    """Ranks that hold no tensor of a group."""

    def broken(run: RunResult) -> RunResult:
        for number in ranks:
            records = run.ranks[number]
            run = of("start", number, tensors=records.start.tensors | {groups: ()})(run)  # type: ignore[union-attr]
            held = records.initial.digests  # type: ignore[union-attr]
            run = of("initial", number, digests=held | ({groups: ""} if groups in held else {}))(
                run
            )
            for step in range(len(records.steps)):
                run = edit_step(run, number, step, digests={groups: ""})
        return run

    return broken


FLAWS: dict[str, tuple[Break, tuple[Any, ...]]] = {
    # what is broken in a whole run, and the flaw's (what, rank, step) as far as they are told
    **{
        what: (ended(what, culprit_rank=1), (what, 1))
        for what in ("hang", "oom", "illegal_access", "crashed", "stale_address")
    },
    "outcome of another run": (lambda run: edit_outcome(run, key="w2-r0-0"), ("corrupt_record",)),
    "undecided": (lambda run: edit_outcome(run, undecided=True), ("shared_gpu",)),
    "missing step": (steps(lambda s: s[:2] + s[3:], 1), ("missing_step", 1, 2)),
    "missing last step": (steps(lambda s: s[:3], 1), ("missing_step", 1, 3)),
    "rank absent": (lambda run: replace(run, ranks=run.ranks[:1]), ("missing_rank", 1)),
    "rank empty": (rank(1, steps=(), start=None, end=None), ("missing_rank", 1)),
    "no steps": (lambda run: rank(0, steps=())(rank(1, steps=())(run)), ("empty_run",)),
    "no ranks": (lambda run: replace(run, ranks=()), ("empty_run",)),
    "line after end": (
        rank(0, problems=("line 7: step 3 follows", LATE), after_end=(LATE,)),
        ("record_after_end", 0),
    ),
    "step past the last": (steps(lambda s: (*s, LAB.step(0, 4))), ("record_after_end", 0)),
    "error and end": (rank(1, error=error("oom")), ("record_after_end", 1)),
    "error": (rank(1, error=error("oom"), end=None), ("oom", 1, 3)),
    "error without name": (rank(1, error=error(""), end=None), ("crashed", 1, 3)),
    "exit 3": (exits(0, 3), ("crashed", 1)), "exit -9": (exits(0, -9), ("killed", 1)),
    "exit unknown": (exits(0, None), ("missing_rank", 1)),
    "exit missing": (exits(0), ("missing_rank", 1)), "no exits": (exits(), ("missing_rank", 0)),
    "exit twice": (twice, ("corrupt_record", 1)),
    "exit of nobody": (exits(0, 0, 0), ("corrupt_record", 2)),
    **{
        f"no {group}": (without(group, (0, 1)), ("empty_run",))
        for group in ("grads", "weights", "optim")
    },
    **{
        name: (broken, ("corrupt_record",))
        for name, broken in {
            "problem": rank(0, problems=("line 3: not JSON",)), "no start": rank(0, start=None),
            "schema": of("start", schema=99), "start rank": of("start", rank=1),
            "world size": of("start", world_size=3), "start run": of("start", run="another"),
            "groups": of("start", tensors={"grads": ("a",)}),
            "taps without stages": of("start", tap_stages=(0,)),
            "no end": rank(0, end=None), "end steps": of("end", steps=3),
            "end rank": of("end", rank=1),
            "repeated step": steps(lambda s: (*s[:2], s[1], *s[2:])),
            "swapped steps": steps(lambda s: (s[1], s[0], *s[2:])),
            "step rank": lambda run: edit_step(run, 0, 1, rank=1),
            "microbatches": lambda run: edit_step(run, 0, 1, microbatch_losses=()),
            "digest group": steps(lambda s: (replace(s[0], digests={"grads": "0" * 64}), *s[1:])),
            "digest length": digest("optim", lambda text: text[:32]),
            "digest long": digest("optim", lambda text: text + "0" * 32),
            "digest odd": digest("grads", lambda text: text[:-1]),
            "digest text": digest("rng", lambda _: "Z" * 32),
            "last digest": digest("optim", lambda text: text[:32], 3),
            "other rank's digest": digest("optim", lambda text: text[:32], 2, rank=1),
            "taps short": lambda run: edit_step(run, 1, 2, taps="0" * 319),
            "taps text": lambda run: edit_step(run, 1, 2, taps="G" * 320),
            "extra rank": lambda run: replace(run, ranks=(*run.ranks, LAB.rank(2, run.spec))),
            "twin rank": lambda run: replace(run, ranks=(*run.ranks, LAB.rank(0, run.spec))),
            "config steps": lambda run: configured(run, steps=None),
            "config microbatches": lambda run: configured(run, microbatches=True),
            "config graph": lambda run: configured(run, graph=["no_scope"]),
        }.items()
    },
    **{
        f"initial, {name}": (broken, ("corrupt_record", 1, None))
        for name, broken in {
            "none": rank(1, initial=None), "rank": of("initial", 1, rank=0),
            "without weights": initial(lambda d: {"optim": d["optim"], "rng": d["rng"]}),
            "without optim": initial(lambda d: {"weights": d["weights"], "rng": d["rng"]}),
            "without rng": initial(lambda d: {"weights": d["weights"], "optim": d["optim"]}),
            "short": initial(lambda d: d | {"weights": ""}),
            "text": initial(lambda d: d | {"weights": "g" * 64}),
            "more": initial(lambda d: d | {"more": "0" * 32}),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FLAWS)
def test_each_flaw_has_its_name(name: str) -> None:
    """A run with every rank, step, digest and exit code 0 is whole; one slip less, and it is not.

    Whatever is malformed is `corrupt_record`, and never an exception.
    """
    broken, told = FLAWS[name]
    flaw = flaw_of(broken(REFERENCE))
    assert (flaw.what, flaw.rank, flaw.step)[: len(told)] == told


@pytest.mark.parametrize(
    "whole",
    [lambda run: run, without("rng", (0,)), without("optim", (0,)),
     lambda run: configured(run, program={"target": "train.py"})],
)  # fmt: skip
def test_what_is_whole_has_no_flaw(whole: Break) -> None:
    """A rank may own no row of a group, or no generator; other programs record the same."""
    assert find_flaw(whole(REFERENCE)) is None


@pytest.mark.parametrize("at", [(r, s) for r in (0, 1) for s in range(-2, 4)])
def test_removing_any_record_is_detected(at: tuple[int, int]) -> None:
    """Without any one start, end or step record of any rank, a run is not whole."""
    number, step = at
    gone: dict[str, Any] = {"start": None} if step == -2 else {"end": None}
    if step >= 0:
        kept = REFERENCE.ranks[number].steps
        gone = {"steps": kept[:step] + kept[step + 1 :]}
    flaw = flaw_of(edit_rank(REFERENCE, number, **gone))
    assert flaw.rank == number
    assert step < 0 or (flaw.what, flaw.step) == ("missing_step", step)


def test_all_ranks_that_lack_a_step_are_named() -> None:
    """Where every rank left early, none of them is singled out, and how they left is said."""
    one = steps(lambda s: s[:2], 1, end=None)(REFERENCE)
    flaw = flaw_of(steps(lambda s: s[:2], 0, end=None)(one))
    assert (flaw.what, flaw.rank, flaw.ranks, flaw.step) == ("missing_step", 0, (0, 1), 2)
    assert "exited with code 0 without an end record" in flaw.message
    assert (flaw_of(one).rank, flaw_of(one).ranks) == (1, (1,))


@pytest.mark.parametrize("number", [8, 11])
def test_ranks_above_7_are_looked_at(number: int) -> None:
    """One that is gone, silent, short, or whose digest is damaged."""
    run = Lab(world_size=12).legs()[2]
    gone = replace(run, ranks=tuple(each for each in run.ranks if each.rank != number))
    silent = edit_rank(run, number, start=None, steps=(), end=None)
    for broken, told in (
        (gone, ("missing_rank", number, None)), (silent, ("missing_rank", number, None)),
        (steps(lambda s: s[:-1], number)(run), ("missing_step", number, 3)),
        (digest("optim", lambda text: text[1:], 3, number)(run), ("corrupt_record", number, 3)),
    ):  # fmt: skip
        flaw = flaw_of(broken)
        assert (flaw.what, flaw.rank, flaw.step) == told


@pytest.mark.parametrize("tokens", [None, (), ("targets",)])
def test_the_builtin_trainer_records_what_it_reads(tokens: Any) -> None:
    """Without digests of tokens nobody could say whether ranks read the same samples."""
    named = {"samples": tokens} if tokens is not None else {}
    tensors = {g: n for g, n in REFERENCE.ranks[1].start.tensors.items() if g != "samples"}  # type: ignore[union-attr]

    def plain(record: Any) -> Any:
        held = {g: text for g, text in record.digests.items() if g != "samples"}
        return replace(record, digests=held | {g: "0" * 32 * len(n) for g, n in named.items()})

    run = of("start", 1, tensors=tensors | named)(REFERENCE)
    run = steps(lambda s: map(plain, s), 1)(run)
    assert (flaw_of(run).what, flaw_of(run).rank) == ("corrupt_record", 1)
    assert find_flaw(configured(run, program={"target": "train.py"})) is None


# --- graphs and compiled parts ----------------------------------------------------------------

EXPERTS = {"layers": 3, "experts": 4, "top_k": 2, "expert_ffn": 32, "first_dense_layers": 1}


def graphed(graph: tuple[str, ...], change: Callable[[GraphUse], Any], **config: Any) -> RunResult:
    """A run of those scopes whose rank 1 states the uses that `change` makes of those owed."""
    run = LAB.run(LAB.spec(graph=graph, **config))
    changed = (change(use) for use in run.ranks[1].end.graphs)  # type: ignore[union-attr]
    uses = tuple(use for use in changed if use is not None)
    return edit_rank(run, 1, end={"graphs": uses, "replays": launches(uses)})


@pytest.mark.parametrize(
    ("graph", "config"),
    [
        (("attn",), {}), (("attn", "mlp"), {}), (("layer",), {"parallel": {"pp": 2}}),
        (("attn", "moe_router", "moe_preprocess"), {"model": EXPERTS}),
        (("mlp", "moe"), {"model": {**EXPERTS, "capacity_factor": 2.0}}),
        (("full_iteration",), {}), (("full_iteration",), {"graph_optimizer": False}),
        (("attn",), {"graph_layers": [1, 1]}),
    ],
)  # fmt: skip
def test_all_that_is_owed_is_enough(graph: Any, config: Any) -> None:
    """A rank that captured and replayed everything has no flaw, on any kind of layer."""
    assert find_flaw(graphed(graph, lambda use: use, **config)) is None


def only(wanted: Callable[[GraphUse], bool]) -> Callable[[GraphUse], GraphUse | None]:
    return lambda use: use if wanted(use) else None


def replays(number: Callable[[GraphUse], int]) -> Callable[[GraphUse], GraphUse]:
    return lambda use: replace(use, replays=number(use))


def once(layer: int, direction: str) -> Callable[[GraphUse], GraphUse]:
    """One replay where four are owed."""
    return replays(lambda use: 1 if (use.layer, use.direction) == (layer, direction) else 4)


@pytest.mark.parametrize(
    ("graph", "change", "told"),
    [
        (("attn",), only(lambda use: use.layer != 1), ("layers.1 attn", "captures.forward", 1, 0)),
        (("attn", "mlp"), only(lambda use: use.scope == "attn"),
         ("layers.0 mlp", "captures.forward", 1, 0)),
        (("attn",), once(1, "forward"), ("layers.1 attn", "replays.forward", 4, 1)),
        (("attn",), once(1, "backward"), ("layers.1 attn", "replays.backward", 4, 1)),
        # One layer's graph in place of another's: the sum is right, the parts are not.
        (("attn",), replays(lambda use: 8 if use.layer == 0 else 0),
         ("layers.0 attn", "replays.forward", 4, 8)),
        (("full_iteration",), only(lambda use: use.direction == "gradients"),
         ("full_iteration", "captures.optimizer", 1, 0)),
        (("full_iteration",), replays(lambda use: 1),
         ("full_iteration", "replays.gradients", 2, 1)),
    ],
)  # fmt: skip
def test_what_ran_eagerly_is_named(graph: Any, change: Any, told: Any) -> None:
    """A layer, a scope, calls of one direction, the optimizer's part of a whole step."""
    flaw = flaw_of(graphed(graph, change))
    found = flaw.difference
    assert found is not None
    assert (flaw.what, flaw.rank, found.rank) == ("not_replayed", 1, 1)
    got = found.tensor, found.quantity, int(found.reference), int(found.candidate)
    assert got == told


def test_replays_that_nobody_asked_for_are_a_flaw() -> None:
    """Of an eager run, of an optimizer that was to stay outside, of no part at all, of one more."""
    inside = LAB.run(LAB.spec(graph=("full_iteration",))).ranks[1].end
    outside = LAB.run(LAB.spec(graph=("full_iteration",), graph_optimizer=False))
    assert place(flaw_of(edit_rank(outside, 1, end=inside)))[2] == "replays.optimizer"
    eager = edit_rank(REFERENCE, 1, end=CANDIDATE.ranks[1].end)
    for run in (eager, of("end", 1, replays=1)(REFERENCE), of("end", 1, replays=17)(CANDIDATE)):
        assert flaw_of(run).what == "not_replayed"
    assert flaw_of(of("end", 1, replays=0)(CANDIDATE)).what == "not_replayed"


@pytest.mark.parametrize("layer", [0, 2])
def test_stages_owe_their_own_layers(layer: int) -> None:
    """A rank of the second stage owes layers 2 and 3, not those of the first."""
    config = {"parallel": {"pp": 2}, "model": {"layers": 4}}
    flaw = find_flaw(graphed(("attn",), only(lambda use: use.layer != layer), **config))
    assert (flaw is None) == (layer == 0)


@pytest.mark.parametrize(
    ("compiled", "missing"), [(("attn", "mlp"), ""), (("attn",), "mlp"), ((), "attn")]
)
def test_parts_must_be_compiled(compiled: Any, missing: str) -> None:
    """A part that the compiler made no code of is named, also in a run that replays all else."""
    run = of("end", compiled=("attn", "mlp"))(
        LAB.run(LAB.spec(graph=("attn",), compile=["attn", "mlp"]))
    )
    flaw = find_flaw(of("end", 1, compiled=compiled)(run))
    assert (flaw is None) == (missing == "")
    if flaw is not None:
        assert (flaw.what, place(flaw)) == ("not_compiled", (0, 1, "compiled", missing))


def test_stages_owe_parts_that_their_layers_have() -> None:
    """The first stage has no experts here, the second no dense feed-forward."""
    model = {**EXPERTS, "layers": 2, "capacity_factor": 2.0}
    run = LAB.run(LAB.spec(parallel={"pp": 2}, compile=["mlp", "experts"], model=model))
    run = of("end", 1, compiled=("experts",))(of("end", compiled=("mlp",))(run))
    assert find_flaw(run) is None


# --- graphs of another program ----------------------------------------------------------------


def event(rank: int, name: str, **detail: Any) -> EventRecord:
    about = {"graph": 1, "maker": "torch.cuda.graph", "place": "train.py:7", "replay": 5}
    return EventRecord(rank=rank, step=2, name=name, detail={**about, **detail})


@pytest.mark.parametrize(
    ("run", "least", "told"),
    [
        (CANDIDATE, 3, 32), (CANDIDATE, 16, 32), (CANDIDATE, None, 32), (REFERENCE, None, 0),
        (CANDIDATE, 17, ("not_replayed", (0, 0, "replays", ""))),
        (of("end", 1, replays=2)(CANDIDATE), 3, ("not_replayed", (0, 1, "replays", ""))),
        (edit_rank(CANDIDATE, 1, end=None), 3, ("not_replayed", (0, 1, "replays", ""))),
        (of("end", 10, replays=0)(Lab(world_size=11).legs()[2]), 3,
         ("not_replayed", (0, 10, "replays", ""))),
        *(
            (edit_rank(of("end", replays=0)(CANDIDATE), 1, events=(event(1, name, parameter="w"),)),
             least, ("static_buffer", (2, 1, name, "w")))
            for name in ("static_gradient", "static_activation") for least in (3, None)
        ),
    ],
)  # fmt: skip
def test_graphs_of_a_program(run: RunResult, least: int | None, told: Any) -> None:
    """Each rank replays at least so often; memory in use is a failure, asked for or not."""
    answer = ask("graphs", REFERENCE, run, **({} if least is None else {"min_replays": least}))
    if isinstance(told, int):
        assert said(answer) == ("passed", "")
        assert answer.figures["replays"] == told
    else:
        assert (said(answer), place(answer)) == (("failed", told[0]), told[1])
        assert "train.py:7" in answer.message or told[0] == "not_replayed"


def test_nothing_recorded_is_no_pass() -> None:
    """Without a record there is nothing to look at; what was captured and not replayed is said."""
    assert ask("graphs", REFERENCE, replace(CANDIDATE, ranks=())).outcome == "error"
    silent = of("end", 0, replays=0)(CANDIDATE)
    held = EventRecord(rank=0, step=4, name="cuda_graphs", detail={"graphs": [{}, {}]})
    for run, told in ((silent, "none"), (edit_rank(silent, 0, events=(held,)), "2 graphs")):
        assert f"captured {told}" in ask("graphs", REFERENCE, run, min_replays=1).message


# --- soaks ------------------------------------------------------------------------------------


def soaked(by: Any, amount: float, *changes: Break, **detail: Any) -> RunResult:
    """The candidate as a soak of its 4 steps and 16 replays, whose ranks say so."""
    spec = replace(CANDIDATE.spec, soak=SoakSpec(by=by, amount=amount))
    run = edit_outcome(replace(CANDIDATE, spec=spec), key=spec.key)
    for change in changes:
        run = change(run)
    for records in run.ranks:
        end = records.end
        assert end is not None
        about = {"steps": end.steps, "replays": end.replays, "trained_s": 12.0} | detail
        made = EventRecord(name="soaked", rank=records.rank, step=0, detail=about)
        run = edit_rank(run, records.rank, events=(made,))
    return run


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (soaked("duration", 12.0), None), (soaked("duration", 12.1), ("missing_step", 0)),
        (soaked("replays", 16), None), (soaked("replays", 17), ("not_replayed", 0)),
        (soaked("steps", 4), None), (soaked("steps", 5), ("missing_step", 0)),
        (soaked("duration", 12, steps=3), ("corrupt_record", 0)),
        (soaked("duration", 12, replays=15), ("corrupt_record", 0)),
        (soaked("duration", 12, trained_s="long"), ("corrupt_record", 0)),
        (soaked("duration", 12, trained_s=True), ("corrupt_record", 0)),
        (edit_rank(soaked("replays", 16), 1, events=()), ("corrupt_record", 1)),
        (soaked("duration", 9, steps(lambda s: s[:3], 1), of("end", 1, steps=3)),
         ("missing_step", 1)),
    ],
)  # fmt: skip
def test_what_a_soak_asked_for_is_what_counts(run: RunResult, told: Any) -> None:
    """Seconds of rank 0, replays of every rank, as each states them; all end at one step."""
    flaw = find_flaw(run)
    assert (flaw and (flaw.what, flaw.rank)) == told
