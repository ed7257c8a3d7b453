"""A look at every operator that torch runs."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Seeing(TorchDispatchMode):
    """Inside, `see(operator, arguments, result)` is called after each operator."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(func, args, result)
        return result
