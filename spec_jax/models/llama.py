"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) as a purely functional Flax Linen module.

The module is a frozen, hashable description; parameters, cache and features are plain pytrees passed in and out. The
staged methods `embed`, `layers` and `head` let a drafter use part of its target.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spec_jax import cache as kv
from spec_jax.models.blocks import Flight, feed_forward, flight_behind, rotations, self_attention
from spec_jax.models.config import LlamaConfig, param_shapes
from spec_jax.models.layers import RowBlocks, embed, flat_active, rms_norm, rows_for, unembed
from spec_jax.models.packing import pack_params, packed_shapes

FINAL_NORM = -1
"""Name of the final norm's output among the captured features; layer i's output is i."""


@flax.struct.dataclass
class ForwardOutput:
    """Logits float32 [batch, width, vocab]; features {layer: [batch, width, embed]}; the cache with rows written."""

    logits: jax.Array
    features: dict[int, jax.Array]
    cache: kv.KVCache


class Llama(nn.Module):
    """One decoder-only model.

    Attributes:
      config: sizes and switches.
      dtype: "float32" or "bfloat16", of weights, activations and cache; logits, norms and softmax are float32.
      packed: the parameters are packed for the CPU kernels, which then run all products, norms and attention.
    """

    config: LlamaConfig
    dtype: str = "float32"
    packed: bool = False

    def setup(self):
        shapes = packed_shapes(self.config) if self.packed else param_shapes(self.config)
        self.weights = {
            name: self.param(name, _initialise, entry, jnp.dtype(self.dtype)) for name, entry in shapes.items()
        }

    def __call__(
        self,
        tokens: jax.Array,
        cache: kv.KVCache,
        *,
        depth: jax.Array,
        ancestors: jax.Array,
        rows: RowBlocks,
        write: jax.Array | None = None,
        active: jax.Array | None = None,
        capture: tuple[int, ...] = (),
        with_logits: bool = True,
        start: int = 0,
        hidden: jax.Array | None = None,
    ) -> ForwardOutput:
        """One forward pass of the rows in flight.

        Args:
          tokens: int32 [batch, width].
          cache: rows 0..length-1 committed; row w of the flight is written to slot length + w.
          depth: int32 [width] or [batch, width], position of a row behind `length` (a chain: 0, 1, 2, ...).
          ancestors: uint32 [batch or 1, width, words].
          rows: the canonical row blocks to run in.
          write: bool [batch], rows that may write to the cache; None: all.
          active: bool [batch, width], rows whose results are wanted; None: all. A packed model computes no others:
            there logits hold anything, NaN too, and features are zeros.
          capture: layers whose outputs are returned as features; `FINAL_NORM` for the final norm's output.
          with_logits: False leaves out the head, as prefill does.
          start, hidden: begins at this layer, with outputs [batch, width, embed] of the one before it, whose K/V are in
            the cache already.
        """
        flight = self.flight(cache, tokens.shape[1], depth, ancestors, write, active)
        x = self.embed(tokens) if hidden is None else hidden
        x, cache, features = self.layers(x, cache, flight, rows, start=start, capture=capture)
        normed = self.final_norm(x, rows, flight.active) if with_logits or FINAL_NORM in capture else None
        if FINAL_NORM in capture:
            features[FINAL_NORM] = self._feature(normed, flight)
        logits = self.head(normed, rows, flight.active) if with_logits else None
        return ForwardOutput(logits, features, cache)

    def flight(self, cache, width, depth, ancestors, write=None, active=None) -> Flight:
        """Describes `width` rows in flight behind the committed slots of `cache`."""
        return flight_behind(cache, width, depth, ancestors, write, active)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [batch, width] to embeddings [batch, width, embed]. Ids must lie in the vocabulary."""
        return embed(tokens, self.weights["embedding"], rows_for(self.packed, RowBlocks()))

    def layers(
        self,
        x: jax.Array,
        cache: kv.KVCache,
        flight: Flight,
        rows: RowBlocks,
        *,
        start: int = 0,
        stop: int | None = None,
        skip: Sequence[int] = (),
        capture: Sequence[int] = (),
    ) -> tuple[jax.Array, kv.KVCache, dict[int, jax.Array]]:
        """Runs layers start..stop-1 except those in `skip`, writing K/V of each layer that ran."""
        k, v, features = list(cache.k), list(cache.v), {}
        rotation = rotations(self.config.rope, self.config.head_dim, flight.positions, self.packed)
        for index in range(start, self.config.num_layers if stop is None else stop):
            if index in skip:
                continue
            # A barrier at every layer border, so that capturing a layer's output never changes how it is fused.
            x = lax.optimization_barrier(x)
            x, k[index], v[index] = self._layer(index, x, k[index], v[index], flight, rotation, rows)
            if index in capture:
                features[index] = self._feature(x, flight)
        return lax.optimization_barrier(x), cache.replace(k=tuple(k), v=tuple(v)), features

    def final_norm(self, x: jax.Array, rows: RowBlocks, active: jax.Array | None = None) -> jax.Array:
        """The norm in front of the head, [batch, width, embed]."""
        flat = x.reshape(-1, x.shape[-1])
        weight, eps = self.weights["final_norm"], self.config.rms_norm_eps
        return rms_norm(flat, weight, eps, rows_for(self.packed, rows), flat_active(active, len(flat))).reshape(x.shape)

    def head(self, normed: jax.Array, rows: RowBlocks, active: jax.Array | None = None) -> jax.Array:
        """float32 logits [batch, width, vocab] of final-norm outputs."""
        weight, vocab = self.weights[self.config.head_table], self.config.vocab_size
        flat = normed.reshape(-1, normed.shape[-1])
        active = flat_active(active, len(flat))
        return unembed(flat, weight, rows_for(self.packed, rows), vocab, active).reshape(*normed.shape[:-1], vocab)

    def _feature(self, x: jax.Array, flight: Flight) -> jax.Array:
        """x where it was computed, zeros elsewhere: a drafter may put every row of a feature into its state."""
        return jnp.where(flight.active[..., None], x, 0) if self.packed else x

    def _layer(self, index, x, k_slots, v_slots, flight, rotation, rows):
        c, w = self.config, self.weights[f"layer_{index}"]
        rows, shape, active = rows_for(self.packed, rows), x.shape, flight.active.reshape(-1)
        x = x.reshape(-1, shape[-1])
        with jax.named_scope("attention"):
            normed = rms_norm(x, w["attention_norm"], c.rms_norm_eps, rows, active)
            out, k_slots, v_slots = self_attention(normed, w, c, k_slots, v_slots, flight, rotation, rows)
            x = x + out
        with jax.named_scope("mlp"):
            normed = rms_norm(x, w["mlp_norm"], c.rms_norm_eps, rows, active)
            x = x + feed_forward(normed, w, c, rows, active)
        return x.reshape(shape), k_slots, v_slots


def _initialise(key, entry, dtype):
    """Random weights for tests and for drafters trained from scratch: ones for norms, zeros for biases, else normal."""
    if not isinstance(entry, dict):
        return _initialise(key, {"final_norm" if len(entry) == 1 else "weight": entry}, dtype).popitem()[1]
    out = {}
    for place, (name, shape) in enumerate(entry.items()):
        if name.endswith("norm"):
            out[name] = jnp.ones(shape, dtype)
        elif name.endswith("bias"):
            out[name] = jnp.zeros(shape, dtype)
        else:
            scale = shape[0] ** -0.5 if len(entry) > 1 else shape[-1] ** -0.5
            out[name] = (jax.random.normal(jax.random.fold_in(key, place), shape) * scale).astype(dtype)
    return out


def init_params(module: Llama, seed: int = 0) -> dict:
    """Random parameters of `module`, a nested dict like that of a loaded checkpoint."""
    plain = module.clone(packed=False)
    cache = kv.init_cache(module.config, 1, 1, module.dtype)
    tokens = jnp.zeros((1, 1), jnp.int32)
    ancestors = np.ones((1, 1, 1), np.uint32)

    def init(key):
        return plain.init(key, tokens, cache, depth=np.zeros(1, np.int32), ancestors=ancestors, rows=RowBlocks())

    params = jax.jit(init)(jax.random.key(seed))["params"]
    return pack_params(params) if module.packed else params
