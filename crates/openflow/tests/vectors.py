"""vectors.py: prints the test vectors of OpenFlow, one a line: name, colon, hexadecimal digits. vectors.txt has its output.

Three sources, all independent of the crate:

    captured/  messages that os-ken's own tests read, of Open vSwitch, LINC (Erlang) and others
    os-ken/    messages that os-ken encodes; support/samples.rs has the same messages
    manual/    messages of switches with OpenFlow 1.0, which os-ken only decodes, packed here as the specification (OpenFlow 1.0.1) lays them out

os-ken must decode the last ones too. To write the file anew:

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install os-ken==4.2.2
    /tmp/venv/bin/python crates/openflow/tests/vectors.py > crates/openflow/tests/vectors.txt
"""

import struct
from pathlib import Path

import os_ken.tests
from os_ken.ofproto import ofproto_parser, ofproto_protocol
from os_ken.ofproto import ofproto_v1_0 as c0, ofproto_v1_0_parser as p0
from os_ken.ofproto import ofproto_v1_3 as c3, ofproto_v1_3_parser as p3

XID = 0x01020304
MAC = "02:00:00:00:00:01"
D0 = ofproto_protocol.ProtocolDesc(c0.OFP_VERSION)
D3 = ofproto_protocol.ProtocolDesc(c3.OFP_VERSION)


def captured():
    folder = Path(os_ken.tests.__file__).parent / "packet_data"
    for name in ("of10", "of13"):
        for file in sorted((folder / name).glob("*.packet")):
            yield f"captured/{name}/{file.stem}", file.read_bytes()


def match13():
    return p3.OFPMatch(in_port=7, eth_dst=(MAC, "ff:ff:ff:00:00:00"), eth_type=0x800, vlan_vid=0x1000 | 5, ip_proto=6,
                       ipv4_src=("10.0.0.0", "255.0.0.0"), tcp_dst=80)


def actions13():
    return [
        p3.OFPActionOutput(2, 128), p3.OFPActionCopyTtlOut(), p3.OFPActionCopyTtlIn(), p3.OFPActionSetMplsTtl(9), p3.OFPActionDecMplsTtl(),
        p3.OFPActionPushVlan(0x8100), p3.OFPActionPopVlan(), p3.OFPActionPushMpls(0x8847), p3.OFPActionPopMpls(0x800),
        p3.OFPActionSetQueue(3), p3.OFPActionGroup(4), p3.OFPActionSetNwTtl(10), p3.OFPActionDecNwTtl(),
        p3.OFPActionSetField(ipv6_src="2001:db8::1"), p3.OFPActionPushPbb(0x88e7), p3.OFPActionPopPbb(),
        p3.OFPActionExperimenterUnknown(0x00abcdef, b"12345678"),
    ]


def fields13():
    """A match for each field of the specification: name in os-ken, value, mask."""
    return [
        ("in_port", 1), ("in_phy_port", 2), ("metadata", (3, 0xff)), ("eth_dst", (MAC, "ff:ff:ff:ff:ff:00")), ("eth_src", MAC),
        ("eth_type", 0x800), ("vlan_vid", (0x1000, 0x1000)), ("vlan_pcp", 5), ("ip_dscp", 46), ("ip_ecn", 1), ("ip_proto", 17),
        ("ipv4_src", ("10.1.0.0", "255.255.0.0")), ("ipv4_dst", "10.0.0.1"), ("tcp_src", 11), ("tcp_dst", 12), ("udp_src", 13),
        ("udp_dst", 14), ("sctp_src", 15), ("sctp_dst", 16), ("icmpv4_type", 8), ("icmpv4_code", 0), ("arp_op", 2),
        ("arp_spa", ("10.1.2.0", "255.255.255.0")), ("arp_tpa", "10.1.2.3"), ("arp_sha", MAC), ("arp_tha", (MAC, "ff:00:00:00:00:00")),
        ("ipv6_src", ("2001:db8::", "ffff:ffff::")), ("ipv6_dst", "2001:db8::1"), ("ipv6_flabel", (0x12345, 0xfffff)), ("icmpv6_type", 135),
        ("icmpv6_code", 0), ("ipv6_nd_target", "fe80::1"), ("ipv6_nd_sll", MAC), ("ipv6_nd_tll", MAC), ("mpls_label", 0xabcde),
        ("mpls_tc", 3), ("mpls_bos", 1), ("pbb_isid", (0x123400, 0xffff00)), ("tunnel_id", (1 << 40, 0xff << 40)), ("ipv6_exthdr", (5, 0x1ff)),
    ]


def os_ken_13():
    yield "hello", p3.OFPHello(D3)
    yield "error", p3.OFPErrorMsg(D3, c3.OFPET_BAD_MATCH, c3.OFPBMC_DUP_FIELD, b"request")
    yield "error_experimenter", p3.OFPErrorMsg(D3, c3.OFPET_EXPERIMENTER, exp_type=9, experimenter=0x00abcdef, data=b"why")
    yield "echo_request", p3.OFPEchoRequest(D3, b"ping")
    yield "echo_reply", p3.OFPEchoReply(D3, b"ping")
    yield "experimenter", p3.OFPExperimenter(D3, 0x00abcdef, 5, b"data")
    yield "features_request", p3.OFPFeaturesRequest(D3)
    yield "get_config_request", p3.OFPGetConfigRequest(D3)
    yield "set_config", p3.OFPSetConfig(D3, c3.OFPC_FRAG_REASM, 0xffff)
    yield "packet_out", p3.OFPPacketOut(D3, c3.OFP_NO_BUFFER, c3.OFPP_CONTROLLER, [p3.OFPActionOutput(2, 128)], b"packet")
    flow = dict(cookie=0x1122334455667788, cookie_mask=0xff, table_id=3, command=c3.OFPFC_MODIFY_STRICT, idle_timeout=10, hard_timeout=20,
                priority=100, buffer_id=0x55, out_port=c3.OFPP_ANY, out_group=c3.OFPG_ANY, flags=c3.OFPFF_SEND_FLOW_REM)
    instructions = [
        p3.OFPInstructionMeter(6), p3.OFPInstructionActions(c3.OFPIT_APPLY_ACTIONS, actions13()),
        p3.OFPInstructionActions(c3.OFPIT_CLEAR_ACTIONS, []), p3.OFPInstructionActions(c3.OFPIT_WRITE_ACTIONS, [p3.OFPActionGroup(9)]),
        p3.OFPInstructionWriteMetadata(0xa0, 0xf0), p3.OFPInstructionGotoTable(4),
    ]
    yield "flow_mod", p3.OFPFlowMod(D3, match=match13(), instructions=instructions, **flow)
    for name, value in fields13():
        match = p3.OFPMatch(**{name: value})
        yield f"field_{name}", p3.OFPFlowMod(D3, match=match, out_port=c3.OFPP_ANY, out_group=c3.OFPG_ANY)
    buckets = [p3.OFPBucket(5, 1, c3.OFPG_ANY, [p3.OFPActionOutput(1, 0xffff)]), p3.OFPBucket(6, c3.OFPP_ANY, 7, [])]
    yield "group_mod", p3.OFPGroupMod(D3, c3.OFPGC_MODIFY, c3.OFPGT_FF, 12, buckets)
    yield "port_mod", p3.OFPPortMod(D3, 3, MAC, c3.OFPPC_PORT_DOWN, c3.OFPPC_PORT_DOWN | c3.OFPPC_NO_FWD, c3.OFPPF_COPPER)
    yield "table_mod", p3.OFPTableMod(D3, 0xff, 3)
    bands = [p3.OFPMeterBandDrop(1000, 100), p3.OFPMeterBandDscpRemark(500, 50, 1), p3.OFPMeterBandExperimenter(7, 8, 0x00abcdef)]
    yield "meter_mod", p3.OFPMeterMod(D3, c3.OFPMC_ADD, c3.OFPMF_KBPS | c3.OFPMF_BURST, 6, bands)
    yield "desc_request", p3.OFPDescStatsRequest(D3)
    yield "flow_request", p3.OFPFlowStatsRequest(D3, 0, 1, 2, 3, 4, 5, match13())
    yield "aggregate_request", p3.OFPAggregateStatsRequest(D3, 0, 0xff, c3.OFPP_ANY, c3.OFPG_ANY, 0, 0, p3.OFPMatch())
    yield "table_request", p3.OFPTableStatsRequest(D3)
    yield "port_request", p3.OFPPortStatsRequest(D3, 0, 5)
    yield "queue_request", p3.OFPQueueStatsRequest(D3, 0, 5, 6)
    yield "group_request", p3.OFPGroupStatsRequest(D3, 0, 7)
    yield "group_desc_request", p3.OFPGroupDescStatsRequest(D3)
    yield "group_features_request", p3.OFPGroupFeaturesStatsRequest(D3)
    yield "meter_request", p3.OFPMeterStatsRequest(D3, 0, 8)
    yield "meter_config_request", p3.OFPMeterConfigStatsRequest(D3)
    yield "meter_features_request", p3.OFPMeterFeaturesStatsRequest(D3)
    oxm_ids = [p3.OFPOxmId("eth_dst", hasmask=True), p3.OFPOxmId("eth_type")]
    properties = [
        p3.OFPTableFeaturePropInstructions(c3.OFPTFPT_INSTRUCTIONS, instruction_ids=[p3.OFPInstructionId(1), p3.OFPInstructionId(4)]),
        p3.OFPTableFeaturePropNextTables(c3.OFPTFPT_NEXT_TABLES_MISS, table_ids=[1, 2, 3]),
        p3.OFPTableFeaturePropActions(c3.OFPTFPT_WRITE_ACTIONS, action_ids=[p3.OFPActionId(0), p3.OFPActionId(22)]),
        p3.OFPTableFeaturePropActions(c3.OFPTFPT_APPLY_ACTIONS_MISS, action_ids=[p3.OFPActionId(25)]),
        p3.OFPTableFeaturePropOxm(c3.OFPTFPT_MATCH, oxm_ids=oxm_ids),
        p3.OFPTableFeaturePropOxm(c3.OFPTFPT_WILDCARDS, oxm_ids=oxm_ids[:1]),
        p3.OFPTableFeaturePropOxm(c3.OFPTFPT_WRITE_SETFIELD_MISS, oxm_ids=oxm_ids[1:]),
        p3.OFPTableFeaturePropOxm(c3.OFPTFPT_APPLY_SETFIELD, oxm_ids=[]),
        p3.OFPTableFeaturePropExperimenter(c3.OFPTFPT_EXPERIMENTER, experimenter=0x00abcdef, exp_type=2, data=[0x31323334]),
    ]
    table = p3.OFPTableFeaturesStats(2, b"two", 0xff, 0xf0, 3, 1000, properties)
    yield "table_features_request", p3.OFPTableFeaturesStatsRequest(D3, c3.OFPMPF_REQ_MORE, [table])
    yield "port_desc_request", p3.OFPPortDescStatsRequest(D3)
    yield "experimenter_request", p3.OFPExperimenterStatsRequest(D3, 0, 0x00abcdef, 5, b"data")
    yield "barrier_request", p3.OFPBarrierRequest(D3)
    yield "queue_get_config_request", p3.OFPQueueGetConfigRequest(D3, c3.OFPP_ANY)
    yield "role_request", p3.OFPRoleRequest(D3, c3.OFPCR_ROLE_MASTER, 0x1122334455667788)
    yield "get_async_request", p3.OFPGetAsyncRequest(D3)
    yield "set_async", p3.OFPSetAsync(D3, [1, 2], [3, 4], [5, 6])


def match10():
    wildcards = c0.OFPFW_ALL & ~(c0.OFPFW_IN_PORT | c0.OFPFW_DL_TYPE | c0.OFPFW_NW_PROTO | c0.OFPFW_TP_DST | c0.OFPFW_NW_SRC_MASK | c0.OFPFW_DL_VLAN)
    return p0.OFPMatch(wildcards=wildcards | 24 << c0.OFPFW_NW_SRC_SHIFT, in_port=7, dl_vlan=5, dl_type=0x800, nw_proto=6, nw_src="10.0.0.0",
                       tp_dst=80)


def os_ken_10():
    yield "hello", p0.OFPHello(D0)
    yield "error", p0.OFPErrorMsg(D0, c0.OFPET_FLOW_MOD_FAILED, c0.OFPFMFC_ALL_TABLES_FULL, b"request")
    yield "echo_request", p0.OFPEchoRequest(D0, b"ping")
    yield "echo_reply", p0.OFPEchoReply(D0, b"ping")
    yield "features_request", p0.OFPFeaturesRequest(D0)
    yield "get_config_request", p0.OFPGetConfigRequest(D0)
    yield "set_config", p0.OFPSetConfig(D0, c0.OFPC_FRAG_DROP, 128)
    actions = [
        p0.OFPActionOutput(2, 128), p0.OFPActionVlanVid(5), p0.OFPActionVlanPcp(3), p0.OFPActionStripVlan(), p0.OFPActionSetDlSrc(MAC),
        p0.OFPActionSetDlDst(MAC), p0.OFPActionSetNwSrc("10.0.0.1"), p0.OFPActionSetNwDst("10.0.0.2"), p0.OFPActionSetNwTos(46 << 2),
        p0.OFPActionSetTpSrc(1), p0.OFPActionSetTpDst(2), p0.OFPActionEnqueue(3, 4), p0.OFPActionVendorUnknown(0x00abcdef, b"12345678"),
    ]
    yield "packet_out", p0.OFPPacketOut(D0, 0xffffffff, c0.OFPP_NONE, actions, b"packet")
    yield "flow_mod", p0.OFPFlowMod(D0, match10(), 0x1122334455667788, c0.OFPFC_DELETE, 10, 20, 100, 0x55, c0.OFPP_LOCAL, c0.OFPFF_EMERG,
                                    actions[:1])
    arp = p0.OFPMatch(dl_src=MAC, dl_dst=MAC, dl_vlan=0xffff, dl_vlan_pcp=0, dl_type=0x806, nw_proto=1, nw_src="10.0.0.1", nw_dst="10.0.0.2")
    yield "field_arp", p0.OFPFlowMod(D0, arp)
    yield "field_icmp", p0.OFPFlowMod(D0, p0.OFPMatch(dl_type=0x800, nw_tos=46 << 2, nw_proto=1, tp_src=8, tp_dst=0))
    yield "field_udp", p0.OFPFlowMod(D0, p0.OFPMatch(dl_type=0x800, nw_proto=17, tp_src=53))
    yield "field_no_protocol", p0.OFPFlowMod(D0, p0.OFPMatch(tp_src=53, dl_vlan_pcp=6))
    yield "port_mod", p0.OFPPortMod(D0, 3, MAC, c0.OFPPC_NO_FLOOD, c0.OFPPC_NO_FLOOD | c0.OFPPC_PORT_DOWN, c0.OFPPF_COPPER)
    yield "desc_request", p0.OFPDescStatsRequest(D0, 0)
    yield "flow_request", p0.OFPFlowStatsRequest(D0, 0, match10(), 0xff, c0.OFPP_NONE)
    yield "aggregate_request", p0.OFPAggregateStatsRequest(D0, 0, p0.OFPMatch(), 0xfe, 5)
    yield "table_request", p0.OFPTableStatsRequest(D0, 0)
    yield "port_request", p0.OFPPortStatsRequest(D0, 0, c0.OFPP_NONE)
    yield "queue_request", p0.OFPQueueStatsRequest(D0, 0, c0.OFPP_ALL, 6)
    yield "barrier_request", p0.OFPBarrierRequest(D0)
    yield "queue_get_config_request", p0.OFPQueueGetConfigRequest(D0, 5)


# Numbers of messages in OpenFlow 1.0.1 section 5.1.
VENDOR, FEATURES_REPLY, GET_CONFIG_REPLY, PACKET_IN, FLOW_REMOVED, PORT_STATUS = 4, 6, 8, 10, 11, 12
STATS_REQUEST, STATS_REPLY, BARRIER_REPLY, QUEUE_GET_CONFIG_REPLY = 16, 17, 19, 21


def manual_10():
    mac = bytes.fromhex(MAC.replace(":", ""))
    port = struct.pack("!H6s16sIIIIII", 0xfffe, mac, b"br0", 1 << 4, 1 << 0 | 2 << 8, 1 << 7 | 1 << 5, 1 << 9, 1 << 10, 1 << 11)
    match = struct.pack("!IH6s6sHBxHBB2xIIHH", 0x3820ff & ~(1 | 1 << 4), 7, bytes(6), bytes(6), 0, 0, 0x800, 0, 0, 0, 0, 0, 0)
    yield "vendor", VENDOR, struct.pack("!I", 0x00abcdef) + b"data"
    yield "features_reply", FEATURES_REPLY, struct.pack("!QIB3xII", 0x1122334455667788, 256, 2, 0b1000_0111, 0xfff) + port
    yield "get_config_reply", GET_CONFIG_REPLY, struct.pack("!HH", 0, 128)
    yield "packet_in", PACKET_IN, struct.pack("!IHHBx", 0x55, 100, 7, 1) + b"packet"
    yield "flow_removed", FLOW_REMOVED, match + struct.pack("!QHBxIIH2xQQ", 9, 100, 2, 5, 600, 10, 1000, 2000)
    yield "port_status", PORT_STATUS, struct.pack("!B7x", 2) + port
    yield "vendor_request", STATS_REQUEST, struct.pack("!HHI", 0xffff, 0, 0x00abcdef) + b"data"
    yield "desc_reply", STATS_REPLY, struct.pack("!HH256s256s256s32s256s", 0, 0, b"maker", b"box", b"1.2", b"7", b"attic")
    entry = struct.pack("!BxIIHHH6xQQQ", 1, 5, 600, 100, 10, 20, 9, 1000, 2000)
    output = struct.pack("!HHHH", 0, 8, 2, 0)
    entry = struct.pack("!H", 2 + len(entry) + len(match) + len(output)) + entry[:2] + match + entry[2:] + output
    yield "flow_reply", STATS_REPLY, struct.pack("!HH", 1, 1) + entry + entry
    yield "aggregate_reply", STATS_REPLY, struct.pack("!HHQQI4x", 2, 0, 1000, 2000, 3)
    yield "table_reply", STATS_REPLY, struct.pack("!HHB3x32sIIIQQ", 3, 0, 1, b"classifier", 0x3fffff, 1000, 3, 400, 300)
    yield "port_reply", STATS_REPLY, struct.pack("!HHH6x12Q", 4, 0, 7, *range(1, 12), 0xffffffffffffffff)
    yield "queue_reply", STATS_REPLY, struct.pack("!HHH2xIQQQ", 5, 0, 7, 6, 1000, 10, 1)
    yield "vendor_reply", STATS_REPLY, struct.pack("!HHI", 0xffff, 0, 0x00abcdef) + b"data"
    yield "barrier_reply", BARRIER_REPLY, b""
    queues = struct.pack("!IH2xHH4xH6x", 1, 24, 1, 16, 500) + struct.pack("!IH2xHH4x", 2, 16, 0, 8)
    yield "queue_get_config_reply", QUEUE_GET_CONFIG_REPLY, struct.pack("!H6x", 7) + queues


def encoded(message):
    message.set_xid(XID)
    message.serialize()
    return bytes(message.buf)


def vectors():
    yield from captured()
    for name, message in os_ken_13():
        yield f"os-ken/of13/{name}", encoded(message)
    for name, message in os_ken_10():
        yield f"os-ken/of10/{name}", encoded(message)
    for name, kind, body in manual_10():
        yield f"manual/of10/{name}", struct.pack("!BBHI", 1, kind, 8 + len(body), XID) + body


def main():
    for name, data in vectors():
        version, kind, length, xid = ofproto_parser.header(data)
        # os-ken does not decode what only controllers send, and does not know the vendor.
        if name.startswith("manual/") and "vendor" not in name:
            ofproto_parser.msg(D0, version, kind, length, xid, data)
        print(f"{name}: {data.hex()}")


main()
