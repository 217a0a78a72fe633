/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Rates of forwarded TCP flows, which have no socket here: the switch lowers the receive window that one end advertises, and so what the other end may
 * have under way. What a client receives is limited in the client's segments, what it sends in those to the client.
 *
 * The window is only lowered, never to zero, and only in flows whose whole handshake was seen, because its options scale all later windows. Nothing is
 * remembered in the packets or at the ends: without a live daemon, or without the program, the next segment has the window of its sender again.
 *
 * The switch also measures what the daemon needs to choose the window: the payload, and the round trips between this machine and each end.
 */
#ifndef BRAID_WINDOW_H
#define BRAID_WINDOW_H

#include "flow.h"

#define ETH_HEADER 14

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

#define TCP_HEADER 20
/* Offsets in the header. */
#define TCP_OFFSET_AT 12
#define TCP_WINDOW_AT 14
#define TCP_CHECK_AT 16
/* Kinds of options. */
#define OPTION_END 0
#define OPTION_NOP 1
#define OPTION_SCALE 3
#define OPTION_MD5 19
#define OPTION_AO 29
/* Two no-operations and a timestamp option of ten bytes: how all common systems begin the options of a segment (RFC 7323, appendix A). */
#define ALIGNED_TIMESTAMP bpf_htonl(0x0101080a)
#define MAX_SCALE 14

/* `scale` of a flow: 0: not seen; NO_SCALE: a handshake without the option; else one more than the shift. */
#define NO_SCALE 16

/* Bit of `handshake` of a flow: the other bits are the round trip, no longer a time modulo 2^31. */
#define TIMED (1u << 31)

/* A flow that was silent for this long may have waited for a program: its round trip is measured anew. */
#define PAUSE_NS 100000000ull
/* A longer round trip is none. */
#define LONGEST_US 3000000u
/* A TCP header and the options after it, as far as they are read. */
struct segment {
	__u16 source;
	__u16 target;
	__u32 sequence;
	__u32 acknowledged;
	__u8 offset;
	__u8 flags;
	__u16 window;
	__u16 check;
	__u16 urgent;
	__u32 option;
	__u32 time; /* TSval */
	__u32 echo; /* TSecr */
};

/* Progress and round trips of the forwarded flows in `shapes`, by id. The daemon creates and removes the entries. */
MAP(windows, BPF_MAP_TYPE_HASH, __u64, struct braid_window, BRAID_MAX_SHAPES, BPF_F_NO_PREALLOC);

/* Whether windows are to be lowered or measured: the daemon lives and has asked for it. */
BRAID_INLINE _Bool are_windows_wanted(void)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);

	return switches && switches->windows && (__s64)(bpf_ktime_get_coarse_ns() - switches->heartbeat) <= (__s64)BRAID_HEARTBEAT_NS;
}

/*
 * Reads the window scale of a SYN: a value for `scale` of the flow. 0 if its segments are signed (RFC 2385, RFC 5925): the signature covers the window.
 * An option has at least one byte, and there are at most 40. All three kinds have at least three.
 */
static __attribute__((noinline)) int read_scale(struct __sk_buff *skb, __u32 transport)
{
	__u32 at = transport + TCP_HEADER, end, scale = NO_SCALE;
	__u8 option[3] = {};

	if (bpf_skb_load_bytes_relative(skb, transport + TCP_OFFSET_AT, option, 1, BPF_HDR_START_NET))
		return 0;
	end = transport + (option[0] >> 4) * 4;
	for (int count = 0; count < 40; count++) {
		if (at + 3 > end || bpf_skb_load_bytes_relative(skb, at, option, 3, BPF_HDR_START_NET) || option[0] == OPTION_END)
			break;
		if (option[0] == OPTION_NOP) {
			at++;
			continue;
		}
		if (option[0] == OPTION_MD5 || option[0] == OPTION_AO)
			return 0;
		/* Like the ends, it ignores an option that goes on in the payload. */
		if (option[1] < 2 || at + option[1] > end)
			break;
		if (option[0] == OPTION_SCALE && option[1] == 3)
			scale = 1 + (option[2] > MAX_SCALE ? MAX_SCALE : option[2]);
		at += option[1];
	}
	return scale;
}

/* Reads the scale of a SYN, or of the server's answer to it. The first answer counts: nobody changes the scale later. */
BRAID_INLINE void follow_handshake(struct __sk_buff *skb, struct braid_flow *flow, __u32 transport, _Bool server)
{
	if (flow->scale[1])
		return;
	if (server) {
		if (flow->scale[0])
			flow->scale[1] = read_scale(skb, transport);
		return;
	}
	flow->scale[0] = read_scale(skb, transport);
	flow->handshake = (bpf_ktime_get_ns() / 1000) & ~TIMED;
}

/* The client's first segment after the handshake ends a round trip between both ends. */
BRAID_INLINE void time_handshake(struct braid_flow *flow)
{
	__u32 took;

	if (!flow->scale[1] || (flow->handshake & TIMED))
		return;
	took = (bpf_ktime_get_ns() / 1000 - flow->handshake) & ~TIMED;
	flow->handshake = TIMED | took;
}

/* Ends the measurement of a round trip if this segment answers what was sent then. `end` is the sequence number after the segment. */
BRAID_INLINE void answer(struct braid_echo *echo, const struct segment *segment, __u32 end, __u64 now)
{
	__u32 past, took, kind = echo->kind;

	switch (kind) {
	case BRAID_ECHO_TIME:
		if (segment->option != ALIGNED_TIMESTAMP)
			return;
		past = bpf_ntohl(segment->echo) - echo->expected;
		break;
	case BRAID_ECHO_ACKNOWLEDGED:
		past = bpf_ntohl(segment->acknowledged) - echo->expected;
		break;
	case BRAID_ECHO_WINDOW:
		past = end - echo->expected;
		break;
	default:
		return;
	}
	if (past >> 31)
		return;
	echo->kind = BRAID_ECHO_NONE;
	took = (now - echo->at) / 1000 < LONGEST_US ? (now - echo->at) / 1000 : 0;
	if (!took)
		return;
	/* A sender that has little to send uses its window up late. */
	if (kind == BRAID_ECHO_WINDOW)
		echo->took = echo->took && echo->took < took ? echo->took : took;
	else
		echo->took = echo->took ? (echo->took + took) / 2 : took;
}

/*
 * Begins to measure a round trip to the other end, if none is measured: until it echoes the timestamp, else until it acknowledges the payload, else until
 * it sends what a lowered window allows for the first time. After a pause it begins anew, because the other end may have had nothing to send. `edge` is the
 * end of the window that the segment announces.
 */
BRAID_INLINE void ask(struct braid_echo *echo, const struct segment *segment, __u32 payload, __u32 edge, _Bool lowered, __u64 now, _Bool paused)
{
	_Bool timed = segment->option == ALIGNED_TIMESTAMP;
	__u32 seen = echo->seen, kind, expected;

	/* Windows that become smaller move their edge back, but what was announced may be under way. */
	if (!timed && (!seen || !((edge - seen) >> 31)))
		echo->seen = edge;
	if (echo->kind && !paused)
		return;
	if (timed) {
		expected = bpf_ntohl(segment->time);
		/* The echo of an earlier segment with the same time would come too early. */
		if (expected == seen)
			return;
		echo->seen = expected;
		kind = BRAID_ECHO_TIME;
	} else if (payload) {
		expected = bpf_ntohl(segment->sequence) + payload;
		kind = BRAID_ECHO_ACKNOWLEDGED;
	} else if (lowered && seen && echo->seen != seen) {
		expected = seen + 1;
		kind = BRAID_ECHO_WINDOW;
	} else {
		return;
	}
	echo->expected = expected;
	echo->at = now;
	echo->kind = kind;
}

/* Offset of the network header from the packet's start; negative: unknown. Devices for raw IP have no header before it. */
static __attribute__((noinline)) int network_offset(struct __sk_buff *skb)
{
	__u32 wanted[5], found[5];

	if (bpf_skb_load_bytes_relative(skb, 0, wanted, sizeof(wanted), BPF_HDR_START_NET))
		return -1;
	if (!bpf_skb_load_bytes(skb, ETH_HEADER, found, sizeof(found)) && found[0] == wanted[0] && found[1] == wanted[1] && found[2] == wanted[2] &&
	    found[3] == wanted[3] && found[4] == wanted[4])
		return ETH_HEADER;
	if (!bpf_skb_load_bytes(skb, 0, found, sizeof(found)) && found[0] == wanted[0] && found[1] == wanted[1] && found[2] == wanted[2] &&
	    found[3] == wanted[3] && found[4] == wanted[4])
		return 0;
	return -1;
}

/*
 * Lowers the window of a segment. The checksum of a packet that a network card completes covers the payload later, and the helper leaves it alone; in one
 * that was received with a sum of all bytes, both changes cancel out. All segments of a large packet get its header.
 */
static __attribute__((noinline)) int lower_window(struct __sk_buff *skb, const struct segment *segment, __u32 transport, __u32 window)
{
	int network = network_offset(skb);
	__u16 lowered = bpf_htons(window);

	if (network < 0)
		return 0;
	transport += network;
	if (bpf_l4_csum_replace(skb, transport + TCP_CHECK_AT, segment->window, lowered, sizeof(lowered)))
		return 0;
	return bpf_skb_store_bytes(skb, transport + TCP_WINDOW_AT, &lowered, sizeof(lowered), 0);
}

/* Measures a segment of a flow that the daemon shapes, and lowers its window. `size` is that of the segment with its header. */
static __attribute__((noinline)) int follow_window(struct __sk_buff *skb, struct braid_flow *flow, __u32 transport, __u32 size, __u32 server)
{
	__u64 id = flow->id, now, last = flow->last;
	struct braid_shape *shape = bpf_map_lookup_elem(&shapes, &id);
	struct braid_window *window = bpf_map_lookup_elem(&windows, &id);
	struct segment segment = {};
	struct braid_echo *asking;
	__u32 header, payload, scale, limit, advertised, edge;

	if (!shape || !window || bpf_skb_load_bytes_relative(skb, transport, &segment, TCP_HEADER, BPF_HDR_START_NET))
		return 0;
	header = (segment.offset >> 4) * 4;
	if (header >= sizeof(segment))
		bpf_skb_load_bytes_relative(skb, transport + TCP_HEADER, &segment.option, sizeof(segment) - TCP_HEADER, BPF_HDR_START_NET);
	payload = size > header ? size - header : 0;
	scale = server ? flow->scale[1] : flow->scale[0];
	if (!flow->scale[0] || !flow->scale[1] || (segment.flags & (TCP_SYN | TCP_RST)))
		return 0;
	scale = flow->scale[0] == NO_SCALE || flow->scale[1] == NO_SCALE ? 0 : (scale - 1) & 15;
	limit = server ? shape->client_window : shape->window;
	if (limit)
		limit = ((limit - 1) >> scale) + 1;
	advertised = bpf_ntohs(segment.window);
	asking = &window->echo[server ? 1 : 0];
	edge = bpf_ntohl(segment.acknowledged) + (advertised << scale);
	if (limit && limit < advertised)
		advertised = limit;
	else
		limit = 0;
	/* No end of a window that was announced before is further than the sender's own. */
	if (asking->seen)
		edge = bpf_ntohl(segment.acknowledged) + (advertised << scale);
	now = bpf_ktime_get_ns();
	window->handshake = flow->handshake & TIMED ? flow->handshake & ~TIMED : 0;
	answer(&window->echo[server ? 0 : 1], &segment, bpf_ntohl(segment.sequence) + payload, now);
	ask(asking, &segment, payload, edge, limit, now, (__s64)(now - last) > (__s64)PAUSE_NS);
	if (server)
		__sync_fetch_and_add(&window->rx, payload);
	else
		__sync_fetch_and_add(&window->tx, payload);
	return limit ? lower_window(skb, &segment, transport, limit) : 0;
}

#endif
