"""``python -m memlean``: see ``--help``."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m memlean", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what is used, and why")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args(arguments)

    from memlean.doctor import report

    return report(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
