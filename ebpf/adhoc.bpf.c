/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The ad-hoc device: one Ethernet device over several radios (Mota 2011, sections 3.1 and 3.2). An object of its own: it needs nothing of the others.
 *
 *   adhoc_out  at the egress of the device: gives each frame a radio; broadcasts go over all
 *   adhoc_in   at the ingress of each radio: notes who was heard, drops copies, and lets the rest arrive by the device, later if it is ahead of others
 *
 * The process that owns the device keeps the neighbour database and decides about shares (`control::adhoc`). The programs note what passes.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>

#include "map.h"
#include "adhoc.h"

#define INLINE static __attribute__((always_inline)) inline

#define TC_NEXT (-1)
#define TC_DROP 2

#define ETH_HEADER 14
#define ETH_IPV4 0x0800
#define ETH_ARP 0x0806
#define ETH_IPV6 0x86dd
#define ETH_EAPOL 0x888e

#define SHARE_UNIT (1ULL << 32)

/* A flow that was silent for this long may get another radio without reordering: longer than round trips differ. */
#define PAUSE_NS 500000000ULL
/* Identical broadcasts within this time are copies, or repetitions that are counted. */
#define COPIES_NS 400000000ULL
/* Broadcasts and multicasts a second from one radio, and how many at once. */
#define BRAID_STORM 5000
#define BRAID_STORM_BURST 1000
/* The same of Braid's own frames from hosts that are no neighbours: the process has to look at each. */
#define BRAID_OFFERS 500
#define BRAID_OFFERS_BURST 500
/* A repetition counts as delivered for this time. */
#define DELIVERED_NS 1200000000ULL
/* A radio that lost repetitions is behind the others by this number at most. */
#define LAG 2
/* Bytes of a frame that tell it from others: with the checksum of a packet, which covers the rest. */
#define DIGESTED 96
/* A sample that takes longer was lost. */
#define LONGEST_RTT_NS 10000000000ULL

MAP(adhoc, BPF_MAP_TYPE_ARRAY, __u32, struct braid_adhoc, 1, 0);
MAP(arrivals, BPF_MAP_TYPE_ARRAY, __u32, struct braid_arrivals, 1, 0);
MAP(radios, BPF_MAP_TYPE_ARRAY, __u32, struct braid_radio, BRAID_RADIOS, 0);
/* The place of a device in `radios`. */
MAP(places, BPF_MAP_TYPE_HASH, __u32, __u32, BRAID_RADIOS, 0);
MAP(plans, BPF_MAP_TYPE_HASH, struct braid_mac, struct braid_plan, BRAID_NEIGHBOURS, 0);
/* The daemon enters them. Others can't make entries here: a flood of made-up addresses fills only `strangers`. */
MAP(pairs, BPF_MAP_TYPE_HASH, struct braid_pair_key, struct braid_pair, BRAID_NEIGHBOURS * BRAID_RADIOS, BPF_F_NO_PREALLOC);
/* Neighbours that were heard over a radio and have no plan, and when. */
MAP(strangers, BPF_MAP_TYPE_LRU_HASH, struct braid_pair_key, __u64, 8192, 0);
/* Addresses without a plan to which frames were sent. */
MAP(wanted, BPF_MAP_TYPE_LRU_HASH, struct braid_mac, __u64, 1024, 0);
/* The neighbour whose address on a radio this is. */
MAP(aliases, BPF_MAP_TYPE_HASH, struct braid_pair_key, struct braid_mac, BRAID_NEIGHBOURS * BRAID_RADIOS, BPF_F_NO_PREALLOC);

/* Weighted turns of a neighbour's radios in virtual time. */
struct turns {
	__u64 now;
	__u64 next[BRAID_RADIOS];
};
MAP(turns_of, BPF_MAP_TYPE_LRU_HASH, struct braid_mac, struct turns, BRAID_NEIGHBOURS, 0);

struct flow_key {
	__u64 digest; /* of addresses, protocol and ports */
	struct braid_mac mac; /* the neighbour */
};
struct flow {
	__u64 last;
	__u64 timed; /* when the segment was sent whose acknowledgement is awaited; 0: none */
	__u32 acknowledges; /* the number that acknowledges it */
	__u32 radio;
};
MAP(flows, BPF_MAP_TYPE_LRU_HASH, struct flow_key, struct flow, 16384, 0);

/* The next numbers of a neighbour's flows. The process makes an entry with the plan. */
struct numbers {
	struct bpf_spin_lock lock;
	__u16 salt; /* the upper half of the flows' names: the numbers of another start are those of other flows */
	__u16 next[BRAID_NUMBERED_FLOWS];
	__u16 pad;
};
MAP(numbers, BPF_MAP_TYPE_HASH, struct braid_mac, struct numbers, BRAID_NEIGHBOURS, BPF_F_NO_PREALLOC);
/* The value of a number of a frame that has none. */
#define NO_NUMBER ~0ULL

struct copies_key {
	__u64 digest;
	__u64 which; /* a radio, REPETITION and the number of a repetition, or MOST */
};
#define REPETITION (1ULL << 32)
#define MOST (1ULL << 33)
struct copies {
	__u64 last;
	__u64 count;
};
MAP(copies, BPF_MAP_TYPE_LRU_HASH, struct copies_key, struct copies, 32768, 0);

struct storm {
	__u64 last;
	__u64 left; /* nanoseconds of credit */
};
/* Of the broadcasts of each radio, then of Braid's own frames. */
MAP(storms, BPF_MAP_TYPE_ARRAY, __u32, struct storm, BRAID_RADIOS * 2, 0);
MAP(adhoc_counts, BPF_MAP_TYPE_ARRAY, __u32, __u64, BRAID_ADHOC_COUNTS, 0);

INLINE void count(__u32 what)
{
	__u64 *counter = bpf_map_lookup_elem(&adhoc_counts, &what);

	if (counter)
		__sync_fetch_and_add(counter, 1);
}

INLINE _Bool is_same(const __u8 *one, const __u8 *other)
{
	return one[0] == other[0] && one[1] == other[1] && one[2] == other[2] && one[3] == other[3] && one[4] == other[4] && one[5] == other[5];
}

INLINE __u64 mix(__u64 sum, __u64 word)
{
	sum = (sum ^ word) * 0x9e3779b97f4a7c15ULL;
	return sum ^ sum >> 29;
}

/* Reads from the Ethernet header on. Returns 0 on success. */
INLINE long load(struct __sk_buff *skb, __u32 offset, void *to, __u32 size)
{
	return bpf_skb_load_bytes(skb, offset, to, size);
}

/* What a frame's headers say about its flow. The first two are given. */
struct seen {
	__u32 base; /* offset of the packet behind the Ethernet header */
	__be16 type; /* its EtherType */
	_Bool has_ports;
	__u64 out; /* digest of the flow, by a frame that leaves */
	__u64 in; /* the same digest, by one that arrives */
	__u32 tcp; /* offset of its TCP header; 0: it has none */
	__u32 end; /* offset of the end of the IP packet; 0: unknown, as of one that a network card will cut */
};

INLINE void digest(struct seen *seen, __u64 source, __u64 target, __u16 from, __u16 to, __u8 protocol)
{
	seen->out = mix(mix(mix(protocol, source), target), (__u64)from << 16 | to);
	seen->in = mix(mix(mix(protocol, target), source), (__u64)to << 16 | from);
}

static __attribute__((noinline)) int read_flow(struct __sk_buff *skb, struct seen *seen)
{
	__u64 source, target, half[4];
	__u32 ports = 0, offset;
	__u8 head[40], protocol;
	_Bool fragment = 0;

	seen->tcp = seen->end = 0;
	seen->has_ports = 0;
	seen->out = seen->in = seen->type;
	if (seen->type == bpf_htons(ETH_IPV4)) {
		if (load(skb, seen->base, head, 20))
			return 0;
		offset = seen->base + (head[0] & 15) * 4;
		fragment = (head[6] & 0x3f) || head[7];
		protocol = head[9];
		source = (__u32)head[12] << 24 | head[13] << 16 | head[14] << 8 | head[15];
		target = (__u32)head[16] << 24 | head[17] << 16 | head[18] << 8 | head[19];
		seen->end = seen->base + (head[2] << 8 | head[3]);
	} else if (seen->type == bpf_htons(ETH_IPV6)) {
		if (load(skb, seen->base, head, 8) || load(skb, seen->base + 8, half, 32))
			return 0;
		offset = seen->base + 40;
		/* Flows behind extension headers are told apart by their addresses only. */
		protocol = head[6];
		source = mix(half[0], half[1]);
		target = mix(half[2], half[3]);
		seen->end = offset + (head[4] << 8 | head[5]);
	} else {
		return 0;
	}
	if (skb->gso_size || seen->end > skb->len)
		seen->end = skb->len;
	if (!fragment && (protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP || protocol == IPPROTO_DCCP)) {
		seen->has_ports = 1;
		if (load(skb, offset, &ports, 4))
			ports = 0;
		if (protocol == IPPROTO_TCP)
			seen->tcp = offset;
	}
	digest(seen, source, target, ports & 0xffff, ports >> 16, protocol);
	return 0;
}

/*
 * Times a segment that leaves (the paper's estimator; section 3.2.3): one at a time for each flow. The acknowledgement of one that was sent again could be that of
 * either (Karn's rule), so that sample is given up.
 */
INLINE void time_segment(struct __sk_buff *skb, const struct seen *seen, struct flow *flow, __u64 now)
{
	__u8 head[16];
	__u32 first, end;

	if (!seen->tcp || load(skb, seen->tcp, head, sizeof(head)))
		return;
	first = (__u32)head[4] << 24 | head[5] << 16 | head[6] << 8 | head[7];
	end = first + (seen->end - seen->tcp - (head[12] >> 4) * 4);
	if (end == first)
		return;
	if (flow->timed && now - flow->timed < LONGEST_RTT_NS) {
		if ((__s32)(first - flow->acknowledges) < 0)
			flow->timed = 0;
		return;
	}
	flow->acknowledges = end;
	flow->timed = now;
}

/* Looks whether a segment that arrived acknowledges the one that is timed. */
INLINE void time_acknowledgement(struct __sk_buff *skb, const struct seen *seen, const struct braid_mac *from, __u64 now)
{
	struct flow_key key = { .digest = seen->in, .mac = *from };
	struct braid_pair_key at = {};
	struct braid_pair *pair;
	struct flow *flow;
	__u8 head[16];
	__u64 rtt;

	if (!seen->tcp)
		return;
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow || !flow->timed || load(skb, seen->tcp, head, sizeof(head)) || !(head[13] & 0x10))
		return;
	if ((__s32)(((__u32)head[8] << 24 | head[9] << 16 | head[10] << 8 | head[11]) - flow->acknowledges) < 0)
		return;
	rtt = now - flow->timed;
	flow->timed = 0;
	if (rtt >= LONGEST_RTT_NS)
		return;
	__builtin_memcpy(at.mac, from->byte, sizeof(at.mac));
	at.radio = flow->radio;
	pair = bpf_map_lookup_elem(&pairs, &at);
	if (pair) {
		__sync_fetch_and_add(&pair->rtt, rtt);
		__sync_fetch_and_add(&pair->samples, 1);
	}
}

/* The radio whose turn is first in virtual time, as in the daemon's weighted round robin. Returns BRAID_RADIOS if the plan has none that works. */
static __attribute__((noinline)) __u32 take_turn(const struct braid_mac *to, const struct braid_plan *plan, __u32 working, __u32 cost)
{
	struct turns *turns, none = {};
	__u64 best = ~0ULL, start;
	__u32 radio, winner = BRAID_RADIOS;

	turns = bpf_map_lookup_elem(&turns_of, to);
	if (!turns) {
		bpf_map_update_elem(&turns_of, to, &none, BPF_NOEXIST);
		turns = bpf_map_lookup_elem(&turns_of, to);
		if (!turns)
			return BRAID_RADIOS;
	}
#pragma unroll
	for (radio = 0; radio < BRAID_RADIOS; radio++) {
		if (!plan->share[radio] || !(working & 1u << radio))
			continue;
		start = turns->next[radio] > turns->now ? turns->next[radio] : turns->now;
		/* Frames cost their length, flows 1: flows do not wait for frames of before. */
		if (cost == 1 && start - turns->now > SHARE_UNIT / plan->share[radio])
			start = turns->now + SHARE_UNIT / plan->share[radio];
		/* Ties go to the larger share. */
		if (start < best || (start == best && winner < BRAID_RADIOS && plan->share[radio] > plan->share[winner & (BRAID_RADIOS - 1)])) {
			best = start;
			winner = radio;
		}
	}
	if (winner < BRAID_RADIOS) {
		turns->now = best;
		turns->next[winner] = best + SHARE_UNIT / plan->share[winner] * cost;
	}
	return winner;
}

#define PROTOCOL_ICMPV6 58
#define ND_FIRST 133 /* router solicitation, router advertisement, neighbour solicitation, neighbour advertisement, redirect */
#define ND_LAST 137
#define ND_TYPE_AT (ETH_HEADER + 40)
#define ND_CHECK_AT (ND_TYPE_AT + 2)
#define ARP_SENDER_AT (ETH_HEADER + 8)
#define ARP_TARGET_AT (ETH_HEADER + 18)
#define ARP_END (ETH_HEADER + 28)

/* Exchanges the sender's address in the options of neighbour discovery (RFC 4861, section 4.6.1). */
static __attribute__((noinline)) int exchange_option(struct __sk_buff *skb, const struct braid_mac *from, const struct braid_mac *to)
{
	/* Where the options of each message begin. */
	__u8 head[2], option[8], changed[8];
	__u32 offset;
	__s64 sum;

	if (load(skb, ETH_HEADER + 6, head, 1) || head[0] != PROTOCOL_ICMPV6 || load(skb, ND_TYPE_AT, head, 1))
		return 0;
	if (head[0] < ND_FIRST || head[0] > ND_LAST)
		return 0;
	offset = ND_TYPE_AT + (head[0] == ND_FIRST ? 8 : head[0] == ND_FIRST + 1 ? 16 : head[0] == ND_LAST ? 40 : 24);
	for (int i = 0; i < 8; i++) {
		if (load(skb, offset, option, sizeof(option)) || !option[1])
			return 0;
		if ((option[0] == 1 || option[0] == 2) && option[1] == 1 && is_same(option + 2, from->byte)) {
			__builtin_memcpy(changed, option, 2);
			__builtin_memcpy(changed + 2, to->byte, 6);
			sum = bpf_csum_diff((__be32 *)option, sizeof(option), (__be32 *)changed, sizeof(changed), 0);
			if (bpf_skb_store_bytes(skb, offset, changed, sizeof(changed), 0))
				return -1;
			return bpf_l4_csum_replace(skb, ND_CHECK_AT, 0, sum, 0);
		}
		offset += option[1] * 8;
	}
	return 0;
}

/*
 * Exchanges the frame's source, also where ARP and neighbour discovery name it. No sum of a network card covers the Ethernet header. Returns 0 on success. A global
 * function, which the verifier looks at once, not for each radio.
 */
__attribute__((noinline)) int exchange_source(struct __sk_buff *skb, const struct braid_mac *from, const struct braid_mac *to)
{
	__u8 address[6];

	if (!from || !to || bpf_skb_store_bytes(skb, 6, to->byte, 6, 0))
		return -1;
	if (skb->protocol == bpf_htons(ETH_IPV6))
		return exchange_option(skb, from, to);
	if (skb->protocol == bpf_htons(ETH_ARP) && !load(skb, ARP_SENDER_AT, address, 6) && is_same(address, from->byte))
		return bpf_skb_store_bytes(skb, ARP_SENDER_AT, to->byte, 6, BPF_F_RECOMPUTE_CSUM);
	return 0;
}

#define BOOTP_FLAGS 10
#define BOOTP_BROADCAST 0x8000

/*
 * Asks a DHCP server to broadcast its answer (RFC 2131, section 4.1): it would send it to the hardware address in the message, which is the device's, and which
 * some radios do not receive. All copies of the request ask for it, so that they stay equal.
 */
INLINE void want_broadcast(struct __sk_buff *skb)
{
	__u8 head[20];
	__u16 ports[2], flags, wanted;
	__u32 offset;

	if (skb->protocol != bpf_htons(ETH_IPV4) || load(skb, ETH_HEADER, head, sizeof(head)) || head[9] != IPPROTO_UDP)
		return;
	offset = ETH_HEADER + (head[0] & 15) * 4;
	if (load(skb, offset, ports, sizeof(ports)) || ports[0] != bpf_htons(68) || ports[1] != bpf_htons(67))
		return;
	if (load(skb, offset + 8 + BOOTP_FLAGS, &flags, 2))
		return;
	wanted = flags | bpf_htons(BOOTP_BROADCAST);
	if (wanted == flags || bpf_l4_csum_replace(skb, offset + 6, flags, wanted, 2 | BPF_F_MARK_MANGLED_0))
		return;
	bpf_skb_store_bytes(skb, offset + 8 + BOOTP_FLAGS, &wanted, 2, 0);
}

/* Makes the frame one of a radio that carries only its own address. Returns 0 on success. */
static __attribute__((noinline)) int translate(struct __sk_buff *skb, const struct braid_adhoc *own, const struct braid_radio *radio)
{
	__u8 source[6];

	if (load(skb, 6, source, 6))
		return -1;
	if (!is_same(source, own->mac.byte)) {
		count(BRAID_ADHOC_FOREIGN);
		return -1;
	}
	return exchange_source(skb, &own->mac, &radio->mac);
}

/* Sends the frame over these radios. Returns the verdict. */
static __attribute__((noinline)) int send_over_each(struct __sk_buff *skb, const struct braid_adhoc *own, __u32 left)
{
	const struct braid_radio *radio;

	want_broadcast(skb);
	for (__u32 place = 0; place < BRAID_RADIOS; place++) {
		__u32 key = place;

		if (!(left & 1u << place))
			continue;
		left &= ~(1u << place);
		radio = bpf_map_lookup_elem(&radios, &key);
		if (!radio)
			continue;
		if ((radio->flags & BRAID_RADIO_TRANSLATES) && translate(skb, own, radio)) {
			if (!left)
				return TC_DROP;
			continue;
		}
		/* The last one gets the frame itself. */
		if (!left)
			return bpf_redirect(radio->device, 0);
		bpf_clone_redirect(skb, radio->device, 0);
		if ((radio->flags & BRAID_RADIO_TRANSLATES) && exchange_source(skb, &radio->mac, &own->mac))
			return TC_DROP;
	}
	count(BRAID_ADHOC_NO_RADIO);
	return TC_DROP;
}

/* Whether a frame can have a number: not what network cards cut into several, and not what a bridge forwards, whose sender the receiver does not know. */
static __attribute__((noinline)) int may_number(struct __sk_buff *skb, const struct braid_adhoc *own, const struct seen *seen)
{
	__u8 source[6];

	if (!seen->has_ports || skb->gso_size || skb->vlan_present || load(skb, 6, source, 6))
		return 0;
	return is_same(source, own->mac.byte);
}

/* The next number of the frame's flow, above it the flow; NO_NUMBER: it gets none. */
static __attribute__((noinline)) __u64 next_number(const struct braid_mac *to, const struct seen *seen)
{
	struct numbers *entry;
	__u16 sequence;
	__u32 flow = seen->out & (BRAID_NUMBERED_FLOWS - 1);

	entry = bpf_map_lookup_elem(&numbers, to);
	if (!entry)
		return NO_NUMBER;
	bpf_spin_lock(&entry->lock);
	sequence = entry->next[flow]++;
	bpf_spin_unlock(&entry->lock);
	return (__u64)(((__u32)entry->salt << 8 | flow) & 0xffff) << 16 | sequence;
}

/* Gives the frame this number. Returns 0 on success. */
static __attribute__((noinline)) int add_number(struct __sk_buff *skb, __u32 place, __u64 number)
{
	__u8 head[12 + BRAID_NUMBER] = {};

	if (load(skb, 0, head, 12) || bpf_skb_change_head(skb, BRAID_NUMBER, 0))
		return -1;
	head[12] = BRAID_ADHOC_TYPE >> 8;
	head[13] = BRAID_ADHOC_TYPE & 0xff;
	head[14] = BRAID_SPREAD | (place & (BRAID_RADIOS - 1));
	head[16] = number >> 24;
	head[17] = number >> 16;
	head[18] = number >> 8;
	head[19] = number;
	return bpf_skb_store_bytes(skb, 0, head, sizeof(head), 0);
}

/* Sends the frame over a radio, to the neighbour's address there, with a number if it has one. Returns the verdict. */
static __attribute__((noinline)) int send_over(struct __sk_buff *skb, const struct braid_adhoc *own, __u32 place, const struct braid_mac *at, __u64 number)
{
	const struct braid_radio *radio = bpf_map_lookup_elem(&radios, &place);

	if (!radio || !radio->device || ((radio->flags & BRAID_RADIO_TRANSLATES) && translate(skb, own, radio)))
		return TC_DROP;
	if (at && (at->byte[0] | at->byte[1] | at->byte[2] | at->byte[3] | at->byte[4] | at->byte[5]) && bpf_skb_store_bytes(skb, 0, at->byte, 6, 0))
		return TC_DROP;
	if (number != NO_NUMBER && add_number(skb, place, number))
		return TC_DROP;
	return bpf_redirect(radio->device, 0);
}

/* Sends a frame to an address without a plan: over the radio that heard it last, or over all. Returns the verdict. */
static __attribute__((noinline)) int send_to_stranger(struct __sk_buff *skb, const struct braid_adhoc *own, const struct braid_mac *to)
{
	struct braid_pair_key key = {};
	__u64 now = bpf_ktime_get_ns(), last = 0, *heard;
	__u32 winner = BRAID_RADIOS;

	bpf_map_update_elem(&wanted, to, &now, BPF_ANY);
	__builtin_memcpy(key.mac, to->byte, 6);
	for (__u32 place = 0; place < BRAID_RADIOS; place++) {
		if (!(own->radios & 1u << place))
			continue;
		key.radio = place;
		heard = bpf_map_lookup_elem(&strangers, &key);
		if (heard && *heard > last) {
			last = *heard;
			winner = place;
		}
	}
	if (winner < BRAID_RADIOS)
		return send_over(skb, own, winner, NULL, NO_NUMBER);
	count(BRAID_ADHOC_FLOODED);
	return send_over_each(skb, own, own->radios);
}

SEC("classifier")
int braid_adhoc_out(struct __sk_buff *skb)
{
	__u64 now = bpf_ktime_get_ns();
	__u32 zero = 0, device = skb->ingress_ifindex, place;
	const struct braid_adhoc *own = bpf_map_lookup_elem(&adhoc, &zero);
	struct braid_pair_key at = {};
	const struct braid_plan *plan;
	struct flow_key key = {};
	struct braid_pair *pair;
	struct flow *flow, fresh = {};
	struct braid_mac to = {};
	struct seen seen = { .base = ETH_HEADER, .type = skb->protocol };
	_Bool numbers, anew;

	/* Another program can set the mark, but no frame from elsewhere has come in by a radio. */
	if (skb->tc_index == BRAID_WAITS && bpf_map_lookup_elem(&places, &device))
		return TC_NEXT;
	if (!own || load(skb, 0, to.byte, 6))
		return TC_DROP;
	/* The network knows where this host is. */
	if (own->served)
		return send_over_each(skb, own, own->served);
	if (to.byte[0] & 1)
		return send_over_each(skb, own, own->radios);
	plan = bpf_map_lookup_elem(&plans, &to);
	if (!plan)
		return send_to_stranger(skb, own, &to);
	read_flow(skb, &seen);
	key.digest = seen.out;
	key.mac = to;
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow) {
		fresh.radio = BRAID_RADIOS;
		bpf_map_update_elem(&flows, &key, &fresh, BPF_NOEXIST);
		flow = bpf_map_lookup_elem(&flows, &key);
		if (!flow)
			return send_to_stranger(skb, own, &to);
	}
	place = flow->radio;
	/* What cannot have a number keeps its order by keeping its radio. */
	numbers = plan->numbered && may_number(skb, own, &seen);
	anew = plan->by_frame && (numbers || !plan->numbered);
	if (anew || place >= BRAID_RADIOS || !plan->share[place] || !(own->radios & 1u << place) || now - flow->last > PAUSE_NS) {
		place = take_turn(&to, plan, own->radios, anew ? skb->len : 1);
		if (place >= BRAID_RADIOS)
			return send_to_stranger(skb, own, &to);
		if (flow->radio != place)
			flow->timed = 0;
		flow->radio = place;
	}
	flow->last = now;
	time_segment(skb, &seen, flow, now);
	__builtin_memcpy(at.mac, to.byte, 6);
	at.radio = place;
	pair = bpf_map_lookup_elem(&pairs, &at);
	if (pair)
		pair->sent = now;
	return send_over(skb, own, place, &plan->at[place & (BRAID_RADIOS - 1)], numbers ? next_number(&to, &seen) : NO_NUMBER);
}

/* Whether a frame is one too many of those that are counted at `place`: so many a second, and so many at once. */
INLINE _Bool is_storm(__u32 place, __u64 now, __u64 rate, __u64 burst)
{
	const __u64 each = 1000000000ULL / rate;
	struct storm *storm = bpf_map_lookup_elem(&storms, &place);

	if (!storm)
		return 0;
	/* Another processor may have been here later. */
	if (now > storm->last) {
		storm->left += now - storm->last;
		storm->last = now;
	}
	if (storm->left > each * burst)
		storm->left = each * burst;
	if (storm->left < each)
		return 1;
	storm->left -= each;
	return 0;
}

/*
 * Whether another radio has delivered this frame already. Each copy came over another radio, so the n-th arrival of the same bytes over any radio is the same
 * one. No header is needed, and plain neighbours take part.
 */
static __attribute__((noinline)) int is_copy(struct __sk_buff *skb, __u32 place)
{
	__u64 word, now = bpf_ktime_get_ns(), sum = 0;
	struct copies_key key = {};
	struct copies *before, *most, fresh = { .last = now, .count = 1 };
	struct seen seen = { .base = ETH_HEADER, .type = skb->protocol };
	__u32 end;

	/* Some radios pad short frames. */
	read_flow(skb, &seen);
	end = skb->protocol == bpf_htons(ETH_ARP) ? ARP_END : seen.end ?: skb->len;
	end = end < DIGESTED ? end : DIGESTED;
	for (__u32 at = 0; at + sizeof(word) <= DIGESTED; at += sizeof(word)) {
		if (at + sizeof(word) > end || load(skb, at, &word, sizeof(word)))
			break;
		sum = mix(sum, word);
	}
	/* The rest of a short frame, with some bytes a second time. */
	if (end >= ETH_HEADER && !load(skb, end - sizeof(word), &word, sizeof(word)))
		sum = mix(sum, word);
	key.digest = sum;
	key.which = place;
	before = bpf_map_lookup_elem(&copies, &key);
	if (before && now - before->last < COPIES_NS) {
		before->last = now;
		before->count++;
		fresh.count = before->count;
	} else {
		bpf_map_update_elem(&copies, &key, &fresh, BPF_ANY);
	}
	if (fresh.count > 1) {
		key.which = MOST;
		most = bpf_map_lookup_elem(&copies, &key);
		if (most && now - most->last < COPIES_NS) {
			if (most->count > fresh.count + LAG && before)
				fresh.count = before->count = most->count - LAG;
			if (fresh.count > most->count)
				most->count = fresh.count;
			most->last = now;
		} else {
			bpf_map_update_elem(&copies, &key, &fresh, BPF_ANY);
		}
	}
	key.which = REPETITION | fresh.count;
	if (!bpf_map_update_elem(&copies, &key, &fresh, BPF_NOEXIST))
		return 0;
	before = bpf_map_lookup_elem(&copies, &key);
	if (before && now - before->last < DELIVERED_NS)
		return 1;
	bpf_map_update_elem(&copies, &key, &fresh, BPF_ANY);
	return 0;
}

/* Whether the frame is for the radio's own driver or for Braid: what no bridge forwards either (IEEE 802.1Q, table 8-1), keys of wireless networks. */
INLINE _Bool is_for_radio(const __u8 *head)
{
	__u16 type = head[12] << 8 | head[13];

	if (type == BRAID_ADHOC_TYPE || type == ETH_EAPOL)
		return 1;
	return head[0] == 0x01 && head[1] == 0x80 && head[2] == 0xc2 && !head[3] && !head[4] && head[5] < 16;
}

/* Notes what one of Braid's own frames says about its sender, if it has a number; the process does the rest. Returns whether the sender is a neighbour. */
static __attribute__((noinline)) int note_own(struct __sk_buff *skb, __u32 place)
{
	struct seen seen = { .base = ETH_HEADER + BRAID_NUMBER };
	__u64 now = bpf_ktime_get_ns();
	struct braid_pair_key key = {};
	const struct braid_mac *alias;
	struct braid_mac from = {};
	struct braid_pair *pair;
	__u8 kind, first;

	if (load(skb, 0, &first, 1) || load(skb, ETH_HEADER, &kind, 1) || load(skb, 6, from.byte, 6))
		return 0;
	__builtin_memcpy(key.mac, from.byte, 6);
	key.radio = place;
	alias = bpf_map_lookup_elem(&aliases, &key);
	if (alias) {
		from = *alias;
		__builtin_memcpy(key.mac, from.byte, 6);
	}
	pair = bpf_map_lookup_elem(&pairs, &key);
	if (!pair)
		return 0;
	if ((kind & 0xf0) != BRAID_SPREAD || (first & 1) || load(skb, seen.base - 2, &seen.type, 2))
		return 1;
	pair->heard = now;
	read_flow(skb, &seen);
	time_acknowledgement(skb, &seen, &from, now);
	return 1;
}

SEC("classifier")
int braid_adhoc_in(struct __sk_buff *skb)
{
	__u64 now = bpf_ktime_get_ns(), *stamp;
	__u32 zero = 0, device = skb->ifindex, place;
	const struct braid_adhoc *own = bpf_map_lookup_elem(&adhoc, &zero);
	const __u32 *known = bpf_map_lookup_elem(&places, &device);
	struct braid_mac at = {}, from = {};
	struct braid_pair_key key = {};
	const struct braid_radio *radio;
	const struct braid_mac *alias;
	struct braid_arrivals *arrived = NULL;
	struct braid_pair *pair;
	struct seen seen = { .base = ETH_HEADER, .type = skb->protocol };
	__u8 head[ETH_HEADER], target[6];
	_Bool is_newer;

	if (!own || !own->device || now > own->until || !known || load(skb, 0, head, sizeof(head)))
		return TC_NEXT;
	place = *known;
	if (is_for_radio(head)) {
		if (head[12] != BRAID_ADHOC_TYPE >> 8 || head[13] != (BRAID_ADHOC_TYPE & 0xff))
			return TC_NEXT;
		/* Of another network: the socket would lose the tag. */
		if (skb->vlan_present)
			return TC_DROP;
		if (!note_own(skb, place) && is_storm(BRAID_RADIOS + place, now, BRAID_OFFERS, BRAID_OFFERS_BURST)) {
			count(BRAID_ADHOC_STORM);
			return TC_DROP;
		}
		return TC_NEXT;
	}
	radio = bpf_map_lookup_elem(&radios, &place);
	if (!radio)
		return TC_NEXT;
	__builtin_memcpy(at.byte, head + 6, 6);
	if (is_same(at.byte, own->mac.byte) || is_same(at.byte, radio->mac.byte)) {
		count(BRAID_ADHOC_OWN);
		return TC_DROP;
	}
	if (is_same(head, radio->mac.byte) && !is_same(head, own->mac.byte)) {
		/* What a radio that carries the device's address receives for its own is not the device's. */
		if (!(radio->flags & BRAID_RADIO_TRANSLATES))
			return radio->flags & BRAID_RADIO_SEALED ? TC_DROP : TC_NEXT;
		if (bpf_skb_store_bytes(skb, 0, own->mac.byte, 6, 0))
			return TC_DROP;
		if (skb->protocol == bpf_htons(ETH_ARP) && !load(skb, ARP_TARGET_AT, target, 6) && is_same(target, radio->mac.byte))
			bpf_skb_store_bytes(skb, ARP_TARGET_AT, own->mac.byte, 6, BPF_F_RECOMPUTE_CSUM);
	}
	__builtin_memcpy(key.mac, at.byte, 6);
	key.radio = place;
	from = at;
	alias = bpf_map_lookup_elem(&aliases, &key);
	if (alias) {
		from = *alias;
		/* Sent over another radio of this device. */
		if (is_same(from.byte, own->mac.byte)) {
			count(BRAID_ADHOC_OWN);
			return TC_DROP;
		}
		if (exchange_source(skb, &at, &from))
			return TC_DROP;
		__builtin_memcpy(key.mac, from.byte, 6);
	}
	pair = bpf_map_lookup_elem(&pairs, &key);
	if (pair) {
		/* What is sent to all is no answer: the neighbour may not hear this host. */
		if (!(head[0] & 1))
			pair->heard = now;
	} else {
		stamp = bpf_map_lookup_elem(&strangers, &key);
		if (stamp)
			*stamp = now;
		else
			bpf_map_update_elem(&strangers, &key, &now, BPF_ANY);
	}
	if ((head[0] & 1) && is_storm(place, now, BRAID_STORM, BRAID_STORM_BURST)) {
		count(BRAID_ADHOC_STORM);
		return TC_DROP;
	}
	is_newer = own->newer & 1u << place;
	if (own->newer && is_same(head, own->mac.byte))
		arrived = bpf_map_lookup_elem(&arrivals, &zero);
	if (((head[0] & 1) || own->merges) && is_copy(skb, place)) {
		if (arrived && is_newer)
			arrived->behind |= 1u << place;
		count(BRAID_ADHOC_DUPLICATE);
		return TC_DROP;
	}
	if (!(head[0] & 1)) {
		read_flow(skb, &seen);
		time_acknowledgement(skb, &seen, &from, now);
	}
	if (arrived && is_newer && !(arrived->behind & 1u << place)) {
		skb->tc_index = BRAID_WAITS;
		return bpf_redirect(own->device, 0);
	}
	if (arrived && !is_newer)
		arrived->passed = now;
	return bpf_redirect(own->device, BPF_F_INGRESS);
}

#include "adhoc_sealed.h"

char LICENSE[] SEC("license") = "GPL";
