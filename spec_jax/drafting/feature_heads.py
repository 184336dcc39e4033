"""Forward passes of the heads that draft token by token from the target's features: EAGLE, EAGLE-3 and MTP.

All pair the hidden state of position t with the token behind it, run layers with K and V of their own, and hand their
output on to the next step in place of the feature that the target has not computed yet. They differ in how features
become a hidden state, what the first layer reads, and which norms stand where.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.cache import KVCache
from spec_jax.drafting.heads import Eagle3Head, EagleHead, Head, MtpHead
from spec_jax.models.blocks import Flight, feed_forward, rotations, self_attention
from spec_jax.models.layers import RowBlocks, flat_active, joined_linear, rms_norm, rows_for

Params = dict


def fuse(
    head: Head, params: Params, features: dict[int, jax.Array], rows: RowBlocks, active: jax.Array | None = None
) -> jax.Array:
    """The hidden state that the target's features stand for.

    Args:
      features: {layer: [batch, width, target_hidden]}, of `head.features`.
      rows: row blocks of the products.
      active: bool [batch, width], rows that are wanted; None: all.

    Returns:
      [batch, width, hidden].
    """
    parts = [features[layer].astype(head.dtype) for layer in head.features]
    if not isinstance(head, Eagle3Head):
        return parts[0]
    return _through_fc(head, params["fc"], parts, rows, active)


def mask_hidden(head: Eagle3Head, params: Params, rows: RowBlocks) -> jax.Array:
    """The learned stand-in of P-EAGLE for the hidden states that are not known yet, [hidden]."""
    learned = params["fc"]["mask_hidden"]
    if not head.mask_wide:
        return learned
    parts = jnp.split(learned[None, None], len(head.features), axis=-1)
    return _through_fc(head, params["fc"], parts, rows, None)[0, 0]


def step(
    head: Head,
    params: Params,
    hidden: jax.Array,
    embedded: jax.Array,
    cache: KVCache,
    flight: Flight,
    rows: RowBlocks,
) -> tuple[jax.Array, KVCache]:
    """Runs the layers over rows in flight.

    Args:
      hidden: [batch, width, hidden], of `fuse` or `next_hidden`.
      embedded: [batch, width, hidden], embeddings of the tokens behind them.
      cache: the head's own.
      flight: where the rows stand.
      rows: row blocks of the products.

    Returns:
      The output of the last layer, [batch, width, hidden], and the cache with the rows written behind `length`.
    """
    c, active, shape = head.config, flight.active.reshape(-1), hidden.shape
    rows = rows_for(head.packed, rows)
    norm = lambda x, weight: rms_norm(x, weight, c.rms_norm_eps, rows, active)  # noqa: E731
    hidden, embedded = hidden.reshape(-1, shape[-1]), embedded.reshape(-1, embedded.shape[-1]).astype(head.dtype)
    k, v = list(cache.k), list(cache.v)
    rotation = rotations(c.rope, c.head_dim, flight.positions, head.packed)

    x = None  # the residual
    for index in range(c.num_layers):
        w = params[f"layer_{index}"]
        if index > 0:
            read = norm(x, w["attention_norm"])
        elif isinstance(head, EagleHead):
            x = _fc(params["fc"], jnp.concatenate([embedded, hidden], axis=1), c.hidden_size, rows, active)
            read = x
        elif isinstance(head, Eagle3Head):
            normed = norm(hidden, w["hidden_norm"])
            x = normed if head.norm_before_residual else hidden
            read = jnp.concatenate([norm(embedded, w["attention_norm"]), normed], axis=1)
        else:
            if head.zero_first:
                embedded = jnp.where(flight.positions.reshape(-1, 1) == 0, 0, embedded)
            pair = [norm(embedded, w["embedding_norm"]), norm(hidden, w["hidden_norm"])]
            pair = pair[::-1] if head.hidden_first else pair
            x = _fc(w, jnp.concatenate(pair, axis=1), c.hidden_size, rows, active)
            read = norm(x, w["attention_norm"])
        seen, k[index], v[index] = self_attention(read, w, c, k[index], v[index], flight, rotation, rows)
        x = x + seen
        x = x + feed_forward(norm(x, w["mlp_norm"]), w, c, rows, active)
    return x.reshape(shape), cache.replace(k=tuple(k), v=tuple(v))


def next_hidden(head: Head, params: Params, output: jax.Array, rows: RowBlocks) -> jax.Array:
    """What the next step is fed in place of a feature, from outputs [batch, width, hidden] of `step`."""
    normed = head.norm_output if isinstance(head, Eagle3Head) else isinstance(head, MtpHead) and head.post_norm
    return head_input(head, params, output, rows) if normed else output


def head_input(
    head: Head, params: Params, output: jax.Array, rows: RowBlocks, active: jax.Array | None = None
) -> jax.Array:
    """What the output head reads, from outputs [batch, width, hidden] of `step`."""
    if isinstance(head, EagleHead):
        return output
    weight = params["final_norm"] if isinstance(head, Eagle3Head) else params["layer_0"]["output_norm"]
    flat = output.reshape(-1, output.shape[-1])
    normed = rms_norm(
        flat, weight, head.config.rms_norm_eps, rows_for(head.packed, rows), flat_active(active, len(flat))
    )
    normed = normed.reshape(output.shape)
    return normed * head.logit_scale if isinstance(head, Eagle3Head) and head.logit_scale != 1 else normed


def _through_fc(head, w, parts, rows, active):
    rows, shape = rows_for(head.packed, rows), parts[0].shape
    parts = [x.reshape(-1, shape[-1]) for x in parts]
    active, eps = flat_active(active, len(parts[0])), head.config.rms_norm_eps
    if head.fc_norm == "each":
        parts = [rms_norm(x, w[f"norm_{i}"], eps, rows, active) for i, x in enumerate(parts)]
    x = jnp.concatenate(parts, axis=1)
    if head.fc_norm == "whole":
        x = rms_norm(x, w["norm"], eps, rows, active)
    return _fc(w, x, head.config.hidden_size, rows, active).reshape(*shape[:-1], -1)


def _fc(w, x, size, rows, active):
    return joined_linear(x, w, ("fc",), (size,), rows, active)[0]
