"""Undo: generators and tensors from before go on as if nothing had been run."""

import torch

from fsdp_core.device import Device
from fsdp_core.graph.capture_session import Undo


def test_generators_draw_what_they_would_have_drawn() -> None:
    """Those that are named and the device's own are put back; others are nobody's business."""
    named, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = [torch.rand(3), torch.rand(3, generator=other)]
    torch.manual_seed(torch.initial_seed())
    default = torch.random.get_rng_state()
    with Undo(Device("cpu"), [named]):
        torch.rand(5)
        torch.rand(5, generator=named)
    assert torch.equal(torch.random.get_rng_state(), default)
    assert torch.equal(torch.rand(3, generator=named), expected[1])


def test_what_was_written_unseen_is_put_back_where_it_is_named() -> None:
    """Tensors that an operator writes are found; a write that none shows is, if it is named."""
    seen, named, unnamed = (torch.zeros(4) for _ in range(3))
    with Undo(Device("cpu"), [], [named]) as undo:
        with undo.watching():
            seen.add_(1)
        for tensor in (named, unnamed):
            tensor.numpy()[:] = 1
    assert [tensor.sum().item() for tensor in (seen, named, unnamed)] == [0.0, 0.0, 4.0]
