/* SPDX-License-Identifier: GPL-2.0-only OR MIT OR Apache-2.0 */
/*
 * The structures that the daemon and its BPF programs exchange. The Rust side is crates/platform/src/linux/sys/abi.rs; a test compares sizes and
 * offsets. No structure has hidden padding.
 */
#ifndef BRAID_H
#define BRAID_H

#define BRAID_MAX_LINKS 32
#define BRAID_MAX_RULES 64
/* Maximum number of redirected connections that wait for the daemon; also the backlog of its listeners. */
#define BRAID_MAX_ARRIVALS 4096
/* Size of the array of TCP flows, which is indexed by socket cookie; a power of two. */
#define BRAID_CONNECTION_PLACES 4096
/* Maximum number of flows that a run of braid_connections dumps. */
#define BRAID_DUMPED 512
/* Maximum number of flows in `overflow` that it looks for. */
#define BRAID_DUMPED_IDS 256
/* Maximum number of TCP flows whose array entry is taken by another flow. */
#define BRAID_MAX_OVERFLOW 32768
/* Maximum number of TCP flows whose rates are set at once. */
#define BRAID_MAX_SHAPES 4096
/* Maximum number of redirected datagram exchanges at a time. */
#define BRAID_MAX_EXCHANGES 8192
/* Maximum number of users with redirected flows at a time. */
#define BRAID_MAX_SHARES 4096
/* Maximum number of prefixes in `hold`. */
#define BRAID_MAX_HOLD 16384
/* Maximum number of forwarded flows at a time, of one client and of all. */
#define BRAID_MAX_CLIENT_FLOWS 32768
#define BRAID_CGROUP_LEVELS 16 /* control groups are nested this deep at most, for rules about forwarded flows */
#define BRAID_MAX_FORWARDED 131072
/* Maximum number of forwarded flows in the fast path at a time. */
#define BRAID_MAX_FAST 4096
/* How long a direction of such a flow is confirmed after a packet that the kernel forwarded. */
#define BRAID_CONFIRMED_NS 2500000000ull
/* Maximum number of clients at a time. */
#define BRAID_MAX_CLIENTS 4096
/* `device` of a braid_exe_key that names a client instead of an executable; the application's name is the client's address. */
#define BRAID_CLIENT_DEVICE 0xffffffffu
#define BRAID_NO_SLOT 0xffffffffu

/* A socket's routing mark is this plus the link's slot plus one. Braid did not set any other mark. */
#define BRAID_MARK_BASE 0xB1D00000u
#define BRAID_MARK_MASK 0xFFFFFF00u
/* While a connect moves from one link to another, the second byte of its mark contains the slot that it leaves, plus one. */
#define BRAID_MOVE_MASK 0xFFFF0000u

/* Mark of packets of clients that the daemon takes: a firewall rule hands them to its transparent sockets (`decide::gateway`). */
#define BRAID_CARRIER_MARK (BRAID_MARK_BASE | 0xfe)
/* The mark of packets of this machine's moved flows, which a routing rule leads to Braid's device. */
#define BRAID_DEPARTURE_MARK (BRAID_MARK_BASE | 0xfb)
/* Mark of packets of clients that go through a bond as packets: a routing rule sends them to the daemon's device (`decide::tables`). */
#define BRAID_PACKET_MARK (BRAID_MARK_BASE | 0xfd)
/* Mark of the daemon's own datagrams to relays. */
#define BRAID_RELAY_MARK (BRAID_MARK_BASE | 0xfc)
/* These bits of a mark say that the packet has waited in the daemon's queue. No link has this number. */
#define BRAID_LATE_MARK 0xff00u

/* Time without an answer after which a SYN is sent again over another link. The kernel itself sends it again after a second. */
#define BRAID_UNANSWERED_NS 500000000ull

/* Maximum age of the heartbeat. The programs do nothing if it is older. */
#define BRAID_HEARTBEAT_NS 2000000000ull

enum braid_mode {
	BRAID_ONLY_ONE,
	BRAID_VIRTUAL_START,
	BRAID_CHEAPEST_IN_TIME,
	BRAID_LEAST_FINISH,
	BRAID_LEAST_MAKESPAN,
	BRAID_RANDOM
};
enum braid_direction { BRAID_DOWN, BRAID_UP };
enum braid_affinity { BRAID_AFFINITY_NONE, BRAID_AFFINITY_DESTINATION, BRAID_AFFINITY_APPLICATION, BRAID_AFFINITY_UNSET = 255 };
enum braid_class { BRAID_UNCLASSIFIED, BRAID_REAL_TIME, BRAID_BROWSER, BRAID_BULK, BRAID_CLASS_UNSET = 255 };
enum braid_verdict { BRAID_LEAVE, BRAID_STEER };

/* The rule's state of a link. The programs write it only under the table's lock. */
struct braid_link_load {
	__u64 load[2];
	__u64 tag;
	__u32 flows;
	__u32 pad;
};

/* The daemon's parameters of a link. */
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

#define BRAID_CONFINED_UNRULED 1u /* flows that match no rule may leave through a relay only */
#define BRAID_CONFINED_SOME 2u	  /* so may those of some rule (BRAID_DO_CONFINE) */

/* One bank of the daemon's parameters. The daemon writes the idle bank, then switches `braid_control.bank`. */
struct braid_params {
	__u64 netns;
	__u64 target[2]; /* bytes per second, down and up; 0: none */
	__u64 default_demand;
	__u32 mode;
	__u32 scheduler; /* number of the configured scheduler, stored in each flow */
	__u32 rules;
	__u32 daemon; /* the daemon's process, which is never steered */
	__u32 usable[2]; /* masks of slots, IPv4 and IPv6 */
	__u32 backup;
	__u32 affinity; /* unless a rule overrides it */
	__u32 local4; /* source address that the system itself would choose, network order; 0: none */
	__u32 redirected_classes; /* bit mask of classes: redirected unless a rule overrides it */
	__u32 local6[4];
	__u32 peer_direct; /* redirect connections to hosts that run Braid, unless a rule overrides it */
	__u32 processes; /* inode number of the daemon's PID namespace; 0: the initial namespace */
	__u32 confined; /* BRAID_CONFINED_*; 0: nothing is confined */
	__u32 cgroups; /* 1: a rule has a condition on the control group */
	struct braid_slot slots[BRAID_MAX_LINKS];
};

struct braid_control {
	__u64 heartbeat; /* CLOCK_MONOTONIC, nanoseconds */
	__u32 bank;
	__u32 classes; /* generation number, changes whenever an application's class changes; never 0 */
	__u32 counting; /* 1: the programs that count datagrams are attached; 0: a new UDP flow requests them by an event */
	__u32 windows; /* 1: `shapes` contains forwarded flows */
	__u32 fast; /* 1: `fast` contains flows */
	__u32 rewrites; /* 1: `rewrites` contains flows */
	__u32 pressure; /* 1: more than a quarter of `forwarded` is used */
	__u32 pad;
};

struct braid_exe_key {
	__u64 inode;
	__u32 device; /* in the kernel's encoding: major << 20 | minor */
	__u32 pad;
};

/* The number of a file among the rules' executables, for each bank; 0: none. */
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
	__u32 classes; /* value of `braid_control.classes` when `class_` was cached; 0: not cached */
	__u8 class_;
	__u8 pad[3];
};

struct braid_app {
	__u8 class_;
	__u8 learnt; /* class by the pattern of its traffic, for rules only; applies while class_ is BRAID_UNCLASSIFIED */
	__u8 pad[6];
};

#define BRAID_IF_EXE 1u
#define BRAID_IF_NAME 2u
#define BRAID_IF_PORT 4u
#define BRAID_IF_DESTINATION 8u
#define BRAID_IF_CGROUP 16u
#define BRAID_IF_USER 32u
#define BRAID_IF_CLASS 128u
#define BRAID_NEVER 64u /* the rule matches nothing, because its executable or cgroup does not exist */
#define BRAID_IF_CLIENT 256u /* forwarded flows of clients with an address in this prefix */
#define BRAID_IF_MAC 512u    /* forwarded flows of the client with this hardware address */
#define BRAID_IF_PROTOCOL 1024u

#define BRAID_DO_EXCLUDE 1u
#define BRAID_DO_LINKS 2u
#define BRAID_DO_PREFER 4u
#define BRAID_DO_REDIRECT 8u /* redirect to the daemon, while it accepts flows */
#define BRAID_DO_DIRECT 16u  /* never redirect to the daemon, whatever the class */
/* For hosts that run Braid, instead of `peer_direct` of the parameters: */
#define BRAID_DO_PEER_DIRECT_ALL 32u   /* also datagrams */
#define BRAID_DO_PEER_DIRECT_NEVER 64u /* nothing */
#define BRAID_DO_NO_PACKETS 128u       /* its relay is not the one that takes packets of protocols other than TCP and UDP */
#define BRAID_DO_CONFINE 256u	       /* the flow leaves through a relay, or fails */

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
	__u8 of_class; /* class of the application, for BRAID_IF_CLASS */
	__u8 mac[6];
	__u32 client[4]; /* IPv6 or IPv4-mapped prefix */
	__u8 client_len;
	__u8 protocol; /* IPPROTO_..., for BRAID_IF_PROTOCOL */
	__u8 pad[6];
};

struct braid_affinity_key {
	struct braid_app_key app;
	__u32 remote[4]; /* zero for affinity by application */
};

struct braid_affinity_value {
	__u32 slot;
	__u32 ifindex;
	__u64 used;
};

#define BRAID_FLOW_PENDING 1u /* connected UDP that has sent nothing yet and reserves nothing, or a TCP array entry that is being written */
#define BRAID_FLOW_MARKER 2u  /* not an active flow: the socket sends unconnected datagrams (see `datagrams`), or a TCP flow has ended */

#define BRAID_FLOW_FILTERED 4u /* not redirected although its destination runs Braid, because foreign programs filter its cgroup */

#define BRAID_FLOW_MOVING 8u /* its connect was moved to another link: the socket has a mark and is unbound until it is answered */

/* Forwarded TCP: one end has closed its direction. */
#define BRAID_FLOW_CLIENT_CLOSED 16u
#define BRAID_FLOW_SERVER_CLOSED 32u

#define BRAID_FLOW_STRICT 64u /* its rule restricts the links: its destination is no probe target, since probes use every link */

/* Forwarded: handed to the daemon, which bonds it or opens it anew over a link, or bonds its packets (protocols other than TCP and UDP); in no link's load */
#define BRAID_FLOW_CARRIED 128u

#define BRAID_FLOW_ACCEPTED 256u /* the other host opened it; only in rows of the dump */

struct braid_flow {
	__u64 id; /* socket cookie; a forwarded flow has a number of its own (BRAID_FORWARDED_ID) */
	__u64 started;
	__u64 demand;
	__u64 reserved; /* the part of the demand that is in the link's load */
	__u64 rx; /* counted for UDP; for TCP the kernel's counters at the last dump */
	__u64 tx;
	__u64 cgroup;
	__u64 last; /* UDP and forwarded: time of the last packet, within a jiffy (1 to 10 ms). TCP: the last SYN or move, later the last dump that saw progress */
	struct braid_app_key app;
	__u32 remote[4]; /* IPv6 or IPv4-mapped, network order */
	__u16 port; /* remote, host order */
	__u8 protocol;
	__u8 family; /* 4 or 6, of the packets */
	__u32 slot;
	__u32 ifindex;
	__u32 process; /* a client's flow: index of the LAN device */
	__u32 user;
	__u32 flags;
	__u8 direction;
	__u8 class_;
	__u8 scheduler;
	__u8 rule; /* index of the rule that matched; 255: none */
	union {
		__u32 answered; /* TCP: its handshake was answered and is counted in the link's signs */
		__u32 tick; /* UDP: jiffy in which `last` was written */
	};
	__u32 allowed; /* TCP: links that its rule allowed when it started */
	__u32 untried; /* TCP: those of them over which its SYN has not been sent in the current round */
	__u8 moves; /* TCP: number of times its connect was moved */
	__u8 resent; /* TCP: number of SYN retransmissions */
	union {
		__u8 scale[2]; /* forwarded TCP: scales of the client's and the server's windows (window.h) */
		__u16 local_port; /* unconnected datagrams, host order */
	};
	union {
		__u32 handshake; /* forwarded TCP: time of the last SYN, then the round trip of the handshake, in microseconds (window.h) */
		__u32 inode; /* accepted: number of the socket's file, by which its program is found */
	};
};

/* Length of an Ethernet header. */
#define BRAID_ETHERNET 14

/* What braid_connections dumps: all flows at these places, or those of `overflow` with the ids that follow. */
struct braid_dump {
	__u32 start; /* the first of BRAID_DUMPED places */
	__u32 ids; /* number of ids that follow, at most BRAID_DUMPED_IDS; 0: places */
};

/* Ids of forwarded flows begin here. Socket cookies are smaller, and programs that read ids as floating-point numbers represent all of them exactly. */
#define BRAID_FORWARDED_ID (1ull << 52)

/* A forwarded flow: addresses are IPv6 or IPv4-mapped in network order, ports in host order. For ICMP echo the client's port is its identifier. */
struct braid_forward_key {
	__u32 client[4];
	__u32 remote[4];
	__u16 client_port;
	__u16 remote_port;
	__u8 protocol;
	__u8 pad[3];
};

enum braid_leg_number { BRAID_LEG_OUT, BRAID_LEG_BACK };

/* One direction of a flow in the fast path (fast.h). The daemon writes the first part, the programs the second. */
struct braid_leg {
	__u32 address[4]; /* of the client, as packets have it when they leave, network order */
	__u32 from; /* indexes of the devices */
	__u32 to;
	__u32 mark; /* of packets when they leave; back: the programs write it */
	__u16 port; /* host order */

	__u8 hops; /* hop limit and traffic class of the last sample when it came: a packet that was left to the kernel */
	__u8 traffic_class;
	__u64 sampled; /* when it came */
	__u64 confirmed; /* when a sample last left as a packet of the fast path would; 0: never */
	__u32 priority; /* of packets when they leave */
	__u8 hardware[12]; /* Ethernet addresses of packets when they leave: target and source */
};

/* A flow in the fast path. */
struct braid_fast {
	__u64 id; /* of the flow */
	__u32 over; /* 1: the TCP connection begins or ends, so the kernel must see all its packets */
	__u32 own; /* 1: the client is a program of this machine, which uses the virtual interface */
	struct braid_leg leg[2]; /* BRAID_LEG_OUT: from the client; BRAID_LEG_BACK */
};

/* Packets do not wait in the daemon's queue if its thread has been silent for this long. */
#define BRAID_LATE_NS 500000000ull

/* The daemon's queue of packets that wait for a link. */
struct braid_late {
	__u64 heartbeat; /* of the thread that sends them: CLOCK_MONOTONIC, nanoseconds */
	__u32 device; /* index of the device that leads there; 0: none */
	__u32 pad;
};

/* Moved flows end once the heartbeat is this old. By then the watchdog has acted. */
#define BRAID_MOVES_NS 10000000000ull
/* Hardware address of the device for moved flows. */
#define BRAID_HARDWARE { 0x02, 0x62, 0x72, 0x61, 0x69, 0x64 }

/* Maximum number of entries in `rewrites`. A moved flow has three, or more while its addresses change. */
#define BRAID_MAX_REWRITES 65536

/* A reset came, as hosts send that do not know the connection by these addresses. */
#define BRAID_RESET 1
/* Somebody begins a connection with these addresses. */
#define BRAID_SYN 2

/* What becomes of the packets with some addresses and ports: a key's `client` is the packet's source, its `remote` the destination. */
struct braid_rewrite {
	struct braid_forward_key to; /* afterwards */
	__u32 device; /* index of the device over which they leave, or by which they seem to arrive; 0: they leave over their own link, or arrive as they are */
	__u32 mark; /* their mark afterwards */
	__u32 arrives; /* 1: they are for this machine */
	__u32 from; /* they arrive: index of the only device over which they may; 0: any */
	__u32 follows; /* they leave: 1: the flow's socket does as this entry says. Datagrams arrive, with a proof: 1: it has come by this way */
	__u32 refused; /* they arrive: BRAID_RESET, BRAID_SYN */
	__u32 sent; /* they leave: sequence number of the first byte that the socket sent, or of its SYN; both 0: not known yet */
	__u32 received; /* and of the first byte that it received. A socket with others is another connection. Datagrams arrive: the proof that came last */
	__u32 unacknowledged; /* they leave: sequence number of the socket's first byte that is not acknowledged, when it was last seen */
	__u32 expected; /* and of the next byte that it expects */
	__u32 window; /* what its segments say about its window */
	__u32 doublings; /* how many times in a row its retransmission timer has doubled */
	__u32 passes; /* they arrive: 1: for another host, over `device`; without one they are dropped */
	__u32 bare; /* they leave: 1: the device takes packets without Ethernet headers */
	__u64 seen; /* they arrive: when the last one did; they leave: when the socket was last there */
};

/*
 * What hosts that run Braid say to each other in a datagram of a flow: this text, and the flow's proof of 8 bytes. It comes to the flow's own addresses first. Whoever
 * repeats it later receives the flow's datagrams, and so may say by which other way they come. The programs drop it, so that no socket gets it.
 */
#define BRAID_MESSAGE "braid: this way?"

struct braid_message {
	__u8 text[16];
	__u32 proof[2]; /* network order */
};

/* Maximum number of flows of datagrams that keep their source address. */
#define BRAID_MAX_KEPT 64

/* The source address that datagrams of an unconnected socket to a destination keep, whatever becomes of its link, because the flow has moved or may move. */
struct braid_kept {
	__u32 source[4]; /* IPv6 or IPv4-mapped, network order */
};

/* A client of a LAN device, by address. */
struct braid_client {
	__u64 last; /* time of its last new flow */
	__u32 flows; /* living flows; the daemon corrects it at each dump */
	__u32 device; /* index of the LAN device */
	__u8 mac[6]; /* zero: the device has no hardware addresses */
	__u8 pad[2];
};

/* An address of the virtual interface, IPv6 or IPv4-mapped, network order; zero: none. */
struct braid_own_address {
	__u32 inside[4]; /* the device's, which programs see */
	__u32 outside[4]; /* another one with the same checksum, which packets have in the firewall and in connection tracking */
};

/* One flow, as a dump or an end event reports it. */
struct braid_flow_row {
	struct braid_flow flow;
	__u64 rx;
	__u64 tx;
	__u64 delivery_rate; /* bytes per second; 0: no sample, or limited by the application */
	__u32 srtt_us; /* measured as sender; 0: none */
	__u32 rcv_rtt_us; /* measured as receiver; 0: none */
	__u32 retransmissions;
	__u32 segments_out;
	__u32 state; /* TCP state */
	__u32 local_port;
	__u32 local[4];
	__u64 read_at; /* CLOCK_MONOTONIC, nanoseconds */
};

/* Ports on loopback at which the daemon receives redirected flows, in host order; 0: none. Only the daemon writes them. */
struct braid_redirection {
	__u16 port4; /* 0: nothing is redirected */
	__u16 port6; /* at ::1, for sockets that accept no IPv4 */
	__u16 datagrams4; /* 0: no datagrams are redirected */
	__u16 datagrams6; /* at ::1, for connected sockets */
	__u16 packets; /* bit 0, 1: it takes IPv4, IPv6 packets of other protocols from clients of the gateway */
	__u16 pad;
	/* Ports of transparent sockets for clients, at 127.0.0.1 and ::1; 0: it takes nothing from them. */
	__u16 clients[2];
	__u16 client_datagrams[2];
};

#define BRAID_ARRIVAL_UNCONNECTED 1u
#define BRAID_ARRIVAL_HELD 4u /* redirected because it is not known yet whether its destination runs Braid */
#define BRAID_ARRIVAL_FILTERED 2u /* foreign programs filter its cgroup: it must go through a relay, not directly to its destination */

/* What one user has reserved for redirected flows. */
struct braid_share {
	__u32 arrivals;
	__u32 exchanges;
};

/*
 * A redirected connection that the daemon has not accepted yet, or a datagram exchange. Its key is its own loopback address, in network
 * order.
 */
struct braid_arrival {
	__u64 socket; /* socket cookie */
	__u64 started; /* 0: it is being written */
	__u64 released; /* time when its socket was closed or, if unconnected, last sent a datagram to `remote`; 0: open */
	__u64 demand;
	__u64 cgroup;
	struct braid_app_key app;
	__u32 remote[4]; /* requested destination: IPv6 or IPv4-mapped, network order */
	__u32 process;
	__u32 user;
	__u32 source; /* source address, network order; 0: ::1 */
	__u16 source_port; /* host order; 0: its handshake has not been answered */
	__u16 port; /* requested port, host order */
	__u8 family; /* 4 or 6, of `remote` */
	__u8 class_;
	__u8 rule; /* index of the rule that matched; 255: none */
	__u8 direction;
	__u32 flags;
};

/* What the daemon wants of a running TCP flow. */
struct braid_shape {
	__u32 pacing; /* bytes per second that it may send; 0: no limit. Not for forwarded flows */
	__u32 window; /* bytes that the other end may have under way to it; 0: no limit */
	__u32 client_window; /* forwarded: bytes that its client may have under way to the other end; 0: no limit */
};

enum braid_echo_kind { BRAID_ECHO_NONE, BRAID_ECHO_TIME, BRAID_ECHO_ACKNOWLEDGED, BRAID_ECHO_WINDOW };

/* The round trip between this machine and one end of a forwarded TCP flow. */
struct braid_echo {
	__u64 at; /* when the segment that the end is to answer passed */
	__u32 kind; /* of the answer; BRAID_ECHO_NONE: no measurement is under way */
	__u32 expected; /* timestamp or sequence number from which on it is an answer */
	__u32 seen; /* last timestamp of the other end; without timestamps, the furthest end of its window */
	__u32 took; /* smoothed round trip in microseconds; 0: none yet */
};

/* Progress of a forwarded TCP flow in `shapes`. */
struct braid_window {
	__u64 rx; /* payload to the client and from it, since the daemon made this entry */
	__u64 tx;
	struct braid_echo echo[2]; /* of the server and the client */
	__u32 handshake; /* round trip of the handshake in microseconds; 0: unknown */
	__u32 pad;
};

/* Key of unconnected datagrams: one entry per socket and remote. */
struct braid_datagram_key {
	__u64 socket;
	__u32 remote[4];
	__u32 port;
	__u32 pad;
};

enum braid_event_kind { BRAID_EVENT_END, BRAID_EVENT_APP, BRAID_EVENT_SYMPTOM, BRAID_EVENT_COUNT };

struct braid_event {
	__u32 kind;
	__u32 detail; /* SYMPTOM: retransmissions so far, bit 31 set for an unanswered SYN */
	struct braid_flow_row row; /* APP: `flow.app`, `process`, `user` and `cgroup` only; COUNT: unused */
};

/* What the connections of a link reveal about it, per slot. */
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
	BRAID_COUNT_FAILED, /* the kernel rejected an attempt to steer a socket */
	BRAID_COUNT_UNTRACKED, /* steered, but not tracked for lack of memory */
	BRAID_COUNT_LOST_EVENTS,
	BRAID_COUNT_ENDED,
	BRAID_COUNT_REDIRECTED,
	BRAID_COUNT_NOT_REDIRECTED, /* could not be redirected: no free entry, or an unsupported kind of socket */
	BRAID_COUNT_MOVED, /* connects moved to another link because they received no answer */
	BRAID_COUNT_FORWARDED, /* forwarded flows that got a link */
	BRAID_COUNT_OVERFLOWED, /* forwarded flows that followed the system's routes for lack of room in the table */
	BRAID_COUNT_FAST, /* packets of forwarded flows that took the fast path */
	BRAID_COUNTERS
};

#endif
