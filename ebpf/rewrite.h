/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Rewriting of packets: an end of the flow gets another address and port, and all checksums follow. Not by direct access: that would copy each packet of this
 * machine in advance.
 */
#ifndef BRAID_REWRITE_H
#define BRAID_REWRITE_H

#include "packet.h"

#define IPV4_CHECK_AT 10
#define UDP_CHECK_AT 6

/* One end of a packet's flow, before and afterwards: addresses as in `struct braid_forward_key`, ports in network order. */
struct change {
	__u32 from[4];
	__u32 to[4];
	__u16 from_port;
	__u16 to_port;
	__u8 network; /* offset of the packet's network header */
	__u8 fewer_hops; /* by how much the hop limit becomes smaller */
	__u8 destination; /* 1: this end is the destination */
	__u8 pad;
};

/* Changes the transport's checksum as the headers will change. Returns 0 on success, 1 if nothing was changed, and else -1. */
static __attribute__((noinline)) int change_checksum(struct __sk_buff *skb, const struct packet *packet, const struct change *change)
{
	_Bool tcp = packet->key.protocol == IPPROTO_TCP;
	__u32 at = change->network + packet->transport + (tcp ? TCP_CHECK_AT : UDP_CHECK_AT);
	__u32 old_port = change->from_port, new_port = change->to_port;
	__u64 kind = tcp ? 0 : BPF_F_MARK_MANGLED_0;
	__u16 check = 1;

	if (!tcp && bpf_skb_load_bytes(skb, at, &check, sizeof(check)))
		return 1;
	/* A network card may have supplied the sum of all bytes. No checksum makes up for the port if there is none, nor for the header of IPv6. */
	if (!check) {
		bpf_csum_update(skb, bpf_csum_diff((__be32 *)&old_port, 4, (__be32 *)&new_port, 4, 0));
	} else if (packet->family == 6) {
		if (bpf_l4_csum_replace(skb, at, 0, bpf_csum_diff((__be32 *)change->from, 16, (__be32 *)change->to, 16, 0), kind | BPF_F_PSEUDO_HDR))
			return 1;
	} else if (bpf_l4_csum_replace(skb, at, change->from[3], change->to[3], kind | BPF_F_PSEUDO_HDR | 4)) {
		return 1;
	}
	if (packet->family == 6) {
		__u32 old_hops = bpf_htonl(packet->hops), new_hops = bpf_htonl(packet->hops - change->fewer_hops);
		__s64 address = bpf_csum_diff((__be32 *)change->from, 16, (__be32 *)change->to, 16, 0);

		bpf_csum_update(skb, bpf_csum_diff((__be32 *)&old_hops, 4, (__be32 *)&new_hops, 4, address));
	}
	if (!check || old_port == new_port)
		return 0;
	return bpf_l4_csum_replace(skb, at, old_port, new_port, kind | 2) ? -1 : 0;
}

/* Writes an end's address and port into the header of IP at `network` and the ports at `ports`. Returns 0 on success. */
static __attribute__((noinline)) int write_end(struct __sk_buff *skb, const struct change *change, __u32 family, __u32 network, __u32 ports)
{
	_Bool destination = change->destination;

	if (family == 6) {
		if (bpf_skb_store_bytes(skb, network + (destination ? IPV6_DESTINATION : IPV6_SOURCE), change->to, 16, 0))
			return -1;
	} else {
		if (bpf_l3_csum_replace(skb, network + IPV4_CHECK_AT, change->from[3], change->to[3], 4) ||
		    bpf_skb_store_bytes(skb, network + (destination ? IPV4_DESTINATION : IPV4_SOURCE), &change->to[3], 4, 0))
			return -1;
	}
	if (change->from_port == change->to_port)
		return 0;
	return bpf_skb_store_bytes(skb, ports + (destination ? 2 : 0), &change->to_port, sizeof(change->to_port), 0);
}

#endif
