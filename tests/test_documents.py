"""What the documents name exists."""

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.compile(r"`(test_\w+)`")


def test_each_outcome_for_bad_input_names_tests_that_exist():
    text = (HERE.parent / "docs" / "numerics.md").read_text()
    table = text[text.index("## Bad input") : text.index("## Error")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    defined = set(re.findall(r"^def (test_\w+)", "".join(path.read_text() for path in HERE.rglob("test_*.py")), re.M))
    for row in rows:
        names = NAMED.findall(row.rsplit("|", 2)[-2])
        assert names, f"no test named: {row}"
        assert not set(names) - defined, f"no such test: {set(names) - defined}"
