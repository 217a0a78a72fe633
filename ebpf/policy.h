/* SPDX-License-Identifier: GPL-2.0-only */
/* Evaluates the policy for a request: the first matching rule, class, affinity, demand, and the allowed links. */
#ifndef BRAID_POLICY_H
#define BRAID_POLICY_H

#include "caller.h"

/* The application's class as far as it is known, without a report to the daemon: an excluded application stays unreported. */
BRAID_INLINE __u8 app_class(const struct request *request)
{
	struct braid_app_key key = request->app;
	struct braid_app *known = bpf_map_lookup_elem(&apps, &key);

	if (!known)
		known = bpf_map_lookup_elem(&names, &key.name);
	if (!known)
		return BRAID_UNCLASSIFIED;
	return known->class_ == BRAID_UNCLASSIFIED ? known->learnt : known->class_;
}

/* Bits of an IPv4-mapped IPv6 address in front of the IPv4 address. */
#define MAPPED_LEN 96

BRAID_INLINE _Bool in_prefix(const __u32 *prefix, __u32 left, const __u32 *address)
{
	for (int word = 0; word < 4; word++) {
		__u32 bits = left > 32 ? 32 : left;
		__u32 mask = bits ? bpf_htonl(~0u << (32 - bits)) : 0;

		if ((prefix[word] ^ address[word]) & mask)
			return 0;
		left -= bits;
	}
	return 1;
}

/* Whether the address, which has the family of the request, is in the prefix. No IPv4 address is in a prefix of IPv6, although its mapped form is in ::/0. */
BRAID_INLINE _Bool is_within(const struct request *request, const __u32 *prefix, __u32 length, const __u32 *address)
{
	return (length >= MAPPED_LEN || request->family == 6) && in_prefix(prefix, length, address);
}

/* Whether the destination meets the rule's conditions about it. */
BRAID_INLINE _Bool is_destination(const struct request *request, const struct braid_rule *rule)
{
	__u32 conditions = rule->conditions;

	if ((conditions & BRAID_IF_PORT) && rule->port != request->port)
		return 0;
	if ((conditions & BRAID_IF_PROTOCOL) && rule->protocol != request->protocol)
		return 0;
	return !(conditions & BRAID_IF_DESTINATION) || is_within(request, rule->destination, rule->prefix_len, request->remote);
}

/* Whether the calling program meets the rule's conditions about it. */
BRAID_INLINE _Bool is_program(const struct request *request, const struct braid_rule *rule)
{
	__u32 conditions = rule->conditions;

	if ((conditions & BRAID_IF_USER) && rule->user != request->user)
		return 0;
	if (conditions & BRAID_IF_NAME) {
		const __u64 *want = (const __u64 *)rule->name, *have = (const __u64 *)request->app.name;

		if (want[0] != have[0] || want[1] != have[1])
			return 0;
	}
	if (conditions & BRAID_IF_EXE) {
		struct braid_exe_key program = request->app.exe;
		struct braid_exe *exe = bpf_map_lookup_elem(&executables, &program);

		if (!exe || exe->id[request->bank & 1] != rule->exe)
			return 0;
	}
	return 1;
}

/*
 * Global, like `judge` and `pick`, so that the verifier processes it once instead of once per rule. Before Linux 6.2 an argument of a global function
 * cannot be a map key, so each key is copied to the stack.
 */
__attribute__((noinline)) int matches(const struct request *request, __u32 key)
{
	const struct braid_rule *rule = bpf_map_lookup_elem(&rules, &key);
	__u32 conditions;

	if (!request || !rule)
		return 0;
	conditions = rule->conditions;
	if (conditions & (BRAID_NEVER | BRAID_IF_CLIENT | BRAID_IF_MAC))
		return 0;
	if (!is_destination(request, rule) || !is_program(request, rule))
		return 0;
	if ((conditions & BRAID_IF_CGROUP) && bpf_get_current_ancestor_cgroup_id(rule->cgroup_level) != rule->cgroup)
		return 0;
	return !(conditions & BRAID_IF_CLASS) || app_class(request) == rule->of_class;
}

/* Conditions about a program, which a client's flow never meets. */
#define BRAID_IF_PROGRAM (BRAID_IF_EXE | BRAID_IF_NAME | BRAID_IF_USER)

/*
 * The same for a forwarded flow. Its client is known, but its program only if it came through the virtual interface. The control group is known for
 * those, and for containers of this machine. A separate function, because programs at tc may not call the helper for cgroups above.
 */
__attribute__((noinline)) int matches_forwarded(const struct request *request, __u32 key)
{
	const struct braid_rule *rule = bpf_map_lookup_elem(&rules, &key);
	__u32 conditions;

	if (!request || !rule)
		return 0;
	conditions = rule->conditions;
	if (conditions & BRAID_NEVER)
		return 0;
	if (conditions & BRAID_IF_PROGRAM) {
		if (!request->own)
			return 0;
		if (!request->cgroup && (conditions & (BRAID_IF_EXE | BRAID_IF_NAME))) {
			/* A rule that restricts the links must not be evaded by a program that cannot be recognized. */
			if (!(rule->actions & BRAID_DO_LINKS) || ((conditions & BRAID_IF_USER) && rule->user != request->user))
				return 0;
		} else if (!is_program(request, rule)) {
			return 0;
		}
	}
	if (conditions & BRAID_IF_CGROUP) {
		__u32 level = rule->cgroup_level;
		__u64 *cgroup = bpf_map_lookup_elem(&sender_cgroups, &level);

		if (!cgroup || *cgroup != rule->cgroup)
			return 0;
	}
	if (!is_destination(request, rule))
		return 0;
	if ((conditions & BRAID_IF_CLASS) && request->class_ != rule->of_class)
		return 0;
	if (conditions & BRAID_IF_MAC) {
		for (int at = 0; at < 6; at++)
			if (rule->mac[at] != request->mac[at])
				return 0;
	}
	return !(conditions & BRAID_IF_CLIENT) || is_within(request, rule->client, rule->client_len, request->source);
}

/* The first matching rule, or NULL. `forwarded` is a constant. */
BRAID_INLINE const struct braid_rule *first_match(__u32 bank, const struct braid_params *now, struct request *request, _Bool forwarded)
{
	request->rule = 255;
	for (__u32 index = 0; index < BRAID_MAX_RULES; index++) {
		__u32 key = bank * BRAID_MAX_RULES + index;

		if (index >= now->rules)
			break;
		if (forwarded ? matches_forwarded(request, key) : matches(request, key)) {
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

/* The daemon is woken whenever the data in the ring has grown by this many bytes. Otherwise it reads the ring every quarter of a second. */
#define WAITING_LIMIT (1 << 18)

/*
 * Submits an event that is not urgent without waking the daemon. A wake-up for each would cost more than all other work at the end of a flow. The first few
 * events past a multiple of the limit wake it: other processors may have added one since this event took its place.
 */
BRAID_INLINE void submit_without_wakeup(struct braid_event *event)
{
	__u64 waiting = bpf_ringbuf_query(&events, BPF_RB_AVAIL_DATA);
	_Bool grown = waiting >= WAITING_LIMIT && waiting % WAITING_LIMIT < 8 * sizeof(*event);

	bpf_ringbuf_submit(event, grown ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
}

/* Returns the application's class. Reports a new application to the daemon while its path can still be read from /proc. */
BRAID_INLINE __u8 class_of(const struct request *request)
{
	struct braid_app_key key = request->app;
	struct braid_app *known = bpf_map_lookup_elem(&apps, &key);
	struct braid_app fresh = {}, *named;
	struct braid_event *event;

	if (known)
		return known->class_;
	named = bpf_map_lookup_elem(&names, &key.name);
	if (named)
		fresh.class_ = named->class_;
	event = new_event(BRAID_EVENT_APP);
	/* The event is lost. The application stays unknown and is reported with its next flow. */
	if (!event)
		return fresh.class_;
	bpf_map_update_elem(&apps, &key, &fresh, BPF_NOEXIST);
	event->row.flow.app = request->app;
	event->row.flow.process = request->process;
	event->row.flow.user = request->user;
	event->row.flow.cgroup = request->cgroup;
	event->row.flow.class_ = fresh.class_;
	/* Force the wake-up even if events are waiting already, because the process, and with it the path, may be gone a moment later. */
	bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return fresh.class_;
}

/* The demand estimate of the application and this remote port, or NULL. */
BRAID_INLINE struct braid_demand *learnt_of(const struct request *request)
{
	struct braid_demand_key key = {};

	key.app = request->app;
	key.port = request->port;
	return bpf_map_lookup_elem(&demands, &key);
}

/* The application's class, from the demand estimate if cached there: one lookup instead of two. */
BRAID_INLINE __u8 known_class(const struct request *request, struct braid_demand *known)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	__u32 classes = switches ? switches->classes : 0;
	__u8 found;

	if (known && classes && known->classes == classes)
		return known->class_;
	found = class_of(request);
	if (known) {
		known->class_ = found;
		known->classes = classes;
	}
	return found;
}

BRAID_INLINE void set_expected_demand(const struct braid_params *now, struct request *request, const struct braid_demand *known)
{
	request->direction = BRAID_DOWN;
	request->demand = now->default_demand;
	if (known) {
		request->demand = known->down + known->up;
		if (known->up > known->down)
			request->direction = BRAID_UP;
	}
}

/* Whether it is unknown if the destination runs Braid, and the first connection waits for the answer. Look-ups of names do not wait. */
BRAID_INLINE _Bool is_held(const struct request *request)
{
	struct lpm6 key = { .len = 128 };
	__u8 *wanted;

	if (request->protocol != IPPROTO_TCP || request->port == DNS_PORT || request->port == DNS_TLS_PORT)
		return 0;
	__builtin_memcpy(key.addr, request->remote, sizeof(key.addr));
	wanted = bpf_map_lookup_elem(&hold, &key);
	return wanted && *wanted;
}

/*
 * Whether the flow is redirected to the daemon because its destination runs Braid, or may run it. A flow with a single allowed link gains nothing. Datagrams are
 * redirected only if a rule says so, because most of their protocols interpret reordering as loss. Flows whose cgroup foreign programs filter are not
 * redirected.
 */
BRAID_INLINE _Bool goes_peer_direct(const struct braid_params *now, struct request *request, __u32 actions)
{
	struct braid_datagram_key key = {};

	if (actions & (BRAID_DO_DIRECT | BRAID_DO_PEER_DIRECT_NEVER))
		return 0;
	if (!(actions & BRAID_DO_PEER_DIRECT_ALL) && (!now->peer_direct || request->protocol != IPPROTO_TCP))
		return 0;
	if (!(request->allowed & (request->allowed - 1)))
		return 0;
	__builtin_memcpy(key.remote, request->remote, sizeof(key.remote));
	key.port = request->port;
	if (!bpf_map_lookup_elem(&servers, key.remote)) {
		if (!is_held(request))
			return 0;
		request->held = 1;
	}
	if (bpf_map_lookup_elem(&closed, &key))
		return 0;
	request->filtered = is_filtered();
	return !request->filtered;
}

enum judgement { GO_ON, LEAVE_ALONE, FAIL };

/*
 * The links that have the socket's current source address. The kernel keeps the source address of a UDP socket that connects again without
 * disconnecting first, so the socket must keep its link too.
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

/* Sets the class that the rule gives, and the affinity. */
BRAID_INLINE void classify(const struct braid_params *now, struct request *request, const struct braid_rule *rule)
{
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
}

/* Sets `request->allowed`, `confined` and `strict`. Returns whether the flow must fail. */
BRAID_INLINE _Bool is_denied(const struct braid_params *now, struct request *request, const struct braid_rule *rule)
{
	__u32 actions = rule ? rule->actions : now->confined & BRAID_CONFINED_UNRULED ? BRAID_DO_CONFINE : 0;
	_Bool denied;

	/* Otherwise clang 19 reads the rule again, where the verifier of Linux 6.1 has forgotten that there is one. */
	__asm__ volatile("" : "+r"(actions));
	request->allowed = braid_admit(now->usable[request->family == 6], now->backup, actions, rule ? rule->links : 0, rule ? rule->prefer : 0,
				       &denied);
	request->confined = !!(actions & BRAID_DO_CONFINE);
	request->strict = !!(actions & (BRAID_DO_CONFINE | BRAID_DO_LINKS));
	return denied || (request->confined && !request->allowed);
}

/*
 * Whether the class or the rule redirects the flow to the daemon, and a relay accepts the destination. A confined flow is always redirected: the daemon
 * refuses it if no relay takes it.
 */
BRAID_INLINE _Bool is_redirected(const struct braid_params *now, const struct request *request, const struct braid_rule *rule,
				 const struct address *remote)
{
	_Bool wanted = (now->redirected_classes >> (request->class_ & 31)) & 1;

	if (rule && (rule->actions & (BRAID_DO_REDIRECT | BRAID_DO_DIRECT)))
		wanted = !!(rule->actions & BRAID_DO_REDIRECT);
	return request->confined || (wanted && !bpf_map_lookup_elem(&bypass, remote));
}

/* Look-ups of names at a link's resolver go over its links. Returns whether the destination is one. */
BRAID_INLINE _Bool pin_to_resolver(struct request *request, const struct address *remote)
{
	__u32 *pinned;

	if (request->port != DNS_PORT && request->port != DNS_TLS_PORT)
		return 0;
	pinned = bpf_map_lookup_elem(&resolvers, remote);
	if (pinned && (*pinned & request->allowed))
		request->allowed &= *pinned;
	return !!pinned;
}

/*
 * Evaluates the policy for a request. Returns GO_ON and sets `request->allowed`, or returns what else to do.
 *
 * This function and `pick` are global, so that the verifier processes each of them once instead of once per call path.
 */
__attribute__((noinline)) int judge(struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	const struct braid_rule *rule;
	struct braid_demand *known;
	struct address remote;

	if (!request || !now)
		return LEAVE_ALONE;
	request->bank = bank;
	request->strict = 0;
	request->confined = 0;
	request->filtered = 0;
	request->held = 0;
	rule = first_match(bank, now, request, 0);
	if (rule && (rule->actions & BRAID_DO_EXCLUDE))
		return LEAVE_ALONE;
	known = learnt_of(request);
	request->class_ = known_class(request, known);
	classify(now, request, rule);
	if (is_denied(now, request, rule))
		return FAIL;
	if (!request->allowed)
		return LEAVE_ALONE;
	__builtin_memcpy(remote.word, request->remote, sizeof(remote.word));
	request->redirect = is_redirected(now, request, rule, &remote);
	if (!request->redirect)
		request->redirect = goes_peer_direct(now, request, rule ? rule->actions : 0);
	else
		request->filtered = is_filtered();
	if (request->source[0] | request->source[1] | request->source[3]) {
		request->allowed &= with_source(now, request);
		if (!request->allowed)
			return request->strict ? FAIL : LEAVE_ALONE;
	}
	if (!request->confined && pin_to_resolver(request, &remote))
		request->redirect = 0; /* a network's resolver often answers only clients of that network */
	set_expected_demand(now, request, known);
	return GO_ON;
}

/* The same for a forwarded flow, whose class by its port is set. */
__attribute__((noinline)) int judge_forwarded(struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	const struct braid_rule *rule;
	struct address remote;
	__u8 by_port, found;

	if (!request || !now)
		return LEAVE_ALONE;
	request->bank = bank;
	by_port = request->class_;
	if (request->own && request->cgroup && app_class(request) != BRAID_UNCLASSIFIED)
		request->class_ = app_class(request);
	rule = first_match(bank, now, request, 1);
	if (rule && (rule->actions & BRAID_DO_EXCLUDE))
		return LEAVE_ALONE;
	/* A class by the pattern of the program's traffic is for rules only. */
	found = request->own && request->cgroup ? class_of(request) : BRAID_UNCLASSIFIED;
	request->class_ = found == BRAID_UNCLASSIFIED ? by_port : found;
	classify(now, request, rule);
	if (is_denied(now, request, rule))
		return FAIL;
	if (!request->allowed)
		return LEAVE_ALONE;
	__builtin_memcpy(remote.word, request->remote, sizeof(remote.word));
	request->redirect = is_redirected(now, request, rule, &remote);
	/* Packets of other protocols go to one relay, over all links. */
	if (request->protocol != IPPROTO_TCP && request->protocol != IPPROTO_UDP && rule && (rule->actions & (BRAID_DO_LINKS | BRAID_DO_NO_PACKETS)))
		request->redirect = 0;
	if (!request->confined && pin_to_resolver(request, &remote))
		request->redirect = 0; /* a network's resolver often answers only clients of that network */
	set_expected_demand(now, request, learnt_of(request));
	return GO_ON;
}

#endif
