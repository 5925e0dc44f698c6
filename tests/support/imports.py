"""The import graph of a source tree, read from its syntax: nothing is imported.

A module's imports are those anywhere in its file, functions and `TYPE_CHECKING` blocks
included. `from package import name` points to the module `package.name` where that is one, and
to `package` otherwise. What importing a submodule runs in its parents' `__init__` does not count:
every module of a package would reach every other through it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """`importer` uses `target` (a dotted module name) at `line`; `name` is what it takes from it,
    None for a plain `import target`."""

    importer: str
    target: str
    name: str | None
    line: int

    def __str__(self) -> str:
        what = self.target if self.name is None else f"{self.name} of {self.target}"
        return f"{self.importer}:{self.line} uses {what}"


class ImportGraph:
    """Every module below `src` and what it imports of the others."""

    def __init__(self, src: Path):
        self.files: dict[str, Path] = {}
        for path in sorted(src.rglob("*.py")):
            parts = path.relative_to(src).with_suffix("").parts
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.imports = [
            found for module in self.files for found in self._imports_of(module, self.files[module])
        ]
        self._edges: dict[str, set[str]] = {module: set() for module in self.files}
        for found in self.imports:
            self._edges[found.importer].add(found.target)

    def reachable(self, module: str) -> dict[str, str]:
        """Maps each module that `module` imports, directly or not, to the one it came through."""
        seen: dict[str, str] = {}
        todo = [module]
        while todo:
            importer = todo.pop()
            for target in self._edges[importer] - seen.keys():
                seen[target] = importer
                todo.append(target)
        return seen

    def _imports_of(self, module: str, path: Path) -> Iterator[Import]:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.files:
                        bound = alias.name if alias.asname else alias.name.split(".")[0]
                        aliases[alias.asname or bound] = bound
                        yield Import(module, alias.name, None, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    if full in self.files:
                        aliases[alias.asname or alias.name] = full
                        yield Import(module, full, None, node.lineno)
                    elif base in self.files:
                        yield Import(module, base, alias.name, node.lineno)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield from self._attribute(module, node, aliases)

    def _attribute(self, module: str, node: ast.Attribute, aliases: dict[str, str]):
        """`smalti.masks.causal` after `import smalti` takes causal from smalti.masks."""
        names = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        if not isinstance(value, ast.Name) or value.id not in aliases:
            return
        target = aliases[value.id]
        *path, last = reversed(names)
        for step in path:
            if f"{target}.{step}" not in self.files:
                return
            target = f"{target}.{step}"
        yield Import(module, target, last, node.lineno)
