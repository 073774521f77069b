"""python -m tests.house: what the house's rules count, over all Python files of the repository.

The rules: files of at most 500 lines, functions of at most 80, at most 8 parameters, no parameter
or result under `kernels/` that is annotated as a bare tuple or list, no import cycles.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

REPOSITORY = pathlib.Path(__file__).parents[1]
ROOMS = ("fa4_jax", "kernels", "tests", "benchmarks", "examples", "ffi")
MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 500, 80, 8
_BARE = ("tuple", "list", "dict")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something beyond a rule: where it is, and how far."""

    rule: str
    place: str
    amount: int


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every Python file of the repository, by its path from the root."""
    files = (path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py")))
    return {str(path.relative_to(REPOSITORY)): ast.parse(path.read_text()) for path in files}


def findings() -> list[Finding]:
    """All findings."""
    found = [
        Finding("lines of a file", path, lines)
        for path in modules()
        if (lines := len((REPOSITORY / path).read_text().splitlines())) > MOST_LINES
    ]
    for path, function in _functions():
        found += _of_function(path, function)
    return found + [Finding("import cycle", " -> ".join(cycle), len(cycle)) for cycle in cycles()]


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def _of_function(path: str, function: ast.FunctionDef) -> Iterator[Finding]:
    place = f"{path}: {function.name}"
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if lines > MOST_FUNCTION_LINES:
        yield Finding("lines of a function", place, lines)
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named = [argument for argument in named if argument.arg not in ("self", "cls")]
    if len(named) > MOST_PARAMETERS:
        yield Finding("parameters", place, len(named))
    if path.startswith("kernels/"):
        annotations = [argument.annotation for argument in named] + [function.returns]
        bare = sum(isinstance(a, ast.Name) and a.id in _BARE for a in annotations)
        if bare:
            yield Finding("bare tuples and lists", place, bare)


def cycles() -> list[list[str]]:
    """Groups of modules that import each other at run time, at the top of their files."""
    names = {_module(path): path for path in modules()}
    arrows = {name: _imports(modules()[path], names) for name, path in names.items()}
    found, numbers, low = list[list[str]](), dict[str, int](), dict[str, int]()
    stack: list[str] = []

    def visit(name: str) -> None:
        """Tarjan's algorithm: strongly connected components."""
        numbers[name] = low[name] = len(numbers)
        stack.append(name)
        for other in arrows[name]:
            if other not in numbers:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], numbers[other])
        if low[name] == numbers[name]:
            at = stack.index(name)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    for name in names:
        if name not in numbers:
            visit(name)
    return found


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(module: ast.Module, names: dict[str, str]) -> set[str]:
    """Modules of the repository that are imported at the top, not for type checkers alone."""
    imported: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in names else node.module for name in full}
    return imported & names.keys()


def main() -> None:
    """Prints what is beyond the rules, worst first."""
    table = Table("rule", "where", "amount")
    for finding in sorted(findings(), key=lambda finding: (finding.rule, -finding.amount)):
        table.add_row(finding.rule, finding.place, str(finding.amount))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
