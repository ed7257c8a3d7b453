"""Evidence is data: nothing reads our own sentences, paths of tracebacks or printed lines again.

What a message says is also in a field of the exception, the record, the outcome or the answer that
it came from.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.arch.tree import ROOT, code_files, syntax

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
    "harness/engine/outcome.py": "faulthandler's stacks of a process that answers no more",
    "harness/provenance.py": "PyTorch says of a cuDNN that it refuses which one that is",
}
"""Files that take sentences apart, and whose they are."""


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


def test_no_sentence_is_taken_apart() -> None:
    """What somebody wants to know of a failure is a field of it."""
    found = {
        str(path.relative_to(ROOT)): [f"{each.lineno}: {ast.unparse(each)}" for each in read]
        for path in code_files("harness", "reports")
        if (read := list(takes_apart(syntax(path))))
    }
    assert found.keys() <= READS.keys(), found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("'never entered' in outcome.message", 1), ("x.evidence[0].startswith('step')", 1),
        ("any(p in error.message.lower() for p in ps)", 1), ("str(error).partition(':')", 1),
        ("one_line(flaw.message).split()", 1), ("name.partition('.')", 0), ("a.name in b.names", 0),
        ("found.message != NO_ANSWER", 1), ("error.message == 'gone'", 1), ("a.message != ''", 0),
    ],
)  # fmt: skip
def test_the_rule_finds_what_it_should(text: str, number: int) -> None:
    """It is not green by being blind."""
    assert len(list(takes_apart(ast.parse(text)))) == number
