"""What memlean has to reach, and what the csv in results/ say it reaches.

Beside a ratio to a peer stands what it would be if memlean took no more than the read probe, with backward the read and
the copy probe: a goal above that is out of reach of any code on the machine.

python benchmarks/goals.py [--quick] [--results FOLDER]
"""

import operator

import harness
from harness import SHORT, select, the
from peers import MEMLEAN


def goals(rows: list[dict[str, str]]) -> list[tuple[str, float, str, float]]:
    """(what, measured, relation, goal)."""
    base = {"case": "base", "entropy": 0}
    found = []

    def share(case: str, peer: str, dtype: str, measure: str) -> float:
        return the(rows, "share_of_limit", case=case, entropy=0, peer=peer, dtype=dtype, measure=measure)

    def at_most(ratio: float, dtype: str, measure: str) -> str:
        return f" (at the speed of memory: {ratio / share('base', MEMLEAN, dtype, measure):.2f})"

    def fastest_peer(ending: str, measure: str, dtype: str, **where) -> tuple[str, float]:
        others = [row for row in select(rows, measure=measure, dtype=dtype, **where) if row["peer"].endswith(ending)]
        others = [row for row in others if row["peer"] not in (MEMLEAN, "arithmetic floor")]
        fastest = min(others, key=lambda row: float(row["ratio"]))
        return fastest["peer"], float(fastest["ratio"])

    found.append(("fp32 forward, share of the read probe", share("base", MEMLEAN, "float32", "forward"), ">=", 0.75))
    floor = the(rows, "ratio", peer="arithmetic floor", dtype="bfloat16", measure="forward", **base)
    hertz = the(rows, "value", peer="clock", dtype="bfloat16", measure="probe", **base)
    found.append((f"bf16 forward over 5.5 cycles per 16 logits at {hertz / 1e9:.2f} GHz", 1 / floor, "<=", 1.4))
    for dtype, short in SHORT.items():
        if not select(rows, dtype=dtype, **base):
            continue
        warm = share("warm heap", MEMLEAN, dtype, "backward")
        found.append((f"{short} backward on warm buffers, share of the copy probe", warm, ">=", 0.75))
        for measure, name, goal in (("forward", "forward", 12), ("both", "forward + backward", 10)):
            ratio = the(rows, "ratio", peer="twinkle", dtype=dtype, measure=measure, **base)
            peer = f"twinkle's row loop{at_most(ratio, dtype, measure)}"
            found.append((f"{short} {name}, over {peer}", ratio, ">=", goal))
        for measure, name, goal in (
            ("forward", "forward", {"bfloat16": 4, "float32": 2}[dtype]),
            ("both", "forward + backward", 5),
        ):
            peer, ratio = fastest_peer("compiled", measure, dtype, **base)
            peer += at_most(ratio, dtype, measure)
            found.append((f"{short} {name}, over the fastest compiled peer, {peer}", ratio, ">=", goal))
        for measure in ("scoring", "both"):
            peer, ratio = fastest_peer("", measure, dtype, case="one row")
            found.append((f"{short} one row, {measure}: the fastest peer ({peer}) over memlean", ratio, ">=", 1))
        small = {"case": "small call", "peer": "log_softmax", "dtype": dtype}
        for measure in ("scoring", "both"):
            ratio = the(rows, "ratio", measure=measure, **small)
            found.append((f"{short} call of [4, 20], {measure}: over log_softmax + gather", 1 / ratio, "<=", 3))
    return found


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    rows = harness.read("selective_log_softmax", harness.folder_of(options))
    for what, measured, relation, goal in goals(rows):
        reached = {">=": operator.ge, "<=": operator.le}[relation](measured, goal)
        print(f"{'reached' if reached else 'missed':8} {measured:8.2f} {relation} {goal:<5} {what}")


if __name__ == "__main__":
    main()
