"""A training function with two lines of the recorder: a step of its own, and averaged weights.

It runs under torchrun as a script, and as `entry: lines:main` in a fork of the warm server.
"""

import argparse

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness.recorder import record


def main(*, steps: int = 6, foreach: bool = True, plant_step: int = -1) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    recorder = record(model, optimizer)
    recorder.state("ema", dict(averaged.module.named_parameters()))
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        batch = torch.randn(8, 16, generator=generator)
        if step == plant_step and dist.get_rank() == 1:
            batch[0, 0] += 2**-18
        with recorder.step():
            loss = model(batch).square().mean()
            loss.backward()
            recorder.microbatch(loss)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--foreach", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plant-step", type=int, default=-1)
    main(**vars(parser.parse_args()))
