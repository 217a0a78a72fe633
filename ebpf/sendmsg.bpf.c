/* SPDX-License-Identifier: GPL-2.0-only */
/* sendmsg4/6 of unconnected UDP: sets the datagram's source address, which a routing rule matches, or redirects the datagram to the daemon. */
#include "steer.h"

/* Records on the socket that it sends unconnected datagrams, and the destination and link of the last one. */
BRAID_INLINE int mark_socket(struct bpf_sock *socket, const struct braid_datagram_key *key, __u32 slot, __u32 ifindex)
{
	struct braid_flow *marker = bpf_sk_storage_get(&flows, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (!marker)
		return -1;
	marker->flags = BRAID_FLOW_MARKER;
	marker->id = key->socket;
	__builtin_memcpy(marker->remote, key->remote, sizeof(marker->remote));
	marker->port = key->port;
	marker->slot = slot;
	marker->ifindex = ifindex;
	return 0;
}

/*
 * The slot of the socket's last datagram if that went to the same remote, otherwise BRAID_NO_SLOT. A flow that was evicted from `datagrams`, because
 * another program has thousands of exchanges, thereby keeps its source address.
 */
static __attribute__((noinline)) __u32 last_slot(struct bpf_sock *socket, const struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	const struct braid_flow *marker = bpf_sk_storage_get(&flows, socket, NULL, 0);
	__u32 slot;

	if (!now || !marker || !(marker->flags & BRAID_FLOW_MARKER) || marker->port != request->port)
		return BRAID_NO_SLOT;
	if ((marker->remote[0] ^ request->remote[0]) | (marker->remote[1] ^ request->remote[1]) |
	    (marker->remote[2] ^ request->remote[2]) | (marker->remote[3] ^ request->remote[3]))
		return BRAID_NO_SLOT;
	slot = marker->slot & (BRAID_MAX_LINKS - 1);
	return marker->ifindex && (request->allowed & (1u << slot)) && now->slots[slot].ifindex == marker->ifindex ? slot : BRAID_NO_SLOT;
}

/*
 * Judges a datagram of a socket that was connected, and so has the mark of a link, by which it leaves. It may go to the address it was connected to,
 * or elsewhere if the rule allows that link.
 */
static __attribute__((noinline)) int send_marked(struct request *request, struct bpf_sock *socket, __u32 bank, __u32 mark)
{
	const struct braid_flow *own = bpf_sk_storage_get(&flows, socket, NULL, 0);
	__u32 slot = (mark - BRAID_MARK_BASE - 1) & (BRAID_MAX_LINKS - 1);
	int judgement;

	count(BRAID_COUNT_LEFT);
	if (own && own->remote[0] == request->remote[0] && own->remote[1] == request->remote[1] && own->remote[2] == request->remote[2] &&
	    own->remote[3] == request->remote[3] && own->port == request->port)
		return ALLOW;
	read_caller(request);
	judgement = judge(request, bank);
	if (judgement == FAIL || request->confined || (judgement == GO_ON && request->strict && !(request->allowed & (1u << slot))))
		return refuse();
	return ALLOW;
}

/* Whether an earlier connect assigned a link to the socket. */
BRAID_INLINE _Bool is_marked(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;

	return socket && is_ours(socket->mark);
}

/* Keeps the source address of a datagram whose flow has moved, or is about to leave a dead link. Returns whether it is such a one. */
static __attribute__((noinline)) int keep_source(struct request *request, const struct braid_datagram_key *key)
{
	__u32 zero = 0;
	const struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	const struct braid_kept *own;

	if (!switches || !switches->rewrites)
		return 0;
	own = bpf_map_lookup_elem(&kept, key);
	if (!own)
		return 0;
	__builtin_memcpy(request->source, own->source, sizeof(request->source));
	request->kept = 1;
	return 1;
}

/*
 * The slot through which this datagram leaves, or BRAID_NO_SLOT to leave it alone. Sets *verdict, which may fail the call. `fixed`: the program chose the
 * source address.
 */
BRAID_INLINE __u32 route_datagram(struct bpf_sock_addr *ctx, struct request *request, const struct braid_params **current, int *verdict, _Bool fixed)
{
	struct bpf_sock *socket = ctx->sk;
	struct braid_datagram_key key = {};
	const struct braid_params *now;
	struct braid_flow *flow;
	struct socket_options asked;
	int judgement;
	__u32 bank, last;

	*verdict = ALLOW;
	if (!socket || ctx->protocol != IPPROTO_UDP)
		return BRAID_NO_SLOT;
	now = active_params(ctx, request, &bank);
	if (!now || (fixed && !now->confined))
		return BRAID_NO_SLOT;
	*current = now;
	request->protocol = IPPROTO_UDP;
	request->port = bpf_ntohs((__u16)ctx->user_port);
	read_socket_options(socket, &asked);
	fixed |= asked.device || (asked.mark && !is_ours(asked.mark)) || (asked.locks & (SOCK_BINDADDR_LOCK | SOCK_BINDPORT_LOCK));
	if ((fixed && !now->confined) || !steerable(request)) {
		count(BRAID_COUNT_LEFT);
		return BRAID_NO_SLOT;
	}
	if (asked.mark && !fixed) {
		*verdict = send_marked(request, socket, bank, asked.mark);
		return BRAID_NO_SLOT;
	}
	key.socket = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key.remote, request->remote, sizeof(key.remote));
	key.port = request->port;
	flow = fixed ? NULL : bpf_map_lookup_elem(&datagrams, &key);
	if (flow) {
		__u32 slot = flow->slot & (BRAID_MAX_LINKS - 1);
		__u32 usable = now->usable[request->family == 6];

		if (keep_source(request, &key) || ((usable & (1u << slot)) && now->slots[slot].ifindex == flow->ifindex)) {
			mark_socket(socket, &key, slot, flow->ifindex);
			return slot;
		}
	}
	read_caller(request);
	judgement = judge(request, bank);
	if (fixed && !request->confined)
		judgement = LEAVE_ALONE;
	if (judgement == FAIL || (fixed && request->confined)) {
		*verdict = refuse();
		return BRAID_NO_SLOT;
	}
	if (judgement == LEAVE_ALONE) {
		count(BRAID_COUNT_LEFT);
		return BRAID_NO_SLOT;
	}
	if (request->confined) {
		if (!redirect_datagrams(ctx, request, bank, 0))
			*verdict = refuse();
		return BRAID_NO_SLOT;
	}
	last = flow ? BRAID_NO_SLOT : last_slot(socket, request, bank);
	if (!flow && last == BRAID_NO_SLOT && request->redirect && redirect_datagrams(ctx, request, bank, 0))
		return BRAID_NO_SLOT;
	if (last == BRAID_NO_SLOT ? choose(request, bank, 1) : pick(request, bank, 1, last)) {
		*verdict = not_steered(request);
		return BRAID_NO_SLOT;
	}
	if (flow)
		release(flow, key.socket);
	else
		bpf_map_update_elem(&datagrams, &key, &no_flow, BPF_ANY);
	flow = bpf_map_lookup_elem(&datagrams, &key);
	if (!flow || mark_socket(socket, &key, request->slot, now->slots[request->slot & (BRAID_MAX_LINKS - 1)].ifindex)) {
		unreserve(request);
		count(BRAID_COUNT_UNTRACKED);
		return request->slot;
	}
	fill(flow, now, request, key.socket, 0);
	flow->local_port = socket->src_port;
	request_counting();
	count(BRAID_COUNT_STEERED);
	return request->slot;
}

SEC("cgroup/sendmsg4")
int braid_sendmsg4(struct bpf_sock_addr *ctx)
{
	struct request request = {};
	const struct braid_params *now = NULL;
	struct redirect_state *own = redirect_state_of(ctx);
	int verdict;
	__u32 slot;

	if (own) {
		if (ctx->user_ip4 == own->remote[3] && is_mapped(own->remote) && (__u16)ctx->user_port == own->port) {
			ctx->user_ip4 = own->address;
			ctx->user_port = own->listener;
			return ALLOW;
		}
		if (is_loopback4(ctx->user_ip4))
			return ALLOW;
		/* It goes to another destination than the one it was connected to, so it is judged like any other. */
		if (is_loopback4(ctx->msg_src_ip4))
			ctx->msg_src_ip4 = 0;
	}
	set_remote4(&request, ctx->user_ip4);
	slot = route_datagram(ctx, &request, &now, &verdict, ctx->msg_src_ip4 && !is_marked(ctx));
	if (request.loopback) {
		ctx->user_ip4 = request.loopback;
		ctx->user_port = request.listener;
	} else if (slot < BRAID_MAX_LINKS && now) {
		ctx->msg_src_ip4 = request.kept ? request.source[3] : now->slots[braid_opaque(slot) & (BRAID_MAX_LINKS - 1)].source4;
	}
	return verdict;
}

/*
 * Handles a datagram with a destination address on a connected, redirected socket. Returns whether it goes to the connected address or to loopback.
 */
BRAID_INLINE _Bool send_redirected6(struct bpf_sock_addr *ctx, const struct redirect_state *own)
{
	const __u32 loopback[4] = { 0, 0, 0, bpf_htonl(1) };
	__u32 addr[4];

	read_address6(ctx, addr);
	if (!((addr[0] ^ own->remote[0]) | (addr[1] ^ own->remote[1]) | (addr[2] ^ own->remote[2]) | (addr[3] ^ own->remote[3])) &&
	    (__u16)ctx->user_port == own->port) {
		write_address6(ctx, loopback);
		ctx->user_port = own->listener;
		return 1;
	}
	if (is_loopback6(addr))
		return 1;
	ctx->msg_src_ip6[0] = 0;
	ctx->msg_src_ip6[1] = 0;
	ctx->msg_src_ip6[2] = 0;
	ctx->msg_src_ip6[3] = 0;
	return 0;
}

/* Redirects a datagram of an unconnected socket to the daemon, which identifies it by the address. */
BRAID_INLINE void redirect_datagram6(struct bpf_sock_addr *ctx, const struct request *request)
{
	const __u32 prefix[3] = REDIRECT_PREFIX;

	ctx->user_ip6[0] = prefix[0];
	ctx->user_ip6[1] = prefix[1];
	ctx->user_ip6[2] = prefix[2];
	ctx->user_ip6[3] = request->loopback;
	ctx->user_port = request->listener;
	ctx->msg_src_ip6[0] = 0;
	ctx->msg_src_ip6[1] = 0;
	ctx->msg_src_ip6[2] = 0;
	ctx->msg_src_ip6[3] = bpf_htonl(1);
}

SEC("cgroup/sendmsg6")
int braid_sendmsg6(struct bpf_sock_addr *ctx)
{
	struct request request = { .family = 6 };
	const struct braid_params *now = NULL;
	struct redirect_state *own = redirect_state_of(ctx);
	_Bool fixed;
	int verdict;
	__u32 slot;

	if (own && own->by_port && send_redirected6(ctx, own))
		return ALLOW;
	fixed = (ctx->msg_src_ip6[0] | ctx->msg_src_ip6[1] | ctx->msg_src_ip6[2] | ctx->msg_src_ip6[3]) && !is_marked(ctx);
	read_address6(ctx, request.remote);
	if (is_mapped(request.remote))
		return ALLOW; /* the kernel runs sendmsg4 for it */
	slot = route_datagram(ctx, &request, &now, &verdict, fixed);
	if (request.loopback) {
		redirect_datagram6(ctx, &request);
	} else if (request.kept) {
		ctx->msg_src_ip6[0] = request.source[0];
		ctx->msg_src_ip6[1] = request.source[1];
		ctx->msg_src_ip6[2] = request.source[2];
		ctx->msg_src_ip6[3] = request.source[3];
	} else if (slot < BRAID_MAX_LINKS && now) {
		const struct braid_slot *link = &now->slots[braid_opaque(slot) & (BRAID_MAX_LINKS - 1)];

		ctx->msg_src_ip6[0] = link->source6[0];
		ctx->msg_src_ip6[1] = link->source6[1];
		ctx->msg_src_ip6[2] = link->source6[2];
		ctx->msg_src_ip6[3] = link->source6[3];
	}
	return verdict;
}
