"""Ahead-of-time compilation of a decoder's programs, timed, and kept for later calls of the same shapes."""

from __future__ import annotations

import collections
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax

from spec_jax import environment, hub
from spec_jax.decode import Decoder

KEPT = 64
"""Programs kept; the least recently used are dropped, since one of thirty unrolled layers takes megabytes."""

DONATED = {"run": (2,), "fill": (0,)}
"""Arguments whose memory a program takes over."""

_programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_lock = threading.Lock()
_compilations = 0


def compiled(decoder: Decoder, name: str, *arguments: Any) -> tuple[Any, float]:
    """The compiled `decoder.<name>` for arguments of these shapes, and the seconds that compiling took (0: kept).

    The state passed to `run` or `fill` is donated: both work in place on one copy of the cache.
    """
    global _compilations
    leaves, structure = jax.tree.flatten(arguments)
    key = (decoder, name, structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in map(jax.typeof, leaves)))
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            return _programs[key], 0.0
    start = time.perf_counter()
    program = jax.jit(getattr(decoder, name), donate_argnums=DONATED.get(name, ())).lower(*arguments).compile()
    with _lock:
        _programs[key] = program
        if len(_programs) > KEPT:
            _programs.popitem(last=False)
    _compilations += 1
    return program, time.perf_counter() - start


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keeps compiled programs on disk (JAX's persistent compilation cache), so that later processes need not compile.

    The command line does this by itself. A cache that was set up already, by `jax.config` or the environment variable
    JAX_COMPILATION_CACHE_DIR, is left as it is; SPEC_JAX_COMPILATION_CACHE=0 turns this function off.

    Args:
      folder: where; None: beside the models, one folder per kind of processor, for which programs are made.

    Returns:
      The folder in use, or None where there is none.
    """
    if os.environ.get("SPEC_JAX_COMPILATION_CACHE", "1") == "0":
        return None
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    if folder is None:
        kind = hashlib.sha256(environment.processor().encode()).hexdigest()[:12]
        folder = hub.cache_folder() / "programs" / kind
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a home that cannot be written costs the time of compiling, nothing else
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path


def program_count() -> int:
    """How many programs have been compiled so far; a call that reuses kept ones leaves it unchanged."""
    return _compilations


def clear_programs() -> None:
    """Forgets every kept program, to free their memory."""
    _programs.clear()
