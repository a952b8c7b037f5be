"""The study as text and as a picture."""

import itertools
import textwrap
from pathlib import Path

import torch

ROWS = 16_384  # 8 sequences of 2,048 tokens
SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def introduction() -> str:
    return (
        "Log-probability of the next token, and entropy, "
        f"with torch {torch.__version__} on {torch.get_num_threads()} threads:\n"
        "  row loop  what trainers call: for each sequence, log_softmax + gather in bf16, gather - logsumexp in fp32\n"
        "  compiled  torch.compile of gather - logsumexp in float32\n"
        "  memlean   selective_log_softmax"
    )


def format_bytes(count: float) -> str:
    """In the largest binary unit that leaves a whole number before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _at_rows(study: dict, result: dict) -> float:
    return result["retained_bytes"] * ROWS / study["rows"]


def _mebibytes(count: int | None) -> str:
    return "n/a" if count is None else f"{max(count, 0) / 2**20:.1f}"


def _cells(study: dict, result: dict) -> list[str]:
    return [
        result["method"],
        format_bytes(_at_rows(study, result)),
        "yes" if result["keeps_logits"] else "no",
        str(result["save_calls"]),
        _mebibytes(result["peak_forward_bytes"]),
        _mebibytes(result["peak_backward_bytes"]),
        f"{result['value_error']:.1e}",
        f"{result['gradient_error']:.1e}",
        str(result["nan_rows_when_masked"]),
        f"{result['forward_speedup']:.1f} x",
        f"{result['forward_backward_speedup']:.1f} x",
        "" if result["compile_s"] is None else f"{result['compile_s']:.0f} s",
    ]


def table(study: dict) -> str:
    """Aligned plain text: one group of lines for each logits, dtype and entropy; notes on how it was measured."""
    head = [
        ("", "retained at", f"{ROWS:,} rows"),
        ("", "keeps", "logits"),
        ("", "save", "calls"),
        ("peak", "forward", "MiB"),
        ("peak", "backward", "MiB"),
        ("max", "error", "value"),
        ("max", "error", "gradient"),
        ("NaN", "rows if", "masked"),
        ("", "speed", "forward"),
        ("speed", "forward +", "backward"),
        ("", "time to", "compile"),
    ]
    lines: list[str | list[str]] = []
    for title, results in itertools.groupby(study["results"], _title):
        lines.append(title)
        lines += [_cells(study, result) for result in results]
    header = [["", *(column[i] for column in head)] for i in range(3)]
    cells = header + [line for line in lines if isinstance(line, list)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head) + 1)]
    text = [""]
    for line in header + lines:
        if isinstance(line, str):
            text += ["", line]
        else:
            first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            text.append("  ".join(["  " + first.strip().ljust(widths[0]), *rest]).rstrip())
    return "\n".join([*text, "", _legend(study)])


def _legend(study: dict) -> str:
    legend = f"""\
        Measured at {study["rows"]} rows.
        Retained: by autograd until backward (saved_tensors_hooks, by storage), extrapolated linearly to {ROWS:,} rows;
        without the caller's logits and index. Keeps logits: whether they have to live until backward, too.
        Peak: resident high-water mark (VmHWM in /proc/self/status) above the logits; backward: with what forward left.
        Error: largest absolute difference from float64; value: of log-probability and entropy.
        NaN rows: with the end of the vocabulary masked with -inf, as padding is.
        Speed: times as fast as the row loop, median over {study["repeats"]} pairs measured in turn."""
    return "\n".join([textwrap.dedent(legend), *study["notes"]])


def _title(result: dict) -> str:
    entropy = "with entropy" if result["entropy"] else "no entropy"
    return f"{result['source']}, V = {result['vocab']:,}, {SHORT[result['dtype']]}, {entropy}"


def chart(study: dict, path: Path) -> None:
    """Three panels for each vocabulary: retained memory, error, speed."""
    from matplotlib.figure import Figure

    def retained(result: dict) -> float:
        return _at_rows(study, result) / 2**30

    def error(result: dict) -> float:
        return result["value_error"]

    def speed(result: dict) -> float:
        return result["forward_backward_speedup"]

    panels = [
        (f"Kept for backward at {ROWS:,} rows [GiB]", retained, lambda gib: format_bytes(gib * 2**30), "linear"),
        ("Largest error against float64 [nats]", error, "{:.1e}".format, "log"),
        ("Forward + backward, times as fast as the row loop", speed, "{:.1f} x".format, "linear"),
    ]
    vocabs = sorted({r["vocab"] for r in study["results"]})
    figure = Figure(figsize=(15, 4.6 * len(vocabs)), layout="constrained")
    grid = figure.subplots(len(vocabs), len(panels), squeeze=False)
    for vocab, line in zip(vocabs, grid, strict=True):
        results = [r for r in study["results"] if r["vocab"] == vocab]
        widened = results[0]["source"].partition(", ")[2]
        line[0].set_ylabel(f"V = {vocab:,} {widened}".rstrip(), fontsize=13)
        for axes, panel in zip(line, panels, strict=True):
            _bars(axes, results, *panel)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    sources = "; ".join(dict.fromkeys(r["source"].partition(", ")[0] for r in study["results"]))
    figure.suptitle(f"Per-token log-probability and entropy from logits: {sources}", fontsize=15)
    figure.savefig(path, format="png", dpi=110)


def _bars(axes, results: list[dict], title: str, value, label, scale: str) -> None:
    colors = {"row loop": "#8c8c8c", "compiled": "#e0a030", "memlean": "#1f77b4"}
    groups = list(dict.fromkeys((r["dtype"], r["entropy"]) for r in results))
    methods = [name for name in colors if any(r["method"] == name for r in results)]
    height = 0.8 / len(methods)
    for offset, method in enumerate(methods):
        mine = [r for r in results if r["method"] == method]
        places = [groups.index((r["dtype"], r["entropy"])) + (offset + 0.5) * height - 0.4 for r in mine]
        bars = axes.barh(places, [value(r) for r in mine], height * 0.92, color=colors[method], label=method)
        axes.bar_label(bars, [label(value(r)) for r in mine], padding=3, fontsize=9)
    names = [f"{SHORT[dtype]}{chr(10) + '+ entropy' if entropy else ''}" for dtype, entropy in groups]
    axes.set_yticks(range(len(groups)), names)
    axes.invert_yaxis()
    axes.set_xscale(scale)
    axes.margins(x=0.2)  # room for the numbers
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
