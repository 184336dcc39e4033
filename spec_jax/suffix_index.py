"""Texts to copy from: a suffix array with the tree of its intervals, built on the host and read on the device.

A node of the tree is a string of tokens, given as the interval of the suffix array in which the suffixes begin with it:
its size is how often the string occurs. Children stand in descending order of their counts, so that the likeliest
continuation is one lookup (`child`), however large the index is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

END = -1
"""Stands behind every text; equal to nothing, itself included."""
MIN_SIZE = 1 << 14
"""Of the arrays, so that a history that grows does not compile anew at every call."""
MAX_TOKENS = 1 << 26
"""Of one index; 44 bytes each on the device, or up to twice as many: arrays have sizes that are powers of two."""


@flax.struct.dataclass
class SuffixIndex:
    """An index of n tokens in arrays of `size` >= n + 1 entries, a power of two.

    Attributes:
      text: int32 [size], tokens, with END behind every text and in the rest.
      order: int32 [size], where the suffixes begin, sorted by their first `depth` tokens, at least.
      common: int32 [size + 1], tokens that a suffix shares with the one before it, at most `depth`; -1 at both ends.
      branch: int32 [size], by node: the tokens of its string; `depth` where nothing branches.
      earliest: int32 [size], by node: where its string first begins.
      first, degree: int32 [size], by node: where its children stand, and how many there are.
      low, width: int32 [2 * size], of every child its interval.
      count: int32 [], n.
      depth: tokens by which suffixes are told apart.
    """

    text: jax.Array
    order: jax.Array
    common: jax.Array
    branch: jax.Array
    earliest: jax.Array
    first: jax.Array
    degree: jax.Array
    low: jax.Array
    width: jax.Array
    count: jax.Array
    depth: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Place:
    """A string in an index: int32 of one shape each.

    Attributes:
      low, width: its interval of the suffix array; a width of 0: it does not occur.
      depth: its tokens.
    """

    low: jax.Array
    width: jax.Array
    depth: jax.Array


def build(texts: Iterable[Sequence[int]], depth: int) -> SuffixIndex:
    """The index of some texts, as NumPy arrays. Takes about 2 s for a million tokens at a depth of 24.

    Args:
      texts: token ids, none negative.
      depth: tokens by which suffixes are told apart: of what is looked up and what follows it together.

    Raises:
      ValueError: more than MAX_TOKENS tokens, or a negative one.
    """
    parts = [np.append(np.asarray(text, np.int64).reshape(-1), END) for text in texts]
    joined = np.concatenate([*parts, np.full(1, END)])
    if joined.size > MAX_TOKENS:
        raise ValueError(f"the texts have {joined.size} tokens, an index at most {MAX_TOKENS}: give fewer texts, or a "
                         f"history a smaller max_tokens")  # fmt: skip
    if any((part[:-1] < 0).any() for part in parts):
        raise ValueError("texts must be token ids, and one is negative")
    size = max(MIN_SIZE, 1 << (joined.size - 1).bit_length())
    text = np.full(size, END, np.int32)
    text[: joined.size] = joined
    count = joined.size - 1
    order = sorted_suffixes(text[:count], depth)
    common = shared_prefixes(text, order, depth)
    nodes, children = _tree(text, order, common, depth)

    def padded(x, length, fill):
        out = np.full(length, fill, np.int32)
        out[: len(x)] = x
        return out

    branch, earliest, first, degree = np.full(size, depth, np.int32), *np.zeros((3, size), np.int32)
    branch[nodes["id"]], earliest[nodes["id"]] = nodes["depth"], nodes["earliest"]
    bounds = np.searchsorted(children["parent"], nodes["id"]), np.searchsorted(children["parent"], nodes["id"], "right")
    first[nodes["id"]], degree[nodes["id"]] = bounds[0], bounds[1] - bounds[0]
    return SuffixIndex(
        text, padded(order, size, size - 1), padded(common, size + 1, -1), branch, earliest, first, degree,
        padded(children["low"], 2 * size, 0), padded(children["width"], 2 * size, 0), np.int32(count), depth,
    )  # fmt: skip


def is_whole(index: SuffixIndex) -> bool:
    """Whether arrays that were read from somewhere have the shapes and dtypes of an index."""
    size = index.text.size
    shapes = {name: (size,) for name in ("text", "order", "branch", "earliest", "first", "degree")}
    shapes |= {"common": (size + 1,), "low": (2 * size,), "width": (2 * size,), "count": ()}
    found = {name: getattr(index, name) for name in shapes}
    return all(x.shape == shapes[name] and x.dtype == np.int32 for name, x in found.items())


def sorted_suffixes(text: np.ndarray, depth: int) -> np.ndarray:
    """Where the suffixes begin, sorted by `depth` tokens or more (END first): prefix doubling."""
    rank, known = text.astype(np.int64) + 1, 1
    while known < depth:
        behind = np.zeros_like(rank)
        behind[:-known] = rank[known:] + 1
        both = rank * (behind.max(initial=0) + 1) + behind
        rank, known = np.unique(both, return_inverse=True)[1].reshape(-1), 2 * known
    return np.argsort(rank, kind="stable")


def shared_prefixes(text: np.ndarray, order: np.ndarray, depth: int) -> np.ndarray:
    """Tokens that each suffix shares with the one before it, [n + 1]; -1 at both ends."""
    common = np.zeros(len(order) + 1, np.int64)
    running = np.arange(1, len(order))
    for offset in range(depth):
        ours, others = (np.minimum(order[i] + offset, len(text) - 1) for i in (running, running - 1))
        running = running[(text[ours] == text[others]) & (text[ours] >= 0)]
        common[running] = offset + 1
    common[[0, -1]] = -1
    return common


def _tree(text, order, common, depth) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Nodes, and the children of those that branch, each column by column; children sorted by node, frequency and
    freshness. Where suffixes do not differ within `depth` tokens their node does not branch, and its depth is `depth`.
    """
    count, found_nodes, found_children = len(order), [], []
    for level in range(depth):
        starts = np.flatnonzero(common[:-1] <= level)
        if not len(starts):
            break
        width = np.diff(starts, append=count)
        group = np.cumsum(common[starts] < level) - 1  # the string of `level` tokens that each belongs to
        branches = np.bincount(group)[group] > 1
        heads = np.flatnonzero(branches & (common[starts] < level))
        if not len(heads):
            continue
        low = starts[heads]
        total = np.add.reduceat(width, np.flatnonzero(common[starts] < level))[group[heads]]
        parent = node_of(common, low, total, np)
        spans = np.stack([low, low + total], axis=1).reshape(-1)
        spans = spans[:-1] if spans[-1] == count else spans
        found_nodes.append((parent, np.full(len(parent), level), np.minimum.reduceat(order, spans)[::2]))
        newest = np.maximum.reduceat(order, starts)
        token = text[np.minimum(order[starts] + level, len(text) - 1)]
        mine = branches & (token >= 0)
        place = np.searchsorted(group[heads], group[mine])
        found_children.append((parent[place], starts[mine], width[mine], newest[mine]))
    starts = np.flatnonzero(common[:-1] < depth)
    width = np.diff(starts, append=count)
    many = width > 1
    if many.any():
        low, earliest = starts[many], np.minimum.reduceat(order, starts)[many]
        found_nodes.append((node_of(common, low, width[many], np), np.full(len(low), depth), earliest))
    empty = np.zeros((4, 0), np.int64)
    node = [np.concatenate(c) for c in zip(*found_nodes, strict=True)] or empty[:3]
    parent, low, width, newest = [np.concatenate(c) for c in zip(*found_children, strict=True)] or empty
    by = np.lexsort((-newest, -width, parent))
    children = {"parent": parent[by], "low": low[by], "width": width[by]}
    return dict(zip(("id", "depth", "earliest"), node, strict=True)), children


def node_of(common, low, width, xp=jnp):
    """The number of the node with an interval of two or more: its end at which fewer tokens go on, so that no two nodes
    share one."""
    return xp.where(common[low] >= common[low + width], low, low + width - 1)


def find(index: SuffixIndex, tokens: jax.Array, length: jax.Array) -> Place:
    """The suffixes of a text in an index, of 1, 2, ..., depth - 1 tokens.

    Args:
      tokens: int32 [capacity]; length: int32, committed tokens.

    Returns:
      The places, [depth - 1] each; those that do not occur have no width.
    """
    most, size = index.depth - 1, index.order.shape[0]
    sizes, offset = jnp.arange(1, most + 1), jnp.arange(most)
    at = length - sizes[:, None] + offset
    want = tokens[jnp.clip(at, 0, tokens.shape[0] - 1)]
    looked_at = offset < sizes[:, None]
    beyond = jnp.array([False, True])[:, None]  # the end of an interval is where what is larger begins

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        have = index.text[jnp.minimum(index.order[jnp.minimum(middle, size - 1)][..., None] + offset, size - 1)]
        differ = (have != want) & looked_at
        place = jnp.argmax(differ, axis=-1)[..., None]
        smaller = (jnp.take_along_axis(have - want, place, axis=-1) < 0)[..., 0] & differ.any(-1)
        right = (smaller | (beyond & ~differ.any(-1))) & (low < high)
        return jnp.where(right, middle + 1, low), jnp.where(right | (low >= high), high, middle)

    start = jnp.zeros((2, most), jnp.int32), jnp.full((2, most), index.count, jnp.int32)
    (low, _) = lax.fori_loop(0, size.bit_length(), halve, start)
    exists = sizes <= jnp.minimum(length, tokens.shape[0])
    return Place(low[0], jnp.where(exists, low[1] - low[0], 0), sizes)


def child(index: SuffixIndex, place: Place, number: jax.Array) -> tuple[Place, jax.Array]:
    """The `number`-th most frequent continuation of strings by one token: the longer strings, and the tokens.

    There are none behind the index's depth, and where nothing followed; the width is 0 then, and the token END.
    """
    size, last = index.order.shape[0], index.low.shape[0] - 1
    exists = (place.width > 0) & (place.depth < index.depth)
    node = node_of(index.common, jnp.clip(place.low, 0, size - 1), jnp.clip(place.width, 0, size))
    node = jnp.clip(node, 0, size - 1)
    branches = (place.width > 1) & (index.branch[node] == place.depth)
    entry = jnp.minimum(index.first[node] + number, last)
    low = jnp.where(branches, index.low[entry], place.low)
    width = jnp.where(branches, index.width[entry], place.width)
    exists = exists & (number < jnp.where(branches, index.degree[node], 1))
    token = index.text[jnp.minimum(index.order[jnp.clip(low, 0, size - 1)] + place.depth, size - 1)]
    exists = exists & (token >= 0)
    return Place(low, jnp.where(exists, width, 0), place.depth + 1), jnp.where(exists, token, END)
