import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_jax.data import shards
from nanogpt_jax.data.shards import Shards, find_shards, open_shard, sha256_of_tokens, write_shard
from tests.nanogpt_jax.data.support import quick


def refusal(path, text):
    return pytest.raises(ValueError, match="^" + re.escape(str(path)) + ".*" + text)


def some(n, seed=0):
    return np.random.default_rng(seed).integers(0, 50257, n).astype(np.uint16)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, some(100))
    return path


def test_the_bytes_are_those_of_modded_nanogpt(tmp_path):
    """Its loader reads 256 int32, then `header[2]` uint16 (`data/fineweb.py`)."""
    write_shard(tmp_path / "a.bin", np.array([1, 258, 50256], np.uint16))
    raw = (tmp_path / "a.bin").read_bytes()
    assert raw[:12] == b"\x88\xd8\x34\x01" + b"\1\0\0\0" + b"\3\0\0\0"
    assert raw[12:1024] == bytes(1012)
    assert raw[1024:] == b"\x01\x00\x02\x01\x50\xc4"


def test_roundtrip(tmp_path):
    for n in (1, 2, 1000):
        write_shard(tmp_path / "a.bin", some(n))
        np.testing.assert_array_equal(open_shard(tmp_path / "a.bin"), some(n))
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


def test_mapped_tokens_are_read_only(shard):
    with pytest.raises(ValueError, match="read-only"):
        open_shard(shard)[0] = 1


@pytest.mark.parametrize(
    "tokens", [np.zeros(0, np.uint16), np.zeros(3, np.int32), np.zeros((2, 2), np.uint16)]
)
def test_write_takes_uint16_rows_only(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"tokens: got .* a shard holds uint16 \[N\]"):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_empty_file(shard):
    shard.write_bytes(b"")
    with refusal(shard, "is empty"):
        open_shard(shard)


def test_torn_header(shard):
    shard.write_bytes(shard.read_bytes()[:1000])
    with refusal(shard, "torn: it ends at byte 1000, inside its header"):
        open_shard(shard)


@pytest.mark.parametrize("cut", [1, 2, 57, 200])
def test_torn_tokens(shard, cut):
    shard.write_bytes(shard.read_bytes()[:-cut])
    token = (200 - cut) // 2
    with refusal(shard, f"to byte 1224, but it ends at byte {1224 - cut}, in token {token}"):
        open_shard(shard)


def test_trailing_bytes(shard):
    shard.write_bytes(shard.read_bytes() + b"xyz")
    with refusal(shard, "has 3 bytes too many: the 100 tokens .* end at byte 1224, the file at"):
        open_shard(shard)


def edit_header(path, index, value):
    raw = bytearray(path.read_bytes())
    raw[4 * index : 4 * index + 4] = int(value).to_bytes(4, "little", signed=True)
    path.write_bytes(raw)


def test_foreign_magic(shard):
    edit_header(shard, 0, 20240521)
    with refusal(shard, "byte 0 has 20240521, .* magic number 20240520"):
        open_shard(shard)


def test_headerless_nanogpt_file(tmp_path):
    some(2000).tofile(tmp_path / "train.bin")
    with refusal(tmp_path / "train.bin", r"byte 0 has .*nanoGPT's own \.bin has no header"):
        open_shard(tmp_path / "train.bin")


def test_other_version(shard):
    edit_header(shard, 1, 2)
    with refusal(shard, "byte 4 has version 2, allowed is 1"):
        open_shard(shard)


@pytest.mark.parametrize("count", [0, -5])
def test_no_tokens(shard, count):
    edit_header(shard, 2, count)
    with refusal(shard, f"byte 8 says {count} tokens"):
        open_shard(shard)


@pytest.mark.parametrize("at", [0, 4, 63, 64, 99])
def test_out_of_vocabulary_token(shard, at, monkeypatch):
    monkeypatch.setattr(shards, "_CHUNK", 64)
    tokens = some(100)
    tokens[at] = 60000
    tokens[99] = 60001 if at != 99 else 60000
    write_shard(shard, tokens)
    with refusal(shard, rf"token {at} \(byte {1024 + 2 * at}\) is 60000, .* ids 0 to 50256"):
        Shards([shard], 50257)


def test_the_vocabulary_bound_is_exact(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([79], np.uint16))
    assert len(Shards([tmp_path / "a.bin"], 80)) == 1
    with refusal(tmp_path / "a.bin", r"token 0 \(byte 1024\) is 79"):
        Shards([tmp_path / "a.bin"], 79)


def test_the_second_shard_is_checked_too(shard, tmp_path):
    (tmp_path / "b.bin").write_bytes(b"")
    with refusal(tmp_path / "b.bin", "is empty"):
        Shards([shard, tmp_path / "b.bin"], 50257)


@quick
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.data())
def test_several_shards_are_one_sequence(tmp_path_factory, sizes, data):
    folder = tmp_path_factory.mktemp("shards")
    tokens = some(sum(sizes), seed=len(sizes))
    paths, start = [], 0
    for i, size in enumerate(sizes):
        paths.append(folder / f"{i}.bin")
        write_shard(paths[-1], tokens[start : start + size])
        start += size
    joined = Shards(paths, 50257)
    a, b = data.draw(st.tuples(st.integers(0, start + 2), st.integers(0, start + 2)))
    assert len(joined) == start
    np.testing.assert_array_equal(joined[a:b], tokens[a:b])
    assert joined[a:b].dtype == np.uint16
    assert joined.sha256 == sha256_of_tokens(tokens)


def test_slices_with_a_step_are_refused(shard):
    with pytest.raises(ValueError, match="slice: got step 2"):
        Shards([shard], 50257)[0:10:2]


def test_find_shards_sorts_and_refuses_nothing(shard, tmp_path):
    write_shard(tmp_path / "0.bin", some(1))
    assert [p.name for p in find_shards(tmp_path / "*.bin")] == ["0.bin", "a.bin"]
    assert find_shards(shard) == [shard]
    with pytest.raises(FileNotFoundError, match=r"z\*\.bin: no such shard"):
        find_shards(tmp_path / "z*.bin")
    with pytest.raises(ValueError, match="paths: got no shards"):
        Shards([], 50257)


def test_a_failed_write_leaves_the_old_file(shard):
    def parts():
        yield b"half"
        raise KeyboardInterrupt

    before = shard.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        shards.write_atomic(shard, parts())
    assert shard.read_bytes() == before
    assert [p.name for p in shard.parent.iterdir()] == ["a.bin"]


def test_a_killed_write_leaves_the_old_file(shard):
    code = (
        "import os, pathlib, sys\n"
        "from nanogpt_jax.data.shards import write_atomic\n"
        "def parts():\n"
        "    yield b'half'\n"
        "    os.kill(os.getpid(), 9)\n"
        "write_atomic(pathlib.Path(sys.argv[1]), parts())\n"
    )
    before = shard.read_bytes()
    done = subprocess.run([sys.executable, "-c", code, str(shard)], timeout=60, check=False)
    assert done.returncode == -9
    assert shard.read_bytes() == before
    assert find_shards(shard.parent / "*.bin") == [shard]
