# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of what was recorded.

    python plot.py results/h200/kernels.jsonl
    python plot.py results/h200/sampling.jsonl
    python plot.py results/h200/conditional.jsonl
    python plot.py results/h200/text_nano.jsonl

The first writes kernels.md and one <op>.svg per operation beside the data, the others a table and a plot of the same name.
Where a measurement was repeated, the last line of the file counts. Needs matplotlib.
"""

import argparse
import collections
import json
import pathlib

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot, ticker  # noqa: E402

OPS = ("tree_build", "tree_mask", "gdn_verify", "tree_attention", "tree_accept", "commit")
AXES = {"nodes": "nodes per request", "requests": "requests", "context": "context, tokens"}
COLUMNS = ("us", "spread", "launch_us", "floor_us", "peer_us", "peer_spread")
OURS, FLOOR = "#1b5e9b", "#8a8a8a"
OTHERS = ("#c8553d", "#5b8c5a", "#8e6c8a", "#d9a441", "#4f9d9d", "#7a5c3e")
MODES = ("chain", "chain-probabilistic", "match", "coupled", "marginal", "conditional", "spine")
METHODS = ("none", "chain", "ddtree-chain", "ddtree", "ddtree-coupled")
STYLES = ("-", "-.", ":", (0, (1, 1)), (0, (5, 1, 1, 1)))
# Keys of every line; other words (a variant, say) tell measurements of one operation apart.
COMMON = {"op", *AXES, "dtype", *COLUMNS, "peer", "gpu", "driver", "commit", "command"}


def read(path: pathlib.Path) -> list[dict]:
    """The measurements, the last of each kind, in the order of operations and sizes."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    last = {}
    for line in lines:
        line["variant"] = " ".join(
            value
            for key, value in sorted(line.items())
            if key not in COMMON and isinstance(value, str)
        )
        key = (line["op"], line["variant"], line["dtype"], line["peer"])
        last[*key, *(line[axis] for axis in AXES)] = line
    return sorted(
        last.values(),
        key=lambda line: (
            OPS.index(line["op"]),
            line["variant"],
            line["dtype"],
            [line[axis] or 0 for axis in ("context", "requests", "nodes")],
            line["peer"] or "",
        ),
    )


def number(value: float | None) -> str:
    """Microseconds with three significant digits."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(lines: list[dict]) -> str:
    """The measurements of one operation as Markdown."""
    columns = ["variant", "dtype", "requests", "nodes", "context", "us", "floor us", "of floor"]
    columns += ["peer", "peer us", "peer / ours"]
    rows = []
    for line in lines:
        ratio = f"{line['us'] / line['floor_us']:.1f}x" if (line["floor_us"] or 0) > 0.1 else ""
        peer = f"{line['peer_us'] / line['us']:.1f}x" if line["peer_us"] else ""
        spread = f"{number(line['us'])} ± {number(line['spread'] / 2)}"
        peer_spread = number(line["peer_us"])
        if line.get("peer_spread") is not None:
            peer_spread += f" ± {number(line['peer_spread'] / 2)}"
        rows.append(
            [line["variant"], line["dtype"], line["requests"], line["nodes"], line["context"] or ""]
            + [spread, number(line["floor_us"]), ratio, line["peer"] or "", peer_spread, peer]
        )
    used = [i for i in range(len(columns)) if any(row[i] != "" for row in rows)]
    text = [[columns[i] for i in used], ["---"] * len(used)]
    text += [[str(row[i]) for i in used] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in text)


def longest(lines: list[dict], axis: str) -> tuple[dict, list[dict]]:
    """The measurements that differ only along the axis: of all such groups the one with the most points, the smallest
    sizes among equals. Returns what they share and them."""
    fixed = [other for other in AXES if other != axis]
    groups = collections.defaultdict(list)
    for line in lines:
        if line[axis] is not None:
            groups[tuple(line[name] or 0 for name in fixed)].append(line)
    if not groups:
        return {}, []
    best = min(groups, key=lambda key: (-len({line[axis] for line in groups[key]}), key))
    return dict(zip(fixed, best)), groups[best]


def draw(lines: list[dict], path: pathlib.Path) -> bool:
    """Draws how the time of one operation grows along each axis that at least three sizes were measured of, for the
    dtype that was measured most."""
    dtype = collections.Counter(line["dtype"] for line in lines).most_common(1)[0][0]
    lines = [line for line in lines if line["dtype"] == dtype]
    panels = [(axis, *longest(lines, axis)) for axis in AXES]
    panels = [panel for panel in panels if len({line[panel[0]] for line in panel[2]}) >= 3]
    if not panels:
        return False
    figure, plots = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False, layout="constrained"
    )
    variants = sorted({line["variant"] for line in lines})
    peers = sorted({line["peer"] for line in lines if line["peer_us"]})
    # label, key that selects its lines, columns of time and spread, look
    curves = [
        (
            f"ddtree {variant}".strip(),
            ("variant", variant),
            "us",
            "spread",
            {"color": OURS, "linestyle": style},
        )
        for variant, style in zip(variants, STYLES)
    ]
    curves += [
        (peer, ("peer", peer), "peer_us", "peer_spread", {"color": color})
        for peer, color in zip(peers, OTHERS)
    ]
    curves.append(
        ("floor", None, "floor_us", None, {"color": FLOOR, "linestyle": "--", "marker": ""})
    )
    handles = {}
    for plot, (axis, shared, group) in zip(plots[0], panels):
        for label, key, column, spread, look in curves:
            points = {
                line[axis]: line
                for line in group
                if line[column] is not None and (key is None or line[key[0]] == key[1])
            }
            if not points:
                continue
            x = sorted(points)
            y = [points[value][column] for value in x]
            handles[label] = plot.plot(x, y, **{"marker": "o", "markersize": 3.5, **look})[0]
            half = [(points[value].get(spread) or 0) / 2 for value in x]
            low = [max(a - b, a / 2) for a, b in zip(y, half)]
            high = [a + b for a, b in zip(y, half)]
            plot.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        ticks = sorted({line[axis] for line in group})
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set_xticks(
            ticks, [f"{t // 1024}k" if t >= 1024 and t % 1024 == 0 else str(t) for t in ticks]
        )
        plot.xaxis.set_minor_locator(ticker.NullLocator())
        plot.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        plot.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        plot.yaxis.set_minor_formatter(ticker.NullFormatter())
        plot.grid(alpha=0.25, linewidth=0.5)
        for side in ("top", "right"):
            plot.spines[side].set_visible(False)
        words = {"nodes": "{} nodes each", "requests": "{} requests", "context": "context {}"}
        parts = [words[name].format(value) for name, value in shared.items() if value]
        plot.set_title(", ".join(parts).replace("1 requests", "1 request"), fontsize=9)
        plot.set_xlabel(AXES[axis])
    plots[0][0].set_ylabel("microseconds, L2 cold")
    figure.suptitle(f"{lines[0]['op']}, {dtype}, {lines[0]['gpu']}", fontsize=11)
    columns = min(2, len(handles))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        fontsize=8,
        frameon=False,
        ncols=columns,
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def sampling(path: pathlib.Path) -> None:
    """Tokens per round by temperature, of lines of serving/sampling.py or conditional.py."""
    last = {}
    for line in map(json.loads, filter(None, path.read_text().splitlines())):
        filters = [f"top-k {line['top_k']}"] if line.get("top_k") else []
        filters += [f"top-p {line['top_p']}"] if line.get("top_p", 1) < 1 else []
        line["model"] = ", ".join([line["model"], *filters])
        last[line["model"], line["mode"], line["budget"], line["temperature"]] = line
    text = ["# Tokens per round"]
    models = sorted({model for model, *_ in last})
    figure, plots = pyplot.subplots(
        1, len(models), figsize=(5.2 * len(models), 3.8), squeeze=False, layout="constrained"
    )
    for plot, model in zip(plots[0], models):
        lines = [line for line in last.values() if line["model"] == model]
        temperatures = sorted({line["temperature"] for line in lines})
        series = list(dict.fromkeys((line["mode"], line["budget"]) for line in lines))
        series.sort(key=lambda key: (key[1], MODES.index(key[0])))
        budgets = sorted({budget for _, budget in series})
        text += [
            f"## {model}",
            f"Written by `tests/bench/plot.py` from `{path.name}`: {lines[0]['gpu'].replace('none', 'CPU')}, {lines[0]['prompts']} prompts of "
            f"{lines[0]['tokens']} tokens, {lines[0]['batch']} in flight; 95 % intervals by bootstrap over prompts.",
        ]
        rows = [["mode", "budget", *(f"T = {temperature:g}" for temperature in temperatures)]]
        rows.append(["---", "--:", *["--:"] * len(temperatures)])
        for mode, budget in series:
            own = [last.get((model, mode, budget, temperature)) for temperature in temperatures]
            rows.append([mode, str(budget)])
            rows[-1] += [
                f"{line['tokens_per_round']:.2f} ({line['ci95'][0]:.2f} to {line['ci95'][1]:.2f})"
                if line
                else ""
                for line in own
            ]
            points = [line for line in own if line]
            x, y = ([line[key] for line in points] for key in ("temperature", "tokens_per_round"))
            errors = [
                [line["tokens_per_round"] - line["ci95"][0] for line in points],
                [line["ci95"][1] - line["tokens_per_round"] for line in points],
            ]
            plot.errorbar(
                x, y, errors, label=f"{mode}, {budget}", marker="o", markersize=3.5, capsize=2,
                color=(OURS, *OTHERS)[MODES.index(mode)], linestyle=STYLES[budgets.index(budget) % len(STYLES)],
            )  # fmt: skip
        text.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        plot.set_title(model, fontsize=9)
        plot.set_xticks(temperatures)
        plot.set_xlabel("temperature")
        plot.set_ylim(bottom=1)
        plot.grid(alpha=0.25, linewidth=0.5)
        plot.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            plot.spines[side].set_visible(False)
    plots[0][0].set_ylabel("tokens per round")
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)
    text.insert(1, f"![tokens per round]({path.stem}.svg)")
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")


def serving_text(path: pathlib.Path) -> None:
    """Tokens per second of one model by drafted tokens, of lines of serving/text.py."""
    last = {}
    for line in map(json.loads, filter(None, path.read_text().splitlines())):
        last[tuple(line[key] for key in ("temperature", "batch", "method", "budget"))] = line
    text = ["# Tokens per second"]
    lines = list(last.values())
    temperatures, batches = (sorted({line[key] for line in lines}) for key in ("temperature", "batch"))
    methods = [method for method in METHODS if any(line["method"] == method for line in lines)]
    figure, plots = pyplot.subplots(
        len(temperatures), len(batches), figsize=(3.6 * len(batches), 3 * len(temperatures)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    rows = [["T", "batch", "method", "drafted", "tokens/s", "spread", "of none", "tokens/round", "ms/round"]]
    rows.append(["--:", "--:", "---", *["--:"] * 6])
    for i, temperature in enumerate(temperatures):
        for j, batch in enumerate(batches):
            own = [line for line in lines if (line["temperature"], line["batch"]) == (temperature, batch)]
            own.sort(key=lambda line: (METHODS.index(line["method"]), line["budget"]))
            base = next((line["tokens_per_s"] for line in own if line["method"] == "none"), None)
            for line in own:
                gain = f"{line['tokens_per_s'] / base:.2f}x" if base else ""
                rows.append([
                    f"{temperature:g}", str(batch), line["method"], str(line["budget"] or ""),
                    f"{line['tokens_per_s']:.0f}", f"{line['spread']:.0f}", gain,
                    f"{line['tokens_per_round']:.2f}", f"{line['ms_per_round']:.2f}",
                ])  # fmt: skip
            plot = plots[i][j]
            if base:
                plot.axhline(base, color=FLOOR, linestyle="--", linewidth=1, label="none")
            for method, color in zip(methods, (OURS, *OTHERS)):
                points = [line for line in own if line["method"] == method != "none"]
                if points:
                    x, y = ([line[key] for line in points] for key in ("budget", "tokens_per_s"))
                    plot.plot(x, y, label=method, color=color, marker="o", markersize=3.5)
            plot.set_xscale("log", base=2)
            ticks = sorted({line["budget"] for line in lines} - {0})
            plot.set_xticks(ticks, [str(tick) for tick in ticks])
            plot.xaxis.set_minor_locator(ticker.NullLocator())
            plot.set_ylim(bottom=0)
            plot.set_title(f"{batch} in flight, T = {temperature:g}", fontsize=9)
            plot.grid(alpha=0.25, linewidth=0.5)
            for side in ("top", "right"):
                plot.spines[side].set_visible(False)
    plots[0][0].legend(fontsize=8, frameon=False)
    plots[0][0].set_ylabel("tokens per second")
    plots[-1][0].set_xlabel("drafted tokens or nodes")
    figure.suptitle(f"{lines[0]['model']}, {lines[0]['gpu']}", fontsize=11)
    image = path.with_suffix(".svg")
    figure.savefig(image, metadata={"Date": None})
    pyplot.close(figure)
    text += [
        f"![tokens per second]({image.name})",
        f"Written by `tests/bench/plot.py` from `{path.name}`: {lines[0]['model']}, {lines[0]['gpu']}, vLLM {lines[0]['vllm']}. Median of the runs; "
        "spread is from the slowest to the fastest.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
    ]
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=pathlib.Path)
    args = parser.parse_args()
    # the same data give the same file, and text stays text
    matplotlib.rcParams.update({"svg.hashsalt": "ddtree", "svg.fonttype": "none"})
    writers = {"sampling": sampling, "conditional": sampling, "text": serving_text}
    if writer := writers.get(args.data.stem.split("_")[0]):
        writer(args.data)
        return
    lines = read(args.data)
    gpus = sorted({f"{line['gpu']}, driver {line['driver']}" for line in lines})
    text = [
        "# Kernel times",
        f"Written by `tests/bench/plot.py` from `{args.data.name}`: {'; '.join(gpus)}. "
        "Microseconds of the GPU in a CUDA graph with a cold L2; half the distance between the 10th and the 90th "
        "percentile after ±. A peer was timed in the same run.",
    ]
    for op in OPS:
        mine = [line for line in lines if line["op"] == op]
        if not mine:
            continue
        text.append(f"## {op}")
        if draw(mine, args.data.with_name(f"{op}.svg")):
            text.append(f"![cost of {op}]({op}.svg)")
        text.append(table(mine))
    args.data.with_suffix(".md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
