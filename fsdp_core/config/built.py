"""What a configuration may ask for, and the trainer does not build yet.

Legal is one thing, built another: such configurations are validated, listed and planned, and
refused where a run would start. Once the trainer builds something, its line here goes.
"""

from fsdp_core.config.rule import ConfigError, Rule, broken
from fsdp_core.config.run import TrainConfig


def _graphs_of_packs_by_torch(run: TrainConfig) -> ConfigError | None:
    if not run.graph or not run.parallel.dynamic_cp or run.backend != "te":
        return None
    expected = "torch, as graphs of packs by TransformerEngine's attention are not built so far"
    return ConfigError("backend", expected=expected, got=run.backend, legal=("torch",))


def _delayed_scales_outside_of_graphs(run: TrainConfig) -> ConfigError | None:
    if run.fp8 != "delayed" or not set(run.graph) - {"full_iteration"}:
        return None
    expected = (
        "current or block, as scales that follow earlier steps are moved once a step, and partial "
        "scopes that leave them to that are not built so far"
    )
    return ConfigError("fp8", expected=expected, got=run.fp8, legal=("current", "block"))


NOT_BUILT: tuple[Rule[TrainConfig], ...] = (
    Rule("te_graphs_of_dynamic_cp_are_not_built",
         "Partial scopes with dynamic cp are built with the torch backend only, so far.",
         _graphs_of_packs_by_torch),
    Rule("delayed_fp8_in_partial_scopes_is_not_built",
         "Partial scopes compute in fp8 with scales of now only, so far.",
         _delayed_scales_outside_of_graphs),
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
