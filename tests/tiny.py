"""Tiny models and drafters whose accept patterns can be chosen: random drafters accept nothing and test nothing.

TINY: a random Llama with clear top-2 gaps. MARKOV: logits depend on the last token only, in closed form. SCRIPT
proposes the true continuation with chosen positions corrupted; ORACLE accepts everything, ANTI nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.compilation import compiled
from spec_jax.decode import Decoder
from spec_jax.decode_state import CONTEXT, LENGTH
from spec_jax.drafting.base import BaseDrafter, Draft, NoDrafter
from spec_jax.exactness import row_blocks
from spec_jax.generation import capacity_for, generate
from spec_jax.models.config import LlamaConfig
from spec_jax.models.llama import Llama, init_params
from spec_jax.models.model import Model
from spec_jax.models.packing import pack_params
from spec_jax.models.rope import inverse_frequencies
from spec_jax.requests import sampling_state
from spec_jax.sampling import SamplingState


@functools.lru_cache
def tiny(
    seed=0,
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=97,
    context=256,
    usable=None,
    dtype="float32",
    **config,
):
    """A random model; the head is scaled so that most top-2 gaps are far above float32 rounding."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        **config,
    )
    module = Llama(config, dtype)
    params = _random_params(module, seed)
    if "lm_head" in params:
        params["lm_head"] = params["lm_head"] * 6
    return model_of(module, params, usable=usable, name=f"tiny-{seed}")


@functools.lru_cache
def _first_params(module):
    return init_params(module, 0)


def _random_params(module, seed):
    """Random parameters; every seed but 0 is drawn without compiling anything, at the sizes of `init_params`."""
    if seed == 0:
        return dict(_first_params(module))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name.endswith(("norm", "bias")):
            return jnp.asarray(np.full(leaf.shape, float(name.endswith("norm"))), leaf.dtype)
        inputs = leaf.shape[-1] if name in ("embedding", "lm_head") else leaf.shape[-2]
        return jnp.asarray(rng.standard_normal(leaf.shape) / inputs**0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: init_params(module)))


def model_of(module, params, usable=None, name="toy", tokenizer=None, eos=()):
    """Wraps a module and parameters as a `Model`."""
    return Model(
        module=module,
        params=params,
        tokenizer=tokenizer,
        eos_token_ids=tuple(eos),
        name=name,
        max_model_len=module.config.max_position_embeddings,
        vocab_size=usable or module.config.vocab_size,
    )


@functools.lru_cache
def packed(model):
    """The same model with its weights packed for the CPU kernels."""
    module = Llama(model.config, model.module.dtype, packed=True)
    return dataclasses.replace(model, module=module, params=pack_params(dict(model.params)))


def markov(table: np.ndarray, context: int = 64, pad_vocab: int = 0) -> Model:
    """A transformer whose next-token law is exactly `table[last token]` (rows sum to 1; zeros become about e^-60)."""
    vocab = table.shape[0]
    rows = vocab + pad_vocab
    width = max(8, rows)
    config = LlamaConfig(rows, width, width, 1, 2, 1, 4, context)
    module = Llama(config)
    params = jax.tree.map(np.array, _random_params(module, 1))
    params["embedding"][:] = np.eye(rows, width)
    params["layer_0"]["o"][:] = 0
    params["layer_0"]["down"][:] = 0
    params["lm_head"][:] = 0
    if pad_vocab:
        params["lm_head"][vocab:, :] = 50.0  # padded rows hold large values on purpose
    params["lm_head"][:vocab, :vocab] = (np.log(np.maximum(table, 1e-26)) / np.sqrt(width)).T
    return model_of(module, jax.tree.map(jnp.asarray, params), usable=vocab, name="markov")


def random_table(vocab: int, seed: int, concentration: float = 0.7) -> np.ndarray:
    """A random row-stochastic table [vocab, vocab]."""
    return np.random.default_rng(seed).dirichlet(np.ones(vocab) * concentration, size=vocab)


@dataclasses.dataclass(frozen=True)
class ScriptDrafter(BaseDrafter):
    """Proposes what its params say comes next: {"text": int32 [batch, positions], "count": int32 [batch, positions]}.

    The token proposed for position p is text[:, p]; count[:, p] limits a proposal that starts at position p.
    """

    num_nodes: int

    def propose(self, params, state, view):
        at = view.length[:, None] + jnp.arange(self.num_nodes)
        at = jnp.minimum(at, params["text"].shape[1] - 1)
        tokens = jnp.take_along_axis(params["text"], at, axis=1)
        count = jnp.take_along_axis(params["count"], view.length[:, None], axis=1)[:, 0]
        return Draft(tokens, jnp.minimum(count, self.num_nodes)), state


def script(texts: list[list[int]], k: int, wrong=(), vocab: int = 97, counts=None, size: int = 300):
    """A (drafter, params) pair that proposes `texts` (prompt and continuation per row), corrupted where `wrong` says.

    Args:
      wrong: positions at which the proposal is off by one (of every row), a list of such lists per row, or "all".
      counts: {position: count} limits of proposals that start there.
    """
    text = np.zeros((len(texts), size), np.int32)
    for row, ids in enumerate(texts):
        text[row, : len(ids)] = ids
        text[row, len(ids) :] = 1
        positions = (
            range(size) if wrong == "all" else wrong[row] if wrong and isinstance(wrong[0], (list, tuple)) else wrong
        )
        for p in positions:
            text[row, p] = (text[row, p] + 1) % vocab
    count = np.full((len(texts), size), k, np.int32)
    for position, limit in (counts or {}).items():
        count[:, position] = limit
    return ScriptDrafter(k), {"text": jnp.asarray(text), "count": jnp.asarray(count)}


@dataclasses.dataclass(frozen=True)
class TreeDrafter(BaseDrafter):
    """An uneven tree: a script's continuation on the branch 1, 3, 5, other tokens on the other nodes."""

    num_nodes: int = 6
    parents: tuple[int, ...] | None = (-1, -1, 0, 1, 1, 3)
    dynamic_tree: bool = False

    def propose(self, params, state, view):
        at = jnp.minimum(view.length[:, None] + jnp.arange(3), params["text"].shape[1] - 1)
        right = jnp.take_along_axis(params["text"], at, axis=1)
        wrong = (right + 1) % 97
        nodes = [wrong[:, 0], right[:, 0], wrong[:, 1], right[:, 1], wrong[:, 0], right[:, 2]]
        draft = Draft(jnp.stack(nodes, axis=1), jnp.full(view.length.shape, self.num_nodes, jnp.int32))
        return (draft if self.parents else draft.replace(parents=jnp.array(TreeDrafter.parents))), state


def plain(model, prompts, sampling=None, **options):
    """Token ids of plain decoding."""
    return [s.token_ids for s in generate(model, prompts, None, sampling, **options).sequences]


def perturbed(model: Model, scale: float, seed: int = 9) -> Model:
    """The model with noise of relative size `scale` on its weights: as a draft model it is right now and then."""
    rng = np.random.default_rng(seed)

    def shake(x):
        return jnp.asarray(np.asarray(x) * (1 + scale * rng.standard_normal(x.shape)), x.dtype)

    return dataclasses.replace(model, params=jax.tree.map(shake, model.params), name=f"{model.name}-perturbed")


def truncated(model: Model, layers: tuple[int, ...]) -> Model:
    """The model with these layers only, renumbered."""
    config = dataclasses.replace(model.config, num_layers=len(layers))
    params = {k: v for k, v in model.params.items() if not k.startswith("layer_")}
    params |= {f"layer_{new}": model.params[f"layer_{old}"] for new, old in enumerate(layers)}
    return model_of(dataclasses.replace(model.module, config=config), params, usable=model.vocab_size, name="truncated")


# --- the compiled loop, step by step ----------------------------------------------------------------------------------


def decoder_of(model: Model, drafter, batch: int, width: int = 8, rule: str = "coupled") -> Decoder:
    """The decoder that `generate` would use, so that both share their compiled programs."""
    rows = row_blocks(None, batch, width, model.module)
    return Decoder(model.module, drafter, model.vocab_size, width, rule, rows, min(rows.block or 64, 64))


def greedy_state(batch: int) -> SamplingState:
    """Greedy rows without stop ids, as `generate` would make them."""
    return sampling_state([], batch)


def start(decoder: Decoder, model: Model, drafter_params, prompts, budget: int, capacity: int | None = None):
    """The state in front of the first step of a greedy run of `prompts`, `budget` tokens each."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    limit = np.minimum(lengths + budget, model.max_model_len).astype(np.int32)
    reason = np.where(lengths + budget > model.max_model_len, CONTEXT, LENGTH).astype(np.int32)
    tokens = np.zeros((len(prompts), capacity or capacity_for(int(limit.max()), decoder.width)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    arrays = map(jnp.asarray, (tokens, lengths, limit, reason))
    arguments = (model.params, drafter_params, *arrays, greedy_state(len(prompts)))
    init, _ = compiled(decoder.for_prefill(), "init", *arguments)
    return init(*arguments)


def advance(decoder: Decoder, model: Model, drafter_params, state, steps: int = 2**31 - 1):
    """The state after at most `steps` more steps. Donates `state`."""
    arguments = (model.params, drafter_params, state, jnp.int32(steps), jnp.int32(1))
    return compiled(decoder, "run", *arguments)[0](*arguments)


def plain_drafter() -> NoDrafter:
    return NoDrafter()


def assert_same_cache(ours, theirs, row: int, count: int):
    """The first `count` slots of one row hold the same bits in both caches, in every layer."""
    for a, b in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[row, :, :count], np.asarray(b)[row, :, :count])


def prompts_of(model, lengths, seed=0):
    """Random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.vocab_size, n).tolist() for n in lengths]


def experiment(name: str):
    """An experiment script as a module; it finds those beside it, as where it is run."""
    path = pathlib.Path(__file__).parent.parent / "experiments" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --- an independent reference: NumPy, float64, no cache -------------------------------------------------------------


def numpy_logits(model: Model, tokens: list[int]) -> np.ndarray:
    """float64 logits [len(tokens), vocab] of one sequence, recomputed from scratch with full attention."""
    c, p = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    count = len(tokens)
    x = p["embedding"][tokens]
    frequencies, factor = inverse_frequencies(c.rope, c.head_dim)
    angle = np.outer(np.arange(count), frequencies)[:, None, :]

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * w

    def rotate(x):
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for i in range(c.num_layers):
        w = p[f"layer_{i}"]
        h = norm(x, w["attention_norm"])
        q, k, v = ((h @ w[n] + w.get(f"{n}_bias", 0)).reshape(count, -1, c.head_dim) for n in "qkv")
        if c.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(t, c.query_group, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        x = x + out @ w["o"] + w.get("o_bias", 0)
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"] + w.get("gate_bias", 0)
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"] + w.get("up_bias", 0))) @ w["down"] + w.get("down_bias", 0)
    head = p["embedding"] if c.tie_embeddings else p["lm_head"]
    return norm(x, p["final_norm"]) @ head.T


def numpy_greedy(model: Model, prompt: list[int], count: int, stop: tuple[int, ...] = ()) -> list[int]:
    """Greedy decoding that re-runs the full sequence for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(numpy_logits(model, tokens)[-1, : model.vocab_size].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


# --- a toy tokenizer --------------------------------------------------------------------------------------------------


class ToyTokenizer:
    """Tokens are byte strings: letters, pairs of letters, parts of characters, one byte that is never valid, and the
    last id is a special token without text."""

    has_chat_template = False

    def __init__(self, vocab: int = 97):
        letters = [bytes([b]) for b in b" abcdefghijklmnopqrstuvwxyz.,"]
        parts = [bytes([b]) for b in "é日😀".encode()] + [b"\xff"]
        pairs = [a + b for a in letters[1:13] for b in letters[1:13]]
        self.pieces = (letters + parts + pairs)[: vocab - 1] + [b""]

    @property
    def vocabulary(self):
        return {piece.hex(): i for i, piece in enumerate(self.pieces)}

    def encode(self, text, add_special_tokens=True):
        rest, ids = text.encode(), []
        while rest:
            best = max(
                (i for i, p in enumerate(self.pieces) if p and rest.startswith(p)), key=lambda i: len(self.pieces[i])
            )
            ids.append(best)
            rest = rest[len(self.pieces[best]) :]
        return ids

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


@functools.lru_cache
def with_text(model: Model, eos: tuple[int, ...] = ()) -> Model:
    """The model with a toy tokenizer and these end-of-text ids."""
    return dataclasses.replace(model, tokenizer=ToyTokenizer(model.vocab_size), eos_token_ids=eos)


def replay(prompt, output, propose):
    """Drafts, draft tokens and accepted tokens of a greedy run that ended in `output`; propose(text) is the drafter."""
    text, left = list(prompt), list(output)
    drafts = drafted = accepted = 0
    while left:
        proposal = propose(text)[: len(left) - 1]
        n = next((i for i, t in enumerate(proposal) if t != left[i]), len(proposal))
        drafts, drafted, accepted = drafts + bool(proposal), drafted + len(proposal), accepted + n
        text, left = text + left[: n + 1], left[n + 1 :]
    return drafts, drafted, accepted
