"""Three ways from text to numbers: a character, a byte, or a GPT-2 token at a time.

All encode to uint16, the type of a `.bin` shard. Two tokenizers are equal when their JSON is, and
a checkpoint stores that JSON, so that sampling never decodes with another vocabulary.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from nanogpt_jax.data import gpt2
from nanogpt_jax.data.names import check_name

TOKENIZERS = ("char", "byte", "gpt2")


class Tokenizer(ABC):
    """What the three share."""

    name: str
    vocab_size: int
    end_of_text: int | None = None
    """The id put before every document, where the vocabulary has one."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """uint16 ids `[N]`; raises ValueError for what the vocabulary cannot write."""

    @abstractmethod
    def _decode(self, ids: np.ndarray) -> str: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids `[N]`, any integer type; raises ValueError for an id out of range.

        Bytes that are not UTF-8 (a sample may end inside a character) become U+FFFD.
        """
        array = np.asarray(ids, np.int64)
        bad = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if bad.size:
            raise ValueError(
                f"ids: got {array[bad[0]]} at position {bad[0]}, the {self.name!r} vocabulary has "
                f"ids 0 to {self.vocab_size - 1}; mask the logits of a padded vocabulary"
            )
        return self._decode(array)

    def to_json(self) -> str:
        return json.dumps({"name": self.name, "vocab_size": self.vocab_size} | self._state())

    def _state(self) -> dict[str, str]:
        return {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"


class CharTokenizer(Tokenizer):
    """One id a character: the distinct characters of a text, in code point order."""

    name = "char"

    def __init__(self, text: str):
        self.chars = "".join(sorted(set(text)))
        self.vocab_size = len(self.chars)
        if not 1 <= self.vocab_size <= 2**16:
            raise ValueError(
                f"text: has {self.vocab_size} distinct characters, uint16 ids allow 1 to 65536; "
                "use tokenizer 'byte' or 'gpt2'"
            )
        self._codes = _code_points(self.chars)

    def encode(self, text: str) -> np.ndarray:
        codes = _code_points(text)
        # A table over all of Unicode is 2 MB, and 20 times faster than a search a character.
        ids = np.zeros(0x110000, np.uint16)
        ids[self._codes] = np.arange(self.vocab_size)
        out = ids[codes]
        unknown = np.flatnonzero(self._codes[out] != codes)
        if unknown.size:
            i = int(unknown[0])
            raise ValueError(
                f"text: has {text[i]!r} (U+{ord(text[i]):04X}) at position {i}, which is not one "
                f"of the {self.vocab_size} characters of this 'char' tokenizer; remove it, or "
                "build the tokenizer from a text that holds it"
            )
        return out

    def _decode(self, ids: np.ndarray) -> str:
        return "".join(map(chr, self._codes[ids]))

    def _state(self) -> dict[str, str]:
        return {"chars": self.chars}


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8: any text, 256 ids."""

    name = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint16)

    def _decode(self, ids: np.ndarray) -> str:
        return bytes(ids.astype(np.uint8)).decode("utf-8", errors="replace")


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's 50257 tokens. `<|endoftext|>` inside a text is encoded as the characters it has.

    Raises ModuleNotFoundError when the package with the vocabulary is missing.
    """

    name = "gpt2"
    vocab_size = gpt2.VOCAB_SIZE
    end_of_text = gpt2.END_OF_TEXT

    def __init__(self):
        self._vocabulary = gpt2.load_vocabulary()
        self._bytes = {i: token for token, i in self._vocabulary.items()}
        self._bytes[gpt2.END_OF_TEXT] = b"<|endoftext|>"

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        pieces = gpt2.piece_pattern().findall(text)
        ids = {p: gpt2.merge(p.encode(), self._vocabulary) for p in set(pieces)}
        return np.array([i for piece in pieces for i in ids[piece]], np.uint16)

    def _decode(self, ids: np.ndarray) -> str:
        return b"".join(self._bytes[i] for i in ids.tolist()).decode("utf-8", errors="replace")


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer called `name`; 'char' takes its vocabulary from `texts`."""
    check_name("tokenizer", name, TOKENIZERS)
    if name == "char":
        return CharTokenizer("".join(sorted(set().union(*map(set, texts)))))
    return ByteTokenizer() if name == "byte" else Gpt2Tokenizer()


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_json` wrote; raises ValueError for anything else."""
    try:
        state = json.loads(text)
        name, vocab_size, chars = state["name"], state["vocab_size"], state.get("chars", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"tokenizer: got {text[:80]!r}, allowed is what Tokenizer.to_json writes; "
            "prepare the data again"
        ) from None
    tokenizer = make_tokenizer(name, [chars])
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"tokenizer: says vocab_size {vocab_size}, {name!r} with these characters has "
            f"{tokenizer.vocab_size}; the file was edited: prepare the data again"
        )
    return tokenizer


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text: has the lone surrogate {text[error.start]!r} at position {error.start}, which "
            "UTF-8 cannot write; read the file with the right encoding"
        ) from None
