/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Makes the sockets of moved flows send through Braid's device, whose egress program rewrites their packets (rewrite.bpf.c), whatever becomes of the link that
 * the flows leave. A socket keeps its addresses, and is bound to no device while its flow is moved or may be. Afterwards it is bound again to the link that
 * has its address.
 *
 * The daemon starts this iterator over the namespace's TCP sockets after it changed `rewrites`.
 */

/* The socket's addresses and ports, as in its packets. */
BRAID_INLINE void read_ends(const struct sock_common *socket, struct braid_forward_key *key)
{
	const void *number = as_number(socket);
	const struct sock *sk = number;

	if (socket->skc_family == AF_INET6)
		BPF_CORE_READ_INTO(&key->remote, sk, __sk_common.skc_v6_daddr);
	if (socket->skc_family == AF_INET6 && !is_mapped(key->remote)) {
		BPF_CORE_READ_INTO(&key->client, sk, __sk_common.skc_v6_rcv_saddr);
	} else {
		key->client[2] = key->remote[2] = bpf_htonl(0xffff);
		key->remote[0] = key->remote[1] = 0;
		key->client[3] = socket->skc_rcv_saddr;
		key->remote[3] = socket->skc_daddr;
	}
	key->client_port = socket->skc_num;
	key->remote_port = bpf_ntohs(socket->skc_dport);
	key->protocol = IPPROTO_TCP;
}

/* The slot of the link that has this source address; BRAID_NO_SLOT if there is none. Without branches in the loop, which the verifier would all follow. */
static __attribute__((noinline)) int slot_of_source(const struct braid_forward_key *key, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	_Bool mapped = is_mapped(key->client);
	__u64 found = BRAID_NO_SLOT;

	if (!now)
		return BRAID_NO_SLOT;
	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		const struct braid_slot *link = &now->slots[slot];
		__u64 differs;

		if (mapped)
			differs = link->source4 ^ key->client[3];
		else
			differs = (link->source6[0] ^ key->client[0]) | (link->source6[1] ^ key->client[1]) | (link->source6[2] ^ key->client[2]) |
				  (link->source6[3] ^ key->client[3]);
		found = braid_select(braid_is_zero(differs), slot, found);
	}
	return found;
}

/* Books a steered flow on another link. */
static __attribute__((noinline)) int rebook(struct sock_common *socket, const struct braid_params *now, __u32 slot)
{
	struct connection *connection = connection_of(bpf_get_socket_cookie(socket));
	__u64 id, reserved;

	if (!connection || connection->flow.slot == slot || slot >= BRAID_MAX_LINKS)
		return 0;
	/* The compiler knows that it is below the limit, and omits masks that the verifier needs. */
	__asm__ volatile("" : "+r"(slot));
	id = connection->flow.id;
	reserved = connection->flow.reserved;
	add_to_load(slot, connection->flow.direction, reserved, 1, 0);
	if (!transfer(&connection->flow, id, now, slot, reserved, 0))
		remove_from_load(slot, connection->flow.direction, reserved);
	return 0;
}

/* Marks the socket, and binds it to no device. A socket that its program bound to a device or marked stays as it is. Returns whether it has the mark. */
static __attribute__((noinline)) int lead(struct sock_common *socket, __u32 mark)
{
	const void *number = as_number(socket);
	const struct sock *sk = number;
	__u32 none = 0, bound = BPF_CORE_READ(sk, __sk_common.skc_bound_dev_if), has = BPF_CORE_READ(sk, sk_mark);
	struct connection *connection = connection_of(bpf_get_socket_cookie(socket));

	if (has == mark && !bound)
		return 1;
	if ((has && !is_ours(has)) || (bound && (!connection || connection->flow.ifindex != bound)))
		return 0;
	if (has != mark && set_mark(socket, mark))
		return 0;
	if (!bound || !bpf_setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, &none, sizeof(none)))
		return 1;
	set_mark(socket, has);
	return 0;
}

/*
 * Makes the socket send over its own link. While packets may arrive by Braid's device, which a bound socket would not get, only a mark leads it there;
 * otherwise it is bound, and goes on without Braid. Returns whether the socket does so.
 */
static __attribute__((noinline)) int send_by_own_link(struct sock_common *socket, const struct braid_params *now, __u32 slot, _Bool binds)
{
	const struct braid_slot *link = &now->slots[slot & (BRAID_MAX_LINKS - 1)];

	/* The other end of a connection that somebody else opened has no link of its own. */
	if (slot >= BRAID_MAX_LINKS || !connection_of(bpf_get_socket_cookie(socket)))
		return lead(socket, 0);
	if (!lead(socket, link->mark))
		return 0;
	rebook(socket, now, slot);
	if (binds && !bpf_setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, (void *)link->name, sizeof(link->name)))
		set_mark(socket, 0);
	return 1;
}

/*
 * Notes that the socket is there, what a segment without data would say now, and the sequence numbers with which its connection began. Both ends know them and hardly anybody else, so that they show the
 * other host which connection is meant. The number that is sent may be that of the SYN: the kernel counts it as an acknowledged byte at the end that connects.
 * Returns 0 if the entry is about an earlier connection with the same addresses and ports.
 */
static __attribute__((noinline)) int is_meant(const struct sock_common *socket, struct braid_rewrite *entry)
{
	const struct tcp_sock *tcp = as_number(socket);
	__u32 sent = BPF_CORE_READ(tcp, snd_una) - (__u32)BPF_CORE_READ(tcp, bytes_acked);
	__u32 received = BPF_CORE_READ(tcp, rcv_nxt) - (__u32)BPF_CORE_READ(tcp, bytes_received);

	if (!entry)
		return 1;
	if ((entry->sent | entry->received) && (entry->sent != sent || entry->received != received)) {
		entry->follows = 0;
		return 0;
	}
	entry->sent = sent;
	entry->received = received;
	entry->unacknowledged = BPF_CORE_READ(tcp, snd_una);
	entry->expected = BPF_CORE_READ(tcp, rcv_nxt);
	entry->window = BPF_CORE_READ(tcp, rcv_wnd) >> BPF_CORE_READ_BITFIELD_PROBED(tcp, rx_opt.rcv_wscale);
	entry->doublings = BPF_CORE_READ((const struct inet_connection_sock *)tcp, icsk_backoff);
	entry->seen = bpf_ktime_get_ns();
	return 1;
}

SEC("iter/tcp")
int braid_depart(struct bpf_iter__tcp *ctx)
{
	struct sock_common *socket = ctx->sk_common;
	struct braid_forward_key key = {};
	struct braid_rewrite *entry;
	const struct braid_params *now;
	const void *number;
	__u32 bank, leads;

	if (!socket || !is_established(socket))
		return 0;
	now = params_now(&bank);
	if (!now)
		return 0;
	read_ends(socket, &key);
	entry = bpf_map_lookup_elem(&rewrites, &key);
	if (entry && entry->arrives)
		return 0;
	if (!is_meant(socket, entry))
		return 0;
	if (entry && entry->device) {
		leads = lead(socket, BRAID_DEPARTURE_MARK);
		if (leads)
			rebook(socket, now, (entry->mark & 255) - 1);
		entry->follows = leads;
		return 0;
	}
	/* A connection has no mark of Braid's but while it is moved, or may be. */
	number = as_number(socket);
	if (!entry && !is_ours(BPF_CORE_READ((const struct sock *)number, sk_mark)))
		return 0;
	leads = send_by_own_link(socket, now, slot_of_source(&key, bank), !entry);
	if (entry)
		entry->follows = leads;
	return 0;
}
