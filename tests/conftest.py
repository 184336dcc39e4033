"""Makes the shared modules of the tests (`tiny`, `fake_core`) importable from every folder, and shares one fixture."""

import pathlib
import sys

import pytest

_HERE = str(pathlib.Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


@pytest.fixture
def core(monkeypatch):
    """A `FakeCore` in place of `spec_jax.load_model` and `spec_jax.generate`."""
    from fake_core import FakeCore

    import spec_jax

    fake = FakeCore()
    monkeypatch.setitem(vars(spec_jax), "load_model", fake.load_model)
    monkeypatch.setitem(vars(spec_jax), "generate", fake.generate)
    return fake
