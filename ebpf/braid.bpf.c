/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Connection mode in the kernel: every connect and every unconnected datagram of this network namespace gets its link here, on
 * the caller's own socket, and the kernel does the rest. No program runs per TCP packet (but before Linux 6.3, where the two that count
 * UDP see every packet pass).
 *
 * Fail open: nothing is touched when the heartbeat is old, the destination unknown, or anything at all goes wrong.
 *
 * This file lists the files of programs, grouped by what the programs do. They are compiled together, so they share one object and one set
 * of maps. A header holds types, maps and functions, and no program.
 */
#include "connect.bpf.c"
#include "sendmsg.bpf.c"
#include "redirect.bpf.c"
#include "flows.bpf.c"
#include "move.bpf.c"
#include "count.bpf.c"

char LICENSE[] SEC("license") = "GPL";
