// SPDX-License-Identifier: Apache-2.0
//! What a fuzzer's bytes do: a call of one operation of the C ABI with hostile values in buffers
//! that are as long as the parameters say. Whatever they are, the call must return a status, leave
//! inputs and the memory around outputs alone, and write nothing unless it returns DDT_OK. Outputs
//! may lie on inputs: then those may change too, and nothing is said of what they hold.
//!
//! What an operation takes is only ever appended to: an input that has ended reads as zeros, so
//! older inputs stay the calls that they were.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ddtree::ffi::*;

/// Reads numbers from the input; zeros when it has ended.
pub struct Bytes<'a>(&'a [u8]);

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

    fn place(&mut self) -> Place {
        Place { start: self.pointer().cast(), bytes: (self.memory.len() - 2 * GUARD) * size_of::<T>() }
    }

    /// `may_write`: the call succeeded, and this is one of its outputs.
    fn check(&self, name: &str, may_write: bool) {
        // a NaN differs from itself, its bytes do not
        fn bytes<T>(all: &[T]) -> &[u8] {
            // SAFETY: integers and floats have no padding.
            unsafe { std::slice::from_raw_parts(all.as_ptr().cast::<u8>(), size_of_val(all)) }
        }
        let (now, before) = (&self.memory, &self.before);
        let end = now.len() - GUARD;
        assert_eq!(bytes(&now[..GUARD]), bytes(&before[..GUARD]), "{name}: written before its start");
        assert_eq!(bytes(&now[end..]), bytes(&before[end..]), "{name}: written after its end");
        if !may_write {
            assert_eq!(bytes(now), bytes(before), "{name}: written");
        }
    }
}

/// Memory between two guards.
struct Place {
    start: *mut c_void,
    bytes: usize,
}

/// A pointer of the parameters, and the memory that it would point to.
struct Field {
    pointer: *mut *mut c_void,
    place: Place,
}

fn field<P, T: Copy + PartialEq>(pointer: &mut P, buffer: &mut Buffer<T>) -> Field {
    assert_eq!(size_of::<P>(), size_of::<*mut c_void>());
    Field { pointer: (&raw mut *pointer).cast(), place: buffer.place() }
}

/// Puts up to three outputs onto other memory of the call, in every second input that is long
/// enough; returns whether it did. Absent outputs stay absent.
fn overlap(bytes: &mut Bytes<'_>, outputs: &[Field], places: &[Place]) -> bool {
    if bytes.byte() < 128 {
        return false;
    }
    for _ in 0..=bytes.below(3) {
        let (output, place) = (&outputs[bytes.below(outputs.len())], &places[bytes.below(places.len())]);
        // SAFETY: the field is one of the caller's parameters.
        let pointer = unsafe { &mut *output.pointer };
        if !pointer.is_null() && output.place.bytes <= place.bytes {
            let shifts = (place.bytes - output.place.bytes) / 8 + 1;
            *pointer = place.start.wrapping_byte_add(bytes.below(shifts) * 8);
        }
    }
    true
}

/// The same for an output that is longer than the inputs: moves up to three of them, with what they
/// hold, to where the call writes.
fn carry<T: Copy + PartialEq>(bytes: &mut Bytes<'_>, inputs: &[Field], output: &mut Buffer<T>) -> bool {
    if bytes.byte() < 128 {
        return false;
    }
    let to = output.place();
    for _ in 0..=bytes.below(3) {
        let input = &inputs[bytes.below(inputs.len())];
        // SAFETY: the field is one of the caller's parameters.
        let pointer = unsafe { &mut *input.pointer };
        if !pointer.is_null() && input.place.bytes <= to.bytes {
            let shifts = (to.bytes - input.place.bytes) / 8 + 1;
            *pointer = to.start.wrapping_byte_add(bytes.below(shifts) * 8);
            // SAFETY: both are as long as that.
            unsafe { pointer.cast::<u8>().copy_from(input.place.start.cast(), input.place.bytes) };
        }
    }
    output.before.clone_from(&output.memory);
    true
}

/// Leaves out up to three fields, in every second input that is long enough.
fn leave_out(bytes: &mut Bytes<'_>, fields: &[Field]) {
    if bytes.byte() < 128 {
        return;
    }
    for _ in 0..=bytes.below(3) {
        // SAFETY: the field is one of the caller's parameters.
        unsafe { *fields[bytes.below(fields.len())].pointer = null_mut() };
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

/// Makes two heads of every two entries of axis 0, in the same memory.
fn pair_heads(tensor: &mut ddt_tensor) {
    if tensor.shape[1] == 1 {
        (tensor.shape[0], tensor.shape[1]) = (tensor.shape[0] / 2, 2);
        tensor.strides[1] = tensor.strides[0];
        tensor.strides[0] = tensor.strides[0].wrapping_mul(2);
    }
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
        Self::with_sizes(bytes, num_reqs, max_nodes, max_depth)
    }

    fn with_sizes(bytes: &mut Bytes<'_>, num_reqs: usize, max_nodes: usize, max_depth: usize) -> Self {
        let slots = num_reqs * max_nodes;
        Self {
            num_reqs,
            max_nodes,
            max_depth,
            num_nodes: ints(bytes, num_reqs),
            per_node: std::array::from_fn(|_| ints(bytes, slots)),
            positions: longs(bytes, slots),
            bits: ints(bytes, slots * max_nodes.div_ceil(32)),
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

    fn outputs(&mut self, tree: &mut ddt_tree) -> Vec<Field> {
        let [tokens, parents, depths, first_child, next_sibling, subtree_end, pop_ranks] =
            self.per_node.each_mut();
        vec![
            field(&mut tree.num_nodes, &mut self.num_nodes),
            field(&mut tree.tokens, tokens),
            field(&mut tree.parents, parents),
            field(&mut tree.depths, depths),
            field(&mut tree.first_child, first_child),
            field(&mut tree.next_sibling, next_sibling),
            field(&mut tree.subtree_end, subtree_end),
            field(&mut tree.pop_ranks, pop_ranks),
            field(&mut tree.positions, &mut self.positions),
            field(&mut tree.ancestor_bits, &mut self.bits),
            field(&mut tree.ancestors, &mut self.ancestors),
            field(&mut tree.flags, &mut self.flags),
        ]
    }

    fn places(&mut self) -> Vec<Place> {
        let mut places: Vec<_> = self.per_node.iter_mut().map(Buffer::place).collect();
        for buffer in [&mut self.num_nodes, &mut self.bits, &mut self.ancestors, &mut self.flags] {
            places.push(buffer.place());
        }
        places.push(self.positions.place());
        places
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
    fn check_trees(&self, tree: &ddt_tree) {
        if tree.parents.is_null() || tree.depths.is_null() || tree.subtree_end.is_null() {
            return;
        }
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
fn query_start(bytes: &mut Bytes<'_>, num_reqs: usize, rows: usize) -> Buffer<i32> {
    let mut next = 0;
    let most = (num_reqs * rows) as i32;
    Buffer::new(num_reqs + 1, POISON, || {
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

/// A struct of an older caller, or of one that lies; never longer than it is.
fn shorten(bytes: &mut Bytes<'_>, struct_size: &mut u32) {
    if bytes.byte() >= 224 {
        *struct_size = bytes.int().clamp(0, i64::from(*struct_size)) as u32;
    }
}

/// What a size query must do, on a CPU context: 0 bytes or a status, and `out` alone then.
fn check_size_query(query: impl FnOnce(*mut usize) -> ddt_status) {
    let mut size = usize::MAX;
    let want = if succeeded(query(&mut size)) { 0 } else { usize::MAX };
    assert_eq!(size, want);
}

fn tree_mask(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    let mut trees = Trees::new(bytes);
    let slots = trees.num_reqs * trees.max_nodes;
    let (mut num_nodes, mut parents) = (ints(bytes, trees.num_reqs), ints(bytes, slots));
    let (mut priorities, mut positions) = (ints(bytes, slots), longs(bytes, trees.num_reqs));
    let mut order = output(slots, POISON);
    let mut tree = trees.describe();
    let mut params = params!(ddt_tree_mask_params {
        num_reqs: tree.num_reqs,
        max_nodes: tree.max_nodes,
        num_nodes: num_nodes.pointer(),
        parents: parents.pointer(),
        priorities: priorities.pointer(),
        root_positions: positions.pointer(),
        order: order.pointer(),
    });
    let mut outputs = trees.outputs(&mut tree);
    outputs.push(field(&mut params.order, &mut order));
    let mut places = trees.places();
    places.extend([num_nodes.place(), parents.place(), priorities.place(), positions.place(), order.place()]);
    let overlaps = overlap(bytes, &outputs, &places);
    shorten(bytes, &mut params.struct_size);
    let mut tokens = ints(bytes, slots);
    if bytes.byte() >= 128 {
        params.tokens = tokens.pointer();
    }
    let mut optional = outputs;
    optional.push(field(&mut params.priorities, &mut priorities));
    optional.push(field(&mut params.root_positions, &mut positions));
    leave_out(bytes, &optional);
    params.tree = &mut tree;
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_mask(context, &params, null_mut()) });
    trees.check(is_ok);
    order.check("order", is_ok);
    num_nodes.check("num_nodes", is_ok && overlaps);
    parents.check("parents", is_ok && overlaps);
    priorities.check("priorities", is_ok && overlaps);
    positions.check("root_positions", is_ok && overlaps);
    tokens.check("tokens", false);
    if is_ok && !overlaps {
        trees.check_trees(&tree);
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
    let has_index = optional & 8 != 0;
    if has_index {
        params.tree_index = tensor(bytes, &mut index, DDT_DTYPE_I32, &[reqs]);
    }
    let (mut spines, mut min_depths) = (ints(bytes, reqs), ints(bytes, reqs));
    let optional_later = bytes.byte();
    if optional_later & 1 != 0 {
        params.spine_depths = spines.pointer();
    }
    if optional_later & 2 != 0 {
        params.stop_min_depths = min_depths.pointer();
    }
    if optional_later & 4 != 0 && is_lattice {
        // SAFETY: all zero is an absent tensor.
        params.candidate_scores = unsafe { std::mem::zeroed() };
    }
    let outputs = trees.outputs(&mut tree);
    let mut places = trees.places();
    let mut inputs: [&mut Buffer<i32>; 9] = [
        &mut tokens,
        &mut index,
        &mut roots,
        &mut budgets,
        &mut depth_caps,
        &mut caps,
        &mut stops,
        &mut spines,
        &mut min_depths,
    ];
    let mut float_inputs = [&mut scores, &mut transitions, &mut scales, &mut temperatures];
    places.extend(inputs.iter_mut().map(|input| input.place()));
    places.extend(float_inputs.iter_mut().map(|input| input.place()));
    places.extend([positions.place(), seeds.place()]);
    let overlaps = overlap(bytes, &outputs, &places);
    shorten(bytes, &mut params.struct_size);
    let mut long_index = longs(bytes, reqs);
    if has_index {
        if bytes.byte() >= 128 {
            params.tree_index = tensor(bytes, &mut long_index, DDT_DTYPE_I64, &[reqs]);
        }
        // fewer requests than trees
        let batch = (reqs - bytes.below(reqs + 1)) as i64;
        for tensor in [
            &mut params.tree_index,
            &mut params.logits,
            &mut params.candidate_tokens,
            &mut params.candidate_scores,
            &mut params.transition_scores,
        ] {
            tensor.shape[0] = tensor.shape[0].min(batch);
        }
    }
    leave_out(bytes, &outputs);
    params.tree = &mut tree;
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_build(context, &params, null_mut()) });
    // SAFETY: as above.
    check_size_query(|out| unsafe { ddt_tree_build_workspace_size(context, &params, out) });
    trees.check(is_ok);
    inputs.iter().for_each(|input| input.check("an input", is_ok && overlaps));
    float_inputs.iter().for_each(|input| input.check("an input of floats", is_ok && overlaps));
    positions.check("root_positions", is_ok && overlaps);
    seeds.check("seeds", is_ok && overlaps);
    long_index.check("tree_index", false);
    // with an index some trees may stay as they were
    if is_ok && !has_index && !overlaps {
        trees.check_trees(&tree);
    }
}

fn tree_accept(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    let mut trees = Trees::new(bytes);
    let (reqs, rows, vocab) = (trees.num_reqs, bytes.below(10), bytes.below(9));
    let mut query_start = query_start(bytes, trees.num_reqs, rows);
    let mut logits = floats(bytes, reqs * rows * vocab);
    let (mut temperatures, mut seeds) = (floats(bytes, reqs), longs(bytes, reqs));
    let path = reqs * (trees.max_depth + 1);
    let (mut count, mut nodes) = (output(reqs, POISON), output(reqs * trees.max_depth, POISON));
    let (mut tokens, mut accepted_rows) = (output(path, i64::from(POISON)), output(path, POISON));
    let (mut next, mut rejected) = (output(reqs, i64::from(POISON)), output(reqs, POISON));
    let mut tree = trees.describe();
    let mut params = params!(ddt_tree_accept_params {
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
    let mut node_tokens = longs(bytes, reqs * rows);
    if bytes.byte() >= 128 {
        // SAFETY: all zero is an absent tensor.
        (params.logits, params.node_tokens) = (unsafe { std::mem::zeroed() }, node_tokens.pointer());
    }
    let outputs = [
        field(&mut tree.flags, &mut trees.flags),
        field(&mut params.num_accepted, &mut count),
        field(&mut params.accepted_nodes, &mut nodes),
        field(&mut params.output_tokens, &mut tokens),
        field(&mut params.accepted_rows, &mut accepted_rows),
        field(&mut params.next_positions, &mut next),
        field(&mut params.num_rejected, &mut rejected),
    ];
    let mut places = trees.places();
    places.extend([query_start.place(), logits.place(), temperatures.place(), seeds.place()]);
    places.extend([node_tokens.place(), tokens.place(), accepted_rows.place()]);
    let overlaps = overlap(bytes, &outputs, &places);
    shorten(bytes, &mut params.struct_size);
    leave_out(bytes, &outputs);
    params.tree = &mut tree;
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_accept(context, &params, null_mut()) });
    // SAFETY: as above.
    check_size_query(|out| unsafe { ddt_tree_accept_workspace_size(context, &params, out) });
    // it may set bits of flags, and nothing else of the tree
    trees.flags.check("flags", is_ok);
    trees.flags.before.clone_from(&trees.flags.memory);
    trees.check(is_ok && overlaps);
    query_start.check("query_start", is_ok && overlaps);
    logits.check("logits", is_ok && overlaps);
    temperatures.check("temperatures", is_ok && overlaps);
    seeds.check("seeds", is_ok && overlaps);
    node_tokens.check("node_tokens", is_ok && overlaps);
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
    let mut query_start = query_start(bytes, trees.num_reqs, rows);
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
        softmax_scale: bytes.float(),
        logit_softcap: bytes.float(),
        out: tensor(bytes, &mut out, DDT_DTYPE_F32, &[reqs * rows, 1, DIM]),
    });
    if bytes.byte() >= 128 {
        params.prefix_rows = prefix.pointer();
    }
    let inputs = [
        field(&mut tree.num_nodes, &mut trees.num_nodes),
        field(&mut tree.ancestor_bits, &mut trees.bits),
        field(&mut params.block_table.data, &mut block_table),
        field(&mut params.query_start, &mut query_start),
        field(&mut params.seq_lens, &mut seq_lens),
        field(&mut params.query.data, &mut query),
        field(&mut params.key_cache.data, &mut keys),
        field(&mut params.value_cache.data, &mut values),
    ];
    carry(bytes, &inputs, &mut out);
    shorten(bytes, &mut params.struct_size);
    let heads = bytes.byte();
    if heads & 1 != 0 {
        pair_heads(&mut params.query);
        pair_heads(&mut params.out);
    }
    if heads & 2 != 0 {
        pair_heads(&mut params.key_cache);
        pair_heads(&mut params.value_cache);
    }
    params.tree = &mut tree;
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_attention(context, &params, null_mut()) });
    // SAFETY: as above.
    check_size_query(|out| unsafe { ddt_tree_attention_workspace_size(context, &params, out) });
    trees.check(false);
    query_start.check("query_start", false);
    seq_lens.check("seq_lens", false);
    prefix.check("prefix_rows", false);
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
    let mut query_start = query_start(bytes, trees.num_reqs, rows);
    // long arrays of few different values: inputs stay short
    let pattern: Vec<f32> = (0..8).map(|_| bytes.float()).collect();
    let big = |len: usize| {
        let mut i = 0;
        Buffer::new(len, 77.0, || {
            i += 1;
            pattern[i % 8]
        })
    };
    let (mut weight, mut bias, mut conv) = (big(CHANNELS * 4), big(CHANNELS), big(slots * CHANNELS * 3));
    let (mut state, mut stash) = (big(slots * DIM * DIM), big(total * CHANNELS));
    let (mut gates, mut qkv, mut out) = (big(total * 2), big(total * CHANNELS), big(total * DIM));
    let (mut a, mut b) = (floats(bytes, total), floats(bytes, total));
    let (mut a_log, mut dt_bias) = (floats(bytes, 1), floats(bytes, 1));
    let (mut state_slots, mut snapshot_slots) = (ints(bytes, reqs), ints(bytes, reqs));
    let mut layer = ddt_gdn_layer {
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
        let mut params = params!(ddt_gdn_verify_params {
            mixed_qkv: tensor(bytes, &mut qkv, DDT_DTYPE_F32, &[total, CHANNELS]),
            a: tensor(bytes, &mut a, DDT_DTYPE_F32, &[total, 1]),
            b: tensor(bytes, &mut b, DDT_DTYPE_F32, &[total, 1]),
            a_log: tensor(bytes, &mut a_log, DDT_DTYPE_F32, &[1]),
            dt_bias: tensor(bytes, &mut dt_bias, DDT_DTYPE_F32, &[1]),
            query_start: query_start.pointer(),
            scale: bytes.float(),
            norm_eps: bytes.float(),
            out: tensor(bytes, &mut out, DDT_DTYPE_F32, &[total, 1, DIM]),
        });
        let [_, parents, depths, ..] = trees.per_node.each_mut();
        let inputs = [
            field(&mut tree.num_nodes, &mut trees.num_nodes),
            field(&mut tree.parents, parents),
            field(&mut tree.depths, depths),
            field(&mut tree.ancestors, &mut trees.ancestors),
            field(&mut params.query_start, &mut query_start),
            field(&mut params.mixed_qkv.data, &mut qkv),
            field(&mut params.a.data, &mut a),
            field(&mut params.a_log.data, &mut a_log),
            field(&mut layer.state_slots, &mut state_slots),
            field(&mut layer.conv_weight.data, &mut weight),
            field(&mut layer.conv_state.data, &mut conv),
        ];
        let target = if bytes.byte() < 128 { &mut out } else { &mut stash };
        carry(bytes, &inputs, target);
        shorten(bytes, &mut params.struct_size);
        if bytes.byte() >= 128 {
            layer.conv_bias = tensor(bytes, &mut bias, DDT_DTYPE_F32, &[CHANNELS]);
        }
        (params.layer, params.tree) = (layer, &mut tree);
        // SAFETY: every buffer is as long as the parameters say.
        let is_ok = succeeded(unsafe { ddt_gdn_verify(context, &params, null_mut()) });
        // SAFETY: as above.
        check_size_query(|out| unsafe { ddt_gdn_verify_workspace_size(context, &params, out) });
        trees.check(false);
        query_start.check("query_start", false);
        state_slots.check("state_slots", false);
        weight.check("conv_weight", false);
        bias.check("conv_bias", false);
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
    let mut kv = ddt_kv_layer {
        key_cache: tensor(bytes, &mut keys, DDT_DTYPE_F32, &[blocks, 1, block, 4]),
        value_cache: tensor(bytes, &mut values, DDT_DTYPE_F32, &[blocks, 1, block, 4]),
        row_slots: row_slots.pointer(),
    };
    let mut params = params!(ddt_commit_params {
        num_gdn_layers: 1,
        num_kv_layers: 1,
        query_start: query_start.pointer(),
        num_accepted: count.pointer(),
        accepted_nodes: nodes.pointer(),
        norm_eps: bytes.float(),
    });
    if !layer.snapshot_slots.is_null() {
        params.snapshot_tokens = snapshot_tokens.pointer();
    }
    let inputs = [
        field(&mut tree.num_nodes, &mut trees.num_nodes),
        field(&mut params.query_start, &mut query_start),
        field(&mut params.num_accepted, &mut count),
        field(&mut params.accepted_nodes, &mut nodes),
        field(&mut params.snapshot_tokens, &mut snapshot_tokens),
        field(&mut layer.state_slots, &mut state_slots),
        field(&mut layer.snapshot_slots, &mut snapshot_slots),
        field(&mut layer.stash_qkv.data, &mut stash),
        field(&mut layer.stash_gates.data, &mut gates),
        field(&mut kv.row_slots, &mut row_slots),
    ];
    let is_carried = carry(bytes, &inputs, &mut state);
    // keys and values that share their memory
    overlap(bytes, &[field(&mut kv.value_cache.data, &mut values)], &[keys.place(), state.place()]);
    shorten(bytes, &mut params.struct_size);
    if bytes.byte() >= 128 {
        layer.conv_bias = tensor(bytes, &mut bias, DDT_DTYPE_F32, &[CHANNELS]);
    }
    let (gdn_layers, kv_layers) = ([layer; 2], [kv; 2]);
    if bytes.byte() >= 224 {
        params.num_kv_layers = [0, 2, -1][bytes.below(3)];
        // without a stash nothing but query_start says how long row_slots is: it must be right then
        params.num_gdn_layers = [1, 0, 2, -1][if is_carried { 0 } else { bytes.below(4) }];
    }
    (params.gdn_layers, params.kv_layers) = (gdn_layers.as_ptr(), kv_layers.as_ptr());
    params.tree = &mut tree;
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_commit(context, &params, null_mut()) });
    // SAFETY: as above.
    check_size_query(|out| unsafe { ddt_commit_workspace_size(context, &params, out) });
    trees.check(false);
    query_start.check("query_start", false);
    count.check("num_accepted", false);
    nodes.check("accepted_nodes", false);
    state_slots.check("state_slots", false);
    weight.check("conv_weight", false);
    bias.check("conv_bias", false);
    stash.check("stash_qkv", false);
    gates.check("stash_gates", false);
    row_slots.check("row_slots", false);
    conv.check("conv_state", is_ok);
    state.check("ssm_state", is_ok);
    keys.check("keys", is_ok);
    values.check("values", is_ok);
}

fn tree_gather(bytes: &mut Bytes<'_>, context: *const ddt_context) {
    // one word of ancestor_bits for a node, or two
    const SIZES: [usize; 8] = [1, 2, 5, 8, 9, 32, 33, 40];
    let (from_nodes, to_nodes) = (SIZES[bytes.below(8)], SIZES[bytes.below(8)]);
    let (from_reqs, to_reqs, max_depth) = (bytes.below(4), bytes.below(4), bytes.below(5));
    let (num_trees, rows, axes) = (bytes.below(4), bytes.below(10), bytes.below(4));
    let mut source_trees = Trees::with_sizes(bytes, from_reqs, from_nodes, max_depth);
    let mut trees = Trees::with_sizes(bytes, to_reqs, to_nodes, max_depth);
    let (mut index, mut long_index) = (ints(bytes, num_trees), longs(bytes, num_trees));
    let mut query_start = query_start(bytes, num_trees, rows);
    let total = num_trees * rows;
    let (mut positions, mut mrope) = (longs(bytes, total), longs(bytes, axes * total));
    let (mut source, mut tree) = (source_trees.describe(), trees.describe());
    let mut params = params!(ddt_tree_gather_params { query_start: query_start.pointer() });
    params.tree_index = match bytes.byte() {
        0..128 => tensor(bytes, &mut index, DDT_DTYPE_I32, &[num_trees]),
        _ => tensor(bytes, &mut long_index, DDT_DTYPE_I64, &[num_trees]),
    };
    let optional = bytes.byte();
    if optional & 1 != 0 {
        params.positions = tensor(bytes, &mut positions, DDT_DTYPE_I64, &[total]);
    }
    if optional & 2 != 0 {
        params.mrope_positions = tensor(bytes, &mut mrope, DDT_DTYPE_I64, &[axes, total]);
    }
    let mut outputs = trees.outputs(&mut tree);
    outputs.push(field(&mut params.positions.data, &mut positions));
    outputs.push(field(&mut params.mrope_positions.data, &mut mrope));
    let mut places = source_trees.places();
    places.extend(trees.places());
    places.extend([index.place(), long_index.place(), query_start.place(), positions.place(), mrope.place()]);
    let overlaps = overlap(bytes, &outputs, &places);
    shorten(bytes, &mut params.struct_size);
    (params.source, params.tree) = (&mut source, &mut tree);
    if bytes.byte() >= 240 {
        params.tree = params.source;
    }
    let overlaps = overlaps || params.tree == params.source;
    // SAFETY: every buffer is as long as the parameters say.
    let is_ok = succeeded(unsafe { ddt_tree_gather(context, &params, null_mut()) });
    source_trees.check(is_ok && overlaps);
    index.check("tree_index", is_ok && overlaps);
    long_index.check("tree_index", is_ok && overlaps);
    query_start.check("query_start", is_ok && overlaps);
    trees.check(is_ok);
    positions.check("positions", is_ok);
    mrope.check("mrope_positions", is_ok);
    if !is_ok || overlaps {
        return;
    }
    for tree in 0..to_reqs {
        let count = trees.num_nodes.memory[GUARD + tree];
        assert!((0..=to_nodes as i32).contains(&count), "num_nodes {count}");
        if count > 0 {
            let is_i64 = params.tree_index.dtype == DDT_DTYPE_I64;
            let from =
                if is_i64 { long_index.memory[GUARD + tree] } else { index.memory[GUARD + tree].into() };
            let from = from as usize;
            for (i, (to_field, from_field)) in trees.per_node.iter().zip(&source_trees.per_node).enumerate() {
                let got = &to_field.memory[GUARD + tree * to_nodes..][..to_nodes];
                let want = &from_field.memory[GUARD + from * from_nodes..][..to_nodes];
                let is_absent = got.iter().eq(&to_field.before[GUARD + tree * to_nodes..][..to_nodes]);
                assert!(got == want || is_absent, "field {i} of tree {tree}");
            }
        }
    }
}

/// What needs no context, or makes one.
fn context(bytes: &mut Bytes<'_>) {
    let mut params = params!(ddt_context_params {
        abi_version: if bytes.byte() < 128 { DDT_ABI_VERSION } else { bytes.int() as u32 },
        device: bytes.int() as u32,
        device_index: bytes.int() as i32,
        flags: bytes.int() as u32,
    });
    shorten(bytes, &mut params.struct_size);
    let mut context = null_mut();
    // SAFETY: both pointers are valid.
    let is_ok = succeeded(unsafe { ddt_context_create(&params, &mut context) });
    assert_eq!(is_ok, !context.is_null());
    // SAFETY: made above, or NULL.
    unsafe { ddt_context_free(context) };
    // SAFETY: NULL is allowed as far as the library has to notice it.
    assert!(!succeeded(unsafe { ddt_context_create(null(), &mut context) }));
    let status = bytes.int() as i32;
    // SAFETY: the string is static.
    let name = unsafe { std::ffi::CStr::from_ptr(ddt_status_name(status)) };
    assert!(name.to_bytes().starts_with(b"DDT_"), "{name:?} for {status}");
    let mut text = output(bytes.below(200), 0x5au8);
    let (len, mut needed) = (text.place().bytes, 0);
    // SAFETY: the buffer is as long as said.
    assert_eq!(unsafe { ddt_last_error(text.pointer().cast(), len, &mut needed) }, DDT_OK);
    text.check("the message", true);
    if len > 0 {
        let end = text.memory[GUARD..GUARD + len].iter().position(|&byte| byte == 0);
        assert!(end.is_some_and(|end| end < needed), "no NUL in {len} bytes");
    }
}

type Operation = fn(&mut Bytes<'_>, *const ddt_context);

/// The operations, and the names of their fuzz targets and of their folders in the corpus.
pub const OPERATIONS: [(&str, Operation); 8] = [
    ("tree_mask", tree_mask),
    ("tree_build", tree_build),
    ("tree_accept", tree_accept),
    ("tree_attention", tree_attention),
    ("gdn_verify", |bytes, cpu| layers(bytes, cpu, false)),
    ("commit", |bytes, cpu| layers(bytes, cpu, true)),
    ("tree_gather", tree_gather),
    ("context", |bytes, _| context(bytes)),
];

/// One call on a CPU context. Panics where the library did what it must not.
pub fn run(operation: &str, data: &[u8]) {
    let (_, call) = OPERATIONS.iter().find(|(name, _)| *name == operation).expect("an operation");
    let params = params!(ddt_context_params { abi_version: DDT_ABI_VERSION });
    let mut cpu = null_mut();
    // SAFETY: both pointers are valid.
    assert_eq!(unsafe { ddt_context_create(&params, &mut cpu) }, DDT_OK);
    call(&mut Bytes(data), cpu);
    // SAFETY: made above, and nobody else has it.
    unsafe { ddt_context_free(cpu) };
}
