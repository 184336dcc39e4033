"""Ahead-of-time compilation of a decoder's programs, timed, and kept for later calls of the same shapes."""

from __future__ import annotations

import collections
import time
from typing import Any

import jax

from spec_jax.decode import Decoder

KEPT = 64
"""Programs kept; the least recently used are dropped, since one of thirty unrolled layers takes megabytes."""

DONATED = {"run": (2,), "fill": (0,)}
"""Arguments whose memory a program takes over."""

_programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_compilations = 0


def compiled(decoder: Decoder, name: str, *arguments: Any) -> tuple[Any, float]:
    """The compiled `decoder.<name>` for arguments of these shapes, and the seconds that compiling took (0: kept).

    The state passed to `run` or `fill` is donated: both work in place on one copy of the cache.
    """
    global _compilations
    leaves, structure = jax.tree.flatten(arguments)
    key = (decoder, name, structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in map(jax.typeof, leaves)))
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key], 0.0
    start = time.perf_counter()
    program = jax.jit(getattr(decoder, name), donate_argnums=DONATED.get(name, ())).lower(*arguments).compile()
    _programs[key] = program
    if len(_programs) > KEPT:
        _programs.popitem(last=False)
    _compilations += 1
    return program, time.perf_counter() - start


def program_count() -> int:
    """How many programs have been compiled so far; a call that reuses kept ones leaves it unchanged."""
    return _compilations


def clear_programs() -> None:
    """Forgets every kept program, to free their memory."""
    _programs.clear()
