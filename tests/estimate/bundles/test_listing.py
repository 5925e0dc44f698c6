import re

import pytest

from smalti.estimate.bundles.listing import parse_listing
from smalti.estimate.errors import DumpUnreadable

from ..fixtures import NAMES, load
from ..simulate.listings import text


def operation(line: str):
    (found,) = parse_listing(text([line]), "k.1").bundles[0].operations
    return found


def test_bundles_depths_regions_and_sources():
    listing = parse_listing(
        """
     0   :  { %s1_s1 = smov 3 /* copy /* of a :: nested */ comment */ } /* entry bundle: %k = c() */
   0x1 LB: > { %s2_s2 = sadd.s32 1, %s1_s1 /* loc("/a/b.py":12:3 to :9) */  ;;  \
%v1_v2 = vadd.f32 %v0_v1, %v0_v1 /* a
comment of lines } { ;; */ } /* Start region 7 :: Start region 12 */
   0x2   : >> { } /* End region 12 :: End region 7 */
   0x3 PF: {} /* Start/End empty region 9 */
   0x4 CT:  {} /* exit bundle: %k = c() */
""",
        "k",
    )
    assert [bundle.address for bundle in listing.bundles] == [0, 1, 2, 3, 4]
    assert [bundle.depth for bundle in listing.bundles] == [0, 1, 2, 0, 0]
    assert [len(bundle.operations) for bundle in listing.bundles] == [1, 2, 0, 0, 0]
    assert listing.regions == {7: 1, 12: 1, 9: 3}
    assert listing.starts == {1, 3}
    assert listing.boundaries == {1, 3}
    assert listing.ended_at(2) == (12, 7)
    assert listing.ended_at(1) == ()
    add, vector = listing.bundles[1].operations
    assert (add.opcode, add.destination, add.arguments) == ("sadd.s32", "%s2_s2", ("1", "%s1_s1"))
    assert add.source == ("/a/b.py", 12)
    assert not add.is_vector
    assert (vector.is_vector, vector.source) == (True, None)
    assert listing.bundles[0].operations[0].note == "copy /* of a :: nested */ comment"


@pytest.mark.parametrize(
    ("line", "destination", "opcode", "predicate", "arguments"),
    [
        ("%s1_s2 = sadd.s32 1, %s3_s4", "%s1_s2", "sadd.s32", None, ("1", "%s3_s4")),
        ("%s1_s2 = sadd.s32 (%p1_p1), 1, 2", "%s1_s2", "sadd.s32", "%p1_p1", ("1", "2")),
        ("%s1_s2 = sadd.s32 (!%p1_p1), 1, 2", "%s1_s2", "sadd.s32", "!%p1_p1", ("1", "2")),
        ("%s1_s2 = smov (%p1_p1, %s3_s2), 5", "%s1_s2", "smov", None, ("(%p1_p1, %s3_s2)", "5")),
        ("%s1_s2 = sld [smem:[%s1_s1 + $0x4]]", "%s1_s2", "sld", None, ("[smem:[%s1_s1 + $0x4]]",)),
        (
            "%s1_s2 = sld [smem:[#allocation3]] (!%p1_p1)",
            "%s1_s2",
            "sld",
            "!%p1_p1",
            ("[smem:[#allocation3]]",),
        ),
        ("%7 = sst [smem:[#allocation3]] %s1_s2", None, "sst", None,
         ("[smem:[#allocation3]]", "%s1_s2")),
        ("%7 = sst [smem:[#allocation3 + $0x1]] (%p1_p1), 5", None, "sst", "%p1_p1",
         ("[smem:[#allocation3 + $0x1]]", "5")),
        ("%7 = sbr.rel (!%p1_p1) target = $region3", None, "sbr.rel", "!%p1_p1",
         ("target = $region3",)),
        ("%7 = dma.hbm_to_vmem [thread:$0]  (%p1_p1), %s1_s1, 8, %s2_s2, %s3_s3", None,
         "dma.hbm_to_vmem", "%p1_p1", ("%s1_s1", "8", "%s2_s2", "%s3_s3")),
        ("%7 = sfence", None, "sfence", None, ()),
    ],
)  # fmt: skip
def test_operations(line, destination, opcode, predicate, arguments):
    found = operation(line)
    assert (found.destination, found.opcode) == (destination, opcode)
    assert (found.predicate, found.arguments) == (predicate, arguments)


@pytest.mark.parametrize(
    ("line", "is_vector"),
    [
        ("%v1_v2 = vadd.f32 %v1_v1, %v1_v3", True),
        ("%7 = vst [vmem:[%s1_s1] sm:$0xff] %v1_v1", True),
        ("%vm1_vm2 = vcmp.gt.s32.totalorder %v1_v1, %v1_v3", True),
        ("%v1_v2 = vpop.f32.eup %7", True),
        ("%7 = vsyncpa [#allocation1], 0", False),
        ("%7 = vpush %v1_v1", False),
        ("%s1_s2 = vpop.sfrf %7", False),
        ("%p1_p2 = vnew %v1_v1", False),
    ],
)
def test_what_writes_a_scalar_register_is_no_vector_operation(line, is_vector):
    assert operation(line).is_vector is is_vector


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: "", "k.1: no bundle in the dump of 0 characters"),
        (
            lambda t: t.replace("exit bundle", "bundle"),
            "k.1: the dump ends before its exit bundle; it is cut short",
        ),
        (
            lambda t: re.sub(r" *0x1 .*\n", "", t),
            "k.1: bundle 0x2 stands where 0x1 was due; lines are missing",
        ),
        (
            lambda t: t.replace("{ b.x }", "{ b.x "),
            "k.1: bundle 0x1 does not end; the dump is damaged",
        ),
        (
            lambda t: t.replace("{ b.x }", "{ b.x } */"),
            "k.1: bundle 0x1 ends a comment that never began",
        ),
        (
            lambda t: t.replace("{ b.x }", "{ b.x } /* a"),
            "k.1: a comment in bundle 0x1 does not end",
        ),
        (
            lambda t: t.replace("b.x", "%%% b"),
            "k.1: bundle 0x1 holds what is no operation: '%%% b'",
        ),
        (
            lambda t: t.replace("{ b.x }", "{ b.x } /* Start region 3 */"),
            "k.1: region 3 starts twice, at 0x0 and 0x1; the dump is damaged",
        ),
    ],
)  # fmt: skip
def test_damage_is_named(change, expected):
    whole = text(["a.x // Start region 3", "b.x", "c.x", "d.x"])
    assert len(parse_listing(whole, "k.1").bundles) == 4
    with pytest.raises(DumpUnreadable, match=f"^{re.escape(expected)}$"):
        parse_listing(change(whole), "k.1")


@pytest.mark.parametrize("name", NAMES)
def test_real_listings(name):
    dump = load(name).dump
    listing = parse_listing(dump.bundles, dump.op)
    assert listing.bundles[-1].address == len(listing.bundles) - 1
    assert dump.bundles.count("exit bundle:") == 1
    # Every loop of the listing is a branch back.
    assert any(bundle.depth for bundle in listing.bundles)
    sources = {
        operation.source[0]
        for bundle in listing.bundles
        for operation in bundle.operations
        if operation.source
    }
    assert sources
    assert not any("/" in source for source in sources)
