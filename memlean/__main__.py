"""``python -m memlean``: see ``--help``."""

import argparse
import os
import runpy
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memlean", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what is used, and why; which fixes apply")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    run = commands.add_parser("run", help="run a script with trainers patched, in its child processes too")
    run.add_argument("--patch", action="append", metavar="NAME", help="target or fix; default: all that are installed")
    run.add_argument("--mask", choices=["npu", "auto"], default="npu", help="as in memlean.patch")
    run.add_argument("--strict", action="store_true", help="do not run the script unless every fix can be applied")
    run.add_argument("script", help="path of the script; put -- before it")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    demo = commands.add_parser("demo", help="one training step, before and after")
    demo.add_argument("--trainer", choices=["twinkle"], required=True)
    options = parser.parse_args(arguments)

    if options.command == "doctor":
        from memlean.doctor import report

        return report(as_json=options.json)
    if options.command == "demo":
        from memlean import demo_twinkle

        return demo_twinkle.run(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    import memlean

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
