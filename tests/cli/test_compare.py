from smalti.estimate.report import record_text
from tests.estimate.report import records


def test_two_files_are_compared(smalti, tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(record_text(records.fn("double")))
    after.write_text(record_text(records.fn("jax_flash")))
    run = smalti("estimate", "--diff", before, after)
    assert run.code == 0
    assert "programs.py:double → programs.py:jax_flash: totals" in run.out
    assert "flash_attention.py: " in run.out


def test_files_that_are_none(smalti, tmp_path):
    run = smalti("estimate", "--diff", tmp_path / "a.json", tmp_path / "b.json")
    assert run.code == 2
    assert "a.json cannot be read: No such file or directory" in run.line
