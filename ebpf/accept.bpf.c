/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Lists the connections that other hosts have opened to this machine. They begin on the link whose address the other host chose, and no program of Braid runs
 * when they do. Only those of hosts with which they can move are listed (`openers`).
 *
 * The daemon starts this iterator over the namespace's TCP sockets when it reads the flows. The kernel lists the listening sockets first: a connection whose
 * local port one of them has was accepted there.
 */

/* Ports of listening sockets, and when a run last found one. */
MAP(listening, BPF_MAP_TYPE_LRU_HASH, __u32, __u64, 4096, 0);

/* A port that an earlier run found says nothing. */
#define LISTENING_AGE_NS 5000000000ull

BRAID_INLINE _Bool is_opener(const struct braid_flow *flow)
{
	struct lpm6 key = { .len = 128 };
	__u8 *wanted;

	__builtin_memcpy(key.addr, flow->remote, sizeof(key.addr));
	wanted = bpf_map_lookup_elem(&openers, &key);
	return wanted && *wanted;
}

BRAID_INLINE _Bool was_accepted(__u32 port, __u64 now)
{
	const __u64 *seen = bpf_map_lookup_elem(&listening, &port);

	return seen && (__s64)(now - *seen) < (__s64)LISTENING_AGE_NS;
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
	const struct braid_params *params_in_force;
	struct braid_forward_key ends = {};
	struct braid_flow_row row = {};
	const struct sock *number;
	__u32 bank, slot, port;

	if (!socket)
		return 0;
	row.read_at = bpf_ktime_get_ns();
	port = socket->skc_num;
	if (socket->skc_state == TCP_LISTEN) {
		bpf_map_update_elem(&listening, &port, &row.read_at, BPF_ANY);
		return 0;
	}
	if (!is_established(socket) || !was_accepted(port, row.read_at))
		return 0;
	read_ends(socket, &ends);
	row.flow.id = bpf_get_socket_cookie(socket);
	row.flow.protocol = IPPROTO_TCP;
	row.flow.family = is_mapped(ends.remote) ? 4 : 6;
	row.flow.flags = BRAID_FLOW_ACCEPTED;
	row.flow.rule = 255;
	row.flow.port = ends.remote_port;
	__builtin_memcpy(row.flow.remote, ends.remote, sizeof(row.flow.remote));
	if (!is_opener(&row.flow) || !is_steered_to(&row.flow) || connection_of(row.flow.id))
		return 0;
	params_in_force = params_now(&bank);
	if (!params_in_force)
		return 0;
	slot = slot_of_source(&ends, bank);
	if (slot >= BRAID_MAX_LINKS)
		return 0;
	row.flow.slot = slot;
	row.flow.ifindex = params_in_force->slots[slot].ifindex;
	row.flow.scheduler = params_in_force->scheduler;
	number = as_number(socket);
	row.flow.user = BPF_CORE_READ(number, sk_uid.val);
	row.flow.cgroup = BPF_CORE_READ(number, sk_cgrp_data.cgroup, kn, id);
	row.flow.inode = BPF_CORE_READ(number, sk_socket, file, f_inode, i_ino);
	read_tcp(number, &row);
	/* It has sent no SYN. */
	if (row.tx)
		row.tx++;
	read_local(number, &row);
	bpf_seq_write(seq, &row, sizeof(row));
	return 0;
}
