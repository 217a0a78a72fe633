/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The switch for packets that this machine forwards (Hercules; Yap's thesis, 2.3), at tc on the devices of `[gateway]`:
 *
 *   from_lan  packets from clients. The first packet of a flow gets its link by the same policy, rule and load table as a connect. Every packet of the
 *             flow gets the link's mark, which Braid's routing rules match. The kernel forwards the packets and translates their addresses: it follows the
 *             user's firewall, finds free ports, and translates fragments and ICMP errors. TCP and UDP flows that are to be bonded get another mark,
 *             and go to the daemon; so do packets of other protocols, with a third mark, if a relay takes them.
 *   to_lan    packets to clients: counts them and follows the state of TCP.
 *   from_link, to_link  at the links' devices: the fast path (fast.h).
 *
 *   from_member  the same packets earlier, at a port of a bridge: finds the control group of a container.
 *
 * For programs of this machine that use the virtual interface (`decide::virtual_device`), `from_virtual` and `to_lan` do the same at that device, where a
 * program is what a client is elsewhere. At its other end, `outside` and `inside` exchange its address for one of the same checksum, and back.
 *
 * Fail open: without a live daemon, and for flows that do not fit into the table, packets follow the system's routes.
 */
#include "fast.h"

/* Reads the client's hardware address, if the device has any. */
static __attribute__((noinline)) int read_mac(struct __sk_buff *skb, struct request *request)
{
	struct {
		__u32 words[3];
		__u16 type;
	} head;
	__u32 packet[3];

	if (bpf_skb_load_bytes_relative(skb, 0, &head, ETH_HEADER, BPF_HDR_START_MAC) || load(skb, 0, packet, sizeof(packet)))
		return 0;
	/* Without such a header both begin at the same place, and the type would be bytes that the client chose. */
	if (head.words[0] == packet[0] && head.words[1] == packet[1] && head.words[2] == packet[2])
		return 0;
	if (head.type == skb->protocol)
		__builtin_memcpy(request->mac, (__u8 *)head.words + 6, 6);
	return 0;
}

/*
 * Reads who sends a packet through the virtual interface. The user is the socket's. The packet is in the context of the program that sent it, unless the
 * kernel sends it again from a timer: then another task runs, whose control group or user is another one, or which has no program. The program is also
 * unknown if it has changed its user or control group since it opened the socket.
 */
static __attribute__((noinline)) int read_sender(struct __sk_buff *skb, struct request *request, __u32 processes)
{
	struct task_struct *task = bpf_get_current_task_btf();
	__u64 cgroup = bpf_skb_cgroup_id(skb);

	request->own = 1;
	request->user = bpf_get_socket_uid(skb);
	if (!cgroup || BPF_CORE_READ(task, cgroups, dfl_cgrp, kn, id) != cgroup || task->cred->uid.val != request->user || !task->mm)
		return 0;
	request->app.exe.device = 0;
	read_program(request);
	request->process = processes ? process_in(processes) : task->tgid;
	request->cgroup = cgroup;
	return 1;
}

/*
 * Finds the control groups of the packet's socket, if it belongs to this machine: of a program that uses the virtual interface, or of a container. A bridge
 * takes the socket from the packet. So if there is none here, those count that a port of the bridge found in the same packet a moment ago on this CPU.
 */
static __attribute__((noinline)) int find_cgroups(struct __sk_buff *skb, const struct braid_forward_key *key)
{
	__u32 zero = 0;
	struct braid_forward_key *known = bpf_map_lookup_elem(&sender, &zero);
	_Bool same = 1;

	if (!known)
		return 0;
	if (!bpf_skb_cgroup_id(skb)) {
		for (int word = 0; word < 4; word++)
			same &= known->client[word] == key->client[word] && known->remote[word] == key->remote[word];
		if (same && known->client_port == key->client_port && known->remote_port == key->remote_port && known->protocol == key->protocol)
			return 0;
	}
	__builtin_memcpy(known, key, sizeof(*known));
	for (__u32 level = 0; level < BRAID_CGROUP_LEVELS; level++) {
		__u32 key = level;
		__u64 *cgroup = bpf_map_lookup_elem(&sender_cgroups, &key);

		if (cgroup)
			*cgroup = bpf_skb_ancestor_cgroup_id(skb, level);
	}
	return 0;
}
/* Whether control groups are there. Without them the kernel may lack the helpers for them. */
const volatile __u8 has_cgroups = 1;
/* Greatest number of flows of one client. The loader lowers it where the table is small. */
const volatile __u32 max_client_flows = BRAID_MAX_CLIENT_FLOWS;

/* Counts another flow of the client. Returns 0 if it has too many. */
static __attribute__((noinline)) int admit_client(const struct request *request)
{
	struct address address;
	struct braid_client *client, fresh = {};

	__builtin_memcpy(address.word, request->source, sizeof(address.word));
	client = bpf_map_lookup_elem(&clients, &address);
	if (!client) {
		fresh.last = request->time;
		fresh.flows = 1;
		fresh.device = request->own ? 0 : request->process;
		__builtin_memcpy(fresh.mac, request->mac, sizeof(fresh.mac));
		return !bpf_map_update_elem(&clients, &address, &fresh, BPF_NOEXIST);
	}
	if (client->flows >= max_client_flows)
		return 0;
	__sync_fetch_and_add(&client->flows, 1);
	client->last = request->time;
	client->device = request->own ? 0 : request->process;
	__builtin_memcpy(client->mac, request->mac, sizeof(client->mac));
	return 1;
}

/* Counts one flow less of the client with this address. */
static __attribute__((noinline)) int dismiss_client(const __u32 *client_address)
{
	struct address address;
	struct braid_client *client;

	__builtin_memcpy(address.word, client_address, sizeof(address.word));
	client = bpf_map_lookup_elem(&clients, &address);
	if (client && client->flows)
		__sync_fetch_and_add(&client->flows, -1);
	return 0;
}

BRAID_INLINE __u64 next_id(void)
{
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&forwarded_ids, &zero);

	return BRAID_FORWARDED_ID + ((__u64)(bpf_get_smp_processor_id() & 4095) << 40) + (count ? (*count)++ & ((1ull << 40) - 1) : 0);
}

enum outcome { OUTCOME_NEXT, OUTCOME_FLOW, OUTCOME_DROP };

/* A request, outside the stack, which has no room for it. Programs at tc do not interrupt each other on one CPU. */
MAP(forward_request, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct request, 1, 0);

/* Whether the bond carries flows of this protocol as packets. */
BRAID_INLINE _Bool is_bonded_as_packets(__u8 protocol)
{
	return protocol != IPPROTO_TCP && protocol != IPPROTO_UDP;
}

/* Destinations that the relay which takes packets refuses. */
MAP(packet_bypass, BPF_MAP_TYPE_HASH, struct address, __u32, 512, 0);

/* Whether a relay takes packets to this address now. */
static __attribute__((noinline)) int has_packet_relay(const __u32 *remote_address, __u8 family)
{
	__u32 zero = 0;
	struct braid_redirection *open = bpf_map_lookup_elem(&redirection, &zero);
	struct address remote;

	__builtin_memcpy(remote.word, remote_address, sizeof(remote.word));
	return open && ((open->packets >> (family == 6)) & 1) && !bpf_map_lookup_elem(&packet_bypass, &remote);
}

/* Whether the daemon takes this flow. */
BRAID_INLINE _Bool is_carried(const struct request *request)
{
	__u32 zero = 0;
	struct braid_redirection *open = bpf_map_lookup_elem(&redirection, &zero);

	if (!request->redirect || !open)
		return 0;
	if (is_bonded_as_packets(request->protocol))
		return has_packet_relay(request->remote, request->family);
	return open->clients[request->family == 6] && !is_heavy(request->user);
}

/* Gives a new flow its link, and an entry in the table. */
static __attribute__((noinline)) int start_forwarded(struct request *request, const struct braid_forward_key *key, __u32 bank)
{
	const struct braid_params *now = bpf_map_lookup_elem(&params, &bank);
	__u32 port = request->port;
	struct braid_flow *flow;
	_Bool carried;
	__u8 *known;
	int judgement;

	if (!now || !steerable(request))
		return OUTCOME_NEXT;
	known = bpf_map_lookup_elem(&port_classes, &port);
	request->class_ = known ? *known : BRAID_UNCLASSIFIED;
	judgement = judge_forwarded(request, bank);
	if (judgement == FAIL)
		return OUTCOME_DROP;
	if (judgement == LEAVE_ALONE)
		return OUTCOME_NEXT;
	carried = is_carried(request);
	if (request->confined && !carried)
		return OUTCOME_DROP;
	if (!admit_client(request)) {
		count(BRAID_COUNT_OVERFLOWED);
		return request->strict ? OUTCOME_DROP : OUTCOME_NEXT;
	}
	if (bpf_map_update_elem(&forwarded, key, &no_flow, BPF_NOEXIST)) {
		dismiss_client(key->client);
		count(BRAID_COUNT_OVERFLOWED);
		return request->strict ? OUTCOME_DROP : OUTCOME_NEXT;
	}
	flow = bpf_map_lookup_elem(&forwarded, key);
	if (!flow || (!carried && choose(request, bank, 1))) {
		bpf_map_delete_elem(&forwarded, key);
		dismiss_client(key->client);
		return request->strict ? OUTCOME_DROP : OUTCOME_NEXT;
	}
	fill(flow, now, request, request->id, BRAID_FLOW_PENDING | (carried ? BRAID_FLOW_CARRIED : 0));
	flow->reserved = carried ? 0 : request->demand;
	__asm__ volatile("" ::: "memory");
	flow->flags &= ~BRAID_FLOW_PENDING;
	count(carried ? BRAID_COUNT_REDIRECTED : BRAID_COUNT_FORWARDED);
	return OUTCOME_FLOW;
}

/* Ends a flow. One that the daemon carries is in no load, and the daemon reports its end. */
BRAID_INLINE void end_forwarded(const struct braid_forward_key *key, struct braid_flow *flow)
{
	if (flow->flags & BRAID_FLOW_CARRIED)
		flow->flags |= BRAID_FLOW_MARKER;
	else
		end_flow(NULL, key, flow, flow->id);
}

/* Ends a flow whose entry is to be used again. */
BRAID_INLINE void forget(const struct braid_forward_key *key, struct braid_flow *flow)
{
	end_forwarded(key, flow);
	dismiss_client(key->client);
	bpf_map_delete_elem(&forwarded, key);
}

/*
 * Whether a packet of a client begins another flow than the entry's: a TCP connection whose addresses and ports were used before, or a flow without
 * connection whose link can no longer be used. A TCP connection ends with its link.
 */
BRAID_INLINE _Bool begins_anew(const struct braid_flow *flow, const struct packet *packet, const struct braid_params *now)
{
	const struct braid_slot *slot = &now->slots[flow->slot & (BRAID_MAX_LINKS - 1)];
	_Bool usable = (now->usable[packet->family == 6] >> (flow->slot & (BRAID_MAX_LINKS - 1))) & 1 && slot->ifindex == flow->ifindex;

	/* Its link is the daemon's concern. Without its relay, a flow of packets begins anew over a link. */
	if (flow->flags & BRAID_FLOW_CARRIED)
		usable = !is_bonded_as_packets(packet->key.protocol) || has_packet_relay(packet->key.remote, packet->family);
	if (packet->key.protocol != IPPROTO_TCP)
		return !usable || (flow->flags & BRAID_FLOW_MARKER);
	if ((packet->flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return 0;
	return !usable || flow->answered || (flow->flags & BRAID_FLOW_MARKER);
}

/* Counts a packet. The size includes the headers below and of IP. */
BRAID_INLINE void count_forwarded(struct braid_flow *flow, __u64 *bytes, __u32 size)
{
	__sync_fetch_and_add(bytes, size);
	flow->last = bpf_ktime_get_coarse_ns();
}

/* Follows the end of a TCP connection. The entry stays until the next dump, so that its last packets find it. */
BRAID_INLINE void follow_end(struct braid_flow *flow, const struct packet *packet, __u32 closed)
{
	if (packet->key.protocol != IPPROTO_TCP || !(packet->flags & (TCP_FIN | TCP_RST)))
		return;
	if (packet->flags & TCP_FIN)
		flow->flags |= closed;
	if ((packet->flags & TCP_RST) || !(~flow->flags & (BRAID_FLOW_CLIENT_CLOSED | BRAID_FLOW_SERVER_CLOSED)))
		end_forwarded(&packet->key, flow);
}

/*
 * Gives a packet that the daemon takes to its transparent socket. The firewall does that too (`tproxy` in `decide::gateway`), but not for packets of a bridge
 * that has passed the firewall before. This alone would not do either: reassembly takes the socket from fragments. A connection that has its own socket needs
 * nothing: the kernel finds it. Only at an ingress.
 */
static __attribute__((noinline)) int hand_over(struct __sk_buff *skb, const struct packet *packet)
{
	__u32 zero = 0, six = packet->family == 6, size = six ? sizeof(((struct bpf_sock_tuple *)0)->ipv6) : sizeof(((struct bpf_sock_tuple *)0)->ipv4);
	const struct braid_redirection *open = bpf_map_lookup_elem(&redirection, &zero);
	_Bool tcp = packet->key.protocol == IPPROTO_TCP;
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *found;

	if (!open)
		return 0;
	if (tcp) {
		if (six) {
			__builtin_memcpy(tuple.ipv6.saddr, packet->key.client, 16);
			__builtin_memcpy(tuple.ipv6.daddr, packet->key.remote, 16);
			tuple.ipv6.sport = bpf_htons(packet->key.client_port);
			tuple.ipv6.dport = bpf_htons(packet->key.remote_port);
		} else {
			tuple.ipv4.saddr = packet->key.client[3];
			tuple.ipv4.daddr = packet->key.remote[3];
			tuple.ipv4.sport = bpf_htons(packet->key.client_port);
			tuple.ipv4.dport = bpf_htons(packet->key.remote_port);
		}
		found = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
		if (found) {
			bpf_sk_release(found);
			return 0;
		}
		__builtin_memset(&tuple, 0, sizeof(tuple));
	}
	if (six) {
		tuple.ipv6.daddr[3] = bpf_htonl(1);
		tuple.ipv6.dport = bpf_htons(tcp ? open->clients[1] : open->client_datagrams[1]);
	} else {
		tuple.ipv4.daddr = bpf_htonl(0x7f000001);
		tuple.ipv4.dport = bpf_htons(tcp ? open->clients[0] : open->client_datagrams[0]);
	}
	found = tcp ? bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0) : bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!found)
		return 0;
	bpf_sk_assign(skb, found, 0);
	bpf_sk_release(found);
	return 0;
}

/* Follows and changes the windows of a TCP flow that the kernel forwards. Before the packet is counted: the time since the last one matters. */
BRAID_INLINE void follow_tcp(struct __sk_buff *skb, const struct packet *packet, struct braid_flow *flow, _Bool server)
{
	if (packet->key.protocol != IPPROTO_TCP || (flow->flags & BRAID_FLOW_CARRIED))
		return;
	if (packet->flags & TCP_SYN)
		return follow_handshake(skb, flow, packet->transport, server);
	if (!server)
		time_handshake(flow);
	if (are_windows_wanted())
		follow_window(skb, flow, packet->transport, packet->size, server);
}

/* Sends a packet of a client or program over its link at once, if its flow is in the fast path. */
static __attribute__((noinline)) int try_fast(struct __sk_buff *skb, const struct packet *packet, __u64 id)
{
	struct braid_fast *found = is_fast_path_open() && !skb->vlan_present ? bpf_map_lookup_elem(&fast, &packet->key) : NULL;

	return found && found->id == id ? use_fast_path(skb, packet, found, BRAID_LEG_OUT) : TC_NEXT;
}

/* Whether a frame is of a VLAN. Number 0 is none: such a tag has only a priority (IEEE 802.1Q, 9.6), and the kernel removes it later. */
BRAID_INLINE _Bool has_vlan(struct __sk_buff *skb)
{
	return skb->vlan_present && (skb->vlan_tci & 0xfff);
}

/* Processes a packet from a client or, if the constant `own` is set, from a program that uses the virtual interface. */
BRAID_INLINE int process(struct __sk_buff *skb, _Bool own)
{
	const struct braid_params *now;
	struct request *request;
	struct packet packet = {};
	struct braid_flow *flow;
	__u32 bank, zero = 0;
	__u64 time;
	int outcome;

	if (!own && (skb->pkt_type != PACKET_HOST || has_vlan(skb)))
		return TC_NEXT;
	now = live_params(&time, &bank);
	if (!now || !read_packet(skb, &packet, 0))
		return TC_NEXT;
	flow = bpf_map_lookup_elem(&forwarded, &packet.key);
	if (flow && (!flow->id || (flow->flags & BRAID_FLOW_PENDING)))
		return TC_NEXT;
	if (flow && begins_anew(flow, &packet, now)) {
		forget(&packet.key, flow);
		flow = NULL;
	}
	if (!flow) {
		/* Somebody else decides about a packet with a mark. */
		if (skb->mark)
			return TC_NEXT;
		request = bpf_map_lookup_elem(&forward_request, &zero);
		if (!request)
			return TC_NEXT;
		__builtin_memset(request, 0, sizeof(*request));
		__builtin_memcpy(request->remote, packet.key.remote, sizeof(request->remote));
		__builtin_memcpy(request->source, packet.key.client, sizeof(request->source));
		__builtin_memcpy(request->app.name, packet.key.client, sizeof(request->app.name));
		request->app.exe.device = BRAID_CLIENT_DEVICE;
		request->time = time;
		request->id = next_id();
		/* A number for the limits per user. Users have smaller ones. */
		request->user = 1u << 31 | packet.key.client[3];
		request->process = own ? skb->ifindex : skb->ingress_ifindex;
		request->port = packet.key.remote_port;
		request->family = packet.family;
		request->protocol = packet.key.protocol;
		read_mac(skb, request);
		if (has_cgroups && now->cgroups)
			find_cgroups(skb, &packet.key);
		if (own)
			read_sender(skb, request, now->processes);
		outcome = start_forwarded(request, &packet.key, bank);
		if (outcome != OUTCOME_FLOW)
			return outcome == OUTCOME_DROP ? TC_DROP : TC_NEXT;
		flow = bpf_map_lookup_elem(&forwarded, &packet.key);
		if (!flow)
			return TC_NEXT;
	} else if (packet.key.protocol == IPPROTO_TCP && !(flow->answered | (flow->flags & BRAID_FLOW_CARRIED)) && (packet.flags & TCP_SYN)) {
		/* The client sends its SYN again. A flood of them is no evidence. */
		if (time - flow->last >= BRAID_UNANSWERED_NS) {
			flow->resent++;
			record_timeout(flow, (flow->resent - 1) | 1u << 31);
		}
	}
	follow_tcp(skb, &packet, flow, 0);
	count_forwarded(flow, &flow->tx, skb->len);
	follow_end(flow, &packet, BRAID_FLOW_CLIENT_CLOSED);
	/* A bridge may have passed the firewall already, which gave the packet its connection's mark. Only TCP has to follow that. */
	if (!skb->mark || (is_ours(skb->mark) && packet.key.protocol != IPPROTO_TCP))
		skb->mark = !(flow->flags & BRAID_FLOW_CARRIED)			? now->slots[flow->slot & (BRAID_MAX_LINKS - 1)].mark
			    : is_bonded_as_packets(packet.key.protocol)	? BRAID_PACKET_MARK
									: BRAID_CARRIER_MARK;
	if (!own && skb->mark == BRAID_CARRIER_MARK)
		hand_over(skb, &packet);
	return (flow->flags & BRAID_FLOW_CARRIED) ? TC_NEXT : try_fast(skb, &packet, flow->id);
}

SEC("classifier")
int braid_from_lan(struct __sk_buff *skb)
{
	return process(skb, 0);
}

/* At the ingress of the ports of a LAN's bridge: finds the control groups of a new flow's sender. */
SEC("classifier")
int braid_from_member(struct __sk_buff *skb)
{
	const struct braid_params *now;
	struct packet packet = {};
	struct braid_flow *flow;
	__u32 bank;
	__u64 time;

	if (!has_cgroups)
		return TC_NEXT;
	now = live_params(&time, &bank);
	if (!now || !now->cgroups || !bpf_skb_cgroup_id(skb) || !read_packet(skb, &packet, 0))
		return TC_NEXT;
	flow = bpf_map_lookup_elem(&forwarded, &packet.key);
	if (!flow || begins_anew(flow, &packet, now))
		find_cgroups(skb, &packet.key);
	return TC_NEXT;
}

/* At the ingress of a link: sends a packet to its client or program at once, if its flow is in the fast path. */
SEC("classifier")
int braid_from_link(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct braid_fast *found;

	if (!is_fast_path_open() || skb->pkt_type != PACKET_HOST || skb->vlan_present || !read_packet(skb, &packet, 1))
		return TC_NEXT;
	found = find_on_link(&packet.key);
	return found ? use_fast_path(skb, &packet, found, BRAID_LEG_BACK) : TC_NEXT;
}

/* At the egress of a link: compares what the kernel forwards with the fast path. */
SEC("classifier")
int braid_to_link(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct braid_fast *found;

	/* A packet of this machine itself came from no device. */
	if (took_fast_path(skb) || !may_be_sample(skb) || !skb->ingress_ifindex || !read_packet(skb, &packet, 0))
		return TC_NEXT;
	found = find_on_link(&packet.key);
	if (found)
		confirm(skb, &packet, found, BRAID_LEG_OUT);
	return TC_NEXT;
}

/* At the egress of the virtual interface. */
SEC("classifier")
int braid_from_virtual(struct __sk_buff *skb)
{
	return process(skb, 1);
}

/* Records that a link answered a handshake. */
static __attribute__((noinline)) int record_forwarded_answer(struct braid_flow *flow)
{
	flow->answered = 1;
	if (flow->flags & BRAID_FLOW_CARRIED)
		return 0;
	record_answer_at(flow, bpf_ktime_get_ns());
	return 0;
}

/* Compares a packet that the kernel forwards to a client with the fast path. */
static __attribute__((noinline)) int confirm_back(struct __sk_buff *skb, const struct packet *packet, __u64 id)
{
	struct braid_fast *found = may_be_sample(skb) ? bpf_map_lookup_elem(&fast, &packet->key) : NULL;

	return found && found->id == id ? confirm(skb, packet, found, BRAID_LEG_BACK) : 0;
}

SEC("classifier")
int braid_to_lan(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct braid_flow *flow;

	if (!read_packet(skb, &packet, 1))
		return TC_NEXT;
	flow = bpf_map_lookup_elem(&forwarded, &packet.key);
	if (!flow || !flow->id || (flow->flags & (BRAID_FLOW_PENDING | BRAID_FLOW_MARKER)))
		return TC_NEXT;
	follow_tcp(skb, &packet, flow, 1);
	count_forwarded(flow, &flow->rx, skb->len);
	/* A connection from before the daemon's start is answered by any packet. */
	if (packet.key.protocol == IPPROTO_TCP && !flow->answered && (packet.flags & (TCP_SYN | TCP_ACK)))
		record_forwarded_answer(flow);
	if (!took_fast_path(skb))
		confirm_back(skb, &packet, flow->id);
	follow_end(flow, &packet, BRAID_FLOW_SERVER_CLOSED);
	return TC_NEXT;
}

/* ------------------------------------------------------------------ the virtual interface */

/* Writes `to` over the IPv4 address at `offset` if it is `from`. Both have the same checksum. */
BRAID_INLINE void exchange4(struct __sk_buff *skb, __u32 offset, __u32 from, __u32 to)
{
	__u32 have;

	if (!bpf_skb_load_bytes(skb, offset, &have, sizeof(have)) && have == from)
		bpf_skb_store_bytes(skb, offset, &to, sizeof(to), 0);
}

/* The same for an IPv6 address. */
BRAID_INLINE void exchange6(struct __sk_buff *skb, __u32 offset, const __u32 *from, const __u32 *to)
{
	__u32 have[4], new[4];

	if (bpf_skb_load_bytes(skb, offset, have, sizeof(have)) || have[0] != from[0] || have[1] != from[1] || have[2] != from[2] || have[3] != from[3])
		return;
	__builtin_memcpy(new, to, sizeof(new));
	bpf_skb_store_bytes(skb, offset, new, sizeof(new), 0);
}

/*
 * Exchanges one address for the other in the source or destination of a packet, and in the packet that an ICMP error quotes, which went the other way. Both
 * addresses have the same checksum, so no checksum changes.
 */
BRAID_INLINE int exchange(struct __sk_buff *skb, _Bool out)
{
	const struct braid_own_address *own;
	const __u32 *from, *to;
	__u32 quoted = 0, place = skb->protocol == bpf_htons(ETH_IPV6);
	__u8 head[2];

	own = bpf_map_lookup_elem(&own_addresses, &place);
	if (!own || !(own->inside[0] | own->inside[3]))
		return TC_NEXT;
	from = out ? own->inside : own->outside;
	to = out ? own->outside : own->inside;
	if (place) {
		exchange6(skb, ETH_HEADER + (out ? IPV6_SOURCE : IPV6_DESTINATION), from, to);
		quoted = ETH_HEADER + IPV6_HEADER;
		/* The types of errors are below 128 (RFC 4443, 2.1). */
		if (bpf_skb_load_bytes(skb, ETH_HEADER + 6, head, 1) || head[0] != PROTOCOL_ICMPV6 || bpf_skb_load_bytes(skb, quoted, head, 1) ||
		    head[0] >= ECHO_REQUEST6)
			return TC_NEXT;
		exchange6(skb, quoted + ICMP_HEADER + (out ? IPV6_DESTINATION : IPV6_SOURCE), from, to);
	} else if (skb->protocol == bpf_htons(ETH_IPV4)) {
		exchange4(skb, ETH_HEADER + (out ? IPV4_SOURCE : IPV4_DESTINATION), from[3], to[3]);
		/* A later fragment has no ICMP header. */
		if (bpf_skb_load_bytes(skb, ETH_HEADER + 6, head, 2) || (head[0] & 0x1f) || head[1] || bpf_skb_load_bytes(skb, ETH_HEADER, head, 1) ||
		    !is_header4(head[0]))
			return TC_NEXT;
		quoted = ETH_HEADER + (head[0] & 15) * 4;
		if (bpf_skb_load_bytes(skb, ETH_HEADER + 9, head, 1) || head[0] != PROTOCOL_ICMP || bpf_skb_load_bytes(skb, quoted, head, 1))
			return TC_NEXT;
		/* Destination unreachable, time exceeded, parameter problem. */
		if (head[0] != 3 && head[0] != 11 && head[0] != 12)
			return TC_NEXT;
		exchange4(skb, quoted + ICMP_HEADER + (out ? IPV4_DESTINATION : IPV4_SOURCE), from[3], to[3]);
	}
	return TC_NEXT;
}

/* Packets of programs, at the ingress of the switch's end. */
SEC("classifier")
int braid_outside(struct __sk_buff *skb)
{
	return exchange(skb, 1);
}

/* Packets to programs, at the egress of the switch's end. */
SEC("classifier")
int braid_inside(struct __sk_buff *skb)
{
	return exchange(skb, 0);
}

/* ------------------------------------------------------------------ the dump */

/* The kernel's connection tracking forgets flows after these times without a packet (nf_conntrack-sysctl); an unanswered TCP connection after 120 s. */
#define FORWARDED_TCP_IDLE_NS 7200000000000ull
#define FORWARDED_IDLE_NS 120000000000ull
/* One without connection that nobody answers. */
#define FORWARDED_UNANSWERED_NS 30000000000ull
/* While the table is under pressure: whoever fills it with made-up addresses gets no answers. */
#define PRESSURE_IDLE_NS 30000000000ull
#define PRESSURE_UNANSWERED_NS 2000000000ull

/* How long a flow may be idle. */
BRAID_INLINE __u64 idle_time(const struct braid_flow *flow)
{
	__u32 zero = 0;
	struct braid_control *switches = bpf_map_lookup_elem(&control, &zero);
	_Bool pressure = switches && switches->pressure;

	if (!flow->rx && pressure)
		return PRESSURE_UNANSWERED_NS;
	if (flow->protocol == IPPROTO_TCP)
		return flow->answered ? FORWARDED_TCP_IDLE_NS : FORWARDED_IDLE_NS;
	if (!flow->rx)
		return FORWARDED_UNANSWERED_NS;
	return pressure ? PRESSURE_IDLE_NS : FORWARDED_IDLE_NS;
}

/*
 * Prepares a forwarded flow for a dump: ends it if it was idle for too long, or else updates what it reserves. Returns 0 if the entry is no flow. Ended
 * flows are marked (BRAID_FLOW_MARKER): the daemon removes their entries.
 */
BRAID_INLINE _Bool tend(const struct braid_forward_key *key, struct braid_flow *flow, __u64 now)
{
	if (!flow->id || (flow->flags & BRAID_FLOW_PENDING))
		return 0;
	/* Signed, because a packet may be counted in the meantime. */
	if ((__s64)(now - flow->last) > (__s64)idle_time(flow))
		end_forwarded(key, flow);
	else if (!(flow->flags & BRAID_FLOW_CARRIED))
		refresh(flow, flow->id, flow->rx + flow->tx, flow->last, now);
	return 1;
}

struct bpf_map;

static long tend_one(struct bpf_map *map, struct braid_forward_key *key, struct braid_flow *flow, void *unused)
{
	if (key && flow)
		tend(key, flow, bpf_ktime_get_ns());
	return 0;
}

/*
 * Prepares a dump. The daemon runs this program, which is attached nowhere, then reads the table itself. Nothing in this file may depend on the kernel's types
 * (CO-RE): a gateway needs no BTF.
 */
SEC("classifier")
int braid_tend(struct __sk_buff *skb)
{
	apply_corrections();
	bpf_for_each_map_elem(&forwarded, tend_one, NULL, 0);
	return 0;
}
