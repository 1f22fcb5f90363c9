// SPDX-License-Identifier: Apache-2.0
//! Trees for speculative decoding: build one from a drafter's scores, verify all of it in one
//! forward of a hybrid (gated delta net + attention) target, and commit the accepted path.
//!
//! One decoding round is five calls, and a sixth for runtimes that build their own trees:
//!
//! 1. [`tree_build`]: a tree per request, best first under a node budget.
//! 2. [`tree_attention`] in each attention layer, [`gdn_verify`] in each recurrent layer.
//! 3. [`tree_accept`]: walk the target's choices down the tree.
//! 4. [`commit`]: replay the accepted path into the recurrent state and compact the KV cache.
//!
//! [`tree_mask`] turns any parent array into the same tree layout. The C ABI of the same
//! operations, and of one that reorders batches, is `include/ddtree.h`, generated from [`ffi`].
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used))]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("ddtree needs 64-bit pointers: sizes and strides of its C ABI are int64_t");

mod commit;
#[cfg(feature = "cuda")]
mod cuda;
mod dtype;
mod error;
pub mod ffi;
mod gdn;
mod gdn_verify;
pub mod gumbel;
mod lanes;
pub mod scores;
mod tensor;
mod tree;
mod tree_accept;
mod tree_attention;
mod tree_build;
mod tree_mask;

pub use commit::{Commit, CommitGdnLayer, CommitKvLayer, commit};
pub use dtype::DType;
pub use error::{Error, Result, Status};
pub use gdn::{GDN_CONV_WIDTH, GDN_HEAD_DIM};
pub use gdn_verify::{GdnVerify, gdn_verify};
pub use tensor::{Element, TensorMut, TensorRef};
pub use tree::{
    FLAG_CANDIDATES_EXHAUSTED, FLAG_NO_CANDIDATES, FLAG_NONFINITE, MAX_DEPTH, MAX_NODE_BUDGET, RequestRows,
    Tree, request_rows,
};
pub use tree_accept::{AcceptedPath, Choice, TreeLinks, greedy_choice, sampled_choice, tree_accept};
pub use tree_attention::{TreeAttention, tree_attention};
pub use tree_build::{BuiltTree, DraftScores, TargetNoise, TreeRequest, tree_build};
pub use tree_mask::{Topology, tree_mask};

// runs the example of rust/README.md as a test
#[cfg(doctest)]
#[doc = include_str!("README.md")]
struct Readme;
