"""What a rehearsal predicts of each rank beside what the rank measured."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_core.config import FsdpConfig, TrainConfig, model_from_preset
from fsdp_core.config.parallel import ParallelConfig
from tests.dist.rank_pool import RankPool
from tests.memory_table.programs import measure
from tests.memory_table.rehearsal import predict_at_rest, rehearse

SMALL = {"layers": 2, "vocab_size": 64, "hidden": 32, "ffn": 64, "seq": 16}
EXPERTS = SMALL | {"expert_ffn": 16, "experts": 4}


def small(
    model: str,
    *,
    fsdp: FsdpConfig | None = None,
    capacity: float | None = None,
    **parallel: int | bool,
) -> TrainConfig:
    """A run of a small model of a preset's kind."""
    shape: dict[str, Any] = SMALL if model.startswith("dense") else EXPERTS
    if capacity is not None:
        shape = shape | {"capacity_factor": capacity}
    if model.startswith("mla"):
        shape = shape | {"shared_expert_ffn": 16}
    return TrainConfig(
        model=model_from_preset(model, shape),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        fsdp=fsdp or FsdpConfig(),
        microbatches=2,
    )


def layouts() -> dict[str, TrainConfig]:
    """Layouts of 2 to 4 ranks that cover every axis, strategy and pool."""
    found = {}
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        found[f"dense dp2 {strategy}"] = small(
            "dense_tiny", fsdp=FsdpConfig(strategy=strategy), dp=2
        )
    for pool in ("double", "traced"):
        fsdp = FsdpConfig(pool=pool, persistent_on_miss=True)
        found[f"dense dp2 {pool}"] = small("dense_tiny", fsdp=fsdp, dp=2)
    found |= {
        "dense dp4": small("dense_tiny", dp=4),
        "dense dp2 x dp2": small("dense_tiny", dp_outer=2, dp=2),
        "dense dp2 x tp2": small("dense_tiny", dp=2, tp=2),
        "dense tp2 sequence": small("dense_tiny", tp=2, sequence_parallel=True),
        "dense dp2 x cp2": small("dense_tiny", dp=2, cp=2),
        "dense dp2 x pp2": small("dense_tiny", dp=2, pp=2),
        "experts dp2": small("moe_tiny", dp=2),
        "experts dp4 ep2 capacity": small("moe_tiny", capacity=1.0, dp=4, ep=2),
        "latent experts dp2": small("mla_moe_tiny", dp=2),
        "latent experts dp2 ep2 capacity": small("mla_moe_tiny", capacity=1.5, dp=2, ep=2),
    }
    return found


@dataclass(frozen=True)
class Row:
    """One rank: bytes measured and predicted, and whether what is at rest is exact."""

    layout: str
    rank: int
    measured: int
    predicted: int
    unexplained: int
    is_exact_at_rest: bool
    worst_owner: str
    worst_owner_bytes: int

    @property
    def error(self) -> float:
        """Of the peak, relative, with its sign."""
        return self.predicted / self.measured - 1.0


def compare(pool: RankPool, name: str, config: TrainConfig) -> Iterator[Row]:
    """Every rank of one layout."""
    measured = pool.run(measure, config.to_dict(), world_size=config.parallel.world_size)
    for rank, found in enumerate(measured):
        rehearsed = rehearse(config, rank)
        differ = {
            owner: rehearsed.owners[owner] - nbytes for owner, nbytes in found["owners"].items()
        }
        worst = max(differ, key=lambda owner: abs(differ[owner]))
        yield Row(
            name, rank, found["peak_bytes"], rehearsed.peak_bytes, abs(found["owners"]["rest"]),
            dataclasses.asdict(predict_at_rest(config, rank)) == found["at_rest"],
            worst, differ[worst],
        )  # fmt: skip
