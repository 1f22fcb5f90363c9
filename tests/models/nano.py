# SPDX-License-Identifier: Apache-2.0
"""The nano hybrid target and its DFlash drafter in plain PyTorch: to train them, and as an independent reference in tests.

Module and parameter names are those of the checkpoints that vLLM loads (`Qwen3_5ForCausalLM` and `DFlashDraftModel`), so a
checkpoint is the module's state dict. Shapes: B sequences, T tokens, H hidden size, V vocabulary.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

GDN_CHUNK = 64


class RMSNorm(nn.Module):
    """x / rms(x) * weight in f32. `centred` norms store weight - 1, as Qwen3.5 does."""

    def __init__(self, size: int, eps: float, centred: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps, self.centred = eps, centred

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self.centred else self.weight.float()
        return (F.rms_norm(x.float(), weight.shape, eps=self.eps) * weight).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope(x: Tensor, positions: Tensor, theta: float, rotary_dim: int) -> Tensor:
    """Rotates the first `rotary_dim` dims of x [B, heads, T, D], half against half. positions: [T] or [B, T]."""
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, device=x.device, dtype=torch.float32) / rotary_dim)
    angles = positions[..., None].float() * frequencies
    if angles.dim() == 3:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    left, right, rest = x.float().split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Grouped-query attention. query [B, Hq, Tq, D], key and value [B, Hkv, Tk, D] -> [B, Tq, Hq * D]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return out.transpose(1, 2).flatten(2)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular [..., n, n], n a power of two: inverts diagonal blocks of doubling size."""
    size = lower.shape[-1]
    inverse = torch.ones(*lower.shape[:-1], 1, 1, dtype=lower.dtype, device=lower.device)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        tiles = lower.unflatten(-1, (pairs, 2 * block)).unflatten(-3, (pairs, 2 * block))
        below = tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., block:, :block]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ below @ first)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        inverse = torch.cat([top, torch.cat([corner, second], -1)], -2)
        block *= 2
    return inverse.squeeze(-3)


def gated_delta(query, key, value, log_decay, beta, state) -> tuple[Tensor, Tensor]:
    """The gated delta rule, chunk by chunk: S = exp(g) S; S += beta k (v - S^T k)^T; out = S^T q.

    query, key, value: f32 [B, heads, T, D]; log_decay, beta: f32 [B, heads, T]; state: f32 [B, heads, D, D] (key-major).
    Returns the outputs [B, heads, T, D] and the state after the last token.
    """
    length = query.shape[2]
    chunk = min(GDN_CHUNK, 1 << (length - 1).bit_length())
    pad = -length % chunk  # Padding tokens have beta 0 and decay 1: they leave the state alone.
    query, key, value = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (query, key, value))
    log_decay, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (log_decay, beta))

    since_start = log_decay.cumsum(-1)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    gap = (since_start[..., :, None] - since_start[..., None, :]).masked_fill(future, float("-inf")).exp()
    decay = since_start.exp()[..., None]
    key_beta = key * beta[..., None]
    inverse = unit_lower_inverse((key_beta @ key.mT * gap).tril(-1))
    updates, reads = (inverse @ torch.cat([value * beta[..., None], key_beta * decay], -1)).chunk(2, -1)
    inner = query @ key.mT * gap
    query = query * decay
    key = key * (since_start[..., -1:] - since_start).exp()[..., None]
    total = decay[..., -1:, :]

    outputs = []
    for i in range(query.shape[2]):
        update = updates[:, :, i] - reads[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + inner[:, :, i] @ update)
        state = state * total[:, :, i] + key[:, :, i].mT @ update
    return torch.cat(outputs, 2)[:, :, :length], state


class GatedDeltaNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.dim, self.width = config.linear_key_head_dim, config.linear_conv_kernel_dim
        key_dim, value_dim = self.key_heads * self.dim, self.value_heads * self.dim
        self.splits = [key_dim, key_dim, value_dim]
        channels = sum(self.splits)
        self.in_proj_qkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, value_dim, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, self.width, groups=channels, bias=False)
        # Decay rates spread over the heads, between 0.1 % and 20 % of 1..8 per token.
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 8).log())
        step = torch.logspace(-3, -0.7, self.value_heads)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = RMSNorm(self.dim, config.rms_norm_eps, centred=False)
        self.out_proj = nn.Linear(value_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cache: dict | None) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.in_proj_qkv(x)
        past = cache.get("conv") if cache is not None else None
        mixed = F.pad(mixed, (0, 0, self.width - 1, 0)) if past is None else torch.cat([past, mixed], 1)
        if cache is not None:
            cache["conv"] = mixed[:, 1 - self.width :]
        # The sum of shifted copies: PyTorch's depthwise convolution is slow to differentiate.
        taps = self.conv1d.weight.float().squeeze(1).unbind(1)
        mixed = F.silu(sum(tap * mixed[:, j : j + length].float() for j, tap in enumerate(taps)).to(x.dtype))
        query, key, value = mixed.split(self.splits, -1)
        log_decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        beta = self.in_proj_b(x).float().sigmoid()
        state = cache.get("state") if cache is not None else None
        if state is None:
            state = torch.zeros(batch, self.value_heads, self.dim, self.dim, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            query, key, value = (t.float().unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in (query, key, value))
            query, key = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (query, key))
            groups = self.value_heads // self.key_heads
            query, key = (t.repeat_interleave(groups, 1) for t in (query * self.dim**-0.5, key))
            out, state = gated_delta(query, key, value, log_decay.mT, beta.mT, state)
        if cache is not None:
            cache["state"] = state
        gate = F.silu(self.in_proj_z(x).float()).unflatten(-1, (-1, self.dim))
        out = self.norm(out.transpose(1, 2)) * gate
        return self.out_proj(out.flatten(2).to(x.dtype))


class GatedAttention(nn.Module):
    """Qwen3.5's full attention: q_proj gives each head its query and an output gate; RoPE on a quarter of the dims."""

    def __init__(self, config):
        super().__init__()
        self.dim = config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        self.rotary_dim = int(self.dim * config.rope_parameters["partial_rotary_factor"])
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.dim * 2, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps, centred=True)
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps, centred=True)

    def forward(self, x: Tensor, cache: dict | None) -> Tensor:
        length = x.shape[1]
        past = cache["key"].shape[2] if cache else 0
        if past and length > 1:
            raise ValueError("a cached call takes one token, or the whole prompt first")
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.dim)).chunk(2, -1)
        key, value = (p(x).unflatten(-1, (-1, self.dim)) for p in (self.k_proj, self.v_proj))
        positions = torch.arange(past, past + length, device=x.device)
        query = rope(self.q_norm(query).transpose(1, 2), positions, self.theta, self.rotary_dim)
        key = rope(self.k_norm(key).transpose(1, 2), positions, self.theta, self.rotary_dim)
        value = value.transpose(1, 2)
        if cache is not None:
            if past:
                key, value = torch.cat([cache["key"], key], 2), torch.cat([cache["value"], value], 2)
            cache["key"], cache["value"] = key, value
        out = attend(query, key, value, None, causal=not past)
        return self.o_proj(out * gate.flatten(2).sigmoid())


class TargetLayer(nn.Module):
    def __init__(self, config, index: int):
        super().__init__()
        if config.layer_types[index] == "full_attention":
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, centred=True)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, centred=True)

    def forward(self, x: Tensor, cache: dict | None, dropout: float) -> Tensor:
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        x = x + F.dropout(mixer(self.input_layernorm(x), cache), dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class TargetBody(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, centred=True)


class Target(nn.Module):
    """The hybrid language model, with tied input and output embeddings."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.model = TargetBody(self.config)
        self.dropout = 0.0
        init_weights(self, self.config.num_hidden_layers)

    def new_cache(self) -> list[dict]:
        return [{} for _ in self.model.layers]

    def forward(self, tokens: Tensor, layer_ids=(), cache: list[dict] | None = None) -> tuple[Tensor, Tensor | None]:
        """tokens i64 [B, T] -> normed hidden states [B, T, H] and, for `layer_ids`, the layers' outputs side by side."""
        x, taps = self.model.embed_tokens(tokens), []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cache[i] if cache is not None else None, self.dropout)
            if i in layer_ids:
                taps.append(x)
        return self.model.norm(x), torch.cat(taps, -1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


class DraftAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.theta = config.head_dim, config.rope_theta
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps, centred=False)
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps, centred=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        source = torch.cat([context, x], 1)
        context_positions = torch.arange(context.shape[1], device=x.device)
        if positions.dim() == 2:
            context_positions = context_positions.expand(len(positions), -1)
        key_positions = torch.cat([context_positions, positions], -1)
        query = rope(self.q_norm(self.heads(self.q_proj(x))), positions, self.theta, self.dim)
        key = rope(self.k_norm(self.heads(self.k_proj(source))), key_positions, self.theta, self.dim)
        return self.o_proj(attend(query, key, self.heads(self.v_proj(source)), mask, causal=False))


class DraftLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, centred=False)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, centred=False)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash: one pass drafts a whole block. Rows are the anchor (the last sampled token) and masks, and see every row of their
    block and the target's hidden states of the tokens before the anchor. Row j > 0 predicts the token at its own position."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = SimpleNamespace(**config)
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.mask_token = self.config.dflash_config["mask_token_id"]
        self.layer_ids = self.config.dflash_config["target_layer_ids"]
        self.fc = nn.Linear(hidden * len(self.layer_ids), hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps, centred=False)
        self.layers = nn.ModuleList(DraftLayer(self.config) for _ in range(self.config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps, centred=False)
        init_weights(self, self.config.num_hidden_layers)

    def forward(self, target: Target, anchors: Tensor, anchor_positions: Tensor, taps: Tensor, horizon: int) -> Tensor:
        """Drafts `horizon` < block_size tokens in each of N blocks for each sequence.

        anchors: i64 [B, N], the token of each block's first row; anchor_positions: i64 [N] or [B, N], its position;
        taps: [B, T, len(layer_ids) * H] from `Target`. Returns logits [B, N, horizon, V].
        """
        batch, blocks = anchors.shape
        size, length, device = horizon + 1, taps.shape[1], anchors.device
        tokens = anchors.new_full((batch, blocks, size), self.mask_token)
        tokens[..., 0] = anchors
        positions = (anchor_positions[..., None] + torch.arange(size, device=device)).flatten(-2)
        first = anchor_positions.repeat_interleave(size, -1)[..., None]
        block = torch.arange(blocks, device=device).repeat_interleave(size)
        same = (block[:, None] == block).expand(*first.shape[:-1], -1)
        mask = torch.cat([torch.arange(length, device=device) < first, same], -1)
        if mask.dim() == 3:
            mask = mask[:, None]
        x = target.model.embed_tokens(tokens.flatten(1))
        context = self.hidden_norm(self.fc(taps))
        for layer in self.layers:
            x = layer(x, context, positions, mask)
        x = self.norm(x).unflatten(1, (blocks, size))
        return target.logits(x[:, :, 1:])


def init_weights(module: nn.Module, depth: int) -> None:
    """Normal weights; the projections that write to the residual stream are scaled down by the depth."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            scale = (2 * depth) ** -0.5 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 if "embed" in name else scale * parameter.shape[1] ** -0.5)


def save(module: Target | Drafter, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(vars(module.config), indent=1) + "\n")


def load(kind: type, folder: Path) -> Target | Drafter:
    """Loads a `Target` or a `Drafter`, with the bf16 weights widened to f32."""
    module = kind(json.loads((folder / "config.json").read_text()))
    module.load_state_dict({name: x.float() for name, x in load_file(folder / "model.safetensors").items()})
    return module.eval().requires_grad_(False)
