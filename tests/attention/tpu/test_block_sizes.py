"""Tile sizes: legal, small enough, and refused with advice where they are not."""

import functools
import itertools
from typing import Any

import pytest

from smalti import BlockSizes, masks
from smalti.attention.tpu import block_sizes
from smalti.attention.tpu.known import find_cells, plan_known
from smalti.attention.tpu.layout import Heads
from smalti.attention.tpu.mods import NO_MOD, KernelMod, Operand
from smalti.attention.tpu.pipeline import written_out
from smalti.attention.tpu.vmem import vmem_bytes
from smalti.masks.tiles import TileGrid

CHIPS = [None, *block_sizes.VMEM_LIMIT]


def heads_of(D: int, Dv: int = 128) -> Heads:
    whole_lanes = D % 128 == 0 and Dv % 128 == 0
    return Heads(1, 8, 8, D, Dv, "BHSD" if whole_lanes else "BHDS")


def choose(direction: Any = "forward", q_len=4096, kv_len=4096, **options):
    options = {
        "heads": heads_of(128),
        "itemsize": 2,
        "chip": "v6e",
        "block_sizes": None,
    } | options
    return block_sizes.choose(direction, q_len=q_len, kv_len=kv_len, **options)


def mod_of(*kinds: Any, floating: bool = False) -> KernelMod:
    return KernelMod(tuple(Operand(kind, floating) for kind in kinds), (), {}, (), (), result=kinds)


LENGTHS = [(1, 1), (128, 129), (700, 1), (4096, 4096), (1, 100_000), (100_000, 1000)]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_are_legal_and_fit_in_vmem(direction, chip):
    for (q_len, kv_len), D, itemsize in itertools.product(LENGTHS, (1, 64, 128, 256), (2, 4)):
        for bias in (None, ((q_len, kv_len), 4), ((1, kv_len), 4)):
            heads = heads_of(D)
            blocks = choose(
                direction, q_len, kv_len, chip=chip, bias=bias, heads=heads, itemsize=itemsize
            )
            check_legal(blocks, q_len, kv_len)
            assert blocks.keys_in_lanes == (heads.layout == "BHDS")
            all_keys = kv_len <= blocks.major_kv
            for launch in block_sizes._launches(direction, all_keys, bias is not None):
                need = vmem_bytes(launch, blocks, heads, itemsize, chip=chip, bias=bias)
                assert need <= block_sizes.vmem_limit(chip), (launch, blocks, heads, itemsize)
            if bias is None or 1 in bias[0]:
                assert max(blocks.major_q, blocks.major_kv) <= block_sizes.MOST_MAJOR


def check_legal(blocks, q_len: int, kv_len: int):
    assert blocks.block_q % blocks.cut_q == blocks.block_q % 128 == 0
    assert blocks.block_kv % 128 == 0
    assert blocks.major_q % blocks.block_q == blocks.major_kv % blocks.block_kv == 0
    # Tokens of padding are few, but for what a register of lanes takes.
    for size, length in ((blocks.block_q, q_len), (blocks.block_kv, kv_len)):
        assert -(-length // size) * size <= max(128, (-(-length // 128) * 128) * 16 / 15)


MODS = {
    "rows": (("q", "kv", "number"), ()),
    "relative": (("relative",), ("relative", "q")),
    "scores": (("scores", "kv"), ()),
    "score_mod of many": ((), ("q", "kv", "relative", "number")),
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("chip", ["v4", "v6e"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_mods_read_fits_in_vmem_as_well(direction, chip, name):
    kinds, of_scores = MODS[name]
    mask = mod_of(*kinds)
    score_mod = mod_of(*of_scores, floating=True) if of_scores else NO_MOD
    for (q_len, kv_len), D in itertools.product(LENGTHS, (64, 256)):
        heads = heads_of(D)
        blocks = choose(
            direction, q_len, kv_len, chip=chip, heads=heads, mask=mask, score_mod=score_mod
        )
        check_legal(blocks, q_len, kv_len)
        operands = block_sizes.operand_blocks([*kinds, *of_scores], blocks, q_len, kv_len)
        assert len(operands) == len([x for x in (*kinds, *of_scores) if x != "number"])
        for launch in block_sizes._launches(direction, kv_len <= blocks.major_kv, False):
            need = vmem_bytes(
                launch, blocks, heads, 2, chip=chip, operands=operands,
                score_mod=len(of_scores) if of_scores else None,
                relative="relative" in (*kinds, *of_scores),
            )  # fmt: skip
            assert need <= block_sizes.vmem_limit(chip), (launch, blocks, heads)
        most = block_sizes.MOST_MAJOR_WITH_BIAS if "scores" in kinds else block_sizes.MOST_MAJOR
        assert max(blocks.major_q, blocks.major_kv) <= most


def test_what_of_an_operand_is_in_vmem():
    blocks = choose(q_len=3000, kv_len=5000)
    find = functools.partial(block_sizes.operand_blocks, blocks=blocks, q_len=3000, kv_len=5000)
    assert find(["number"]) == []
    assert find(["q", "kv"]) == [(1, blocks.major_q, 4), (1, blocks.major_kv, 4)]
    ((rows, columns, _),) = find(["relative"])  # all of it, padded as queries and keys are
    assert rows == 1
    assert columns >= 3000 + 5000 - 1
    assert columns % 128 == 0
    assert find(["scores"]) == [(blocks.major_q, blocks.major_kv, 2)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_of_known_masks_fit_with_the_tiles_that_are_written_out(direction):
    for mask, length in [(masks.causal(), 8192), (masks.sliding_window(512), 4096)]:
        sizes = 1, 1, length, length
        cells = find_cells(mask.bind(*sizes), sizes)
        assert cells is not None
        for D, chip in itertools.product((64, 128, 256), ("v5e", "v6e", "v7x")):
            heads = heads_of(D)
            blocks = choose(direction, length, length, chip=chip, heads=heads, cells=cells)
            check_legal(blocks, length, length)
            walk = plan_known(cells, blocks)
            assert walk is not None
            written, loops = written_out(walk)
            for launch in block_sizes._launches(direction, length <= blocks.major_kv, False):
                need = vmem_bytes(
                    launch, blocks, heads, 2, chip=chip, written_out=written, loops=loops,
                    one_tile_per_query=walk.one_tile_per_query,
                    first_keys=walk.first_keys,
                )  # fmt: skip
                assert need <= block_sizes.vmem_limit(chip), (launch, blocks, heads)


def test_the_callers_sizes_are_kept_and_cut_down_to_the_sequence():
    blocks = choose(block_sizes=BlockSizes(256, 640))
    assert (blocks.block_q, blocks.block_kv) == (256, 640)
    blocks = choose(q_len=100, kv_len=300, block_sizes=BlockSizes(512, 512))
    assert (blocks.block_q, blocks.block_kv) == (128, 384)


@pytest.mark.parametrize(
    ("name", "size", "most", "nearest"),
    [
        ("block_q", 1, 512, 128),
        ("block_kv", 200, 1024, 256),
        ("block_q", 130, 512, 128),
        ("block_kv", 8, 1024, 128),
        ("block_q", 640, 512, 512),
        ("block_kv", 4096, 1024, 1024),
    ],
)
def test_sizes_that_are_not_legal_are_refused_with_the_nearest(name, size, most, nearest):
    sizes = BlockSizes(**({"block_q": 256, "block_kv": 256} | {name: size}))
    message = (
        rf"BlockSizes.{name}: got {size}; .* multiples of 128, .* up to {most}\. "
        rf"The nearest is {nearest}\."
    )
    with pytest.raises(ValueError, match=message):
        block_sizes.check(sizes)
    with pytest.raises(ValueError, match=message):
        choose(block_sizes=sizes)


def test_tiles_that_cannot_fit_are_refused():
    wide = {"heads": heads_of(512, 512), "itemsize": 4, "block_sizes": BlockSizes(512, 1024)}
    message = r"tile of 512 queries and 1024 keys takes some \d+ MiB of VMEM, and v4 has 14"
    with pytest.raises(ValueError, match=message):
        choose("backward", chip="v4", **wide)
    assert choose("backward", chip="v6e", **wide).block_kv == 1024


def test_a_large_bias_makes_the_blocks_in_vmem_smaller():
    plain, row = choose(), choose(bias=((1, 4096), 4))
    whole = choose(bias=((4096, 4096), 4))
    assert (row.major_q, row.major_kv) == (plain.major_q, plain.major_kv)
    assert max(whole.major_q, whole.major_kv) <= block_sizes.MOST_MAJOR_WITH_BIAS


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x"])
def test_all_keys_of_a_head_before_all_else(chip):
    """8192 keys of 256 dimensions, which one launch of the backward can have."""
    options: dict[str, Any] = {
        "q_len": 8192,
        "kv_len": 8192,
        "heads": heads_of(256, 256),
        "chip": chip,
    }
    blocks = choose("backward", band=(None, 0), **options)
    assert (blocks.major_kv, blocks.key_buffers, blocks.block_kv) == (8192, 1, 512)
    roomy = choose("backward", band=(None, 0), **{**options, "heads": heads_of(128, 128)})
    assert (roomy.major_kv, roomy.key_buffers, roomy.block_kv) == (8192, 2, 1024)
    given = choose("backward", block_sizes=BlockSizes(512, 1024), **options)
    assert given.block_kv == 1024


def test_small_vmem_takes_smaller_blocks():
    sizes: dict[str, Any] = {
        "q_len": 8192,
        "kv_len": 8192,
        "heads": heads_of(256, 256),
        "itemsize": 4,
    }
    small, large = (choose("backward", chip=chip, **sizes) for chip in ("v4", "v6e"))
    assert small.major_q * small.major_kv < large.major_q * large.major_kv


def entry(which="forward", *, Sq=4096, group=1, **more) -> dict[str, Any]:
    same = {"pass": which, "dtype": "bfloat16", "mask": "causal"}
    return {
        "kernel": "ours",
        "chip": "v6e",
        "same": same | {"head_dim": 128, "value_dim": 128},
        "near": {"group": group, "Sq": Sq, "Sk": 4096},
        "blocks": {"block_q": 256, "block_kv": 512},
    } | more


def test_tiles_come_from_the_nearest_entry_of_the_table(monkeypatch):
    other = entry(Sq=512, blocks={"block_q": 128, "block_kv": 128})
    monkeypatch.setattr(block_sizes, "table", lambda: [entry(), other])

    def tile(direction="forward", **options):
        blocks = choose(direction, **{"band": (None, 0), **options})
        return blocks.block_q, blocks.block_kv

    assert tile() == tile(q_len=2049) == (256, 512)
    assert tile(q_len=300) == (128, 128)
    default = block_sizes.DEFAULT["bfloat16"]
    assert tile(band=None) == tile(band=(None, None)) == default
    assert tile("backward") == tile(chip="v5e") == default
    assert tile(itemsize=4) == block_sizes.DEFAULT["float32"]
    assert tile(block_sizes=BlockSizes(128, 256)) == (128, 256)


@pytest.mark.parametrize("number", range(len(block_sizes.table())))
def test_what_is_in_the_table_is_legal_and_fits_as_it_is(number):
    found = block_sizes.table()[number]
    asked = found["searched"]
    sizes = BlockSizes(**found["blocks"])
    block_sizes.check(sizes)
    assert found["kernel"] == "ours"
    assert f"tune ours --chip {found['chip']} " in found["command"]
    heads = Heads(1, asked["Hq"], asked["Hkv"], asked["D"], asked["Dv"], "BHSD")
    blocks = choose(
        asked["pass"],
        asked["Sq"],
        asked["Sk"],
        chip=found["chip"],
        heads=heads,
        itemsize={"bfloat16": 2, "float32": 4}[asked["dtype"]],
        band={"causal": (None, 0), "full": (None, None)}[asked["mask"]],
    )
    assert (blocks.block_q, blocks.block_kv) == (sizes.block_q, sizes.block_kv)


@pytest.mark.parametrize(
    ("band", "name"),
    [
        ((None, None), "full"),
        ((None, 3), "causal"),
        ((-1023, 0), "sliding_window(1024)"),
        ((-5, None), None),
        ((1, 0), None),
        (None, None),
    ],
)
def test_names_of_masks_in_the_table(band, name):
    assert block_sizes.name_in_table(band) == name


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        (TileGrid(1, 1, 1024, 2048, 256, 512), (256, 512)),
        (TileGrid(1, 1, 100, 2048, 100, 512), (128, 512)),  # one tile: filled up
        (TileGrid(1, 1, 512, 1000, 512, 1000), (512, 1024)),
        (TileGrid(1, 1, 1024, 2048, 100, 512), None),
        (TileGrid(1, 1, 1024, 4096, 1024, 512), None),
        (TileGrid(1, 1, 1024, 4096, 256, 2048), None),
    ],
)
def test_the_tiles_of_a_block_mask(grid, sizes):
    found = block_sizes.of_block_mask(grid)
    assert found == (None if sizes is None else BlockSizes(*sizes))
