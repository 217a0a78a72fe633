//! End-to-end tests of `braid sim`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn sim(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
    command.arg("sim").args(words).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output of a command that must succeed.
fn succeed(words: &[&str]) -> String {
    let Output { status, stdout, stderr } = sim(words).output().unwrap();
    assert!(status.success(), "{words:?}: {}", text(&stderr));
    text(&stdout)
}

/// Standard error of a command that must fail with `code`.
fn fail(words: &[&str], code: i32) -> String {
    let Output { status, stderr, .. } = sim(words).output().unwrap();
    assert_eq!(status.code(), Some(code), "{words:?}: {}", text(&stderr));
    text(&stderr)
}

/// Output of the command with `input` on standard input.
fn feed(words: &[&str], input: &str) -> Output {
    let mut child = sim(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

#[test]
fn experiments_are_listed() {
    assert!(succeed(&["list"]).contains("thesis-4-5"));
    let list: Value = serde_json::from_str(&succeed(&["list", "--json"])).unwrap();
    assert!(list["schema_version"] == 1);
    assert!(list["experiments"].as_array().unwrap().iter().any(|one| one["name"] == "thesis-4-5" && one["paper"] == "thesis"), "{list}");
}

#[test]
fn one_seed_gives_the_same_files_with_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["thesis-3-1", "thesis-4-3", "thesis-4-5"] {
        let run = |threads: &str| {
            let out = folder.path().join(format!("{name} {threads}"));
            let words = ["run", name, "--seed", "7", "--runs", "2", "--threads", threads, "--out", out.to_str().unwrap()];
            (succeed(&words), files(&out))
        };
        let (one, three) = (run("1"), run("3"));
        assert!(one.0.contains("seed 7") && one.0.contains("VERDICT"), "{}", one.0);
        assert!(one.1.contains_key(&format!("{name}.json")) && one.1.keys().any(|file| file.ends_with(".svg")), "{:?}", one.1.keys());
        assert_eq!(one, three, "{name}");
    }
}

#[test]
fn results_can_be_printed_as_json() {
    let found: Value = serde_json::from_str(&succeed(&["run", "thesis-4-3", "--json", "--seed", "3"])).unwrap();
    let found = &found["experiments"];
    assert_eq!(
        (&found[0]["name"], &found[0]["seed"], &found[0]["verdicts"][0]["judgement"]),
        (&"thesis-4-3".into(), &3.into(), &"not-met".into())
    );
}

#[test]
fn an_unknown_experiment_is_rejected_with_the_nearest_name() {
    let said = fail(&["run", "thesis-45"], 1);
    assert!(said.contains("no experiment \"thesis-45\"") && said.contains("did you mean \"thesis-4-5\""), "{said}");
    assert!(!fail(&["run", "?"], 1).contains("did you mean"));
}

#[test]
fn an_unwritable_folder_is_reported() {
    let said = fail(&["run", "thesis-4-3", "--out", "/dev/null/plots"], 1);
    assert!(said.contains("/dev/null/plots") && said.contains("can be written"), "{said}");
}

const FAIR: &str = r#"{"links":[{"name":"1","capacity_bps":3000000},{"name":"2","capacity_bps":10000000}],
    "flows":[{"name":"a","weight":1,"links":["1"],"demand_bps":null,"packet_bytes":1500},
             {"name":"b","weight":2,"links":["1","2"],"demand_bps":null,"packet_bytes":1500},
             {"name":"c","weight":1,"links":["2"],"demand_bps":null,"packet_bytes":1500}],
    "duration_s":20,"seed":1}"#;

#[test]
fn a_fair_instance_is_solved() {
    let output = feed(&["fair", "--instance", "-", "--json"], FAIR);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let near = |value: &Value, wanted: f64, part: f64| (value.as_f64().unwrap() / wanted - 1.0).abs() < part;
    assert!(near(&answer["rates_bps"]["b"], 20e6 / 3.0, 1e-9), "{answer}");
    assert_eq!(answer["clusters"][1]["flows"], serde_json::json!(["b", "c"]));
    assert_eq!(answer["clusters"][1]["links"], serde_json::json!(["2"]));
    assert!(near(&answer["clusters"][1]["rate_per_weight_bps"], 10e6 / 3.0, 1e-9), "{answer}");
    assert!(near(&answer["midrr"]["rates_bps"]["b"], 20e6 / 3.0, 0.01), "{answer}");
    assert!(answer["midrr"]["max_relative_deviation"].as_f64().unwrap() < 0.01, "{answer}");

    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), FAIR).unwrap();
    let shown = succeed(&["fair", "--instance", file.path().to_str().unwrap()]);
    assert!(shown.contains("6.7 Mbit/s") && shown.contains("b c"), "{shown}");
}

#[test]
fn counters_are_fair_where_flags_are_not() {
    let instance = r#"{"links":[{"name":"1","capacity_bps":2000000},{"name":"2","capacity_bps":3000000}],
        "flows":[{"name":"a","weight":1,"links":["1","2"],"demand_bps":null,"packet_bytes":1500},
                 {"name":"b","weight":1,"links":["2"],"demand_bps":null,"packet_bytes":1500}],"duration_s":20,"seed":1}"#;
    let output = feed(&["fair", "--json", "--instance", "-"], instance);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [counters, flags] = ["midrr", "midrr_flags"].map(|variant| answer[variant]["max_relative_deviation"].as_f64().unwrap());
    assert!((flags - 0.2).abs() < 0.01 && counters < 0.01, "{flags} {counters}");
}

#[test]
fn invalid_instances_are_rejected_with_field_and_reason() {
    let said = |command: &str, input: &str| {
        let output = feed(&[command, "--instance", "-", "--json"], input);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{input}: {}", text(&output.stderr));
        text(&output.stderr)
    };
    for (good, bad, field) in [
        ("\"weight\":2", "\"weight\":0", "flows[1].weight"),
        ("\"weight\":2", "\"wait\":2", "wait"),
        ("\"links\":[\"2\"]", "\"links\":[\"3\"]", "flows[2].links[0]"),
        ("\"seed\":1", "\"seed\":-1", "seed"),
        ("\"duration_s\":20", "\"duration_s\":1e9", "duration_s"),
        ("\"capacity_bps\":3000000", "\"capacity_bps\":900000000000000", "duration_s"),
        ("\"seed\":1}", "", "EOF"),
    ] {
        let found = said("fair", &FAIR.replacen(good, bad, 1));
        assert!(found.contains(field), "{bad}: {found}");
    }
    let found = said("operetta", r#"{"alpha":2,"links":[],"streams":[],"new":{"load_bytes":1,"kind":"packet"}}"#);
    assert!(found.contains("alpha") && found.contains("from 0 to 1"), "{found}");
    let found = said("operetta", r#"{"alpha":1,"links":[],"streams":[],"new":{"load_bytes":1,"kind":"bulk"}}"#);
    assert!(found.contains("new.kind"), "{found}");
}

#[test]
fn an_operetta_instance_is_solved() {
    let instance = r#"{"alpha":1.0,"links":[{"name":"wifi","rate_bps":1000000,"power_mw":634}],
        "streams":[{"load_bytes":1000,"kind":"connection","link":"wifi"},{"load_bytes":1000,"kind":"packet"}],
        "new":{"load_bytes":1000,"kind":"connection"}}"#;
    let output = feed(&["operetta", "--instance", "-", "--json"], instance);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["assignment"], &answer["weights"]["wifi"], &answer["feasible"]), (&"wifi".into(), &1.0.into(), &true.into()));
    // 24,000 bits at 1 Mbit/s and 634 mW.
    assert!((answer["energy_j"].as_f64().unwrap() - 0.634 * 0.024).abs() < 1e-12, "{answer}");
    assert!(text(&feed(&["operetta", "--instance", "-"], instance).stdout).contains("goes to wifi"));
}

#[test]
fn a_missing_instance_is_reported() {
    let said = fail(&["fair", "--instance", "/nowhere.json"], 1);
    assert!(said.contains("/nowhere.json") && said.contains("standard input"), "{said}");
}
