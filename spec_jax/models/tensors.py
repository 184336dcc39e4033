"""From named tensors in a checkpoint to the parameter tree, one tensor at a time.

Both readers (safetensors folders and GGUF) hand over the shapes they hold and a function that reads one tensor. The
shapes are compared first, so that everything that is wrong with a file is reported at once and before any weight is
read. Then only one tensor at a time exists in host memory besides the finished tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.models.config import TensorSpec

DTYPES = ("float32", "bfloat16")
_LISTED = 8  # names listed per kind of mistake; a wrong config.json would otherwise print thousands


def check_shapes(
    specs: Mapping[str, TensorSpec],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    problems: Sequence[str] = (),
) -> None:
    """Raises one ValueError that lists missing, unexpected and wrong-shape tensors.

    Args:
      specs: the tensors that what the checkpoint says it is has.
      shapes: shape of every tensor in the checkpoint, by Hugging Face name.
      where: the file or folder, for the message.
      problems: further findings of the reader, listed in the same message.
    """
    missing = [name for name in specs if name not in shapes]
    unexpected = [name for name in shapes if name not in specs]
    wrong = [
        f"{name} is {list(shapes[name])}, not {list(spec.shape)}"
        for name, spec in specs.items()
        if name in shapes and tuple(shapes[name]) != spec.shape
    ]
    found = list(problems)
    for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong)):
        if names:
            rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            found.append(f"{kind} ({len(names)}): {', '.join(names[:_LISTED])}{rest}")
    if not found:
        return
    hint = ""
    if missing == ["lm_head.weight"]:
        hint = (
            "; the config says tie_word_embeddings=false, so the output head must be in the file:"
            " set tie_word_embeddings=true if the model really shares it with the embedding"
        )
    raise ValueError(f"the tensors in {where} do not fit its config: {'; '.join(found)}{hint}")


def read_params(specs: Mapping[str, TensorSpec], read: Callable[[str], np.ndarray], dtype: str) -> dict[str, Any]:
    """Builds the parameter tree.

    Args:
      specs: where every tensor goes; `check_shapes` must have passed.
      read: returns the tensor of a Hugging Face name in any floating dtype.
      dtype: "float32" or "bfloat16"; every parameter gets it.

    Returns:
      A nested dict of arrays on JAX's default device, following `TensorSpec.path`.
    """
    params: dict[str, Any] = {}
    for name, spec in specs.items():
        array = read(name)
        if array.shape != spec.shape:
            raise ValueError(f"tensor {name} was read as {list(array.shape)}, not {list(spec.shape)}")
        *parents, leaf = spec.path
        branch = params
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = _to_device(spec.to_param(array), dtype)
    return params


def _to_device(array: np.ndarray, dtype: str) -> jax.Array:
    # A copy, because on CPU JAX may otherwise keep using the memory-mapped file that the array points into.
    return jnp.array(np.asarray(array, dtype=jnp.dtype(dtype)), copy=True)
