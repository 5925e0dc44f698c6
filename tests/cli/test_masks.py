import importlib.util
import re
import shlex
from pathlib import Path

import pytest

DRAWN = """\
(causal() & document(lengths=[200, 100]))
300 queries (down) × 300 keys (across), tiles of 100 × 50

▒▒▒▒········
████▒▒▒▒····
········▒▒▒▒

"""


def test_a_mask_is_drawn_and_counted(smalti):
    text = "causal() & document(lengths=[200, 100])"
    run = smalti("masks", "show", text, "--q-len", 300, "--block-q", 100, "--block-kv", 50)
    assert run.code == 0, run.err
    assert run.out.startswith(DRAWN)
    assert "  live                8  44.44 %\n" in run.out
    assert "  visible        25,150  27.94 %\n" in run.out
    assert "   55.56 %  empty tiles left out\n" in run.out
    assert run.err == ""


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written(smalti, tmp_path, suffix):
    file = tmp_path / f"a.{suffix}"
    run = smalti("masks", "show", "~causal", "--q-len", 9, "--kv-len", 20, "--out", file)
    assert run.code == 0
    assert run.err == f"wrote {file}\n"
    assert file.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_million_tokens(smalti):
    run = smalti("masks", "show", "streaming(sinks=4, window=512)", "--q-len", 1 << 20)
    assert run.code == 0
    assert "each place is 205 × 205 tiles" in run.out
    assert max(map(len, run.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("causl()", "--q-len", 8), "no mask 'causl' here; did you mean 'causal'?"),
        (("causal() and full()", "--q-len", 8), "joined by &, | and ~"),
        (("document(lengths=[3, 4])", "--q-len", 8), "its lengths sum to 7; here they must sum"),
        (("document(7)", "--q-len", 8), "write document(lengths=[100, 28])"),
        (("causal", "--q-len", 0), "--q-len 0: from 1 to 16777216"),
        (("causal", "--q-len", 8, "--kv-len", 1 << 30), "--kv-len 1073741824: from 1 to"),
        (("causal", "--q-len", 8, "--block-kv", -1), "--block-kv -1: from 1 to"),
        (("causal", "--q-len", "x"), "Invalid value for '--q-len'"),
        (("causal",), "Missing option '--q-len'"),
        ((), "Missing argument 'MASK'"),
        (("causal", "--q-len", 8, "--out", "a.pdf"), "--out a.pdf: the name ends in .png or .svg"),
        (("causal", "--q-len", 8, "--out", "/no/such/a.png"), "--out /no/such/a.png cannot be wri"),
    ],
)
def test_a_wrong_argument_is_one_line(smalti, arguments, expected):
    run = smalti("masks", "show", *arguments)
    assert run.code == 2
    assert run.out == ""
    assert expected in run.line


def test_a_picture_needs_matplotlib(smalti, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name)
    )
    run = smalti("masks", "show", "causal", "--q-len", 8, "--out", tmp_path / "a.png")
    assert run.code == 1
    assert run.line == '--out needs matplotlib: pip install "smalti[cli]"'


def test_a_terminal_of_ascii_gets_ascii(smalti, monkeypatch):
    from smalti.cli import masks

    monkeypatch.setattr(masks, "_can_print", lambda text: False)
    run = smalti("masks", "show", "causal", "--q-len", 256)
    assert run.out.isascii()
    assert "\n++..\n##++\n" in run.out


def test_help(smalti):
    assert "show" in smalti("masks").out
    assert "document(lengths=[N" in smalti("masks", "show", "--help").out


def test_the_commands_of_the_docs_run(smalti, monkeypatch, tmp_path):
    page = Path(__file__).resolve().parents[2] / "docs/masks.md"
    commands = re.findall(r"^smalti (masks .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) >= 2
    monkeypatch.chdir(tmp_path)
    for command in commands:
        run = smalti(*shlex.split(command))
        assert run.code == 0, run.err
