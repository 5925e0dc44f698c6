"""Block tables: which entry serves which shape, and that damage is said."""

import json

import pytest

from smalti.block_table import ShapeClass, attention_class, dump, find, load, matmul_class

HEADS = {"Hq": 8, "Hkv": 8}
FORWARD = {"which": "forward", "dtype": "bfloat16", "mask": "causal", "D": 128, **HEADS}


def entry(shape_class: ShapeClass, kernel="splash", chip="v6e", **changed):
    return {
        "kernel": kernel,
        "chip": chip,
        "same": dict(shape_class.same),
        "near": dict(shape_class.near),
        "blocks": {"block_q": 512},
        "flags": [],
        "cycles": 100,
        "time_ns": 57,
        "label": "estimate",
        "runner_up": None,
        "candidates": 3,
        "tried": 2,
        "missed": 1,
        "searched": {"Sq": 2048},
        "versions": {"jax": "1"},
        "date": "2026-01-01",
        "command": "smalti estimate tune",
        **changed,
    }


def at(length: int, **changed) -> ShapeClass:
    return attention_class(**{**FORWARD, "Sq": length, "Sk": length, **changed})


def found(entries, shape_class: ShapeClass, kernel="splash", chip="v6e"):
    return find(entries, kernel=kernel, chip=chip, shape_class=shape_class)


def test_sizes_count_up_to_whole_half_lanes_and_powers_of_two():
    shape = at(3000, D=80, Dv=130, Hq=12, Hkv=4)
    assert shape.same == {
        "pass": "forward",
        "dtype": "bfloat16",
        "mask": "causal",
        "head_dim": 128,
        "value_dim": 192,
    }
    assert shape.near == {"group": 4, "Sq": 4096, "Sk": 4096}
    assert at(1, D=64).same["head_dim"] == 64
    assert at(1, D=65).same["value_dim"] == 128
    assert at(1).near["Sq"] == 1
    assert at(2049) == at(4096)
    assert at(2048) != at(2049)


def test_a_window_is_a_size_and_its_mask_a_kind():
    shape = at(4096, mask="sliding_window(1000)")
    assert shape.same["mask"] == "sliding_window"
    assert shape.near["window"] == 1024
    with pytest.raises(ValueError, match=r"mask 'sliding_window\(x\)' is not sliding_window\(n\)"):
        at(4096, mask="sliding_window(x)")


def test_an_equal_class_is_found():
    entries = [entry(at(n)) for n in (1024, 2048, 4096)]
    assert found(entries, at(2000)) is entries[1]


def test_the_nearest_sizes_serve_and_the_smaller_of_two():
    entries = [entry(at(n)) for n in (8192, 512, 2048)]
    assert found(entries, at(1 << 20)) is entries[0]
    assert found(entries, at(64)) is entries[1]
    assert found(entries, at(4096)) is entries[2]  # one doubling from 2048 and from 8192
    assert found(entries, at(1024)) is entries[1]


def test_the_distances_of_all_sizes_count_together():
    far_group = entry(at(2048, Hkv=1))  # group 8, three doublings
    far_length = entry(at(8192))  # two doublings in Sq and in Sk
    assert found([far_length, far_group], at(2048)) is far_group
    assert found([far_length, far_group], at(4096)) is far_length


@pytest.mark.parametrize(
    "other",
    [
        {"which": "backward"},
        {"dtype": "float32"},
        {"mask": "full"},
        {"mask": "sliding_window(1024)"},
        {"D": 192},
        {"Dv": 64},
    ],
)
def test_what_must_be_the_same_must(other):
    assert found([entry(at(2048, **other))], at(2048)) is None
    assert found([entry(at(2048))], at(2048, **other)) is None


def test_kernels_and_chips_are_kept_apart():
    entries = [entry(at(2048))]
    assert found(entries, at(2048), chip="v5e") is None
    assert found(entries, at(2048), kernel="tokamax") is None
    assert found([], at(2048)) is None


def test_products_have_classes_too():
    shape = matmul_class(dtype="bfloat16", M=1000, K=512, N=8)
    assert shape.near == {"M": 1024, "K": 512, "N": 8}
    made = entry(shape, kernel="matmul")
    larger = matmul_class(dtype="bfloat16", M=4096, K=4096, N=4096)
    assert found([made], larger, kernel="matmul") is made
    assert found([made], at(2048), kernel="matmul") is None


def test_a_table_comes_back_and_its_text_does_not_depend_on_the_order(tmp_path):
    entries = [entry(at(n), kernel=k) for n in (4096, 512, 16384) for k in ("splash", "ours")]
    text = dump(entries)
    assert text == dump(list(reversed(entries)))
    path = tmp_path / "table.json"
    path.write_text(text, encoding="utf-8")
    again = load(path)
    assert dump(again) == text
    order = [(one["kernel"], one["near"]["Sq"]) for one in again]
    assert order == [(k, n) for k in ("ours", "splash") for n in (512, 4096, 16384)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ('{"schema": 1, "entr', "it is not JSON"),
        ("[]", "it has no schema number"),
        ('{"entries": []}', "it has no schema number"),
        ('{"schema": 1}', "it has no list of entries"),
        ('{"schema": 1, "entries": [3]}', "entry 0 is not an object"),
        ('{"schema": 1, "entries": [{}]}', "entry 0 has no 'kernel'"),
    ],
)
def test_a_damaged_table_is_said(tmp_path, text, why):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"is damaged \\({why}.*restore it, or delete it and tune"):
        load(path)


def test_bytes_that_are_no_text_are_damage(tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a block table"):
        load(path)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"blocks": [512]}, "entry 1 has .512. as 'blocks'"),
        ({"cycles": "100"}, "entry 1 has '100' as 'cycles'"),
        ({"tried": True}, "entry 1 has True as 'tried'"),
        ({"near": {"Sq": 0}}, "entry 1 has 0 as the size of 'Sq'"),
        ({"near": {"Sq": "2048"}}, "entry 1 has '2048' as the size of 'Sq'"),
    ],
)
def test_a_damaged_entry_is_said_and_is_not_written(tmp_path, changed, why):
    entries = [entry(at(2048)), entry(at(4096), **changed)]
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"schema": 1, "entries": entries}))
    with pytest.raises(ValueError, match=why):
        load(path)
    with pytest.raises(ValueError, match=why.removeprefix("entry 1 ")):
        dump(entries)


def test_a_table_of_another_schema_says_what_to_do(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"schema": 2, "entries": []}')
    with pytest.raises(ValueError, match="of schema 2, and this smalti reads 1: tune again"):
        load(path)


def test_a_missing_table_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "table.json")
