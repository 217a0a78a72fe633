//! Pins the parts of the schema that clients depend on.

use braid_api::openapi::{self, OPERATIONS};
use braid_api::{Check, ExplainRequest, Flow, LinkStatus, List, Problem, SCHEMA_VERSION, Status, Verdict, Versioned};
use serde_json::{Value, json};

/// A link with only the fixed fields, all values unknown.
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

/// Asserts that every field of `small` is in `large` with the same value.
fn assert_contains(large: &Value, small: &Value) {
    for (key, value) in small.as_object().unwrap() {
        assert_eq!(large.get(key), Some(value), "{key}");
    }
}

#[test]
fn fixed_fields_keep_their_names_and_unknown_values_are_null() {
    let read: LinkStatus = serde_json::from_value(link()).unwrap();
    assert_contains(&serde_json::to_value(read).unwrap(), &link());
    let read: Flow = serde_json::from_value(flow()).unwrap();
    assert_contains(&serde_json::to_value(read).unwrap(), &flow());

    let status = json!({"schema_version": 1, "version": "0.1.0", "scheduler": "round-robin", "links": [link()], "flows": 0});
    let read: Versioned<Status> = serde_json::from_value(status.clone()).unwrap();
    let mut written = serde_json::to_value(read).unwrap();
    assert_contains(&written["links"][0].take(), &link());
    written["links"] = status["links"].clone();
    assert_contains(&written, &status);
    assert_contains(&written, &json!({"battery": null, "utility": null, "target_down_bps": null}));
}

#[test]
fn unknown_fields_of_a_response_are_ignored() {
    let mut value = flow();
    value["from_the_future"] = json!([1, 2]);
    assert_eq!(serde_json::from_value::<Flow>(value).unwrap().id, 7);
}

#[test]
fn a_request_with_an_unknown_field_is_rejected() {
    assert!(serde_json::from_value::<ExplainRequest>(json!({"flow": 3})).is_ok());
    let error = serde_json::from_value::<ExplainRequest>(json!({"flw": 3})).unwrap_err().to_string();
    assert!(error.contains("flw"), "{error}");
}

#[test]
fn problems_serialize_as_in_rfc_9457() {
    let problem = Problem::new(403, "Not allowed", "only root may reload");
    let value = serde_json::to_value(&problem).unwrap();
    assert_eq!(value, json!({"type": "about:blank", "title": "Not allowed", "status": 403, "detail": "only root may reload"}));
    assert_eq!(problem.to_string(), "Not allowed: only root may reload");
    let bare: Problem = serde_json::from_value(json!({"title": "Gone", "status": 410})).unwrap();
    assert_eq!(bare.to_string(), "Gone (HTTP status 410)");
}

#[test]
fn verdicts_deserialize_from_lower_case_strings() {
    let check = json!({"name": "kernel", "verdict": "missing", "found": "4.19", "remedy": "use 5.15"});
    assert_eq!(serde_json::from_value::<Check>(check).unwrap().verdict, Verdict::Missing);
}

#[test]
fn a_list_is_an_object_with_its_own_key() {
    let list = Versioned::of(List::of(vec![serde_json::from_value::<LinkStatus>(link()).unwrap()]));
    let mut written = serde_json::to_value(&list).unwrap();
    assert_eq!(written.as_object().unwrap().keys().collect::<Vec<_>>(), ["links", "schema_version"]);
    assert_eq!((&written["schema_version"], &written["links"][0]["name"]), (&json!(SCHEMA_VERSION), &json!("wlan0")));
    written["next"] = json!("a field of a later version");
    assert_eq!(serde_json::from_value::<Versioned<List<LinkStatus>>>(written).unwrap(), list);
}

#[test]
fn a_higher_or_missing_version_is_rejected() {
    let read = |text: &str| serde_json::from_str::<Versioned<List<Flow>>>(text).map(|list| list.content.items.len());
    assert_eq!(read(r#"{"flows": [], "schema_version": 1}"#).unwrap(), 0);
    let error = |text: &str| read(text).unwrap_err().to_string();
    assert!(error(r#"{"schema_version": 2, "flows": []}"#).contains("schema_version is 2"), "{}", error(r#"{"schema_version": 2}"#));
    assert!(error(r#"{"flows": []}"#).contains("schema_version"));
    assert!(error(r#"{"schema_version": 1, "links": []}"#).contains("flows"));
    assert!(read("[]").is_err());
}

#[test]
fn every_response_has_its_schema_version() {
    let document = openapi::document();
    for operation in OPERATIONS.iter().filter(|operation| operation.path != "/v1/openapi.json") {
        let content = &document["paths"][operation.path][operation.method.to_lowercase()]["responses"]["200"]["content"];
        let Some(reference) = content.pointer("/application~1json/schema/$ref").and_then(Value::as_str) else {
            assert!(content.get("application/json").is_none(), "{}: {content}", operation.path);
            continue;
        };
        let schema = document.pointer(reference.trim_start_matches('#')).unwrap();
        assert_eq!(schema["properties"]["schema_version"]["const"], SCHEMA_VERSION, "{}", operation.path);
        assert!(schema["required"].as_array().unwrap().contains(&json!("schema_version")), "{}", operation.path);
    }
}
