"""Plant failures that follow a device, a rank, the program, or nothing; see that each is told.

    python -m benchmarks.calibration.hardware              all eight (minutes; 2 cores or GPUs)
    python -m benchmarks.calibration.hardware -k builtin   the built-in trainer; `program`: a script
    python -m benchmarks.calibration.hardware --device cpu not on GPUs that are there

Exit codes: 0 all as expected, 1 not, 4 usage.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE = Path(__file__).parents[2] / "scenarios" / "hardware" / "hardware.yaml"
EXPECTED = {
    ("builtin", "ulp_s1_d0"): "device",
    ("builtin", "ulp_s1_r1 and not once"): "rank",
    ("builtin", "epsilon_s1"): "program",
    ("builtin", "once"): "nothing",
    ("program", "device"): "device",
    ("program", "rank"): "rank",
    ("program", "program"): "program",
    ("program", "once"): "nothing",
}
"""Scenario and case, and what its failure follows."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration.hardware")
    parser.add_argument("-k", default="", metavar="WORDS", help="part of `builtin device`")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder of the searches")
    asked = parser.parse_args(arguments)
    out = asked.out or Path(tempfile.mkdtemp(prefix="hardware-"))
    chosen = [(key, says) for key, says in EXPECTED.items() if asked.k in f"{key[0]} {says}"]
    if not chosen:
        sys.stderr.write(f"-k {asked.k}: expected part of a name, got one of none\n")
        return 4
    right = [_trace(*key, says, asked.device, out) for key, says in chosen]
    sys.stdout.write(f"{sum(right)} of {len(right)} right; searches: {out}\n")
    return 0 if all(right) else 1


def _trace(scenario: str, case: str, expected: str, device: str, out: Path) -> bool:
    folder, began_s = out / f"{scenario}-{expected}", time.monotonic()
    mark = ["--set", f"args.mark={folder}.mark"] if scenario == "program" else []
    done = subprocess.run(
        [sys.executable, "-m", "harness", "bisect", f"{FILE}::hardware_{scenario}",
         "-k", case, "--hardware", "--device", device, *mark, "--out", str(folder), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = (json.loads(done.stdout or "{}").get("hardware") or {}) if done.returncode == 1 else {}
    best = (found.get("suspects") or [{}])[0]
    is_right = found.get("follows") == expected
    told = f"{found.get('follows', done.stderr.strip()[-300:])} {best.get('device', '')}".strip()
    counts = f"{len(found.get('trials', ()))} trials, {time.monotonic() - began_s:.0f} s"
    sure = f"{best.get('probability', 0):.1%}"
    mark_of = "" if is_right else "   WRONG"
    sys.stdout.write(f"{scenario:8} {expected:8} -> {told}, {sure}, {counts}{mark_of}\n")
    sys.stdout.flush()
    return is_right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
