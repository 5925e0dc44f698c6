"""How long a model takes for a token, early and late in a long text, and beside recomputation:

    python -m nanogpt_jax.decode_bench --config configs/shakespeare.yaml \
      --override training.seq_len=2048 attention.impl=streaming

A text of `--num-tokens` is written over the cache that sampling has. States on its way are kept,
and afterwards each writes on from there, turn about with one another and with the forward pass over
`training.seq_len` tokens that gives a token without a cache. The weights are new: what they are
changes no time.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from nanogpt_jax.attention import make_attention
from nanogpt_jax.cache import CacheSizes, cache_sizes
from nanogpt_jax.cli import command, writing_to
from nanogpt_jax.config import Config, UserError, add_config_arguments, load_config
from nanogpt_jax.data.names import path_argument
from nanogpt_jax.generate import Caches, Decoder, Draws, recomputation
from nanogpt_jax.model import Params, init_params
from nanogpt_jax.sample import make_forward
from smalti.files import write_whole

MARKS = (1_000, 2_048, 5_000, 10_000, 20_000, 50_000, 100_000)
# Tokens of a turn, of which a sample is the mean: few, so that what else the machine does falls on
# all alike. Those before them bring code and cache back near the cores.
TURN, BEFORE_TURN = 50, 5


class Moment(NamedTuple):
    """Where a text is: its last token, the caches with all before it, and how many tokens."""

    token: Any
    caches: Caches
    tokens: int


class Writer:
    """Writes on from a moment, as `nanogpt_jax.sample` does."""

    def __init__(self, config: Config, vocab_size: int):
        sizes = cache_sizes(config)
        if sizes is None:
            raise UserError(
                f"attention.mask: got {config.attention.mask_text!r}, which no cache of first and "
                "last tokens expresses; use causal(), sliding_window(…) or streaming(…)"
            )
        self.config, self.sizes, choice = config, sizes, make_attention(config)
        self.decoder = Decoder(config, choice, sizes)
        self.next_token = recomputation(make_forward(config, choice.attention))
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        self.params: Params = jax.device_put(init_params(config.model, vocab_size, 0), here)
        self.draws = Draws.of(config.sampling, self.params)
        self.by_place = self.decoder.by_place(config.sampling)

    def start(self) -> Moment:
        return self.on_device(Moment(np.int32(0), self.decoder.empty(self.params), 0))

    def on_device(self, moment: Moment) -> Moment:
        where = self.params["embedding"].sharding
        token, caches = jax.device_put((moment.token, moment.caches), where)
        return Moment(token, caches, moment.tokens)

    def write(self, at: Moment, count: int) -> Moment:
        """`at` is given away: its caches become the new ones."""
        token, caches = at.token, at.caches
        for i in range(at.tokens, at.tokens + count):
            token, caches = self.decoder.step(
                self.params, token, caches, self.draws, i, by_place=self.by_place
            )
            int(token)  # as who prints it
        return Moment(token, caches, at.tokens + count)

    def recompute(self) -> None:
        """One token, of a whole context."""
        S = self.config.training.seq_len
        int(self.next_token(self.params, np.zeros(S, np.int32), S, self.draws, 0))


def measure(
    config: Config, vocab_size: int, num_tokens: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds per token of the text as it was written, of each mark and of recomputation."""
    writer = Writer(config, vocab_size)
    marks = [mark for mark in MARKS if mark < num_tokens] + [num_tokens]
    say("compiling")
    writer.write(writer.start(), 2)
    writer.recompute()

    # Made beforehand, so that nothing here makes the process grow on the way.
    kept = {mark: jax.tree.map(np.array, writer.start()) for mark in marks}
    moment, text = writer.start(), []
    for mark in marks:
        say(f"writing {mark:,} tokens")
        count, start = mark - moment.tokens, time.perf_counter()
        moment = writer.write(moment, count)
        seconds = time.perf_counter() - start
        cache_bytes = sum(x.nbytes for x in jax.tree.leaves(moment.caches))
        measured = {"s_per_token": seconds / count, "cache_bytes": cache_bytes}
        text.append({"tokens": mark, **measured, "process_mib": resident_mib()})
        jax.tree.map(np.copyto, kept[mark], moment)

    samples: dict[int, list[float]] = {mark: [] for mark in marks}
    recomputed: list[float] = []
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}")
        for mark in marks if turn % 2 == 0 else reversed(marks):
            here = writer.write(writer.on_device(kept[mark]._replace(tokens=mark)), BEFORE_TURN)
            start = time.perf_counter()
            writer.write(here, TURN)
            samples[mark].append((time.perf_counter() - start) / TURN)
        start = time.perf_counter()
        writer.recompute()
        recomputed.append(time.perf_counter() - start)
    return {
        "text": text,
        "turns": [{"tokens": mark, "samples_s": samples[mark]} for mark in marks],
        "recomputation": {"tokens": config.training.seq_len, "samples_s": recomputed},
        "cache": {"sinks": writer.sizes.sinks, "window": writer.sizes.window},
    }


def resident_mib() -> float | None:
    """What this process holds of the machine's memory; None off Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def table(found: dict[str, Any]) -> list[str]:
    """Lines to read. Times of a turn are medians, and relative to those of the first full cache."""
    sizes = CacheSizes(**found["cache"])
    lines = [
        f"a cache of {sizes}",
        "   tokens | written at, ms a token | writing on, ms a token |     × | cache, KiB "
        "| process, MiB",
    ]
    medians = [statistics.median(turn["samples_s"]) for turn in found["turns"]]
    is_full = [turn["tokens"] >= sizes.sinks + sizes.window for turn in found["turns"]]
    first_full = medians[is_full.index(True) if any(is_full) else -1]
    for text, median in zip(found["text"], medians, strict=True):
        process = "–" if text["process_mib"] is None else f"{text['process_mib']:.0f}"
        lines.append(
            f"{text['tokens']:>9,} | {text['s_per_token'] * 1e3:>22.3f} | {median * 1e3:>22.3f} "
            f"| {median / first_full:>5.3f} | {text['cache_bytes'] / 1024:>10,.0f} | {process:>12}"
        )
    forward = found["recomputation"]
    median = statistics.median(forward["samples_s"])
    slowest = max(medians)
    lines.append(
        f"a forward pass over {forward['tokens']:,} tokens: {median * 1e3:.1f} ms a token, "
        f"{median / slowest:.0f} times the slowest of these"
    )
    return lines


def _say(words: str) -> None:
    if sys.stderr.isatty():
        print(f"({words})", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m nanogpt_jax.decode_bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--num-tokens", type=int, default=20_000, metavar="N", help="of the text")
    parser.add_argument("--rounds", type=int, default=41, metavar="N", help="turns of each")
    parser.add_argument("--vocab-size", type=int, default=256, metavar="V", help="default: 256")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write every sample")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        for name in ("num_tokens", "rounds", "vocab_size"):
            if getattr(args, name) < 1:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option}: got {getattr(args, name)}; it must be at least 1")
        config = load_config(args.config, args.override)
        found = measure(config, args.vocab_size, args.num_tokens, args.rounds, _say)
        if args.json:
            record = {
                "argv": sys.argv[1:] if argv is None else argv,
                "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "versions": {"python": platform.python_version(), "jax": jax.__version__},
                "device": jax.devices()[0].device_kind,
                "config": config.model_dump(),
                **found,
            }
            with writing_to("--json", args.json):
                args.json.parent.mkdir(parents=True, exist_ok=True)
                write_whole(args.json, json.dumps(record, indent=1) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing was measured to its end", file=sys.stderr)
        return 130
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
