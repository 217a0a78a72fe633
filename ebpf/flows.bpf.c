/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Programs that track a flow after its link is chosen.
 *
 *   release             ends a flow: updates loads and demand estimates, and sends the event to the daemon.
 *   retransmission      reports SYNs and segments that receive no answer. Not a `sockops` program, because the kernel runs
 *                       those eight times per connection, at both ends.
 *   connections, flows  dump the active flows of TCP and UDP, and update their reservations. Neither is an iterator over a map: some kernels refuse those
 *                       (docs/decisions/0045-flows-are-dumped-without-iterators-over-maps.md).
 *
 * `move.bpf.c` moves connects that receive no answer.
 */
#include "flow.h"

/* ------------------------------------------------------------------ the end of a socket */

SEC("cgroup/sock_release")
int braid_release(struct bpf_sock *ctx)
{
	if (ctx->protocol == IPPROTO_TCP) {
		__u64 cookie = bpf_get_socket_cookie(ctx);
		struct connection *connection = find_in_array(cookie);
		_Bool overflowed = !connection;

		if (overflowed)
			connection = bpf_map_lookup_elem(&overflow, &cookie);
		if (connection) {
			end_flow(as_number(ctx), NULL, &connection->flow, cookie);
			if (overflowed)
				bpf_map_delete_elem(&overflow, &cookie);
		}
	} else {
		struct braid_flow *flow = bpf_sk_storage_get(&flows, ctx, NULL, 0);

		if (flow)
			end_flow(as_number(ctx), NULL, flow, flow->id);
	}
	release_redirected(ctx);
	return ALLOW;
}

/* ------------------------------------------------------------------ retransmissions */

BRAID_INLINE struct braid_flow *flow_of(struct sock *socket)
{
	struct connection *connection = connection_of(bpf_get_socket_cookie(socket));

	return connection ? &connection->flow : NULL;
}

/*
 * Arguments: the socket, and the segment that is sent again. Only retransmissions by timeout are recorded: the kernel counts expired timers until
 * data is acknowledged, and then sends the first unacknowledged segment. Other retransmissions repair a loss that acknowledgements have reported.
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
		/* The timeout of the old link was recorded when the flow left it, and the new link has received no SYN before. */
		if (moved)
			return 0;
	}
	record_timeout(flow, (timeouts - 1) | (connecting ? 1u << 31 : 0));
	return 0;
}

/* ------------------------------------------------------------------ the dump */

/* A flow that neither sends nor receives for this long reserves nothing until it does again. */
#define IDLE_NS 10000000000ull
/* Minimum age of a closed socket's flow before it counts as ended, because a socket is still closed just after connect is called. */
#define SETTLED_NS 1000000000ull

/* Bytes that a flow is still expected to transfer: max(C - moved, moved), so that a flow that exceeds its estimate still has a load. */
BRAID_INLINE __u64 remaining(__u64 demand, __u64 moved)
{
	__u64 rest = demand > moved ? demand - moved : 0;

	return rest > moved ? rest : moved;
}

BRAID_INLINE void refresh(struct braid_flow *flow, __u64 id, __u64 moved, __u64 last, __u64 now)
{
	/* Signed, because a datagram may be counted in the meantime. */
	update_reservation(flow, id, (__s64)(now - last) > (__s64)IDLE_NS ? 0 : remaining(flow->demand, moved), 0);
}

BRAID_INLINE void apply_corrections(void)
{
	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		__u32 key = slot;
		struct braid_link_load *wrong = bpf_map_lookup_elem(&corrections, &key);

		if (!wrong || !(wrong->load[0] | wrong->load[1] | wrong->flows))
			continue;
		add_to_load(slot, BRAID_DOWN, wrong->load[0], wrong->flows, 0);
		add_to_load(slot, BRAID_UP, wrong->load[1], 0, 0);
		wrong->load[0] = 0;
		wrong->load[1] = 0;
		wrong->flows = 0;
	}
}

struct bpf_iter_meta {
	struct seq_file *seq;
	__u64 session_id;
} __attribute__((preserve_access_index));

/*
 * Where an iterator writes its rows. Iterators call this first: the verifier searches the kernel's types by name, for a millisecond, each time that it
 * follows this load.
 */
BRAID_INLINE struct seq_file *output(const struct bpf_iter_meta *meta)
{
	struct seq_file *seq = meta->seq;

	/* Prevents the compiler from moving the load behind branches. */
	__asm__ volatile("" : "+r"(seq));
	return seq;
}

struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
} __attribute__((preserve_access_index));

/* Runs for each UDP socket of the namespace. */
SEC("iter/udp")
int braid_flows(struct bpf_iter__udp *ctx)
{
	struct seq_file *seq = output(ctx->meta);
	struct braid_flow_row row = {};
	struct udp_sock *socket = ctx->udp_sk;
	struct braid_flow *flow;

	if (!socket)
		return 0;
	flow = bpf_sk_storage_get(&flows, socket, NULL, 0);
	if (!flow)
		return 0;
	if (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)) {
		/* Not an active flow, but a socket whose datagrams must be counted. */
		row.flow = *flow;
		bpf_seq_write(seq, &row, sizeof(row));
		return 0;
	}
	row.read_at = bpf_ktime_get_ns();
	row.rx = flow->rx;
	row.tx = flow->tx;
	refresh(flow, flow->id, row.rx + row.tx, flow->last, row.read_at);
	row.flow = *flow;
	read_local(socket, &row);
	bpf_seq_write(seq, &row, sizeof(row));
	return 0;
}

/* The rows of a run of braid_connections. */
MAP(dumped, BPF_MAP_TYPE_ARRAY, __u32, struct braid_flow_row, BRAID_DUMPED, 0);

/*
 * Writes the row of a TCP flow. Sockets are read without holding a reference. If the memory of one is reused in the meantime, its cookie differs. Ends the
 * flows of sockets whose end was missed, and of closed sockets that their programs have not released yet (after a reset, a refusal or a forced
 * close). Returns the number of rows.
 */
static __attribute__((noinline)) int dump_connection(struct connection *connection, __u32 at)
{
	struct braid_flow_row *row = bpf_map_lookup_elem(&dumped, &at);
	struct braid_flow *flow = &connection->flow;
	const void *socket = (const void *)connection->socket;
	__u64 id = flow->id;

	if (!row || !id)
		return 0;
	__builtin_memset(row, 0, sizeof(*row));
	row->flow = *flow;
	/* The entry is free, is being written, or has just been taken by another flow. */
	if (row->flow.id != id || (row->flow.flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)))
		return 0;
	row->read_at = bpf_ktime_get_ns();
	read_tcp(socket, row);
	read_local(socket, row);
	if (!is_socket(socket, id))
		socket = NULL;
	if (!socket || (row->state == TCP_CLOSE && row->read_at - flow->started > SETTLED_NS)) {
		end_flow(socket, NULL, flow, id);
		bpf_map_delete_elem(&overflow, &id);
		return 0;
	}
	if (row->rx != flow->rx || row->tx != flow->tx)
		flow->last = row->read_at;
	flow->rx = row->rx;
	flow->tx = row->tx;
	if (row->flow.answered && !flow->answered) {
		flow->answered = 1;
		record_answer(row);
	}
	refresh(flow, id, row->rx + row->tx, flow->last, row->read_at);
	row->flow.reserved = flow->reserved;
	return 1;
}

/* The verifier follows global functions once, not in each turn of a loop. */
__attribute__((noinline)) int dump_place(__u32 place, __u32 at)
{
	struct connection *connection = bpf_map_lookup_elem(&connections, &place);

	return connection ? dump_connection(connection, at) : 0;
}

__attribute__((noinline)) int dump_overflow(__u64 id, __u32 at)
{
	struct connection *connection = bpf_map_lookup_elem(&overflow, &id);

	return connection ? dump_connection(connection, at) : 0;
}

/*
 * Dumps TCP flows. The daemon runs this program, which is attached nowhere, on a packet that contains `struct braid_dump` behind its Ethernet header. Returns the
 * number of rows in `dumped`.
 */
SEC("classifier")
int braid_connections(struct __sk_buff *skb)
{
	struct braid_dump dump;
	__u32 rows = 0;
	__u64 id;

	if (bpf_skb_load_bytes(skb, BRAID_ETHERNET, &dump, sizeof(dump)))
		return 0;
	if (dump.ids) {
		for (__u32 number = 0; number < BRAID_DUMPED_IDS && number < dump.ids; number++) {
			if (bpf_skb_load_bytes(skb, BRAID_ETHERNET + sizeof(dump) + number * sizeof(id), &id, sizeof(id)))
				break;
			rows += dump_overflow(id, rows);
		}
		return rows;
	}
	if (!dump.start)
		apply_corrections();
	for (__u32 place = 0; place < BRAID_DUMPED; place++)
		rows += dump_place(dump.start + place, rows);
	return rows;
}
