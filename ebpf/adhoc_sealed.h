/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A radio of a group with a key. MACsec devices stay when their process is gone, so each lies over a TAP device of the process, which goes with it, and takes the
 * MACsec device along:
 *
 *   vi0 -> MACsec device -> TAP device -> radio      sealed_out, at the egress of the TAP device
 *   vi0 <- MACsec device <- TAP device <- radio      sealed_in, at the ingress of the radio
 *
 * The programs of the other groups run at the MACsec device instead of the radio. What arrives at the radio without MACsec never comes there.
 */
#ifndef BRAID_ADHOC_SEALED_H
#define BRAID_ADHOC_SEALED_H

#define ETH_MACSEC 0x88e5

/* The TAP device of a radio, and the radio of a TAP device. */
MAP(seals, BPF_MAP_TYPE_HASH, __u32, __u32, BRAID_RADIOS * 2, 0);

SEC("classifier")
int braid_adhoc_sealed_out(struct __sk_buff *skb)
{
	__u32 device = skb->ifindex;
	const __u32 *radio = bpf_map_lookup_elem(&seals, &device);

	/* The system's own frames, such as those of IPv6, would leave in clear. */
	if (!radio || skb->protocol != bpf_htons(ETH_MACSEC))
		return TC_DROP;
	/* Packets have their numbers now. What sorts them by flow or priority would make some arrive too late to be accepted. */
	bpf_set_hash_invalid(skb);
	skb->priority = 0;
	return bpf_redirect(*radio, 0);
}

SEC("classifier")
int braid_adhoc_sealed_in(struct __sk_buff *skb)
{
	__u32 zero = 0, device = skb->ifindex;
	const struct braid_adhoc *own = bpf_map_lookup_elem(&adhoc, &zero);
	const __u32 *tap = bpf_map_lookup_elem(&seals, &device);

	/* A VLAN tag in front of the frame is not encrypted, so anybody can add one. */
	if (!own || !own->device || bpf_ktime_get_ns() > own->until || !tap || skb->protocol != bpf_htons(ETH_MACSEC) || skb->vlan_present)
		return TC_NEXT;
	return bpf_redirect(*tap, BPF_F_INGRESS);
}

#endif
