"""The project's files as the architecture tests see them: paths, syntax trees, imports."""

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("fsdp_core", "harness", "reports")
CODE_FOLDERS = (*PACKAGES, "benchmarks", "tests")
FOLDERS = (*CODE_FOLDERS, "scenarios", "docs", ".ci", ".github")
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".yaml", ".yml", ".j2", ".html", ".css", ".sh", ".txt"}


@dataclass(frozen=True)
class Import:
    """One imported name. `top` is its first part; `nested` if a function holds the statement."""

    module: str
    name: str
    line: int
    nested: bool

    @property
    def top(self) -> str:
        """The distribution-level package."""
        return self.name.split(".")[0]


def settings() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def code_files(*folders: str) -> list[Path]:
    """Python files of these folders, all of them by default, sorted."""
    found = [path for folder in folders or CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert found, f"no Python files under {folders}"
    return sorted(found)


def text_files() -> list[Path]:
    """Files that people read: code, text and configuration, those at the top included."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    at_top = [path for path in ROOT.iterdir() if path.name not in (".git", ".gitignore")]
    files = [p for p in (*inside, *at_top) if p.is_file() and p.suffix in TEXT_SUFFIXES]
    return sorted(p for p in files if not p.name.startswith(".coverage"))


def module_name(path: Path) -> str:
    """Dotted name of a module of a package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def syntax(path: Path) -> ast.Module:
    """A file's syntax tree, read once: the tests change none."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file: statements, those inside functions too, and `import_module("x")`."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    tree = syntax(path)
    nested = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        for name in _imported(node):
            assert isinstance(node, ast.stmt | ast.expr)
            yield Import(module_name(path), name, node.lineno, id(node) in nested)


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [f"{module}.{alias.name}" for alias in node.names]
        case ast.Call(
            func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]
        ):
            return [name]
        case _:
            return []
