"""A run that is not whole is found, by its own name; and what graphs owe."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks import complete
from harness.checks.complete import Flaw, find_flaw, launches
from harness.checks.evidence import Runs
from harness.checks.judge import judge
from harness.records import EndRecord, ErrorRecord, EventRecord, GraphUse, RankExit, RunResult
from tests.unit.harness.checks.conftest import Edits, Lab, flaw_of, place_of

LATE = "line 7: step record after end"
LAB, EDIT = Lab(), Edits()
Break = Callable[[Any], Any]


def start(**changes: Any) -> Break:
    """Change the start record of rank 0."""

    def broken(run: Any) -> Any:
        return EDIT.rank(run, 0, start=dataclasses.replace(run.ranks[0].start, **changes))

    return broken


def end(**changes: Any) -> Break:
    """The same of its end record."""

    def broken(run: Any) -> Any:
        return EDIT.rank(run, 0, end=dataclasses.replace(run.ranks[0].end, **changes))

    return broken


def ended(what: str) -> Break:
    """What the engine says of the run, with a culprit."""
    return lambda run: EDIT.outcome(run, what=what, culprit_rank=1)


def digest(group: str, change: Callable[[str], str], step: int = 1) -> Break:
    """The same of the text of one group in a step."""

    def broken(run: RunResult) -> RunResult:
        held = run.ranks[0].steps[step].digests
        return EDIT.step(run, 0, step, digests=held | {group: change(held[group])})

    return broken


def steps(change: Callable[[Any], tuple[Any, ...]], rank: int = 0, **more: Any) -> Break:
    """The same of its step records."""
    return lambda run: EDIT.rank(run, rank, steps=change(run.ranks[rank].steps), **more)


def failed(what: str) -> ErrorRecord:
    return ErrorRecord(rank=1, step=3, what=what, type="E", message="m", traceback="")  # type: ignore[arg-type]


def exits(*codes: tuple[int, int | None]) -> Break:
    ranks = tuple(RankExit(rank=rank, code=code) for rank, code in codes)
    return lambda run: EDIT.outcome(run, ranks=ranks)


def config(**changes: Any) -> Break:
    """Another configuration under a key of its own."""

    def broken(run: RunResult) -> RunResult:
        spec = dataclasses.replace(run.spec, config=run.spec.config | changes)
        return EDIT.outcome(dataclasses.replace(run, spec=spec), key=spec.key)

    return broken


def ranks(change: Callable[[RunResult], tuple[Any, ...]]) -> Break:
    return lambda run: dataclasses.replace(run, ranks=change(run))


FLAWS: dict[str, tuple[Break, tuple[Any, ...]]] = {
    # name: (what is broken in a whole run, the flaw's (what, rank, step) as far as they are told)
    **{
        what: (ended(what), (what, 1))
        for what in ("hang", "oom", "illegal_access", "crashed", "stale_address")
    },
    "outcome of another run": (lambda run: EDIT.outcome(run, key="w2-r0-0"), ("corrupt_record",)),
    "missing step": (steps(lambda s: s[:2] + s[3:], 1), ("missing_step", 1, 2)),
    "rank absent": (ranks(lambda run: run.ranks[:1]), ("missing_rank", 1)),
    "rank empty": (steps(lambda _: (), 1, start=None, end=None), ("missing_rank", 1)),
    "no steps": (lambda run: steps(lambda _: ())(steps(lambda _: (), 1)(run)), ("empty_run",)),
    "no ranks": (ranks(lambda _: ()), ("empty_run",)),
    "line after end": (
        lambda run: EDIT.rank(run, 0, problems=("line 7: step 3 follows", LATE), after_end=(LATE,)),
        ("record_after_end", 0),
    ),
    "step past the last": (steps(lambda s: (*s, LAB.step(0, 4))), ("record_after_end", 0)),
    "error and end": (lambda run: EDIT.rank(run, 1, error=failed("oom")), ("record_after_end", 1)),
    "error": (lambda run: EDIT.rank(run, 1, error=failed("oom"), end=None), ("oom", 1, 3)),
    "error without name": (
        lambda run: EDIT.rank(run, 1, error=failed(""), end=None), ("crashed", 1, 3)
    ),
    "exit 3": (exits((0, 0), (1, 3)), ("crashed", 1)),
    "exit -9": (exits((0, 0), (1, -9)), ("killed", 1)),
    "exit unknown": (exits((0, 0), (1, None)), ("missing_rank", 1)),
    "exit missing": (exits((0, 0)), ("missing_rank", 1)),
    "no exits": (exits(), ("missing_rank", 0)),
    "exit twice": (exits((0, 0), (1, 0), (1, 0)), ("corrupt_record", 1)),
    "exit of nobody": (exits((0, 0), (1, 0), (2, 0)), ("corrupt_record", 2)),
    **{
        name: (broken, ("corrupt_record",))
        for name, broken in {
            "problem": lambda run: EDIT.rank(run, 0, problems=("line 3: not JSON",)),
            "no start": lambda run: EDIT.rank(run, 0, start=None),
            "schema": start(schema=99), "start rank": start(rank=1),
            "world size": start(world_size=3), "groups": start(tensors={"grads": ("a",)}),
            "start run": start(run="another"),
            "no end": lambda run: EDIT.rank(run, 0, end=None),
            "end steps": end(steps=3), "end rank": end(rank=1),
            "repeated step": steps(lambda s: (*s[:2], s[1], *s[2:])),
            "swapped steps": steps(lambda s: (s[1], s[0], *s[2:])),
            "step rank": lambda run: EDIT.step(run, 0, 1, rank=1),
            "microbatches": lambda run: EDIT.step(run, 0, 1, microbatch_losses=()),
            "digest group": lambda run: EDIT.step(run, 0, 1, digests={"grads": "0" * 64}),
            "digest length": digest("optim", lambda text: text[:32]),
            "digest long": digest("optim", lambda text: text + "0" * 32),
            "digest odd": digest("grads", lambda text: text[:-1]),
            "digest text": digest("rng", lambda _: "Z" * 32),
            "last digest": digest("optim", lambda text: text[:32], 3),
            "extra rank": ranks(lambda run: (*run.ranks, LAB.rank(2, run.spec))),
            "twin rank": ranks(lambda run: (*run.ranks, LAB.rank(0, run.spec))),
            "config steps": config(steps=None), "config microbatches": config(microbatches=True),
            "config graph": config(graph=["no_scope"]),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FLAWS)
def test_each_flaw_has_its_name(name: str) -> None:
    """A run with every rank, step, digest and exit code 0 is whole; one slip less, and it is not.

    Whatever is malformed is `corrupt_record`, and never an exception.
    """
    whole = LAB.run(LAB.spec())
    assert find_flaw(whole) is None
    broken, told = FLAWS[name]
    flaw = flaw_of(broken(whole))
    assert (flaw.what, flaw.rank, flaw.step)[: len(told)] == told


def test_all_ranks_that_lack_a_step_are_named(lab: Any, edit: Any) -> None:
    """Where every rank left early, none of them is singled out."""
    run = one = lab.run(lab.spec())
    for rank in (0, 1):
        run = edit.rank(run, rank, steps=run.ranks[rank].steps[:2], end=None)
    flaw = flaw_of(run)
    assert (flaw.what, flaw.rank, flaw.ranks, flaw.step) == ("missing_step", 0, (0, 1), 2)
    flaw = flaw_of(edit.rank(one, 1, steps=run.ranks[1].steps[:2], end=None))
    assert (flaw.rank, flaw.ranks) == (1, (1,))


def of_program(run: Any) -> Any:
    """The same records of a script's run."""
    config = run.spec.config | {"program": {"script": "train.py"}}
    spec = dataclasses.replace(run.spec, config=config)
    return dataclasses.replace(
        run, spec=spec, outcome=dataclasses.replace(run.outcome, key=spec.key)
    )


def without(run: Any, rank: int, group: str, edit: Any) -> Any:
    """The run in which a rank holds no tensor of a group."""
    records = run.ranks[rank]
    start = dataclasses.replace(records.start, tensors=records.start.tensors | {group: ()})
    of_initial = {group: ""} if group in records.initial.digests else {}
    initial = dataclasses.replace(records.initial, digests=records.initial.digests | of_initial)
    run = edit.rank(run, rank, start=start, initial=initial)
    for step, record in enumerate(records.steps):
        run = edit.step(run, rank, step, digests=record.digests | {group: ""})
    return run


@pytest.mark.parametrize("group", ["grads", "weights", "optim"])
def test_empty_digest_proves_nothing(lab: Any, edit: Any, group: str) -> None:
    """A run that digests no tensor of a group is not whole; one rank alone may own no row."""
    run = lab.run(lab.spec())
    flaws = []
    for rank in (0, 1):
        run = without(run, rank, group, edit)
        flaws.append(find_flaw(run))
    assert flaws[0] is None
    assert getattr(flaws[1], "what", "") == "empty_run"


@pytest.mark.parametrize(
    ("graph", "replays", "whole"),
    [((), 0, True), ((), 1, False), (("attn",), 16, True), (("attn",), 0, False)],
)
def test_graphs_must_replay(
    lab: Any, edit: Any, graph: tuple[str, ...], replays: int, whole: bool
) -> None:
    """A graphed run whose graphs never ran proves nothing; an eager one must not replay any."""
    run = lab.run(lab.spec(graph=graph))
    end = dataclasses.replace(run.ranks[1].end, replays=replays)
    flaw = find_flaw(edit.rank(run, 1, end=end))
    assert (flaw is None) == whole
    assert whole or getattr(flaw, "what", "") == "not_replayed"


def test_empty_rng_is_allowed(lab: Any, edit: Any) -> None:
    """A rank without random state is still whole."""
    run = lab.run(lab.spec())
    assert find_flaw(without(run, 0, "rng", edit)) is None


@pytest.mark.parametrize("builtin", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        None, {"rank": 0}, {"weights": None}, {"optim": None}, {"rng": None}, {"weights": ""},
        {"weights": "g" * 64}, {"more": "0" * 32},
    ],
)  # fmt: skip
def test_the_state_before_step_0_is_whole(
    lab: Any, edit: Any, changes: dict[str, Any] | None, builtin: bool
) -> None:
    """Of every rank of every program: a run without it would be compared from step 0 on only."""
    run = lab.run(lab.spec())
    if not builtin:
        run = of_program(run)
    assert find_flaw(run) is None
    initial = run.ranks[1].initial
    if changes is None:
        initial = None
    elif "rank" in changes:
        initial = dataclasses.replace(initial, **changes)
    else:
        digests = {g: text for g, text in (initial.digests | changes).items() if text is not None}
        initial = dataclasses.replace(initial, digests=digests)
    flaw = flaw_of(edit.rank(run, 1, initial=initial))
    assert (flaw.what, flaw.rank, flaw.step) == ("corrupt_record", 1, None)


@pytest.mark.parametrize("tensors", [None, (), ("targets",)])
def test_the_builtin_trainer_records_what_it_reads(lab: Any, edit: Any, tensors: Any) -> None:
    """Without digests of tokens nobody could say whether ranks read the same samples."""
    run = lab.run(lab.spec())
    start = run.ranks[1].start
    named = {g: names for g, names in (start.tensors | {"samples": tensors}).items() if names}
    if tensors == ():
        named["samples"] = ()
    run = edit.rank(run, 1, start=dataclasses.replace(start, tensors=named))
    for step, record in enumerate(run.ranks[1].steps):
        digests = {g: text for g, text in record.digests.items() if g in named}
        if "samples" in named:
            digests["samples"] = "0" * 32 * len(named["samples"])
        run = edit.step(run, 1, step, digests=digests)
    flaw = flaw_of(run)
    assert (flaw.what, flaw.rank) == ("corrupt_record", 1)
    assert find_flaw(of_program(run)) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_removing_any_record_is_detected(lab: Any, edit: Any, data: st.DataObject) -> None:
    """Without any one start, step or end record of any rank, a run is not whole."""
    run = lab.run(lab.spec())
    rank = data.draw(st.integers(0, lab.world_size - 1))
    place = data.draw(st.integers(-2, lab.steps - 1))
    if place == -2:
        broken = edit.rank(run, rank, start=None)
    elif place == -1:
        broken = edit.rank(run, rank, end=None)
    else:
        steps = run.ranks[rank].steps
        broken = edit.rank(run, rank, steps=steps[:place] + steps[place + 1 :])
    flaw = flaw_of(broken)
    assert flaw.rank == rank
    if place >= 0:
        assert (flaw.what, flaw.step) == ("missing_step", place)


EXPERTS = {"layers": 3, "experts": 4, "top_k": 2, "expert_ffn": 32, "first_dense_layers": 1}
MOE = {"model": EXPERTS}


def with_uses(lab: Any, edit: Any, graph: tuple[str, ...], change: Any, **config: Any) -> Any:
    """A run of those scopes whose rank 1 states the uses that `change` makes of those owed."""
    spec = lab.spec(graph=graph)
    run = lab.run(dataclasses.replace(spec, config=spec.config | config))
    end: EndRecord = run.ranks[1].end
    uses = tuple(changed for use in end.graphs if (changed := change(use)) is not None)
    return edit.rank(run, 1, end=dataclasses.replace(end, graphs=uses, replays=launches(uses)))


def difference(flaw: Flaw | None) -> tuple[Any, ...]:
    assert flaw is not None
    assert (flaw.what, flaw.rank) == ("not_replayed", 1)
    found = flaw.difference
    assert found is not None
    return found.tensor, found.quantity, found.reference, found.candidate


@pytest.mark.parametrize(
    ("graph", "config"),
    [
        (("attn",), {}),
        (("attn", "mlp"), {}),
        (("layer",), {"parallel": {"pp": 2}}),
        (("attn", "moe_router", "moe_preprocess"), MOE),
        (("mlp", "moe"), {"model": {**EXPERTS, "capacity_factor": 2.0}}),
        (("full_iteration",), {}),
        (("full_iteration",), {"graph_optimizer": False}),
        (("attn",), {"graph_layers": [1, 1]}),
    ],
)
def test_all_that_is_owed_is_enough(lab: Any, edit: Any, graph: Any, config: Any) -> None:
    """A rank that captured and replayed everything has no flaw, on any kind of layer."""
    assert find_flaw(with_uses(lab, edit, graph, lambda use: use, **config)) is None


def only(wanted: Callable[[GraphUse], bool]) -> Callable[[GraphUse], GraphUse | None]:
    return lambda use: use if wanted(use) else None


def replays(number: Callable[[GraphUse], int]) -> Callable[[GraphUse], GraphUse]:
    return lambda use: dataclasses.replace(use, replays=number(use))


@pytest.mark.parametrize(
    ("graph", "change", "told"),
    [
        (("attn",), only(lambda use: use.layer != 1), ("layers.1 attn", "captures.forward", 1, 0)),
        (("attn", "mlp"), only(lambda use: use.scope == "attn"),
         ("layers.0 mlp", "captures.forward", 1, 0)),
        (("attn",), replays(lambda use: 1 if (use.layer, use.direction) == (1, "forward") else 4),
         ("layers.1 attn", "replays.forward", 4, 1)),
        (("attn",), replays(lambda use: 1 if (use.layer, use.direction) == (1, "backward") else 4),
         ("layers.1 attn", "replays.backward", 4, 1)),
        # One layer's graph in place of another's: the sum is right, the parts are not.
        (("attn",), replays(lambda use: 8 if use.layer == 0 else 0),
         ("layers.0 attn", "replays.forward", 4, 8)),
        (("full_iteration",), only(lambda use: use.direction == "gradients"),
         ("full_iteration", "captures.optimizer", 1, 0)),
    ],
)  # fmt: skip
def test_what_ran_eagerly_is_named(lab: Any, edit: Any, graph: Any, change: Any, told: Any) -> None:
    """A layer, a scope, calls of one direction, the optimizer's part of a whole step."""
    where, quantity, *numbers = told
    found = difference(find_flaw(with_uses(lab, edit, graph, change)))
    assert found == (where, quantity, *map(str, numbers))


def test_optimizer_that_was_to_stay_outside(lab: Any, edit: Any) -> None:
    """What nobody asked to be captured is a difference, too."""
    spec = lab.spec(graph=("full_iteration",))
    inside = lab.run(spec).ranks[1].end
    outside = lab.run(dataclasses.replace(spec, config=spec.config | {"graph_optimizer": False}))
    run = edit.rank(outside, 1, end=inside)
    assert difference(find_flaw(run)) == ("full_iteration", "replays.optimizer", "0", "2")


@pytest.mark.parametrize("layer", [0, 2])
def test_stages_owe_their_own_layers(lab: Any, edit: Any, layer: int) -> None:
    """A rank of the second stage owes layers 2 and 3, not those of the first."""
    config = {"parallel": {"pp": 2}, "model": {"layers": 4}}

    def change(use: GraphUse) -> GraphUse | None:
        assert use.layer in (2, 3)
        return use if use.layer != layer else None

    flaw = find_flaw(with_uses(lab, edit, ("attn",), change, **config))
    assert (flaw is None) == (layer == 0)


def test_verdict_of_a_partial_fallback(lab: Any, edit: Any) -> None:
    """The verdict is a failure that carries scope and layer as fields."""
    case = lab.case()
    reference, control, candidate = lab.legs()
    end = candidate.ranks[0].end
    broken = dataclasses.replace(
        end, graphs=tuple(u for u in end.graphs if u.layer == 0), replays=end.replays // 2
    )
    verdict = judge(case, reference, control, edit.rank(candidate, 0, end=broken))
    assert (verdict.outcome, verdict.what) == ("failed", "not_replayed")
    where = place_of(verdict)
    assert (where.rank, where.tensor) == (0, "layers.1 attn")


def test_sums_must_fit(lab: Any, edit: Any) -> None:
    """Launches that no part states are a flaw."""
    run = lab.run(lab.spec(graph=("attn",)))
    end = run.ranks[1].end
    run = edit.rank(run, 1, end=dataclasses.replace(end, replays=end.replays + 1))
    assert difference(find_flaw(run)) == ("", "replays", "16", "17")


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [(("attn", "mlp"), None), (("attn",), "mlp"), ((), "attn")],
)
def test_parts_must_be_compiled(lab: Any, edit: Any, compiled: Any, expected: Any) -> None:
    """A part that the compiler made no code of is named, also in a run that replays all else."""
    spec = lab.spec(graph=("attn",))
    run = lab.run(dataclasses.replace(spec, config=spec.config | {"compile": ["attn", "mlp"]}))
    for rank in (0, 1):
        said = compiled if rank else ("attn", "mlp")
        run = edit.rank(run, rank, end=dataclasses.replace(run.ranks[rank].end, compiled=said))
    flaw = find_flaw(run)
    if expected is None:
        assert flaw is None
    else:
        assert flaw is not None
        where = place_of(flaw)
        assert (flaw.what, flaw.rank, where.tensor) == ("not_compiled", 1, expected)


def test_stages_owe_parts_that_their_layers_have(lab: Any, edit: Any) -> None:
    """The first stage has no experts here, the second no dense feed-forward."""
    config = {
        "parallel": {"pp": 2}, "compile": ["mlp", "experts"],
        "model": {**EXPERTS, "layers": 2, "capacity_factor": 2.0},
    }  # fmt: skip
    spec = lab.spec()
    run = lab.run(dataclasses.replace(spec, config=spec.config | config))
    for rank, part in enumerate(("mlp", "experts")):
        run = edit.rank(run, rank, end=dataclasses.replace(run.ranks[rank].end, compiled=(part,)))
    assert find_flaw(run) is None


LEAST = {"min_replays": 3}


def event(rank: int, name: str, step: int = 2, **detail: Any) -> EventRecord:
    about = {"graph": 1, "maker": "torch.cuda.graph", "place": "train.py:7", "replay": 5}
    return EventRecord(rank=rank, step=step, name=name, detail={**about, **detail})


def captured(rank: int, number: int) -> EventRecord:
    """What a rank says of its graphs as it ends."""
    return EventRecord(rank=rank, step=4, name="cuda_graphs", detail={"graphs": [{}] * number})


def replayed(lab: Any, edit: Any, replays: dict[int, int]) -> Any:
    """A candidate whose ranks have replayed that often; 4 times where nothing is said."""
    run = lab.run(lab.spec(graph=("attn",)))
    for rank, number in replays.items():
        end = run.ranks[rank].end
        run = edit.rank(run, rank, end=dataclasses.replace(end, replays=number))
    return run


def answer(lab: Any, candidate: Any, least: dict[str, int] = LEAST) -> Any:
    return complete.graphs(Runs(case=None, reference=None, control=None, candidate=candidate), least)


@pytest.mark.parametrize("least", [LEAST, {"min_replays": 4}, {"min_replays": 0}, {}])
def test_enough_replays_pass(lab: Any, edit: Any, least: dict[str, int]) -> None:
    """At the minimum and above it, with all of them counted; a capture is no finding."""
    candidate = edit.rank(
        replayed(lab, edit, {}), 1, events=(event(1, "graph_captured"), captured(1, 2))
    )
    found = answer(lab, candidate, least)
    assert (found.outcome, found.what, found.difference) == ("passed", "", None)
    assert found.figures["replays"] == 2 * 16


def test_a_program_that_nobody_asks_for_replays_has_none(lab: Any) -> None:
    """Eager runs pass; the number is 0."""
    found = answer(lab, lab.run(lab.spec()), {})
    assert (found.outcome, found.figures["replays"]) == ("passed", 0)


@pytest.mark.parametrize(
    ("replays", "rank", "number"),
    [({0: 0, 1: 0}, 0, 0), ({0: 2, 1: 2}, 0, 2), ({1: 2}, 1, 2), ({0: 900, 1: 0}, 1, 0)],
)
def test_too_few_replays(
    lab: Any, edit: Any, replays: dict[int, int], rank: int, number: int
) -> None:
    """The first rank below the minimum is named with its number: no rank stands in for another."""
    found = answer(lab, replayed(lab, edit, replays))
    assert (found.outcome, found.what) == ("failed", "not_replayed")
    difference = found.difference
    assert (difference.rank, difference.quantity) == (rank, "replays")
    assert (difference.reference, difference.candidate) == ("3", str(number))


def test_the_last_of_many_ranks(make_lab: Any, edit: Any) -> None:
    """Of 11 ranks, 10 is looked at as well; the first is named in whatever order they are read."""
    lab = make_lab(world_size=11)
    found = answer(lab, replayed(lab, edit, {10: 0}))
    assert (found.what, found.difference.rank) == ("not_replayed", 10)
    candidate = replayed(lab, edit, {10: 0, 9: 1})
    candidate = dataclasses.replace(candidate, ranks=candidate.ranks[::-1])
    found = answer(lab, candidate)
    assert (found.difference.rank, found.difference.candidate) == (9, "1")


def test_a_rank_that_did_not_end_has_replayed_nothing(lab: Any, edit: Any) -> None:
    """Its replays are not known, so they prove nothing."""
    found = answer(lab, edit.rank(replayed(lab, edit, {}), 1, end=None))
    assert (found.what, found.difference.rank) == ("not_replayed", 1)
    assert found.difference.candidate == "0"


@pytest.mark.parametrize(("events", "says"), [(1, "it captured 2 graphs"), (0, "captured none")])
def test_what_a_rank_without_replays_captured(lab: Any, edit: Any, events: int, says: str) -> None:
    """Captured and never replayed is another mistake than not captured."""
    candidate = edit.rank(
        replayed(lab, edit, {0: 0}), 0, events=(event(0, "other"), captured(0, 2))[: 2 * events]
    )
    assert says in answer(lab, candidate).message


def test_nothing_recorded_is_no_pass(lab: Any) -> None:
    """Without a record there is nothing to look at, asked for replays or not."""
    run = lab.run(lab.spec())
    empty = dataclasses.replace(run, ranks=())
    for least in (LEAST, {}):
        found = answer(lab, empty, least)
        assert (found.outcome, found.what) == ("error", "not_run")


@pytest.mark.parametrize("least", [LEAST, {}])
@pytest.mark.parametrize(
    ("name", "detail", "tensor", "says"),
    [
        ("static_gradient", {"parameter": "0.weight"}, "0.weight", "replay 5 overwrites it"),
        ("static_activation", {"forward": 0}, "", "forward graph was replayed again"),
    ],
)
def test_static_memory_in_use(
    lab: Any, edit: Any, name: str, detail: dict[str, Any], tensor: str, says: str,
    least: dict[str, int],
) -> None:  # fmt: skip
    """A failure with step, rank, tensor and graph, asked for replays or not."""
    candidate = edit.rank(
        replayed(lab, edit, {}), 1, events=(event(1, "graph_captured"), event(1, name, **detail))
    )
    found = answer(lab, candidate, least)
    assert (found.outcome, found.what) == ("failed", "static_buffer")
    difference = found.difference
    assert (difference.step, difference.rank) == (2, 1)
    assert (difference.quantity, difference.tensor) == (name, tensor)
    assert says in found.message
    assert "graph 1 of torch.cuda.graph, train.py:7" in found.message


def test_static_memory_comes_before_missing_replays(lab: Any, edit: Any) -> None:
    """What is wrong says more than what is missing."""
    candidate = edit.rank(
        replayed(lab, edit, {0: 0}), 1, events=(event(1, "static_gradient", parameter="w"),)
    )
    assert answer(lab, candidate).what == "static_buffer"
