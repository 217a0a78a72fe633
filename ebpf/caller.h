/* SPDX-License-Identifier: GPL-2.0-only */
/* Who wants to reach what: the calling program, the destination, and what the program itself asked of its socket. */
#ifndef BRAID_CALLER_H
#define BRAID_CALLER_H

#include "maps.h"

/* Who wants to reach what, and what was decided about it. */
struct request {
	struct braid_app_key app;
	__u64 id; /* the socket's cookie, of TCP only */
	__u64 time; /* CLOCK_MONOTONIC, nanoseconds, as of the last tick */
	__u64 cgroup;
	__u64 demand;
	__u32 remote[4]; /* IPv6 or IPv4-mapped, network order */
	__u32 source[4]; /* what an earlier connect of this UDP socket left behind, likewise; zero: nothing */
	__u32 user;
	__u32 process;
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
	__u8 placed : 1; /* it has the place that its cookie gives it */
	__u8 strict : 1; /* its rule names the links: where they cannot be had, it must fail */
	__u8 redirect : 1; /* the policy has it carried by the daemon */
	__u8 filtered : 1; /* its destination runs Braid, and programs of others filter its cgroup */
	__u8 by_port : 1; /* a redirected one goes to ::1 instead of `loopback` */
	__u16 listener; /* where a redirected one goes: the port, network order */
	__u32 loopback; /* and the loopback address, network order; 0: it is not redirected */
};

static const struct braid_flow no_flow;

/* What of a word of text, its first byte in the lowest address, comes before its end. */
BRAID_INLINE __u64 text_before_end(__u64 word)
{
	__u64 text = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? word : __builtin_bswap64(word);
	/* The lowest bit is the highest of the first byte that is zero. */
	__u64 zeroes = (text - 0x0101010101010101ull) & ~text & 0x8080808080808080ull;

	if (zeroes)
		text &= ((zeroes & -zeroes) >> 7) - 1;
	return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? text : __builtin_bswap64(text);
}

/*
 * The process's name. As text: before Linux 5.17 the kernel leaves the end of an earlier, longer name behind. In words, since a
 * helper that copies text takes a connect a twentieth of its time.
 */
BRAID_INLINE void read_name(const struct task_struct *leader, struct braid_app_key *app)
{
	const __u64 *comm = (const __u64 *)leader->comm;
	__u64 first = comm[0], second = comm[1], *name = (__u64 *)app->name;

	name[0] = text_before_end(first);
	/* Shorter than eight bytes: nothing follows. */
	name[1] = name[0] == first && first >> (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 56 : 0) & 255 ? text_before_end(second) : 0;
}

/* A function of its own, as the next one too: what it needs of the stack's 512 bytes is free again after it. */
static __attribute__((noinline)) int read_caller(struct request *request)
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
	request->cgroup = bpf_get_current_cgroup_id();
	request->user = task->cred->uid.val;
	return 0;
}

/* Namespaces of processes stand in each other, 32 deep at most; who runs a daemon is not that deep. */
#define BRAID_PROCESS_LEVELS 8
#define BRAID_PIDTYPE_TGID 1

/* The caller's number in another namespace of processes than the kernel's own; 0: it has none there. */
static __attribute__((noinline)) __u32 process_in(__u32 space)
{
	struct task_struct *task = bpf_get_current_task_btf();
	const struct pid *pid = BPF_CORE_READ(task, signal, pids[BRAID_PIDTYPE_TGID]);
	const struct upid *number = (const void *)pid + bpf_core_field_offset(struct pid, numbers);
	__u32 level = BPF_CORE_READ(pid, level);

	/* Unrolled, with a bound that is a constant: clang 19 and later otherwise make a loop that Linux 6.1's verifier gives up on. */
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

/*
 * The bank of parameters in force, and the time in the request; NULL where Braid must not act: no live daemon, another network
 * namespace, the daemon itself.
 */
BRAID_INLINE const struct braid_params *acting(struct bpf_sock_addr *ctx, struct request *request, __u32 *bank)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	const struct braid_params *found;

	/* The tick's time, some milliseconds old: no clock is read for it. */
	request->time = bpf_ktime_get_coarse_ns();
	/* Signed: a heartbeat between the two readings is a little in the future, not an age. */
	if (!switches || (__s64)(request->time - switches->heartbeat) > (__s64)BRAID_HEARTBEAT_NS)
		return NULL;
	*bank = switches->bank & 1;
	found = bpf_map_lookup_elem(&params, bank);
	if (!found || bpf_get_netns_cookie(ctx) != found->netns)
		return NULL;
	/* As the daemon counts: in a container the kernel's numbers are not those that it knows itself and others by. */
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

/* Whether the kernel's own choice for the destination is a link; what is unknown is not. A function of its own, for the sake of the stack. */
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
 * The verifier lets nobody add an offset to a socket's pointer, so its fields cannot be found by CO-RE. Copied by way of the
 * stack, the pointer is just a number, which the probing reads accept.
 */
BRAID_INLINE const void *as_number(const void *pointer)
{
	const void *number = NULL;

	bpf_probe_read_kernel(&number, sizeof(number), &pointer);
	return number;
}

/* What the program itself asked of its socket. */
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

/* The same of a TCP socket, which the verifier lets us read as it is, without a call for each field. */
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

/* More programs of one kind than this are not looked through. */
#define BRAID_MAX_PROGRAMS 16

/* Whether a program that is no Braid's runs for the caller's cgroup at this attach type (of the kernel's own numbers); unknown counts. */
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
 * Whether programs of others filter what the caller's cgroup sends or receives (`IPAddressDeny=` and its like). They do not see what the
 * daemon sends for it. Other Braids, in other network namespaces, filter nothing.
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

/* Whether it is the mark of a connect that is being moved. */
BRAID_INLINE _Bool is_moving(__u32 mark)
{
	return (mark & BRAID_MOVE_MASK) == BRAID_MARK_BASE && !is_ours(mark);
}

#endif
