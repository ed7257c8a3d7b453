"""Comparing layouts: what is farther apart than rounding is named with element and ranks."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fsdp_core.config import ModelConfig, ParallelConfig, TrainConfig
from harness.bisect.elements import Floats, whole_tensors
from harness.bisect.layouts import (
    BRANCHES,
    NUM_SAMPLES,
    LayoutAnswer,
    Leg,
    compare_layouts,
    runs_to_compare,
)
from harness.errors import UsageError
from harness.records import FloatBits, RankRecords, RunOutcome, RunResult, RunSpec, StepRecord
from harness.store.contents import Contents, KeptTensor, Loaded, Place

MODEL = ModelConfig(vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=2, ffn=24, seq=6)
HEAD, LATE, EARLY = "head.weight", "layers.1.mlp.norm.weight", "layers.0.attn.wq.weight"
SHAPES = {EARLY: (8, 32), LATE: (16,), HEAD: (4, 16)}
NOISE = 1e-6

Tensors = Mapping[str, Floats]
Change = Callable[[dict[str, Floats]], None]


def spec(world_size: int = 1, **config: Any) -> RunSpec:
    """A run of a layout."""
    values: dict[str, Any] = {"model": MODEL, "steps": 3} | config
    return RunSpec(
        config=TrainConfig(**values).to_dict(), device="cpu", world_size=world_size, timeout_s=9.0
    )


def leg(tensors: Tensors, ranks: int = 1, *, loss: float = 4.0, what: Any = "") -> Leg:
    """A run whose ranks each have some columns of matrices and all of every vector."""
    held: list[list[Loaded]] = [[] for _ in range(ranks)]
    for name, whole in tensors.items():
        for rank in range(ranks):
            width = whole.shape[-1] // ranks if whole.ndim > 1 else whole.shape[0]
            first = rank * width if whole.ndim > 1 else 0
            part = np.ascontiguousarray(whole[..., first : first + width], np.float32)
            rows = (0,) * (whole.ndim - 1)
            place = Place(
                name=name, shape=whole.shape, offsets=(*rows, first), local_offsets=(*rows, 0),
                sizes=part.shape,
            )  # fmt: skip
            data = part.tobytes()
            about = KeptTensor(
                name=name if ":" in name else f"grads:{name}", part=0, dtype="float32",
                shape=part.shape, as_digested=True, places=(place,),
            )  # fmt: skip
            held[rank].append(Loaded(about=about, data=data))
    number = FloatBits.from_bits(int(np.float32(loss).view(np.uint32)))
    step = StepRecord(
        step=2, rank=0, loss=number, microbatch_losses=(), grad_norm=number, digests={},
        nonfinite={}, step_s=0.0, live_bytes=0, peak_bytes=0,
    )  # fmt: skip
    records = RankRecords(
        rank=0, start=None, steps=(step,), events=(), error=None, end=None, problems=()
    )
    outcome = RunOutcome(
        key="k", what=what, message="it fell over" if what else "", culprit_rank=None, ranks=(),
        started_unix_s=0.0, wall_s=0.0,
    )  # fmt: skip
    return Leg(
        result=RunResult(spec=spec(), outcome=outcome, ranks=(records,)),
        contents=Contents(step=2, ranks=tuple(map(tuple, held)), problems=()),
    )


def rounded(seed: int) -> dict[str, Floats]:
    """The same gradients each time, rounded otherwise."""
    exact, noise = np.random.default_rng(0), np.random.default_rng(100 + seed)
    found = {}
    for name, shape in SHAPES.items():
        value = exact.standard_normal(shape)
        found[name] = value * (1 + NOISE * noise.standard_normal(shape))
    return found


def answer(change: Change = lambda tensors: None, **options: Any) -> LayoutAnswer:
    """Two layouts, the second of two ranks and changed, and samples of as much rounding."""
    candidate = rounded(1)
    change(candidate)
    samples = [leg(rounded(10 + number)) for number in range(NUM_SAMPLES)]
    return compare_layouts(leg(rounded(0)), leg(candidate, 2, **options), samples)


def test_rounding_alone_is_no_difference() -> None:
    """Two runs as far apart as rounding takes samples: no tensor is wrong, none is at zero."""
    found = answer()
    assert found.location is None
    assert found.wrong == ()
    assert [each.name for each in found.tensors] == [
        "loss", f"grads:{HEAD}", f"grads:{LATE}", f"grads:{EARLY}",
    ]  # fmt: skip
    assert all(0 < each.units.both < 0.5 for each in found.tensors[1:])
    assert "all 4 tensors of step 2 are within their bounds" in found.message


def test_the_first_that_backward_makes_is_named_with_row_element_and_ranks() -> None:
    """Two tensors are wrong: the later layer's comes first, with the element and who has it."""

    def change(tensors: dict[str, Floats]) -> None:
        tensors[EARLY] *= 2
        tensors[HEAD][2, 13] += 1e-4

    found = answer(change)
    location = found.location
    assert location is not None
    assert [each.name for each in found.wrong] == [f"grads:{HEAD}", f"grads:{EARLY}"]
    assert found.wrong[0].row == 2
    assert (location.step, location.phase, location.module) == (2, "backward", "head")
    assert (location.tensor, location.quantity) == (HEAD, "grads")
    assert location.ranks == (1,)
    element = location.element
    assert element is not None
    assert (element.index, element.local, element.dtype) == ((2, 13), 2 * 8 + 5, "float32")
    assert float(element.candidate) == pytest.approx(float(element.reference) + 1e-4, rel=1e-4)
    assert "on rank 0 of the reference" in location.evidence[1]
    assert "on rank 1 of the candidate" in location.evidence[1]
    # The runs without a layout tell which leg is off.
    assert found.wrong[0].units.reference < 0.5
    assert found.wrong[0].units.candidate > 1


def test_a_small_fault_in_one_row_of_many_is_seen() -> None:
    """Two rows of one gradient in each other's place, and one row lost, are both rows' faults."""

    def swap(tensors: dict[str, Floats]) -> None:
        tensors[EARLY][[3, 4]] = tensors[EARLY][[4, 3]]

    def lose(tensors: dict[str, Floats]) -> None:
        tensors[EARLY][7] = 0

    for change, rows in ((swap, (3, 4)), (lose, (7,))):
        (wrong,) = answer(change).wrong
        assert wrong.name == f"grads:{EARLY}"
        assert wrong.row in rows


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_wrong(value: float) -> None:
    """A NaN or an infinity on one side is past every bound."""

    def change(tensors: dict[str, Floats]) -> None:
        tensors[LATE][5] = value

    location = answer(change).location
    assert location is not None
    assert (location.tensor, location.ranks) == (LATE, (0, 1))
    assert location.element is not None
    assert location.element.index == (5,)


def test_ranks_that_share_an_element_must_agree_to_the_bit() -> None:
    """A vector that both ranks have, with another last bit on one: wrong, however small."""
    sound, other = leg(rounded(1), 2), rounded(1)
    other[LATE] = np.nextafter(other[LATE].astype(np.float32), np.float32(9)).astype(np.float64)
    mixed = dataclasses.replace(
        sound,
        contents=dataclasses.replace(
            sound.contents, ranks=(sound.contents.ranks[0], leg(other, 2).contents.ranks[1])
        ),
    )
    samples = [leg(rounded(10 + number)) for number in range(NUM_SAMPLES)]
    location = compare_layouts(leg(rounded(0)), mixed, samples).location
    assert location is not None
    assert location.tensor == LATE
    assert "the candidate: rank 1 has other bits of [0] than 0" in location.evidence[0]


@pytest.mark.parametrize(("dtype", "experts"), [("bf16", 4), ("bf16", 0), ("fp32", 4)])
def test_a_router_in_eight_bits_of_mantissa_is_said_to_be_no_proof(
    dtype: str, experts: int
) -> None:
    """Where a token may go elsewhere for a rounding's sake, the answer says so; elsewhere not."""
    first = leg(rounded(0))
    config = first.result.spec.config
    config |= {"dtype": dtype, "model": config["model"] | {"experts": experts}}
    samples = [leg(rounded(10 + number)) for number in range(NUM_SAMPLES)]
    found = compare_layouts(first, leg(rounded(1), loss=4.1), samples).location
    assert found is not None
    said = any(told.startswith("routing:") for told in found.unknown)
    assert said == (dtype == "bf16" and experts > 0)


def test_a_loss_of_its_own_is_first() -> None:
    """A loss that is off comes before all gradients, and has no element."""
    location = answer(loss=4.001).location
    assert location is not None
    assert (location.phase, location.quantity, location.element) == ("forward", "loss", None)


def test_of_forward_passes_the_first_branch_that_is_apart_is_named() -> None:
    """Branches come in the order of forward, and only where what they lead to is apart, too."""
    first, second = "layers.0.mlp:output[0]", "layers.1.attn:output[0]"

    def run(seed: int, scale: float = 1.0) -> dict[str, Floats]:
        calls = np.random.default_rng(seed + 50).standard_normal((2, 2, 6, 16))
        whole = {name: 1 + NOISE * call for name, call in zip((second, first), calls, strict=True)}
        whole[second] *= scale
        return whole | rounded(seed)

    def compared(loss: float, scale: float) -> LayoutAnswer:
        samples = [leg(run(10 + number)) for number in range(NUM_SAMPLES)]
        return compare_layouts(leg(run(0)), leg(run(1, scale), 2, loss=loss), samples)

    found = compared(4.001, 1.01).location
    assert found is not None
    assert (found.phase, found.module, found.microbatch) == ("forward", "layers.1.attn", 0)
    assert (found.tensor, found.quantity) == (second, "taps.output")
    assert found.element is not None
    assert len(found.element.index) == 3
    assert compared(4.0, 1.01).location is None
    loss = compared(4.001, 1.0).location
    assert loss is not None
    assert loss.quantity == "loss"


def test_nothing_passes_where_nothing_was_compared() -> None:
    """A run that failed, damaged contents, no samples: the answer says so and is no pass."""
    failed = answer(what="crashed")
    assert failed.tensors == ()
    assert failed.message == "nothing was compared: run k: crashed: it fell over"
    sound = leg(rounded(0))
    damaged = dataclasses.replace(
        sound, contents=dataclasses.replace(sound.contents, problems=("rank 0 kept nothing",))
    )
    samples = [leg(rounded(2)), leg(rounded(3))]
    message = compare_layouts(sound, damaged, samples).message
    assert message == "nothing was compared: run k: rank 0 kept nothing"
    assert "expected samples, got 0" in compare_layouts(sound, sound, []).message


def test_a_piece_that_no_rank_has_is_wrong() -> None:
    """Half of the matrices is not there: the tensor cannot be compared, and that is said."""
    whole = leg(rounded(1), 2)
    half = dataclasses.replace(
        whole, contents=dataclasses.replace(whole.contents, ranks=whole.contents.ranks[:1])
    )
    samples = [leg(rounded(2)), leg(rounded(3))]
    location = compare_layouts(leg(rounded(0)), half, samples).location
    assert location is not None
    assert location.tensor == HEAD
    assert "the candidate has not all of it" in location.evidence[0]


def test_whole_tensors_have_every_bit() -> None:
    """What two ranks have is put together as it was, and every element has its owner."""
    tensors = rounded(4)
    found = whole_tensors(leg(tensors, 2).contents)
    for name, value in tensors.items():
        whole = found[f"grads:{name}"]
        assert whole.num_missing == 0
        assert np.array_equal(whole.values, value.astype(np.float32).astype(np.float64))
    assert found[f"grads:{HEAD}"].ranks_of((0, 8)) == (1,)
    assert found[f"grads:{LATE}"].ranks_of((8,)) == (0, 1)


def test_runs_keep_one_step_and_samples_have_the_data_alone_in_common() -> None:
    """Samples have no axis but those of the data, take no step more, and round by other seeds."""
    parallel = ParallelConfig(dp=2, tp=2)
    one, other = spec(2, parallel=ParallelConfig(dp=2)), spec(4, parallel=parallel, graph=("attn",))
    runs = runs_to_compare(one, other, 1)
    assert len({run.key for run in (runs.reference, runs.candidate, *runs.samples)}) == 8
    assert [run.rounding for run in (runs.reference, runs.candidate)] == [0, 0]
    for number, run in enumerate(runs.samples):
        config = TrainConfig.from_dict(run.config)
        assert (run.world_size, run.rounding, config.steps) == (2, number + 1, 2)
        assert config.parallel == ParallelConfig(dp=2)
        assert config.graph == ()
        assert run.keep is not None
        assert run.keep.step == 1
        assert config.taps == BRANCHES
    assert runs.candidate.config["taps"] == list(BRANCHES)
    other = spec(2, parallel=ParallelConfig(dp=2), engine="fsdp2")
    assert runs_to_compare(one, other, 1).candidate.config["taps"] == []


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "expected the same seed"),
    ({"parallel": ParallelConfig(dp=2)}, "as many dp x dp_outer ranks, got 1 and 2"),
    ({"model": dataclasses.replace(MODEL, dropout=0.1)}, "expected the same model"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda v: str(v)[:12])
def test_what_is_not_the_same_training_is_refused(options: dict[str, Any], message: str) -> None:
    """Another seed, other data or another model cannot be compared, and one line says why."""
    with pytest.raises(UsageError, match=message):
        runs_to_compare(spec(), spec(**options), 0)
    with pytest.raises(UsageError, match="expected a step below 3, got 3"):
        runs_to_compare(spec(), spec(), 3)
