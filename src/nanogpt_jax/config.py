"""The configuration of a run: YAML and `--override a.b=c` into models that refuse what they do not
know, and suggest what was meant.
"""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import smalti.masks

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]  # a step is an int32
NotNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Size = Annotated[int, Field(ge=1, le=2**16)]  # of a model, far beyond what was ever trained
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
FLOAT32 = 3.4e38  # about the largest; what is more would be infinite in a program
Rate = Annotated[float, Field(gt=0, le=FLOAT32)]
Fraction = Annotated[float, Field(ge=0, le=1)]

Impl = Literal["xla", "ours", "streaming", "flex", "jax_flash", "splash"]


class UserError(Exception):
    """The user's input is wrong: `main` prints this one line and exits with code 2."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, validate_default=True
    )


def _check_path(name: str, path: str) -> None:
    """An empty one would quietly mean the current folder."""
    if not path.strip() or "\0" in path:
        raise ValueError(f"{name}: got {path!r}; it must be a path, or '.' for the current folder")


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    dir: str = "runs"  # the run is the folder dir/name
    seed: Seed = 0  # initial weights and the order of the data
    distributed: bool = False  # start jax.distributed: one process a host of a TPU slice

    @model_validator(mode="after")
    def _check(self):
        _check_path("dir", self.dir)
        return self


class DataConfig(Section):
    corpus: str = "shakespeare"  # or 'sample', a text, a folder of texts, a folder of .bin shards
    tokenizer: Literal["char", "byte", "gpt2"] | None = None  # None: that of the shards, else char
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _check(self):
        _check_path("corpus", self.corpus)
        return self


class ModelConfig(Section):
    num_layers: Size = 4
    dim: Size = 128
    num_heads: Size = 4
    num_kv_heads: Size | None = None  # None: num_heads
    mlp_ratio: Size = 4  # hidden width of the MLP, in units of dim
    tie_embeddings: bool = False
    rope_theta: Rate = 10000.0
    norm_eps: Rate = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @model_validator(mode="after")
    def _check(self):
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"dim: got {self.dim} with num_heads {self.num_heads}; dim / num_heads, the width "
                "of a head, must be an even whole number, since RoPE turns pairs"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads: got {self.num_kv_heads} with num_heads {self.num_heads}; "
                "num_heads must be a multiple of it"
            )
        return self


class AttentionConfig(Section):
    impl: Impl = "ours"
    preprocess: Literal["xla", "pallas"] = "xla"
    mask: str | None = None  # as smalti.masks.parse reads it; None: causal(). For flex and xla
    sink_tokens: NotNegative | None = None  # of streaming: first tokens, seen by all; None: 4
    window: Positive | None = None  # of streaming: recent tokens with the own one; None: 256
    interpret: bool = False  # run smalti's Pallas kernels in JAX's interpreter, anywhere and slowly

    @model_validator(mode="after")
    def _check(self):
        if self.interpret and not self.kernels_of_smalti and self.preprocess != "pallas":
            raise ValueError(
                f"interpret: got True with impl {self.impl!r} and preprocess {self.preprocess!r}, "
                "of which neither is a Pallas kernel of smalti; use impl 'ours', 'streaming' or "
                "'flex', or preprocess 'pallas', or leave interpret out"
            )
        if self.mask is not None:
            if self.impl not in ("flex", "xla"):
                raise ValueError(
                    f"mask: got {self.mask!r} with impl {self.impl!r}, which has a mask of its "
                    "own; use impl 'flex', or 'xla' to compare with, or leave mask out"
                )
            smalti.masks.parse(self.mask)
        for name in ("sink_tokens", "window"):
            if self.impl != "streaming" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: got {getattr(self, name)} with impl {self.impl!r}, which has none; "
                    f"use impl 'streaming', or leave {name} out"
                )
        return self

    @property
    def kernels_of_smalti(self) -> bool:
        """Whether `impl` is `smalti.attention`, which has Pallas kernels."""
        return self.impl in ("ours", "streaming", "flex")

    @property
    def streaming_sizes(self) -> tuple[int, int]:
        """Sink tokens and window of impl 'streaming'."""
        return 4 if self.sink_tokens is None else self.sink_tokens, self.window or 256

    @property
    def mask_text(self) -> str:
        """The mask in words that `smalti.masks.parse` reads."""
        if self.impl == "streaming":
            sinks, window = self.streaming_sizes
            return f"streaming(sinks={sinks}, window={window})"
        return self.mask or "causal()"


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = "muon"
    learning_rate: Rate = 3e-3  # of AdamW; under Muon, of what is no matrix of a block
    muon_learning_rate: Rate = 0.02  # of Muon: matrices of the blocks
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95  # of Muon
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0, le=FLOAT32)] = 0.0  # of the blocks' matrices only
    schedule: Literal["cosine", "wsd"] = "wsd"  # after the warm-up; wsd: constant, then linear
    warmup_fraction: Fraction = 0.02  # of all steps, linear from 0
    decay_fraction: Fraction = 0.4  # of all steps, for wsd
    final_fraction: Fraction = 0.0  # the last rate, as a share of the highest
    clip_norm: Rate | None = 1.0  # of the whole gradient; None: no clipping

    @model_validator(mode="after")
    def _check(self):
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"decay_fraction: got {self.decay_fraction} after warmup_fraction "
                f"{self.warmup_fraction}; together they may take at most 1, the whole run"
            )
        return self


class TrainingConfig(Section):
    num_iterations: Positive = 1000
    batch_size: Size = 16  # rows of a step, over all devices and accumulation steps
    seq_len: Positive = 256
    grad_accumulation: Positive = 1  # the step's rows are taken in this many parts
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are float32
    remat: bool = False  # recompute each block in the backward pass: less memory, more time
    eval_every: Positive = 100  # steps between validation losses
    eval_windows: Positive | None = 256  # windows of these; None: all. The last one takes all

    @model_validator(mode="after")
    def _check(self):
        if self.batch_size % self.grad_accumulation:
            raise ValueError(
                f"grad_accumulation: got {self.grad_accumulation} with batch_size "
                f"{self.batch_size}, which must be a multiple of it"
            )
        return self


class CheckpointConfig(Section):
    every: Positive = 100  # steps between checkpoints; the last step always has one
    keep_last: Positive = 2
    keep_best: bool = True  # keep the one with the lowest validation loss as well


class LoggingConfig(Section):
    every: Positive = 10  # steps between printed lines; metrics.jsonl has every step
    wandb: bool = False
    wandb_project: str = "nanogpt_jax"
    tensorboard: bool = False


class SamplingConfig(Section):
    every: NotNegative = 0  # steps between samples; 0: only one, at the end
    prompt: str = "\n"
    num_tokens: NotNegative = 256  # 0: no samples
    temperature: Annotated[float, Field(ge=0, le=FLOAT32)] = 0.8  # 0: always the likeliest token
    top_k: Positive | None = None  # None: all tokens
    # Of a cache with sink tokens: by place in it, as StreamingLLM does, or in the text, as trained.
    positions: Literal["cache", "absolute"] = "cache"
    seed: Seed = 0


class Config(Section):
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _check(self):
        saves, evaluates = self.checkpoint.every, self.training.eval_every
        if self.checkpoint.keep_best and saves % evaluates:
            raise ValueError(
                f"checkpoint.every: got {saves} with training.eval_every {evaluates}; it must be a "
                "multiple of that, so that each checkpoint has a validation loss to be the best "
                "by, or set checkpoint.keep_best to false"
            )
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file (None: all defaults) and sets overrides like `model.dim=256` over it.

    `run.name` defaults to the name of the file. Raises UserError, in one line.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_yaml(Path(path))
        run = values.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", Path(path).stem)
    for override in overrides:
        _apply(values, override)
    given = [*([] if path is None else [str(path)]), *(["--override"] if overrides else [])]
    return parse_config(values, " with ".join(given) or "the defaults")


def parse_config(values: dict[str, Any], source: str) -> Config:
    """A checked Config from plain values; raises UserError that names `source`."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: " + "; ".join(map(_explain, error.errors()))) from None


def add_config_arguments(parser: argparse._ActionsContainer, required: bool = True) -> None:
    parser.add_argument("--config", required=required, metavar="FILE", help="a file of configs/")
    parser.add_argument(
        "--override",
        action="extend",
        nargs="+",
        default=[],
        metavar="A.B=C",
        help="set values, written as in YAML; may be given again",
    )


def all_paths(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """The dotted path of every value."""
    paths = []
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        paths += all_paths(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return paths


def _section(annotation: Any) -> type[BaseModel] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def suggest(got: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(got, list(allowed), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


def _suggest_path(path: str) -> str:
    """What was meant by an unknown dotted path, or what there is where it points to."""
    section, _, key = path.rpartition(".")
    siblings = {p.rpartition(".")[2]: p for p in all_paths() if p.rpartition(".")[0] == section}
    # The same key in another section is a likelier slip than a similar word.
    elsewhere = [p for p in all_paths() if p.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean {siblings[near[0]]!r}?"
    if siblings:
        return "allowed are " + ", ".join(siblings.values())
    return suggest(path, [*all_paths(), *Config.model_fields]) or (
        "allowed are the sections " + ", ".join(Config.model_fields)
    )


def _show(got: Any) -> str:
    try:
        text = repr(got)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else text[:200] + "…"


def _explain(error: Any) -> str:
    """One pydantic error in one line: which key, what was got, what is allowed, what to do."""
    path = ".".join(str(part) for part in error["loc"])
    kind, got = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return f"unknown key {path!r}; {_suggest_path(path)}"
    if kind == "literal_error":
        allowed = _choices(error["loc"])
        hint = suggest(_show(got), allowed)
        return (
            f"{path}: got {_show(got)}; allowed are {', '.join(map(repr, allowed))}; {hint}".rstrip(
                "; "
            )
        )
    if kind == "value_error":
        text = str(error["ctx"]["error"])
        return f"{path}.{text}" if path else text
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: got {_show(got)}; it is a section and holds keys, as in '{path}: {{…}}'"
    if kind == "string_pattern_mismatch":
        return f"{path}: got {_show(got)}; it must match {error['ctx']['pattern']}"
    if kind == "less_than_equal":  # pydantic writes 3.4e38 in all of its digits
        return f"{path}: got {_show(got)}; it must be less than or equal to {error['ctx']['le']!r}"
    message = error["msg"].removeprefix("Input should be ").replace("a valid integer", "an integer")
    return f"{path}: got {_show(got)}; it must be {message}"


def _choices(loc: Sequence[Any]) -> list[str]:
    model: Any = Config
    for part in loc[:-1]:
        model = _section(model.model_fields[part].annotation) or model
    annotation = model.model_fields[loc[-1]].annotation if loc[-1] in model.model_fields else None
    values = get_args(annotation)
    nested = [inner for value in values for inner in get_args(value)]
    return [value for value in (*values, *nested) if isinstance(value, str)]


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (as in YAML 1.2) and no key may come twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _load(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("too many brackets in each other") from None
    except Exception as error:  # PyYAML leaves those of int(), date() and its own slips as they are
        raise yaml.YAMLError(f"a value in it cannot be read: {error}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = _load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = suggest(path.name, (p.name for p in path.parent.glob("*.yaml")))
        raise UserError(f"--config: no file {path}; {near}".rstrip("; ")) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that cannot be one
        raise UserError(f"--config: cannot read {str(path)!r}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: got {type(values).__name__}; it must hold sections of keys")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise UserError(f"--override {override!r}: write it as section.key=value")
    if path in Config.model_fields:
        example = next(p for p in all_paths() if p.startswith(path + "."))
        raise UserError(f"--override {path}: is a section; set one of its keys, like {example}=…")
    if path not in all_paths():
        raise UserError(f"--override: unknown key {path!r}; {_suggest_path(path)}")
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"--override {path}: {_show(text)} is not YAML: {problem}") from None
    *sections, key = path.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UserError(f"{section}: got {values!r}; it is a section and holds keys")
    values[key] = value
