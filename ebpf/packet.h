/* SPDX-License-Identifier: GPL-2.0-only */
/* Packets at tc: reads the flow to which a packet belongs. */
#ifndef BRAID_PACKET_H
#define BRAID_PACKET_H

#include "window.h"

#define TC_NEXT (-1)
#define TC_DROP 2
/* `pkt_type` of packets that are addressed to this machine: not broadcast, multicast, or for others. */
#define PACKET_HOST 0

#define ETH_IPV4 0x0800
#define ETH_IPV6 0x86dd

#define IPV4_HEADER 20
#define IPV4_HOPS 8
#define IPV4_SOURCE 12
#define IPV4_DESTINATION 16
#define IPV6_HEADER 40
#define IPV6_HOPS 7
#define IPV6_SOURCE 8
#define IPV6_DESTINATION 24

#define PROTOCOL_HOP_BY_HOP 0
#define PROTOCOL_ICMP 1
#define PROTOCOL_DCCP 33
#define PROTOCOL_ROUTING 43
#define PROTOCOL_FRAGMENT 44
#define PROTOCOL_AH 51
#define PROTOCOL_ICMPV6 58
#define PROTOCOL_DESTINATION_OPTIONS 60
#define PROTOCOL_SCTP 132
#define PROTOCOL_UDP_LITE 136

/* ICMP messages about another packet begin with 8 bytes, followed by that packet. */
#define ICMP_HEADER 8
#define ECHO_REPLY 0
#define ECHO_REQUEST 8
#define ECHO_REQUEST6 128
#define ECHO_REPLY6 129

/* What a packet says about its flow. */
struct packet {
	struct braid_forward_key key;
	__u8 family;
	__u8 flags; /* of TCP */
	__u16 transport; /* offset of the transport header from the network header */
	__u32 size; /* from the transport header on */
	__u8 hops; /* hop limit */
	__u8 traffic_class;
	__u8 fragment; /* the first one of several, IPv4 */
	__u8 pad;
};

/* Reads from the packet's network header on. Returns 0 on success. */
BRAID_INLINE long load(struct __sk_buff *skb, __u32 offset, void *to, __u32 size)
{
	return bpf_skb_load_bytes_relative(skb, offset, to, size, BPF_HDR_START_NET);
}

/* Finds the transport header of an IPv6 packet; 0: it has none that can be read, because of a fragment or unknown headers. */
BRAID_INLINE __u32 skip_extensions(struct __sk_buff *skb, __u8 *next)
{
	__u32 offset = IPV6_HEADER;
	__u8 head[4];

	for (int extension = 0; extension < 5; extension++) {
		switch (*next) {
		case PROTOCOL_HOP_BY_HOP:
		case PROTOCOL_ROUTING:
		case PROTOCOL_DESTINATION_OPTIONS:
			if (load(skb, offset, head, sizeof(head)))
				return 0;
			offset += (head[1] + 1) * 8;
			break;
		case PROTOCOL_AH:
			if (load(skb, offset, head, sizeof(head)))
				return 0;
			offset += (head[1] + 2) * 4;
			break;
		case PROTOCOL_FRAGMENT:
			/* Only the first fragment has the transport header. */
			if (load(skb, offset, head, sizeof(head)) || head[2] || (head[3] & 0xf8))
				return 0;
			offset += 8;
			break;
		default:
			return offset;
		}
		*next = head[0];
	}
	return 0;
}

/* Whether an IPv4 header can begin with this byte: its version, and its length in words. The kernel drops other packets, but later. */
BRAID_INLINE _Bool is_header4(__u8 first)
{
	return first >> 4 == 4 && (first & 15) >= 5;
}

/*
 * Reads the flow of a packet, from a client or, if `out` is set, to a client. Returns 0 if it has none of its own: a later fragment, which the kernel
 * reassembles with the first one, or an ICMP message about another packet, which the kernel sends the way of that packet.
 */
static __attribute__((noinline)) int read_packet(struct __sk_buff *skb, struct packet *packet, _Bool out)
{
	struct braid_forward_key *key = &packet->key;
	__u32 *source = out ? key->remote : key->client, *target = out ? key->client : key->remote;
	__u8 head[40], transport[14];
	__u16 first, second;
	__u32 offset, size;

	if (skb->protocol == bpf_htons(ETH_IPV4)) {
		if (load(skb, 0, head, 20))
			return 0;
		offset = (head[0] & 15) * 4;
		if (!is_header4(head[0]) || (head[6] & 0x1f) || head[7])
			return 0;
		packet->family = 4;
		packet->hops = head[8];
		packet->traffic_class = head[1];
		packet->fragment = head[6] & 0x20;
		size = head[2] << 8 | head[3];
		key->protocol = head[9];
		source[2] = target[2] = bpf_htonl(0xffff);
		__builtin_memcpy(&source[3], head + 12, 4);
		__builtin_memcpy(&target[3], head + 16, 4);
	} else if (skb->protocol == bpf_htons(ETH_IPV6)) {
		if (load(skb, 0, head, 40) || head[0] >> 4 != 6)
			return 0;
		key->protocol = head[6];
		offset = skip_extensions(skb, &key->protocol);
		if (!offset)
			return 0;
		packet->family = 6;
		packet->hops = head[7];
		packet->traffic_class = head[0] << 4 | head[1] >> 4;
		size = head[4] << 8 | head[5];
		size += size ? 40 : 0;
		__builtin_memcpy(source, head + 8, 16);
		__builtin_memcpy(target, head + 24, 16);
		/* No host has such an address. The table's key would be that of an IPv4 flow. */
		if (is_mapped(key->client))
			return 0;
	} else {
		return 0;
	}
	packet->transport = offset;
	/* The header of a packet that a network card will cut has no size if it is too large for it. */
	size = size ?: skb->len - ETH_HEADER;
	/* The kernel drops a packet that says more, but later. */
	size = size < skb->len ? size : skb->len;
	packet->size = size > offset ? size - offset : 0;
	switch (key->protocol) {
	case IPPROTO_TCP:
		if (load(skb, offset, transport, 14))
			return 0;
		packet->flags = transport[13];
		break;
	case IPPROTO_UDP:
	case PROTOCOL_DCCP:
	case PROTOCOL_SCTP:
	case PROTOCOL_UDP_LITE:
		if (load(skb, offset, transport, 4))
			return 0;
		break;
	case PROTOCOL_ICMP:
	case PROTOCOL_ICMPV6:
		if (load(skb, offset, transport, 8))
			return 0;
		first = key->protocol == PROTOCOL_ICMP ? ECHO_REQUEST : ECHO_REQUEST6;
		second = key->protocol == PROTOCOL_ICMP ? ECHO_REPLY : ECHO_REPLY6;
		if (transport[0] != (out ? second : first))
			return 0;
		key->client_port = transport[4] << 8 | transport[5];
		return 1;
	default:
		/* One flow for each pair of addresses. */
		return 1;
	}
	first = transport[0] << 8 | transport[1];
	second = transport[2] << 8 | transport[3];
	key->client_port = out ? second : first;
	key->remote_port = out ? first : second;
	return 1;
}

#endif
