"""Dumps as NCCL's flight recorder leaves them, made by hand."""

import pickle
from pathlib import Path

GATHER = "_all_gather_base"


def dump(path: Path, *calls: tuple[str, str, str], first: int = 1, frames: bool = True) -> None:
    """A dump of collectives of two groups of ranks 0 and 1.

    Args:
        path: of the dump.
        calls: name of the group ("0" is that of all ranks), operator and state, in their order.
        first: number of the first collective of each group.
        frames: whether they have stacks, which those that C++ calls on a thread of its own lack.
    """
    numbers: dict[str, int] = {}
    entries = []
    for line, (group, operator, state) in enumerate(calls, 1):
        numbers[group] = numbers.get(group, first - 1) + 1
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
