"""Load PyTorch's FSDP2 tests so that they run on CPU ranks, with torch's `fully_shard` or ours."""

import ast
import functools
import re
import sys
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

sys.modules.setdefault("expecttest", cast("Any", SimpleNamespace(TestCase=unittest.TestCase)))
# ruff: noqa: E402
from torch.testing._internal import common_distributed, common_fsdp
from torch.testing._internal.common_utils import TestCase

import fsdp_core.fsdp

PATCHERS = re.compile(r"patch_(foreach|unshard|reshard|post_backward|register_post)")
"""Helpers of PyTorch's test suite that replace functions of its own implementation."""

PRIVATE = re.compile(r"torch\.distributed\.fsdp\._(?!init_utils)")
"""Modules of its implementation; `_init_utils` only makes process groups."""

PUBLIC = re.compile(r"torch|dist\b|super|nn\b|\w*mesh")
"""Whose names with an underscore say nothing of FSDP."""

SOURCE = (
    (r"torch\.distributed\._composable\.fsdp(\.fully_shard)?\b", "torch.distributed.fsdp"),
    (r"(?m)^(import torch_npu|from torch_npu\S* import .*)$", ""),
    (r"@SupportedDevices\(.*\)", ""),
    (r"@unittest.skipIf\(not TEST_CUDA.*\)", ""),
    (r"@skipIfUnsupportMultiNPU\(.*\)", ""),
    (r"\bFSDPNPUTest\b", "CpuTest"),
    (r"\.(npu|cuda)\(\)", ".cpu()"),
    (r"\btorch\.(npu|cuda)\b", "torch.cpu"),
    (r"device_ids=\[self.rank\]", "device_ids=None"),
    (r"([\"'])(npu|cuda)(:0)?\1", r"\1cpu\1"),
    (r"self\.assertGreater\(self\.rank, 0\)", "pass"),
    (r"\.to_local\(\),(\s+[\w.]+)\.to_local\(\)", r".full_tensor(),\1.full_tensor()"),
)
"""Other devices' names, so that copies of the files made for them do, too. That rank 0 has rows of
every parameter, and that units of other parameters cut one alike: which rows a rank has is the
engine's own, so whole tensors are compared."""

calls: list[int] = []
"""One item a call of `fully_shard`."""


@dataclass(frozen=True)
class Test:
    """A test method of a file; `private`: names of torch's implementation that it uses."""

    file: Path
    case: str
    method: str
    private: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.file.stem.removeprefix('test_fully_shard_')}::{self.case}::{self.method}"

    def ranks(self, most: int) -> int:
        """Its number of ranks, at most `most`."""
        return int(min(most, getattr(load(self.file), self.case)(self.method).world_size))


REFUSALS = (AssertionError, ValueError, RuntimeError, NotImplementedError)


class CpuTest(common_fsdp.FSDPTestMixin, TestCase):
    """What stands in for PyTorch's base classes: this process is one rank already."""

    rank = 0

    @property
    def world_size(self) -> int:
        """As many as the machine is said to have devices."""
        return dist.get_world_size() if dist.is_initialized() else torch.cpu.device_count()

    def perThreadSetUp(self) -> None:  # noqa: N802
        """Ranks are processes."""

    perThreadTearDown = perThreadSetUp  # noqa: N815

    def assertRaisesRegex(  # noqa: N802
        self, expected_exception: Any, expected_regex: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """How a refusal is worded is no part of the interface; nor is AssertionError."""
        kind = REFUSALS if expected_exception is AssertionError else expected_exception
        return self.assertRaises(kind, *args, **kwargs)  # noqa: PT027

    def assertNotEqual(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Of what a rank has no rows there is nothing that could differ."""
        if not isinstance(x, torch.Tensor) or x.numel():
            super().assertNotEqual(x, y, *args, **kwargs)  # noqa: PT009

    @property
    def process_group(self) -> dist.ProcessGroup:
        """All ranks."""
        return dist.distributed_c10d._get_default_group()


def check_whole_parity(
    case: unittest.TestCase,
    replicated: torch.nn.Module,
    sharded: torch.nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
) -> None:
    """`check_sharded_parity`, but of whole tensors: which rows a rank has is the engine's own."""
    pairs = zip(replicated.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, expected), (sharded_name, parameter) in pairs:
        plain_name = functools.reduce(
            lambda n, p: n.replace(p, ""), prefixes_to_ignore, sharded_name
        )
        assert name == plain_name, (name, plain_name)
        for plain, cut in ((expected, parameter), (expected.grad, parameter.grad)):
            assert (plain is None) == (cut is None), f"{name}: {plain} and {cut}"
            if plain is not None:
                assert isinstance(cut, DTensor), type(cut)
                case.assertEqual(cut.full_tensor(), plain)  # noqa: PT009


def use_cpu(devices: int) -> None:
    """Make the machine one of `devices` CPU devices for the tests, and count what they wrap."""
    torch.cpu.device_count = lambda: devices
    vars(torch.cpu)["current_device"] = lambda: 0
    for name in ("FSDPTest", "FSDPTestMultiThread", "FSDPTestContinuous"):
        setattr(common_fsdp, name, CpuTest)
    for name in ("skip_if_lt_x_gpu", "skip_if_rocm_arch_multiprocess"):
        setattr(common_distributed, name, lambda *_a, **_k: lambda method: method)
    vars(common_fsdp)["check_sharded_parity"] = check_whole_parity
    torch_fsdp.fully_shard = common_fsdp.fully_shard = _counted(torch_fsdp.fully_shard)


def use_ours() -> None:
    """Put our names in the place of torch's public ones, for the files loaded from now on."""
    for name in torch_fsdp.__all__[torch_fsdp.__all__.index("CPUOffloadPolicy") :]:
        ours = getattr(fsdp_core.fsdp, name, None) or _absent(name)
        setattr(torch_fsdp, name, _counted(ours) if name == "fully_shard" else ours)
    common_fsdp.fully_shard = torch_fsdp.fully_shard
    load.cache_clear()


def _counted(fully_shard: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fully_shard)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return fully_shard(*args, **kwargs)

    return counted


def _absent(name: str) -> type:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"fsdp_core.fsdp has no {name}")

    return type(name, (), {"__init__": refuse})


@functools.cache
def load(file: Path) -> types.ModuleType:
    """The file as a module; private names of torch that this version lacks are refused in use."""
    source = file.read_text()
    for pattern, replacement in SOURCE:
        source = re.sub(pattern, replacement, source)
    tree = ast.parse(source)
    module = types.ModuleType(file.stem)
    module.__dict__.update(__file__=str(file), CpuTest=CpuTest)
    for statement in tree.body:
        try:
            exec(compile(ast.Module([statement], []), str(file), "exec"), module.__dict__)
        except ImportError:
            if not isinstance(statement, ast.ImportFrom):
                raise
            found = __import__(str(statement.module), fromlist=["_"])
            for alias in statement.names:
                have = getattr(found, alias.name, None) or _absent(alias.name)
                setattr(module, alias.asname or alias.name, have)
    return module


def collect(file: Path) -> list[Test]:
    """The tests of a file."""
    module, tests = load(file), []
    functions, imported = _functions(ast.parse(file.read_text()))
    for case, made in vars(module).items():
        is_case = isinstance(made, type) and issubclass(made, CpuTest)
        if is_case and made.__module__ == module.__name__:
            owners = [base.__name__ for base in made.__mro__]
            for method in unittest.TestLoader().getTestCaseNames(made):
                private = _private_names(functions, imported, owners, method)
                tests.append(Test(file, case, method, private))
    return tests


def _functions(tree: ast.Module) -> tuple[dict[str, ast.AST], set[str]]:
    """Functions by name, methods by class and name; names imported from private modules."""
    found: dict[str, ast.AST] = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    for made in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        methods = (part for part in made.body if isinstance(part, ast.FunctionDef))
        found |= {f"{made.name}.{method.name}": method for method in methods}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    private = (node for node in imports if PRIVATE.search(str(node.module)))
    return found, {alias.asname or alias.name for node in private for alias in node.names}


def _private_names(
    functions: dict[str, ast.AST], imported: set[str], owners: list[str], method: str
) -> tuple[str, ...]:
    """Names of torch's implementation that a method uses, itself or through what it calls."""
    found: set[str] = set()
    todo = [method]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        for key in {name, *(f"{owner}.{name}" for owner in owners)} & functions.keys() - seen:
            seen.add(key)
            for node in ast.walk(functions[key]):
                base = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
                if isinstance(node, ast.Name):
                    todo.append(node.id)
                    found |= {node.id} if node.id in imported or PATCHERS.match(node.id) else set()
                elif isinstance(node, ast.Attribute) and base in ("self", "cls"):
                    todo.append(node.attr)
                elif isinstance(node, ast.Attribute):
                    is_private = re.match("_[^_]", node.attr) and not PUBLIC.match(base)
                    is_state = (base, node.attr) == ("fully_shard", "state")
                    found |= {node.attr} if is_private or is_state else set()
    return tuple(sorted(found))
