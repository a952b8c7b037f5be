"""Writes README.md's measured numbers from the csv in results/, between their markers.

python benchmarks/readme_table.py [--write]
"""

import argparse
from pathlib import Path

import harness
from harness import SHORT, select, the
from peers import MEMLEAN

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks/readme_table.py: {} begins -->\n", "<!-- benchmarks/readme_table.py: {} ends -->\n"
ROWS = 16_384  # 8 sequences of 2,048 tokens; what is kept grows linearly with rows
TIMES = "\N{MULTIPLICATION SIGN}"
HEADS = {
    "twinkle": "row loop of twinkle 0.5.1",
    "TRL": "TRL 1.16.0",
    "cross_entropy": "`F.cross_entropy`",
    "log_softmax compiled": "`log_softmax` + `gather`, compiled",
    "gather - logsumexp compiled": "`gather - logsumexp`, compiled",
    MEMLEAN: "memlean",
}


def measured() -> str:
    rows = harness.read("selective_log_softmax")
    base = select(rows, case="base")[0]
    scale = ROWS / int(base["rows"])

    def cells(name: str, dtype: str, case: str, measure: str, text) -> str:
        line = [f"{name}, {SHORT[dtype]}"]
        for peer in HEADS:
            where = {"case": case, "peer": peer, "dtype": dtype, "measure": measure}
            plain, entropy = ([text(row) for row in select(rows, entropy=flag, **where)] for flag in (0, 1))
            line.append(" ".join([*plain, *(f"({cell})" for cell in entropy)]))
        return "| " + " | ".join(line) + " |"

    def kept(row: dict) -> str:
        return _bytes(float(row["value"]) * scale)

    def peak(row: dict) -> str:
        return _bytes(max(0.0, float(row["value"])), whole=True)

    def error(row: dict) -> str:
        return f"{float(row['value']):.1e}"

    def nan(row: dict) -> str:
        return f"{float(row['value']):.0f} of {row['rows']}"

    def time(row: dict) -> str:
        if row["peer"] == MEMLEAN:
            return f"{float(row['value']) * 1e3:.1f} ms"
        return f"{float(row['ratio']):.1f} {TIMES}"

    measures = [
        (f"kept for backward at {ROWS:,} rows", "base", "retained", kept),
        ("peak of backward", "base", "peak backward", peak),
        ("largest error of the values", "base", "value error", error),
        ("rows with NaN, if padding is -inf", "base", "NaN rows when masked", nan),
        ("forward", "base", "forward", time),
        ("forward + backward", "base", "both", time),
        ("the same, on pages that are there", "warm heap", "both", time),
    ]
    lines = [f"| V = {int(base['vocab']):,}, with entropy in brackets | " + " | ".join(HEADS.values()) + " |"]
    lines.append("|---" * (1 + len(HEADS)) + "|")
    lines += [cells(name, dtype, *rest) for name, *rest in measures for dtype in ("bfloat16", "float32")]
    return "\n".join(lines) + f"\n\n{_source(base)}, {base['rows']} rows, {base['threads']} threads\n"


def options() -> str:
    rows = harness.read("features")

    def ratios(option: str, measure: str) -> str:
        where = {"peer": option, "measure": measure}
        return " / ".join(f"{the(rows, 'ratio', dtype=dtype, **where):.2f}" for dtype in ("bfloat16", "float32"))

    names = [row["peer"] for row in select(rows, measure="forward", dtype="bfloat16") if row["peer"] != row["baseline"]]
    lines = ["| time over that without it, bf16 / fp32 | forward | forward + backward |", "|---|---|---|"]
    lines += [f"| {name} | {ratios(name, 'forward')} | {ratios(name, 'both')} |" for name in names]
    return "\n".join(lines) + f"\n\n{_source(rows[0])}, {rows[0]['rows']} rows, {rows[0]['threads']} thread\n"


def ranks() -> str:
    rows = select(harness.read("vocab_parallel"), dtype="bfloat16")

    def of(peer: str, measure: str, column: str = "value") -> float:
        return the(rows, column, peer=peer, measure=measure)

    kept, theirs = of(MEMLEAN, "retained"), of("megatron-core", "retained")
    ratio = of("megatron-core", "both", "ratio")
    return (
        f"Two gloo ranks, bf16: {kept:,.0f} bytes kept for {rows[0]['rows']} rows; megatron-core 0.16.1 keeps\n"
        f"{theirs:,.0f} and takes {ratio:.1f} {TIMES} the time of both passes.\n\n{_source(rows[0])}\n"
    )


def _source(row: dict) -> str:
    name = row["script"].removeprefix("bench_")
    return (
        f"`benchmarks/{row['script']}.py`, `benchmarks/results/{name}.csv`, commit {row['commit']}, {row['date']}:\n"
        f"{row['machine']}"
    )


def _bytes(count: float, whole: bool = False) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or (whole and unit == "MiB"):
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


BLOCKS = {"measured": measured, "options": options, "ranks": ranks}


def updated(text: str) -> str:
    """README's text with every block made anew."""
    for name, make in BLOCKS.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = before + begin + make() + end + rest.split(end)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into README.md")
    if parser.parse_args().write:
        README.write_text(updated(README.read_text()))
    else:
        print("\n".join(make() for make in BLOCKS.values()))


if __name__ == "__main__":
    main()
