"""Drafters that draft trees: which nodes, and what their caches hold behind every node that can be accepted.

Guards B35 (masks, positions and the copy of the path in uneven trees) and B32 for a draft model's own cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_draft_model import BATCH, WIDTH, Driver, small

from spec_jax.compilation import compiled, program_count
from spec_jax.config import SpeculativeConfig
from spec_jax.drafting.base import Seen
from spec_jax.drafting.draft_model import DraftModelDrafter
from spec_jax.drafting.layer_skip import LayerSkipDrafter
from spec_jax.drafting.tree_drafting import DynamicTree, StaticTree
from spec_jax.exactness import row_blocks
from spec_jax.generation import generate, prepare
from spec_jax.requests import make_requests
from spec_jax.sampling_params import SamplingParams

SLOW = pytest.mark.slow
TREES = {
    "uneven": StaticTree((-1, -1, -1, 0, 1, 1, 5)),  # under every rank some leaf and some parent
    "siblings": StaticTree((-1, -1, -1)),
    "one": StaticTree((-1,)),
    "deep": StaticTree((-1, 0, 1, 1, 2, 3, 3)),
    "eagle2": DynamicTree(7, top_k=3, levels=4),
    "opt_tree": DynamicTree(7, top_k=2, levels=6, threshold=0.4),
    "one level": DynamicTree(3, top_k=3, levels=1),
}


# --- an independent reference: every path recomputed from scratch -----------------------------------------------------


def reference_tree(model, text, tree):
    """(tokens, parents) of the tree that is drafted greedily behind `text`."""
    return (_dynamic if isinstance(tree, DynamicTree) else _static)(model, text, tree)


def _log_probs(model, text):
    logits = tiny.numpy_logits(model, text)[-1, : model.vocab_size]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def _static(model, text, tree):
    """The likeliest tokens behind every path, in order."""
    tokens = []
    for node, parent in enumerate(tree.parents):
        rank = sum(p == parent for p in tree.parents[:node])
        tokens.append(int(np.argsort(-_log_probs(model, text + path_to(tree.parents, tokens, parent)))[rank]))
    return tokens, list(tree.parents)


def _dynamic(model, text, tree):
    """EAGLE-2, and OPT-Tree where the tree has a threshold: the best of a pool of paths (path, log-probability)."""
    pool, layer, expected = [], [((), 0.0)], 0.0
    for _ in range(tree.levels):
        grown = []
        for path, score in layer:
            log_probs = _log_probs(model, [*text, *path])
            grown += [((*path, int(t)), score + log_probs[t]) for t in np.argsort(-log_probs)[: tree.top_k]]
        pool += grown
        layer = sorted(grown, key=lambda x: -x[1])[: tree.top_k]
        best = sorted(pool, key=lambda x: -x[1])[: tree.nodes]
        before, expected = expected, sum(np.exp(score) for _, score in best)
        if tree.threshold is not None and expected - before <= tree.threshold:
            break
    paths = [path for path, _ in pool if path in {path for path, _ in best}]
    return [path[-1] for path in paths], [paths.index(path[:-1]) if path[:-1] else -1 for path in paths]


def nodes_to(parents, node):
    """The nodes that lead to a node, itself last."""
    return [] if node < 0 else [*nodes_to(parents, parents[node]), node]


def path_to(parents, tokens, node):
    """The tokens that lead to a node, its own last."""
    return [tokens[n] for n in nodes_to(parents, node)]


def walk(tokens, parents, text):
    """The nodes of a tree that `text` goes along."""
    nodes, parent = [], -1
    for token in text:
        found = [n for n, p in enumerate(parents) if p == parent and tokens[n] == token]
        if not found:
            break
        nodes.append(parent := found[0])
    return nodes


def assert_close_cache(ours, theirs, row, count):
    for a, b in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
        np.testing.assert_allclose(np.asarray(a)[row, :, :count], np.asarray(b)[row, :, :count], atol=1e-5)


# --- a draft model by hand: every node accepted -----------------------------------------------------------------------


CONTEXT = 80
"""Of the draft model; texts stay below it, but where that is the question."""


class TreeDriver(Driver):
    """Accepts whatever nodes it is told to. Drivers share the prefill, which knows nothing of trees."""

    def __init__(self, model, tree):
        super().__init__(model)
        self.tree = tree
        self.drafter = dataclasses.replace(self.drafter, num_nodes=tree.nodes, tree=tree, max_positions=CONTEXT)
        self._commit, self._whole, self._propose = (
            jax.jit(self.drafter.commit),
            jax.jit(self.drafter.propose),
            self._keep,
        )

    def start(self, texts):
        return chain_driver().start(texts)

    def _keep(self, params, state, view):
        self.draft, state = self._whole(params, state, view)
        return self.draft, state

    def proposals(self, state, texts):
        """[(tokens, parents)] per row, and the state."""
        tokens, state = self.propose(state, texts)
        parents = [self.tree.parents] * BATCH if self.draft.parents is None else self.draft.parents.tolist()
        counts = self.draft.count.tolist()
        return [(t[:c].tolist(), list(p)[:c]) for t, p, c in zip(tokens, parents, counts, strict=True)], state

    def accept(self, state, texts, proposals, targets):
        """Commits the path to one node per row (-1: none of them) and a token of the target's; None: nothing."""
        fed, path = np.full((BATCH, WIDTH), 13, np.int32), np.zeros((BATCH, WIDTH), np.int32)
        start, count, longer = [len(t) - 1 for t in texts], np.zeros(BATCH, np.int32), [list(t) for t in texts]
        for row, (node, (tokens, parents)) in enumerate(zip(targets, proposals, strict=True)):
            if node is None:
                continue
            rows, run = [0, *(n + 1 for n in nodes_to(parents, node))], path_to(parents, tokens, node)
            fed[row, : len(rows)], path[row, : len(rows)], count[row] = [texts[row][-1], *run], rows, len(rows)
            longer[row] += [*run, (int(fed[row, len(run)]) + 29) % 97]
        ints = [jnp.asarray(x, jnp.int32) for x in (fed, start, count, path)]
        seen = Seen(ints[0], ints[0], ints[1], ints[2], {}, None, ints[3], prefill=False)
        return self._commit(self.model.params, state, seen), longer


@functools.lru_cache
def chain_driver():
    return Driver(small())


@functools.lru_cache
def driver(name):
    return TreeDriver(small(), TREES[name])


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=() if n in ("uneven", "eagle2") else SLOW) for n in TREES)])
def test_behind_every_node_cache_and_proposals_are_those_of_a_fresh_drafter(name):
    """Rows accept different nodes, now and then nothing; one begins with a single token, where nothing is in front."""
    d, nodes = driver(name), TREES[name].nodes
    texts = tiny.prompts_of(d.model, (1, 2, 17), seed=4)
    state = d.start(texts)
    order = [*range(-1, nodes), None]
    for turn in range(len(order)):
        proposals, state = d.proposals(state, texts)
        assert proposals == [reference_tree(d.model, t, d.tree) for t in texts]
        state, texts = d.accept(state, texts, proposals, [order[(turn + i) % len(order)] for i in (1, 0, nodes // 2)])
        fresh = d.start(texts)
        for row, text in enumerate(texts):
            held = int(state.cache.length[row])
            assert len(text) - 2 <= held <= len(text) - 1
            assert_close_cache(state.cache, fresh.cache, row, held)


def test_steps_without_a_draft_leave_no_hole():
    d = driver("uneven")
    texts = tiny.prompts_of(d.model, (1, 6, 18), seed=5)
    proposals, state = d.proposals(d.start(texts), texts)
    state, texts = d.accept(state, texts, proposals, (6, -1, 3))
    for run in ((3, 1, 0), (0, 4, 1)):
        runs = [list(range(40, 40 + n)) for n in run]
        state = d.commit(state, texts, runs)
        texts = [t + r for t, r in zip(texts, runs, strict=True)]
    assert d.proposals(state, texts)[0] == [reference_tree(d.model, t, d.tree) for t in texts]


def test_a_tree_ends_with_the_draft_models_context():
    """A node at depth d follows the token d - 1 positions behind the last one."""
    short = DynamicTree(18, top_k=2, levels=6, threshold=0.95)  # stops long before it has as many nodes
    for tree, seeds in ((TREES["uneven"], [6]), (TREES["eagle2"], [6]), (short, range(6, 14))):
        d = TreeDriver(small(), tree)
        for seed in seeds:
            texts = tiny.prompts_of(d.model, (CONTEXT - 2, CONTEXT, CONTEXT + 1), seed=seed)
            proposals, _ = d.proposals(d.start(texts), texts)
            depths = []
            for text, (tokens, parents) in zip(texts, proposals, strict=True):
                full, shape = reference_tree(d.model, text, d.tree)
                inside = [n for n in range(len(full)) if len(nodes_to(shape, n)) <= CONTEXT - len(text) + 1]
                assert (tokens, parents) == ([full[n] for n in inside], [shape[n] for n in inside])
                depths.append(max((len(nodes_to(parents, n)) for n in range(len(tokens))), default=0))
            assert depths[1:] == [1, 0]


# --- in the loop ------------------------------------------------------------------------------------------------------

LENGTHS, BUDGET = (1, 6, 14), 20


@functools.lru_cache
def prompts():
    return tiny.prompts_of(small(), LENGTHS, seed=21)


@functools.lru_cache
def greedy(target):
    return [p + tiny.numpy_greedy(target, p, BUDGET) for p in prompts()]


def of_method(method, tree):
    """(target, drafter, its parameters, the model that it drafts with)."""
    if method == "layer_skip":
        target = tiny.tiny()
        return target, LayerSkipDrafter(tree.nodes, (0,), tree=tree), (), tiny.truncated(target, (0,))
    target, draft = small(), tiny.perturbed(small(), 0.1)
    module = tiny.packed(draft).module
    drafter = DraftModelDrafter(tree.nodes, module, 97, 97, 256, row_blocks(True, 1, 1, module), tree=tree)
    return target, drafter, tiny.packed(draft).params, draft


@pytest.mark.parametrize("method, name", [("draft_model", "uneven"), pytest.param("layer_skip", "eagle2", marks=SLOW)])
def test_every_step_accepts_what_the_reference_tree_holds(method, name):
    """Also what the caches hold: of the target, and of a draft model."""
    tree = TREES[name]
    target, drafter, params, draft = of_method(method, tree)
    model, whole = tiny.packed(target), greedy(target)
    decoder = tiny.decoder_of(model, drafter, 3)
    state = tiny.start(decoder, model, params, prompts(), BUDGET)
    later, steps = 0, 0
    while bool(state.live.any()):
        before, live = np.asarray(state.length), np.asarray(state.live)
        state = tiny.advance(decoder, model, params, state, 1)
        steps += 1
        for row, (text, length) in enumerate(zip(whole, np.asarray(state.length).tolist(), strict=True)):
            assert np.asarray(state.tokens)[row, :length].tolist() == text[:length]
            if not live[row]:
                assert length == before[row]
                continue
            tokens, parents = reference_tree(draft, text[: before[row]], tree)
            nodes = walk(tokens, parents, text[before[row] : -1])
            assert length - before[row] == len(nodes) + 1
            later += sum(parents.index(parents[node]) != node for node in nodes)
        if steps % 4 == 1:
            texts = [t[:n] for t, n in zip(whole, np.asarray(state.length).tolist(), strict=True)]
            fresh = tiny.start(decoder, model, params, texts, 1)
            for row, text in enumerate(texts):
                assert_close_cache(state.cache, fresh.cache, row, len(text) - 1)
                if method == "draft_model":
                    held = int(state.drafter.cache.length[row])
                    assert held >= len(text) - 2
                    assert_close_cache(state.drafter.cache, fresh.drafter.cache, row, held)
    program, _ = compiled(decoder, "run", model.params, params, state, jnp.int32(1), jnp.int32(1))
    assert not any(word in program.as_text() for word in ("infeed", "outfeed", "callback"))
    assert later > 2, "later siblings should be accepted now and then"
    assert steps < BUDGET


# --- through `generate` -----------------------------------------------------------------------------------------------


def drafted(tree, method="layer_skip", **options):
    model = {"model": tiny.perturbed(tiny.tiny(), 0.1)} if method == "draft_model" else {"exit_layer": 1}
    return {"method": method, "speculative_token_tree": tree, **model, **options}


PATHS = [[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]]


@SLOW
def test_a_sampled_text_depends_on_its_own_seed_only():
    """Neither on its slot nor on its batch mates: three requests in two slots, in every order. One program does."""
    config = drafted(PATHS, "draft_model", draft_sample_method="probabilistic")
    params = [SamplingParams(temperature=1.2, seed=seed, max_tokens=12 + 5 * seed) for seed in range(3)]
    found, programs = [], []
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        given = [prompts()[i] for i in order], config, [params[i] for i in order]
        result = generate(tiny.packed(tiny.tiny()), *given, max_batch_size=2)
        found.append({i: s.token_ids for i, s in zip(order, result.sequences, strict=True)})
        assert result.stats.num_accepted_tokens > 0
        programs.append(program_count())
    assert found[0] == found[1] == found[2]
    other = [SamplingParams(temperature=0.7, top_k=9, top_p=0.9, seed=4), SamplingParams(max_tokens=40)]
    generate(tiny.packed(tiny.tiny()), tiny.prompts_of(tiny.tiny(), (30, 2)), config, other, max_batch_size=2)
    assert programs == [program_count()] * 3


@SLOW
def test_a_tree_at_the_end_of_the_context_writes_nothing_outside():
    """Rows end at every offset, in front of a tree that is deeper than their room; a later row uses the slot again."""
    target = dataclasses.replace(tiny.packed(tiny.tiny()), max_model_len=40)
    given = tiny.prompts_of(target, (33, 34, 35, 36, 37, 38, 39, 5, 20, 31), seed=8)
    result = generate(target, given, drafted("opt_tree", "draft_model", num_speculative_tokens=7), max_batch_size=3)
    for prompt, sequence in zip(given, result.sequences, strict=True):
        assert sequence.token_ids == tiny.numpy_greedy(tiny.tiny(), prompt, 40 - len(prompt))
        assert sequence.finish_reason == "context"
    assert result.stats.draft_acceptance_rate > 0.1


@pytest.mark.parametrize("longest", [482, 483, 484])
def test_the_cache_holds_what_a_growing_tree_writes(longest):
    """Its flight is wider than that of verification: 29 rows, the first of which is the last committed token."""
    target = dataclasses.replace(small(), max_model_len=longest)
    requests = make_requests(target, [[1]], [SamplingParams(max_tokens=longest)], [None])
    config = SpeculativeConfig(**drafted("opt_tree", num_speculative_tokens=7))
    call = prepare(target, requests, config, None, None, None, None)
    assert (call.decoder.width, call.decoder.drafter.needs.slots) == (8, 29)
    assert call.capacity == (512 if longest + 29 <= 512 else 1024)


def test_a_tree_whose_nodes_are_not_in_order_of_depth_is_refused():
    with pytest.raises(ValueError, match="node 2 is less deep"):
        StaticTree((-1, 0, -1)).draft(None, None, None, False, 97)
    with pytest.raises(ValueError, match=r"parents\[1\]=1"):
        StaticTree((-1, 1)).depth  # noqa: B018
    with pytest.raises(ValueError, match="draw the nodes of a static one"):
        TREES["eagle2"].draft(None, None, None, True, 97)
