"""``python -m memlean demo``: what each way to the same numbers keeps, allocates, gets wrong and costs here."""

import argparse
import json
import time
from pathlib import Path

import torch


def add_parser(commands) -> None:
    """Adds the subcommand to what ``argparse.ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser("demo", help="a before/after study of memory, error and time on this machine")
    parser.add_argument("--quick", action="store_true", help="seconds: fewer rows, random logits, no compiled peer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number to FILE")
    chart = Path("memlean-demo.png")
    parser.add_argument("--chart", type=Path, metavar="FILE", default=chart, help="the picture (default: %(default)s)")
    parser.add_argument("--trainer", choices=["twinkle"], help="instead: a training step of this trainer, patched")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.trainer == "twinkle":
        from memlean.demo import twinkle

        return twinkle.run(options)
    try:
        import matplotlib  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        print(f"the demo needs {error.name}: pip install 'memlean[demo]'")
        return 1
    from memlean import doctor
    from memlean.demo import logits, measure, report

    for path in (options.json, options.chart):  # now, not after minutes of measuring
        if path is not None and not path.absolute().parent.is_dir():
            print(f"no folder {path.parent} to write {path.name} to")
            return 2
    started = time.monotonic()
    print(report.introduction(), flush=True)
    inputs = logits.random(seq=4) if options.quick else logits.real_if_possible(seq=32)
    methods: dict[str, measure.Method] = {
        "row loop": measure.row_loop,
        "compiled": measure.compiled,
        "memlean": measure.memlean,
    }
    notes = list(inputs.notes)
    if options.quick:
        del methods["compiled"]
        notes.append("The compiled peer is left out of a quick run.")
    cases = [
        measure.Case(name, values, inputs.index, dtype, entropy)
        for name, values in inputs.by_name.items()
        for dtype in (torch.bfloat16, torch.float32)
        for entropy in (False, True)
    ]
    repeats = 3 if options.quick else 5
    results = []
    total = len(cases) * measure.steps(methods, repeats)
    with (
        tqdm(total=total, bar_format="{bar:30} {percentage:3.0f} % {elapsed} {desc}") as bar,
        measure.empty_compiler_cache(),
    ):
        for case in cases:
            results += measure.study(case, methods, repeats, bar, notes)

    study = {
        "machine": doctor.collect(),
        "rows": inputs.index.numel(),
        "extrapolated_to_rows": report.ROWS,
        "repeats": repeats,
        "notes": notes,
        "results": results,
    }
    print(report.table(study))
    if options.json:
        options.json.write_text(json.dumps(study, indent=2) + "\n")
        print(f"numbers: {options.json.resolve()}")
    report.chart(study, options.chart)
    print(f"chart:   {options.chart.resolve()}")
    print(f"took     {time.monotonic() - started:.0f} s")
    return 0
