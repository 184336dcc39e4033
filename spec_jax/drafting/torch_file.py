"""Reads the tensors of a PyTorch checkpoint (`.pt`, `.bin`) without PyTorch and without running what is in it.

The file is a zip archive: a pickle of a dict of tensors, whose numbers lie in one file per storage. A pickle can name
any function to be called; here it may name an `OrderedDict`, the types of storages and the function that says which
part of a storage a tensor is, and nothing else. Tensors are read one at a time, when they are asked for.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import pickle
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

STORAGES = {
    "FloatStorage": ("F32", np.float32),
    "DoubleStorage": ("F64", np.float64),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", ml_dtypes.bfloat16),
    "LongStorage": ("I64", np.int64),
    "IntStorage": ("I32", np.int32),
    "ShortStorage": ("I16", np.int16),
    "CharStorage": ("I8", np.int8),
    "ByteStorage": ("U8", np.uint8),
    "BoolStorage": ("BOOL", np.bool_),
}
"""The types of storages in PyTorch's files: what safetensors calls the same numbers, and NumPy's type."""
MAX_AXES = 8
_MAX_PICKLE = 64 << 20  # names and shapes of tensors take far less


@dataclasses.dataclass(frozen=True)
class _Part:
    """A tensor as the pickle describes it: a strided part of one storage. Counts are in elements."""

    storage: str
    kind: str
    dtype: np.dtype
    storage_size: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """One checkpoint file. Raises ValueError if it is damaged, holds anything but tensors or asks to run code.

    Attributes:
      shapes: of every tensor, by name.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise ValueError(
                f"{path} is truncated or not a file of PyTorch 1.6 or later, which are zip archives; fetch it again, "
                f"or load it with PyTorch and save it anew"
            ) from None
        self._parts = self._read_index()
        self.shapes = {name: part.shape for name, part in self._parts.items()}

    def problems(
        self, names: Collection[str], types: Collection[str], skips: Callable[[str], bool] = lambda name: False
    ) -> list[str]:
        """What is wrong with the tensors `names`, which must be of one of `types`; see `SafetensorsFiles`."""
        kinds = {name: self._parts[name].kind for name in names}
        return [
            f"{name} has the type {kind}, not one of {', '.join(types)}"
            for name, kind in kinds.items()
            if kind not in types
        ]

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype it is stored in."""
        part = self._parts[name]
        data = self._member(f"data/{part.storage}")
        if len(data) != part.storage_size * part.dtype.itemsize:
            raise ValueError(
                f"{self.path}: the storage of {name} has {len(data)} bytes, not {part.storage_size} numbers of "
                f"{part.dtype}; fetch it again"
            )
        numbers = np.frombuffer(data, part.dtype)[part.offset :]
        strides = [stride * part.dtype.itemsize for stride in part.strides]
        return np.lib.stride_tricks.as_strided(numbers, part.shape, strides, writeable=False)

    def _read_index(self) -> dict[str, _Part]:
        tops = {name.partition("/")[0] for name in self._archive.namelist() if name.endswith("/data.pkl")}
        if len(tops) != 1:
            raise ValueError(f"{self.path} has no single data.pkl, which PyTorch's files have; fetch it again")
        self._top = tops.pop()
        if f"{self._top}/byteorder" in self._archive.namelist() and self._member("byteorder") != b"little":
            raise ValueError(f"{self.path} was not written on a little-endian machine, which is not supported")
        if self._archive.getinfo(f"{self._top}/data.pkl").file_size > _MAX_PICKLE:
            raise ValueError(f"{self.path}: its data.pkl has more than {_MAX_PICKLE >> 20} MiB; is the file damaged?")
        try:
            found = _Unpickler(io.BytesIO(self._member("data.pkl")), str(self.path)).load()
        except _Refused as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # a damaged pickle ends in any of a dozen types, MemoryError too
            raise ValueError(f"{self.path}: its data.pkl is damaged ({type(error).__name__}); fetch it again") from None
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} holds a {type(found).__name__}, not a dict of tensors; save a state_dict")
        # Methods of the type: a pickle may set attributes of the dict.
        return {name: self._checked(name, entry) for name, entry in dict.items(found)}

    def _checked(self, name: Any, entry: Any) -> _Part:
        """An entry of the dict, whose every part is what the pickle says until here."""
        if not isinstance(name, str) or not isinstance(entry, tuple) or entry[:1] != (_TENSOR,):
            known = f"{name!r:.80}" if isinstance(name, str) else f"of a {type(name).__name__}"
            raise ValueError(
                f"{self.path}: the entry {known} is a {type(entry).__name__}; only tensors with names are supported: "
                f"save the state_dict alone"
            )
        damaged = ValueError(f"{self.path}: {name} is not described as a tensor of PyTorch is; is the file damaged?")
        try:
            _, (_, dtype, key, _, size), offset, shape, strides = entry
            counts = (size, offset, *shape, *strides)
        except (TypeError, ValueError):
            raise damaged from None
        if not (isinstance(key, str) and isinstance(dtype, str) and dtype in STORAGES and all(map(_is_count, counts))):
            raise damaged
        if len(shape) != len(strides) or len(shape) > MAX_AXES:
            raise damaged
        end = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if (end if math.prod(shape) else offset) > size:
            raise ValueError(
                f"{self.path}: {name}, of shape {list(shape)} and strides {list(strides)} from number {offset} on, "
                f"ends beyond its storage of {size} numbers; is the file damaged?"
            )
        kind, number = STORAGES[dtype]
        return _Part(key, kind, np.dtype(number), size, offset, tuple(shape), tuple(strides))

    def _member(self, name: str) -> bytes:
        try:
            info = self._archive.getinfo(f"{self._top}/{name}")
            if info.compress_type != zipfile.ZIP_STORED:  # PyTorch never does, and a small file could fill the memory
                raise ValueError(f"{self.path}: {name} is compressed, which PyTorch's files are not")
            return self._archive.read(info)
        except KeyError:
            raise ValueError(f"{self.path} lacks {name}; fetch it again") from None
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as error:
            raise ValueError(f"{self.path}: {name} is damaged ({error}); fetch it again") from None


class _Refused(Exception):
    """What the pickle asks for is understood and not allowed."""


_TENSOR = "tensor"


class _Rebuild:
    """Stands for a function of PyTorch that makes a tensor. Without a `__dict__` that a pickle could write to."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError


class _RebuildTensor(_Rebuild):
    __slots__ = ()

    def __call__(self, storage, offset, shape, strides, *_):
        return _TENSOR, storage, offset, shape, strides


class _RebuildParameter(_Rebuild):
    __slots__ = ()

    def __call__(self, tensor, *_):
        return tensor


class _Unpickler(pickle.Unpickler):
    """Rebuilds dicts of descriptions, of plain tuples, strings and integers, none of which have been checked yet.

    Every name that the pickle uses is looked up here and nowhere else.
    """

    def __init__(self, file: io.BytesIO, where: str):
        super().__init__(file)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _RebuildTensor()
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _RebuildParameter()
        if module == "torch" and name in STORAGES:
            return name
        raise _Refused(
            f"{self._where} asks for {module}.{name}, which is not allowed: only tensors of ordinary types are read, "
            f"as files can run code otherwise. Save the state_dict alone, or convert it to safetensors"
        )

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
