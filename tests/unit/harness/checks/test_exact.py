"""Digests of the state and what is not finite, place by place; what data-parallel ranks read."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig
from fsdp_core.layouts import Dense, dense_coordinates
from harness.checks.exact import same_data
from harness.records import ABSENT, COPIES, DIGEST_GROUPS, SAMPLES, RunResult
from tests.unit.harness.checks.conftest import (
    CANDIDATE,
    INF,
    LAB,
    NAN,
    REFERENCE,
    TENSORS,
    Lab,
    ask,
    configured,
    edit_all,
    edit_rank,
    edit_step,
    f32,
    flip,
    place,
    said,
    verdict_of,
)

WIDE = Lab(world_size=16)
WIDE_REFERENCE, _, WIDE_CANDIDATE = WIDE.legs()


def test_equal_digests_pass() -> None:
    """And the answer says how many were compared, the state before step 0 included."""
    answer = ask("state", REFERENCE, CANDIDATE)
    assert said(answer) == ("passed", "")
    assert answer.figures == {"digests": (5 + 9 * 4) * 2, "differing_pairs": 0}


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize(
    ("step", "group", "bit"),
    [(-1, "weights", 130), (-1, "rng", 0), *((0, g, 127) for g in TENSORS), (3, "optim", 255)],
)
def test_any_flipped_bit_is_found_where_it_is(rank: int, step: int, group: str, bit: int) -> None:
    """Of any digest, step and rank of 16, with group and tensor; no other place is named."""
    answer = ask("state", WIDE_REFERENCE, flip(WIDE_CANDIDATE, rank, step, group, bit))
    assert said(answer) == ("failed", "diverged")
    assert place(answer) == (step, rank, group, TENSORS[group][bit // 128])
    figures = ("differing_tensors", "differing_ranks", "differing_pairs")
    assert [answer.figures[name] for name in figures] == [1, 1, 1]
    assert f"1 of {16 * 5} (step, rank) pairs" in answer.message
    assert ("before step 0" in answer.message) == (step < 0)


@pytest.mark.parametrize(
    ("flips", "first"),
    [
        ([(0, 3, "grads", 0), (0, 2, "weights", 0), (0, 2, "grads", 200), (1, 2, "grads", 5)],
         (2, 1, "grads", "embed.weight")),
        ([(0, 0, "weights", 0), (1, -1, "rng", 0)], (-1, 1, "rng", "cpu")),
        ([(1, 1, "optim", 0), (0, 1, "rng", 0)], (1, 1, "optim", "embed.weight.exp_avg")),
        ([(0, 1, "grads", 0), (1, 1, "samples", 128)], (1, 1, "samples", "targets")),
    ],
)  # fmt: skip
def test_order_is_step_group_tensor_rank(flips: list[Any], first: Any) -> None:
    """The first difference is by step, then group, then tensor, and only then by rank."""
    run = CANDIDATE
    for each in flips:
        run = flip(run, *each)
    assert place(ask("state", REFERENCE, run)) == first


def test_a_group_comes_before_all_later_ones_on_any_rank() -> None:
    """A gradient that rank 0 does not hold is named before a weight of rank 0."""
    names = (*TENSORS["grads"], "tail.weight")
    runs = []
    for run in (REFERENCE, CANDIDATE):
        run = edit_rank(run, 1, start={"tensors": TENSORS | {"grads": names}})
        for step, record in enumerate(run.ranks[1].steps):
            run = edit_step(run, 1, step, digests={"grads": record.digests["grads"] + "1" * 32})
        runs.append(run)
    other = flip(flip(runs[1], 1, 2, "grads", 2 * 128), 0, 2, "weights")
    assert place(ask("state", runs[0], other))[1:] == (1, "grads", "tail.weight")


@pytest.mark.parametrize(
    "names", [TENSORS["weights"][::-1], TENSORS["weights"][:1], (*TENSORS["weights"], "extra"),
              ("embed.weight", "tail.weight"), ()],
)  # fmt: skip
@pytest.mark.parametrize("rank", [1, 15])
def test_other_tensor_names_fail(names: tuple[str, ...], rank: int) -> None:
    """Equal digests of differently named, ordered or counted tensors do not pass, either way."""
    tensors = TENSORS | {"weights": names}
    broken = edit_rank(WIDE_CANDIDATE, rank, start={"tensors": tensors})
    for pair in ((WIDE_REFERENCE, broken), (broken, WIDE_REFERENCE)):
        answer = ask("state", *pair)
        assert said(answer) == ("failed", "diverged")
        assert place(answer)[:3] == (0, rank, "tensors.weights")


def test_exchanged_and_repeated_records_are_seen() -> None:
    """Ranks whose digests are exchanged differ on both; a second record of a step hides nothing."""
    left, right = (CANDIDATE.ranks[rank].steps[1].digests for rank in (0, 1))
    run = edit_step(edit_step(CANDIDATE, 0, 1, digests=right), 1, 1, digests=left)
    assert ask("state", REFERENCE, run).figures["differing_ranks"] == 2
    steps = CANDIDATE.ranks[0].steps
    wrong = flip(CANDIDATE, 0, 1, "optim").ranks[0].steps[1]
    run = edit_rank(CANDIDATE, 0, steps=(steps[0], wrong, *steps[1:]))
    assert place(ask("state", REFERENCE, run))[:2] == (1, 0)


@pytest.mark.parametrize(
    "change", [lambda d: d | {"grads": d["grads"][:-3]}, lambda d: d | {"grads": d["grads"] + "ab"},
               lambda d: {"grads": d["grads"]}, lambda d: {}, lambda d: d | {"novel": "00" * 16}],
)  # fmt: skip
def test_malformed_digests_differ(change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Odd lengths, lost and new groups never pass and never raise."""
    steps = list(CANDIDATE.ranks[0].steps)
    steps[1] = replace(steps[1], digests=change(steps[1].digests))
    answer = ask("state", REFERENCE, edit_rank(CANDIDATE, 0, steps=tuple(steps)))
    assert (answer.outcome, place(answer)[:2]) == ("failed", (1, 0))


def test_nothing_to_compare_is_no_pass() -> None:
    """No steps, no names, or digests of absent tensors alone."""
    stepless = edit_rank(edit_rank(CANDIDATE, 0, steps=()), 1, steps=())
    nameless = edit_rank(edit_rank(REFERENCE, 0, start=None), 1, start=None)
    absent = {group: ABSENT * len(names) for group, names in TENSORS.items()}
    empty = [edit_all(run, digests=absent) for run in (REFERENCE, CANDIDATE)]
    for pair in ((REFERENCE, stepless), (nameless, CANDIDATE), empty):
        assert said(ask("state", *pair)) == ("error", "not_run")


def test_an_initial_state_of_one_run_alone_is_damage() -> None:
    """It is not passed over, of a rank or of a run."""
    lost = edit_rank(CANDIDATE, 1, initial=None)
    for pair in ((REFERENCE, lost), (lost, REFERENCE)):
        assert said(ask("state", *pair)) == ("error", "corrupt_record")


@pytest.mark.parametrize(("strategies", "outcome"), [(("optim", "optim"), "failed"),
                                                     (("optim", "grads"), "passed")])  # fmt: skip
def test_copies_are_compared_where_strategies_keep_the_same(strategies: Any, outcome: str) -> None:
    """A stale copy fails though all else is equal; another strategy keeps other copies, or none."""
    runs: list[RunResult] = []
    for run, strategy, copy in zip((REFERENCE, CANDIDATE), strategies, "ab", strict=True):
        run = configured(run, fsdp={"strategy": strategy})
        for rank in (0, 1):
            run = edit_rank(run, rank, start={"tensors": TENSORS | {COPIES: ("embed.weight",)}})
            run = edit_step(run, rank, 3, digests={COPIES: copy * 32})
        runs.append(run)
    answer = ask("state", *runs)
    assert answer.outcome == outcome
    assert outcome == "passed" or place(answer)[:3] == (3, 0, COPIES)


def test_what_the_loss_would_have_shown_is_said() -> None:
    """Nothing; its bits at once; its five decimals once the difference has grown."""
    broken = flip(CANDIDATE, 1, 0, "weights")
    assert "bits of the loss never differ, its 5 decimals never differ" in (
        ask("state", REFERENCE, broken).message
    )
    ours = edit_step(edit_step(REFERENCE, 0, 1, loss=f32(2.0)), 0, 3, loss=f32(2.0))
    theirs = edit_step(edit_step(broken, 0, 1, loss=f32(2.00000024)), 0, 3, loss=f32(2.5))
    told = "the bits of the loss differ first at step 1, its 5 decimals differ first at step 3"
    assert told in ask("state", ours, theirs).message


# --- NaN and infinity -------------------------------------------------------------------------


def test_a_finite_run_passes_and_none_gives_no_answer() -> None:
    """A run without records is no run without NaN."""
    assert ask("finite", REFERENCE, CANDIDATE).figures == {"pairs": 8}
    assert said(ask("finite", REFERENCE, replace(CANDIDATE, ranks=()))) == ("error", "not_run")


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize(
    ("change", "quantity", "tensor"),
    [
        *(({"loss": bad}, "loss", "") for bad in (NAN, INF)),
        ({"microbatch_losses": (f32(1.0), NAN)}, "microbatch_losses[1]", ""),
        ({"grad_norm": INF}, "grad_norm", ""),
        *(({"nonfinite": {group: ("x",)}}, group, "x") for group in (*DIGEST_GROUPS, "buffers")),
        # The norm is made of the gradients, and what the optimizer wrote comes after both.
        ({"grad_norm": NAN, "nonfinite": {"weights": ("w",), "grads": ("x",)}}, "grads", "x"),
        ({"grad_norm": NAN, "nonfinite": {"optim": ("w",)}}, "grad_norm", ""),
    ],
)
def test_whatever_is_not_finite_fails(rank: int, change: Any, quantity: str, tensor: str) -> None:
    """Any float and any tensor of any group of any rank, named where it was computed first."""
    run = edit_step(WIDE_CANDIDATE, rank, 2, **change)
    run = edit_step(run, 3, 3, loss=NAN)
    answer = ask("finite", WIDE_REFERENCE, run)
    assert said(answer) == ("failed", "nonfinite")
    assert place(answer) == (2, rank, quantity, tensor)
    assert answer.figures["nonfinite_pairs"] == 2


@pytest.mark.parametrize(
    ("group", "skipped", "in_reference", "outcome"),
    [
        ("buffers", False, True, "passed"), ("buffers", False, False, "failed"),
        ("weights", False, True, "failed"), ("grads", True, False, "passed"),
        ("grads", False, True, "failed"), ("weights", True, True, "failed"),
        ("loss", True, True, "failed"), ("grad_norm", True, True, "passed"),
    ],
)  # fmt: skip
def test_what_excuses_a_value_that_is_not_finite(
    group: str, skipped: bool, in_reference: bool, outcome: str
) -> None:
    """A mask that both runs have, and gradients of a skipped step; nothing that is trained."""
    is_float = group in ("loss", "grad_norm")
    bad: dict[str, Any] = {group: NAN} if is_float else {"nonfinite": {group: ("mean",)}}
    about = bad | {"skipped": "scaler" if skipped else ""}
    reference = edit_step(REFERENCE, 0, 1, **about) if in_reference else REFERENCE
    answer = ask("finite", reference, edit_step(CANDIDATE, 0, 1, **about))
    assert answer.outcome == outcome
    assert ("not finite there either" in answer.message) == (outcome == "failed" and in_reference)


def test_poison_is_said_where_nan_comes_from_it() -> None:
    """Under that stressor, and only there, NaN means a buffer that was read out of its time."""
    bad = edit_step(CANDIDATE, 1, 2, loss=NAN)
    assert "poison" not in ask("finite", REFERENCE, bad).message
    assert "poison" in ask("finite", REFERENCE, configured(bad, stress=["poison"])).message


# --- what data-parallel ranks read ------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2}, {"dp_outer": 2, "dp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2},
    {"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
]  # fmt: skip
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 8}
TEXT = {"data": {"kind": "text", "path": "short.txt"}}
Choice = Callable[[Dense, int], object]


def at(parallel: dict[str, Any], rank: int) -> Dense:
    return dense_coordinates(ParallelConfig(**parallel), rank)


def read(run: RunResult, choice: Choice, **config: Any) -> RunResult:
    """The run with a digest of tokens that follows from the rank's place and the step."""

    def digests(step: int, rank: int) -> dict[str, str]:
        text = str(choice(at(config["parallel"], rank), step))
        return {SAMPLES: 2 * hashlib.md5(text.encode()).hexdigest()}

    return configured(edit_all(run, digests=digests), **config)


def own(here: Dense, step: int) -> object:
    """What the sampler gives: ranks of tp and pp read the same."""
    return step, here.dp_outer, here.dp, here.cp


def alike(_: Dense, step: int) -> object:
    """A sampler that knows no ranks."""
    return step


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("axis", ["", "dp_outer", "dp", "cp"])
def test_each_part_of_the_batch_is_read_by_its_own_ranks(parallel: Any, axis: str) -> None:
    """Peers of tp, pp, ep and etp read alike; an axis along which all do otherwise is found."""
    size = ParallelConfig(**parallel).world_size
    run = read(
        Lab(world_size=size).legs()[0],
        lambda here, step: own(here._replace(**{axis: 0}) if axis else here, step),
        parallel=parallel, model=EXPERTS if "ep" in parallel else {},
    )  # fmt: skip
    found = same_data(run, "reference")
    if parallel.get(axis, 1) == 1:
        assert found is None
        return
    assert found is not None
    first = next(rank for rank in range(size) if getattr(at(parallel, rank), axis))
    assert said(found) == ("failed", "same_data")
    assert place(found)[1:] == (first, SAMPLES, "tokens")
    other = at(parallel, int(found.figures["same_as_rank"]))
    assert other == at(parallel, first)._replace(**{axis: 0})


@pytest.mark.parametrize(
    ("steps", "choice", "config", "is_found"),
    [
        (4, lambda here, step: (step, here.dp if step == 2 else 0), {}, False),
        (1, alike, {"microbatches": 2}, False), (4, alike, {"model": {"vocab_size": 1}}, False),
        (8, alike, {"model": {"vocab_size": 2}}, False), (5, alike, TEXT, False),
        (8, lambda here, step: 0, TEXT, False), (6, alike, TEXT, True),
        (4, alike, {"program": {"target": "train.py"}}, False),
    ],
)  # fmt: skip
def test_what_is_equal_by_chance_is_no_failure(
    steps: int, choice: Choice, config: dict[str, Any], is_found: bool
) -> None:
    """One step of other samples, too few to tell, one token or two in all, a corpus of unknown
    length or of one sequence, another program; but many steps of a corpus, no two alike, are."""
    run = read(Lab(steps=steps).legs()[0], choice, parallel={"dp": 2}, **config)
    assert (same_data(run, "reference") is not None) == is_found


@pytest.mark.parametrize(("choice", "outcome"), [(alike, "failed"), (own, "passed")])
def test_the_same_data_in_every_run_fails_the_case(choice: Choice, outcome: str) -> None:
    """No comparison sees it: the cause is a field of the verdict."""
    runs = [read(run, choice, parallel={"dp": 2}) for run in LAB.legs()]
    verdict = verdict_of(*runs)
    assert verdict.outcome == outcome, verdict.message
    if outcome == "failed":
        assert (verdict.what, verdict.check, place(verdict)[1]) == ("same_data", "samples", 1)
