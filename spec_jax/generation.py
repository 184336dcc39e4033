"""`generate` and `make_decoder`: one call from prompts to results, over the slots of one compiled loop."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import cache as kv
from spec_jax import rule_names
from spec_jax.config import SpeculativeConfig, auto_widths, choose_width, parse_speculative_config
from spec_jax.decode import Decoder
from spec_jax.draft_length import CostModel
from spec_jax.draft_policies import CONFIDENCE, SURVIVAL, BatchTable, HeuristicSchedule, StopRule
from spec_jax.drafting.base import Drafter, NoDrafter
from spec_jax.drafting.registry import build_drafter
from spec_jax.drafting.text_guide import TextGuide
from spec_jax.exactness import level_of, row_blocks
from spec_jax.method_options import FOR_THE_WHOLE
from spec_jax.metrics import Completion, GenerateResult, Stats, total
from spec_jax.models.layers import RowBlocks
from spec_jax.progress import progress_bar
from spec_jax.requests import Request, encode_prompts, layout_of, make_requests, messages_of, per_prompt
from spec_jax.results import untouched
from spec_jax.sampling_params import SamplingParams
from spec_jax.session import Session, release_sessions
from spec_jax.slots import Slots, Source

MAX_BATCH = 64
MIN_BLOCKS = 4
MAX_CHUNK = 64
ASSUMED_FREE = 4 << 30


def generate(
    target: Any,
    prompts: Any,
    speculative_config: Any = None,
    sampling: SamplingParams | Sequence[SamplingParams] | Mapping | None = None,
    verify_width: int | str | None = None,
    exact: bool | None = None,
    max_batch_size: int | None = None,
    drafter: tuple[Any, Any] | None = None,
    progress: bool | None = None,
) -> GenerateResult:
    """Generates continuations, exactly as the target alone would.

    Args:
      target: a loaded `Model`.
      prompts: a string, a list of strings, a list of token-id lists, or a list of conversations (lists of
        {"role", "content"} messages, rendered with the model's chat template).
      speculative_config: None, a dict, a JSON object as text, or a `SpeculativeConfig`.
      sampling: one `SamplingParams` (or dict) for all prompts, or a list with one per prompt; None is greedy.
      verify_width: rows of one verification step; None takes the config's, else the default (8 up to K = 7). "auto":
        see `SpeculativeConfig`; under `standard` the draft lengths, and with them the random numbers that are used,
        then depend on measured times, so that a sampled text is not repeatable.
      exact: True: logits independent of drafter, K, width, batch and bucket (E2), whatever it costs. None: E2 while
        batch x width fits one row block, else E1 (plain and speculative runs of the same width and batch are
        bit-identical). False: the narrowest width, no promise beyond E0.
      max_batch_size: slots decoded side by side; None takes what memory allows, at most 64. Further prompts enter the
        slots in which others have ended.
      drafter: (drafter, its params) for a drafter of one's own, instead of `speculative_config`'s method; the
        config may still give verify_width and rejection_sample_method.
      progress: a progress bar on stderr; None: where that is a terminal and prompts wait for slots.

    Returns:
      A `GenerateResult`, sequences in the order of the prompts, n per prompt.

    Raises:
      ValueError: for bad input, naming the value and what is allowed.
    """
    check_progress(progress)
    config = check_config(speculative_config, drafter, verify_width)
    ids = encode_prompts(target, prompts)
    requests = make_requests(target, ids, per_prompt(sampling, len(ids)), messages_of(prompts))
    call = prepare(target, requests, config, verify_width, exact, max_batch_size, drafter)
    return call.finish(progress)


@dataclasses.dataclass
class Call:
    """One call behind its checks: the requests, the decoder that serves them and, while it runs, its slots.

    Attributes:
      active: the requests that may emit a token.
      drafter_params: the drafter's parameters.
      level: the exactness level of its text.
      batch, capacity: slots, and tokens per slot.
      config, exact, max_batch_size: as asked for.
    """

    target: Any
    requests: list[Request]
    active: list[Request]
    decoder: Decoder
    drafter_params: Any
    level: str
    batch: int
    capacity: int
    config: SpeculativeConfig
    exact: bool | None
    max_batch_size: int | None

    def start(self, source: Source | None = None) -> Slots:
        """Fresh slots for the active requests."""
        layout = layout_of(self.active, self.target.vocab_size)
        params, guide = self.drafter_params, None
        if isinstance(params, TextGuide):
            params, guide = params.empty(self.batch), params
        return Slots(self.target, self.decoder, params, self.active, self.batch, layout, self.capacity, source, guide)

    def finish(self, progress: bool | None = False, source: Source | None = None) -> GenerateResult:
        """Decodes everything."""
        slots = self.start(source)
        found = {}
        with progress_bar(progress, len(self.requests), self.batch) as bar:
            if bar is not None:
                bar.advance(0, sequences=len(self.requests) - len(self.active))  # these may not emit anything
            while slots.busy:
                slots.fill()
                for index, sequence in slots.advance(until_end=bar is not None):
                    found[index] = sequence
                    if bar is not None:
                        bar.advance(len(sequence.token_ids))
        return self.result(slots, found)

    def result(self, slots: Slots, found: Mapping[int, Completion]) -> GenerateResult:
        """What the caller gets, from the completions by request index."""
        nodes = self.decoder.drafter.num_nodes
        sequences = [found.get(r.index) or untouched(self.target, r, nodes) for r in self.requests]
        compile_seconds, prefill_seconds, decode_seconds = map(float, slots.seconds)
        call = Stats(
            compile_seconds=compile_seconds,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            num_forward_rows=slots.forward_rows,
            remark=getattr(self.decoder.drafter, "remark", ""),
        )
        return GenerateResult(
            sequences=sequences,
            exactness=self.level,
            verify_width=self.decoder.width,
            stats=total([*(s.stats for s in sequences), call]),
            session=Session(self, slots, sequences),
        )


def prepare(
    target: Any,
    requests: list[Request],
    config: SpeculativeConfig,
    verify_width: int | str | None,
    exact: bool | None,
    max_batch_size: int | None,
    drafter: tuple[Any, Any] | None,
) -> Call:
    """Chooses width, batch, row blocks and capacity, and builds the drafter."""
    active = [r for r in requests if r.params.max_tokens > 0 and len(r.prompt) < target.max_model_len]
    width_asked = verify_width if verify_width is not None else config.verify_width
    longest = max((min(len(r.prompt) + r.params.max_tokens, target.max_model_len) for r in active), default=1)
    batch = _batch_size(target, len(active), longest, max_batch_size)
    num_nodes = drafter[0].num_nodes if drafter else config.num_speculative_tokens
    width = num_nodes + 1 if exact is False and width_asked is None else choose_width(num_nodes, width_asked)
    if width_asked == "auto" and exact is None:
        exact = True  # E1 is for one width
    # Without a token to choose nothing runs, and nothing need be measured for it.
    rows = row_blocks(exact, batch, width, target.module if active else None)
    built, params = drafter if drafter else build_drafter(config, target, rows)
    policy = draft_length_policy(built, width, rows, config, width_asked == "auto")
    decoder = _decoder(target, built, width, (config.rule, config.rule_options), rows, None, policy, stop_rule(config))
    tree = built.parents is not None or built.dynamic_tree
    level = "lossy" if config.rule in rule_names.LOSSY else level_of(rows, exact, tree)
    capacity = capacity_for(longest, max(width, built.needs.slots))
    return Call(target, requests, active, decoder, params, level, batch, capacity, config, exact, max_batch_size)


def make_decoder(
    target: Any,
    drafter: Any = None,
    *,
    batch: int = 1,
    verify_width: int | str | None = None,
    rejection_sample_method: str = "coupled",
    rule_options: Mapping[str, float] | None = None,
    exact: bool | None = None,
    prefill_chunk: int | None = None,
):
    """The pure functions underneath `generate`, to jit, export, shard or embed.

    Args:
      target: a loaded `Model`; only its static parts are used.
      drafter: a drafter; None decodes plainly.
      batch: rows, which decides between E2 and E1 when `exact` is None.
      rule_options: of a lossy rule, see `SpeculativeConfig`.

    Returns:
      init(params, drafter_params, tokens, prompt_length, limit, cap_reason, sampling) -> DecodeState and
      run(params, drafter_params, state, max_steps) -> DecodeState; see `decode.Decoder`. With verify_width="auto" `run`
      also takes `pace`, see `draft_length.Pace`.
    """
    drafter = NoDrafter() if drafter is None else drafter
    width = choose_width(drafter.num_nodes, verify_width)
    rule = rule_names.full_name(rejection_sample_method)
    options = rule_names.options_of(rule, rule_options or {})
    if prefill_chunk is not None and (not isinstance(prefill_chunk, int) or prefill_chunk < 1):
        raise ValueError(f"prefill_chunk={prefill_chunk!r} must be a positive integer, or None for the default")
    auto = verify_width == "auto"
    rows = row_blocks(True if auto and exact is None else exact, batch, width, target.module)
    policy = draft_length_policy(drafter, width, rows, SpeculativeConfig(), auto)
    decoder = _decoder(target, drafter, width, (rule, options), rows, prefill_chunk, policy)
    return decoder.init, decoder.run


def check_progress(progress: Any) -> None:
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress={progress!r} must be True, False or None")


def check_config(value: Any, drafter: Any, verify_width: int | str | None = None) -> SpeculativeConfig:
    if drafter is None:
        config = parse_speculative_config(value, verify_width)
        given = [name for name in FOR_THE_WHOLE if getattr(config, name) is not None] if config.method == "none" else []
        if given:
            raise ValueError(f"{given[0]} is about drafts, and method='none' makes none; give a method or a drafter")
        return config
    if not (isinstance(drafter, tuple) and len(drafter) == 2 and hasattr(drafter[0], "propose")):
        raise ValueError(f"drafter must be a pair (drafter, its parameters), not {drafter!r}")
    if isinstance(drafter[0], type):
        raise ValueError(f"drafter must hold an instance, not the class {drafter[0].__name__}; call it")
    protocol = (*Drafter.__annotations__, *(name for name in vars(Drafter) if not name.startswith("_")))
    missing = [name for name in protocol if not hasattr(drafter[0], name)]
    if missing:
        raise ValueError(f"drafter {type(drafter[0]).__name__} lacks {', '.join(missing)}; derive it from "
                         "spec_jax.drafting.base.BaseDrafter, which has defaults")  # fmt: skip
    try:
        hash(drafter[0])
    except TypeError:
        name = type(drafter[0]).__name__
        raise ValueError(f"drafter {name} is not hashable; make it a frozen dataclass without arrays") from None
    if isinstance(value, Mapping) and "method" not in value:
        value = {"method": "none", **value}
    config = parse_speculative_config(value)
    if config.method != "none":
        raise ValueError(f"give either a drafter or a method, not both: method={config.method!r} came with drafter="
                         f"{drafter[0]!r}")  # fmt: skip
    return config


def _batch_size(target: Any, active: int, longest: int, asked: int | None) -> int:
    if asked is not None:
        if not isinstance(asked, numbers.Integral) or isinstance(asked, bool) or asked < 1:
            raise ValueError(f"max_batch_size={asked!r} must be a positive integer, or None to let memory decide")
        return max(min(int(asked), active), 1)
    c = target.config
    slot_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(target.module.dtype).itemsize
    wanted = max(min(active, MAX_BATCH), 1)

    def fits():
        return int(_free_bytes() // 2 // (slot_bytes * capacity_for(longest, 8)))

    if fits() < wanted:
        release_sessions()  # their next turn prefills again
    return max(min(fits(), wanted), 1)


def _free_bytes() -> int:
    """Memory that is free on the default device, or on the host where the device does not tell."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells how much is free
        return ASSUMED_FREE


def draft_length_policy(drafter: Any, width: int, rows: RowBlocks, config: SpeculativeConfig, auto: bool) -> Any:
    """What chooses the draft length: of `auto` the cost model, else what the configuration says; None: nothing."""
    if drafter.num_nodes == 0:
        return None
    widths = (width,) if rows.independent or not auto else auto_widths(width)
    if auto:
        dataclasses.replace(config, verify_width="auto")  # checks what goes with it, where it was asked for beside it
        return CostModel(widths, drafter.priors)
    if config.num_speculative_tokens_per_batch_size is not None:
        most = max(k for *_, k in config.num_speculative_tokens_per_batch_size)
        if most > drafter.num_nodes:
            raise ValueError(f"num_speculative_tokens_per_batch_size asks for {most} draft tokens, but the drafter "
                             f"makes {drafter.num_nodes} at most")  # fmt: skip
        return BatchTable(widths, config.num_speculative_tokens_per_batch_size, drafter.priors)
    if config.num_assistant_tokens_schedule in ("heuristic", "heuristic_transient"):
        kept, k = config.num_assistant_tokens_schedule == "heuristic", drafter.num_nodes
        return HeuristicSchedule(widths, k, k, kept, drafter.priors)
    return None


def stop_rule(config: SpeculativeConfig) -> StopRule | None:
    """When a model that drafts stops by itself."""
    if config.assistant_confidence_threshold is not None:
        return StopRule(CONFIDENCE, config.assistant_confidence_threshold)
    if config.draft_survival_threshold is not None:
        return StopRule(SURVIVAL, config.draft_survival_threshold)
    return None


def _decoder(target, drafter, width, rule, rows: RowBlocks, prefill_chunk=None, policy=None, stop=None) -> Decoder:
    # Canonical rows are prefilled one block at a time; other prefills run at as many rows as there are.
    chunk = prefill_chunk or (min(rows.block, MAX_CHUNK) if rows.tile is not None else MAX_CHUNK)
    rule, options = rule
    return Decoder(target.module, drafter, target.vocab_size, width, rule, rows, chunk, policy, options, stop)


def capacity_for(longest: int, width: int) -> int:
    """Slots for rows of up to `longest` tokens and a flight of `width` rows.

    A power of two of KV blocks, at least four, so that prompts of many lengths share one program. Attention reads no
    block beyond the longest row.
    """
    blocks = max(-(-(longest + width) // kv.BLOCK), MIN_BLOCKS)
    return kv.BLOCK * kv.power_of_two(blocks)
