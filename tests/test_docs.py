"""The documents keep their word: their examples run; what they name exists."""

import functools
import importlib.util
import pydoc
import re
import subprocess
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import smalti

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block of that language."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 2, found.group(2))
        for found in FENCE.finditer(text)
        if found.group(1) == language
    ]


def code_of(page: Path) -> str:
    """All that a page writes as code: fenced blocks, and spans between backticks."""
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return "\n".join([*spans, *(found.group(2) for found in FENCE.finditer(text))])


EXAMPLES = [
    pytest.param(page, line, code, id=f"{name_of(page)}:{line}")
    for page in PAGES
    for line, code in blocks(page, "python")
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@functools.cache
def run(page: Path, line: int, code: str) -> dict:
    names = {"__name__": "example"}
    # Blank lines in front, so that a traceback points into the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
    return names


@pytest.mark.parametrize(("page", "line", "code"), EXAMPLES)
def test_example_runs(page, line, code):
    run(page, line, code)


def test_the_first_example_has_twenty_lines():
    _, code = blocks(ROOT / "README.md", "python")[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 20


@pytest.mark.slow
def test_the_first_example_gives_the_gradients_of_plain_attention():
    """The example says what it computes; this is the same, written out without tiles."""
    ran: Any = run(ROOT / "README.md", *blocks(ROOT / "README.md", "python")[0])
    jax, jnp = ran["jax"], ran["jnp"]
    k, v = (jnp.repeat(x, 4, axis=2) for x in (ran["k"], ran["v"]))
    i, j = jnp.arange(1000)[:, None], jnp.arange(1000)[None, :]
    same_document = i // 250 == j // 250
    seen = same_document & (j <= i) & ((j < 4) | (i - j < 128))

    def loss(slopes):
        scores = jnp.einsum("bihd,bjhd->bhij", ran["q"], k, precision="highest") / 8
        scores = jnp.where(seen, scores - slopes[:, None, None] * (i - j), -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None])
        out = jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")
        return jnp.mean(out**2) + 1e-4 * jnp.mean(lse**2)

    expected = jax.grad(loss)(ran["slopes"])
    error = jnp.max(jnp.abs(ran["gradients"][3] - expected)) / jnp.max(jnp.abs(expected))
    assert error < 1e-4


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [
        link for link in links if "://" not in link and not (page.parent / link).resolve().exists()
    ]
    assert missing == []


def make_targets() -> dict[str, str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z-]+):.*?## (.*)$", makefile, re.MULTILINE))


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    assert set(phony.group(1).split()) == set(make_targets())
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target, meaning in make_targets().items():
        assert re.search(rf"make {target} +{re.escape(meaning)}", said.stdout)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    code = code_of(page)
    targets = set(re.findall(r"\bmake ([a-z-]+)", code)) - set(make_targets())
    assert targets == set()
    modules = re.findall(r"python -m ([\w.]+)", code)
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    scripts = re.findall(r"^(\.ci/\w+|scripts/\w+)", code, re.MULTILINE)
    assert [name for name in scripts if not (ROOT / name).exists()] == []
    files = re.findall(r"\b((?:tests|configs|src|docs)/[\w./-]+\.\w+)", code)
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_smalti_exist(page):
    names = re.findall(r"(?<!/)\b((?:smalti|masks)(?:\.[A-Za-z_]\w*)+)", code_of(page))
    names = [re.sub(r"^masks\.", "smalti.masks.", name) for name in names]
    unknown = [name for name in sorted(set(names)) if not resolves(name)]
    assert unknown == []


def resolves(name: str) -> bool:
    """By attributes of `smalti`, as a user writes it, or as a module that `python -m` runs."""
    value = smalti
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value is not None or pydoc.locate(name) is not None


def test_names_that_do_not_exist_are_found():
    assert resolves("smalti.masks.causal")
    assert not resolves("smalti.masks.casual")


def test_flags_of_the_benchmark_exist():
    from smalti.lab.bench.__main__ import parse

    page = (ROOT / "docs/performance/cpu.md").read_text(encoding="utf-8")
    arguments = re.findall(r'make bench ARGS="([^"]*)"', page)
    assert len(arguments) >= 3
    for text in arguments:
        parse(text.split())


def test_the_terminology_has_all_block_sizes_of_jax():
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes

    page = (ROOT / "docs/terminology.md").read_text(encoding="utf-8")
    section = page.partition("## From jax's TPU flash attention")[2].partition("Its other names")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(BlockSizes))


def test_ci_runs_the_test_command_of_the_readme():
    """On a line of its own, last: its closing line is the run's."""
    commands = "".join(text for _, text in blocks(ROOT / "README.md", "sh"))
    assert "make test" in commands
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert textwrap.dedent(script).rstrip().splitlines()[-1] == "make test"
