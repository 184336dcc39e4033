"""Reads a Hugging Face folder: `config.json`, `*.safetensors` with or without an index, tokenizer, generation config.

Tied embeddings: the config's `tie_word_embeddings` decides. If it is true, a redundant `lm_head.weight` in the file is
not read; if it is false and the file has no head, that is an error rather than a guess.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.fields import get, get_ids, read_json, wrong
from spec_jax.models.config import from_hf_config, tensor_specs
from spec_jax.models.tensors import check_shapes, read_params
from spec_jax.tokenizer import Tokenizer, tokenizer_from_folder

INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16", "F64")
_IGNORED = (".rotary_emb.inv_freq", ".self_attn.masked_bias")  # buffers of old versions, recomputed from the config


class SafetensorsFolder:
    """One checkpoint folder. Raises ValueError if the config, the set of tensors or a file in it cannot be used.

    Attributes:
      config: the model's `LlamaConfig`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} has no config.json; give a Hugging Face checkpoint folder or a .gguf file")
        self._hf_config = read_json(folder / "config.json")
        quantisation = get(self._hf_config, "quantization_config", dict, where=str(folder / "config.json"))
        if quantisation:
            method = quantisation.get("quant_method", "unknown")
            fix = "use the unquantised checkpoint or a GGUF file"
            raise ValueError(f"{folder} is quantised (quant_method={method!r:.80}), which is not supported; {fix}")
        try:
            self.config = from_hf_config(self._hf_config)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None
        files, problems, promised = _files(folder)
        self._handles: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, str] = {}
        for file in files:
            handle = _open(file)
            for name in handle.keys():
                if self._skips(name):
                    continue
                if name in shapes:
                    problems.append(f"{name} is in more than one file")
                self._handles[name] = handle
                view = handle.get_slice(name)
                shapes[name], self._types[name] = tuple(view.get_shape()), view.get_dtype()
                if self._types[name] not in _FLOATS:
                    problems.append(f"{name} has the type {self._types[name]}, not one of {', '.join(_FLOATS)}")
        lost = [
            f"{name} (in {file})" for name, file in promised.items() if name not in shapes and not self._skips(name)
        ]
        if lost:
            problems.append(f"named by {INDEX} but not in its file ({len(lost)}): {', '.join(lost[:8])}")
        check_shapes(tensor_specs(self.config), shapes, str(folder), tuple(problems[:8]))

    def read_params(self, dtype: str) -> dict[str, Any]:
        """The parameter tree in `dtype`."""
        return read_params(tensor_specs(self.config), self._read, dtype)

    def read_tokenizer(self) -> Tokenizer | None:
        """None if the folder has no `tokenizer.json`."""
        return tokenizer_from_folder(self.folder)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The `eos_token_id` entries (an int or a list) of `config.json` and `generation_config.json`, joined."""
        ids = get_ids(self._hf_config, "eos_token_id", where=str(self.folder / "config.json"))
        generation = self.folder / "generation_config.json"
        if generation.exists():
            ids += get_ids(read_json(generation), "eos_token_id", where=str(generation))
        return tuple(sorted(set(ids)))

    def _skips(self, name: str) -> bool:
        return name.endswith(_IGNORED) or (name == "lm_head.weight" and self.config.tie_embeddings)

    def _read(self, name: str) -> np.ndarray:
        return self._handles[name].get_tensor(name)


def _files(folder: Path) -> tuple[list[Path], list[str], dict[str, str]]:
    """Weight files to open, problems found on the way, and the index's map from tensor to file name."""
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
        return [folder / name for name in names], [], promised
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
    return files, [], {}


def _open(path: Path):
    try:
        return safe_open(str(path), framework="np")
    except SafetensorError as error:
        size = path.stat().st_size
        found = f"{size} bytes; {error}"
        raise ValueError(f"{path} is truncated or not a safetensors file ({found}); fetch it again") from None
