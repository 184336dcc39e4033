"""Makes the shared modules of the tests importable from every folder, and keeps compiled programs; one fixture."""

import pathlib
import sys

import jax
import pytest

_HERE = str(pathlib.Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

# Most of the time goes into compiling; processes and later runs share what has been compiled. Entries are keyed by the
# program, the flags, the machine and the versions, so a stale one cannot be taken.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def core(monkeypatch):
    """A `FakeCore` in place of `spec_jax.load_model` and `spec_jax.generate`."""
    from fake_core import FakeCore

    import spec_jax

    fake = FakeCore()
    monkeypatch.setitem(vars(spec_jax), "load_model", fake.load_model)
    monkeypatch.setitem(vars(spec_jax), "generate", fake.generate)
    return fake
