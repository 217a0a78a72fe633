//! What programs and the controller say to each other: one JSON object a line, over TCP or TLS.
//!
//! The first line is the controller's: [`Say::Welcome`], with the host for which the program's requests count. Each request has a number, which its answer repeats. Unknown
//! fields are ignored on both sides, and unknown lines of the controller by programs, so both may be of different versions.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::discovery::VERSION;

/// Application protocol of connections with TLS (ALPN).
pub const ALPN: &[u8] = b"braid-sfnet/1";
/// Longest line of a program in bytes, with its end.
pub const MAX_LINE: usize = crate::wire::MAX_LINE;
/// Longest line of the controller in bytes, with its end: the state of a large network.
pub const MAX_ANSWER: usize = 1 << 20;
/// Most characters of a reason.
const MAX_REASON: usize = 1024;

/// What a program asks for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case")]
pub enum Ask {
    /// The state of the network that it may see.
    State {
        /// Number of the request.
        id: u64,
        /// A host, by its IP or Ethernet address: the answer has the path to it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<String>,
    },
    /// A service.
    Start {
        /// Number of the request.
        id: u64,
        /// Name of the service.
        service: String,
        /// What the service needs.
        #[serde(default)]
        with: Value,
        /// Seconds for which the service stays after the connection has ended.
        #[serde(default)]
        keep: u32,
        /// The host for which it is meant, by its IP or Ethernet address. Others than the program's own are refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<String>,
    },
    /// Ends a service of this connection.
    End {
        /// Number of the request.
        id: u64,
        /// The lease.
        lease: u64,
    },
}

/// What the controller says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum Say {
    /// The first line.
    Welcome {
        /// Version of the protocol.
        version: u32,
        /// Ethernet address of the host for which requests count.
        host: String,
        /// Names of the services that this host may ask for.
        services: Vec<String>,
    },
    /// The state of the network.
    State {
        /// Number of the request.
        id: u64,
        /// The state.
        state: Value,
    },
    /// A service has begun: the switches do what it needs.
    Started {
        /// Number of the request.
        id: u64,
        /// Number of the lease.
        lease: u64,
        /// What the service says.
        result: Value,
    },
    /// A request was refused, or a line not understood.
    Refused {
        /// Number of the request, if it could be read.
        id: Option<u64>,
        /// Why, and what to do.
        reason: String,
    },
    /// A service has ended: the program asked for it (then with the number of the request), or the controller ended it.
    Ended {
        /// Number of the request.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<u64>,
        /// The lease.
        lease: u64,
        /// Why.
        reason: String,
    },
    /// A service reports something.
    Event {
        /// The lease.
        lease: u64,
        /// What.
        event: Value,
    },
    /// The controller closes the connection.
    Bye {
        /// Why, and what to do.
        reason: String,
    },
    /// A line of a later version.
    #[serde(other)]
    Other,
}

impl Say {
    /// Its line, with its end. An answer that is longer than [`MAX_ANSWER`] becomes a refusal.
    pub fn line(&self) -> String {
        let line = line(self);
        if line.len() <= MAX_ANSWER {
            return line;
        }
        let id = match self {
            Self::State { id, .. } | Self::Started { id, .. } => Some(*id),
            _ => None,
        };
        self::line(&Self::Refused { id, reason: format!("the answer is longer than {MAX_ANSWER} bytes: ask for less") })
    }

    /// A refusal, whose reason is cut if it is too long.
    pub(crate) fn refused(id: Option<u64>, reason: &str) -> Self {
        Self::Refused { id, reason: short(reason) }
    }
}

impl Ask {
    /// Number of the request.
    pub fn id(&self) -> u64 {
        match self {
            Self::State { id, .. } | Self::Start { id, .. } | Self::End { id, .. } => *id,
        }
    }

    /// Its line, with its end.
    pub fn line(&self) -> String {
        line(self)
    }

    /// Reads a line.
    ///
    /// # Errors
    /// It is none of this protocol: the number, if that can be read, and a text.
    pub fn read(text: &str) -> Result<Self, (Option<u64>, String)> {
        #[derive(Deserialize)]
        struct Numbered {
            id: u64,
        }
        serde_json::from_str(text).map_err(|error| {
            let id = serde_json::from_str::<Numbered>(text).ok().map(|numbered| numbered.id);
            let remedy = "send one object a line, such as {\"ask\":\"state\",\"id\":1}";
            (id, short(&format!("the line is none of the protocol braid-sfnet/{VERSION}: {error}; {remedy}")))
        })
    }
}

fn line(value: &impl Serialize) -> String {
    // Maps with text as keys always serialize.
    serde_json::to_string(value).map(|text| text + "\n").unwrap_or_default()
}

/// A text of bounded length, without line ends of others.
fn short(text: &str) -> String {
    text.chars().take(MAX_REASON).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_are_those_of_the_handbook() {
        let start = Ask::read(r#"{"ask":"start","id":2,"service":"multicast","with":{"group":"239.192.1.2"},"keep":30}"#).unwrap();
        let expected = Ask::Start { id: 2, service: "multicast".into(), with: json!({"group": "239.192.1.2"}), keep: 30, host: None };
        assert_eq!(start, expected);
        assert_eq!(Ask::read(r#"{"ask":"state","id":1,"later":[]}"#).unwrap(), Ask::State { id: 1, to: None });
        let line = Say::Ended { id: None, lease: 3, reason: "x".into() }.line();
        assert_eq!(line, "{\"say\":\"ended\",\"lease\":3,\"reason\":\"x\"}\n");
        assert_eq!(serde_json::from_str::<Say>(r#"{"say":"sing","song":1}"#).unwrap(), Say::Other);
    }

    #[test]
    fn what_is_malformed_is_named_with_its_number() {
        let (id, reason) = Ask::read(r#"{"ask":"fly","id":7}"#).unwrap_err();
        assert!(id == Some(7) && reason.contains("unknown variant `fly`") && reason.contains("one object a line"), "{reason}");
        assert_eq!(Ask::read("[").unwrap_err().0, None);
        assert!(Ask::read(&format!("{}1{}", "[".repeat(8000), "]".repeat(8000))).is_err(), "nesting is bounded");
        let long = format!("{{\"ask\":\"{}\"}}", "x".repeat(9000));
        assert!(Ask::read(&long).unwrap_err().1.len() <= 4 * MAX_REASON);
    }

    #[test]
    fn an_answer_that_is_too_long_becomes_a_refusal() {
        let line = Say::State { id: 4, state: json!("x".repeat(MAX_ANSWER)) }.line();
        assert!(line.len() < 200 && line.contains("\"id\":4") && line.contains("refused"), "{line}");
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(text in ".*") {
            let _ = Ask::read(&text);
            if let Ok(ask) = Ask::read(&text) {
                prop_assert_eq!(Ask::read(&ask.line()), Ok(ask));
            }
        }
    }
}
