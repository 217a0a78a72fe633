//! The parts of the schema that others build on, held by name.

use braid_api::{Check, ExplainRequest, Flow, Link, Problem, Status, Verdict};
use serde_json::{Value, json};

/// What a client that knows only the fixed fields would write, with everything unknown.
fn link() -> Value {
    json!({
        "name": "wlan0", "state": "unknown", "kind": "wireless", "addresses": ["10.0.0.2/24"], "capacity_down_bps": null,
        "capacity_up_bps": null, "rtt_us": null, "loss": null, "rx_bytes": null, "tx_bytes": null, "flows": 0,
    })
}

fn flow() -> Value {
    json!({
        "id": 7, "application": "/usr/bin/curl", "protocol": "tcp", "local": null, "remote": "192.0.2.1:443", "link": "wlan0",
        "carry": "direct", "scheduler": "max-throughput", "rx_bytes": null, "tx_bytes": null, "rtt_us": null, "age_ms": null,
    })
}

/// Every field of `small` stands in `large` with the same value.
fn holds(large: &Value, small: &Value) {
    for (key, value) in small.as_object().unwrap() {
        assert_eq!(large.get(key), Some(value), "{key}");
    }
}

#[test]
fn fixed_fields_keep_their_names_and_the_unknown_is_null() {
    let read: Link = serde_json::from_value(link()).unwrap();
    holds(&serde_json::to_value(read).unwrap(), &link());
    let read: Flow = serde_json::from_value(flow()).unwrap();
    holds(&serde_json::to_value(read).unwrap(), &flow());

    let status = json!({"schema_version": 1, "version": "0.1.0", "scheduler": "round-robin", "links": [link()], "flows": 0});
    let read: Status = serde_json::from_value(status.clone()).unwrap();
    let mut written = serde_json::to_value(read).unwrap();
    holds(&written["links"][0].take(), &link());
    written["links"] = status["links"].clone();
    holds(&written, &status);
    holds(&written, &json!({"battery": null, "utility": null, "target_down_bps": null}));
}

#[test]
fn fields_added_later_do_not_disturb_a_client() {
    let mut value = flow();
    value["from_the_future"] = json!([1, 2]);
    assert_eq!(serde_json::from_value::<Flow>(value).unwrap().id, 7);
}

#[test]
fn a_request_with_an_unknown_field_is_refused() {
    assert!(serde_json::from_value::<ExplainRequest>(json!({"flow": 3})).is_ok());
    let error = serde_json::from_value::<ExplainRequest>(json!({"flw": 3})).unwrap_err().to_string();
    assert!(error.contains("flw"), "{error}");
}

#[test]
fn problems_are_written_as_rfc_9457_says() {
    let problem = Problem::new(403, "Not allowed", "only root may reload");
    let value = serde_json::to_value(&problem).unwrap();
    assert_eq!(value, json!({"type": "about:blank", "title": "Not allowed", "status": 403, "detail": "only root may reload"}));
    assert_eq!(problem.to_string(), "Not allowed: only root may reload");
    let bare: Problem = serde_json::from_value(json!({"title": "Gone", "status": 410})).unwrap();
    assert_eq!(bare.to_string(), "Gone (HTTP status 410)");
}

#[test]
fn verdicts_are_words() {
    let check = json!({"name": "kernel", "verdict": "missing", "found": "4.19", "remedy": "use 5.15"});
    assert_eq!(serde_json::from_value::<Check>(check).unwrap().verdict, Verdict::Missing);
}
