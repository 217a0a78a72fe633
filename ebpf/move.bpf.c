/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Moves connects that receive no answer to another link, before the kernel sends the SYN again.
 *
 * The daemon starts these iterators over the namespace's TCP sockets, one after the other, when a SYN has waited long enough for an answer.
 * `braid_move` unbinds the socket from its device and marks it with the slots that it leaves and enters. A rule rejects packets with that mark from
 * the old link's address, so that with the next SYN the kernel chooses another source address (`net.ipv4.ip_dynaddr`). Another rule routes the mark
 * over the new link. IPv4 only: IPv6 never changes the source address.
 *
 * Once the connect is answered, the program binds the socket to the link whose address it has, and clears the mark. The connection then continues to
 * work without Braid.
 *
 * The socket keeps its local port. A socket on another link may have the same one for the same destination, and the kernel does not test for it when
 * it changes the source address: both would then be the same connection to the server. So `braid_unanswered` records the ports of the connects to be
 * moved, and `braid_taken` the links on which another socket has them. A connect that starts on the new link between the search and the next SYN
 * (usually half a second; longer after the first move of a connect, as the kernel doubles the time between SYNs) can still take the same port.
 */
#include "flow.h"

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
} __attribute__((preserve_access_index));

/* What two connections have in common that differ in nothing but the source address. */
struct ports {
	__u32 remote;
	__u16 remote_port;
	__u16 local_port;
};

/* The links on which another socket has the same ports, as bits, and when the search for them began. */
struct taken {
	__u64 at;
	__u32 links;
	__u32 pad;
};

/* The connects to be moved. A connect that finds no place here, or lost it, is moved by a later run. */
MAP(taken, BPF_MAP_TYPE_LRU_HASH, struct ports, struct taken, 4096, 0);

/*
 * A search that began earlier says nothing: a program that keeps a socket locked may have held up the run since, or the search was another run's.
 */
#define SEARCH_AGE_NS 200000000ull

BRAID_INLINE void ports_of(const struct sock_common *socket, struct ports *ports)
{
	ports->remote = socket->skc_daddr;
	ports->remote_port = socket->skc_dport;
	ports->local_port = socket->skc_num;
}

BRAID_INLINE const struct braid_params *params_now(__u32 *bank)
{
	__u32 zero = 0;
	const struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);

	/* The rules that a moved connect needs end with the daemon. */
	if (!switches || (__s64)(bpf_ktime_get_ns() - switches->heartbeat) > (__s64)BRAID_HEARTBEAT_NS)
		return NULL;
	*bank = switches->bank & 1;
	return bpf_map_lookup_elem(&params, bank);
}

/* Whether the handshake of a connection is over. Request sockets and TIME_WAIT sockets are not full sockets. */
BRAID_INLINE _Bool is_established(const struct sock_common *socket)
{
	__u8 state = socket->skc_state;

	return state != TCP_CLOSE && state != TCP_TIME_WAIT && state != TCP_NEW_SYN_RECV && state != TCP_LISTEN && state != TCP_SYN_SENT;
}

/* The connection of an IPv4 socket that Braid steered; NULL for all others. */
BRAID_INLINE struct connection *steered4(struct sock_common *socket)
{
	struct connection *connection = connection_of(bpf_get_socket_cookie(socket));

	if (!connection || connection->flow.family != 4 || (connection->flow.flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)))
		return NULL;
	return connection;
}

/* Whether the SYN has waited long enough for an answer. */
BRAID_INLINE _Bool is_due(const struct braid_flow *flow)
{
	return flow->resent >= flow->moves && (__s64)(bpf_ktime_get_ns() - flow->last) >= (__s64)BRAID_UNANSWERED_NS;
}

SEC("iter/tcp")
int braid_unanswered(struct bpf_iter__tcp *ctx)
{
	struct sock_common *socket = ctx->sk_common;
	struct connection *connection;
	struct ports ports = {};
	struct taken none = {};

	if (!socket || socket->skc_state != TCP_SYN_SENT)
		return 0;
	connection = steered4(socket);
	if (!connection || !is_due(&connection->flow))
		return 0;
	ports_of(socket, &ports);
	none.at = bpf_ktime_get_ns();
	bpf_map_update_elem(&taken, &ports, &none, BPF_ANY);
	return 0;
}

SEC("iter/tcp")
int braid_taken(struct bpf_iter__tcp *ctx)
{
	struct sock_common *socket = ctx->sk_common;
	const struct braid_params *now;
	struct connection *connection;
	struct ports ports = {};
	struct taken *entry;
	__u32 bank, slot, bits = 0;

	if (!socket)
		return 0;
	ports_of(socket, &ports);
	entry = bpf_map_lookup_elem(&taken, &ports);
	now = params_now(&bank);
	if (!entry || !now)
		return 0;
	for (slot = 0; slot < BRAID_MAX_LINKS; slot++)
		if (now->slots[slot].source4 == socket->skc_rcv_saddr)
			bits |= 1u << slot;
	/* A connect that was moved has its new address only from the next SYN on. */
	if (socket->skc_state == TCP_SYN_SENT) {
		connection = steered4(socket);
		if (connection)
			bits |= 1u << (connection->flow.slot & (BRAID_MAX_LINKS - 1));
	}
	entry->links |= bits;
	return 0;
}

/* Chooses another link for the flow and reserves its demand there; BRAID_NO_SLOT if there is none. Not inlined, to save stack. */
static __attribute__((noinline)) __u32 reserve_elsewhere(const struct braid_flow *flow, __u32 bank, __u32 allowed)
{
	struct request request = {};

	request.allowed = allowed;
	request.direction = flow->direction;
	request.demand = flow->demand;
	/* The request has no array entry: the flow keeps its own. */
	if (pick(&request, bank, 1, BRAID_NO_SLOT))
		return BRAID_NO_SLOT;
	return request.slot & (BRAID_MAX_LINKS - 1);
}

/*
 * Moves a flow's reservation to `slot`, on which `reserved` is already booked, and updates the flow's link. One step under the lock; does nothing if
 * the flow has ended in the meantime.
 */
BRAID_INLINE _Bool transfer(struct braid_flow *flow, __u64 id, const struct braid_params *now, __u32 slot, __u64 reserved, __u32 flags)
{
	struct load_table *shared = the_load_table();
	struct braid_link_load *old;
	_Bool done = 0;

	if (!shared)
		return 0;
	old = &shared->state.loads[flow->slot & (BRAID_MAX_LINKS - 1)];
	bpf_spin_lock(&shared->lock);
	if (flow->id == id && !(flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER))) {
		old->load[flow->direction & 1] -= flow->reserved;
		old->flows--;
		shared->removals++;
		flow->slot = slot;
		flow->ifindex = now->slots[slot & (BRAID_MAX_LINKS - 1)].ifindex;
		flow->reserved = reserved;
		flow->flags = (flow->flags & ~BRAID_FLOW_MOVING) | flags;
		done = 1;
	}
	bpf_spin_unlock(&shared->lock);
	return done;
}

BRAID_INLINE int set_mark(struct sock_common *socket, __u32 mark)
{
	return bpf_setsockopt(socket, SOL_SOCKET, SO_MARK, &mark, sizeof(mark));
}

static __attribute__((noinline)) int move_elsewhere(struct sock_common *socket, struct braid_flow *flow, const struct braid_params *now,
						    __u32 bank)
{
	__u32 from = flow->slot & (BRAID_MAX_LINKS - 1), to, none = 0, free, untried;
	__u64 id = flow->id, demand = flow->demand;
	struct ports ports = {};
	struct taken *entry;

	ports_of(socket, &ports);
	entry = bpf_map_lookup_elem(&taken, &ports);
	if (!entry || !is_due(flow) || bpf_ktime_get_ns() - entry->at > SEARCH_AGE_NS)
		return 0;
	free = now->usable[0] & ~(1u << from) & ~entry->links;
	untried = flow->untried & free ? flow->untried : flow->allowed;
	if (!(untried & free))
		return 0;
	to = reserve_elsewhere(flow, bank, untried & free);
	if (to == BRAID_NO_SLOT)
		return 0;
	if (set_mark(socket, BRAID_MARK_BASE | (from + 1) << 8 | (to + 1)))
		goto refused;
	if (bpf_setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, &none, sizeof(none))) {
		set_mark(socket, 0);
		goto refused;
	}
	record_timeout(flow, flow->resent | 1u << 31);
	if (!transfer(flow, id, now, to, demand, BRAID_FLOW_MOVING))
		goto ended;
	entry->links |= 1u << to;
	flow->untried = untried & ~(1u << from | 1u << to);
	flow->moves++;
	flow->last = bpf_ktime_get_ns();
	count(BRAID_COUNT_MOVED);
	return 0;
refused:
	count(BRAID_COUNT_FAILED);
ended:
	remove_from_load(to, flow->direction, demand);
	return 0;
}

/*
 * Binds the socket of an answered connect to the link whose address it has. That may be the old link, if the answer came just before the move took
 * effect.
 */
static __attribute__((noinline)) int bind_answered(struct sock_common *socket, struct braid_flow *flow, const struct braid_params *now)
{
	const void *number = as_number(socket);
	const struct sock *sk = number;
	__u32 address = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr), mark = BPF_CORE_READ(sk, sk_mark);
	__u32 to = flow->slot & (BRAID_MAX_LINKS - 1);
	const struct braid_slot *slot = &now->slots[to];
	__u64 id = flow->id, reserved = flow->reserved;

	if (slot->source4 != address) {
		__u32 from = ((mark >> 8 & 255) - 1) & (BRAID_MAX_LINKS - 1);

		slot = &now->slots[from];
		if (slot->source4 == address)
			to = from;
	}
	/* If the link cannot be determined, because it has several addresses, the mark stays: it then routes the socket's packets. */
	if (slot->ifindex && slot->source4 == address &&
	    !bpf_setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, (void *)slot->name, sizeof(slot->name)))
		set_mark(socket, 0);
	add_to_load(to, flow->direction, reserved, 1, 0);
	if (!transfer(flow, id, now, to, reserved, 0))
		remove_from_load(to, flow->direction, reserved);
	return 0;
}

SEC("iter/tcp")
int braid_move(struct bpf_iter__tcp *ctx)
{
	struct sock_common *socket = ctx->sk_common;
	const struct braid_params *now;
	struct connection *connection;
	__u32 bank;

	if (!socket || (socket->skc_state != TCP_SYN_SENT && !is_established(socket)))
		return 0;
	connection = steered4(socket);
	now = params_now(&bank);
	if (!connection || !now)
		return 0;
	if (socket->skc_state == TCP_SYN_SENT)
		move_elsewhere(socket, &connection->flow, now, bank);
	else if (connection->flow.flags & BRAID_FLOW_MOVING)
		bind_answered(socket, &connection->flow, now);
	return 0;
}
