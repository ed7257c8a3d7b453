"""Losses, state, finite values and samples: every bit of every rank, and where it first differs."""

import dataclasses
import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.config import ParallelConfig
from fsdp_core.layouts import Dense, dense_coordinates
from harness.checks import exact, judge, within
from harness.checks.evidence import step_table
from harness.checks.exact import same_data
from harness.records import COPIES, DIGEST_GROUPS, SAMPLES, FloatBits, RunResult
from tests.unit.harness.checks.conftest import flaw_of, place_of


def flipped(value: FloatBits, bit: int) -> FloatBits:
    return FloatBits.from_bits(int(value.bits, 16) ^ (1 << bit))


def test_equal_runs_pass(lab: Any) -> None:
    """Equal bits pass, and the answer says over how many pairs."""
    reference, _, candidate = lab.legs()
    answer = within.loss(reference, candidate)
    assert answer.outcome == "passed"
    assert answer.figures["pairs"] == lab.steps * lab.world_size


@pytest.mark.parametrize(
    ("left", "right", "ulps"),
    [
        (0x3F800000, 0x3F800001, 1),
        (0x00000000, 0x80000000, 0),
        (0x7FC00000, 0x7FC00001, None),
        (0x7F800000, 0x7F7FFFFF, None),
        (0x80000001, 0x00000001, 2),
    ],
)
def test_bits_decide(lab: Any, edit: Any, left: int, right: int, ulps: int | None) -> None:
    """One ulp, -0.0 for 0.0, another NaN payload and infinity for the largest float all differ."""
    reference, _, candidate = lab.legs()
    a, b = FloatBits.from_bits(left), FloatBits.from_bits(right)
    reference = edit.step(reference, 1, 2, grad_norm=a)
    answer = within.loss(reference, edit.step(candidate, 1, 2, grad_norm=b))
    assert answer.outcome == "failed"
    where = place_of(answer)
    assert (where.step, where.rank) == (2, 1)
    assert where.ulps == ulps
    assert f"0x{a.bits}" in where.reference
    assert f"0x{b.bits}" in where.candidate
    same = within.loss(reference, edit.step(candidate, 1, 2, grad_norm=a))
    assert same.outcome == "passed"


def test_loss_before_norm_then_rank(lab: Any, edit: Any) -> None:
    """Within a step a loss of a later rank comes before the norm of an earlier one."""
    reference, _, candidate = lab.legs()
    step = candidate.ranks[0].steps[2]
    candidate = edit.step(candidate, 0, 2, grad_norm=flipped(step.grad_norm, 0))
    candidate = edit.step(candidate, 1, 2, loss=flipped(candidate.ranks[1].steps[2].loss, 0))
    candidate = edit.step(candidate, 0, 3, loss=flipped(candidate.ranks[0].steps[3].loss, 0))
    answer = within.loss(reference, candidate)
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity, where.ulps) == (2, 1, "loss", 1)
    assert "3 of 8 (step, rank) pairs differ, on ranks 0 and 1" in answer.message


def test_microbatch_losses_that_cancel(lab: Any, edit: Any) -> None:
    """Microbatch losses that changed places are seen although their mean is the same."""
    reference, _, candidate = lab.legs()
    losses = candidate.ranks[0].steps[1].microbatch_losses
    candidate = edit.step(candidate, 0, 1, microbatch_losses=losses[::-1])
    answer = within.loss(reference, candidate)
    where = place_of(answer)
    assert where.quantity == "microbatch_losses[0]"


def test_malformed_input(lab: Any, edit: Any) -> None:
    """Nothing in common and a lost microbatch never pass nor raise."""
    reference, _, candidate = lab.legs()
    for rank in (0, 1):
        candidate = edit.rank(candidate, rank, steps=())
    assert within.loss(reference, candidate).what == "not_run"
    short = edit.step(reference, 0, 1, microbatch_losses=())
    for left, right in ((reference, short), (short, reference)):
        answer = within.loss(left, right)
        assert answer.outcome == "failed"
        where = place_of(answer)
        assert "missing" in (where.reference, where.candidate)


def test_a_norm_that_only_one_run_has_differs(lab: Any, edit: Any) -> None:
    """The last of a step's values may be missing in either run."""
    reference, _, candidate = lab.legs()
    bare = edit.step(candidate, 1, 3, grad_norm=None)
    for left, right in ((reference, bare), (bare, reference)):
        answer = within.loss(left, right)
        assert answer.outcome == "failed"
        where = place_of(answer)
        assert (where.quantity, where.step) == ("grad_norm", 3)


def test_runs_without_any_loss_compare_nothing(lab: Any, edit: Any) -> None:
    """Programs may record none: then there is no answer, and no pass."""
    runs = list(lab.legs())
    for place, run in enumerate(runs):
        for rank in range(lab.world_size):
            for step in range(lab.steps):
                run = edit.step(run, rank, step, loss=None, microbatch_losses=(), grad_norm=None)
        runs[place] = run
    answer = within.loss(runs[0], runs[2])
    assert (answer.outcome, answer.what) == ("error", "not_run")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found_where_it_is(lab: Any, edit: Any, data: st.DataObject) -> None:
    """Flipping any bit of any loss or norm fails with exactly that step, rank and quantity."""
    reference, _, candidate = lab.legs()
    rank = data.draw(st.integers(0, lab.world_size - 1))
    step = data.draw(st.integers(0, lab.steps - 1))
    bit = data.draw(st.integers(0, 31))
    quantity: Any = data.draw(st.sampled_from(["loss", "grad_norm", 0, 1]))
    record = candidate.ranks[rank].steps[step]
    if isinstance(quantity, int):
        losses = list(record.microbatch_losses)
        losses[quantity] = flipped(losses[quantity], bit)
        changes: dict[str, Any] = {"microbatch_losses": tuple(losses)}
        name = f"microbatch_losses[{quantity}]"
    else:
        name = quantity
        changes = {name: flipped(getattr(record, name), bit)}
    answer = within.loss(reference, edit.step(candidate, rank, step, **changes))
    assert answer.outcome == "failed"
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity) == (step, rank, name)


def test_equal_digests_pass(lab: Any) -> None:
    """Equal digests pass, and the answer says how many were compared."""
    reference, _, candidate = lab.legs()
    answer = exact.state(reference, candidate)
    assert answer.outcome == "passed"
    assert answer.figures["digests"] == (5 + 9 * lab.steps) * lab.world_size


@pytest.mark.parametrize(("group", "tensor"), [("weights", "embed.weight"), ("rng", "cpu")])
def test_another_initialisation_is_before_step_0(
    lab: Any, edit: Any, group: str, tensor: str
) -> None:
    """What differs before the first step is said to, whatever differs later."""
    reference, _, candidate = lab.legs()
    for step in range(lab.steps):
        candidate = edit.digest(candidate, 0, step, "weights", 0)
    initial = candidate.ranks[1].initial
    digests = initial.digests | {group: "0" + initial.digests[group][1:]}
    assert digests != initial.digests
    other = dataclasses.replace(initial, digests=digests)
    answer = exact.state(reference, edit.rank(candidate, 1, initial=other))
    assert (answer.outcome, answer.what) == ("failed", "diverged")
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity, where.tensor) == (-1, 1, group, tensor)
    assert "before step 0" in answer.message


@pytest.mark.parametrize("strategies", [("optim", "optim"), ("optim", "no_shard")])
def test_copies_are_compared_where_strategies_keep_the_same(
    lab: Any, edit: Any, strategies: tuple[str, str]
) -> None:
    """A stale copy fails though all else is equal; another strategy keeps other copies, or none."""
    runs: list[RunResult] = []
    for run, strategy, copy in zip(lab.legs()[::2], strategies, "ab", strict=True):
        config = run.spec.config | {"fsdp": {"strategy": strategy}}
        made = dataclasses.replace(run, spec=dataclasses.replace(run.spec, config=config))
        for records in run.ranks:
            start, steps = records.start, list(records.steps)
            last = steps[-1].digests | {COPIES: copy * 32}
            steps[-1] = dataclasses.replace(steps[-1], digests=last)
            tensors = start.tensors | {COPIES: ("embed.weight",)}
            made = edit.rank(
                made, records.rank, steps=tuple(steps),
                start=dataclasses.replace(start, tensors=tensors),
            )  # fmt: skip
        runs.append(made)
    answer = exact.state(runs[0], runs[1])
    if len(set(strategies)) > 1:
        assert answer.outcome == "passed"
        return
    assert (answer.outcome, answer.what) == ("failed", "diverged")
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity) == (lab.steps - 1, 0, COPIES)


def test_an_initial_state_of_one_run_alone_is_damage(lab: Any, edit: Any) -> None:
    """It is not passed over: there is no pass without it, of a rank or of a run."""
    reference, _, candidate = lab.legs()
    lost = edit.rank(candidate, 1, initial=None)
    for pair in ((reference, lost), (lost, reference)):
        answer = exact.state(*pair)
        assert (answer.outcome, answer.what) == ("error", "corrupt_record")
    flaw = flaw_of(lost)
    assert (flaw.what, flaw.rank) == ("corrupt_record", 1)


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize("step", [-1, 0, 3])
def test_each_of_16_ranks_is_compared(make_lab: Any, edit: Any, rank: int, step: int) -> None:
    """A difference on any rank of many fails, on that rank, and all pairs are counted."""
    lab = make_lab(world_size=16)
    reference, _, candidate = lab.legs()
    pairs = 16 * (1 + lab.steps)
    assert f"{pairs} (step, rank) pairs" in exact.state(reference, candidate).message
    if step < 0:
        initial = candidate.ranks[rank].initial
        digests = initial.digests | {"weights": "f" + initial.digests["weights"][1:]}
        changed = edit.rank(candidate, rank, initial=dataclasses.replace(initial, digests=digests))
    else:
        changed = edit.digest(candidate, rank, step, "optim", 40)
    answer = exact.state(reference, changed)
    assert answer.outcome == "failed"
    where = place_of(answer)
    assert (where.step, where.rank) == (step, rank)
    assert (answer.figures["differing_ranks"], answer.figures["differing_pairs"]) == (1, 1)


def test_order_is_step_group_tensor_rank(lab: Any, edit: Any) -> None:
    """The first difference is by step, then group, then tensor, and only then by rank."""
    reference, _, candidate = lab.legs()
    for rank, step, group, bit in ((0, 3, "grads", 0), (0, 2, "weights", 0), (0, 2, "grads", 200)):
        candidate = edit.digest(candidate, rank, step, group, bit)
    candidate = edit.digest(candidate, 1, 2, "grads", 5)
    answer = exact.state(reference, candidate)
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity, where.tensor) == (2, 1, "grads", "embed.weight")
    assert "3 tensors on ranks 0 and 1 differ" in answer.message
    assert answer.figures["differing_pairs"] == 3


def test_a_group_comes_before_all_later_ones_on_any_rank(lab: Any, edit: Any) -> None:
    """A gradient that rank 0 does not hold is named before a weight of rank 0."""
    runs = []
    for run in lab.legs()[::2]:
        start = run.ranks[1].start
        tensors = start.tensors | {"grads": (*start.tensors["grads"], "tail.weight")}
        run = edit.rank(run, 1, start=dataclasses.replace(start, tensors=tensors))
        for step, record in enumerate(run.ranks[1].steps):
            digests = record.digests | {"grads": record.digests["grads"] + "1" * 32}
            run = edit.step(run, 1, step, digests=digests)
        runs.append(run)
    other = edit.digest(edit.digest(runs[1], 1, 2, "grads", 2 * 128), 0, 2, "weights", 0)
    where = place_of(exact.state(runs[0], other))
    assert (where.rank, where.quantity, where.tensor) == (1, "grads", "tail.weight")


def test_other_tensor_names_fail(lab: Any, edit: Any) -> None:
    """Equal digests of differently named, ordered or counted tensors do not pass."""
    reference, _, candidate = lab.legs()
    start = candidate.ranks[1].start
    names = start.tensors["weights"]
    for other in (names[::-1], names[:1], (*names, "extra"), ("embed.weight", "tail.weight")):
        tensors = start.tensors | {"weights": other}
        broken = edit.rank(candidate, 1, start=dataclasses.replace(start, tensors=tensors))
        for left, right in ((reference, broken), (broken, reference)):
            answer = exact.state(left, right)
            assert answer.outcome == "failed"
            where = place_of(answer)
            assert where.rank == 1
            assert "different tensors" in answer.message


def test_exchanged_shards_are_seen(lab: Any, edit: Any) -> None:
    """Two ranks whose digests are exchanged differ on both."""
    reference, _, candidate = lab.legs()
    left, right = candidate.ranks[0].steps[1].digests, candidate.ranks[1].steps[1].digests
    candidate = edit.step(edit.step(candidate, 0, 1, digests=right), 1, 1, digests=left)
    answer = exact.state(reference, candidate)
    assert answer.outcome == "failed"
    assert answer.figures["differing_ranks"] == 2


def test_malformed_digests(lab: Any, edit: Any) -> None:
    """Odd lengths, lost groups, no digests at all and parameters never pass and never raise."""
    reference, _, candidate = lab.legs()
    digests = candidate.ranks[0].steps[1].digests
    for changed in (
        digests | {"grads": digests["grads"][:-3]},
        digests | {"grads": digests["grads"] + "ab"},
        {"grads": digests["grads"]},
        {},
        digests | {"novel": "00" * 16},
    ):
        answer = exact.state(reference, edit.step(candidate, 0, 1, digests=changed))
        assert answer.outcome == "failed"
        where = place_of(answer)
        assert (where.step, where.rank) == (1, 0)
    empty = edit.rank(edit.rank(candidate, 0, steps=()), 1, steps=())
    assert exact.state(reference, empty).what == "not_run"
    nameless = edit.rank(edit.rank(reference, 0, start=None), 1, start=None)
    assert exact.state(nameless, candidate).what == "not_run"


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_a_digest_is_found(lab: Any, edit: Any, data: st.DataObject) -> None:
    """Flipping any bit of any digest fails with exactly that step, rank, group and tensor."""
    reference, _, candidate = lab.legs()
    rank = data.draw(st.integers(0, lab.world_size - 1))
    step = data.draw(st.integers(0, lab.steps - 1))
    group = data.draw(st.sampled_from(DIGEST_GROUPS))
    names = reference.ranks[rank].start.tensors[group]
    bit = data.draw(st.integers(0, 128 * len(names) - 1))
    answer = exact.state(reference, edit.digest(candidate, rank, step, group, bit))
    assert answer.outcome == "failed"
    where = place_of(answer)
    found = (where.step, where.rank, where.quantity, where.tensor)
    assert found == (step, rank, group, names[bit // 128])
    assert answer.figures["differing_tensors"] == 1


NAN = FloatBits.from_bits(0x7FC00000)
INF = FloatBits.from_bits(0xFF800000)


def test_finite_run_passes(lab: Any) -> None:
    """A run without NaN or infinity passes."""
    reference, _, candidate = lab.legs()
    assert exact.finite(reference, candidate).outcome == "passed"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("quantity", ["loss", "microbatch_losses[1]", "grad_norm"])
def test_each_float_is_looked_at(lab: Any, edit: Any, value: FloatBits, quantity: str) -> None:
    """A NaN or infinity in any recorded float fails with its step, rank and name."""
    reference, _, candidate = lab.legs()
    if quantity.startswith("micro"):
        first = candidate.ranks[1].steps[2].microbatch_losses[0]
        changes: dict[str, Any] = {"microbatch_losses": (first, value)}
    else:
        changes = {quantity: value}
    answer = exact.finite(reference, edit.step(candidate, 1, 2, **changes))
    assert (answer.outcome, answer.what) == ("failed", "nonfinite")
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity) == (2, 1, quantity)


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize("group", [*DIGEST_GROUPS, "buffers"])
def test_each_group_of_each_of_16_ranks_is_looked_at(
    make_lab: Any, edit: Any, rank: int, group: str
) -> None:
    """A tensor of any group that is not finite fails, named with its group and rank."""
    reference, _, candidate = make_lab(world_size=16).legs()
    bad = edit.step(candidate, rank, 2, nonfinite={group: ("a tensor",)})
    answer = exact.finite(reference, bad)
    assert (answer.outcome, answer.what) == ("failed", "nonfinite")
    where = place_of(answer)
    assert (where.step, where.rank, where.quantity, where.tensor) == (2, rank, group, "a tensor")
    assert answer.figures["nonfinite_pairs"] == 1


def test_gradient_is_named_before_the_norm_made_of_it(lab: Any, edit: Any) -> None:
    """Where a gradient and the norm are bad the tensor is named, on whichever rank it is."""
    reference, _, candidate = lab.legs()
    candidate = edit.step(candidate, 0, 2, grad_norm=NAN)
    candidate = edit.step(
        candidate, 1, 2, grad_norm=NAN,
        nonfinite={"weights": ("embed.weight",), "grads": ("head.weight",)},
    )  # fmt: skip
    answer = exact.finite(reference, candidate)
    where = place_of(answer)
    found = (where.step, where.rank, where.quantity, where.tensor)
    assert found == (2, 1, "grads", "head.weight")
    assert "head.weight (grads)" in answer.message
    assert "the reference is finite there;" in answer.message


def test_poison_is_said_where_nan_comes_from_it(lab: Any, edit: Any) -> None:
    """Under that stressor, and only there, NaN means a buffer that was read out of its time."""
    reference, _, candidate = lab.legs()
    bad = edit.step(candidate, 1, 2, loss=NAN)
    plain = exact.finite(reference, bad).message
    bad.spec.config["stress"] = ["poison"]
    poisoned = exact.finite(reference, bad).message
    assert "poison" not in plain
    assert poisoned.startswith(plain)
    assert "under stressor poison NaN is what lies in a pool's buffer" in poisoned


def test_shared_nonfinite_still_fails(lab: Any, edit: Any) -> None:
    """A reference that is non-finite in the same place is mentioned and excuses nothing."""
    reference, _, candidate = lab.legs()
    answer = exact.finite(
        edit.step(reference, 0, 1, loss=NAN), edit.step(candidate, 0, 1, loss=NAN)
    )
    assert answer.outcome == "failed"
    assert "not finite there either" in answer.message


def test_unknown_group_of_tensors_counts(lab: Any, edit: Any) -> None:
    """A tensor listed under a group that the harness does not know still fails."""
    reference, _, candidate = lab.legs()
    answer = exact.finite(reference, edit.step(candidate, 0, 3, nonfinite={"novel": ("x",)}))
    assert answer.outcome == "failed"
    where = place_of(answer)
    assert (where.quantity, where.tensor) == ("novel", "x")


def test_nothing_to_look_at(lab: Any, edit: Any) -> None:
    """No steps and a reference without records never pass and never raise."""
    reference, _, candidate = lab.legs()
    empty = edit.rank(edit.rank(candidate, 0, steps=()), 1, steps=())
    assert exact.finite(reference, empty).what == "not_run"
    answer = exact.finite(empty, edit.step(candidate, 0, 1, loss=NAN))
    where = place_of(answer)
    assert where.reference == "missing"


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2}, {"dp_outer": 2, "dp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2},
    {"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
]  # fmt: skip
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 8}
Choice = Callable[[Dense, int], object]


def read(run: RunResult, choice: Choice, **config: Any) -> RunResult:
    """The run with a digest of tokens that follows from the rank's place and the step."""
    spec = dataclasses.replace(run.spec, config=run.spec.config | config)
    ranks = []
    for records in run.ranks:
        assert records.start is not None
        place = dense_coordinates(ParallelConfig(**config["parallel"]), records.rank)
        steps = []
        for step in records.steps:
            text = str(choice(place, step.step))
            digests = step.digests | {SAMPLES: 2 * hashlib.md5(text.encode()).hexdigest()}
            steps.append(dataclasses.replace(step, digests=digests))
        tensors = records.start.tensors | {SAMPLES: ("tokens", "targets")}
        start = dataclasses.replace(records.start, tensors=tensors)
        ranks.append(dataclasses.replace(records, start=start, steps=tuple(steps)))
    outcome = dataclasses.replace(run.outcome, key=spec.key)
    return dataclasses.replace(run, spec=spec, outcome=outcome, ranks=tuple(ranks))


def own(place: Dense, step: int) -> object:
    """What the sampler gives: ranks of tp and pp read the same."""
    return step, place.dp_outer, place.dp, place.cp


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("axis", ["", "dp_outer", "dp", "cp"])
def test_each_part_of_the_batch_is_read_by_its_own_ranks(
    make_lab: Any, parallel: dict[str, Any], axis: str
) -> None:
    """Peers of tp, pp, ep and etp read alike; an axis along which all do otherwise is found."""
    size = ParallelConfig(**parallel).world_size

    def choice(place: Dense, step: int) -> object:
        return own(place._replace(**{axis: 0}) if axis else place, step)

    plain = make_lab(world_size=size).legs()[0]
    model = EXPERTS if "ep" in parallel else {}
    run = read(plain, choice, parallel=parallel, model=model)
    found = same_data(run, "reference")
    if parallel.get(axis, 1) == 1:
        assert found is None
        return
    assert found is not None
    assert (found.outcome, found.what) == ("failed", "same_data")
    where = place_of(found)
    first = next(r for r in range(size) if getattr(_at(parallel, r), axis))
    assert (where.rank, where.quantity, where.tensor) == (first, SAMPLES, "tokens")
    other = int(found.figures["same_as_rank"])
    assert _at(parallel, other) == _at(parallel, first)._replace(**{axis: 0})


def _at(parallel: dict[str, Any], rank: int) -> Dense:
    return dense_coordinates(ParallelConfig(**parallel), rank)


def alike(place: Dense, step: int) -> object:
    """A sampler that knows no ranks."""
    del place
    return step


@pytest.mark.parametrize(
    ("steps", "choice", "config"),
    [
        (4, lambda place, step: (step, place.dp if step == 2 else 0), {}),
        (1, alike, {"microbatches": 2}),
        (4, alike, {"model": {"vocab_size": 1}}),
        (8, alike, {"model": {"vocab_size": 2}}),
        (5, alike, {"data": {"kind": "text", "path": "short.txt"}}),
        (8, lambda place, step: 0, {"data": {"kind": "text", "path": "short.txt"}}),
    ],
)
def test_what_is_equal_by_chance_is_no_failure(
    make_lab: Any, steps: int, choice: Choice, config: dict[str, Any]
) -> None:
    """One step of other samples, too few sequences to tell, one token in all, two; a corpus of
    which nobody knows the length, or of one sequence.
    """
    run = make_lab(steps=steps).legs()[0]
    assert same_data(read(run, choice, parallel={"dp": 2}, **config), "reference") is None


def test_of_other_programs_nothing_is_asked(lab: Any) -> None:
    """Nobody knows which of their ranks share their data; records may be older than the group."""
    run = read(lab.legs()[0], alike, parallel={"dp": 2})
    program = {"program": {"script": "train.py"}}
    spec = dataclasses.replace(run.spec, config=run.spec.config | program)
    assert same_data(dataclasses.replace(run, spec=spec), "reference") is None
    assert same_data(lab.legs()[0], "reference") is None


@pytest.mark.parametrize(("choice", "outcome"), [(alike, "failed"), (own, "passed")])
def test_the_same_data_in_every_run_fails_the_case(lab: Any, choice: Choice, outcome: str) -> None:
    """No comparison sees it: the cause is a field of the verdict."""
    runs = [read(run, choice, parallel={"dp": 2}) for run in lab.legs()]
    names = ("reference", "control", "candidate")
    specs = {name: run.spec for name, run in zip(names, runs, strict=True)}
    case = dataclasses.replace(lab.case(), **specs)
    verdict = judge(case, *runs)
    assert verdict.outcome == outcome, verdict.message
    if outcome == "failed":
        assert (verdict.what, verdict.check) == ("same_data", "samples")
        where = place_of(verdict)
        assert where.rank == 1


def test_a_corpus_that_is_read_alike_in_many_steps_is_a_failure(make_lab: Any) -> None:
    """No two steps of it are alike, so that it is longer than what is read."""
    run = make_lab(steps=6).legs()[0]
    corpus = {"data": {"kind": "text", "path": "corpus.txt"}}
    found = same_data(read(run, alike, parallel={"dp": 2}, **corpus), "x")
    assert found is not None
    assert found.what == "same_data"


def _bits(number: float) -> FloatBits:
    return FloatBits.from_bits(int.from_bytes(struct.pack(">f", number), "big"))


def test_state_alone_sees_it(lab: Any, edit: Any) -> None:
    """A digest that differs while every loss agrees is seen by the state and never by the loss."""
    reference, candidate = lab.run(lab.spec()), lab.run(lab.spec())
    record = candidate.ranks[1].steps[2]
    digest = ("0" if record.digests["weights"][0] != "0" else "1") + record.digests["weights"][1:]
    candidate = edit.step(candidate, 1, 2, digests=record.digests | {"weights": digest})
    result = exact.state(reference, candidate)
    assert result.figures["first_step_state"] == 2
    assert result.figures["first_step_loss_bits"] == NEVER
    assert "the bits of the loss never differ" in result.message


def test_decimals_see_less_than_bits(lab: Any, edit: Any) -> None:
    """One ulp of the loss shows in its bits at once and at five decimals only once it has grown."""
    reference = lab.run(lab.spec())
    candidate = edit.step(reference, 0, 1, loss=_bits(2.0000002384185791))
    candidate = edit.step(candidate, 0, 3, loss=_bits(2.5))
    reference = edit.step(edit.step(reference, 0, 1, loss=_bits(2.0)), 0, 3, loss=_bits(2.0))
    steps = first_steps(step_table(reference), step_table(candidate))
    assert (steps["first_step_loss_bits"], steps["first_step_loss_5_decimals"]) == (1, 3)


def test_lost_records_are_not_evidence(lab: Any) -> None:
    """Only steps that both runs hold are compared."""
    run = lab.run(lab.spec())
    shorter = dataclasses.replace(run, ranks=run.ranks[:1])
    assert set(first_steps(step_table(run), step_table(shorter)).values()) == {NEVER}


RANKS = 12
LAST = RANKS - 1


@pytest.fixture(scope="module")
def wide(make_lab: Any) -> Any:
    return make_lab(steps=3, world_size=RANKS)


@pytest.mark.parametrize("rank", [8, LAST])
def test_a_difference_is_seen_on_any_rank(wide: Any, edit: Any, rank: int) -> None:
    """A digest, a loss and an infinity of a rank above 7."""
    reference, control, candidate = wide.legs()
    digest = edit.digest(candidate, rank, 2, "optim", 3)
    other = edit.step(candidate, rank, 2, grad_norm=FloatBits.from_bits(0x7F800000))
    for check, run in ((exact.state, digest), (within.loss, other), (exact.finite, other)):
        answer = check(reference, run)
        assert answer.outcome == "failed"
        where = place_of(answer)
        assert (where.step, where.rank) == (2, rank)
    for run in (digest, other):
        assert judge(wide.case(), reference, control, run).outcome == "failed"


def test_names_are_compared_on_any_rank(wide: Any, edit: Any) -> None:
    """Tensors of the last rank alone have other names."""
    reference, _, candidate = wide.legs()
    start = candidate.ranks[LAST].start
    tensors = start.tensors | {"weights": start.tensors["weights"][::-1]}
    renamed = edit.rank(candidate, LAST, start=dataclasses.replace(start, tensors=tensors))
    answer = exact.state(reference, renamed)
    where = place_of(answer)
    assert where.rank == LAST


def test_a_rank_that_recorded_nothing_is_missing(wide: Any, edit: Any) -> None:
    """Its records are gone, though its process ended well; so is only its last step."""
    _, _, candidate = wide.legs()
    gone = dataclasses.replace(candidate, ranks=candidate.ranks[:LAST])
    silent = edit.rank(candidate, LAST, start=None, steps=(), end=None)
    for run in (gone, silent):
        flaw = flaw_of(run)
        assert (flaw.what, flaw.rank) == ("missing_rank", LAST)
    steps = candidate.ranks[LAST].steps
    flaw = flaw_of(edit.rank(candidate, LAST, steps=steps[:-1]))
    assert (flaw.what, flaw.rank, flaw.step) == ("missing_step", LAST, 2)
