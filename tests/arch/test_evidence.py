"""Evidence is data: nothing reads our own sentences, paths of tracebacks or printed lines again.

What a message says is also in a field of the exception, the record, the outcome or the answer that
it came from. Patterns are for formats of others, and for grammars of names.
"""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.arch.tree import ROOT, code_files, syntax

NAMES = "a grammar of names or of what a user writes"
PATTERNS = {
    "harness/bisect/repro.py": (1, NAMES),
    "harness/scenario/settings.py": (1, NAMES),
    "harness/campaign/scoring.py": (1, NAMES),
    "harness/store/verify.py": (1, NAMES),
    "harness/runner/run.py": (1, NAMES),
    "harness/records.py": (1, NAMES),
    "harness/provenance.py": (3, "variables of the environment, commits, the driver's version"),
    "harness/recorder/hooks.py": (2, NAMES),
    "harness/recorder/observer.py": (1, NAMES),
    "harness/scenario/schema.py": (1, NAMES),
    "harness/scenario/suite.py": (1, NAMES),
    "harness/runner/plan.py": (1, NAMES),
    "harness/store/folder.py": (1, NAMES),
    "harness/pytest_plugin/session.py": (1, NAMES),
    "harness/engine/evidence.py": (3, "dumps of NCCL's recorder and CUDA's driver"),
    "harness/engine/outcome.py": (5, "faulthandler's stacks, srun's log, the kernel's counters"),
    "harness/engine/slurm.py": (1, "scontrol's output"),
    "harness/worker/node.py": (1, "scontrol's output"),
    "harness/program/packages.py": (13, "pip's output, and the grammar of requirements"),
    "harness/recorder/session.py": (1, "the table of library errors: gloo's places"),
    "harness/masking.py": (10, "secrets, in whatever form"),
    "harness/scenario/yaml_source.py": (2, "YAML"),
    "harness/terminal.py": (1, "blanks that rich leaves at ends of lines"),
    "reports/markdown.py": (2, "Markdown's own characters"),
    "reports/reading.py": (1, NAMES),
    "reports/text.py": (3, "digests, and characters that a terminal or XML does not take"),
}
"""Files that use patterns: how often, and on what. Our own sentences are no reason."""
PROSE = frozenset(
    {"message", "messages", "told", "said", "traceback", "evidence", "unknown", "notes", "stderr",
     "stderr_tail", "text", "words", "why"}
)  # fmt: skip
"""Fields that hold sentences."""
TAKES_APART = frozenset(
    {"startswith", "endswith", "partition", "rpartition", "split", "rsplit", "find", "rfind",
     "index", "removeprefix", "removesuffix", "count", "replace"}
)  # fmt: skip
READS = {
    "harness/engine/outcome.py": (1, "faulthandler's stacks of a process that answers no more"),
    "harness/history/ledger.py": (1, "SQLite gives text that does not decode no error code"),
    "harness/provenance.py": (1, "PyTorch says of a cuDNN that it refuses which one that is"),
}
"""Files that take sentences apart: how often, and whose they are."""


def takes_apart(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that look into a sentence: `"x" in a.message`, `str(error).split()`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            looked_in = [
                right
                for operator, right in zip(node.ops, node.comparators, strict=True)
                if isinstance(operator, ast.In | ast.NotIn)
            ]
            sides = (node.left, *node.comparators)
            is_asked = any(map(is_prose, sides)) and any(map(is_wording, sides))
            if any(map(is_prose, looked_in)) or is_asked:
                yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in TAKES_APART
            and is_prose(node.func.value)
        ):
            yield node


def is_wording(node: ast.expr) -> bool:
    """Whether an expression is a certain text, in place or as a constant of a module."""
    match node:
        case ast.Constant(value=str(text)):
            return bool(text)
        case ast.Name(id=name):
            return name.isupper()
        case _:
            return False


def is_prose(node: ast.expr) -> bool:
    """Whether an expression is a sentence, or one in lower case."""
    match node:
        case ast.Attribute(attr=name):
            return name in PROSE
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]):
            return name in ("error", "wrong", "lost", "failure")
        case ast.Call(func=ast.Attribute(attr="lower" | "strip" | "casefold", value=inner)):
            return is_prose(inner)
        case ast.Call(func=ast.Name(id="one_line"), args=[inner, *_]):
            return is_prose(inner)
        case ast.Subscript(value=inner):
            return is_prose(inner)
        case _:
            return False


def uses_of_patterns(tree: ast.AST) -> list[ast.Call]:
    """Calls of functions of `re`."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr != "escape"
    ]


def test_patterns_are_for_formats_of_others() -> None:
    """A new one has a reason in the list above, and one that went leaves it."""
    found = Counter[str]()
    for path in code_files("harness", "reports"):
        found[str(path.relative_to(ROOT))] += len(uses_of_patterns(syntax(path)))
    assert dict(+found) == {path: number for path, (number, _) in PATTERNS.items()}


def test_nothing_is_imported_from_re() -> None:
    """So that the test above sees every use."""
    for path in code_files("harness", "reports"):
        for node in ast.walk(syntax(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.module == "re"), path


def test_no_sentence_is_taken_apart() -> None:
    """What somebody wants to know of a failure is a field of it."""
    found = {
        str(path.relative_to(ROOT)): [f"{each.lineno}: {ast.unparse(each)}" for each in read]
        for path in code_files("harness", "reports")
        if (read := list(takes_apart(syntax(path))))
    }
    allowed = {path: number for path, (number, _) in READS.items()}
    assert {path: len(each) for path, each in found.items()} == allowed, found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("'never entered' in outcome.message", 1), ("x.evidence[0].startswith('step')", 1),
        ("any(p in error.message.lower() for p in ps)", 1), ("str(error).partition(':')", 1),
        ("one_line(flaw.message).split()", 1), ("name.partition('.')", 0), ("a.name in b.names", 0),
        ("found.message != NO_ANSWER", 1), ("error.message == 'gone'", 1), ("a.message != ''", 0),
        ("re.compile('x') or re.escape('y')", 0),
    ],
)  # fmt: skip
def test_the_rule_finds_what_it_should(text: str, number: int) -> None:
    """It is not green by being blind."""
    assert len(list(takes_apart(ast.parse(text)))) == number
    assert len(uses_of_patterns(ast.parse(text))) == ("re.compile" in text)
