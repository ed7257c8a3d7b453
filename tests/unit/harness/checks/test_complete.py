"""A run that is not whole is told apart from one that is, and by its own name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks.complete import find_flaw
from harness.records import ErrorRecord, RankExit, What


def test_whole_run_has_no_flaw(lab: Any) -> None:
    """A run with every rank, step, digest and exit code 0 is whole."""
    assert find_flaw(lab.run(lab.spec())) is None


@pytest.mark.parametrize("what", ["hang", "oom", "illegal_access", "crashed", "stale_address"])
def test_engine_outcome_is_the_flaw(lab: Any, edit: Any, what: str) -> None:
    """What the engine saw comes first, in its own words and with its culprit."""
    run = edit.outcome(lab.run(lab.spec()), what=what, message="it went wrong", culprit_rank=1)
    flaw = find_flaw(run)
    assert flaw is not None
    assert (flaw.what, flaw.message, flaw.rank) == (what, "it went wrong", 1)


def test_outcome_of_another_run(lab: Any, edit: Any) -> None:
    """An outcome with another run's key is never taken for this run's."""
    flaw = find_flaw(edit.outcome(lab.run(lab.spec()), key="w2-eager-r0-000000000000"))
    assert flaw is not None
    assert flaw.what == "corrupt_record"


def test_missing_step_is_named(lab: Any, edit: Any) -> None:
    """A step that one rank did not record is `missing_step` with rank and step."""
    run = lab.run(lab.spec())
    steps = tuple(record for record in run.ranks[1].steps if record.step != 2)
    flaw = find_flaw(edit.rank(run, 1, steps=steps))
    assert flaw is not None
    assert (flaw.what, flaw.rank, flaw.step) == ("missing_step", 1, 2)


def test_all_ranks_that_lack_a_step_are_named(lab: Any, edit: Any) -> None:
    """Where every rank left early, none of them is singled out."""
    run = lab.run(lab.spec())
    for rank in (0, 1):
        run = edit.rank(run, rank, steps=run.ranks[rank].steps[:2], end=None)
    flaw = find_flaw(run)
    assert flaw is not None
    assert (flaw.what, flaw.rank, flaw.ranks, flaw.step) == ("missing_step", 0, (0, 1), 2)
    one = find_flaw(edit.rank(lab.run(lab.spec()), 1, steps=run.ranks[1].steps[:2], end=None))
    assert one is not None
    assert (one.rank, one.ranks) == (1, (1,))


def test_missing_rank_is_named(lab: Any, edit: Any) -> None:
    """A rank without records is `missing_rank`, whether its file is absent or empty."""
    run = lab.run(lab.spec())
    absent = dataclasses.replace(run, ranks=run.ranks[:1])
    empty = edit.rank(run, 1, start=None, steps=(), end=None)
    for broken in (absent, empty):
        flaw = find_flaw(broken)
        assert flaw is not None
        assert (flaw.what, flaw.rank) == ("missing_rank", 1)


def test_empty_run(lab: Any, edit: Any) -> None:
    """A run in which no rank recorded a step is `empty_run`, even with start and end."""
    run = lab.run(lab.spec())
    for rank in (0, 1):
        run = edit.rank(run, rank, steps=())
    flaw = find_flaw(run)
    assert flaw is not None
    assert flaw.what == "empty_run"
    assert getattr(find_flaw(dataclasses.replace(run, ranks=())), "what", "") == "empty_run"


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
    flaw = find_flaw(edit.rank(run, 1, initial=initial))
    assert flaw is not None
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
    flaw = find_flaw(run)
    assert flaw is not None
    assert (flaw.what, flaw.rank) == ("corrupt_record", 1)
    assert find_flaw(of_program(run)) is None


LATE = "line 7: step record after end"


def test_record_after_end(lab: Any, edit: Any) -> None:
    """A line after the end, a step past the last, and an error beside an end are named so."""
    run = lab.run(lab.spec())
    more = (*run.ranks[0].steps, lab.step(0, 4))
    error = ErrorRecord(rank=0, step=3, what="crashed", type="E", message="m", traceback="")
    for broken in (
        edit.rank(run, 0, problems=("line 7: step 3 follows", LATE), after_end=(LATE,)),
        edit.rank(run, 0, steps=more),
        edit.rank(run, 0, error=error),
    ):
        flaw = find_flaw(broken)
        assert flaw is not None
        assert (flaw.what, flaw.rank) == ("record_after_end", 0)


def test_error_record_with_clean_exit(lab: Any, edit: Any) -> None:
    """An error record is believed although every process exited with 0, and one without a name."""
    run = lab.run(lab.spec())
    cases: tuple[tuple[What, What], ...] = (("oom", "oom"), ("", "crashed"))
    for what, named in cases:
        error = ErrorRecord(rank=1, step=3, what=what, type="E", message="no room", traceback="")
        flaw = find_flaw(edit.rank(run, 1, error=error, end=None))
        assert flaw is not None
        assert (flaw.what, flaw.rank, flaw.step) == (named, 1, 3)


@pytest.mark.parametrize(
    ("exits", "what"),
    [
        (((0, 0), (1, 3)), "crashed"),
        (((0, 0), (1, -9)), "killed"),
        (((0, 0), (1, None)), "missing_rank"),
        (((0, 0),), "missing_rank"),
        ((), "missing_rank"),
        (((0, 0), (1, 0), (1, 0)), "corrupt_record"),
        (((0, 0), (1, 0), (2, 0)), "corrupt_record"),
    ],
)
def test_exit_states(lab: Any, edit: Any, exits: tuple[Any, ...], what: str) -> None:
    """Whole records do not excuse a process that did not exit with 0."""
    ranks = tuple(RankExit(rank=rank, code=code) for rank, code in exits)
    flaw = find_flaw(edit.outcome(lab.run(lab.spec()), ranks=ranks))
    assert flaw is not None
    assert flaw.what == what


def _start(run: Any, **changes: Any) -> Any:
    return dataclasses.replace(run.ranks[0].start, **changes)


@pytest.mark.parametrize(
    "case",
    [
        "problem", "no start", "schema", "start rank", "world size", "groups", "no end",
        "end steps", "end rank", "repeated step", "swapped steps", "step rank", "microbatches",
        "digest group", "digest length", "digest odd", "digest text", "extra rank", "twin rank",
        "config steps", "config microbatches", "start run", "digest long", "last digest",
        "config graph",
    ],
)  # fmt: skip
def test_malformed_records_are_corrupt(lab: Any, edit: Any, case: str) -> None:
    """Every malformed record is `corrupt_record`, never an exception and never whole."""
    run = lab.run(lab.spec())
    r0 = run.ranks[0]
    s = r0.steps
    d = s[1].digests
    config = run.spec.config
    broken = {
        "problem": lambda: edit.rank(run, 0, problems=("line 3: not JSON",)),
        "no start": lambda: edit.rank(run, 0, start=None),
        "schema": lambda: edit.rank(run, 0, start=_start(run, schema=99)),
        "start rank": lambda: edit.rank(run, 0, start=_start(run, rank=1)),
        "world size": lambda: edit.rank(run, 0, start=_start(run, world_size=3)),
        "groups": lambda: edit.rank(run, 0, start=_start(run, tensors={"grads": ("a",)})),
        "no end": lambda: edit.rank(run, 0, end=None),
        "end steps": lambda: edit.rank(run, 0, end=dataclasses.replace(r0.end, steps=3)),
        "end rank": lambda: edit.rank(run, 0, end=dataclasses.replace(r0.end, rank=1)),
        "repeated step": lambda: edit.rank(run, 0, steps=(*s[:2], s[1], *s[2:])),
        "swapped steps": lambda: edit.rank(run, 0, steps=(s[1], s[0], *s[2:])),
        "step rank": lambda: edit.step(run, 0, 1, rank=1),
        "microbatches": lambda: edit.step(run, 0, 1, microbatch_losses=()),
        "digest group": lambda: edit.step(run, 0, 1, digests={"grads": d["grads"]}),
        "digest length": lambda: edit.step(run, 0, 1, digests=d | {"optim": d["optim"][:32]}),
        "digest odd": lambda: edit.step(run, 0, 1, digests=d | {"grads": d["grads"][:-1]}),
        "digest text": lambda: edit.step(run, 0, 1, digests=d | {"rng": "Z" * 32}),
        "extra rank": lambda: dataclasses.replace(run, ranks=(*run.ranks, lab.rank(2, run.spec))),
        "twin rank": lambda: dataclasses.replace(run, ranks=(*run.ranks, lab.rank(0, run.spec))),
        "config steps": lambda: _reconfigured(run, edit, config | {"steps": None}),
        "start run": lambda: edit.rank(run, 0, start=dataclasses.replace(r0.start, run="another")),
        "digest long": lambda: edit.step(run, 0, 1, digests=d | {"optim": d["optim"] + "0" * 32}),
        "last digest": lambda: edit.step(run, 0, 3, digests=d | {"optim": d["optim"][:32]}),
        "config graph": lambda: _reconfigured(run, edit, config | {"graph": ["no_scope"]}),
        "config microbatches": lambda: _reconfigured(run, edit, config | {"microbatches": True}),
    }[case]()
    flaw = find_flaw(broken)
    assert flaw is not None
    assert flaw.what == "corrupt_record"


def _reconfigured(run: Any, edit: Any, config: dict[str, Any]) -> Any:
    spec = dataclasses.replace(run.spec, config=config)
    return edit.outcome(dataclasses.replace(run, spec=spec), key=spec.key)


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
    flaw = find_flaw(broken)
    assert flaw is not None
    assert flaw.rank == rank
    if place >= 0:
        assert (flaw.what, flaw.step) == ("missing_step", place)
