"""Where ranks find the store of their run."""

import socket

import pytest
import torch.distributed as dist

from harness.worker.main import join_store
from harness.worker.serve import open_torch_store

ADDRESS = "127.0.0.2"
"""Where nothing else listens: a rank that asks this machine's usual address finds nobody."""


@pytest.mark.parametrize(
    ("restart", "prefix"), [(None, ""), ("0", "harness/0/"), ("1", "harness/1/")]
)
def test_the_store_is_that_of_the_first_node(
    monkeypatch: pytest.MonkeyPatch, restart: str | None, prefix: str
) -> None:
    """At MASTER_ADDR; under torchrun, whose store lives longer, apart from an earlier attempt."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    store = open_torch_store(listener)
    assert isinstance(store, dist.TCPStore)
    monkeypatch.setenv("MASTER_ADDR", ADDRESS)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if restart is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    join_store(port).set("key", "value")
    assert store.get(f"{prefix}key") == b"value"
