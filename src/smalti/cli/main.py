"""Runs a command so that whatever goes wrong is one line on stderr and an exit code.

0: done. 1: no answer. 2: the command is wrong. 130: stopped by Ctrl-C. 141: nobody reads on.
"""

import contextlib
import errno
import importlib.util
import io
import os
import sys
import traceback
from typing import Any

import jax

from smalti.cli.failing import STOPPED, Failed

_INTERRUPTED = 130
_NOBODY_READS = 141
# What writing ends in, where no file has been opened that the error could name.
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)


def main(argv: list[str] | None = None) -> int:
    """`smalti`: returns the exit code."""
    _open_what_is_closed()
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
        _drop(sys.stdout)
        return _NOBODY_READS
    except OSError as error:
        if "--verbose" in arguments:
            _print(traceback.format_exc())
        return _say(f"{_what_failed(error)}: {error.strerror or error}", 1)
    return code


def _open_what_is_closed() -> None:
    """`>&-` and `2>&-`, for which Python has no stream: nothing can be printed to the one, as
    elsewhere, and what goes wrong is said to nobody."""
    if sys.stdout is None:
        descriptor = os.open(os.devnull, os.O_RDONLY)  # which takes nothing
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w")), "utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _what_failed(error: OSError) -> str:
    try:
        sys.stdout.flush()  # what could not be written is still there, if it is buffered
    except OSError:
        _drop(sys.stdout)
        return "the output cannot be written"
    if error.filename is not None:
        return str(error.filename)
    return "the output cannot be written" if error.errno in _OF_WRITING else "it failed"


def _drop(stream: Any) -> None:
    """What is still buffered would raise again when Python ends."""
    with contextlib.suppress(OSError):  # a stream in memory
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
            _print(error.details)
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
            _print(printed)
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
        near = difflib.get_close_matches(unknown[1].lower(), names, n=1)
        text += f" Did you mean '{near[0]}'?" if near else f" There are: {', '.join(names)}."
    if context is not None:
        text += f" See: {context.command_path} --help"
    return text


def _say(text: str, code: int) -> int:
    _print("smalti: " + " ".join(text.split()))
    return code


def _print(text: str) -> None:
    """To stderr, if it can be written; the exit code says the same."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)
