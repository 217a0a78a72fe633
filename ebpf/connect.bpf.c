/* SPDX-License-Identifier: GPL-2.0-only */
/* connect4/6. TCP: binds the socket to its link once, or redirects it to the daemon. Connected UDP: sets a mark, which a routing rule matches. */
#include "steer.h"

/* Removes what an earlier connect of this UDP socket left behind. Not inlined, to save stack. */
static __attribute__((noinline)) int reset_udp(struct bpf_sock_addr *ctx, struct bpf_sock *socket, __u32 mark)
{
	struct braid_flow *old = bpf_sk_storage_get(&flows, socket, NULL, 0);
	__u32 none = 0;

	if (old) {
		end_flow(as_number(socket), NULL, old, old->id);
		bpf_sk_storage_delete(&flows, socket);
	}
	if (is_ours(mark))
		bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &none, sizeof(none));
	return 0;
}

enum binding { BOUND, NOT_BOUND, WRONG_DEVICE };

/*
 * Binds by name and verifies the index, because a name may move to another device before the daemon reacts. Binding by index would be simpler, but it
 * "succeeds" for a device that is gone.
 */
BRAID_INLINE enum binding bind_device(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_slot *slot)
{
	__u32 none = 0;

	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, (void *)slot->name, sizeof(slot->name)))
		return NOT_BOUND;
	if (socket->bound_dev_if == slot->ifindex)
		return BOUND;
	/* Unprivileged users may not unbind a socket. */
	return bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, &none, sizeof(none)) ? WRONG_DEVICE : NOT_BOUND;
}

BRAID_INLINE int steer_tcp(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_params *now, __u32 bank,
			   struct request *request)
{
	const struct braid_slot *slot;
	enum binding binding;

	request->id = bpf_get_socket_cookie(ctx);
	if (choose(request, bank, 1))
		return not_steered(request);
	/* Track the flow before the socket is bound: a socket that is bound but not tracked would stay on its link when a tunnel comes up. */
	if (!request->placed && follow_overflow(socket, now, request)) {
		unreserve(request);
		count(BRAID_COUNT_UNTRACKED);
		return request->strict ? refuse() : ALLOW;
	}
	slot = &now->slots[request->slot & (BRAID_MAX_LINKS - 1)];
	binding = bind_device(ctx, socket, slot);
	if (binding != BOUND) {
		unfollow(request);
		request->strict |= binding == WRONG_DEVICE;
		return not_steered(request);
	}
	if (request->placed)
		follow(socket, now, request);
	count(BRAID_COUNT_STEERED);
	return ALLOW;
}

BRAID_INLINE int steer_udp(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_params *now, __u32 bank,
			   struct request *request)
{
	struct braid_flow *flow;
	__u32 mark;

	if (choose(request, bank, 0))
		return not_steered(request);
	mark = now->slots[request->slot & (BRAID_MAX_LINKS - 1)].mark;
	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &mark, sizeof(mark)))
		return not_steered(request);
	flow = bpf_sk_storage_get(&flows, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flow) {
		count(BRAID_COUNT_UNTRACKED);
		return ALLOW;
	}
	fill(flow, now, request, bpf_get_socket_cookie(ctx), BRAID_FLOW_PENDING);
	request_counting();
	return ALLOW;
}

/* A socket that was steered directly, and so has a link's address, is never redirected. A connect to port 0 only queries the route. */
BRAID_INLINE _Bool may_redirect(const struct request *request)
{
	return request->port && !(request->source[0] | request->source[1] | request->source[3]);
}

static __attribute__((noinline)) int on_loopback(struct bpf_sock *socket, __u32 family)
{
	const struct sock *sk = as_number(socket);
	__u32 addr[4];

	if (family == 4)
		return is_loopback4(BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr));
	BPF_CORE_READ_INTO(&addr, sk, __sk_common.skc_v6_rcv_saddr);
	return is_loopback6(addr);
}

BRAID_INLINE _Bool to_loopback(const struct request *request)
{
	return request->family == 4 ? is_loopback4(request->remote[3]) : is_loopback6(request->remote);
}

/* What happens to a steered TCP socket, which is bound to a link, that connects again. */
enum reconnect { KEEP_LINK, STEER_AGAIN, REJECT };

/*
 * For the same destination the socket keeps its link. For another destination it is unbound and steered again. If the kernel does not let its user
 * unbind it, it may connect only if the destination may be steered and its rule allows that link.
 */
static __attribute__((noinline)) int reconnect(struct bpf_sock_addr *ctx, struct request *request, __u32 bank)
{
	__u64 id = bpf_get_socket_cookie(ctx);
	struct connection *own = last_of(id);
	__u32 none = 0, slot;
	__u64 differs;
	int judgement;

	if (!own)
		return KEEP_LINK;
	differs = (own->flow.remote[0] ^ request->remote[0]) | (own->flow.remote[1] ^ request->remote[1]) |
		  (own->flow.remote[2] ^ request->remote[2]) | (own->flow.remote[3] ^ request->remote[3]) | (own->flow.port ^ request->port);
	if (!differs && steerable(request))
		return KEEP_LINK;
	if (!bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, &none, sizeof(none))) {
		release(&own->flow, id);
		bpf_map_delete_elem(&overflow, &id);
		return STEER_AGAIN;
	}
	if (!steerable(request))
		return REJECT;
	slot = own->flow.slot & (BRAID_MAX_LINKS - 1);
	read_caller(request);
	judgement = judge(request, bank);
	if (judgement == FAIL || request->confined || (judgement == GO_ON && request->strict && !(request->allowed & (1u << slot))))
		return REJECT;
	__builtin_memcpy(own->flow.remote, request->remote, sizeof(own->flow.remote));
	own->flow.port = request->port;
	return KEEP_LINK;
}

/* Removes what a moved connect that failed left behind. Returns the mark that the socket has afterwards. */
static __attribute__((noinline)) int reset_moved(struct bpf_sock_addr *ctx)
{
	__u64 id = bpf_get_socket_cookie(ctx);
	struct connection *own = last_of(id);
	__u32 none = 0;

	if (own) {
		release(&own->flow, id);
		bpf_map_delete_elem(&overflow, &id);
	}
	return bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &none, sizeof(none)) ? BRAID_MARK_BASE : 0;
}

BRAID_INLINE int decide_connect(struct bpf_sock_addr *ctx, struct bpf_sock *socket, struct request *request, _Bool was_redirected)
{
	const struct braid_params *now;
	struct socket_options asked;
	int judgement;
	_Bool fixed;
	__u32 bank;

	now = active_params(ctx, request, &bank);
	if (!now)
		return ALLOW;
	request->protocol = ctx->protocol;
	request->port = bpf_ntohs((__u16)ctx->user_port);
	if (request->protocol == IPPROTO_TCP) {
		if (read_tcp_socket_options(socket, &asked))
			return ALLOW;
		if (asked.device && last_of(bpf_get_socket_cookie(ctx))) {
			int outcome = reconnect(ctx, request, bank);

			if (outcome != STEER_AGAIN)
				return outcome == KEEP_LINK ? ALLOW : refuse();
			asked.device = 0;
		}
		if (is_moving(asked.mark))
			asked.mark = reset_moved(ctx);
	} else {
		read_socket_options(socket, &asked);
		reset_udp(ctx, socket, asked.mark);
	}
	/* The program has chosen a link, or a source that a redirected socket could not keep. That does not let a confined flow out. */
	fixed = asked.device || (asked.locks & SOCK_BINDADDR_LOCK) || (asked.mark && !is_ours(asked.mark)) ||
		(request->protocol == IPPROTO_UDP && (asked.locks & SOCK_BINDPORT_LOCK));
	if ((fixed && !now->confined) || !steerable(request)) {
		count(BRAID_COUNT_LEFT);
		return ALLOW;
	}
	/* The loopback address of a redirected socket does not bind it to a link. */
	if (request->protocol == IPPROTO_UDP && !was_redirected)
		read_source(socket, request);
	read_caller(request);
	judgement = judge(request, bank);
	if (fixed && !request->confined)
		judgement = LEAVE_ALONE;
	if (judgement == FAIL || (fixed && request->confined))
		return refuse();
	if (judgement == LEAVE_ALONE) {
		count(BRAID_COUNT_LEFT);
		return ALLOW;
	}
	if (request->redirect && may_redirect(request)) {
		if (request->protocol == IPPROTO_TCP ? redirect(ctx, request, bank) : redirect_datagrams(ctx, request, bank, 1))
			return ALLOW;
	}
	if (request->confined)
		return refuse();
	return request->protocol == IPPROTO_TCP ? steer_tcp(ctx, socket, now, bank, request) : steer_udp(ctx, socket, now, bank, request);
}

BRAID_INLINE int intercept_connect(struct bpf_sock_addr *ctx, struct request *request)
{
	struct bpf_sock *socket = ctx->sk;
	_Bool was_redirected;
	int verdict;

	if (!socket || (ctx->protocol != IPPROTO_TCP && ctx->protocol != IPPROTO_UDP))
		return ALLOW;
	was_redirected = clear_redirect_state(socket);
	if (was_redirected && ctx->protocol == IPPROTO_UDP)
		was_redirected = on_loopback(socket, request->family);
	verdict = decide_connect(ctx, socket, request, was_redirected);
	/*
	 * A UDP socket keeps its source address, and from a loopback address it would reach nobody. The program may disconnect and connect again.
	 */
	if (verdict == ALLOW && was_redirected && !request->loopback && ctx->protocol == IPPROTO_UDP && !to_loopback(request))
		return refuse();
	return verdict;
}

SEC("cgroup/connect4")
int braid_connect4(struct bpf_sock_addr *ctx)
{
	struct request request = {};
	int verdict;

	set_remote4(&request, ctx->user_ip4);
	verdict = intercept_connect(ctx, &request);
	if (request.loopback) {
		ctx->user_ip4 = request.loopback;
		ctx->user_port = request.listener;
	}
	return verdict;
}

SEC("cgroup/connect6")
int braid_connect6(struct bpf_sock_addr *ctx)
{
	struct request request = { .family = 6 };
	int verdict;

	read_address6(ctx, request.remote);
	if (is_mapped(request.remote))
		request.family = 4;
	verdict = intercept_connect(ctx, &request);
	if (request.loopback) {
		__u32 to[4] = { 0, 0, request.by_port ? 0 : bpf_htonl(0xffff), request.by_port ? bpf_htonl(1) : request.loopback };

		write_address6(ctx, to);
		ctx->user_port = request.listener;
	}
	return verdict;
}
