"""The pictures of results/selective_log_softmax.csv: time, memory and error.

python benchmarks/plots.py [--quick] [--results FOLDER]
"""

import os

import harness
from harness import SHORT
from matplotlib.figure import Figure
from peers import MEMLEAN

# Colours of Okabe and Ito, which the colour-blind can tell apart; the markers say the same again.
STYLES = {
    MEMLEAN: {"color": "#0072B2", "marker": "o", "linewidth": 3, "markersize": 8, "zorder": 3},
    "twinkle": {"color": "#D55E00", "marker": "s"},
    "TRL": {"color": "#CC79A7", "marker": "D"},
    "verl": {"color": "#999999", "marker": "P"},
    "log_softmax": {"color": "#E69F00", "marker": "^"},
    "cross_entropy": {"color": "#F0E442", "marker": "<", "markeredgecolor": "black"},
    "gather - logsumexp": {"color": "#000000", "marker": "x"},
    "log_softmax compiled": {"color": "#009E73", "marker": "v"},
    "cross_entropy compiled": {"color": "#F0E442", "marker": ">", "markeredgecolor": "black"},
    "gather - logsumexp compiled": {"color": "#56B4E9", "marker": "d"},
}
LIMIT = {"color": "#444444", "linestyle": "--", "linewidth": 1.2}
DTYPES = ("bfloat16", "float32")


def series(rows: list[dict], axis: str, measure: str, dtype: str) -> dict[str, list[tuple[float, float]]]:
    """(place on the axis, value) by peer, for the peers that are at all points of that axis and at the base point."""
    cases = {"base", axis} | ({"one row"} if axis == "rows" else set())
    found: dict[str, list[tuple[float, float]]] = {}
    for row in harness.select(rows, measure=measure, dtype=dtype, entropy=0):
        if row["case"] in cases:
            found.setdefault(row["peer"], []).append((float(row[axis]), float(row["value"])))
    all_places = max(len(values) for values in found.values())
    return {peer: sorted(values) for peer, values in found.items() if len(values) == all_places}


def growth(axes, lines: dict[str, list[tuple[float, float]]], scale: float) -> None:
    for peer, style in STYLES.items():
        if peer in lines:
            places, values = zip(*lines[peer], strict=True)
            axes.plot(places, [value * scale for value in values], label=peer, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(which="major", alpha=0.3)
    places = sorted({place for line in lines.values() for place, _ in line})
    axes.set_xticks(places, [f"{place:,.0f}" for place in places], rotation=35, ha="right", fontsize=9)
    axes.minorticks_off()


def time_figure(rows: list[dict]) -> Figure:
    """Forward + backward, against the vocabulary and against rows."""
    figure, grid = _grid("Time of forward + backward, two threads")
    base = _base(rows)
    for line, dtype in zip(grid, DTYPES, strict=True):
        for axes, axis in zip(line, ("vocab", "rows"), strict=True):
            growth(axes, series(rows, axis, "both", dtype), 1e3)
            probes = series(rows, axis, "probe", dtype)
            read, copy = (dict(probes[name]) for name in ("read probe", "copy probe"))
            places = sorted(read)
            axes.plot(places, [(read[p] + copy[p]) * 1e3 for p in places], label="reading, then copying", **LIMIT)
            axes.set_ylabel(f"{SHORT[dtype]}: time [ms]")
            axes.set_xlabel(_label(axis, base))
    _legend(figure, grid)
    return figure


def memory_figure(rows: list[dict]) -> Figure:
    """What both passes allocate at most, and what forward keeps for backward, against rows."""
    figure, grid = _grid("Memory beside the logits, V = {:,}".format(int(_base(rows)["vocab"])))
    for line, dtype in zip(grid, DTYPES, strict=True):
        peaks = _larger(series(rows, "rows", "peak forward", dtype), series(rows, "rows", "peak backward", dtype))
        growth(line[0], peaks, 2**-20)
        line[0].set_ylabel(f"{SHORT[dtype]}: peak of both passes [MiB]")
        growth(line[1], series(rows, "rows", "retained", dtype), 2**-20)
        line[1].set_ylabel(f"{SHORT[dtype]}: kept for backward [MiB]")
        size = {"bfloat16": 2, "float32": 4}[dtype] * int(_base(rows)["vocab"]) * 2**-20
        places = sorted({place for values in peaks.values() for place, _ in values})
        for axes in line:
            axes.plot(places, [place * size for place in places], label="the logits themselves", **LIMIT)
            axes.set_xlabel("rows")
    _legend(figure, grid)
    return figure


def error_figure(rows: list[dict]) -> Figure:
    """Largest distances from float64 at the base point."""
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    columns = figure.subplots(1, 3, sharey=True)
    peers = list(reversed(STYLES))
    panels = (("value error", "0", "log-probability"), ("value error", "1", "log-probability and entropy"))
    panels += (("gradient error", "0", "gradient of the log-probability"),)
    for axes, (measure, entropy, title) in zip(columns, panels, strict=True):
        for dtype, filled in zip(DTYPES, (True, False), strict=True):
            for place, peer in enumerate(peers):
                where = {"case": "base", "peer": peer, "measure": measure, "dtype": dtype, "entropy": entropy}
                for row in harness.select(rows, **where):
                    color = STYLES[MEMLEAN]["color"] if peer == MEMLEAN else "#D55E00"
                    face = color if filled else "white"
                    axes.scatter(float(row["value"]), place, 90, face, edgecolor=color, linewidth=2, zorder=3)
        axes.set_xscale("log")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("largest error against float64" + (" [nats]" if measure == "value error" else ""))
        axes.grid(alpha=0.3)
    columns[0].set_yticks(range(len(peers)), peers)
    columns[0].get_yticklabels()[-1].set_fontweight("bold")
    for dtype, face in zip(DTYPES, ("#444444", "white"), strict=True):
        columns[0].scatter([], [], 90, face, edgecolor="#444444", linewidth=2, label=SHORT[dtype])
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    base = _base(rows)
    figure.suptitle(f"Error at {base['rows']} rows, V = {int(base['vocab']):,}")
    return figure


def _grid(title: str):
    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(title, fontsize=14)
    return figure, figure.subplots(2, 2)


def _legend(figure: Figure, grid) -> None:
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def _base(rows: list[dict]) -> dict:
    return next(row for row in rows if row["case"] == "base")


def _label(axis: str, base: dict) -> str:
    if axis == "vocab":
        return f"vocabulary, {base['rows']} rows"
    return f"rows, V = {int(base['vocab']):,}"


def _larger(some: dict, others: dict) -> dict:
    page = 4096  # what the kernel counts in; below is noise
    return {
        peer: [(place, max(a, b, page)) for (place, a), (_, b) in zip(some[peer], others[peer], strict=True)]
        for peer in some
    }


def main() -> None:
    parser = harness.parser(__doc__)
    options = parser.parse_args()
    folder = harness.folder_of(options)
    rows = harness.read("selective_log_softmax", folder)
    for name, figure in (("time", time_figure), ("memory", memory_figure), ("error", error_figure)):
        path = folder / f"{name}.png"
        figure(rows).savefig(path, dpi=100)
        print(f"picture: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
