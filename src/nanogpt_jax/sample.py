"""Text from a trained model: `python -m nanogpt_jax.sample --run runs/shakespeare --prompt "Ham"`.

The same checkpoint, prompt, options and seed give the same text, of any length. A cache holds the
last `training.seq_len` tokens, or what the mask leaves of them, so that each token takes as long as
any other. Where no cache can express the mask, each is a forward pass; what runs is said first.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nanogpt_jax.attention import make_attention
from nanogpt_jax.checkpoint import Checkpoints
from nanogpt_jax.cli import command
from nanogpt_jax.config import Config, SamplingConfig, UserError, parse_config
from nanogpt_jax.data import Tokenizer, tokenizer_from_json
from nanogpt_jax.data.names import path_argument
from nanogpt_jax.generate import Generator, make_generator
from nanogpt_jax.model import Params, forward, init_params
from nanogpt_jax.step import Forward


def make_sampler(
    generator: Generator, tokenizer: Tokenizer
) -> Callable[[Params, SamplingConfig], Iterator[str]]:
    """(params, options) -> the pieces of the text, without the prompt."""

    def sample(params: Params, options: SamplingConfig) -> Iterator[str]:
        piece: list[int] = []
        for token in generator.tokens(params, encode_prompt(tokenizer, options.prompt), options):
            piece.append(token)
            text = tokenizer.decode(piece)
            # A character of several tokens is shown when its last one is there.
            if not text.endswith("\ufffd"):
                yield text
                piece.clear()

    return sample


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """uint16 [N], N ≥ 1; raises UserError for what the vocabulary cannot write."""
    try:
        tokens = tokenizer.encode(prompt)
    except ValueError as error:
        raise UserError(f"sampling.prompt: {error}") from None
    if len(tokens):
        return tokens
    if tokenizer.end_of_text is None:
        raise UserError(
            "sampling.prompt: got an empty text, and this vocabulary has no token to start from; "
            r"give at least one character, such as '\n'"
        )
    return np.array([tokenizer.end_of_text], np.uint16)


def on_one_device(params: Params) -> Params:
    """A kernel outside shard_map wants its arguments on a single device."""
    return jax.tree.map(lambda x: x.addressable_data(0), params)


def load_run(folder: Path) -> tuple[Config, Tokenizer, Params, int]:
    """Config, tokenizer, weights and step of the newest checkpoint of a run."""
    checkpoints = Checkpoints(folder / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        problem = "has no checkpoint yet" if folder.is_dir() else "does not exist"
        runs = sorted(str(p.parent) for p in folder.parent.glob("*/checkpoints"))
        known = f"; there are {', '.join(runs)}" if runs else ""
        raise UserError(f"--run: {folder} {problem}; give the folder of a trained run{known}")
    meta = checkpoints.meta(steps[-1])
    config = parse_config(meta["config"], str(checkpoints.path(steps[-1])))
    try:
        tokenizer = tokenizer_from_json(meta["tokenizer"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        where = checkpoints.path(steps[-1]) / "meta"
        raise UserError(f"checkpoint: {where}: tokenizer: cannot be read: {error}") from None
    like = jax.eval_shape(lambda: init_params(config.model, tokenizer.vocab_size, 0))
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like)
    return config, tokenizer, checkpoints.restore_params(steps[-1], like), steps[-1]


def make_forward(config: Config, attention) -> Forward:
    """`model.forward` as the config wants it: (params, tokens) -> logits."""

    def run(params: Params, tokens: jax.Array) -> jax.Array:
        return forward(
            params,
            tokens,
            config=config.model,
            attention=attention,
            dtype=jnp.dtype(config.training.dtype),
            remat=config.training.remat,
        )

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m nanogpt_jax.sample", description=__doc__
    )
    parser.add_argument(
        "--run", required=True, type=path_argument, metavar="FOLDER", help="runs/<name>"
    )
    parser.add_argument("--prompt", help="the text to go on with; default: that of the config")
    parser.add_argument("--num-tokens", type=int, metavar="N", help="how much to write")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest only")
    parser.add_argument(
        "--positions",
        help="where a cache has sink tokens: 'cache', by place in it, as StreamingLLM does; or "
        "'absolute', by place in the text, as the model was trained",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="another seed, another text")
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    args = vars(_parser().parse_args(argv))
    try:
        config, tokenizer, params, step = load_run(args.pop("run"))
        changes = {name: value for name, value in args.items() if value is not None}
        values = config.model_dump()
        values["sampling"] |= changes
        config = parse_config(values, "the command line")
        encode_prompt(tokenizer, config.sampling.prompt)
        attention = make_attention(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    generator = make_generator(config, attention, make_forward(config, attention.attention))
    print(f"(weights of step {step}; {generator.description})", file=sys.stderr)
    sampler = make_sampler(generator, tokenizer)
    print(config.sampling.prompt, end="", flush=True)
    try:
        for piece in sampler(params, config.sampling):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
        return 130
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
