# SPDX-License-Identifier: Apache-2.0
"""The rows of the grammar bitmask for a tree of drafts, against vLLM's own rows without
speculation: a fresh request per node takes the tokens from the root to it, one step each.
No engine."""

import json
import random
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import TARGET
from vllm_ddtree.compat import is_0_32
from vllm_ddtree.grammar import needs_chain

BUDGET, DEPTH = 40, 9
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer"},
        "kind": {"enum": ["tree", "chain", "treatise"]},
    },
    "required": ["name", "size", "kind"],
}
SPECS = {
    "schema": ("JSON", json.dumps(SCHEMA)),
    "regex": ("REGEX", "[a-z]{1,3}(_[a-z]{2,6}[0-9])*"),
    "choice": ("CHOICE", json.dumps(["yes", "yesterday", "no", "never"])),
    "grammar": ("GRAMMAR", 'root ::= ("(" root ")")? [a-c]*'),
}
TEXTS = {
    "schema": '{"name": "oak", "size": 12, "kind": "tree"}',
    "regex": "ab_oak7_elm2",
    "choice": "yesterday",
    "grammar": "((ab)cab)b",
}
BACKENDS = ("xgrammar", "guidance", "outlines")
CASES = [
    (backend, name)
    for backend in BACKENDS
    for name in SPECS
    # of these, only xgrammar has grammars in this notation
    if name != "grammar" or backend == "xgrammar"
]


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(TARGET))


@cache
def vllm_config():
    return SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=False,
            disable_additional_properties=False,
            enable_in_reasoning=False,
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=BUDGET),
        num_speculative_tokens=BUDGET,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type="qwen3_5"),
            skip_tokenizer_init=True,
            is_diffusion=False,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(distributed_executor_backend=None),
    )


@cache
def backend_of(name: str):
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    cls = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
    vocabulary = len(tokenizer())
    return cls[name](vllm_config(), tokenizer=tokenizer(), vocab_size=vocabulary)


def fresh_grammar(backend: str, spec: str):
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.utils import choice_as_grammar

    kind, text = SPECS[spec]
    if (backend, kind) == ("xgrammar", "CHOICE"):
        # as vLLM's front end has it
        kind, text = "GRAMMAR", choice_as_grammar(json.loads(text))
    return backend_of(backend).compile_grammar(
        StructuredOutputOptions[kind], text, stop_token_ids={tokenizer().eos_token_id}
    )


class Request:
    """What the manager reads of vLLM's request."""

    use_structured_output = True

    def __init__(self, grammar) -> None:
        self.request_id = "r"
        self.prompt_token_ids = [300, 301]
        self.all_token_ids = [300, 301]
        self.structured_output_request = SimpleNamespace(
            grammar=grammar,
            reasoning_ended=None,
            reasoner=None,
            reasoning_parser_kwargs=None,
            masked_reasoning_end_ids=None,
        )


def manager_of(backend: str, cls=None, reasoner=None):
    from vllm_ddtree.grammar import TreeStructuredOutputManager

    manager = (cls or TreeStructuredOutputManager)(vllm_config())
    manager.backend = backend_of(backend)
    manager.reasoner_cls, manager.tokenizer = reasoner, tokenizer()
    return manager


@dataclass(frozen=True)
class Tree:
    # Of the nodes without the root, in depth-first preorder.
    tokens: list[int]
    depths: list[int]

    def paths(self) -> list[list[int]]:
        """The tokens from the root to each node, the root's first."""
        path, paths = [], [[]]
        for depth, token in zip(self.depths, self.tokens, strict=True):
            path = [*path[: depth - 1], token]
            paths.append(path)
        return paths

    def parents(self) -> list[int]:
        """Rows of the nodes' parents."""
        last, parents = {0: 0}, []
        for row, depth in enumerate(self.depths, 1):
            parents.append(last[depth - 1])
            last[depth] = row
        return parents

    def packed(self) -> list[int]:
        from vllm_ddtree.grammar import DEPTH_SHIFT

        return [d << DEPTH_SHIFT | t for d, t in zip(self.depths, self.tokens, strict=True)]


def allowed(row: np.ndarray, token: int) -> bool:
    return bool((int(np.uint32(row[token >> 5])) >> (token & 31)) & 1)


def allowed_tokens(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.nonzero(bits[: len(tokenizer())])[0].tolist()


def row_after(backend: str, spec: str, committed: list[int], path: list[int], reasoner=None):
    """The row that no speculation has after `path`, None where it cannot come to be there."""
    from vllm.v1.structured_output import StructuredOutputManager

    manager = manager_of(backend, StructuredOutputManager, reasoner)
    request = Request(fresh_grammar(backend, spec))

    def row() -> np.ndarray:
        return manager.grammar_bitmask({"r": request}, ["r"], {})[0]

    for i, token in enumerate([*committed, *path]):
        if not allowed(row(), token):
            assert i >= len(committed)
            return None
        request.all_token_ids.append(token)
        assert manager.accept_tokens(request, [token])
    return row().copy()


def grow(rng: random.Random, count: int, *where) -> Tree:
    """Some of the children at random, more of what the grammar allows, the end of text and
    what comes behind it included."""
    tokens, depths, vocabulary = [], [], len(tokenizer())
    eos = tokenizer().eos_token_id

    def visit(path: list[int]) -> None:
        backend, spec, committed, *reasoner = where
        row = row_after(backend, spec, committed, path, *reasoner)
        choices = allowed_tokens(row) if row is not None else []
        children = set()
        # Little below what is forbidden, or most of the tree would be there.
        for _ in range(rng.choice((1, 2, 2, 3) if choices else (0, 1))):
            pick = rng.random()
            if choices and pick < 0.75:
                children.add(eos if eos in choices and pick < 0.3 else rng.choice(choices))
            else:
                children.add(rng.randrange(vocabulary))
        for child in sorted(children, key=lambda _: rng.random()):
            if len(tokens) == count or len(path) == DEPTH:
                return
            tokens.append(child)
            depths.append(len(path) + 1)
            visit([*path, child])

    visit([])
    return Tree(tokens, depths)


def some_output(backend: str, spec: str, rng: random.Random) -> list[int]:
    """The beginning of a text that the grammar allows, or all of it."""
    tokens = tokenizer().encode(TEXTS[spec], add_special_tokens=False)
    # Outlines knows fewer ways to cut a text into tokens.
    tokens = fresh_grammar(backend, spec).validate_tokens(tokens)
    return tokens[: rng.choice((0, len(tokens), rng.randrange(len(tokens) + 1)))]


def compare(where: tuple, tree: Tree, rows: np.ndarray) -> dict[str, int]:
    """Rows that a walk can reach are those of no speculation; it can reach no others."""
    seen = {"reached": 0, "forbidden": 0, "free": 0}
    parents = [0, *tree.parents()]
    reachable: list[bool] = []
    for row, path in enumerate(tree.paths()):
        backend, spec, committed, *reasoner = where
        want = row_after(backend, spec, committed, path, *reasoner)
        reachable.append(want is not None)
        if want is not None:
            assert (rows[row] == want).all(), f"row {row} of {tree}"
            seen["reached"] += 1
            # Behind the grammar's end, or before that of reasoning.
            seen["free"] += bool((want == -1).all())
        elif reachable[parents[row]]:
            assert not allowed(rows[parents[row]], path[-1]), f"row {row} of {tree}"
            seen["forbidden"] += 1
    return seen


def request_at(manager, backend: str, spec: str, committed: list[int]) -> Request:
    request = Request(fresh_grammar(backend, spec))
    for token in committed:
        request.all_token_ids.append(token)
        assert manager.accept_tokens(request, [token])
    return request


def rows_of(manager, request: Request, drafts: list[int]) -> np.ndarray:
    return manager.grammar_bitmask({"r": request}, ["r"], {"r": drafts})


@pytest.mark.parametrize(("backend", "spec"), CASES)
def test_rows_are_those_of_no_speculation(backend, spec):
    rng = random.Random(f"{backend} {spec}")
    seen = {"reached": 0, "forbidden": 0, "free": 0}
    for _ in range(16):
        where = backend, spec, some_output(backend, spec, rng)
        tree = grow(rng, rng.randrange(BUDGET // 2, BUDGET + 1), *where)
        manager = manager_of(backend)
        request = request_at(manager, *where)
        # Twice: the grammar must be left as it was.
        for _ in range(2):
            found = compare(where, tree, rows_of(manager, request, tree.packed()))
        seen = {name: seen[name] + found[name] for name in seen}
    assert all(seen.values()), seen
    assert seen["reached"] > 60


def random_tree(seed: int, backend: str = "xgrammar", spec: str = "regex"):
    rng = random.Random(seed)
    where = backend, spec, some_output(backend, spec, rng)
    manager = manager_of(backend)
    return where, grow(rng, BUDGET, *where), manager, request_at(manager, *where)


def test_masks_in_list_order_are_wrong():
    """The negative control: vLLM's own rows for the same nodes, and ours for depths that
    make them a chain."""
    from vllm.v1.structured_output import StructuredOutputManager

    wrong = 0
    for seed in range(8):
        where, tree, manager, request = random_tree(seed, spec="schema")
        compare(where, tree, rows_of(manager, request, tree.packed()))
        stock = manager_of(where[0], StructuredOutputManager)
        chain = Tree(tree.tokens, list(range(1, len(tree.tokens) + 1)))
        for rows in (
            rows_of(stock, request_at(stock, *where), tree.tokens),
            rows_of(manager, request, chain.packed()),
        ):
            try:
                compare(where, tree, rows)
            except AssertionError:
                wrong += 1
    # Of 16. Where only one text is allowed, any order gives the same masks.
    assert wrong >= 4


def test_a_tree_that_the_scheduler_cut_is_a_tree():
    where, tree, manager, request = random_tree(7)
    whole = rows_of(manager, request, tree.packed()).copy()
    for count in range(1, len(tree.tokens)):
        rows = rows_of(manager, request, tree.packed()[:count])
        assert (rows[: count + 1] == whole[: count + 1]).all()


@pytest.mark.parametrize("filler", [0, -1], ids=["idle", "placeholder"])
def test_rows_that_are_no_nodes_allow_everything(filler):
    """Idle rows of a smaller tree, and what the scheduler puts where it has no drafts."""
    where, tree, manager, request = random_tree(8)
    count = len(tree.tokens) // 2
    whole = rows_of(manager, request, tree.packed()).copy()
    rows = rows_of(manager, request, tree.packed()[:count] + [filler] * 5)
    assert (rows[: count + 1] == whole[: count + 1]).all()
    assert (rows[count + 1 : count + 6] == -1).all()
    assert (rows_of(manager, request, [-1] * 9)[0] == whole[0]).all()


def test_requests_keep_their_own_rows():
    """Trees of several sizes, one request without drafts, in one batch."""
    cases = [
        random_tree(seed, spec=spec) for seed, spec in enumerate(("regex", "choice", "schema"))
    ]
    manager = manager_of("xgrammar")
    requests = {str(i): case[3] for i, case in enumerate(cases)}
    drafts = {"0": cases[0][1].packed()[:5], "2": cases[2][1].packed()}
    rows, first = manager.grammar_bitmask(requests, ["2", "1", "0"], drafts), 0
    for name in ("2", "1", "0"):
        where, tree, alone, request = cases[int(name)]
        mine = drafts.get(name, [])
        want = alone.grammar_bitmask({"r": request}, ["r"], {"r": mine} if mine else {})
        count = len(mine) + 1
        assert (rows[first : first + count] == want[:count]).all(), name
        first += count if is_0_32() else BUDGET + 1
    assert len(rows) == first


def test_all_nodes_stay_scheduled():
    """A tree of which the grammar forbids a node keeps its rows, and so its CUDA graph."""
    _, tree, manager, request = random_tree(9)
    assert manager.validate_tokens(request, tree.packed()) == tree.packed()
    assert manager.validate_tokens(request, [-1] * 4) == []
    free = SimpleNamespace(use_structured_output=False)
    assert manager.validate_tokens(free, [-1] * 4) == [-1] * 4


class Reasoner:
    """Reasoning ends with two tokens in a row, which only what came before can tell."""

    END = (40, 41)

    def __init__(self, tokenizer, **kwargs) -> None:
        pass

    def is_reasoning_end(self, token_ids) -> bool:
        return self.END in zip(token_ids, token_ids[1:])

    def is_reasoning_end_streaming(self, token_ids, delta_ids) -> bool:
        tail = list(token_ids[-len(delta_ids) - 1 :])
        return self.is_reasoning_end(tail)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grammars_start_where_reasoning_ends_on_a_path(backend):
    rng = random.Random(backend)
    grammar = allowed_tokens(row_after(backend, "regex", [], []))
    seen = {"reached": 0, "forbidden": 0, "free": 0}
    for committed in ([], [17], [40], [17, 40, 41]):
        where = backend, "regex", committed, Reasoner
        for _ in range(6):
            # The end of reasoning at several depths, also split by the commit, and twice.
            tokens, depths = [], []
            for _ in range(24):
                depth = rng.randint(1, min(depths[-1] + 1 if depths else 1, DEPTH))
                depths.append(depth)
                after_first = depth > 1 and tokens[-1] == 40 and depths[-2] == depth - 1
                pick = 41 if after_first or rng.random() < 0.2 else rng.choice((40, 17))
                tokens.append(pick if rng.random() < 0.6 else rng.choice(grammar))
            tree = Tree(tokens, depths)
            manager = manager_of(backend, reasoner=Reasoner)
            request = request_at(manager, backend, "regex", committed)
            found = compare(where, tree, rows_of(manager, request, tree.packed()))
            seen = {name: seen[name] + found[name] for name in seen}
    assert all(seen.values()), seen
    assert seen["reached"] - seen["free"] > 20


def test_drafts_go_to_the_scheduler_with_their_depths(monkeypatch):
    """And idle rows as such; those of a batch without grammars as they are."""
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
    from vllm_ddtree.grammar import TreeDraftTokens
    from vllm_ddtree.trees import TreeBatch, TreeShape

    sent: list[torch.Tensor] = []
    # It has streams of its own, and the copy to the host is its.
    monkeypatch.setattr(DraftTokensHandler, "__init__", lambda *_: None)
    monkeypatch.setattr(DraftTokensHandler, "set_draft_tokens", lambda *args: sent.append(args[2]))
    device = torch.device("cpu")
    trees = TreeBatch.zeros(TreeShape(4, 8, 5), device)
    trees.num_nodes[:] = torch.tensor([8, 1, 4, 3])
    # Left over in slots 1 to 3 from larger trees.
    trees.depths[:] = torch.tensor([0, 1, 2, 2, 3, 1, 2, 2])
    drafts = torch.arange(100, 106).repeat(3, 1)
    batch = SimpleNamespace(idx_mapping=torch.tensor([2, 0, 1]), has_structured_output_reqs=True)
    handler = TreeDraftTokens(device, trees)
    handler.set_draft_tokens(batch, drafts)
    whole = Tree(list(range(100, 106)), [1, 2, 2, 3, 1, 2]).packed()
    assert sent[0].tolist() == [whole[:3] + [0] * 3, whole, [0] * 6]
    assert drafts.tolist() == [list(range(100, 106))] * 3
    batch.has_structured_output_reqs = False
    handler.set_draft_tokens(batch, drafts)
    assert sent[1] is drafts


def test_a_backend_that_is_not_known_gets_a_chain():
    from vllm.sampling_params import StructuredOutputsParams

    assert not needs_chain(None)
    for backend, chain in (*((name, False) for name in BACKENDS), ("new", True)):
        params = StructuredOutputsParams(regex="a+")
        params._backend = backend
        assert needs_chain(params) is chain
