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
# Of masks within masks. A mask is walked to its depth by all that is asked of it, under tracing
# too, and Python's stack has a thousand frames.
MOST_DEEP = 100
_ADVICE = "write it like 'streaming(sinks=4, window=512) & causal()'."


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
        node = ast.parse(text.strip(), mode="eval").body
    except (RecursionError, MemoryError) as error:
        raise _too_deep(text) from error
    except (SyntaxError, ValueError) as error:  # ValueError: what is no text, such as a null byte
        reason = getattr(error, "msg", None) or str(error)
        raise ValueError(f"mask {_short(text)} cannot be read ({reason}); {_ADVICE}") from error
    try:
        return _build(node, text, 0)
    except RecursionError as error:  # in a number, or in what is not allowed
        raise _too_deep(text) from error


def _too_deep(text: str) -> ValueError:
    return ValueError(
        f"mask {_short(text)} is nested more than {MOST_DEEP} deep, where each & and | of a chain "
        "and each ~ is one more; write a shorter one, or the mask as a function "
        "mask_mod(b, h, q_idx, kv_idx) in Python."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")


def _build(node: ast.expr, text: str, depth: int) -> Mask:
    if depth > MOST_DEEP:
        raise _too_deep(text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _build(node.left, text, depth + 1) & _build(node.right, text, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _build(node.left, text, depth + 1) | _build(node.right, text, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_build(node.operand, text, depth + 1)
    if isinstance(node, ast.Name):  # `causal` for `causal()`
        return _build(ast.Call(node, [], []), text, depth)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = [kw.arg for kw in node.keywords if kw.arg is not None]
        twice = next((word for word in named if named.count(word) > 1), None)
        if twice is not None:
            raise ValueError(
                f"mask {text!r}: {node.func.id} is given {twice}= {named.count(twice)} times; give "
                "it once."
            )
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
        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(NAMES)}."
        raise ValueError(f"mask {text!r}: no mask {name!r} here; {hint}")
    make = getattr(catalogue, name)
    signature = inspect.signature(make)
    known = signature.parameters
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        unknown = [word for word in kwargs if word not in known]
        near = [
            match
            for word in unknown
            for match in difflib.get_close_matches(word.lower(), known, n=1)
        ]
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
