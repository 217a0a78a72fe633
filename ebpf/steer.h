/* SPDX-License-Identifier: GPL-2.0-only */
/* What connect and sendmsg share: how they fail a call, and how they ask for datagrams to be counted. */
#ifndef BRAID_STEER_H
#define BRAID_STEER_H

#include "flow.h"

BRAID_INLINE int refuse(void)
{
	count(BRAID_COUNT_DENIED);
	if (has_retval)
		bpf_set_retval(-ENETUNREACH);
	return DENY;
}

/* The kernel refused to steer: a flow that may use no other link must not go out of whichever. */
BRAID_INLINE int not_steered(const struct request *request)
{
	count(BRAID_COUNT_FAILED);
	return request->strict ? refuse() : ALLOW;
}

/*
 * Asks the daemon to attach the programs that count datagrams, unless they are. They are tracepoints that run at every send and receive of the
 * machine, so they are attached only while a UDP socket is steered. What a first socket sends before the daemon answers is not counted.
 */
static __attribute__((noinline)) int want_counting(void)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	struct braid_event *event;

	if (!switches || switches->counting)
		return 0;
	event = new_event(BRAID_EVENT_COUNT);
	if (event)
		bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
}

#endif
