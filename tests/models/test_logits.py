"""Logits against transformers on the same weights."""

import functools
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
import toy_checkpoints as toy

from spec_jax import load_model
from spec_jax.cache import init_cache
from spec_jax.kernels.masks import chain_ancestors
from spec_jax.models.layers import RowBlocks

GOLDENS = Path(__file__).parent.parent / "goldens"
TOLERANCE = 1e-4


@functools.cache
def goldens_module():
    spec = importlib.util.spec_from_file_location("make_llama_goldens", GOLDENS / "make_llama_goldens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits_of(model, ids) -> np.ndarray:
    """float32 [batch, width, vocab] of one pass over `ids` [batch, width]."""
    batch, width = ids.shape
    cache = init_cache(model.config, batch, width, model.module.dtype)
    depth, ancestors = np.arange(width, dtype=np.int32), chain_ancestors(width)

    @jax.jit
    def run(params, tokens, cache):
        output = model.module.apply(
            {"params": params}, tokens, cache, depth=depth, ancestors=ancestors, rows=RowBlocks()
        )
        return output.logits

    return np.asarray(run(model.params, ids.astype(np.int32), cache))


@pytest.mark.parametrize("family", toy.FAMILIES)
def test_logits_agree_with_transformers(family, tmp_path):
    hf_config = toy.FAMILIES[family]
    tensors = toy.random_tensors(hf_config)
    folder = load_model(str(toy.write_folder(tmp_path / "folder", hf_config, tensors)))

    module = goldens_module()
    expected = np.load(GOLDENS / "llama_logits.npz")[family]
    ids = module.input_ids()
    ours = logits_of(folder, ids)
    np.testing.assert_allclose(ours[:, -module.KEPT :], expected, atol=TOLERANCE, rtol=0)
    if family == "llama-llama3-rope":  # the one family whose GGUF config is stated in another way
        gguf = load_model(str(toy.write_gguf(tmp_path / "model.gguf", hf_config, tensors)))
        np.testing.assert_allclose(logits_of(gguf, ids), ours, atol=1e-5, rtol=0)


def test_a_dropped_rope_scaling_would_be_seen(tmp_path):
    """The goldens stand beyond the original context, so ignoring the scaling must miss them clearly."""
    module, stored = goldens_module(), np.load(GOLDENS / "llama_logits.npz")
    for family in ("llama-llama3-rope", "llama-linear-rope", "qwen2-yarn-rope"):
        hf_config = toy.FAMILIES[family]
        tensors = toy.random_tensors(hf_config)
        plain = load_model(str(toy.write_folder(tmp_path / family, hf_config | {"rope_scaling": None}, tensors)))
        ours = logits_of(plain, module.input_ids())[:, -module.KEPT :]
        assert np.abs(ours - stored[family]).max() > 100 * TOLERANCE, family


@pytest.mark.slow
@pytest.mark.parametrize("family", toy.FAMILIES)
def test_live_transformers(family, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    hf_config = toy.FAMILIES[family]
    folder = toy.write_folder(tmp_path / "folder", hf_config, toy.random_tensors(hf_config, seed=3))
    ids = goldens_module().input_ids()
    expected = goldens_module().transformers_logits(folder, ids)
    np.testing.assert_allclose(logits_of(load_model(str(folder)), ids), expected, atol=TOLERANCE, rtol=0)
