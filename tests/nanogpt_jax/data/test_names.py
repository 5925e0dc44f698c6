import pytest

from nanogpt_jax.data.names import check_name, did_you_mean


def test_a_typo_suggests_the_name():
    with pytest.raises(ValueError, match=r"^colour: got 'gren', allowed are 'red', 'green'\. Did "):
        check_name("colour", "gren", ["red", "green"])
    assert did_you_mean("Green", ["red", "green"]) == "Did you mean 'green'? "


def test_far_words_suggest_nothing():
    with pytest.raises(ValueError, match=r"allowed are 'red', 'green'\.$"):
        check_name("colour", "ultramarine", ["red", "green"])


def test_an_allowed_name_comes_back():
    assert check_name("colour", "red", ["red"]) == "red"
