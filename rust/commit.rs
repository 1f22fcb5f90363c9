// SPDX-License-Identifier: Apache-2.0
//! Makes the accepted path of each tree permanent, after which the tree can be forgotten.
//!
//! Recurrent layers replay the root and the accepted nodes from the stash of
//! [`gdn_verify`](crate::gdn_verify()), token by token as plain decoding would, so errors do not
//! add up over rounds. Attention layers move the KV rows of the accepted nodes to where a chain
//! would have put them.

use crate::dtype::DType;
use crate::error::{Result, bail, want_len};
use crate::gdn::{self, Conv, Head, HeadState, Heads, Inputs};
use crate::tensor::{TensorMut, TensorRef};
use crate::tree::request_rows;

/// One gated-delta-net layer of [`Commit`]. Extents, dtypes and the meaning of each tensor are
/// those of [`GdnVerify`](crate::GdnVerify).
#[derive(Debug)]
pub struct CommitGdnLayer<'a> {
    /// `[C,4]`.
    pub conv_weight: TensorRef<'a>,
    /// `[C]`.
    pub conv_bias: Option<TensorRef<'a>>,
    /// `[slots,C,3]` in and out: the last three conv inputs, newest last.
    pub conv_state: TensorMut<'a>,
    /// `[slots,Hv,128,128]` f32, in and out.
    pub ssm_state: TensorMut<'a>,
    /// `[T,C]` as `gdn_verify` wrote it.
    pub stash_qkv: TensorRef<'a>,
    /// `[T,2,Hv]` as `gdn_verify` wrote it.
    pub stash_gates: TensorRef<'a>,
    /// `[R]` slot of each request, all distinct; negative = this layer skips the request.
    pub state_slots: &'a [i32],
    /// `[R]` a second slot for the states after `snapshot_tokens` rows; negative = none.
    pub snapshot_slots: Option<&'a [i32]>,
}

impl CommitGdnLayer<'_> {
    /// Checks shapes and dtypes of a layer whose stash has at least `num_rows` rows.
    pub(crate) fn check_tensors(&self, num_rows: usize) -> Result<Heads> {
        let (conv_state, ssm_state) = (self.conv_state.view(), self.ssm_state.view());
        self.stash_qkv.want_ndim("stash_qkv", 2)?;
        self.stash_qkv.want_dtype("stash_qkv", DType::FLOATS)?;
        ssm_state.want_ndim("ssm_state", 4)?;
        let heads = Heads::new("stash_qkv", self.stash_qkv.shape()[1], ssm_state.shape()[1])?;
        gdn::check_stash(heads, num_rows, &self.stash_qkv, &self.stash_gates)?;
        gdn::check_layer(
            heads,
            self.stash_qkv.dtype(),
            &self.conv_weight,
            self.conv_bias.as_ref(),
            &conv_state,
            &ssm_state,
        )?;
        Ok(heads)
    }
}

/// The KV cache of one attention layer of [`Commit`].
#[derive(Debug)]
pub struct CommitKvLayer<'a> {
    /// `[blocks,Hkv,block_size,Dh]` in and out, any dtype.
    pub key_cache: TensorMut<'a>,
    /// `[blocks,Hkv,block_size,Dh]` in and out, any dtype.
    pub value_cache: TensorMut<'a>,
    /// `[T]` `block * block_size + offset` of each row; negative = none, refused for a row that
    /// moves or is moved to.
    pub row_slots: &'a [i64],
}

impl CommitKvLayer<'_> {
    /// Checks the shapes, and returns the number of blocks and the tokens of each.
    pub(crate) fn check_tensors(&self) -> Result<(usize, usize)> {
        self.key_cache.want_ndim("key_cache", 4)?;
        self.value_cache.want_ndim("value_cache", 4)?;
        let (num_blocks, block_size) = (self.key_cache.shape()[0], self.key_cache.shape()[2]);
        self.value_cache.want_dim("value_cache", 0, num_blocks, "blocks of key_cache")?;
        self.value_cache.want_dim("value_cache", 2, block_size, "block size of key_cache")?;
        Ok((num_blocks, block_size))
    }
}

/// Arguments of [`commit`]. T = rows, R = requests, D = `max_depth`.
#[derive(Debug)]
pub struct Commit<'a> {
    /// Recurrent layers; may be empty.
    pub gdn_layers: Vec<CommitGdnLayer<'a>>,
    /// Attention layers; may be empty.
    pub kv_layers: Vec<CommitKvLayer<'a>>,
    /// `[R + 1]` first row of each request.
    pub query_start: &'a [i32],
    /// `[R]` nodes with the root; 0 = padding request.
    pub num_nodes: &'a [i32],
    /// Row length of `accepted_nodes`.
    pub max_depth: usize,
    /// `[R]` accepted nodes without the root; -1 = padding request.
    pub num_accepted: &'a [i32],
    /// `[R][D]` the accepted nodes from depth 1 on.
    pub accepted_nodes: &'a [i32],
    /// `[R]` rows, root included, that a snapshot contains: 1 to `num_accepted + 1`. Required if
    /// a layer has `snapshot_slots`; read where one of them is not negative.
    pub snapshot_tokens: Option<&'a [i32]>,
    /// Epsilon of the L2 norm of keys, as in `gdn_verify`; 0 = 1e-6.
    pub norm_eps: f32,
}

/// Commits root and accepted nodes of every request: the states of each recurrent layer become
/// those after plain decoding of these tokens, and the KV row of the `j`-th accepted node moves
/// to the row of node `j`. The root's row is in place already.
///
/// The recurrence is f32, per token and value head:
/// `S = exp(g) * S; u = beta * (v - S^T k); S += k u^T`.
///
/// # Errors
/// `InvalidShape`, `InvalidDtype`; `InvalidValue` for a row, node or slot out of range, accepted
/// nodes that do not ascend, and slots that would be written twice. Nothing is written then.
pub fn commit(mut args: Commit) -> Result<()> {
    let norm_eps = gdn::norm_eps(args.norm_eps)?;
    let paths = accepted_paths(&args)?;
    let mut replays = Vec::with_capacity(args.gdn_layers.len());
    for (i, layer) in args.gdn_layers.iter().enumerate() {
        replays.push(
            Replay::new(layer, &paths, &args).map_err(|error| error.context(format!("gdn_layers[{i}]")))?,
        );
    }
    let mut moves = Vec::with_capacity(args.kv_layers.len());
    for (i, layer) in args.kv_layers.iter().enumerate() {
        moves.push(moves_of(layer, &paths, &args).map_err(|error| error.context(format!("kv_layers[{i}]")))?);
    }
    for (layer, replay) in args.gdn_layers.iter_mut().zip(&replays) {
        replay.run(layer, norm_eps);
    }
    for (layer, moves) in args.kv_layers.iter_mut().zip(&moves) {
        compact(&mut layer.key_cache, moves);
        compact(&mut layer.value_cache, moves);
    }
    Ok(())
}

/// The rows that one request commits.
struct AcceptedPath {
    request: usize,
    /// Rows of the root and the accepted nodes, in order.
    rows: Vec<usize>,
    /// Row of the root; node `i` is row `root_row + i`.
    root_row: usize,
}

/// Checks what was accepted; padding requests are left out.
fn accepted_paths(args: &Commit) -> Result<Vec<AcceptedPath>> {
    let num_reqs = args.num_nodes.len();
    want_len("num_accepted", args.num_accepted.len(), num_reqs)?;
    want_len("accepted_nodes", args.accepted_nodes.len(), num_reqs * args.max_depth)?;
    if let Some(snapshot_tokens) = args.snapshot_tokens {
        want_len("snapshot_tokens", snapshot_tokens.len(), num_reqs)?;
    }
    let mut paths = Vec::new();
    for (request, rows) in
        request_rows(args.query_start, args.num_nodes, num_rows(args.query_start))?.into_iter().enumerate()
    {
        let num_accepted = args.num_accepted[request];
        if rows.num_nodes == 0 || num_accepted == -1 {
            continue;
        }
        let most = args.max_depth.min(rows.num_nodes - 1);
        if num_accepted < 0 || num_accepted as usize > most {
            bail!(InvalidValue, "num_accepted[{request}]: got {num_accepted}, want -1..={most}");
        }
        let accepted = &args.accepted_nodes[request * args.max_depth..][..num_accepted as usize];
        let mut path = AcceptedPath { request, rows: vec![rows.of_node(0)], root_row: rows.of_node(0) };
        let mut last = 0;
        for (i, &node) in accepted.iter().enumerate() {
            if node <= last || node as usize >= rows.num_nodes {
                bail!(
                    InvalidValue,
                    "accepted_nodes[{request}][{i}]: got {node}, want more than the node before, {last}, and < {}",
                    rows.num_nodes
                );
            }
            last = node;
            path.rows.push(rows.of_node(node as usize));
        }
        paths.push(path);
    }
    Ok(paths)
}

/// Rows of the batch; what does not fit is found when the requests are checked.
fn num_rows(query_start: &[i32]) -> usize {
    query_start.last().map_or(0, |&end| end.max(0) as usize)
}

/// Refuses a value that occurs twice, because the second write would destroy the first.
fn want_distinct<T: Ord + Copy + std::fmt::Display>(what: &str, mut values: Vec<T>) -> Result<()> {
    values.sort_unstable();
    if let Some(pair) = values.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!(InvalidValue, "{what}: got {} twice, want distinct ones", pair[0]);
    }
    Ok(())
}

/// The checked work of one recurrent layer.
struct Replay<'a> {
    heads: Heads,
    requests: Vec<ReplayRequest<'a>>,
}

struct ReplayRequest<'a> {
    rows: &'a [usize],
    slot: usize,
    snapshot: Option<Snapshot>,
}

#[derive(Clone, Copy)]
struct Snapshot {
    slot: usize,
    tokens: usize,
}

impl<'a> Replay<'a> {
    fn new(layer: &CommitGdnLayer, paths: &'a [AcceptedPath], args: &Commit) -> Result<Self> {
        let heads = layer.check_tensors(num_rows(args.query_start))?;
        let (conv_state, ssm_state) = (layer.conv_state.view(), layer.ssm_state.view());
        want_len("state_slots", layer.state_slots.len(), args.num_nodes.len())?;
        if let Some(slots) = layer.snapshot_slots {
            want_len("snapshot_slots", slots.len(), args.num_nodes.len())?;
        }
        let mut requests = Vec::new();
        let mut written = Vec::new();
        for path in paths {
            let slot = layer.state_slots[path.request];
            if slot < 0 {
                continue;
            }
            gdn::check_slot("state_slots", path.request, slot, &conv_state, &ssm_state)?;
            written.push(slot);
            let snapshot_slot = layer.snapshot_slots.map_or(-1, |slots| slots[path.request]);
            let mut snapshot = None;
            if snapshot_slot >= 0 {
                gdn::check_slot("snapshot_slots", path.request, snapshot_slot, &conv_state, &ssm_state)?;
                written.push(snapshot_slot);
                let tokens = snapshot_tokens(args, path)?;
                snapshot = Some(Snapshot { slot: snapshot_slot as usize, tokens });
            }
            requests.push(ReplayRequest { rows: &path.rows, slot: slot as usize, snapshot });
        }
        want_distinct("state_slots and snapshot_slots", written)?;
        Ok(Self { heads, requests })
    }

    fn run(&self, layer: &mut CommitGdnLayer, norm_eps: f32) {
        if self.requests.is_empty() {
            return;
        }
        let heads = self.heads;
        let conv = Conv::new(&layer.conv_weight, layer.conv_bias.as_ref(), layer.stash_qkv.dtype());
        let mut inputs = Inputs::new(heads.channels());
        let mut state = HeadState::new();
        for request in &self.requests {
            let num_tokens = request.rows.len();
            inputs.start(&layer.conv_state.view().at(request.slot));
            for &row in request.rows {
                inputs.push(&layer.stash_qkv.at(row));
            }
            let taps = |token| [token, token + 1, token + 2, token + 3];
            for k_head in 0..heads.num_k {
                let channel = heads.key_channel(k_head);
                let keys: Vec<Head> = (0..num_tokens)
                    .map(|token| conv.normalized_head(&inputs, taps(token), channel, norm_eps))
                    .collect();
                for v_head in heads.value_heads(k_head) {
                    let channel = heads.value_channel(v_head);
                    state.load(&layer.ssm_state.view().at(request.slot).at(v_head));
                    for (token, (&row, key)) in request.rows.iter().zip(&keys).enumerate() {
                        let value = conv.head(&inputs, taps(token), channel);
                        let log_decay = layer.stash_gates.get_f32(&[row, 0, v_head]);
                        let beta = layer.stash_gates.get_f32(&[row, 1, v_head]);
                        state.step(key, &value, log_decay.exp(), beta);
                        if let Some(snapshot) = request.snapshot.filter(|it| it.tokens == token + 1) {
                            state.store(layer.ssm_state.at(snapshot.slot).at(v_head));
                        }
                    }
                    state.store(layer.ssm_state.at(request.slot).at(v_head));
                }
            }
            inputs.store_window(num_tokens, layer.conv_state.at(request.slot));
            if let Some(snapshot) = request.snapshot {
                inputs.store_window(snapshot.tokens, layer.conv_state.at(snapshot.slot));
            }
        }
    }
}

fn snapshot_tokens(args: &Commit, path: &AcceptedPath) -> Result<usize> {
    let Some(tokens) = args.snapshot_tokens else {
        bail!(NullPointer, "snapshot_tokens: got NULL, want a pointer because snapshot_slots is given");
    };
    let tokens = tokens[path.request];
    if tokens < 1 || tokens as usize > path.rows.len() {
        bail!(
            InvalidValue,
            "snapshot_tokens[{}]: got {tokens}, want 1..={} (num_accepted + 1)",
            path.request,
            path.rows.len()
        );
    }
    Ok(tokens as usize)
}

/// A place in a KV cache.
#[derive(Clone, Copy, Debug)]
struct Place {
    block: usize,
    offset: usize,
}

/// Lists the `(from, to)` of every KV row that has to move in one layer.
fn moves_of(layer: &CommitKvLayer, paths: &[AcceptedPath], args: &Commit) -> Result<Vec<(Place, Place)>> {
    let (num_blocks, block_size) = layer.check_tensors()?;
    want_len("row_slots", layer.row_slots.len(), num_rows(args.query_start))?;
    let place = |row: usize| {
        let slot = layer.row_slots[row];
        let (block, offset) = match usize::try_from(slot) {
            Ok(slot) if block_size > 0 => (slot / block_size, slot % block_size),
            _ => (num_blocks, 0),
        };
        if block >= num_blocks {
            bail!(
                InvalidValue,
                "row_slots[{row}]: got {slot}, want a slot in {num_blocks} blocks of {block_size}, because the row moves"
            );
        }
        Ok(Place { block, offset })
    };
    let mut moves = Vec::new();
    let mut written = Vec::new();
    for path in paths {
        for (node, &from) in path.rows.iter().enumerate() {
            let to = path.root_row + node;
            if from != to {
                moves.push((place(from)?, place(to)?));
                written.push(layer.row_slots[to]);
            }
        }
    }
    want_distinct("row_slots of rows that are moved to", written)?;
    Ok(moves)
}

/// Reads all rows that move before it writes the first, because one may go where another is.
fn compact(cache: &mut TensorMut, moves: &[(Place, Place)]) {
    let &[_, num_heads, _, head_dim] = cache.shape() else { unreachable!("ndim is 4") };
    let row_bytes = head_dim * cache.dtype().size();
    let mut rows = vec![0; moves.len() * num_heads * row_bytes];
    if rows.is_empty() {
        return;
    }
    let heads_of = |place: Place| (0..num_heads).map(move |head| (place, head));
    let sources = moves.iter().flat_map(|&(from, _)| heads_of(from));
    for ((from, head), row) in sources.zip(rows.chunks_exact_mut(row_bytes)) {
        cache.view().at(from.block).at(head).at(from.offset).load_bytes(row);
    }
    let targets = moves.iter().flat_map(|&(_, to)| heads_of(to));
    for ((to, head), row) in targets.zip(rows.chunks_exact(row_bytes)) {
        cache.at(to.block).at(head).at(to.offset).store_bytes(row);
    }
}
