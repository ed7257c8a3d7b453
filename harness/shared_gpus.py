"""Ranks that share a GPU: how NCCL is told, and how a run's records say so."""

from collections.abc import Mapping

from harness.records import RunResult, What

SHARED_GPU: What = "shared_gpu"
"""What is said of a run where nobody knows whose doing its end was (`harness.engine.gpus`)."""
HOST_KEY = "NCCL_HOSTID"
SHARED_HOST = "shared-gpus"
"""How its value begins where ranks share GPUs (`harness/engine/gpus.py` has the reason)."""


def shares_gpus(run: RunResult) -> bool:
    """Whether any rank of the run shared its GPU with another one: its times mean nothing."""
    return any(
        _host(rank.start.environment).startswith(SHARED_HOST)
        for rank in run.ranks
        if rank.start is not None
    )


def _host(environment: Mapping[str, object]) -> str:
    fingerprint = environment.get("fingerprint", environment)
    variables = fingerprint.get("environment") if isinstance(fingerprint, Mapping) else None
    return str(variables.get(HOST_KEY, "")) if isinstance(variables, Mapping) else ""
