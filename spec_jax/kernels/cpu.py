"""Our own CPU kernels (C++ in `native/`): compiled on first use where the machine has a compiler, and never required.

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
import shlex
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import environment, hub

SOURCES = Path(__file__).with_name("native")
SWITCH = "SPEC_JAX_CPU_KERNELS"
"""Environment variable; 0 leaves the kernels out."""
PANEL = 16
"""Outputs that lie together in a packed weight [outputs / PANEL, inputs, PANEL]."""
DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
FAILED = "they could not be compiled with"
COMPILERS = ("c++", "g++", "clang++")
# No instruction set is named: the compiler takes what this machine has. Where multiply-add fuses stands in the code,
# since a compiler that fuses here and not there would make bits depend on the row count.
NATIVE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
FLAGS = ("-O2", "-std=c++17", NATIVE, "-ffp-contract=off", "-fPIC", "-shared", "-w")
_TARGETS = {
    "product": "SpecJaxProduct",
    "rms_norm": "SpecJaxNorm",
    "attention": "SpecJaxAttention",
    "swiglu": "SpecJaxSwiglu",
    "read": "SpecJaxRead",
    "cuts": "SpecJaxCuts",
    "laws": "SpecJaxLaws",
    "choice": "SpecJaxChoice",
}


@functools.lru_cache
def unavailable() -> str | None:
    """Why the kernels cannot be used here, or None: then they are compiled, loaded and registered with JAX."""
    if jax.default_backend() != "cpu":
        return f"the default device is a {jax.default_backend()}"
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0 is set"
    asked = os.environ.get("CXX", "")
    try:
        compiler = shlex.split(asked) or [c for c in COMPILERS if shutil.which(c)][:1]
    except ValueError as error:
        return f"{FAILED} CXX={asked}: {error}"
    if not compiler:
        return f"no C++ compiler was found (looked for {', '.join(COMPILERS)}; CXX may name another)"
    try:
        library = _loaded(compiler)
        symbols = {name: getattr(library, symbol) for name, symbol in _TARGETS.items()}
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        return f"{FAILED} {shlex.join(compiler)}: {_detail(error)}"
    for name, symbol in symbols.items():
        jax.ffi.register_ffi_target(f"spec_jax_{name}", jax.ffi.pycapsule(symbol), platform="cpu", api_version=1)
    return None


def _detail(error: Exception) -> str:
    """The line that says most about a failed compilation."""
    printed = getattr(error, "stderr", None) or ""
    printed = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    status = f"status {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else str(error)
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else status)[:300]


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    library = _built(compiler)
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # damaged: once more
        library.unlink()
        return ctypes.CDLL(str(_built(compiler)))


def _built(compiler: list[str]) -> Path:
    """The shared library, compiled unless the cache folder holds it for these sources, JAX, compiler and processor."""
    sources = [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cc")]
    version = _run([*compiler, "--version"], timeout=60)
    versions = (jax.__version__, metadata.version("jaxlib"), version, platform.machine(), environment.processor())
    key = hashlib.sha256("|".join((*sources, *FLAGS, *compiler, *versions)).encode()).hexdigest()[:16]
    library = _folder() / f"cpu-{key}.so"
    if not library.exists():
        _compile(compiler, library)
    return library


def _folder() -> Path:
    """Where compiled kernels are kept: a folder that only this user can write."""
    temporary = Path(tempfile.gettempdir())
    for folder in (hub.cache_folder() / "kernels", temporary / f"spec_jax-{_user()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = folder.stat()
            ours = found.st_uid == _user() and not (folder.is_relative_to(temporary) and found.st_mode & 0o022)
            if ours and os.access(folder, os.W_OK):
                return folder
    raise OSError(f"neither {hub.cache_folder()} nor {temporary} can be written")


def _compile(compiler: list[str], library: Path) -> None:
    """Compiles beside the library and renames, so that no other process ever loads half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(descriptor)
    try:
        source = str(SOURCES / "kernels.cc")
        _run([*compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), source, "-o", temporary], timeout=300)
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _run(command: list[str], timeout: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, timeout=timeout)
    return done.stdout


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _require() -> None:
    reason = unavailable()
    if reason is not None:
        raise ValueError(
            f"this model is packed for spec_jax's CPU kernels, which cannot be used here: {reason}; load it with "
            "cpu_kernels=False"
        )


def _check(kernel: str, name: str, x: jax.Array, shape: tuple[int, ...], dtype=None) -> None:
    """The kernels trust what they are given, so a mismatch would read foreign memory. No dtype: any of `DTYPES`."""
    if dtype is None:
        dtype = x.dtype if x.dtype in DTYPES else DTYPES[0]
    if x.shape != shape or x.dtype != dtype:
        wanted = f"{jnp.dtype(dtype)}{list(shape)}"
        raise ValueError(f"{kernel}: {name} is {x.dtype}{list(x.shape)}, it must be {wanted}")


def product(x: jax.Array, weight: jax.Array, outputs: int, active: jax.Array, bias=None, dtype=None) -> jax.Array:
    """x [rows, inputs] times a packed weight, plus bias: [rows, outputs], accumulated in float32.

    Args:
      weight: [ceil(outputs / PANEL), inputs, PANEL] in x's dtype.
      active: bool [rows]; the other rows are neither computed nor written, so that they hold anything.
      bias: [outputs] in the result's dtype, or None.
      dtype: of the result; x's by default, or float32.
    """
    _require()
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    bias = jnp.zeros(0, dtype) if bias is None else bias
    rows, inputs = x.shape
    _check("product", "x", x, (rows, inputs))
    _check("product", "weight", weight, (-(-outputs // PANEL), inputs, PANEL), x.dtype)
    _check("product", "bias", bias, (outputs,) if bias.size else (0,), dtype)
    _check("product", "active", active, (rows,), bool)
    if dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"product: dtype={dtype} must be {x.dtype} or float32")
    call = jax.ffi.ffi_call("spec_jax_product", jax.ShapeDtypeStruct((x.shape[0], outputs), dtype))
    return call(x, weight, bias, active)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, active: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis of x [rows, ..., size]; rows not `active` hold anything."""
    _require()
    _check("rms_norm", "x", x, x.shape)
    _check("rms_norm", "weight", weight, x.shape[-1:], x.dtype)
    _check("rms_norm", "active", active, x.shape[:1], bool)
    call = jax.ffi.ffi_call("spec_jax_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, weight, active, eps=np.float32(eps))


def swiglu(x: jax.Array, active: jax.Array) -> jax.Array:
    """silu(gate) * up of x [rows, gate and then up], computed in float32; rows not `active` hold anything."""
    _require()
    _check("swiglu", "x", x, x.shape)
    _check("swiglu", "active", active, x.shape[:1], bool)
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"swiglu: x is {x.dtype}{list(x.shape)}, it must be [rows, an even number]")
    return jax.ffi.ffi_call("spec_jax_swiglu", jax.ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), x.dtype))(x, active)


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
      ancestors: uint32 [batch or 1, width, words], see `kernels.masks.pack_ancestors`.
      active: bool [batch, width], rows that are written and computed; the others hold anything.
      write: bool [batch], sequences that may write to the cache.

    Returns:
      [batch, width, heads, head_dim], and k and v with the rows written.
    """
    _require()
    batch, width, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    _check("attention", "q", q, q.shape)
    for name, x in (("k_new", k_new), ("v_new", v_new)):
        _check("attention", name, x, (batch, width, kv_heads, head_dim), q.dtype)
    for name, x in (("k", k), ("v", v)):
        _check("attention", name, x, (batch, kv_heads, capacity, head_dim), q.dtype)
    words = (batch if ancestors.shape[0] == batch else 1, width, -(-width // 32))
    for name, x, shape, dtype in (
        ("start", start, (batch,), jnp.int32),
        ("ancestors", ancestors, words, jnp.uint32),
        ("active", active, (batch, width), bool),
        ("write", write, (batch,), bool),
    ):
        _check("attention", name, x, shape, dtype)
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
    call = jax.ffi.ffi_call("spec_jax_attention", results, input_output_aliases={3: 1, 4: 2})
    return tuple(call(q, k_new, v_new, k, v, start, ancestors, active.reshape(-1), write))


def cuts(
    scores: jax.Array,
    index: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    vocab_size: int,
) -> jax.Array:
    """The least score that the filters leave of each of n rows, float32 [n]; -inf where a row is empty or broken.

    Args:
      scores, index: as in `laws`.
      temperature, top_p, min_p: float32 [n], all temperatures above 0; top_k: int32 [n], 0 for all.
    """
    index = _check_entries("cuts", scores, index, vocab_size, temperature=temperature, top_p=top_p, min_p=min_p)
    _check("cuts", "top_k", top_k, index.shape, jnp.int32)
    result = jax.ShapeDtypeStruct(index.shape, jnp.float32)
    call = jax.ffi.ffi_call("spec_jax_cuts", result, vmap_method="sequential")
    return call(scores, index, temperature, top_k, top_p, min_p, size=np.int64(vocab_size))


def laws(
    scores: jax.Array, index: jax.Array, temperature: jax.Array, cut: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """The laws behind n rows of scores as a few numbers.

    Args:
      scores: float32 [rows, vocab]; ids at and beyond `vocab_size` are padding.
      index: int32 [n], the rows; negative: none.
      temperature: float32 [n], 0 for a greedy row.
      cut: float32 [n]; scores below it are filtered out of a row that is not greedy.

    Returns:
      [n] each: float32, the best score, 0 where none is left; float32, the logarithm of the sum of
      exp((score - best) / temperature), inf where none is left, 0 in greedy rows; int32 and float32, of greedy rows the
      best token (-1: none) and its lead; bool, whether a row holds NaN or +inf.
    """
    index = _check_entries("laws", scores, index, vocab_size, temperature=temperature, cut=cut)
    shape, kinds = index.shape, (jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.bool_)
    results = [jax.ShapeDtypeStruct(shape, kind) for kind in kinds]
    call = jax.ffi.ffi_call("spec_jax_laws", results, vmap_method="sequential")
    return tuple(call(scores, index, temperature, cut, size=np.int64(vocab_size)))


def choice(
    scores: jax.Array, index: jax.Array, temperature: jax.Array, cut: jax.Array, keys: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """The token that each of n rows of scores chooses, with the noise of `jax.random.gumbel` where it is not greedy.

    Args:
      scores, index, temperature, cut: as in `laws`.
      keys: uint32 [n, 2], the data of threefry keys.

    Returns:
      int32 [n], -1 where no score is left, and float32 [n], the lead of the choice in units of the scores; 0 and NaN
      where a row holds NaN or +inf.
    """
    index = _check_entries("choice", scores, index, vocab_size, temperature=temperature, cut=cut)
    _check("choice", "keys", keys, (*index.shape, 2), jnp.uint32)
    results = [jax.ShapeDtypeStruct(index.shape, kind) for kind in (jnp.int32, jnp.float32)]
    call = jax.ffi.ffi_call("spec_jax_choice", results, vmap_method="sequential")
    return tuple(call(scores, index, temperature, cut, keys, size=np.int64(vocab_size)))


def _check_entries(kernel: str, scores: jax.Array, index: jax.Array, vocab_size: int, **each: jax.Array) -> jax.Array:
    """Returns the rows, where rows that are not there are none."""
    _require()
    _check(kernel, "scores", scores, (*scores.shape[:1], max(vocab_size, *scores.shape[1:])), jnp.float32)
    _check(kernel, "index", index, index.shape[:1], jnp.int32)
    for name, x in each.items():
        _check(kernel, name, x, index.shape, jnp.float32)
    return jnp.where(index < scores.shape[0], index, -1)


def read(x: jax.Array) -> jax.Array:
    """Reads float32 x once, to measure the memory's bandwidth: float32 [1], the sum of (nearly) all of it."""
    _require()
    return jax.ffi.ffi_call("spec_jax_read", jax.ShapeDtypeStruct((1,), jnp.float32))(x)
