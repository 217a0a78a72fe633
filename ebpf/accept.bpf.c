/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Lists the connections that other hosts have opened to this machine. They begin on the link whose address the other host chose, and no program of Braid runs
 * when they do. Only those of hosts with which they can move are listed (`openers`).
 *
 * The daemon starts this iterator over the namespace's TCP sockets when it reads the flows. The kernel lists the listening sockets first: a connection whose
 * local port one of them has was accepted there. A connection that was listed once is listed as long as its socket lives: its listener may close, and its link
 * may lose the address.
 */

/* Ports of listening sockets, and the last run that has found one. */
MAP(listening, BPF_MAP_TYPE_LRU_HASH, __u32, __u64, 4096, 0);

/* The link on which a connection began. */
struct accepted_on {
	__u32 slot;
	__u32 ifindex;
};

/* Connections that were listed. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct accepted_on);
} accepted SEC(".maps");

BRAID_INLINE _Bool is_opener(const struct braid_flow *flow)
{
	struct lpm6 key = { .len = 128 };
	__u8 *wanted;

	__builtin_memcpy(key.addr, flow->remote, sizeof(key.addr));
	wanted = bpf_map_lookup_elem(&openers, &key);
	return wanted && *wanted;
}

BRAID_INLINE _Bool is_listening(__u32 port, __u64 run)
{
	const __u64 *found = bpf_map_lookup_elem(&listening, &port);

	return found && *found == run;
}

/* Whether destinations like the other host may be steered: no tunnel, local network or other route leads there. */
BRAID_INLINE _Bool is_steered_to(const struct braid_flow *flow)
{
	struct request request = { .family = flow->family };

	__builtin_memcpy(request.remote, flow->remote, sizeof(request.remote));
	return steerable(&request);
}

SEC("iter/tcp")
int braid_accepted(struct bpf_iter__tcp *ctx)
{
	struct seq_file *seq = output(ctx->meta);
	struct sock_common *socket = ctx->sk_common;
	const struct braid_params *now;
	struct braid_forward_key ends = {};
	struct braid_flow_row row = {};
	struct accepted_on *known, first;
	const struct sock *number;
	__u64 run = ctx->meta->session_id;
	__u32 bank, port;

	if (!socket)
		return 0;
	port = socket->skc_num;
	if (socket->skc_state == TCP_LISTEN) {
		bpf_map_update_elem(&listening, &port, &run, BPF_ANY);
		return 0;
	}
	if (!is_established(socket))
		return 0;
	known = bpf_sk_storage_get(&accepted, socket, NULL, 0);
	if (!known && !is_listening(port, run))
		return 0;
	read_ends(socket, &ends);
	row.flow.id = bpf_get_socket_cookie(socket);
	row.flow.protocol = IPPROTO_TCP;
	row.flow.family = is_mapped(ends.remote) ? 4 : 6;
	row.flow.flags = BRAID_FLOW_ACCEPTED;
	row.flow.rule = 255;
	row.flow.port = ends.remote_port;
	__builtin_memcpy(row.flow.remote, ends.remote, sizeof(row.flow.remote));
	now = params_now(&bank);
	if (!now || !is_opener(&row.flow))
		return 0;
	if (!known) {
		if (!is_steered_to(&row.flow) || connection_of(row.flow.id))
			return 0;
		first.slot = slot_of_source(&ends, bank);
		if (first.slot >= BRAID_MAX_LINKS)
			return 0;
		first.ifindex = now->slots[first.slot].ifindex;
		known = bpf_sk_storage_get(&accepted, socket, &first, BPF_SK_STORAGE_GET_F_CREATE);
		if (!known)
			return 0;
	}
	row.flow.slot = known->slot;
	row.flow.ifindex = known->ifindex;
	row.flow.scheduler = now->scheduler;
	row.read_at = bpf_ktime_get_ns();
	number = as_number(socket);
	row.flow.user = BPF_CORE_READ(number, sk_uid.val);
	row.flow.cgroup = BPF_CORE_READ(number, sk_cgrp_data.cgroup, kn, id);
	row.flow.inode = BPF_CORE_READ(number, sk_socket, file, f_inode, i_ino);
	/* Timeouts since the other host last acknowledged something. */
	row.flow.resent = BPF_CORE_READ((const struct inet_connection_sock *)(const void *)number, icsk_retransmits);
	read_tcp(number, &row);
	/* It has sent no SYN. */
	if (row.tx)
		row.tx++;
	read_local(number, &row);
	bpf_seq_write(seq, &row, sizeof(row));
	return 0;
}
