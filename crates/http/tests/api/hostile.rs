//! Ten thousand requests generated from the API's own document, most of them invalid. None may cause a server error, none may leave a
//! configuration that the checker rejects, and no answer may contain data of the files that requests name.

use std::sync::OnceLock;

use braid_api::Problem;
use braid_config::World;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value, json};

use crate::fixture::{Connection, FILE, Fixture};

const CASES: u32 = 10_000;

/// Content of the files that must not leak: a marker text, and the start of a line in this process's environment.
const CANARIES: [&str; 2] = ["canary-4f1c9e", "CARGO_PKG_NAME="];

/// Files that must not be read, as in /etc, in the state directory and in /proc, and files that block a reader.
fn files() -> &'static [String] {
    static FILES: OnceLock<Vec<String>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("canaries");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(folder.join("etc")).unwrap();
        std::fs::create_dir_all(folder.join("state")).unwrap();
        std::fs::write(folder.join("etc/shadow"), "root:canary-4f1c9e:19000:0:99999:7:::\n").unwrap();
        std::fs::write(folder.join("state/ui-token"), "canary-4f1c9e\n").unwrap();
        std::fs::write(folder.join("state/profiles.toml"), "[[profile]]\ncanary-4f1c9e = 1\n").unwrap();
        assert!(std::process::Command::new("mkfifo").arg(folder.join("state/fifo")).status().unwrap().success());
        let own = ["etc/shadow", "state/ui-token", "state/profiles.toml", "state/fifo"].map(|name| folder.join(name).display().to_string());
        own.into_iter().chain(["/proc/self/environ", "/dev/zero"].map(str::to_owned)).collect()
    })
}

/// Words with a meaning for the API, and hostile texts.
const WORDS: [&str; 40] = [
    "",
    "a",
    "scheduler",
    "operetta",
    "round-robin",
    "utility",
    "battery",
    "link",
    "app",
    "match",
    "name",
    "wlan0",
    "lte0",
    "wlan*",
    "role",
    "backup",
    "metered",
    "cap",
    "10 GB",
    "reset_day",
    "links",
    "prefer",
    "class",
    "bulk",
    "carry",
    "bond",
    "weight",
    "measure",
    "every",
    "1 h",
    "exclude",
    "kind:wired",
    "203.0.113.10",
    "::1",
    "<script>alert(1)</script>",
    "a\u{0}b",
    "\u{202e}\u{1b}[2J",
    "\"]\n[[app]]\n",
    "../../etc/passwd",
    "18446744073709551616",
];

/// Random generator with a seed, so that a failure is reproducible by its number.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        // splitmix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound.max(1) as u64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn word(&mut self) -> String {
        match self.below(40) {
            0 => "x".repeat(5000),
            1 => WORDS.concat(),
            2..6 => self.file(),
            _ => self.of(&WORDS).to_owned(),
        }
    }

    fn file(&mut self) -> String {
        files()[self.below(files().len())].clone()
    }

    fn number(&mut self) -> Value {
        match self.below(8) {
            0 => json!(u64::MAX),
            1 => json!(i64::MIN),
            2 => json!(-1),
            3 => json!(1e308),
            4 => json!(0.5),
            n => json!(n - 5),
        }
    }

    fn any(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 4 } else { 6 }) {
            0 => Value::Null,
            1 => json!(self.one_in(2)),
            2 => self.number(),
            3 => json!(self.word()),
            4 => (0..self.below(4)).map(|_| self.any(depth - 1)).collect(),
            _ => Value::Object((0..self.below(4)).map(|_| (self.word(), self.any(depth - 1))).collect()),
        }
    }

    /// A value that roughly matches `schema`.
    fn like(&mut self, schema: &Value, depth: usize) -> Value {
        if depth == 0 || self.one_in(25) {
            return self.any(2);
        }
        if let Some(reference) = schema["$ref"].as_str() {
            let target = document().pointer(&reference[1..]).unwrap();
            return self.like(target, depth - 1);
        }
        if let Some(value) = schema.get("const") {
            return value.clone();
        }
        if let Some(values) = schema["enum"].as_array() {
            return values[self.below(values.len())].clone();
        }
        if let Some(choices) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
            let choice = self.below(choices.len());
            return self.like(&choices[choice], depth - 1);
        }
        let kind = match &schema["type"] {
            Value::Array(kinds) => kinds[self.below(kinds.len())].as_str().unwrap_or(""),
            kind => kind.as_str().unwrap_or(""),
        };
        match kind {
            "object" => self.object(schema, depth),
            "array" => (0..self.below(4)).map(|_| self.like(&schema["items"], depth - 1)).collect(),
            "string" => json!(self.word()),
            "integer" => self.number(),
            "number" => self.number(),
            "boolean" => json!(self.one_in(2)),
            "null" => Value::Null,
            _ => self.any(3),
        }
    }

    /// An edit that is likely to be valid.
    fn edit(&mut self) -> Value {
        let (word, index) = (self.word(), self.below(4));
        match self.below(12) {
            10 => json!({"op": "set", "path": ["energy_profiles"], "value": self.file()}),
            11 => json!({"op": "app-add", "at": null, "value": {"match": {"exe": self.file()}, "class": "bulk"}}),
            0 => json!({"op": "set", "path": ["scheduler"], "value": self.of(&["operetta", "round-robin", "only-one"])}),
            1 => json!({"op": "unset", "path": ["scheduler"]}),
            2 => json!({"op": "link", "name": "wlan0", "set": {"metered": self.one_in(2)}, "unset": ["role"]}),
            3 => json!({"op": "link", "name": word, "set": {"role": self.of(&["backup", "normal"])}}),
            4 | 5 => json!({"op": "app-add", "at": self.of(&[None, Some(0)]), "value": {"match": {"name": word}, "class": "bulk"}}),
            6 => json!({"op": "app-remove", "index": index}),
            7 => json!({"op": "app-move", "index": index, "to": self.below(3)}),
            8 => json!({"op": "app", "index": index, "set": {"carry": "direct"}, "unset": ["class"]}),
            _ => json!({"op": "set", "path": ["exclude", "applications"], "value": [word]}),
        }
    }

    fn object(&mut self, schema: &Value, depth: usize) -> Value {
        let mut object = Map::new();
        for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
            if !self.one_in(12) {
                object.insert(key.clone(), self.like(schema, depth - 1));
            }
        }
        // Where any property is allowed, use those of a rule.
        if schema.get("properties").is_none() {
            for key in ["match", "links", "role", "metered", "cap", "class", "carry", "weight", "name"] {
                if self.one_in(4) {
                    object.insert(key.to_owned(), self.any(2));
                }
            }
            if self.one_in(2) {
                object.insert("match".to_owned(), json!({"name": self.word()}));
            }
        }
        if self.one_in(20) {
            object.insert(self.word(), self.any(2));
        }
        Value::Object(object)
    }
}

fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(braid_api::openapi::document)
}

/// Generates a request from a seed.
fn made_up(seed: u64, revision: &str, authorization: Option<&str>) -> Request<Full<Bytes>> {
    let mut chance = Chance(seed);
    let paths = document()["paths"].as_object().unwrap();
    let (path, methods) = paths.iter().nth(chance.below(paths.len())).unwrap();
    let methods = methods.as_object().unwrap();
    let (method, operation) = methods.iter().nth(chance.below(methods.len())).unwrap();
    let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    let mut body = if schema.is_null() { Value::Null } else { chance.like(schema, 12) };
    if body.get("revision").is_some() && !chance.one_in(6) {
        body["revision"] = json!(revision);
        // Few generated bodies are valid; these are valid more often.
        if chance.one_in(3) {
            body = json!({"revision": revision, "edits": [chance.edit(), chance.edit()]});
        }
    }
    let mut bytes = if body.is_null() && chance.one_in(2) { Vec::new() } else { body.to_string().into_bytes() };
    match chance.below(40) {
        0 => bytes.truncate(bytes.len() / 2),
        1 => bytes.extend([0xff, 0xfe]),
        2 => bytes = vec![b'['; 100_000],
        3 => bytes = vec![b' '; 300_000],
        _ => {}
    }
    let query: Vec<String> = operation["parameters"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|_| chance_of(seed))
        .map(|parameter| {
            let value = Chance(seed ^ 7).like(&parameter["schema"], 3);
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let safe: String = text.bytes().take(200).map(|byte| format!("%{byte:02x}")).collect();
            format!("{}={safe}", parameter["name"].as_str().unwrap())
        })
        .collect();
    let mut target = path.clone();
    if chance.one_in(50) {
        target.push_str(chance.of(&["/", "x", "/..", "%00", "/%2e%2e/%2e%2e/etc/passwd"]));
    }
    if !query.is_empty() {
        target = format!("{target}?{}", query.join("&"));
    }
    let wanted = method.to_uppercase();
    let method = if chance.one_in(20) { chance.of(&["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BRAID"]) } else { &wanted };
    let kind = if chance.one_in(30) {
        chance.of(&["text/plain", "application/json; charset=x", "multipart/form-data", ""])
    } else {
        "application/json"
    };
    let mut builder = Request::builder().method(Method::from_bytes(method.as_bytes()).unwrap()).uri(target);
    builder = builder.header("host", "localhost").header("content-type", kind);
    if chance.one_in(30) {
        builder = builder.header("last-event-id", chance.of(&["0", "-1", "x", "99999999999999999999999"]));
    }
    if let Some(authorization) = authorization {
        builder = builder.header("authorization", authorization);
    }
    builder.body(Full::new(bytes.into())).unwrap()
}

fn chance_of(seed: u64) -> bool {
    !Chance(seed ^ 3).one_in(4)
}

/// Sends a request and checks the answer.
async fn judged(
    fixture: &Fixture,
    client: &mut Option<Connection>,
    remote: bool,
    request: Request<Full<Bytes>>,
) -> Result<(), TestCaseError> {
    let what = format!("{request:?}");
    let (head_only, stream) = (*request.method() == Method::HEAD, request.uri().path() == "/v1/events");
    if client.as_ref().is_none_or(Connection::is_closed) {
        *client = Some(if remote { fixture.remote().await } else { fixture.local().await });
    }
    let connection = client.as_mut().unwrap();
    if stream {
        // The stream has no end, so the connection is dropped.
        let status = connection.begin(request).await.map_or(0, |answer| answer.status().as_u16());
        *client = None;
        prop_assert!(status < 500, "{status}: {what}");
        return Ok(());
    }
    // The server does not read an oversized body to its end and closes the connection.
    let Ok(answer) = connection.send(request).await else {
        *client = None;
        return Ok(());
    };
    prop_assert!(answer.status < 500, "{answer:?}: {what}");
    let told = String::from_utf8_lossy(&answer.body);
    for canary in CANARIES {
        prop_assert!(!told.contains(canary), "{told}: {what}");
    }
    if answer.status >= 400 && !head_only {
        prop_assert_eq!(answer.header("content-type"), Problem::MEDIA_TYPE, "{}: {}", answer.status, &what);
        let problem: Problem = serde_json::from_slice(&answer.body).map_err(|error| TestCaseError::fail(format!("{error}: {what}")))?;
        prop_assert_eq!(problem.status, answer.status);
    }
    Ok(())
}

async fn revision(fixture: &Fixture) -> String {
    fixture.local().await.ask("GET /v1/config", &[], "").await.json()["revision"].as_str().unwrap().to_owned()
}

/// A runner with the same cases in every run.
fn runner(cases: u32) -> TestRunner {
    let config = Cases { cases, failure_persistence: None, max_shrink_iters: 0, ..Cases::default() };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

/// Runs cases on one server; the effects of a case persist for the next.
fn run(cases: u32, remote: bool, after: impl Fn(&Fixture) -> Result<(), TestCaseError>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let set = tokio::task::LocalSet::new();
    let fixture = set.block_on(&runtime, Fixture::new());
    let authorization = remote.then(|| format!("Bearer {}", fixture.tokens[1]));
    let state = std::cell::RefCell::new((None, set.block_on(&runtime, revision(&fixture)), fixture.text()));
    let one = |seed: u64| {
        let (client, current, text) = &mut *state.borrow_mut();
        set.block_on(&runtime, async {
            judged(&fixture, client, remote, made_up(seed, current, authorization.as_deref())).await?;
            if fixture.text() != *text {
                *text = fixture.text();
                *current = revision(&fixture).await;
                after(&fixture)?;
            }
            Ok(())
        })
    };
    runner(cases).run(&any::<u64>(), one).unwrap();
    after(&fixture).unwrap();
    let status = set.block_on(&runtime, async { fixture.local().await.ask("GET /v1/status", &[], "").await });
    assert_eq!(status.status, 200);
}

#[test]
fn ten_thousand_generated_requests_cause_no_errors_and_leak_nothing() {
    let changed = std::cell::Cell::new(0);
    run(CASES, false, |fixture| {
        let text = fixture.text();
        changed.set(changed.get() + 1);
        let world = World { strict: false, ..World::here(false) };
        let read = braid_config::parse("braid.toml", &text, &world);
        prop_assert!(read.is_ok(), "{:?}\n{text}", read);
        prop_assert!(text.contains("# Mine."), "{text}");
        Ok(())
    });
    assert!(changed.get() > 10, "some cases change the file: {}", changed.get());
}

#[test]
fn read_only_clients_change_nothing() {
    run(2_000, true, |fixture| {
        let (text, commands) = (fixture.text(), fixture.mind.borrow().commands);
        prop_assert_eq!((text.as_str(), commands), (FILE, 0));
        prop_assert_eq!(fixture.mind.borrow().notes().len(), 0);
        Ok(())
    });
}

/// The files are readable, and reading them reveals a canary.
#[test]
fn every_readable_canary_file_contains_a_canary() {
    let texts: Vec<_> = files().iter().filter(|name| !name.contains("fifo") && !name.contains("zero")).collect();
    assert_eq!(texts.len(), 4);
    for name in texts {
        let text = String::from_utf8_lossy(&std::fs::read(name).unwrap()).into_owned();
        assert!(CANARIES.iter().any(|canary| text.contains(canary)), "{name}");
    }
}
