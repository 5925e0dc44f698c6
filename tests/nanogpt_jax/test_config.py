"""Files and overrides into a config, and what is said of those that are wrong."""

import subprocess
import sys

import pytest
import yaml

from nanogpt_jax import train
from nanogpt_jax.config import Config, UserError, all_paths, load_config, parse_config

from .conftest import ROOT, SMOKE


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_configs_of_the_repository_are_valid(path):
    config = load_config(path)
    assert config.run.name == path.stem


def test_what_is_printed_reads_back_as_the_same_config(tmp_path):
    config = load_config(SMOKE, ["attention.impl=flex", "attention.mask=sliding_window(8)"])
    path = tmp_path / "printed.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.num_iterations=3", "training.num_iterations", 3),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("model.num_kv_heads=null", "model.num_kv_heads", None),
        ("training.remat=true", "training.remat", True),
        ("sampling.prompt='a=b'", "sampling.prompt", "a=b"),
        ("attention.preprocess=pallas", "attention.preprocess", "pallas"),
    ],
)
def test_override(override, path, value):
    section, key = path.split(".")
    assert getattr(getattr(load_config(SMOKE, [override]), section), key) == value


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("run.seed=4294967296", "run.seed: got 4294967296; it must be less than or equal to 429"),
        ("sampling.seed=4294967296", "sampling.seed: got 4294967296; it must be less than or"),
        ("model.dim=10000000000", "model.dim: got 10000000000; it must be less than or equal to"),
        ("training.num_iterations=2147483648", "it must be less than or equal to 2147483647"),
        (
            "sampling.temperature=1e39",
            "temperature: got 1e+39; it must be less than or equal to 3.",
        ),
        ("sampling.temperature=.inf", "sampling.temperature: got inf; it must be a finite number"),
        ("optimizer.learning_rate=1e39", "learning_rate: got 1e+39; it must be less than or equal"),
        ("optimizer.weight_decay=1e39", "weight_decay: got 1e+39; it must be less than or equal"),
        ("run.seed=2024-99-99", "is not YAML: a value in it cannot be read: month must be"),
        ("run.seed=" + "9" * 5000, "is not YAML: a value in it cannot be read: Exceeds the"),
        ("run.seed=0x" + "f" * 5000, "run.seed: got a number of thousands of digits; it must be"),
        ("run.seed=" + "[" * 5000, "is not YAML: too many brackets in each other"),
        ("run.dir=", "run.dir: got None; it must be"),
        ("run.dir=''", "run.dir: got ''; it must be a path, or '.' for the current folder"),
        ("data.corpus=''", "data.corpus: got ''; it must be a path, or '.' for the current"),
        ('data.corpus="a\\0"', r"data.corpus: got 'a\x00'; it must be a path"),
        ("attention.window=8", "attention.window: got 8 with impl 'ours', which has none; use im"),
        ("attention.sink_tokens=0", "attention.sink_tokens: got 0 with impl 'ours', which has no"),
    ],
    ids=lambda text: text[:24],
)
def test_what_is_out_of_reach_is_one_line(override, text):
    with pytest.raises(UserError) as error:
        load_config(SMOKE, [override])
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("path", "overrides", "blamed"),
    [
        (SMOKE, ["model.dim=65"], f"{SMOKE} with --override: "),
        (None, ["model.dim=65"], "--override: "),
    ],
)
def test_the_file_alone_is_not_blamed_for_an_override(path, overrides, blamed):
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    assert str(error.value).startswith(blamed)


def test_streaming_has_a_window_and_sinks_of_its_own():
    given = ["attention.impl=streaming", "attention.sink_tokens=0"]
    assert load_config(SMOKE, given).attention.mask_text == "streaming(sinks=0, window=256)"
    assert load_config(SMOKE, given[:1]).attention.mask_text == "streaming(sinks=4, window=256)"


def test_the_interpreter_needs_a_kernel_to_interpret():
    given = ["attention.impl=xla", "attention.interpret=true"]
    with pytest.raises(UserError) as error:
        load_config(SMOKE, given)
    assert str(error.value).endswith(
        "attention.interpret: got True with impl 'xla' and preprocess 'xla', of which neither is a "
        "Pallas kernel of smalti; use impl 'ours', 'streaming' or 'flex', or preprocess 'pallas', "
        "or leave interpret out"
    )
    assert load_config(SMOKE, [*given, "attention.preprocess=pallas"]).attention.interpret


def test_a_path_that_cannot_be_one():
    with pytest.raises(UserError, match=r"--config: cannot read 'a\\x00b': "):
        load_config("a\0b")


def test_later_overrides_win():
    config = load_config(SMOKE, ["run.seed=1", "run.seed=2"])
    assert config.run.seed == 2


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.dm=3", "unknown key 'model.dm'; did you mean 'model.dim'?"),
        ("atention.impl=ours", "unknown key 'atention.impl'; did you mean 'attention.impl'?"),
        ("model.impl=ours", "unknown key 'model.impl'; did you mean 'attention.impl'?"),
        ("batch_size=3", "unknown key 'batch_size'; did you mean 'training.batch_size'?"),
        ("model.zzzz=3", "unknown key 'model.zzzz'; allowed are model.num_layers, model.dim,"),
        ("model=3", "--override model: is a section; set one of its keys, like model.num_layers=…"),
        ("model.dim", "--override 'model.dim': write it as section.key=value"),
        ("sampling.top_k=[", "--override sampling.top_k: '[' is not YAML"),
        (
            "attention.impl=our",
            "attention.impl: got 'our'; allowed are 'xla', 'ours', 'streaming', 'flex', "
            "'jax_flash', 'splash'; did you mean 'ours'?",
        ),
        (
            "data.tokenizer=chr",
            "data.tokenizer: got 'chr'; allowed are 'char', 'byte', 'gpt2'; did you mean 'char'?",
        ),
        ("model.dim=abc", "model.dim: got 'abc'; it must be an integer"),
        ("training.remat=1", "training.remat: got 1; it must be a valid boolean"),
        ("training.num_iterations=true", "training.num_iterations: got True; it must be an int"),
        ("training.num_iterations=0", "training.num_iterations: got 0; it must be greater than"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: got nan; it must be a finite"),
        ("run.name=../x", "run.name: got '../x'; it must match ^[A-Za-z0-9]"),
        ("model.dim=130", "model.dim: got 130 with num_heads 4; dim / num_heads"),
        ("model.num_kv_heads=3", "model.num_kv_heads: got 3 with num_heads 4; num_heads must be"),
        (
            "training.grad_accumulation=3",
            "training.grad_accumulation: got 3 with batch_size 8, which must be a multiple of it",
        ),
        ("checkpoint.every=7", "checkpoint.every: got 7 with training.eval_every 5"),
        ("attention.mask=causal()", "attention.mask: got 'causal()' with impl 'ours'"),
        ("optimizer.decay_fraction=1", "optimizer.decay_fraction: got 1.0 after warmup_fraction"),
    ],
)
def test_a_wrong_override_says_what_and_what_to_do(override, text):
    with pytest.raises(UserError) as error:
        load_config(SMOKE, [override])
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_mask_is_named_with_the_right_one():
    with pytest.raises(UserError, match=r"attention.*no mask 'causl' here; did you mean 'causal'"):
        load_config(SMOKE, ["attention.impl=flex", "attention.mask=causl()"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainin: {seq_len: 3}", "unknown key 'trainin'; did you mean 'training'?"),
        (
            "training: {seqlen: 3}",
            "unknown key 'training.seqlen'; did you mean 'training.seq_len'?",
        ),
        ("training: 3", "training: got 3; it is a section and holds keys"),
        ("[1, 2]", "got list; it must hold sections of keys"),
        ("a: [", "is not YAML"),
        ("run: {seed: 1, seed: 2}", "the key 'seed' is there twice"),
        ("run: {seed: -1}\nmodel: {dim: 0}", "run.seed: got -1; it must be greater than or equal"),
        ("run: {seed: -1}\nmodel: {dim: 0}", "model.dim: got 0; it must be greater than or equal"),
    ],
)
def test_a_wrong_file_says_what(tmp_path, text, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert expected in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"no file .*smok\.yaml; did you mean 'smoke\.yaml'\?"):
        load_config(SMOKE.with_name("smok.yaml"))


def test_every_path_is_listed():
    flat = {f"{s}.{k}" for s, section in Config().model_dump().items() for k in section}
    assert set(all_paths()) == flat


def test_an_empty_config_is_the_defaults():
    assert parse_config({}, "nothing") == Config()


def test_print_config(capsys):
    assert train.main(["--config", str(SMOKE), "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == load_config(SMOKE).model_dump()


def test_exit_code_2_and_one_line_without_a_traceback(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nanogpt_jax.train", "--config", str(SMOKE)),
            *("--override", "attention.imple=ours"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: --override: unknown key 'attention.imple'; did you mean 'attention.impl'?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_parser_asks_for_a_config(capsys):
    with pytest.raises(SystemExit) as error:
        train.main([])
    assert error.value.code == 2
    assert "--config" in capsys.readouterr().err
