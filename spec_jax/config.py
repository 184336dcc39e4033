"""`SpeculativeConfig`: which drafter guesses, how far, and how its guesses are verified, checked on creation.

Field names and meanings follow vLLM where it has them. This module imports neither jax nor flax.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from spec_jax import rule_names
from spec_jax.checks import is_int, nearest, plain, settle
from spec_jax.length_options import check_lengths
from spec_jax.method_options import check_always_tree, check_method, check_parts
from spec_jax.tree_options import DYNAMIC_TREES, MAX_NODES, TREE_OPTIONS, check_tree

METHODS = (
    "none", "ngram", "suffix", "sam", "rest", "oracle", "recycling", "jacobi", "lookahead", "draft_model",
    "layer_skip", "hybrid", "cascade",
)  # fmt: skip
WIDTHS = (4, 8, 16, 32, 64, 128)
DEFAULT_TOKENS = {
    "none": 0, "ngram": 5, "suffix": 15, "sam": 7, "rest": 15, "oracle": 7, "recycling": 20, "jacobi": 5,
    "lookahead": None, "draft_model": 4, "layer_skip": 4,
    "cascade": 6,
}  # fmt: skip
AUTO_TOKENS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Which drafter guesses, how far, and by which rule its guesses are verified.

    Attributes:
      method: "none" | "ngram" | "suffix" | "sam" | "rest" | "oracle" | "recycling" | "jacobi" | "lookahead" |
        "draft_model" | "layer_skip" | "hybrid" | "cascade".
      num_speculative_tokens: K, draft tokens per step at most. Default: ngram 5, suffix and rest 15, sam and oracle 7,
        jacobi 5, recycling 20, draft_model and layer_skip 4, cascade 6; lookahead and hybrid what their options say;
        the nodes of a static tree, which no other number may be given for; 24 nodes of a dynamic one.
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
      num_assistant_tokens_schedule: the draft length of every row changes as Hugging Face's does: "heuristic" (two more
        where all drafts were accepted, else one less; later requests in the same slot go on from it: "coupled" only) or
        "heuristic_transient" (each request begins anew). K is where it begins and the most. Default "constant".
      num_speculative_tokens_per_batch_size: a list of [lowest, highest, K]: K by the number of rows that still decode;
        nothing is drafted outside of the ranges.
      assistant_confidence_threshold: draft_model and layer_skip (in a hybrid too), chains: a row stops drafting behind
        the first token that its model gave a probability below this. Default: it does not stop.
      draft_survival_threshold: likewise, where the probability that any token so far is refused, by the draft model's
        own probabilities, has risen above this (SpecDec++, https://arxiv.org/abs/2405.19715).
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
      lookahead_ngram_size, lookahead_window, lookahead_guesses: lookahead only: N, W and G. Default 4, 4, 4: 23 nodes.
      lookahead_pool_from_prompt: lookahead only: the pool begins with the n-grams of the prompt. Default True.
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
    num_assistant_tokens_schedule: str | None = None
    num_speculative_tokens_per_batch_size: Any = None
    assistant_confidence_threshold: float | None = None
    draft_survival_threshold: float | None = None
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
    lookahead_ngram_size: int | None = None
    lookahead_window: int | None = None
    lookahead_guesses: int | None = None
    lookahead_pool_from_prompt: bool | None = None
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
            settle(self, field.name, plain(getattr(self, field.name)))
        if self.method in ("hybrid", "cascade"):
            check_parts(self, parse_speculative_config)
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is not known{nearest(str(self.method), METHODS)}; "
                             f"known methods: {', '.join(METHODS)}")  # fmt: skip
        if self.rejection_sample_method is not None:
            settle(self, "rejection_sample_method", rule_names.full_name(self.rejection_sample_method))
        if self.speculative_token_tree is not None or self.draft_with_replacement:
            check_tree(self)
        elif options := [name for name in TREE_OPTIONS if getattr(self, name) is not None]:
            raise ValueError(f"{options[0]} belongs to a dynamic tree; give speculative_token_tree as one of "
                             f"{', '.join(DYNAMIC_TREES)}")  # fmt: skip
        check_method(self, [field.name for field in dataclasses.fields(self)])
        if self.method in ("recycling", "lookahead"):
            check_always_tree(self)
        k = self.num_speculative_tokens
        if k is None:
            auto = self.verify_width == "auto" and self.method != "none"
            default = AUTO_TOKENS if auto else DEFAULT_TOKENS[self.method]
            settle(self, "num_speculative_tokens", default)
        elif not is_int(k) or k < 0:
            raise ValueError(f"num_speculative_tokens={k!r} must be an integer of at least 0 (0 turns drafting off)")
        elif k > MAX_NODES:
            raise ValueError(f"num_speculative_tokens={k} is more than {MAX_NODES}, the most that a step may draft")
        elif self.method == "none" and k:
            raise ValueError(f"num_speculative_tokens={k} needs a method; method='none' drafts nothing")
        width = self.verify_width
        if width is not None and width != "auto" and (not is_int(width) or width < 1):
            raise ValueError(f"verify_width={width!r} must be a positive integer, 'auto', or None for the default")
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(f"draft_sample_method={self.draft_sample_method!r} must be 'greedy' or 'probabilistic'")
        if self.draft_sample_method == "probabilistic" and self.method not in ("draft_model", "layer_skip", "hybrid"):
            raise ValueError(f"draft_sample_method='probabilistic' needs a drafter that samples (draft_model, "
                             f"layer_skip); method={self.method!r} proposes deterministically")  # fmt: skip
        self.rule_options  # noqa: B018  (checks them)
        check_lengths(self)
        drawn = self.draft_sample_method == "probabilistic"
        independent = drawn and (self.speculative_token_tree is None or self.draft_with_replacement)
        if self.rule == "kseq" and self.method != "none" and not independent:
            raise ValueError("rejection_sample_method='kseq' judges siblings drawn independently; it needs draft_"
                             "sample_method='probabilistic' and, in trees, draft_with_replacement=True")  # fmt: skip

    @property
    def drafts_tree(self) -> bool:
        """Whether trees are drafted, not chains."""
        own = self.speculative_token_tree is not None or self.suffix_decoding_use_tree or self.rest_use_tree
        own = own or self.method in ("recycling", "lookahead")
        return bool(own) or (self.method == "hybrid" and self.drafters[1].drafts_tree)

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
