//! The API from outside, over its Unix socket and over TCP, as used by clients, browsers and attackers.

mod fixture;
mod hostile;

use std::future::Future;
use std::time::Duration;

use braid_api::FlowChanges;
use braid_api::openapi::{Needs, OPERATIONS};
use braid_model::{ByteCount, FlowId};
use fixture::{FILE, Fixture, NOW, request};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::AsyncWriteExt;

/// Runs a test in its own runtime.
fn in_runtime<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test)
}

#[test]
fn exactly_the_declared_operations_exist() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.local().await;
        for operation in OPERATIONS.iter().filter(|operation| operation.path != "/v1/events") {
            let answer = client.ask(&format!("{} {}", operation.method, operation.path), &[], "").await;
            assert!(![404, 405].contains(&answer.status) && answer.status < 500, "{}: {answer:?}", operation.path);
            let other = if operation.method == "GET" { "POST" } else { "GET" };
            if !OPERATIONS.iter().any(|known| known.path == operation.path && known.method == other) {
                assert_eq!(client.ask(&format!("{other} {}", operation.path), &[], "").await.status, 405, "{}", operation.path);
            }
        }
        let unknown = client.ask("GET /v1/nonsense", &[], "").await;
        assert!(unknown.status == 404 && unknown.json()["detail"].as_str().unwrap().contains("/v1/status"));
        let document = client.ask("GET /v1/openapi.json", &[], "").await;
        assert_eq!(document.json(), braid_api::openapi::document());
    });
}

#[test]
fn every_answer_is_an_object_with_its_version_and_named_lists() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.local().await;
        let streams = ["/v1/events", "/v1/metrics", "/v1/openapi.json"];
        for operation in OPERATIONS.iter().filter(|operation| operation.method == "GET" && !streams.contains(&operation.path)) {
            let answer = client.ask(&format!("GET {}", operation.path), &[], "").await;
            assert_eq!((answer.status, &answer.json()["schema_version"]), (200, &json!(1)), "{}", operation.path);
        }
        for (path, name) in
            [("links", "links"), ("flows", "flows"), ("apps", "apps"), ("peers", "peers"), ("notes", "notes"), ("tradeoff", "points")]
        {
            let answer = client.ask(&format!("GET /v1/{path}"), &[], "").await.json();
            assert!(answer[name].is_array() && answer.as_object().unwrap().len() == 2, "{path}: {answer}");
        }
        let explained = client.ask("POST /v1/explain", &[], r#"{"name": "curl", "destination": "192.0.2.1"}"#).await;
        assert_eq!((explained.status, &explained.json()["schema_version"]), (200, &json!(1)), "{explained:?}");
    });
}

#[test]
fn the_metrics_include_the_adhoc_device_while_there_is_one() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.local().await;
        let sample = "braid_adhoc_frames_total{device=\"vi0\",outcome=\"duplicates\"} 0";
        for (exists, expected) in [(true, 1), (false, 0)] {
            let answer = client.ask("GET /v1/metrics", &[], "").await;
            let text = std::str::from_utf8(&answer.body).unwrap();
            assert_eq!((answer.status, text.lines().filter(|line| *line == sample).count()), (200, expected), "{text}");
            assert!(text.contains("braid_flows ") && text.contains("adhoc") == exists, "{text}");
            fixture.mind.borrow_mut().adhoc = None;
        }
    });
}

#[test]
fn over_tcp_the_token_determines_the_access_right() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.remote().await;
        let bearer = fixture.tokens.clone().map(|token| format!("Bearer {token}"));
        for operation in OPERATIONS.iter().filter(|operation| operation.path != "/v1/events") {
            let what = format!("{} {}", operation.method, operation.path);
            let none = client.ask(&what, &[], "").await;
            let wrong = client.ask(&what, &[("authorization", "Bearer x")], "").await;
            let reading = client.ask(&what, &[("authorization", &bearer[1])], "").await;
            let barred = |status: u16| [401, 403].contains(&status);
            match operation.needs {
                Needs::Nothing => assert!(!barred(none.status), "{what}: {none:?}"),
                Needs::Reading => assert!(none.status == 401 && wrong.status == 401 && !barred(reading.status), "{what}: {reading:?}"),
                Needs::Changing => assert!(none.status == 401 && wrong.status == 401 && reading.status == 403, "{what}: {reading:?}"),
            }
        }
        assert_eq!((fixture.mind.borrow().commands, fixture.text().as_str()), (0, FILE), "no request was allowed to change anything");
        let (none, wrong) =
            (client.ask("GET /v1/links", &[], "").await, client.ask("GET /v1/links", &[("authorization", "Bearer x")], "").await);
        assert_eq!((&none.json()["title"], &wrong.json()["title"]), (&json!("No token"), &json!("Unknown token")));
        assert!(wrong.json()["detail"].as_str().unwrap().contains("ui-token"), "{wrong:?}");
        let down = client.ask("POST /v1/down", &[("authorization", &bearer[0])], "").await;
        assert_eq!((down.status, fixture.mind.borrow().commands), (200, 1));
    });
}

#[test]
fn browser_requests_from_other_sites_are_rejected() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.remote().await;
        let page = client.ask("GET /", &[("accept-encoding", "gzip")], "").await;
        assert_eq!((page.status, page.header("content-encoding"), page.header("x-content-type-options")), (200, "gzip", "nosniff"));
        let policy = page.header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"));
        let rebound = client.ask("GET /v1/status", &[("host", "evil.example")], "").await;
        assert_eq!((rebound.status, rebound.header("content-type")), (421, "application/problem+json"));
        let token = json!({"token": fixture.tokens[0]}).to_string();
        let own = format!("http://{}", fixture.address);
        let host = fixture.address.to_string();
        for (origin, site, status) in [
            (Some("https://evil.example"), "cross-site", 403),
            (Some("null"), "cross-site", 403),
            (None, "cross-site", 403),
            (None, "same-site", 403),
            (Some("http://localhost:1"), "same-origin", 403),
            (Some(own.as_str()), "same-origin", 200),
        ] {
            let mut headers = vec![("host", host.as_str()), ("sec-fetch-site", site)];
            headers.extend(origin.map(|origin| ("origin", origin)));
            assert_eq!(client.ask("POST /v1/session", &headers, &token).await.status, status, "{origin:?} {site}");
        }
        let session = client.ask("POST /v1/session", &[], &token).await;
        let cookie = session.header("set-cookie").split(';').next().unwrap().to_owned();
        assert_eq!(session.json(), json!({"schema_version": 1, "may_change": true}));
        let status = client.ask("GET /v1/status", &[("cookie", &cookie)], "").await;
        assert_eq!((status.status, status.header("cache-control")), (200, "no-store"));
        assert_eq!(client.ask("POST /v1/reload", &[("cookie", &cookie)], "").await.status, 200);
        assert_eq!(client.ask("POST /v1/session", &[], "{\"token\":\"guess\"}").await.status, 401);
    });
}

#[test]
fn every_client_gets_the_pages_address_with_its_own_access_right() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.remote().await;
        for (token, may_change) in fixture.tokens.iter().zip([true, false]) {
            let answer = client.ask("POST /v1/ui", &[("authorization", &format!("Bearer {token}"))], "").await.json();
            let ticket = answer["url"].as_str().unwrap().strip_prefix(&format!("http://{}/#token=", fixture.address)).unwrap();
            let body = json!({"token": ticket}).to_string();
            let sessions = [client.ask("POST /v1/session", &[], &body).await, client.ask("POST /v1/session", &[], &body).await];
            assert_eq!(
                (sessions[0].json(), sessions[1].status),
                (json!({"schema_version": 1, "may_change": may_change}), 401),
                "a ticket starts one session"
            );
        }
        let over_unix = fixture.local().await.ask("POST /v1/ui", &[], "").await;
        assert_eq!(over_unix.status, 409, "this server has no page address");
    });
}

#[test]
fn a_change_is_previewed_applied_written_and_undone() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.local().await;
        let config = client.ask("GET /v1/config", &[], "").await.json();
        assert_eq!((config["text"].as_str(), config["can_undo"].as_bool()), (Some(FILE), Some(false)));
        let change =
            json!({"revision": config["revision"], "edits": [{"op": "set", "path": ["scheduler"], "value": "operetta"}]}).to_string();
        let preview = client.ask("POST /v1/config/preview", &[], &change).await.json();
        assert_eq!(preview["changes"], json!(["scheduler changes to \"operetta\" (was \"round-robin\")"]));
        assert_eq!(fixture.text(), FILE);
        let applied = client.ask("POST /v1/config", &[], &change).await;
        assert_eq!((applied.status, fixture.text()), (200, FILE.replace("round-robin", "operetta")));
        assert_eq!(client.ask("GET /v1/policy", &[], "").await.json()["scheduler"], "operetta");
        assert_eq!(client.ask("POST /v1/config", &[], &change).await.status, 409, "the text has changed");
        let revision = applied.json()["revision"].clone();
        let wrong = json!({"revision": revision, "edits": [{"op": "set", "path": ["scheduler"], "value": "opereta"}]}).to_string();
        let refused = client.ask("POST /v1/config", &[], &wrong).await;
        let finding = &refused.json()["findings"][0];
        assert_eq!((refused.status, &finding["line"], &finding["nearest"]), (422, &json!(2), &json!("operetta")));
        let undone = client.ask("POST /v1/config/undo", &[], "").await;
        assert_eq!((undone.status, fixture.text().as_str()), (200, FILE));
        assert_eq!(client.ask("GET /v1/policy", &[], "").await.json()["scheduler"], "round-robin");
        let notes: Vec<String> = fixture.mind.borrow().notes().into_iter().map(|note| note.text).collect();
        assert!(notes[0].contains("scheduler changes to") && notes[1].contains("undone"), "{notes:?}");
    });
}

#[test]
fn listeners_receive_only_changed_flows() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mind = &mut *fixture.mind.borrow_mut();
        let known = mind.core.flows_view(NOW);
        let first = known.changes(None);
        let id = first.put[0].id;
        assert_eq!((first.put.len(), first.put[0].name.as_deref()), (1, Some("<script>")));
        let later = NOW + Duration::from_secs(1);
        mind.core.poll(later).unwrap();
        assert_eq!(mind.core.flows_view(later).changes(Some(&known)), FlowChanges::default(), "only its age has changed");
        mind.core.steering().transfer(FlowId(id), ByteCount::new(1000), ByteCount::ZERO);
        mind.core.poll(later).unwrap();
        let grown = mind.core.flows_view(later);
        assert_eq!(grown.changes(Some(&known)).put[0].rx_bytes, Some(1000));
        mind.core.steering().close(later, FlowId(id));
        mind.core.poll(later).unwrap();
        let last = mind.core.flows_view(later).changes(Some(&grown));
        assert_eq!((last.put.len(), last.gone), (0, vec![id]));
    });
}

#[test]
fn events_are_streamed_and_kept_in_the_history() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        fixture.mind.borrow_mut().second();
        let (head, mut body) = fixture.local().await.begin(request("GET /v1/events", &[], "")).await.unwrap().into_parts();
        assert_eq!(head.headers["content-type"], "text/event-stream");
        let mut told = String::new();
        while !told.contains("event: sample") {
            told.push_str(std::str::from_utf8(&body.frame().await.unwrap().unwrap().into_data().unwrap()).unwrap());
        }
        assert!(told.contains("event: status") && told.contains("\"full\":true") && told.contains("<script>"), "{told}");
        assert!(
            ["status", "apps", "peers"].iter().all(|name| told.contains(&format!("event: {name}\ndata: {{\"schema_version\":1,"))),
            "{told}"
        );
        assert!(told.contains("\"peers\":[]}\n"), "{told}");
        fixture.mind.borrow_mut().lose_link();
        fixture.mind.borrow_mut().second();
        while !told.contains("lte0 was removed") {
            told.push_str(std::str::from_utf8(&body.frame().await.unwrap().unwrap().into_data().unwrap()).unwrap());
        }
        let mut client = fixture.local().await;
        let history = client.ask("GET /v1/history?resolution=1s&since_ms=0", &[], "").await.json();
        assert_eq!((&history["resolution_ms"], history["samples"].as_array().unwrap().len()), (&json!(1000), 2));
        assert_eq!(client.ask("GET /v1/history?resolution=2s", &[], "").await.status, 400);
        let moved = client.ask("GET /v1/history/apps?resolution=1s", &[], "").await.json();
        assert_eq!((&moved["resolution_ms"], moved["samples"].as_array().unwrap().len()), (&json!(1000), 2));
        assert_eq!(client.ask("GET /v1/history/apps?application=%3Cscript%3E&x=1", &[], "").await.status, 400);
        let notes = client.ask("GET /v1/notes", &[], "").await.json();
        let last = notes["notes"].as_array().unwrap().last().unwrap()["id"].as_u64().unwrap();
        assert_eq!(client.ask(&format!("GET /v1/notes?since={last}"), &[], "").await.json(), json!({"schema_version": 1, "notes": []}));
        let gains = client.ask("GET /v1/gains?days=7", &[], "").await.json();
        assert_eq!((&gains["estimated"], &gains["days"]), (&json!(true), &json!(7)));
    });
}

#[test]
fn the_tradeoff_uses_the_present_links() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.local().await;
        let tradeoff = client.ask("GET /v1/tradeoff", &[], "").await.json();
        let points = tradeoff["points"].as_array().unwrap();
        assert_eq!((points.len(), &points[0]["utility"], &points[20]["utility"]), (21, &json!(0.0), &json!(1.0)));
        let bps = |point: usize| points[point]["throughput_bps"].as_u64();
        assert_eq!((bps(0), bps(10), bps(20)), (Some(100_000_000), Some(150_000_000), Some(200_000_000)));
        // Both links alike: 81.16 J per gigabyte, at 25 MB/s.
        assert!((points[20]["power_w"].as_f64().unwrap() - 2.03).abs() < 0.01, "{tradeoff}");
    });
}

/// Sixty-four readers could occupy all streams.
#[test]
fn regression_readers_leave_streams_to_clients_with_full_access() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let bearer = fixture.tokens.clone().map(|token| format!("Bearer {token}"));
        let stream = |token: &str| request("GET /v1/events", &[("authorization", token)], "");
        let mut kept = Vec::new();
        for _ in 0..64 {
            let mut reader = fixture.remote().await;
            let answer = reader.begin(stream(&bearer[1])).await.unwrap();
            if answer.status() == 200 {
                kept.push((reader, answer));
            }
        }
        assert!(!kept.is_empty());
        let answer = fixture.remote().await.begin(stream(&bearer[0])).await.unwrap();
        assert_eq!(answer.status(), 200);
    });
}

/// Requests with slow bodies could take any number of permits.
#[test]
fn regression_the_concurrent_requests_of_a_reader_are_limited_and_others_are_answered() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let bearer = fixture.tokens.clone().map(|token| format!("Bearer {token}"));
        let mut slow = Vec::new();
        for _ in 0..16 {
            let mut stream = tokio::net::TcpStream::connect(fixture.address).await.unwrap();
            let head = format!(
                "POST /v1/explain HTTP/1.1\r\nhost: localhost\r\nauthorization: {}\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{",
                bearer[1]
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            slow.push(stream);
        }
        let status = async |token: &str| fixture.remote().await.ask("GET /v1/status", &[("authorization", token)], "").await.status;
        let refused = async {
            while status(&bearer[1]).await != 429 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), refused).await.expect("the reader reaches its limit");
        assert_eq!(status(&bearer[0]).await, 200);
        drop(slow);
        let answered = async {
            while status(&bearer[1]).await != 200 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), answered).await.expect("the reader is below its limit again");
    });
}

#[test]
fn a_rule_of_a_program_ends_when_its_process_ends() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.local().await;
        // The program keeps no connection.
        let script = "import socket, sys\nbody = sys.argv[2]\none = socket.socket(1, 1)\none.connect(sys.argv[1])\n\
            one.sendall(f'POST /v1/rules HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\ncontent-length: {len(body)}\\r\\n\
            connection: close\\r\\n\\r\\n{body}'.encode())\nwhile one.recv(4096): pass\none.close()\nsys.stdin.read()";
        let add = |name: &str, stays: bool| {
            let body = json!({"name": name, "rule": {"match": {"port": 443}, "weight": 2.0}, "lease_ms": 60_000, "stays": stays});
            let mut command = std::process::Command::new("python3");
            command.args(["-c", script]).arg(fixture.folder.path().join("socket")).arg(body.to_string());
            command.stdin(std::process::Stdio::piped()).spawn().unwrap()
        };
        let mut programs = [add("mine", false), add("stays", true)];
        wait_for_rules(&mut client, &["mine", "stays"]).await;
        let rules = client.ask("GET /v1/rules", &[], "").await.json();
        let mine = rules["rules"].as_array().unwrap().iter().find(|rule| rule["name"] == "mine").unwrap().clone();
        assert_eq!(mine["process"], json!(programs[0].id()));
        assert!(mine["program"].as_str().unwrap().starts_with("python3"), "{mine}");
        assert!(mine["entry"]["matches"] == "port = 443" && mine["entry"]["weight"] == 2.0 && mine["entry"]["unmet"].is_null(), "{mine}");
        for program in &mut programs {
            program.kill().unwrap();
            program.wait().unwrap();
        }
        wait_for_rules(&mut client, &["stays"]).await;
        assert!(fixture.mind.borrow().notes().iter().any(|note| note.text.contains("has ended: its rules are removed")));
    });
}

/// Waits until these rules of programs exist, in any order.
async fn wait_for_rules(client: &mut fixture::Connection, wanted: &[&str]) {
    let wait = async {
        loop {
            let rules = client.ask("GET /v1/rules", &[], "").await.json();
            let mut names: Vec<&str> = rules["rules"].as_array().unwrap().iter().map(|rule| rule["name"].as_str().unwrap()).collect();
            names.sort_unstable();
            if names == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("the rules appear or disappear");
}

#[test]
fn a_rule_over_tcp_ends_with_its_lease_only_and_is_parsed_like_an_entry() {
    in_runtime(async {
        let fixture = Fixture::new().await;
        let mut client = fixture.remote().await;
        let full = format!("Bearer {}", fixture.tokens[0]);
        let headers = [("authorization", full.as_str())];
        let mut ask = async |body: serde_json::Value| client.ask("POST /v1/rules", &headers, &body.to_string()).await;
        let good = json!({"match": {"name": "curl"}, "weight": 2.0});
        for (body, status, text) in [
            (json!({"name": "mine", "rule": good}), 400, "lease_ms"),
            (json!({"name": "mine", "rule": good, "lease_ms": 10}), 400, "lease_ms"),
            (json!({"name": "mine", "rule": good, "lease_ms": 1000, "lease": 1}), 400, "unknown field"),
            (json!({"name": "Mine", "rule": good, "lease_ms": 1000}), 400, "lower-case"),
            (json!({"name": "mine", "rule": {}, "lease_ms": 1000}), 422, "match"),
            (json!({"name": "mine", "rule": {"match": {}}, "lease_ms": 1000}), 422, "match"),
            (json!({"name": "mine", "rule": {"match": {"port": 0}}, "lease_ms": 1000}), 422, "port"),
            (json!({"name": "mine", "rule": {"match": {"name": "x"}, "wieght": 2}, "lease_ms": 1000}), 422, "weight"),
            (json!({"name": "mine", "rule": {"match": {"name": "x"}, "links": ["no-such-link"]}, "lease_ms": 1000}), 422, "no-such-link"),
            (json!({"name": "mine", "rule": {"match": {"name": "x".repeat(20_000)}}, "lease_ms": 1000}), 400, "longer than"),
            (json!({"name": "mine", "rule": {"match": {"name": "x"}, "when": {"moving": true}}, "lease_ms": 1000}), 409, "when"),
            (json!({"name": "mine", "rule": good, "reserve": {"up_bps": 1_000_000}, "lease_ms": 1000}), 409, "not known yet"),
            (json!({"name": "mine", "rule": good, "reserve": {"up": 1}, "lease_ms": 1000}), 400, "unknown field"),
            (json!({"name": "mine"}), 404, "braid rules"),
            (json!({"name": "mine", "rule": good, "lease_ms": 1000}), 200, "is added for 1 s"),
            (json!({"name": "mine", "rule": good, "lease_ms": 2000}), 200, "is renewed for 2 s"),
        ] {
            let answer = ask(body.clone()).await;
            let told = answer.json().to_string();
            assert!(answer.status == status && told.contains(text), "{body}: {told}");
        }
        let rules = client.ask("GET /v1/rules", &headers, "").await.json();
        assert_eq!((rules["rules"].as_array().unwrap().len(), &rules["rules"][0]["process"]), (1, &json!(null)));
        let removed = client.ask("POST /v1/rules", &headers, r#"{"name": "mine"}"#).await;
        assert_eq!(removed.json()["message"], "the rule mine is removed");
        assert_eq!(fixture.text(), FILE, "the configuration file is untouched");
    });
}
