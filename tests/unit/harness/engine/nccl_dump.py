"""Dumps as NCCL's flight recorder leaves them, made by hand."""

import pickle
from pathlib import Path


def dump(path: Path, *states: str, at: int = 7) -> None:
    """A dump of torch's form: collectives of ranks 0 and 1, numbered up to `at`."""
    first = at - len(states) + 1
    entries = [
        {
            "process_group": ("0", "default_pg"), "collective_seq_id": first + place,
            "profiling_name": "nccl:_all_gather_base", "state": state, "is_p2p": False,
        }
        for place, state in enumerate(states)
    ]  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries}))
