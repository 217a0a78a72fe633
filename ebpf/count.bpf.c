/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Programs that count the bytes of UDP, whose sockets have no counters of their own.
 *
 *   sent/received   count by system call.
 *   egress/ingress  count by packet, on kernels without the tracepoints of sent/received.
 */
#include "flow.h"

#define IPV6_HEADER 40
#define IPV6_EXTENSIONS 4

/* Offset of a packet's UDP header, behind the IP header with its options or extensions; 0 if it cannot be found. */
BRAID_INLINE __u32 udp_offset(struct __sk_buff *skb)
{
	__u32 offset = IPV6_HEADER;
	__u8 head[2];
	__u8 next;

	if (skb->protocol == bpf_htons(0x0800))
		return bpf_skb_load_bytes(skb, 0, head, 1) ? 0 : (head[0] & 15) * 4;
	if (bpf_skb_load_bytes(skb, 6, &next, 1))
		return 0;
	for (int extension = 0; extension < IPV6_EXTENSIONS; extension++) {
		if (next == IPPROTO_UDP)
			break;
		if (bpf_skb_load_bytes(skb, offset, head, 2))
			return 0;
		next = head[0];
		offset += (head[1] + 1) * 8;
	}
	return next == IPPROTO_UDP ? offset : 0;
}

/* Reads the remote address of a UDP packet whose UDP header begins at `offset`. Returns 0 if it cannot be read. */
BRAID_INLINE int remote_of(struct __sk_buff *skb, __u32 offset, struct braid_datagram_key *key, _Bool out)
{
	__u8 ports[4];

	if (skb->protocol == bpf_htons(0x0800)) {
		key->remote[2] = bpf_htonl(0xffff);
		if (bpf_skb_load_bytes(skb, out ? 16 : 12, &key->remote[3], 4))
			return 0;
	} else if (bpf_skb_load_bytes(skb, out ? 24 : 8, key->remote, 16)) {
		return 0;
	}
	if (bpf_skb_load_bytes(skb, offset, ports, 4))
		return 0;
	key->port = out ? ports[2] << 8 | ports[3] : ports[0] << 8 | ports[1];
	return 1;
}

/* Starts the flow of a connected socket with its first data. */
BRAID_INLINE void start_flow(struct braid_flow *flow)
{
	__u32 zero = 0, bank;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	struct load_table *shared = the_load_table();
	const struct braid_params *now;
	__u64 time = bpf_ktime_get_ns();
	_Bool first = 0;

	if (!switches || !shared)
		return;
	bank = switches->bank & 1;
	now = bpf_map_lookup_elem(&params, &bank);
	if (!now)
		return;
	bpf_spin_lock(&shared->lock);
	/* Check again under the lock, because two threads may send at once. */
	if (flow->flags & BRAID_FLOW_PENDING) {
		first = 1;
		flow->flags &= ~BRAID_FLOW_PENDING;
		flow->started = time;
		flow->reserved = flow->demand;
		shared->state.winner = flow->slot;
		braid_commit(&shared->state, now, flow->direction, flow->demand);
	}
	bpf_spin_unlock(&shared->lock);
	if (first)
		count(BRAID_COUNT_STEERED);
}

/* The flow of a UDP socket's datagram, started if it is pending; NULL if there is none. */
BRAID_INLINE struct braid_flow *started(struct braid_flow *flow)
{
	if (flow && (flow->flags & BRAID_FLOW_PENDING))
		start_flow(flow);
	return flow;
}

BRAID_INLINE void add_bytes(struct braid_flow *flow, __u64 bytes, _Bool out)
{
	/* Reading the clock is half the cost of counting a datagram, so it is read once per jiffy. */
	__u32 tick = (__u32)bpf_jiffies64();

	__sync_fetch_and_add(out ? &flow->tx : &flow->rx, bytes);
	if (flow->tick == tick)
		return;
	flow->tick = tick;
	flow->last = bpf_ktime_get_ns();
}

/* Counts the payload of the packet without headers, as `count_call` does. */
BRAID_INLINE int count_packet(struct __sk_buff *skb, _Bool out)
{
	struct bpf_sock *socket = skb->sk;
	struct braid_flow *flow;
	__u32 offset;

	if (!socket)
		return ALLOW;
	socket = bpf_sk_fullsock(socket);
	if (!socket || socket->protocol != IPPROTO_UDP)
		return ALLOW;
	flow = bpf_sk_storage_get(&flows, socket, NULL, 0);
	if (!flow)
		return ALLOW;
	offset = udp_offset(skb);
	if (!offset || skb->len < offset + UDP_HEADER)
		return ALLOW;
	if (flow->flags & BRAID_FLOW_MARKER) {
		struct braid_datagram_key key = {};

		key.socket = bpf_get_socket_cookie(skb);
		if (!remote_of(skb, offset, &key, out))
			return ALLOW;
		flow = bpf_map_lookup_elem(&datagrams, &key);
	}
	flow = started(flow);
	if (flow)
		add_bytes(flow, skb->len - offset - UDP_HEADER, out);
	return ALLOW;
}

/*
 * Counts by system call, if the kernel has the tracepoints (Linux 6.3); then no program runs per packet. Datagrams that an unconnected socket
 * receives count for the remote to which it last sent.
 */
BRAID_INLINE int count_call(__u64 *ctx, _Bool out)
{
	struct sock *socket = (void *)ctx[0];
	int length = (int)ctx[1], flags = (int)ctx[2];
	struct braid_flow *flow;

	if (length <= 0 || socket->sk_protocol != IPPROTO_UDP || (flags & MSG_PEEK))
		return 0;
	flow = bpf_sk_storage_get(&flows, socket, NULL, 0);
	if (!flow)
		return 0;
	if (flow->flags & BRAID_FLOW_MARKER) {
		struct braid_datagram_key key = {};

		key.socket = flow->id;
		__builtin_memcpy(key.remote, flow->remote, sizeof(key.remote));
		key.port = flow->port;
		flow = bpf_map_lookup_elem(&datagrams, &key);
	}
	flow = started(flow);
	if (flow)
		add_bytes(flow, (__u64)length, out);
	return 0;
}

SEC("tp_btf/sock_send_length")
int braid_sent(__u64 *ctx)
{
	return count_call(ctx, 1);
}

SEC("tp_btf/sock_recv_length")
int braid_received(__u64 *ctx)
{
	return count_call(ctx, 0);
}

SEC("cgroup_skb/egress")
int braid_egress(struct __sk_buff *skb)
{
	return count_packet(skb, 1);
}

SEC("cgroup_skb/ingress")
int braid_ingress(struct __sk_buff *skb)
{
	return count_packet(skb, 0);
}
