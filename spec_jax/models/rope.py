"""Rotary position embeddings (RoFormer, https://arxiv.org/abs/2104.09864) and their context-extending variants.

`RopeConfig` is read from a Hugging Face `config.json`; `inverse_frequencies` turns it into the per-pair angular
frequencies plus the attention factor that multiplies cos and sin. Everything is computed once in NumPy float64 at
trace time and rounded to float32, so that target and drafter tables never depend on the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.fields import get

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Static description of one rotary embedding. Fields that a `rope_type` does not use are ignored by it."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()  # one per pair, applied first: how a GGUF file states llama3 scaling

    def __post_init__(self):
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type={self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if not 0 < self.theta < math.inf:
            raise ValueError(f"rope_theta={self.theta!r} must be a positive number")
        if not all(0 < divisor < math.inf for divisor in self.frequency_divisors):
            raise ValueError("the rope frequency divisors must be positive numbers")
        if self.rope_type == "default":
            return
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"rope scaling factor={self.factor!r} must be at least 1")
        if self.rope_type == "linear":
            return
        if self.original_max_position < 1:
            raise ValueError(f"original_max_position_embeddings={self.original_max_position!r} must be at least 1")
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor!r} must be below high_freq_factor={self.high_freq_factor!r}"
            )
        if self.rope_type == "yarn":
            if self.theta == 1.0:
                raise ValueError("rope_theta=1.0 gives all pairs one frequency, which yarn cannot tell apart")
            for name in ("beta_fast", "beta_slow"):
                if not getattr(self, name) > 0:
                    raise ValueError(f"{name}={getattr(self, name)!r} must be a positive number")


def rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    key = "rope_parameters" if get(config, "rope_parameters", dict) else "rope_scaling"
    scaling = get(config, key, dict, {})

    def number(name: str, default: float | None) -> float | None:
        return get(scaling, name, float, default, where=key)

    theta = number("rope_theta", get(config, "rope_theta", float, 10000.0))
    rope_type = get(scaling, "rope_type", str, get(scaling, "type", str, "default", where=key), where=key)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type not in ROPE_TYPES:  # before the fields, which an unknown type may not have
        return RopeConfig(theta=theta, rope_type=rope_type)
    factor = number("factor", None)
    if factor is None:
        raise ValueError(f"rope scaling of type {rope_type!r} has no 'factor'; got the keys {sorted(scaling)}")
    name = "original_max_position_embeddings"
    original = get(config, name, int) or get(scaling, name, int, where=key)
    if original is None:
        scales_by_context = rope_type in ("llama3", "yarn")
        original = get(config, "max_position_embeddings", int, 8192) if scales_by_context else 8192
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=factor,
        original_max_position=original,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", None) or 32.0,
        beta_slow=number("beta_slow", None) or 1.0,
        attention_factor=number("attention_factor", None),
        mscale=number("mscale", 0.0),
        mscale_all_dim=number("mscale_all_dim", 0.0),
        truncate=get(scaling, "truncate", bool, True, where=key),
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The entries that `rope_from_hf` reads as `rope`, for transformers 4 and 5."""
    found: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type == "default":
        return {"rope_theta": rope.theta, "rope_parameters": found}
    found |= {"factor": rope.factor, "original_max_position_embeddings": rope.original_max_position}
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }.get(rope.rope_type, ())
    found |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return {"rope_theta": rope.theta, "rope_parameters": found, "rope_scaling": found}


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequency of each rotated pair, float32 [head_dim // 2], and the factor on cos and sin.

    llama3 blends between the plain and the interpolated frequency by wavelength; yarn
    (https://arxiv.org/abs/2309.00071) blends by the number of rotations over the original context and sharpens
    attention by `0.1 ln(factor) + 1`.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even for rotary embeddings")
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.frequency_divisors:
        if len(rope.frequency_divisors) != head_dim // 2:
            count = len(rope.frequency_divisors)
            raise ValueError(f"rope has {count} frequency divisors; head_dim={head_dim} needs {head_dim // 2}")
        plain = plain / np.asarray(rope.frequency_divisors, np.float64)
    if rope.rope_type == "default":
        return plain.astype(np.float32), 1.0
    interpolated = plain / rope.factor
    if rope.rope_type == "linear":
        return interpolated.astype(np.float32), 1.0
    if rope.rope_type == "llama3":
        rotations = rope.original_max_position * plain / (2 * math.pi)
        blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return (blend * plain + (1 - blend) * interpolated).astype(np.float32), 1.0

    def pair_at(rotations: float) -> float:  # the pair index that turns `rotations` times over the original context
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_at(rope.beta_fast), pair_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    frequencies = interpolated * ramp + plain * (1 - ramp)

    def sharpen(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    factor = rope.attention_factor
    if factor is None:
        if rope.mscale and rope.mscale_all_dim:
            factor = sharpen(rope.mscale) / sharpen(rope.mscale_all_dim)
        else:
            factor = sharpen(1.0)
    return frequencies.astype(np.float32), float(factor)


def rope_table(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., head_dim // 2], at integer `positions` [...]."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the last axis of `x` [..., heads, head_dim] (Hugging Face's "rotate half" pairing)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
