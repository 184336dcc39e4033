"""The names of the verification rules, and what the lossy ones are told. Imports neither jax nor flax."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from spec_jax.checks import is_int, nearest

LOSSLESS = ("coupled", "standard", "block", "recursive", "kseq", "traversal")
LOSSY: Mapping[str, Mapping[str, float]] = {
    "lossy_typical": {"posterior_threshold": 0.09, "posterior_alpha": 0.3},
    "lossy_relaxed": {"relaxed_top_k": 10, "relaxed_delta": 0.6},
    "lossy_lenience": {"lenience": 0.5},
}
"""Rules that change the output, with their options and defaults: Medusa's, TensorRT-LLM's, and a factor of two."""
RULES = (*LOSSLESS, *LOSSY)
CHAIN_RULES = ("standard", "block", "lossy_lenience")
"""Rules that cannot verify trees."""
SHORT = {name.removeprefix("lossy_"): name for name in LOSSY}
"""Shorter names that are understood too; results and messages use the full one."""
OPTIONS = {option: rule for rule, options in LOSSY.items() for option in options}


def full_name(value: Any) -> str:
    """The name of a rule. Raises ValueError where it is not known."""
    name = SHORT.get(value, value) if isinstance(value, str) else value
    if name not in RULES:
        raise ValueError(
            f"rejection_sample_method={value!r} is not known{nearest(str(value), RULES)}; allowed: {', '.join(RULES)}"
        )
    return name


def options_of(rule: str, given: Mapping[str, Any]) -> tuple[float, ...]:
    """The options of a rule, in the order in which its function takes them. Raises ValueError for bad values.

    Args:
      given: by name; None where an option was left out.
    """
    for option, owner in OPTIONS.items():
        value = given.get(option)
        if value is None:
            continue
        if owner != rule:
            raise ValueError(
                f"{option} belongs to rejection_sample_method={owner!r}, but the rule in force is {rule!r}"
            )
        if option == "relaxed_top_k":
            if not is_int(value) or value < 1:
                raise ValueError(f"{option}={value!r} must be an integer of at least 1")
        elif not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value <= 1:
            raise ValueError(f"{option}={value!r} must be a number between 0 and 1")
        elif option == "lenience" and value == 0:
            raise ValueError("lenience=0 would accept every draft; give a number above 0, 1 for a lossless rule")
    return tuple(default if given.get(o) is None else given[o] for o, default in LOSSY.get(rule, {}).items())
