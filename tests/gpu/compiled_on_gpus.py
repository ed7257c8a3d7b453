"""Programs that train with compiled parts on GPUs, eagerly and in graphs."""

from dataclasses import replace

import torch
import torch.distributed as dist

from fsdp_core.device import Device
from fsdp_core.parallel.mesh import build_axes
from tests.gpu.scopes_on_gpus import config_of, first_difference, train


def compare(
    preset: str, layout: str, parts: tuple[str, ...], backend: str, scopes: tuple[str, ...]
) -> dict[str, str]:
    """By scope, where its run parts from the compiled eager one; "again" is eager's second run."""
    device = Device("cuda", torch.cuda.current_device())
    eager = replace(config_of(preset, layout), compile=parts, compile_backend=backend)
    axes = build_axes(eager.parallel, device)
    expected, _ = train(eager, axes, device)
    found = {"again": first_difference(expected, train(eager, axes, device)[0])}
    for scope in scopes:
        steps, graphs = train(replace(eager, graph=tuple(scope.split("+"))), axes, device)
        found[scope] = first_difference(expected, steps) if graphs else "nothing was captured"
    dist.barrier()
    return found
