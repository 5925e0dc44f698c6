import sys

import jax
import pytest

from smalti.cli.failing import Failed
from smalti.cli.function import load_function

FILE = """\
import functools
import jax
import beside

def double(x):
    return 2 * x
double_shapes = ["f32[8,128]"]

def tree(params, x):
    return params["w"] @ x
tree.shapes = [{"w": "f32[8,8]"}, jax.ShapeDtypeStruct((8,), "float32")]

def bare(x, y):
    return x + y

def raising(x):
    raise RuntimeError("no good\\nsecond line")
raising_shapes = "f32[8]"

def deep(x):
    return jax.numpy.dot(x, x[:3])
deep_shapes = ["f32[8]"]

class Holder:
    @staticmethod
    def method(x):
        return x

halve = functools.partial(lambda factor, x: factor * x, 0.5)
number = 3
number_shapes = []
odd_shapes = 7
def odd(x): return x
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "mine.py").write_text(FILE)
    yield tmp_path / "mine.py"
    for name in ("mine", "beside"):
        sys.modules.pop(name, None)


def test_shapes_beside_the_function(file):
    found = load_function(f"{file}:double", None)
    assert found.spelled == ["f32[8,128]"]
    assert jax.eval_shape(found.call, *found.args).shape == (8, 128)
    assert found.call.__name__ == "double"


def test_shapes_on_the_function_may_be_trees(file):
    found = load_function(f"{file}:tree", None)
    assert found.spelled == ["f32[8,8]", "f32[8]"]
    assert jax.eval_shape(found.call, *found.args).shape == (8,)


def test_shapes_of_the_command_line_come_first(file):
    assert load_function(f"{file}:double", "bf16[4]").spelled == ["bf16[4]"]


def test_methods_partials_and_modules(file, monkeypatch):
    assert load_function(f"{file}:Holder.method", "f32[4]").spelled == ["f32[4]"]
    partial = load_function(f"{file}:halve", "f32[4]")
    assert jax.eval_shape(partial.call, *partial.args).shape == (4,)
    monkeypatch.chdir(file.parent)
    assert load_function("mine:double", None).spelled == ["f32[8,128]"]
    assert load_function("jax.numpy:sin", "f32[4]").spelled == ["f32[4]"]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("duoble", None, r"has no 'duoble'; did you mean 'double'\?"),
        ("zzz", None, "has no 'zzz'; it has bare, deep, double"),
        ("number", None, "is int, which cannot be called"),
        ("bare", None, r"bare are not known: give --args .* or set bare_shapes = "),
        ("bare", "f32[8]", r"takes \(x, y\), and there are shapes for 1 arguments \(missing"),
        ("bare", "f32[8", "--args: the shapes 'f32\\[8' cannot be read"),
        ("odd", None, "the shapes of .*odd are int; they are a list"),
    ],
)
def test_what_cannot_be_asked(file, name, args, expected):
    with pytest.raises(ValueError, match=expected):
        load_function(f"{file}:{name}", args)


def test_files_and_modules_that_are_not_there(file):
    with pytest.raises(ValueError, match=r"there is no file .*mime\.py; did you mean .*mine\.py"):
        load_function(f"{file.parent / 'mime.py'}:double", None)
    with pytest.raises(ValueError, match=r"there is no module 'no_such\.module'"):
        load_function("no_such.module:f", None)
    for text in ("double", "mine.py:", ":double"):
        with pytest.raises(ValueError, match=r"is not FILE\.py:FUNCTION or MODULE:FUNCTION"):
            load_function(text, None)


def test_a_function_that_raises_shows_its_own_error_and_place(file):
    line = FILE.splitlines().index('    raise RuntimeError("no good\\nsecond line")') + 1
    found = load_function(f"{file}:raising", None)
    with pytest.raises(Failed, match=rf"raising failed at .*mine\.py:{line}: RuntimeError: no g"):
        jax.eval_shape(found.call, *found.args)


def test_an_error_inside_jax_is_placed_in_the_user_s_file(file):
    line = FILE.splitlines().index("    return jax.numpy.dot(x, x[:3])") + 1
    found = load_function(f"{file}:deep", None)
    with pytest.raises(Failed, match=rf"deep failed at .*mine\.py:{line}: TypeError: ") as caught:
        jax.eval_shape(found.call, *found.args)
    assert caught.value.code == 1
    assert "Traceback" in caught.value.details


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1 / 0\n", r"importing mine\.py failed at .*mine\.py:1: ZeroDivisionError: division"),
        ("x = (\n", r"importing mine\.py failed at .*mine\.py:1: SyntaxError: "),
        ("import no_such_thing\n", r"mine\.py:1: ModuleNotFoundError: No module named 'no_such"),
        ("raise SystemExit(3)\n", r"mine\.py:1: SystemExit: 3"),
    ],
)
def test_a_file_that_fails(file, text, expected):
    file.write_text(text)
    with pytest.raises(Failed, match=expected):
        load_function(f"{file}:double", None)
