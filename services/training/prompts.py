"""Prompts like those a code model will see, from Python sources: function stubs, and requests made of them.

It knows Python's syntax and no tokens.
"""

import ast
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_DOCSTRING, MAX_DOCSTRING = 24, 1200

_REQUESTS = (
    "Write a Python function `{name}`. {text}",
    "Implement `{header}` in Python. {text}",
    "{text}\n\nWrite this as a Python function called {name}.",
    "How do I do this in Python? {text}",
    "Explain what a function `{name}` does whose documentation says: {text}",
)


@dataclass(frozen=True, slots=True)
class Stub:
    """A function without its body.

    Attributes:
        name: Of the function.
        header: From `def` to the colon.
        docstring: Its documentation, cleaned of indentation.
        source: Header and docstring as they stand in the file, from the left margin.
    """

    name: str
    header: str
    docstring: str
    source: str


def stubs_of(source: str) -> Iterator[Stub]:
    """Finds the documented functions and methods of a module, in order; none if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources have odd escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring, first = ast.get_docstring(node), node.body[0]
        if docstring is None or not MIN_DOCSTRING <= len(docstring) <= MAX_DOCSTRING:
            continue
        end = first.end_lineno
        if end is None or first.lineno == node.lineno:  # all on one line
            continue
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : end])) + "\n"
        header = " ".join("\n".join(lines[node.lineno - 1 : first.lineno - 1]).split())
        yield Stub(node.name, header, docstring, text)


def read_stubs(paths: Iterable[Path]) -> list[Stub]:
    """The stubs of many files, each text once.

    Raises:
        ValueError: A file is not UTF-8, or there is no stub in any of them.
    """
    found: dict[str, Stub] = {}
    for path in paths:
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
        for stub in stubs_of(source):
            found.setdefault(stub.source, stub)
    if not found:
        raise ValueError("the sources have no documented function: name folders with Python files")
    return list(found.values())


def request_of(stub: Stub, rng: random.Random) -> str:
    """Something a user might ask that the function answers."""
    text = stub.docstring.split("\n\n")[0]
    return rng.choice(_REQUESTS).format(name=stub.name, header=stub.header, text=" ".join(text.split()))


def shuffled(stubs: Sequence[Stub], seed: int) -> list[Stub]:
    """The stubs in an order that the seed alone decides."""
    order = list(stubs)
    random.Random(seed).shuffle(order)
    return order
