"""What a configuration may ask for, and the trainer does not build yet.

Legal is one thing, built another: such configurations are validated, listed and planned, and
refused where a run would start. Once the trainer builds something, its line here goes; at present
it builds all that is legal.
"""

from fsdp_core.config.rule import ConfigError, Rule, broken
from fsdp_core.config.run import TrainConfig

NOT_BUILT: tuple[Rule[TrainConfig], ...] = ()


def not_built(config: TrainConfig) -> ConfigError | None:
    """The error of the first thing in `config` that the trainer does not build yet, or None."""
    return broken(NOT_BUILT, config)


def refuse_not_built(config: TrainConfig) -> None:
    """Stop a run that would train something else than it was told to.

    Raises:
        ConfigError: the configuration asks for what the trainer does not build yet.
    """
    error = not_built(config)
    if error is not None:
        raise error
