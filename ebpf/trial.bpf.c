/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Kernel parts for tests and benchmarks, in a separate object that Braid itself never loads. First the connection rule alone: each run makes one
 * decision on the trial in the map and writes the result back.
 */
#include <linux/types.h>
#include <linux/bpf.h>

#include "map.h"
#include "schedule.h"

struct trial {
	/* At the top level, because Linux 6.1 does not find a nested one. */
	struct bpf_spin_lock lock;
	__u32 pad;
	__u64 pad2;
	struct braid_load_table state;
	__u32 allowed;
	__u32 direction;
	__u64 demand;
	__u32 winner;
	__u32 denied;
	__u32 actions;
	__u32 links;
	__u32 prefer;
	__u32 end;
};

MAP(params, BPF_MAP_TYPE_ARRAY, __u32, struct braid_params, 1, 0);
MAP(trials, BPF_MAP_TYPE_ARRAY, __u32, struct trial, 1, 0);

SEC("classifier")
int braid_trial(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct trial *trial = bpf_map_lookup_elem(&trials, &zero);
	const struct braid_params *now = bpf_map_lookup_elem(&params, &zero);
	__u32 allowed;
	_Bool denied = 0;

	if (!trial || !now)
		return 0;
	allowed = braid_admit(trial->allowed, now->backup, trial->actions, trial->links, trial->prefer, &denied);
	trial->denied = denied;
	trial->winner = BRAID_NO_SLOT;
	if (!allowed)
		return 0;
	bpf_spin_lock(&trial->lock);
	braid_pick(&trial->state, now, allowed, trial->direction, trial->demand);
	braid_commit(&trial->state, now, trial->direction, trial->demand);
	trial->winner = trial->state.winner;
	bpf_spin_unlock(&trial->lock);
	return 0;
}

/* A foreign filter for tests. It lets all packets pass. */
SEC("cgroup_skb/egress")
int foreign_filter(struct __sk_buff *skb)
{
	return 1;
}

char LICENSE[] SEC("license") = "GPL";
