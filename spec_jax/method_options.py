"""Checks and defaults of the options that belong to one method of a `SpeculativeConfig`."""

from __future__ import annotations

from typing import Any

from spec_jax import rule_names
from spec_jax.checks import is_int, is_number, settle
from spec_jax.history import MAX_ID, TokenHistory

COPYING = ("ngram", "suffix", "sam", "rest", "oracle")
"""Methods that copy from texts: chains without state, chosen deterministically (as long as they draft no tree)."""
FOR_THE_WHOLE = (
    "num_assistant_tokens_schedule", "num_speculative_tokens_per_batch_size", "assistant_confidence_threshold",
    "draft_survival_threshold",
)  # fmt: skip
"""Options that hold for all drafts of a method that is made of others."""
MAX_LOOKUP = 64
SUFFIX_DEPTH = 24
SUFFIX_FACTOR = 1.0
SUFFIX_MIN_PROB = 0.1
LOOKUP_MATCHES = 1, 3
SAM_MATCHES = 3, 32
REST_MATCHES = 2, 16
ORACLE_ACCEPTANCE = 0.8
LOOKAHEAD = {"lookahead_ngram_size": (4, 3), "lookahead_window": (4, 2), "lookahead_guesses": (4, 1)}
"""Default and least value of each."""
MAX_LOOKAHEAD = 32


def owners_of(config: Any, names: list[str]) -> dict[str, tuple[str, ...]]:
    """The methods that each option belongs to; options of all methods are not in it."""
    owners = {
        "prompt_lookup_max": ("ngram",), "prompt_lookup_min": ("ngram",), "datastore": ("rest",),
        "history": ("suffix", "sam"), "model": ("draft_model", "cascade"), "hybrid_threshold": ("hybrid",),
        "drafters": ("hybrid", "cascade"), "use_heterogeneous_vocab": ("draft_model", "cascade"),
        "exit_layer": ("layer_skip",), "draft_layers": ("layer_skip",),
    }  # fmt: skip
    prefixes = {"suffix_decoding_": "suffix", "sam_": "sam", "rest_": "rest", "oracle_": "oracle"}
    prefixes |= {"lookahead_": "lookahead"}
    for prefix, method in prefixes.items():
        owners |= {name: (method,) for name in names if name.startswith(prefix)}
    return owners


def check_method(config: Any, names: list[str]) -> None:
    """Options of other methods are refused, and the method's own get their defaults."""
    for name, owners in owners_of(config, names).items():
        if getattr(config, name) is not None and config.method not in owners:
            asked = " and ".join(f"method={owner!r}" for owner in owners)
            raise ValueError(f"{name} belongs to {asked}, but method={config.method!r} was asked for")
    if config.history is not None and not isinstance(config.history, TokenHistory):
        raise ValueError(f"history={config.history!r:.80} must be a spec_jax.TokenHistory")
    check = {
        "ngram": _check_ngram, "suffix": _check_suffix, "sam": _check_sam, "rest": _check_rest,
        "oracle": _check_oracle, "lookahead": _check_lookahead, "layer_skip": _check_layers,
        "draft_model": _check_model, "cascade": _check_model,
    }.get(config.method)  # fmt: skip
    if check is not None:
        check(config)


def _check_ngram(config: Any) -> None:
    _check_matches(config, ("prompt_lookup_min", "prompt_lookup_max"), LOOKUP_MATCHES)


def _check_suffix(config: Any) -> None:
    depth, factor, share = (
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
    depth, factor = SUFFIX_DEPTH if depth is None else depth, SUFFIX_FACTOR if factor is None else factor
    share = SUFFIX_MIN_PROB if share is None else share
    if not is_int(depth) or not 2 <= depth <= MAX_LOOKUP:
        raise ValueError(f"suffix_decoding_max_tree_depth={depth!r} must be an integer from 2 to {MAX_LOOKUP}")
    if not is_number(factor) or not 0 < factor <= MAX_LOOKUP:
        raise ValueError(f"suffix_decoding_max_spec_factor={factor!r} must be a number above 0, at most {MAX_LOOKUP}")
    if not is_number(share) or not 0 <= share <= 1:
        raise ValueError(f"suffix_decoding_min_token_prob={share!r} must be a number from 0 to 1")
    _check_use_tree(config, "suffix_decoding_use_tree", default=False)
    settle(config, "suffix_decoding_max_tree_depth", depth)
    settle(config, "suffix_decoding_max_spec_factor", float(factor))
    settle(config, "suffix_decoding_min_token_prob", float(share))


def _check_use_tree(config: Any, name: str, default: bool) -> None:
    """Whether a drafter of texts drafts a tree, which not everything goes with."""
    tree = getattr(config, name)
    if not isinstance(tree, bool | None):
        raise ValueError(f"{name}={tree!r} must be True or False")
    if tree and config.verify_width == "auto":
        raise ValueError(f"verify_width='auto' chooses how much of a chain is verified; give a number, or leave it "
                         f"out, with {name}")  # fmt: skip
    chain = config.verify_width == "auto" or config.rejection_sample_method in rule_names.CHAIN_RULES
    if tree and chain:
        raise ValueError(f"rejection_sample_method={config.rejection_sample_method!r} verifies chains; it does not "
                         f"go with {name}")  # fmt: skip
    settle(config, name, default and not chain if tree is None else tree)


def _check_sam(config: Any) -> None:
    _check_matches(config, ("sam_min_match", "sam_max_match"), SAM_MATCHES)


def _check_matches(config: Any, names: tuple[str, str], default: tuple[int, int]) -> None:
    """The shortest and the longest suffix that a method looks up."""
    given = [getattr(config, name) for name in names]
    shortest = default[0] if given[0] is None else given[0]
    longest = given[1] if given[1] is not None else max(default[1], shortest) if is_int(shortest) else default[1]
    if not (is_int(shortest) and is_int(longest) and 1 <= shortest <= longest <= MAX_LOOKUP):
        raise ValueError(f"{names[0]}={shortest!r} and {names[1]}={longest!r} must be integers with 1 <= min <= "
                         f"max <= {MAX_LOOKUP}")  # fmt: skip
    settle(config, names[0], shortest)
    settle(config, names[1], longest)


def _check_rest(config: Any) -> None:
    _check_matches(config, ("rest_min_match", "rest_max_match"), REST_MATCHES)
    _check_use_tree(config, "rest_use_tree", default=True)
    store = config.datastore
    if store is None:
        raise ValueError("method='rest' needs 'datastore': a corpus file or a spec_jax.TokenHistory")
    if not isinstance(store, (str, TokenHistory)) and not hasattr(store, "__fspath__"):
        raise ValueError(f"datastore={store!r:.80} must be the path of a corpus file or a spec_jax.TokenHistory")


def _check_oracle(config: Any) -> None:
    texts, rate = config.oracle_texts, config.oracle_acceptance
    rate = ORACLE_ACCEPTANCE if rate is None else rate
    if not is_number(rate) or not 0 <= rate <= 1:
        raise ValueError(f"oracle_acceptance={rate!r} must be a number from 0 to 1")
    ok = isinstance(texts, (list, tuple)) and texts and all(isinstance(t, (list, tuple)) and t for t in texts)
    if not ok or not all(is_int(i) and 0 <= i < MAX_ID for text in texts for i in text):
        raise ValueError(f"oracle_texts={texts!r:.80}: method='oracle' replays recorded texts and needs a list with "
                         f"the token ids of prompt and output of each, from 0 to {MAX_ID - 1}")  # fmt: skip
    settle(config, "oracle_acceptance", float(rate))
    settle(config, "oracle_texts", tuple(tuple(int(i) for i in text) for text in texts))


def _check_lookahead(config: Any) -> None:
    for name, (default, least) in LOOKAHEAD.items():
        value = default if getattr(config, name) is None else getattr(config, name)
        if not is_int(value) or not least <= value <= MAX_LOOKAHEAD:
            raise ValueError(f"{name}={value!r} must be an integer from {least} to {MAX_LOOKAHEAD}")
        settle(config, name, value)
    if not isinstance(config.lookahead_pool_from_prompt, bool | None):
        raise ValueError(f"lookahead_pool_from_prompt={config.lookahead_pool_from_prompt!r} must be True or False")
    settle(config, "lookahead_pool_from_prompt", config.lookahead_pool_from_prompt is not False)
    n, w, g = (getattr(config, name) for name in LOOKAHEAD)
    nodes = (n - 1) * (w + g) - 1
    if config.num_speculative_tokens not in (None, 0, nodes):
        raise ValueError(f"num_speculative_tokens={config.num_speculative_tokens}: lookahead has (N - 1) * (W + G) - 1 "
                         f"= {nodes} nodes; leave it out")  # fmt: skip
    if config.num_speculative_tokens is None:
        settle(config, "num_speculative_tokens", nodes)


def check_always_tree(config: Any) -> None:
    """What does not go with a method that drafts nothing but trees."""
    if config.verify_width == "auto":
        raise ValueError(f"verify_width='auto' chooses how much of a chain is verified; method={config.method!r} "
                         f"drafts a tree, leave it out")  # fmt: skip
    if config.rejection_sample_method in rule_names.CHAIN_RULES:
        raise ValueError(f"rejection_sample_method={config.rejection_sample_method!r} verifies chains; it does not go "
                         f"with method={config.method!r}")  # fmt: skip


def _check_model(config: Any) -> None:
    if config.model is None:
        raise ValueError(
            f"method={config.method!r} needs 'model': a hub name, a folder, a .gguf file or a loaded Model"
        )
    foreign = config.use_heterogeneous_vocab
    if not isinstance(foreign, bool | None) and foreign != "text":
        raise ValueError(f"use_heterogeneous_vocab={foreign!r} must be True, False or 'text'")
    drawn, auto = config.draft_sample_method == "probabilistic", config.verify_width == "auto"
    if foreign == "text" and (config.method == "cascade" or config.drafts_tree or drawn or auto):
        raise ValueError("use_heterogeneous_vocab='text' drafts greedy chains of a fixed length for method="
                         "'draft_model'; leave out trees, draft_sample_method and verify_width='auto'")  # fmt: skip


def _check_layers(config: Any) -> None:
    exit_layer, layers = config.exit_layer, config.draft_layers
    if exit_layer is not None and layers is not None:
        raise ValueError("give exit_layer or draft_layers, not both")
    if exit_layer is not None and (not is_int(exit_layer) or exit_layer < 1):
        raise ValueError(f"exit_layer={exit_layer!r} must be a positive integer")
    if layers is not None:
        ok = isinstance(layers, (list, tuple)) and layers and all(is_int(i) and i >= 0 for i in layers)
        if not ok or list(layers) != sorted(set(layers)):
            raise ValueError(f"draft_layers={layers!r} must be a list of different layer ids in ascending order")
        settle(config, "draft_layers", tuple(layers))


def check_parts(config: Any, parse: Any) -> None:
    """The configurations of which this one is made; `parse` reads one."""
    wanted = {"hybrid": 2, "cascade": 1}[config.method]
    parts = config.drafters
    if not isinstance(parts, (list, tuple)) or len(parts) != wanted:
        raise ValueError(f"method={config.method!r} needs 'drafters', a list of {wanted} configurations, not {parts!r}")
    parts = tuple(parse(part) for part in parts)
    for part in parts:
        if part.verify_width is not None or part.rejection_sample_method is not None:
            raise ValueError(f"verify_width and rejection_sample_method are given once, beside method="
                             f"{config.method!r}, not in its drafters")  # fmt: skip
        if part.method in ("none", "hybrid", "lookahead"):
            raise ValueError(f"drafters of method={config.method!r} cannot have method={part.method!r}")
        if given := [name for name in FOR_THE_WHOLE if getattr(part, name) is not None]:
            raise ValueError(f"{given[0]} is given once, beside method={config.method!r}, not in its drafters")
        if part.num_speculative_tokens == 0 or part.use_heterogeneous_vocab == "text":
            what = "num_speculative_tokens=0" if part.num_speculative_tokens == 0 else "use_heterogeneous_vocab='text'"
            raise ValueError(f"{what} does not go with one of the drafters of method={config.method!r}: leave it out")
    copying = parts[0]
    if copying.method not in COPYING or copying.suffix_decoding_use_tree or copying.rest_use_tree:
        raise ValueError(f"the first of drafters must copy chains from texts ({', '.join(COPYING)}, without a "
                         f"tree), not method={copying.method!r}")  # fmt: skip
    settle(config, "drafters", parts)
    threshold = config.hybrid_threshold
    if threshold is not None and (not is_number(threshold) or threshold < 0):
        raise ValueError(f"hybrid_threshold={threshold!r} must be a number of at least 0: accepted tokens")
    if config.method == "hybrid":
        most = max(part.num_speculative_tokens for part in parts)
        if config.num_speculative_tokens not in (None, 0, most):
            raise ValueError(f"num_speculative_tokens={config.num_speculative_tokens}: a hybrid drafts as many "
                             f"tokens as its parts, {most}; give it in drafters")  # fmt: skip
        if config.num_speculative_tokens is None:
            settle(config, "num_speculative_tokens", most)
        drawn = parts[1].draft_sample_method
        if config.draft_sample_method not in ("greedy", drawn):
            raise ValueError(f"draft_sample_method={config.draft_sample_method!r} belongs to the second of drafters, "
                             f"which has {drawn!r}: give it there")  # fmt: skip
        settle(config, "draft_sample_method", drawn)
        if parts[1].drafts_tree and config.rejection_sample_method in rule_names.CHAIN_RULES:
            raise ValueError(f"rejection_sample_method={config.rejection_sample_method!r} verifies chains, and the "
                             f"second of drafters drafts trees")  # fmt: skip
        if parts[1].drafts_tree and config.verify_width == "auto":
            raise ValueError("verify_width='auto' needs chains, and the second of drafters drafts trees")
