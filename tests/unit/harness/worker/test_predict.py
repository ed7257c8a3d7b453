"""Contracts of harness.worker.predict."""

import io
import json
import sys

import pytest

from fsdp_core.allocations import Explanation
from fsdp_core.config import TrainConfig, model_from_preset
from fsdp_core.config.parallel import ParallelConfig
from harness.worker.predict import predict, predicted


def test_a_model_that_fits_nowhere_is_known_at_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 billion parameters over 64 ranks: weights, gradients and moments by arithmetic, no peak."""
    model = model_from_preset("llama3_8b", {"layers": 4, "vocab_size": 128_000})
    config = TrainConfig(model=model, parallel=ParallelConfig(dp=64))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([config.to_dict()])))
    assert predict() == 0
    (answer,) = json.loads(capsys.readouterr().out)
    # A layer: wq, wo 4096 x 4096, wk, wv 4096 x 1024, three of 4096 x 14336, two norms.
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    weights = 4 * layer + 2 * 128_000 * 4096 + 4096
    kept = answer["at_rest"]["0"]
    assert kept["parameters"] == kept["gradients"] == pytest.approx(4 * weights / 64, rel=1e-3)
    assert kept["largest_unit"] == pytest.approx(2 * (2 * 128_000 * 4096 + 4096), rel=1e-3)
    assert (answer["peak"], answer["why_no_peak"]) == (None, "too large to rehearse on a CPU")


@pytest.mark.parametrize(("dp", "ranks"), [(4, [0, 1, 2, 3]), (8, [0])])
def test_the_largest_peak_of_few_ranks_is_that_of_every_rank(
    dp: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to four ranks all are rehearsed, as another than a stage's first may take more."""
    seen: list[int] = []

    def rehearsed(config: TrainConfig, rank: int) -> Explanation:
        seen.append(rank)
        return Explanation(peak_bytes=100 + rank % 3, owners={}, largest_rest=())

    monkeypatch.setattr("harness.worker.predict.rehearse", rehearsed)
    config = TrainConfig(model=model_from_preset("dense_tiny"), parallel=ParallelConfig(dp=dp))
    answer = predicted(config)
    assert seen == ranks
    assert answer["peak"]["rank"] == (2 if dp == 4 else 0)
