/* SPDX-License-Identifier: GPL-2.0-only */
/* Functions common to connect and sendmsg: failing a call, and requesting that datagrams are counted. */
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

/* The kernel rejected the attempt to steer. A flow that may use only certain links must then fail. */
BRAID_INLINE int not_steered(const struct request *request)
{
	count(BRAID_COUNT_FAILED);
	return request->strict ? refuse() : ALLOW;
}

/*
 * Requests the programs that count datagrams from the daemon, unless they are attached. They are tracepoints that run at every send and receive of
 * the machine, so they are attached only while a UDP socket is steered. Datagrams of the first socket that are sent before the daemon reacts are not
 * counted.
 */
static __attribute__((noinline)) int request_counting(void)
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
