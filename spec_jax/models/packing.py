"""The packed layout of a model's weights, which the CPU kernels read in one stream.

A weight [inputs, outputs] becomes [ceil(outputs / PANEL), inputs, PANEL]: PANEL outputs lie side by side and all their
inputs follow each other in memory. Weights that take the same input (q, k and v; gate and up) are joined into one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.kernels.cpu import PANEL
from spec_jax.models.config import LlamaConfig, param_shapes

JOINED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",), "fc": ("fc",)}
"""Packed weights of a layer and the weights they are made of, in this order along the outputs."""
TABLES = ("embedding", "lm_head")
"""How the names of weights begin that lie as [outputs, inputs] in the plain layout."""


def pack(weight: jax.Array) -> jax.Array:
    """[inputs, outputs] to [panels, inputs, PANEL], outputs padded with zeros to whole panels."""
    inputs, outputs = weight.shape
    padded = jnp.pad(weight, ((0, 0), (0, -outputs % PANEL)))
    return padded.reshape(inputs, -1, PANEL).transpose(1, 0, 2)


def unpack(weight: jax.Array, outputs: int) -> jax.Array:
    """[panels, inputs, PANEL] to [inputs, outputs]."""
    return weight.transpose(1, 0, 2).reshape(weight.shape[1], -1)[:, :outputs]


def split(joined: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """The parts of these sizes that were joined along the last axis."""
    return jnp.split(joined, list(itertools.accumulate(sizes))[:-1], axis=-1)


def pack_params(params: dict[str, Any]) -> dict[str, Any]:
    """A parameter tree in the packed layout. Takes `params` apart, so that only one weight is held twice at a time."""
    packed = {}
    for name in list(params):
        entry = params.pop(name)
        if name.startswith(TABLES):
            entry = pack(entry.T)
        elif isinstance(entry, dict):
            entry = dict(entry)
            for whole, parts in _joined(entry):
                joined = jnp.concatenate([entry.pop(part) for part in parts], axis=-1)
                entry[whole] = joined if joined.ndim == 1 else pack(joined)
        packed[name] = entry
    return packed


def unpack_params(params: dict[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """The plain layout of a model's packed parameter tree, as `tensor_specs` describes it."""
    return unpack_tree(params, param_shapes(config))


def unpack_tree(params: dict[str, Any], tree_shapes: dict[str, Any]) -> dict[str, Any]:
    """The plain layout, of these shapes, of a packed parameter tree."""
    plain = {}
    for name, shapes in tree_shapes.items():
        entry = params[name]
        if name.startswith(TABLES):
            entry = unpack(entry, shapes[0]).T
        elif isinstance(entry, dict):
            entry = dict(entry)
            for whole, parts in _joined(shapes):
                joined, sizes = entry.pop(whole), [shapes[part][-1] for part in parts]
                joined = joined if joined.ndim == 1 else unpack(joined, sum(sizes))
                entry |= zip(parts, split(joined, sizes), strict=True)
        plain[name] = entry
    return plain


@functools.lru_cache
def packed_shapes(config: LlamaConfig) -> dict[str, Any]:
    """`param_shapes` of the packed layout."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), param_shapes(config), is_leaf=is_shape)
    return jax.tree.map(lambda x: x.shape, jax.eval_shape(lambda tree: pack_params(dict(tree)), plain))


def _joined(entry: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """The packed weights and biases of a layer with these plain ones, each with its parts."""
    found = []
    for suffix in ("", "_bias"):
        for whole, parts in JOINED.items():
            names = tuple(f"{part}{suffix}" for part in parts)
            if names[0] in entry:
                found.append((f"{whole}{suffix}", names))
    return found
