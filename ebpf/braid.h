/* SPDX-License-Identifier: GPL-2.0-only OR MIT OR Apache-2.0 */
/*
 * What the daemon and its BPF programs say to each other. The Rust side is crates/platform/src/linux/bpf/abi.rs;
 * a test compares sizes and offsets. Every structure is laid out without hidden padding.
 */
#ifndef BRAID_H
#define BRAID_H

#define BRAID_MAX_LINKS 32
#define BRAID_MAX_RULES 64
/* Redirected connections that wait for the daemon; its listeners' queues hold as many. */
#define BRAID_MAX_ARRIVALS 4096
/* Places for the TCP flows that are followed, by their sockets' cookies; a power of two. */
#define BRAID_CONNECTION_PLACES 4096
/* And how many may be followed besides, whose places are taken. */
#define BRAID_MAX_OVERFLOW 32768
/* Redirected exchanges of datagrams at a time. */
#define BRAID_MAX_EXCHANGES 8192
/* Users that may have redirected flows at a time. */
#define BRAID_MAX_SHARES 4096
#define BRAID_NO_SLOT 0xffffffffu

/* A socket's routing mark is this plus the link's slot plus one; any other mark is foreign. */
#define BRAID_MARK_BASE 0xB1D00000u
#define BRAID_MARK_MASK 0xFFFFFF00u
/* While a connect is moved from one link to another its mark also holds the slot it leaves, plus one, in the second byte. */
#define BRAID_MOVE_MASK 0xFFFF0000u

/* A SYN that nobody answers for so long is sent again by another link; the kernel itself sends it again after a second. */
#define BRAID_UNANSWERED_NS 500000000ull

/* The programs do nothing once the heartbeat is older than this. */
#define BRAID_HEARTBEAT_NS 2000000000ull

enum braid_mode { BRAID_ONLY_ONE, BRAID_VIRTUAL_START, BRAID_CHEAPEST_IN_TIME };
enum braid_direction { BRAID_DOWN, BRAID_UP };
enum braid_affinity { BRAID_AFFINITY_NONE, BRAID_AFFINITY_DESTINATION, BRAID_AFFINITY_APPLICATION, BRAID_AFFINITY_UNSET = 255 };
enum braid_class { BRAID_UNCLASSIFIED, BRAID_REAL_TIME, BRAID_BROWSER, BRAID_BULK, BRAID_CLASS_UNSET = 255 };
enum braid_verdict { BRAID_LEAVE, BRAID_STEER };

/* What the rule keeps of a link. Written by the programs under the table's lock only. */
struct braid_link_load {
	__u64 load[2];
	__u64 tag;
	__u32 flows;
	__u32 pad;
};

/* What the daemon says of a link. */
struct braid_slot {
	__u32 ifindex; /* 0: the slot is free */
	__u32 rank;
	__u8 name[16];
	__u32 source4; /* network order; 0: none */
	__u32 mark;
	__u32 source6[4];
	__u64 rate[2]; /* bytes per second, down and up */
	__u64 price;
	__u64 step;
};

/* One bank of what the daemon decided. The daemon writes the idle bank, then turns `braid_control.bank`. */
struct braid_params {
	__u64 netns;
	__u64 target[2]; /* bytes per second, down and up; 0: none */
	__u64 default_demand;
	__u32 mode;
	__u32 scheduler; /* the configured scheduler's number, remembered by each flow */
	__u32 rules;
	__u32 daemon; /* its process: never steered */
	__u32 usable[2]; /* masks of slots, IPv4 and IPv6 */
	__u32 backup;
	__u32 affinity; /* where no rule says otherwise */
	__u32 local4; /* the address the system itself would send from, network order; 0: none */
	__u32 redirected_classes; /* bit by class: what is redirected where no rule says otherwise */
	__u32 local6[4];
	__u32 peer_direct; /* connections to hosts that run Braid go to the daemon, where no rule says otherwise */
	__u32 processes; /* the daemon's namespace of processes, by its number; 0: the kernel's own */
	struct braid_slot slots[BRAID_MAX_LINKS];
};

struct braid_control {
	__u64 heartbeat; /* CLOCK_MONOTONIC, nanoseconds */
	__u32 bank;
	__u32 classes; /* another number whenever an application's class changes; never 0 */
	__u32 counting; /* 1: the programs that count datagrams are attached, or are being detached; 0: a UDP flow asks for them by an event */
	__u32 pad;
};

struct braid_exe_key {
	__u64 inode;
	__u32 device; /* the kernel's own encoding: major << 20 | minor */
	__u32 pad;
};

/* Which of the rules' executables a file is: a number for each bank, 0 for none. */
struct braid_exe {
	__u32 id[2];
};

struct braid_app_key {
	struct braid_exe_key exe;
	__u8 name[16];
};

struct braid_demand_key {
	struct braid_app_key app;
	__u16 port; /* host order */
	__u16 pad[3];
};

struct braid_demand {
	__u64 down;
	__u64 up;
	__u64 updated; /* CLOCK_MONOTONIC, nanoseconds */
	__u64 count;
	__u32 classes; /* what `braid_control.classes` was when `class_` was the application's; 0: never */
	__u8 class_;
	__u8 pad[3];
};

struct braid_app {
	__u8 class_;
	__u8 pad[7];
};

#define BRAID_IF_EXE 1u
#define BRAID_IF_NAME 2u
#define BRAID_IF_PORT 4u
#define BRAID_IF_DESTINATION 8u
#define BRAID_IF_CGROUP 16u
#define BRAID_IF_USER 32u
#define BRAID_NEVER 64u /* an executable or cgroup that does not exist: the rule matches nothing */

#define BRAID_DO_EXCLUDE 1u
#define BRAID_DO_LINKS 2u
#define BRAID_DO_PREFER 4u
#define BRAID_DO_REDIRECT 8u /* to the daemon, while it takes any */
#define BRAID_DO_DIRECT 16u  /* never to the daemon, whatever the class */
/* To hosts that run Braid themselves, in place of what the parameters say: */
#define BRAID_DO_PEER_DIRECT_ALL 32u   /* datagrams too */
#define BRAID_DO_PEER_DIRECT_NEVER 64u /* nothing */

struct braid_rule {
	__u32 conditions;
	__u32 actions;
	__u32 exe; /* id in the executables map, never 0 */
	__u32 user;
	__u64 cgroup;
	__u32 cgroup_level;
	__u16 port;
	__u8 prefix_len; /* of `destination`, which is IPv6 or IPv4-mapped: 0 to 128 */
	__u8 class_;
	__u32 destination[4];
	__u8 name[16];
	__u32 links;
	__u32 prefer;
	__u8 affinity;
	__u8 pad[7];
};

struct braid_affinity_key {
	struct braid_app_key app;
	__u32 remote[4]; /* zero for application affinity */
};

struct braid_affinity_value {
	__u32 slot;
	__u32 ifindex;
	__u64 used;
};

#define BRAID_FLOW_PENDING 1u /* connected UDP that has sent nothing yet: reserves nothing; or a place of TCP's that is being written */
#define BRAID_FLOW_MARKER 2u  /* not a flow: the socket sends unconnected datagrams, see `datagrams` */

#define BRAID_FLOW_FILTERED 4u /* it goes direct though its destination runs Braid: programs of others filter its cgroup */

#define BRAID_FLOW_MOVING 8u /* its connect was moved to another link: the socket is marked, and bound to no device until it is answered */

struct braid_flow {
	__u64 id; /* the socket's cookie */
	__u64 started;
	__u64 demand;
	__u64 reserved; /* what of it the link's load holds */
	__u64 rx; /* UDP only; TCP's counters are the kernel's own */
	__u64 tx;
	__u64 cgroup;
	__u64 last; /* UDP: the last datagram, to a tick of the kernel's (1 to 10 ms). TCP: the last SYN or move, then what the dump saw move */
	struct braid_app_key app;
	__u32 remote[4]; /* IPv6 or IPv4-mapped, network order */
	__u16 port; /* remote, host order */
	__u8 protocol;
	__u8 family; /* 4 or 6, of the packets */
	__u32 slot;
	__u32 ifindex;
	__u32 process;
	__u32 user;
	__u32 flags;
	__u8 direction;
	__u8 class_;
	__u8 scheduler;
	__u8 rule; /* index of the rule that matched; 255: none */
	union {
		__u32 answered; /* TCP: its handshake was answered, and counts among the link's signs */
		__u32 tick; /* UDP: the kernel's tick in which `last` was written */
	};
	__u32 allowed; /* TCP: the links that its rule allowed when it began */
	__u32 untried; /* TCP: those of them that its SYN has not been sent by since all had been */
	__u8 moves; /* TCP: how often its connect was moved */
	__u8 resent; /* TCP: how often its SYN was sent again */
	__u8 pad[6];
};

/* One flow as a dump or an end event tells it. */
struct braid_flow_row {
	struct braid_flow flow;
	__u64 rx;
	__u64 tx;
	__u64 delivery_rate; /* bytes per second; 0: no sample, or limited by the application */
	__u32 srtt_us; /* of the sender; 0: none */
	__u32 rcv_rtt_us; /* of the receiver; 0: none */
	__u32 retransmissions;
	__u32 segments_out;
	__u32 state; /* TCP state */
	__u32 local_port;
	__u32 local[4];
	__u64 read_at; /* CLOCK_MONOTONIC, nanoseconds */
};

/* Where the daemon takes redirected connections, on the loopback: ports in host order, 0 for none. Written by the daemon alone. */
struct braid_redirection {
	__u16 port4; /* 0: nothing is redirected */
	__u16 port6; /* at ::1, for sockets that take no IPv4 */
	__u16 datagrams4; /* 0: no datagrams are redirected */
	__u16 datagrams6; /* at ::1, for connected sockets */
};

#define BRAID_ARRIVAL_UNCONNECTED 1u
#define BRAID_ARRIVAL_FILTERED 2u /* programs of others filter its cgroup: it goes to a relay, not straight to its destination */

/*
 * A redirected connection that the daemon has not taken yet, or an exchange of datagrams; its key is the loopback address of its
 * own, in network order.
 */
/* What one user has reserved for flows that are redirected. */
struct braid_share {
	__u32 arrivals;
	__u32 exchanges;
};

struct braid_arrival {
	__u64 socket; /* its cookie */
	__u64 started; /* 0: being written */
	__u64 released; /* when its socket was closed, or, unconnected, last sent a datagram to `remote`; 0: it is open */
	__u64 demand;
	__u64 cgroup;
	struct braid_app_key app;
	__u32 remote[4]; /* where it wanted to go: IPv6 or IPv4-mapped, network order */
	__u32 process;
	__u32 user;
	__u32 source; /* where it comes from, network order; 0: ::1 */
	__u16 source_port; /* host order; 0: its handshake has not begun */
	__u16 port; /* where it wanted to go, host order */
	__u8 family; /* 4 or 6, of `remote` */
	__u8 class_;
	__u8 rule; /* index of the rule that matched; 255: none */
	__u8 direction;
	__u32 flags;
};

/* Unconnected datagrams: one entry per socket and remote. */
struct braid_datagram_key {
	__u64 socket;
	__u32 remote[4];
	__u32 port;
	__u32 pad;
};

enum braid_event_kind { BRAID_EVENT_END, BRAID_EVENT_APP, BRAID_EVENT_SUFFERING, BRAID_EVENT_COUNT };

struct braid_event {
	__u32 kind;
	__u32 detail; /* SUFFERING: retransmissions so far, bit 31 set for an unanswered SYN */
	struct braid_flow_row row; /* APP: `flow.app`, `process`, `user` and `cgroup` only; COUNT: nothing */
};

/* What connections tell of a link, per slot. */
struct braid_signs {
	__u64 answered[2]; /* handshakes completed, IPv4 and IPv6 */
	__u64 answered_at[2];
	__u32 remote4;
	__u16 port4; /* host order */
	__u16 port6;
	__u32 remote6[4];
	__u64 timeouts[2];
};

enum braid_counter {
	BRAID_COUNT_STEERED,
	BRAID_COUNT_LEFT,
	BRAID_COUNT_DENIED,
	BRAID_COUNT_FAILED, /* the kernel refused to steer a socket */
	BRAID_COUNT_UNTRACKED, /* steered, but no memory to follow the flow */
	BRAID_COUNT_LOST_EVENTS,
	BRAID_COUNT_ENDED,
	BRAID_COUNT_REDIRECTED,
	BRAID_COUNT_NOT_REDIRECTED, /* should have been, but there was no room, or the socket's kind has no way */
	BRAID_COUNT_MOVED, /* connects that were moved to another link for want of an answer */
	BRAID_COUNTERS
};

#endif
