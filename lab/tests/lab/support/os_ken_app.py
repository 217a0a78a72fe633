"""A controller on os-ken: a learning switch such as simple_switch_13 of Ryu, and an entry that leads TCP to ADDRESS over DEVICE: os_ken_app.py DEVICE ADDRESS."""

import logging
import sys

from os_ken import cfg
from os_ken.base import app_manager
from os_ken.base.app_manager import AppManager
from os_ken.controller import controller, ofp_event, ofp_handler  # noqa: F401 (their options)
from os_ken.controller.handler import CONFIG_DISPATCHER, MAIN_DISPATCHER, set_ev_cls
from os_ken.lib.packet import ethernet, packet
from os_ken.ofproto import ofproto_v1_3

DEVICE, ADDRESS = sys.argv[1:3]


class Switch(app_manager.OSKenApp):
    OFP_VERSIONS = [ofproto_v1_3.OFP_VERSION]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ports = {}

    def add(self, datapath, priority, match, port):
        proto, parser = datapath.ofproto, datapath.ofproto_parser
        actions = [parser.OFPActionOutput(port, proto.OFPCML_NO_BUFFER)]
        instructions = [parser.OFPInstructionActions(proto.OFPIT_APPLY_ACTIONS, actions)]
        datapath.send_msg(parser.OFPFlowMod(datapath=datapath, priority=priority, match=match, instructions=instructions))

    @set_ev_cls(ofp_event.EventOFPSwitchFeatures, CONFIG_DISPATCHER)
    def features(self, event):
        datapath = event.msg.datapath
        self.add(datapath, 0, datapath.ofproto_parser.OFPMatch(), datapath.ofproto.OFPP_CONTROLLER)
        datapath.send_msg(datapath.ofproto_parser.OFPPortDescStatsRequest(datapath, 0))

    @set_ev_cls(ofp_event.EventOFPPortDescStatsReply, MAIN_DISPATCHER)
    def lead(self, event):
        datapath = event.msg.datapath
        number = next(port.port_no for port in event.msg.body if port.name.decode() == DEVICE)
        match = datapath.ofproto_parser.OFPMatch(eth_type=0x0800, ip_proto=6, ipv4_dst=ADDRESS)
        self.add(datapath, 100, match, number)
        datapath.send_msg(datapath.ofproto_parser.OFPBarrierRequest(datapath))

    @set_ev_cls(ofp_event.EventOFPBarrierReply, MAIN_DISPATCHER)
    def leads(self, event):
        print(f"leads {event.msg.datapath.id:x}", flush=True)

    @set_ev_cls(ofp_event.EventOFPErrorMsg, MAIN_DISPATCHER)
    def refused(self, event):
        print(f"refused {event.msg.type} {event.msg.code}", flush=True)

    @set_ev_cls(ofp_event.EventOFPPacketIn, MAIN_DISPATCHER)
    def learn(self, event):
        message, datapath = event.msg, event.msg.datapath
        proto, parser = datapath.ofproto, datapath.ofproto_parser
        frame = packet.Packet(message.data).get_protocols(ethernet.ethernet)[0]
        self.ports[frame.src] = message.match["in_port"]
        port = self.ports.get(frame.dst, proto.OFPP_FLOOD)
        out = parser.OFPPacketOut(
            datapath=datapath,
            buffer_id=message.buffer_id,
            in_port=message.match["in_port"],
            actions=[parser.OFPActionOutput(port)],
            data=message.data,
        )
        datapath.send_msg(out)
        print("shown", flush=True)


logging.basicConfig(level=logging.WARNING)
cfg.CONF(args=["--ofp-listen-host", "127.0.0.1", "--ofp-tcp-listen-port", "6653"], project="os_ken")
AppManager.run_apps(["__main__"])
