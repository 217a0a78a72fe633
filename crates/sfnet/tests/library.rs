//! The libraries for Rust and Python against controllers that follow a script. The lab tests them with the real one.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use braid_sfnet::{ClientEvent, Network, Options};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(20);
const WELCOME: &str = "{\"say\":\"welcome\",\"version\":1,\"host\":\"02:00:00:00:00:01\",\"services\":[\"multicast\"]}\n";

type Answer = fn(&Value) -> Option<String>;

/// Takes one connection after the other. Each answers lines as its function says, and ends when that says nothing.
fn controller(connections: Vec<Answer>) -> (SocketAddr, JoinHandle<Vec<Value>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = move || {
        let mut asked = Vec::new();
        for answer in connections {
            let (mut stream, _): (TcpStream, _) = listener.accept().unwrap();
            stream.write_all(WELCOME.as_bytes()).unwrap();
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let Ok(line) = line else { break };
                let ask: Value = serde_json::from_str(&line).unwrap();
                let said = answer(&ask);
                asked.push(ask);
                let Some(said) = said else { break };
                if stream.write_all(said.as_bytes()).is_err() {
                    break;
                }
            }
        }
        asked
    };
    (address, thread::spawn(serve))
}

fn network(address: SocketAddr) -> Network {
    // The loopback device has nobody who would answer.
    Network::new(Options { controller: Some(address), device: Some("lo".into()), tls: None })
}

fn until(network: &mut Network, is_it: impl Fn(&ClientEvent) -> bool) -> ClientEvent {
    loop {
        let event = network.wait(LONG).expect("something happens");
        if is_it(&event) {
            return event;
        }
    }
}

fn started(ask: &Value, lease: u64) -> Option<String> {
    (ask["ask"] == "start").then(|| json!({"say": "started", "id": ask["id"], "lease": lease, "result": lease}).to_string() + "\n")
}

#[test]
fn what_is_wanted_is_asked_for_again_when_the_controller_comes_back() {
    let (address, serving) = controller(vec![|ask| started(ask, 7), |ask| started(ask, 8)]);
    let mut network = network(address);
    let want = network.start("multicast", json!({"group": "239.192.1.2"}), 5);
    let first = until(&mut network, |event| matches!(event, ClientEvent::Started { .. }));
    assert_eq!(first, ClientEvent::Started { want, result: json!(7) });
    assert!(network.own_address().is_some_and(|own| own.is_loopback()));
    // The script ends the connection on this.
    network.state(None);
    until(&mut network, |event| matches!(event, ClientEvent::Disconnected { .. }));
    let again = until(&mut network, |event| matches!(event, ClientEvent::Started { .. }));
    assert_eq!(again, ClientEvent::Started { want, result: json!(8) });
    drop(network);
    let asked = serving.join().unwrap();
    let starts = asked.iter().filter(|ask| ask["ask"] == "start").count();
    assert_eq!(starts, 2, "{asked:?}");
}

#[test]
fn an_answer_in_pieces_is_read_and_one_without_end_is_refused() {
    let (address, serving) =
        controller(vec![|ask| Some(json!({"say": "state", "id": ask["id"], "state": "x".repeat(200_000)}).to_string() + "\n"), |_| {
            Some("y".repeat((1 << 20) + 40_000))
        }]);
    let mut network = network(address);
    network.state(None);
    let ClientEvent::State { state, .. } = until(&mut network, |event| matches!(event, ClientEvent::State { .. })) else { unreachable!() };
    assert_eq!(state.as_str().map(str::len), Some(200_000));
    drop(network);
    let mut network = self::network(address);
    network.state(None);
    let ClientEvent::Disconnected { reason, .. } = until(&mut network, |event| matches!(event, ClientEvent::Disconnected { .. })) else {
        unreachable!()
    };
    assert!(reason.contains("more than 1048576 bytes"), "{reason}");
    drop(network);
    serving.join().unwrap();
}

#[test]
fn a_controller_that_is_not_there_is_an_event_with_its_reason() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut network = network(address);
    let event = network.wait(LONG).unwrap();
    assert!(matches!(&event, ClientEvent::Disconnected { reason, .. } if reason.contains(&address.to_string())), "{event:?}");
    assert_eq!(network.wait(Duration::from_millis(20)), None, "it pauses");
}

#[test]
fn the_package_for_python_passes_its_own_tests() {
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/braid_sfnet");
    let output = match Command::new("python3").args(["-B", "-m", "unittest", "discover", "-s", "tests"]).current_dir(package).output() {
        Ok(output) => output,
        Err(error) if std::env::var_os("CI").is_none() => return eprintln!("skipped: cannot run python3: {error}"),
        Err(error) => panic!("cannot run python3: {error}"),
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("OK"), "{said}");
}
