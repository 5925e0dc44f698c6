"""A small transformer and its training. Needs the extra `train`."""

import importlib.util
import sys

_NEEDED = ("matplotlib", "optax", "orbax.checkpoint", "pydantic", "rich", "yaml")


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


if missing := [name for name in _NEEDED if not _is_there(name)]:
    message = (
        f'nanogpt_jax needs {", ".join(missing)}: pip install "smalti[train]", or from a '
        'checkout pip install ".[train]"'
    )
    if sys.argv[0] == "-m":  # `python -m nanogpt_jax.train`: one line, no traceback
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)
    raise ModuleNotFoundError(message)
