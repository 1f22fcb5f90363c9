// SPDX-License-Identifier: Apache-2.0
//! What a fuzzer's bytes do: a call of one operation of the C ABI with hostile values in buffers
//! that are as long as the parameters say. Whatever they are, the call must return a status, leave
//! inputs and the memory around outputs alone, and write nothing unless it returns DDT_OK.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ddtree::ffi::*;

/// Reads numbers from the input; zeros when it has ended.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let (&first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        first
    }

    fn below(&mut self, limit: usize) -> usize {
        self.byte() as usize % limit
    }

    /// Mostly a number that could be right, else one that programs trip over.
    fn int(&mut self) -> i64 {
        const HOSTILE: [i64; 16] = [
            -1,
            -2,
            i32::MIN as i64,
            i32::MAX as i64,
            i64::MIN,
            i64::MAX,
            31,
            32,
            33,
            63,
            64,
            255,
            256,
            257,
            1 << 31,
            1 << 32,
        ];
        match self.byte() {
            byte @ ..=199 => i64::from(byte % 12),
            byte => HOSTILE[byte as usize % HOSTILE.len()],
        }
    }

    fn float(&mut self) -> f32 {
        match self.byte() {
            200..=205 => f32::NAN,
            206..=211 => f32::INFINITY,
            212..=217 => f32::NEG_INFINITY,
            218..=223 => 1e-40,
            224..=229 => f32::MAX,
            230..=235 => -f32::MAX,
            byte => f32::from(byte as i8) / 16.0,
        }
    }
}

const GUARD: usize = 16;

/// Memory of the caller between two guards.
struct Buffer<T> {
    memory: Vec<T>,
    before: Vec<T>,
}

impl<T: Copy + PartialEq> Buffer<T> {
    fn new(len: usize, guard: T, mut fill: impl FnMut() -> T) -> Self {
        let mut memory = vec![guard; len + 2 * GUARD];
        for value in &mut memory[GUARD..GUARD + len] {
            *value = fill();
        }
        Self { before: memory.clone(), memory }
    }

    fn pointer(&mut self) -> *mut T {
        // SAFETY: the guard is inside of the allocation.
        unsafe { self.memory.as_mut_ptr().add(GUARD) }
    }
}

/// Bytes of a buffer now and as they were, whatever its type.
trait Checked {
    /// `may_write`: the call succeeded, and this is one of its outputs.
    fn check(&self, name: &str, may_write: bool);
}

impl<T: Copy> Checked for Buffer<T> {
    fn check(&self, name: &str, may_write: bool) {
        // SAFETY: integers and floats have no padding.
        let bytes = |all: &[T]| unsafe {
            std::slice::from_raw_parts(all.as_ptr().cast::<u8>(), size_of_val(all)).to_vec()
        };
        let (now, before) = (&self.memory, &self.before);
        let end = now.len() - GUARD;
        assert_eq!(bytes(&now[..GUARD]), bytes(&before[..GUARD]), "{name}: written before its start");
        assert_eq!(bytes(&now[end..]), bytes(&before[end..]), "{name}: written after its end");
        if !may_write {
            assert_eq!(bytes(now), bytes(before), "{name}: written");
        }
    }
}

const POISON: i32 = 0x5a5a_5a5a;

fn ints(bytes: &mut Bytes<'_>, len: usize) -> Buffer<i32> {
    Buffer::new(len, POISON, || bytes.int() as i32)
}

fn longs(bytes: &mut Bytes<'_>, len: usize) -> Buffer<i64> {
    Buffer::new(len, i64::from(POISON), || bytes.int())
}

fn floats(bytes: &mut Bytes<'_>, len: usize) -> Buffer<f32> {
    Buffer::new(len, 77.0, || bytes.float())
}

/// An output, which the call may write but must not need.
fn output<T: Copy + PartialEq>(len: usize, poison: T) -> Buffer<T> {
    Buffer::new(len, poison, || poison)
}

/// A tensor over a buffer that holds `shape` without gaps; what it says of itself may be wrong, but
/// never so that a caller would have had to give more memory.
fn tensor<T: Copy + PartialEq>(
    bytes: &mut Bytes<'_>,
    buffer: &mut Buffer<T>,
    dtype: u32,
    shape: &[usize],
) -> ddt_tensor {
    let mut tensor = ddt_tensor {
        data: buffer.pointer().cast::<c_void>(),
        dtype,
        ndim: shape.len() as u32,
        shape: [0; 4],
        strides: [0; 4],
    };
    let mut stride = 1;
    for axis in (0..shape.len()).rev() {
        (tensor.shape[axis], tensor.strides[axis]) = (shape[axis] as i64, stride);
        stride *= shape[axis] as i64;
    }
    let axis = bytes.below(shape.len());
    match bytes.byte() {
        0..=199 => {}
        200..=209 => tensor.strides[axis] = [-1, 0, i64::MIN, i64::MAX][bytes.below(4)],
        210..=219 => tensor.shape[axis] = [-1, 0, 1, i64::MIN][bytes.below(4)].min(tensor.shape[axis]),
        220..=229 => tensor.ndim = bytes.int() as u32,
        230..=239 => tensor.dtype = bytes.int() as u32,
        240..=244 => tensor.data = null_mut(),
        245..=249 => tensor.data = tensor.data.wrapping_byte_add(1),
        _ => tensor = ddt_tensor { data: null_mut(), dtype: 0, ..tensor },
    }
    // a smaller number of bigger elements would be a lie about memory
    if tensor.dtype == DDT_DTYPE_I64 && size_of::<T>() < 8 {
        tensor.dtype = 0;
    }
    tensor
}

/// All arrays of a batch of trees.
struct Trees {
    num_reqs: usize,
    max_nodes: usize,
    max_depth: usize,
    num_nodes: Buffer<i32>,
    per_node: [Buffer<i32>; 7],
    positions: Buffer<i64>,
    bits: Buffer<i32>,
    ancestors: Buffer<i32>,
    flags: Buffer<i32>,
    absent: u8,
}

impl Trees {
    fn new(bytes: &mut Bytes<'_>) -> Self {
        let (num_reqs, max_nodes, max_depth) = (bytes.below(4), 1 + bytes.below(9), bytes.below(5));
        let slots = num_reqs * max_nodes;
        Self {
            num_reqs,
            max_nodes,
            max_depth,
            num_nodes: ints(bytes, num_reqs),
            per_node: std::array::from_fn(|_| ints(bytes, slots)),
            positions: longs(bytes, slots),
            bits: ints(bytes, slots),
            ancestors: ints(bytes, slots * (max_depth + 1)),
            flags: ints(bytes, num_reqs),
            absent: bytes.byte(),
        }
    }

    fn describe(&mut self) -> ddt_tree {
        let [tokens, parents, depths, first_child, next_sibling, subtree_end, pop_ranks] =
            self.per_node.each_mut().map(Buffer::pointer);
        let mut tree = ddt_tree {
            struct_size: size_of::<ddt_tree>() as u32,
            num_reqs: self.num_reqs as i32,
            max_nodes: self.max_nodes as i32,
            max_depth: self.max_depth as i32,
            num_nodes: self.num_nodes.pointer(),
            tokens,
            parents,
            depths,
            first_child,
            next_sibling,
            subtree_end,
            ancestor_bits: self.bits.pointer().cast(),
            ancestors: self.ancestors.pointer(),
            positions: self.positions.pointer(),
            pop_ranks,
            flags: self.flags.pointer().cast(),
        };
        match self.absent {
            200..=209 => tree.num_nodes = null_mut(),
            210..=219 => tree.parents = null_mut(),
            220..=229 => tree.tokens = null_mut(),
            230..=239 => tree.ancestors = null_mut(),
            240..=249 => tree.max_nodes = -1,
            250.. => tree.struct_size = 12,
            _ => {}
        }
        tree
    }

    fn check(&self, may_write: bool) {
        self.num_nodes.check("num_nodes", may_write);
        for (i, field) in self.per_node.iter().enumerate() {
            field.check(&format!("field {i} of a node"), may_write);
        }
        self.positions.check("positions", may_write);
        self.bits.check("ancestor_bits", may_write);
        self.ancestors.check("ancestors", may_write);
        self.flags.check("flags", may_write);
    }

    /// What an operation wrote is a tree: parents first, children in their parent's interval.
    fn check_trees(&self) {
        let [_, parents, depths, _, _, subtree_end, _] =
            self.per_node.each_ref().map(|field| &field.memory[GUARD..]);
        for r in 0..self.num_reqs {
            let count = self.num_nodes.memory[GUARD + r];
            assert!((0..=self.max_nodes as i32).contains(&count), "num_nodes {count}");
            for node in 0..count as usize {
                let at = r * self.max_nodes + node;
                if node == 0 {
                    assert_eq!((parents[at], depths[at], subtree_end[at]), (-1, 0, count));
                    continue;
                }
                assert!((0..node as i32).contains(&parents[at]), "parent {} of {node}", parents[at]);
                let parent = r * self.max_nodes + parents[at] as usize;
                assert_eq!(depths[at], depths[parent] + 1);
                assert!(depths[at] <= self.max_depth as i32);
                assert!((node as i32) < subtree_end[at] && subtree_end[at] <= subtree_end[parent]);
            }
        }
    }
}

/// `[R + 1]` row numbers, usually those of `rows` rows for each request; never more rows than there
/// are, because their last one says how long arrays of the caller are.
fn query_start(bytes: &mut Bytes<'_>, trees: &Trees, rows: usize) -> Buffer<i32> {
    let mut next = 0;
    let most = (trees.num_reqs * rows) as i32;
    Buffer::new(trees.num_reqs + 1, POISON, || {
        let start = next;
        next += rows as i32;
        if bytes.byte() < 240 { start } else { (bytes.int() as i32).min(most) }
    })
}

/// Whether a call wrote its outputs; panics for a status that means a bug.
fn succeeded(status: ddt_status) -> bool {
    let mut text = [0u8; 300];
    // SAFETY: the buffer is as long as said.
    let copied = unsafe { ddt_last_error(text.as_mut_ptr().cast(), text.len(), null_mut()) };
    assert_eq!(copied, DDT_OK);
    assert!(status < DDT_PANIC, "{status}: {}", String::from_utf8_lossy(&text));
    status == DDT_OK
}

macro_rules! params {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        // SAFETY: zero is "absent" or 0 in every field.
        let mut params: $type = unsafe { std::mem::zeroed() };
        params.struct_size = size_of::<$type>() as u32;
        $(params.$field = $value;)*
        params
    }};
}

fn tree_mask(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    let mut trees = Trees::new(bytes);
    let slots = trees.num_reqs * trees.max_nodes;
    let (mut num_nodes, mut parents) = (ints(bytes, trees.num_reqs), ints(bytes, slots));
    let (mut priorities, mut positions) = (ints(bytes, slots), longs(bytes, trees.num_reqs));
    let mut order = output(slots, POISON);
    let mut tree = trees.describe();
    let params = params!(ddt_tree_mask_params {
        num_reqs: tree.num_reqs,
        max_nodes: tree.max_nodes,
        num_nodes: num_nodes.pointer(),
        parents: parents.pointer(),
        priorities: priorities.pointer(),
        root_positions: positions.pointer(),
        order: order.pointer(),
        tree: &mut tree,
    });
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_mask(context, &params, null_mut()) });
    trees.check(is_ok);
    order.check("order", is_ok);
    num_nodes.check("input", false);
    parents.check("input", false);
    if is_ok && !tree.parents.is_null() {
        trees.check_trees();
    }
}

fn tree_build(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    let mut trees = Trees::new(bytes);
    let (reqs, depths, width) = (trees.num_reqs, bytes.below(5), bytes.below(9));
    let is_lattice = bytes.byte() >= 128;
    let mut scores = floats(bytes, reqs * depths * width);
    let mut tokens = ints(bytes, reqs * depths * width);
    let mut transitions = floats(bytes, reqs * depths * width * width);
    let mut index = ints(bytes, reqs);
    let (mut roots, mut positions) = (ints(bytes, reqs), longs(bytes, reqs));
    let (mut budgets, mut depth_caps, mut caps) = (ints(bytes, reqs), ints(bytes, reqs), ints(bytes, reqs));
    let (mut stops, mut scales) = (ints(bytes, reqs * 2), floats(bytes, depths));
    let (mut temperatures, mut seeds) = (floats(bytes, reqs), longs(bytes, reqs));
    let mut tree = trees.describe();
    let mut params = params!(ddt_tree_build_params {
        root_tokens: roots.pointer(),
        root_positions: positions.pointer(),
        node_budgets: budgets.pointer(),
        stop_tokens: stops.pointer(),
        max_stop_tokens: 2,
        max_candidates: 0,
        tree: &mut tree,
    });
    if is_lattice {
        params.candidate_tokens = tensor(bytes, &mut tokens, DDT_DTYPE_I32, &[reqs, depths, width]);
        params.candidate_scores = tensor(bytes, &mut scores, DDT_DTYPE_F32, &[reqs, depths, width]);
        if bytes.byte() >= 128 {
            params.transition_scores =
                tensor(bytes, &mut transitions, DDT_DTYPE_F32, &[reqs, depths, width, width]);
        }
    } else {
        params.logits = tensor(bytes, &mut scores, DDT_DTYPE_F32, &[reqs, depths, width]);
        params.max_candidates = bytes.int() as i32;
    }
    let optional = bytes.byte();
    if optional & 1 != 0 {
        params.depth_caps = depth_caps.pointer();
        params.candidate_caps = caps.pointer();
    }
    if optional & 2 != 0 {
        (params.temperatures, params.seeds) = (temperatures.pointer(), seeds.pointer());
    }
    if optional & 4 != 0 {
        params.depth_scales = scales.pointer();
    }
    if optional & 8 != 0 {
        params.tree_index = tensor(bytes, &mut index, DDT_DTYPE_I32, &[reqs]);
    }
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_build(context, &params, null_mut()) });
    trees.check(is_ok);
    scores.check("scores", false);
    tokens.check("tokens", false);
    budgets.check("budgets", false);
    // with an index some trees may stay as they were
    if is_ok && !tree.parents.is_null() && optional & 8 == 0 {
        trees.check_trees();
    }
}

fn tree_accept(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    let mut trees = Trees::new(bytes);
    let (reqs, rows, vocab) = (trees.num_reqs, bytes.below(10), bytes.below(9));
    let mut query_start = query_start(bytes, &trees, rows);
    let mut logits = floats(bytes, reqs * rows * vocab);
    let (mut temperatures, mut seeds) = (floats(bytes, reqs), longs(bytes, reqs));
    let path = reqs * (trees.max_depth + 1);
    let (mut count, mut nodes) = (output(reqs, POISON), output(reqs * trees.max_depth, POISON));
    let (mut tokens, mut accepted_rows) = (output(path, i64::from(POISON)), output(path, POISON));
    let (mut next, mut rejected) = (output(reqs, i64::from(POISON)), output(reqs, POISON));
    let mut tree = trees.describe();
    let mut params = params!(ddt_tree_accept_params {
        tree: &mut tree,
        query_start: query_start.pointer(),
        logits: tensor(bytes, &mut logits, DDT_DTYPE_F32, &[reqs * rows, vocab]),
        num_accepted: count.pointer(),
        accepted_nodes: nodes.pointer(),
        output_tokens: tokens.pointer(),
        accepted_rows: accepted_rows.pointer(),
        next_positions: next.pointer(),
        num_rejected: rejected.pointer(),
    });
    if bytes.byte() >= 128 {
        (params.temperatures, params.seeds) = (temperatures.pointer(), seeds.pointer());
    }
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_accept(context, &params, null_mut()) });
    // it may set bits of flags, and nothing else of the tree
    trees.flags.check("flags", is_ok);
    trees.flags.before.clone_from(&trees.flags.memory);
    trees.check(false);
    logits.check("logits", false);
    count.check("num_accepted", is_ok);
    nodes.check("accepted_nodes", is_ok);
    tokens.check("output_tokens", is_ok);
    accepted_rows.check("accepted_rows", is_ok);
    next.check("next_positions", is_ok);
    rejected.check("num_rejected", is_ok);
}

fn tree_attention(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    const DIM: usize = 32;
    let mut trees = Trees::new(bytes);
    let (reqs, rows, blocks) = (trees.num_reqs, bytes.below(10), bytes.below(4));
    let (block, table) = (1 + bytes.below(4), bytes.below(4));
    let mut query_start = query_start(bytes, &trees, rows);
    let mut query = floats(bytes, reqs * rows * DIM);
    let (mut keys, mut values) = (floats(bytes, blocks * block * DIM), floats(bytes, blocks * block * DIM));
    let mut block_table = ints(bytes, reqs * table);
    let (mut seq_lens, mut prefix) = (ints(bytes, reqs), ints(bytes, reqs));
    let mut out = output(reqs * rows * DIM, 77.0);
    let mut tree = trees.describe();
    let mut params = params!(ddt_tree_attention_params {
        query: tensor(bytes, &mut query, DDT_DTYPE_F32, &[reqs * rows, 1, DIM]),
        key_cache: tensor(bytes, &mut keys, DDT_DTYPE_F32, &[blocks, 1, block, DIM]),
        value_cache: tensor(bytes, &mut values, DDT_DTYPE_F32, &[blocks, 1, block, DIM]),
        block_table: tensor(bytes, &mut block_table, DDT_DTYPE_I32, &[reqs, table]),
        query_start: query_start.pointer(),
        seq_lens: seq_lens.pointer(),
        tree: &mut tree,
        softmax_scale: bytes.float(),
        logit_softcap: bytes.float(),
        out: tensor(bytes, &mut out, DDT_DTYPE_F32, &[reqs * rows, 1, DIM]),
    });
    if bytes.byte() >= 128 {
        params.prefix_rows = prefix.pointer();
    }
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_attention(context, &params, null_mut()) });
    trees.check(false);
    query.check("query", false);
    keys.check("keys", false);
    values.check("values", false);
    block_table.check("block_table", false);
    out.check("out", is_ok);
}

/// One recurrent layer, one attention layer: `gdn_verify`, or `commit`.
fn layers(bytes: &mut Bytes<'_>, context: *const ddt_context, is_commit: bool) {
    const DIM: usize = 128;
    const CHANNELS: usize = 3 * DIM;
    let mut trees = Trees::new(bytes);
    let (reqs, rows, slots) = (trees.num_reqs, bytes.below(6), bytes.below(4));
    let total = reqs * rows;
    let mut query_start = query_start(bytes, &trees, rows);
    // long arrays of few different values: inputs stay short
    let pattern: Vec<f32> = (0..8).map(|_| bytes.float()).collect();
    let big = |len: usize| {
        let mut i = 0;
        Buffer::new(len, 77.0, || {
            i += 1;
            pattern[i % 8]
        })
    };
    let (mut weight, mut conv) = (big(CHANNELS * 4), big(slots * CHANNELS * 3));
    let (mut state, mut stash) = (big(slots * DIM * DIM), big(total * CHANNELS));
    let (mut gates, mut qkv, mut out) = (big(total * 2), big(total * CHANNELS), big(total * DIM));
    let (mut a, mut b) = (floats(bytes, total), floats(bytes, total));
    let (mut a_log, mut dt_bias) = (floats(bytes, 1), floats(bytes, 1));
    let (mut state_slots, mut snapshot_slots) = (ints(bytes, reqs), ints(bytes, reqs));
    let layer = ddt_gdn_layer {
        conv_weight: tensor(bytes, &mut weight, DDT_DTYPE_F32, &[CHANNELS, 4]),
        // SAFETY: all zero is an absent tensor.
        conv_bias: unsafe { std::mem::zeroed() },
        conv_state: tensor(bytes, &mut conv, DDT_DTYPE_F32, &[slots, CHANNELS, 3]),
        ssm_state: tensor(bytes, &mut state, DDT_DTYPE_F32, &[slots, 1, DIM, DIM]),
        stash_qkv: tensor(bytes, &mut stash, DDT_DTYPE_F32, &[total, CHANNELS]),
        stash_gates: tensor(bytes, &mut gates, DDT_DTYPE_F32, &[total, 2, 1]),
        state_slots: state_slots.pointer(),
        snapshot_slots: if bytes.byte() < 128 { null() } else { snapshot_slots.pointer() },
    };
    let mut tree = trees.describe();
    if !is_commit {
        let params = params!(ddt_gdn_verify_params {
            layer: layer,
            mixed_qkv: tensor(bytes, &mut qkv, DDT_DTYPE_F32, &[total, CHANNELS]),
            a: tensor(bytes, &mut a, DDT_DTYPE_F32, &[total, 1]),
            b: tensor(bytes, &mut b, DDT_DTYPE_F32, &[total, 1]),
            a_log: tensor(bytes, &mut a_log, DDT_DTYPE_F32, &[1]),
            dt_bias: tensor(bytes, &mut dt_bias, DDT_DTYPE_F32, &[1]),
            query_start: query_start.pointer(),
            tree: &mut tree,
            scale: bytes.float(),
            norm_eps: bytes.float(),
            out: tensor(bytes, &mut out, DDT_DTYPE_F32, &[total, 1, DIM]),
        });
        // SAFETY: every buffer is as long as the parameters say.
        let is_ok = succeeded(unsafe { ddt_gdn_verify(context, &params, null_mut()) });
        trees.check(false);
        conv.check("conv_state", false);
        state.check("ssm_state", false);
        qkv.check("mixed_qkv", false);
        stash.check("stash_qkv", is_ok);
        gates.check("stash_gates", is_ok);
        out.check("out", is_ok);
        return;
    }
    let (blocks, block) = (bytes.below(4), 1 + bytes.below(4));
    let (mut keys, mut values) = (floats(bytes, blocks * block * 4), floats(bytes, blocks * block * 4));
    let mut row_slots = longs(bytes, total);
    let (mut count, mut nodes) = (ints(bytes, reqs), ints(bytes, reqs * trees.max_depth));
    let mut snapshot_tokens = ints(bytes, reqs);
    let kv = ddt_kv_layer {
        key_cache: tensor(bytes, &mut keys, DDT_DTYPE_F32, &[blocks, 1, block, 4]),
        value_cache: tensor(bytes, &mut values, DDT_DTYPE_F32, &[blocks, 1, block, 4]),
        row_slots: row_slots.pointer(),
    };
    let mut params = params!(ddt_commit_params {
        num_gdn_layers: 1,
        num_kv_layers: 1,
        gdn_layers: &layer,
        kv_layers: &kv,
        tree: &mut tree,
        query_start: query_start.pointer(),
        num_accepted: count.pointer(),
        accepted_nodes: nodes.pointer(),
        norm_eps: bytes.float(),
    });
    if !layer.snapshot_slots.is_null() {
        params.snapshot_tokens = snapshot_tokens.pointer();
    }
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_commit(context, &params, null_mut()) });
    trees.check(false);
    stash.check("stash_qkv", false);
    gates.check("stash_gates", false);
    row_slots.check("row_slots", false);
    conv.check("conv_state", is_ok);
    state.check("ssm_state", is_ok);
    keys.check("keys", is_ok);
    values.check("values", is_ok);
}

/// One call on a CPU context. Panics where the library did what it must not.
pub fn run(data: &[u8]) {
    let params = params!(ddt_context_params { abi_version: DDT_ABI_VERSION });
    let mut context = null_mut();
    // SAFETY: both pointers are valid.
    assert_eq!(unsafe { ddt_context_create(&params, &mut context) }, DDT_OK);
    let mut bytes = Bytes(data);
    match bytes.below(6) {
        0 => tree_mask(&mut bytes, context),
        1 => tree_build(&mut bytes, context),
        2 => tree_accept(&mut bytes, context),
        3 => tree_attention(&mut bytes, context),
        4 => layers(&mut bytes, context, false),
        _ => layers(&mut bytes, context, true),
    }
    // SAFETY: made above, and nobody else has it.
    unsafe { ddt_context_free(context) };
}
