"""What the planner projects for accelerators from acceptances that were measured on another machine.

A projection from published peaks: nothing is run there. Steps are taken as they were on average: tokens that they
emitted, draft tokens that they verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_jax import draft_costs, load_model
from spec_jax.config import parse_speculative_config
from spec_jax.devices import find_device
from spec_jax.drafting.registry import skip_layers
from spec_jax.model_costs import ModelCosts, costs_from_config
from spec_jax.planner import speculative_step
from spec_jax.roofline import Load

DEVICES = ("v5e", "h200")


def costs_of(target: Any) -> ModelCosts:
    """The costs of a loaded model in bfloat16."""
    c = target.config
    return costs_from_config(
        {
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_layers,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "tie_word_embeddings": c.tie_embeddings,
            "torch_dtype": "bfloat16",
        }
    )


def costs_of_drafter(target: Any, config: Mapping[str, Any]) -> draft_costs.DraftCosts:
    """What a configured drafter costs: a hybrid as its second part in every step, a cascade as its model alone."""
    parsed = parse_speculative_config(config)
    if parsed.method == "hybrid":
        parsed = parsed.drafters[1]
    if parsed.method == "layer_skip":
        return draft_costs.layer_skip(costs_of(target), len(skip_layers(parsed, target.config.num_layers)))
    if parsed.method in ("draft_model", "cascade"):
        model = load_model(parsed.model) if isinstance(parsed.model, str) else parsed.model
        return draft_costs.draft_model(costs_of(model))
    return draft_costs.lookup()


def projected_speedups(
    target: Any, tokens_per_step: float, drafted_per_step: float, context: int, drafter: Any = None
) -> dict[str, float]:
    """Projected speed-up over plain decoding by device, batch 1.

    Args:
      tokens_per_step, drafted_per_step: means over all steps, those without a draft included.
      context: tokens in the cache.
      drafter: `DraftCosts`; None: a lookup, which costs nothing.
    """
    nodes = max(round(drafted_per_step), 1)
    tokens = min(max(tokens_per_step, 1.0), nodes + 1)
    drafter = draft_costs.lookup() if drafter is None else drafter
    costs, load = costs_of(target), Load(batch=1, context=max(context, 1))

    def speedup(name):
        found = speculative_step(find_device(name), costs, drafter, load, tokens, nodes).speedup
        # Steps that drafted nothing did not run the drafter.
        drafting = min(drafted_per_step / nodes, 1.0)
        return tokens / (1 + drafting * (tokens / found - 1))

    return {name: speedup(name) for name in DEVICES}
