//! What a client and the controller say to each other: one JSON object a line, over a connection in which both have proven their keys.
//!
//! The key says which host the client is, so no report names it. Unknown lines of the controller are ignored, and unknown reports refused, so both may be of
//! different versions.

use std::collections::BTreeMap;

use braid_model::{Mac, PerDirection, Rate};
use serde::{Deserialize, Serialize};

use crate::hosts::Client;
use crate::ids::{AccessId, Channel, Signal};
use crate::mobility::{Notice, Report};

/// Application protocol of the connection (ALPN).
pub const ALPN: &[u8] = b"braid-net/1";
/// Longest line in bytes, with its end.
pub const MAX_LINE: usize = 16 << 10;
/// Most signals of a report.
const MAX_SIGNALS: usize = 64;
/// Most loads of a message: their line is shorter than [`MAX_LINE`].
const MAX_LOADS: usize = 512;

/// Most access points of a client.
const MAX_FREE: usize = 64;
/// Most characters of the reason why something is not reserved.
const MAX_REASON: usize = 1024;

/// What the controller says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The first line: the host that the client's key belongs to.
    Welcome(Mac),
    /// A notice of its mobility manager.
    Notice(Notice),
    /// A report was refused.
    Refused(String),
    /// How busy access points are, in percent of their capacity.
    Loads(Vec<(AccessId, u16)>),
    /// What the access points of this client can carry towards it and away from it besides the traffic that they carry now, its own included, and besides what
    /// others have reserved.
    Free(Vec<(AccessId, PerDirection<Rate>)>),
    /// What is reserved for this client towards it and away from it at its access points, and why it is not what the client asked for.
    Reserved {
        /// What is reserved.
        kept: Vec<(AccessId, PerDirection<Rate>)>,
        /// Why it is not more.
        reason: Option<String>,
    },
}

/// Why a line was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// It is no JSON, or not one of this protocol.
    #[error("the line is none of the protocol braid-net/1: {0}")]
    Unknown(String),
    /// An address in it is none.
    #[error("{0:?} is no Ethernet address such as 02:00:00:00:00:01")]
    Address(String),
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
enum ReportLine {
    Hello {
        radios: u8,
        removes_duplicates: bool,
    },
    Entering {
        access: String,
    },
    Associated {
        access: String,
    },
    Dissociated {
        access: String,
    },
    Signals {
        dbm: BTreeMap<String, i16>,
    },
    WantsMove {
        access: Option<String>,
    },
    /// Towards the client and away from it, in bits per second.
    Reserve {
        bps: [u64; 2],
    },
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
enum MessageLine {
    Welcome {
        host: String,
    },
    GoTo {
        access: String,
        channel: u16,
    },
    Begins {
        access: String,
    },
    Ends {
        access: String,
    },
    Refused {
        reason: String,
    },
    Loads {
        percent: BTreeMap<String, u16>,
    },
    /// Towards the client and away from it, in bits per second.
    Free {
        bps: BTreeMap<String, [u64; 2]>,
    },
    /// The same.
    Reserved {
        bps: BTreeMap<String, [u64; 2]>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    #[serde(other)]
    Other,
}

fn mac(text: &str) -> Result<Mac, LineError> {
    text.parse().map_err(|_| LineError::Address(text.chars().take(32).collect()))
}

fn access(text: &str) -> Result<AccessId, LineError> {
    mac(text).map(AccessId)
}

fn directions([down, up]: [u64; 2]) -> PerDirection<Rate> {
    PerDirection { down: Rate::from_bps(down), up: Rate::from_bps(up) }
}

fn of_accesses(rates: &[(AccessId, PerDirection<Rate>)]) -> BTreeMap<String, [u64; 2]> {
    rates.iter().take(MAX_FREE).map(|(id, rates)| (id.to_string(), rates.map(Rate::bps).to_array())).collect()
}

fn to_accesses(bps: &BTreeMap<String, [u64; 2]>) -> Result<Vec<(AccessId, PerDirection<Rate>)>, LineError> {
    bps.iter().map(|(id, bps)| Ok((access(id)?, directions(*bps)))).collect()
}

fn line(value: &impl Serialize) -> String {
    // Maps with text as keys always serialize.
    serde_json::to_string(value).map(|text| text + "\n").unwrap_or_default()
}

fn unknown(error: &serde_json::Error) -> LineError {
    LineError::Unknown(error.to_string())
}

/// The line of a report, with its end.
pub fn encode_report(report: &Report) -> String {
    line(&match report {
        Report::Hello(Client { radios, removes_duplicates }) => {
            ReportLine::Hello { radios: *radios, removes_duplicates: *removes_duplicates }
        }
        Report::Entering(id) => ReportLine::Entering { access: id.to_string() },
        Report::Associated(id) => ReportLine::Associated { access: id.to_string() },
        Report::Dissociated(id) => ReportLine::Dissociated { access: id.to_string() },
        Report::Signals(signals) => {
            ReportLine::Signals { dbm: signals.iter().take(MAX_SIGNALS).map(|(id, signal)| (id.to_string(), signal.0)).collect() }
        }
        Report::WantsMove(to) => ReportLine::WantsMove { access: to.map(|id| id.to_string()) },
        Report::Reserve(rates) => ReportLine::Reserve { bps: rates.map(Rate::bps).to_array() },
    })
}

/// The report of a line.
///
/// # Errors
/// It is no report.
pub fn decode_report(text: &str) -> Result<Report, LineError> {
    Ok(match serde_json::from_str(text).map_err(|error| unknown(&error))? {
        ReportLine::Hello { radios, removes_duplicates } => Report::Hello(Client { radios, removes_duplicates }),
        ReportLine::Entering { access: id } => Report::Entering(access(&id)?),
        ReportLine::Associated { access: id } => Report::Associated(access(&id)?),
        ReportLine::Dissociated { access: id } => Report::Dissociated(access(&id)?),
        ReportLine::Signals { dbm } => {
            let signals = dbm.iter().take(MAX_SIGNALS).map(|(id, dbm)| Ok((access(id)?, Signal(*dbm))));
            Report::Signals(signals.collect::<Result<_, _>>()?)
        }
        ReportLine::WantsMove { access: id } => Report::WantsMove(id.as_deref().map(access).transpose()?),
        ReportLine::Reserve { bps } => Report::Reserve(directions(bps)),
    })
}

/// The line of a message, with its end.
pub fn encode_message(message: &Message) -> String {
    line(&match message {
        Message::Welcome(host) => MessageLine::Welcome { host: host.to_string() },
        Message::Notice(Notice::GoTo { access, channel }) => MessageLine::GoTo { access: access.to_string(), channel: channel.0 },
        Message::Notice(Notice::Begins { to }) => MessageLine::Begins { access: to.to_string() },
        Message::Notice(Notice::Ends { leave }) => MessageLine::Ends { access: leave.to_string() },
        Message::Refused(reason) => MessageLine::Refused { reason: reason.clone() },
        Message::Loads(loads) => {
            MessageLine::Loads { percent: loads.iter().take(MAX_LOADS).map(|(id, used)| (id.to_string(), *used)).collect() }
        }
        Message::Free(free) => MessageLine::Free { bps: of_accesses(free) },
        Message::Reserved { kept, reason } => {
            let reason = reason.as_ref().map(|reason| reason.chars().take(MAX_REASON).collect());
            MessageLine::Reserved { bps: of_accesses(kept), reason }
        }
    })
}

/// The message of a line; `None`: one of a later version.
///
/// # Errors
/// It is no message.
pub fn decode_message(text: &str) -> Result<Option<Message>, LineError> {
    Ok(Some(match serde_json::from_str(text).map_err(|error| unknown(&error))? {
        MessageLine::Welcome { host } => Message::Welcome(mac(&host)?),
        MessageLine::GoTo { access: id, channel } => Message::Notice(Notice::GoTo { access: access(&id)?, channel: Channel(channel) }),
        MessageLine::Begins { access: id } => Message::Notice(Notice::Begins { to: access(&id)? }),
        MessageLine::Ends { access: id } => Message::Notice(Notice::Ends { leave: access(&id)? }),
        MessageLine::Refused { reason } => Message::Refused(reason),
        MessageLine::Loads { percent } => {
            let loads = percent.iter().map(|(id, used)| Ok((access(id)?, *used)));
            Message::Loads(loads.collect::<Result<_, _>>()?)
        }
        MessageLine::Free { bps } => Message::Free(to_accesses(&bps)?),
        MessageLine::Reserved { bps, reason } => Message::Reserved { kept: to_accesses(&bps)?, reason },
        MessageLine::Other => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_access() -> impl Strategy<Value = AccessId> {
        any::<[u8; 6]>().prop_map(|bytes| AccessId(Mac(bytes)))
    }

    fn any_report() -> impl Strategy<Value = Report> {
        prop_oneof![
            (any::<u8>(), any::<bool>()).prop_map(|(radios, removes_duplicates)| Report::Hello(Client { radios, removes_duplicates })),
            any_access().prop_map(Report::Entering),
            any_access().prop_map(Report::Associated),
            any_access().prop_map(Report::Dissociated),
            proptest::collection::btree_map(any_access(), any::<i16>().prop_map(Signal), 0..MAX_SIGNALS)
                .prop_map(|signals| Report::Signals(signals.into_iter().collect())),
            proptest::option::of(any_access()).prop_map(Report::WantsMove),
            any::<[u64; 2]>().prop_map(|bps| Report::Reserve(directions(bps))),
        ]
    }

    fn any_message() -> impl Strategy<Value = Message> {
        prop_oneof![
            any::<[u8; 6]>().prop_map(|bytes| Message::Welcome(Mac(bytes))),
            (any_access(), any::<u16>()).prop_map(|(access, channel)| Message::Notice(Notice::GoTo { access, channel: Channel(channel) })),
            any_access().prop_map(|to| Message::Notice(Notice::Begins { to })),
            any_access().prop_map(|leave| Message::Notice(Notice::Ends { leave })),
            any::<String>().prop_map(Message::Refused),
            proptest::collection::btree_map(any_access(), any::<u16>(), 0..9).prop_map(|loads| Message::Loads(loads.into_iter().collect())),
            proptest::collection::btree_map(any_access(), any::<[u64; 2]>(), 0..9)
                .prop_map(|free| { Message::Free(free.into_iter().map(|(id, free)| (id, directions(free))).collect()) }),
            (proptest::collection::btree_map(any_access(), any::<[u64; 2]>(), 0..9), any::<Option<String>>()).prop_map(|(kept, reason)| {
                Message::Reserved { kept: kept.into_iter().map(|(id, kept)| (id, directions(kept))).collect(), reason }
            }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(report in any_report(), message in any_message()) {
            let (one, other) = (encode_report(&report), encode_message(&message));
            prop_assert!(one.ends_with('\n') && other.ends_with('\n'));
            prop_assert_eq!(one.matches('\n').count() + other.matches('\n').count(), 2);
            prop_assert!(one.len() <= MAX_LINE);
            prop_assert_eq!(decode_report(&one).unwrap(), report);
            prop_assert_eq!(decode_message(&other).unwrap(), Some(message));
        }

        #[test]
        fn no_line_makes_it_panic(text in ".*", cut in 0usize..200, report in any_report()) {
            let _ = (decode_report(&text), decode_message(&text));
            let line = encode_report(&report);
            let _ = decode_report(line.get(..cut.min(line.len())).unwrap_or_default());
        }
    }

    #[test]
    fn a_refusal_says_what_is_wrong() {
        let error = |text: &str| decode_report(text).unwrap_err().to_string();
        assert!(error("{}").contains("the line is none of the protocol braid-net/1: missing field `report`"), "{}", error("{}"));
        assert!(error(r#"{"report":"fly"}"#).contains("unknown variant `fly`"));
        assert_eq!(error(r#"{"report":"entering","access":"x"}"#), "\"x\" is no Ethernet address such as 02:00:00:00:00:01");
        for rate in ["-1", "1e30", "18446744073709551616", "1.5", "\"1\"", "null"] {
            assert!(error(&format!(r#"{{"report":"reserve","bps":[{rate},0]}}"#)).contains("invalid"), "{rate}");
        }
        assert_eq!(decode_message(r#"{"say":"sing"}"#), Ok(None));
    }
}
