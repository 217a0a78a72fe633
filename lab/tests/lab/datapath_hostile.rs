//! A remote controller that does harm, or that another user runs: flows follow the local policy, and the daemon answers.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use braid_lab::Lab;

use crate::support::*;

const PORT: u16 = 9_310;
const CONFIG: &str = "scheduler = \"only-one\"\n[datapath]\ncontroller = \"tcp:127.0.0.1:6653\"\n";
/// Local control returns within this time after the controller's death.
const BACK: Duration = Duration::from_secs(1);
/// Memory in kilobytes that a controller may cost.
const MEMORY: u64 = 24 << 10;

/// The controller, in the client's namespace.
struct Hostile {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Hostile {
    /// `link`: the link over which it leads connections to host 11.
    fn start(lab: &Lab, user: Option<u32>, mode: &str, link: usize) -> Self {
        let mut command = lab.client().command_as(user, "python3").unwrap();
        command.args(["-c", include_str!("support/hostile_controller.py"), mode, lab.links()[link].name(), &Lab::internet(11).to_string()]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut hostile = Self { child, said };
        assert_eq!(hostile.says(), "listens");
        hostile
    }

    /// Its next line.
    fn says(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn warnings(up: &Up<'_>) -> String {
    up.status().unwrap()["warnings"].to_string()
}

/// The daemon answers soon, and has not grown much.
#[track_caller]
fn check_well(up: &Up<'_>, before: u64) {
    let begin = Instant::now();
    assert!(up.status().is_some());
    assert!(begin.elapsed() < Duration::from_secs(2), "status took {:?}", begin.elapsed());
    let now = up.resident();
    assert!(now < before + MEMORY, "{before} kB grew to {now} kB");
    assert!(!up.log().contains("panicked"), "{}", up.log());
}

#[test]
fn a_flood_of_changes_ends_with_its_controller() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let to = remote(11, PORT);
    let up = Up::start(&lab, CONFIG);
    let (usual, before) = (chosen(&lab, to).unwrap(), up.resident());
    let link = 1 - usual;
    let mut hostile = Hostile::start(&lab, None, "flood", link);
    assert_eq!(hostile.says(), "leads");
    eventually("the entry leads flows", || chosen(&lab, to).unwrap() == link);
    assert_eq!(hostile.says(), "flooded");
    check_well(&up, before);
    assert_eq!(chosen(&lab, to).unwrap(), link, "it is still there");
    drop(hostile);
    let took = within(BACK, "the local policy decides", || chosen(&lab, to).unwrap() == usual);
    println!("local control after {took:?}, in the middle of a flood");
    check_well(&up, before);

    // It gets an answer to each barrier.
    let mut bulk = Hostile::start(&lab, None, "bulk", link);
    let said = bulk.says();
    println!("100,000 changes with a barrier each: {said}");
    assert!(said.starts_with("answered 100001 ") && said.ends_with(" 0 errors"), "{said}");
    check_well(&up, before);
}

#[test]
fn a_controller_that_reads_nothing_sends_nonsense_or_flaps_leaves_flows_to_the_local_policy() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let to = remote(11, PORT);
    let up = Up::start(&lab, CONFIG);
    let (usual, before) = (chosen(&lab, to).unwrap(), up.resident());
    let link = 1 - usual;
    for (mode, says) in [("deaf", "closed"), ("garbage", ""), ("flap", "flaps")] {
        let mut hostile = Hostile::start(&lab, None, mode, link);
        if !says.is_empty() {
            assert_eq!(hostile.says(), says, "{mode}");
        }
        eventually("it is lost", || warnings(&up).contains("is lost") || warnings(&up).contains("cannot be reached"));
        within(BACK, "the local policy decides", || chosen(&lab, to).unwrap() == usual);
        check_well(&up, before);
        if mode == "flap" {
            // It is dialled less and less often.
            let taken = || up.log().matches("has the flow table").count();
            let first = taken();
            std::thread::sleep(Duration::from_secs(10));
            assert!(taken() - first <= 6, "{}", up.log());
        }
    }
}

#[test]
fn a_program_of_another_user_does_not_get_the_table() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let to = remote(11, PORT);
    let up = Up::start(&lab, CONFIG);
    let usual = chosen(&lab, to).unwrap();
    let hostile = Hostile::start(&lab, Some(NOBODY), "lead", 1 - usual);
    eventually("it is refused", || warnings(&up).contains(&format!("user {NOBODY}, neither root nor the daemon's,")));
    assert!(warnings(&up).contains("insecure = true"), "{}", warnings(&up));
    assert_eq!(chosen(&lab, to).unwrap(), usual);
    assert!(!up.log().contains("has the flow table"), "{}", up.log());
    drop(hostile);

    // The user may allow it.
    up.configure(&format!("{CONFIG}insecure = true\n"));
    up.signal("HUP");
    let _hostile = Hostile::start(&lab, Some(NOBODY), "lead", 1 - usual);
    eventually("it has the table", || chosen(&lab, to).unwrap() == 1 - usual);
    // Without the daemon nothing leads flows.
    up.signal("KILL");
    within(Duration::from_secs(5), "the system decides", || chosen(&lab, to).unwrap() == usual);
}
