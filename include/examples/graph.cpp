// SPDX-License-Identifier: Apache-2.0
// Captures the library's part of a round on a GPU in a CUDA graph, in C++17 with the CUDA runtime,
// and replays it with new inputs: build trees, walk along the target's choices, move the accepted KV
// rows. Where a server runs its target, the target's logits are uploaded instead. Every replay is
// compared with the same calls on the CPU, which must give the same bits.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddtree.h"

namespace {

constexpr int kReqs = 4, kVocab = 1000, kHorizon = 7, kNodes = 16, kWords = 1, kRows = kReqs * kNodes;
constexpr int kBlocks = 16, kBlock = 16, kDim = 64;

void cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void must(ddt_status status) {
  if (status == DDT_OK) return;
  char text[512] = "";
  if (ddt_last_error(text, sizeof text, nullptr) != DDT_OK) text[0] = 0;
  throw std::runtime_error(std::string(ddt_status_name(status)) + ": " + text);
}

struct Context {
  ddt_context *handle = nullptr;
  explicit Context(uint32_t device) {
    ddt_context_params params{};
    params.struct_size = sizeof params;
    params.abi_version = DDT_ABI_VERSION;
    params.device = device;
    must(ddt_context_create(&params, &handle));
  }
  ~Context() { ddt_context_free(handle); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
};

// An array in host memory and, for a GPU, its copy there, whose address a graph may keep.
template <typename T>
class Array {
 public:
  Array(size_t count, bool on_gpu) : host(count) {
    if (on_gpu) cuda(cudaMalloc(reinterpret_cast<void **>(&device_), count * sizeof(T)));
  }
  ~Array() {
    if (device_) cudaFree(device_);
  }
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;

  T *data() { return device_ ? device_ : host.data(); }
  void upload() {
    if (device_) cuda(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void download() {
    if (device_) cuda(cudaMemcpy(host.data(), device_, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }

  std::vector<T> host;

 private:
  T *device_ = nullptr;
};

template <typename T>
ddt_tensor tensor(Array<T> &array, uint32_t dtype, std::vector<int64_t> shape) {
  ddt_tensor out{};
  out.data = array.data();
  out.dtype = dtype;
  out.ndim = static_cast<uint32_t>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    out.shape[i] = shape[i];
    out.strides[i] = stride;
    stride *= shape[i];
  }
  return out;
}

// The buffers of a round on one device, and its calls.
class Round {
 public:
  Round(ddt_context *context, bool on_gpu)
      : context_(context),
        draft(kReqs * kHorizon * kVocab, on_gpu),
        logits(kRows * kVocab, on_gpu),
        kv(kBlocks * kBlock * kDim, on_gpu),
        output_tokens(kReqs * (kHorizon + 1), on_gpu),
        tokens(kRows, on_gpu),
        num_accepted(kReqs, on_gpu),
        root_tokens(kReqs, on_gpu),
        root_positions(kReqs, on_gpu),
        query_start_(kReqs + 1, on_gpu),
        row_slots_(kRows, on_gpu),
        num_nodes_(kReqs, on_gpu),
        parents_(kRows, on_gpu),
        first_child_(kRows, on_gpu),
        next_sibling_(kRows, on_gpu),
        bits_(kRows * kWords, on_gpu),
        accepted_nodes_(kReqs * kHorizon, on_gpu) {
    for (int r = 0; r <= kReqs; r++) query_start_.host[r] = r * kNodes;
    // KV rows of this step lie in pages 2r and 2r + 1 of request r
    for (int i = 0; i < kRows; i++) row_slots_.host[i] = i / kNodes * 2 * kBlock + i % kNodes;
    query_start_.upload();
    row_slots_.upload();

    tree_.struct_size = sizeof tree_;
    tree_.num_reqs = kReqs;
    tree_.max_nodes = kNodes;
    tree_.max_depth = kHorizon;
    tree_.num_nodes = num_nodes_.data();
    tree_.tokens = tokens.data();
    tree_.parents = parents_.data();
    tree_.first_child = first_child_.data();
    tree_.next_sibling = next_sibling_.data();
    tree_.ancestor_bits = bits_.data();

    build_.struct_size = sizeof build_;
    build_.logits = tensor(draft, DDT_DTYPE_F32, {kReqs, kHorizon, kVocab});
    build_.root_tokens = root_tokens.data();
    build_.root_positions = root_positions.data();
    build_.tree = &tree_;

    accept_.struct_size = sizeof accept_;
    accept_.tree = &tree_;
    accept_.query_start = query_start_.data();
    accept_.logits = tensor(logits, DDT_DTYPE_F32, {kRows, kVocab});
    accept_.num_accepted = num_accepted.data();
    accept_.accepted_nodes = accepted_nodes_.data();
    accept_.output_tokens = output_tokens.data();

    layer_.key_cache = tensor(kv, DDT_DTYPE_F32, {kBlocks, 1, kBlock, kDim / 2});
    layer_.value_cache = layer_.key_cache;
    // keys and values side by side in a row, as some runtimes keep them
    for (ddt_tensor *cache : {&layer_.key_cache, &layer_.value_cache}) {
      cache->strides[0] = cache->strides[1] = kBlock * kDim;
      cache->strides[2] = kDim;
    }
    layer_.value_cache.data = kv.data() + kDim / 2;
    layer_.row_slots = row_slots_.data();
    commit_.struct_size = sizeof commit_;
    commit_.num_kv_layers = 1;
    commit_.kv_layers = &layer_;
    commit_.tree = &tree_;
    commit_.query_start = query_start_.data();
    commit_.num_accepted = num_accepted.data();
    commit_.accepted_nodes = accepted_nodes_.data();

    // the calls of a stream follow each other, so one workspace serves all of them
    size_t bytes = 0, most = 0;
    must(ddt_tree_build_workspace_size(context, &build_, &bytes));
    most = std::max(most, bytes);
    must(ddt_tree_accept_workspace_size(context, &accept_, &bytes));
    most = std::max(most, bytes);
    must(ddt_commit_workspace_size(context, &commit_, &bytes));
    most = std::max(most, bytes);
    if (most) cuda(cudaMalloc(&workspace_, most));
    build_.workspace = accept_.workspace = commit_.workspace = workspace_;
    build_.workspace_bytes = accept_.workspace_bytes = commit_.workspace_bytes = most;
  }
  ~Round() {
    if (workspace_) cudaFree(workspace_);
  }
  Round(const Round &) = delete;
  Round &operator=(const Round &) = delete;

  // Enqueues the round. Nothing waits, so the stream may be capturing.
  void enqueue(void *stream) {
    must(ddt_tree_build(context_, &build_, stream));
    // here the target's forward runs on tokens, with ddt_tree_attention and ddt_gdn_verify
    must(ddt_tree_accept(context_, &accept_, stream));
    must(ddt_commit(context_, &commit_, stream));
  }

  void upload() {
    draft.upload();
    logits.upload();
    kv.upload();
    root_tokens.upload();
    root_positions.upload();
  }
  void download() {
    tokens.download();
    kv.download();
    num_accepted.download();
    output_tokens.download();
  }

 private:
  ddt_context *context_;

 public:
  Array<float> draft, logits, kv;
  Array<int64_t> output_tokens;
  Array<int32_t> tokens, num_accepted, root_tokens;
  Array<int64_t> root_positions;

 private:
  Array<int32_t> query_start_;
  Array<int64_t> row_slots_;
  Array<int32_t> num_nodes_, parents_, first_child_, next_sibling_;
  Array<uint32_t> bits_;
  Array<int32_t> accepted_nodes_;
  ddt_tree tree_{};
  ddt_tree_build_params build_{};
  ddt_tree_accept_params accept_{};
  ddt_kv_layer layer_{};
  ddt_commit_params commit_{};
  void *workspace_ = nullptr;
};

void run() {
  Context cpu(DDT_DEVICE_CPU), gpu(DDT_DEVICE_CUDA);
  Round on_cpu(cpu.handle, false), on_gpu(gpu.handle, true);
  cudaStream_t stream;
  cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  on_gpu.enqueue(stream);
  cuda(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  cuda(cudaGraphInstantiate(&exec, graph, 0));

  std::mt19937 random(1);
  std::normal_distribution<float> noise;
  int accepted = 0;
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; round++) {
    for (float &x : on_cpu.kv.host) x = noise(random);
    for (int r = 0; r < kReqs; r++) {
      on_cpu.root_tokens.host[r] = static_cast<int32_t>(random() % kVocab);
      on_cpu.root_positions.host[r] = static_cast<int64_t>(random() % 100000);
      // the target likes what the drafter likes, whatever the path
      std::vector<float> liked(kVocab);
      for (float &x : liked) x = 3 * noise(random);
      for (int i = 0; i < kHorizon * kVocab; i++) {
        on_cpu.draft.host[r * kHorizon * kVocab + i] = liked[i % kVocab] + noise(random);
      }
      for (int i = 0; i < kNodes * kVocab; i++) {
        on_cpu.logits.host[r * kNodes * kVocab + i] = liked[i % kVocab] + noise(random);
      }
    }
    on_gpu.draft.host = on_cpu.draft.host;
    on_gpu.logits.host = on_cpu.logits.host;
    on_gpu.kv.host = on_cpu.kv.host;
    on_gpu.root_tokens.host = on_cpu.root_tokens.host;
    on_gpu.root_positions.host = on_cpu.root_positions.host;
    on_gpu.upload();

    on_cpu.enqueue(nullptr);
    cuda(cudaGraphLaunch(exec, stream));
    cuda(cudaStreamSynchronize(stream));
    on_gpu.download();
    if (on_gpu.tokens.host != on_cpu.tokens.host || on_gpu.output_tokens.host != on_cpu.output_tokens.host ||
        on_gpu.num_accepted.host != on_cpu.num_accepted.host || on_gpu.kv.host != on_cpu.kv.host) {
      throw std::runtime_error("round " + std::to_string(round) + ": the GPU is not the CPU");
    }
    for (int32_t count : on_cpu.num_accepted.host) accepted += count;
  }
  if (accepted == 0) throw std::runtime_error("no token was accepted");
  std::printf("%s\n%d replays as on the CPU, %.2f tokens accepted a request\n", ddt_build_info(), kRounds,
              static_cast<double>(accepted) / (kRounds * kReqs));
  cuda(cudaGraphExecDestroy(exec));
  cuda(cudaGraphDestroy(graph));
  cuda(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
