"""What a rank gives to each collective, digested: so that a wrong sum is led back to its giver.

    counter of live storage -> Notes.entering -> Given.take -> an event a step, in runs that tap

A digest of a gradient is that of the sum, on whichever rank holds its rows; what was added is seen
on the way in alone. Inputs are digested on the host, which is why it is done on the CPU only, and
only in runs that look into modules.
"""

import hashlib
from typing import Any

import torch

from harness.records import GIVEN, EventRecord, GivenCall

_INPUTS = frozenset({"input", "inputs", "input_tensor", "input_tensors", "tensors"})
"""What operators call the tensors that a rank brings along."""


class Given:
    """Collects what one rank gave in a step."""

    def __init__(self) -> None:
        self._calls: list[GivenCall] = []

    def take(self, func: Any, args: tuple[Any, ...], label: str, group: tuple[int, ...]) -> None:
        """A collective of a group is entered, for the unit of that name."""
        digest = hashlib.blake2b(digest_size=8)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.name in _INPUTS:
                for tensor in [value] if isinstance(value, torch.Tensor) else value:
                    # A copy: storage that numpy has seen can be resized no more, as pools do.
                    own = tensor.detach().clone(memory_format=torch.contiguous_format)
                    digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
        operator = func._schema.name.rpartition("::")[2].strip("_")
        self._calls.append(
            GivenCall(operator=operator, label=label, group=group, digest=digest.hexdigest())
        )

    def event(self, rank: int, step: int) -> EventRecord:
        """What was given since the last time."""
        calls, self._calls = self._calls, []
        detail = {"calls": [call.to_json() for call in calls]}
        return EventRecord(name=GIVEN, rank=rank, step=step, detail=detail)
