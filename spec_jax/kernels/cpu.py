"""Our own CPU kernels (`cpu.cc`): compiled on first use where the machine has a compiler, and never required.

XLA's products of a few rows neither reach the memory's bandwidth nor round alike at every row count. These do both:
every result has one fixed order of additions, so that exactness E2 needs no padding, and rows that a step does not need
(drafts that were not made, finished sequences) are not computed. Models use them in the packed layout of
`spec_jax.models.packing`; without a compiler they keep their plain layout and XLA's products.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import environment, hub

SOURCE = Path(__file__).with_name("cpu.cc")
SWITCH = "SPEC_JAX_CPU_KERNELS"
"""Environment variable; 0 leaves the kernels out."""
PANEL = 16
"""Outputs that lie together in a packed weight [outputs / PANEL, inputs, PANEL]."""
COMPILERS = ("c++", "g++", "clang++")
# No instruction set is named: the compiler takes what this machine has. Multiply-add must fuse everywhere or nowhere.
FLAGS = ("-O2", "-std=c++17", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_TARGETS = {
    "product": "SpecJaxProduct",
    "rms_norm": "SpecJaxNorm",
    "attention": "SpecJaxAttention",
    "read": "SpecJaxRead",
}


@functools.lru_cache
def unavailable() -> str | None:
    """Why the kernels cannot be used here, or None: then they are compiled, loaded and registered with JAX."""
    if jax.default_backend() != "cpu":
        return f"the default device is a {jax.default_backend()}"
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 is set"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        return f"no C++ compiler was found (looked for {', '.join(COMPILERS)}; CXX may name another)"
    try:
        library = ctypes.cdll.LoadLibrary(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        reason = f"they could not be compiled with {compiler}: {detail.strip().splitlines()[0][:300]}"
        warnings.warn(f"the CPU kernels are not used, XLA's slower products are: {reason}", stacklevel=2)
        return reason
    for name, symbol in _TARGETS.items():
        jax.ffi.register_ffi_target(
            f"spec_jax_{name}", jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu", api_version=1
        )
    return None


def _built(compiler: str) -> Path:
    """The shared library, compiled unless the cache folder holds it for this source, JAX, compiler and processor."""
    include = jax.ffi.include_dir()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    parts = (SOURCE.read_text(), *FLAGS, jax.__version__, version, platform.machine(), environment.processor())
    name = f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"
    for folder in (hub.cache_folder() / "kernels", Path(tempfile.gettempdir()) / f"spec_jax-{_user()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(folder, os.W_OK) or _owner(folder) != _user():
                continue
            library = folder / name
            if not library.exists():
                _compile(compiler, include, library)
            return library
    raise OSError(f"neither {hub.cache_folder()} nor {tempfile.gettempdir()} can be written")


def _compile(compiler: str, include: str, library: Path) -> None:
    """Compiles beside the library and renames, so that no other process ever loads half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [compiler, *FLAGS, "-isystem", include, str(SOURCE), "-o", temporary]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _owner(folder: Path) -> int:
    return folder.stat().st_uid if hasattr(os, "getuid") else 0


def _require() -> None:
    reason = unavailable()
    if reason is not None:
        raise ValueError(
            f"this model is packed for spec_jax's CPU kernels, which cannot be used here: {reason}; load it with "
            "cpu_kernels=False"
        )


def product(x: jax.Array, weight: jax.Array, outputs: int, active: jax.Array, bias=None, dtype=None) -> jax.Array:
    """x [rows, inputs] times a packed weight, plus bias: [rows, outputs], accumulated in float32.

    Args:
      weight: [ceil(outputs / PANEL), inputs, PANEL] in x's dtype.
      active: bool [rows]; the other rows are not computed and become zeros.
      bias: [outputs] in the result's dtype, or None.
      dtype: of the result; x's by default, or float32.
    """
    _require()
    dtype = x.dtype if dtype is None else dtype
    bias = jnp.zeros(0, dtype) if bias is None else bias
    call = jax.ffi.ffi_call("spec_jax_product", jax.ShapeDtypeStruct((x.shape[0], outputs), dtype))
    return call(x, weight, bias, active)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, active: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis of x [rows, ..., size]; rows that are not `active` become zeros."""
    _require()
    call = jax.ffi.ffi_call("spec_jax_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, active, eps=np.float32(eps))


def attention(
    q: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    ancestors: jax.Array,
    active: jax.Array,
    write: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes the K/V of the rows in flight to the cache, in place, and attends over committed slots and ancestors.

    Args:
      q: [batch, width, heads, head_dim], rotated; k_new, v_new: [batch, width, kv_heads, head_dim].
      k, v: [batch, kv_heads, capacity, head_dim].
      start: int32 [batch], committed slots; row w of the flight is written to slot start + w, if within the capacity.
      ancestors: uint32 [batch or 1, width, words], see `kernels.attention.pack_ancestors`.
      active: bool [batch, width], rows that are written and computed; the others become zeros.
      write: bool [batch], sequences that may write to the cache.

    Returns:
      [batch, width, heads, head_dim], and k and v with the rows written.
    """
    _require()
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    call = jax.ffi.ffi_call("spec_jax_attention", results, input_output_aliases={3: 1, 4: 2})
    return tuple(call(q, k_new, v_new, k, v, start, ancestors, active.reshape(-1), write))


def read(x: jax.Array) -> jax.Array:
    """Reads float32 x once, to measure the memory's bandwidth: float32 [1], the sum of (nearly) all of it."""
    _require()
    return jax.ffi.ffi_call("spec_jax_read", jax.ShapeDtypeStruct((1,), jnp.float32))(x)
