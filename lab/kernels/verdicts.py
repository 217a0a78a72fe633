"""Compares the verifier's results with a table: verdicts.py TABLE VERDICTS KERNELS COMPILERS. With UPDATE=1 in the environment it writes the table.

VERDICTS has a line of JSON for each kernel, object (named after its compiler) and program, as `braid-lab verifier` prints them. KERNELS and
COMPILERS are the names, separated by spaces, of the tested kernels and compilers. A missing verdict is a failure.
`verdicts.py --self-test` tests this program.
"""

import json
import os
import sys

# A program's limit, out of the million instructions after which the verifier gives up.
LIMIT = 500_000
# Tolerated relative difference from the table. Kernels and compilers named "newest" change from day to day.
TOLERANCE = 0.10
UPDATE = "run `make test-verifier UPDATE=1`"
# Kernels without the tracepoints that count system calls.
WITHOUT_CALLS = ["6.1"]

HEAD = """# Verifier results

Number of instructions that the kernel's verifier processes to accept each BPF program, by kernel and compiler. `make test-verifier` loads each program
separately on each kernel in QEMU and compares with this table. It fails if a program that a kernel must load is refused, needs over 500,000 instructions,
is new or missing, or if a figure differs from the table by more than 10 % (except in the columns with "newest", which change with Debian's archive).
`make test-verifier UPDATE=1` writes the table.

"refused": the kernel has no such tracepoint (before Linux 6.3), and Braid counts datagrams with `braid_egress` and `braid_ingress` instead.

"""


def main(table, verdicts, kernels, compilers):
    with open(verdicts) as lines:
        verdicts = {(v["kernel"], v["object"], v["program"]): v for v in map(json.loads, lines)}
    columns = [(kernel, compiler) for kernel in kernels.split() for compiler in compilers.split()]
    known = read(table)
    # If only some columns are tested, keep the programs of the others.
    partial = not verdicts or {column for column, _ in known} - set(columns)
    programs = sorted({program for _, _, program in verdicts} | ({program for _, program in known} if partial else set()))
    text = render(columns, programs, lambda column, program: cell(verdicts.get((*column, program))))
    print(text)
    faults = [fault for column in columns for program in programs for fault in judge(verdicts.get((*column, program)), column, program)]
    faults += [fault for column in columns for fault in uncounted(verdicts, column)]
    if os.environ.get("UPDATE"):
        if faults:
            print("the table is not written, because a check failed")
        else:
            write(table, known, columns, programs, verdicts)
    else:
        faults += compare(known, verdicts, columns, programs)
    for fault in faults:
        print(f"FAIL {fault}")
    failed = len({fault.split(":")[0] for fault in faults})
    passed = max(len(columns) * len(programs) - failed, 0)
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; programs by kernel and compiler")
    return 1 if failed or not passed else 0


def write(table, known, columns, programs, verdicts):
    """Writes the table; columns that were not tested stay unchanged."""
    kept = list(dict.fromkeys(column for column, _ in known))
    columns = kept + [column for column in columns if column not in kept]
    figure = lambda column, program: cell(verdicts.get((*column, program))) or known.get((column, program), "")
    with open(table, "w") as file:
        file.write(HEAD + render(columns, programs, figure))
    print(f"wrote {table}")


def cell(verdict):
    if verdict is None:
        return ""
    if "refusal" in verdict:
        return "refused"
    return f"{verdict['instructions']:,}" if "instructions" in verdict else "accepted"


def judge(verdict, column, program):
    place = f"{program} on {column[0]} from {column[1]}"
    if verdict is None:
        yield f"{place}: nothing was said of it: the object has no such program, could not be read, or the kernel ended before"
    elif "refusal" in verdict and not (verdict["needed"] == "calls" and column[0] in WITHOUT_CALLS):
        yield f"{place}: the kernel refuses it: {verdict['refusal']}"
    elif verdict.get("instructions", 0) > LIMIT:
        yield f"{place}: {verdict['instructions']:,} instructions, more than {LIMIT:,}"


def uncounted(verdicts, column):
    """A kernel must accept all programs of one method of counting datagrams."""
    refused = {v["needed"] for key, v in verdicts.items() if key[:2] == column and "refusal" in v}
    if {"calls", "packets"} <= refused:
        yield f"datagrams on {column[0]} from {column[1]}: neither way of counting them loads"


def compare(known, verdicts, columns, programs):
    rows = {program for _, program in known}
    for program in programs:
        if program not in rows:
            yield f"{program}: it is not in the table: {UPDATE}"
    for program in sorted(rows - set(programs)):
        yield f"{program}: it is in the table and in no object: {UPDATE}"
    for column in columns:
        for program in programs:
            before, now = known.get((column, program)), cell(verdicts.get((*column, program)))
            if program not in rows or any("newest" in name for name in column):
                continue
            if before is None or not close(before, now):
                yield f"{program} on {column[0]} from {column[1]}: {now}, the table says {before or 'nothing'}: {UPDATE}"


def close(before, now):
    try:
        before, now = (int(text.replace(",", "")) for text in (before, now))
    except ValueError:
        return before == now
    return abs(now - before) <= max(TOLERANCE * before, 10)


def render(columns, programs, content):
    rows = [["program"] + [f"{kernel}, {compiler}" for kernel, compiler in columns], ["---"] + ["---:"] * len(columns)]
    rows += [[program] + [content(column, program) for column in columns] for program in programs]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def read(table):
    """The figures of the table by column and program."""
    try:
        with open(table) as file:
            rows = [[part.strip() for part in line.strip().strip("|").split("|")] for line in file if line.startswith("|")]
    except FileNotFoundError:
        rows = []
    columns = [tuple(name.split(", ")) for name in rows[0][1:]] if rows else []
    return {(column, row[0]): figure for row in rows[2:] for column, figure in zip(columns, row[1:])}


def self_test():
    """Checks that deviations fail and that results equal to the table pass."""
    import contextlib
    import io
    import pathlib
    import tempfile

    os.environ.pop("UPDATE", None)
    folder = tempfile.TemporaryDirectory()
    table, file = pathlib.Path(folder.name) / "table.md", pathlib.Path(folder.name) / "verdicts"
    verdict = lambda kernel, compiler, program, needed="always", **more: {"kernel": kernel, "object": compiler, "program": program, "needed": needed, **more}
    whole = [verdict(k, c, p, instructions=100) for k in ("6.1", "6.12") for c in ("clang-14", "clang-19") for p in ("one", "two")]

    def judged(verdicts, kernels="6.1 6.12"):
        file.write_text("".join(json.dumps(v) + "\n" for v in verdicts))
        with contextlib.redirect_stdout(io.StringIO()):
            return main(table, file, kernels, "clang-14 clang-19")

    os.environ["UPDATE"] = "1"
    assert judged(whole) == 0
    os.environ.pop("UPDATE")
    assert judged(whole) == 0
    assert judged([]) == 1, "nothing at all"
    assert judged([v for v in whole if v["kernel"] != "6.12"]) == 1, "a kernel that said nothing"
    assert judged([v for v in whole if (v["kernel"], v["object"]) != ("6.12", "clang-19")]) == 1, "an object that could not be read"
    assert judged(whole[1:]) == 1, "a program without a verdict"
    assert judged([verdict("6.1", "clang-14", "one", refusal="no"), *whole[1:]]) == 1, "a refusal"
    assert judged([verdict("6.1", "clang-14", "one", instructions=LIMIT + 1), *whole[1:]]) == 1, "too many instructions"
    assert judged([verdict("6.1", "clang-14", "one", instructions=200), *whole[1:]]) == 1, "a figure that changed"
    calls = lambda kernel: [verdict(v["kernel"], v["object"], v["program"], "calls", refusal="no") if v["program"] == "one" and v["kernel"] == kernel else v for v in whole]
    assert judged(calls("6.12")) == 1, "calls that should load"
    os.environ["UPDATE"] = "1"
    assert judged(calls("6.1")) == 0 and judged([v for v in whole if v["kernel"] == "6.12"], "6.12") == 0
    before = table.read_text()
    assert judged([v for v in whole if (v["kernel"], v["program"]) == ("6.12", "one")], "6.12") == 1, "an update that would lose a program"
    assert table.read_text() == before
    os.environ.pop("UPDATE")
    assert judged(calls("6.1")) == 0, "an update of one kernel leaves the other's columns"
    print("test result: ok. 1 passed; 0 failed; verdicts.py")
    return 0


if __name__ == "__main__":
    sys.exit(self_test() if sys.argv[1:] == ["--self-test"] else main(*sys.argv[1:]))
