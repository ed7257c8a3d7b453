"""Histories of the real trainer and harness, each commit a change, from one on with a bug.

The bug is in replays on the host: one element of what a graph computes is doubled. Commits that do
not build have a line that is no Python, in the harness or in the trainer.
"""

import subprocess
from collections.abc import Collection
from pathlib import Path

from tests.bisect_history.history import Files

ROOT = Path(__file__).parents[2]
PACKAGES = ("fsdp_core", "harness")
GRAPH, COMMANDS, NUMBER = "fsdp_core/graph/host_graph.py", "harness/cli.py", "harness/change.txt"
BUG = """

_as_it_was = HostGraph.replay


def _doubled(self: HostGraph) -> None:
    _as_it_was(self)
    written = [tensor for step in self._steps for _, tensor in step.places]
    floats = [tensor for tensor in written if tensor.is_floating_point() and tensor.numel()]
    floats[-1].view(-1)[:1].mul_(2)


HostGraph.replay = _doubled
"""
NO_PYTHON = "\n\ndef broken(:\n"
SCENARIO = """\
name: found_wrong
why: A graph of attention that was right some commits ago.
base: {steps: 4, microbatches: 1}
axes: {graph: [eager, [attn]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 300}
"""


def trainers(number: int, first_bad: int, broken: Collection[int] = ()) -> list[Files]:
    """A commit that passes and `number` after it, bad from `first_bad` (1 to `number`) on."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard", "--",
         *PACKAGES],
        check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    first = {
        name: (ROOT / name).read_text()
        for name in filter(None, listed)
        if Path(name).suffix in (".py", ".typed", ".toml", ".md")
    }
    changes: list[Files] = []
    for place in range(number + 1):
        graph = first[GRAPH] + (BUG if place >= first_bad else "")
        commands = first[COMMANDS]
        if place in broken and place % 2:
            graph += NO_PYTHON
        elif place in broken:
            commands += NO_PYTHON
        changes.append(
            {**(first if place == 0 else {}), NUMBER: f"{place}\n",
             GRAPH: graph, COMMANDS: commands}
        )  # fmt: skip
    return changes
