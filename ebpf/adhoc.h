/* SPDX-License-Identifier: GPL-2.0-only */
/* What the programs of the ad-hoc device (adhoc.bpf.c) and the process that owns it exchange. */
#ifndef BRAID_ADHOC_H
#define BRAID_ADHOC_H

/* Most radios of a device, and most neighbours. */
#define BRAID_RADIOS 8
#define BRAID_NEIGHBOURS 1024
/* EtherType of Braid's own frames: the first one for local experiments (IEEE 802, clause 9.2.4). */
#define BRAID_ADHOC_TYPE 0x88b5
/*
 * A frame with a number (`decide::adhoc::order`) has it behind the addresses: the EtherType above, this with the place of the radio, zero, the flow and the sequence
 * number, of two bytes each. The frame follows from its own EtherType on.
 */
#define BRAID_SPREAD 0xd0
#define BRAID_NUMBER 8
/* Flows of a neighbour that are numbered apart: a power of 2. */
#define BRAID_NUMBERED_FLOWS 256

struct braid_mac {
	__u8 byte[6];
	__u8 pad[2];
};

/* The device. */
struct braid_adhoc {
	__u64 until; /* the programs at the radios pass all frames after this time: the process that owns the device is gone */
	__u32 device; /* index of the device to which frames from the radios go */
	__u32 radios; /* a bit for each radio over which frames may leave */
	struct braid_mac mac;
	__u32 served; /* in a network whose controller chooses: a bit for each radio over which all frames leave; 0: plans decide */
	__u32 merges; /* frames for this host arrive over several radios: copies are dropped */
	__u32 newer; /* a bit for each radio whose frames for this host wait for those of the others, while the route changes */
	__u32 pad;
};

/* What arrives while a route changes. */
struct braid_arrivals {
	__u64 passed; /* when a frame for this host arrived last over a radio that is not newer */
	__u32 behind; /* a bit for each newer radio over which a copy arrived: it is behind the others, and its frames do not wait */
	__u32 pad;
};

/* `tc_index` of a frame that waits: the device passes it to the process, which lets it arrive later. */
#define BRAID_WAITS 0xb4a1

#define BRAID_RADIO_TRANSLATES 1
/* `device` is a MACsec device over the radio, with nothing of the system's own. */
#define BRAID_RADIO_SEALED 2

/* A radio, by its place. */
struct braid_radio {
	__u32 device;
	__u32 flags;
	struct braid_mac mac;
};

/* How a neighbour is reached, as the daemon decided. */
struct braid_plan {
	__u32 share[BRAID_RADIOS]; /* parts of 65,536; 0: not over this radio */
	struct braid_mac at[BRAID_RADIOS]; /* its address on a radio; zeroes: its own */
	__u32 by_frame; /* each frame gets a radio anew, not each flow */
	__u32 numbered; /* the frames of a flow are numbered */
};

struct braid_pair_key {
	__u8 mac[6];
	__u16 radio;
};

/* What passed between this host and a neighbour over a radio. Times are those of the monotonic clock in nanoseconds. */
struct braid_pair {
	__u64 heard;
	__u64 sent;
	__u64 rtt; /* sum of samples in nanoseconds */
	__u32 samples;
	__u32 pad;
};

/* What became of frames; the number of each is an index of the map `adhoc_counts`. */
enum {
	BRAID_ADHOC_DUPLICATE, /* a copy of a broadcast that arrived over another radio */
	BRAID_ADHOC_OWN, /* its source is this device: a loop, or another device with this address */
	BRAID_ADHOC_STORM, /* more broadcasts than BRAID_STORM */
	BRAID_ADHOC_FLOODED, /* to an address that no radio has heard: sent over all */
	BRAID_ADHOC_FOREIGN, /* from a bridge, for a radio that carries only its own address */
	BRAID_ADHOC_NO_RADIO, /* no radio works */
	BRAID_ADHOC_COUNTS,
};

#endif
