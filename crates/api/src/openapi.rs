//! Declaration of the API: every operation, its required rights, its request and its response. The OpenAPI 3.1 document is generated from
//! it.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::{
    Accepted, AdhocChange, AdhocStatus, AdhocUp, App, AppHistory, ClientStatus, ConfigChange, ConfigChanged, ConfigView, ExplainRequest,
    Explanation, Fact, FactChange, Flow, Gains, History, JoinRequest, LeaveRequest, LinkStatus, List, Listed, MoveRequest, MovedFlow,
    NetworkChange, NetworkStatus, Note, Peer, PolicyView, Problem, ProgramRule, RewriteRequest, Rewritten, RuleChange, Session,
    SessionRequest, SliceChange, SlicerStatus, Status, TradeoffPoint, UiAddress, UiRequest, Versioned,
};

/// Rights required to call an operation. On the Unix socket every user may read; root, the daemon's user and the group `braid` may change
/// things. Over TCP a token determines the rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Needs {
    /// No rights: every client that can connect.
    Nothing,
    /// The right to read.
    Reading,
    /// The right to change things.
    Changing,
}

/// One operation of the API.
#[derive(Clone, Copy)]
pub struct Operation {
    /// HTTP method: `GET` or `POST`.
    pub method: &'static str,
    /// URL path.
    pub path: &'static str,
    /// Summary for the OpenAPI document.
    pub summary: &'static str,
    /// Rights required to call it.
    pub needs: Needs,
    /// Query parameters.
    pub query: &'static [Parameter],
    body: Option<Schema>,
    answer: Content,
}

/// A query parameter.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// Name of the parameter.
    pub name: &'static str,
    /// Description for the OpenAPI document.
    pub summary: &'static str,
    /// Accepted values.
    pub takes: Takes,
}

/// Accepted values of a [`Parameter`].
#[derive(Debug, Clone, Copy)]
pub enum Takes {
    /// One of these.
    OneOf(&'static [&'static str]),
    /// An integer from 0 to this maximum.
    Number(u64),
    /// Any text.
    Text,
}

type Schema = fn(&mut SchemaGenerator) -> schemars::Schema;

#[derive(Clone, Copy)]
enum Content {
    Json(Schema),
    /// Text of this media type.
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
    summary: "interval between samples, which also determines how far back they go; default: 1s",
    takes: Takes::OneOf(&["1s", "10s", "5m", "1h"]),
};
const SINCE_MS: Parameter = Parameter {
    name: "since_ms",
    summary: "only samples after this time (milliseconds since the Unix epoch)",
    takes: Takes::Number(u64::MAX),
};
const APPLICATION: Parameter =
    Parameter { name: "application", summary: "only this application, as in `application` of flows; default: all", takes: Takes::Text };
const SINCE: Parameter = Parameter { name: "since", summary: "only notes after the note with this id", takes: Takes::Number(u64::MAX) };
const DAYS: Parameter = Parameter { name: "days", summary: "number of days, including today; default: 30", takes: Takes::Number(400) };

/// Every operation under `/v1`.
pub const OPERATIONS: [Operation; 42] = [
    read("/v1/status", "Overview of the daemon.", answer::<Status>),
    read("/v1/links", "All links.", list::<LinkStatus>),
    read("/v1/flows", "All live flows.", list::<Flow>),
    read("/v1/apps", "Learned data about applications.", list::<App>),
    read("/v1/policy", "The active policy.", answer::<PolicyView>),
    read("/v1/peers", "Hosts that carry flows over several links.", list::<Peer>),
    read("/v1/clients", "Clients of the gateway.", list::<ClientStatus>),
    read("/v1/context", "Facts that conditions of rules refer to.", list::<Fact>),
    read("/v1/rewrites", "Moved flows: TCP flows whose packets have other addresses on the way.", list::<MovedFlow>),
    read("/v1/rules", "Rules and reservations that programs have added for a limited time.", list::<ProgramRule>),
    Operation {
        answer: Content::Text("text/plain"),
        ..read("/v1/metrics", "Prometheus metrics: `braid_...`, with stable names.", of::<String>)
    },
    Operation {
        answer: Content::Text("text/event-stream"),
        ..read(
            "/v1/events",
            "Server-sent events: `status`, `apps` and `peers` (as in the `GET` responses), `flows` (FlowChanges), `note`, `sample`, `app_sample` (AppsSample), at most once a second each.",
            of::<String>,
        )
    },
    Operation { query: &[RESOLUTION, SINCE_MS], ..read("/v1/history", "History of links.", answer::<History>) },
    Operation { query: &[RESOLUTION, SINCE_MS, APPLICATION], ..read("/v1/history/apps", "History of applications.", answer::<AppHistory>) },
    Operation { query: &[SINCE], ..read("/v1/notes", "Log of events, in sentences.", list::<Note>) },
    Operation { query: &[DAYS], ..read("/v1/gains", "Benefit of Braid compared with a single link.", answer::<Gains>) },
    read("/v1/tradeoff", "Throughput and power at each utility, with the present links.", list::<TradeoffPoint>),
    read("/v1/config", "Text of the configuration.", answer::<ConfigView>),
    read("/v1/openapi.json", "This document.", of::<Map<String, Value>>),
    read("/v1/session", "Whether this client may change anything.", answer::<Session>),
    Operation {
        needs: Needs::Nothing,
        ..change("/v1/session", "Exchanges a token for a session cookie, for browsers.", Some(of::<SessionRequest>), answer::<Session>)
    },
    Operation {
        needs: Needs::Reading,
        ..change("/v1/explain", "Explains the choice of link for a flow.", Some(of::<ExplainRequest>), answer::<Explanation>)
    },
    Operation {
        needs: Needs::Reading,
        ..change(
            "/v1/config/preview",
            "Previews the result of edits to the configuration.",
            Some(of::<ConfigChange>),
            answer::<ConfigChanged>,
        )
    },
    Operation {
        needs: Needs::Reading,
        ..change(
            "/v1/ui",
            "Address of the web page, with a token that has the rights of this client.",
            Some(of::<UiRequest>),
            answer::<UiAddress>,
        )
    },
    change("/v1/config", "Applies edits and writes them to the file.", Some(of::<ConfigChange>), answer::<ConfigChanged>),
    change("/v1/config/undo", "Undoes the last applied change.", None, answer::<ConfigView>),
    change("/v1/join", "Joins a relay.", Some(of::<JoinRequest>), answer::<Accepted>),
    change("/v1/leave", "Leaves a relay, or deletes the key of a server.", Some(of::<LeaveRequest>), answer::<Accepted>),
    change(
        "/v1/move",
        "Moves flows to another link: bonded ones, and direct ones whose host agrees.",
        Some(of::<MoveRequest>),
        answer::<Accepted>,
    ),
    change(
        "/v1/rewrites",
        "Moves running TCP flows for a limited time, or lets them come back.",
        Some(of::<RewriteRequest>),
        answer::<Rewritten>,
    ),
    change("/v1/rules", "Adds, renews or removes a rule or a reservation of a program.", Some(of::<RuleChange>), answer::<Accepted>),
    change("/v1/context", "Sets or clears a fact that conditions of rules refer to.", Some(of::<FactChange>), answer::<Accepted>),
    read("/v1/adhoc", "The ad-hoc device: its radios and its neighbours.", answer::<AdhocStatus>),
    change("/v1/adhoc", "Changes the ad-hoc device.", Some(of::<AdhocChange>), answer::<Accepted>),
    change("/v1/adhoc/up", "Makes the ad-hoc device.", Some(of::<AdhocUp>), answer::<Accepted>),
    change("/v1/adhoc/down", "Removes the ad-hoc device.", None, answer::<Accepted>),
    read("/v1/network", "The network of a controller: its switches, links, access points and hosts.", answer::<NetworkStatus>),
    change(
        "/v1/network",
        "Chooses the mobility manager of a host, or asks it to go to an access point.",
        Some(of::<NetworkChange>),
        answer::<Accepted>,
    ),
    read("/v1/slices", "The slices of a slicer.", answer::<SlicerStatus>),
    change("/v1/slices", "Adds, changes or removes a slice, or lets a user opt in or out.", Some(of::<SliceChange>), answer::<Accepted>),
    change("/v1/reload", "Reloads the configuration.", None, answer::<Accepted>),
    change("/v1/down", "Stops Braid.", None, answer::<Accepted>),
];

/// The operation for a method and a path.
pub fn operation(method: &str, path: &str) -> Option<&'static Operation> {
    // HEAD has the same rights as GET.
    let method = if method == "HEAD" { "GET" } else { method };
    OPERATIONS.iter().find(|operation| operation.method == method && operation.path == path)
}

/// Generates the OpenAPI 3.1 document.
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
    // No operation has these types as its response: the events of the stream, and errors.
    generator.subschema_for::<crate::FlowChanges>();
    generator.subschema_for::<crate::Sample>();
    generator.subschema_for::<crate::AppsSample>();
    generator.subschema_for::<Problem>();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Braid",
            "version": crate::SCHEMA_VERSION.to_string(),
            "description": "JSON over HTTP, on a Unix socket and, if configured, over TCP. An unknown value is null, never 0. Every \
                response is an object with schema_version; a list is an array under its own key. Fields may be added at any time; no field \
                is renamed or removed within one version. Names of quantities end in their unit: _bps bits per second, _bytes, \
                _us, _ms, _s, _j joules, _w watts. Errors are problem details (RFC 9457). On the Unix socket every user may read; root, the \
                daemon's user and the group braid may change things. Over TCP a token determines the rights.",
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
        "responses": {"200": {"description": "Success.", "content": content}, "default": problem},
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
    fn operations_are_unique_and_references_resolve() {
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
    fn operations_that_change_things_require_the_right_to_change() {
        let open = ["/v1/explain", "/v1/config/preview", "/v1/session", "/v1/ui"];
        for operation in OPERATIONS.iter().filter(|operation| operation.method == "POST" && !open.contains(&operation.path)) {
            assert_eq!(operation.needs, Needs::Changing, "{}", operation.path);
        }
        assert_eq!(operation("HEAD", "/v1/status").unwrap().needs, Needs::Reading);
        assert!(operation("GET", "/v1/down").is_none());
    }
}
