"""Picking one of a few names, with the right one suggested when the word was a typo; and paths."""

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """`"Did you mean 'char'? "` for a near miss, else the empty string."""
    near = difflib.get_close_matches(got.lower(), list(allowed), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}? " if near else ""


def check_name(argument: str, got: str, allowed: Iterable[str]) -> str:
    """Returns `got` if it is one of `allowed`; raises ValueError that suggests one otherwise."""
    allowed = list(allowed)
    if got not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(
            f"{argument}: got {got!r}, allowed are {choices}. {did_you_mean(got, allowed)}".rstrip()
        )
    return got


def path_argument(text: str) -> Path:
    """For argparse: a path, but not the empty one, which would quietly be the current folder."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; it must be a path, or '.' for the current folder"
        )
    return Path(text)
