"""Reads a Hugging Face folder: `config.json`, `*.safetensors` with or without an index, tokenizer, generation config.

Tied embeddings: the config's `tie_word_embeddings` decides. If it is true, a redundant `lm_head.weight` in the file is
not read; if it is false and the file has no head, that is an error rather than a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spec_jax.fields import get, get_ids, read_json
from spec_jax.models.config import from_hf_config, tensor_specs
from spec_jax.models.safetensors_files import FLOATS, SafetensorsFiles
from spec_jax.models.tensors import check_shapes, read_params
from spec_jax.tokenizer import Tokenizer, tokenizer_from_folder

SHARED_WITH = "spec_jax_shared_with"
"""Key of a draft model's config.json: the target whose embedding and output head it uses instead of its own."""
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_IGNORED = (".rotary_emb.inv_freq", ".self_attn.masked_bias")  # buffers of old versions, recomputed from the config
_MTP_PREFIXES = ("mtp.", "model.mtp_layers.")  # Qwen3-Next, MiMo
_MTP_MARK = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")  # DeepSeek: numbered behind the model's own layers


def mtp_tensors(names: Iterable[str]) -> set[str]:
    """Those of these tensors that belong to multi-token prediction modules: a drafter, not the model itself."""
    names = list(names)
    prefixes = _MTP_PREFIXES + tuple(found[1] for found in map(_MTP_MARK.fullmatch, names) if found)
    return {name for name in names if name.startswith(prefixes)}


class SafetensorsFolder:
    """One checkpoint folder. Raises ValueError if the config, the set of tensors or a file in it cannot be used.

    Modules for multi-token prediction in it are left to `spec_jax.drafting.checkpoints`.

    Attributes:
      config: the model's `LlamaConfig`.
      shared_with: name of the target whose embedding and output head a draft model uses; None: its own.
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
        self.shared_with = get(self._hf_config, SHARED_WITH, str)
        self._specs = tensor_specs(self.config)
        if self.shared_with is not None:
            self._specs = {name: spec for name, spec in self._specs.items() if name not in _TABLES}
        self._files = SafetensorsFiles(folder)
        self._modules = mtp_tensors(self._files.shapes)
        shapes = {name: shape for name, shape in self._files.shapes.items() if not self._skips(name)}
        problems = self._files.problems(shapes, FLOATS, self._skips)
        check_shapes(self._specs, shapes, str(folder), tuple(problems[:8]))

    def read_params(self, dtype: str) -> dict[str, Any]:
        """The parameter tree in `dtype`, without the tables of a model that shares them."""
        return read_params(self._specs, self._files.read, dtype)

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
        tied = name == "lm_head.weight" and self.config.tie_embeddings
        return name.endswith(_IGNORED) or tied or name in self._modules
