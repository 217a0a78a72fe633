/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Redirection of connections to the daemon. connect is redirected to the daemon's listener on loopback. Each connection gets its own loopback
 * address, by which the daemon finds the application and the destination. The program sees the addresses that it asked for.
 *
 * Datagrams are redirected in the same way. Those of connected IPv6 sockets go to ::1, where the source port identifies the socket. Those of
 * unconnected IPv6 sockets go to a prefix that the daemon makes local to loopback by a route, because the kernel accepts no IPv4-mapped address
 * there.
 *
 * An arrival is the entry of a redirected connection that the daemon has not taken yet; an exchange is the entry of redirected
 * datagrams. The daemon claims
 * an arrival by the source address and port of the connection's handshake. These are recorded before the segment that completes the handshake is sent,
 * and so before the daemon can accept the connection. Any other connection to the same loopback address gets nothing.
 */
#ifndef BRAID_REDIRECT_H
#define BRAID_REDIRECT_H

#include "policy.h"

/* 127.64.0.0/10 */
#define REDIRECT_BASE 0x7f400000u
#define REDIRECT_HOSTS 0x003fffffu
#define REDIRECT_TRIES 3
/* fd62:7261:6964:5757::/64, followed by 0:0 and an address as above. */
#define REDIRECT_PREFIX { bpf_htonl(0xfd627261u), bpf_htonl(0x69645757u), 0 }

/* State of a redirected socket, kept until it is closed. Addresses are IPv6 or IPv4-mapped; all values are in network order. */
struct redirect_state {
	__u64 socket; /* socket cookie */
	__u32 remote[4]; /* requested destination */
	__u32 local[4]; /* source address it would have had; zero: unknown */
	__u32 address; /* its own loopback address, the key of its arrival */
	__u16 port; /* requested port */
	__u16 listener; /* port to which it was redirected */
	__u32 by_port; /* redirected to ::1, where only its source port identifies it */
	__u32 datagrams;
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct redirect_state);
} redirect_states SEC(".maps");

MAP(redirection, BPF_MAP_TYPE_ARRAY, __u32, struct braid_redirection, 1, 0);
MAP(arrivals, BPF_MAP_TYPE_HASH, __u32, struct braid_arrival, BRAID_MAX_ARRIVALS, 0);
/* The loopback address of each arrival at ::1, by source port. */
MAP(sources6, BPF_MAP_TYPE_ARRAY, __u32, __u32, 65536, 0);

MAP(exchanges, BPF_MAP_TYPE_HASH, __u32, struct braid_arrival, BRAID_MAX_EXCHANGES, 0);
/* The loopback address of an exchange, by socket and remote; for an exchange at ::1 by socket alone. */
MAP(exchange_keys, BPF_MAP_TYPE_HASH, struct braid_datagram_key, __u32, BRAID_MAX_EXCHANGES, 0);

/* Number of entries of each user in `arrivals` and `exchanges`. A user may have a quarter of each map. The daemon recounts from time to time. */
MAP(shares, BPF_MAP_TYPE_HASH, __u32, struct braid_share, BRAID_MAX_SHARES, 0);

/* Users that have reached their limit of redirected flows: their next ones go direct. */
MAP(heavy_users, BPF_MAP_TYPE_HASH, __u32, __u32, 1024, 0);

static const struct braid_arrival no_arrival;

BRAID_INLINE _Bool is_heavy(__u32 user)
{
	return bpf_map_lookup_elem(&heavy_users, &user) != NULL;
}

/* Number of entries of a user; NULL if `shares` is full. */
BRAID_INLINE struct braid_share *share_of(__u32 user)
{
	struct braid_share *share = bpf_map_lookup_elem(&shares, &user), none = {};

	if (share)
		return share;
	bpf_map_update_elem(&shares, &user, &none, BPF_NOEXIST);
	return bpf_map_lookup_elem(&shares, &user);
}

BRAID_INLINE void release_arrival_share(__u32 user)
{
	struct braid_share *share = bpf_map_lookup_elem(&shares, &user);

	if (share)
		__sync_fetch_and_add(&share->arrivals, -1);
}

BRAID_INLINE void release_exchange_share(__u32 user)
{
	struct braid_share *share = bpf_map_lookup_elem(&shares, &user);

	if (share)
		__sync_fetch_and_add(&share->exchanges, -1);
}

/* The arrival or exchange of `own` that the daemon has not taken yet, or NULL. */
BRAID_INLINE struct braid_arrival *arrival_of(const struct redirect_state *own)
{
	__u32 address = own->address;
	struct braid_arrival *arrival;

	if (own->datagrams)
		arrival = bpf_map_lookup_elem(&exchanges, &address);
	else
		arrival = bpf_map_lookup_elem(&arrivals, &address);
	return arrival && arrival->socket == own->socket ? arrival : NULL;
}

/* Removes what an earlier connect of this socket left behind, because that connect failed or ended. Returns whether there was anything. */
static __attribute__((noinline)) int clear_redirect_state(struct bpf_sock *socket)
{
	struct redirect_state *own = bpf_sk_storage_get(&redirect_states, socket, NULL, 0);
	struct braid_arrival *arrival;
	__u32 address, user;

	if (!own)
		return 0;
	address = own->address;
	arrival = arrival_of(own);
	user = arrival ? arrival->user : 0;
	if (own->datagrams) {
		struct braid_datagram_key key = { .socket = own->socket };

		if (own->by_port)
			bpf_map_delete_elem(&exchange_keys, &key);
		if (arrival && !bpf_map_delete_elem(&exchanges, &address))
			release_exchange_share(user);
	} else if (arrival && !bpf_map_delete_elem(&arrivals, &address)) {
		release_arrival_share(user);
	}
	bpf_sk_storage_delete(&redirect_states, socket);
	return 1;
}

BRAID_INLINE __u32 random_address(void)
{
	return bpf_htonl(REDIRECT_BASE | (bpf_get_prandom_u32() & REDIRECT_HOSTS));
}

/* Reserves a free loopback address for an arrival. 0: the user has too many, or no free address was found. */
BRAID_INLINE __u32 reserve_address(__u32 user)
{
	struct braid_share *share = share_of(user);

	if (!share || (__s32)share->arrivals >= BRAID_MAX_ARRIVALS / 4)
		return 0;
	for (int try = 0; try < REDIRECT_TRIES; try++) {
		__u32 address = random_address();

		if (!bpf_map_update_elem(&arrivals, &address, &no_arrival, BPF_NOEXIST)) {
			__sync_fetch_and_add(&share->arrivals, 1);
			return address;
		}
	}
	return 0;
}

/* Reserves a free loopback address for an exchange. 0: the user has too many, or no free address was found. */
BRAID_INLINE __u32 reserve_exchange(__u32 user)
{
	struct braid_share *share = share_of(user);

	if (!share || (__s32)share->exchanges >= BRAID_MAX_EXCHANGES / 4)
		return 0;
	for (int try = 0; try < REDIRECT_TRIES; try++) {
		__u32 address = random_address();

		if (!bpf_map_update_elem(&exchanges, &address, &no_arrival, BPF_NOEXIST)) {
			__sync_fetch_and_add(&share->exchanges, 1);
			return address;
		}
	}
	return 0;
}

BRAID_INLINE void fill_redirect_state(struct redirect_state *own, const struct braid_params *now, const struct request *request)
{
	__builtin_memcpy(own->remote, request->remote, sizeof(own->remote));
	if (request->family == 6) {
		__builtin_memcpy(own->local, now->local6, sizeof(own->local));
	} else if (now->local4) {
		own->local[2] = bpf_htonl(0xffff);
		own->local[3] = now->local4;
	}
	own->address = request->loopback;
	own->port = bpf_htons(request->port);
	own->listener = request->listener;
	own->by_port = request->by_port;
	own->datagrams = request->protocol == IPPROTO_UDP;
}

BRAID_INLINE void fill_arrival(struct braid_arrival *arrival, const struct request *request, __u64 cookie)
{
	arrival->socket = cookie;
	arrival->demand = request->demand;
	arrival->cgroup = request->cgroup;
	arrival->app = request->app;
	__builtin_memcpy(arrival->remote, request->remote, sizeof(arrival->remote));
	arrival->process = request->process;
	arrival->user = request->user;
	arrival->port = request->port;
	arrival->family = request->family;
	arrival->class_ = request->class_;
	arrival->rule = request->rule;
	arrival->direction = request->direction;
	if (request->filtered)
		arrival->flags |= BRAID_ARRIVAL_FILTERED;
	if (request->held)
		arrival->flags |= BRAID_ARRIVAL_HELD;
	arrival->started = bpf_ktime_get_ns();
}

/*
 * Redirects the connection to the daemon, if possible. Returns 1 and sets `request->loopback` and `request->listener` to the address and port, or
 * returns 0: the connection then continues without redirection. Not inlined, to stay within the stack limit of 512 bytes.
 */
__attribute__((noinline)) int redirect(struct bpf_sock_addr *ctx, struct request *request, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	struct bpf_sock *socket = ctx->sk;
	const struct tcp_sock *tcp;
	const struct sock *sk;
	struct braid_arrival *arrival;
	struct braid_redirection *open;
	struct redirect_state *own;
	__u32 zero = 0, address;
	_Bool by_port;
	__u16 port;

	open = bpf_map_lookup_elem(&redirection, &zero);
	if (!request || !now || !socket || !open || !open->port4)
		return 0;
	tcp = as_number(socket);
	sk = (const void *)tcp;
	by_port = socket->family == AF_INET6 && BPF_CORE_READ_BITFIELD_PROBED(sk, __sk_common.skc_ipv6only);
	port = by_port ? open->port6 : open->port4;
	/* A socket that sends nothing before its first data (TCP_FASTOPEN_CONNECT) could keep its entry indefinitely. */
	address = 0;
	if (port && !BPF_CORE_READ_BITFIELD_PROBED(tcp, fastopen_connect) && !is_heavy(request->user))
		address = reserve_address(request->user);
	if (!address) {
		count(BRAID_COUNT_NOT_REDIRECTED);
		return 0;
	}
	arrival = bpf_map_lookup_elem(&arrivals, &address);
	own = bpf_sk_storage_get(&redirect_states, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!arrival || !own) {
		bpf_map_delete_elem(&arrivals, &address);
		release_arrival_share(request->user);
		count(BRAID_COUNT_NOT_REDIRECTED);
		return 0;
	}
	request->loopback = address;
	request->listener = bpf_htons(port);
	request->by_port = by_port;
	own->socket = bpf_get_socket_cookie(ctx);
	fill_redirect_state(own, now, request);
	fill_arrival(arrival, request, own->socket);
	count(BRAID_COUNT_REDIRECTED);
	return 1;
}

/* Redirects datagrams to the daemon. Returns what redirect() returns. An unconnected socket has one loopback address for each remote. */
__attribute__((noinline)) int redirect_datagrams(struct bpf_sock_addr *ctx, struct request *request, __u32 bank, __u32 connected)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	struct bpf_sock *socket = ctx->sk;
	struct braid_datagram_key key = {};
	struct braid_redirection *open;
	struct braid_arrival *exchange;
	struct redirect_state *own = NULL;
	__u32 zero = 0, address, *held;
	_Bool by_port;
	__u16 port;

	open = bpf_map_lookup_elem(&redirection, &zero);
	if (!request || !now || !socket || !open || !open->datagrams4)
		return 0;
	by_port = request->family == 6 && connected;
	port = request->family == 6 ? open->datagrams6 : open->datagrams4;
	request->listener = bpf_htons(port);
	request->by_port = by_port;
	key.socket = bpf_get_socket_cookie(ctx);
	if (!connected) {
		__builtin_memcpy(key.remote, request->remote, sizeof(key.remote));
		key.port = request->port;
		held = bpf_map_lookup_elem(&exchange_keys, &key);
		address = held ? *held : 0;
		exchange = bpf_map_lookup_elem(&exchanges, &address);
		if (port && exchange && exchange->socket == key.socket) {
			exchange->released = bpf_ktime_get_ns();
			request->loopback = address;
			return 1;
		}
	}
	address = port && !is_heavy(request->user) ? reserve_exchange(request->user) : 0;
	if (!address) {
		count(BRAID_COUNT_NOT_REDIRECTED);
		return 0;
	}
	exchange = bpf_map_lookup_elem(&exchanges, &address);
	if (connected)
		own = bpf_sk_storage_get(&redirect_states, socket, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!exchange || (connected && !own) ||
	    ((by_port || !connected) && bpf_map_update_elem(&exchange_keys, &key, &address, BPF_ANY))) {
		bpf_map_delete_elem(&exchanges, &address);
		release_exchange_share(request->user);
		if (own)
			bpf_sk_storage_delete(&redirect_states, socket);
		count(BRAID_COUNT_NOT_REDIRECTED);
		return 0;
	}
	request->loopback = address;
	if (own) {
		own->socket = key.socket;
		fill_redirect_state(own, now, request);
	} else {
		exchange->flags = BRAID_ARRIVAL_UNCONNECTED;
		exchange->released = bpf_ktime_get_ns();
	}
	fill_arrival(exchange, request, key.socket);
	count(BRAID_COUNT_REDIRECTED);
	return 1;
}

/* Handles the end of a redirected socket. Data that it has sent may still wait for the daemon, which takes it or lets the entry time out. */
BRAID_INLINE void release_redirected(struct bpf_sock *socket)
{
	struct redirect_state *own = bpf_sk_storage_get(&redirect_states, socket, NULL, 0);
	struct braid_arrival *arrival;
	__u32 address;

	if (!own)
		return;
	arrival = arrival_of(own);
	if (!arrival)
		return;
	address = own->address;
	if (own->datagrams) {
		const struct sock *sk = as_number(socket);

		/* The address by which its last datagrams are claimed, because the kernel can no longer be asked for their socket. */
		arrival->source = own->by_port ? 0 : BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
		arrival->source_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	} else if (socket->state == TCP_SYN_SENT || socket->state == TCP_CLOSE) {
		__u32 user = arrival->user;

		if (!bpf_map_delete_elem(&arrivals, &address))
			release_arrival_share(user);
		return;
	}
	arrival->released = bpf_ktime_get_ns();
}

BRAID_INLINE struct redirect_state *redirect_state_of(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;

	return socket ? bpf_sk_storage_get(&redirect_states, socket, NULL, 0) : NULL;
}

BRAID_INLINE _Bool is_loopback4(__u32 addr)
{
	return bpf_ntohl(addr) >> 24 == 127;
}

BRAID_INLINE _Bool is_loopback6(const __u32 *addr)
{
	return (addr[0] | addr[1] | addr[2]) == 0 && addr[3] == bpf_htonl(1);
}

BRAID_INLINE void read_address6(struct bpf_sock_addr *ctx, __u32 *addr)
{
	addr[0] = ctx->user_ip6[0];
	addr[1] = ctx->user_ip6[1];
	addr[2] = ctx->user_ip6[2];
	addr[3] = ctx->user_ip6[3];
}

BRAID_INLINE void write_address6(struct bpf_sock_addr *ctx, const __u32 *addr)
{
	ctx->user_ip6[0] = addr[0];
	ctx->user_ip6[1] = addr[1];
	ctx->user_ip6[2] = addr[2];
	ctx->user_ip6[3] = addr[3];
}

#endif
