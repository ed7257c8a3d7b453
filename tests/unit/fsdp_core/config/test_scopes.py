"""Contracts of fsdp_core.config: graph scopes."""

from fsdp_core.config import BEGINS_AT, SCOPES


def test_every_partial_scope_begins_somewhere() -> None:
    """At a layer or a part of it; but for the one that goes on where another ends."""
    assert set(BEGINS_AT) == set(SCOPES) - {"full_iteration", "moe_preprocess"}
