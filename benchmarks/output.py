"""How fast what ranks print is taken: MB of all ranks together, per second of one core.

    python -m benchmarks.output

Processes write lines of a training log into pipes as fast as they can, and one process, as a
leader does, masks and stores them: its own processor time counts. "up to the cap" stores every
byte; "beyond it" only the end.
"""

import argparse
import json
import os
import selectors
import sys
import tempfile
import time
from pathlib import Path

from harness.engine.ranks import CappedOutput
from harness.masking import Masker

LINES = {
    "a training log": b"INFO 2026-05-01 12:00:01,123 train.py:212 step 1234 loss=2.3456 lr: 3e-04 "
    b"grad_norm 1.25 tokens/s 123456 layers.3.attn.q_proj\n",
    "words": b"lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor\n",
    "no lines": b"lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor ",
    "URLs": b"GET https://host.example/a/b?token=1 for user@host.example, key: value\n",
    "a secret a line": b"login as correct-horse-battery password=hunter22abc\n",
}
ENVIRON = {"A_TOKEN": "correct-horse-battery", "B_SECRET": "an0therS3cretValue"}
BLOCK_BYTES = 1 << 20


def measure(ranks: int, line: bytes, cap_bytes: int, size_bytes: int) -> float:
    """MB per second of processor time at which `size_bytes` of each of `ranks` are taken."""
    block = (line * (BLOCK_BYTES // len(line) + 1))[:BLOCK_BYTES]
    with tempfile.TemporaryDirectory() as folder, selectors.DefaultSelector() as selector:
        pids, outputs = [], []
        for rank in range(ranks):
            read_fd, write_fd = os.pipe()
            output = CappedOutput(
                read_fd, Path(folder, str(rank)), cap_bytes=cap_bytes, masker=Masker(ENVIRON)
            )
            pids.append(os.fork())
            if not pids[-1]:
                for _ in range(size_bytes // BLOCK_BYTES):
                    view = memoryview(block)
                    while view:
                        view = view[os.write(write_fd, view) :]
                os._exit(0)
            os.close(write_fd)
            outputs.append(output)
            selector.register(read_fd, selectors.EVENT_READ, output)
        began_s = time.process_time()
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.drain():
                    selector.unregister(key.fd)
        for output in outputs:
            output.close()
        took_s = time.process_time() - began_s
        for pid in pids:
            os.waitpid(pid, 0)
    return ranks * size_bytes / took_s / 1e6


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.output", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        {
            "lines": name, "ranks": ranks,
            "up to the cap, MB/s": round(measure(ranks, line, 1 << 40, (32 << 20) // ranks)),
            "beyond it, MB/s": round(measure(ranks, line, BLOCK_BYTES, (2 << 30) // ranks)),
        }
        for name, line in LINES.items() for ranks in options.ranks
    ]  # fmt: skip
    print(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
