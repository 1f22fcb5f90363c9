# SPDX-License-Identifier: Apache-2.0
"""The library's operations on tensors: torch custom ops, `torch.ops.ddtree.*`, where
they stand by themselves, and plans where most of the arguments stay where they are.

To an op a batch of trees is its int32 storage (`trees.TreeBatch.storage`) and
its capacity (num_reqs, max_nodes, max_depth). All write into tensors of the
caller, so that they can be captured, and return nothing. Row and padding rules:
ddtree.h."""

import torch

from vllm_ddtree.native import library
from vllm_ddtree.trees import TreeBatch, TreeShape


def _void(*args, **kwargs) -> None:
    """Fake implementation: every op only mutates its arguments."""


def _fill_gdn_layer(
    lib,
    out,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    ssm_state: torch.Tensor,
    stash_qkv: torch.Tensor,
    stash_gates: torch.Tensor,
    state_slots: torch.Tensor | None = None,
    snapshot_slots: torch.Tensor | None = None,
) -> None:
    lib.fill_tensor(out.conv_weight, conv_weight)
    lib.fill_tensor(out.conv_bias, conv_bias)
    lib.fill_tensor(out.conv_state, conv_state)
    lib.fill_tensor(out.ssm_state, ssm_state)
    lib.fill_tensor(out.stash_qkv, stash_qkv)
    lib.fill_tensor(out.stash_gates, stash_gates)
    out.state_slots = lib.pointer(state_slots, "int32_t", torch.int32)
    out.snapshot_slots = lib.pointer(snapshot_slots, "int32_t", torch.int32)


@torch.library.custom_op("ddtree::tree_build", mutates_args=("tree",))
def tree_build(
    logits: torch.Tensor | None,
    root_tokens: torch.Tensor,
    root_positions: torch.Tensor,
    node_budgets: torch.Tensor,
    candidate_caps: torch.Tensor,
    stop_tokens: torch.Tensor,
    stop_min_depths: torch.Tensor,
    tree: torch.Tensor,
    num_reqs: int,
    max_nodes: int,
    max_depth: int,
    tree_index: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    candidate_tokens: torch.Tensor | None = None,
    candidate_scores: torch.Tensor | None = None,
    transition_scores: torch.Tensor | None = None,
    spine_depths: torch.Tensor | None = None,
) -> None:
    """Best-first trees from the drafter's logits, or from its candidate lattice.

    logits [n, L, V] f32/f16/bf16, or candidate_tokens int32 [n, L, K] with
    candidate_scores f32 [n, L, K] or transition_scores f32 [n, L, K, K] (parent, child)
    or both, which are added; root_tokens, node_budgets, candidate_caps,
    stop_min_depths int32 [n]; root_positions int64 [n]; stop_tokens int32 [n, S], -1
    padded. Request i writes tree tree_index[i], int32 or int64 [n], and none where
    that is negative; without it the first n trees are written. With temperatures f32
    [n] (0 = none) and seeds int64 [n], candidates are scored with the target's noise.
    spine_depths int32 [n]: down to there the chain of best children is in the tree."""
    lib = library()
    params = lib.params("ddt_tree_build_params")
    trees = TreeBatch(TreeShape(num_reqs, max_nodes, max_depth), tree)
    lib.fill_tensor(params.logits, logits)
    lib.fill_tensor(params.candidate_tokens, candidate_tokens)
    lib.fill_tensor(params.candidate_scores, candidate_scores)
    lib.fill_tensor(params.transition_scores, transition_scores)
    params.root_tokens = lib.pointer(root_tokens, "int32_t", torch.int32)
    params.root_positions = lib.pointer(root_positions, "int64_t", torch.int64)
    params.node_budgets = lib.pointer(node_budgets, "int32_t", torch.int32)
    params.candidate_caps = lib.pointer(candidate_caps, "int32_t", torch.int32)
    params.stop_tokens = lib.pointer(stop_tokens, "int32_t", torch.int32)
    params.max_stop_tokens = stop_tokens.shape[1]
    params.stop_min_depths = lib.pointer(stop_min_depths, "int32_t", torch.int32)
    written = root_tokens.shape[0] if tree_index is None else num_reqs
    params.tree = trees.described(written)
    lib.fill_tensor(params.tree_index, tree_index)
    params.temperatures = lib.pointer(temperatures, "float", torch.float32)
    params.seeds = lib.pointer(seeds, "int64_t", torch.int64)
    params.spine_depths = lib.pointer(spine_depths, "int32_t", torch.int32)
    lib.call("tree_build", params, tree.device)


def tree_gather(
    source: TreeBatch,
    trees: TreeBatch,
    tree_index: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor | None = None,
    mrope_positions: torch.Tensor | None = None,
) -> None:
    """Tree i of `trees` becomes tree tree_index[i] of `source`, cut to its rows; trees
    past the index become padding requests. The positions of the rows of nodes change
    in place from those of a chain to those of the tree.

    tree_index int32 or int64 [n]; query_start int32 [n + 1]; positions int64 [T];
    mrope_positions int64 [axes, T]. No torch op: nothing of it is ever traced."""
    lib = library()
    params = lib.params("ddt_tree_gather_params")
    params.source, params.tree = source.described(), trees.described()
    lib.fill_tensor(params.tree_index, tree_index)
    params.query_start = lib.pointer(query_start, "int32_t", torch.int32)
    lib.fill_tensor(params.positions, positions)
    lib.fill_tensor(params.mrope_positions, mrope_positions)
    lib.call("tree_gather", params, trees.storage.device)


class AttentionPlan:
    """`ddt_tree_attention` over the caches of one layer, [blocks, Hkv, block_size, Dh],
    which stay where they are: described once, run every step."""

    def __init__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> None:
        self._lib = lib = library()
        self._params = params = lib.params("ddt_tree_attention_params")
        lib.fill_tensor(params.key_cache, key_cache)
        lib.fill_tensor(params.value_cache, value_cache)
        params.softmax_scale = scale
        params.logit_softcap = softcap

    def run(
        self,
        query: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        trees: TreeBatch,
        out: torch.Tensor,
    ) -> None:
        """Paged prefix and tree rows in one softmax for the first requests.

        query, out [T, Hq, Dh]; block_table int32 [n, max_blocks]; query_start int32
        [n + 1]; seq_lens int32 [n]. On the current stream, as all that is here."""
        lib, params = self._lib, self._params
        lib.fill_tensor(params.query, query)
        lib.fill_tensor(params.block_table, block_table)
        params.query_start = lib.pointer(query_start, "int32_t", torch.int32)
        params.seq_lens = lib.pointer(seq_lens, "int32_t", torch.int32)
        params.tree = trees.described(seq_lens.shape[0])
        lib.fill_tensor(params.out, out)
        lib.call("tree_attention", params, query.device)


class GdnVerifyPlan:
    """`ddt_gdn_verify` of one layer, whose own tensors stay where they are: described
    once, run every step.

    a_log, dt_bias [Hv]; conv_weight [C, 4]; conv_state [slots, C, 3]; ssm_state
    [slots, Hv, 128 v, 128 k] f32; stash_qkv [T', C], stash_gates f32 [T', 2, Hv]."""

    def __init__(
        self,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        stash_qkv: torch.Tensor,
        stash_gates: torch.Tensor,
    ) -> None:
        self._lib = lib = library()
        self._params = params = lib.params("ddt_gdn_verify_params")
        _fill_gdn_layer(
            lib,
            params.layer,
            conv_weight,
            conv_bias,
            conv_state,
            ssm_state,
            stash_qkv,
            stash_gates,
        )
        lib.fill_tensor(params.a_log, a_log)
        lib.fill_tensor(params.dt_bias, dt_bias)
        params.norm_eps = 1e-6

    def run(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state_slots: torch.Tensor,
        query_start: torch.Tensor,
        trees: TreeBatch,
        out: torch.Tensor,
    ) -> None:
        """Outputs of every node from the layer's state, which stays as it is.

        mixed_qkv [T, C]; a, b [T, Hv]; state_slots int32 [n]; query_start int32
        [n + 1]; out [T, Hv, 128]; T' >= T."""
        lib, params = self._lib, self._params
        lib.fill_tensor(params.mixed_qkv, mixed_qkv)
        lib.fill_tensor(params.a, a)
        lib.fill_tensor(params.b, b)
        params.layer.state_slots = lib.pointer(state_slots, "int32_t", torch.int32)
        params.query_start = lib.pointer(query_start, "int32_t", torch.int32)
        params.tree = trees.described(state_slots.shape[0])
        lib.fill_tensor(params.out, out)
        lib.call("gdn_verify", params, mixed_qkv.device)


# No optional outputs: in PyTorch 2.11 a custom op may not leave out what it mutates.
@torch.library.custom_op(
    "ddtree::tree_accept",
    mutates_args=("num_accepted", "accepted_nodes", "output_tokens"),
)
def tree_accept(
    node_tokens: torch.Tensor | None,
    query_start: torch.Tensor,
    tree: torch.Tensor,
    max_nodes: int,
    max_depth: int,
    num_reqs: int,
    num_accepted: torch.Tensor,
    accepted_nodes: torch.Tensor,
    output_tokens: torch.Tensor,
    logits: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
) -> None:
    """Follow the token of each node while it names a child. The token is the
    caller's, or chosen here: node_tokens int64 [T], or processed logits [T, V]
    with, to sample as vLLM's sampler does, temperatures f32 [n] (0 = greedy; the
    logits are divided by them already) and seeds int64 [n].

    query_start int32 [n + 1]; num_accepted int32 [n]; accepted_nodes int32
    [n, D] and output_tokens int64 [n, D + 1], -1 padded."""
    lib = library()
    n = num_accepted.shape[0]
    params = lib.params("ddt_tree_accept_params")
    trees = TreeBatch(TreeShape(num_reqs, max_nodes, max_depth), tree)
    params.tree = trees.described(n)
    params.query_start = lib.pointer(query_start, "int32_t", torch.int32)
    params.node_tokens = lib.pointer(node_tokens, "int64_t", torch.int64)
    lib.fill_tensor(params.logits, logits)
    params.temperatures = lib.pointer(temperatures, "float", torch.float32)
    params.seeds = lib.pointer(seeds, "int64_t", torch.int64)
    params.num_accepted = lib.pointer(num_accepted, "int32_t", torch.int32)
    params.accepted_nodes = lib.pointer(accepted_nodes, "int32_t", torch.int32)
    params.output_tokens = lib.pointer(output_tokens, "int64_t", torch.int64)
    lib.call("tree_accept", params, num_accepted.device)


class CommitPlan:
    """`ddt_commit` over layers whose tensors stay where they are: described once,
    run every round. The tensors are the caller's to keep alive.

    gdn: per recurrent layer conv_weight, conv_state, ssm_state, stash_qkv,
    stash_gates, state_slots and snapshot_slots (None without prefix caching's
    snapshots); kv: per attention layer key_cache, value_cache and row_slots int64
    [T]. query_start, num_accepted, accepted_nodes, snapshot_tokens: as ddtree.h has
    them, for up to trees.shape.num_reqs requests."""

    def __init__(
        self,
        trees: TreeBatch,
        gdn: list[tuple[torch.Tensor | None, ...]],
        kv: list[tuple[torch.Tensor, ...]],
        query_start: torch.Tensor,
        num_accepted: torch.Tensor,
        accepted_nodes: torch.Tensor,
        snapshot_tokens: torch.Tensor | None,
    ) -> None:
        self._lib = lib = library()
        self._device = num_accepted.device
        self._trees = trees
        self._gdn = lib.ffi.new("ddt_gdn_layer[]", max(1, len(gdn)))
        for layer, tensors in zip(self._gdn, gdn, strict=False):
            weight, *rest = tensors
            _fill_gdn_layer(lib, layer, weight, None, *rest)
        self._kv = lib.ffi.new("ddt_kv_layer[]", max(1, len(kv)))
        for layer, (key_cache, value_cache, row_slots) in zip(self._kv, kv, strict=False):
            lib.fill_tensor(layer.key_cache, key_cache)
            lib.fill_tensor(layer.value_cache, value_cache)
            layer.row_slots = lib.pointer(row_slots, "int64_t", torch.int64)
        self._params = params = lib.params("ddt_commit_params")
        params.num_gdn_layers = len(gdn)
        params.num_kv_layers = len(kv)
        params.gdn_layers = self._gdn
        params.kv_layers = self._kv
        params.query_start = lib.pointer(query_start, "int32_t", torch.int32)
        params.num_accepted = lib.pointer(num_accepted, "int32_t", torch.int32)
        params.accepted_nodes = lib.pointer(accepted_nodes, "int32_t", torch.int32)
        params.snapshot_tokens = lib.pointer(snapshot_tokens, "int32_t", torch.int32)

    def run(self, num_reqs: int) -> None:
        """Commit the first `num_reqs` requests on the current stream."""
        self._params.tree = self._trees.described(num_reqs)
        self._lib.call("commit", self._params, self._device)


for _op in (tree_build, tree_accept):
    _op.register_fake(_void)
