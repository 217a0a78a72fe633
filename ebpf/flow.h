/* SPDX-License-Identifier: GPL-2.0-only */
/* The life of a flow: choice of the link, loads, byte counts, and the demand estimate that is updated at its end. */
#ifndef BRAID_FLOW_H
#define BRAID_FLOW_H

#include "redirect.h"

#define UDP_HEADER 8

BRAID_INLINE void affinity_key(const struct request *request, struct braid_affinity_key *key)
{
	key->app = request->app;
	if (request->affinity == BRAID_AFFINITY_DESTINATION)
		__builtin_memcpy(key->remote, request->remote, sizeof(key->remote));
	else
		__builtin_memset(key->remote, 0, sizeof(key->remote));
}

/*
 * Returns the slot to which affinity binds the request, or BRAID_NO_SLOT. This and `keep_held` are global functions apart from `pick`, because a
 * single frame for all of them, below those of sendmsg, would exceed the stack limit.
 */
__attribute__((noinline)) int held_slot(struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	struct braid_affinity_value *held;
	struct braid_affinity_key key;
	__u32 slot;

	if (!request || !now)
		return BRAID_NO_SLOT;
	affinity_key(request, &key);
	held = bpf_map_lookup_elem(&affinities, &key);
	if (!held)
		return BRAID_NO_SLOT;
	slot = held->slot & (BRAID_MAX_LINKS - 1);
	if (!(request->allowed & (1u << slot)) || now->slots[slot].ifindex != held->ifindex)
		return BRAID_NO_SLOT;
	held->used = bpf_ktime_get_ns();
	return slot;
}

/* Binds later requests with the same affinity to the slot of this request. */
__attribute__((noinline)) int keep_held(struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	struct braid_affinity_value held = {};
	struct braid_affinity_key key;

	if (!request || !now)
		return -1;
	affinity_key(request, &key);
	held.slot = request->slot;
	held.ifindex = now->slots[request->slot & (BRAID_MAX_LINKS - 1)].ifindex;
	held.used = bpf_ktime_get_ns();
	return bpf_map_update_elem(&affinities, &key, &held, BPF_ANY);
}

BRAID_INLINE struct connection *array_entry(__u64 id)
{
	__u32 place = id & (BRAID_CONNECTION_PLACES - 1);

	return bpf_map_lookup_elem(&connections, &place);
}

/*
 * Sets request->slot, to `slot` unless that is BRAID_NO_SLOT. If `reserve` is set, also reserves the demand on it and, for TCP, takes the flow's
 * array entry if it is free. All this is one step under one lock. The entry is pending until its flags change.
 */
__attribute__((noinline)) int pick(struct request *request, __u32 bank, __u32 reserve, __u32 slot)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	__u32 zero = 0;
	struct load_table *shared = bpf_map_lookup_elem(&load_table, &zero);
	struct connection *place = NULL;
	const struct packet_load *load = bpf_map_lookup_elem(&packets, &zero);

	if (!request || !now || !shared || !load)
		return -1;
	/* Forwarded flows have no entry there. */
	if (reserve && request->protocol == IPPROTO_TCP && request->id < BRAID_FORWARDED_ID)
		place = array_entry(request->id);
	bpf_spin_lock(&shared->lock);
	shared->state.packets[0] = load->bytes[0];
	shared->state.packets[1] = load->bytes[1];
	if (slot != BRAID_NO_SLOT)
		shared->state.winner = slot;
	else
		braid_pick(&shared->state, now, request->allowed, request->direction, request->demand);
	if (reserve) {
		braid_commit(&shared->state, now, request->direction, request->demand);
		shared->added += request->demand;
	}
	request->slot = shared->state.winner & (BRAID_MAX_LINKS - 1);
	if (place && (!place->flow.id || place->flow.id == request->id || (place->flow.flags & BRAID_FLOW_MARKER))) {
		place->flow.id = request->id;
		place->flow.flags = BRAID_FLOW_PENDING;
		request->placed = 1;
	}
	bpf_spin_unlock(&shared->lock);
	return 0;
}

/* Chooses request->slot and, if `reserve` is set, reserves the demand on it. */
BRAID_INLINE int choose(struct request *request, __u32 bank, __u32 reserve)
{
	__u32 slot = BRAID_NO_SLOT;

	if (request->affinity != BRAID_AFFINITY_NONE)
		slot = held_slot(request, bank);
	if (pick(request, bank, reserve, slot))
		return -1;
	if (request->affinity != BRAID_AFFINITY_NONE && slot == BRAID_NO_SLOT)
		keep_held(request, bank);
	return 0;
}

BRAID_INLINE struct load_table *the_load_table(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&load_table, &zero);
}

/*
 * Adds to a link's load. Takes the lock, as every change of a load must: a concurrent atomic addition would be lost when the lock's holder writes
 * back.
 */
BRAID_INLINE void add_to_load(__u32 slot, __u32 direction, __u64 load, __u32 flows, __u32 removals)
{
	struct load_table *shared = the_load_table();
	struct braid_link_load *link_load;

	if (!shared)
		return;
	link_load = &shared->state.loads[slot & (BRAID_MAX_LINKS - 1)];
	bpf_spin_lock(&shared->lock);
	link_load->load[direction & 1] += load;
	link_load->flows += flows;
	shared->removals += removals;
	bpf_spin_unlock(&shared->lock);
}

/* Removes one reservation from a link's load. */
BRAID_INLINE void remove_from_load(__u32 slot, __u32 direction, __u64 load)
{
	add_to_load(slot, direction, -load, -1, 1);
}

/*
 * Updates what an active flow reserves, together with the link's load, in one step. Does nothing if the flow is not active, because a dump may race
 * with the end of a flow and with the start of another in the same entry.
 */
BRAID_INLINE _Bool update_reservation(struct braid_flow *flow, __u64 id, __u64 reservation, _Bool end)
{
	struct load_table *shared = the_load_table();
	struct braid_link_load *link_load;
	_Bool done = 0;

	if (!shared)
		return 0;
	link_load = &shared->state.loads[flow->slot & (BRAID_MAX_LINKS - 1)];
	bpf_spin_lock(&shared->lock);
	if (flow->id == id && !(flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER))) {
		link_load->load[flow->direction & 1] += reservation - flow->reserved;
		flow->reserved = reservation;
		if (end) {
			link_load->flows--;
			shared->removals++;
			flow->flags |= BRAID_FLOW_MARKER;
		}
		done = 1;
	}
	bpf_spin_unlock(&shared->lock);
	return done;
}

/* Ends a flow: removes its reservation from the link's load, at most once. */
BRAID_INLINE _Bool release(struct braid_flow *flow, __u64 id)
{
	return update_reservation(flow, id, 0, 1);
}

BRAID_INLINE void unreserve(const struct request *request)
{
	struct connection *place = request->placed ? array_entry(request->id) : NULL;

	if (place)
		place->flow.flags = BRAID_FLOW_MARKER;
	remove_from_load(request->slot, request->direction, request->demand);
}

BRAID_INLINE void fill(struct braid_flow *flow, const struct braid_params *now, const struct request *request, __u64 id, __u32 flags)
{
	flow->id = id;
	flow->started = request->time;
	flow->last = request->time;
	flow->demand = request->demand;
	flow->reserved = flags & BRAID_FLOW_PENDING ? 0 : request->demand;
	flow->rx = 0;
	flow->tx = 0;
	flow->cgroup = request->cgroup;
	flow->app = request->app;
	__builtin_memcpy(flow->remote, request->remote, sizeof(flow->remote));
	flow->port = request->port;
	flow->protocol = request->protocol;
	flow->family = request->family;
	flow->slot = request->slot;
	flow->ifindex = now->slots[request->slot & (BRAID_MAX_LINKS - 1)].ifindex;
	flow->process = request->process;
	flow->user = request->user;
	flow->flags = flags | (request->filtered ? BRAID_FLOW_FILTERED : 0) | (request->strict ? BRAID_FLOW_STRICT : 0);
	flow->direction = request->direction;
	flow->class_ = request->class_;
	flow->scheduler = now->scheduler;
	flow->rule = request->rule;
	flow->answered = 0;
	flow->allowed = request->allowed;
	flow->untried = request->allowed & ~(1u << (request->slot & (BRAID_MAX_LINKS - 1)));
	flow->moves = 0;
	flow->resent = 0;
}

/* The active TCP flow with this id in the array, or NULL. It may be in `overflow`. */
BRAID_INLINE struct connection *find_in_array(__u64 id)
{
	struct connection *found = array_entry(id);

	return found && found->flow.id == id && !(found->flow.flags & BRAID_FLOW_MARKER) ? found : NULL;
}

/* The active TCP flow with this id, or NULL. */
BRAID_INLINE struct connection *connection_of(__u64 id)
{
	struct connection *found = find_in_array(id);

	return found ? found : bpf_map_lookup_elem(&overflow, &id);
}

/* The flow, active or ended, for which this socket was last steered; NULL if none is known. */
BRAID_INLINE struct connection *last_of(__u64 id)
{
	struct connection *found = array_entry(id);

	return found && found->flow.id == id ? found : bpf_map_lookup_elem(&overflow, &id);
}

/*
 * Tracks a TCP flow whose array entry is taken. Returns 0 on success. Storing the socket's pointer through a map update converts it to a number. This
 * and the next functions are not inlined, to stay within the stack limit of 512 bytes.
 */
static __attribute__((noinline)) int follow_overflow(struct bpf_sock *socket, const struct braid_params *now, const struct request *request)
{
	struct connection entry = {};
	__u64 cookie = request->id;

	fill(&entry.flow, now, request, cookie, 0);
	entry.socket = (__u64)socket;
	return bpf_map_update_elem(&overflow, &cookie, &entry, BPF_ANY);
}

/* Starts to track a TCP flow that has its array entry. */
static __attribute__((noinline)) int follow(struct bpf_sock *socket, const struct braid_params *now, const struct request *request)
{
	struct connection *own = array_entry(request->id);

	if (!own)
		return -1;
	fill(&own->flow, now, request, request->id, BRAID_FLOW_PENDING);
	own->flow.reserved = request->demand;
	own->socket = (__u64)socket;
	__asm__ volatile("" ::: "memory");
	own->flow.flags &= ~BRAID_FLOW_PENDING;
	return 0;
}

/* Reverts the reservation of a TCP flow that could not be steered. */
static __attribute__((noinline)) int unfollow(const struct request *request)
{
	struct connection *entry;
	__u64 id = request->id;

	if (request->placed) {
		unreserve(request);
		return 0;
	}
	entry = bpf_map_lookup_elem(&overflow, &id);
	if (entry)
		release(&entry->flow, id);
	bpf_map_delete_elem(&overflow, &id);
	return 0;
}

/* ------------------------------------------------------------------ timeouts */

/* Records and reports a segment that was not answered in time. `detail` is as in `struct braid_event`. */
BRAID_INLINE void record_timeout(const struct braid_flow *flow, __u32 detail)
{
	__u32 key = flow->slot;
	struct braid_signs *sign = bpf_map_lookup_elem(&signs, &key);
	struct braid_event *event;

	if (sign)
		__sync_fetch_and_add(&sign->timeouts[flow->family == 6], 1);
	event = new_event(BRAID_EVENT_SYMPTOM);
	if (!event)
		return;
	event->detail = detail;
	event->row.flow = *flow;
	bpf_ringbuf_submit(event, 0);
}

/* ------------------------------------------------------------------ the end of a flow */

BRAID_INLINE void read_tcp(const void *socket, struct braid_flow_row *row)
{
	const struct tcp_sock *tcp = socket;
	const struct sock *sk = socket;
	__u32 interval, delivered;

	row->state = BPF_CORE_READ(sk, __sk_common.skc_state);
	/* The kernel counts SYN and FIN as bytes. Once the handshake is answered, the SYN is acknowledged, so bytes_acked is not 0. */
	row->flow.answered = !!BPF_CORE_READ(tcp, bytes_acked);
	row->rx = BPF_CORE_READ(tcp, bytes_received);
	if (row->rx && (row->state == TCP_CLOSE_WAIT || row->state == TCP_LAST_ACK || row->state == TCP_CLOSING))
		row->rx--;
	/* Bytes that the program has written, acknowledged or not. */
	row->tx = BPF_CORE_READ(tcp, bytes_acked) + (__u32)(BPF_CORE_READ(tcp, write_seq) - BPF_CORE_READ(tcp, snd_una));
	if (row->tx)
		row->tx--;
	row->srtt_us = BPF_CORE_READ(tcp, srtt_us) >> 3;
	row->rcv_rtt_us = BPF_CORE_READ(tcp, rcv_rtt_est.rtt_us) >> 3;
	row->retransmissions = BPF_CORE_READ(tcp, total_retrans);
	row->segments_out = BPF_CORE_READ(tcp, segs_out);
	interval = BPF_CORE_READ(tcp, rate_interval_us);
	delivered = BPF_CORE_READ(tcp, rate_delivered);
	if (interval && !BPF_CORE_READ_BITFIELD_PROBED(tcp, rate_app_limited))
		row->delivery_rate = (__u64)delivered * BPF_CORE_READ(tcp, mss_cache) * 1000000 / interval;
}

BRAID_INLINE void read_local(const void *socket, struct braid_flow_row *row)
{
	const struct sock *sk = socket;

	row->local_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	if (row->flow.family == 4) {
		row->local[2] = bpf_htonl(0xffff);
		row->local[3] = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	} else {
		BPF_CORE_READ_INTO(&row->local, sk, __sk_common.skc_v6_rcv_saddr);
	}
}

/* The local end of a forwarded flow is its client. */
BRAID_INLINE void read_client(const struct braid_forward_key *key, struct braid_flow_row *row)
{
	row->local_port = key->client_port;
	__builtin_memcpy(row->local, key->client, sizeof(row->local));
}

BRAID_INLINE __u64 learn_step(__u64 estimate, __u64 sample)
{
	return estimate - (estimate >> 3) + (sample >> 3);
}

/* DBAS eq. 1 with a = 1/8, per application and remote port. A flow without bytes is not a sample. */
BRAID_INLINE void learn(const struct braid_flow_row *row)
{
	struct braid_demand_key key = {};
	struct braid_demand *known, first = {};

	if (row->rx + row->tx == 0)
		return;
	key.app = row->flow.app;
	key.port = row->flow.port;
	known = bpf_map_lookup_elem(&demands, &key);
	if (known) {
		known->down = learn_step(known->down, row->rx);
		known->up = learn_step(known->up, row->tx);
		known->updated = bpf_ktime_get_ns();
		known->count++;
		return;
	}
	first.down = row->rx;
	first.up = row->tx;
	first.updated = bpf_ktime_get_ns();
	first.count = 1;
	bpf_map_update_elem(&demands, &key, &first, BPF_ANY);
}

/* Whether the socket at this address has this cookie. The kernel reuses the memory of sockets, but never a cookie. */
BRAID_INLINE _Bool is_socket(const struct sock *sk, __u64 cookie)
{
	return (__u64)BPF_CORE_READ(sk, __sk_common.skc_cookie.counter) == cookie;
}

/*
 * Records that a link answered a handshake, which shows that it works. This is detected in a dump and at the end of a flow, because a program at
 * every handshake would run three times in each connect of the machine.
 */
BRAID_INLINE void record_answer_at(const struct braid_flow *flow, __u64 at)
{
	__u32 key = flow->slot, v6 = flow->family == 6;
	struct braid_signs *sign = bpf_map_lookup_elem(&signs, &key);

	if (!sign)
		return;
	__sync_fetch_and_add(&sign->answered[v6], 1);
	/* Flows are not examined in the order of their answers. */
	if (at < sign->answered_at[v6])
		return;
	sign->answered_at[v6] = at;
	if (flow->flags & BRAID_FLOW_STRICT)
		return;
	if (v6) {
		__builtin_memcpy(sign->remote6, flow->remote, sizeof(sign->remote6));
		sign->port6 = flow->port;
	} else {
		sign->remote4 = flow->remote[3];
		sign->port4 = flow->port;
	}
}

BRAID_INLINE void record_answer(const struct braid_flow_row *row)
{
	record_answer_at(&row->flow, row->flow.started + (__u64)row->srtt_us * 1000);
}

/* Ends the flow with this id if it is active. `socket` is NULL if the socket no longer exists, `forwarded` unless the flow is forwarded. */
BRAID_INLINE void end_flow(const struct sock *socket, const struct braid_forward_key *forwarded, struct braid_flow *flow, __u64 id)
{
	struct braid_event *event;

	if (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER))
		return;
	event = new_event(BRAID_EVENT_END);
	/*
	 * Test this here and not below: the verifier of Linux 6.1 forgets an earlier test for NULL and then reports that the event is not released.
	 */
	if (!event) {
		if (release(flow, id))
			count(BRAID_COUNT_ENDED);
		return;
	}
	event->row.flow = *flow;
	if (!release(flow, id)) {
		bpf_ringbuf_discard(event, BPF_RB_NO_WAKEUP);
		return;
	}
	count(BRAID_COUNT_ENDED);
	event->row.flow.reserved = 0;
	event->row.rx = event->row.flow.rx;
	event->row.tx = event->row.flow.tx;
	event->row.read_at = bpf_ktime_get_ns();
	if (forwarded)
		read_client(forwarded, &event->row);
	if (socket)
		read_local(socket, &event->row);
	if (socket && event->row.flow.protocol == IPPROTO_TCP) {
		_Bool recorded = event->row.flow.answered;

		read_tcp(socket, &event->row);
		if (event->row.flow.answered && !recorded)
			record_answer(&event->row);
	}
	learn(&event->row);
	submit_without_wakeup(event);
}

#endif
