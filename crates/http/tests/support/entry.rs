//! What the corpus and the fuzzer hand bytes to.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

use std::path::Path;

use braid_api::{ConfigChange, ExplainRequest, JoinRequest, LeaveRequest, MoveRequest, SessionRequest, UiRequest};
use braid_config::settings::Settings;
use braid_config::{ConfigErrors, Files, World};
use braid_peer::invite::Invite;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A machine that is the same everywhere, of whose files nothing is asked.
fn world() -> World {
    World {
        strict: true,
        devices: vec!["wlan0".to_owned(), "lte0".to_owned()],
        users: [("ada".to_owned(), 1000)].into(),
        files: Files::These { programs: Vec::new(), profiles: Vec::new() },
        relays: Some(vec!["home".to_owned()]),
    }
}

/// A configuration file: what is refused is refused with a place in it, and what is taken once is taken again.
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

/// The operations of the API that take a body; a body's first byte names one by its place.
pub const OPERATIONS: [&str; 8] =
    ["/v1/config", "/v1/config/preview", "/v1/explain", "/v1/join", "/v1/leave", "/v1/move", "/v1/session", "/v1/ui"];

/// The body of a request, which begins with a digit for its operation; whether it is read. What is read can be said again; what changes the
/// configuration at `example` leaves one that is taken.
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
        other => panic!("{other} is read by nobody here"),
    }
}

fn said<T: Serialize + DeserializeOwned>(body: &[u8]) -> Option<T> {
    let request: T = serde_json::from_slice(body).ok()?;
    let again = serde_json::to_vec(&request).expect("what was read can be written");
    serde_json::from_slice::<T>(&again).expect("what was written can be read");
    Some(request)
}

fn preview(mut change: ConfigChange, example: &Path) {
    let settings = Settings::new(Some(example.to_owned()), example.to_owned());
    change.revision = settings.look().view().expect("the example can be read").revision;
    match settings.preview(&change, &world()) {
        Ok(changed) => {
            let lenient = World { strict: false, ..world() };
            braid_config::parse("braid.toml", &changed.text, &lenient).expect("what a change leaves is taken");
        }
        Err(error) => assert!(error.cause != braid_control::Cause::Failed, "{error:?}"),
    }
}

fn join(request: &JoinRequest) {
    if let Ok(invite) = Invite::parse(&request.line) {
        let again = Invite::parse(&invite.to_line()).expect("an invitation that was read can be said again");
        assert_eq!(again.to_line(), invite.to_line());
    }
}
