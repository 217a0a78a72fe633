//! Rules and reservations that programs add for a limited time.

use std::time::Duration;

use braid_api::{Accepted, ExplainRequest, FactChange, ProgramRule, Reserve};
use braid_control::config::Config;
use braid_control::core::{Due, MAX_PROGRAM_RULES, MAX_RULES_OF_PROGRAM, NewRule, Program};
use braid_control::fake::Steered;
use braid_control::steering::{AppId, ExeId};
use braid_control::{Cause, RequestError};
use braid_decide::policy::{AppMatcher, AppRule, Carry, Exclusions, Fallback, LinkRule, MAX_RULES, Portion, Scheduler, When};
use braid_model::{ByteCount, FlowId, LinkIndex, Rate, Role};

use super::world::*;

const MINUTE: Duration = Duration::from_secs(60);

fn program(process: u32) -> Option<Program> {
    Some(Program { process, started: 100, name: "client".to_owned() })
}

fn matching(name: &str) -> AppRule {
    AppRule { matcher: AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() }, ..AppRule::default() }
}

/// A rule that leads the program "test" over lte0.
fn over_lte() -> AppRule {
    AppRule { links: only(&["lte0"]), ..matching("test") }
}

fn started(config: Config) -> World {
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world
}

/// Links with 10 Mbit/s each way; wlan0 is the system's choice.
fn known(apps: Vec<AppRule>) -> Config {
    let capacity = Some(Rate::from_mbps(10));
    let link = |name| LinkRule { capacity_down: capacity, capacity_up: capacity, ..link_rule(name) };
    let mut config = config(Scheduler::OnlyOne);
    (config.policy.links, config.policy.apps) = (vec![link("wlan0"), link("lte0")], apps);
    config
}

fn up(bps: u64, link: Option<&str>) -> Reserve {
    Reserve { down_bps: None, up_bps: Some(bps), link: link.map(str::to_owned) }
}

impl World {
    fn put(&mut self, name: &str, program: Option<Program>, rule: AppRule) -> Result<Accepted, RequestError> {
        self.core.put_rule(self.now, NewRule { name, program, rule, reserve: None, lease: MINUTE })
    }

    fn reserve(&mut self, name: &str, rule: AppRule, reserve: &Reserve) -> Result<Accepted, RequestError> {
        self.core.put_rule(self.now, NewRule { name, program: None, rule, reserve: Some(reserve), lease: MINUTE })
    }

    fn rules(&self) -> Vec<ProgramRule> {
        self.core.program_rules(self.now)
    }

    fn explain_flow(&mut self, id: FlowId) -> braid_api::Explanation {
        self.core.explain(self.now, &ExplainRequest { flow: Some(id.0), ..ExplainRequest::default() }).unwrap()
    }

    /// Moves up to 20 Mbit/s out for each flow, as far as its pacing allows.
    fn upload(&mut self, span: Duration, flows: &[FlowId]) {
        for _ in 0..span.as_millis() / 20 {
            for id in flows {
                let pacing = self.pacing_of(*id).map_or(2e7, |bps| (bps as f64).min(2e7));
                self.core.steering().transfer(*id, ByteCount::ZERO, ByteCount::new((pacing * 0.02 / 8.0) as u64));
            }
            self.run(Duration::from_millis(20));
        }
    }

    fn pacing_of(&mut self, id: FlowId) -> Option<u64> {
        self.core.steering().shapes().get(&id)?.pacing.map(Rate::bps)
    }

    fn flow(&mut self, name: &str) -> (usize, FlowId) {
        let app = AppId { exe: ExeId { device: 1, inode: 3 }, name: name.to_owned() };
        let Steered::To(slot, id) = self.core.steering().connect(self.now, &app, 1000, (SERVER, 443)) else { panic!("{name}") };
        let now = self.now;
        self.core.steering().answer(now, id);
        (slot, id)
    }
}

#[test]
fn a_rule_applies_at_once_and_ends_with_its_lease() {
    let mut world = started(config(Scheduler::OnlyOne));
    assert_eq!(world.used(), ["wlan0"]);
    assert_eq!(world.put("mine", None, over_lte()).unwrap().message, "the rule mine is added for 60 s");
    assert!(world.core.take_actions().rules_changed);
    assert_eq!(world.used(), ["lte0"], "without a tick");
    world.run(Duration::from_millis(10));
    let (_, id) = world.flow("test");
    world.run(Duration::from_millis(500));
    let flows = world.core.flows(world.now);
    let shown: Vec<_> = flows.iter().map(|flow| (flow.id, flow.program_rule.as_deref(), flow.rule)).collect();
    assert!(shown.contains(&(id.0, Some("mine"), None)), "{shown:?}");
    let explained = world.explain_flow(id);
    assert_eq!(
        (explained.program_rule.as_deref(), explained.rule, explained.rule_text.as_deref()),
        (Some("mine"), None, Some("name = \"test\""))
    );
    world.run(MINUTE - Duration::from_secs(1));
    assert_eq!((world.used(), world.rules().len()), (vec!["lte0".to_owned()], 1));
    let (put, until) = (world.now, world.now + Duration::from_millis(1500));
    assert!(world.core.poll_timeout(put).0 <= until);
    world.core.tick(until).unwrap();
    world.now = until;
    assert_eq!((world.used(), world.rules()), (vec!["wlan0".to_owned()], vec![]));
    assert_ne!(world.core.poll_timeout(until).1, Due::Lease);
}

#[test]
fn a_lease_is_renewed_and_its_rule_changed_by_the_same_request() {
    let mut world = started(config(Scheduler::OnlyOne));
    world.put("mine", program(1), over_lte()).unwrap();
    world.run(MINUTE - Duration::from_secs(5));
    assert_eq!(world.put("mine", program(1), over_lte()).unwrap().message, "the rule mine is renewed for 60 s");
    world.run(MINUTE - Duration::from_secs(5));
    assert_eq!(world.used(), ["lte0"]);
    world.put("mine", program(1), AppRule { links: only(&["wlan0"]), ..matching("test") }).unwrap();
    assert_eq!((world.used(), world.rules().len()), (vec!["wlan0".to_owned()], 1));
    assert_eq!(world.core.remove_rule(world.now, "mine").unwrap().message, "the rule mine is removed");
    assert_eq!(world.core.remove_rule(world.now, "mine").unwrap_err().cause, Cause::NotFound);
}

#[test]
fn the_rules_of_a_program_end_with_it_and_no_others() {
    let mut world = started(config(Scheduler::OnlyOne));
    world.put("mine", program(1), over_lte()).unwrap();
    world.put("also-mine", program(1), matching("other")).unwrap();
    world.put("stays", None, matching("third")).unwrap();
    let reused = Program { started: 101, ..program(1).unwrap() };
    assert!(!world.core.on_program_ended(world.now, &reused).unwrap(), "a later process has the same id");
    assert_eq!(world.rules().len(), 3);
    let (_, id) = world.flow("test");
    assert!(world.core.on_program_ended(world.now, &program(1).unwrap()).unwrap());
    assert_eq!(world.used(), ["wlan0"]);
    assert_eq!(world.rules().iter().map(|rule| rule.name.as_str()).collect::<Vec<_>>(), ["stays"]);
    // The flow keeps its link, but the place of its rule may belong to another one by now.
    world.put("new", program(2), AppRule { weight: 3.0, ..matching("fourth") }).unwrap();
    world.run(Duration::from_secs(1));
    assert!(world.explain_flow(id).share.is_none_or(|share| share.weight == 1.0));
}

#[test]
fn a_name_belongs_to_the_program_that_uses_it() {
    let mut world = started(config(Scheduler::OnlyOne));
    world.put("mine", program(1), over_lte()).unwrap();
    for other in [program(2), None] {
        let error = world.put("mine", other, matching("x")).unwrap_err();
        assert!(error.cause == Cause::Conflict && error.detail.contains("belongs to client (process 1)"), "{error}");
    }
    assert_eq!(world.used(), ["lte0"]);
}

#[test]
fn the_users_entries_come_first() {
    let strict = AppRule { links: only(&["wlan0"]), ..matching("test") };
    let bond = AppRule { carry: Carry::Bond, fallback: Some(Fallback::None), ..matching("secret") };
    let mut config = config(Scheduler::OnlyOne);
    config.policy.apps = vec![strict, bond];
    config.policy.exclude = Exclusions { names: vec!["left".into()], ..Exclusions::default() };
    let mut world = started(config);
    for (name, wanted) in [("test", "[[app]] entry 1"), ("secret", "[[app]] entry 2"), ("left", "[exclude]")] {
        let error = world.put("mine", None, AppRule { links: only(&["lte0"]), ..matching(name) }).unwrap_err();
        assert!(error.cause == Cause::Conflict && error.detail.contains(wanted) && error.detail.contains("rule mine"), "{error}");
    }
    // A wider rule applies to what is left.
    let wide = AppRule { matcher: AppMatcher { port: Some(443), ..AppMatcher::default() }, links: only(&["lte0"]), ..AppRule::default() };
    world.put("wide", None, wide).unwrap();
    assert_eq!(world.used(), ["wlan0"], "the strict entry holds");
    let secret = ExplainRequest { name: Some("secret".into()), destination: Some(SERVER.to_string()), ..ExplainRequest::default() };
    let explained = world.core.explain(world.now, &secret).unwrap();
    assert_eq!((explained.rule, explained.program_rule, explained.confined), (Some(2), None, true), "it leaves through a relay or fails");
    assert_eq!(world.flow("other").0, 1, "lte0");
    assert_eq!(world.core.steering().params().unwrap().rules.len(), 4);
}

#[test]
fn a_policy_that_changes_suspends_rules_that_break_it() {
    let mut world = started(config(Scheduler::OnlyOne));
    world.put("mine", None, AppRule { carry: Carry::Direct, ..over_lte() }).unwrap();
    assert_eq!(world.used(), ["lte0"]);
    let before = world.core.config().clone();
    let mut confined = before.clone();
    (confined.policy.bonds_all, confined.policy.fallback) = (true, Fallback::None);
    world.core.reconfigure(world.now, confined).unwrap();
    let rules = world.core.steering().params().unwrap().rules.clone();
    assert_eq!(rules[0].matching.exe, Some(vec![]), "it matches nothing");
    let unmet = world.rules()[0].entry.unmet.clone();
    assert!(unmet.as_ref().is_some_and(|unmet| unmet.contains("fallback = \"none\"")), "{unmet:?}");
    let mut backup = before.clone();
    backup.policy.links = vec![LinkRule { role: Role::Backup, ..link_rule("lte0") }];
    world.core.reconfigure(world.now, backup).unwrap();
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0"]);
    let unmet = world.rules()[0].entry.unmet.clone();
    assert!(unmet.as_ref().is_some_and(|unmet| unmet.contains("the link lte0, which has role = \"backup\"")), "{unmet:?}");
    world.core.reconfigure(world.now, before).unwrap();
    world.run(Duration::from_millis(100));
    assert_eq!((world.used(), world.rules()[0].entry.unmet.clone()), (vec!["lte0".to_owned()], None));
}

#[test]
fn an_entry_with_a_condition_comes_first_while_it_holds() {
    let when = When { facts: [("moving".to_owned(), "true".to_owned())].into(), ..When::default() };
    let mut config = config(Scheduler::OnlyOne);
    config.policy.apps = vec![AppRule { when, links: only(&["wlan0"]), ..matching("test") }];
    let mut world = started(config);
    world.put("mine", None, over_lte()).unwrap();
    assert_eq!(world.used(), ["lte0"]);
    let change = FactChange { name: "moving".to_owned(), value: Some("true".to_owned()), for_ms: None };
    assert!(!world.core.set_fact(world.now, &change).unwrap().message.contains("entry 2"));
    assert_eq!(world.used(), ["wlan0"]);
    assert!(world.rules()[0].entry.unmet.as_ref().unwrap().contains("[[app]] entry 1"));
}

/// The firewall's rules outlive a killed daemon.
#[test]
fn the_firewall_does_not_hold_rules_of_programs() {
    let mut config = config(Scheduler::OnlyOne);
    config.policy.lan = vec!["lan0".to_owned()];
    config.policy.apps = vec![AppRule { matcher: AppMatcher { port: Some(22), ..AppMatcher::default() }, ..over_lte() }];
    let mut world = World::new(config);
    let plan = world.core.take_actions().gateway.flatten().unwrap();
    assert!(plan.rules.iter().any(|rule| rule.port == Some(22)), "{plan:?}");
    let strict = AppRule { matcher: AppMatcher { port: Some(443), ..AppMatcher::default() }, ..over_lte() };
    world.put("mine", None, strict).unwrap();
    world.set_network();
    assert_eq!((world.core.take_actions().gateway, world.used()), (None, vec!["lte0".to_owned()]));
}

#[test]
fn rules_are_limited_for_each_program_and_together() {
    let mut world = started(config(Scheduler::OnlyOne));
    let name = |number: usize| format!("r{number}");
    for number in 0..MAX_RULES_OF_PROGRAM {
        world.put(&name(number), program(1), matching(&name(number))).unwrap();
    }
    let error = world.put("more", program(1), matching("more")).unwrap_err();
    assert!(error.cause == Cause::Conflict && error.detail.contains("this program has 8 rules"), "{error}");
    world.put("r0", program(1), matching("changed")).unwrap();
    for number in MAX_RULES_OF_PROGRAM..MAX_PROGRAM_RULES {
        world.put(&name(number), None, matching(&name(number))).unwrap();
    }
    assert!(world.put("more", program(2), matching("more")).unwrap_err().detail.contains("32 rules together"));
    // More entries of the configuration leave less room.
    let mut config = world.core.config().clone();
    config.policy.apps = (0..MAX_RULES - 10).map(|number| matching(&format!("app{number}"))).collect();
    world.core.reconfigure(world.now, config).unwrap();
    world.run(Duration::from_millis(100));
    assert_eq!(world.core.steering().params().unwrap().rules.len(), MAX_RULES);
    assert_eq!(world.rules().iter().filter(|rule| rule.entry.unmet.is_none()).count(), 10);
}

#[test]
fn malformed_requests_change_nothing() {
    let mut world = started(known(vec![]));
    let long = "x".repeat(33);
    for name in ["", "Mine", "2x", "a b", "ä", "../x", &long] {
        assert_eq!(world.put(name, None, over_lte()).unwrap_err().cause, Cause::Unclear, "{name}");
        assert_eq!(world.core.remove_rule(world.now, name).unwrap_err().cause, Cause::Unclear, "{name}");
    }
    for lease in [Duration::ZERO, Duration::from_millis(999), Duration::from_secs(3601), Duration::from_millis(u64::MAX)] {
        let new = NewRule { name: "mine", program: None, rule: over_lte(), reserve: None, lease };
        assert_eq!(world.core.put_rule(world.now, new).unwrap_err().cause, Cause::Unclear, "{lease:?}");
    }
    let when = When { running: Some("game".into()), ..When::default() };
    assert_eq!(world.put("mine", None, AppRule { when, ..over_lte() }).unwrap_err().cause, Cause::Conflict);
    let error = world.put("mine", None, AppRule { guarantee: Some(Portion::Share(0.1)), ..over_lte() }).unwrap_err();
    assert!(error.cause == Cause::Conflict && error.detail.contains("reserve"), "{error}");
    let plain = || matching("test");
    for (rule, reserve) in [
        (plain(), Reserve::default()),
        (plain(), up(0, None)),
        (plain(), up(47_999, None)),
        (AppRule { prefer: only(&["wlan0"]).unwrap(), ..plain() }, up(1_000_000, None)),
        (AppRule { rate: Some(Portion::Rate(Rate::from_bps(900_000))), ..plain() }, up(1_000_000, None)),
        (AppRule { carry: Carry::Bond, ..plain() }, up(1_000_000, None)),
        (AppRule { relay: Some("home".into()), ..plain() }, up(1_000_000, None)),
    ] {
        assert_eq!(world.reserve("mine", rule, &reserve).unwrap_err().cause, Cause::Unclear, "{reserve:?}");
    }
    assert_eq!(world.reserve("mine", plain(), &up(u64::MAX, None)).unwrap_err().cause, Cause::Conflict);
    assert_eq!((world.rules(), world.core.steering().params().unwrap().rules.len()), (vec![], 0));
}

#[test]
fn a_failing_kernel_leaves_no_half_of_a_rule() {
    let mut world = started(config(Scheduler::OnlyOne));
    world.core.steering().set_chaos(Some(1));
    assert_eq!(world.put("mine", None, over_lte()).unwrap_err().cause, Cause::Failed);
    world.core.steering().set_chaos(None);
    world.run(Duration::from_secs(1));
    assert_eq!((world.used(), world.rules()), (vec!["wlan0".to_owned()], vec![]));
}

#[test]
fn a_reservation_is_placed_where_it_fits_and_refused_with_what_is_left() {
    let mut world = started(known(vec![]));
    let accepted = world.reserve("one", matching("one"), &up(5_000_000, Some("wlan0"))).unwrap();
    assert!(accepted.message.ends_with("reserved on wlan0"), "{}", accepted.message);
    let error = world.reserve("two", matching("two"), &up(4_000_000, Some("wlan0"))).unwrap_err();
    assert!(error.detail.contains("wlan0 has 3.0 Mbit/s left up"), "{error}");
    assert!(world.reserve("two", matching("two"), &up(4_000_000, None)).unwrap().message.ends_with("reserved on lte0"));
    assert_eq!(world.flow("two").0, 1, "its flows use that link");
    assert_eq!(world.flow("other").0, 0);
    let error = world.reserve("three", matching("three"), &up(5_000_000, None)).unwrap_err();
    assert!(error.detail.contains("wlan0 has 3.0 Mbit/s left up") && error.detail.contains("lte0 has 4.0 Mbit/s left up"), "{error}");
    let error = world.reserve("three", matching("three"), &up(1_000_000, Some("eth7"))).unwrap_err();
    assert!(error.detail.contains("there is no link eth7"), "{error}");
    let error = world.reserve("three", AppRule { links: only(&["lte0"]), ..matching("three") }, &up(1_000_000, Some("wlan0"))).unwrap_err();
    assert!(error.detail.contains("does not allow wlan0"), "{error}");
    // The same request again stays where it is.
    assert!(world.reserve("one", matching("one"), &up(5_000_000, Some("wlan0"))).unwrap().message.contains("is renewed"));
    assert!(world.rules().iter().all(|rule| rule.reservation.as_ref().unwrap().kept));
}

#[test]
fn what_the_configuration_guarantees_is_not_reserved() {
    let call = AppRule { guarantee: Some(Portion::Share(0.5)), links: only(&["wlan0"]), ..matching("call") };
    let mut world = started(known(vec![call]));
    let error = world.reserve("mine", matching("mine"), &up(4_000_000, Some("wlan0"))).unwrap_err();
    assert!(error.detail.contains("wlan0 has 3.0 Mbit/s left up"), "{error}");
    assert!(world.reserve("mine", matching("mine"), &up(4_000_000, None)).unwrap().message.ends_with("lte0"));
}

#[test]
fn an_unknown_capacity_cannot_be_reserved() {
    let mut world = started(config(Scheduler::OnlyOne));
    let error = world.reserve("mine", matching("mine"), &up(1_000_000, Some("wlan0"))).unwrap_err();
    assert!(error.detail.contains("capacity of wlan0 (up) is not known yet"), "{error}");
}

#[test]
fn a_reservation_follows_links_that_die_and_says_when_none_can_keep_it() {
    let mut world = started(known(vec![]));
    world.reserve("mine", matching("mine"), &up(6_000_000, None)).unwrap();
    world.reserve("fixed", matching("fixed"), &up(1_000_000, Some("wlan0"))).unwrap();
    let first = world.rules()[0].reservation.as_ref().unwrap().link.clone().unwrap();
    let (dead, other) = if first == "wlan0" { (1, "lte0") } else { (2, "wlan0") };
    world.devices.iter_mut().find(|device| device.index == LinkIndex(dead)).unwrap().carrier = false;
    world.set_network();
    world.run(Duration::from_millis(100));
    let moved = world.rules()[0].reservation.clone().unwrap();
    assert_eq!((moved.kept, moved.link.as_deref()), (true, Some(other)), "{moved:?}");
    world.devices.iter_mut().for_each(|device| device.carrier = false);
    world.set_network();
    world.run(Duration::from_millis(100));
    for reservation in world.rules().into_iter().map(|rule| rule.reservation.unwrap()) {
        assert!(!reservation.kept && reservation.link.is_none(), "{reservation:?}");
        assert!(reservation.reason.as_ref().is_some_and(|reason| reason.contains("wlan0 is not usable now")), "{reservation:?}");
    }
    let renewed = world.reserve("mine", matching("mine"), &up(6_000_000, None)).unwrap();
    assert!(renewed.warnings[0].contains("not kept now: wlan0 is not usable now"), "what was admitted stays: {renewed:?}");
    world.reserve("new", matching("new"), &up(1_000_000, None)).unwrap_err();
    world.devices.iter_mut().for_each(|device| device.carrier = true);
    world.set_network();
    world.run(Duration::from_secs(5));
    assert!(world.rules().iter().all(|rule| rule.reservation.as_ref().unwrap().kept), "{:?}", world.rules());
}

#[test]
fn other_flows_leave_a_reservation_free_also_while_it_is_idle() {
    let mut world = started(known(vec![]));
    let (_, bulk) = world.flow("bulk");
    world.upload(Duration::from_secs(2), &[bulk]);
    assert_eq!(world.pacing_of(bulk), None, "nothing limits it");
    world.reserve("call", matching("call"), &up(4_000_000, Some("wlan0"))).unwrap();
    world.upload(Duration::from_secs(3), &[bulk]);
    let beside_idle = world.pacing_of(bulk).unwrap();
    assert!((4_500_000..7_100_000).contains(&beside_idle), "{beside_idle}");
    let (_, call) = world.flow("call");
    world.upload(Duration::from_secs(3), &[bulk, call]);
    let (kept, rest) = (world.pacing_of(call).unwrap(), world.pacing_of(bulk).unwrap());
    assert!(kept >= 4_000_000 && kept + rest < 11_100_000, "{kept} {rest}");
    let share = world.explain_flow(call).share.unwrap();
    assert_eq!((share.up.reserved_bps, share.down.reserved_bps, share.up.guaranteed_bps >= Some(4_000_000)), (Some(4_000_000), None, true));
    world.core.remove_rule(world.now, "call").unwrap();
    world.upload(Duration::from_secs(1), &[bulk, call]);
    assert!(world.core.steering().shapes().is_empty(), "everything is given back");
}
