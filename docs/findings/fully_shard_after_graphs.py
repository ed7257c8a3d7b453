"""FSDP2 does not train modules that were graphed before `fully_shard`, and nothing is raised.

Package: torch 2.11.0+cu130 (one H200); in 2.13 and 2.14.1 the code that matters reads alike. No
report was found.

What happens: `torch.cuda.make_graphed_callables(module, ...)` captures the module's parameters and
passes these same tensors to autograd in each call. `fully_shard(module)` then replaces the
parameters by sharded ones. Forward and backward go on with the old ones: the gradients land in the
`.grad` of tensors that no optimizer has, those of the new parameters stay None, and the optimizer
skips them. The loss looks plausible, as modules that were not graphed still train.

Expected: `fully_shard` refuses a module whose forward was graphed, as `make_graphed_callables`
refuses one with hooks; or the graphed forward refuses to run once its module's parameters are
others. The documentation of `make_graphed_callables` says that parameters may not be added or
removed afterwards; `fully_shard` does not say that it does so.

Run: torchrun --nproc-per-node 1 fully_shard_after_graphs.py
It prints, of a graphed and of a plain layer, whether the parameter has a gradient and changed.
With --shard-first `make_graphed_callables` refuses: "Modules must not have hooks registered".

Found by `harness run scenarios/combinations/combined.yaml::combinations_graph_first`:
`static_buffer`, and `state`.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train three steps; exit code 1 if a layer was not trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard-first", action="store_true", help="the order that is refused")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    sample = torch.randn(8, 64, device=device, requires_grad=True)

    def graph() -> None:
        make: Any = torch.cuda.make_graphed_callables
        model[0] = make(model[0], (sample,))

    def shard() -> None:
        for unit in (*model, model):
            fully_shard(unit)

    for each in (shard, graph) if options.shard_first else (graph, shard):
        each()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [layer.weight.full_tensor().clone() for layer in model]  # type: ignore[operator]
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        gradients = [layer.weight.grad is not None for layer in model]
        optimizer.step()
    has_failed = False
    for name, layer, old, has in zip(("graphed", "plain"), model, before, gradients, strict=True):
        is_changed = not torch.equal(layer.weight.full_tensor(), old)  # type: ignore[operator]
        has_failed |= not is_changed
        print(f"{name}: has a gradient: {has}, was trained: {is_changed}")
    dist.destroy_process_group()
    raise SystemExit(int(has_failed))


if __name__ == "__main__":
    main()
