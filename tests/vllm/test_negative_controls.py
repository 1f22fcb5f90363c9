# SPDX-License-Identifier: Apache-2.0
"""The comparisons of test_lossless.py fail when a part of the method is left out."""

import pytest
import torch
from engine import FULL, Engine, assert_same_text, prompts

pytestmark = pytest.mark.skipif(not FULL, reason="the full tier checks the checks")
PARAMS = {"temperature": 0.0, "max_tokens": 32}
BUDGET = 15


@pytest.fixture(scope="module")
def base():
    with Engine(margins=True) as engine:
        return engine.generate(prompts(6), PARAMS)


def run():
    with Engine({"method": "ddtree", "tree_budget": BUDGET}) as engine:
        return engine.generate(prompts(6), PARAMS)


@pytest.fixture(scope="module")
def whole():
    return run()


def without_kv_moves(monkeypatch, module):
    monkeypatch.setattr(module, "find_kv_layers", lambda context: [])


def with_linear_positions(monkeypatch, module):
    mixin = module.TreeStateMixin
    gather, accepted_first = mixin._gather_trees, mixin.accepted_first
    tree_positions = []

    def linear(self, step, input_batch, mrope_positions):
        kept = input_batch.positions.clone()
        gather(self, step, input_batch, None)
        tree_positions[:] = [input_batch.positions.clone()]
        input_batch.positions.copy_(kept)

    def of_the_tree(self, positions, hidden_states):
        # The drafter's own stay right.
        if self.step is not None:
            positions.copy_(tree_positions[0])
        accepted_first(self, positions, hidden_states)

    monkeypatch.setattr(mixin, "_gather_trees", linear)
    monkeypatch.setattr(mixin, "accepted_first", of_the_tree)


def with_causal_mask(monkeypatch, module):
    gather = module.TreeStateMixin._gather_trees

    def causal(self, step, *args):
        gather(self, step, *args)
        rows = [(2 << i) - 1 for i in range(BUDGET + 1)]
        bits = step.trees.ancestor_bits
        bits[: step.num_reqs, :, 0] = bits.new_tensor(rows)

    monkeypatch.setattr(module.TreeStateMixin, "_gather_trees", causal)


def with_first_rows_committed(monkeypatch, module):
    commit = module.TreeStateMixin._commit

    def first_rows(self, step):
        # In place: the commit knows it by its address.
        path = step.accepted_nodes.clone()
        rows = torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=path.device)
        step.accepted_nodes.copy_(torch.where(path >= 0, rows, -1))
        commit(self, step)
        step.accepted_nodes.copy_(path)

    monkeypatch.setattr(module.TreeStateMixin, "_commit", first_rows)


@pytest.mark.parametrize(
    "leave_out",
    [
        without_kv_moves,
        with_linear_positions,
        with_causal_mask,
        with_first_rows_committed,
    ],
)
def test_text_changes(monkeypatch, base, whole, leave_out):
    from vllm_ddtree import model_state

    assert_same_text(base, whole, "ddtree")
    leave_out(monkeypatch, model_state)
    with pytest.raises(AssertionError, match="differs at token"):
        assert_same_text(base, run(), leave_out.__name__)


def test_wrong_drafter_context_shows_in_rounds_alone(monkeypatch, base, whole):
    from vllm_ddtree import model_state

    monkeypatch.setattr(
        model_state.TreeStateMixin, "accepted_first", lambda self, *args: None
    )
    broken = run()
    assert_same_text(base, broken, "drafter context in tree order")
    assert broken.tokens_per_round < 0.9 * whole.tokens_per_round
