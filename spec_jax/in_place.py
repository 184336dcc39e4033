"""Work that is done or left out on large arrays, which stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_if(predicate: jax.Array, function: Callable[[Any], Any], carry: Any) -> Any:
    """`function(carry)` where `predicate` holds, else `carry`, whose arrays are updated in place.

    A loop of at most one turn. `lax.cond` has a branch that hands its operands on, for which XLA copies them, and they
    are caches here.

    Args:
      predicate: bool [].
      function: carry -> a pytree of the same structure, shapes and dtypes. Large arrays that it changes must come to it
        in `carry` and not from outside.
    """
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.bool_(False), function(c[1])), (predicate, carry))[1]
