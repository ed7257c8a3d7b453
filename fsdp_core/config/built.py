"""What a configuration may ask for, and the trainer does not build yet.

Legal is one thing, built another: such configurations are validated, listed and planned, and
refused where a run would start. Once the trainer builds something, its line here goes.
"""

from fsdp_core.config.rule import ConfigError, Rule, broken
from fsdp_core.config.run import TrainConfig

_SCOPES = ("attn", "full_iteration")


def _scopes(run: TrainConfig) -> ConfigError | None:
    missing = [scope for scope in run.graph if scope not in _SCOPES]
    if not missing:
        return None
    expected = "attn or full_iteration (no other scope is built so far)"
    return ConfigError("graph", expected=expected, got=missing[0], legal=_SCOPES)


def _attn_without_pipeline(run: TrainConfig) -> ConfigError | None:
    if "attn" not in run.graph or run.parallel.pp == 1:
        return None
    expected = "1, as graphs of attn hold one microbatch at a time (more are not built so far)"
    return ConfigError("parallel.pp", expected=expected, got=run.parallel.pp, legal=(1,))


def _attn_with_one_cp(run: TrainConfig) -> ConfigError | None:
    if "attn" not in run.graph or not run.parallel.dynamic_cp:
        return None
    expected = "no sizes, as graphs of attn hold one context size (more are not built so far)"
    return ConfigError("parallel.dynamic_cp", expected=expected, got=run.parallel.dynamic_cp)


NOT_BUILT: tuple[Rule[TrainConfig], ...] = (
    Rule("scopes_are_not_built", "Most graph scopes are not built so far.", _scopes),
    Rule("attn_in_pipelines_is_not_built", "Scope attn under pp is not built so far.",
         _attn_without_pipeline),
    Rule("attn_of_dynamic_cp_is_not_built", "Scope attn with dynamic cp is not built so far.",
         _attn_with_one_cp),
)  # fmt: skip


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
