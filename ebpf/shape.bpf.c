/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Sets the rates of running TCP flows: the pacing rate for what they send, and the window clamp for what they receive.
 *
 * The daemon writes the wanted shapes by socket cookie into `shapes` and runs `braid_shape` over the namespace's TCP sockets. The program applies each
 * shape, remembers in `shaped` what the socket had before, and reports the flow's progress. A socket that is in `shaped` but no longer in `shapes` gets
 * its own settings back.
 *
 * `braid_unshape` gives all sockets their own settings back. The daemon's watchdog holds an iterator of it and reads it when the daemon dies.
 *
 * If both die at once, `shaped` is gone. So the values that this file sets have a low byte of their own, by which `braid_sweep` finds such sockets when
 * the next daemon starts. It gives them what a socket has that never set anything.
 */
#include "flow.h"

#define SOL_TCP 6
#define SO_MAX_PACING_RATE 47
#define TCP_WINDOW_CLAMP 10
#define UNLIMITED ((__u32)-1)

/* The settings that shaped sockets had before, and those they have now. */
struct held {
	__u32 pacing_before;
	__u32 window_before;
	__u32 buffer_before;
	__u32 pacing; /* UNLIMITED: never set, or given back */
	__u32 window; /* 0: never set, or given back */
};

MAP(shaped, BPF_MAP_TYPE_HASH, __u64, struct held, BRAID_MAX_SHAPES, BPF_F_NO_PREALLOC);

/* The low byte of pacing rates (bytes per second) and window clamps (bytes) that this file sets. Odd, so that no round number has it. */
#define SIGNATURE 177u

BRAID_INLINE __u32 sign(__u32 value)
{
	return (value & ~255u) | SIGNATURE;
}

BRAID_INLINE _Bool is_signed(__u32 value)
{
	return (value & 255) == SIGNATURE;
}

BRAID_INLINE _Bool set_pacing(struct sock_common *socket, __u32 rate)
{
	return !bpf_setsockopt(socket, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof(rate));
}

BRAID_INLINE _Bool set_window(struct sock_common *socket, __u32 bytes)
{
	return !bpf_setsockopt(socket, SOL_TCP, TCP_WINDOW_CLAMP, &bytes, sizeof(bytes));
}

BRAID_INLINE __u32 pacing_of(const struct sock *sk)
{
	unsigned long rate = BPF_CORE_READ(sk, sk_max_pacing_rate);

	return rate >= UNLIMITED ? UNLIMITED : rate;
}

/*
 * The pacing rate that a program may have set. A socket that is not connected is in no iterator, so it keeps a rate of this file if the shapes end
 * meanwhile; the program may connect it again.
 */
BRAID_INLINE __u32 own_pacing(__u32 rate)
{
	return is_signed(rate) ? UNLIMITED : rate;
}

BRAID_INLINE void give_pacing_back(struct sock_common *socket, struct held *held)
{
	/* A rate that the program has set in the meantime stays. */
	if (held->pacing == UNLIMITED || (pacing_of(as_number(socket)) == held->pacing && !set_pacing(socket, held->pacing_before)))
		return;
	held->pacing = UNLIMITED;
}

/* If the kernel has enlarged the receive buffer in the meantime, half of it is the least window that fits. */
BRAID_INLINE void give_window_back(struct sock_common *socket, struct held *held)
{
	const struct sock *sk = as_number(socket);
	__u32 buffer = BPF_CORE_READ(sk, sk_rcvbuf), window = held->window_before;

	if (!held->window)
		return;
	if (buffer > held->buffer_before && buffer / 2 > window)
		window = buffer / 2;
	if (set_window(socket, window))
		held->window = 0;
}

/*
 * A program may set these options itself, before and while Braid does. Its pacing rate is kept as the one to give back, and never exceeded. Its window
 * clamp, or one that the kernel raised with the receive buffer, is replaced.
 */
BRAID_INLINE void apply(struct sock_common *socket, const struct braid_shape *shape, struct held *held)
{
	const struct tcp_sock *tcp = as_number(socket);
	__u32 current = pacing_of(as_number(socket)), pacing, window;

	if (current != (held->pacing == UNLIMITED ? held->pacing_before : held->pacing))
		held->pacing_before = own_pacing(current);
	if (!shape->pacing) {
		give_pacing_back(socket, held);
	} else {
		pacing = sign(shape->pacing);
		if (pacing > held->pacing_before)
			pacing = held->pacing_before;
		if (pacing == current || set_pacing(socket, pacing))
			held->pacing = pacing;
	}
	if (!shape->window) {
		give_window_back(socket, held);
	} else {
		window = sign(shape->window);
		if (BPF_CORE_READ(tcp, window_clamp) == window || set_window(socket, window))
			held->window = window;
	}
}

BRAID_INLINE void give_back(struct sock_common *socket, struct held *held)
{
	give_pacing_back(socket, held);
	give_window_back(socket, held);
}

SEC("iter/tcp")
int braid_shape(struct bpf_iter__tcp *ctx)
{
	struct seq_file *seq = output(ctx->meta);
	struct sock_common *socket = ctx->sk_common;
	struct braid_flow_row row = {};
	struct braid_shape *shape;
	struct held *held, fresh = {};
	const struct tcp_sock *tcp;
	const struct sock *sk;
	struct braid_control *switches;
	__u32 zero = 0;
	__u64 cookie;

	if (!socket || !is_established(socket))
		return 0;
	/* A run of a killed daemon may still wait for a locked socket. It must not limit the sockets behind that one again. */
	switches = bpf_map_lookup_elem(&control, &zero);
	if (!switches || (__s64)(bpf_ktime_get_ns() - switches->heartbeat) > (__s64)BRAID_HEARTBEAT_NS)
		return 0;
	cookie = bpf_get_socket_cookie(socket);
	shape = bpf_map_lookup_elem(&shapes, &cookie);
	held = bpf_map_lookup_elem(&shaped, &cookie);
	if (!shape) {
		if (held) {
			give_back(socket, held);
			bpf_map_delete_elem(&shaped, &cookie);
		}
		return 0;
	}
	tcp = as_number(socket);
	sk = as_number(socket);
	if (!held && (shape->pacing || shape->window)) {
		fresh.pacing_before = own_pacing(pacing_of(sk));
		fresh.window_before = BPF_CORE_READ(tcp, window_clamp);
		fresh.buffer_before = BPF_CORE_READ(sk, sk_rcvbuf);
		fresh.pacing = UNLIMITED;
		bpf_map_update_elem(&shaped, &cookie, &fresh, BPF_ANY);
		/* No room: the socket keeps its settings, because they could not be given back. */
		held = bpf_map_lookup_elem(&shaped, &cookie);
	}
	if (held)
		apply(socket, shape, held);
	row.flow.id = cookie;
	row.read_at = bpf_ktime_get_ns();
	read_tcp(tcp, &row);
	bpf_seq_write(seq, &row, sizeof(row));
	return 0;
}

SEC("iter/tcp")
int braid_unshape(struct bpf_iter__tcp *ctx)
{
	struct sock_common *socket = ctx->sk_common;
	struct held *held;
	__u64 cookie;

	if (!socket || !is_established(socket))
		return 0;
	cookie = bpf_get_socket_cookie(socket);
	held = bpf_map_lookup_elem(&shaped, &cookie);
	if (!held)
		return 0;
	give_back(socket, held);
	bpf_map_delete_elem(&shaped, &cookie);
	return 0;
}

SEC("iter/tcp")
int braid_sweep(struct bpf_iter__tcp *ctx)
{
	struct sock_common *socket = ctx->sk_common;
	const struct tcp_sock *tcp;
	const struct sock *sk;
	__u32 buffer, clamp;

	if (!socket || !is_established(socket))
		return 0;
	tcp = as_number(socket);
	sk = as_number(socket);
	if (is_signed(pacing_of(sk)))
		set_pacing(socket, UNLIMITED);
	buffer = BPF_CORE_READ(sk, sk_rcvbuf);
	clamp = BPF_CORE_READ(tcp, window_clamp);
	if (is_signed(clamp) && clamp < buffer / 2)
		set_window(socket, buffer / 2);
	return 0;
}
