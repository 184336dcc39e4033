"""The rows of a flight and its query group as tiles of one product per KV head, and back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spec_jax.kernels.masks import flag_committed, lowest_slots


@dataclasses.dataclass(frozen=True)
class Packing:
    """How [batch, width, heads] rows of queries lie in tiles [batch, kv_heads, tiles, rows].

    Attributes:
      width: tokens in flight of a sequence.
      kv_heads, group: KV heads, and the query heads of each.
      rows: of a tile. The first `filled` of them are tokens times group, the others repeat the last one, so that every
        softmax is finite.
    """

    width: int
    kv_heads: int
    group: int
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return min(self.rows // self.group, self.width)

    @property
    def tiles(self) -> int:
        return -(-self.width // self.tokens)

    @property
    def filled(self) -> int:
        """Rows of a tile that hold a query."""
        return self.tokens * self.group

    def queries(self, q: jax.Array) -> jax.Array:
        """[batch, width, heads, head_dim] as [batch, kv_heads, tiles, rows, head_dim]."""
        batch, _, _, head_dim = q.shape
        q = jnp.pad(q, ((0, 0), (0, self.tiles * self.tokens - self.width), (0, 0), (0, 0)))
        q = q.reshape(batch, self.tiles, self.tokens, self.kv_heads, self.group, head_dim).transpose(0, 3, 1, 2, 4, 5)
        return self._pad(q.reshape(batch, self.kv_heads, self.tiles, self.filled, head_dim))

    def masks(self, ancestors: jax.Array, start: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
        """What the rows see: bits, uint32 [batch, tiles, rows, words], see `flag_committed`; and the first slot of each
        row's window, int32 [batch, tiles, rows, 1]."""
        batch = start.shape[0]
        ancestors = jnp.broadcast_to(ancestors, (batch, *ancestors.shape[1:]))
        padding = self.tiles * self.tokens - self.width
        ancestors = jnp.pad(ancestors, ((0, 0), (0, padding), (0, 0)), mode="edge")
        lowest = lowest_slots(ancestors, start, window)
        return self._by_rows(flag_committed(ancestors, self.width)), self._by_rows(lowest[..., None])

    def outputs(self, out: jax.Array) -> jax.Array:
        """[batch, kv_heads, tiles, filled or more, head_dim] as [batch, width, heads, head_dim]."""
        batch, *_, head_dim = out.shape
        out = out[:, :, :, : self.filled]
        out = out.reshape(batch, self.kv_heads, self.tiles * self.tokens, self.group, head_dim)[:, :, : self.width]
        return out.transpose(0, 2, 1, 3, 4).reshape(batch, self.width, self.kv_heads * self.group, head_dim)

    def _by_rows(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, n] as [batch, tiles, rows, n]: every query head of a group sees what its token sees."""
        x = jnp.repeat(x, self.group, axis=1)
        return self._pad(x.reshape(x.shape[0], self.tiles, self.filled, x.shape[-1]))

    def _pad(self, x: jax.Array) -> jax.Array:
        """Pads the last axis but one with its last row, up to `rows`."""
        return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, self.rows - x.shape[-2]), (0, 0)), mode="edge")
