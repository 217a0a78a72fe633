/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The fast path of forwarded flows: the switch rewrites a packet as the kernel would, and sends it at once, past the firewall, connection tracking and
 * routing.
 *
 * The kernel shows how. The daemon enters a flow with the translation that connection tracking has for it. Until both directions are confirmed, and once a
 * second from then on, a packet is left to the kernel: a sample. If it leaves as the fast path would have sent it, with the same addresses, device, hop
 * limit, traffic class and mark, that confirms its direction. From it the fast path also takes the Ethernet addresses and the priority. So a flow returns to
 * the kernel within BRAID_CONFIRMED_NS if a firewall begins to drop its samples, another rule changes them, a policy encrypts them, or its translation or
 * route changes. A packet that the kernel must see is left to it: the handshake and the end of a TCP connection, fragments, packets with options, and those
 * too large for the device.
 */
#ifndef BRAID_FAST_H
#define BRAID_FAST_H

#include "rewrite.h"

/* Samples are small packets, since others may overtake them: that costs nothing if they only acknowledge. A small packet is sampled this long after the last
 * sample, */
#define SAMPLE_SMALL_NS 1000000000ull
#define SMALL 128
/* and any packet this long after it, or, in one of eight seconds, as soon as a small one: a rule may distinguish them. */
#define SAMPLE_ANY_NS 1500000000ull
#define TURN_SHIFT 30
#define TURN_MASK 7
/* `tc_index` of a packet that took the fast path, between the two devices. A sample has the flow's tag. */
#define TOOK_FAST_PATH 0xb1d0
/* The bits of the traffic class that routers on the way do not change: those without ECN (RFC 3168). */
#define WITHOUT_ECN 0xfc

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
	return leg->confirmed && (__s64)(now - leg->confirmed) < (__s64)BRAID_CONFIRMED_NS;
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

/* Gives the headers the leg's addresses and port, and the packet one hop less. Returns 0 on success. Not by direct access: that would copy each packet of
 * this machine in advance. */
static __attribute__((noinline)) int write_headers(struct __sk_buff *skb, const struct packet *packet, const struct braid_leg *leg, _Bool back)
{
	__u16 port = bpf_htons(leg->port);
	__u8 ip[IPV6_HEADER];

	if (packet->family == 6) {
		__u32 at = back ? IPV6_DESTINATION : IPV6_SOURCE;

		ip[0] = packet->hops - 1;
		if (bpf_skb_store_bytes(skb, ETH_HEADER + IPV6_HOPS, ip, 1, 0) || bpf_skb_store_bytes(skb, ETH_HEADER + at, leg->address, 16, 0))
			return -1;
	} else {
		__u16 *word = (__u16 *)ip, fewer;

		if (bpf_skb_load_bytes(skb, ETH_HEADER, ip, IPV4_HEADER))
			return -1;
		fewer = bpf_htons(bpf_ntohs(word[4]) - 0x100);
		word[5] = changed_check(word[5], packet->key.client[3], leg->address[3], word[4], fewer);
		word[4] = fewer;
		__builtin_memcpy(ip + (back ? IPV4_DESTINATION : IPV4_SOURCE), &leg->address[3], 4);
		if (bpf_skb_store_bytes(skb, ETH_HEADER + 8, ip + 8, IPV4_HEADER - 8, 0))
			return -1;
	}
	if (bpf_skb_store_bytes(skb, ETH_HEADER + packet->transport + (back ? 2 : 0), &port, sizeof(port), 0))
		return -1;
	return bpf_skb_store_bytes(skb, 0, leg->hardware, sizeof(leg->hardware), 0);
}

/* Rewrites a packet of this leg and sends it. */
static __attribute__((noinline)) int send_fast(struct __sk_buff *skb, const struct packet *packet, const struct braid_fast *flow, __u32 back)
{
	const struct braid_leg *leg = &flow->leg[back & 1];
	struct change change = {};
	__u32 mtu = 0;
	int changed;

	if (bpf_check_mtu(skb, leg->to, &mtu, 0, BPF_MTU_CHK_SEGS))
		return TC_NEXT;
	__builtin_memcpy(change.from, packet->key.client, sizeof(change.from));
	__builtin_memcpy(change.to, leg->address, sizeof(change.to));
	change.from_port = bpf_htons(packet->key.client_port);
	change.to_port = bpf_htons(leg->port);
	change.network = ETH_HEADER;
	change.fewer_hops = 1;
	changed = change_checksum(skb, packet, &change);
	if (changed)
		return changed > 0 ? TC_NEXT : TC_DROP;
	if (write_headers(skb, packet, leg, back))
		return TC_DROP;
	skb->mark = leg->mark;
	skb->priority = leg->priority;
	skb->tc_index = TOOK_FAST_PATH;
	count(BRAID_COUNT_FAST);
	/* Programs receive at the virtual interface. */
	return bpf_redirect(leg->to, back && flow->own ? BPF_F_INGRESS : 0);
}

/* The mark of a flow's samples, which tells them from another flow's packets with the same addresses. */
BRAID_INLINE __u16 tag_of(const struct braid_fast *flow)
{
	__u16 tag = flow->id | 1;

	return tag;
}

/* Sends a packet the fast way if it may. Else the kernel forwards it. */
static __attribute__((noinline)) int use_fast_path(struct __sk_buff *skb, const struct packet *packet, struct braid_fast *flow, __u32 back)
{
	struct braid_leg *leg = &flow->leg[back & 1];
	__u64 now = bpf_ktime_get_coarse_ns();
	_Bool small = packet->size <= SMALL || !((now >> TURN_SHIFT) & TURN_MASK), sample;

	if (skb->ifindex != leg->from)
		return TC_NEXT;
	if (packet->key.protocol == IPPROTO_TCP && (packet->flags & (TCP_SYN | TCP_FIN | TCP_RST)))
		flow->over = 1;
	if (flow->over || !is_plain(packet))
		return TC_NEXT;
	sample = (__s64)(now - leg->sampled) > (__s64)(small ? SAMPLE_SMALL_NS : SAMPLE_ANY_NS);
	sample |= packet->hops < 2 || packet->hops != leg->hops || ((packet->traffic_class ^ leg->traffic_class) & WITHOUT_ECN);
	if (sample || !is_confirmed(&flow->leg[0], now) || !is_confirmed(&flow->leg[1], now)) {
		leg->sampled = now;
		leg->hops = packet->hops;
		leg->traffic_class = packet->traffic_class;
		skb->tc_index = tag_of(flow);
		return TC_NEXT;
	}
	return send_fast(skb, packet, flow, back & 1);
}

/* Compares a sample, where it reaches the other device, with what the fast path would have sent. */
static __attribute__((noinline)) int confirm(struct __sk_buff *skb, const struct packet *packet, struct braid_fast *flow, __u32 back)
{
	struct braid_leg *leg = &flow->leg[back & 1];
	__u8 head[ETH_HEADER];
	_Bool same;

	/* It may pass a device above the other one, or below it. */
	if (skb->ifindex != leg->to || skb->tc_index != tag_of(flow) || !is_plain(packet))
		return 0;
	skb->tc_index = 0;
	same = packet->hops + 1 == leg->hops && !((packet->traffic_class ^ leg->traffic_class) & WITHOUT_ECN) && !skb->vlan_present;
	/* What mark the answers have depends on the system's rules; it must not change. */
	if (back && !leg->confirmed)
		leg->mark = skb->mark;
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

/* Whether a packet that leaves may be a sample, and so needs to be compared. Most are not: this is asked before the packet is read. */
BRAID_INLINE _Bool may_be_sample(const struct __sk_buff *skb)
{
	return skb->tc_index && is_fast_path_open();
}

/* The flow in the fast path to which a packet on a link belongs. */
BRAID_INLINE struct braid_fast *find_on_link(const struct braid_forward_key *key)
{
	const struct braid_forward_key *inner = bpf_map_lookup_elem(&fast_back, key);

	return inner ? bpf_map_lookup_elem(&fast, inner) : NULL;
}

#endif
