/* SPDX-License-Identifier: GPL-2.0-only */
/* Properties of a request: the calling program, the destination, and the options that the program itself set on its socket. */
#ifndef BRAID_CALLER_H
#define BRAID_CALLER_H

#include "maps.h"

/* A connect or datagram to steer, and the decision about it. */
struct request {
	struct braid_app_key app;
	__u64 id; /* socket cookie, TCP only */
	__u64 time; /* CLOCK_MONOTONIC, nanoseconds, at the last jiffy */
	__u64 cgroup;
	__u64 demand;
	__u32 remote[4]; /* IPv6 or IPv4-mapped, network order */
	/* Source address from an earlier connect of this UDP socket, same format; zero: none. Forwarded: the client's address. */
	__u32 source[4];
	__u32 user;
	__u32 process; /* a client's flow: index of the LAN device */
	__u32 allowed;
	__u32 slot;
	__u16 port; /* host order */
	__u8 family; /* 4 or 6, of the packets */
	__u8 protocol;
	__u8 direction;
	__u8 class_;
	__u8 affinity;
	__u8 rule;
	__u8 bank;
	__u8 placed : 1; /* it has the array entry of its cookie */
	__u8 strict : 1; /* its rule restricts the links: if they are not available, it must fail */
	__u8 redirect : 1; /* the policy redirects it to the daemon */
	__u8 filtered : 1; /* foreign programs filter its cgroup */
	__u8 held : 1; /* redirected because it is not known yet whether its destination runs Braid */
	__u8 by_port : 1; /* redirected to ::1 instead of `loopback` */
	__u8 confined : 1; /* it leaves through a relay, or fails; then `strict` is set too */
	__u8 own : 1; /* forwarded: a program of this machine sent it through the virtual interface; which one is known if `cgroup` is set */
	__u8 kept : 1; /* the datagram has `source`, whatever becomes of its link */
	__u8 mac[6]; /* of the client of a forwarded flow */
	__u16 listener; /* port to which it is redirected, network order */
	__u32 loopback; /* loopback address to which it is redirected, network order; 0: not redirected */
};

static const struct braid_flow no_flow;

/* The part of a word of text before the terminating zero. The first byte is at the lowest address. */
BRAID_INLINE __u64 text_before_end(__u64 word)
{
	__u64 text = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? word : __builtin_bswap64(word);
	/* The lowest set bit is the highest bit of the first zero byte. */
	__u64 zeroes = (text - 0x0101010101010101ull) & ~text & 0x8080808080808080ull;

	if (zeroes)
		text &= ((zeroes & -zeroes) >> 7) - 1;
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? text : __builtin_bswap64(text);
}

/*
 * Reads the process name. Clears everything after the terminator, because before Linux 5.17 the kernel leaves the rest of an earlier, longer name
 * there. Works on words, because a helper that copies text would take a twentieth of the time of a connect.
 */
BRAID_INLINE void read_name(const struct task_struct *leader, struct braid_app_key *app)
{
	const __u64 *comm = (const __u64 *)leader->comm;
	__u64 first = comm[0], second = comm[1], *name = (__u64 *)app->name;

	name[0] = text_before_end(first);
	/* If the name is shorter than eight bytes, the second word is empty. */
	name[1] = name[0] == first && first >> (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 56 : 0) & 255 ? text_before_end(second) : 0;
}

/* Not inlined, like the next function, so that its part of the 512-byte stack is free again afterwards. */
static __attribute__((noinline)) int read_program(struct request *request)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct mm_struct *mm = task->mm;
	struct file *file = mm ? mm->exe_file : NULL;
	struct inode *inode = file ? file->f_inode : NULL;

	if (inode) {
		request->app.exe.inode = inode->i_ino;
		request->app.exe.device = inode->i_sb->s_dev;
	}
	read_name(task->group_leader, &request->app);
	request->user = task->cred->uid.val;
	return 0;
}

BRAID_INLINE void read_caller(struct request *request)
{
	read_program(request);
	request->cgroup = bpf_get_current_cgroup_id();
}

/* PID namespaces are nested at most 32 deep. This limit suffices for any system that runs a daemon. */
#define BRAID_PROCESS_LEVELS 8
#define BRAID_PIDTYPE_TGID 1

/* The caller's process id in a PID namespace other than the initial one; 0 if it has none there. */
static __attribute__((noinline)) __u32 process_in(__u32 space)
{
	struct task_struct *task = bpf_get_current_task_btf();
	const struct pid *pid = BPF_CORE_READ(task, signal, pids[BRAID_PIDTYPE_TGID]);
	const struct upid *number = (const void *)pid + bpf_core_field_offset(struct pid, numbers);
	__u32 level = BPF_CORE_READ(pid, level);

	/* Unrolled with a constant bound: otherwise clang 19 and later generate a loop that the verifier of Linux 6.1 rejects. */
#pragma unroll
	for (__u32 at = 0; at < BRAID_PROCESS_LEVELS; at++) {
		const struct upid *here = (const void *)number + at * bpf_core_type_size(struct upid);

		if (at > level)
			break;
		if (BPF_CORE_READ(here, ns, ns.inum) == space)
			return BPF_CORE_READ(here, nr);
	}
	return 0;
}

/* The bank of parameters in force, and the time. NULL if there is no live daemon. */
BRAID_INLINE const struct braid_params *live_params(__u64 *time, __u32 *bank)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);

	/* The coarse clock, which may be some milliseconds old, is cheaper to read. */
	*time = bpf_ktime_get_coarse_ns();
	/* Signed, because a heartbeat written between the two clock readings is slightly in the future. */
	if (!switches || (__s64)(*time - switches->heartbeat) > (__s64)BRAID_HEARTBEAT_NS)
		return NULL;
	*bank = switches->bank & 1;
	return bpf_map_lookup_elem(&params, bank);
}

/* The same for a caller. NULL also if the caller is in another network namespace or is the daemon itself. */
BRAID_INLINE const struct braid_params *active_params(struct bpf_sock_addr *ctx, struct request *request, __u32 *bank)
{
	const struct braid_params *found = live_params(&request->time, bank);

	if (!found || bpf_get_netns_cookie(ctx) != found->netns)
		return NULL;
	/* The id in the daemon's PID namespace, because in a container the kernel's ids differ from those that the daemon uses. */
	request->process = found->processes ? process_in(found->processes) : bpf_get_current_pid_tgid() >> 32;
	return request->process == found->daemon ? NULL : found;
}

BRAID_INLINE _Bool is_mapped(const __u32 *addr)
{
	return addr[0] == 0 && addr[1] == 0 && addr[2] == bpf_htonl(0xffff);
}

BRAID_INLINE void set_remote4(struct request *request, __u32 addr)
{
	request->remote[0] = 0;
	request->remote[1] = 0;
	request->remote[2] = bpf_htonl(0xffff);
	request->remote[3] = addr;
	request->family = 4;
}

/* Whether the kernel's own route for the destination is a link; false if unknown. Not inlined, to save stack. */
static __attribute__((noinline)) int steerable(const struct request *request)
{
	__u8 *verdict;

	if (request->family == 4) {
		struct lpm4 key = { .len = 32, .addr = request->remote[3] };

		verdict = bpf_map_lookup_elem(&prefixes4, &key);
	} else {
		struct lpm6 key = { .len = 128 };

		__builtin_memcpy(key.addr, request->remote, sizeof(key.addr));
		verdict = bpf_map_lookup_elem(&prefixes6, &key);
	}
	return verdict && *verdict == BRAID_STEER;
}

/*
 * Converts a pointer to a number. The verifier forbids adding an offset to a socket's pointer, so CO-RE cannot address its fields. Copied through the
 * stack, the pointer becomes a number, which the probing reads accept.
 */
BRAID_INLINE const void *as_number(const void *pointer)
{
	const void *number = NULL;

	bpf_probe_read_kernel(&number, sizeof(number), &pointer);
	return number;
}

/* Options that the program itself set on its socket. */
struct socket_options {
	__u32 device;
	__u32 mark;
	__u8 locks;
};

static __attribute__((noinline)) int read_socket_options(struct bpf_sock *socket, struct socket_options *asked)
{
	const struct inet_sock *inet = as_number(socket);
	struct ipv6_pinfo *inet6 = BPF_CORE_READ(inet, pinet6);

	asked->mark = socket->mark;
	asked->locks = BPF_CORE_READ_BITFIELD_PROBED(&inet->sk, sk_userlocks);
	asked->device = socket->bound_dev_if | BPF_CORE_READ(inet, uc_index);
	if (inet6)
		asked->device |= BPF_CORE_READ(inet6, ucast_oif);
	return 0;
}

/* Reads the same options of a TCP socket, which the verifier allows to be read directly, without a helper call per field. */
static __attribute__((noinline)) int read_tcp_socket_options(struct bpf_sock *socket, struct socket_options *asked)
{
	const struct inet_sock *inet = (const void *)bpf_skc_to_tcp_sock(socket);
	struct ipv6_pinfo *inet6;

	if (!inet)
		return -1;
	inet6 = inet->pinet6;
	asked->mark = socket->mark;
	asked->locks = BPF_CORE_READ_BITFIELD(&inet->sk, sk_userlocks);
	asked->device = socket->bound_dev_if | inet->uc_index;
	if (inet6)
		asked->device |= inet6->ucast_oif;
	return 0;
}

BRAID_INLINE void read_source(struct bpf_sock *socket, struct request *request)
{
	const struct sock *sk = as_number(socket);

	if (request->family == 4)
		request->source[3] = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
	else
		BPF_CORE_READ_INTO(&request->source, sk, __sk_common.skc_v6_rcv_saddr);
}

/* Maximum number of programs of one attach type that are examined. */
#define BRAID_MAX_PROGRAMS 16

/* Whether a program that does not belong to Braid runs for the caller's cgroup at this attach type (as numbered by the kernel). True if unknown. */
__attribute__((noinline)) int has_foreign_program(__u32 type)
{
	struct task_struct *task = bpf_get_current_task_btf();
	const void *cgroup = BPF_CORE_READ(task, cgroups, dfl_cgrp);
	const void *slot = cgroup + bpf_core_field_offset(struct cgroup, bpf) + bpf_core_field_offset(struct cgroup_bpf, effective);
	const void *programs = NULL;

	if (!cgroup || bpf_probe_read_kernel(&programs, sizeof(programs), slot + type * sizeof(programs)) || !programs)
		return 1;
	programs += bpf_core_field_offset(struct bpf_prog_array, items);
#pragma unroll
	for (__u32 at = 0; at < BRAID_MAX_PROGRAMS; at++) {
		const struct bpf_prog_array_item *item = programs + at * bpf_core_type_size(struct bpf_prog_array_item);
		const struct bpf_prog *program = BPF_CORE_READ(item, prog);
		char name[16] = {};

		if (!program)
			return 0;
		BPF_CORE_READ_INTO(&name, program, aux, name);
		if (name[0] != 'b' || name[1] != 'r' || name[2] != 'a' || name[3] != 'i' || name[4] != 'd' || name[5] != '_')
			return 1;
	}
	return 1;
}

/*
 * Whether foreign programs filter what the caller's cgroup sends or receives (such as `IPAddressDeny=`). They do not see what the daemon sends on its
 * behalf. Other instances of Braid, in other network namespaces, filter nothing.
 */
BRAID_INLINE _Bool is_filtered(void)
{
	return has_foreign_program(bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_INET_EGRESS)) ||
	       has_foreign_program(bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_INET_INGRESS)) ||
	       has_foreign_program(bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_INET4_CONNECT)) ||
	       has_foreign_program(bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_INET6_CONNECT)) ||
	       has_foreign_program(bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_UDP4_SENDMSG)) ||
	       has_foreign_program(bpf_core_enum_value(enum cgroup_bpf_attach_type, CGROUP_UDP6_SENDMSG));
}

BRAID_INLINE _Bool is_ours(__u32 mark)
{
	return (mark & BRAID_MARK_MASK) == BRAID_MARK_BASE;
}

/* Whether this is the mark of a connect that is being moved. */
BRAID_INLINE _Bool is_moving(__u32 mark)
{
	return (mark & BRAID_MOVE_MASK) == BRAID_MARK_BASE && !is_ours(mark);
}

#endif
