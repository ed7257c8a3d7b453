"""After three steps the process group is destroyed and made again."""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training(ddp=True)
for step in range(STEPS):
    if step == 3 and training.mode == "bad":
        store = dist.PrefixStore("second", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=training.rank, world_size=2)
        training.net = DistributedDataParallel(training.model)
    training.step(step)
training.close()
