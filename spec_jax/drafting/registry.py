"""From a `SpeculativeConfig` to a drafter and its parameters, with every mismatch refused before any weight is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from spec_jax.config import DYNAMIC_TREES, SpeculativeConfig
from spec_jax.datastore import load_datastore
from spec_jax.drafting.base import NoDrafter
from spec_jax.drafting.cascade import CascadeDrafter
from spec_jax.drafting.draft_model import DraftModelDrafter
from spec_jax.drafting.hybrid import HybridDrafter
from spec_jax.drafting.jacobi import JacobiDrafter
from spec_jax.drafting.layer_skip import LayerSkipDrafter
from spec_jax.drafting.lookahead import LookaheadDrafter
from spec_jax.drafting.ngram import NGramDrafter
from spec_jax.drafting.oracle import OracleDrafter, recorded
from spec_jax.drafting.recycling import RecyclingDrafter
from spec_jax.drafting.rest import RestDrafter
from spec_jax.drafting.sam import SamDrafter
from spec_jax.drafting.suffix import SuffixDrafter
from spec_jax.drafting.text_guide import GivenDrafter, TextGuide
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree
from spec_jax.exactness import for_model
from spec_jax.history import TokenHistory
from spec_jax.models.layers import RowBlocks
from spec_jax.models.model import Model
from spec_jax.token_tree import parse_tree, sequoia_tree
from spec_jax.vocabulary import kept_map

RECYCLING_RATES = (0.35, 0.1, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01)
"""How often each rank is the right one: what the default tree of token recycling is best for."""
REST_DEPTH = 16
"""Tokens that `rest` drafts behind a suffix at most, one after another."""


def build_drafter(config: SpeculativeConfig, target: Any, rows: RowBlocks) -> tuple[Any, Any]:
    """The drafter of `config` and its parameters. `rows`: canonical row blocks of a draft model's forward passes."""
    k = config.num_speculative_tokens
    if k == 0:
        return NoDrafter(), ()
    sample = config.draft_sample_method == "probabilistic"
    if config.method == "ngram":
        return NGramDrafter(k, config.prompt_lookup_max, config.prompt_lookup_min), ()
    if config.method == "suffix":
        options = (
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            config.suffix_decoding_use_tree,
        )
        return SuffixDrafter(k, *options), newest_params(config, target, ())
    if config.method == "sam":
        drafter = SamDrafter(k, config.sam_min_match, config.sam_max_match)
        return drafter, newest_params(config, target, ())
    if config.method == "rest":
        drafter = RestDrafter(k, config.rest_max_match, config.rest_min_match, config.rest_use_tree)
        return drafter, newest_params(config, target, ())
    if config.method == "oracle":
        return OracleDrafter(k, config.oracle_acceptance), recorded(config.oracle_texts)
    if config.method == "layer_skip":
        return LayerSkipDrafter(k, skip_layers(config, target.config.num_layers), sample, tree_of(config)), ()
    if config.method == "jacobi":
        return JacobiDrafter(k, target.vocab_size), ()
    if config.method == "recycling":
        paths = config.speculative_token_tree
        tree = parse_tree(paths) if paths is not None else sequoia_tree(RECYCLING_RATES, k).parents
        return RecyclingDrafter(tuple(tree), target.vocab_size), ()
    if config.method == "lookahead":
        sizes = config.lookahead_ngram_size, config.lookahead_window, config.lookahead_guesses
        return LookaheadDrafter(*sizes, target.vocab_size, config.lookahead_pool_from_prompt), ()
    if config.method == "hybrid":
        (first, ours), (second, theirs) = (build_drafter(part, target, rows) for part in config.drafters)
        if isinstance(second, LayerSkipDrafter):  # whose outputs verification cannot go on from in all rows
            second = dataclasses.replace(second, reuse=False)
        return HybridDrafter(first, second, config.hybrid_threshold), (ours, theirs)
    drafter, params = _draft_model(config, target, rows)
    if config.method == "cascade":
        inner, inner_params = build_drafter(config.drafters[0], target, rows)
        return CascadeDrafter(drafter, inner), (params, inner_params)
    return drafter, params


def _draft_model(config: SpeculativeConfig, target: Any, rows: RowBlocks) -> tuple[DraftModelDrafter, Any]:
    draft = config.model
    if isinstance(draft, str) or hasattr(draft, "__fspath__"):
        from spec_jax.models.loading import load_model  # a model on disk: the loaders are needed only here

        draft = load_model(draft, dtype=target.module.dtype)
    if not isinstance(draft, Model):
        raise ValueError(f"model={draft!r} must be a hub name, a folder, a .gguf file or a loaded Model")
    k, params, foreign = config.num_speculative_tokens, draft.params, config.use_heterogeneous_vocab
    if foreign == "text":
        return GivenDrafter(k, draft.name), TextGuide(target, draft, k)
    if foreign:
        params = params, kept_map(target, draft)
    else:
        check_same_vocabulary(target, draft)
    drafter = DraftModelDrafter(
        num_nodes=k,
        module=draft.module,
        vocab_size=target.vocab_size,
        target_vocab=target.config.vocab_size,
        max_positions=draft.max_model_len,
        rows=for_model(rows, draft.module),
        sample=config.draft_sample_method == "probabilistic",
        tree=tree_of(config),
        mapped=bool(foreign),
    )
    return drafter, params


def _where_texts_are(config: SpeculativeConfig, params: Any, replace: Callable[..., Any]) -> Any:
    """A drafter's parameters, with `replace(part, its parameters, texts)` in place of those of every part that copies
    from other texts: a `TokenHistory` or a corpus file."""
    if config.num_speculative_tokens == 0:
        return params
    if config.method == "hybrid":
        return tuple(_where_texts_are(part, p, replace) for part, p in zip(config.drafters, params, strict=True))
    if config.method == "cascade":
        return params[0], _where_texts_are(config.drafters[0], params[1], replace)
    texts = config.datastore if config.method == "rest" else config.history
    return params if texts is None else replace(config, params, texts)


def without_history(config: SpeculativeConfig, params: Any) -> Any:
    """A drafter's parameters without the index of a `TokenHistory`, which `newest_params` puts back."""
    return _where_texts_are(config, params, lambda _, p, texts: () if isinstance(texts, TokenHistory) else p)


def newest_params(config: SpeculativeConfig, target: Any, params: Any) -> Any:
    """A drafter's parameters, with what has been added to the texts of its configuration since they were made."""
    return _where_texts_are(config, params, lambda part, _, texts: _index_of(part, target, texts))


def _index_of(config: SpeculativeConfig, target: Any, texts: Any) -> Any:
    """The index of the texts that one method copies from."""
    depth = {
        "suffix": config.suffix_decoding_max_tree_depth,
        "sam": (config.sam_max_match or 0) + 1,
        "rest": (config.rest_max_match or 0) + REST_DEPTH,
    }[config.method]
    if isinstance(texts, TokenHistory):
        return texts.index(depth)
    if target.tokenizer is None:
        raise ValueError(
            f"datastore={texts!r} is a file of text, but {target.name} has no tokenizer; give a TokenHistory"
        )
    return load_datastore(texts, target.tokenizer, depth)


def tree_of(config: SpeculativeConfig) -> StaticTree | DynamicTree | None:
    """The tree that a drafter drafts; None: a chain."""
    tree = config.speculative_token_tree
    if tree is None:
        return None
    if tree in DYNAMIC_TREES:
        return DynamicTree(config.num_speculative_tokens, config.tree_top_k, config.tree_depth, config.tree_threshold)
    return StaticTree(parse_tree(tree), config.draft_with_replacement)


def skip_layers(config: SpeculativeConfig, num_layers: int) -> tuple[int, ...]:
    """The layers that a layer_skip drafter runs."""
    if config.draft_layers is not None:
        if config.draft_layers[-1] >= num_layers:
            raise ValueError(
                f"draft_layers={config.draft_layers} names layer {config.draft_layers[-1]}, but the target has layers "
                f"0..{num_layers - 1}"
            )
        return config.draft_layers
    exit_layer = config.exit_layer if config.exit_layer is not None else max(num_layers // 3, 1)
    if exit_layer > num_layers:
        raise ValueError(f"exit_layer={exit_layer} is beyond the target's {num_layers} layers")
    return tuple(range(exit_layer))


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Raises ValueError unless both models use the same ids for the same tokens; padding rows may differ."""
    for side, other in ((target, draft), (draft, target)):
        if side.config.vocab_size < other.vocab_size:
            raise ValueError(
                f"{side.name} has {side.config.vocab_size} embedding rows, fewer than the {other.vocab_size} ids of "
                f"{other.name}; a draft model must share the target's vocabulary"
            )
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"the draft model {draft.name} has a vocabulary of {draft.vocab_size} ids and the target {target.name} one "
            f"of {target.vocab_size}; they must be equal (embeddings may be padded beyond them). Choose a draft model "
            f"of the target's family, or give use_heterogeneous_vocab"
        )
    if target.tokenizer is None or draft.tokenizer is None or target.tokenizer is draft.tokenizer:
        return
    ours, theirs = target.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if ours != theirs:
        token = next(t for t in sorted(ours.keys() | theirs.keys()) if ours.get(t) != theirs.get(t))
        raise ValueError(
            f"the tokenizers of {target.name} and {draft.name} differ: {token!r} has id {ours.get(token)} and "
            f"{theirs.get(token)}; a draft model must share the target's tokenizer, unless use_heterogeneous_vocab is "
            f"given"
        )
