"""Sampling: the same seed, the same text; and what a run must have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanogpt_jax import sample
from nanogpt_jax.config import SamplingConfig, UserError
from nanogpt_jax.data import load
from nanogpt_jax.data.tokenizers import ByteTokenizer
from nanogpt_jax.generate import Generator
from nanogpt_jax.model import init_params
from nanogpt_jax.sample import encode_prompt, make_sampler

from .conftest import tiny_config
from .test_generate import generator_of
from .test_model import SEQ, compiled


@pytest.fixture(scope="module")
def model():
    """A random model over the sample's characters: forward, params, tokenizer, sampler."""
    tokenizer = load("sample", "char").tokenizer
    config = tiny_config("model.num_layers=2")
    params = init_params(config.model, tokenizer.vocab_size, 0)
    params["head"] = jax.random.normal(jax.random.key(1), params["head"].shape)
    sampler = make_sampler(generator_of(config), tokenizer)
    return compiled(config), params, tokenizer, sampler


def text_of(model, **options):
    _, params, _, sampler = model
    return "".join(sampler(params, SamplingConfig(**{"num_tokens": 40, "prompt": "A", **options})))


def test_a_seed_gives_a_text(model):
    assert text_of(model, seed=1) == text_of(model, seed=1)
    assert text_of(model, seed=1) != text_of(model, seed=2)
    assert len(text_of(model, seed=1)) == 40


def test_top_1_and_temperature_0_are_the_likeliest_tokens(model):
    forward, params, tokenizer, _ = model
    tokens = tokenizer.encode("A").tolist()
    while len(tokens) < SEQ:
        logits = forward(params, jnp.asarray([tokens + [7] * (SEQ - len(tokens))], jnp.int32))
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    expected = tokenizer.decode(tokens)[1:]
    for options in ({"temperature": 0.0}, {"top_k": 1, "temperature": 3.0}):
        assert text_of(model, num_tokens=SEQ - 1, **options) == expected


def test_top_k_draws_from_the_k_likeliest(model):
    forward, params, tokenizer, _ = model
    logits = forward(params, jnp.asarray([tokenizer.encode("A")], jnp.int32))[0, -1]
    likeliest = set(tokenizer.decode(np.argsort(logits)[-3:]))
    drawn = {text_of(model, top_k=3, temperature=5.0, num_tokens=1, seed=s) for s in range(30)}
    assert drawn == likeliest


def test_a_character_is_shown_when_its_last_token_is_there():
    """A piece is decoded by itself, so that a long text costs no more for each of its tokens."""
    tokenizer = ByteTokenizer()
    text = "aé☃\U0001f600b\x80"
    written = [*text.encode(), 0xE2]
    generator = Generator(lambda params, prompt, options: iter(written), "")
    pieces = list(make_sampler(generator, tokenizer)({}, SamplingConfig(prompt="A")))
    assert pieces == list(text)  # and nothing of the character that lacks its end


def test_prompts_that_cannot_be_written():
    tokenizer = load("sample", "char").tokenizer
    with pytest.raises(UserError, match=r"sampling\.prompt: text: has '☃' \(U\+2603\)"):
        encode_prompt(tokenizer, "☃")
    with pytest.raises(UserError, match=r"sampling\.prompt: got an empty text"):
        encode_prompt(tokenizer, "")


def test_the_command(tmp_path, run_train, capsys):
    assert run_train("sampling.prompt=The", "sampling.num_tokens=12")[0] == 0
    run = str(tmp_path / "runs" / "smoke")

    def text(*args):
        assert sample.main(["--run", run, *args]) == 0
        out, err = capsys.readouterr()
        cache = "sampling: smalti.decode, with a cache of the last 16 tokens"
        assert err == f"(weights of step 6; {cache})\n"
        return out

    written = (tmp_path / "runs" / "smoke" / "sample.txt").read_text()
    assert text() == written
    assert written.startswith("The")
    assert len(written) == len("The") + 12 + len("\n")
    other = text("--prompt", "A", "--num-tokens", "30", "--seed", "3", "--top-k", "5")
    assert other == text("--prompt", "A", "--num-tokens", "30", "--seed", "3", "--top-k", "5")
    assert len(other) == 32

    for args, message in (
        (["--run", run, "--prompt", "☃"], "error: sampling.prompt: text: has '☃'"),
        (["--run", run, "--top-k", "0"], "sampling.top_k: got 0; it must be greater than"),
        (
            ["--run", run, "--positions", "cash"],
            "positions: got 'cash'; allowed are 'cache', 'absolute'; did you mean 'cache'?",
        ),
        (["--run", run, "--temperature", "-1"], "sampling.temperature: got -1.0; it must be"),
        (
            ["--run", run, "--temperature", "1e39"],
            "sampling.temperature: got 1e+39; it must be less than or equal to 3.4e+38",
        ),
        (
            ["--run", run + "x"],
            f"runx does not exist; give the folder of a trained run; there are {run}",
        ),
    ):
        message = message.replace("runx", run + "x")
        assert sample.main(args) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert err.count("\n") == 1
        assert out == ""
