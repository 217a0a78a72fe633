/* SPDX-License-Identifier: GPL-2.0-only */
/* At the egress of links whose packets are bound late: see late.h. */
#include "late.h"

SEC("classifier")
int braid_late(struct __sk_buff *skb)
{
	__u32 link = skb->ifindex;
	const struct hardware *own = bpf_map_lookup_elem(&late_links, &link);
	__u8 head[IPV6_HEADER + 1], source[6];

	/* What Braid's own bonds send has waited in their queues. */
	if (!own || skb->vlan_present || skb->mark == BRAID_RELAY_MARK || bpf_skb_load_bytes(skb, 6, source, sizeof(source)))
		return TC_NEXT;
	for (int byte = 0; byte < 6; byte++)
		if (source[byte] != own->address[byte])
			return TC_NEXT;
	if (skb->protocol == bpf_htons(ETH_IPV6)) {
		if (load(skb, 0, head, sizeof(head)))
			return TC_NEXT;
		if (head[6] == PROTOCOL_ICMPV6 && head[IPV6_HEADER] >= ROUTER_SOLICITATION && head[IPV6_HEADER] <= REDIRECT)
			return TC_NEXT;
	} else if (skb->protocol != bpf_htons(ETH_IPV4)) {
		return TC_NEXT;
	}
	return network_offset(skb) == ETH_HEADER ? wait_for_link(skb, link) : TC_NEXT;
}
