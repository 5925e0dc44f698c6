import json
import statistics

import pytest

from smalti.lab.bench import __main__ as bench
from smalti.lab.bench.cases import Case


@pytest.fixture
def one_tiny_case(monkeypatch):
    case = Case("causal", 1024, peers=("plain",), bars={"plain": 1000.0})
    monkeypatch.setattr(bench, "all_cases", lambda: [case])
    return case


def test_a_run_prints_a_table_and_keeps_every_sample(one_tiny_case, tmp_path, capsys):
    path = tmp_path / "new" / "record.json"
    arguments = ["--quick", "--rounds", "3", "--only", "causal/f32/128/fwd", "--json", str(path)]
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "causal/f32/128/fwd" in printed
    assert str(path) in printed

    record = json.loads(path.read_text())
    assert record["rounds"] == 3
    assert record["versions"]["jax"]
    assert record["device"]["platform"] == "cpu"
    assert record["device"]["cores"] >= 1
    assert record["memory"] is None
    [result] = record["results"]
    assert result["name"] == "causal/f32/128/fwd"
    for timing in result["implementations"].values():
        assert len(timing["samples_s"]) >= 3
        assert timing["median_s"] == statistics.median(timing["samples_s"])


def test_a_missed_bar_is_printed_and_fails_nothing(one_tiny_case, tmp_path, capsys):
    path = tmp_path / "record.json"
    arguments = ["--rounds", "1", "--only", "causal/f32/1024/fwd", "--json", str(path)]
    assert bench.main(arguments) == 0
    assert "≥ 1000× missed" in capsys.readouterr().out


def test_list_prints_the_names_and_runs_nothing(capsys):
    assert bench.main(["--list", "--only", "16384"]) == 0
    assert capsys.readouterr().out.split() == [
        "causal/f32/16384/fwd+bwd",
        "memory/causal/f32/16384/fwd+bwd",
    ]


def test_a_pattern_that_matches_nothing_says_so(capsys):
    assert bench.main(["--only", "casual"]) == 2
    assert "--only 'casual' matches no case; --list prints them" in capsys.readouterr().err


def test_no_rounds_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--rounds", "0"])
    assert "--rounds is 0; give 1 or more" in capsys.readouterr().err
