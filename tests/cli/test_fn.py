import json

import pytest

from smalti import estimate
from tests.estimate.report.programs import program
from tests.support.libtpu import needs_libtpu

FILE = """\
import jax
import smalti

def double(x):
    return 2 * x
double_shapes = ["f32[512,128]"]

def attend(q, k, v):
    return smalti.attention(q, k, v)
attend_shapes = ["bf16[1,128,2,128]"] * 3

def loop(n, x):
    return jax.lax.fori_loop(0, n, lambda i, y: jax.numpy.sin(y), x)
loop_shapes = ["s32[]", "f32[8,128]"]

def returns_text(x):
    return "text"
returns_text_shapes = ["f32[8]"]

def printing(x):
    jax.debug.print("{}", x)
    return x
printing_shapes = ["f32[8]"]

def raising(x):
    raise ValueError("x is not to my taste")
raising_shapes = ["f32[8]"]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


@pytest.fixture
def compiles(monkeypatch):
    """In place of the compiler: what a fixture was compiled to; and what it was asked."""
    asked = {}

    def compile_for(fn, *args, **options):
        asked.update(options, args=args, fn=fn)
        return program("double")

    monkeypatch.setattr(estimate, "compile_for", compile_for)
    return asked


def test_a_table_a_record_and_a_chart(smalti, file, tmp_path, compiles):
    json_file, chart = tmp_path / "a.json", tmp_path / "a.png"
    flag = "--xla_tpu_scoped_vmem_limit_kib=32768"
    arguments = ("--flags", flag, "--json", json_file, "--chart", chart, "--source")
    run = smalti("estimate", "fn", f"{file}:double", *arguments)
    assert run.code == 0, run.err
    assert compiles["flags"] == (flag,)
    assert compiles["chip"] == "v6e"
    assert "mine.py:double on v6e:2x2" in run.out
    assert "1 Pallas kernel (double.1)" in run.out
    assert "programs.py:" in run.out
    record = json.loads(json_file.read_text())
    assert record["label"] in run.out
    assert record["label"].startswith("estimate; ")
    assert record["args"] == ["f32[512,128]"]
    assert record["function"] == f"{file}:double"
    assert {"cycles", "time_ns", "bytes_hbm", "bound", "occupancy", "ops"} <= record.keys()
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_json_alone_on_stdout(smalti, file, compiles):
    run = smalti("estimate", "fn", f"{file}:double", "--json", "-")
    assert json.loads(run.out)["kind"] == "fn"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("mine.py:double",), "there is no file mine.py"),
        (("{file}:duoble",), "did you mean 'double'?"),
        (("{file}:double", "--chip", "v6"), "did you mean v6e?"),
        (("{file}:double", "--topology", "v5e:2x2"), "is of v5e, but chip is 'v6e'"),
        (("{file}:double", "--overlap", "some"), "--overlap 'some' is neither full nor none"),
        (("{file}:double", "--longest", "0"), "--longest 0: at least 1"),
        (("{file}:double", "--branch", "c"), "--branch 'c' is not NAME=NUMBER"),
        (("{file}:double", "--chart", "a.bmp"), "--chart a.bmp: the name ends in"),
        (("{file}:double", "--json", "/no/such/folder/a"), "cannot be written: No such file"),
        (("{file}:double", "--args", "f32[2],f32[2]"), "there are shapes for 2 arguments"),
        (("{file}:double", "--trip-count", "while.1=3"), "no loop of the module is called"),
    ],
)
def test_a_wrong_argument_is_one_line(smalti, file, compiles, arguments, expected):
    run = smalti("estimate", "fn", *(one.format(file=file) for one in arguments))
    assert run.code == 2
    assert run.out == ""
    assert expected in run.line


@pytest.mark.slow
@needs_libtpu
def test_end_to_end(smalti, file):
    """The real compiler, with what an implementation of smalti leaves in the program."""
    run = smalti("estimate", "fn", f"{file}:attend", "--json", "-")
    assert run.code == 0, run.err
    record = json.loads(run.out)
    (kernel,) = record["lowered"]["kernels"]
    assert kernel.partition(".")[0] == "smalti_attention_forward"
    assert record["lowered"]["smalti_attention"] == ["pallas"]
    assert record["cycles"] > 1000
    assert any(op["file"].endswith(".py") for op in record["ops"] if op["file"])


@pytest.mark.slow
@needs_libtpu
def test_loops_that_depend_on_data_are_stated(smalti, file):
    run = smalti("estimate", "fn", f"{file}:loop")
    assert run.code == 1
    assert "--trip-count NAME=NUMBER" in run.line
    name = run.line.partition("the loop %")[2].split()[0]
    cycles = []
    for count in (10, 20):
        stated = f"{name}={count}"
        run = smalti("estimate", "fn", f"{file}:loop", "--trip-count", stated, "--json", "-")
        assert run.code == 0, run.err
        cycles.append(json.loads(run.out)["cycles"])
    assert cycles[1] > 1.5 * cycles[0]


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("returns_text", "TypeError: "),
        ("printing", "mine.py:printing: ValueError: "),
        ("raising", "mine.py:26: ValueError: x is not to my taste"),
    ],
)
def test_what_the_function_does_wrong_is_one_line(smalti, file, name, expected):
    run = smalti("estimate", "fn", f"{file}:{name}")
    assert run.code == 1
    assert expected in run.line
    assert "Traceback" in smalti("estimate", "fn", f"{file}:{name}", "--verbose").err
