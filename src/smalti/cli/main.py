"""Runs a command so that whatever goes wrong is one line on stderr and an exit code.

0: done. 1: no answer. 2: the command is wrong. 130: stopped by Ctrl-C. 141: nobody reads on.
"""

import importlib.util
import io
import os
import sys
from typing import Any

import jax

from smalti.cli.failing import STOPPED, Failed

_INTERRUPTED = 130
_NOBODY_READS = 141


def main(argv: list[str] | None = None) -> int:
    """`smalti`: returns the exit code."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        return _say(
            f'the command line needs {" and ".join(missing)}: pip install "smalti[cli]", or from a '
            'checkout pip install ".[cli]"',
            1,
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # 'µ' in ASCII is no reason to stop
    arguments = sys.argv[1:] if argv is None else argv
    if "JAX_PLATFORMS" not in os.environ:
        # No command runs anything on a TPU; asked for one, libtpu complains where there is none.
        os.environ["JAX_PLATFORMS"] = "cpu"  # of the workers
        jax.config.update("jax_platforms", "cpu")
    try:
        code = _run(arguments, verbose="--verbose" in arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head`
        # What is still buffered would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS
    return code


def _run(arguments: list[str], verbose: bool) -> int:
    import typer

    from smalti.cli.app import app

    # Whichever click typer brings along: the base of its usage errors, and what Ctrl-C becomes.
    usage_error: Any = typer.BadParameter.__mro__[2]
    try:
        result = typer.main.get_command(app).main(
            arguments, prog_name="smalti", standalone_mode=False
        )
    except usage_error as error:
        return _say(_suggest(error), 2)
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _say(STOPPED, _INTERRUPTED)
    except Failed as error:
        if verbose and error.details:
            print(error.details, file=sys.stderr)
        return _say(str(error), error.code)
    except ValueError as error:
        return _say(str(error), 2)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer has seen to stdout already
            return _NOBODY_READS
        raise
    except Exception as error:
        from smalti.estimate import EstimateError  # late: it takes a while, and --help has no use

        if not isinstance(error, EstimateError):
            raise
        if verbose and (printed := getattr(error, "compiler_message", "")):
            print(printed, file=sys.stderr)
        return _say(str(error), 1)
    if result == _INTERRUPTED:  # some versions of typer return what others raise
        return _say(STOPPED, _INTERRUPTED)
    return result if isinstance(result, int) else 0


def _suggest(error: Any) -> str:
    """What click says, in one line; of an unknown command with the nearest name."""
    import difflib
    import re

    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    unknown = re.match(r"No such command '(.*?)'", text)
    if unknown and context is not None and "Did you mean" not in text:
        names = list(getattr(context.command, "commands", ()))
        near = difflib.get_close_matches(unknown[1], names, n=1)
        text += f" Did you mean '{near[0]}'?" if near else f" There are: {', '.join(names)}."
    if context is not None:
        text += f" See: {context.command_path} --help"
    return text


def _say(text: str, code: int) -> int:
    one_line = " ".join(text.split())
    print(f"smalti: {one_line}", file=sys.stderr)
    return code
