/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Connection mode in the kernel: every connect and every unconnected datagram of this network namespace gets its link here, on
 * the caller's own socket, and the kernel does the rest. No program runs per TCP packet.
 *
 *   connect4/6    TCP: binds the socket to its link, once. Connected UDP: marks it, and a rule routes the mark.
 *   sendmsg4/6    unconnected UDP: writes the datagram's source address, and a rule routes that.
 *   sock_release  ends a flow: loads, demand, the event for the daemon.
 *   sockops       what connections suffer: SYNs and segments without an answer, handshakes answered.
 *   egress/ingress  count UDP, whose sockets have no counters of their own.
 *   flows         dumps the living flows and brings their reservations up to date.
 *
 * Fail open: nothing is touched when the heartbeat is old, the destination unknown, or anything at all goes wrong.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#include "kernel.h"
#include "schedule.h"

#define AF_INET 2
#define AF_INET6 10
#define SOL_SOCKET 1
#define SO_BINDTODEVICE 25
#define SO_MARK 36
#define SOCK_BINDADDR_LOCK 4
#define SOCK_BINDPORT_LOCK 8
#define TCP_SYN_SENT 2
#define TCP_CLOSE_WAIT 8
#define TCP_LAST_ACK 9
#define TCP_CLOSING 11
#define ENETUNREACH 101
#define DNS_PORT 53
#define DNS_TLS_PORT 853

#define ALLOW 1
#define DENY 0

/* What this kernel can do, set by the loader before loading. */
const volatile __u8 has_retval = 0;

struct board {
	struct bpf_spin_lock lock;
	__u32 pad;
	struct braid_board_state state;
};

#define MAP(NAME, TYPE, KEY, VALUE, ENTRIES, FLAGS)   \
	struct {                                      \
		__uint(type, TYPE);                   \
		__type(key, KEY);                     \
		__type(value, VALUE);                 \
		__uint(max_entries, ENTRIES);         \
		__uint(map_flags, FLAGS);             \
	} NAME SEC(".maps")

struct process_name {
	__u8 text[16];
};

struct lpm4 {
	__u32 len;
	__u32 addr;
};

struct address {
	__u32 word[4];
};

struct lpm6 {
	__u32 len;
	__u32 addr[4];
};

MAP(control, BPF_MAP_TYPE_ARRAY, __u32, struct braid_control, 1, 0);
MAP(params, BPF_MAP_TYPE_ARRAY, __u32, struct braid_params, 2, 0);
MAP(rules, BPF_MAP_TYPE_ARRAY, __u32, struct braid_rule, 2 * BRAID_MAX_RULES, 0);
MAP(board, BPF_MAP_TYPE_ARRAY, __u32, struct board, 1, 0);
MAP(corrections, BPF_MAP_TYPE_ARRAY, __u32, struct braid_lane, BRAID_MAX_LINKS, 0);
MAP(prefixes4, BPF_MAP_TYPE_LPM_TRIE, struct lpm4, __u8, 65536, BPF_F_NO_PREALLOC);
MAP(prefixes6, BPF_MAP_TYPE_LPM_TRIE, struct lpm6, __u8, 65536, BPF_F_NO_PREALLOC);
MAP(resolvers, BPF_MAP_TYPE_HASH, struct address, __u32, 256, 0);
MAP(executables, BPF_MAP_TYPE_HASH, struct braid_exe_key, struct braid_exe, 1024, 0);
MAP(names, BPF_MAP_TYPE_HASH, struct process_name, struct braid_app, 1024, 0);
MAP(apps, BPF_MAP_TYPE_LRU_HASH, struct braid_app_key, struct braid_app, 4096, 0);
MAP(demands, BPF_MAP_TYPE_LRU_HASH, struct braid_demand_key, struct braid_demand, 16384, 0);
MAP(affinities, BPF_MAP_TYPE_LRU_HASH, struct braid_affinity_key, struct braid_affinity_value, 16384, 0);
MAP(datagrams, BPF_MAP_TYPE_LRU_HASH, struct braid_datagram_key, struct braid_flow, 16384, 0);
MAP(signs, BPF_MAP_TYPE_ARRAY, __u32, struct braid_signs, BRAID_MAX_LINKS, 0);
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, BRAID_COUNTERS, 0);

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct braid_flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

BRAID_INLINE void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);

	if (counter)
		(*counter)++;
}

/* ------------------------------------------------------------------ the caller and the destination */

/* Who wants to reach what, and what was decided about it. */
struct request {
	struct braid_app_key app;
	__u64 cgroup;
	__u64 demand;
	__u32 remote[4]; /* IPv6 or IPv4-mapped, network order */
	__u32 source[4]; /* what an earlier connect of this UDP socket left behind, likewise; zero: nothing */
	__u32 user;
	__u32 process;
	__u32 allowed;
	__u32 slot;
	__u16 port; /* host order */
	__u8 family; /* 4 or 6, of the packets */
	__u8 protocol;
	__u8 direction;
	__u8 class_;
	__u8 affinity;
	__u8 rule;
	__u32 bank;
	__u32 pad;
};

static const struct braid_flow no_flow;

BRAID_INLINE void read_caller(struct request *request)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct inode *inode = BPF_CORE_READ(task, mm, exe_file, f_inode);
	struct task_struct *leader = BPF_CORE_READ(task, group_leader);

	request->app.exe.inode = BPF_CORE_READ(inode, i_ino);
	request->app.exe.device = BPF_CORE_READ(inode, i_sb, s_dev);
	BPF_CORE_READ_INTO(&request->app.name, leader, comm);
	request->cgroup = bpf_get_current_cgroup_id();
	request->user = (__u32)bpf_get_current_uid_gid();
	request->process = bpf_get_current_pid_tgid() >> 32;
}

/* The bank of parameters in force, or NULL where Braid must not act: no live daemon, another network namespace, the daemon itself. */
BRAID_INLINE const struct braid_params *acting(struct bpf_sock_addr *ctx, __u32 *bank)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	const struct braid_params *found;

	if (!switches || bpf_ktime_get_ns() - switches->heartbeat > BRAID_HEARTBEAT_NS)
		return NULL;
	*bank = switches->bank & 1;
	found = bpf_map_lookup_elem(&params, bank);
	if (!found || bpf_get_netns_cookie(ctx) != found->netns || bpf_get_current_pid_tgid() >> 32 == found->daemon)
		return NULL;
	return found;
}

BRAID_INLINE _Bool is_mapped(const __u32 *addr)
{
	return addr[0] == 0 && addr[1] == 0 && addr[2] == bpf_htonl(0xffff);
}

BRAID_INLINE void set_remote4(struct request *request, __u32 addr)
{
	request->remote[0] = 0;
	request->remote[1] = 0;
	request->remote[2] = bpf_htonl(0xffff);
	request->remote[3] = addr;
	request->family = 4;
}

/* Whether the kernel's own choice for the destination is a link; what is unknown is not. */
BRAID_INLINE _Bool steerable(const struct request *request)
{
	__u8 *verdict;

	if (request->family == 4) {
		struct lpm4 key = { .len = 32, .addr = request->remote[3] };

		verdict = bpf_map_lookup_elem(&prefixes4, &key);
	} else {
		struct lpm6 key = { .len = 128 };

		__builtin_memcpy(key.addr, request->remote, sizeof(key.addr));
		verdict = bpf_map_lookup_elem(&prefixes6, &key);
	}
	return verdict && *verdict == BRAID_STEER;
}

/*
 * The verifier lets nobody add an offset to a socket's pointer, so its fields cannot be found by CO-RE. Copied by way of the
 * stack, the pointer is just a number, which the probing reads accept.
 */
BRAID_INLINE const void *as_number(const void *pointer)
{
	const void *number = NULL;

	bpf_probe_read_kernel(&number, sizeof(number), &pointer);
	return number;
}

/* What the program itself asked of its socket. */
struct wishes {
	__u32 device;
	__u32 mark;
	__u8 locks;
};

BRAID_INLINE void read_wishes(struct bpf_sock *socket, struct wishes *wishes)
{
	const struct inet_sock *inet = as_number(socket);
	struct ipv6_pinfo *inet6 = BPF_CORE_READ(inet, pinet6);

	wishes->mark = socket->mark;
	wishes->locks = BPF_CORE_READ_BITFIELD_PROBED(&inet->sk, sk_userlocks);
	wishes->device = socket->bound_dev_if | BPF_CORE_READ(inet, uc_index);
	if (inet6)
		wishes->device |= BPF_CORE_READ(inet6, ucast_oif);
}

BRAID_INLINE void read_source(struct bpf_sock *socket, struct request *request)
{
	const struct sock *sk = as_number(socket);

	if (request->family == 4)
		request->source[3] = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	else
		BPF_CORE_READ_INTO(&request->source, sk, __sk_common.skc_v6_rcv_saddr);
}

BRAID_INLINE _Bool is_ours(__u32 mark)
{
	return (mark & BRAID_MARK_MASK) == BRAID_MARK_BASE;
}

/* ------------------------------------------------------------------ policy */

/* Global, like `judge` and `choose` below: walked by the verifier once, not once for every rule there may be. */
__attribute__((noinline)) int matches(const struct request *request, __u32 key)
{
	const struct braid_rule *rule = bpf_map_lookup_elem(&rules, &key);
	__u32 conditions;

	if (!request || !rule)
		return 0;
	conditions = rule->conditions;
	if (conditions & BRAID_NEVER)
		return 0;
	if ((conditions & BRAID_IF_PORT) && rule->port != request->port)
		return 0;
	if ((conditions & BRAID_IF_USER) && rule->user != request->user)
		return 0;
	if (conditions & BRAID_IF_NAME) {
		const __u64 *want = (const __u64 *)rule->name, *have = (const __u64 *)request->app.name;

		if (want[0] != have[0] || want[1] != have[1])
			return 0;
	}
	if (conditions & BRAID_IF_EXE) {
		struct braid_exe *exe = bpf_map_lookup_elem(&executables, &request->app.exe);

		if (!exe || exe->id[request->bank & 1] != rule->exe)
			return 0;
	}
	if ((conditions & BRAID_IF_CGROUP) && bpf_get_current_ancestor_cgroup_id(rule->cgroup_level) != rule->cgroup)
		return 0;
	if (conditions & BRAID_IF_DESTINATION) {
		__u32 left = rule->prefix_len;

		for (int word = 0; word < 4; word++) {
			__u32 bits = left > 32 ? 32 : left;
			__u32 mask = bits ? bpf_htonl(~0u << (32 - bits)) : 0;

			if ((rule->destination[word] ^ request->remote[word]) & mask)
				return 0;
			left -= bits;
		}
	}
	return 1;
}

/* The rule that decides, or NULL. */
BRAID_INLINE const struct braid_rule *first_match(__u32 bank, const struct braid_params *now, struct request *request)
{
	request->rule = 255;
	for (__u32 index = 0; index < BRAID_MAX_RULES; index++) {
		__u32 key = bank * BRAID_MAX_RULES + index;

		if (index >= now->rules)
			break;
		if (matches(request, key)) {
			request->rule = index;
			return bpf_map_lookup_elem(&rules, &key);
		}
	}
	return NULL;
}

BRAID_INLINE struct braid_event *new_event(__u32 kind)
{
	struct braid_event *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);

	if (!event) {
		count(BRAID_COUNT_LOST_EVENTS);
		return NULL;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->kind = kind;
	return event;
}

/* The application's class; one never seen is introduced to the daemon, which can still read its path from /proc. */
BRAID_INLINE __u8 class_of(const struct request *request)
{
	struct braid_app *known = bpf_map_lookup_elem(&apps, &request->app);
	struct braid_app fresh = {}, *named;
	struct braid_event *event;

	if (known)
		return known->class_;
	named = bpf_map_lookup_elem(&names, &request->app.name);
	if (named)
		fresh.class_ = named->class_;
	bpf_map_update_elem(&apps, &request->app, &fresh, BPF_NOEXIST);
	event = new_event(BRAID_EVENT_APP);
	if (event) {
		event->row.flow.app = request->app;
		event->row.flow.process = request->process;
		event->row.flow.user = request->user;
		event->row.flow.cgroup = request->cgroup;
		event->row.flow.class_ = fresh.class_;
		bpf_ringbuf_submit(event, 0);
	}
	return fresh.class_;
}

BRAID_INLINE void expect(const struct braid_params *now, struct request *request)
{
	struct braid_demand_key key = {};
	struct braid_demand *known;

	key.app = request->app;
	key.port = request->port;
	known = bpf_map_lookup_elem(&demands, &key);
	request->direction = BRAID_DOWN;
	request->demand = now->default_demand;
	if (known) {
		request->demand = known->down + known->up;
		if (known->up > known->down)
			request->direction = BRAID_UP;
	}
}

enum judgement { GO_ON, LEAVE_ALONE, FAIL };

/*
 * The links whose address the socket already has. The kernel keeps the source address of a UDP socket that is connected again
 * (unless it is disconnected in between), so it must keep its link too.
 */
BRAID_INLINE __u32 with_source(const struct braid_params *now, const struct request *request)
{
	__u32 mask = 0;

	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		const struct braid_slot *link = &now->slots[slot];
		__u64 differs;

		if (request->family == 4)
			differs = link->source4 ^ request->source[3];
		else
			differs = (link->source6[0] ^ request->source[0]) | (link->source6[1] ^ request->source[1]) |
				  (link->source6[2] ^ request->source[2]) | (link->source6[3] ^ request->source[3]);
		mask |= braid_is_zero(differs) << slot;
	}
	return mask;
}

/*
 * Judges a request by policy: GO_ON with `request->allowed`, or what else to do with it.
 *
 * This function and `choose` are global, so that the verifier walks each of them once, not once for every way that leads there.
 */
__attribute__((noinline)) int judge(struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	const struct braid_rule *rule;
	__u32 usable, *pinned;
	_Bool denied;

	if (!request || !now)
		return LEAVE_ALONE;
	request->bank = bank;
	rule = first_match(bank, now, request);
	usable = now->usable[request->family == 6];
	if (rule && (rule->actions & BRAID_DO_EXCLUDE))
		return LEAVE_ALONE;
	request->class_ = class_of(request);
	request->affinity = BRAID_AFFINITY_UNSET;
	if (rule) {
		if (rule->class_ != BRAID_CLASS_UNSET)
			request->class_ = rule->class_;
		request->affinity = rule->affinity;
	}
	if (request->affinity == BRAID_AFFINITY_UNSET)
		request->affinity = now->affinity;
	if (request->affinity == BRAID_AFFINITY_UNSET)
		request->affinity = request->class_ == BRAID_BROWSER ? BRAID_AFFINITY_DESTINATION : BRAID_AFFINITY_NONE;
	request->allowed = braid_admit(usable, now->backup, rule ? rule->actions : 0, rule ? rule->links : 0, rule ? rule->prefer : 0,
				       &denied);
	if (denied)
		return FAIL;
	if (!request->allowed)
		return LEAVE_ALONE;
	if (request->source[0] | request->source[1] | request->source[3]) {
		request->allowed &= with_source(now, request);
		if (!request->allowed)
			return rule && (rule->actions & BRAID_DO_LINKS) ? FAIL : LEAVE_ALONE;
	}
	if (request->port == DNS_PORT || request->port == DNS_TLS_PORT) {
		pinned = bpf_map_lookup_elem(&resolvers, request->remote);
		if (pinned && (*pinned & request->allowed))
			request->allowed &= *pinned;
	}
	expect(now, request);
	return GO_ON;
}

/* ------------------------------------------------------------------ choice and reservation */

BRAID_INLINE void affinity_key(const struct request *request, struct braid_affinity_key *key)
{
	key->app = request->app;
	if (request->affinity == BRAID_AFFINITY_DESTINATION)
		__builtin_memcpy(key->remote, request->remote, sizeof(key->remote));
	else
		__builtin_memset(key->remote, 0, sizeof(key->remote));
}

/* Chooses request->slot and, if asked to, reserves the demand on it: one step under one lock. */
__attribute__((noinline)) int choose(struct request *request, __u32 bank, __u32 reserve)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	struct braid_affinity_key key;
	__u32 zero = 0, slot = BRAID_NO_SLOT;
	struct board *shared = bpf_map_lookup_elem(&board, &zero);

	if (!request || !now || !shared)
		return -1;
	if (request->affinity != BRAID_AFFINITY_NONE) {
		struct braid_affinity_value *held;

		affinity_key(request, &key);
		held = bpf_map_lookup_elem(&affinities, &key);
		if (held) {
			__u32 old = held->slot & (BRAID_MAX_LINKS - 1);

			if ((request->allowed & (1u << old)) && now->slots[old].ifindex == held->ifindex) {
				slot = old;
				held->used = bpf_ktime_get_ns();
			}
		}
	}
	bpf_spin_lock(&shared->lock);
	if (slot != BRAID_NO_SLOT)
		shared->state.winner = slot;
	else
		braid_pick(&shared->state, now, request->allowed, request->direction, request->demand);
	if (reserve)
		braid_commit(&shared->state, now, request->direction, request->demand);
	request->slot = shared->state.winner & (BRAID_MAX_LINKS - 1);
	bpf_spin_unlock(&shared->lock);
	if (request->affinity != BRAID_AFFINITY_NONE && slot == BRAID_NO_SLOT) {
		struct braid_affinity_value held = { .slot = request->slot };

		held.ifindex = now->slots[request->slot & (BRAID_MAX_LINKS - 1)].ifindex;
		held.used = bpf_ktime_get_ns();
		bpf_map_update_elem(&affinities, &key, &held, BPF_ANY);
	}
	return 0;
}

BRAID_INLINE struct braid_lane *lane_of(__u32 slot)
{
	__u32 zero = 0;
	struct board *shared = bpf_map_lookup_elem(&board, &zero);

	return shared ? &shared->state.lanes[slot & (BRAID_MAX_LINKS - 1)] : NULL;
}

BRAID_INLINE void add_load(struct braid_lane *lane, __u32 direction, __s64 amount)
{
	__sync_fetch_and_add(&lane->load[direction & 1], amount);
}

BRAID_INLINE void release(struct braid_flow *flow)
{
	struct braid_lane *lane = lane_of(flow->slot);

	if (!lane || (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)))
		return;
	add_load(lane, flow->direction, -(__s64)flow->reserved);
	__sync_fetch_and_add(&lane->flows, -1);
	flow->reserved = 0;
}

BRAID_INLINE void unreserve(const struct request *request)
{
	struct braid_lane *lane = lane_of(request->slot);

	if (!lane)
		return;
	add_load(lane, request->direction, -(__s64)request->demand);
	__sync_fetch_and_add(&lane->flows, -1);
}

BRAID_INLINE void fill(struct braid_flow *flow, const struct braid_params *now, const struct request *request, __u64 id, __u32 flags)
{
	flow->id = id;
	flow->started = bpf_ktime_get_ns();
	flow->last = flow->started;
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
	flow->flags = flags;
	flow->direction = request->direction;
	flow->class_ = request->class_;
	flow->scheduler = now->scheduler;
	flow->rule = request->rule;
}

/* ------------------------------------------------------------------ the end of a flow */

BRAID_INLINE void read_tcp(const void *socket, struct braid_flow_row *row)
{
	const struct tcp_sock *tcp = socket;
	const struct sock *sk = socket;
	__u32 interval, delivered;

	row->state = BPF_CORE_READ(sk, __sk_common.skc_state);
	/* The kernel counts SYN and FIN as bytes. */
	row->rx = BPF_CORE_READ(tcp, bytes_received);
	if (row->rx && (row->state == TCP_CLOSE_WAIT || row->state == TCP_LAST_ACK || row->state == TCP_CLOSING))
		row->rx--;
	/* What the program has written, acknowledged or not. */
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

BRAID_INLINE __u64 learn_step(__u64 estimate, __u64 sample)
{
	return estimate - (estimate >> 3) + (sample >> 3);
}

/* DBAS eq. 1 with a = 1/8, per application and remote port. What moved nothing teaches nothing. */
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

BRAID_INLINE void end_flow(const void *socket, struct braid_flow *flow)
{
	struct braid_event *event;

	if (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER))
		return;
	socket = as_number(socket);
	release(flow);
	count(BRAID_COUNT_ENDED);
	event = new_event(BRAID_EVENT_END);
	if (event)
		event->row.flow = *flow;
	/* The kernel may keep the socket for a while: it is no flow any more. */
	flow->flags |= BRAID_FLOW_MARKER;
	if (!event)
		return;
	event->row.rx = flow->rx;
	event->row.tx = flow->tx;
	event->row.read_at = bpf_ktime_get_ns();
	read_local(socket, &event->row);
	if (flow->protocol == IPPROTO_TCP)
		read_tcp(socket, &event->row);
	learn(&event->row);
	bpf_ringbuf_submit(event, 0);
}

SEC("cgroup/sock_release")
int braid_release(struct bpf_sock *ctx)
{
	struct braid_flow *flow = bpf_sk_storage_get(&flows, ctx, NULL, 0);

	if (flow)
		end_flow(ctx, flow);
	return ALLOW;
}

/* ------------------------------------------------------------------ connect */

BRAID_INLINE int refuse(void)
{
	count(BRAID_COUNT_DENIED);
	if (has_retval)
		bpf_set_retval(-ENETUNREACH);
	return DENY;
}

/* Takes back what an earlier connect of this UDP socket was given. */
BRAID_INLINE void forget(struct bpf_sock_addr *ctx, struct bpf_sock *socket, struct braid_flow *old, __u32 mark)
{
	__u32 none = 0;

	if (old) {
		end_flow(socket, old);
		bpf_sk_storage_delete(&flows, socket);
	}
	if (is_ours(mark))
		bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &none, sizeof(none));
}

BRAID_INLINE int steer_tcp(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_params *now, __u32 bank,
			   struct request *request)
{
	const struct braid_slot *slot;
	struct braid_flow *flow;

	if (choose(request, bank, 1))
		return ALLOW;
	slot = &now->slots[request->slot & (BRAID_MAX_LINKS - 1)];
	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, (void *)slot->name, sizeof(slot->name))) {
		unreserve(request);
		count(BRAID_COUNT_FAILED);
		return ALLOW;
	}
	flow = bpf_sk_storage_get(&flows, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flow) {
		unreserve(request);
		count(BRAID_COUNT_UNTRACKED);
		return ALLOW;
	}
	fill(flow, now, request, bpf_get_socket_cookie(ctx), 0);
	count(BRAID_COUNT_STEERED);
	return ALLOW;
}

BRAID_INLINE int steer_udp(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_params *now, __u32 bank,
			   struct request *request)
{
	struct braid_flow *flow;
	__u32 mark;

	if (choose(request, bank, 0))
		return ALLOW;
	mark = now->slots[request->slot & (BRAID_MAX_LINKS - 1)].mark;
	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &mark, sizeof(mark))) {
		count(BRAID_COUNT_FAILED);
		return ALLOW;
	}
	flow = bpf_sk_storage_get(&flows, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flow) {
		count(BRAID_COUNT_UNTRACKED);
		return ALLOW;
	}
	fill(flow, now, request, bpf_get_socket_cookie(ctx), BRAID_FLOW_PENDING);
	return ALLOW;
}

BRAID_INLINE int intercept_connect(struct bpf_sock_addr *ctx, struct request *request)
{
	struct bpf_sock *socket = ctx->sk;
	const struct braid_params *now;
	struct braid_flow *old;
	struct wishes wishes;
	int judgement;
	__u32 bank;

	if (!socket || (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP))
		return ALLOW;
	now = acting(ctx, &bank);
	if (!now)
		return ALLOW;
	request->protocol = ctx->protocol;
	request->port = bpf_ntohs((__u16)ctx->user_port);
	old = bpf_sk_storage_get(&flows, socket, NULL, 0);
	if (old && request->protocol == IPPROTO_TCP)
		return ALLOW; /* a retry keeps its link */
	read_wishes(socket, &wishes);
	if (request->protocol == IPPROTO_UDP)
		forget(ctx, socket, old, wishes.mark);
	if (wishes.device || (wishes.locks & SOCK_BINDADDR_LOCK) || (wishes.mark && !is_ours(wishes.mark)) ||
	    (request->protocol == IPPROTO_UDP && (wishes.locks & SOCK_BINDPORT_LOCK)) || !steerable(request)) {
		count(BRAID_COUNT_LEFT);
		return ALLOW;
	}
	if (request->protocol == IPPROTO_UDP)
		read_source(socket, request);
	read_caller(request);
	judgement = judge(request, bank);
	if (judgement == FAIL)
		return refuse();
	if (judgement == LEAVE_ALONE) {
		count(BRAID_COUNT_LEFT);
		return ALLOW;
	}
	return request->protocol == IPPROTO_TCP ? steer_tcp(ctx, socket, now, bank, request) : steer_udp(ctx, socket, now, bank, request);
}

SEC("cgroup/connect4")
int braid_connect4(struct bpf_sock_addr *ctx)
{
	struct request request = {};

	set_remote4(&request, ctx->user_ip4);
	return intercept_connect(ctx, &request);
}

SEC("cgroup/connect6")
int braid_connect6(struct bpf_sock_addr *ctx)
{
	struct request request = { .family = 6 };

	request.remote[0] = ctx->user_ip6[0];
	request.remote[1] = ctx->user_ip6[1];
	request.remote[2] = ctx->user_ip6[2];
	request.remote[3] = ctx->user_ip6[3];
	if (is_mapped(request.remote))
		request.family = 4;
	return intercept_connect(ctx, &request);
}

/* ------------------------------------------------------------------ unconnected datagrams */

/* The slot this datagram goes out of, or BRAID_NO_SLOT to leave it alone; -1 in *verdict fails it. */
BRAID_INLINE __u32 route_datagram(struct bpf_sock_addr *ctx, struct request *request, const struct braid_params **bank_in_force, int *verdict)
{
	struct bpf_sock *socket = ctx->sk;
	struct braid_datagram_key key = {};
	const struct braid_params *now;
	struct braid_flow *flow, *marker;
	struct wishes wishes;
	int judgement;
	__u32 bank;

	*verdict = ALLOW;
	if (!socket || ctx->protocol != IPPROTO_UDP)
		return BRAID_NO_SLOT;
	now = acting(ctx, &bank);
	if (!now)
		return BRAID_NO_SLOT;
	*bank_in_force = now;
	request->protocol = IPPROTO_UDP;
	request->port = bpf_ntohs((__u16)ctx->user_port);
	read_wishes(socket, &wishes);
	if (wishes.device || wishes.mark || (wishes.locks & (SOCK_BINDADDR_LOCK | SOCK_BINDPORT_LOCK)) || !steerable(request)) {
		count(BRAID_COUNT_LEFT);
		return BRAID_NO_SLOT;
	}
	key.socket = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key.remote, request->remote, sizeof(key.remote));
	key.port = request->port;
	flow = bpf_map_lookup_elem(&datagrams, &key);
	if (flow) {
		__u32 slot = flow->slot & (BRAID_MAX_LINKS - 1);
		__u32 usable = now->usable[request->family == 6];

		if ((usable & (1u << slot)) && now->slots[slot].ifindex == flow->ifindex)
			return slot;
	}
	read_caller(request);
	judgement = judge(request, bank);
	if (judgement == FAIL) {
		*verdict = refuse();
		return BRAID_NO_SLOT;
	}
	if (judgement == LEAVE_ALONE) {
		count(BRAID_COUNT_LEFT);
		return BRAID_NO_SLOT;
	}
	if (choose(request, bank, 1))
		return BRAID_NO_SLOT;
	if (flow)
		release(flow);
	else
		bpf_map_update_elem(&datagrams, &key, &no_flow, BPF_ANY);
	flow = bpf_map_lookup_elem(&datagrams, &key);
	marker = bpf_sk_storage_get(&flows, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flow || !marker) {
		unreserve(request);
		count(BRAID_COUNT_UNTRACKED);
		return request->slot;
	}
	marker->flags = BRAID_FLOW_MARKER;
	fill(flow, now, request, key.socket, 0);
	count(BRAID_COUNT_STEERED);
	return request->slot;
}

SEC("cgroup/sendmsg4")
int braid_sendmsg4(struct bpf_sock_addr *ctx)
{
	struct request request = {};
	const struct braid_params *now = NULL;
	int verdict;
	__u32 slot;

	if (ctx->msg_src_ip4)
		return ALLOW; /* the program, or an earlier connect, chose it */
	set_remote4(&request, ctx->user_ip4);
	slot = route_datagram(ctx, &request, &now, &verdict);
	if (slot < BRAID_MAX_LINKS && now)
		ctx->msg_src_ip4 = now->slots[slot].source4;
	return verdict;
}

SEC("cgroup/sendmsg6")
int braid_sendmsg6(struct bpf_sock_addr *ctx)
{
	struct request request = { .family = 6 };
	const struct braid_params *now = NULL;
	int verdict;
	__u32 slot;

	if (ctx->msg_src_ip6[0] | ctx->msg_src_ip6[1] | ctx->msg_src_ip6[2] | ctx->msg_src_ip6[3])
		return ALLOW;
	request.remote[0] = ctx->user_ip6[0];
	request.remote[1] = ctx->user_ip6[1];
	request.remote[2] = ctx->user_ip6[2];
	request.remote[3] = ctx->user_ip6[3];
	if (is_mapped(request.remote))
		return ALLOW; /* the kernel asks again, as IPv4 */
	slot = route_datagram(ctx, &request, &now, &verdict);
	if (slot < BRAID_MAX_LINKS && now) {
		ctx->msg_src_ip6[0] = now->slots[slot].source6[0];
		ctx->msg_src_ip6[1] = now->slots[slot].source6[1];
		ctx->msg_src_ip6[2] = now->slots[slot].source6[2];
		ctx->msg_src_ip6[3] = now->slots[slot].source6[3];
	}
	return verdict;
}

/* ------------------------------------------------------------------ counting UDP */

/* The remote address of a packet; 0 if it is no UDP packet that can be read. */
BRAID_INLINE int remote_of(struct __sk_buff *skb, struct braid_datagram_key *key, _Bool out)
{
	__u8 head[44];
	__u32 offset;

	if (skb->protocol == bpf_htons(0x0800)) {
		if (bpf_skb_load_bytes(skb, 0, head, 20))
			return 0;
		key->remote[2] = bpf_htonl(0xffff);
		__builtin_memcpy(&key->remote[3], head + (out ? 16 : 12), 4);
		offset = (head[0] & 15) * 4;
	} else {
		if (bpf_skb_load_bytes(skb, 0, head, 40))
			return 0;
		__builtin_memcpy(key->remote, head + (out ? 24 : 8), 16);
		offset = 40;
	}
	if (bpf_skb_load_bytes(skb, offset, head, 4))
		return 0;
	key->port = out ? head[2] << 8 | head[3] : head[0] << 8 | head[1];
	return 1;
}

/* A connected socket's first byte makes it a flow. */
BRAID_INLINE void begin(struct braid_flow *flow)
{
	__u32 zero = 0, bank;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	struct board *shared = bpf_map_lookup_elem(&board, &zero);
	const struct braid_params *now;

	if (!switches || !shared)
		return;
	bank = switches->bank & 1;
	now = bpf_map_lookup_elem(&params, &bank);
	if (!now)
		return;
	flow->flags &= ~BRAID_FLOW_PENDING;
	flow->started = bpf_ktime_get_ns();
	flow->reserved = flow->demand;
	bpf_spin_lock(&shared->lock);
	shared->state.winner = flow->slot;
	braid_commit(&shared->state, now, flow->direction, flow->demand);
	bpf_spin_unlock(&shared->lock);
	count(BRAID_COUNT_STEERED);
}

BRAID_INLINE int count_datagram(struct __sk_buff *skb, _Bool out)
{
	struct bpf_sock *socket = skb->sk;
	struct braid_flow *flow;

	if (!socket)
		return ALLOW;
	socket = bpf_sk_fullsock(socket);
	if (!socket || socket->protocol != IPPROTO_UDP)
		return ALLOW;
	flow = bpf_sk_storage_get(&flows, socket, NULL, 0);
	if (!flow)
		return ALLOW;
	if (flow->flags & BRAID_FLOW_MARKER) {
		struct braid_datagram_key key = {};

		key.socket = bpf_get_socket_cookie(skb);
		if (!remote_of(skb, &key, out))
			return ALLOW;
		flow = bpf_map_lookup_elem(&datagrams, &key);
		if (!flow)
			return ALLOW;
	}
	if (flow->flags & BRAID_FLOW_PENDING) {
		if (!out)
			return ALLOW;
		begin(flow);
	}
	__sync_fetch_and_add(out ? &flow->tx : &flow->rx, skb->len);
	flow->last = bpf_ktime_get_ns();
	return ALLOW;
}

SEC("cgroup_skb/egress")
int braid_egress(struct __sk_buff *skb)
{
	return count_datagram(skb, 1);
}

SEC("cgroup_skb/ingress")
int braid_ingress(struct __sk_buff *skb)
{
	return count_datagram(skb, 0);
}

/* ------------------------------------------------------------------ what connections suffer */

BRAID_INLINE void note_answer(struct bpf_sock_ops *ctx, const struct braid_flow *flow)
{
	__u32 key = flow->slot, v6 = flow->family == 6;
	struct braid_signs *sign = bpf_map_lookup_elem(&signs, &key);

	if (!sign)
		return;
	__sync_fetch_and_add(&sign->answered[v6], 1);
	sign->answered_at[v6] = bpf_ktime_get_ns();
	if (v6) {
		__builtin_memcpy(sign->remote6, flow->remote, sizeof(sign->remote6));
		sign->port6 = flow->port;
	} else {
		sign->remote4 = flow->remote[3];
		sign->port4 = flow->port;
	}
}

BRAID_INLINE void note_timeout(struct bpf_sock_ops *ctx, const struct braid_flow *flow)
{
	__u32 key = flow->slot;
	struct braid_signs *sign = bpf_map_lookup_elem(&signs, &key);
	struct braid_event *event;

	if (sign)
		__sync_fetch_and_add(&sign->timeouts[flow->family == 6], 1);
	event = new_event(BRAID_EVENT_SUFFERING);
	if (!event)
		return;
	event->detail = ctx->args[0];
	if (ctx->state == TCP_SYN_SENT)
		event->detail |= 1u << 31;
	event->row.flow = *flow;
	bpf_ringbuf_submit(event, 0);
}

SEC("sockops")
int braid_sockops(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *socket;
	struct braid_flow *flow;

	if (ctx->op != BPF_SOCK_OPS_TCP_CONNECT_CB && ctx->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && ctx->op != BPF_SOCK_OPS_RTO_CB)
		return 1;
	socket = ctx->sk;
	if (!socket)
		return 1;
	flow = bpf_sk_storage_get(&flows, socket, NULL, 0);
	if (!flow)
		return 1;
	if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTO_CB_FLAG);
	else if (ctx->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		note_answer(ctx, flow);
	else
		note_timeout(ctx, flow);
	return 1;
}

/* ------------------------------------------------------------------ the dump */

/* A flow that neither sends nor receives for this long weighs nothing until it does again. */
#define IDLE_NS 10000000000ull

/* What a flow is still expected to move: max(C - moved, moved), so that one that outlives its estimate still weighs. */
BRAID_INLINE __u64 remaining(__u64 demand, __u64 moved)
{
	__u64 rest = demand > moved ? demand - moved : 0;

	return rest > moved ? rest : moved;
}

BRAID_INLINE void refresh(struct braid_flow *flow, __u64 moved, __u64 last, __u64 now)
{
	struct braid_lane *lane = lane_of(flow->slot);
	__u64 weight = now - last > IDLE_NS ? 0 : remaining(flow->demand, moved);

	if (!lane)
		return;
	add_load(lane, flow->direction, (__s64)weight - (__s64)flow->reserved);
	flow->reserved = weight;
}

BRAID_INLINE void apply_corrections(void)
{
	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		__u32 key = slot;
		struct braid_lane *wrong = bpf_map_lookup_elem(&corrections, &key), *lane = lane_of(slot);

		if (!wrong || !lane)
			continue;
		for (int direction = 0; direction < 2; direction++)
			__sync_fetch_and_add(&lane->load[direction], wrong->load[direction]);
		__sync_fetch_and_add(&lane->flows, wrong->flows);
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
	__u64 moved;

	if (!socket || !flow) {
		apply_corrections();
		return 0;
	}
	if (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER))
		return 0;
	row.read_at = bpf_ktime_get_ns();
	row.rx = flow->rx;
	row.tx = flow->tx;
	if (flow->protocol == IPPROTO_TCP) {
		read_tcp(socket, &row);
		if (row.rx != flow->rx || row.tx != flow->tx)
			flow->last = row.read_at;
		flow->rx = row.rx;
		flow->tx = row.tx;
	}
	moved = row.rx + row.tx;
	refresh(flow, moved, flow->last, row.read_at);
	row.flow = *flow;
	read_local(socket, &row);
	bpf_seq_write(ctx->meta->seq, &row, sizeof(row));
	return 0;
}

/* ------------------------------------------------------------------ the rule alone, for tests and benchmarks */

struct trial {
	struct board board;
	__u32 allowed;
	__u32 direction;
	__u64 demand;
	__u32 winner;
	__u32 denied;
	__u32 actions;
	__u32 links;
	__u32 prefer;
	__u32 pad;
};

MAP(trials, BPF_MAP_TYPE_ARRAY, __u32, struct trial, 1, 0);

SEC("classifier")
int braid_trial(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct trial *trial = bpf_map_lookup_elem(&trials, &zero);
	const struct braid_params *now = bpf_map_lookup_elem(&params, &zero);
	__u32 allowed;
	_Bool denied = 0;

	if (!trial || !now)
		return 0;
	allowed = braid_admit(trial->allowed, now->backup, trial->actions, trial->links, trial->prefer, &denied);
	trial->denied = denied;
	trial->winner = BRAID_NO_SLOT;
	if (!allowed)
		return 0;
	bpf_spin_lock(&trial->board.lock);
	braid_pick(&trial->board.state, now, allowed, trial->direction, trial->demand);
	braid_commit(&trial->board.state, now, trial->direction, trial->demand);
	trial->winner = trial->board.state.winner;
	bpf_spin_unlock(&trial->board.lock);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
