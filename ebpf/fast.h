/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The fast path of forwarded flows: the switch rewrites a packet as the kernel would, and sends it at once, past the firewall, connection tracking and
 * routing.
 *
 * The kernel shows how. The daemon enters a flow with the translation that connection tracking has for it. Until both directions are confirmed, and once a
 * second from then on, a packet is left to the kernel. If it leaves as the fast path would have sent it, with the same addresses, device, hop limit, traffic
 * class and mark, that confirms its direction. From it the fast path also takes the Ethernet addresses and the priority. So a flow returns to the kernel
 * within VALID_NS if a firewall begins to drop it, another rule changes its packets, a policy encrypts them, or its translation or route changes. A packet
 * that the kernel must see is left to it: the handshake and the end of a TCP connection, fragments, packets with options, and those too large for the device.
 */
#ifndef BRAID_FAST_H
#define BRAID_FAST_H

#include "packet.h"

/* A small packet is left to the kernel if none was for this long. Others may then overtake it, which costs nothing if it only acknowledges. */
#define CHECK_NS 1000000000ull
#define SMALL 128
/* Any packet is, if none was for this long. */
#define ASK_NS 1500000000ull
/* How long a confirmation holds. */
#define VALID_NS 2500000000ull
/* `tc_index` of a packet between the two devices. */
#define TOOK_FAST_PATH 0xb1d0
/* Explicit congestion notification changes on the way (RFC 3168). */
#define WITHOUT_ECN 0xfc

#define UDP_CHECK_AT 6

/* The flows, by the addresses that their packets have on the LAN. The daemon enters and removes them. */
MAP(fast, BPF_MAP_TYPE_HASH, struct braid_forward_key, struct braid_fast, BRAID_MAX_FAST, BPF_F_NO_PREALLOC);
/* Keys of `fast`, by the addresses that the packets have on the link. */
MAP(fast_back, BPF_MAP_TYPE_HASH, struct braid_forward_key, struct braid_forward_key, BRAID_MAX_FAST, BPF_F_NO_PREALLOC);

/* Whether there are flows in the fast path, and a daemon that minds them. */
BRAID_INLINE _Bool is_fast_path_open(void)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);

	return switches && switches->fast && (__s64)(bpf_ktime_get_coarse_ns() - switches->heartbeat) <= (__s64)BRAID_HEARTBEAT_NS;
}

BRAID_INLINE _Bool is_confirmed(const struct braid_leg *leg, __u64 now)
{
	return leg->confirmed && (__s64)(now - leg->confirmed) < (__s64)VALID_NS;
}

/* Whether the fast path can send packets of this kind: TCP and UDP, whole and without options. */
BRAID_INLINE _Bool is_plain(const struct packet *packet)
{
	_Bool ported = packet->key.protocol == IPPROTO_TCP || packet->key.protocol == IPPROTO_UDP;

	return ported && !packet->fragment && packet->transport == (packet->family == 6 ? IPV6_HEADER : IPV4_HEADER);
}

/* The checksum of an IPv4 header in which these words changed. Any byte order (RFC 1624). */
BRAID_INLINE __u16 changed_check(__u16 check, __u32 old_address, __u32 new_address, __u16 old_word, __u16 new_word)
{
	__u32 sum = (__u16)~check;

	sum += (__u16)~old_address + (__u16)(~old_address >> 16) + (__u16)new_address + (new_address >> 16);
	sum += (__u16)~old_word + new_word;
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Gives the IP header the leg's address, and the packet one hop less. The packet's bytes up to the ports can be written directly. Returns 0 on success. */
BRAID_INLINE int write_headers(struct __sk_buff *skb, const struct packet *packet, const struct braid_leg *leg, _Bool back)
{
	__u8 *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end, *ip = data + ETH_HEADER;
	__u16 port = bpf_htons(leg->port), *word;

	if (packet->family == 6) {
		if (ip + IPV6_HEADER + 4 > end)
			return -1;
		ip[7]--;
		__builtin_memcpy(ip + (back ? IPV6_DESTINATION : IPV6_SOURCE), leg->address, 16);
		word = (__u16 *)(ip + IPV6_HEADER);
	} else {
		__u16 *hops = (__u16 *)(ip + 8), *check = (__u16 *)(ip + 10), fewer;

		if (ip + IPV4_HEADER + 4 > end)
			return -1;
		fewer = bpf_htons(bpf_ntohs(*hops) - 0x100);
		*check = changed_check(*check, packet->key.client[3], leg->address[3], *hops, fewer);
		*hops = fewer;
		*(__u32 *)(ip + (back ? IPV4_DESTINATION : IPV4_SOURCE)) = leg->address[3];
		word = (__u16 *)(ip + IPV4_HEADER);
	}
	word[back] = port;
	__builtin_memcpy(data, leg->hardware, sizeof(leg->hardware));
	return 0;
}

/* Changes the transport's checksum as `write_headers` changes what it covers. Returns 0 on success, 1 if nothing was changed, and else -1. */
static __attribute__((noinline)) int change_checksum(struct __sk_buff *skb, const struct packet *packet, const struct braid_leg *leg)
{
	_Bool tcp = packet->key.protocol == IPPROTO_TCP;
	__u32 at = ETH_HEADER + packet->transport + (tcp ? TCP_CHECK_AT : UDP_CHECK_AT);
	__u32 old_port = bpf_htons(packet->key.client_port), new_port = bpf_htons(leg->port);
	__u64 kind = tcp ? 0 : BPF_F_MARK_MANGLED_0;
	__u16 check = 1;

	if (!tcp && bpf_skb_load_bytes(skb, at, &check, sizeof(check)))
		return 1;
	/* A network card may have supplied the sum of all bytes. No checksum makes up for the port if there is none, nor for the header of IPv6. */
	if (!check) {
		bpf_csum_update(skb, bpf_csum_diff((__be32 *)&old_port, 4, (__be32 *)&new_port, 4, 0));
	} else if (packet->family == 6) {
		if (bpf_l4_csum_replace(skb, at, 0, bpf_csum_diff((__be32 *)packet->key.client, 16, (__be32 *)leg->address, 16, 0), kind | BPF_F_PSEUDO_HDR))
			return 1;
	} else if (bpf_l4_csum_replace(skb, at, packet->key.client[3], leg->address[3], kind | BPF_F_PSEUDO_HDR | 4)) {
		return 1;
	}
	if (packet->family == 6) {
		__u32 old_hops = bpf_htonl(packet->hops), new_hops = bpf_htonl(packet->hops - 1);
		__s64 change = bpf_csum_diff((__be32 *)packet->key.client, 16, (__be32 *)leg->address, 16, 0);

		bpf_csum_update(skb, bpf_csum_diff((__be32 *)&old_hops, 4, (__be32 *)&new_hops, 4, change));
	}
	if (!check || old_port == new_port)
		return 0;
	return bpf_l4_csum_replace(skb, at, old_port, new_port, kind | 2) ? -1 : 0;
}

/* Rewrites a packet of this leg and sends it. */
static __attribute__((noinline)) int send_fast(struct __sk_buff *skb, const struct packet *packet, const struct braid_fast *flow, __u32 back)
{
	const struct braid_leg *leg = &flow->leg[back & 1];
	__u32 mtu = 0;
	int changed;

	if (bpf_check_mtu(skb, leg->to, &mtu, 0, BPF_MTU_CHK_SEGS))
		return TC_NEXT;
	changed = change_checksum(skb, packet, leg);
	if (changed)
		return changed > 0 ? TC_NEXT : TC_DROP;
	if (write_headers(skb, packet, leg, back) &&
	    (bpf_skb_pull_data(skb, ETH_HEADER + packet->transport + 4) || write_headers(skb, packet, leg, back)))
		return TC_DROP;
	skb->mark = leg->mark;
	skb->priority = leg->priority;
	skb->tc_index = TOOK_FAST_PATH;
	count(BRAID_COUNT_FAST);
	/* Programs receive at the virtual interface. */
	return bpf_redirect(leg->to, back && flow->own ? BPF_F_INGRESS : 0);
}

/* Sends a packet the fast way if it may. Else the kernel forwards it. */
static __attribute__((noinline)) int use_fast_path(struct __sk_buff *skb, const struct packet *packet, struct braid_fast *flow, __u32 back)
{
	struct braid_leg *leg = &flow->leg[back & 1];
	__u64 now = bpf_ktime_get_coarse_ns();
	_Bool asks;

	if (packet->key.protocol == IPPROTO_TCP && (packet->flags & (TCP_SYN | TCP_FIN | TCP_RST)))
		flow->over = 1;
	if (flow->over || !is_plain(packet) || skb->ifindex != leg->from)
		return TC_NEXT;
	asks = (__s64)(now - leg->asked) > (__s64)(packet->size <= SMALL ? CHECK_NS : ASK_NS);
	asks |= packet->hops < 2 || packet->hops != leg->hops || ((packet->traffic_class ^ leg->traffic_class) & WITHOUT_ECN);
	if (asks || !is_confirmed(&flow->leg[0], now) || !is_confirmed(&flow->leg[1], now)) {
		leg->asked = now;
		leg->hops = packet->hops;
		leg->traffic_class = packet->traffic_class;
		return TC_NEXT;
	}
	return send_fast(skb, packet, flow, back & 1);
}

/* Compares a packet that the kernel has forwarded, where it reaches the other device, with what the fast path would have sent. */
static __attribute__((noinline)) int confirm(struct __sk_buff *skb, const struct packet *packet, struct braid_fast *flow, __u32 back)
{
	struct braid_leg *leg = &flow->leg[back & 1];
	__u8 head[ETH_HEADER];
	_Bool same;

	if (!is_plain(packet))
		return 0;
	same = leg->asked && packet->hops + 1 == leg->hops && !((packet->traffic_class ^ leg->traffic_class) & WITHOUT_ECN);
	same &= skb->ifindex == leg->to && !skb->vlan_present;
	if (back)
		leg->mark = skb->mark;
	else
		same &= skb->mark == leg->mark;
	if (!same || bpf_skb_load_bytes(skb, 0, head, sizeof(head)) || (head[12] | head[13] << 8) != skb->protocol) {
		leg->confirmed = 0;
		return 0;
	}
	leg->priority = skb->priority;
	__builtin_memcpy(leg->hardware, head, sizeof(leg->hardware));
	__asm__ volatile("" ::: "memory");
	leg->confirmed = bpf_ktime_get_coarse_ns();
	return 0;
}

/* Whether a packet that leaves took the fast path. Only asked once of each packet. */
BRAID_INLINE _Bool took_fast_path(struct __sk_buff *skb)
{
	if (skb->tc_index != TOOK_FAST_PATH)
		return 0;
	skb->tc_index = 0;
	return 1;
}

/* The flow in the fast path to which a packet on a link belongs. */
BRAID_INLINE struct braid_fast *find_on_link(const struct braid_forward_key *key)
{
	const struct braid_forward_key *inner = bpf_map_lookup_elem(&fast_back, key);

	return inner ? bpf_map_lookup_elem(&fast, inner) : NULL;
}

#endif
