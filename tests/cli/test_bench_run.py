from dataclasses import replace

from smalti.cli import bench_run
from smalti.cli.bench_cases import OURS, Asked, tasks
from smalti.cli.bench_run import depends, key_of
from smalti.estimate.tune import Journal, Trial
from tests.support.tokamax import needs_tokamax

ASKED = Asked(("v6e",), (128,), (2048,), (8,), ("forward",), variants=1)
HIT = Trial(cycles=7.0, time_ns=4.0, bytes_hbm=1, bound="MXU")


@needs_tokamax
def test_every_task_has_a_key_of_its_own():
    keys = [str(key_of(task)) for task in tasks(Asked(lengths=(2048,)))]
    assert len(set(keys)) == len(keys)


@needs_tokamax
def test_the_flags_and_the_versions_count(monkeypatch):
    (ours, *_) = tasks(ASKED)
    (other, *_) = tasks(Asked(*vars(ASKED).values()))
    assert key_of(ours) == key_of(other)
    flagged = replace(ours, variant=replace(ours.variant, flags=("--other",)))
    assert key_of(ours) != key_of(flagged)
    before = key_of(ours)
    monkeypatch.setattr(bench_run, "versions_now", lambda: {"jax": "99", "smalti": "1"})
    assert key_of(ours) != before
    assert "smalti" not in key_of(ours)["versions"]


def test_our_kernels_are_no_part_of_a_peers_key():
    kernels = ("attention/tpu/forward.py", "masks/catalogue.py", "tpu/tiles.py", "varying.py")
    for name in kernels:
        assert depends(name, ours=True)
        assert not depends(name, ours=False)
    for name in ("estimate/simulate/blocks.py", "chips.py", "estimate/result.py"):
        assert depends(name, ours=True)
        assert depends(name, ours=False)
    for name in ("cli/bench_show.py", "estimate/report/tables.py", "estimate/tune/journal.py"):
        assert not depends(name, ours=True)
        assert not depends(name, ours=False)


@needs_tokamax
def test_what_is_known_is_not_measured_again(tmp_path, monkeypatch):
    seen, started, done = [], [], []

    def measure(variant, chip):
        seen.append((variant.peer, chip))
        return HIT

    monkeypatch.setattr(bench_run, "measure", measure)
    journal = Journal(tmp_path / "j")
    (ours, *peers) = tasks(ASKED)
    journal.add(key_of(ours), Trial(reason="not yet"))
    found = bench_run.run(
        ASKED, journal, jobs=1, on_start=started.append, on_done=lambda name: done.append(name)
    )
    assert found.trials == {0: Trial(reason="not yet"), 1: HIT, 2: HIT, 3: HIT}
    assert seen == [(task.variant.peer, "v6e") for task in peers]
    assert started == [4]
    assert sorted(done) == sorted([OURS, *(task.variant.peer for task in peers)])
    assert Journal(tmp_path / "j").find(key_of(peers[0])) == HIT
