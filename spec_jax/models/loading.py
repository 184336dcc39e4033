"""`load_model`: from a name to a `Model`."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spec_jax import hub
from spec_jax.models.gguf import GgufCheckpoint
from spec_jax.models.model import Model
from spec_jax.models.safetensors_folder import SafetensorsFolder
from spec_jax.models.tensors import DTYPES


def load_model(
    name: str,
    dtype: str = "float32",
    max_model_len: int | None = None,
    mesh: Any = None,
    cpu_kernels: bool | None = None,
) -> Model:
    """Finds or fetches a checkpoint and loads it onto JAX's default device.

    Args:
      name: a built-in model (`spec-jax models` lists them), a Hugging Face folder, a .gguf file, or a Hugging Face
        repository id such as "HuggingFaceTB/SmolLM2-135M-Instruct" where `huggingface_hub` can reach it.
      dtype: "float32" or "bfloat16", for parameters and activations. Quantised GGUF weights are dequantised to it.
      max_model_len: longest prompt plus output; default and upper limit: the model's `max_position_embeddings`.
      mesh: must be None; loading onto several devices is not supported yet.
      cpu_kernels: pack the weights for spec_jax's own CPU kernels. None: where they can be compiled and the default
        device is a CPU. False keeps the plain layout and XLA alone, for a model that is to be differentiated, exported
        or moved to other devices.

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
    if cpu_kernels is not None and not isinstance(cpu_kernels, bool):
        raise ValueError(f"cpu_kernels={cpu_kernels!r} must be True, False or None")
    if mesh is not None:
        raise ValueError("mesh: loading a model onto a device mesh is not supported yet; leave mesh=None")
    path = hub.find_model(name)
    checkpoint = SafetensorsFolder(path) if path.is_dir() else GgufCheckpoint(path)
    if getattr(checkpoint, "shared_with", None) is not None:
        raise ValueError(
            f"{name} is a draft model that uses the embedding of {checkpoint.shared_with}; it has none of its own: use "
            f"it with that target, as the model of the method draft_model"
        )
    config = checkpoint.config
    limit = config.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(f"max_model_len={max_model_len} exceeds max_position_embeddings={limit} of {name}")

    from spec_jax.kernels import cpu
    from spec_jax.models.llama import Llama
    from spec_jax.models.packing import pack_params

    tokenizer = checkpoint.read_tokenizer()
    vocab_size = config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, config.vocab_size)
    eos = set(checkpoint.eos_token_ids()) | set(() if tokenizer is None else tokenizer.eos_token_ids)
    outside = sorted(i for i in eos if not 0 <= i < vocab_size)
    if outside:
        message = f"{name}: end-of-text ids {outside} are outside the vocabulary of {vocab_size} and are ignored"
        warnings.warn(message, stacklevel=2)
    with ThreadPoolExecutor(1) as other:  # the first load on a machine compiles the kernels meanwhile
        missing = None if cpu_kernels is False else other.submit(cpu.unavailable)
        params = checkpoint.read_params(dtype)
    reason = None if missing is None else missing.result()
    if cpu_kernels and reason is not None:
        raise ValueError(f"cpu_kernels=True cannot be had: {reason}; leave it out to use XLA's products instead")
    packed = cpu_kernels is not False and reason is None
    if reason is not None and reason.startswith(cpu.FAILED):
        warnings.warn(f"the CPU kernels are not used, XLA's slower products are: {reason}", stacklevel=2)
    return Model(
        module=Llama(config, dtype, packed),
        params=pack_params(params) if packed else params,
        tokenizer=tokenizer,
        eos_token_ids=tuple(sorted(eos - set(outside))),
        name=str(name),
        max_model_len=max_model_len or limit,
        vocab_size=vocab_size,
    )
