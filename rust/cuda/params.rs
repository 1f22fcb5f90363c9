// SPDX-License-Identifier: Apache-2.0
// Generated from cuda/params.h by bindgen; do not edit. `DDTREE_WRITE_PARAMS=1 cargo test --test kernel_params` rewrites it.
#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, dead_code, clippy::all)]

pub const DDT_CUDA_F32: ddt_cuda_dtype = 1;
pub const DDT_CUDA_F16: ddt_cuda_dtype = 2;
pub const DDT_CUDA_BF16: ddt_cuda_dtype = 3;
pub const DDT_CUDA_I32: ddt_cuda_dtype = 4;
pub const DDT_CUDA_I64: ddt_cuda_dtype = 5;
pub const DDT_CUDA_U8: ddt_cuda_dtype = 6;
pub type ddt_cuda_dtype = ::std::os::raw::c_uint;
pub const DDT_CUDA_MAX_NODES: _bindgen_ty_1 = 256;
pub const DDT_CUDA_MAX_DEPTH: _bindgen_ty_1 = 32;
pub type _bindgen_ty_1 = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_view {
    pub data: *mut ::std::os::raw::c_void,
    pub strides: [i64; 4usize],
    pub dtype: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ddt_cuda_view"][::std::mem::size_of::<ddt_cuda_view>() - 48usize];
    ["Alignment of ddt_cuda_view"][::std::mem::align_of::<ddt_cuda_view>() - 8usize];
    [
        "Offset of field: ddt_cuda_view::data",
    ][::std::mem::offset_of!(ddt_cuda_view, data) - 0usize];
    [
        "Offset of field: ddt_cuda_view::strides",
    ][::std::mem::offset_of!(ddt_cuda_view, strides) - 8usize];
    [
        "Offset of field: ddt_cuda_view::dtype",
    ][::std::mem::offset_of!(ddt_cuda_view, dtype) - 40usize];
    [
        "Offset of field: ddt_cuda_view::reserved",
    ][::std::mem::offset_of!(ddt_cuda_view, reserved) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree {
    pub num_reqs: i32,
    pub max_nodes: i32,
    pub max_depth: i32,
    pub words: i32,
    pub num_nodes: *mut i32,
    pub tokens: *mut i32,
    pub parents: *mut i32,
    pub depths: *mut i32,
    pub first_child: *mut i32,
    pub next_sibling: *mut i32,
    pub subtree_end: *mut i32,
    pub ancestor_bits: *mut u32,
    pub ancestors: *mut i32,
    pub positions: *mut i64,
    pub pop_ranks: *mut i32,
    pub flags: *mut u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ddt_cuda_tree"][::std::mem::size_of::<ddt_cuda_tree>() - 112usize];
    ["Alignment of ddt_cuda_tree"][::std::mem::align_of::<ddt_cuda_tree>() - 8usize];
    [
        "Offset of field: ddt_cuda_tree::num_reqs",
    ][::std::mem::offset_of!(ddt_cuda_tree, num_reqs) - 0usize];
    [
        "Offset of field: ddt_cuda_tree::max_nodes",
    ][::std::mem::offset_of!(ddt_cuda_tree, max_nodes) - 4usize];
    [
        "Offset of field: ddt_cuda_tree::max_depth",
    ][::std::mem::offset_of!(ddt_cuda_tree, max_depth) - 8usize];
    [
        "Offset of field: ddt_cuda_tree::words",
    ][::std::mem::offset_of!(ddt_cuda_tree, words) - 12usize];
    [
        "Offset of field: ddt_cuda_tree::num_nodes",
    ][::std::mem::offset_of!(ddt_cuda_tree, num_nodes) - 16usize];
    [
        "Offset of field: ddt_cuda_tree::tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree, tokens) - 24usize];
    [
        "Offset of field: ddt_cuda_tree::parents",
    ][::std::mem::offset_of!(ddt_cuda_tree, parents) - 32usize];
    [
        "Offset of field: ddt_cuda_tree::depths",
    ][::std::mem::offset_of!(ddt_cuda_tree, depths) - 40usize];
    [
        "Offset of field: ddt_cuda_tree::first_child",
    ][::std::mem::offset_of!(ddt_cuda_tree, first_child) - 48usize];
    [
        "Offset of field: ddt_cuda_tree::next_sibling",
    ][::std::mem::offset_of!(ddt_cuda_tree, next_sibling) - 56usize];
    [
        "Offset of field: ddt_cuda_tree::subtree_end",
    ][::std::mem::offset_of!(ddt_cuda_tree, subtree_end) - 64usize];
    [
        "Offset of field: ddt_cuda_tree::ancestor_bits",
    ][::std::mem::offset_of!(ddt_cuda_tree, ancestor_bits) - 72usize];
    [
        "Offset of field: ddt_cuda_tree::ancestors",
    ][::std::mem::offset_of!(ddt_cuda_tree, ancestors) - 80usize];
    [
        "Offset of field: ddt_cuda_tree::positions",
    ][::std::mem::offset_of!(ddt_cuda_tree, positions) - 88usize];
    [
        "Offset of field: ddt_cuda_tree::pop_ranks",
    ][::std::mem::offset_of!(ddt_cuda_tree, pop_ranks) - 96usize];
    [
        "Offset of field: ddt_cuda_tree::flags",
    ][::std::mem::offset_of!(ddt_cuda_tree, flags) - 104usize];
};
pub const DDT_CUDA_COMMIT_MAX_GDN_LAYERS: _bindgen_ty_2 = 64;
pub const DDT_CUDA_COMMIT_MAX_KV_LAYERS: _bindgen_ty_2 = 64;
pub type _bindgen_ty_2 = ::std::os::raw::c_uint;
pub const DDT_CUDA_COMMIT_REPLAY_THREADS: _bindgen_ty_3 = 256;
pub const DDT_CUDA_COMMIT_REPLAY_BLOCKS_PER_SM: _bindgen_ty_3 = 2;
pub const DDT_CUDA_COMMIT_SHIFT_THREADS: _bindgen_ty_3 = 256;
pub const DDT_CUDA_COMMIT_MAX_BLOCK_HEADS: _bindgen_ty_3 = 3;
pub const DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES: _bindgen_ty_3 = 67584;
pub const DDT_CUDA_COMMIT_WINDOW_CHANNELS: _bindgen_ty_3 = 1024;
pub type _bindgen_ty_3 = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_commit_gdn {
    pub conv_weight: ddt_cuda_view,
    pub conv_bias: ddt_cuda_view,
    pub conv_state: ddt_cuda_view,
    pub ssm_state: ddt_cuda_view,
    pub stash_qkv: ddt_cuda_view,
    pub stash_gates: ddt_cuda_view,
    pub state_slots: *const i32,
    pub snapshot_slots: *const i32,
    pub num_slots: i64,
    pub stash_rows: i32,
    pub num_k_heads: i32,
    pub num_v_heads: i32,
    pub block_heads: i32,
    pub has_aligned_rows: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_commit_gdn",
    ][::std::mem::size_of::<ddt_cuda_commit_gdn>() - 336usize];
    [
        "Alignment of ddt_cuda_commit_gdn",
    ][::std::mem::align_of::<ddt_cuda_commit_gdn>() - 8usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::conv_weight",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, conv_weight) - 0usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::conv_bias",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, conv_bias) - 48usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::conv_state",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, conv_state) - 96usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::ssm_state",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, ssm_state) - 144usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::stash_qkv",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, stash_qkv) - 192usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::stash_gates",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, stash_gates) - 240usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::state_slots",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, state_slots) - 288usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::snapshot_slots",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, snapshot_slots) - 296usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::num_slots",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, num_slots) - 304usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::stash_rows",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, stash_rows) - 312usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::num_k_heads",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, num_k_heads) - 316usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::num_v_heads",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, num_v_heads) - 320usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::block_heads",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, block_heads) - 324usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::has_aligned_rows",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, has_aligned_rows) - 328usize];
    [
        "Offset of field: ddt_cuda_commit_gdn::reserved",
    ][::std::mem::offset_of!(ddt_cuda_commit_gdn, reserved) - 332usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_commit_cache {
    pub data: *mut ::std::os::raw::c_void,
    pub block_stride: i64,
    pub head_stride: i64,
    pub token_stride: i64,
    pub unit_stride: i64,
    pub unit_bytes: u32,
    pub num_units: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_commit_cache",
    ][::std::mem::size_of::<ddt_cuda_commit_cache>() - 48usize];
    [
        "Alignment of ddt_cuda_commit_cache",
    ][::std::mem::align_of::<ddt_cuda_commit_cache>() - 8usize];
    [
        "Offset of field: ddt_cuda_commit_cache::data",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, data) - 0usize];
    [
        "Offset of field: ddt_cuda_commit_cache::block_stride",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, block_stride) - 8usize];
    [
        "Offset of field: ddt_cuda_commit_cache::head_stride",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, head_stride) - 16usize];
    [
        "Offset of field: ddt_cuda_commit_cache::token_stride",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, token_stride) - 24usize];
    [
        "Offset of field: ddt_cuda_commit_cache::unit_stride",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, unit_stride) - 32usize];
    [
        "Offset of field: ddt_cuda_commit_cache::unit_bytes",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, unit_bytes) - 40usize];
    [
        "Offset of field: ddt_cuda_commit_cache::num_units",
    ][::std::mem::offset_of!(ddt_cuda_commit_cache, num_units) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_commit_kv {
    pub key_cache: ddt_cuda_commit_cache,
    pub value_cache: ddt_cuda_commit_cache,
    pub row_slots: *const i64,
    pub num_blocks: i64,
    pub block_size: i64,
    pub num_key_heads: i32,
    pub num_value_heads: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_commit_kv",
    ][::std::mem::size_of::<ddt_cuda_commit_kv>() - 128usize];
    [
        "Alignment of ddt_cuda_commit_kv",
    ][::std::mem::align_of::<ddt_cuda_commit_kv>() - 8usize];
    [
        "Offset of field: ddt_cuda_commit_kv::key_cache",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, key_cache) - 0usize];
    [
        "Offset of field: ddt_cuda_commit_kv::value_cache",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, value_cache) - 48usize];
    [
        "Offset of field: ddt_cuda_commit_kv::row_slots",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, row_slots) - 96usize];
    [
        "Offset of field: ddt_cuda_commit_kv::num_blocks",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, num_blocks) - 104usize];
    [
        "Offset of field: ddt_cuda_commit_kv::block_size",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, block_size) - 112usize];
    [
        "Offset of field: ddt_cuda_commit_kv::num_key_heads",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, num_key_heads) - 120usize];
    [
        "Offset of field: ddt_cuda_commit_kv::num_value_heads",
    ][::std::mem::offset_of!(ddt_cuda_commit_kv, num_value_heads) - 124usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_commit {
    pub tree: ddt_cuda_tree,
    pub query_start: *const i32,
    pub num_accepted: *const i32,
    pub accepted_nodes: *const i32,
    pub snapshot_tokens: *const i32,
    pub norm_eps: f32,
    pub num_gdn_layers: i32,
    pub num_kv_layers: i32,
    pub reserved: u32,
    pub gdn_layers: [ddt_cuda_commit_gdn; 64usize],
    pub kv_layers: [ddt_cuda_commit_kv; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ddt_cuda_commit"][::std::mem::size_of::<ddt_cuda_commit>() - 29856usize];
    ["Alignment of ddt_cuda_commit"][::std::mem::align_of::<ddt_cuda_commit>() - 8usize];
    [
        "Offset of field: ddt_cuda_commit::tree",
    ][::std::mem::offset_of!(ddt_cuda_commit, tree) - 0usize];
    [
        "Offset of field: ddt_cuda_commit::query_start",
    ][::std::mem::offset_of!(ddt_cuda_commit, query_start) - 112usize];
    [
        "Offset of field: ddt_cuda_commit::num_accepted",
    ][::std::mem::offset_of!(ddt_cuda_commit, num_accepted) - 120usize];
    [
        "Offset of field: ddt_cuda_commit::accepted_nodes",
    ][::std::mem::offset_of!(ddt_cuda_commit, accepted_nodes) - 128usize];
    [
        "Offset of field: ddt_cuda_commit::snapshot_tokens",
    ][::std::mem::offset_of!(ddt_cuda_commit, snapshot_tokens) - 136usize];
    [
        "Offset of field: ddt_cuda_commit::norm_eps",
    ][::std::mem::offset_of!(ddt_cuda_commit, norm_eps) - 144usize];
    [
        "Offset of field: ddt_cuda_commit::num_gdn_layers",
    ][::std::mem::offset_of!(ddt_cuda_commit, num_gdn_layers) - 148usize];
    [
        "Offset of field: ddt_cuda_commit::num_kv_layers",
    ][::std::mem::offset_of!(ddt_cuda_commit, num_kv_layers) - 152usize];
    [
        "Offset of field: ddt_cuda_commit::reserved",
    ][::std::mem::offset_of!(ddt_cuda_commit, reserved) - 156usize];
    [
        "Offset of field: ddt_cuda_commit::gdn_layers",
    ][::std::mem::offset_of!(ddt_cuda_commit, gdn_layers) - 160usize];
    [
        "Offset of field: ddt_cuda_commit::kv_layers",
    ][::std::mem::offset_of!(ddt_cuda_commit, kv_layers) - 21664usize];
};
pub const DDT_CUDA_GDN_VERIFY_STATE: ddt_cuda_gdn_verify_flags = 1;
pub const DDT_CUDA_GDN_VERIFY_ROWS: ddt_cuda_gdn_verify_flags = 2;
pub const DDT_CUDA_GDN_VERIFY_STASH: ddt_cuda_gdn_verify_flags = 4;
pub const DDT_CUDA_GDN_VERIFY_WEIGHT: ddt_cuda_gdn_verify_flags = 8;
pub const DDT_CUDA_GDN_VERIFY_WINDOW: ddt_cuda_gdn_verify_flags = 16;
pub const DDT_CUDA_GDN_VERIFY_OUT: ddt_cuda_gdn_verify_flags = 32;
pub type ddt_cuda_gdn_verify_flags = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_gdn_verify {
    pub conv_weight: ddt_cuda_view,
    pub conv_bias: ddt_cuda_view,
    pub conv_state: ddt_cuda_view,
    pub ssm_state: ddt_cuda_view,
    pub stash_qkv: ddt_cuda_view,
    pub stash_gates: ddt_cuda_view,
    pub mixed_qkv: ddt_cuda_view,
    pub a: ddt_cuda_view,
    pub b: ddt_cuda_view,
    pub a_log: ddt_cuda_view,
    pub dt_bias: ddt_cuda_view,
    pub out: ddt_cuda_view,
    pub tree: ddt_cuda_tree,
    pub state_slots: *const i32,
    pub query_start: *const i32,
    pub heads: *mut ::std::os::raw::c_void,
    pub values: *mut ::std::os::raw::c_void,
    pub norms: *mut f32,
    pub gates: *mut f32,
    pub num_slots: i64,
    pub num_rows: i32,
    pub num_k_heads: i32,
    pub num_v_heads: i32,
    pub block_tiles: i32,
    pub row_capacity: i32,
    pub flags: u32,
    pub scale: f32,
    pub norm_eps: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_gdn_verify",
    ][::std::mem::size_of::<ddt_cuda_gdn_verify>() - 776usize];
    [
        "Alignment of ddt_cuda_gdn_verify",
    ][::std::mem::align_of::<ddt_cuda_gdn_verify>() - 8usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::conv_weight",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, conv_weight) - 0usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::conv_bias",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, conv_bias) - 48usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::conv_state",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, conv_state) - 96usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::ssm_state",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, ssm_state) - 144usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::stash_qkv",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, stash_qkv) - 192usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::stash_gates",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, stash_gates) - 240usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::mixed_qkv",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, mixed_qkv) - 288usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::a",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, a) - 336usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::b",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, b) - 384usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::a_log",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, a_log) - 432usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::dt_bias",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, dt_bias) - 480usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::out",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, out) - 528usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::tree",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, tree) - 576usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::state_slots",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, state_slots) - 688usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::query_start",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, query_start) - 696usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::heads",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, heads) - 704usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::values",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, values) - 712usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::norms",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, norms) - 720usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::gates",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, gates) - 728usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::num_slots",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, num_slots) - 736usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::num_rows",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, num_rows) - 744usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::num_k_heads",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, num_k_heads) - 748usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::num_v_heads",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, num_v_heads) - 752usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::block_tiles",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, block_tiles) - 756usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::row_capacity",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, row_capacity) - 760usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::flags",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, flags) - 764usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::scale",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, scale) - 768usize];
    [
        "Offset of field: ddt_cuda_gdn_verify::norm_eps",
    ][::std::mem::offset_of!(ddt_cuda_gdn_verify, norm_eps) - 772usize];
};
pub const DDT_CUDA_GDN_VERIFY_PREPARE_THREADS: _bindgen_ty_4 = 128;
pub const DDT_CUDA_GDN_VERIFY_PREPARE_NODES: _bindgen_ty_4 = 8;
pub const DDT_CUDA_GDN_VERIFY_GATE_HEADS: _bindgen_ty_4 = 16;
pub const DDT_CUDA_GDN_VERIFY_TILES: _bindgen_ty_4 = 3;
pub const DDT_CUDA_GDN_VERIFY_SMALL_NODES: _bindgen_ty_4 = 16;
pub const DDT_CUDA_GDN_VERIFY_SMALL_WARPS: _bindgen_ty_4 = 8;
pub const DDT_CUDA_GDN_VERIFY_MEDIUM_NODES: _bindgen_ty_4 = 32;
pub const DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16: _bindgen_ty_4 = 1165;
pub const DDT_CUDA_GDN_VERIFY_ROW_BYTES: _bindgen_ty_4 = 1709;
pub const DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16: _bindgen_ty_4 = 64;
pub const DDT_CUDA_GDN_VERIFY_MAX_ROWS: _bindgen_ty_4 = 40;
pub const DDT_CUDA_GDN_VERIFY_TILE_BYTES: _bindgen_ty_4 = 8192;
pub const DDT_CUDA_GDN_VERIFY_EXTRA_BYTES: _bindgen_ty_4 = 32;
pub const DDT_CUDA_GDN_VERIFY_SHARED_BYTES: _bindgen_ty_4 = 99168;
pub type _bindgen_ty_4 = ::std::os::raw::c_uint;
pub const DDT_CUDA_TREE_ACCEPT_CHOOSE_THREADS: _bindgen_ty_5 = 256;
pub const DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM: _bindgen_ty_5 = 4;
pub const DDT_CUDA_TREE_ACCEPT_WALK_THREADS: _bindgen_ty_5 = 256;
pub const DDT_CUDA_TREE_ACCEPT_LOAD_BYTES: _bindgen_ty_5 = 16;
pub type _bindgen_ty_5 = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree_accept {
    pub tree: ddt_cuda_tree,
    pub query_start: *const i32,
    pub logits: ddt_cuda_view,
    pub node_tokens: *const i64,
    pub temperatures: *const f32,
    pub seeds: *const i64,
    pub num_accepted: *mut i32,
    pub accepted_nodes: *mut i32,
    pub output_tokens: *mut i64,
    pub accepted_rows: *mut i32,
    pub next_positions: *mut i64,
    pub num_rejected: *mut i32,
    pub partials: *mut u64,
    pub num_rows: i32,
    pub vocab: i32,
    pub num_splits: i32,
    pub split_tokens: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tree_accept",
    ][::std::mem::size_of::<ddt_cuda_tree_accept>() - 264usize];
    [
        "Alignment of ddt_cuda_tree_accept",
    ][::std::mem::align_of::<ddt_cuda_tree_accept>() - 8usize];
    [
        "Offset of field: ddt_cuda_tree_accept::tree",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, tree) - 0usize];
    [
        "Offset of field: ddt_cuda_tree_accept::query_start",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, query_start) - 112usize];
    [
        "Offset of field: ddt_cuda_tree_accept::logits",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, logits) - 120usize];
    [
        "Offset of field: ddt_cuda_tree_accept::node_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, node_tokens) - 168usize];
    [
        "Offset of field: ddt_cuda_tree_accept::temperatures",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, temperatures) - 176usize];
    [
        "Offset of field: ddt_cuda_tree_accept::seeds",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, seeds) - 184usize];
    [
        "Offset of field: ddt_cuda_tree_accept::num_accepted",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, num_accepted) - 192usize];
    [
        "Offset of field: ddt_cuda_tree_accept::accepted_nodes",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, accepted_nodes) - 200usize];
    [
        "Offset of field: ddt_cuda_tree_accept::output_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, output_tokens) - 208usize];
    [
        "Offset of field: ddt_cuda_tree_accept::accepted_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, accepted_rows) - 216usize];
    [
        "Offset of field: ddt_cuda_tree_accept::next_positions",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, next_positions) - 224usize];
    [
        "Offset of field: ddt_cuda_tree_accept::num_rejected",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, num_rejected) - 232usize];
    [
        "Offset of field: ddt_cuda_tree_accept::partials",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, partials) - 240usize];
    [
        "Offset of field: ddt_cuda_tree_accept::num_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, num_rows) - 248usize];
    [
        "Offset of field: ddt_cuda_tree_accept::vocab",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, vocab) - 252usize];
    [
        "Offset of field: ddt_cuda_tree_accept::num_splits",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, num_splits) - 256usize];
    [
        "Offset of field: ddt_cuda_tree_accept::split_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_accept, split_tokens) - 260usize];
};
pub const DDT_CUDA_TREE_ATTENTION_MAX_TILE_ROWS: _bindgen_ty_6 = 128;
pub const DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_256: _bindgen_ty_6 = 32;
pub const DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_128: _bindgen_ty_6 = 64;
pub const DDT_CUDA_TREE_ATTENTION_GRANULE: _bindgen_ty_6 = 16;
pub const DDT_CUDA_TREE_ATTENTION_MIN_WARPS: _bindgen_ty_6 = 4;
pub const DDT_CUDA_TREE_ATTENTION_MAX_STAGES: _bindgen_ty_6 = 4;
pub const DDT_CUDA_TREE_ATTENTION_SHARED_BYTES: _bindgen_ty_6 = 98304;
pub const DDT_CUDA_TREE_ATTENTION_COMBINE_SHARED_BYTES: _bindgen_ty_6 = 0;
pub const DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_ROWS: _bindgen_ty_6 = 32;
pub const DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_TOKENS: _bindgen_ty_6 = 32;
pub const DDT_CUDA_TREE_ATTENTION_GENERIC_SHARED_BYTES: _bindgen_ty_6 = 98432;
pub const DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS: _bindgen_ty_6 = 256;
pub type _bindgen_ty_6 = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree_attention {
    pub query: ddt_cuda_view,
    pub key_cache: ddt_cuda_view,
    pub value_cache: ddt_cuda_view,
    pub block_table: ddt_cuda_view,
    pub out: ddt_cuda_view,
    pub query_start: *const i32,
    pub seq_lens: *const i32,
    pub prefix_rows: *const i32,
    pub tree: ddt_cuda_tree,
    pub partial_stats: *mut f32,
    pub partial_out: *mut f32,
    pub num_rows: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub group: i32,
    pub head_dim: i32,
    pub num_blocks: i32,
    pub block_size: i32,
    pub max_blocks: i32,
    pub tile_rows: i32,
    pub tile_tokens: i32,
    pub num_ctas: i32,
    pub min_tiles: i32,
    pub stages: i32,
    pub score_scale: f32,
    pub softcap: f32,
    pub combine_parts: i32,
    pub out_has_pairs: i32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tree_attention",
    ][::std::mem::size_of::<ddt_cuda_tree_attention>() - 464usize];
    [
        "Alignment of ddt_cuda_tree_attention",
    ][::std::mem::align_of::<ddt_cuda_tree_attention>() - 8usize];
    [
        "Offset of field: ddt_cuda_tree_attention::query",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, query) - 0usize];
    [
        "Offset of field: ddt_cuda_tree_attention::key_cache",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, key_cache) - 48usize];
    [
        "Offset of field: ddt_cuda_tree_attention::value_cache",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, value_cache) - 96usize];
    [
        "Offset of field: ddt_cuda_tree_attention::block_table",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, block_table) - 144usize];
    [
        "Offset of field: ddt_cuda_tree_attention::out",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, out) - 192usize];
    [
        "Offset of field: ddt_cuda_tree_attention::query_start",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, query_start) - 240usize];
    [
        "Offset of field: ddt_cuda_tree_attention::seq_lens",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, seq_lens) - 248usize];
    [
        "Offset of field: ddt_cuda_tree_attention::prefix_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, prefix_rows) - 256usize];
    [
        "Offset of field: ddt_cuda_tree_attention::tree",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, tree) - 264usize];
    [
        "Offset of field: ddt_cuda_tree_attention::partial_stats",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, partial_stats) - 376usize];
    [
        "Offset of field: ddt_cuda_tree_attention::partial_out",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, partial_out) - 384usize];
    [
        "Offset of field: ddt_cuda_tree_attention::num_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, num_rows) - 392usize];
    [
        "Offset of field: ddt_cuda_tree_attention::num_heads",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, num_heads) - 396usize];
    [
        "Offset of field: ddt_cuda_tree_attention::num_kv_heads",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, num_kv_heads) - 400usize];
    [
        "Offset of field: ddt_cuda_tree_attention::group",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, group) - 404usize];
    [
        "Offset of field: ddt_cuda_tree_attention::head_dim",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, head_dim) - 408usize];
    [
        "Offset of field: ddt_cuda_tree_attention::num_blocks",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, num_blocks) - 412usize];
    [
        "Offset of field: ddt_cuda_tree_attention::block_size",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, block_size) - 416usize];
    [
        "Offset of field: ddt_cuda_tree_attention::max_blocks",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, max_blocks) - 420usize];
    [
        "Offset of field: ddt_cuda_tree_attention::tile_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, tile_rows) - 424usize];
    [
        "Offset of field: ddt_cuda_tree_attention::tile_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, tile_tokens) - 428usize];
    [
        "Offset of field: ddt_cuda_tree_attention::num_ctas",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, num_ctas) - 432usize];
    [
        "Offset of field: ddt_cuda_tree_attention::min_tiles",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, min_tiles) - 436usize];
    [
        "Offset of field: ddt_cuda_tree_attention::stages",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, stages) - 440usize];
    [
        "Offset of field: ddt_cuda_tree_attention::score_scale",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, score_scale) - 444usize];
    [
        "Offset of field: ddt_cuda_tree_attention::softcap",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, softcap) - 448usize];
    [
        "Offset of field: ddt_cuda_tree_attention::combine_parts",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, combine_parts) - 452usize];
    [
        "Offset of field: ddt_cuda_tree_attention::out_has_pairs",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, out_has_pairs) - 456usize];
    [
        "Offset of field: ddt_cuda_tree_attention::reserved",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention, reserved) - 460usize];
};
pub const DDT_CUDA_TREE_ATTENTION_SM90_TILE_TOKENS: _bindgen_ty_7 = 64;
pub const DDT_CUDA_TREE_ATTENTION_SM90_PANEL_COLUMNS: _bindgen_ty_7 = 64;
pub const DDT_CUDA_TREE_ATTENTION_SM90_KEY_BOX_TOKENS: _bindgen_ty_7 = 8;
pub const DDT_CUDA_TREE_ATTENTION_SM90_VALUE_BOX_TOKENS: _bindgen_ty_7 = 16;
pub const DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES: _bindgen_ty_7 = 232448;
pub type _bindgen_ty_7 = ::std::os::raw::c_uint;
#[repr(C)]
#[repr(align(64))]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tensor_map {
    pub words: [u64; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tensor_map",
    ][::std::mem::size_of::<ddt_cuda_tensor_map>() - 128usize];
    [
        "Alignment of ddt_cuda_tensor_map",
    ][::std::mem::align_of::<ddt_cuda_tensor_map>() - 64usize];
    [
        "Offset of field: ddt_cuda_tensor_map::words",
    ][::std::mem::offset_of!(ddt_cuda_tensor_map, words) - 0usize];
};
#[repr(C)]
#[repr(align(64))]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree_attention_sm90 {
    pub key_map: ddt_cuda_tensor_map,
    pub value_map: ddt_cuda_tensor_map,
    pub attention: ddt_cuda_tree_attention,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tree_attention_sm90",
    ][::std::mem::size_of::<ddt_cuda_tree_attention_sm90>() - 768usize];
    [
        "Alignment of ddt_cuda_tree_attention_sm90",
    ][::std::mem::align_of::<ddt_cuda_tree_attention_sm90>() - 64usize];
    [
        "Offset of field: ddt_cuda_tree_attention_sm90::key_map",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention_sm90, key_map) - 0usize];
    [
        "Offset of field: ddt_cuda_tree_attention_sm90::value_map",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention_sm90, value_map) - 128usize];
    [
        "Offset of field: ddt_cuda_tree_attention_sm90::attention",
    ][::std::mem::offset_of!(ddt_cuda_tree_attention_sm90, attention) - 256usize];
};
pub const DDT_CUDA_TREE_BUILD_CHUNK: _bindgen_ty_8 = 4096;
pub const DDT_CUDA_TREE_BUILD_BLOCK: _bindgen_ty_8 = 64;
pub const DDT_CUDA_TREE_BUILD_SELECT_THREADS: _bindgen_ty_8 = 512;
pub const DDT_CUDA_TREE_BUILD_SELECT_SHARED_BYTES: _bindgen_ty_8 = 65536;
pub const DDT_CUDA_TREE_BUILD_SEARCH_SHARED_BYTES: _bindgen_ty_8 = 65536;
pub const DDT_CUDA_TREE_BUILD_LISTS_SHARED_BYTES: _bindgen_ty_8 = 49152;
pub type _bindgen_ty_8 = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_child_list {
    pub length: i32,
    pub is_cut: i32,
    pub has_nonfinite: i32,
    pub reserved: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_child_list",
    ][::std::mem::size_of::<ddt_cuda_child_list>() - 16usize];
    [
        "Alignment of ddt_cuda_child_list",
    ][::std::mem::align_of::<ddt_cuda_child_list>() - 4usize];
    [
        "Offset of field: ddt_cuda_child_list::length",
    ][::std::mem::offset_of!(ddt_cuda_child_list, length) - 0usize];
    [
        "Offset of field: ddt_cuda_child_list::is_cut",
    ][::std::mem::offset_of!(ddt_cuda_child_list, is_cut) - 4usize];
    [
        "Offset of field: ddt_cuda_child_list::has_nonfinite",
    ][::std::mem::offset_of!(ddt_cuda_child_list, has_nonfinite) - 8usize];
    [
        "Offset of field: ddt_cuda_child_list::reserved",
    ][::std::mem::offset_of!(ddt_cuda_child_list, reserved) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree_build {
    pub logits: ddt_cuda_view,
    pub candidate_tokens: ddt_cuda_view,
    pub candidate_scores: ddt_cuda_view,
    pub transition_scores: ddt_cuda_view,
    pub vocab: i32,
    pub num_chunks: i32,
    pub num_blocks: i32,
    pub num_candidates: i32,
    pub num_rows: i32,
    pub max_candidates: i32,
    pub list_capacity: i32,
    pub lists_per_row: i32,
    pub max_stop_tokens: i32,
    pub vector: i32,
    pub lists_in_shared: i32,
    pub reserved: i32,
    pub tree_index: ddt_cuda_view,
    pub depth_scales: *const f32,
    pub root_tokens: *const i32,
    pub root_positions: *const i64,
    pub node_budgets: *const i32,
    pub depth_caps: *const i32,
    pub candidate_caps: *const i32,
    pub spine_depths: *const i32,
    pub stop_tokens: *const i32,
    pub stop_min_depths: *const i32,
    pub seeds: *const i64,
    pub temperatures: *const f32,
    pub arrived: *mut u32,
    pub chunk_max: *mut f32,
    pub chunk_sum: *mut f32,
    pub chunk_usable: *mut u32,
    pub block_max: *mut f32,
    pub lists: *mut ddt_cuda_child_list,
    pub keys: *mut u64,
    pub columns: *mut u16,
    pub tree: ddt_cuda_tree,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tree_build",
    ][::std::mem::size_of::<ddt_cuda_tree_build>() - 552usize];
    [
        "Alignment of ddt_cuda_tree_build",
    ][::std::mem::align_of::<ddt_cuda_tree_build>() - 8usize];
    [
        "Offset of field: ddt_cuda_tree_build::logits",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, logits) - 0usize];
    [
        "Offset of field: ddt_cuda_tree_build::candidate_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, candidate_tokens) - 48usize];
    [
        "Offset of field: ddt_cuda_tree_build::candidate_scores",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, candidate_scores) - 96usize];
    [
        "Offset of field: ddt_cuda_tree_build::transition_scores",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, transition_scores) - 144usize];
    [
        "Offset of field: ddt_cuda_tree_build::vocab",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, vocab) - 192usize];
    [
        "Offset of field: ddt_cuda_tree_build::num_chunks",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, num_chunks) - 196usize];
    [
        "Offset of field: ddt_cuda_tree_build::num_blocks",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, num_blocks) - 200usize];
    [
        "Offset of field: ddt_cuda_tree_build::num_candidates",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, num_candidates) - 204usize];
    [
        "Offset of field: ddt_cuda_tree_build::num_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, num_rows) - 208usize];
    [
        "Offset of field: ddt_cuda_tree_build::max_candidates",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, max_candidates) - 212usize];
    [
        "Offset of field: ddt_cuda_tree_build::list_capacity",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, list_capacity) - 216usize];
    [
        "Offset of field: ddt_cuda_tree_build::lists_per_row",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, lists_per_row) - 220usize];
    [
        "Offset of field: ddt_cuda_tree_build::max_stop_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, max_stop_tokens) - 224usize];
    [
        "Offset of field: ddt_cuda_tree_build::vector",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, vector) - 228usize];
    [
        "Offset of field: ddt_cuda_tree_build::lists_in_shared",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, lists_in_shared) - 232usize];
    [
        "Offset of field: ddt_cuda_tree_build::reserved",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, reserved) - 236usize];
    [
        "Offset of field: ddt_cuda_tree_build::tree_index",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, tree_index) - 240usize];
    [
        "Offset of field: ddt_cuda_tree_build::depth_scales",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, depth_scales) - 288usize];
    [
        "Offset of field: ddt_cuda_tree_build::root_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, root_tokens) - 296usize];
    [
        "Offset of field: ddt_cuda_tree_build::root_positions",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, root_positions) - 304usize];
    [
        "Offset of field: ddt_cuda_tree_build::node_budgets",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, node_budgets) - 312usize];
    [
        "Offset of field: ddt_cuda_tree_build::depth_caps",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, depth_caps) - 320usize];
    [
        "Offset of field: ddt_cuda_tree_build::candidate_caps",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, candidate_caps) - 328usize];
    [
        "Offset of field: ddt_cuda_tree_build::spine_depths",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, spine_depths) - 336usize];
    [
        "Offset of field: ddt_cuda_tree_build::stop_tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, stop_tokens) - 344usize];
    [
        "Offset of field: ddt_cuda_tree_build::stop_min_depths",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, stop_min_depths) - 352usize];
    [
        "Offset of field: ddt_cuda_tree_build::seeds",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, seeds) - 360usize];
    [
        "Offset of field: ddt_cuda_tree_build::temperatures",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, temperatures) - 368usize];
    [
        "Offset of field: ddt_cuda_tree_build::arrived",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, arrived) - 376usize];
    [
        "Offset of field: ddt_cuda_tree_build::chunk_max",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, chunk_max) - 384usize];
    [
        "Offset of field: ddt_cuda_tree_build::chunk_sum",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, chunk_sum) - 392usize];
    [
        "Offset of field: ddt_cuda_tree_build::chunk_usable",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, chunk_usable) - 400usize];
    [
        "Offset of field: ddt_cuda_tree_build::block_max",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, block_max) - 408usize];
    [
        "Offset of field: ddt_cuda_tree_build::lists",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, lists) - 416usize];
    [
        "Offset of field: ddt_cuda_tree_build::keys",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, keys) - 424usize];
    [
        "Offset of field: ddt_cuda_tree_build::columns",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, columns) - 432usize];
    [
        "Offset of field: ddt_cuda_tree_build::tree",
    ][::std::mem::offset_of!(ddt_cuda_tree_build, tree) - 440usize];
};
pub const DDT_CUDA_TREE_GATHER_THREADS: _bindgen_ty_9 = 256;
pub type _bindgen_ty_9 = ::std::os::raw::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree_gather {
    pub source: ddt_cuda_tree,
    pub tree: ddt_cuda_tree,
    pub tree_index: ddt_cuda_view,
    pub query_start: *const i32,
    pub positions: ddt_cuda_view,
    pub mrope_positions: ddt_cuda_view,
    pub num_trees: i32,
    pub num_rows: i32,
    pub num_axes: i32,
    pub reserved: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tree_gather",
    ][::std::mem::size_of::<ddt_cuda_tree_gather>() - 392usize];
    [
        "Alignment of ddt_cuda_tree_gather",
    ][::std::mem::align_of::<ddt_cuda_tree_gather>() - 8usize];
    [
        "Offset of field: ddt_cuda_tree_gather::source",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, source) - 0usize];
    [
        "Offset of field: ddt_cuda_tree_gather::tree",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, tree) - 112usize];
    [
        "Offset of field: ddt_cuda_tree_gather::tree_index",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, tree_index) - 224usize];
    [
        "Offset of field: ddt_cuda_tree_gather::query_start",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, query_start) - 272usize];
    [
        "Offset of field: ddt_cuda_tree_gather::positions",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, positions) - 280usize];
    [
        "Offset of field: ddt_cuda_tree_gather::mrope_positions",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, mrope_positions) - 328usize];
    [
        "Offset of field: ddt_cuda_tree_gather::num_trees",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, num_trees) - 376usize];
    [
        "Offset of field: ddt_cuda_tree_gather::num_rows",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, num_rows) - 380usize];
    [
        "Offset of field: ddt_cuda_tree_gather::num_axes",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, num_axes) - 384usize];
    [
        "Offset of field: ddt_cuda_tree_gather::reserved",
    ][::std::mem::offset_of!(ddt_cuda_tree_gather, reserved) - 388usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ddt_cuda_tree_mask {
    pub num_nodes: *const i32,
    pub tokens: *const i32,
    pub parents: *const i32,
    pub priorities: *const i32,
    pub root_positions: *const i64,
    pub order: *mut i32,
    pub tree: ddt_cuda_tree,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ddt_cuda_tree_mask",
    ][::std::mem::size_of::<ddt_cuda_tree_mask>() - 160usize];
    [
        "Alignment of ddt_cuda_tree_mask",
    ][::std::mem::align_of::<ddt_cuda_tree_mask>() - 8usize];
    [
        "Offset of field: ddt_cuda_tree_mask::num_nodes",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, num_nodes) - 0usize];
    [
        "Offset of field: ddt_cuda_tree_mask::tokens",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, tokens) - 8usize];
    [
        "Offset of field: ddt_cuda_tree_mask::parents",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, parents) - 16usize];
    [
        "Offset of field: ddt_cuda_tree_mask::priorities",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, priorities) - 24usize];
    [
        "Offset of field: ddt_cuda_tree_mask::root_positions",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, root_positions) - 32usize];
    [
        "Offset of field: ddt_cuda_tree_mask::order",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, order) - 40usize];
    [
        "Offset of field: ddt_cuda_tree_mask::tree",
    ][::std::mem::offset_of!(ddt_cuda_tree_mask, tree) - 48usize];
};
