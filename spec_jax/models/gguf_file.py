"""The GGUF container: metadata and tensor table (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The header is parsed here instead of with `gguf.GGUFReader`, which takes seconds on a vocabulary of 50,000 tokens (a
NumPy view per string) and reports a truncated file or an unknown tensor type without naming the tensor. Block formats
and dequantisation come from the `gguf` package.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is in NumPy order (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the file


class GgufFile:
    """A memory-mapped .gguf file.

    Attributes:
      path: the file.
      metadata: key to int, float, bool, str or list of those.
      tensors: name to `GgufTensor`.

    Raises ValueError if the file is not GGUF, is truncated, or is of a version that cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with open(path, "rb") as file:
            head = file.read(8)
            if head[:4] != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file: it starts with {head[:4]!r}, not b'GGUF'")
            if len(head) < 8:
                raise self._truncated("before the version number")
            (version,) = struct.unpack("<I", head[4:])
            if version not in _VERSIONS:
                raise ValueError(f"{path} has GGUF version {version}; little-endian versions 2 and 3 can be read")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 8
        try:
            self._read_header()
        except struct.error:
            raise self._truncated("in the header") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged: its header holds text that is not UTF-8 ({error})") from None

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as float32, in the shape of its table entry.

        Raises ValueError naming tensor and type if the type cannot be dequantised.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        tensor = self.tensors[name]
        subject = f"tensor {name} in {self.path} has"
        try:
            kind = GGMLQuantizationType(tensor.type_id)
        except ValueError:
            raise ValueError(f"{subject} the unknown GGML type {tensor.type_id}{_TYPE_FIX}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row = tensor.shape[-1] if tensor.shape else 1
        if row % block:
            raise ValueError(f"{subject} rows of {row} values, which is not a multiple of {kind.name}'s {block}")
        rows = math.prod(tensor.shape[:-1])  # in Python: sizes of a damaged file overflow 64 bits
        size = rows * (row // block) * block_bytes
        if tensor.offset + size > len(self._data):
            raise self._truncated(f"in tensor {name}")
        raw = np.frombuffer(self._data, np.uint8, count=size, offset=tensor.offset)
        try:
            values = quants.dequantize(raw.reshape(rows, -1), kind)
        except NotImplementedError:
            raise ValueError(f"{subject} the type {kind.name}, which cannot be dequantised{_TYPE_FIX}") from None
        return np.asarray(values, np.float32).reshape(tensor.shape)

    def _truncated(self, where: str) -> ValueError:
        size = self.path.stat().st_size
        return ValueError(f"{self.path} ends {where}: the file is truncated ({size} bytes); fetch it again")

    def _read_header(self):
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        table = []
        for _ in range(tensor_count):
            name = self._string()
            dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
            table.append((name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path} is damaged: general.alignment is {alignment!r}, not a positive integer")
        start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in table:
            self.tensors[name] = GgufTensor(name, shape, type_id, start + offset)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        raw = self._data[self._at : self._at + size]
        if len(raw) != size:
            raise struct.error
        self._at += size
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"{self.path} is damaged: metadata type {kind} at byte {self._at} is not a GGUF type")
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _ARRAY:  # no known key has them, and a few bytes a level could exhaust the stack
            raise ValueError(
                f"{self.path}: the metadata at byte {self._at} is an array of arrays, which is not supported"
            )
        if item not in _SCALARS:
            return [self._value(item) for _ in range(count)]
        code = _SCALARS[item]
        size = count * struct.calcsize(f"<{code}")
        if self._at + size > len(self._data):  # before a huge count becomes a huge format
            raise struct.error
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += size
        return list(values)


_TYPE_FIX = "; convert the model to F32, F16, BF16, Q8_0 or another type of the gguf package"
