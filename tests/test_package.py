"""The package as a user meets it: light imports, public names, the README's commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import spec_jax

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "rich", "tensorboard")


@pytest.mark.parametrize("module", ["spec_jax", "spec_jax.cli"])
def test_import_is_light(module):
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", spec_jax.__all__)
def test_public_name_resolves(name):
    assert getattr(spec_jax, name) is not None
    assert name in dir(spec_jax)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        spec_jax.nothing  # noqa: B018


@pytest.mark.parametrize("name", [name for name in spec_jax.__all__ if name != "__version__"])
def test_no_module_shadows_a_public_name(name):
    assert not (ROOT / "spec_jax" / f"{name}.py").exists()


def readme_commands():
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv")]


def test_readme_gives_the_two_commands():
    bench, test = readme_commands()
    assert bench.endswith("&& .venv/bin/spec-jax bench")
    assert test.endswith("&& .venv/bin/python -m pytest")


def test_ci_runs_the_readme_test_command():
    assert readme_commands()[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_version_is_the_same_everywhere():
    declared = re.search(r"^version = (.*)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert declared.group(1) == spec_jax.__version__
