"""Comparing layouts: what is farther apart than rounding is named with its row and ranks."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest

from fsdp_core.config import ModelConfig, ParallelConfig, TrainConfig
from harness.bisect import layouts
from harness.bisect.found import Location
from harness.bisect.layouts import (
    BRANCHES,
    Apart,
    LayoutAnswer,
    Leg,
    compare_layouts,
    first_apart,
    runs_to_compare,
)
from harness.bisect.operators import Floats
from harness.errors import UsageError
from harness.records import FloatBits, RunResult, RunSpec
from harness.repeats import NUM_SAMPLES
from harness.store.contents import Contents, Loaded, Place
from tests.support import records

MODEL = ModelConfig(vocab_size=40, hidden=16, layers=2, heads=2, kv_heads=2, ffn=24, seq=6)
HEAD, LATE, EARLY = "head.weight", "layers.1.mlp.norm.weight", "layers.0.attn.wq.weight"
SHAPES = {EARLY: (8, 32), LATE: (16,), HEAD: (4, 16)}
NOISE = 1e-6

Tensors = Mapping[str, Floats]
Change = Callable[[dict[str, Floats]], None]


def spec(world_size: int = 1, **config: Any) -> RunSpec:
    """A run of a layout."""
    values: dict[str, Any] = {"model": MODEL, "steps": 3} | config
    return records.run_spec(world_size, config=TrainConfig(**values).to_dict(), timeout_s=9.0)


def leg(
    tensors: Tensors, num: int = 1, *, loss: float = 4.0, what: Any = "", **contents: Any
) -> Leg:
    """A run whose ranks each have some columns of matrices and all of every vector."""
    held: list[list[Loaded]] = [[] for _ in range(num)]
    for (name, whole), rank in ((item, r) for item in tensors.items() for r in range(num)):
        width = whole.shape[-1] // num if whole.ndim > 1 else whole.shape[0]
        first, rows = rank * width if whole.ndim > 1 else 0, (0,) * (whole.ndim - 1)
        part = np.ascontiguousarray(whole[..., first : first + width], np.float32)
        place = Place(
            name=name, shape=whole.shape, offsets=(*rows, first), local_offsets=(*rows, 0),
            sizes=part.shape,
        )  # fmt: skip
        called = name if ":" in name else f"grads:{name}"
        about = records.kept_tensor(called, part.shape, places=(place,))
        held[rank].append(Loaded(about=about, data=part.tobytes()))
    number = FloatBits.from_bits(int(np.float32(loss).view(np.uint32)))
    step = records.step(2, loss=number, microbatch_losses=(), grad_norm=number)
    outcome = records.outcome(what=what, message="it fell over" if what else "")
    kept: dict[str, Any] = {"step": 2, "ranks": tuple(map(tuple, held)), "problems": ()}
    ranks = (records.rank_records(steps=(step,)),)
    result = RunResult(spec=spec(), outcome=outcome, ranks=ranks)
    return Leg(result=result, contents=Contents(**(kept | contents)))


def rounded(seed: int) -> dict[str, Floats]:
    """The same gradients each time, rounded otherwise."""
    exact, noise = np.random.default_rng(0), np.random.default_rng(100 + seed)
    whole = {name: exact.standard_normal(shape) for name, shape in SHAPES.items()}
    return {n: v * (1 + NOISE * noise.standard_normal(v.shape)) for n, v in whole.items()}


SAMPLES = [leg(rounded(10 + number)) for number in range(NUM_SAMPLES)]


def answer(change: Change = lambda tensors: None, **options: Any) -> LayoutAnswer:
    """Two layouts, the second of two ranks and changed, and samples of as much rounding."""
    candidate = rounded(1)
    change(candidate)
    return compare_layouts(leg(rounded(0)), leg(candidate, 2, **options), SAMPLES)


def location_of(found: LayoutAnswer) -> Location:
    assert found.location is not None
    return found.location


def test_rounding_alone_is_no_difference() -> None:
    """Two runs as far apart as rounding takes samples: no tensor is wrong, none is at zero."""
    found = answer()
    assert (found.location, found.wrong) == (None, ())
    names = ["loss", f"grads:{HEAD}", f"grads:{LATE}", f"grads:{EARLY}"]
    assert [each.name for each in found.tensors] == names
    assert all(0 < each.units < 0.5 for each in found.tensors[1:])
    assert "all 4 tensors of step 2 are within their bounds" in found.message


def put(name: str, where: Any, value: float) -> Change:
    return lambda tensors: tensors[name].__setitem__(where, value)


def two(tensors: dict[str, Floats]) -> None:
    tensors[EARLY] *= 2
    tensors[HEAD][2, 13] += 1e-4


def swap(tensors: dict[str, Floats]) -> None:
    tensors[EARLY][[3, 4]] = tensors[EARLY][[4, 3]]


@pytest.mark.parametrize(
    ("change", "wrong", "rows", "ranks"),
    [
        (two, [HEAD, EARLY], (2,), (1,)),
        (swap, [EARLY], (3, 4), (1,)),
        (put(EARLY, (7, slice(16, None)), 0.0), [EARLY], (7,), (1,)),
        (put(LATE, 5, math.nan), [LATE], (None,), (0, 1)),
        (put(LATE, 5, math.inf), [LATE], (None,), (0, 1)),
    ],
)
def test_the_first_that_backward_makes_is_named_with_its_row(
    change: Change, wrong: list[str], rows: tuple[int | None, ...], ranks: tuple[int, ...]
) -> None:
    """A later layer's gradient comes first; a small fault in one row of many, a lost row, NaN."""
    found = answer(change)
    location = location_of(found)
    assert [each.name for each in found.wrong] == [f"grads:{name}" for name in wrong]
    assert found.wrong[0].row in rows
    assert (location.step, location.phase, location.quantity) == (2, "backward", "grads")
    assert (location.tensor, location.module) == (wrong[0], wrong[0].rpartition(".")[0])
    assert (location.ranks, location.rank) == (ranks, ranks[0])
    assert location.unknown[0].startswith("backward or reduce:")


def test_ranks_that_share_an_element_must_agree_to_the_bit() -> None:
    """A vector that both ranks have, with another last bit on one: wrong, however small."""
    sound, other = leg(rounded(1), 2), rounded(1)
    other[LATE] = np.nextafter(other[LATE].astype(np.float32), np.float32(9)).astype(np.float64)
    ranks = (sound.contents.ranks[0], leg(other, 2).contents.ranks[1])
    mixed, half = (leg(rounded(1), 2, ranks=kept) for kept in (ranks, ranks[:1]))
    location = location_of(compare_layouts(leg(rounded(0)), mixed, SAMPLES))
    assert (location.tensor, location.ranks) == (LATE, (1,))
    assert "the candidate: rank 1 has other bits of [0] than 0" in location.evidence[0]
    location = location_of(compare_layouts(leg(rounded(0)), half, SAMPLES))
    assert location.tensor == HEAD
    assert "the candidate has not all of it" in location.evidence[0]


@pytest.mark.parametrize(("dtype", "experts"), [("bf16", 4), ("bf16", 0), ("fp32", 4)])
def test_a_loss_of_its_own_is_first(dtype: str, experts: int) -> None:
    """Before all gradients; where a router may send a token elsewhere, the answer says so."""
    first = leg(rounded(0))
    config = first.result.spec.config
    config |= {"dtype": dtype, "model": config["model"] | {"experts": experts}}
    found = location_of(compare_layouts(first, leg(rounded(1), loss=4.001), SAMPLES))
    assert (found.phase, found.quantity, found.tensor) == ("forward", "loss", "")
    said = any(told.startswith("routing:") for told in found.unknown)
    assert said == (dtype == "bf16" and experts > 0)


@pytest.mark.parametrize(
    ("loss", "scale", "quantity"),
    [(4.001, 1.01, "taps.output"), (4.0, 1.01, ""), (4.001, 1.0, "loss")],
)
def test_of_forward_passes_the_first_branch_that_is_apart_is_named(
    loss: float, scale: float, quantity: str
) -> None:
    """Branches come in the order of forward, and only where what they lead to is apart, too."""
    first, second = "layers.0.mlp:output[0]", "layers.1.attn:output[0]"

    def run(seed: int, scale: float = 1.0) -> dict[str, Floats]:
        calls = np.random.default_rng(seed + 50).standard_normal((2, 2, 6, 16))
        whole = {name: 1 + NOISE * call for name, call in zip((second, first), calls, strict=True)}
        whole[second] *= scale
        return whole | rounded(seed)

    samples = [leg(run(10 + number)) for number in range(NUM_SAMPLES)]
    found = compare_layouts(leg(run(0)), leg(run(1, scale), 2, loss=loss), samples).location
    assert (found.quantity if found else "") == quantity
    if found is not None and quantity != "loss":
        assert (found.phase, found.module, found.microbatch) == ("forward", "layers.1.attn", 0)
        assert found.tensor == second


SOUND = leg(rounded(0))


@pytest.mark.parametrize(
    ("legs", "said"),
    [((SOUND, leg(rounded(0), what="crashed"), SAMPLES), "run k: crashed: it fell over"),
     ((SOUND, leg(rounded(0), problems=("rank 0 kept nothing",)), SAMPLES), "rank 0 kept nothing"),
     ((SOUND, SOUND, []), "expected samples, got 0")],
)  # fmt: skip
def test_nothing_passes_where_nothing_was_compared(legs: Any, said: str) -> None:
    """A run that failed, damaged contents, no samples: the answer says so and is no pass."""
    found = compare_layouts(*legs)
    case = dataclasses.make_dataclass("Case", ["id"])("x")
    assert (found.tensors, said in found.message) == ((), True)
    assert layouts.verdict_of(case, found).outcome == "error"


def test_runs_keep_one_step_and_samples_have_the_data_alone_in_common() -> None:
    """Samples have no axis but those of the data, take no step more, and round by other seeds."""
    parallel = ParallelConfig(dp=2, tp=2)
    one, other = spec(2, parallel=ParallelConfig(dp=2)), spec(4, parallel=parallel, graph=("attn",))
    runs = runs_to_compare(one, other, 1)
    assert len({run.key for run in runs}) == 8
    for number, run in enumerate(runs[2:]):
        config = TrainConfig.from_dict(run.config)
        assert (run.world_size, run.rounding, config.steps) == (2, number + 1, 2)
        assert (config.parallel, config.graph) == (ParallelConfig(dp=2), ())
        assert run.keep is not None
        assert (run.keep.step, config.taps) == (1, BRANCHES)
    assert runs[1].config["taps"] == list(BRANCHES)
    other = spec(2, parallel=ParallelConfig(dp=2), engine="fsdp2")
    assert runs_to_compare(one, other, 1)[1].config["taps"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "expected the same seed"),
        ({"parallel": ParallelConfig(dp=2)}, "as many dp x dp_outer ranks, got 1 and 2"),
        ({"model": dataclasses.replace(MODEL, dropout=0.1)}, "expected the same model"),
    ],
    ids=str,
)
def test_what_is_not_the_same_training_is_refused(options: dict[str, Any], message: str) -> None:
    """Another seed, other data or another model cannot be compared, and one line says why."""
    with pytest.raises(UsageError, match=message):
        runs_to_compare(spec(), spec(**options), 0)


@pytest.mark.parametrize(
    ("begin", "broken", "expected"),
    [*((n, None, n) for n in range(9)), (99, None, None), (0, 0, "error"), (99, 8, "error")],
)
def test_the_first_step_that_is_apart_is_found(
    monkeypatch: pytest.MonkeyPatch, begin: int, broken: int | None, expected: int | str | None
) -> None:
    """The first, else the last, else halving; whoever stops the search has the nearest one."""
    asked, seen = list[int](), list[int]()

    def compare(case: Any, step: int, asker: Any) -> LayoutAnswer:
        asked.append(step)
        place = Location(step=step) if step >= begin and step != broken else None
        return LayoutAnswer(place, () if step == broken else (Apart("loss", 0.5),), "")

    monkeypatch.setattr(layouts, "_compare", compare)
    case = dataclasses.make_dataclass("Case", ["candidate"])(spec(steps=9))
    told: Callable[[LayoutAnswer], None] = lambda x: seen.append(location_of(x).step or 0)  # noqa: E731
    found = first_apart(case, cast("Any", None), told)
    assert len(asked) == len(set(asked)) <= 6
    assert seen == sorted(seen, reverse=True)
    if expected == "error":
        assert found.tensors == ()
    else:
        assert (found.location and found.location.step) == expected
