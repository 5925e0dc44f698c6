"""Masks written as text, for configs and command lines: ``"streaming(sinks=4, window=512)"``."""

from __future__ import annotations

import ast
import difflib
import inspect

from smalti.masks import catalogue
from smalti.masks.mask_mod import Mask

CATALOGUE = (
    *(catalogue.full, catalogue.causal, catalogue.sliding_window, catalogue.local),
    *(catalogue.streaming, catalogue.prefix_lm, catalogue.document, catalogue.lengths),
)
NAMES = tuple(make.__name__ for make in CATALOGUE)


def parse(text: str) -> Mask:
    """The mask that ``text`` describes: catalogue names called with ints, joined by ``&``, ``|``
    and ``~``, as in Python. Documents are given by their lengths: ``document(lengths=[100, 28])``.

    Raises ValueError, with the nearest name, for anything else; nothing is evaluated.

    >>> parse("sliding_window(256) | prefix_lm(16)")
    (sliding_window(256) | prefix_lm(16))
    """
    if not isinstance(text, str):
        raise ValueError(f"mask: got {type(text).__name__}; parse takes a text like 'causal()'.")
    try:
        return _build(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or "it is nested too deeply"
        raise ValueError(
            f"mask {text[:80]!r} cannot be read ({reason}); write it like "
            "'streaming(sinks=4, window=512) & causal()'."
        ) from error


def _build(node: ast.expr, text: str) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _build(node.left, text) & _build(node.right, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _build(node.left, text) | _build(node.right, text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_build(node.operand, text)
    if isinstance(node, ast.Name):  # `causal` for `causal()`
        return _build(ast.Call(node, [], []), text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "document":
            return _document(node, text)
        args = [_number(arg, text) for arg in node.args]
        kwargs = {str(kw.arg): _number(kw.value, text) for kw in node.keywords}
        return _call(node.func.id, args, kwargs, text)
    raise ValueError(
        f"mask {text!r}: {ast.unparse(node)!r} is not allowed; use {', '.join(NAMES)}, called with "
        "numbers and joined by &, | and ~ ('and', 'or', 'not' do not combine masks)."
    )


def _call(name: str, args: list, kwargs: dict, text: str) -> Mask:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(NAMES)}."
        raise ValueError(f"mask {text!r}: no mask {name!r} here; {hint}")
    make = getattr(catalogue, name)
    signature = inspect.signature(make)
    known = signature.parameters
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        unknown = [word for word in kwargs if word not in known]
        near = [match for word in unknown for match in difflib.get_close_matches(word, known, n=1)]
        hint = f"; did you mean {near[0]!r}?" if near else "."
        words = ", ".join(f"{word}=…" for word in known)
        raise ValueError(f"mask {text!r}: write {name}({words}){hint}") from None
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mask {text!r}: {error}") from error


def _document(node: ast.Call, text: str) -> Mask:
    """The one mask of a list: ids, one a token, are too many for a text."""
    words = {kw.arg: kw.value for kw in node.keywords}
    lengths = words.get("lengths")
    if node.args or len(words) != 1 or not isinstance(lengths, (ast.List, ast.Tuple)):
        raise ValueError(
            f"mask {text!r}: write document(lengths=[100, 28]): how many tokens each document has, "
            "packed one after another."
        )
    return _call("document", [], {"lengths": [_number(n, text) for n in lengths.elts]}, text)


def _number(node: ast.expr, text: str) -> int:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        value = None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"mask {text!r}: {ast.unparse(node)!r} is not a whole number.")
    return value
