"""Dumps as NCCL's flight recorder leaves them, made by hand."""

import pickle
from pathlib import Path


def dump_of(path: Path, *calls: tuple[str, str, str], frames: bool = True) -> None:
    """A dump of collectives of two groups of ranks 0 and 1, each numbered from 1.

    Args:
        path: of the dump.
        calls: name of the group ("0" is that of all ranks), operator and state, in their order.
        frames: whether they have stacks, which those that C++ calls on a thread of its own lack.
    """
    numbers: dict[str, int] = {}
    entries = []
    for line, (group, operator, state) in enumerate(calls, 1):
        numbers[group] = numbers.get(group, 0) + 1
        stack = [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/c.py", "line": 3},
            {"name": "main", "filename": "/x/train.py", "line": line},
        ]  # fmt: skip
        entries.append(
            {
                "process_group": (group, "default_pg" if group == "0" else "undefined"),
                "collective_seq_id": numbers[group], "profiling_name": f"nccl:{operator}",
                "state": state, "is_p2p": False, "frames": stack if frames else [],
            }
        )  # fmt: skip
    config = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in ("0", "7")}
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries}))


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
