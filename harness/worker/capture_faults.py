"""Ranks that fail while graphs are captured, each at one place of the capture.

    handshake_raise   an exception as ranks agree to capture
    warm_up_raise     an exception in the warm-up, before what ranks of a layer exchange
    capture_raise     an exception in the capture, at the same place
    capture_oom       no memory is left there
    capture_sigkill   the process is killed there

The place is the attention of the first layer: every scope that is planted holds it, and with tensor
parallelism the others then wait inside of the very function that failed.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fsdp_core.device import Device
from fsdp_core.graph import capture_session
from fsdp_core.train import Trainer

WARM_UPS = 2
"""Calls of a partial scope's function before it is captured."""
PLACES: Mapping[str, str] = MappingProxyType(
    {
        "handshake_raise": "raise",
        "warm_up_raise": "raise",
        "capture_raise": "raise",
        "capture_oom": "oom",
        "capture_sigkill": "sigkill",
    }
)
"""Which fault of a rank each of them is."""


def plant_in_capture(trainer: Trainer, fault: str, action: Callable[[], None]) -> None:
    """Have `action` called once, where the fault's name says; the run captures attention."""
    if fault == "handshake_raise":
        _before_exchange(action)
    else:
        warms_up = fault == "warm_up_raise" or trainer.config.graph == ("full_iteration",)
        _before_attention(trainer, 0 if warms_up else WARM_UPS, action)


def _before_exchange(action: Callable[[], None]) -> None:
    exchange = capture_session.exchange_refusals

    def act_first(device: Device, what: str, refusal: str | None) -> dict[int, str]:
        action()
        return exchange(device, what, refusal)

    capture_session.exchange_refusals = act_first


def _before_attention(trainer: Trainer, num_calls: int, action: Callable[[], None]) -> None:
    """Act in the call after `num_calls` of the attention of this rank's first layer."""
    attention = next(
        module for name, module in trainer.stages[0].named_modules() if name.endswith(".attention")
    )
    forward, left = attention.forward, num_calls

    def act_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            attention.forward = forward
            action()
        return forward(*args, **kwargs)

    attention.forward = act_once
