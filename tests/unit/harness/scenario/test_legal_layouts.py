"""The list of legal layouts: what trying every combination finds, lazily and in order."""

import itertools
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.config import (
    DEGREES,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    divisors,
    model_from_preset,
)
from harness.scenario.legal_layouts import MAX_RANKS, legal_layouts


def by_trial(
    world_size: int, model: ModelConfig, **options: tuple[Any, ...]
) -> set[ParallelConfig]:
    """Legal layouts found by trying every combination of degrees in a whole run."""
    numbers = divisors(world_size)
    found = set()
    for degrees in itertools.product(numbers, repeat=len(DEGREES)):
        chosen = dict(zip(DEGREES, degrees, strict=True))
        dense = math.prod(chosen[axis] for axis in ("dp", "dp_outer", "tp", "cp", "pp"))
        if dense != world_size:
            continue
        for sequence_parallel in (False, True):
            for values in itertools.product(*options.values()):
                fields = chosen | dict(zip(options, values, strict=True))
                try:
                    parallel = ParallelConfig(**fields, sequence_parallel=sequence_parallel)
                    TrainConfig(model=model, parallel=parallel, microbatches=4)
                except ConfigError:
                    continue
                found.add(parallel)
    return found


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny", "mla_moe_tiny", "moonlight_16b_a3b"])
@pytest.mark.parametrize("world_size", [1, 2, 6, 8])
def test_the_list_is_what_trial_finds(preset: str, world_size: int) -> None:
    """Every legal layout is listed, once, and no other: the rules that skip early skip no more."""
    model = model_from_preset(preset)
    listed = list(legal_layouts(world_size, model, microbatches=4))
    assert len(set(listed)) == len(listed)
    assert set(listed) == by_trial(world_size, model)


def test_options_multiply_the_list() -> None:
    """Chunks and dynamic sizes are tried where they are asked for."""
    model = model_from_preset("moe_tiny", {"layers": 4})
    options: dict[str, tuple[Any, ...]] = {"pp_chunks": (1, 2), "dynamic_cp": ((), (1, 2))}
    listed = set(legal_layouts(4, model, microbatches=4, only=options))
    assert listed == by_trial(4, model, **options)
    assert {(p.pp_chunks, p.dynamic_cp) for p in listed} == set(
        itertools.product(*options.values())
    )


@settings(deadline=None)
@given(st.sampled_from(["dense_tiny", "moe_tiny"]), st.sampled_from([4, 8, 12]), st.data())
def test_only_leaves_out_and_nothing_else(preset: str, world_size: int, data: Any) -> None:
    """Restricting a field gives the layouts of the whole list that have one of its values."""
    model = model_from_preset(preset)
    values = st.sets(st.integers(1, 8), min_size=1)
    only = data.draw(st.dictionaries(st.sampled_from(DEGREES), values, max_size=3))
    whole = legal_layouts(world_size, model)
    kept = [p for p in whole if all(getattr(p, name) in only[name] for name in only)]
    assert list(legal_layouts(world_size, model, only=only)) == kept


def test_the_list_is_lazy() -> None:
    """The first of the layouts of a hundred thousand ranks is there at once."""
    began = time.process_time()
    first = next(legal_layouts(2**17, model_from_preset("qwen3_30b_a3b")))
    assert first.world_size == 2**17
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("world_size", "only", "key"),
    [(0, {}, "world_size"), (MAX_RANKS + 1, {}, "world_size"), (8, {"edp": [1]}, "edp")],
)
def test_bad_questions_are_refused_when_asked(
    world_size: int, only: dict[str, list[int]], key: str
) -> None:
    """The error comes with the call, not with the first layout."""
    with pytest.raises(ConfigError) as caught:
        legal_layouts(world_size, ModelConfig(), only=only)
    assert caught.value.key == key


def test_numbers_of_legal_layouts() -> None:
    """A change of these numbers is a change of rules: say which."""
    counts = {
        preset: [
            sum(1 for _ in legal_layouts(world_size, model_from_preset(preset)))
            for world_size in (8, 64)
        ]
        for preset in ("dense_tiny", "moe_tiny", "mla_moe_tiny", "qwen3_8b", "qwen3_30b_a3b",
                       "moonlight_16b_a3b", "llama3_8b")
    }  # fmt: skip
    assert counts == {
        "dense_tiny": [34, 112], "moe_tiny": [238, 1655], "mla_moe_tiny": [281, 2169],
        "qwen3_8b": [50, 305], "qwen3_30b_a3b": [295, 3891], "moonlight_16b_a3b": [306, 4675],
        "llama3_8b": [50, 305],
    }  # fmt: skip
