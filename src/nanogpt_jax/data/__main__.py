"""`python -m nanogpt_jax.data prepare`: a text becomes a folder of token files."""

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nanogpt_jax.cli import command as as_command
from nanogpt_jax.data.names import path_argument
from nanogpt_jax.data.prepare import SHARD_TOKENS, prepare
from nanogpt_jax.data.tokenizers import TOKENIZERS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m nanogpt_jax.data", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "prepare",
        help="encode a corpus into .bin shards",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--input",
        required=True,
        type=path_argument,
        help="shakespeare, sample, a .txt or .md file, or a folder",
    )
    command.add_argument("--tokenizer", required=True, help=", ".join(TOKENIZERS))
    command.add_argument("--out", required=True, type=path_argument, help="the folder to write")
    command.add_argument(
        "--val-fraction", type=float, default=0.1, help="share of the text for validation"
    )
    command.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, help="most tokens in one file"
    )
    command.add_argument(
        "--overwrite", action="store_true", help="replace the data that --out holds"
    )
    return parser


@as_command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line that says what is wrong with the input."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar:
            task = bar.add_task("", total=None)

            def show(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total or None)

            manifest = prepare(
                str(args.input),
                args.tokenizer,
                args.out,
                args.val_fraction,
                args.shard_tokens,
                args.overwrite,
                show,
            )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"stopped: {args.out} has no whole set of data; run again with --overwrite",
            file=sys.stderr,
        )
        return 130
    train, val = manifest["train"], manifest["val"]
    print(
        f"{args.out}: {train['tokens']} training and {val['tokens']} validation tokens in "
        f"{len(train['shards'])} + {len(val['shards'])} shards, "
        f"tokenizer {manifest['tokenizer']} ({manifest['vocab_size']} ids)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
