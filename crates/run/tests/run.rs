//! `braid run` on the real kernel: a client with three links, and a user without privilege.

#[path = "support/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use world::{LINKS, OTHER, SERVER, SERVER_MAPPED, SERVER6, World, address, address6, counts, each, may_make_namespaces, text};

const TURNS: [&str; 2] = ["--scheduler", "round-robin"];

fn all() -> impl Iterator<Item = String> {
    (0..LINKS).map(address)
}

#[test]
fn connections_take_turns_in_both_families() {
    if !may_make_namespaces("connections over three links") {
        return;
    }
    let world = World::new();
    assert_eq!(world.ask(&TURNS, &["tcp", SERVER, "9"]), each(3, all()));
    assert_eq!(world.ask(&TURNS, &["tcp", SERVER_MAPPED, "9"]), each(3, all()));
    assert_eq!(world.ask(&TURNS, &["tcp", SERVER6, "9"]), each(3, (0..LINKS).map(address6)));
    assert_eq!(world.ask(&["--scheduler", "only-one"], &["tcp", SERVER, "9"]), each(9, [address(0)]));
    let two = [&TURNS[..], &["--link", "link1", "--link", "link2"]].concat();
    assert_eq!(world.ask(&two, &["tcp", SERVER, "8"]), each(4, [address(1), address(2)]));
    assert_eq!(world.ask(&TURNS, &["tcp-threads", SERVER, "100", "12"]), each(400, all()));
}

#[test]
fn concurrent_connections_spread_by_load() {
    if !may_make_namespaces("maximum throughput over three links") {
        return;
    }
    let world = World::new();
    let answers = world.ask(&[], &["tcp-threads", SERVER, "1000", "1"]);
    assert_eq!(answers.values().sum::<u64>(), 1000, "{answers:?}");
    assert!(answers.keys().cloned().eq(all()) && answers.values().all(|count| *count > 100), "{answers:?}");
}

#[test]
fn datagrams_take_turns_and_sockets_are_not_bound() {
    if !may_make_namespaces("datagrams over three links") {
        return;
    }
    let world = World::new();
    for kind in ["udp-connected", "udp-unconnected"] {
        assert_eq!(world.ask(&TURNS, &[kind, SERVER, "9"]), each(3, all()), "{kind}");
        assert_eq!(world.ask(&TURNS, &[kind, SERVER_MAPPED, "9"]), each(3, all()), "{kind}");
        assert_eq!(world.ask(&TURNS, &[kind, SERVER6, "9"]), each(3, (0..LINKS).map(address6)), "{kind}");
    }
    // Two destinations from one socket: each keeps its own link.
    assert_eq!(world.ask(&TURNS, &["udp-both", SERVER, OTHER]), each(2, [address(0), address(1)]));
    // After a steered destination, a destination on another link must be reached from that link's address.
    assert_eq!(world.ask(&["--link", "link1"], &["udp-reconnect", SERVER, "10.88.2.1"]), each(1, [address(1), address(2)]));
    // A socket with a port of its own is a server; its answers take the system's route.
    assert_eq!(world.ask(&["--link", "link1"], &["udp-server", "5353", SERVER, "3"]), each(3, [address(0)]));
}

#[test]
fn destinations_without_a_choice_of_links_are_left_alone() {
    if !may_make_namespaces("destinations to be left alone") {
        return;
    }
    let world = World::new();
    let second = ["--link", "link1"];
    assert_eq!(world.ask(&second, &["tcp", SERVER, "1"]), each(1, [address(1)]));
    // An on-link destination, a static route, and a socket bound to an address by its program.
    assert_eq!(world.ask(&second, &["tcp", "10.88.2.1", "2"]), each(2, [address(2)]));
    world.ip(&format!("route add {OTHER} via 10.88.2.1 dev link2"));
    assert_eq!(world.ask(&second, &["tcp", OTHER, "2"]), each(2, [address(2)]));
    assert_eq!(world.ask(&second, &["udp-connected", OTHER, "2"]), each(2, [address(2)]));
    world.ip("rule add from 10.88.2.2 lookup 7");
    world.ip("route add default via 10.88.2.1 dev link2 table 7");
    assert_eq!(world.ask(&second, &["tcp-from", &address(2), SERVER, "2"]), each(2, [address(2)]));
    // On loopback no process listens, and the program must receive that error.
    let refused = world.ask(&second, &["tcp", "127.0.0.1", "1"]);
    assert!(refused.keys().all(|answer| answer.contains("refused")), "{refused:?}");
}

#[test]
fn a_link_without_carrier_gets_no_new_connections() {
    if !may_make_namespaces("carrier loss") {
        return;
    }
    let world = World::new();
    world.make_gate();
    // The link is unused once the notification has arrived; the delay depends on the machine.
    let settle = format!("for i in 1 2 3 4 5 6 7 8 9; do ./peer tcp {SERVER} 3 > round; grep -q error round || break; done");
    let script = format!("./peer tcp {SERVER} 3; read go < gate; {settle}; ./peer tcp {SERVER} 8");
    let mut shell = world.run(&[&TURNS[..], &["--", "sh", "-c", &script]].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let mut before = [0; 36];
    shell.stdout.as_mut().unwrap().read_exact(&mut before).unwrap();
    assert_eq!(text(&before), "10.88.0.2 1\n10.88.1.2 1\n10.88.2.2 1\n");
    world.far_ip("link set far1 down");
    // The kernel reports carrier changes at most once a second, over all namespaces together.
    let state = || text(&world.on_client("ip").args(["link", "show", "dev", "link1"]).output().unwrap().stdout);
    wait_for("the kernel's notification", || !state().contains(" state UP "));
    world.open_gate();
    let after = shell.wait_with_output().unwrap();
    assert_eq!(text(&after.stdout), "10.88.0.2 4\n10.88.2.2 4\n");
}

#[test]
fn regression_the_supervisor_raises_its_file_limit_and_the_command_keeps_its_own() {
    if !may_make_namespaces("limits of open files") {
        return;
    }
    let world = World::new();
    let raised = "grep -q 'Max open files *1024 *1024 ' /proc/$PPID/limits";
    let script = format!("ulimit -Sn; for i in $(seq 600); do {raised} && echo raised && break; sleep 0.1; done");
    let mut command = world.as_nobody("prlimit");
    let output = command.args(["--nofile=256:1024", "./run", "--", "sh", "-c", &script]).output().unwrap();
    assert_eq!(text(&output.stdout), "256\nraised\n", "{}", text(&output.stderr));
}

#[test]
fn a_strict_filter_excludes_a_link_with_a_warning() {
    if !may_make_namespaces("strict reverse-path filter") {
        return;
    }
    let world = World::new();
    world.sysctl("net.ipv4.conf.all.rp_filter", "1");
    for link in 0..LINKS {
        world.sysctl(&format!("net.ipv4.conf.link{link}.rp_filter"), if link == 2 { "2" } else { "1" });
    }
    let output = world.run(&[&TURNS[..], &["--", "./peer", "tcp", SERVER, "4"]].concat()).output().unwrap();
    assert_eq!(counts(&output), each(2, [address(0), address(2)]));
    let warning = text(&output.stderr);
    assert!(warning.starts_with("braid: link1 ") && warning.contains("rp_filter") && warning.lines().count() == 1, "{warning}");
}

#[test]
fn the_command_does_not_notice_the_death_of_its_supervisor() {
    if !may_make_namespaces("death of the supervisor") {
        return;
    }
    let world = World::new();
    for victim in [Victim::Supervisor, Victim::Front, Victim::Guard] {
        let [told, begun, end] = ["told", "begun", "end"].map(|name| world.directory.path().join(name));
        let script = format!("exec ./peer tcp-between {SERVER} begun end > told");
        let mut front = world.run(&[&TURNS[..], &["--", "sh", "-c", &script]].concat()).spawn().unwrap();
        wait_for("the first answer", || begun.exists());
        let supervisor = only_child(front.id(), |_| true);
        let process = match victim {
            Victim::Front => front.id(),
            Victim::Supervisor => supervisor,
            Victim::Guard => only_child(supervisor, |name| name == "run"),
        };
        let command = only_child(supervisor, |name| name == "peer");
        check(Command::new("kill").args(["-KILL", &process.to_string()]));
        wait_for("its death", || !is_alive(process));
        std::fs::write(&end, "").unwrap();
        let status = front.wait().unwrap();
        assert_eq!(status.success(), victim != Victim::Front, "{victim:?}: {status}");
        wait_for("the command's end", || !is_alive(command));
        let told = std::fs::read_to_string(&told).unwrap();
        assert!(!told.contains("error") && told.contains(&address(0)), "{victim:?}: {told}");
        wait_for("the end of all", || !is_alive(supervisor));
        [&begun, &end].into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Supervisor,
    Front,
    Guard,
}

#[test]
fn the_command_behaves_as_if_run_directly() {
    if !may_make_namespaces("exit statuses and signals") {
        return;
    }
    let world = World::new();
    let status = |words: &[&str]| world.run(words).stderr(Stdio::null()).status().unwrap().code();
    assert_eq!(status(&["--", "sh", "-c", "exit 7"]), Some(7));
    assert_eq!(status(&["--", "sh", "-c", "kill -TERM $$"]), Some(143));
    assert_eq!(status(&["--", "no-such-program"]), Some(127));
    assert_eq!(status(&["--", "/"]), Some(126));
    assert_eq!(status(&["--link", "link9", "--", "true"]), Some(125));
    let mut shell = world.run(&["--", "sh", "-c", "read word; echo out $word; echo err >&2"]);
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(shell.stdin.as_mut().unwrap(), b"word\n").unwrap();
    let output = shell.wait_with_output().unwrap();
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("out word\n", "err\n"));
    // A signal sent to the process that the user started is meant for the command.
    let mut shell = world.run(&["--", "sh", "-c", "trap 'exit 9' TERM; echo set; while :; do sleep 0.1; done"]);
    let mut shell = shell.stdout(Stdio::piped()).spawn().unwrap();
    shell.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    check(Command::new("kill").args(["-TERM", &shell.id().to_string()]));
    assert_eq!(shell.wait().unwrap().code(), Some(9));
}

#[test]
fn background_processes_are_steered_and_delay_nobody() {
    if !may_make_namespaces("background processes") {
        return;
    }
    let world = World::new();
    let script = format!("(read go < gate; ./peer tcp {SERVER} 6 > late) > /dev/null 2>&1 & exit 3");
    world.make_gate();
    // Standard output and error are pipes; both reach their end although a background process still runs.
    let output = world.run(&[&TURNS[..], &["--", "sh", "-c", &script]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    world.open_gate();
    let late = || std::fs::read_to_string(world.directory.path().join("late")).unwrap_or_default();
    wait_for("three answers", || late().lines().count() == LINKS);
    assert_eq!(late(), "10.88.0.2 2\n10.88.1.2 2\n10.88.2.2 2\n");
}

#[test]
fn a_program_that_cannot_be_inspected_runs_unsteered_with_one_warning() {
    if !may_make_namespaces("non-dumpable programs") {
        return;
    }
    let world = World::new();
    let hidden = world.directory.path().join("hidden");
    std::fs::copy(world.directory.path().join("peer"), &hidden).unwrap();
    // A user who may run a program but not read it may not inspect it either.
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o711)).unwrap();
    let script = format!("./hidden tcp {SERVER} 4; ./hidden tcp {SERVER} 4; ./peer tcp {SERVER} 3");
    let output = world.run(&[&TURNS[..], &["--", "sh", "-c", &script]].concat()).output().unwrap();
    assert_eq!(text(&output.stdout), "10.88.0.2 4\n10.88.0.2 4\n10.88.0.2 1\n10.88.1.2 1\n10.88.2.2 1\n");
    let warning = text(&output.stderr);
    assert!(warning.lines().count() == 1 && warning.contains("hidden"), "{warning}");
}

#[test]
fn regression_a_programs_name_cannot_send_escape_sequences_to_the_terminal() {
    if !may_make_namespaces("hostile names") {
        return;
    }
    let world = World::new();
    let hidden = world.directory.path().join("\u{1b}[2Jx");
    std::fs::copy(world.directory.path().join("peer"), &hidden).unwrap();
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o711)).unwrap();
    let output = world.run(&["--", hidden.to_str().unwrap(), "tcp", SERVER, "1"]).output().unwrap();
    let warning = text(&output.stderr);
    assert!(warning.contains("[2Jx") && !warning.contains('\u{1b}'), "{warning:?}");
}

#[test]
fn regression_a_hanging_supervisor_delays_the_command_only_for_seconds() {
    if !may_make_namespaces("a hung supervisor") {
        return;
    }
    let world = World::new();
    world.make_gate();
    let script = format!("read go < gate; ./peer tcp {SERVER} 3; exit 6");
    let front = world.run(&[&TURNS[..], &["--", "sh", "-c", &script]].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let supervisor = only_child(front.id(), |_| true);
    only_child(supervisor, |name| name == "sh");
    // The guard starts after the command.
    only_child(supervisor, |name| name == "run");
    check(Command::new("kill").args(["-STOP", &supervisor.to_string()]));
    world.open_gate();
    let output = front.wait_with_output().unwrap();
    assert_eq!((text(&output.stdout).as_str(), output.status.code()), ("10.88.0.2 3\n", Some(6)));
    wait_for("the end of the supervisor", || !is_alive(supervisor));
}

#[test]
fn regression_the_status_is_reported_although_sigchld_is_ignored() {
    if !may_make_namespaces("ignored ends of children") {
        return;
    }
    let world = World::new();
    let status = world.as_nobody("env").args(["--ignore-signal=CHLD", "./run", "--", "sh", "-c", "exit 7"]).status().unwrap();
    assert_eq!(status.code(), Some(7));
}

#[test]
fn no_new_privs_is_set_only_where_the_kernel_requires_it() {
    if !may_make_namespaces("privileges") {
        return;
    }
    let world = World::new();
    let words = ["grep", "NoNewPrivs", "/proc/self/status"];
    let output = world.run(&[&["--"], &words[..]].concat()).output().unwrap();
    assert_eq!(text(&output.stdout), "NoNewPrivs:\t1\n");
    let output = world.run_as_root(&[&["--"], &words[..]].concat()).output().unwrap();
    assert_eq!(text(&output.stdout), "NoNewPrivs:\t0\n");
}

#[test]
fn sockets_of_other_namespaces_are_left_alone() {
    if !may_make_namespaces("other namespaces") {
        return;
    }
    let world = World::new();
    let peer = world.directory.path().join("peer");
    let words = ["--link", "link1", "--", "nsenter", &world.far_namespace(), peer.to_str().unwrap(), "tcp", SERVER, "2"];
    let output = world.run_as_root(&words).output().unwrap();
    assert_eq!(counts(&output), each(2, [SERVER.to_owned()]), "{output:?}");
}

#[test]
fn a_run_inside_another_run_leaves_the_supervision_to_the_outer_one() {
    if !may_make_namespaces("a run within a run") {
        return;
    }
    let world = World::new();
    let output =
        world.run(&[&TURNS[..], &["--", "./run", "--link", "link0", "--", "./peer", "tcp", SERVER, "9"]].concat()).output().unwrap();
    assert_eq!(counts(&output), each(3, all()));
    assert_eq!(text(&output.stderr).lines().count(), 1, "{output:?}");
}

#[test]
fn static_programs_and_nested_filters_work_and_io_uring_is_refused() {
    if !may_make_namespaces("static programs") || !has("cc") {
        return;
    }
    let world = World::new();
    let (source, program) = (world.directory.path().join("static.c"), world.directory.path().join("static"));
    std::fs::write(&source, include_str!("support/static.c")).unwrap();
    check(Command::new("cc").args(["-static", "-o"]).args([&program, &source]));
    let output = world.run(&[&TURNS[..], &["--", "./static", SERVER]].concat()).output().unwrap();
    let expected: BTreeMap<String, u64> = each(2, all());
    assert_eq!(text(&output.stderr), "io_uring_setup: Function not implemented\nlistener: Device or resource busy\n");
    assert_eq!(tally(&text(&output.stdout)), expected);
}

#[test]
fn go_programs_work() {
    if !may_make_namespaces("Go programs") || !has("go") {
        return;
    }
    let world = World::new();
    let source = world.directory.path().join("dial.go");
    std::fs::write(&source, include_str!("support/dial.go")).unwrap();
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(world.directory.path().join("dial")).arg(&source);
    check(build.env("GO111MODULE", "off").env("GOFLAGS", "").current_dir(&world.directory));
    let output = world.run(&[&TURNS[..], &["--", "./dial", SERVER, "999"]].concat()).output().unwrap();
    assert_eq!(tally(&text(&output.stdout)), each(333, all()), "{output:?}");
}

#[test]
fn curl_works_with_names_and_addresses() {
    if !may_make_namespaces("curl") || !has("curl") {
        return;
    }
    let world = World::new();
    let url = format!("http://{SERVER}:8080/");
    let script = format!("for i in 1 2 3 4 5 6; do curl -s --http0.9 {url}; echo; done");
    let output = world.run(&[&TURNS[..], &["--", "sh", "-c", &script]].concat()).output().unwrap();
    assert_eq!(tally(&text(&output.stdout)), each(2, all()), "{output:?}");
}

fn tally(lines: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    lines.lines().for_each(|line| *counts.entry(line.to_owned()).or_default() += 1);
    counts
}

fn has(program: &str) -> bool {
    let found = std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).exists()));
    if !found {
        eprintln!("skipped, since {program} is not installed");
    }
    found
}

fn check(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
}

/// The only child of `parent` whose name matches `fits`; waits until there is exactly one.
fn only_child(parent: u32, fits: impl Fn(&str) -> bool) -> u32 {
    let children = || {
        let list = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        let mut all: Vec<u32> = list.split_whitespace().filter_map(|child| child.parse().ok()).collect();
        // Children of other threads are listed under those threads.
        for entry in std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten() {
            let list = std::fs::read_to_string(entry.path().join("children")).unwrap_or_default();
            all.extend(list.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
        all.sort_unstable();
        all.dedup();
        all.retain(|child| fits(std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default().trim_end()));
        all
    };
    wait_for("a child", || children().len() == 1);
    children()[0]
}

/// Whether a process is running; a zombie is not.
fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
