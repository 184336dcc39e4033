"""Checks and defaults of the draft trees of a `SpeculativeConfig`."""

from __future__ import annotations

from typing import Any

from spec_jax import rule_names
from spec_jax.checks import is_int, is_number, nearest, settle

MAX_NODES = 1024
"""Nodes of a tree, or of a chain, at most: far beyond what any chip verifies for free."""
DYNAMIC_TREES = ("eagle2", "opt_tree")
DYNAMIC_NODES = 24
MAX_TREE_OPTION = 64
TREE_TOP_K = 4
TREE_DEPTH = {"eagle2": 5, "opt_tree": 8}
TREE_THRESHOLD = 0.5
TREE_OPTIONS = ("tree_top_k", "tree_depth", "tree_threshold")
TREE_METHODS = ("draft_model", "layer_skip", "recycling")
"""Methods whose trees are given; those that copy from texts have a switch of their own."""


def check_tree(config: Any) -> None:
    """Checks what belongs to trees, and fills in its defaults."""
    if hasattr(config.speculative_token_tree, "tolist"):  # a NumPy array
        settle(config, "speculative_token_tree", config.speculative_token_tree.tolist())
    tree, method, sampled = config.speculative_token_tree, config.method, config.draft_sample_method == "probabilistic"
    replacement = config.draft_with_replacement
    if not isinstance(replacement, bool):
        raise ValueError(f"draft_with_replacement={replacement!r} must be True or False")
    if replacement and (tree is None or not sampled or config.rejection_sample_method == "coupled"):
        raise ValueError("draft_with_replacement=True is about siblings that are sampled: it needs "
                         "speculative_token_tree, draft_sample_method='probabilistic', and another rule than "
                         "'coupled', which takes the target's own noise")  # fmt: skip
    if method not in TREE_METHODS:
        raise ValueError(f"speculative_token_tree={tree!r} needs a drafter of trees ({', '.join(TREE_METHODS)}); "
                         f"method={method!r} drafts chains")  # fmt: skip
    if method == "recycling" and tree in DYNAMIC_TREES:
        raise ValueError(
            f"speculative_token_tree={tree!r} needs probabilities; method='recycling' takes paths of ranks"
        )
    if config.verify_width == "auto":
        raise ValueError("verify_width='auto' chooses how much of a chain is verified; give a number, or leave it "
                         "out, with speculative_token_tree")  # fmt: skip
    if config.rejection_sample_method in rule_names.CHAIN_RULES:
        trees = ", ".join(rule for rule in rule_names.RULES if rule not in rule_names.CHAIN_RULES)
        raise ValueError(f"rejection_sample_method={config.rejection_sample_method!r} verifies chains; with "
                         f"speculative_token_tree use one of {trees}, or leave it out")  # fmt: skip
    if isinstance(tree, str) and tree[:1].isalpha() and tree not in DYNAMIC_TREES:
        raise ValueError(f"speculative_token_tree={tree!r} is not known{nearest(tree, DYNAMIC_TREES)}; give one of "
                         f"{', '.join(DYNAMIC_TREES)}, or paths such as [[0], [0, 0], [1]]")  # fmt: skip
    if tree not in DYNAMIC_TREES:
        check_static_tree(config)
        return
    if sampled:
        raise ValueError(f"draft_sample_method='probabilistic' does not go with speculative_token_tree={tree!r}, "
                         f"whose nodes are the likeliest ones; give a tree as paths to sample it")  # fmt: skip
    if tree != "opt_tree" and config.tree_threshold is not None:
        raise ValueError(f"tree_threshold belongs to speculative_token_tree='opt_tree', not {tree!r}")
    for name, default in (("tree_top_k", TREE_TOP_K), ("tree_depth", TREE_DEPTH[tree])):
        value = default if getattr(config, name) is None else getattr(config, name)
        if not is_int(value) or not 1 <= value <= MAX_TREE_OPTION:
            raise ValueError(f"{name}={value!r} must be an integer from 1 to {MAX_TREE_OPTION}")
        settle(config, name, value)
    if tree == "opt_tree":
        threshold = TREE_THRESHOLD if config.tree_threshold is None else config.tree_threshold
        if not is_number(threshold) or not 0 <= threshold < 1:
            raise ValueError(f"tree_threshold={threshold!r} must be a number from 0 to below 1: expected tokens "
                             f"that a level adds, which are at most 1")  # fmt: skip
        settle(config, "tree_threshold", float(threshold))
    pool = config.tree_top_k + (config.tree_depth - 1) * config.tree_top_k**2
    nodes = min(DYNAMIC_NODES, pool) if config.num_speculative_tokens is None else config.num_speculative_tokens
    if is_int(nodes) and nodes > pool:
        raise ValueError(f"num_speculative_tokens={nodes} is more than the {pool} candidates of tree_top_k="
                         f"{config.tree_top_k} and tree_depth={config.tree_depth}; raise one of these")  # fmt: skip
    if is_int(nodes) and nodes > MAX_NODES:
        raise ValueError(f"num_speculative_tokens={nodes} is more than the {MAX_NODES} nodes that a tree may have")
    settle(config, "num_speculative_tokens", nodes)


def check_static_tree(config: Any) -> None:
    from spec_jax.token_tree import parse_tree, paths_of  # it takes NumPy, which others need not wait for

    if options := [name for name in TREE_OPTIONS if getattr(config, name) is not None]:
        raise ValueError(f"{options[0]} belongs to a dynamic tree ({', '.join(DYNAMIC_TREES)}), and "
                         f"speculative_token_tree lists every node")  # fmt: skip
    try:
        parents = parse_tree(config.speculative_token_tree)
    except ValueError as error:
        raise ValueError(f"speculative_token_tree: {error}") from None
    k = config.num_speculative_tokens
    if k is not None and (not is_int(k) or k != len(parents)):
        raise ValueError(f"num_speculative_tokens={k!r}, but speculative_token_tree has {len(parents)} nodes; "
                         f"leave num_speculative_tokens out")  # fmt: skip
    settle(config, "speculative_token_tree", paths_of(parents))
    settle(config, "num_speculative_tokens", len(parents))
