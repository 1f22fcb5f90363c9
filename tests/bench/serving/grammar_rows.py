# SPDX-License-Identifier: Apache-2.0
"""Host time of a request's grammar rows in one step: a tree's, and vLLM's own for a chain of
15 (with the validation that it does first). xgrammar, a made-up vocabulary of 248,320 tokens.

    python tests/bench/serving/grammar_rows.py [RESULTS.jsonl]"""

import json
import random
import statistics
import string
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import xgrammar as xgr
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from vllm_ddtree.grammar import DEPTH_SHIFT, TreeStructuredOutputManager

VOCABULARY = 248_320
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
# Where the root stands.
CASES = {
    "JSON schema, in a string": b'{"name": "abc',
    "JSON schema, at a key": b'{"name": "abc", "',
    "regex": b"A",
}
CHAIN = 15
ROUNDS = 20


def vocabulary(rng: random.Random) -> list[bytes]:
    """Every byte, words of lower-case letters, and a tenth of other pieces."""
    pieces, letters = set(), string.ascii_lowercase
    while len(pieces) < VOCABULARY - 257:
        alphabet = letters if rng.random() < 0.9 else string.printable
        piece = "".join(rng.choices(alphabet, k=rng.randint(2, 7)))
        pieces.add(" " + piece if rng.random() < 0.4 else piece)
    return [bytes([b]) for b in range(256)] + [p.encode() for p in sorted(pieces)] + [b"</s>"]


def manager(cls: Any, nodes: int) -> Any:
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(enable_in_reasoning=False),
        num_speculative_tokens=nodes,
        model_config=SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        parallel_config=SimpleNamespace(distributed_executor_backend=None),
    )
    made = cls(config)
    made.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: xgr.allocate_token_bitmask(rows, VOCABULARY)
    )
    return made


def allowed_child(grammar: XgrammarGrammar, rng: random.Random) -> int:
    mask = xgr.allocate_token_bitmask(1, VOCABULARY)
    grammar.fill_bitmask(mask, 0)
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    return int(rng.choice(np.nonzero(bits[: VOCABULARY - 1])[0]))


def tree(grammar: XgrammarGrammar, nodes: int, rng: random.Random) -> list[int]:
    """In depth-first preorder; the grammar allows each node."""
    packed, depth = [], 0
    while len(packed) < nodes:
        child = rng.randint(1, min(depth + 1, CHAIN))
        if depth >= child:
            grammar.rollback(depth - child + 1)
        token = allowed_child(grammar, rng)
        assert grammar.accept_tokens("", [token])
        depth = child
        packed.append(depth << DEPTH_SHIFT | token)
    grammar.rollback(depth)
    return packed


def microseconds(step: Any) -> tuple[float, float]:
    """Median and least."""
    step()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(times), 1), round(min(times), 1)


def main() -> None:
    rng = random.Random(0)
    pieces = vocabulary(rng)
    info = xgr.TokenizerInfo(pieces, vocab_size=VOCABULARY, stop_token_ids=[VOCABULARY - 1])
    compiler = xgr.GrammarCompiler(info)
    schema = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    regex = compiler.compile_regex(r"[A-Z][a-z]+( [a-z]+)*\.")
    for name, text in CASES.items():
        compiled = regex if name == "regex" else schema
        grammar = XgrammarGrammar(
            matcher=xgr.GrammarMatcher(compiled), vocab_size=VOCABULARY, ctx=compiled
        )
        assert grammar.accept_tokens("", list(text))
        request = SimpleNamespace(
            request_id="r",
            use_structured_output=True,
            structured_output_request=SimpleNamespace(grammar=grammar, reasoning_ended=True),
        )
        requests, chain = {"r": request}, [n & 0xFFFFFFFF for n in tree(grammar, 1, rng)]
        for _ in range(CHAIN - 1):
            grammar.accept_tokens("", chain)
            token = allowed_child(grammar, rng)
            grammar.rollback(len(chain))
            chain.append(token)
        stock = manager(StructuredOutputManager, CHAIN)

        def of_chain(stock=stock, requests=requests, chain=chain) -> None:
            valid = stock.validate_tokens(requests["r"], chain)
            stock.grammar_bitmask(requests, ["r"], {"r": valid})

        results = {f"vLLM's chain of {CHAIN}": (CHAIN, of_chain)}
        for nodes in (15, 31, 63):
            ours, drafts = manager(TreeStructuredOutputManager, nodes), tree(grammar, nodes, rng)

            def of_tree(ours=ours, requests=requests, drafts=drafts) -> None:
                ours.grammar_bitmask(requests, ["r"], {"r": drafts})

            results[f"tree of {nodes}"] = (nodes, of_tree)
        for what, (nodes, step) in results.items():
            median, least = microseconds(step)
            line = {"grammar": name, "drafts": what, "median_us": median, "least_us": least}
            line["least_us_per_node"] = round(least / nodes, 2)
            line["command"] = "python tests/bench/serving/grammar_rows.py"
            print(json.dumps(line), flush=True)
            if len(sys.argv) > 1:
                with open(sys.argv[1], "a") as out:
                    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
