"""What a configuration may ask for, and the trainer does not build yet.

Legal is one thing, built another: such configurations are validated, listed and planned, and
refused where a run would start. Once the trainer builds something, its line here goes.
"""

from collections.abc import Callable
from typing import Any

from fsdp_core.config.rule import ConfigError, Rule, broken
from fsdp_core.config.run import TrainConfig

_DEGREES = "only dp and dp_outer are built so far"


def _only(key: str, built: tuple[Any, ...], why: str) -> Callable[[TrainConfig], Any]:
    """A check that the value of `key` is one that is built."""
    part, _, name = key.partition(".")

    def check(run: TrainConfig) -> ConfigError | None:
        value = getattr(getattr(run, part), name)
        if value in built:
            return None
        words = " or ".join(str(choice) for choice in built)
        return ConfigError(key, expected=f"{words} ({why})", got=value, legal=built)

    return check


def _scopes(run: TrainConfig) -> ConfigError | None:
    built = ("attn", "full_iteration")
    missing = [scope for scope in run.graph if scope not in built]
    if not missing:
        return None
    expected = "attn or full_iteration (no other scope is built so far)"
    return ConfigError("graph", expected=expected, got=missing[0], legal=built)


def _head_dim(run: TrainConfig) -> ConfigError | None:
    model = run.model
    if model.attention != "gqa" or model.head_dim * model.heads == model.hidden:
        return None
    expected = f"hidden / heads = {model.hidden / model.heads:g} (no other is built so far)"
    return ConfigError("model.head_dim", expected=expected, got=model.head_dim)


NOT_BUILT: tuple[Rule[TrainConfig], ...] = (
    *(
        Rule(f"{axis}_is_not_built", f"{axis} is not built so far.",
             _only(f"parallel.{axis}", (1,), _DEGREES))
        for axis in ("tp", "cp", "ep", "etp", "pp")
    ),
    Rule("sequence_parallel_is_not_built", "Sequence parallel is not built so far.",
         _only("parallel.sequence_parallel", (False,), _DEGREES)),
    Rule("dynamic_cp_is_not_built", "Dynamic cp is not built so far.",
         _only("parallel.dynamic_cp", ((),), _DEGREES)),
    Rule("mla_is_not_built", "MLA is not built so far.",
         _only("model.attention", ("gqa",), "MLA is not built so far")),
    Rule("qk_norm_is_not_built", "Norms of query and key heads are not built so far.",
         _only("model.qk_norm", (False,), "norms of heads are not built so far")),
    Rule("head_dim_is_not_built", "A head_dim of its own is not built so far.", _head_dim),
    Rule("experts_are_not_built", "Experts are not built so far.",
         _only("model.experts", (0,), "experts are not built so far")),
    Rule("scopes_are_not_built", "Most graph scopes are not built so far.", _scopes),
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
