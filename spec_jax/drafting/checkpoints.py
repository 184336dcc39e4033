"""Reads learned drafters: a folder as published or exported, or a target's own folder with MTP modules in it.

Everything is checked before a weight is read: names and shapes against the config, the config against the target.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import hub
from spec_jax.checks import nearest
from spec_jax.drafting.heads import Head, MedusaHead
from spec_jax.drafting.layout_base import Layout
from spec_jax.drafting.layouts import find_layout
from spec_jax.drafting.torch_file import TorchFile
from spec_jax.fields import read_json
from spec_jax.models.config import TensorSpec
from spec_jax.models.layers import RowBlocks, embed
from spec_jax.models.loading import load_model
from spec_jax.models.model import Model
from spec_jax.models.packing import pack_params
from spec_jax.models.safetensors_files import FLOATS, SafetensorsFiles
from spec_jax.models.safetensors_folder import SHARED_WITH, SafetensorsFolder
from spec_jax.models.tensors import DTYPES, check_shapes, read_params

BUILT_IN = Path(__file__).parent.parent / "data" / "drafters"
"""One folder for each drafter that is known by name; its README.md is its model card."""
_TORCH_FILES = ("pytorch_model.bin", "medusa_lm_head.pt")
_INTEGERS = ("I64", "I32", "BOOL", "U8")


def known_drafters() -> list[str]:
    """The names of the drafters that come with the package."""
    return sorted(path.parent.name for path in BUILT_IN.glob("*/config.json"))


def find_drafter(name: str | os.PathLike[str]) -> Path:
    """The folder of a drafter: one known by name, an existing folder, or a Hugging Face repository id.

    Raises ValueError for anything else, naming what is known.
    """
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise ValueError(f"model={name!r:.80} must be the name of a drafter or its folder")
    known = known_drafters()
    if os.fspath(name) in known:
        return BUILT_IN / os.fspath(name)
    folder = hub.find_folder(name)
    if folder is None:
        listed = ", ".join(known) if known else "none in this installation"
        raise ValueError(
            f"unknown drafter {os.fspath(name)!r}{nearest(os.fspath(name), known)}; known by name: {listed}; else give "
            f"its folder or a Hugging Face repository id"
        )
    return folder


def read_drafter(
    name: str | os.PathLike[str], target: Model, dtype: str | None = None, packed: bool | None = None
) -> tuple[Head, dict[str, Any], str]:
    """Reads a drafter for a target.

    Args:
      name: see `find_drafter`; for MTP modules the folder that the target was loaded from.
      target: the model that it drafts for.
      dtype: "float32" or "bfloat16"; None: the target's.
      packed: pack the weights for the CPU kernels; None: where the target's are.

    Returns:
      The description, the parameters in its layout, and what is worth saying about it in one line, or nothing.

    Raises:
      ValueError: no such drafter, a damaged or incomplete one, an unsupported one, or one for another target.
    """
    return DrafterFolder(find_drafter(name), target).read(dtype, packed)


class DrafterFolder:
    """A drafter on disk and the target that it is for. Raises ValueError if it cannot be used.

    Attributes:
      layout: what is in the folder.
      remark: what is worth saying, in one line; empty: nothing.
    """

    def __init__(self, folder: Path, target: Model):
        self.folder, self._target = folder, target
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} has no config.json; give the folder of a drafter")
        config = read_json(folder / "config.json")
        if config.get("quantization_config"):
            raise ValueError(f"{folder} is quantised, which is not supported; use the unquantised drafter")
        self._files = _open(folder)
        try:
            layout = find_layout(config, self._files.shapes, target)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        self.layout = layout
        check_shapes(layout.specs | self._other_specs(), layout.shapes, str(folder), self._problems())
        self.remark = "; ".join((*layout.notes, *_borrowed(layout, target.name)))

    def read(self, dtype: str | None = None, packed: bool | None = None) -> tuple[Head, dict[str, Any], str]:
        """The description, the parameters and the remark; see `read_drafter`."""
        dtype = self._target.module.dtype if dtype is None else dtype
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        packed = self._target.module.packed if packed is None else packed
        for name, other in self.layout.copies.items():
            if not np.array_equal(self._read(name), self._read(other)):
                raise ValueError(f"{self.folder}: {name} differs from {other}, which it must be a copy of")
        params = read_params(self.layout.specs, self._read, dtype)
        ids = self._draft_ids()
        if self.layout.draft_ids is not None:
            params["draft_ids"] = jnp.asarray(ids, jnp.int32)
        if self.layout.target_rows:
            params["lm_head"] = _head_rows(self._target, ids).astype(dtype)
        head = dataclasses.replace(self.layout.head, dtype=dtype, packed=packed)
        return head, pack_params(params) if packed else params, self.remark

    def _read(self, name: str) -> np.ndarray:
        return self._files.read(self._in_file(name))

    def _in_file(self, name: str) -> str:
        """A tensor's name there: some exporters put a prefix in front of it."""
        return name if name in self._files.shapes else f"model.{name}"

    def _other_specs(self) -> dict[str, TensorSpec]:
        """Of the tensors that are no weights: tables of ids, and copies."""
        layout, found = self.layout, {}
        if layout.draft_ids is not None:
            found[layout.draft_ids] = TensorSpec((), (layout.head.config.vocab_size,))
        if layout.member is not None:  # as long as the publisher's vocabulary, padded as it likes
            found[layout.member] = TensorSpec((), tuple(layout.shapes[layout.member][:1]))
        return found | {name: TensorSpec((), layout.specs[other].shape) for name, other in layout.copies.items()}

    def _problems(self) -> list[str]:
        """Tensors of the wrong type."""
        layout = self.layout
        tables, weights = (
            [self._in_file(name) for name in names if name in layout.shapes]
            for names in ((layout.draft_ids, layout.member), (*layout.specs, *layout.copies))
        )
        ours = {*tables, *weights}
        found = self._files.problems(weights, FLOATS, lambda name: name not in ours)
        return found + self._files.problems(tables, _INTEGERS, lambda name: True)

    def _draft_ids(self) -> np.ndarray:
        """The target's id of every row of the output head, checked, also against the table of members."""
        layout, rows = self.layout, self._target.config.vocab_size
        ids = np.arange(layout.head.config.vocab_size)
        if layout.draft_ids is not None:
            table = self._read(layout.draft_ids).astype(np.int64)
            ids = ids + table if layout.offsets else table
            outside = np.flatnonzero((ids < 0) | (ids >= rows))
            if outside.size:
                first = outside[0]
                hint = f" ({first} + {table[first]}: the table holds offsets)" if layout.offsets else ""
                raise ValueError(
                    f"{self.folder}: {layout.draft_ids} gives draft token {first} the id {ids[first]}{hint}; the ids "
                    f"of {self._target.name} are 0..{rows - 1}"
                )
            values, counts = np.unique(ids, return_counts=True)
            if (counts > 1).any():
                raise ValueError(f"{self.folder}: {layout.draft_ids} names the id {values[counts > 1][0]} twice")
        if layout.member is not None:
            members = np.flatnonzero(self._read(layout.member))
            different = np.setxor1d(members, ids)
            if different.size:
                table = layout.draft_ids or "the output head"
                has, lacks = (layout.member, table) if different[0] in members else (table, layout.member)
                raise ValueError(
                    f"{self.folder}: {layout.member} and {table} disagree on {different.size} ids; {has} has "
                    f"{different[0]} and {lacks} does not"
                )
        return ids


def _open(folder: Path) -> SafetensorsFiles | TorchFile:
    """The tensors of a folder; *.safetensors come first, as nothing in them can be run."""
    torch = next((folder / name for name in _TORCH_FILES if (folder / name).is_file()), None)
    return SafetensorsFiles(folder) if torch is None or any(folder.glob("*.safetensors")) else TorchFile(torch)


def _head_rows(target: Model, ids: np.ndarray) -> jax.Array:
    """The rows of the target's output head, [ids, hidden]."""
    table = target.params[target.config.head_table]
    return embed(jnp.asarray(ids), table, RowBlocks(independent=target.module.packed))


def _borrowed(layout: Layout, target: str) -> tuple[str, ...]:
    """Which tables of the target the drafter uses."""
    head = layout.head
    tables = {
        "embedding": head.own_embedding or isinstance(head, MedusaHead),
        "output head": head.own_head and not layout.target_rows,
    }
    missing = [name for name, own in tables.items() if not own]
    return (f"uses the {' and the '.join(missing)} of {target}",) if missing else ()


def read_draft_model(name: str | os.PathLike[str], target: Model) -> Model:
    """A draft model by the name of a built-in drafter or as `load_model` finds it, in the target's dtype and layout.

    One without tables of its own (`spec_jax_shared_with` in its config.json) uses those of the target, which must be
    the model that it was trained for; its tokenizer and ends of text are the target's then.
    """
    path = BUILT_IN / name if name in known_drafters() else name
    config = Path(path) / "config.json"
    if not config.is_file() or SHARED_WITH not in read_json(config):
        return load_model(path, dtype=target.module.dtype)
    checkpoint = SafetensorsFolder(Path(path))
    ours, theirs = checkpoint.config, target.config
    for field in ("vocab_size", "hidden_size", "tie_embeddings"):
        if getattr(ours, field) != getattr(theirs, field):
            raise ValueError(
                f"{name} uses the embedding of {checkpoint.shared_with}, and its {field} is {getattr(ours, field)}, "
                f"not the {getattr(theirs, field)} of {target.name}; use it with the target that it was trained for"
            )
    params = checkpoint.read_params(target.module.dtype)
    params = pack_params(params) if target.module.packed else params
    params |= {table: target.params[table] for table in ("embedding", "lm_head") if table in target.params}
    return Model(
        module=target.module.clone(config=ours),
        params=params,
        tokenizer=target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        name=os.fspath(name),
        max_model_len=ours.max_position_embeddings,
        vocab_size=target.vocab_size,
    )
