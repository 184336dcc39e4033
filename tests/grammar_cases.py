"""Models with tokenizers of several kinds, and what tests do with a grammar: its masks, acceptance, random walks."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from tiny import model_of
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from spec_jax.grammar import TokenAutomaton, json_schema_grammar, regex_grammar
from spec_jax.hub import find_model
from spec_jax.models.gguf_file import GgufFile
from spec_jax.tokenizer import Tokenizer, tokenizer_from_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = (0, 2)


def in_bytes(text: str) -> str:
    """`text` as byte-level vocabularies spell it."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in splitter.pre_tokenize_str(text))


def model_with(backend: Backend, eos=EOS, vocab_size=None):
    tokenizer = Tokenizer(backend)
    rows = tokenizer.vocab_size + 5  # embeddings are padded
    module = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=rows, max_position_embeddings=64))
    return model_of(module, {}, usable=vocab_size or tokenizer.vocab_size, tokenizer=tokenizer, eos=eos)


def backend_of(words, merges=(), decoder=None, **options) -> Backend:
    tokens = list(dict.fromkeys([*SPECIAL, *words, *("".join(merge) for merge in merges)]))
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges), **options))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def byte_level(added=(), **options):
    """All bytes, and merges that join a quote, a letter or a space with part of a character, or two of its bytes."""
    east, smile, acute = (in_bytes(c) for c in "東🙂é")
    merges = [tuple(pair) for pair in (smile[:2], east[:2], f'"{acute[0]}', f"a{east[0]}")]
    merges += [(smile[:2], smile[2]), (in_bytes(" "), "a"), ("a", "b"), ("y", "e"), ("ye", "s"), ("1", "2")]
    merges += [('"', ":"), ("}", "}"), (acute[1], "a")]
    backend = backend_of(sorted(pre_tokenizers.ByteLevel.alphabet()), merges, decoders.ByteLevel())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    return model_with(backend, **options)


def sentence_piece(drops_space=True):
    """Characters and words with the mark for a space; other characters fall back to bytes."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + list('▁abyes01:{}"é,.') + ["▁▁"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("y", "e"), ("ye", "s"), ("1", "0"), ('"', ":")]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if drops_space else []
    backend = backend_of(words, merges, decoders.Sequence(steps), byte_fallback=True)
    prepend = [normalizers.Prepend("▁")] if drops_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    return model_with(backend)


def metaspace():
    words = list('▁abcyes0123456789:{}[]"é東🙂,.-$\\') + ["▁a", "ab", "yes", "▁ab", "12"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("1", "2")]
    backend = backend_of(words, merges, decoders.Metaspace())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return model_with(backend)


TARGETS = {
    "byte-level": byte_level(),
    "sentencepiece": sentence_piece(),
    "sentencepiece that keeps the space": sentence_piece(drops_space=False),
    "metaspace": metaspace(),
}
json_grammar = functools.lru_cache(json_schema_grammar)
regex = functools.lru_cache(regex_grammar)


@jax.jit
def step(grammar: TokenAutomaton, state, token):
    return grammar(state, token)


def masks(grammar: TokenAutomaton, ids):
    """The mask in front of every one of `ids`, and the last one: bool [len(ids) + 1, vocab_size]."""
    state, mask = step(grammar, jnp.int32(0), jnp.int32(-1))
    found = [np.asarray(mask)]
    for token in ids:
        state, mask = step(grammar, state, jnp.int32(token))
        found.append(np.asarray(mask))
    return np.stack(found)


def accepts(grammar: TokenAutomaton, ids) -> bool:
    """Whether every token is allowed and the text may end behind them; then with every end token."""
    allowed = masks(grammar, ids)
    assert len(set(allowed[-1, list(EOS)])) == 1
    return bool(allowed[np.arange(len(ids)), np.array(ids, int)].all() and allowed[-1, EOS[0]])


def random_walk(grammar: TokenAutomaton, rng) -> list[int]:
    """Tokens up to an end token; classes are drawn first, so that rare ones such as a closing quote are not rare."""
    ids, state, token = [], jnp.int32(0), -1
    for _ in range(2000):
        state, mask = step(grammar, state, jnp.int32(token))
        mask = np.asarray(mask)
        assert mask.any(), f"nothing is allowed after {ids}"
        classes = np.asarray(grammar.class_of)
        token = int(rng.choice(np.flatnonzero(mask & (classes == rng.choice(np.unique(classes[mask]))))))
        if token in EOS:
            return ids
        ids.append(token)
    raise AssertionError("no end in sight")


@functools.lru_cache
def smollm2():
    """The default model without its weights; its file must be at hand, so for slow tests only."""
    tokenizer = tokenizer_from_gguf(GgufFile(find_model("smollm2-135m-instruct")).metadata, "smollm2")
    module = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=49152, max_position_embeddings=8192))
    return model_of(module, {}, tokenizer=tokenizer, eos=tokenizer.eos_token_ids)
