# SPDX-License-Identifier: Apache-2.0
"""How the GPU benchmarks measure and record.

`measure` times operations that take a few microseconds with a cold L2 cache. `record` appends a result to a JSON
lines file. `python timing.py` measures the method itself: what an empty interval and an empty kernel read as, what
the flush does, and the same work as CUPTI sees it.
"""

import argparse
import dataclasses
import functools
import heapq
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch.autograd import DeviceType

# The target that sizes are taken from: 48 gated-delta-net layers, 16 attention layers.
KEY_HEADS, VALUE_HEADS, GDN_HEAD_DIM, CONV_WIDTH = 16, 48, 128, 4
CONV_CHANNELS = 2 * KEY_HEADS * GDN_HEAD_DIM + VALUE_HEADS * GDN_HEAD_DIM
QUERY_HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
VOCAB = 248320
GDN_LAYERS, ATTENTION_LAYERS = 48, 16
# Tokens of a KV block when vLLM pads it to the size of this target's recurrent state.
KV_BLOCK_SIZE = 784
# Bytes and dense bf16 operations per microsecond, by the name that the driver gives the GPU.
DATASHEET = {"NVIDIA H200": (4.8e6, 9.9e8)}
# Depths that the drafter proposes.
HORIZON = 15
# Set by --profile.
_profiling = False


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one case: the median over the replays, and the distance between their 10th and 90th
    percentiles. `launch_us` is what a kernel that does nothing reads as in the same run: the least a launch costs."""

    us: float
    spread: float
    launch_us: float | None = None

    def __str__(self) -> str:
        return f"{self.us:.2f} ±{self.spread / 2:.2f}"


def _flush_buffer() -> torch.Tensor:
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return torch.ones(max(4 * l2_bytes, 1 << 28) >> 14, 4096, device="cuda")


@functools.cache
def _flush() -> Callable[[], None]:
    # Reads rather than writes: after writes the measured operation would also pay for writing back dirty lines,
    # which the layers before it in a model (they stream weights) do not leave behind.
    buffer = _flush_buffer()
    result = torch.empty(buffer.shape[0], device="cuda")

    def flush() -> None:
        torch.amax(buffer, dim=1, out=result)  # one kernel

    return flush


class _Case:
    """A graph of: flush, event, the operation, event. The events are nodes of the graph, so that no launch by the
    host falls between them."""

    def __init__(
        self,
        run: Callable[[], None],
        flush: Callable[[], None],
        stream: torch.cuda.Stream,
        warmup: int,
    ):
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                run()
        stream.synchronize()
        self.start, self.end = (
            torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)
        )
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            flush()
            self.start.record()
            run()
            self.end.record()
        self.samples: list[float] = []

    def median(self) -> float:
        return statistics.median(self.samples)

    def spread(self) -> float:
        if len(self.samples) < 2:
            return 0.0
        tenths = statistics.quantiles(self.samples, n=10)
        return tenths[-1] - tenths[0]


def measure(
    cases: dict[str, Callable[[], None]],
    replays: int = 100,
    warmup: int = 3,
    flush: Callable[[], None] | None = None,
    seed: int = 0,
) -> dict[str, Timing]:
    """Times each case, L2 cold, in microseconds of the GPU.

    A case launches work on the current stream. It is run `warmup` times, captured into a CUDA graph and replayed;
    each round replays all cases once, in random order. Subtracted from each time is what the same pair of events
    reads with nothing between them, in the same rounds. The cost of launching a kernel inside a graph stays in: an
    operation of three kernels pays for it three times. Cases run many times over the same buffers, so one that
    updates its input in place must keep it finite.

    With --profile nothing is timed: each case is launched once, outside of graphs, in an NVTX range of its name, and
    the times returned are NaN.
    """
    if _profiling:
        for name, run in cases.items():
            run()
            torch.cuda.synchronize()
            with torch.cuda.nvtx.range(" ".join(map(str, name)) if isinstance(name, tuple) else name):
                run()
                torch.cuda.synchronize()
        return {name: Timing(math.nan, math.nan) for name in cases}
    stream = torch.cuda.Stream()
    flush = flush or _flush()
    one = torch.ones(1, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    empty = _Case(lambda: None, flush, stream, 0)
    launch = _Case(lambda: one.fill_(1.0), flush, stream, 1)
    captured = {name: _Case(run, flush, stream, warmup) for name, run in cases.items()}
    everything = [empty, launch, *captured.values()]
    rng = random.Random(seed)
    with torch.cuda.stream(stream):
        for _ in range(1000):  # about 0.1 s, in which the clocks rise
            empty.graph.replay()
    discarded = 3
    for replay in range(discarded + replays):
        rng.shuffle(everything)
        with torch.cuda.stream(stream):
            for case in everything:
                case.graph.replay()
        stream.synchronize()
        if replay >= discarded:
            for case in everything:
                case.samples.append(1e3 * case.start.elapsed_time(case.end))
    overhead = empty.median()
    return {
        name: Timing(case.median() - overhead, case.spread(), launch.median() - overhead)
        for name, case in captured.items()
    }


def kernel_times(run: Callable[[], None], replays: int = 20) -> list[tuple[str, float]]:
    """The kernels of one call as CUPTI sees them: (name, median microseconds), L2 cold, gaps between them left out."""
    flush, stream = _flush(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with (
        torch.cuda.stream(stream),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace,
    ):
        for _ in range(3):
            run()
        for _ in range(replays):
            flush()
            run()
        stream.synchronize()
    # Kernels in order of start; calls are told apart by the flush before each.
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    calls: list[list] = []
    for event in events:
        if (
            "reduce_kernel" in event.name
            and "Max" in event.name
            and event.time_range.elapsed_us() > 50
        ):
            calls.append([])
        elif calls:
            calls[-1].append(event)
    length = statistics.mode(len(call) for call in calls)
    calls = [call for call in calls if len(call) == length]
    return [
        (calls[0][i].name, statistics.median(call[i].time_range.elapsed_us() for call in calls))
        for i in range(length)
    ]


@functools.cache
def bandwidth() -> float:
    """Bytes per microsecond of device memory: the best of a large copy (read and written bytes both counted), the same
    by a kernel, and a large read."""
    source = torch.ones(1 << 18, 1024, device="cuda")
    target, rows = torch.empty_like(source), torch.empty(1 << 18, device="cuda")
    cases = {
        "copy": lambda: target.copy_(source),
        "copy by a kernel": lambda: torch.mul(source, 1.5, out=target),
        "read": lambda: torch.amax(source, dim=1, out=rows),
    }
    times = measure(cases, replays=10)
    best = max(
        ((1 if name == "read" else 2) * source.nbytes / time.us, name)
        for name, time in times.items()
    )
    print(f"{best[0] / 1e6:.2f} TB/s by a {best[1]} of 1 GiB", flush=True)
    return best[0]


def floor_us(num_bytes: float, flops: float = 0.0) -> float:
    """The larger of moving the bytes and doing the bf16 arithmetic at the rates of the vendor's datasheet, which no
    version reaches: on an H200 `bandwidth` finds 4.3 of 4.8 TB/s and a large matrix product 0.8 of 0.99 PFLOP/s.
    Where the datasheet is not known here: at the rates just named."""
    bytes_per_us, flops_per_us = DATASHEET.get(torch.cuda.get_device_name(0)) or (
        bandwidth(),
        7.9e8,
    )
    return max(num_bytes / bytes_per_us, flops / flops_per_us)


@functools.cache
def _provenance() -> dict[str, str]:
    def output(*command: str) -> str:
        try:
            return (
                subprocess.run(command, capture_output=True, text=True, check=True)
                .stdout.strip()
                .split("\n")[0]
            )
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    here = os.path.dirname(os.path.abspath(__file__))
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": os.environ.get("DDTREE_COMMIT")
        or output("git", "-C", here, "rev-parse", "--short", "HEAD"),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    }


def record(
    out: str | None,
    *,
    op: str,
    requests: int,
    nodes: int,
    context: int | None,
    dtype: str,
    timing: Timing,
    floor_us: float | None,
    peer: str | None = None,
    peer_timing: Timing | None = None,
    **more: object,
) -> None:
    """Prints a result and appends it to the JSON lines file `out`, if that is not None. Says nothing of results that
    --profile did not time. `nodes` counts the root and is
    per request; `peer` is an exact name with its version; `more` are further keys, such as variant="portable"."""
    if math.isnan(timing.us):
        return
    line = {
        "op": op, "requests": requests, "nodes": nodes, "context": context, "dtype": dtype,
        "us": round(timing.us, 3), "spread": round(timing.spread, 3),
        "launch_us": None if timing.launch_us is None else round(timing.launch_us, 3),
        "floor_us": None if floor_us is None else round(floor_us, 3),
        "peer": peer,
        "peer_us": None if peer_timing is None else round(peer_timing.us, 3),
        "peer_spread": None if peer_timing is None else round(peer_timing.spread, 3),
        **more, **_provenance(),
    }  # fmt: skip
    note = "" if floor_us is None else f"  floor {floor_us:.2f} ({timing.us / floor_us:.2f}x)"
    if peer_timing is not None:
        note += f"  {peer} {peer_timing} ({peer_timing.us / timing.us:.2f}x)"
    where = f"R={requests} N={nodes}" + (f" L={context}" if context else "")
    extra = "".join(f" {key}={value}" for key, value in more.items())
    print(f"{op} {where} {dtype}{extra}: {timing} us{note}", flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def arguments(description: str) -> argparse.Namespace:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", help="JSON lines file to append to")
    parser.add_argument("--quick", action="store_true", help="only the sizes of the goals")
    parser.add_argument(
        "--sweep", action="store_true", help="nodes, requests and context over their ranges"
    )
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument(
        "--profile", action="store_true", help="time nothing; launch each case once, for ncu"
    )
    args = parser.parse_args()
    global _profiling
    _profiling = args.profile
    if _profiling:
        args.out = None
    return args


def drafter_tree(
    num_nodes: int, rng: random.Random, horizon: int = HORIZON
) -> tuple[list[int], list[int]]:
    """Parents and pop ranks, in depth-first preorder with the best child first, of the best tree of a made-up drafter.

    Its most likely token has a probability drawn from 0.5 to 0.85 at each depth, the others share the rest like a
    Zipf law. With 64 nodes such trees are 9 to 14 deep and have about 4 ancestors per node.
    """
    harmonic = sum(1 / rank for rank in range(1, num_nodes + 1))
    scores = []
    for _ in range(horizon):
        first = rng.uniform(0.5, 0.85)
        scores.append(
            [math.log(first)]
            + [math.log((1 - first) / (harmonic * k)) for k in range(1, num_nodes + 1)]
        )
    heap = [(-scores[0][0], 0, 0, 0)]  # cost, parent, depth of the parent, rank
    children: list[list[int]] = [[]]
    while heap and len(children) < num_nodes:
        cost, parent, depth, rank = heapq.heappop(heap)
        node = len(children)
        children.append([])
        children[parent].append(node)
        heapq.heappush(
            heap, (cost + scores[depth][rank] - scores[depth][rank + 1], parent, depth, rank + 1)
        )
        if depth + 1 < horizon:
            heapq.heappush(heap, (cost - scores[depth + 1][0], node, depth + 1, 0))
    parents, ranks, stack = [], [], [(0, -1)]
    while stack:
        node, parent = stack.pop()
        stack += [(child, len(parents)) for child in reversed(children[node])]
        parents.append(parent)
        ranks.append(node)
    return parents, ranks


def chain(num_nodes: int) -> tuple[list[int], list[int]]:
    """Parents and pop ranks of a chain."""
    return [i - 1 for i in range(num_nodes)], list(range(num_nodes))


def tree_fields(
    trees: list[tuple[list[int], list[int]]],
    max_nodes: int | None = None,
    max_depth: int | None = None,
    context: int = 0,
    device: str = "cuda",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """The fields of a `ddt_tree` by name; padding as ddtree.h says. `context` is the position of every root."""
    rng = random.Random(seed)
    depths = [[0] * len(parents) for parents, _ in trees]
    for row, (parents, _) in zip(depths, trees):
        for node, parent in enumerate(parents[1:], 1):
            row[node] = row[parent] + 1
    n = max_nodes or max(len(row) for row in depths)
    d = max(map(max, depths)) if max_depth is None else max_depth
    w = (n + 31) // 32
    shapes = {
        name: (n,)
        for name in ("tokens", "parents", "depths", "first_child", "next_sibling", "pop_ranks")
    }
    shapes["ancestors"] = (n, d + 1)
    fields = {
        name: torch.full((len(trees), *shape), -1, dtype=torch.int32)
        for name, shape in shapes.items()
    }
    fields["subtree_end"] = torch.zeros(len(trees), n, dtype=torch.int32)
    fields["positions"] = torch.zeros(len(trees), n, dtype=torch.int64)
    bits = torch.zeros(len(trees), n, w, dtype=torch.int64)
    for r, (parents, ranks) in enumerate(trees):
        size = len(parents)
        ends, paths = list(range(1, size + 1)), [[0]]
        first_child, next_sibling, last_child = [-1] * size, [-1] * size, [-1] * size
        for node in range(size - 1, 0, -1):
            ends[parents[node]] = max(ends[parents[node]], ends[node])
        for node, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], node])
            if last_child[parent] < 0:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent] = node
        for node, path in enumerate(paths):
            fields["ancestors"][r, node, : len(path)] = torch.tensor(path, dtype=torch.int32)
            for ancestor in path:
                bits[r, node, ancestor // 32] |= 1 << ancestor % 32
        values = {
            "tokens": rng.sample(range(VOCAB), size), "parents": parents, "depths": depths[r], "pop_ranks": ranks,
            "first_child": first_child, "next_sibling": next_sibling, "subtree_end": ends,
            "positions": [context + depth for depth in depths[r]],
        }  # fmt: skip
        for name, row in values.items():
            fields[name][r, :size] = torch.tensor(row)
    fields["ancestor_bits"] = (bits - (bits >> 31 << 32)).to(
        torch.int32
    )  # the same 32 bits, signed
    fields["num_nodes"] = torch.tensor([len(row) for row in depths], dtype=torch.int32)
    fields["flags"] = torch.zeros(len(trees), dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in fields.items()}


def drafter_trees(requests: int, nodes: int, seed: int = 0, **options) -> dict[str, torch.Tensor]:
    """`tree_fields` of trees by `drafter_tree`, all of `nodes` nodes."""
    rng = random.Random(seed)
    return tree_fields([drafter_tree(nodes, rng) for _ in range(requests)], seed=seed, **options)


def _main() -> None:
    """Measures the method."""
    one = torch.ones(1, device="cuda")
    for count in 1, 2, 3:
        result = measure({"": lambda count=count: [one.fill_(1.0) for _ in range(count)]})[""]
        print(f"kernels that set one number: {count}: {result} us")
    bandwidth()
    dirty = _flush_buffer()
    flushes = {
        "no flush": lambda: None,
        "flush by reads": _flush(),
        "flush by writes": lambda: dirty.fill_(1.0),
    }
    for megabytes in (1, 16, 128):
        source = torch.ones(megabytes << 8, 1024, device="cuda")
        rows, target = torch.empty(len(source), device="cuda"), torch.empty_like(source)
        cases = {
            "read": lambda source=source, rows=rows: torch.amax(source, dim=1, out=rows),
            "copy": lambda source=source, target=target: torch.mul(source, 1.5, out=target),
        }
        for name, flush in flushes.items():
            times = measure(cases, replays=50, flush=flush)
            print(f"{megabytes} MiB, {name}: read {times['read']} us, copy {times['copy']} us")
        for name, run in cases.items():
            kernels = kernel_times(run)
            total = sum(us for _, us in kernels)
            print(
                f"{megabytes} MiB, kernel time by CUPTI: {name} {total:.2f} us, {len(kernels)} kernel"
            )


if __name__ == "__main__":
    _main()
