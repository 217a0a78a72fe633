/* SPDX-License-Identifier: GPL-2.0-only OR MIT OR Apache-2.0 */
/*
 * The rule that assigns a link to a new connection, for the kernel. The reference, with reasons and sources, is crates/decide/src/connection.rs; a
 * test runs both with the same inputs. Pure: compiles for BPF and natively.
 *
 * The caller holds the table's lock, so nothing here may call a function: everything is inlined.
 */
#ifndef BRAID_SCHEDULE_H
#define BRAID_SCHEDULE_H

#include "braid.h"

#define BRAID_LOAD_LIMIT (1ull << 61)
#define BRAID_RATE_LIMIT ((1ull << 44) - 1)
#define BRAID_TIME_SHIFT 20
#define BRAID_NEVER_ENDS (~0ull)

#define BRAID_INLINE static inline __attribute__((always_inline))

/*
 * Comparisons and selections without branches. The verifier follows every branch in every iteration of a loop, and with 32 links it would exceed its
 * limit. A truth value is 0 or 1; a mask is 0 or all ones.
 */
BRAID_INLINE __u64 braid_opaque(__u64 value)
{
	/* Prevents the compiler from recognizing the expression and generating branches again. */
	__asm__("" : "+r"(value));
	return value;
}

BRAID_INLINE __u64 braid_less(__u64 one, __u64 other)
{
	return braid_opaque((~one & other) | (~(one ^ other) & (one - other))) >> 63;
}

BRAID_INLINE __u64 braid_is_zero(__u64 value)
{
	return 1 ^ (braid_opaque(value | -value) >> 63);
}

BRAID_INLINE __u64 braid_select(__u64 truth, __u64 yes, __u64 no)
{
	return no ^ ((yes ^ no) & -braid_opaque(truth));
}

BRAID_INLINE __u64 braid_min(__u64 one, __u64 other)
{
	return braid_select(braid_less(one, other), one, other);
}

BRAID_INLINE __u64 braid_max(__u64 one, __u64 other)
{
	return braid_select(braid_less(one, other), other, one);
}

BRAID_INLINE __u64 braid_add(__u64 one, __u64 other)
{
	__u64 sum = one + other;

	return sum | -braid_less(sum, one);
}

/* floor(load * 2^20 / rate), saturating. */
BRAID_INLINE __u64 braid_duration(__u64 load, __u64 rate)
{
	__u64 stopped, whole, time;

	rate = braid_min(rate, BRAID_RATE_LIMIT);
	stopped = braid_is_zero(rate);
	rate += stopped;
	whole = load / rate;
	time = (whole << BRAID_TIME_SHIFT) + ((load - whole * rate) << BRAID_TIME_SHIFT) / rate;
	stopped |= 1 ^ braid_is_zero(whole >> (64 - BRAID_TIME_SHIFT));
	return (time | -stopped) & -(1 ^ braid_is_zero(load));
}

/* State that one decision reads and changes for the next. */
struct braid_load_table {
	__u64 virtual_time;
	/*
	 * Stored in memory, so that the verifier treats it as an unknown number and does not track the best slot through every branch of the loop.
	 */
	volatile __u32 winner;
	__u32 pad;
	__u64 commits; /* number of decisions, counted from a random start */
	__u64 packets[2]; /* bytes of packet streams, which are in no link's load: part of the load that the target applies to */
	struct braid_link_load loads[BRAID_MAX_LINKS];
};

BRAID_INLINE __u64 braid_virtual_start(const struct braid_load_table *table, __u32 slot)
{
	return braid_max(table->loads[slot].tag, table->virtual_time);
}

/* The number that the link draws for the next decision of BRAID_RANDOM: consecutive outputs of SplitMix64. */
BRAID_INLINE __u64 braid_draw(const struct braid_load_table *table, __u32 slot)
{
	__u64 state = (table->commits * BRAID_MAX_LINKS + slot) * 0x9e3779b97f4a7c15ull;

	state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
	state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
	return state ^ (state >> 31);
}

/* Without a target: when the last of the links finishes its load. */
BRAID_INLINE __u64 braid_deadline(const struct braid_load_table *table, const struct braid_params *params, __u32 allowed,
				  __u32 direction, __u64 demand)
{
	__u64 total = braid_min(braid_min(demand, BRAID_LOAD_LIMIT) + braid_min(table->packets[direction], BRAID_LOAD_LIMIT), BRAID_LOAD_LIMIT);
	__u64 latest = 0;

	/* Ends at every eighth slot only: the verifier follows what comes after the loop once for each place where it may end. */
	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		__u64 rest = braid_opaque(allowed >> slot), load;

		if (!(slot & 7) && !rest)
			break;
		load = braid_min(table->loads[slot].load[direction], BRAID_LOAD_LIMIT) & -(rest & 1);
		total = braid_min(total + load, BRAID_LOAD_LIMIT);
		latest = braid_max(latest, braid_duration(load, params->slots[slot].rate[direction]));
	}
	/* A duration of no bytes is 0, whatever the rate. */
	total &= -(1 ^ braid_is_zero(params->target[direction]));
	return braid_max(latest, braid_duration(total, params->target[direction]));
}

/*
 * The part of a link's load that precedes the end of a new flow: (load + min(load, flows * demand)) / 2, or all of it if `whole` is set. `load` and
 * `demand` are at most BRAID_LOAD_LIMIT. The product is computed in two halves, so that an excess over the limit is detected without a division.
 */
BRAID_INLINE __u64 braid_backlog(__u64 load, __u32 flows, __u64 demand, __u64 whole)
{
	__u64 low = (demand & ~0u) * flows, high = (demand >> 32) * flows + (low >> 32);
	__u64 above = 1 ^ braid_is_zero(high >> 29);
	__u64 shares = (high << 32 | (low & ~0u)) | -(above | whole);

	return (load + braid_min(load, shares)) >> 1;
}

/* The best link so far. Smaller keys are better, compared in order; on a tie the first link wins. */
struct braid_best {
	__u64 tier, first, second;
};

BRAID_INLINE void braid_offer(struct braid_load_table *table, struct braid_best *best, __u64 allowed, __u64 tier, __u64 first,
			      __u64 second, __u32 slot)
{
	__u64 better = braid_less(second, best->second);

	better = braid_less(first, best->first) | (braid_is_zero(first ^ best->first) & better);
	better = braid_less(tier, best->tier) | (braid_is_zero(tier ^ best->tier) & better);
	better &= allowed;
	best->tier = braid_select(better, tier, best->tier);
	best->first = braid_select(better, first, best->first);
	best->second = braid_select(better, second, best->second);
	table->winner = braid_select(better, slot, table->winner);
}

/* How braid_pick compares links. */
enum braid_comparison { BRAID_BY_RANK, BRAID_BY_TURN, BRAID_BY_TIME };

/* What braid_search needs to know of the mode. The truth values are 0 or 1. */
struct braid_criteria {
	__u64 random;	/* by rank: a random number instead of the rank */
	__u64 whole;	/* by time: the link's whole load precedes the flow */
	__u64 makespan; /* by time: of the links in time the one of the lowest rank, not of the lowest price */
	__u64 deadline; /* by time */
};

/* `comparison` is a constant, so that each has a loop of its own without branches on it. */
BRAID_INLINE void braid_search(struct braid_load_table *table, const struct braid_params *params, __u32 allowed, __u32 direction,
			       __u64 demand, enum braid_comparison comparison, const struct braid_criteria *criteria)
{
	struct braid_best best = { .tier = 2 };

	for (__u32 slot = 0; slot < BRAID_MAX_LINKS; slot++) {
		const struct braid_slot *link = &params->slots[slot];
		/* A separate variable, so that the verifier does not track which bits of `allowed` were tested. */
		__u64 rest = braid_opaque(allowed >> slot);

		/* Ends at every second slot only, for the same reason as in braid_deadline. */
		if (!(slot & 1) && !rest)
			break;
		if (comparison == BRAID_BY_RANK) {
			__u64 rank = braid_select(criteria->random, braid_draw(table, slot), link->rank);

			braid_offer(table, &best, rest & 1, 0, rank, 0, slot);
		} else if (comparison == BRAID_BY_TURN) {
			braid_offer(table, &best, rest & 1, 0, braid_virtual_start(table, slot), link->step, slot);
		} else {
			__u64 load = braid_min(table->loads[slot].load[direction], BRAID_LOAD_LIMIT);
			__u64 backlog = braid_backlog(load, table->loads[slot].flows, demand, criteria->whole);
			__u64 finish = braid_duration(backlog + demand, link->rate[direction]);
			__u64 late = braid_less(criteria->deadline, finish);
			__u64 in_time = braid_select(criteria->makespan, link->rank, link->price);

			braid_offer(table, &best, rest & 1, late, braid_select(late, finish, in_time), link->price & -late, slot);
		}
	}
}

/* Sets table->winner to the slot that the rule selects among `allowed`, which must not be 0. */
BRAID_INLINE void braid_pick(struct braid_load_table *table, const struct braid_params *params, __u32 allowed, __u32 direction,
			     __u64 demand)
{
	struct braid_criteria criteria = {};
	__u32 mode = params->mode;

	direction &= 1;
	demand = braid_min(demand, BRAID_LOAD_LIMIT);
	if (mode == BRAID_VIRTUAL_START) {
		braid_search(table, params, allowed, direction, demand, BRAID_BY_TURN, &criteria);
		return;
	}
	/* From here on without comparisons of the mode: the verifier would follow the loop once for each mode that it can tell apart. */
	criteria.random = braid_is_zero(mode ^ BRAID_RANDOM);
	if (braid_is_zero(mode) | criteria.random) {
		braid_search(table, params, allowed, direction, demand, BRAID_BY_RANK, &criteria);
	} else {
		__u64 targeted = braid_is_zero(mode ^ BRAID_CHEAPEST_IN_TIME) & (1 ^ braid_is_zero(params->target[direction]));

		criteria.makespan = braid_is_zero(mode ^ BRAID_LEAST_MAKESPAN);
		criteria.whole = targeted | criteria.makespan | braid_is_zero(mode ^ BRAID_LEAST_FINISH);
		if (targeted | criteria.makespan)
			criteria.deadline = braid_deadline(table, params, allowed, direction, demand);
		braid_search(table, params, allowed, direction, demand, BRAID_BY_TIME, &criteria);
	}
}

/* Adds a flow to table->winner. */
BRAID_INLINE void braid_commit(struct braid_load_table *table, const struct braid_params *params, __u32 direction, __u64 demand)
{
	__u32 slot = table->winner & (BRAID_MAX_LINKS - 1);
	struct braid_link_load *link_load = &table->loads[slot];

	direction &= 1;
	if (params->mode == BRAID_VIRTUAL_START) {
		__u64 start = braid_virtual_start(table, slot);

		link_load->tag = braid_add(start, params->slots[slot].step);
		table->virtual_time = start;
	}
	link_load->load[direction] = braid_min(braid_add(link_load->load[direction], demand), BRAID_LOAD_LIMIT);
	if (link_load->flows != ~0u)
		link_load->flows++;
	table->commits++;
}

/*
 * The links that a flow may use, as `decide::policy::admission` computes them. 0: none. `denied` is set if the flow must fail, because all links of a
 * strict rule are unusable.
 */
BRAID_INLINE __u32 braid_admit(__u32 usable, __u32 backup, __u32 actions, __u32 links, __u32 prefer, _Bool *denied)
{
	__u32 pool = usable, normal;

	*denied = 0;
	if (actions & BRAID_DO_LINKS) {
		pool &= links;
		if (!pool) {
			*denied = 1;
			return 0;
		}
	}
	if ((actions & BRAID_DO_PREFER) && (pool & prefer))
		pool &= prefer;
	normal = pool & ~backup;
	return normal ? normal : pool;
}

#endif
