"""__STORY__

Starts the program twice and compares what every optimizer step of every rank saw: bits of losses,
hashes of gradients, parameters, optimizer state and buffers. Needs torch and the program.

Exit codes: 1 the two runs differ, 0 they are equal, 2 they cannot be compared.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

TEXT = r"""__CASE__"""
CASE = json.loads(TEXT) if TEXT.startswith("{") else {}

RANK = r"""
import ctypes, gc, hashlib, importlib, json, os, runpy, sys
case = json.loads(os.environ["REPRO_CASE"])
import torch
from torch.optim import optimizer as optimizers

out = open(os.path.join(os.environ["REPRO_OUT"], "rank" + os.environ["RANK"]), "w", buffering=1)
names, roots, step, backward = {}, [], 0, torch.autograd.backward

def capturing():
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

def say(what, tensor):
    value = tensor.detach()
    value = (value.to_local() if hasattr(value, "to_local") else value).cpu().contiguous()
    data = ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())
    shown = f" = {value.item()!r}" if value.numel() == 1 else ""
    out.write(f"step {step}, {what}{shown}: {hashlib.sha256(data).hexdigest()[:16]}\n")

def name_all(optimizer):
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for module in (each for each in modules if id(each) not in inner):
        held = {id(parameter): name for name, parameter in module.named_parameters()}
        if trained & set(held):
            names.update(held)
            roots.append(module)

def say_all(what, optimizer, gradients=False, state=False):
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group {number}, parameter {place}")
            held = optimizer.state.get(parameter, {}) if state else {}
            parts = {f" ({key})": value for key, value in held.items()}
            if gradients:
                parts["" if parameter.grad is not None else " has none"] = parameter.grad
            for part, tensor in (parts if gradients or state else {"": parameter}).items():
                if isinstance(tensor, torch.Tensor):
                    say(f"{what} {name}{part}", tensor)

def before(optimizer, *_):
    if not capturing():
        roots or name_all(optimizer)
        say_all("before the update, parameter", optimizer)
        say_all("gradient of", optimizer, gradients=True)

def after(optimizer, *_):
    global step
    if not capturing():
        say_all("parameter", optimizer)
        say_all("optimizer state of", optimizer, state=True)
        for name, buffer in (pair for root in roots for pair in root.named_buffers()):
            say(f"buffer {name}", buffer)
        step += 1

def noted(tensors, *arguments, **options):
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if tensor.numel() == 1 and not capturing():
            say("loss", tensor)
    return backward(tensors, *arguments, **options)

torch.autograd.backward = noted
optimizers.register_optimizer_step_pre_hook(before)
optimizers.register_optimizer_step_post_hook(after)
if case["deterministic"]:
    import random
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    random.seed(0)
run, target = case["run"], case["target"]
if case["kind"] == "script":
    sys.argv[:], sys.path[0] = [target, *run["words"]], os.path.dirname(target)
    runpy.run_path(target, run_name="__main__")
elif case["kind"] == "module":
    sys.argv[:], sys.path[0] = [target, *run["words"]], case["folder"]
    runpy.run_module(target, run_name="__main__", alter_sys=True)
else:
    sys.path[0] = case["folder"]
    module, function = target.split(":")
    sys.exit(getattr(importlib.import_module(module), function)(**run["args"]))
"""


def main() -> int:
    """Run both and say what differs first."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(name, Path(folder, name)) for name in ("reference", "candidate")]
    (ours, left), (theirs, right) = runs
    ranks = ((r, zip_longest(left.get(r, []), right.get(r, []))) for r in {*left, *right})
    found = [(n, rank, *pair) for rank, lines in ranks for n, pair in enumerate(lines)]
    found = [each for each in found if each[2] != each[3]]
    code, said = 0, f"equal in {sum(map(len, left.values()))} values"
    if found:
        _, rank, a, b = min(found, key=lambda each: each[:2])
        where = (a or b).rpartition(": ")[0].partition(" = ")[0]
        both = f"  reference: {a or 'absent'}\n  candidate: {b or 'absent'}"
        code, said = 1, f"{rank} differs in {where}\n{both}"
    elif ours != theirs:
        code, said = 1, f"the reference ended with {ours}, the candidate with {theirs}"
    elif not any(left.values()) or ours != "exit code 0":
        code, said = 2, f"nothing to compare: both ended with {ours}"
    sys.stdout.write(f"{said}\n")
    return code


def _run(name: str, place: Path) -> tuple[str, dict[str, list[str]]]:
    """How the program ended, and what each of its ranks noted."""
    place.mkdir()
    run = CASE["runs"][name]
    paths = [str(place / "packages"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    said = json.dumps({**CASE, "run": run})
    environ = {"OMP_NUM_THREADS": "1", **os.environ, **run["env"], "REPRO_CASE": said}
    environ |= {"REPRO_OUT": str(place), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if CASE["deterministic"]:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if wanted := [f"{package}=={version}" for package, version in run["packages"].items()]:
        options = ["--quiet", "--no-deps", "--target", str(place / "packages")]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=True)
    (place / "rank.py").write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launcher, f"--nproc-per-node={CASE['ranks']}", str(place / "rank.py")]
    process = subprocess.Popen(words, env=environ, start_new_session=True)
    try:
        code = process.wait(CASE["timeout_s"])
        ended = f"exit code {code}"
    except subprocess.TimeoutExpired:
        ended = f"no end in {CASE['timeout_s']:g} s"
        process.terminate()  # its ranks have sessions of their own: the launcher ends them
        with suppress(subprocess.TimeoutExpired):
            process.wait(45)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ended, {path.name: path.read_text().splitlines() for path in place.glob("rank[0-9]*")}


if __name__ == "__main__":
    sys.exit(main())
