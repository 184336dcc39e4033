"""Writes llama_logits.npz: logits of `transformers` for the tiny checkpoints of tests/models/toy_checkpoints.py.

Needs torch and transformers (`pip install spec_jax[peers]`):

    python tests/goldens/make_llama_goldens.py

The logits are those of the last 8 of 40 positions, which lie beyond the original context (16) of the scaled rotary
embeddings.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))

import toy_checkpoints as toy  # noqa: E402

TOKENS, KEPT = 40, 8


def input_ids() -> np.ndarray:
    """int64 [2, TOKENS], the same for every family."""
    return np.random.RandomState(7).randint(0, 96, size=(2, TOKENS))


def transformers_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    """float32 [2, TOKENS, vocab] of the checkpoint in `folder`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def main():
    ids, goldens = input_ids(), {}
    for family, hf_config in toy.FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            toy.write_folder(Path(folder), hf_config, toy.random_tensors(hf_config))
            goldens[family] = transformers_logits(Path(folder), ids)[:, -KEPT:]
    np.savez_compressed(HERE / "llama_logits.npz", **goldens)


if __name__ == "__main__":
    main()
