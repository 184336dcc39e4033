"""Drafting from the target's features: whatever the head guesses, the text is that of plain decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from spec_jax.drafting.feature_drafter import FeatureDrafter
from spec_jax.drafting.heads import Eagle3Head, EagleHead, MtpHead
from spec_jax.drafting.tables import with_tables
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree
from spec_jax.generation import generate
from spec_jax.models.config import LlamaConfig
from spec_jax.models.packing import pack_params

CONFIG = LlamaConfig(97, 32, 64, 1, 4, 2, 8, 256)
HEADS = {
    "eagle": EagleHead(CONFIG, 32),
    "eagle3": Eagle3Head(
        dataclasses.replace(CONFIG, vocab_size=50), 32, (0, 1, 1),
        own_head=True, mapped=True, fc_norm="each", norm_output=True,
    ),
    "p-eagle": Eagle3Head(CONFIG, 32, (0, 1), mask_token=5, logit_scale=0.5),
    "mtp": MtpHead(CONFIG, 32, zero_first=True),
}  # fmt: skip
TREES = {"chain": None, "static tree": StaticTree((-1, -1, 0, 0, 1, 2)), "dynamic tree": DynamicTree(6, 2, 3)}
CASES = [(name, tree) for name in HEADS for tree in TREES if name != "p-eagle" or tree == "chain"]
PROMPTS = [[5, 6, 7, 8, 9], [3], [4, 4, 1]]
BUDGET = {"max_tokens": 20}


@functools.lru_cache
def target(packed):
    model = tiny.tiny()
    return tiny.packed(model) if packed else model


@functools.lru_cache
def plain(packed):
    return tiny.plain(target(packed), PROMPTS, BUDGET)


def random_params(head):
    rng = np.random.default_rng(1)

    def fill(path, shape):
        name = path[-1].key
        if name == "draft_ids":
            return jnp.asarray(np.sort(rng.permutation(97)[: shape[0]]), jnp.int32)
        if "norm" in name:
            return jnp.ones(shape)
        return jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, head.param_shapes(), is_leaf=lambda x: isinstance(x, tuple))


@functools.lru_cache
def run(name, tree, packed):
    head, params = HEADS[name], random_params(HEADS[name])
    if packed:
        head, params = dataclasses.replace(head, packed=True), pack_params(params)
    head, params = with_tables(head, params, target(packed))
    drafter = FeatureDrafter(4 if TREES[tree] is None else 6, head, 97, 97, tree=TREES[tree])
    return generate(target(packed), PROMPTS, None, BUDGET, drafter=(drafter, params))


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain layout", "packed"])
@pytest.mark.parametrize("name, tree", CASES)
def test_the_text_is_that_of_plain_decoding(name, tree, packed):
    result = run(name, tree, packed)
    assert [s.token_ids for s in result.sequences] == plain(packed)
    assert result.stats.num_draft_tokens > result.stats.num_drafts


@pytest.mark.slow
@pytest.mark.parametrize("name, tree", CASES)
def test_both_layouts_are_accepted_alike(name, tree):
    """A random head is seldom right, so this sees little; references of the proposals themselves are to come."""
    results = [run(name, tree, packed).stats for packed in (False, True)]
    counts = [(s.num_drafts, s.num_draft_tokens, s.num_accepted_tokens) for s in results]
    assert counts[0] == counts[1]
