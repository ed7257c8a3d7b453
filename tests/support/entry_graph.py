"""Runs `scenarios/programs/entry_graph.yaml` over all modes of its program."""

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.records import Verdict
from harness.store import find_verdict

ROOT = Path(__file__).parents[2]
SCENARIO = "scenarios/programs/entry_graph.yaml::program_entry_graph"
MODES = "[eager, graph, stale_input, replaced_buffer, nothing]"


def verdicts_of_modes(out: Path, *, ranks: int, **environ: str) -> dict[str, Verdict]:
    """Verdicts by the candidate's mode; `environ`: variables over this process's."""
    words = ["--axis", f"args.mode={MODES}", "--set", f"ranks={ranks}", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", SCENARIO, *words],
        capture_output=True, text=True, check=False, timeout=240, cwd=ROOT,
        env=os.environ | environ,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    ids = [json.loads(path.read_text())["case_id"] for path in out.glob("cases/*/verdict.json")]
    found = [find_verdict(out / "cases" / each, each)[0] for each in ids]
    return {each.case_id.removeprefix("mode_"): each for each in found if each is not None}
