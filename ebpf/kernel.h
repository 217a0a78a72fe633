/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The fields of kernel structures that the programs read. Only names and types matter: the loader takes the offsets from the running kernel's BTF
 * (CO-RE).
 */
#ifndef BRAID_KERNEL_H
#define BRAID_KERNEL_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct super_block {
	__u32 s_dev;
};

struct inode {
	unsigned long i_ino;
	struct super_block *i_sb;
};

struct file {
	struct inode *f_inode;
};

struct mm_struct {
	struct file *exe_file;
};

struct cred {
	struct {
		__u32 val;
	} uid;
};

struct pid_namespace {
	struct {
		unsigned int inum;
	} ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
};

/* One number for each namespace, from the outermost inwards. */
struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct signal_struct {
	struct pid *pids[4];
};

struct bpf_prog_aux {
	char name[16];
};

struct bpf_prog {
	struct bpf_prog_aux *aux;
};

struct bpf_prog_array_item {
	struct bpf_prog *prog;
};

/* An item without a program ends the array. */
struct bpf_prog_array {
	struct bpf_prog_array_item items[1];
};

/* The programs that run for a cgroup, by attach type: its own and those of its ancestors. */
struct cgroup_bpf {
	struct bpf_prog_array *effective[1];
};

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	struct cgroup_bpf bpf;
	struct kernfs_node *kn;
};

struct css_set {
	struct cgroup *dfl_cgrp;
};

struct task_struct {
	struct css_set *cgroups;
	struct task_struct *group_leader;
	struct signal_struct *signal;
	struct mm_struct *mm;
	const struct cred *cred;
	int tgid;
	char comm[16];
};

struct sock_common {
	__u32 skc_daddr;
	__u32 skc_rcv_saddr;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	int skc_bound_dev_if;
	__u16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	unsigned char skc_ipv6only : 1;
	volatile unsigned char skc_state;
	struct {
		__s64 counter;
	} skc_cookie;
};

struct socket {
	struct file *file;
};

struct sock {
	struct sock_common __sk_common;
	struct socket *sk_socket;
	struct {
		__u32 val;
	} sk_uid;
	struct {
		struct cgroup *cgroup;
	} sk_cgrp_data;
	__u8 sk_userlocks : 4;
	__u16 sk_protocol;
	__u32 sk_mark;
	int sk_rcvbuf;
	unsigned long sk_max_pacing_rate;
};

struct ipv6_pinfo {
	int ucast_oif;
};

struct inet_sock {
	struct sock sk;
	struct ipv6_pinfo *pinet6;
	int uc_index;
};

struct inet_connection_sock {
	__u8 icsk_backoff;
	__u8 icsk_retransmits;
};

struct sk_buff {
	char cb[48];
};

struct tcp_skb_cb {
	__u32 seq;
};

struct tcp_options_received {
	__u16 rcv_wscale : 4;
};

struct tcp_sock {
	__u64 bytes_received;
	__u64 bytes_acked;
	__u32 write_seq;
	__u32 snd_una;
	__u32 rcv_nxt;
	__u32 rcv_wnd;
	__u32 srtt_us;
	__u32 total_retrans;
	__u32 segs_out;
	__u32 mss_cache;
	__u32 window_clamp;
	__u32 rate_delivered;
	__u32 rate_interval_us;
	__u8 rate_app_limited : 1;
	__u8 fastopen_connect : 1;
	struct {
		__u32 rtt_us;
	} rcv_rtt_est;
	struct tcp_options_received rx_opt;
};

#pragma clang attribute pop

/* The values differ between kernels, so read them only with `bpf_core_enum_value`. */
enum cgroup_bpf_attach_type {
	CGROUP_INET_INGRESS,
	CGROUP_INET_EGRESS,
	CGROUP_INET4_CONNECT,
	CGROUP_INET6_CONNECT,
	CGROUP_UDP4_SENDMSG,
	CGROUP_UDP6_SENDMSG,
};

#endif
