import os
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from smalti.estimate.compile.cache import cache_folder, cache_key, load, store
from smalti.estimate.compile.run import Compiled
from smalti.estimate.program import KernelDump, Memory

KEY = cache_key(b"module", chip="v6e")
COMPILED = Compiled(
    hlo="HloModule jit_f\n" * 500,
    memory=Memory(1, 2, 3, 4, 5),
    kernels={"k.1": KernelDump("k.1", "bundles α", "utilization")},
    xla_ops={"fusion": KernelDump("fusion", "other bundles", "utilization")},
)


def entry(folder: Path) -> Path:
    (path,) = (folder / "programs").iterdir()
    return path


def test_an_entry_comes_back_as_it_was(tmp_path):
    assert load(tmp_path, KEY) is None
    store(tmp_path, KEY, COMPILED)
    assert load(tmp_path, KEY) == COMPILED
    assert len(entry(tmp_path).read_bytes()) < len(COMPILED.hlo) / 10


def test_the_key_depends_on_all_that_it_is_given():
    keys = [
        KEY,
        cache_key(b"other", chip="v6e"),
        cache_key(b"module", chip="v5e"),
        cache_key(b"module", chip="v6e", flags=["--a"]),
    ]
    assert len(set(keys)) == len(keys)
    assert cache_key(b"module", chip="v6e") == KEY


def test_a_byte_changed_anywhere_is_found(tmp_path):
    store(tmp_path, KEY, COMPILED)
    whole = entry(tmp_path).read_bytes()
    # Bytes 3 to 9 of the header are flags, time and system: they hold nothing of the entry.
    for at in [*range(3), *range(10, len(whole))]:
        entry(tmp_path).write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        assert load(tmp_path, KEY) is None, at
    for length in range(len(whole)):
        entry(tmp_path).write_bytes(whole[:length])
        assert load(tmp_path, KEY) is None, length
    store(tmp_path, KEY, COMPILED)
    assert load(tmp_path, KEY) == COMPILED


def test_an_entry_of_another_shape_is_none(tmp_path):
    store(tmp_path, KEY, Compiled("hlo", {"bytes": 1}, {}, {}))  # type: ignore[arg-type]
    assert load(tmp_path, KEY) is None


@contextmanager
def files_end_after(size: int):
    """As on a full disk: writing past it is an OSError."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_a_warning_and_loses_nothing(tmp_path):
    store(tmp_path, KEY, COMPILED)
    larger = Compiled(COMPILED.hlo, COMPILED.memory, {}, {})
    text = (
        f"the compiled program was not cached in {tmp_path / 'programs'} (File too large); it will "
        "be compiled again next time. Set SMALTI_CACHE to a folder that can be written"
    )
    with files_end_after(50), pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        store(tmp_path, KEY, larger)
    assert load(tmp_path, KEY) == COMPILED
    assert entry(tmp_path).name == f"{KEY}.json.gz"  # and no part of the other


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="was not cached"):
        store(tmp_path / "file", KEY, COMPILED)
    assert load(tmp_path / "file", KEY) is None


def test_what_a_killed_writer_left_is_not_read_and_goes_after_an_hour(tmp_path):
    store(tmp_path, KEY, COMPILED)
    young, old = tmp_path / "programs" / "young.part", tmp_path / "programs" / "old.part"
    for part in (young, old):
        part.write_bytes(b"half")
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    store(tmp_path, KEY, COMPILED)
    assert young.exists()
    assert not old.exists()


def test_writers_and_readers_at_once_see_whole_entries(tmp_path):
    def work(n: int):
        if n % 3 == 0:
            store(tmp_path, KEY, COMPILED)
            return COMPILED
        return load(tmp_path, KEY)

    store(tmp_path, KEY, COMPILED)
    with ThreadPoolExecutor(8) as pool:
        assert all(seen == COMPILED for seen in pool.map(work, range(150)))


def test_where_the_cache_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SMALTI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "smalti"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/smalti")
    monkeypatch.setenv("SMALTI_CACHE", "/s")
    assert cache_folder() == Path("/s")
    assert cache_folder("~/mine") == tmp_path / "mine"
