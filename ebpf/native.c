/* SPDX-License-Identifier: GPL-2.0-only OR MIT OR Apache-2.0 */
/* The connection rule compiled for this machine, so that a test can compare it with the Rust reference on millions of inputs. */
#include <linux/types.h>
#include <stddef.h>

#include "adhoc.h"
#include "schedule.h"

/* Chooses as the kernel does. Returns the winner, or BRAID_NO_SLOT if there is none; `denied` then says whether the flow must fail. */
__u32 braid_native_choose(struct braid_load_table *table, const struct braid_params *params, __u32 usable, __u32 actions, __u32 links,
			  __u32 prefer, __u32 direction, __u64 demand, __u32 *denied)
{
	_Bool refused;
	__u32 allowed = braid_admit(usable, params->backup, actions, links, prefer, &refused);

	*denied = refused;
	if (!allowed)
		return BRAID_NO_SLOT;
	braid_pick(table, params, allowed, direction, demand);
	braid_commit(table, params, direction, demand);
	return table->winner;
}

/* Sizes and offsets that must agree with the Rust side. */
const size_t braid_native_sizes[] = {
	sizeof(struct braid_params),	   sizeof(struct braid_slot),	  sizeof(struct braid_link_load),	 sizeof(struct braid_rule),
	sizeof(struct braid_flow),	   sizeof(struct braid_flow_row), sizeof(struct braid_event),	 sizeof(struct braid_signs),
	sizeof(struct braid_demand_key),   sizeof(struct braid_demand),	  sizeof(struct braid_app_key),	 sizeof(struct braid_datagram_key),
	sizeof(struct braid_load_table),  sizeof(struct braid_control),  sizeof(struct braid_exe_key),	 sizeof(struct braid_app),
	sizeof(struct braid_shape),	   sizeof(struct braid_redirection),  sizeof(struct braid_arrival),
	offsetof(struct braid_params, slots), offsetof(struct braid_flow, remote), offsetof(struct braid_flow_row, local),
	offsetof(struct braid_arrival, remote), sizeof(struct braid_forward_key), sizeof(struct braid_client), sizeof(struct braid_own_address),
	sizeof(struct braid_window), sizeof(struct braid_leg), sizeof(struct braid_fast), sizeof(struct braid_rewrite),
	sizeof(struct braid_adhoc), sizeof(struct braid_arrivals), sizeof(struct braid_radio), sizeof(struct braid_plan), sizeof(struct braid_pair_key), sizeof(struct braid_pair),
};
