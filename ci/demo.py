# SPDX-License-Identifier: Apache-2.0
"""Serve a model three ways with `vllm serve`, send each the same prompts, and compare.

The ways: no speculation, vLLM's own DFlash chain, and ddtree. Decoding is greedy, so all three must give the same
text. Run it as `ci/run.sh demo`, which prepares everything first.
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "models"
OUT = ROOT / ".build" / "demo"
# A difference from plain decoding is a near tie if the target's own two best tokens there are this close: one step
# of bf16 at the size of these logits, so that which of them is ahead depends on the order of a sum.
NEAR_TIE = 0.125
METHODS = ("none", "dflash", "ddtree")
# A line that is an error, behind the names of process and logger.
ERROR = re.compile(r"(?:\([^)]*\) |\[[^\]]*\]:? |ERROR \S+ \S+ )*((?:\w+\.)*\w*(?:Error|Exception): .+)")
COLOUR = sys.stdout.isatty()


def say(text=""):
    print(text, flush=True)


def bold(text):
    return f"\033[1m{text}\033[0m" if COLOUR else text


def first_error(lines):
    """The cause of a server's end: its processes report each other's ends after it, and warnings before it quote errors."""
    return next((found[1] for line in lines if (found := ERROR.match(line))), None)


def fail(text, log=None):
    print(f"demo: {text}", file=sys.stderr)
    if log is not None and log.exists():
        lines = log.read_text(errors="replace").splitlines()
        print(f"The end of {log.relative_to(ROOT)}:", file=sys.stderr)
        for line in lines[-25:]:
            print(f"    {line}", file=sys.stderr)
        if cause := first_error(lines):
            print(f"The first error in it:\n    {cause}", file=sys.stderr)
    sys.exit(1)


# ---- one server


class Server:
    """`vllm serve` as a child process; killed with all its own children when the context or this program ends."""

    def __init__(self, method, arguments, model, timeout):
        self.log = OUT / f"{method}.log"
        self.model = model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.trace = OUT / f"{method}.trace.jsonl"
        self.trace.unlink(missing_ok=True)
        command = ["vllm", "serve", model, *arguments]
        say(f"\n$ {' '.join(command)}")
        command[:1] = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "DDTREE_TRACE": str(self.trace)},
            )
        atexit.register(self.stop)
        self._wait_until_healthy(timeout)

    def _wait_until_healthy(self, timeout):
        start = time.monotonic()
        while True:
            if self.process.poll() is not None:
                fail(f"the server ended with status {self.process.returncode}", self.log)
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("/health")
                break
            waited = time.monotonic() - start
            if waited > timeout:
                self.stop()
                fail(f"the server was not ready after {timeout} s", self.log)
            if COLOUR:
                print(f"\r  starting, {waited:.0f} s", end="", flush=True)
            time.sleep(0.5)
        if COLOUR:
            print("\r\033[K", end="")
        say(f"  ready after {time.monotonic() - start:.0f} s; log: {self.log.relative_to(ROOT)}")
        if "V2 Model Runner" not in self.log.read_text(errors="replace"):
            fail("the server does not use vLLM's Model Runner V2", self.log)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return response.read().decode()

    def counter(self, name):
        """The sum of a Prometheus counter over its labels; 0 when it is not exported."""
        lines = self.get("/metrics").splitlines()
        values = (line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name}_total{{"))
        return round(sum(map(float, values)))

    def texts(self, tokens):
        """Each token on its own as text."""
        texts = {}
        for token in set(tokens):
            body = json.dumps({"model": "demo", "tokens": [token]}).encode()
            request = urllib.request.Request(
                self.url + "/detokenize", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                texts[token] = json.load(response)["prompt"]
        return texts

    def stop(self):
        if self.process.poll() is None:
            for number, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience)
                    break
        # the server's own children, had it died without ending them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        atexit.unregister(self.stop)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


# ---- the answers


@dataclasses.dataclass
class Answer:
    tokens: list
    # the log probabilities of the two best tokens at each position, where asked for
    top_two: list


def ask(client, prompt, max_tokens, logprobs=None, show=False):
    """Complete one prompt; with `show`, print the text as it comes."""
    stream = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        logprobs=logprobs,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    answer = Answer([], [])
    for event in stream:
        for choice in event.choices:
            answer.tokens += choice.token_ids or []
            if choice.logprobs is not None:
                for best in choice.logprobs.top_logprobs or []:
                    answer.top_two.append(sorted(best.values(), reverse=True)[:2])
            if show:
                print(bold(choice.text), end="", flush=True)
    if not answer.tokens:
        fail("the server gave an empty answer")
    return answer


def run(method, arguments, options, prompts):
    """One server's answers, its counters, and (for ddtree) the tree to draw."""
    from openai import OpenAI

    with Server(method, arguments, options.model, options.timeout) as server:
        client = OpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=options.timeout, max_retries=0
        )
        logprobs = 2 if method == "none" else None
        say("  one answer, as it comes:\n")
        print(prompts[0], end="", flush=True)
        start = time.monotonic()
        answers = [ask(client, prompts[0], options.max_tokens, logprobs, show=True)]
        say(f"\n\n  {len(answers[0].tokens)} tokens in {time.monotonic() - start:.1f} s")
        with concurrent.futures.ThreadPoolExecutor(options.concurrency) as pool:
            others = [
                pool.submit(ask, client, prompt, options.max_tokens, logprobs)
                for prompt in prompts[1:]
            ]
            for done, other in enumerate(others, 2):
                answers.append(other.result())
                if COLOUR:
                    print(f"\r  answered {done} of {len(prompts)} prompts", end="", flush=True)
        say(f"{chr(13) if COLOUR else ''}  answered {len(prompts)} of {len(prompts)} prompts")
        tokens = sum(len(answer.tokens) for answer in answers)
        drafts = server.counter("vllm:spec_decode_num_drafts")
        if method == "none":
            rounds = tokens
        elif drafts == 0:
            fail("the server did not speculate", server.log)
        else:
            # a prompt's own forward pass gives the first token of its answer
            rounds = drafts + len(prompts)
        result = {"tokens": tokens, "rounds": rounds, "tokens_per_round": round(tokens / rounds, 4)}
        tree = draw_tree(server) if method == "ddtree" else None
        return answers, result, tree


def compare(base, other):
    """`("identical", None, None)`, or near tie or different with the position and the target's gap there."""
    for position, (want, got) in enumerate(zip(base.tokens, other.tokens, strict=False)):
        if want != got:
            best, second = base.top_two[position]
            gap = best - second
            return ("near tie" if gap <= NEAR_TIE else "different"), position, gap
    if len(base.tokens) != len(other.tokens):
        return "different", min(len(base.tokens), len(other.tokens)), float("inf")
    return "identical", None, None


# ---- one round's tree


def draw_tree(server, max_lines=40):
    """The round that shows most: a long, varied accepted path, best where it leaves the most likely branch."""
    if not server.trace.exists():
        fail("the server wrote no trace of its trees", server.log)
    rounds = [json.loads(line) for line in server.trace.read_text().splitlines()]
    rounds = [r for r in rounds if len(r["tokens"]) > 1]
    if not rounds:
        fail("the server verified no tree", server.log)

    def interest(r):
        # in depth-first order the most likely branch is rows 1, 2, ...: an accepted row further on is a turn
        turns = any(node != depth for depth, node in enumerate(r["accepted"], 1))
        return turns, len({r["tokens"][node] for node in r["accepted"]})

    chosen = max(rounds, key=interest)
    tokens, parents, accepted = chosen["tokens"], chosen["parents"], set(chosen["accepted"]) | {0}
    texts = server.texts([*tokens, chosen["bonus"]])
    children = [[] for _ in tokens]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)

    lines = []

    def visit(node, lead, is_last):
        label = f"{texts[tokens[node]]!r}"
        elbow = "" if node == 0 else ("└─ " if is_last else "├─ ")
        mark = "* " if node in accepted else "  "
        lines.append((node in accepted, f"  {mark}{lead}{elbow}{label}"))
        below = lead if node == 0 else lead + ("   " if is_last else "│  ")
        for child in children[node]:
            visit(child, below, child == children[node][-1])

    visit(0, "", True)
    text = [
        f"One round's tree: {len(tokens) - 1} drafted tokens in one forward pass, "
        f"{len(chosen['accepted'])} accepted (*), then {texts[chosen['bonus']]!r} from the target itself:"
    ]
    shown = [line for index, line in enumerate(lines) if index < max_lines or line[0]]
    text += [bold(line) if is_accepted else line for is_accepted, line in shown]
    if len(shown) < len(lines):
        text.append(f"    ... and {len(lines) - len(shown)} more rows, none accepted")
    return "\n".join(text)


# ---- the program


def default_model(variable, folder):
    value = os.environ.get(variable)
    if value:
        return value
    if not (MODELS / folder / "config.json").exists():
        fail(f"no model at {MODELS / folder}; set {variable}")
    return str((MODELS / folder).relative_to(ROOT))


def horizon(drafter):
    """Tokens that the drafter can draft: its block less the anchor."""
    config = Path(drafter) / "config.json"
    return json.loads(config.read_text()).get("block_size", 16) - 1 if config.exists() else 15


def parse_arguments():
    parser = argparse.ArgumentParser(
        prog="ci/run.sh demo",
        description=__doc__,
        epilog="MODEL and DRAFTER in the environment select other checkpoints.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to FILE")
    parser.add_argument(
        "--prompts", type=int, default=8, help="how many held-out prompts (default 8)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="per answer (default 64)")
    parser.add_argument(
        "--budget", type=int, default=31, help="nodes of a tree without its root (default 31)"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument(
        "--timeout",
        type=float,
        help="seconds for a server to start, or to answer (default 300, on a GPU 1200)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="serve on the CPU, though there is a GPU"
    )
    parser.add_argument("--gpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--vllm",
        metavar="ARGUMENTS",
        type=shlex.split,
        default=[],
        help="more arguments for every vllm serve, as one string: --vllm='--gpu-memory-utilization 0.5'",
    )
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        default=list(METHODS),
        help=argparse.SUPPRESS,
    )
    options = parser.parse_args()
    for name in ("prompts", "max_tokens", "budget", "concurrency"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    options.timeout = options.timeout or (1200 if options.gpu else 300)
    options.model = default_model("MODEL", "target")
    options.drafter = default_model("DRAFTER", "drafter")
    return options


def main():
    options = parse_arguments()
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    texts = json.loads((MODELS / "prompts.json").read_text())
    if options.prompts > len(texts):
        fail(f"there are {len(texts)} prompts, not {options.prompts}")
    # spread over the list, whose order has no meaning for length or file
    prompts = [
        entry["text"] for entry in texts[:: len(texts) // options.prompts][: options.prompts]
    ]
    # On a GPU vLLM would keep the nano target's states in bf16; trees keep f32, so all three do.
    device = ["--mamba-ssm-cache-dtype", "float32"] if options.gpu else ["--enforce-eager"]
    common = [
        *("--max-model-len", "512", "--max-num-seqs", str(options.concurrency)),
        *device,
        *options.vllm,
    ]
    chain = min(options.budget, horizon(options.drafter))
    dflash = {"method": "dflash", "model": options.drafter, "num_speculative_tokens": chain}
    arguments = {
        "none": common,
        "dflash": [*common, "--speculative-config", json.dumps(dflash)],
        "ddtree": [
            *common,
            *("--speculative-method", "ddtree", "--speculative-model", options.drafter),
            *("--speculative-tree-budget", str(options.budget)),
        ],
    }
    answers, results, tree = {}, {}, None
    for method in options.methods:
        answers[method], results[method], drawn = run(method, arguments[method], options, prompts)
        tree = drawn or tree

    verdicts = {
        m: [compare(*pair) for pair in zip(answers["none"], answers[m], strict=True)]
        for m in answers
    }
    counts = {
        m: {
            v: sum(1 for w in verdicts[m] if w[0] == v)
            for v in ("identical", "near tie", "different")
        }
        for m in verdicts
    }
    names = {
        "none": "no speculation",
        "dflash": f"DFlash chain, k={chain}",
        "ddtree": f"ddtree, budget {options.budget}",
    }
    if tree:
        say(f"\n{tree}")
    say(f"\n{len(prompts)} held-out prompts, at most {options.max_tokens} tokens each, greedy\n")
    say(f"  {'':22} {'tokens':>7} {'rounds':>7} {'tokens/round':>13} {'same text':>10}")
    for method, result in results.items():
        same = "" if method == "none" else f"{counts[method]['identical']}/{len(prompts)}"
        rate = f"{result['tokens_per_round']:.2f}"
        say(f"  {names[method]:22} {result['tokens']:7} {result['rounds']:7} {rate:>13} {same:>10}")
    say("\n  A round is a forward pass of the target that gave tokens, the prompt's own included.")
    for method, found in verdicts.items():
        for prompt, (verdict, position, gap) in enumerate(found):
            if verdict != "identical":
                say(
                    f"  {names[method]}: prompt {prompt + 1}, {verdict} from token {position + 1} (top-2 gap {gap:.4f})"
                )

    last = options.methods[-1]
    if options.json is not None:
        report = {
            "prompts": len(prompts),
            "methods": results,
            "identical": counts[last]["identical"],
            "near_ties": counts[last]["near tie"],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if counts[last]["different"]:
        fail(f"{names[last]} gave other text than the target alone")


if __name__ == "__main__":
    main()
