"""Training forwards of the drafters that are fed their own output: EAGLE, EAGLE-3 and multi-token prediction.

All steps of all chains run at once (EAGLE-3's training-time test, https://arxiv.org/abs/2503.01840, section 3.2). Place
a of step 0 reads the target's features at a and the token at a + 1. At step s it reads its own output of step s - 1 and
the token at a + 1 + s, and attends to the keys that step 0 made up to a and to those of its own steps 1..s: what it
would see if it had drafted the true tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.drafting.heads import Eagle3Head, EagleHead, MtpHead
from spec_jax.drafting.training.forward import (
    Texts,
    attention,
    feed_forward,
    linear,
    norm,
    normed_and_rotated,
    product,
    split_heads,
)


class _Unrolled:
    """One layer's attention over all steps; remembers the keys and values that earlier steps made."""

    def __init__(self, w: dict[str, jax.Array], config, texts: Texts, dtype: str):
        self.w, self.config, self.texts, self.dtype, self.made = w, config, texts, dtype, []

    def from_normed(self, x: jax.Array) -> jax.Array:
        """What the layer's attention adds for normed inputs of the next step."""
        return self(*(linear(x, self.w, name, self.dtype) for name in "qkv"))

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """The same from the three products [batch, length, heads * head_dim]."""
        q, k, v = (split_heads(x, self.config.head_dim) for x in (q, k, v))
        q, k = normed_and_rotated(q, k, self.w, self.config, self.texts.positions + len(self.made))
        self.made.append((k, v))
        (k, v), *own = self.made
        return linear(attention(q, k, v, self.texts.segments, own, self.dtype), self.w, "o", self.dtype)


def eagle3_rows(
    head: Eagle3Head, params: dict[str, Any], features: jax.Array, embedding: jax.Array, texts: Texts, steps: int,
    dtype: str = "float32",
) -> list[jax.Array]:  # fmt: skip
    """What EAGLE-3's output head reads at every step.

    Args:
      head: the description.
      params: its parameters, plain layout.
      features: float32 [batch, length, concatenated features].
      embedding: [ids, hidden], the drafter's own or the target's.
      texts: the rows.
      steps: how many.
      dtype: of the products.

    Returns:
      float32 [batch, length, hidden] per step, times `logit_scale`.
    """
    c, eps, size = head.config, head.config.rms_norm_eps, head.config.hidden_size
    fc, first = params["fc"], params["layer_0"]
    if head.fc_norm == "whole":
        features = norm(features, fc["norm"], eps)
    elif head.fc_norm == "each":
        parts = jnp.split(features, len(head.features), axis=-1)
        features = jnp.concatenate([norm(x, fc[f"norm_{i}"], eps) for i, x in enumerate(parts)], axis=-1)
    g = product(features, fc["fc"], dtype)
    layers = [_Unrolled(params[f"layer_{i}"], c, texts, dtype) for i in range(c.num_layers)]
    joined = jnp.concatenate([first[name] for name in "qkv"], axis=1)
    bounds = (first["q"].shape[1], first["q"].shape[1] + first["k"].shape[1])
    bias = jnp.concatenate([first[f"{name}_bias"] for name in "qkv"]) if c.qkv_bias else 0
    # The embeddings' share of q, k and v is the same numbers at every step, one place further on.
    embedded = norm(embedding[texts.tokens].astype(jnp.float32), first["attention_norm"], eps)
    embedded = product(embedded, joined[:size], dtype) + bias
    rows = []
    for step in range(steps):
        normed = norm(g, first["hidden_norm"], eps)
        qkv = jnp.roll(embedded, -1 - step, axis=1) + product(normed, joined[size:], dtype)
        u = (normed if head.norm_before_residual else g) + layers[0](*jnp.split(qkv, bounds, axis=-1))
        u = u + feed_forward(norm(u, first["mlp_norm"], eps), first, dtype)
        u = _more_layers(u, layers, eps, dtype)
        out = norm(u, params["final_norm"], eps)
        rows.append(out * head.logit_scale)
        g = out if head.norm_output else u
    return rows


def eagle_rows(
    head: EagleHead, params: dict[str, Any], features: jax.Array, embedding: jax.Array, texts: Texts, steps: int,
    dtype: str = "float32",
) -> list[jax.Array]:  # fmt: skip
    """What EAGLE's output head reads at every step: its guess of the target's feature; see `eagle3_rows`."""
    c, size = head.config, head.config.hidden_size
    first, fc = params["layer_0"], params["fc"]
    layers = [_Unrolled(params[f"layer_{i}"], c, texts, dtype) for i in range(c.num_layers)]
    embedded = product(embedding[texts.tokens].astype(jnp.float32), fc["fc"][:size], dtype) + fc.get("fc_bias", 0)
    rows, hidden = [], features
    for step in range(steps):
        x = jnp.roll(embedded, -1 - step, axis=1) + product(hidden, fc["fc"][size:], dtype)
        u = x + layers[0].from_normed(x)
        u = u + feed_forward(norm(u, first["mlp_norm"], c.rms_norm_eps), first, dtype)
        hidden = _more_layers(u, layers, c.rms_norm_eps, dtype)
        rows.append(hidden)
    return rows


def mtp_rows(
    head: MtpHead, params: dict[str, Any], features: jax.Array, embedding: jax.Array, texts: Texts, steps: int,
    dtype: str = "float32",
) -> list[jax.Array]:  # fmt: skip
    """What the output head of one shared module (FastMTP) reads at every step; see `eagle3_rows`."""
    c, w, eps = head.config, params["layer_0"], head.config.rms_norm_eps
    if c.num_layers != 1:
        raise ValueError(f"num_layers={c.num_layers}: one module that all steps share can be trained; use 1")
    shared = _Unrolled(w, c, texts, dtype)
    parts = jnp.split(w["fc"], (head.target_hidden if head.hidden_first else c.hidden_size,), axis=0)
    of_hidden, of_embedding = parts if head.hidden_first else parts[::-1]
    embedded = norm(embedding[texts.tokens].astype(jnp.float32), w["embedding_norm"], eps)
    embedded = product(embedded, of_embedding, dtype)
    rows, hidden = [], features
    for step in range(steps):
        token = jnp.roll(embedded, -1 - step, axis=1)
        if head.zero_first and step == 0:
            token = jnp.where(texts.positions[..., None] == 0, 0, token)
        x = token + product(norm(hidden, w["hidden_norm"], eps), of_hidden, dtype)
        u = _layer(x, shared, eps, dtype)
        out = norm(u, w["output_norm"], eps)
        rows.append(out)
        hidden = out if head.post_norm else u
    return rows


def _layer(u, unrolled, eps, dtype):
    u = u + unrolled.from_normed(norm(u, unrolled.w["attention_norm"], eps))
    return u + feed_forward(norm(u, unrolled.w["mlp_norm"], eps), unrolled.w, dtype)


def _more_layers(u, layers, eps, dtype):
    for unrolled in layers[1:]:
        u = _layer(u, unrolled, eps, dtype)
    return u
