# SPDX-License-Identifier: Apache-2.0
"""Kernels of vLLM 0.33.0: its chain verification of gated delta nets, its attention with a tree mask, its sampler.

The files of its Triton kernels are loaded alone: of vLLM they get the few names below, so that no other part of it,
and none of its requirements, has to be there. One CUDA kernel comes as the machine code that the wheel has for sm_90.
Of FlashAttention 3, which vLLM runs on such GPUs, the library is there with only the code for head dim 256 and bf16.
"""

import contextlib
import ctypes
import enum
import functools
import importlib.util
import logging
import re
import sys
import types

import torch

from . import folder

VERSION = "0.33.0"
FILES = {
    "attention_helpers": "vllm/v1/attention/ops/triton_attention_helpers.py",
    "attention": "vllm/v1/attention/ops/triton_unified_attention.py",
    "conv": "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "delta_rule": "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "gumbel": "vllm/v1/worker/gpu/sample/gumbel.py",
}
CUBIN = "fused_gdn_decode.sm_90a.cubin"
FUSED_GDN = f"vllm-{VERSION} fused_gdn_decode_post_conv_mtp + causal_conv1d_update"
GDN = f"vllm-{VERSION} fused_sigmoid_gating_delta_rule_update + causal_conv1d_update"
GDN_LAYER = f"vllm-{VERSION} causal_conv1d_update + rearrange_mixed_qkv + fused_sigmoid_gating_delta_rule_update"
ATTENTION = f"vllm-{VERSION} unified_attention(qq_bias)"
CHAIN_ATTENTION = f"vllm-{VERSION} unified_attention"
FLASH_ATTENTION = f"vllm-{VERSION} flash_attn_varlen_func(fa_version=3), a chain"
FLASH_LIBRARY = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
SAMPLE = f"vllm-{VERSION} gumbel_sample"


class _Platform:
    """What the kernels ask `vllm.platforms.current_platform`, answered as vLLM does on CUDA."""

    def is_cpu(self) -> bool:
        return False

    def is_arch_support_pdl(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 9

    def is_device_capability_family(self, capability: int) -> bool:
        return torch.cuda.get_device_capability()[0] == capability // 10

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


class _Logger(logging.Logger):
    debug_once = logging.Logger.debug


# Modes of a quantised KV cache; NONE is the only one used here.
_KVQuantMode = enum.IntEnum(
    "KVQuantMode",
    {
        "NONE": 0,
        "FP8_PER_TENSOR": 1,
        "INT8_PER_TOKEN_HEAD": 2,
        "FP8_PER_TOKEN_HEAD": 3,
        "INT4_PER_TOKEN_HEAD": 4,
    },
)


def _names() -> dict[str, types.ModuleType]:
    import triton
    import triton.language

    contents = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": _Logger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }
    modules = {name: types.ModuleType(name) for name in ("vllm", *contents)}
    for name, values in contents.items():
        vars(modules[name]).update(values)
    modules["vllm"].envs = modules["vllm.envs"]
    return modules


@contextlib.contextmanager
def _in_sys_modules(modules: dict[str, types.ModuleType]):
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@functools.cache
def _kernels() -> types.SimpleNamespace:
    loaded, names = {}, _names()
    for short, path in FILES.items():
        file = folder() / f"vllm-{VERSION}" / path
        spec = importlib.util.spec_from_file_location(f"vllm_{short}", file)
        loaded[short] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded[short]
        with _in_sys_modules(names):
            spec.loader.exec_module(loaded[short])
        names[path.removesuffix(".py").replace("/", ".")] = loaded[short]
    return types.SimpleNamespace(**loaded)


def available() -> str | None:
    """Why vLLM's kernels cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    missing = [
        path for path in FILES.values() if not (folder() / f"vllm-{VERSION}" / path).exists()
    ]
    if missing:
        return f"{missing[0]} of vLLM {VERSION} is not in {folder()}: run peers/fetch.py"
    try:
        _kernels()
    except Exception as error:  # whatever the peer's import runs into
        return f"vLLM {VERSION} does not load: {error!r}"
    return None


class GdnChain:
    """One layer's verification of `rows` drafted tokens per request as a chain, with one stored state per row.

    All tensors as for ddt_gdn_verify: mixed_qkv [T, C], a and b [T, Hv], a_log and dt_bias [Hv], conv_weight [C, 4],
    conv_state [R, C, 3], ssm_state [R, Hv, 128, 128] f32, T = R * rows. They are copied into vLLM's layouts here, once.
    Each call starts from the state that the last one stored for its first row; the first call thus equals plain
    decoding of all rows.
    """

    def __init__(
        self, mixed_qkv, a, b, a_log, dt_bias, conv_weight, conv_bias, conv_state, ssm_state
    ):
        requests, value_heads = ssm_state.shape[:2]
        rows = mixed_qkv.shape[0] // requests
        device, channels = mixed_qkv.device, mixed_qkv.shape[1]
        self.mixed_qkv, self.a, self.b = mixed_qkv.contiguous(), a.contiguous(), b.contiguous()
        self.a_log, self.dt_bias = a_log, dt_bias
        self.conv_weight, self.conv_bias = conv_weight, conv_bias
        self.value_heads = value_heads
        self.key_heads = (channels // 128 - value_heads) // 2
        # Block 0 is vLLM's null block.
        self.slots = 1 + torch.arange(requests * rows, dtype=torch.int32, device=device).view(
            requests, rows
        )
        self.ssm_state = ssm_state.new_zeros(1 + requests * rows, *ssm_state.shape[1:])
        self.ssm_state[self.slots[:, 0].long()] = ssm_state
        self.conv_slots = 1 + torch.arange(requests, dtype=torch.int32, device=device)
        pool = conv_state.new_zeros(1 + requests, 3 + rows - 1, channels).transpose(1, 2)
        pool[1:, :, :3] = conv_state
        self.conv_state = pool
        self.conv_out = torch.empty_like(self.mixed_qkv)
        self.num_accepted = torch.ones(requests, dtype=torch.int32, device=device)
        self.query_start = torch.arange(requests + 1, dtype=torch.int32, device=device) * rows
        self.rows = rows
        key_channels = self.key_heads * 128
        self.splits = [key_channels, key_channels, value_heads * 128]
        self.split_buffer = torch.empty(mixed_qkv.numel(), dtype=mixed_qkv.dtype, device=device)
        self.out = None
        self.layer()  # leaves real convolution outputs in the split buffer, for __call__
        self.ssm_state.zero_()
        self.ssm_state[self.slots[:, 0].long()] = ssm_state
        self.conv_state.zero_()
        self.conv_state[1:, :, :3] = conv_state

    def _conv(self):
        # vLLM overwrites the input; here it must survive for the next call.
        return _kernels().conv.causal_conv1d_update(
            self.mixed_qkv, self.conv_state, self.conv_weight, self.conv_bias, "silu",
            conv_state_indices=self.conv_slots, num_accepted_tokens=self.num_accepted,
            query_start_loc=self.query_start, max_query_len=self.rows, out=self.conv_out,
        )  # fmt: skip

    def _delta_rule(self):
        size = self.mixed_qkv.shape[0]
        q, k, v = self.split_buffer.split([size * width for width in self.splits])
        out, _ = _kernels().delta_rule.fused_sigmoid_gating_delta_rule_update(
            A_log=self.a_log, a=self.a, b=self.b, dt_bias=self.dt_bias,
            q=q.view(1, size, -1, 128), k=k.view(1, size, -1, 128), v=v.view(1, size, -1, 128),
            initial_state=self.ssm_state, inplace_final_state=True, cu_seqlens=self.query_start,
            ssm_state_indices=self.slots, num_accepted_tokens=self.num_accepted, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        self.out = out.view(size, self.value_heads, 128)

    def __call__(self) -> None:
        """The two kernels alone, without the copies that bring the output of the first into the layout of the second:
        the least that vLLM could take."""
        self._conv()
        self._delta_rule()

    def layer(self) -> None:
        """What a layer of vLLM launches: the two kernels and the copies between them."""
        parts = torch.split(self._conv(), self.splits, dim=-1)
        torch.cat([part.reshape(-1) for part in parts], out=self.split_buffer)
        self._delta_rule()


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("qkv", "a", "b", "gate", "state")]


@functools.cache
def _fused_gdn_kernel() -> ctypes.c_void_p:
    """The instance for an f32 state, three value heads for each key head, and a silu gate."""
    code = (folder() / f"vllm-{VERSION}" / CUBIN).read_bytes()
    (name,) = set(
        re.findall(rb"\0(_ZN[^\0]*gdn_decode_post_conv_mtp_kernelIfLi3ELb0E[^\0]*)\0", code)
    )
    cuda = ctypes.CDLL("libcuda.so.1")
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    torch.cuda.current_stream().synchronize()  # there is a context now
    for status in (
        cuda.cuModuleLoadData(ctypes.byref(module), code),
        cuda.cuModuleGetFunction(ctypes.byref(kernel), module, name),
    ):
        if status:
            raise RuntimeError(f"CUDA driver error {status}")
    return kernel


def fused_available() -> str | None:
    """Why `FusedGdnChain` cannot run here, or None."""
    if reason := available():
        return reason
    if torch.cuda.get_device_capability() != (9, 0):
        return "the code taken from the wheel is for sm_90a"
    try:
        _fused_gdn_kernel()
    except Exception as error:  # whatever the peer's import runs into
        return f"vLLM's fused kernel does not load: {error!r}"
    return None


class FusedGdnChain(GdnChain):
    """The same for up to 8 rows per request and three value heads for each key head, by the kernel that vLLM runs
    there; after it, in the same kernel, the gated RMS norm of each head: gate [T, Hv, 128], norm_weight [128]."""

    def __init__(self, *inputs, gate, norm_weight, norm_eps=1e-6, **named):
        super().__init__(*inputs, **named)
        if self.rows > 8 or self.value_heads != 3 * self.key_heads:
            raise ValueError(
                "vLLM's fused kernel takes up to 8 rows and the instance here 3 value heads a key head"
            )
        self.gate, self.norm_weight = gate, norm_weight
        self.out = torch.empty_like(gate)
        pointers = (
            self.conv_out, self.a, self.b, self.a_log.float(), self.dt_bias.float(), self.slots, self.query_start,
            self.num_accepted, self.ssm_state, gate, norm_weight, self.out,
        )  # fmt: skip
        self.keep = pointers
        values = [ctypes.c_void_p(tensor.data_ptr()) for tensor in pointers]
        values += [
            ctypes.c_int(value) for value in (self.key_heads, self.value_heads, self.rows, 0)
        ]
        values += [ctypes.c_bool(norm_weight.dtype == torch.bfloat16), ctypes.c_float(128**-0.5)]
        values += [ctypes.c_float(norm_eps)]
        rows = (self.conv_out, self.a, self.b, gate, self.ssm_state)
        values += [_Strides(*(tensor.stride(0) for tensor in rows))]
        self.values = values
        self.parameters = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(value) for value in values)
        )

    def __call__(self) -> None:
        self._conv()
        requests = self.slots.shape[0]
        status = ctypes.CDLL("libcuda.so.1").cuLaunchKernel(
            _fused_gdn_kernel(), requests, self.value_heads, 1, 256, 1, 1, 0,
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), self.parameters, None,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"CUDA driver error {status}")


class Attention:
    """Attention of N rows per request to a paged cache that holds them already, with a mask among those rows.

    query [T, Hq, Dh]; key_cache and value_cache [blocks, block_size, Hkv, Dh]; block_table [R, max_blocks] and seq_lens
    [R] i32, those rows included; visible [N, N] bool, row sees column, the same tree for all requests, which is all that
    this kernel can do; without it rows are a causal chain. Parents come before their children.
    """

    def __init__(self, query, key_cache, value_cache, block_table, seq_lens, scale, visible=None):
        requests = seq_lens.shape[0]
        rows = query.shape[0] // requests
        self.query, self.key_cache, self.value_cache = query, key_cache, value_cache
        self.block_table, self.seq_lens, self.scale, self.rows = block_table, seq_lens, scale, rows
        self.query_start = torch.arange(requests + 1, dtype=torch.int32, device=query.device) * rows
        self.max_seq_len = int(seq_lens.max())
        self.bias = None
        if visible is not None:
            hidden = torch.full_like(visible, float("-inf"), dtype=torch.float32)
            self.bias = torch.where(visible, torch.zeros_like(hidden), hidden).contiguous()
        self.out = torch.empty_like(query)
        # vLLM's buffers of split attention, which it uses for up to 8 rows per request.
        segments, heads, dim = 16, query.shape[1], query.shape[2]
        self.split = {
            "seq_threshold_3D": 128 // key_cache.shape[2],
            "num_par_softmax_segments": segments,
            "softmax_segm_output": query.new_empty(
                query.shape[0], heads, segments, dim, dtype=torch.float32
            ),
            "softmax_segm_max": query.new_empty(
                query.shape[0], heads, segments, dtype=torch.float32
            ),
            "softmax_segm_expsum": query.new_empty(
                query.shape[0], heads, segments, dtype=torch.float32
            ),
        }

    def __call__(self) -> None:
        _kernels().attention.unified_attention(
            q=self.query, k=self.key_cache, v=self.value_cache, out=self.out, cu_seqlens_q=self.query_start,
            max_seqlen_q=self.rows, seqused_k=self.seq_lens, max_seqlen_k=self.max_seq_len, softmax_scale=self.scale,
            causal=True, window_size=(-1, -1), block_table=self.block_table, softcap=0, q_descale=None,
            k_descale=None, v_descale=None, qq_bias=self.bias, **self.split,
        )  # fmt: skip


@functools.cache
def _flash():
    torch.ops.load_library(str(folder() / f"vllm-{VERSION}" / FLASH_LIBRARY))
    return torch.ops._vllm_fa3_C


def flash_available() -> str | None:
    """Why `FlashAttention` cannot run here, or None."""
    if reason := available():
        return reason
    if torch.cuda.get_device_capability() != (9, 0):
        return "FlashAttention 3 is for sm_90"
    try:
        _flash().fwd.default  # noqa: B018
    except Exception as error:  # whatever the peer's import runs into
        return f"FlashAttention 3 does not load: {error!r}"
    return None


class FlashAttention:
    """The same rows as a chain: this kernel has no tree mask, so it answers another question, and as fast as anything
    on this GPU. Tensors as in `Attention`, head dim 256, bf16. The schedule, which vLLM makes once a step for all
    layers, is made here; splits as vLLM allows them in CUDA graphs."""

    MAX_SPLITS = 32

    def __init__(self, query, key_cache, value_cache, block_table, seq_lens, scale):
        requests = seq_lens.shape[0]
        rows = query.shape[0] // requests
        self.query_start = torch.arange(requests + 1, dtype=torch.int32, device=query.device) * rows
        self.out = torch.empty_like(query)
        longest = int(seq_lens.max())
        heads, dim = query.shape[1:]
        schedule = _flash().get_scheduler_metadata(
            requests, rows, longest, heads, key_cache.shape[2], dim, dim, query.dtype, seq_lens, self.query_start, None,
            None, None, None, key_cache.shape[1], 0, True, -1, -1, False, self.MAX_SPLITS, None, 0,
        )  # fmt: skip
        absent = (
            "k_new v_new q_v cu_seqlens_k cu_seqlens_k_new seqused_q kv_batch_idx leftpad_k rotary_cos rotary_sin "
            "seqlens_rotary q_descale k_descale v_descale pack_gqa s_aux cp_tot_seqused_k"
        )
        self.arguments = dict(
            dict.fromkeys(absent.split()), q=query, k=key_cache, v=value_cache, out=self.out,
            cu_seqlens_q=self.query_start, seqused_k=seq_lens, max_seqlen_q=rows, max_seqlen_k=longest,
            page_table=block_table, softmax_scale=scale, is_causal=True, window_size_left=-1, window_size_right=-1,
            softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=schedule, num_splits=self.MAX_SPLITS,
            sm_margin=0, cp_world_size=1, cp_rank=0,
        )  # fmt: skip

    def __call__(self) -> None:
        _flash().fwd(**self.arguments)


class Sample:
    """A token for each row of logits [T, V] at one temperature; 0 takes the largest logit."""

    def __init__(self, logits, temperature: float = 0.0, seed: int = 0):
        device, size = logits.device, logits.shape[0]
        self.logits = logits
        self.request = torch.zeros(size, dtype=torch.int32, device=device)
        self.temperature = torch.tensor([temperature], dtype=torch.float32, device=device)
        self.seed = torch.tensor([seed], dtype=torch.int64, device=device)
        self.positions = torch.arange(size, dtype=torch.int64, device=device)
        self.out = None

    def __call__(self) -> None:
        self.out = _kernels().gumbel.gumbel_sample(
            self.logits, self.request, self.temperature, self.seed, self.positions,
            apply_temperature=True, is_drafting=False,
        )  # fmt: skip
