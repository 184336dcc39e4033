"""Differentiable forward passes over packed texts: the parts that drafters share, and the frozen target.

Weights are plain-layout float32 trees. Activations stay float32; products run in a `dtype` of choice with float32
sums, bfloat16 being twice as fast where a CPU has instructions for it. With float32 the target's numbers are those of
`spec_jax.models.llama.Llama`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from spec_jax.kernels.masks import MASKED
from spec_jax.kernels.reference import precision
from spec_jax.models.config import LlamaConfig
from spec_jax.models.layers import RowBlocks, rms_norm
from spec_jax.models.llama import FINAL_NORM
from spec_jax.models.rope import RopeConfig, rope_table, rotate

QUERY_BLOCK = 64
"""Queries of one attention product; keys behind a block's end are not read."""


@flax.struct.dataclass
class Texts:
    """Packed texts as arrays [batch, length]: int32 tokens, bool loss, int32 segments and positions.

    `loss` marks tokens to be learned; segments are 1, 2, ... in a row, 0 in padding; positions start at 0 in each.
    """

    tokens: jax.Array
    loss: jax.Array
    segments: jax.Array
    positions: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, weight: jax.Array, dtype: str = "float32") -> jax.Array:
    """x [..., in] times weight [in, out]: float32, as are both gradients; all three products run in `dtype`."""
    return _dot(x, weight, dtype)


def _dot(a, b, dtype, over=((-1,), (0,))):
    a, b = a.astype(dtype), b.astype(dtype)
    axes = tuple(i % a.ndim for i in over[0]), tuple(i % b.ndim for i in over[1])
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision(a), preferred_element_type=jnp.float32)


def _product_forward(x, weight, dtype):
    return _dot(x, weight, dtype), (x.astype(dtype), weight)


def _product_backward(dtype, saved, slope):
    x, weight = saved
    slope = slope.astype(dtype)
    rows = tuple(range(x.ndim - 1))
    d_weight = _dot(x, slope, dtype, (rows, rows)).astype(weight.dtype)
    return _dot(slope, weight, dtype, ((-1,), (1,))), d_weight


product.defvjp(_product_forward, _product_backward)


def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The model's root-mean-square norm of x [..., size]."""
    return rms_norm(x, weight, eps, RowBlocks())


def linear(x: jax.Array, weights: dict[str, jax.Array], name: str, dtype: str) -> jax.Array:
    """x times a named weight, plus its bias where there is one."""
    y = product(x, weights[name], dtype)
    bias = weights.get(f"{name}_bias")
    return y if bias is None else y + bias


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """[batch, length, heads * head_dim] to [batch, length, heads, head_dim]."""
    return x.reshape(*x.shape[:2], -1, head_dim)


def rotated(x: jax.Array, positions: jax.Array, rope: RopeConfig) -> jax.Array:
    """Heads [batch, length, heads, head_dim] rotated to positions [batch, length]."""
    return rotate(x, *rope_table(rope, x.shape[-1], positions))


def queries_keys_values(
    x: jax.Array, w: dict[str, jax.Array], config: LlamaConfig, positions: jax.Array, dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [batch, length, heads, head_dim] and k, v [batch, length, kv_heads, head_dim] of normed x, rotated."""
    q, k, v = (split_heads(linear(x, w, name, dtype), config.head_dim) for name in "qkv")
    return *normed_and_rotated(q, k, w, config, positions), v


def normed_and_rotated(q, k, w, config, positions):
    """q and k behind their norms, where the layer has some, and rotated to their positions."""
    if config.qk_norm:
        q, k = norm(q, w["q_norm"], config.rms_norm_eps), norm(k, w["k_norm"], config.rms_norm_eps)
    return rotated(q, positions, config.rope), rotated(k, positions, config.rope)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    own: Sequence[tuple[jax.Array, jax.Array]] = (),
    dtype: str = "float32",
) -> jax.Array:
    """Causal attention within segments, where every query may also see some keys of its own.

    Args:
      q: [batch, length, heads, head_dim].
      k, v: [batch, length, kv_heads, head_dim]; a query sees those of its segment up to its own place.
      segments: int32 [batch, length].
      own: (k, v) pairs shaped like k; the query at a place sees the pair at this place.
      dtype: of the products.

    Returns:
      [batch, length, heads * head_dim].
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, size) * size**-0.5
    outs = []
    for begin in range(0, length, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, length)
        block, places = slice(begin, end), jnp.arange(begin, end)
        seen = (segments[:, block, None] == segments[:, None, :end]) & (places[:, None] >= jnp.arange(end))
        part = [(k_own[:, block], v_own[:, block]) for k_own, v_own in own]
        outs.append(_attend(q[:, block], k[:, :end], v[:, :end], seen, part, dtype))
    return jnp.concatenate(outs, axis=1).reshape(batch, length, heads * size)


def _attend(q, k, v, seen, own, dtype):
    """q [batch, queries, kv_heads, group, size], seen [batch, queries, keys]."""
    scores = _mixed("bqkgd,bskd->bkgqs", q, k, dtype)
    scores = jnp.where(seen[:, None, None], scores, MASKED)
    best = scores.max(axis=-1)
    mine = [jnp.einsum("bqkgd,bqkd->bkgq", q, k_own) for k_own, _ in own]
    for score in mine:
        best = jnp.maximum(best, score)
    best = lax.stop_gradient(best)
    weights = jnp.exp(scores - best[..., None])
    mine = [jnp.exp(score - best) for score in mine]
    total = weights.sum(axis=-1) + sum(mine)
    out = _mixed("bkgqs,bskd->bqkgd", weights, v, dtype)
    for weight, (_, v_own) in zip(mine, own, strict=True):
        out = out + weight.transpose(0, 3, 1, 2)[..., None] * v_own[:, :, :, None]
    return out / total.transpose(0, 3, 1, 2)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _mixed(spec: str, a: jax.Array, b: jax.Array, dtype: str) -> jax.Array:
    """The einsum of a and b in `dtype`, summed in float32, with gradients in the same way."""
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, precision=precision(a), preferred_element_type=jnp.float32)


def _mixed_forward(spec, a, b, dtype):
    a, b = a.astype(dtype), b.astype(dtype)
    return _mixed(spec, a, b, dtype), (a, b)


def _mixed_backward(spec, dtype, saved, slope):
    (first, second), out = spec.split("->")[0].split(","), spec.split("->")[1]
    a, b = saved
    return _mixed(f"{out},{second}->{first}", slope, b, dtype), _mixed(f"{out},{first}->{second}", slope, a, dtype)


_mixed.defvjp(_mixed_forward, _mixed_backward)


def feed_forward(x: jax.Array, w: dict[str, jax.Array], dtype: str) -> jax.Array:
    """The gated feed-forward of normed x: what is to be added to the residual."""
    return linear(jax.nn.silu(linear(x, w, "gate", dtype)) * linear(x, w, "up", dtype), w, "down", dtype)


def layer(
    x: jax.Array,
    w: dict[str, jax.Array],
    config: LlamaConfig,
    positions: jax.Array,
    segments: jax.Array,
    dtype: str,
) -> jax.Array:
    """One ordinary transformer layer over x [batch, length, hidden]."""
    normed = norm(x, w["attention_norm"], config.rms_norm_eps)
    q, k, v = queries_keys_values(normed, w, config, positions, dtype)
    x = x + linear(attention(q, k, v, segments, (), dtype), w, "o", dtype)
    return x + feed_forward(norm(x, w["mlp_norm"], config.rms_norm_eps), w, dtype)


def target_forward(
    params: dict[str, Any],
    config: LlamaConfig,
    texts: Texts,
    capture: Sequence[int] = (),
    dtype: str = "float32",
) -> tuple[dict[int, jax.Array], jax.Array]:
    """The frozen target over packed texts.

    Args:
      params: its parameters in the plain layout, float32 or bfloat16.
      config: its sizes.
      texts: the rows.
      capture: layers whose outputs are returned; `FINAL_NORM` for the final norm's output.
      dtype: of the products.

    Returns:
      {layer: float32 [batch, length, hidden]} and the final norm's output, which logits are made of.
    """
    x = params["embedding"][texts.tokens].astype(jnp.float32)
    features = {}
    for index in range(config.num_layers):
        x = layer(x, params[f"layer_{index}"], config, texts.positions, texts.segments, dtype)
        if index in capture:
            features[index] = x
    normed = norm(x, params["final_norm"].astype(jnp.float32), config.rms_norm_eps)
    if FINAL_NORM in capture:
        features[FINAL_NORM] = normed
    return jax.tree.map(lax.stop_gradient, (features, normed))
