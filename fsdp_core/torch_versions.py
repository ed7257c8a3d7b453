"""What differs between the versions of torch that are supported, 2.11 to 2.14."""

import torch.distributed as dist

IS_2_13 = hasattr(dist, "all_gather_single")
"""From 2.13 on, a subclass of DTensor sees its operators: before, torch's C++ took them."""

# 2.13 renamed collectives: the old names warn there, the new ones are absent before.
ALL_GATHER = "all_gather_single" if IS_2_13 else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if IS_2_13 else "reduce_scatter_tensor"
FUNCTIONAL_ALL_GATHER = "all_gather_single" if IS_2_13 else "all_gather_tensor"
"""Of `_functional_collectives`; a reduce-scatter has its name of above."""
