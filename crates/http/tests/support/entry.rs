//! Entry points for the corpus and the fuzzer.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

use std::path::Path;

use braid_api::{
    AdhocChange, AdhocUp, ConfigChange, ExplainRequest, FactChange, JoinRequest, LeaveRequest, MoveRequest, NetworkChange, RewriteRequest,
    RuleChange, SessionRequest, SliceChange, UiRequest,
};
use braid_config::settings::{self, Settings};
use braid_config::{ConfigErrors, Files, World};
use braid_control::adhoc::AdhocSettings;
use braid_peer::invite::Invite;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A machine that is the same everywhere, without file access.
fn world() -> World {
    World {
        strict: true,
        devices: vec!["wlan0".to_owned(), "lte0".to_owned()],
        users: [("ada".to_owned(), 1000)].into(),
        files: Files::These { programs: Vec::new(), profiles: Vec::new() },
        relays: Some(vec!["home".to_owned()]),
    }
}

/// Parses a configuration file: a rejection names a position, and parsing is deterministic.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lines = text.split('\n').count();
    let read = || braid_config::parse("braid.toml", text, &world());
    match read() {
        Ok(config) => assert_eq!(format!("{:?}", read().expect("taken before")), format!("{config:?}")),
        Err(errors @ ConfigErrors::Unreadable { .. }) => panic!("nothing was opened: {errors}"),
        Err(errors) => {
            let findings = errors.findings();
            assert!(!findings.is_empty() && !errors.to_string().is_empty());
            assert!(findings.iter().all(|finding| (1..=lines).contains(&finding.line) && !finding.reason.is_empty()), "{findings:?}");
        }
    }
}

/// The operations with a request body; a corpus file's first byte selects one by index.
pub const OPERATIONS: [&str; 15] = [
    "/v1/config",
    "/v1/config/preview",
    "/v1/explain",
    "/v1/join",
    "/v1/leave",
    "/v1/move",
    "/v1/session",
    "/v1/ui",
    "/v1/context",
    "/v1/rewrites",
    "/v1/rules",
    "/v1/adhoc",
    "/v1/adhoc/up",
    "/v1/network",
    "/v1/slices",
];

/// Parses a request body, whose first byte selects the operation. Returns whether it is valid. A valid body must survive serialization, and a
/// change of the configuration at `example` must leave a valid configuration.
pub fn body(bytes: &[u8], example: &Path) -> bool {
    let Some((operation, body)) = bytes.split_first() else { return false };
    match OPERATIONS[usize::from(operation.wrapping_sub(b'0')) % OPERATIONS.len()] {
        "/v1/config" | "/v1/config/preview" => said::<ConfigChange>(body).map(|change| preview(change, example)).is_some(),
        "/v1/explain" => said::<ExplainRequest>(body).is_some(),
        "/v1/join" => said::<JoinRequest>(body).map(|request| join(&request)).is_some(),
        "/v1/leave" => said::<LeaveRequest>(body).is_some(),
        "/v1/move" => said::<MoveRequest>(body).is_some(),
        "/v1/session" => said::<SessionRequest>(body).is_some(),
        "/v1/ui" => said::<UiRequest>(body).is_some(),
        "/v1/context" => said::<FactChange>(body).is_some(),
        "/v1/rewrites" => said::<RewriteRequest>(body).is_some(),
        "/v1/rules" => said::<RuleChange>(body).map(|change| rule(&change)).is_some(),
        "/v1/adhoc" => said::<AdhocChange>(body).map(|change| AdhocSettings::default().changed(&change)).is_some(),
        "/v1/adhoc/up" => said::<AdhocUp>(body).map(|up| AdhocSettings::of(&up)).is_some(),
        "/v1/network" => said::<NetworkChange>(body).is_some(),
        "/v1/slices" => said::<SliceChange>(body).is_some(),
        other => panic!("no parser for {other}"),
    }
}

fn said<T: Serialize + DeserializeOwned>(body: &[u8]) -> Option<T> {
    let request: T = serde_json::from_slice(body).ok()?;
    let again = serde_json::to_vec(&request).expect("a parsed body can be serialized");
    serde_json::from_slice::<T>(&again).expect("a serialized body can be parsed");
    Some(request)
}

fn preview(mut change: ConfigChange, example: &Path) {
    let settings = Settings::new(Some(example.to_owned()), example.to_owned());
    change.revision = settings.look().view().expect("the example can be read").revision;
    match settings.preview(&change, &world()) {
        Ok(changed) => {
            let lenient = World { strict: false, ..world() };
            braid_config::parse("braid.toml", &changed.text, &lenient).expect("a change leaves a valid configuration");
        }
        Err(error) => assert!(error.cause != braid_control::Cause::Failed, "{error:?}"),
    }
}

/// A rule is accepted or refused with a reason, always in the same way.
fn rule(change: &RuleChange) {
    let Some(rule) = &change.rule else { return };
    let read = || settings::program_rule(rule, &world());
    match read() {
        Ok(rule) => assert!(!rule.0.matcher.is_empty() && read().is_ok_and(|again| format!("{again:?}") == format!("{rule:?}"))),
        Err(error) => assert!(error.cause != braid_control::Cause::Failed && !error.detail.is_empty(), "{error:?}"),
    }
}

fn join(request: &JoinRequest) {
    if let Ok(invite) = Invite::parse(&request.line) {
        let again = Invite::parse(&invite.to_line()).expect("a parsed invitation can be parsed again");
        assert_eq!(again.to_line(), invite.to_line());
    }
}
