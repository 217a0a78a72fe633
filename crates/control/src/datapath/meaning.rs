//! What a flow entry means for this device: conditions on flows, and what becomes of them; or the error that its flow-mod is answered with.

use std::net::IpAddr;

use braid_decide::policy::AppMatcher;
use braid_model::{Family, Protocol};
use braid_openflow::ErrorCode;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::ids::PortNo;
use braid_openflow::matching::Match;
use braid_openflow::oxm::{Field, Oxm};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The fields that entries may match. They are about packets that leave this device; flows include the answers.
pub(super) const FIELDS: [Field; 7] =
    [Field::InPort, Field::EthType, Field::IpProto, Field::Ipv4Dst, Field::TcpDst, Field::UdpDst, Field::Ipv6Dst];

/// Conditions on flows; all that are set must hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Conditions {
    family: Option<Family>,
    destination: Option<IpNet>,
    protocol: Option<Protocol>,
    port: Option<u16>,
}

impl Conditions {
    pub(super) fn of(matching: &Match) -> Result<Self, ErrorCode> {
        matching.check()?;
        let mut conditions = Self::default();
        for oxm in &matching.canonical().fields {
            let Oxm::Basic { field, value, mask } = oxm else { return Err(ErrorCode::BadMatchBadField) };
            match field {
                // Everything enters by this port: programs of this machine, and clients behind it.
                Field::InPort if *value == u128::from(PortNo::LOCAL.0) => {}
                Field::InPort => return Err(ErrorCode::BadMatchBadValue),
                Field::EthType => conditions.family = Some(family(*value)?),
                Field::IpProto => conditions.protocol = Some(Protocol::from_number(*value as u8)),
                Field::Ipv4Dst => conditions.destination = Some(net(IpAddr::V4((*value as u32).into()), *mask, 32)?),
                Field::Ipv6Dst => conditions.destination = Some(net(IpAddr::V6((*value).into()), *mask, 128)?),
                Field::TcpDst | Field::UdpDst => conditions.port = Some(*value as u16),
                _ => return Err(ErrorCode::BadMatchBadField),
            }
        }
        Ok(conditions)
    }

    /// Conditions of rules that match the same flows together.
    pub(super) fn matchers(&self) -> Vec<AppMatcher> {
        let (all4, all6) = (Ipv4Net::default().into(), Ipv6Net::default().into());
        let nets: Vec<IpNet> = match (self.destination, self.family) {
            (Some(net), _) => vec![net],
            (None, Some(Family::V4)) => vec![all4],
            (None, Some(Family::V6)) => vec![all6],
            // A rule without conditions would match nothing.
            (None, None) => vec![all4, all6],
        };
        let matcher = |net| AppMatcher { destination: Some(net), protocol: self.protocol, port: self.port, ..AppMatcher::default() };
        nets.into_iter().map(matcher).collect()
    }

    /// Whether a flow may meet both.
    pub(super) fn overlap(&self, other: &Self) -> bool {
        fn fits<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
            one.is_none() || other.is_none() || one == other
        }
        let nets = match (self.destination, other.destination) {
            (Some(one), Some(other)) => one.contains(&other) || other.contains(&one),
            _ => true,
        };
        nets && fits(self.family, other.family) && fits(self.protocol, other.protocol) && fits(self.port, other.port)
    }
}

fn family(ethertype: u128) -> Result<Family, ErrorCode> {
    match ethertype {
        0x0800 => Ok(Family::V4),
        0x86dd => Ok(Family::V6),
        _ => Err(ErrorCode::BadMatchBadValue),
    }
}

fn net(address: IpAddr, mask: Option<u128>, bits: u32) -> Result<IpNet, ErrorCode> {
    let mask = mask.map_or(u128::MAX, |mask| mask << (128 - bits));
    let length = mask.leading_ones();
    let is_prefix = mask == u128::MAX || mask.count_ones() == length;
    let net = IpNet::new(address, length.min(bits) as u8).ok().filter(|_| is_prefix).ok_or(ErrorCode::BadMatchBadNwAddrMask)?.trunc();
    // The kernel's rules hold addresses of IPv4 in this form. No packet has them.
    let is_mapped = matches!(net, IpNet::V6(net) if net.prefix_len() >= 96 && net.addr().to_ipv4_mapped().is_some());
    if is_mapped { Err(ErrorCode::BadMatchBadValue) } else { Ok(net) }
}

/// What becomes of the flows of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// They use this link while it is usable, else those of the local policy.
    Link(PortNo),
    /// The local policy decides.
    Policy,
    /// The local policy decides, and the controller is told.
    Controller,
}

impl Target {
    /// What the instructions mean. `has`: whether there is a link with this number.
    pub(super) fn of(instructions: &[Instruction], has: impl Fn(PortNo) -> bool) -> Result<Self, ErrorCode> {
        let mut lists = instructions.iter().map(actions);
        let actions = lists.next().unwrap_or(Ok(&[]))?;
        // One action needs one instruction. More would be kept, and could be thousands.
        if let Some(other) = lists.next() {
            return Err(other.err().unwrap_or(ErrorCode::BadActionTooMany));
        }
        match actions {
            // Only the user lets flows fail.
            [] => Err(ErrorCode::FlowModFailedEperm),
            [Action::Output { port, .. }] => match *port {
                PortNo::NORMAL => Ok(Self::Policy),
                PortNo::CONTROLLER => Ok(Self::Controller),
                port if has(port) => Ok(Self::Link(port)),
                _ => Err(ErrorCode::BadActionBadOutPort),
            },
            [Action::Group(_), ..] => Err(ErrorCode::BadActionBadOutGroup),
            [Action::Output { .. }, ..] => Err(ErrorCode::BadActionTooMany),
            _ => Err(ErrorCode::BadActionBadType),
        }
    }

    /// The port to which an entry with this target sends packets.
    pub(super) fn port(self) -> PortNo {
        match self {
            Self::Link(port) => port,
            Self::Policy => PortNo::NORMAL,
            Self::Controller => PortNo::CONTROLLER,
        }
    }
}

fn actions(instruction: &Instruction) -> Result<&[Action], ErrorCode> {
    match instruction {
        Instruction::ApplyActions(actions) | Instruction::WriteActions(actions) => Ok(actions),
        Instruction::GotoTable(_) => Err(ErrorCode::BadInstructionBadTableId),
        Instruction::WriteMetadata { .. } => Err(ErrorCode::BadInstructionUnsupMetadata),
        Instruction::Experimenter { .. } => Err(ErrorCode::BadInstructionBadExperimenter),
        Instruction::ClearActions | Instruction::Meter(_) => Err(ErrorCode::BadInstructionUnsupInst),
    }
}

#[cfg(test)]
mod tests {
    use braid_openflow::ids::{MeterId, TableId};

    use super::*;

    fn ip() -> Oxm {
        Oxm::exact(Field::EthType, 0x0800u16)
    }

    fn proto(number: u8) -> Oxm {
        Oxm::exact(Field::IpProto, number)
    }

    #[test]
    fn matches_become_conditions_or_errors() {
        let ipv6 = || Oxm::exact(Field::EthType, 0x86ddu16);
        let to = |length| Oxm::ipv4(Field::Ipv4Dst, [192, 0, 2, 9].into(), length);
        let texts = |fields: Vec<Oxm>| -> Vec<String> {
            let conditions = Conditions::of(&Match { fields }).unwrap();
            let text = |matcher: AppMatcher| {
                let protocol = matcher.protocol.map(|protocol| format!(" {protocol}")).unwrap_or_default();
                format!("{}{protocol}{}", matcher.destination.unwrap(), matcher.port.map(|port| format!(" {port}")).unwrap_or_default())
            };
            conditions.matchers().into_iter().map(text).collect()
        };
        assert_eq!(texts(vec![]), ["0.0.0.0/0", "::/0"]);
        assert_eq!(texts(vec![Oxm::in_port(PortNo::LOCAL)]), ["0.0.0.0/0", "::/0"]);
        assert_eq!(texts(vec![ip(), proto(6), Oxm::exact(Field::TcpDst, 443u16)]), ["0.0.0.0/0 tcp 443"]);
        assert_eq!(texts(vec![ipv6(), proto(17), Oxm::exact(Field::UdpDst, 53u16)]), ["::/0 udp 53"]);
        assert_eq!(texts(vec![ip(), to(24)]), ["192.0.2.0/24"]);
        assert_eq!(texts(vec![ip(), to(32)]), ["192.0.2.9/32"]);
        let net6 = Oxm::ipv6(Field::Ipv6Dst, "2001:db8::1".parse().unwrap(), 32);
        assert_eq!(texts(vec![ipv6(), net6]), ["2001:db8::/32"]);
        for (fields, expected) in [
            (vec![Oxm::in_port(PortNo(3))], ErrorCode::BadMatchBadValue),
            (vec![Oxm::exact(Field::EthType, 0x0806u16)], ErrorCode::BadMatchBadValue),
            (vec![Oxm::exact(Field::EthDst, 1u8)], ErrorCode::BadMatchBadField),
            (vec![ip(), Oxm::ipv4(Field::Ipv4Src, [10, 0, 0, 1].into(), 32)], ErrorCode::BadMatchBadField),
            (vec![ip(), proto(6), Oxm::exact(Field::TcpSrc, 1u16)], ErrorCode::BadMatchBadField),
            (vec![ip(), Oxm::masked(Field::Ipv4Dst, 1u32, 0xff00_00ffu32)], ErrorCode::BadMatchBadNwAddrMask),
            (vec![ip(), Oxm::exact(Field::TcpDst, 443u16)], ErrorCode::BadMatchBadPrereq),
            (vec![ipv6(), Oxm::ipv6(Field::Ipv6Dst, "::ffff:192.0.2.9".parse().unwrap(), 128)], ErrorCode::BadMatchBadValue),
            (vec![Oxm::Other { class: 1, field: 1, masked: false, body: bytes::Bytes::new() }], ErrorCode::BadMatchBadField),
        ] {
            assert_eq!(Conditions::of(&Match { fields: fields.clone() }), Err(expected), "{fields:?}");
        }
    }

    #[test]
    fn entries_overlap_if_a_flow_may_meet_both() {
        let of = |fields: &[Oxm]| Conditions::of(&Match::new(fields.to_vec())).unwrap();
        let (tcp, udp) = (of(&[ip(), proto(6)]), of(&[ip(), proto(17)]));
        let net = |length| of(&[ip(), Oxm::ipv4(Field::Ipv4Dst, [10, 0, 0, 0].into(), length)]);
        let ipv6 = of(&[Oxm::exact(Field::EthType, 0x86ddu16)]);
        for (one, other, expected) in
            [(tcp, udp, false), (tcp, net(8), true), (net(8), net(24), true), (ipv6, tcp, false), (ipv6, of(&[]), true)]
        {
            assert_eq!((one.overlap(&other), other.overlap(&one)), (expected, expected), "{one:?} {other:?}");
        }
    }

    #[test]
    fn instructions_become_a_target_or_an_error() {
        let output = Action::output;
        let apply = |actions: &[Action]| vec![Instruction::ApplyActions(actions.to_vec())];
        let link = PortNo(2);
        for (instructions, expected) in [
            (apply(&[output(link)]), Ok(Target::Link(link))),
            (vec![Instruction::WriteActions(vec![output(link)])], Ok(Target::Link(link))),
            (apply(&[output(PortNo::NORMAL)]), Ok(Target::Policy)),
            (apply(&[output(PortNo::CONTROLLER)]), Ok(Target::Controller)),
            (vec![], Err(ErrorCode::FlowModFailedEperm)),
            (apply(&[]), Err(ErrorCode::FlowModFailedEperm)),
            (apply(&[output(PortNo(3))]), Err(ErrorCode::BadActionBadOutPort)),
            (apply(&[output(PortNo::FLOOD)]), Err(ErrorCode::BadActionBadOutPort)),
            (apply(&[output(link), output(PortNo::CONTROLLER)]), Err(ErrorCode::BadActionTooMany)),
            (apply(&[Action::DecNwTtl, output(link)]), Err(ErrorCode::BadActionBadType)),
            (vec![Instruction::ApplyActions(vec![]), Instruction::WriteActions(vec![output(link)])], Err(ErrorCode::BadActionTooMany)),
            (vec![Instruction::GotoTable(TableId(1))], Err(ErrorCode::BadInstructionBadTableId)),
            (vec![Instruction::Meter(MeterId(1))], Err(ErrorCode::BadInstructionUnsupInst)),
        ] {
            assert_eq!(Target::of(&instructions, |port| port == link), expected, "{instructions:?}");
        }
    }
}
