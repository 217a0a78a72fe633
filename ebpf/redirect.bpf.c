/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Programs for redirected sockets; connect and sendmsg redirect them. Attached only once something may be redirected.
 *
 *   getpeername4/6, getsockname4/6, recvmsg4/6  return the addresses that the program asked for.
 *   state                                       records the source address of redirected connections.
 */
#include "redirect.h"

SEC("cgroup/getpeername4")
int braid_getpeername4(struct bpf_sock_addr *ctx)
{
	struct redirect_state *own = redirect_state_of(ctx);

	if (own && ctx->user_ip4 == own->address && (__u16)ctx->user_port == own->listener) {
		ctx->user_ip4 = own->remote[3];
		ctx->user_port = own->port;
	}
	return ALLOW;
}

SEC("cgroup/getpeername6")
int braid_getpeername6(struct bpf_sock_addr *ctx)
{
	struct redirect_state *own = redirect_state_of(ctx);
	__u32 addr[4];

	if (!own || (__u16)ctx->user_port != own->listener)
		return ALLOW;
	read_address6(ctx, addr);
	if (own->by_port ? is_loopback6(addr) : is_mapped(addr) && addr[3] == own->address) {
		write_address6(ctx, own->remote);
		ctx->user_port = own->port;
	}
	return ALLOW;
}

SEC("cgroup/getsockname4")
int braid_getsockname4(struct bpf_sock_addr *ctx)
{
	struct redirect_state *own = redirect_state_of(ctx);

	if (own && own->local[3] && is_loopback4(ctx->user_ip4))
		ctx->user_ip4 = own->local[3];
	return ALLOW;
}

SEC("cgroup/getsockname6")
int braid_getsockname6(struct bpf_sock_addr *ctx)
{
	struct redirect_state *own = redirect_state_of(ctx);
	__u32 addr[4];

	if (!own || !(own->local[0] | own->local[2] | own->local[3]))
		return ALLOW;
	read_address6(ctx, addr);
	if (own->by_port ? is_loopback6(addr) : is_mapped(addr) && is_loopback4(addr[3]))
		write_address6(ctx, own->local);
	return ALLOW;
}

BRAID_INLINE _Bool is_redirect_address(__u32 addr)
{
	return (bpf_ntohl(addr) & ~REDIRECT_HOSTS) == REDIRECT_BASE;
}

BRAID_INLINE _Bool is_prefixed(const __u32 *addr)
{
	const __u32 prefix[3] = REDIRECT_PREFIX;

	return !((addr[0] ^ prefix[0]) | (addr[1] ^ prefix[1]) | (addr[2] ^ prefix[2]));
}

/* The exchange of this socket to which a datagram from this address belongs, or NULL. */
BRAID_INLINE struct braid_arrival *exchange_from(struct bpf_sock_addr *ctx, __u32 address)
{
	struct braid_arrival *exchange = is_redirect_address(address) ? bpf_map_lookup_elem(&exchanges, &address) : NULL;

	return exchange && exchange->socket == bpf_get_socket_cookie(ctx) ? exchange : NULL;
}

SEC("cgroup/recvmsg4")
int braid_recvmsg4(struct bpf_sock_addr *ctx)
{
	struct braid_arrival *exchange = exchange_from(ctx, ctx->user_ip4);

	if (exchange) {
		ctx->user_ip4 = exchange->remote[3];
		ctx->user_port = bpf_htons(exchange->port);
	}
	return ALLOW;
}

SEC("cgroup/recvmsg6")
int braid_recvmsg6(struct bpf_sock_addr *ctx)
{
	struct braid_arrival *exchange;
	struct redirect_state *own;
	__u32 addr[4];

	read_address6(ctx, addr);
	if (is_loopback6(addr)) {
		own = redirect_state_of(ctx);
		if (own && own->by_port && (__u16)ctx->user_port == own->listener) {
			write_address6(ctx, own->remote);
			ctx->user_port = own->port;
		}
		return ALLOW;
	}
	exchange = is_mapped(addr) || is_prefixed(addr) ? exchange_from(ctx, addr[3]) : NULL;
	if (exchange) {
		write_address6(ctx, exchange->remote);
		ctx->user_port = bpf_htons(exchange->port);
	}
	return ALLOW;
}

/* Records the address whose segments may claim the arrival. Called when a handshake is answered. */
BRAID_INLINE void record_source(struct sock *socket)
{
	struct redirect_state *own = bpf_sk_storage_get(&redirect_states, socket, NULL, 0);
	struct braid_arrival *arrival;
	__u32 port, address;

	if (!own)
		return;
	arrival = arrival_of(own);
	if (!arrival)
		return;
	address = own->address;
	port = socket->__sk_common.skc_num;
	if (own->by_port)
		bpf_map_update_elem(&sources6, &port, &address, BPF_ANY);
	else
		arrival->source = socket->__sk_common.skc_rcv_saddr;
	arrival->source_port = port;
}

/* Arguments: the socket, its old state and its new one. */
SEC("tp_btf/inet_sock_set_state")
int braid_state(__u64 *ctx)
{
	struct sock *socket = (void *)ctx[0];

	if ((int)ctx[1] == TCP_SYN_SENT && (int)ctx[2] == TCP_ESTABLISHED && socket->sk_protocol == IPPROTO_TCP)
		record_source(socket);
	return 0;
}
