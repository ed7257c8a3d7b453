"""What dispatch modes have in common: which tensors they see, and how they live with a compiler."""

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def opens_itself(kind: type) -> bool:
    """Whether operators on a tensor class become operators on the tensors that it holds."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not torch._C._disabled_torch_dispatch_impl


def is_fake(kinds: Iterable[type]) -> bool:
    """Whether an operator's tensors are to know shapes alone, as where DTensor plans its own.

    Modes must hand these on: no other mode is asked once one does not implement them.
    """
    return any(issubclass(kind, FakeTensor) for kind in kinds)


class ObservingMode(TorchDispatchMode):
    """A mode that looks on while operators run: it compiles nothing and keeps no compiler out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around the mode that keeps the compiler out: every operator would pay."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler works as if nobody looked on; without this it gives up."""
        return True
