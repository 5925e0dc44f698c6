"""A user's function, by `path/to/file.py:function` or `package.module:function`."""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from smalti.cli.failing import Failed
from smalti.cli.shapes import parse_args, spell, to_structs


@dataclass(frozen=True)
class Function:
    name: str  # as it was asked for
    call: Callable[..., Any]  # it, with its errors as Failed
    args: tuple[Any, ...]  # pytrees of what has shape and dtype

    @property
    def spelled(self) -> list[str]:
        return spell(self.args)


def load_function(text: str, args: str | None) -> Function:
    """The function and its arguments' shapes.

    args: as `parse_args` reads them. None: what the file says, `function.shapes` or the variable
        `<function>_shapes`: a list with a shape, or a pytree of shapes, for each argument.

    Raises ValueError where the text names no function or its shapes are unknown or do not fit, and
    Failed for what the file itself raises.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{text!r} is not FILE.py:FUNCTION or MODULE:FUNCTION")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    fn: Any = module
    for part in name.split("."):
        if not hasattr(fn, part):
            raise ValueError(f"{place} has no {part!r}{_hint(part, fn)}")
        fn = getattr(fn, part)
    if not callable(fn):
        raise ValueError(f"{text} is {type(fn).__name__}, which cannot be called")
    shapes = _shapes(text, name, fn, module, args)
    _check_fit(text, fn, shapes)
    return Function(text, _guarded(fn, module), shapes)


def _import_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):  # Path.is_file raises where the name is too long
        folder = path.parent
        siblings = [p.name for p in folder.glob("*.py")] if os.path.isdir(folder) else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"there is no file {path}{hint}")
    # As `python file.py` does: what lies beside the file can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    return _running(path.name, lambda: spec.loader.exec_module(module) or module)  # type: ignore[union-attr]


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ValueError(f"there is no module {name!r}; of a file, give the path with its .py")
    return _running(name, lambda: importlib.import_module(name))


def _running(what: str, importing: Callable[[], ModuleType]) -> ModuleType:
    try:
        return importing()
    except (Exception, SystemExit) as error:
        raise _failed(f"importing {what} failed", error, None) from error


def _hint(name: str, holder: Any) -> str:
    names = [
        other
        for other, value in vars(holder).items()
        if callable(value) and not other.startswith("_") and not inspect.isclass(value)
    ]
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it has {', '.join(sorted(names)[:12])}" if names else "; it has no function at all"


def _shapes(text: str, name: str, fn: Any, module: ModuleType, args: str | None) -> tuple[Any, ...]:
    if args is not None:
        try:
            return tuple(parse_args(args)) if args.strip() else ()
        except ValueError as error:
            raise ValueError(f"--args: {error}") from error
    beside = f"{name.rpartition('.')[2]}_shapes"
    value = getattr(fn, "shapes", None)
    if value is None:
        value = getattr(module, beside, None)
    if value is None:
        raise ValueError(
            f"the shapes of the arguments of {text} are not known: give --args "
            f"'bf16[8,128],f32[]', or set {beside} = ['bf16[8,128]', …] in its file"
        )
    if isinstance(value, str):
        return tuple(parse_args(value))
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"the shapes of {text} are {type(value).__name__}; they are a list, with one entry for "
            "each argument"
        )
    return tuple(to_structs(one) for one in value)


def _check_fit(text: str, fn: Any, args: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # it does not say
    try:
        signature.bind(*args)
    except TypeError as error:
        raise ValueError(
            f"{text} takes {signature}, and there are shapes for {len(args)} arguments ({error})"
        ) from error


def _guarded(fn: Any, module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(fn)
    def guarded(*args):
        try:
            return fn(*args)
        except Exception as error:
            name = getattr(fn, "__name__", "the function")
            raise _failed(f"{name} failed", error, module.__file__) from error

    if not hasattr(fn, "__name__"):  # a partial, or an object with __call__
        guarded.__name__ = guarded.__qualname__ = "function"
    return guarded


def _failed(what: str, error: BaseException, file: str | None) -> Failed:
    """With the error's own words, and where in the user's file it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        outside = [f for f in frames if "<frozen" not in f.filename and f.filename != __file__]
        theirs = [f for f in outside if file is not None and f.filename == file]
        last = (theirs or outside or frames)[-1]
        place = f"{last.filename}:{last.lineno}"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    details = "".join(traceback.format_exception(error))
    return Failed(f"{what} at {place}: {type(error).__name__}: {first}", details=details)
