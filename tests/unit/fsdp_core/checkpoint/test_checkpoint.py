"""Checkpoints of plain modules: files, names of states, what fits, and what is refused."""

import json
import math
import os
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdp_core.checkpoint import CheckpointError, files, latest, load, save
from fsdp_core.checkpoint.files import DOCUMENT


def model_of(width: int = 3, **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width, **options), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = model_of()
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def first_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, bytes]:
    tensors = dict(model.state_dict())
    if optimizer is not None:
        for index, states in optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{k}": v for k, v in states.items() if torch.is_tensor(v)}
    return {
        name: str(t.dtype).encode() + t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    """JSON values, and tuples, tensors, infinities and keys that are no strings."""
    extra = {
        "list": [1, 2.5, None, True, "x"],
        "best": math.inf,
        "small": 5e-324,
        "betas": (0.9, (1, [2])),
        "epochs": {1: "a", (2, 3): {"$tensor": "no"}},
        "noise": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    }
    save(tmp_path, 1, model_of(), extra=extra)
    found = load(tmp_path, model_of()).extra
    noise, expected = found.pop("noise"), cast("torch.Tensor", extra.pop("noise"))
    assert found == extra
    assert type(found["betas"]) is tuple
    assert noise.dtype == expected.dtype
    assert torch.equal(noise.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", 1j])
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value: Any) -> None:
    """Nothing is pickled; the error names the place."""
    with pytest.raises(ValueError, match=rf"extra\.a\.0, got a {type(value).__name__}"):
        save(tmp_path, 1, model_of(), extra={"a": [value]})
    assert latest(tmp_path) is None


def test_names_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    """A compiled block has the parameters that it has without."""
    model, optimizer = trained()
    save(tmp_path, 1, model, optimizer)
    other = model_of()
    wrapped = nn.Sequential(
        cast("nn.Module", torch.compile(other[0], backend="eager")), other[1], other[2]
    )
    wrapped_optimizer = torch.optim.AdamW(wrapped.parameters())
    load(tmp_path, wrapped, wrapped_optimizer)
    assert list(bits(wrapped, wrapped_optimizer).values()) == list(bits(model, optimizer).values())
    save(tmp_path, 2, wrapped, wrapped_optimizer)
    assert load(tmp_path, model, optimizer).step == 2


class Counter(nn.Module):
    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("seen", [{"n": (3, 4)}, torch.arange(5, dtype=torch.uint8)])
def test_extra_state_of_modules_comes_back(tmp_path: Path, seen: Any) -> None:
    """`get_extra_state` is stored, whatever its shape, and `set_extra_state` gets it."""
    save(tmp_path, 1, nn.Sequential(Counter(seen)))
    model = nn.Sequential(Counter(torch.zeros(0)))
    load(tmp_path, model)
    found = cast("Counter", model[0]).seen
    assert torch.equal(found, seen) if torch.is_tensor(seen) else found == seen


def test_states_keep_their_dtype(tmp_path: Path) -> None:
    """A state of another dtype than its parameter is not cast on the way."""
    model, optimizer = trained()
    states = optimizer.state[first_of(model)]
    states["exp_avg"] = states["exp_avg"].double() / 3
    states["seen"] = torch.tensor([2**40 + 1])
    expected = bits(model, optimizer)
    save(tmp_path, 1, model, optimizer)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path, model, optimizer)
    assert bits(model, optimizer) == expected


def test_hyperparameters_are_loaded_but_for_how_to_compute(tmp_path: Path) -> None:
    """Learning rates and the like are those saved, into the same memory; `foreach` is as built."""
    model, optimizer = trained(lr=torch.tensor(1 / 3), betas=(0.8, 0.7), foreach=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save(tmp_path, 1, model, optimizer)
    rate = torch.tensor(0.5)
    model, other = trained(lr=rate, amsgrad=False, foreach=None)
    other.param_groups[0]["mine"] = "stays"
    load(tmp_path, model, other)
    group = other.param_groups[0]
    assert group["lr"] is rate
    assert rate.item() == torch.tensor(1 / 3).item()
    assert (group["betas"], group["foreach"], group["mine"]) == ((0.8, 0.7), None, "stays")
    assert torch.equal(group["initial_lr"], rate)


# --- what does not fit ------------------------------------------------------------------------


class Adam2(torch.optim.Adam):
    """Another class."""


def with_state_key() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    optimizer.state[first_of(model)]["mine"] = torch.zeros(3, 4)
    return model, optimizer


MISFITS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "missing": (
        lambda: (nn.Sequential(*model_of(), nn.Linear(2, 2)), None),
        "without 3.bias, 3.weight and with nothing",
    ),
    "unexpected": (lambda: (model_of(bias=False), None), "without nothing and with 0.bias besides"),
    "shape": (lambda: (model_of(5), None), r"0.weight of torch.float32 \(5, 4\), got .*\(3, 4\)"),
    "dtype": (
        lambda: (model_of().double(), None),
        "0.weight of torch.float64 .*, got torch.float32",
    ),
    "meta": (lambda: (model_of().to("meta"), None), "0.weight in memory, got a meta tensor"),
    "optimizer": (lambda: trained(Adam2), "Expected Adam2 with 1 .*, got AdamW with 1"),
    "states": (with_state_key, "same states of 0.weight.*without mine and with nothing"),
    "foreign": (
        lambda: (model_of(), torch.optim.AdamW(model_of().parameters())),
        "Expected an optimizer over parameters of this model at rest",
    ),
    "fewer": (
        lambda: (lambda m: (m, torch.optim.AdamW(list(m.parameters())[1:])))(model_of()),
        "parameters in group 0.*with 0.weight besides",
    ),
}


@pytest.mark.parametrize("kind", list(MISFITS))
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, kind: str) -> None:
    """One line says what differs, and nothing is changed."""
    save(tmp_path, 1, *trained())
    make, message = MISFITS[kind]
    model, optimizer = make()
    before = {} if kind == "meta" else bits(model, optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, model, optimizer)
    assert "\n" not in str(caught.value)
    assert kind == "meta" or bits(model, optimizer) == before


def test_a_checkpoint_without_optimizer_loads_into_models_only(tmp_path: Path) -> None:
    """Weights alone load; an optimizer asks for its states in vain."""
    model, optimizer = trained()
    save(tmp_path, 1, model)
    load(tmp_path, model)
    with pytest.raises(ValueError, match="Expected an optimizer's state, got a checkpoint saved"):
        load(tmp_path, model, optimizer)


@pytest.mark.parametrize("step", [-1, True, 1.0])
def test_a_step_out_of_range_is_refused(tmp_path: Path, step: Any) -> None:
    """A step counts from 0."""
    with pytest.raises(ValueError, match="Expected a step of 0 or more"):
        save(tmp_path, step, model_of())
    assert names(tmp_path) == []


def test_everything_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole files and their folder are synced before the rename, the parent folder after it."""
    synced: dict[str, int] = {}
    at_rename: dict[str, int] = {}
    fsync, rename = os.fsync, Path.rename

    def note_sync(handle: int) -> None:
        path = str(Path(f"/proc/self/fd/{handle}").readlink())
        synced[path.replace(".metadata.tmp", ".metadata")] = os.fstat(handle).st_size
        fsync(handle)

    def note_rename(path: Path, to: Path) -> Path:
        if to.name == "step-00000001":
            files = {str(p): p.stat().st_size for p in (path, *path.iterdir())}
            assert files == {name: synced[name] for name in files}
            at_rename.update(files)
            synced.clear()
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(tmp_path, 1, *trained())
    assert len(at_rename) == 4
    assert str(tmp_path) in synced


def test_only_complete_checkpoints_are_seen(tmp_path: Path) -> None:
    """What a crash left is neither the latest nor loaded, and the next save removes it."""
    model = model_of()
    assert latest(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match=r"Expected a complete checkpoint in .*got steps \[\]"):
        load(tmp_path / "nowhere", model)
    save(tmp_path, 1, model)
    left = tmp_path / "step-00000007.incomplete"
    left.mkdir()
    (left / DOCUMENT).write_text("{}")
    (tmp_path / "step-notes").mkdir()
    assert latest(tmp_path) == 1
    assert load(tmp_path, model).step == 1
    with pytest.raises(ValueError, match=r"checkpoint of step=7 in .*got steps \[1\]"):
        load(tmp_path, model, step=7)
    save(tmp_path, 2, model)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-notes"]


def test_a_saved_step_is_not_overwritten(tmp_path: Path) -> None:
    """Saving a step again is refused, and the first stays as it is."""
    model = model_of()
    before = bits(model)
    save(tmp_path, 1, model)
    nn.init.zeros_(first_of(model))
    with pytest.raises(ValueError, match=r"Expected a step not saved before, got .*step-00000001"):
        save(tmp_path, 1, model)
    load(tmp_path, model)
    assert bits(model) == before


def test_a_full_disk_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails in the middle of a tensor says why it did."""
    monkeypatch.setattr(files, "_BLOCK_BYTES", 16)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"rank 0 with OSError: \[Errno 27\] File too large"
        ):
            save(tmp_path, 1, model_of())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest(tmp_path) is None


# --- damage -----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", DOCUMENT])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_found_before_anything_is_changed(tmp_path: Path, damage: str, file: str) -> None:
    """A flipped bit, a lost end or a lost file is refused by the file's name."""
    model, optimizer = trained()
    path = save(tmp_path, 1, model, optimizer)
    DAMAGES[damage](path / file)
    nn.init.zeros_(first_of(model))
    before = bits(model, optimizer)
    message = f"bytes in .*{file}" if damage == "cut" and file != DOCUMENT else file
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model, optimizer)
    assert bits(model, optimizer) == before


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A document that says it is of another format is not read as this one."""
    path = save(tmp_path, 1, model_of())
    whole = json.loads((path / DOCUMENT).read_text())
    whole["document"]["format"] = 2
    whole["crc32"] = zlib.crc32(json.dumps(whole["document"]).encode())
    (path / DOCUMENT).write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=r"Expected format 1 in .*, got 2"):
        load(tmp_path, model_of())
