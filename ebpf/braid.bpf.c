/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Connection mode in the kernel: every connect and every unconnected datagram of this network namespace gets its link here, on the caller's own
 * socket, and the kernel does the rest. No program runs per TCP packet (except before Linux 6.3, where the two programs that count UDP run for every
 * packet).
 *
 * Fail open: the programs change nothing if the heartbeat is old, the destination is unknown, or anything fails.
 *
 * This file includes the program files, grouped by purpose. They are compiled together, so that they share one object and one set of maps. Headers
 * contain types, maps and functions, but no programs.
 */
#include "connect.bpf.c"
#include "sendmsg.bpf.c"
#include "redirect.bpf.c"
#include "flows.bpf.c"
#include "switch.bpf.c"
#include "rewrite.bpf.c"
#include "late.bpf.c"
#include "move.bpf.c"
#include "depart.bpf.c"
#include "accept.bpf.c"
#include "shape.bpf.c"
#include "count.bpf.c"

char LICENSE[] SEC("license") = "GPL";
