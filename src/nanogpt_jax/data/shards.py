"""Token files as modded-nanogpt has them: a header, then uint16 tokens, all little-endian.

    bytes 0..1023   256 int32: [0] = 20240520 (magic), [1] = 1 (version), [2] = number of tokens
    bytes 1024..    that many uint16

(modded-nanogpt, `data/fineweb.py`.) A file is checked whole when it is opened, since a wrong token
would otherwise show as a strange loss, hours later.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_TOKENS = 2**31 - 1
"""What an int32 can count; modded-nanogpt's own shards have 10**8."""

_CHUNK = 1 << 22  # tokens a pass looks at together: 8 MiB


def write_atomic(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file that is either whole or not there, also after a crash or a kill."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive too
    finally:
        os.close(folder)


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Writes uint16 tokens `[N]`, 1 ≤ N < 2**31, to one shard, atomically."""
    if tokens.dtype != np.uint16 or tokens.ndim != 1 or not 1 <= tokens.size <= MAX_TOKENS:
        raise ValueError(
            f"tokens: got {tokens.dtype}{list(tokens.shape)} for {path}, a shard holds uint16 [N] "
            f"with 1 to {MAX_TOKENS} tokens; split or encode them first"
        )
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    write_atomic(Path(path), [header.tobytes(), np.ascontiguousarray(tokens, "<u2").data])


def open_shard(path: str | Path) -> np.memmap:
    """The tokens of one shard, uint16 `[N]`, mapped read-only.

    Raises ValueError, with the file and the byte, for a file that is empty, torn, of another
    format or version, or longer than its header says. `Shards` also checks the vocabulary.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < HEADER_BYTES:
        what = "is empty" if size == 0 else f"is torn: it ends at byte {size}, inside its header"
        raise ValueError(f"{path}: {what}; a shard has {HEADER_BYTES} bytes of header: {_AGAIN}")
    magic, version, count = (int(n) for n in np.fromfile(path, "<i4", 3))
    if magic != MAGIC:
        raise ValueError(
            f"{path}: byte 0 has {magic}, a shard starts with the magic number {MAGIC}; a file of "
            "another format (nanoGPT's own .bin has no header): prepare it with "
            "`python -m nanogpt_jax.data prepare`"
        )
    if version != VERSION:
        raise ValueError(f"{path}: byte 4 has version {version}, allowed is {VERSION}: {_AGAIN}")
    if count <= 0:
        raise ValueError(f"{path}: byte 8 says {count} tokens, a shard holds at least 1: {_AGAIN}")
    end = HEADER_BYTES + 2 * count
    if size < end:
        raise ValueError(
            f"{path}: is torn: its header promises {count} tokens, to byte {end}, but it ends at "
            f"byte {size}, in token {(size - HEADER_BYTES) // 2}: {_AGAIN}"
        )
    if size > end:
        raise ValueError(
            f"{path}: has {size - end} bytes too many: the {count} tokens of its header end at "
            f"byte {end}, the file at {size}: {_AGAIN}"
        )
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(count,))


_AGAIN = "download or prepare it again"


class Shards:
    """Several shards as one sequence: `len()`, and slices that copy across their borders.

    `sha256` is that of the tokens' bytes (no headers), so it does not depend on how they are cut.
    Opening reads every token once; it raises ValueError, with file, token and byte, where one is
    not below `vocab_size`.
    """

    def __init__(self, paths: Sequence[str | Path], vocab_size: int):
        if not paths:
            raise ValueError("paths: got no shards, allowed is one or more; check the pattern")
        self.paths = [Path(path) for path in paths]
        self._parts = [open_shard(path) for path in self.paths]
        self.starts = np.cumsum([0, *(part.size for part in self._parts)])
        digest = hashlib.sha256()
        for path, part in zip(self.paths, self._parts, strict=True):
            for start in range(0, part.size, _CHUNK):
                chunk = part[start : start + _CHUNK]
                if chunk.max() >= vocab_size:
                    at = start + int(np.argmax(chunk >= vocab_size))
                    raise ValueError(
                        f"{path}: token {at} (byte {HEADER_BYTES + 2 * at}) is {part[at]}, the "
                        f"vocabulary has ids 0 to {vocab_size - 1}; choose the tokenizer it was "
                        "made with, or prepare it again"
                    )
                digest.update(np.ascontiguousarray(chunk).data)
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        """uint16 tokens `[stop - start]`; the step must be 1."""
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"slice: got step {step}, allowed is 1; slice the result instead")
        return np.concatenate([np.zeros(0, np.uint16), *self._overlaps(start, stop)])

    def _overlaps(self, start: int, stop: int) -> Iterator[np.ndarray]:
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        for part, offset in zip(self._parts[first:], self.starts[first:], strict=False):
            if offset >= stop:
                return
            yield part[max(0, start - int(offset)) : stop - int(offset)]


def find_shards(pattern: str | Path) -> list[Path]:
    """The files that a path or glob names, by name; raises FileNotFoundError if there are none."""
    pattern = Path(pattern)
    found = sorted(pattern.parent.glob(pattern.name))
    if not found:
        raise FileNotFoundError(f"{pattern}: no such shard; prepare data or correct the pattern")
    return found


def sha256_of_tokens(tokens: np.ndarray) -> str:
    """What `Shards.sha256` says of the same uint16 tokens `[N]`."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<u2").data).hexdigest()
