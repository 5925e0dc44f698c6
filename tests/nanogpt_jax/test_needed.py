"""What the testbed needs and is not installed is said in one line."""

import subprocess
import sys
import textwrap


def run(tmp_path, *arguments):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import importlib.util

            find_spec = importlib.util.find_spec
            hidden = ("yaml", "orbax.checkpoint")
            there = lambda name, *a: None if name in hidden else find_spec(name, *a)
            importlib.util.find_spec = there
        """)
    )
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_at_the_command_line(tmp_path):
    done = run(tmp_path, "-m", "nanogpt_jax.train", "--config", "configs/smoke.yaml")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nanogpt_jax needs orbax.checkpoint, yaml: pip install")


def test_in_python(tmp_path):
    done = run(tmp_path, "-c", "import nanogpt_jax")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: nanogpt_jax needs orbax.checkpoint, yaml")
