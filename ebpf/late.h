/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Late binding (Yap's thesis, 2.4): packets that are about to leave over a link go to a device of the daemon instead, which keeps them in a queue for each flow
 * (`decide::late`) and sends them over a link when it can take one. They come through the link's egress a second time then, with a mark.
 */
#ifndef BRAID_LATE_H
#define BRAID_LATE_H

#include "rewrite.h"

/* Sources of neighbour and router discovery, which decides about links itself (RFC 4861). */
#define ROUTER_SOLICITATION 133
#define REDIRECT 137

/* Where the packets go. The daemon's thread that sends them keeps the heartbeat: a thread that hangs delays nothing for longer than BRAID_LATE_NS. */
MAP(late, BPF_MAP_TYPE_ARRAY, __u32, struct braid_late, 1, 0);

/* The hardware addresses of the links whose packets wait, by index. A frame with another source is that of a guest or of a virtual router, and does not wait. */
struct hardware {
	__u8 address[6];
	__u8 pad[2];
};
MAP(late_links, BPF_MAP_TYPE_HASH, __u32, struct hardware, 64, 0);

/* Whether the packet has waited already: the daemon sends it now. */
BRAID_INLINE _Bool has_waited(const struct __sk_buff *skb)
{
	return (skb->mark & BRAID_MOVE_MASK) == BRAID_MARK_BASE && (skb->mark & BRAID_LATE_MARK) == BRAID_LATE_MARK;
}

/*
 * Sends the packet, which has an Ethernet header, to the daemon's queue. Its source address tells the daemon whence it comes: the index of a link, or 0 for a
 * moved flow. The daemon restores it. Returns the verdict; TC_NEXT: it does not wait.
 */
static __attribute__((noinline)) int wait_for_link(struct __sk_buff *skb, __u32 link)
{
	__u32 zero = 0;
	struct braid_late *open = bpf_map_lookup_elem(&late, &zero);
	__u8 source[6] = { 0x02, 0x62, link >> 24, link >> 16, link >> 8, link };

	if (!open || !open->device || has_waited(skb) || (__s64)(bpf_ktime_get_coarse_ns() - open->heartbeat) > (__s64)BRAID_LATE_NS)
		return TC_NEXT;
	if (bpf_skb_store_bytes(skb, 6, source, sizeof(source), 0))
		return TC_NEXT;
	return bpf_redirect(open->device, 0);
}

#endif
