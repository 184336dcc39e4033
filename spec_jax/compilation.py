"""Ahead-of-time compilation of a decoder's two programs, timed, and kept for every later call of the same shapes."""

from __future__ import annotations

import time
from typing import Any

import jax

from spec_jax.decode import Decoder

_PROGRAMS: dict[Any, Any] = {}


def compiled(decoder: Decoder, name: str, *arguments: Any) -> tuple[Any, float]:
    """The compiled `decoder.<name>` for arguments of these shapes, and the seconds that compiling took (0: kept).

    The state passed to `run` is donated: the loop works in place on one copy of the cache.
    """
    leaves, structure = jax.tree.flatten(arguments)
    key = (decoder, name, structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in map(jax.typeof, leaves)))
    program = _PROGRAMS.get(key)
    if program is not None:
        return program, 0.0
    start = time.perf_counter()
    donate = (2,) if name == "run" else ()
    program = jax.jit(getattr(decoder, name), donate_argnums=donate).lower(*arguments).compile()
    _PROGRAMS[key] = program
    return program, time.perf_counter() - start


def program_count() -> int:
    """How many programs have been compiled and kept; a call that reuses them leaves it unchanged."""
    return len(_PROGRAMS)


def clear_programs() -> None:
    """Forgets every compiled program, to free their memory."""
    _PROGRAMS.clear()
