"""`SpeculativeConfig`: which drafter guesses, how far, and how its guesses are verified, checked on creation.

Field names and meanings follow vLLM where it has them. This module imports neither jax nor flax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from spec_jax import rule_names
from spec_jax.checks import is_int, is_number, nearest, plain
from spec_jax.history import TokenHistory

METHODS = ("none", "ngram", "suffix", "sam", "rest", "oracle", "draft_model", "layer_skip", "hybrid", "cascade")
COPYING = ("ngram", "suffix", "sam", "rest", "oracle")
"""Methods that copy from texts: chains without state, chosen deterministically (as long as they draft no tree)."""
DYNAMIC_TREES = ("eagle2", "opt_tree")
WIDTHS = (4, 8, 16, 32, 64, 128)
DEFAULT_TOKENS = {
    "none": 0, "ngram": 5, "suffix": 15, "sam": 7, "rest": 15, "oracle": 7, "draft_model": 4, "layer_skip": 4,
    "cascade": 6,
}  # fmt: skip
AUTO_TOKENS = 7
MAX_LOOKUP = 64
SUFFIX_DEPTH = 24
SUFFIX_FACTOR = 1.0
SUFFIX_MIN_PROB = 0.1
SAM_MATCHES = 3, 32
REST_MATCHES = 2, 16
ORACLE_ACCEPTANCE = 0.8
DYNAMIC_NODES = 24
MAX_TREE_OPTION = 64
TREE_TOP_K = 4
TREE_DEPTH = {"eagle2": 5, "opt_tree": 8}
TREE_THRESHOLD = 0.5
TREE_OPTIONS = ("tree_top_k", "tree_depth", "tree_threshold")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter guesses, how far, and by which rule its guesses are verified.

    Attributes:
      method: "none" | "ngram" | "suffix" | "sam" | "rest" | "oracle" | "draft_model" | "layer_skip" | "hybrid" |
        "cascade".
      num_speculative_tokens: K, draft tokens per step at most. Default: ngram 5, suffix and rest 15, sam and oracle 7,
        draft_model and layer_skip 4, cascade 6, hybrid what its parts have; the nodes of a static tree, which no other
        number may be given for; 24 nodes of a dynamic one.
      verify_width: rows of one verification step, at least K + 1; None: 8 where K + 1 <= 8, else the next of
        4, 8, 16, 32, 64, 128. "auto": every step verifies as many drafts, up to K, as promise the most tokens per
        second, none included (`spec_jax.draft_length`); K is 7 then unless it is given.
      rejection_sample_method: "coupled" (same seed, same text whatever the drafter), "standard" (Leviathan et al.,
        https://arxiv.org/abs/2211.17192), "block" (Sun et al., https://arxiv.org/abs/2403.10444: keeps more of sampled
        drafts); for trees too "recursive" (on a chain it keeps what "standard" keeps), "kseq" (SpecTr,
        https://arxiv.org/abs/2310.15141: siblings drawn with replacement) or "traversal"
        (https://arxiv.org/abs/2505.12398: keeps the most; on a chain as much as "block"). None: where drafts are
        sampled "standard", of a tree "recursive", else "coupled". At temperature 0 all of these are exact greedy
        decoding. LOSSY, so that the output is not the target's: "lossy_typical", "lossy_relaxed" and "lossy_lenience",
        see `spec_jax.rules.lossy`.
      posterior_threshold, posterior_alpha: lossy_typical only (Medusa's epsilon and delta). Default 0.09 and 0.3.
      relaxed_top_k, relaxed_delta: lossy_relaxed only. Default 10 and 0.6.
      lenience: lossy_lenience only, above 0 and at most 1, where it is lossless. Default 0.5.
      draft_sample_method: "greedy" or "probabilistic" (draft_model and layer_skip: sample the draft, keep the true q).
      speculative_token_tree: draft_model and layer_skip: draft a tree. Its nodes as paths, a list or its text, see
        `token_tree.parse_tree` (kept as a tuple of paths), or a tree grown anew in every step, the best nodes of a pool
        by the drafter's own probabilities: "eagle2" (https://arxiv.org/abs/2406.16858) or "opt_tree"
        (https://arxiv.org/abs/2406.17276), which stops growing by itself. None: a chain.
      tree_top_k, tree_depth: of dynamic trees: children per node, which is also the nodes expanded per level, and the
        levels at most. Default 4, and 5 levels of "eagle2" or 8 of "opt_tree".
      tree_threshold: of "opt_tree": another level is drafted only if the last one added more expected tokens than
        this. Default 0.5.
      draft_with_replacement: of sampled trees: siblings are drawn independently of each other and may be equal, as
        "kseq" wants them. By default no two are, which keeps more.
      prompt_lookup_max, prompt_lookup_min: ngram only, longest and shortest suffix looked up. Default 3 and 1.
      suffix_decoding_max_tree_depth: suffix only: tokens of the matching suffix and of the draft behind it, together at
        most. Default 24.
      suffix_decoding_max_spec_factor: suffix only: draft tokens per token of the matching suffix, at most. Default 1.
      suffix_decoding_min_token_prob: suffix only: a draft ends where the share of its text in what has followed falls
        below this. Default 0.1.
      suffix_decoding_use_tree: suffix only: draft the K likeliest texts as a tree instead of one path. Default False.
      history: suffix and sam: a `TokenHistory` of other texts to draft from too. Default none.
      sam_min_match, sam_max_match: sam only: a shorter match drafts nothing, a longer one counts as this long. Default
        3 and 32.
      datastore: rest only: the corpus, a file (see `spec_jax.datastore`) or a `TokenHistory`.
      rest_min_match, rest_max_match: rest only, shortest and longest suffix looked up. Default 2 and 16.
      rest_use_tree: rest only: a tree of the K likeliest texts, or one path. Default True, but for verify_width="auto".
      oracle_texts: oracle only: the recorded texts, prompt and output of each as token ids.
      oracle_acceptance: oracle only: the share of draft tokens that are right. Default 0.8. SYNTHETIC: a speed that it
        gives is that of no drafter.
      drafters: hybrid: two configurations, of a method that copies from texts and of any other; the first one's
        proposal is verified where it is expected to be accepted for longer. cascade: one configuration of a method that
        copies, which drafts for the draft model.
      hybrid_threshold: hybrid only: accepted tokens that the first drafter must expect; None: as many as the second one
        has reached lately.
      use_heterogeneous_vocab: draft_model and cascade, with a draft model of another tokenizer: True drafts the tokens
        that both have (https://arxiv.org/abs/2502.05202); "text" (draft_model only) drafts text in a loop on the host,
        which is slow. Default None: the vocabularies must be the same.
      model: draft_model and cascade: a hub name, a folder, a .gguf file or a loaded `Model`.
      exit_layer: layer_skip only: draft with the first `exit_layer` layers. Default: a third of the layers.
      draft_layers: layer_skip only: draft with these layers instead of a prefix, ascending ids.
    """

    method: str = "none"
    num_speculative_tokens: int | None = None
    verify_width: int | None = None
    rejection_sample_method: str | None = None
    draft_sample_method: str = "greedy"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    relaxed_top_k: int | None = None
    relaxed_delta: float | None = None
    lenience: float | None = None
    speculative_token_tree: Any = None
    tree_top_k: int | None = None
    tree_depth: int | None = None
    tree_threshold: float | None = None
    draft_with_replacement: bool = False
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    suffix_decoding_use_tree: bool | None = None
    history: Any = None
    sam_min_match: int | None = None
    sam_max_match: int | None = None
    datastore: Any = None
    rest_min_match: int | None = None
    rest_max_match: int | None = None
    rest_use_tree: bool | None = None
    oracle_texts: Any = None
    oracle_acceptance: float | None = None
    drafters: Any = None
    hybrid_threshold: float | None = None
    use_heterogeneous_vocab: bool | str | None = None
    model: Any = None
    exit_layer: int | None = None
    draft_layers: tuple[int, ...] | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        if self.method in ("hybrid", "cascade") or self.drafters is not None:
            self._check_parts()
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is not known{nearest(str(self.method), METHODS)}; "
                             f"known methods: {', '.join(METHODS)}")  # fmt: skip
        if self.rejection_sample_method is not None:
            object.__setattr__(self, "rejection_sample_method", rule_names.full_name(self.rejection_sample_method))
        if self.speculative_token_tree is not None or self.draft_with_replacement:
            self._check_tree()
        elif options := [name for name in TREE_OPTIONS if getattr(self, name) is not None]:
            raise ValueError(f"{options[0]} belongs to a dynamic tree; give speculative_token_tree as one of "
                             f"{', '.join(DYNAMIC_TREES)}")  # fmt: skip
        k = self.num_speculative_tokens
        if k is None:
            auto = self.verify_width == "auto" and self.method != "none"
            default = AUTO_TOKENS if auto else DEFAULT_TOKENS[self.method]
            object.__setattr__(self, "num_speculative_tokens", default)
        elif not is_int(k) or k < 0:
            raise ValueError(f"num_speculative_tokens={k!r} must be an integer of at least 0 (0 turns drafting off)")
        elif self.method == "none" and k:
            raise ValueError(f"num_speculative_tokens={k} needs a method; method='none' drafts nothing")
        width = self.verify_width
        if width is not None and width != "auto" and (not is_int(width) or width < 1):
            raise ValueError(f"verify_width={width!r} must be a positive integer, 'auto', or None for the default")
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(f"draft_sample_method={self.draft_sample_method!r} must be 'greedy' or 'probabilistic'")
        names = [field.name for field in dataclasses.fields(self)]
        owners = {
            "prompt_lookup_max": "ngram", "prompt_lookup_min": "ngram",
            "model": "cascade" if self.method == "cascade" else "draft_model", "hybrid_threshold": "hybrid",
            "use_heterogeneous_vocab": "cascade" if self.method == "cascade" else "draft_model",
            "exit_layer": "layer_skip", "draft_layers": "layer_skip",
            **{name: "suffix" for name in names if name.startswith("suffix_decoding")},
            **{name: name.split("_")[0] for name in names if name.startswith(("sam_", "rest_", "oracle_"))},
            "datastore": "rest",
        }  # fmt: skip
        for name, owner in owners.items():
            if getattr(self, name) is not None and self.method != owner:
                raise ValueError(f"{name} belongs to method={owner!r}, but method={self.method!r} was asked for")
        if self.history is not None and self.method not in ("suffix", "sam"):
            raise ValueError(f"history belongs to the methods 'suffix' and 'sam', but method={self.method!r} was asked "
                             f"for")  # fmt: skip
        if self.history is not None and not isinstance(self.history, TokenHistory):
            raise ValueError(f"history={self.history!r:.80} must be a spec_jax.TokenHistory")
        if self.draft_sample_method == "probabilistic" and self.method not in ("draft_model", "layer_skip", "hybrid"):
            raise ValueError(f"draft_sample_method='probabilistic' needs a drafter that samples (draft_model, "
                             f"layer_skip); method={self.method!r} proposes deterministically")  # fmt: skip
        self.rule_options  # noqa: B018  (checks them)
        drawn = self.draft_sample_method == "probabilistic"
        independent = drawn and (self.speculative_token_tree is None or self.draft_with_replacement)
        if self.rule == "kseq" and self.method != "none" and not independent:
            raise ValueError("rejection_sample_method='kseq' judges siblings drawn independently; it needs draft_"
                             "sample_method='probabilistic' and, in trees, draft_with_replacement=True")  # fmt: skip
        if self.method == "ngram":
            longest = self.prompt_lookup_max
            shortest = self.prompt_lookup_min
            longest = longest if longest is not None else max(3, shortest) if is_int(shortest) else 3
            shortest = shortest if shortest is not None else 1
            if not (is_int(longest) and is_int(shortest) and 1 <= shortest <= longest <= MAX_LOOKUP):
                raise ValueError(f"prompt_lookup_min={shortest!r} and prompt_lookup_max={longest!r} must be integers "
                                 f"with 1 <= min <= max <= {MAX_LOOKUP}")  # fmt: skip
            object.__setattr__(self, "prompt_lookup_max", longest)
            object.__setattr__(self, "prompt_lookup_min", shortest)
        if self.method == "suffix":
            self._check_suffix()
        if self.method == "sam":
            self._check_matches("sam", SAM_MATCHES)
        if self.method == "rest":
            self._check_rest()
        if self.method == "oracle":
            self._check_oracle()
        if self.method in ("draft_model", "cascade") and self.model is None:
            raise ValueError(
                f"method={self.method!r} needs 'model': a hub name, a folder, a .gguf file or a loaded Model"
            )
        foreign = self.use_heterogeneous_vocab
        if foreign not in (None, True, False, "text"):
            raise ValueError(f"use_heterogeneous_vocab={foreign!r} must be True, False or 'text'")
        if foreign == "text" and (self.method == "cascade" or self.drafts_tree or drawn or self.verify_width == "auto"):
            raise ValueError("use_heterogeneous_vocab='text' drafts greedy chains of a fixed length for method="
                             "'draft_model'; leave out trees, draft_sample_method and verify_width='auto'")  # fmt: skip
        if self.exit_layer is not None and self.draft_layers is not None:
            raise ValueError("give exit_layer or draft_layers, not both")
        if self.exit_layer is not None and (not is_int(self.exit_layer) or self.exit_layer < 1):
            raise ValueError(f"exit_layer={self.exit_layer!r} must be a positive integer")
        if self.draft_layers is not None:
            layers = self.draft_layers
            ok = isinstance(layers, (list, tuple)) and layers and all(is_int(i) and i >= 0 for i in layers)
            if not ok or list(layers) != sorted(set(layers)):
                raise ValueError(f"draft_layers={layers!r} must be a list of different layer ids in ascending order")
            object.__setattr__(self, "draft_layers", tuple(layers))

    def _check_suffix(self):
        depth, factor, share = (
            self.suffix_decoding_max_tree_depth,
            self.suffix_decoding_max_spec_factor,
            self.suffix_decoding_min_token_prob,
        )
        depth, factor = SUFFIX_DEPTH if depth is None else depth, SUFFIX_FACTOR if factor is None else factor
        share = SUFFIX_MIN_PROB if share is None else share
        if not is_int(depth) or not 2 <= depth <= MAX_LOOKUP:
            raise ValueError(f"suffix_decoding_max_tree_depth={depth!r} must be an integer from 2 to {MAX_LOOKUP}")
        if not is_number(factor) or not 0 < factor <= MAX_LOOKUP:
            raise ValueError(
                f"suffix_decoding_max_spec_factor={factor!r} must be a number above 0, at most {MAX_LOOKUP}"
            )
        if not is_number(share) or not 0 <= share <= 1:
            raise ValueError(f"suffix_decoding_min_token_prob={share!r} must be a number from 0 to 1")
        self._check_use_tree("suffix_decoding_use_tree", default=False)
        object.__setattr__(self, "suffix_decoding_max_tree_depth", depth)
        object.__setattr__(self, "suffix_decoding_max_spec_factor", float(factor))
        object.__setattr__(self, "suffix_decoding_min_token_prob", float(share))

    def _check_parts(self):
        """The configurations of which this one is made."""
        wanted = {"hybrid": 2, "cascade": 1}.get(self.method)
        if wanted is None:
            raise ValueError(f"drafters belongs to the methods 'hybrid' and 'cascade', not to {self.method!r}")
        parts = self.drafters
        if not isinstance(parts, (list, tuple)) or len(parts) != wanted:
            raise ValueError(
                f"method={self.method!r} needs 'drafters', a list of {wanted} configurations, not {parts!r}"
            )
        parts = tuple(parse_speculative_config(part) for part in parts)
        for part in parts:
            if part.verify_width is not None or part.rejection_sample_method is not None:
                raise ValueError(f"verify_width and rejection_sample_method are given once, beside method="
                                 f"{self.method!r}, not in its drafters")  # fmt: skip
            if part.method in ("none", "hybrid"):
                raise ValueError(f"drafters of method={self.method!r} cannot have method={part.method!r}")
        copying = parts[0]
        if copying.method not in COPYING or copying.suffix_decoding_use_tree or copying.rest_use_tree:
            raise ValueError(f"the first of drafters must copy chains from texts ({', '.join(COPYING)}, without a "
                             f"tree), not method={copying.method!r}")  # fmt: skip
        object.__setattr__(self, "drafters", parts)
        threshold = self.hybrid_threshold
        if threshold is not None and (not is_number(threshold) or threshold < 0):
            raise ValueError(f"hybrid_threshold={threshold!r} must be a number of at least 0: accepted tokens")
        if self.method == "hybrid":
            most = max(part.num_speculative_tokens for part in parts)
            if self.num_speculative_tokens not in (None, most):
                raise ValueError(f"num_speculative_tokens={self.num_speculative_tokens}: a hybrid drafts as many "
                                 f"tokens as its parts, {most}; give it in drafters")  # fmt: skip
            object.__setattr__(self, "num_speculative_tokens", most)
            object.__setattr__(self, "draft_sample_method", parts[1].draft_sample_method)
            if parts[1].drafts_tree and self.verify_width == "auto":
                raise ValueError("verify_width='auto' needs chains, and the second of drafters drafts trees")

    @property
    def drafts_tree(self) -> bool:
        """Whether trees are drafted, not chains."""
        own = self.speculative_token_tree is not None or self.suffix_decoding_use_tree or self.rest_use_tree
        return bool(own) or (self.method == "hybrid" and self.drafters[1].drafts_tree)

    def _check_use_tree(self, name: str, default: bool):
        """Whether a drafter of texts drafts a tree, which not everything goes with."""
        tree = getattr(self, name)
        if not isinstance(tree, bool | None):
            raise ValueError(f"{name}={tree!r} must be True or False")
        if tree and self.verify_width == "auto":
            raise ValueError(f"verify_width='auto' chooses how much of a chain is verified; give a number, or leave it "
                             f"out, with {name}")  # fmt: skip
        chain = self.verify_width == "auto" or self.rejection_sample_method in rule_names.CHAIN_RULES
        if tree and chain:
            raise ValueError(f"rejection_sample_method={self.rejection_sample_method!r} verifies chains; it does not "
                             f"go with {name}")  # fmt: skip
        object.__setattr__(self, name, default and not chain if tree is None else tree)

    def _check_matches(self, method: str, default: tuple[int, int]):
        names = f"{method}_min_match", f"{method}_max_match"
        given = [getattr(self, name) for name in names]
        shortest = default[0] if given[0] is None else given[0]
        longest = given[1] if given[1] is not None else max(default[1], shortest) if is_int(shortest) else default[1]
        if not (is_int(shortest) and is_int(longest) and 1 <= shortest <= longest <= MAX_LOOKUP):
            raise ValueError(f"{names[0]}={shortest!r} and {names[1]}={longest!r} must be integers with 1 <= min <= "
                             f"max <= {MAX_LOOKUP}")  # fmt: skip
        object.__setattr__(self, names[0], shortest)
        object.__setattr__(self, names[1], longest)

    def _check_rest(self):
        self._check_matches("rest", REST_MATCHES)
        self._check_use_tree("rest_use_tree", default=True)
        store = self.datastore
        if store is None:
            raise ValueError("method='rest' needs 'datastore': a corpus file or a spec_jax.TokenHistory")
        if not isinstance(store, (str, TokenHistory)) and not hasattr(store, "__fspath__"):
            raise ValueError(f"datastore={store!r:.80} must be the path of a corpus file or a spec_jax.TokenHistory")

    def _check_oracle(self):
        texts, rate = self.oracle_texts, self.oracle_acceptance
        rate = ORACLE_ACCEPTANCE if rate is None else rate
        if not is_number(rate) or not 0 <= rate <= 1:
            raise ValueError(f"oracle_acceptance={rate!r} must be a number from 0 to 1")
        ok = isinstance(texts, (list, tuple)) and texts and all(isinstance(t, (list, tuple)) and t for t in texts)
        if not ok or not all(is_int(i) and i >= 0 for text in texts for i in text):
            raise ValueError("method='oracle' replays recorded texts: it needs 'oracle_texts', a list with the token "
                             "ids of prompt and output of each")  # fmt: skip
        object.__setattr__(self, "oracle_acceptance", float(rate))
        object.__setattr__(self, "oracle_texts", tuple(tuple(int(i) for i in text) for text in texts))

    def _check_tree(self):
        """Checks what belongs to trees, and fills in its defaults."""
        if hasattr(self.speculative_token_tree, "tolist"):  # a NumPy array
            object.__setattr__(self, "speculative_token_tree", self.speculative_token_tree.tolist())
        tree, method, sampled = self.speculative_token_tree, self.method, self.draft_sample_method == "probabilistic"
        replacement = self.draft_with_replacement
        if not isinstance(replacement, bool):
            raise ValueError(f"draft_with_replacement={replacement!r} must be True or False")
        if replacement and (tree is None or not sampled or self.rejection_sample_method == "coupled"):
            raise ValueError("draft_with_replacement=True is about siblings that are sampled: it needs "
                             "speculative_token_tree, draft_sample_method='probabilistic', and another rule than "
                             "'coupled', which takes the target's own noise")  # fmt: skip
        if method not in ("draft_model", "layer_skip"):
            raise ValueError(f"speculative_token_tree={tree!r} needs a drafter of trees (draft_model, layer_skip); "
                             f"method={method!r} drafts chains")  # fmt: skip
        if self.verify_width == "auto":
            raise ValueError("verify_width='auto' chooses how much of a chain is verified; give a number, or leave it "
                             "out, with speculative_token_tree")  # fmt: skip
        if self.rejection_sample_method in rule_names.CHAIN_RULES:
            trees = ", ".join(rule for rule in rule_names.RULES if rule not in rule_names.CHAIN_RULES)
            raise ValueError(f"rejection_sample_method={self.rejection_sample_method!r} verifies chains; with "
                             f"speculative_token_tree use one of {trees}, or leave it out")  # fmt: skip
        if isinstance(tree, str) and tree[:1].isalpha() and tree not in DYNAMIC_TREES:
            raise ValueError(f"speculative_token_tree={tree!r} is not known{nearest(tree, DYNAMIC_TREES)}; give one of "
                             f"{', '.join(DYNAMIC_TREES)}, or paths such as [[0], [0, 0], [1]]")  # fmt: skip
        if tree not in DYNAMIC_TREES:
            self._check_static_tree()
            return
        if sampled:
            raise ValueError(f"draft_sample_method='probabilistic' does not go with speculative_token_tree={tree!r}, "
                             f"whose nodes are the likeliest ones; give a tree as paths to sample it")  # fmt: skip
        if tree != "opt_tree" and self.tree_threshold is not None:
            raise ValueError(f"tree_threshold belongs to speculative_token_tree='opt_tree', not {tree!r}")
        for name, default in (("tree_top_k", TREE_TOP_K), ("tree_depth", TREE_DEPTH[tree])):
            value = default if getattr(self, name) is None else getattr(self, name)
            if not is_int(value) or not 1 <= value <= MAX_TREE_OPTION:
                raise ValueError(f"{name}={value!r} must be an integer from 1 to {MAX_TREE_OPTION}")
            object.__setattr__(self, name, value)
        if tree == "opt_tree":
            threshold = TREE_THRESHOLD if self.tree_threshold is None else self.tree_threshold
            if not is_number(threshold) or not 0 <= threshold < 1:
                raise ValueError(f"tree_threshold={threshold!r} must be a number from 0 to below 1: expected tokens "
                                 f"that a level adds, which are at most 1")  # fmt: skip
            object.__setattr__(self, "tree_threshold", float(threshold))
        pool = self.tree_top_k + (self.tree_depth - 1) * self.tree_top_k**2
        nodes = min(DYNAMIC_NODES, pool) if self.num_speculative_tokens is None else self.num_speculative_tokens
        if is_int(nodes) and nodes > pool:
            raise ValueError(f"num_speculative_tokens={nodes} is more than the {pool} candidates of tree_top_k="
                             f"{self.tree_top_k} and tree_depth={self.tree_depth}; raise one of these")  # fmt: skip
        from spec_jax.token_tree import MAX_NODES  # it takes NumPy, which others need not wait for

        if is_int(nodes) and nodes > MAX_NODES:
            raise ValueError(f"num_speculative_tokens={nodes} is more than the {MAX_NODES} nodes that a tree may have")
        object.__setattr__(self, "num_speculative_tokens", nodes)

    def _check_static_tree(self):
        from spec_jax.token_tree import parse_tree, paths_of  # it takes NumPy, which others need not wait for

        if options := [name for name in TREE_OPTIONS if getattr(self, name) is not None]:
            raise ValueError(f"{options[0]} belongs to a dynamic tree ({', '.join(DYNAMIC_TREES)}), and "
                             f"speculative_token_tree lists every node")  # fmt: skip
        try:
            parents = parse_tree(self.speculative_token_tree)
        except ValueError as error:
            raise ValueError(f"speculative_token_tree: {error}") from None
        k = self.num_speculative_tokens
        if k is not None and (not is_int(k) or k != len(parents)):
            raise ValueError(f"num_speculative_tokens={k!r}, but speculative_token_tree has {len(parents)} nodes; "
                             f"leave num_speculative_tokens out")  # fmt: skip
        object.__setattr__(self, "speculative_token_tree", paths_of(parents))
        object.__setattr__(self, "num_speculative_tokens", len(parents))

    @property
    def rule(self) -> str:
        """The verification rule in force."""
        sampled = self.draft_sample_method == "probabilistic"
        default = "coupled" if not sampled else "recursive" if self.drafts_tree else "standard"
        return self.rejection_sample_method or default

    @property
    def rule_options(self) -> tuple[float, ...]:
        """What the rule in force is told beside the drafts; nothing but for lossy rules."""
        return rule_names.options_of(self.rule, {name: getattr(self, name) for name in rule_names.OPTIONS})


def parse_speculative_config(value: Any, verify_width: int | str | None = None) -> SpeculativeConfig:
    """Accepts None, a dict, a JSON object as text, or a `SpeculativeConfig`.

    A `verify_width` of "auto" given beside it stands for the key, since the default draft length follows from it.
    """
    if value is None:
        return SpeculativeConfig()
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            hint = f'; write {{"method": "{value}"}}' if value in METHODS else ""
            raise ValueError(f"speculative_config={value!r:.200} is not JSON: {error}{hint}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"speculative_config must be a dict, a JSON object or a SpeculativeConfig, not {value!r}")
    known = [f.name for f in dataclasses.fields(SpeculativeConfig)]
    for name in value:
        if name not in known:
            raise ValueError(f"unknown key {name!r} in speculative_config{nearest(str(name), known)}; "
                             f"known: {', '.join(known)}")  # fmt: skip
    if verify_width == "auto":
        value = {**value, "verify_width": "auto"}
    if "method" not in value:
        raise ValueError(f"speculative_config has no 'method'; known methods: {', '.join(METHODS)}")
    return SpeculativeConfig(**value)


def choose_width(num_nodes: int, verify_width: Any) -> int:
    """The rows of one verification step for `num_nodes` draft nodes (the last committed token takes one more).

    "auto" chooses among narrower steps as it goes; this is its widest.
    """
    if verify_width is None:
        return next((w for w in WIDTHS if w >= max(num_nodes + 1, 8)), num_nodes + 1)
    if verify_width == "auto":
        return num_nodes + 1
    if not is_int(verify_width) or verify_width < 1:
        raise ValueError(f"verify_width={verify_width!r} must be a positive integer, 'auto', or None for the default")
    if verify_width < num_nodes + 1:
        raise ValueError(f"verify_width={verify_width} cannot hold {num_nodes} draft tokens and the last token; "
                         f"give at least {num_nodes + 1} or leave it out")  # fmt: skip
    return verify_width


def auto_widths(width: int) -> tuple[int, ...]:
    """The widths that "auto" compiles where every row of a step costs alike, ascending, at most four."""
    return tuple(dict.fromkeys([1, *(w for w in (4, 8) if w < width), width]))
