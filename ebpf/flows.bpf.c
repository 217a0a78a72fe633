/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What follows a flow after it has got its link.
 *
 *   release             ends a flow: loads, demand, the event for the daemon.
 *   retransmission      reports what connections suffer: SYNs and segments without an answer. Not by `sockops`, which the kernel runs eight
 *                       times a connection, at both ends.
 *   connections, flows  dump the living flows, TCP's and UDP's, and bring their reservations up to date.
 *
 * `move.bpf.c` moves connects that nobody answers.
 */
#include "flow.h"

/* ------------------------------------------------------------------ the end */

SEC("cgroup/sock_release")
int braid_release(struct bpf_sock *ctx)
{
	if (ctx->protocol == IPPROTO_TCP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		struct connection *connection = in_place(cookie);
		_Bool overflowed = !connection;

		if (overflowed)
			connection = bpf_map_lookup_elem(&overflow, &cookie);
		if (connection) {
			end_flow(as_number(ctx), &connection->flow, cookie);
			if (overflowed)
				bpf_map_delete_elem(&overflow, &cookie);
		}
	} else {
		struct braid_flow *flow = bpf_sk_storage_get(&flows, ctx, NULL, 0);

		if (flow)
			end_flow(as_number(ctx), flow, flow->id);
	}
	part(ctx);
	return ALLOW;
}

/* ------------------------------------------------------------------ what connections suffer */

BRAID_INLINE struct braid_flow *flow_of(struct sock *socket)
{
	struct connection *connection = connection_of(bpf_get_socket_cookie(socket));

	return connection ? &connection->flow : NULL;
}

/*
 * Arguments: the socket and the segment that it sends again. Only for want of an answer: timers that ran out are counted until
 * something is acknowledged, and what they send is the first segment that is not. All else repairs a loss that answers have told of.
 */
SEC("tp_btf/tcp_retransmit_skb")
int braid_retransmission(__u64 *ctx)
{
	struct sock *socket = (void *)ctx[0];
	const struct tcp_sock *tcp = (const void *)socket;
	const struct sk_buff *segment = (const void *)ctx[1];
	const struct inet_connection_sock *connection = (const void *)socket;
	__u32 timeouts = BPF_CORE_READ(connection, icsk_retransmits);
	const struct tcp_skb_cb *control = (const void *)segment + bpf_core_field_offset(segment->cb);
	_Bool connecting = socket->__sk_common.skc_state == TCP_SYN_SENT;
	struct braid_flow *flow;

	if (!timeouts || BPF_CORE_READ(control, seq) != BPF_CORE_READ(tcp, snd_una))
		return 0;
	flow = flow_of(socket);
	if (!flow)
		return 0;
	if (connecting) {
		_Bool moved = flow->resent < flow->moves;

		flow->resent = timeouts;
		flow->last = bpf_ktime_get_ns();
		/* The link that it left was told when it left; the new one has not been asked before. */
		if (moved)
			return 0;
	}
	note_timeout(flow, (timeouts - 1) | (connecting ? 1u << 31 : 0));
	return 0;
}

/* ------------------------------------------------------------------ the dump */

/* A flow that neither sends nor receives for this long weighs nothing until it does again. */
#define IDLE_NS 10000000000ull
/* A socket whose connect has only just been called is still closed. */
#define SETTLED_NS 1000000000ull

/* What a flow is still expected to move: max(C - moved, moved), so that one that outlives its estimate still weighs. */
BRAID_INLINE __u64 remaining(__u64 demand, __u64 moved)
{
	__u64 rest = demand > moved ? demand - moved : 0;

	return rest > moved ? rest : moved;
}

BRAID_INLINE void refresh(struct braid_flow *flow, __u64 id, __u64 moved, __u64 last, __u64 now)
{
	/* Signed: a datagram may pass meanwhile. */
	weigh(flow, id, (__s64)(now - last) > (__s64)IDLE_NS ? 0 : remaining(flow->demand, moved), 0);
}

BRAID_INLINE void apply_corrections(void)
{
	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		__u32 key = slot;
		struct braid_link_load *wrong = bpf_map_lookup_elem(&corrections, &key);

		if (!wrong || !(wrong->load[0] | wrong->load[1] | wrong->flows))
			continue;
		add_to_lane(slot, BRAID_DOWN, wrong->load[0], wrong->flows);
		add_to_lane(slot, BRAID_UP, wrong->load[1], 0);
		wrong->load[0] = 0;
		wrong->load[1] = 0;
		wrong->flows = 0;
	}
}

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	struct sock *sk;
	void *value;
} __attribute__((preserve_access_index));

SEC("iter/bpf_sk_storage_map")
int braid_flows(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct braid_flow_row row = {};
	struct braid_flow *flow = ctx->value;
	struct sock *socket = ctx->sk;

	if (!socket || !flow) {
		apply_corrections();
		return 0;
	}
	if (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)) {
		/* No flow, but a socket whose datagrams are to be counted. */
		row.flow = *flow;
		bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
		return 0;
	}
	row.read_at = bpf_ktime_get_ns();
	row.rx = flow->rx;
	row.tx = flow->tx;
	refresh(flow, flow->id, row.rx + row.tx, flow->last, row.read_at);
	row.flow = *flow;
	read_local(socket, &row);
	bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
	return 0;
}

struct bpf_iter__bpf_map_elem {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	void *key;
	void *value;
} __attribute__((preserve_access_index));

/*
 * TCP's. Sockets are read where they are without holding them: their memory may become another's meanwhile, which its cookie then
 * tells. One that is gone without having been seen to go, or moves nothing any more (reset, refused, ended by force: its program has
 * yet to close it), ends here.
 */
SEC("iter/bpf_map_elem")
int braid_connections(struct bpf_iter__bpf_map_elem *ctx)
{
	struct braid_flow_row row = {};
	struct connection *connection = ctx->value;
	struct braid_flow *flow;
	struct sock *socket;
	__u64 id;

	if (!connection)
		return 0;
	socket = (void *)connection->socket;
	flow = &connection->flow;
	id = flow->id;
	row.flow = *flow;
	/* A place that is free, is being written, or has just become another's. */
	if (!id || row.flow.id != id || (row.flow.flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)))
		return 0;
	row.read_at = bpf_ktime_get_ns();
	read_tcp(socket, &row);
	read_local(socket, &row);
	if (!is_socket(socket, id))
		socket = NULL;
	if (!socket || (row.state == TCP_CLOSE && row.read_at - flow->started > SETTLED_NS)) {
		end_flow(socket, flow, id);
		bpf_map_delete_elem(&overflow, &id);
		return 0;
	}
	if (row.rx != flow->rx || row.tx != flow->tx)
		flow->last = row.read_at;
	flow->rx = row.rx;
	flow->tx = row.tx;
	if (row.flow.answered && !flow->answered) {
		flow->answered = 1;
		note_answer(&row);
	}
	refresh(flow, id, row.rx + row.tx, flow->last, row.read_at);
	row.flow.reserved = flow->reserved;
	bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
	return 0;
}
