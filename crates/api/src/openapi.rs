//! The API as a declared thing: every operation, who may call it, what it takes and gives. The OpenAPI 3.1 document is made of it.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::{
    Accepted, App, AppHistory, ConfigChange, ConfigChanged, ConfigView, ExplainRequest, Explanation, Flow, Gains, History, JoinRequest,
    LeaveRequest, LinkStatus, List, Listed, MoveRequest, Note, Peer, PolicyView, Problem, Session, SessionRequest, Status, TradeoffPoint,
    UiAddress, UiRequest, Versioned,
};

/// Who may call an operation. Over the Unix socket everybody may read, and root, the daemon's own user and the group `braid` may change;
/// over TCP a token decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// Everybody who can connect.
    Nothing,
    /// Those who may read.
    Reading,
    /// Those who may change.
    Changing,
}

/// One operation.
#[derive(Clone, Copy)]
pub struct Operation {
    /// `GET` or `POST`.
    pub method: &'static str,
    /// Its path.
    pub path: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// Who may call it.
    pub needs: Needs,
    /// What may stand behind `?`.
    pub query: &'static [Parameter],
    body: Option<Schema>,
    answer: Content,
}

/// What may stand behind `?`.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// What it says.
    pub summary: &'static str,
    /// Its values.
    pub takes: Takes,
}

/// The values of a [`Parameter`].
#[derive(Debug, Clone, Copy)]
pub enum Takes {
    /// One of these.
    OneOf(&'static [&'static str]),
    /// A whole number of at most this.
    Number(u64),
    /// Text.
    Text,
}

type Schema = fn(&mut SchemaGenerator) -> schemars::Schema;

#[derive(Clone, Copy)]
enum Content {
    Json(Schema),
    /// Of this media type.
    Text(&'static str),
}

const fn read(path: &'static str, summary: &'static str, answer: Schema) -> Operation {
    Operation { method: "GET", path, summary, needs: Needs::Reading, query: &[], body: None, answer: Content::Json(answer) }
}

const fn change(path: &'static str, summary: &'static str, body: Option<Schema>, answer: Schema) -> Operation {
    Operation { method: "POST", path, summary, needs: Needs::Changing, query: &[], body, answer: Content::Json(answer) }
}

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> schemars::Schema {
    generator.subschema_for::<T>()
}

fn answer<T: JsonSchema>(generator: &mut SchemaGenerator) -> schemars::Schema {
    generator.subschema_for::<Versioned<T>>()
}

fn list<T: JsonSchema + Listed>(generator: &mut SchemaGenerator) -> schemars::Schema {
    generator.subschema_for::<Versioned<List<T>>>()
}

const RESOLUTION: Parameter = Parameter {
    name: "resolution",
    summary: "how finely, and so how far back; left out: 1s",
    takes: Takes::OneOf(&["1s", "10s", "5m", "1h"]),
};
const SINCE_MS: Parameter =
    Parameter { name: "since_ms", summary: "only samples after this moment (milliseconds of Unix time)", takes: Takes::Number(u64::MAX) };
const APPLICATION: Parameter =
    Parameter { name: "application", summary: "only this one, by the name that flows have; left out: all", takes: Takes::Text };
const SINCE: Parameter = Parameter { name: "since", summary: "only notes after the one of this id", takes: Takes::Number(u64::MAX) };
const DAYS: Parameter = Parameter { name: "days", summary: "how many days, today among them; left out: 30", takes: Takes::Number(400) };

/// Every operation under `/v1`.
pub const OPERATIONS: [Operation; 27] = [
    read("/v1/status", "The daemon at a glance.", answer::<Status>),
    read("/v1/links", "Every link.", list::<LinkStatus>),
    read("/v1/flows", "Every live flow.", list::<Flow>),
    read("/v1/apps", "What was learnt of applications.", list::<App>),
    read("/v1/policy", "The policy in force.", answer::<PolicyView>),
    read("/v1/peers", "Hosts that carry flows over several links.", list::<Peer>),
    Operation {
        answer: Content::Text("text/plain"),
        ..read("/v1/metrics", "Prometheus metrics: `braid_...`, names that stay.", of::<String>)
    },
    Operation {
        answer: Content::Text("text/event-stream"),
        ..read(
            "/v1/events",
            "Server-sent events: `status`, `apps` and `peers` (as `GET` answers them), `flows` (FlowChanges), `note`, `sample`, `app_sample` (AppsSample), at most once a second each.",
            of::<String>,
        )
    },
    Operation { query: &[RESOLUTION, SINCE_MS], ..read("/v1/history", "What links did.", answer::<History>) },
    Operation { query: &[RESOLUTION, SINCE_MS, APPLICATION], ..read("/v1/history/apps", "What applications moved.", answer::<AppHistory>) },
    Operation { query: &[SINCE], ..read("/v1/notes", "What happened, in plain words.", list::<Note>) },
    Operation { query: &[DAYS], ..read("/v1/gains", "What Braid gained.", answer::<Gains>) },
    read("/v1/tradeoff", "Throughput and power at each utility, with the links present.", list::<TradeoffPoint>),
    read("/v1/config", "The configuration's text.", answer::<ConfigView>),
    read("/v1/openapi.json", "This document.", of::<Map<String, Value>>),
    read("/v1/session", "Whether this client may change anything.", answer::<Session>),
    Operation {
        needs: Needs::Nothing,
        ..change("/v1/session", "Trades a token for a cookie, for browsers.", Some(of::<SessionRequest>), answer::<Session>)
    },
    Operation {
        needs: Needs::Reading,
        ..change("/v1/explain", "Why a flow gets the link it gets.", Some(of::<ExplainRequest>), answer::<Explanation>)
    },
    Operation {
        needs: Needs::Reading,
        ..change("/v1/config/preview", "What edits would make of the configuration.", Some(of::<ConfigChange>), answer::<ConfigChanged>)
    },
    Operation {
        needs: Needs::Reading,
        ..change("/v1/ui", "Where the web page is, with a token for what this client may do.", Some(of::<UiRequest>), answer::<UiAddress>)
    },
    change("/v1/config", "Applies edits, and writes them to the file.", Some(of::<ConfigChange>), answer::<ConfigChanged>),
    change("/v1/config/undo", "Takes the last applied change back.", None, answer::<ConfigView>),
    change("/v1/join", "Bonds with a relay from now on.", Some(of::<JoinRequest>), answer::<Accepted>),
    change("/v1/leave", "Leaves a relay, or forgets a server.", Some(of::<LeaveRequest>), answer::<Accepted>),
    change("/v1/move", "Carries bonded flows over another link.", Some(of::<MoveRequest>), answer::<Accepted>),
    change("/v1/reload", "Reads the configuration again.", None, answer::<Accepted>),
    change("/v1/down", "Takes Braid down.", None, answer::<Accepted>),
];

/// The operation behind a method and a path.
pub fn operation(method: &str, path: &str) -> Option<&'static Operation> {
    // What may be read may be asked for its head.
    let method = if method == "HEAD" { "GET" } else { method };
    OPERATIONS.iter().find(|operation| operation.method == method && operation.path == path)
}

/// The OpenAPI 3.1 document.
pub fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let entry = described(operation, &mut generator);
        if let Some(path) = paths.entry(operation.path).or_insert_with(|| json!({})).as_object_mut() {
            path.insert(operation.method.to_lowercase(), entry);
        }
    }
    // Not an operation's own type: what the stream carries, and what errors look like.
    generator.subschema_for::<crate::FlowChanges>();
    generator.subschema_for::<crate::Sample>();
    generator.subschema_for::<crate::AppsSample>();
    generator.subschema_for::<Problem>();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Braid",
            "version": crate::SCHEMA_VERSION.to_string(),
            "description": "JSON over HTTP, on a Unix socket and, where asked for, over TCP. What is not known is null, never 0. Every \
                answer is an object with schema_version; a list stands in it under its own name. Fields may be added at any time; none is \
                renamed or removed within one version. Quantities end in their unit: _bps bits per second, _bytes, \
                _us, _ms, _s, _j joules, _w watts. Errors are problem details (RFC 9457). On the Unix socket everybody may read; root, the \
                daemon's own user and the group braid may change. Over TCP a token decides.",
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": generator.take_definitions(true),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "braid-session"},
            },
        },
    })
}

fn described(operation: &Operation, generator: &mut SchemaGenerator) -> Value {
    let content = match operation.answer {
        Content::Json(schema) => json!({"application/json": {"schema": schema(generator)}}),
        Content::Text(media) => json!({media: {"schema": {"type": "string"}}}),
    };
    let problem = json!({"description": "A problem (RFC 9457).", "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}});
    let mut entry = json!({
        "operationId": format!("{}{}", operation.method.to_lowercase(), operation.path.trim_start_matches("/v1").replace(['/', '.'], "-")),
        "summary": operation.summary,
        "responses": {"200": {"description": "As asked.", "content": content}, "default": problem},
        "security": if operation.needs == Needs::Nothing { json!([]) } else { json!([{"token": []}, {"session": []}]) },
        "x-braid-needs": match operation.needs { Needs::Nothing => "nothing", Needs::Reading => "reading", Needs::Changing => "changing" },
    });
    if let Some(body) = operation.body {
        entry["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": body(generator)}}});
    }
    if !operation.query.is_empty() {
        entry["parameters"] = operation.query.iter().map(parameter).collect();
    }
    entry
}

fn parameter(parameter: &Parameter) -> Value {
    let schema = match parameter.takes {
        Takes::Number(most) => json!({"type": "integer", "minimum": 0, "maximum": most}),
        Takes::OneOf(values) => json!({"type": "string", "enum": values}),
        Takes::Text => json!({"type": "string"}),
    };
    json!({"name": parameter.name, "in": "query", "required": false, "description": parameter.summary, "schema": schema})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_stands_once_and_every_reference_leads_somewhere() {
        let mut names: Vec<_> = OPERATIONS.iter().map(|operation| (operation.path, operation.method)).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), OPERATIONS.len());
        let document = document();
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }

    #[test]
    fn whatever_changes_needs_the_right_to() {
        let open = ["/v1/explain", "/v1/config/preview", "/v1/session", "/v1/ui"];
        for operation in OPERATIONS.iter().filter(|operation| operation.method == "POST" && !open.contains(&operation.path)) {
            assert_eq!(operation.needs, Needs::Changing, "{}", operation.path);
        }
        assert_eq!(operation("HEAD", "/v1/status").unwrap().needs, Needs::Reading);
        assert!(operation("GET", "/v1/down").is_none());
    }
}
