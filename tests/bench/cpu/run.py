# SPDX-License-Identifier: Apache-2.0
"""What calls of libddtree cost on a CPU.

    python tests/bench/cpu/run.py

times every function on tiny inputs (calls.c) and tree_build beside trees by a heap in C++ (tree_build.cpp) and in
Python (python_heap.py), which must be the same trees, and counts instructions with callgrind if there is a valgrind.
Writes calls.jsonl, tree_build.jsonl and cost.md. Needs a C and a C++ compiler and NumPy.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time

import numpy
import python_heap

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DEPTHS = 15
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{ROOT / 'include'}")
IMPLEMENTATIONS = ("ddtree", "C++ priority_queue", "NumPy + heapq", "Python heapq")


def run(*command) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout


def first_line(*command) -> str | None:
    """Of a tool's --version; None without the tool."""
    return run(*command).splitlines()[0] if shutil.which(command[0]) else None


def build(folder: pathlib.Path, library: pathlib.Path) -> None:
    """The programs calls and tree_build, and tree_build.so, linked to the library."""
    # programs ask the loader for the soname
    (folder / "libddtree.so.1").symlink_to(library.resolve())
    link = (library, f"-Wl,-rpath,{folder}")
    cc, cxx = os.environ.get("CC", "gcc"), os.environ.get("CXX", "g++")
    c = (cc, "-std=c11", "-D_POSIX_C_SOURCE=199309L", "-O2")
    run(*c, *STRICT, HERE / "calls.c", *link, "-o", folder / "calls")
    # the library looks for AVX2 and FMA and uses them
    newer = ("-march=x86-64-v3",) if platform.machine() == "x86_64" else ()
    made = folder / "tree_build.o"
    run(cxx, "-std=c++17", "-O3", *newer, *STRICT, "-fPIC", "-c", HERE / "tree_build.cpp", "-o", made)
    run(cxx, made, *link, "-o", folder / "tree_build")
    run(cxx, "-shared", made, *link, "-o", folder / "tree_build.so")


def instructions(counts: tuple[int, int], command) -> int | None:
    """Per call, from two runs that differ in how many they make, which `command` puts into a command line."""
    if shutil.which("valgrind") is None:
        return None
    # callgrind counts "rep stos" once per byte: without it, memset and memcpy are loops of vectors
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-ERMS"}
    totals = []
    for count in counts:
        result = subprocess.run(
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *map(str, command(count))],
            check=True,
            capture_output=True,
            text=True,
            env=env,
        )
        totals.append(int(re.search(r"Collected : (\d+)", result.stderr)[1]))
    return round((totals[1] - totals[0]) / (counts[1] - counts[0]))


def calls(folder: pathlib.Path, repetitions: int, microseconds: int, counted: int | None) -> list[dict]:
    """A line for each case of calls.c; instructions of the first `counted`."""
    *rows, info = run(folder / "calls", repetitions, microseconds).splitlines()
    lines = []
    for row in rows:
        op, case, *times = row.split("\t")
        median, least, spread = map(float, times)
        count = None
        if counted is None or len(lines) < counted:
            count = instructions(
                (100, 1100), lambda n, op=op, case=case: (folder / "calls", "--count", n, op, case)
            )
        lines.append({"op": op, "case": case, "ns": median, "least_ns": least, "spread": spread,
                      "repetitions": repetitions, "instructions": count, "library": info})  # fmt: skip
    return lines


def paths(tokens, parents) -> set[tuple[int, ...]]:
    """The prefixes that a tree is made of: what two trees must share, in whatever order their nodes are."""
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:]):
        found.append((*found[parent], token))
    return set(found)


def trees(folder: pathlib.Path, vocab: int, budget: int, repetitions: int, counted: bool) -> list[dict]:
    """A line for each implementation, timed in turns on the same logits."""
    native = ctypes.CDLL(folder / "tree_build.so")
    native.bench_build_info.restype = ctypes.c_char_p
    logits = numpy.empty((DEPTHS, vocab), numpy.float32)
    data = ctypes.c_void_p(logits.ctypes.data)
    native.bench_fill(data, ctypes.c_long(logits.size))
    rows = logits.tolist()
    tokens, parents = ((ctypes.c_int32 * (budget + 1))() for _ in range(2))
    ns = ctypes.c_double()

    def native_tree(is_library, count=1):
        sizes = (DEPTHS, vocab, budget, ctypes.c_long(count))
        nodes = native.bench_build(is_library, data, *sizes, tokens, parents, ctypes.byref(ns))
        assert nodes == budget + 1
        return ns.value

    def python_tree(build, argument):
        start = time.perf_counter_ns()
        build(argument, budget)
        return time.perf_counter_ns() - start

    want = paths(*python_heap.plain(rows, budget))
    assert len(want) == budget + 1 and paths(*python_heap.with_numpy(logits, budget)) == want
    counts = []
    for is_library in (1, 0):
        native_tree(is_library)
        assert paths(tokens, parents) == want
        # enough for a fifth of a millisecond
        counts.append(max(1, round(2e5 / native_tree(is_library))))
    timers = (
        lambda: native_tree(1, counts[0]),
        lambda: native_tree(0, counts[1]),
        lambda: python_tree(python_heap.with_numpy, logits),
        lambda: python_tree(python_heap.plain, rows),
    )
    times = [[] for _ in timers]
    for repetition in range(repetitions):
        for timer, own in zip(timers, times):
            # plain Python takes about a second for a large vocabulary
            if timer is timers[-1] and vocab > 10000 and repetition >= 5:
                continue
            own.append(timer() / 1e3)
    lines = []
    for i, (name, own) in enumerate(zip(IMPLEMENTATIONS, times)):
        count = None
        if counted and i < 2:
            who = ("library", "heap")[i]
            count = instructions(
                (1, 3), lambda n, who=who: (folder / "tree_build", who, DEPTHS, vocab, budget, n)
            )
        own.sort()
        lines.append({"op": "ddt_tree_build", "implementation": name, "depths": DEPTHS, "vocab": vocab, "budget": budget,
                      "deepest": max(map(len, want)), "us": round(statistics.median(own), 2), "least_us": round(own[0], 2),
                      "spread": round(own[len(own) * 9 // 10] - own[len(own) // 10], 2), "repetitions": len(own),
                      "instructions": count, "library": native.bench_build_info().decode()})  # fmt: skip
    return lines


def machine() -> dict:
    """What every line says of where it was measured."""
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return {
        "cpu": f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, shared with other processes",
        "tools": "; ".join(
            filter(None, (first_line("rustc", "-V"), first_line(os.environ.get("CXX", "g++"), "--version"),
                          first_line("valgrind", "--version"), f"Python {platform.python_version()}, NumPy {numpy.__version__}"))
        ),
        "commit": os.environ.get("DDTREE_COMMIT") or run("git", "-C", ROOT, "rev-parse", "--short", "HEAD").strip(),
        "command": "python tests/bench/cpu/run.py",
    }  # fmt: skip


def table(rows: list[list[str]], words: set[str]) -> str:
    """The first row is the head; columns other than `words` are numbers."""
    head, *rest = rows
    align = ["---" if name in words else "--:" for name in head]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, align, *rest))


def number(value: float | None, decimals: int = 0) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def markdown(call_lines: list[dict], tree_lines: list[dict]) -> str:
    first = call_lines[0]
    ops = [["function", "case", "ns", "least", "spread", "instructions"]]
    for line in call_lines:
        times = [number(line[key], 0 if line["ns"] >= 100 else 1) for key in ("ns", "least_ns", "spread")]
        ops.append([f"`{line['op']}`", line["case"], *times, number(line["instructions"])])
    sizes = [["vocabulary", "budget", "depth reached", "implementation", "us", "least", "spread", "least, of ddtree's", "instructions"]]
    for line in tree_lines:
        own = next(
            other["least_us"]
            for other in tree_lines
            if other["implementation"] == IMPLEMENTATIONS[0]
            and all(other[key] == line[key] for key in ("vocab", "budget"))
        )
        sizes.append([*(str(line[key]) for key in ("vocab", "budget", "deepest", "implementation")),
                      *(number(line[key], 0 if line["us"] >= 1000 else 1) for key in ("us", "least_us", "spread")),
                      f"{line['least_us'] / own:.1f}x", number(line["instructions"])])  # fmt: skip
    return "\n\n".join([
        "# Cost of calls on a CPU",
        f"Written by `{first['command']}` from `calls.jsonl` and `tree_build.jsonl`: {first['cpu']}. "
        "The cores were shared, so the least time and the instructions (callgrind) are what repeats; "
        "spread is the distance from the 10th to the 90th percentile.",
        "## Every function, tiny inputs",
        table(ops, {"function", "case"}),
        "## tree_build beside heaps",
        f"{DEPTHS} depths, one request, f32 logits that the caches may hold. All build the same trees.",
        table(sizes, {"implementation"}),
    ]) + "\n"  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="seconds: shows that it works, measures nothing")
    parser.add_argument("--library", type=pathlib.Path, help="libddtree.so; default $DDTREE_LIBRARY or target/release")
    parser.add_argument("--out", type=pathlib.Path, default=HERE.parent / "results" / "cpu", help="folder")
    args = parser.parse_args()
    library = args.library or pathlib.Path(
        os.environ.get("DDTREE_LIBRARY", ROOT / "target" / "release" / "libddtree.so")
    )
    sizes = [(1000, 15)] if args.quick else [(v, b) for v in (1000, 248320) for b in (15, 63, 255)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        build(folder, library)
        where = machine()
        call_lines = calls(folder, 3, 5, 1) if args.quick else calls(folder, 500, 200, None)
        tree_lines = []
        for vocab, budget in sizes:
            tree_lines += trees(folder, vocab, budget, 3 if args.quick else 100, not args.quick)
    for file, lines in (("calls", call_lines), ("tree_build", tree_lines)):
        for line in lines:
            line.update(where)
        (args.out / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (args.out / "cost.md").write_text(markdown(call_lines, tree_lines))


if __name__ == "__main__":
    main()
