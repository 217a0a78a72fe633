/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Connection mode in the kernel: every connect and every unconnected datagram of this network namespace gets its link here, on
 * the caller's own socket, and the kernel does the rest. No program runs per TCP packet (but before
 * Linux 6.3, where the two that count UDP see every packet pass).
 *
 *   connect4/6    TCP: binds the socket to its link, once, or turns it to the daemon. Connected UDP: marks it, and a rule routes the mark.
 *   getpeername4/6, getsockname4/6, recvmsg4/6  show a redirected socket the addresses it asked for.
 *   sendmsg4/6    unconnected UDP: writes the datagram's source address, and a rule routes that; or turns it to the daemon.
 *   sock_release  ends a flow: loads, demand, the event for the daemon.
 *   retransmission  what connections suffer: SYNs and segments without an answer. Not by `sockops`, which the kernel runs eight times a
 *                 connection, at both ends.
 *   state         where redirected connections come from; attached only once something may be redirected.
 *   sent/received  count UDP, whose sockets have no counters of their own; on kernels without these tracepoints egress/ingress.
 *   connections, flows  dump the living flows, TCP's and UDP's, and bring their reservations up to date.
 *
 * Fail open: nothing is touched when the heartbeat is old, the destination unknown, or anything at all goes wrong.
 */
#include "flow.h"
#include "redirect.bpf.c"

/* ------------------------------------------------------------------ connect */

BRAID_INLINE int refuse(void)
{
	count(BRAID_COUNT_DENIED);
	if (has_retval)
		bpf_set_retval(-ENETUNREACH);
	return DENY;
}

/* Takes back what an earlier connect of this UDP socket was given. A function of its own, for the sake of the stack. */
static __attribute__((noinline)) int forget(struct bpf_sock_addr *ctx, struct bpf_sock *socket, __u32 mark)
{
	struct braid_flow *old = bpf_sk_storage_get(&flows, socket, NULL, 0);
	__u32 none = 0;

	if (old) {
		end_flow(as_number(socket), old, old->id);
		bpf_sk_storage_delete(&flows, socket);
	}
	if (is_ours(mark))
		bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &none, sizeof(none));
	return 0;
}

enum binding { BOUND, NOT_BOUND, ASTRAY };

/*
 * Binds by name and looks what that was: names can change hands before the daemon hears of it. By index would be simpler, but that
 * "succeeds" for a device that is gone.
 */
BRAID_INLINE enum binding bind_device(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_slot *slot)
{
	__u32 none = 0;

	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, (void *)slot->name, sizeof(slot->name)))
		return NOT_BOUND;
	if (socket->bound_dev_if == slot->ifindex)
		return BOUND;
	/* Unbinding is refused to unprivileged users. */
	return bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, &none, sizeof(none)) ? ASTRAY : NOT_BOUND;
}

/* The kernel refused to steer: a flow that may use no other link must not go out of whichever. */
BRAID_INLINE int not_steered(const struct request *request)
{
	count(BRAID_COUNT_FAILED);
	return request->strict ? refuse() : ALLOW;
}

BRAID_INLINE int steer_tcp(struct bpf_sock_addr *ctx, struct bpf_sock *socket, const struct braid_params *now, __u32 bank,
			   struct request *request)
{
	const struct braid_slot *slot;
	enum binding binding;

	request->id = bpf_get_socket_cookie(ctx);
	if (choose(request, bank, 1))
		return not_steered(request);
	slot = &now->slots[request->slot & (BRAID_MAX_LINKS - 1)];
	binding = bind_device(ctx, socket, slot);
	if (binding != BOUND) {
		unreserve(request);
		request->strict |= binding == ASTRAY;
		return not_steered(request);
	}
	if (follow(socket, now, request)) {
		unreserve(request);
		count(BRAID_COUNT_UNTRACKED);
		return ALLOW;
	}
	count(BRAID_COUNT_STEERED);
	return ALLOW;
}

/*
 * Asks the daemon to attach the programs that count datagrams, unless they are. They are tracepoints that run at every send and receive of the
 * machine, so they are attached only while a UDP socket is steered. What a first socket sends before the daemon answers is not counted.
 */
static __attribute__((noinline)) int want_counting(void)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	struct braid_event *event;

	if (!switches || switches->counting)
		return 0;
	event = new_event(BRAID_EVENT_COUNT);
	if (event)
		bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
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
	want_counting();
	return ALLOW;
}

/* One that was steered directly, and so has a link's address, is never redirected. Port 0 only asks for the way there. */
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

BRAID_INLINE int decide_connect(struct bpf_sock_addr *ctx, struct bpf_sock *socket, struct request *request, _Bool was_redirected)
{
	const struct braid_params *now;
	struct socket_options asked;
	int judgement;
	__u32 bank;

	now = acting(ctx, request, &bank);
	if (!now)
		return ALLOW;
	request->protocol = ctx->protocol;
	request->port = bpf_ntohs((__u16)ctx->user_port);
	if (request->protocol == IPPROTO_TCP) {
		if (read_tcp_socket_options(socket, &asked))
			return ALLOW;
		if (asked.device && is_followed(ctx))
			return ALLOW; /* a retry keeps its link */
	} else {
		read_socket_options(socket, &asked);
		forget(ctx, socket, asked.mark);
	}
	if (asked.device || (asked.locks & SOCK_BINDADDR_LOCK) || (asked.mark && !is_ours(asked.mark)) ||
	    (request->protocol == IPPROTO_UDP && (asked.locks & SOCK_BINDPORT_LOCK)) || !steerable(request)) {
		count(BRAID_COUNT_LEFT);
		return ALLOW;
	}
	/* What a redirected socket had on the loopback binds it to no link. */
	if (request->protocol == IPPROTO_UDP && !was_redirected)
		read_source(socket, request);
	read_caller(request);
	judgement = judge(request, bank);
	if (judgement == FAIL)
		return refuse();
	if (judgement == LEAVE_ALONE) {
		count(BRAID_COUNT_LEFT);
		return ALLOW;
	}
	if (request->redirect && may_redirect(request)) {
		if (request->protocol == IPPROTO_TCP ? redirect(ctx, request, bank) : redirect_datagrams(ctx, request, bank, 1))
			return ALLOW;
	}
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
	/* A UDP socket keeps its source address: from the loopback it would reach nobody. It may disconnect, and connect again. */
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

/* ------------------------------------------------------------------ unconnected datagrams */

/* Notes on a socket that it sends datagrams, and to whom last. */
BRAID_INLINE int mark_socket(struct bpf_sock *socket, const struct braid_datagram_key *key)
{
	struct braid_flow *marker = bpf_sk_storage_get(&flows, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (!marker)
		return -1;
	marker->flags = BRAID_FLOW_MARKER;
	marker->id = key->socket;
	__builtin_memcpy(marker->remote, key->remote, sizeof(marker->remote));
	marker->port = key->port;
	return 0;
}

/* The slot this datagram goes out of, or BRAID_NO_SLOT to leave it alone; -1 in *verdict fails it. */
BRAID_INLINE __u32 route_datagram(struct bpf_sock_addr *ctx, struct request *request, const struct braid_params **bank_in_force, int *verdict)
{
	struct bpf_sock *socket = ctx->sk;
	struct braid_datagram_key key = {};
	const struct braid_params *now;
	struct braid_flow *flow;
	struct socket_options asked;
	int judgement;
	__u32 bank;

	*verdict = ALLOW;
	if (!socket || ctx->protocol != IPPROTO_UDP)
		return BRAID_NO_SLOT;
	now = acting(ctx, request, &bank);
	if (!now)
		return BRAID_NO_SLOT;
	*bank_in_force = now;
	request->protocol = IPPROTO_UDP;
	request->port = bpf_ntohs((__u16)ctx->user_port);
	read_socket_options(socket, &asked);
	if (asked.device || asked.mark || (asked.locks & (SOCK_BINDADDR_LOCK | SOCK_BINDPORT_LOCK)) || !steerable(request)) {
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

		if ((usable & (1u << slot)) && now->slots[slot].ifindex == flow->ifindex) {
			mark_socket(socket, &key);
			return slot;
		}
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
	if (!flow && request->redirect && redirect_datagrams(ctx, request, bank, 0))
		return BRAID_NO_SLOT;
	if (choose(request, bank, 1)) {
		*verdict = not_steered(request);
		return BRAID_NO_SLOT;
	}
	if (flow)
		release(flow, key.socket);
	else
		bpf_map_update_elem(&datagrams, &key, &no_flow, BPF_ANY);
	flow = bpf_map_lookup_elem(&datagrams, &key);
	if (!flow || mark_socket(socket, &key)) {
		unreserve(request);
		count(BRAID_COUNT_UNTRACKED);
		return request->slot;
	}
	fill(flow, now, request, key.socket, 0);
	want_counting();
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
		} else if (is_loopback4(ctx->msg_src_ip4) && !is_loopback4(ctx->user_ip4)) {
			ctx->msg_src_ip4 = 0;
		}
		return ALLOW;
	}
	if (ctx->msg_src_ip4)
		return ALLOW; /* the program, or an earlier connect, chose it */
	set_remote4(&request, ctx->user_ip4);
	slot = route_datagram(ctx, &request, &now, &verdict);
	if (request.loopback) {
		ctx->user_ip4 = request.loopback;
		ctx->user_port = request.listener;
	} else if (slot < BRAID_MAX_LINKS && now) {
		ctx->msg_src_ip4 = now->slots[braid_opaque(slot) & (BRAID_MAX_LINKS - 1)].source4;
	}
	return verdict;
}

/* A datagram to an address, on a socket that is connected: to where it is connected, or elsewhere. */
BRAID_INLINE void send_redirected6(struct bpf_sock_addr *ctx, const struct redirect_state *own)
{
	const __u32 loopback[4] = { 0, 0, 0, bpf_htonl(1) };
	__u32 addr[4];

	read_address6(ctx, addr);
	if (!((addr[0] ^ own->remote[0]) | (addr[1] ^ own->remote[1]) | (addr[2] ^ own->remote[2]) | (addr[3] ^ own->remote[3])) &&
	    (__u16)ctx->user_port == own->port) {
		write_address6(ctx, loopback);
		ctx->user_port = own->listener;
	} else if (!is_loopback6(addr)) {
		ctx->msg_src_ip6[0] = 0;
		ctx->msg_src_ip6[1] = 0;
		ctx->msg_src_ip6[2] = 0;
		ctx->msg_src_ip6[3] = 0;
	}
}

/* A datagram of an unconnected socket: to the daemon, which finds it by the address. */
BRAID_INLINE void turn6(struct bpf_sock_addr *ctx, const struct request *request)
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
	int verdict;
	__u32 slot;

	if (own && own->by_port) {
		send_redirected6(ctx, own);
		return ALLOW;
	}
	if (ctx->msg_src_ip6[0] | ctx->msg_src_ip6[1] | ctx->msg_src_ip6[2] | ctx->msg_src_ip6[3])
		return ALLOW;
	read_address6(ctx, request.remote);
	if (is_mapped(request.remote))
		return ALLOW; /* the kernel asks again, as IPv4 */
	slot = route_datagram(ctx, &request, &now, &verdict);
	if (request.loopback) {
		turn6(ctx, &request);
	} else if (slot < BRAID_MAX_LINKS && now) {
		const struct braid_slot *link = &now->slots[braid_opaque(slot) & (BRAID_MAX_LINKS - 1)];

		ctx->msg_src_ip6[0] = link->source6[0];
		ctx->msg_src_ip6[1] = link->source6[1];
		ctx->msg_src_ip6[2] = link->source6[2];
		ctx->msg_src_ip6[3] = link->source6[3];
	}
	return verdict;
}

/* ------------------------------------------------------------------ counting UDP */

#define UDP_HEADER 8
#define IPV6_HEADER 40
#define IPV6_EXTENSIONS 4

/* Where a packet's UDP header begins, behind the IP header with its options or extensions; 0 if that cannot be found. */
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

/* The remote address of a UDP packet whose UDP header begins at `offset`; 0 if it cannot be read. */
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

/* A connected socket's first byte makes it a flow. */
BRAID_INLINE void begin(struct braid_flow *flow)
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
	/* Looked at again under the lock: two threads may send at once. */
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

/* The flow of a UDP socket's datagram, which begins with it if it has not begun; NULL if there is none. */
BRAID_INLINE struct braid_flow *counted(struct braid_flow *flow)
{
	if (flow && (flow->flags & BRAID_FLOW_PENDING))
		begin(flow);
	return flow;
}

BRAID_INLINE void add_bytes(struct braid_flow *flow, __u64 bytes, _Bool out)
{
	/* The clock is half of what counting a datagram costs, so it is read once in a tick. */
	__u32 tick = (__u32)bpf_jiffies64();

	__sync_fetch_and_add(out ? &flow->tx : &flow->rx, bytes);
	if (flow->tick == tick)
		return;
	flow->tick = tick;
	flow->last = bpf_ktime_get_ns();
}

/* Counts what the packet carries for the program: no headers, as `count_call`. */
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
	flow = counted(flow);
	if (flow)
		add_bytes(flow, skb->len - offset - UDP_HEADER, out);
	return ALLOW;
}

/*
 * The same by system call, where the kernel has the tracepoints (Linux 6.3): no packet is looked at then. What an unconnected socket
 * receives counts for the remote it sent to last.
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
	flow = counted(flow);
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

BRAID_INLINE void note_timeout(const struct braid_flow *flow, __u32 detail)
{
	__u32 key = flow->slot;
	struct braid_signs *sign = bpf_map_lookup_elem(&signs, &key);
	struct braid_event *event;

	if (sign)
		__sync_fetch_and_add(&sign->timeouts[flow->family == 6], 1);
	event = new_event(BRAID_EVENT_SUFFERING);
	if (!event)
		return;
	event->detail = detail;
	event->row.flow = *flow;
	bpf_ringbuf_submit(event, 0);
}

BRAID_INLINE const struct braid_flow *flow_of(struct sock *socket)
{
	struct connection *connection = connection_of(bpf_get_socket_cookie(socket));

	return connection ? &connection->flow : NULL;
}

/* Arguments: the socket, its old state and its new one. Attached from when something may be redirected. */
SEC("tp_btf/inet_sock_set_state")
int braid_state(__u64 *ctx)
{
	struct sock *socket = (void *)ctx[0];

	if ((int)ctx[1] == TCP_SYN_SENT && (int)ctx[2] == TCP_ESTABLISHED && socket->sk_protocol == IPPROTO_TCP)
		note_source(socket);
	return 0;
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
	const struct braid_flow *flow;

	if (!timeouts || BPF_CORE_READ(control, seq) != BPF_CORE_READ(tcp, snd_una))
		return 0;
	flow = flow_of(socket);
	if (flow)
		note_timeout(flow, (timeouts - 1) | (socket->__sk_common.skc_state == TCP_SYN_SENT ? 1u << 31 : 0));
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

char LICENSE[] SEC("license") = "GPL";
