"""Errors that say in attributes what they are about, so that nobody reads it off their words."""


class TensorError(RuntimeError):
    """Something is wrong with tensors that have names: `names`, the first to be told of first."""

    def __init__(self, message: str, *names: str) -> None:
        self.names = list(names)
        super().__init__(message)
