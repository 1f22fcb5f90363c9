# SPDX-License-Identifier: Apache-2.0
"""The rows of the grammar bitmask for a tree of drafts, against a fresh grammar per
node that replays the tokens from the root to it. No engine."""

import json
import random
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import TARGET

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

    def __init__(self, grammar, prompt=(), output=(), reasoning_ended=None) -> None:
        self.request_id = "r"
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = [*prompt, *output]
        self.structured_output_request = SimpleNamespace(
            grammar=grammar,
            reasoning_ended=reasoning_ended,
            reasoner=None,
            reasoning_parser_kwargs=None,
            masked_reasoning_end_ids=None,
        )


def manager_of(backend: str, cls=None):
    from vllm_ddtree.grammar import TreeStructuredOutputManager

    manager = (cls or TreeStructuredOutputManager)(vllm_config())
    manager.backend = backend_of(backend)
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


def empty_bitmask(backend: str, rows: int) -> torch.Tensor:
    return backend_of(backend).allocate_token_bitmask(rows)


def allowed(row: np.ndarray, token: int) -> bool:
    return bool((int(np.uint32(row[token >> 5])) >> (token & 31)) & 1)


def allowed_tokens(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.nonzero(bits[: len(tokenizer())])[0].tolist()


def row_after(backend: str, spec: str, committed: list[int], path: list[int]):
    """(the row, whether a walk can be there), by a grammar of its own."""
    grammar, reached = fresh_grammar(backend, spec), True
    mask = empty_bitmask(backend, 1)
    for token in committed:
        assert grammar.accept_tokens("brute force", [token])

    def row():
        if grammar.is_terminated():
            return np.full_like(mask[0].numpy(), -1)
        grammar.fill_bitmask(mask, 0)
        return mask[0].numpy().copy()

    for token in path:
        if not allowed(row(), token):
            return None, False
        if not grammar.is_terminated():
            assert grammar.accept_tokens("brute force", [token])
    return row(), reached


def grow(backend: str, spec: str, committed: list[int], rng: random.Random, count: int) -> Tree:
    """Half of the children at random, half of what the grammar allows, the end of text and
    what comes behind it included."""
    tokens, depths, vocabulary = [], [], len(tokenizer())
    eos = tokenizer().eos_token_id

    def visit(path: list[int]) -> None:
        row, reached = row_after(backend, spec, committed, path)
        choices = allowed_tokens(row) if reached else []
        children = set()
        for _ in range(rng.choice((1, 2, 2, 3))):
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


def compare(backend: str, spec: str, committed: list[int], tree: Tree, rows: np.ndarray) -> dict:
    """Rows that a walk can reach equal those of brute force; nothing else can be entered."""
    seen = {"reached": 0, "forbidden": 0, "ended": 0}
    parents = [0, *tree.parents()]
    reachable = []
    for row, path in enumerate(tree.paths()):
        want, reached = row_after(backend, spec, committed, path)
        reachable.append(reached)
        if reached:
            assert (rows[row] == want).all(), f"row {row} of {tree}"
            seen["reached"] += 1
            seen["ended"] += bool((want == -1).all())
        elif reachable[parents[row]]:
            assert not allowed(rows[parents[row]], path[-1]), f"row {row} of {tree}"
            seen["forbidden"] += 1
    return seen


@pytest.mark.parametrize(("backend", "spec"), CASES)
def test_rows_are_those_of_each_path_alone(backend, spec):
    rng = random.Random(f"{backend} {spec}")
    seen = {"reached": 0, "forbidden": 0, "ended": 0}
    for _ in range(16):
        committed = some_output(backend, spec, rng)
        tree = grow(backend, spec, committed, rng, rng.randrange(BUDGET // 2, BUDGET + 1))
        grammar = fresh_grammar(backend, spec)
        for token in committed:
            assert grammar.accept_tokens("committed", [token])
        manager = manager_of(backend)
        request = Request(grammar, output=committed)
        # Twice: the grammar must be left as it was.
        for _ in range(2):
            rows = manager.grammar_bitmask({"r": request}, ["r"], {"r": tree.packed()})
            found = compare(backend, spec, committed, tree, rows)
        seen = {name: seen[name] + found[name] for name in seen}
    assert all(seen.values()), seen
    assert seen["reached"] > 60
