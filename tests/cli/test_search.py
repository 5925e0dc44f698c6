import jax
import pytest

from smalti.cli import search
from smalti.cli.search import OURS, Subject, run_one, variants_of
from smalti.estimate import CompileFailed, EstimateError
from smalti.estimate.compile.lowering import lower
from smalti.estimate.compile.target import find_target
from smalti.estimate.peers import AttentionCase
from tests.estimate.report.programs import program

CASE = AttentionCase.parse("B=1,Hq=1,Hkv=1,S=256,D=128")


def subject(which="forward", case=CASE):
    return Subject(case, which, "v6e", (), "estimate; of a test")


def searched(names, *, most=None, jobs=1, of=None):
    started, done = [], []
    found = search.search(
        of or subject(), names, most=most, jobs=jobs, on_start=started.append, on_done=done.append
    )
    assert started == [len(done)]
    return found


@pytest.fixture
def compiles(monkeypatch):
    """In place of the compiler: lowers for real, and takes what a fixture was compiled to."""

    def compile_for(fn, *args, chip, flags):
        name = lower(fn, args, find_target(chip)).name
        return program(name.removesuffix("_forward"))

    monkeypatch.setattr(search, "compile_for", compile_for)


def test_the_best_variant_of_each_peer_is_kept(monkeypatch):
    cycles = {("jax_flash", 0): 30.0, ("jax_flash", 1): 20.0, ("xla", 0): 50.0}

    def run(_, name, index):
        found = cycles[name, index]
        entry = {"cycles": found, "index": index}
        return {"variant": f"{name} {index}", "cycles": found, "entry": entry}

    monkeypatch.setattr(search, "run_one", run)
    found = searched(["jax_flash", "xla"], most=2)
    assert found["jax_flash"].best == {"cycles": 20.0, "index": 1}
    assert found["xla"].best == {"cycles": 50.0, "index": 0}
    assert found["jax_flash"].tried == [
        {"variant": "jax_flash 0", "cycles": 30.0},
        {"variant": "jax_flash 1", "cycles": 20.0},
    ]


def test_a_variant_that_fails_stops_no_other(monkeypatch):
    def compile_for(fn, *_, **__):
        raise CompileFailed("VMEM is exhausted", "all of it")

    monkeypatch.setattr(search, "compile_for", compile_for)
    found = searched(["jax_flash", "xla"], most=2)
    assert found["jax_flash"].best is None
    assert found["jax_flash"].reason == "VMEM is exhausted"
    assert [one["compiler_message"] for one in found["xla"].tried or ()] == ["all of it"]


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch):
    def attention_variants(peer, *_):
        raise EstimateError("peer tokamax is not installed: pip install …")

    monkeypatch.setattr(search, "attention_variants", attention_variants)
    found = searched(["tokamax"])
    assert found["tokamax"].reason == "peer tokamax is not installed: pip install …"


def test_what_a_peer_refuses_is_its_reason():
    case = AttentionCase.parse("B=1,Hq=1,Hkv=1,S=256,D=128", mask="sliding_window(8)")
    found = searched(["jax_flash"], of=subject(case=case))
    assert found["jax_flash"].reason == "flash_attention has no sliding window"


def test_entries_come_from_compiled_programs(compiles):
    found = searched(["jax_flash", "xla"], most=1)
    assert found["xla"].best["kernels"] == []
    assert found["xla"].best["label"] == "estimate; of a test"
    flash = found["jax_flash"].best
    assert flash["variant"].startswith("jax_flash block_q=")
    assert flash["blocks"]["block_q"] == 256
    assert flash["kernels"]


@pytest.mark.parametrize("which", ["forward", "backward", "both"])
def test_ours_says_itself_why_there_is_none(compiles, monkeypatch, which):
    import smalti

    def refuse(*arrays, **options):
        raise NotImplementedError(f"not with layout {options['layout']}")

    monkeypatch.setattr(smalti, "attention", refuse)
    result = run_one(subject(which), OURS, 0)
    assert result["reason"] == "not with layout BHSD"
    assert result["cycles"] is None


def test_ours_is_compiled_as_soon_as_there_is_a_kernel(compiles, monkeypatch):
    import smalti

    asked = []

    def attention(q, k, v, **options):
        asked.append(options)
        return jax.nn.dot_product_attention(q, k, v)

    monkeypatch.setattr(smalti, "attention", attention)
    (variant,) = variants_of(subject(), OURS)
    assert lower(variant.fn, variant.args, find_target("v6e")).name == "smalti_forward"
    (options,) = asked
    assert options["implementation"] == "pallas"
    assert options["layout"] == "BHSD"
    assert repr(options["mask"]) == "causal()"


@pytest.mark.slow
def test_workers_find_the_same():
    """Cases that are refused before anything is compiled, so that no compiler is needed."""
    case = AttentionCase.parse("B=1,Hq=1,Hkv=1,S=256,D=128,Dv=64")
    one = searched(["jax_flash", "xla"], of=subject(case=case), jobs=1)
    two = searched(["jax_flash", "xla"], of=subject(case=case), jobs=2)
    assert one == two
    assert "needs Dv = D" in (two["xla"].reason or "")
