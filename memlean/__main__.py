"""``python -m memlean``: see ``--help``."""

import argparse
import os
import runpy
import sys

import memlean
from memlean import demo, doctor, estimate, selftest


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memlean", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_parser = commands.add_parser(
        "doctor",
        help="what is installed, what is used, and why; which fixes apply",
        description="For bug reports. Exit code: 0 fine, 1 works but slowly, 2 broken.",
    )
    doctor_parser.add_argument("--json", action="store_true", help="machine-readable output")
    doctor_parser.set_defaults(run=lambda options: doctor.report(as_json=options.json))
    selftest_parser = commands.add_parser("selftest", help="whether it computes here what the formulas say, in seconds")
    selftest_parser.set_defaults(run=lambda options: selftest.report())
    run_parser = commands.add_parser("run", help="run a script with trainers patched, in its child processes too")
    run_parser.add_argument("--patch", action="append", metavar="NAME", help="target or fix; default: all installed")
    run_parser.add_argument("--mask", choices=["npu", "auto"], default="npu", help="as in memlean.patch")
    run_parser.add_argument("--strict", action="store_true", help="do not run unless every fix can be applied")
    run_parser.add_argument("script", help="path of the script; put -- before it")
    run_parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    run_parser.set_defaults(run=_run)
    demo.add_parser(commands)
    estimate.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        memlean.patch(*(options.patch or ()), mask=options.mask, strict=options.strict, propagate=True)
    except (memlean.PatchError, ValueError) as error:
        print(f"python -m memlean run: {error}", file=sys.stderr)
        return 2
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))  # what `python script.py` would have put there
    runpy.run_path(options.script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
