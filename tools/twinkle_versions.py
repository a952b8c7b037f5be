"""The verdict per fix for released versions of twinkle-kit, as the Markdown table of docs/integrations.md.

    python tools/twinkle_versions.py           # prints the table
    python tools/twinkle_versions.py --write   # and puts it into docs/integrations.md

Downloads each wheel without its dependencies, unpacks it and reads the files. Nothing of it is imported or installed.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from memlean.integrations import _patch
from memlean.integrations.twinkle import TARGET

VERSIONS = ("0.2.0", "0.2.1", "0.3.0", "0.4.0", "0.5.0", "0.5.1")
DOCUMENT = Path(__file__).parent.parent / "docs/integrations.md"
BEGIN, END = "<!-- tools/twinkle_versions.py begins -->\n", "<!-- tools/twinkle_versions.py ends -->\n"


def verdicts(version: str, folder: Path) -> list[_patch.Verdict]:
    """One for each fix, read from the files of the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
    subprocess.run([*pip, f"{TARGET.distribution}=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    source = _patch.Source(folder / TARGET.name)
    return [_patch.verdict(TARGET, fix, source) for fix in TARGET.fixes]


def table() -> str:
    rows = ["| twinkle-kit | " + " | ".join(f"`{fix.name}`" for fix in TARGET.fixes) + " |"]
    rows.append("|---" * (1 + len(TARGET.fixes)) + "|")
    notes = []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            cells = []
            for found in verdicts(version, Path(folder)):
                cell = found.status
                if found.status != "applies":
                    if found.evidence not in notes:
                        notes.append(found.evidence)
                    cell += f" [{notes.index(found.evidence) + 1}]"
                cells.append(cell)
        rows.append(f"| {version} | " + " | ".join(cells) + " |")
    rows += ["", *(f"[{number}] {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/integrations.md")
    options = parser.parse_args()
    made = table()
    print(made, end="")
    if options.write:
        before, rest = DOCUMENT.read_text().split(BEGIN)
        DOCUMENT.write_text(before + BEGIN + made + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
