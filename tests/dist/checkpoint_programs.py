"""Programs that save and load on ranks; a layout says how many there are and what each holds."""

import contextlib
import os
import pickle
import resource
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.checkpoint import CheckpointError, files, latest, load, save, save_async
from fsdp_core.checkpoint.files import StepWriter
from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard
from tests.dist.fsdp_models import WIDTH, Net, loss_of, rows
from tests.dist.fsdp_sides import differences, same_bits

PARAMS = "optim_grads_params"
LAYOUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "plain": ((1,), None),
    "no_shard": ((2,), "no_shard"),
    "optim": ((3,), "optim"),
    "optim_grads": ((2,), "optim_grads"),
    "params": ((4,), PARAMS),
    "alone": ((1,), PARAMS),
    "hsdp": ((2, 2), ("no_shard", PARAMS)),
    "hfsdp": ((2, 2), ("optim", PARAMS)),
    "one unit": ((3,), PARAMS),
    "more units": ((2,), PARAMS),
}
OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def world_of(layout: str) -> int:
    """Ranks of a layout."""
    shape = LAYOUTS[layout][0]
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


class Odd(Net):
    """Beside what divides badly: a 0-d and a frozen parameter, shared weights, a buffer."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(2, WIDTH), requires_grad=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.embed.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        self.seen += 1
        features = self.features(self.again(x) + (self.frozen @ x.mT).sum()) * self.scale
        out: torch.Tensor = self.head(features)
        return out


def build(
    layout: str, optimizer: str = "AdamW", seed: int = 3, factory: Callable[[], Net] = Odd
) -> tuple[Any, torch.optim.Optimizer]:
    """A model in a layout, and its optimizer in groups: matrices, and all else."""
    shape, strategy = LAYOUTS[layout]
    torch.manual_seed(seed)
    model = factory()
    if strategy is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        if layout == "more units":
            for block in model.blocks:
                fully_shard(cast("Any", block).up, mesh=mesh, strategy=strategy)
        if layout != "one unit":
            for block in model.blocks:
                fully_shard(block, mesh=mesh, strategy=strategy)
        fully_shard(model, mesh=mesh, strategy=strategy)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.dim() == 2) == is_2d] for is_2d in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.3, "note": (1, "b")}]
    made = OPTIMIZERS[optimizer](groups)
    return model, made


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps of training; every step and rank has data of its own."""
    for step in steps:
        loss_of(model(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: Any) -> torch.Tensor:
    """All rows, in memory of their own."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return cast("torch.Tensor", whole.detach().clone())


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, buffers, optimizer states and hyperparameters, of the global shape. Collective."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    parameters = dict(model.named_parameters())
    found: dict[str, Any] = {name: full(p) for name, p in parameters.items()}
    found |= {name: b.clone() for name, b in model.named_buffers()}
    # Adagrad makes states for parameters without rows as well, and does not go on with them.
    mine = {
        n: dict(optimizer.state.get(p, {})) if has_rows(p) else {} for n, p in parameters.items()
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    plain = {n: {k: full_or_none(v) for k, v in s.items()} for n, s in mine.items()}
    dist.all_gather_object(ranks, plain)
    for name, parameter in parameters.items():
        keys = {key: value for rank in ranks for key, value in rank[name].items()}
        for key, value in sorted(keys.items()):
            here = mine[name].get(key)
            if value is None:
                value = full(torch.zeros_like(parameter) if here is None else here)
            found[f"{name}.{key}"] = value
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"group{number}.{k}": v for k, v in group.items() if k != "params"}
    return found


def has_rows(parameter: Any) -> bool:
    """Whether this rank has any of it."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return bool(local.numel())


def full_or_none(value: Any) -> Any:
    """A plain value, None in the place of a cut tensor."""
    return None if hasattr(value, "full_tensor") else value


# --- round trips ------------------------------------------------------------------------------


def train_and_save(folder: str, layout: str, optimizer: str = "AdamW") -> dict[str, Any]:
    """Three steps, saved as step 3."""
    model, made = build(layout, optimizer)
    train(model, made, range(3))
    save(folder, 3, model, made, {"tokens": [3, 0.1]})
    return whole_state(model, made)


def load_each(folders: list[str], layout: str, optimizer: str = "AdamW") -> list[Any]:
    """What each folder's checkpoint is in this layout, loaded into a fresh model."""
    found = []
    for folder in folders:
        model, made = build(layout, optimizer, seed=4)
        loaded = load(folder, model, made)
        found.append((loaded.step, loaded.extra, whole_state(model, made)))
        train(model, made, range(3, 4))  # states are such as the optimizer works with
    return found


def continue_or_not(folder: str, layout: str, optimizer: str) -> tuple[Any, Any, Any]:
    """Training without a stop; resumed in fresh objects; and in live ones that went astray."""
    model, made = build(layout, optimizer)
    train(model, made, range(2))
    save(folder, 2, model, made)
    train(model, made, range(2, 4))
    expected = whole_state(model, made)
    other, other_made = build(layout, optimizer, seed=4)
    load(folder, other, other_made)
    train(other, other_made, range(2, 4))
    memory = addresses(made)
    load(folder, model, made)
    assert addresses(made) == memory
    train(model, made, range(2, 4))
    return expected, whole_state(other, other_made), whole_state(model, made)


def addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    """Where states and learning rates lie."""
    values = [v for states in optimizer.state.values() for v in states.values()]
    values += [v for group in optimizer.param_groups for v in group.values()]
    return [getattr(v, "_local_tensor", v).data_ptr() for v in values if torch.is_tensor(v)]


class Norm(Net):
    """Statistics that are of each rank's own data."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        out: torch.Tensor = self.norm(super().forward(x))
        return out


def rank_statistics(folder: str, saving: bool) -> list[list[float]]:
    """Each rank's running mean after training and saving, or as loaded."""
    layout = {1: "alone", 2: "more units", 4: "params"}[dist.get_world_size()]
    model, made = build(layout, factory=Norm)
    if saving:
        train(model, made, range(2))
        save(folder, 1, model, made)
    else:
        load(folder, model, made)
    return cast("list[list[float]]", model.norm.running_mean.tolist())


def warned_statistics(folder: str) -> tuple[list[list[float]], list[str]]:
    """As loaded, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = rank_statistics(folder, False)
    return found, [str(warning.message) for warning in caught]


def own_parameters(folder: str, saving: bool) -> str:
    """A plain parameter that each rank trains alone: saved, or what loading it comes to."""
    model = nn.Linear(2, 2)
    made = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    if saving:
        nn.init.constant_(model.weight, dist.get_rank())
        save(folder, 1, model, made)
        return ""
    try:
        load(folder, model, made)
    except ValueError as error:
        return str(error)
    return str(model.weight[0, 0].item())


# --- gathered weights, asynchronous saves -----------------------------------------------------


def gathered(folder: str, layout: str) -> tuple[Any, Any, list[torch.Tensor]]:
    """Save and load while units are gathered: the state before and after, and what forward sees."""
    shape, strategy = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    torch.manual_seed(3)
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy, mp_policy=policy)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    before = {name: full(p) for name, p in model.named_parameters()}
    x = rows(0, rank=0)
    with torch.no_grad():
        outs = [model(x)]
        model.blocks[0].unshard()
        save(folder, 1, model)
        model.blocks[0].reshard()
        model.reshard()
        for parameter in model.parameters():
            parameter.mul_(2)
        outs.append(model(x))
        model.blocks[0].unshard()
        load(folder, model)
        check_copies(model)
        outs.append(model(x))
    model.reshard()
    return before, {name: full(p) for name, p in model.named_parameters()}, outs


def check_copies(model: Any) -> None:
    """Copies that are kept at rest hold the weights, for graphs that replay without a gather."""
    for group in model.fsdp_groups:
        for copy, parameter in zip(group.unsharded, group.sharded, strict=True):
            if group.nest.weight_level == 0:
                assert same_bits(copy.detach(), full(parameter).bfloat16())


def save_while_training(folder: str, layout: str) -> tuple[Any, Any, Any]:
    """The state at an asynchronous save, and what two of them hold although training went on."""
    model, made = build(layout)
    train(model, made, range(1))
    expected = [whole_state(model, made)]
    held = Held.hold()
    pending = save_async(folder, 1, model, made)
    train(model, made, range(1, 3))
    assert not pending.done()
    assert latest(folder) is None
    held.set()
    expected.append(whole_state(model, made))
    second = save_async(folder, 2, model, made)
    assert pending.done()
    train(model, made, range(3, 4))
    assert second.wait() == Path(folder) / "step-00000002"
    dist.barrier()
    assert latest(folder) == 2
    found = []
    for step in (1, 2):
        load(folder, model, made, step=step)
        found.append(whole_state(model, made))
    return expected, found, pending.wait().name


class Held:
    """Keeps a save from writing until told."""

    @staticmethod
    def hold() -> threading.Event:
        """The next write waits for this event."""
        may, write = threading.Event(), StepWriter.write_data

        def wait_and_write(self: Any, plan: Any, planner: Any) -> Any:
            assert may.wait(30)
            StepWriter.write_data = write  # type: ignore[method-assign]
            return write(self, plan, planner)

        StepWriter.write_data = wait_and_write  # type: ignore[method-assign]
        return may


# --- failures ---------------------------------------------------------------------------------


def fail_then_save(folder: str, how: str, asynchronous: bool) -> dict[str, Any]:
    """A save that fails on rank 1 alone, and what comes after."""
    model, made = build("optim")
    train(model, made, range(1))
    save(folder, 1, model, made)
    expected = whole_state(model, made)
    train(model, made, range(1, 2))
    text = ""
    extra: dict[str, Any] = {"rank": 0}
    with planted(how, extra):
        try:
            if asynchronous:
                save_async(folder, 2, model, made, extra).wait()
            else:
                save(folder, 2, model, made, extra)
        except (ValueError, CheckpointError) as error:
            text = f"{type(error).__name__}: {error}"
    dist.barrier()
    names = sorted(path.name for path in Path(folder).iterdir())
    step = load(folder, model, made).step
    loaded = whole_state(model, made)
    save(folder, 2, model, made)
    after = sorted(path.name for path in Path(folder).iterdir())
    return {
        "text": text,
        "names": names,
        "step": step,
        "after": after,
        "differences": differences(expected, loaded),
    }


@contextlib.contextmanager
def planted(how: str, extra: dict[str, Any]) -> Iterator[None]:
    """What goes wrong on rank 1."""
    if dist.get_rank() != 1:
        yield
        return
    if how == "full disk":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    elif how == "unlike extra":
        extra["rank"] = 1
        yield
    else:
        extra["odd"] = {1, 2}
        yield


def die(
    rank: int,
    world_size: int,
    folder: str,
    victims: list[int],
    how: tuple[str, bool],
    pipe: Any,
) -> None:
    """Body of a process of its own: a save of step 2 in which some ranks are killed."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    model, made = build("params")
    train(model, made, range(1))
    save(f"{folder}/saved", 1, model, made)
    pipe.send_bytes(pickle.dumps(whole_state(model, made)))
    train(model, made, range(1, 2))
    pipe.send_bytes(pickle.dumps(whole_state(model, made)))
    if rank in victims:
        owner, name = {
            "writing": (files._SummedFile, "write"),
            "renaming": (Path, "rename"),
            "removing": (shutil, "rmtree"),
        }[how[0]]
        setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        if how[1]:
            pending = save_async(f"{folder}/saved", 2, model, made, keep=1)
            # The thread that saves tells the others: nobody has to ask for the outcome.
            wait([pending._future])
            store.set(f"over{rank}", "")
            store.wait([f"over{r}" for r in range(world_size) if r not in victims])
            text = str(pending.wait())
        else:
            text = str(save(f"{folder}/saved", 2, model, made, keep=1))
    except CheckpointError as error:
        text = str(error)
    pipe.send_bytes(pickle.dumps((text, time.monotonic() - start)))
    # Others must not learn of it from this process's end.
    pipe.recv_bytes()


def load_and_save(folder: str) -> tuple[int, Any, list[str]]:
    """What is left after a crash: the step, the state, and what the next save leaves."""
    model, made = build("optim", seed=4)
    step = load(folder, model, made).step
    state = whole_state(model, made)
    save(folder, 9, model, made)
    return step, state, sorted(path.name for path in Path(folder).iterdir())


# --- what does not fit ------------------------------------------------------------------------


def refusals(folder: str, kinds: list[str]) -> list[tuple[str, list[str]]]:
    """For each kind of misfit: the error, and what it changed."""
    found = []
    for kind in kinds:
        model, made = build("more units", seed=4)
        if kind == "damaged":
            path = next(Path(folder).glob("step-*/__1_0.distcp"))
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            dist.barrier()
            path.write_bytes(bytes(data))
        if kind == "optimizer on one rank" and dist.get_rank() == 1:
            made = OPTIMIZERS["SGD"](list(model.parameters()))
        before = whole_state(model, made)
        try:
            load(folder, model, made)
            text = "loaded"
        except (ValueError, CheckpointError) as error:
            text = f"{type(error).__name__}: {error}"
        found.append((text, differences(before, whole_state(model, made))))
    return found


def read_with_dcp(folder: str) -> list[str]:
    """torch's own load into a model of another layout: what differs from ours."""
    model, _ = build("params", seed=4)
    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id=f"{folder}/step-00000003")
    other, other_made = build("params", seed=5)
    load(folder, other, other_made)
    ours = {name: full(p) for name, p in other.named_parameters()}
    return differences(ours, {name: full(p) for name, p in model.named_parameters()})
