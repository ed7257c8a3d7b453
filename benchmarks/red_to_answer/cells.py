"""Every cell of the smoke matrix, and a fault that makes it red."""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.faults.catalogue import CATALOGUE

SMOKE = "scenarios/smoke.yaml"
LAST = -1


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What makes a cell red: a fault that bites there."""

    fault: str
    step: int = 3
    rank: int = LAST

    def as_setting(self) -> str:
        """For `--set`."""
        takes = CATALOGUE[self.fault].takes
        step = f", step: {self.step}" if "step" in takes else ""
        rank = f", rank: {self.rank if self.rank >= 0 else 'last'}" if "rank" in takes else ""
        return f"plant={{fault: {self.fault}{step}{rank}}}"


PLANTED: Mapping[str, Planted] = {
    "fsdp_cudagraph_alignment.dp8-attn": Planted(fault="replay_lost"),
    "fsdp_cudagraph_alignment.dp8-moe_router": Planted(fault="gradients_not_reduced"),
    "fsdp_cudagraph_alignment.dp8-attn+moe_router+moe_preprocess": Planted(fault="stale_shard"),
    "fsdp_cudagraph_alignment.dp4_tp2_sequence_parallel-attn": Planted(fault="norm_counts_copies"),
    "fsdp_cudagraph_alignment.dp4_tp2_sequence_parallel-moe_router": Planted(fault="ulp"),
    "fsdp_cudagraph_alignment.dp4_tp2_sequence_parallel-attn+moe_router+moe_preprocess": Planted(
        fault="replay_lost"
    ),
    "fsdp_cudagraph_alignment.dp8_ep2_etp2-attn": Planted(fault="lost_expert_gradient"),
    "fsdp_cudagraph_alignment.dp8_ep2_etp2-moe_router": Planted(fault="bias_of_own_tokens"),
    "fsdp_cudagraph_alignment.dp8_ep2_etp2-attn+moe_router+moe_preprocess": Planted(
        fault="gradients_not_reduced"
    ),
    "dense_graphs.dp2-attn": Planted(fault="replay_lost"),
    "dense_graphs.dp2-full_iteration": Planted(fault="inputs_not_filled"),
    "dense_graphs.dp4-attn": Planted(fault="stale_shard"),
    "dense_graphs.dp4-full_iteration": Planted(fault="step_count_on_host", step=2),
    "dense_graphs.dp8-attn": Planted(fault="gradients_not_reduced", step=7),
    "dense_graphs.dp8-full_iteration": Planted(fault="stale_parameter", step=7),
    "layouts.dp2_tp2_sequence_parallel-dense_tiny_dropout-full_iteration": Planted(
        fault="norm_counts_copies", step=1
    ),
    "layouts.cp2-dense_tiny_dropout-full_iteration": Planted(fault="skipped_hop", step=1),
    "layouts.tp2_pp2-dense_tiny_dropout-full_iteration": Planted(
        fault="microbatches_in_other_order", step=1, rank=0
    ),
    "layouts.dp2_ep2-moe_tiny_capacity_factor1.25-full_iteration": Planted(
        fault="lost_expert_gradient", step=1
    ),
    "layouts.dp2_tp2_ep2_etp2-mla_moe_tiny_capacity_factor1.25-full_iteration": Planted(
        fault="bias_of_own_tokens", step=1
    ),
    "stress.attn-stress_jitter+poison+scramble": Planted(fault="early_release", step=1),
    "stress.attn-stress_races": Planted(fault="gather_ignores_writes", step=1),
    "stress.full_iteration-stress_jitter+poison+scramble": Planted(fault="zeroed_token"),
    "stress.full_iteration-stress_races": Planted(fault="clip_ignores_reductions", step=1),
}
"""By `SCENARIO.CASE`: every cell of the smoke matrix, and one of many faults that bite in it."""


def exactly(case: str) -> str:
    """The keyword that selects a case, and none whose name goes on with further scopes."""
    return f"{case} and not {case}+"
