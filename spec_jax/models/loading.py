"""`load_model`: from a name to a `Model`."""

from __future__ import annotations

import warnings
from typing import Any

from spec_jax import hub
from spec_jax.models.gguf import GgufCheckpoint
from spec_jax.models.model import Model
from spec_jax.models.safetensors_folder import SafetensorsFolder
from spec_jax.models.tensors import DTYPES


def load_model(name: str, dtype: str = "float32", max_model_len: int | None = None, mesh: Any = None) -> Model:
    """Finds or fetches a checkpoint and loads it onto JAX's default device.

    Args:
      name: a built-in model (`spec-jax models` lists them), a Hugging Face folder, a .gguf file, or a Hugging Face
        repository id such as "HuggingFaceTB/SmolLM2-135M-Instruct" where `huggingface_hub` can reach it.
      dtype: "float32" or "bfloat16", for parameters and activations. Quantised GGUF weights are dequantised to it.
      max_model_len: longest prompt plus output; default and upper limit: the model's `max_position_embeddings`.
      mesh: must be None; loading onto several devices is not supported yet.

    Returns:
      A `Model`. Its `eos_token_ids` join config, generation config and tokenizer (see `Tokenizer.eos_token_ids`); its
      `tokenizer` is None where the checkpoint has none that can be used.

    Raises:
      ValueError: a bad argument, an unknown name or architecture, or a damaged or incomplete checkpoint.
      OSError: the checkpoint cannot be fetched or written to the cache folder.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    if max_model_len is not None and (type(max_model_len) is not int or max_model_len < 1):
        raise ValueError(f"max_model_len={max_model_len!r} must be a positive integer, or None for the model's limit")
    if mesh is not None:
        raise ValueError("mesh: loading a model onto a device mesh is not supported yet; leave mesh=None")
    path = hub.find_model(name)
    checkpoint = SafetensorsFolder(path) if path.is_dir() else GgufCheckpoint(path)
    config = checkpoint.config
    limit = config.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(f"max_model_len={max_model_len} exceeds max_position_embeddings={limit} of {name}")

    from spec_jax.models.llama import Llama

    tokenizer = checkpoint.read_tokenizer()
    vocab_size = config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, config.vocab_size)
    eos = set(checkpoint.eos_token_ids()) | set(() if tokenizer is None else tokenizer.eos_token_ids)
    outside = sorted(i for i in eos if not 0 <= i < vocab_size)
    if outside:
        message = f"{name}: end-of-text ids {outside} are outside the vocabulary of {vocab_size} and are ignored"
        warnings.warn(message, stacklevel=2)
    return Model(
        module=Llama(config, dtype),
        params=checkpoint.read_params(dtype),
        tokenizer=tokenizer,
        eos_token_ids=tuple(sorted(eos - set(outside))),
        name=str(name),
        max_model_len=max_model_len or limit,
        vocab_size=vocab_size,
    )
