"""What a soaked run on GPUs leaves behind when it dies or hangs: NCCL's recorder, CUDA's core dump.

    NCCL's flight recorder   nccl_rank<R>     written by the rank's watchdog thread when the leader
                                              asks by the pipe nccl_rank<R>.pipe
    CUDA's core dump         cuda<R>.core     a light one: registers and the kernel, no memory; the
                                              program goes on and gets its error

What the user has set of these variables stands. A dump holds only plain values, so it is unpickled
with all classes refused. Replays of graphs enqueue nothing that NCCL records: a rank that waits in
one shows the last collectives outside of it.
"""

import ast
import errno
import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.disk import read_plain
from harness.engine.watch import Limits
from harness.engine.whereabouts import Place, group_key, place_path, read_place
from harness.records import RunSpec

BUFFER_ENTRIES = 2000
MAX_DUMP_BYTES = 256 << 20
DUMP_S = 5.0
"""Given to watchdogs, which look for requests once a second, and write."""
_COREDUMP_FLAGS = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory,skip_abort"
)
_EXCEPTION = re.compile(r"coredump: Detected an exception of type (\w+)")
_FRAME = re.compile(r"coredump:\s+#\d+\s+0x[0-9a-f]+\s+(\S.*)")
"""Of the stack of the warp that failed, innermost first: the last one is the kernel."""


def evidence_environment(
    spec: RunSpec, folder: Path, rank: int, set_already: Mapping[str, str]
) -> dict[str, str]:
    """Variables that make a rank leave evidence; none but for a soak on GPUs."""
    if spec.device != "cuda" or spec.soak is None:
        return {}
    prefix = str(folder.absolute() / "nccl_rank")
    wanted = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(BUFFER_ENTRIES),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": prefix,
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1",
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": _COREDUMP_FLAGS,
        "CUDA_COREDUMP_FILE": str(folder.absolute() / f"cuda{rank}.core"),
    }
    return {name: value for name, value in wanted.items() if name not in set_already}


def with_time_for_dumps(limits: Limits, spec: RunSpec) -> Limits:
    """As patient with ranks that are asked for stacks as their dumps need."""
    if not evidence_environment(spec, Path(), 0, {}):
        return limits
    return replace(limits, stacks_s=max(limits.stacks_s, DUMP_S))


def ask_for_dumps(folder: Path, ranks: Iterable[int]) -> None:
    """Ask watchdogs of ranks for what NCCL recorded; a rank that has none is passed over."""
    for rank in ranks:
        try:
            fd = os.open(folder / f"nccl_rank{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):
                continue  # no pipe, or nobody reads it
            raise
        os.write(fd, b"1\n")
        os.close(fd)


class _PlainUnpickler(pickle.Unpickler):
    """Takes apart numbers, texts, lists and mappings; a dump has nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a dump of plain values")


def read_dump(path: Path) -> Place | None:
    """Where a rank was by NCCL's recorder; None if it says nothing that can be understood."""
    try:
        dump = _PlainUnpickler(io.BytesIO(read_plain(path, MAX_DUMP_BYTES))).load()
        groups = {
            str(config["name"]): tuple(int(rank) for rank in ast.literal_eval(config["ranks"]))
            for config in dump["pg_config"].values()
        }
        entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")]
        return _place(entries, groups)
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, SyntaxError):
        return None
    except (KeyError, TypeError, AttributeError, IndexError):
        return None


def last_place(folder: Path, rank: int) -> Place | None:
    """Where a rank was: by its own notes on the CPU, by NCCL's recorder on a GPU, else None."""
    own = read_place(place_path(folder, rank))
    return own if own and own.operator else read_dump(folder / f"nccl_rank{rank}")


def last_module(folder: Path, rank: int) -> str:
    """The module that a rank was in, where it noted that; else ""."""
    own = read_place(place_path(folder, rank))
    return own.module if own is not None else ""


def _place(entries: list[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]) -> Place | None:
    """The first collective that is not over, or the last one."""
    if not entries:
        return None
    entered: dict[str, int] = {}
    for entry in entries:
        key = group_key(groups[str(entry["process_group"][0])])
        entered[key] = max(entered.get(key, 0), int(entry["collective_seq_id"]))
    open_ones = [entry for entry in entries if entry["state"] != "completed"]
    at = open_ones[0] if open_ones else entries[-1]
    group = groups[str(at["process_group"][0])]
    if open_ones:
        # It waits here, whatever was enqueued after it.
        entered[group_key(group)] = int(at["collective_seq_id"])
    operator = str(at["profiling_name"]).rpartition(":")[2]
    return Place(
        step=-1, operator=operator, label="", group=group, is_inside=bool(open_ones),
        entered=entered,
    )  # fmt: skip


def kernel_words(stderr_tail: str, folder: Path, rank: int) -> str:
    """What CUDA's core dump says of an illegal access, in words; "" without one."""
    core = folder / f"cuda{rank}.core"
    found, frames = _EXCEPTION.findall(stderr_tail), _FRAME.findall(stderr_tail)
    if not (found or core.exists()):
        return ""
    what = found[0] if found else "an exception"
    if frames:
        function = f"{frames[0].strip()} of " if len(frames) > 1 else ""
        return f"CUDA's core dump says {what} in {function}kernel {frames[-1].strip()}"
    if core.exists():
        command = f"cuda-gdb -ex 'target cudacore {core.name}'"
        return f"CUDA's core dump says {what}; `{command}` names the kernel"
    return f"CUDA says {what}; it left no core dump, so the kernel is not known"
