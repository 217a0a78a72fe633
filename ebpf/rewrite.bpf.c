/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Mirrored rewriting: how a running flow changes its link without a tunnel (Hercules; Yap's thesis, 2.3.2). Its packets have other addresses and ports on the
 * way than in the sockets at both ends. One end exchanges them where its packets leave, the other end exchanges them back where they arrive, and the reverse.
 *
 *   rewrite_out  packets of moved flows, at the egress of a device of Braid's own to which a routing rule leads them
 *   rewrite_in   packets that arrive over a link, and ICMP errors about packets of moved flows; also those of flows between other hosts that pass this one
 *
 * The daemon enters a flow, and agrees about it with the other host. A flow that is not entered is left alone. Of TCP, a socket's mark leads its packets to the
 * device (depart.bpf.c); of UDP, a routing rule that names the flow's ports, since no program may mark such a socket from outside.
 */
#include "late.h"

/* Hops of a packet that passes this host, at most: more than any path has, and few in a loop. */
#define MOST_HOPS 64

/* What becomes of packets, by the addresses and ports that they have before. The daemon enters and removes them. */
MAP(rewrites, BPF_MAP_TYPE_HASH, struct braid_forward_key, struct braid_rewrite, BRAID_MAX_REWRITES, BPF_F_NO_PREALLOC);

BRAID_INLINE _Bool is_same_address(const __u32 *one, const __u32 *other)
{
	return one[0] == other[0] && one[1] == other[1] && one[2] == other[2] && one[3] == other[3];
}

/* Exchanges the packet's source or destination. Returns 0 on success, also if there is nothing to change. */
static __attribute__((noinline)) int exchange_end(struct __sk_buff *skb, const struct packet *packet, const struct braid_rewrite *entry, __u32 network,
						  _Bool destination)
{
	struct change change = { .network = network, .destination = destination };

	__builtin_memcpy(change.from, destination ? packet->key.remote : packet->key.client, sizeof(change.from));
	__builtin_memcpy(change.to, destination ? entry->to.remote : entry->to.client, sizeof(change.to));
	change.from_port = bpf_htons(destination ? packet->key.remote_port : packet->key.client_port);
	change.to_port = bpf_htons(destination ? entry->to.remote_port : entry->to.client_port);
	if (change.from_port == change.to_port && is_same_address(change.from, change.to))
		return 0;
	if (change_checksum(skb, packet, &change))
		return -1;
	return write_end(skb, &change, packet->family, network, network + packet->transport);
}

/* Gives a packet of a tunnel the Ethernet header that a device of Braid expects. Returns 0 on success. */
static __attribute__((noinline)) int add_ethernet(struct __sk_buff *skb)
{
	__u16 protocol = skb->protocol;

	return bpf_skb_change_head(skb, ETH_HEADER, 0) || bpf_skb_store_bytes(skb, ETH_HEADER - sizeof(protocol), &protocol, sizeof(protocol), 0);
}

/*
 * Lets the packet arrive by Braid's device. By the link a strict reverse path filter would drop it, because its destination is another link's address; on
 * that device the filter looks at the mark, which leads back to the device. `network` is the offset of the packet's network header.
 */
BRAID_INLINE int arrive(struct __sk_buff *skb, __u32 device, __u32 network)
{
	const __u8 hardware[6] = BRAID_HARDWARE;

	if (!network && add_ethernet(skb))
		return TC_DROP;
	return bpf_skb_store_bytes(skb, 0, hardware, sizeof(hardware), 0) ? TC_DROP : bpf_redirect(device, BPF_F_INGRESS);
}

/* Whether a packet that arrives for a moved flow may come over this device. */
BRAID_INLINE _Bool may_arrive(struct __sk_buff *skb, const struct braid_rewrite *entry)
{
	return !entry->from || entry->from == skb->ifindex;
}

/* Gives the packet the addresses and ports of its entry. Returns the verdict. */
static __attribute__((noinline)) int rewrite(struct __sk_buff *skb, const struct packet *packet, struct braid_rewrite *entry)
{
	int network = network_offset(skb);

	/* Fragments cannot be followed. Protocols without ports have no entry. Without Ethernet headers, flows move through tunnels only. */
	if ((network != ETH_HEADER && (network || !entry->arrives || entry->passes)) || packet->fragment || exchange_end(skb, packet, entry, network, 0) || exchange_end(skb, packet, entry, network, 1))
		return TC_DROP;
	skb->mark = has_waited(skb) ? (entry->mark ?: BRAID_MARK_BASE) | BRAID_LATE_MARK : entry->mark;
	if (entry->arrives && !entry->passes)
		return arrive(skb, entry->device, network);
	return entry->bare ? bpf_redirect(entry->device, 0) : bpf_redirect_neigh(entry->device, NULL, 0, 0);
}

/* Gives the packet one hop less, as a router does, and few hops at most, so that a loop of hosts ends soon. Returns 0 on success. */
static __attribute__((noinline)) int lose_hop(struct __sk_buff *skb, __u32 family, __u32 network)
{
	__u16 word, fewer;
	__u8 hops;

	if (load(skb, family == 6 ? IPV6_HOPS : IPV4_HOPS, &hops, 1) || hops < 2)
		return -1;
	hops = hops > MOST_HOPS ? MOST_HOPS : hops - 1;
	if (family == 6)
		return bpf_skb_store_bytes(skb, network + IPV6_HOPS, &hops, 1, BPF_F_RECOMPUTE_CSUM);
	if (load(skb, IPV4_HOPS, &word, 2))
		return -1;
	fewer = bpf_htons((__u16)hops << 8 | (bpf_ntohs(word) & 0xff));
	if (bpf_l3_csum_replace(skb, network + IPV4_CHECK_AT, word, fewer, 2))
		return -1;
	return bpf_skb_store_bytes(skb, network + IPV4_HOPS, &hops, 1, 0);
}

/*
 * Sends a packet between two other hosts on, each of which sees this host only. Such a flow began long ago, without this host. Options and extension headers may
 * name other destinations.
 */
static __attribute__((noinline)) int pass(struct __sk_buff *skb, const struct packet *packet, struct braid_rewrite *entry)
{
	if (!may_arrive(skb, entry) || (packet->flags & TCP_SYN) || packet->transport != (packet->family == 6 ? IPV6_HEADER : IPV4_HEADER))
		return TC_DROP;
	entry->seen = bpf_ktime_get_coarse_ns();
	if (!entry->device || lose_hop(skb, packet->family, network_offset(skb)))
		return TC_DROP;
	return rewrite(skb, packet, entry);
}

SEC("classifier")
int braid_rewrite_out(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct braid_rewrite *entry;
	int waits;

	/* Nothing else is sent through this device. A flow whose entry is gone must not leave with addresses that nobody would exchange back. */
	if (!read_packet(skb, &packet, 0))
		return TC_DROP;
	entry = bpf_map_lookup_elem(&rewrites, &packet.key);
	if (!entry || entry->arrives)
		return TC_DROP;
	waits = bpf_map_lookup_elem(&late_links, &entry->device) ? wait_for_link(skb, 0) : TC_NEXT;
	return waits == TC_NEXT ? rewrite(skb, &packet, entry) : waits;
}

/* The packet that an ICMP error quotes. */
struct quoted {
	struct braid_forward_key key; /* of packets in the other direction */
	__u32 family;
	__u32 network; /* offset of its network header */
	__u32 transport; /* offset of its ports */
};

/* Reads the packet that an ICMP error quotes. Returns 0 if this is no such error. */
static __attribute__((noinline)) int read_quoted(struct __sk_buff *skb, struct quoted *quoted)
{
	struct braid_forward_key *key = &quoted->key;
	__u8 head[IPV6_HEADER];
	__u32 offset;

	if (skb->protocol == bpf_htons(ETH_IPV4)) {
		if (load(skb, 0, head, IPV4_HEADER) || !is_header4(head[0]) || (head[6] & 0x1f) || head[7] || head[9] != PROTOCOL_ICMP)
			return 0;
		offset = (head[0] & 15) * 4;
		/* Destination unreachable, time exceeded, parameter problem. */
		if (load(skb, offset, head, 1) || (head[0] != 3 && head[0] != 11 && head[0] != 12))
			return 0;
		offset += ICMP_HEADER;
		if (load(skb, offset, head, IPV4_HEADER) || !is_header4(head[0]) || (head[6] & 0x1f) || head[7])
			return 0;
		quoted->family = 4;
		quoted->network = offset;
		quoted->transport = offset + (head[0] & 15) * 4;
		key->protocol = head[9];
		key->client[2] = key->remote[2] = bpf_htonl(0xffff);
		__builtin_memcpy(&key->remote[3], head + IPV4_SOURCE, 4);
		__builtin_memcpy(&key->client[3], head + IPV4_DESTINATION, 4);
	} else if (skb->protocol == bpf_htons(ETH_IPV6)) {
		/* The types of errors are below 128 (RFC 4443, 2.1). */
		if (load(skb, 0, head, IPV6_HEADER) || head[0] >> 4 != 6 || head[6] != PROTOCOL_ICMPV6 || load(skb, IPV6_HEADER, head, 1) ||
		    head[0] >= ECHO_REQUEST6)
			return 0;
		offset = IPV6_HEADER + ICMP_HEADER;
		if (load(skb, offset, head, IPV6_HEADER) || head[0] >> 4 != 6)
			return 0;
		quoted->family = 6;
		quoted->network = offset;
		quoted->transport = offset + IPV6_HEADER;
		key->protocol = head[6];
		__builtin_memcpy(key->remote, head + IPV6_SOURCE, 16);
		__builtin_memcpy(key->client, head + IPV6_DESTINATION, 16);
	} else {
		return 0;
	}
	if ((key->protocol != IPPROTO_TCP && key->protocol != IPPROTO_UDP) || load(skb, quoted->transport, head, 4))
		return 0;
	key->remote_port = head[0] << 8 | head[1];
	key->client_port = head[2] << 8 | head[3];
	return 1;
}

/*
 * Exchanges an end in a quoted packet. `at` is the offset of the network header. The checksum of ICMP covers the quoted packet. In IPv4 the changes of the
 * address and of the quoted header's checksum cancel out in it.
 */
static __attribute__((noinline)) int exchange_quoted_end(struct __sk_buff *skb, const struct quoted *quoted, const struct braid_rewrite *entry, __u32 at,
							 _Bool destination)
{
	__u32 check = at + quoted->network - ICMP_HEADER + 2;
	struct change change = { .destination = destination };

	/* The entry is for the other direction: what it says about the source is about the destination here. */
	__builtin_memcpy(change.from, destination ? quoted->key.client : quoted->key.remote, sizeof(change.from));
	__builtin_memcpy(change.to, destination ? entry->to.client : entry->to.remote, sizeof(change.to));
	change.from_port = bpf_htons(destination ? quoted->key.client_port : quoted->key.remote_port);
	change.to_port = bpf_htons(destination ? entry->to.client_port : entry->to.remote_port);
	if (quoted->family == 6 && !is_same_address(change.from, change.to) &&
	    bpf_l4_csum_replace(skb, check, 0, bpf_csum_diff((__be32 *)change.from, 16, (__be32 *)change.to, 16, 0), 0))
		return -1;
	if (change.from_port != change.to_port && bpf_l4_csum_replace(skb, check, change.from_port, change.to_port, 2))
		return -1;
	return write_end(skb, &change, quoted->family, at + quoted->network, at + quoted->transport);
}

/*
 * Gives the error itself the destination that the quoted packet has as source now, as connection tracking expects of an error; or, if it passes this host,
 * the source that the quoted packet has as destination now. Returns 0 on success, 1 if the error is to another address, and else -1.
 */
static __attribute__((noinline)) int exchange_error_end(struct __sk_buff *skb, const struct quoted *quoted, const struct braid_rewrite *entry, __u32 at,
							_Bool destination)
{
	struct change change = { .destination = destination };

	change.from[2] = bpf_htonl(0xffff);
	if (quoted->family == 6 ? load(skb, destination ? IPV6_DESTINATION : IPV6_SOURCE, change.from, 16) :
				  load(skb, destination ? IPV4_DESTINATION : IPV4_SOURCE, &change.from[3], 4))
		return -1;
	if (destination && !is_same_address(change.from, quoted->key.remote))
		return 1;
	__builtin_memcpy(change.to, destination ? entry->to.remote : entry->to.client, sizeof(change.to));
	/* The checksum of ICMPv6 covers the addresses (RFC 4443, 2.3). */
	if (quoted->family == 6 && bpf_l4_csum_replace(skb, at + IPV6_HEADER + 2, 0, bpf_csum_diff((__be32 *)change.from, 16, (__be32 *)change.to, 16, 0), 0))
		return -1;
	return write_end(skb, &change, quoted->family, at, at);
}

/* Makes an ICMP error about a packet of a moved flow one about the packet that the socket sent. */
static __attribute__((noinline)) int rewrite_error(struct __sk_buff *skb)
{
	struct braid_rewrite *entry;
	struct quoted quoted = {};
	int at, exchanged;

	if (!read_quoted(skb, &quoted))
		return TC_NEXT;
	entry = bpf_map_lookup_elem(&rewrites, &quoted.key);
	if (!entry || !entry->arrives || !entry->device || !may_arrive(skb, entry))
		return TC_NEXT;
	at = network_offset(skb);
	if (at != ETH_HEADER || exchange_quoted_end(skb, &quoted, entry, at, 0) || exchange_quoted_end(skb, &quoted, entry, at, 1))
		return TC_DROP;
	exchanged = exchange_error_end(skb, &quoted, entry, at, 1);
	if (exchanged)
		return exchanged > 0 ? TC_NEXT : TC_DROP;
	skb->mark = entry->mark;
	if (!entry->passes)
		return arrive(skb, entry->device, at);
	if (exchange_error_end(skb, &quoted, entry, at, 0) || lose_hop(skb, quoted.family, at))
		return TC_DROP;
	return bpf_redirect_neigh(entry->device, NULL, 0, 0);
}

/*
 * Whether the packet is a reset without acknowledgement: the answer of a host that does not know the connection by these addresses (RFC 9293, 3.10.7.1). So the
 * other end rewrites no more. The flow must go back to its own addresses, and must not end.
 */
BRAID_INLINE _Bool is_refusal(const struct packet *packet)
{
	return packet->key.protocol == IPPROTO_TCP && (packet->flags & (TCP_RST | TCP_ACK)) == TCP_RST;
}

/* Whether this is an address of a tunnel (decide/src/tunnel.rs), which no host has: what comes from there for no moved flow must not go elsewhere. */
BRAID_INLINE _Bool is_of_tunnel(const __u32 *address)
{
	if (is_mapped(address))
		return (address[3] & bpf_htonl(0xfc000000)) == bpf_htonl(0xf4000000);
	return address[0] == bpf_htonl(0x01000000) && !address[1] && !address[2] && !(address[3] & bpf_htonl(0xfc000000));
}

/* Takes what the other host says in a datagram of the flow. Returns 0 if this is a datagram of its program. */
static __attribute__((noinline)) int take_message(struct __sk_buff *skb, const struct packet *packet, struct braid_rewrite *entry)
{
	const struct braid_message expected = { .text = BRAID_MESSAGE };
	struct braid_message message;

	if (packet->key.protocol != IPPROTO_UDP || packet->fragment || packet->size != UDP_HEADER + sizeof(message) ||
	    load(skb, packet->transport + UDP_HEADER, &message, sizeof(message)))
		return 0;
	for (int i = 0; i < sizeof(message.text); i++)
		if (message.text[i] != expected.text[i])
			return 0;
	if (entry->device) {
		/* Only the flow's other end knows its proof. Until it comes from there, what has these addresses may be another flow. */
		if (bpf_ntohl(message.proof[0]) == entry->sent && bpf_ntohl(message.proof[1]) == entry->received) {
			entry->seen = bpf_ktime_get_coarse_ns();
			entry->follows = 1;
		}
	} else if (message.proof[0] | message.proof[1]) {
		entry->sent = bpf_ntohl(message.proof[0]);
		entry->received = bpf_ntohl(message.proof[1]);
	}
	return 1;
}

SEC("classifier")
int braid_rewrite_in(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct braid_rewrite *entry;
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);

	/* Where the kernel has no BPF links for these programs, they outlive a killed daemon. */
	if (!switches || !switches->rewrites || (__s64)(bpf_ktime_get_coarse_ns() - switches->heartbeat) > (__s64)BRAID_MOVES_NS || skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return TC_NEXT;
	if (!read_packet(skb, &packet, 0))
		return rewrite_error(skb);
	entry = bpf_map_lookup_elem(&rewrites, &packet.key);
	if (!entry || !entry->arrives)
		return is_of_tunnel(packet.key.client) ? TC_DROP : TC_NEXT;
	if (entry->passes)
		return pass(skb, &packet, entry);
	/* Left to the kernel, it would be answered with a reset, which ends the flow. */
	if ((entry->device && !may_arrive(skb, entry)) || take_message(skb, &packet, entry))
		return TC_DROP;
	if (!entry->device) {
		entry->seen = bpf_ktime_get_coarse_ns();
		return TC_NEXT;
	}
	if (packet.key.protocol == IPPROTO_UDP && (entry->sent | entry->received) && !entry->follows)
		return TC_NEXT;
	if (is_refusal(&packet)) {
		entry->refused |= BRAID_RESET;
		return TC_DROP;
	}
	/* A connection that has moved began long ago: this is another one. */
	if (packet.key.protocol == IPPROTO_TCP && (packet.flags & TCP_SYN)) {
		entry->refused |= BRAID_SYN;
		/* A way that nothing has come by yet does not keep others from connecting. */
		if (!entry->seen)
			entry->device = 0;
		return TC_NEXT;
	}
	entry->seen = bpf_ktime_get_coarse_ns();
	return rewrite(skb, &packet, entry);
}
