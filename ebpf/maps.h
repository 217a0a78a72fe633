/* SPDX-License-Identifier: GPL-2.0-only */
/* Maps, constants and counters that the programs share. braid.bpf.c compiles all programs together, so each map exists once. */
#ifndef BRAID_MAPS_H
#define BRAID_MAPS_H

#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#include "kernel.h"
#include "map.h"
#include "schedule.h"

#define AF_INET 2
#define AF_INET6 10
#define SOL_SOCKET 1
#define SO_BINDTODEVICE 25
#define SO_MARK 36
#define SOCK_BINDADDR_LOCK 4
#define SOCK_BINDPORT_LOCK 8
#define TCP_ESTABLISHED 1
#define TCP_SYN_SENT 2
#define TCP_TIME_WAIT 6
#define TCP_CLOSE 7
#define TCP_CLOSE_WAIT 8
#define TCP_LAST_ACK 9
#define TCP_LISTEN 10
#define TCP_CLOSING 11
#define TCP_NEW_SYN_RECV 12
#define MSG_PEEK 2
#define ENETUNREACH 101
#define DNS_PORT 53
#define DNS_TLS_PORT 853

#define ALLOW 1
#define DENY 0

/* Features of this kernel. The loader sets them before loading. */
const volatile __u8 has_retval = 0;

struct load_table {
	struct bpf_spin_lock lock;
	__u32 removals; /* number of reservations that were removed or moved to another link, modulo 2^32; `commits` counts the new ones */
	__u64 added;	/* bytes of all reservations so far, modulo 2^64 */
	struct braid_load_table state;
};

struct packet_load {
	__u64 bytes[2]; /* down and up */
};

struct process_name {
	__u8 text[16];
};

struct lpm4 {
	__u32 len;
	__u32 addr;
};

struct address {
	__u32 word[4];
};

struct lpm6 {
	__u32 len;
	__u32 addr[4];
};

MAP(control, BPF_MAP_TYPE_ARRAY, __u32, struct braid_control, 1, 0);
MAP(params, BPF_MAP_TYPE_ARRAY, __u32, struct braid_params, 2, 0);
MAP(rules, BPF_MAP_TYPE_ARRAY, __u32, struct braid_rule, 2 * BRAID_MAX_RULES, 0);
MAP(load_table, BPF_MAP_TYPE_ARRAY, __u32, struct load_table, 1, 0);
/* The load table's `packets`. The daemon writes them; a decision copies them. They are outside `params` because they change all the time. */
MAP(packets, BPF_MAP_TYPE_ARRAY, __u32, struct packet_load, 1, 0);
MAP(corrections, BPF_MAP_TYPE_ARRAY, __u32, struct braid_link_load, BRAID_MAX_LINKS, 0);
MAP(prefixes4, BPF_MAP_TYPE_LPM_TRIE, struct lpm4, __u8, 65536, BPF_F_NO_PREALLOC);
MAP(prefixes6, BPF_MAP_TYPE_LPM_TRIE, struct lpm6, __u8, 65536, BPF_F_NO_PREALLOC);
MAP(resolvers, BPF_MAP_TYPE_HASH, struct address, __u32, 256, 0);
/* Hosts that run Braid. */
MAP(servers, BPF_MAP_TYPE_HASH, struct address, __u32, 1024, 0);
/* Services of these hosts whose ports are closed, so their flows are not redirected. The socket in the key is 0. */
MAP(closed, BPF_MAP_TYPE_HASH, struct braid_datagram_key, __u32, 1024, 0);
/* Whether the first connection to a destination is held until the destination has said whether it runs Braid; by IPv6 or IPv4-mapped prefix. */
MAP(hold, BPF_MAP_TYPE_LPM_TRIE, struct lpm6, __u8, BRAID_MAX_HOLD, BPF_F_NO_PREALLOC);
/* Whether connections that a host has opened to this machine are listed; by IPv6 or IPv4-mapped prefix. */
MAP(openers, BPF_MAP_TYPE_LPM_TRIE, struct lpm6, __u8, BRAID_MAX_HOLD, BPF_F_NO_PREALLOC);
/* Destinations that no relay accepts. */
MAP(bypass, BPF_MAP_TYPE_HASH, struct address, __u32, 512, 0);
MAP(executables, BPF_MAP_TYPE_HASH, struct braid_exe_key, struct braid_exe, 1024, 0);
MAP(names, BPF_MAP_TYPE_HASH, struct process_name, struct braid_app, 1024, 0);
MAP(apps, BPF_MAP_TYPE_LRU_HASH, struct braid_app_key, struct braid_app, 4096, 0);
MAP(demands, BPF_MAP_TYPE_LRU_HASH, struct braid_demand_key, struct braid_demand, 16384, 0);
MAP(affinities, BPF_MAP_TYPE_LRU_HASH, struct braid_affinity_key, struct braid_affinity_value, 16384, 0);
MAP(datagrams, BPF_MAP_TYPE_LRU_HASH, struct braid_datagram_key, struct braid_flow, 16384, 0);
/* Flows of unconnected datagrams that keep their source address. The daemon enters and removes them. */
MAP(kept, BPF_MAP_TYPE_HASH, struct braid_datagram_key, struct braid_kept, BRAID_MAX_KEPT, BPF_F_NO_PREALLOC);
MAP(signs, BPF_MAP_TYPE_ARRAY, __u32, struct braid_signs, BRAID_MAX_LINKS, 0);
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, BRAID_COUNTERS, 0);

/*
 * A TCP flow and the address of its socket in the kernel. The address is stored as a number, for probing reads that then compare cookies
 * (`is_socket`).
 */
struct connection {
	struct braid_flow flow;
	__u64 socket;
};

/*
 * TCP flows, in an array indexed by socket cookie. An entry is free if its `id` is 0, or if its flow is a marker, which means that it has ended. The
 * kernel assigns cookies sequentially, so collisions are rare; on a collision the flow goes to the hash map `overflow`, keyed by its cookie. A new
 * entry there makes a connect some 0.3 microseconds slower than an array entry. Socket storage would cost four times as much again, also when a
 * socket closes. The dump finds the entries of sockets whose end was missed.
 */
MAP(connections, BPF_MAP_TYPE_ARRAY, __u32, struct connection, BRAID_CONNECTION_PLACES, 0);
MAP(overflow, BPF_MAP_TYPE_HASH, __u64, struct connection, BRAID_MAX_OVERFLOW, BPF_F_NO_PREALLOC);

/* Flows that this machine forwards for clients. Not allocated in advance: without a gateway it takes no memory. */
MAP(forwarded, BPF_MAP_TYPE_HASH, struct braid_forward_key, struct braid_flow, BRAID_MAX_FORWARDED, BPF_F_NO_PREALLOC);
/* Those that began flows last: made-up addresses do not keep others out. */
MAP(clients, BPF_MAP_TYPE_LRU_HASH, struct address, struct braid_client, BRAID_MAX_CLIENTS, 0);
/* Number of forwarded flows so far, by CPU. */
MAP(forwarded_ids, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, 1, 0);
/* Addresses of the virtual interface: IPv4, IPv6. */
MAP(own_addresses, BPF_MAP_TYPE_ARRAY, __u32, struct braid_own_address, 2, 0);
/* Control groups of a forwarded packet's sender, by level, and the flow to which they belong; 0: none or unknown. */
MAP(sender, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct braid_forward_key, 1, 0);
MAP(sender_cgroups, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, BRAID_CGROUP_LEVELS, 0);
/* The wanted shapes, by socket cookie or id of a forwarded flow. The daemon writes them. Those of one kind may be added before those of the other are removed. */
MAP(shapes, BPF_MAP_TYPE_HASH, __u64, struct braid_shape, 2 * BRAID_MAX_SHAPES, BPF_F_NO_PREALLOC);
/* Classes of remote ports, for forwarded flows, whose programs are unknown. */
MAP(port_classes, BPF_MAP_TYPE_HASH, __u32, __u8, 256, BPF_F_NO_PREALLOC);

/* Flows of connected UDP sockets, and markers of sockets that send unconnected datagrams. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct braid_flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

BRAID_INLINE void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);

	if (counter)
		(*counter)++;
}

#endif
