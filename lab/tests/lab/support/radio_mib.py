"""A MIB like that of an access point, for pass_persist of net-snmp's snmpd: radios, and virtual access points with an index of radio and number.

Argument: a file with "COLUMN-OID TYPE VALUE" lines, which is read at each request and rewritten when a variable is set.
"""
import os
import sys

PATH = sys.argv[1]


def key(oid):
    return tuple(int(part) for part in oid.strip(".").split("."))


def load():
    with open(PATH, encoding="ascii") as file:
        rows = (line.rstrip("\n").split(" ", 2) for line in file if line.strip())
        return {key(oid): (kind, value) for oid, kind, value in rows}


def store(table):
    with open(PATH + ".new", "w", encoding="ascii") as file:
        for oid in sorted(table):
            file.write(".%s %s %s\n" % (".".join(map(str, oid)), *table[oid]))
    os.rename(PATH + ".new", PATH)


def show(table, oid):
    if oid is None:
        return "NONE"
    kind, value = table[oid]
    return "\n".join([".%s" % ".".join(map(str, oid)), kind, value])


def main():
    while True:
        command = sys.stdin.readline()
        if not command:
            return
        command = command.strip()
        if not command:
            # snmpd ends what it sets with a blank line.
            continue
        if command == "PING":
            answer = "PONG"
        elif command in ("get", "getnext"):
            table, oid = load(), key(sys.stdin.readline())
            if command == "get":
                answer = show(table, oid if oid in table else None)
            else:
                answer = show(table, min((other for other in table if other > oid), default=None))
        elif command == "set":
            table, oid = load(), key(sys.stdin.readline())
            kind, _, value = sys.stdin.readline().strip().partition(" ")
            if oid not in table:
                answer = "not-writable"
            elif table[oid][0] != kind:
                answer = "wrong-type"
            else:
                table[oid] = (kind, value.strip('"'))
                store(table)
                answer = "DONE"
        else:
            answer = "NONE"
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


main()
