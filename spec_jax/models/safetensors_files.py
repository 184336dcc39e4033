"""The tensors in all *.safetensors files of one folder, by name.

int8 tensors with a `NAME_scale` beside them, one number per row, are read as the floats that they stand for: how
spec_jax stores drafters compactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.fields import get, read_json, wrong

INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16", "F64")
SCALE = "_scale"
"""Behind the name of an int8 tensor: its scales, float [rows] or [rows, 1]."""


class SafetensorsFiles:
    """Opens the files; tensors are read one at a time, when they are asked for.

    Attributes:
      shapes: of every tensor but the scales.

    Raises ValueError for a damaged or missing file.
    """

    def __init__(self, folder: Path):
        files, self._promised = weight_files(folder)
        self._handles: dict[str, Any] = {}
        self._types: dict[str, str] = {}
        self._twice: list[str] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            handle = _open(file)
            for name in handle.keys():
                if name in shapes:
                    self._twice.append(name)
                self._handles[name] = handle
                view = handle.get_slice(name)
                shapes[name], self._types[name] = tuple(view.get_shape()), view.get_dtype()
        self._scaled = {name for name in shapes if self._types[name] == "I8" and f"{name}{SCALE}" in shapes}
        self._scales = {name: shapes.pop(f"{name}{SCALE}") for name in self._scaled}
        self.shapes = shapes

    def problems(
        self, names: Collection[str], types: Collection[str], skips: Callable[[str], bool] = lambda name: False
    ) -> list[str]:
        """What is wrong with the tensors `names`, which must be of one of `types`; those that it skips may be lost."""
        found = [f"{name} is in more than one file" for name in self._twice if not skips(name)]
        for name in names:
            if name in self._scaled:
                rows, scales = self.shapes[name][:1], self._scales[name]
                if len(self.shapes[name]) != 2 or scales not in (rows, (*rows, 1)):
                    found.append(f"{name}{SCALE} is {list(scales)}, which does not fit {list(self.shapes[name])}")
                elif self._types[f"{name}{SCALE}"] not in FLOATS:
                    found.append(f"{name}{SCALE} has the type {self._types[f'{name}{SCALE}']}")
            elif self._types[name] not in types:
                found.append(f"{name} has the type {self._types[name]}, not one of {', '.join(types)}")
        absent = [name for name in self._promised if name not in self._handles and not skips(name)]
        lost = [f"{name} (in {self._promised[name]})" for name in absent]
        if lost:
            found.append(f"named by {INDEX} but not in its file ({len(lost)}): {', '.join(lost[:8])}")
        return found

    def read(self, name: str) -> np.ndarray:
        """One tensor in the dtype it is stored in, float32 where it has scales."""
        array = self._handles[name].get_tensor(name)
        if name not in self._scaled:
            return array
        scales = self._handles[f"{name}{SCALE}"].get_tensor(f"{name}{SCALE}")
        return array.astype(np.float32) * scales.astype(np.float32).reshape(-1, 1)


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Weight files to open, and the index's map from tensor to file name."""
    index = folder / INDEX
    if index.exists():
        promised = get(read_json(index), "weight_map", dict, where=str(index))
        if not promised:
            raise ValueError(f"{index} has no weight_map")
        for tensor, file in promised.items():
            if not isinstance(file, str):
                raise wrong(f"weight_map[{tensor!r}]", file, "the name of a file", str(index))
        names = sorted(set(promised.values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            listed = ", ".join(absent[:8])
            raise ValueError(f"{index} names {len(absent)} missing file(s): {listed}; fetch the checkpoint again")
        return [folder / name for name in names], promised
    # Some folders hold the weights a second time in another layout (consolidated.safetensors), so "model" comes first.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pth")])
        found = f"only {', '.join(others[:4])}, which can run code when loaded" if others else "no weights at all"
        raise ValueError(
            f"{folder} has no *.safetensors file ({found}); fetch or convert the checkpoint in that format"
        )
    if (folder / "model.safetensors") in files:
        files = [folder / "model.safetensors"]
    return files, {}


def _open(path: Path):
    try:
        return safe_open(str(path), framework="np")
    except SafetensorError as error:
        size = path.stat().st_size
        found = f"{size} bytes; {error}"
        raise ValueError(f"{path} is truncated or not a safetensors file ({found}); fetch it again") from None
