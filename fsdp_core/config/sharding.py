"""How FSDP shards parameters, and the vocabulary of strategies, pools and dtypes."""

from dataclasses import dataclass

from fsdp_core.config.rule import is_bool, one_of

DTYPES = ("bf16", "fp32")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What is cut over the ranks of an axis; each cuts all that the one before does."""
POOLS = ("dynamic", "double", "traced")


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How parameters are sharded and where gathered buffers come from."""

    strategy: str = "optim_grads_params"
    outer_strategy: str = "no_shard"
    pool: str = "double"
    persistent_on_miss: bool = True
    reshard_after_forward: bool = True
    reduce_dtype: str = "fp32"

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("outer_strategy", self.outer_strategy, STRATEGIES)
        one_of("pool", self.pool, POOLS)
        one_of("reduce_dtype", self.reduce_dtype, DTYPES)
        for key in ("persistent_on_miss", "reshard_after_forward"):
            is_bool(key, getattr(self, key))
