use super::*;

const LINK: LinkIndex = LinkIndex(1);

/// Senders at the far end of one link: each has one window under way per round trip, and what exceeds the link's rate waits in its queue.
struct FarEnd {
    rate: f64,
    round_trip: f64,
    queue: f64,
    moved: BTreeMap<FlowId, f64>,
    now: Time,
}

impl FarEnd {
    /// Passes `STEP` and returns the counters.
    fn pass(&mut self, shapes: &BTreeMap<FlowId, Shape>, flows: &[FlowId]) -> Vec<Progress> {
        self.now = self.now + STEP;
        let wait = self.queue * 8.0 / self.rate;
        let now = self.round_trip + wait;
        let window = |id: &FlowId| shapes.get(id).and_then(|shape| shape.window).map_or(1e6, |window| window.get() as f64);
        let under_way: f64 = flows.iter().map(window).sum();
        // The windows fill the path and then the queue.
        self.queue = (under_way - self.rate / 8.0 * self.round_trip).clamp(0.0, 200_000.0);
        let offered = under_way * 8.0 / now;
        let scale = (self.rate / offered).min(1.0);
        let row = |id: &FlowId| {
            let moved = self.moved.entry(*id).or_default();
            *moved += window(id) / now * scale * STEP.as_secs_f64();
            let micros = Some((now * 1e6) as u32);
            Progress {
                id: *id,
                rx: ByteCount::new(*moved as u64),
                tx: ByteCount::ZERO,
                read_at: self.now,
                rtt_us: micros,
                receive_rtt_us: micros,
            }
        };
        flows.iter().map(row).collect()
    }
}

fn far_end(mbps: f64, milliseconds: f64) -> FarEnd {
    FarEnd { rate: mbps * 1e6, round_trip: milliseconds / 1e3, queue: 0.0, moved: BTreeMap::new(), now: Time::from_millis(1000) }
}

fn subject(id: u64, rule: usize, preference: Preference) -> Subject {
    Subject { id: FlowId(id), limitable: true, link: LINK, client: None, rule: Some(rule), preference, least_round_trip: None }
}

fn facts(capacity: Option<Rate>, milliseconds: u64) -> BTreeMap<LinkIndex, LinkFacts> {
    let capacity = PerDirection { down: capacity, up: capacity };
    [(LINK, LinkFacts { capacity, round_trip: Some(Duration::from_millis(milliseconds)) })].into()
}

/// Runs for some seconds; returns the flows' rates in the last second.
fn run(subjects: &[Subject], far: &mut FarEnd, facts: &BTreeMap<LinkIndex, LinkFacts>, seconds: u64) -> Vec<f64> {
    let mut controller = Controller::default();
    controller.follow(subjects.iter().copied(), false);
    let ids: Vec<FlowId> = subjects.iter().map(|subject| subject.id).collect();
    let (mut shapes, mut before) = (BTreeMap::new(), BTreeMap::new());
    for step in 0..seconds * 10 {
        if step == (seconds - 1) * 10 {
            before = far.moved.clone();
        }
        controller.on_progress(&far.pass(&shapes, &ids));
        shapes = controller.step(facts);
    }
    ids.iter().map(|id| (far.moved[id] - before[id]) * 8.0).collect()
}

#[test]
fn a_window_holds_a_limit_at_any_round_trip() {
    let limit = Preference { rate: Some(Portion::Rate(Rate::from_mbps(4))), ..Preference::default() };
    for milliseconds in [10.0, 40.0, 100.0, 300.0] {
        let rates = run(&[subject(1, 0, limit)], &mut far_end(20.0, milliseconds), &facts(None, milliseconds as u64), 10);
        assert!((rates[0] / 4e6 - 1.0).abs() < 0.05, "{rates:?} at {milliseconds} ms");
    }
}

#[test]
fn weights_divide_a_link_and_its_queue_stays_short() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let mut far = far_end(12.0, 40.0);
    let rates = run(&[subject(1, 0, weight(1.0)), subject(2, 1, weight(3.0))], &mut far, &facts(Some(Rate::from_mbps(12)), 40), 8);
    assert!((rates[1] / rates[0] / 3.0 - 1.0).abs() < 0.05 && rates[0] + rates[1] > 10e6, "{rates:?}");
    assert!(far.queue * 8.0 / far.rate < 0.02, "the queue is {} bytes", far.queue);
}

#[test]
fn clients_share_a_link_whatever_their_number_of_flows() {
    let of = |id: u64, client: u128| Subject {
        client: Some(ClientKey(client)),
        ..subject(id, 0, Preference { among_clients: true, ..Preference::default() })
    };
    let mut subjects: Vec<Subject> = (1..9).map(|id| of(id, 1)).collect();
    subjects.push(of(9, 2));
    let rates = run(&subjects, &mut far_end(40.0, 40.0), &facts(Some(Rate::from_mbps(40)), 40), 8);
    let many: f64 = rates[..8].iter().sum();
    assert!((many / rates[8] - 1.0).abs() < 0.05 && many + rates[8] > 34e6, "{rates:?}");
}

#[test]
fn a_forwarded_flow_has_windows_and_no_pacing() {
    let limit = Preference { rate: Some(Portion::Rate(Rate::from_mbps(4))), ..Preference::default() };
    let mut controller = Controller::default();
    controller.follow([Subject { client: Some(ClientKey(1)), ..subject(1, 0, limit) }], false);
    let facts = facts(None, 40);
    let mut row = far_end(20.0, 40.0).pass(&BTreeMap::new(), &[FlowId(1)])[0];
    for step in 1..=20 {
        row = Progress { rx: ByteCount::ZERO, tx: ByteCount::new(50_000 * step), read_at: row.read_at + STEP, ..row };
        controller.on_progress(&[row]);
        controller.step(&facts);
    }
    let shape = controller.step(&facts)[&FlowId(1)];
    // 4 Mbit/s for 40 ms are 20 kB.
    assert!(shape.pacing.is_none() && shape.client_window.is_some_and(|window| (15_000..30_000).contains(&window.get())), "{shape:?}");
}

/// The windows of a download that was alone were megabytes, and a flow that joined it waited four seconds for its share.
#[test]
fn regression_windows_on_a_full_link_are_bounded_before_another_flow_joins() {
    for (may_share, capacity, bounded) in [(true, 12, true), (false, 12, false), (true, 100, false)] {
        let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
        controller.follow([subject(1, 0, Preference::default())], may_share);
        let (mut far, facts) = (far_end(12.0, 40.0), facts(Some(Rate::from_mbps(capacity)), 40));
        for _ in 0..20 {
            controller.on_progress(&far.pass(&shapes, &[FlowId(1)]));
            shapes = controller.step(&facts);
        }
        assert_eq!(controller.is_needed(&facts), bounded);
        assert!(shapes.values().all(|shape| shape.pacing.is_none()));
        let window = shapes.get(&FlowId(1)).and_then(|shape| shape.window);
        assert_eq!(window.is_some(), bounded, "{window:?}");
        // The queue of 200 kB stays, so nothing is slower, and a growth by half fits in.
        let under_way = 12e6 / 8.0 * 0.04 + 200_000.0;
        assert!(window.is_none_or(|window| (1.5..2.2).contains(&(window.get() as f64 / under_way))), "{window:?} of {under_way}");
    }
}

#[test]
fn a_flow_that_begins_claims_its_share_before_it_has_reached_it() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let (mut far, facts) = (far_end(12.0, 40.0), facts(Some(Rate::from_mbps(12)), 40));
    let (old, new) = (subject(1, 0, weight(1.0)), subject(2, 1, weight(2.0)));
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([old], true);
    for _ in 0..30 {
        controller.on_progress(&far.pass(&shapes, &[FlowId(1)]));
        shapes = controller.step(&facts);
    }
    controller.follow([old, new], true);
    // 1.2 Mbit/s, much less than its share.
    let mut target_after = |steps: std::ops::RangeInclusive<u64>| {
        for step in steps {
            let mut rows = far.pass(&shapes, &[FlowId(1)]);
            rows.push(Progress { id: FlowId(2), rx: ByteCount::new(15_000 * step), ..rows[0] });
            controller.on_progress(&rows);
            shapes = controller.step(&facts);
        }
        controller.share(FlowId(1), Direction::Down).and_then(|share| share.target).unwrap()
    };
    let early = target_after(1..=4);
    assert!(early < Rate::from_mbps(5), "{early}");
    let late = target_after(5..=30);
    assert!(late > Rate::from_mbps(6), "it keeps what the new flow does not use: {late}");
}

/// Each idle connection took a quarter of a megabit of the link, so that a hundred of them left little to a download.
#[test]
fn regression_idle_flows_leave_the_link_to_active_ones() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let mut far = far_end(12.0, 40.0);
    let mut subjects = vec![subject(1, 0, weight(2.0))];
    subjects.extend((2..102).map(|id| subject(id, 1, Preference::default())));
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow(subjects, false);
    for _ in 0..80 {
        controller.on_progress(&far.pass(&shapes, &[FlowId(1)]));
        shapes = controller.step(&facts(Some(Rate::from_mbps(12)), 40));
    }
    let share = controller.share(FlowId(1), Direction::Down).unwrap();
    assert!(share.target.is_none_or(|target| target > Rate::from_mbps(9)), "{share:?}");
}

#[test]
fn an_estimate_above_the_capacity_is_corrected_by_round_trips() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let mut far = far_end(12.0, 40.0);
    run(&[subject(1, 0, weight(1.0)), subject(2, 1, weight(3.0))], &mut far, &facts(Some(Rate::from_mbps(14)), 40), 15);
    assert!(far.queue * 8.0 / far.rate < 0.03, "the queue is {} bytes", far.queue);
}

#[test]
fn flows_without_a_preference_are_not_touched() {
    let mut controller = Controller::default();
    controller.follow([subject(1, 0, Preference::default())], false);
    assert!(!controller.asks());
    assert_eq!(controller.step(&facts(Some(Rate::from_mbps(12)), 40)), BTreeMap::new());
}

#[test]
fn a_flow_that_reaches_its_target_is_no_evidence_of_its_links_capacity() {
    let limit = Preference { rate: Some(Portion::Rate(Rate::from_mbps(4))), ..Preference::default() };
    let mut far = far_end(20.0, 40.0);
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, limit)], false);
    for _ in 0..50 {
        controller.on_progress(&far.pass(&shapes, &[FlowId(1)]));
        shapes = controller.step(&facts(None, 40));
    }
    assert!(controller.limits(FlowId(1), Direction::Down) && !controller.limits(FlowId(1), Direction::Up));
}

#[test]
fn the_guaranteed_rate_is_the_larger_of_weight_and_guarantee_up_to_the_limit() {
    let mut controller = Controller::default();
    let of = |guarantee, rate| Preference { rate, guarantee, ..Preference::default() };
    controller.follow(
        [
            subject(1, 0, of(Some(Portion::Share(0.5)), None)),
            subject(2, 1, of(None, Some(Portion::Rate(Rate::from_mbps(1))))),
            subject(3, 2, Preference { weight: 2.0, ..Preference::default() }),
        ],
        false,
    );
    let guaranteed = |id| controller.guaranteed(FlowId(id), Direction::Down, Some(Rate::from_mbps(12))).map(|it| it.rate().bps());
    assert_eq!([guaranteed(1), guaranteed(2), guaranteed(3)], [Some(6_000_000), Some(1_000_000), Some(6_000_000)]);
    assert_eq!(controller.guaranteed(FlowId(3), Direction::Down, None), None);
    // What is reserved for the second rule is not shared: 9 of 12 Mbit/s remain.
    let rates = PerDirection { down: Some(Rate::from_mbps(3)), up: None };
    controller.reserve([(LINK, Reserved { rule: 2, rates })]);
    let guaranteed = |id, direction| controller.guaranteed(FlowId(id), direction, Some(Rate::from_mbps(12))).map(|it| it.service.bps());
    assert_eq!([1, 2, 3].map(|id| guaranteed(id, Direction::Down)), [Some(6_000_000), Some(2_250_000), Some(6_000_000)]);
    assert_eq!(guaranteed(2, Direction::Up), Some(3_000_000));
}

#[test]
fn a_reservation_is_kept_free_while_it_is_idle_and_used_by_its_rule_only() {
    let mut far = far_end(12.0, 40.0);
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, Preference::default()), subject(2, 1, Preference::default())], true);
    let rates = PerDirection { down: Some(Rate::from_mbps(4)), up: None };
    controller.reserve([(LINK, Reserved { rule: 1, rates }), (LinkIndex(7), Reserved { rule: 0, rates })]);
    let target = |controller: &Controller, id| controller.share(FlowId(id), Direction::Down).unwrap().target.unwrap().bps();
    let mut pass = |controller: &mut Controller, flows: &[FlowId]| {
        for _ in 0..80 {
            controller.on_progress(&far.pass(&shapes, flows));
            shapes = controller.step(&facts(Some(Rate::from_mbps(12)), 40));
        }
    };
    pass(&mut controller, &[FlowId(1)]);
    assert!((6_000_000..9_000_000).contains(&target(&controller, 1)), "{}", target(&controller, 1));
    pass(&mut controller, &[FlowId(1), FlowId(2)]);
    assert!(target(&controller, 2) >= 4_000_000, "{}", target(&controller, 2));
    assert!(controller.share(FlowId(1), Direction::Up).unwrap().target.is_none(), "nothing is reserved in this direction");
    controller.reserve([]);
    controller.step(&facts(Some(Rate::from_mbps(12)), 40));
    assert!(!controller.asks() && [1, 2].iter().all(|id| controller.share(FlowId(*id), Direction::Down).unwrap().target.is_none()));
}

/// BBR sends next to nothing for 0.2 s every 10 s. The others took its share, and it was slow for a second or two after that.
#[test]
fn regression_a_short_pause_does_not_cost_a_share() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let mut far = far_end(12.0, 40.0);
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, weight(1.0)), subject(2, 1, weight(3.0))], false);
    let ids = [FlowId(1), FlowId(2)];
    let known = facts(Some(Rate::from_mbps(12)), 40);
    for _ in 0..50 {
        controller.on_progress(&far.pass(&shapes, &ids));
        shapes = controller.step(&known);
    }
    let before = (shapes[&FlowId(1)].window.unwrap(), shapes[&FlowId(2)].window.unwrap());
    for _ in 0..3 {
        // Only the first one moves data.
        let mut rows = far.pass(&shapes, &ids[..1]);
        let last = controller.flows[&FlowId(2)].last.unwrap();
        rows.push(Progress { read_at: rows[0].read_at, ..last });
        controller.on_progress(&rows);
        shapes = controller.step(&known);
    }
    let near = |now: Option<ByteCount>, before: ByteCount| (now.unwrap().get() as f64 / before.get() as f64 - 1.0).abs() < 0.15;
    assert!(near(shapes[&FlowId(1)].window, before.0) && near(shapes[&FlowId(2)].window, before.1), "{shapes:?}, before {before:?}");
}

/// The windows followed the rates while an old queue drained, and the headroom fell to its least.
#[test]
fn regression_a_queue_from_before_does_not_shrink_the_shares() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let mut far = far_end(12.0, 40.0);
    far.queue = 150_000.0;
    let subjects = [subject(1, 0, weight(1.0)), subject(2, 1, weight(3.0))];
    let begun = |subject: Subject| Subject { least_round_trip: Some(Duration::from_millis(40)), ..subject };
    let rates = run(&subjects.map(begun), &mut far, &facts(Some(Rate::from_mbps(12)), 40), 3);
    assert!((rates[0] / 3e6 - 1.0).abs() < 0.1 && (rates[1] / 9e6 - 1.0).abs() < 0.1, "{rates:?}");
}

#[test]
fn windows_follow_a_round_trip_that_changes() {
    let weight = |weight| Preference { weight, ..Preference::default() };
    let (mut far, known) = (far_end(12.0, 40.0), facts(Some(Rate::from_mbps(12)), 40));
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, weight(1.0)), subject(2, 1, weight(3.0))], false);
    let ids = [FlowId(1), FlowId(2)];
    for milliseconds in [40.0, 90.0, 30.0] {
        far.round_trip = milliseconds / 1e3;
        let mut before = BTreeMap::new();
        for step in 0..40 {
            if step == 30 {
                before = far.moved.clone();
            }
            controller.on_progress(&far.pass(&shapes, &ids));
            shapes = controller.step(&known);
        }
        let rates = ids.map(|id| (far.moved[&id] - before[&id]) * 8.0);
        assert!((rates[0] / 3e6 - 1.0).abs() < 0.12 && (rates[1] / 9e6 - 1.0).abs() < 0.12, "{rates:?} at {milliseconds} ms");
        assert!(far.queue * 8.0 / far.rate < 0.02, "the queue is {} bytes at {milliseconds} ms", far.queue);
    }
}

/// BBR sends at most twice its bandwidth of the last ten round trips times its least one of the last ten seconds. Windows that grew step by step came
/// too late for it after a path became twice as long.
#[test]
fn regression_windows_double_within_ten_round_trips_of_a_longer_path() {
    let (mut far, known) = (far_end(10.0, 60.0), facts(Some(Rate::from_mbps(10)), 60));
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, Preference { weight: 2.0, ..Preference::default() }), subject(2, 1, Preference::default())], false);
    let ids = [FlowId(1), FlowId(2)];
    let mut pass = |far: &mut FarEnd, steps| {
        for _ in 0..steps {
            controller.on_progress(&far.pass(&shapes, &ids));
            shapes = controller.step(&known);
        }
        ids.map(|id| shapes[&id].window.unwrap().get() as f64)
    };
    let before = pass(&mut far, 40);
    far.round_trip = 0.12;
    let after = pass(&mut far, 10);
    assert!(after[0] > 1.7 * before[0] && after[1] > 1.7 * before[1], "{before:?}, then {after:?}");
    pass(&mut far, 20);
    assert!(far.queue * 8.0 / far.rate < 0.02, "the queue is {} bytes", far.queue);
}

/// A flow that joined made a queue, and a trial failed. It blocked the next one for 10 s, also when the queue had gone and the path became longer.
#[test]
fn regression_a_failed_trial_blocks_only_while_there_is_a_queue() {
    let (mut far, known) = (far_end(10.0, 60.0), facts(Some(Rate::from_mbps(10)), 60));
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, Preference { weight: 2.0, ..Preference::default() }), subject(2, 1, Preference::default())], false);
    let ids = [FlowId(1), FlowId(2)];
    let mut before = 0.0;
    for step in 0..90 {
        match step {
            40 => far.rate = 5e6,
            50 => far.rate = 10e6,
            80 => far.round_trip = 0.12,
            _ => {}
        }
        controller.on_progress(&far.pass(&shapes, &ids));
        shapes = controller.step(&known);
        if step == 79 {
            before = shapes[&ids[0]].window.unwrap().get() as f64;
        }
    }
    let after = shapes[&ids[0]].window.unwrap().get() as f64;
    assert!(after > 1.7 * before, "{before}, then {after}");
}

/// A link that becomes slower makes round trips longer and rates lower, as a longer path does. Larger windows then go back.
#[test]
fn windows_that_make_a_queue_on_a_slower_link_go_back() {
    let (mut far, known) = (far_end(10.0, 60.0), facts(Some(Rate::from_mbps(10)), 60));
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    controller.follow([subject(1, 0, Preference { weight: 2.0, ..Preference::default() }), subject(2, 1, Preference::default())], false);
    let ids = [FlowId(1), FlowId(2)];
    let mut longest = 0.0_f64;
    for step in 0..140 {
        if step == 40 {
            far.rate = 5e6;
        }
        controller.on_progress(&far.pass(&shapes, &ids));
        shapes = controller.step(&known);
        if step > 50 {
            longest = longest.max(far.queue * 8.0 / far.rate);
        }
    }
    // The windows for 10 Mbit/s make a queue of some 70 ms, until a lower capacity is known.
    assert!(longest < 0.1, "the queue lasts {longest} s");
}

#[test]
fn tcp_flows_leave_a_udp_flow_what_it_is_guaranteed() {
    let mut far = far_end(12.0, 40.0);
    let (mut controller, mut shapes) = (Controller::default(), BTreeMap::new());
    let guarantee = Preference { guarantee: Some(Portion::Share(0.1)), ..Preference::default() };
    controller.follow([Subject { limitable: false, ..subject(1, 0, guarantee) }, subject(2, 1, Preference::default())], false);
    for step in 0..50_u64 {
        let rows = far.pass(&shapes, &[FlowId(2)]);
        // 800 kbit/s, as polls show it.
        let call = Progress { id: FlowId(1), rx: ByteCount::new(step * 10_000), rtt_us: None, receive_rtt_us: None, ..rows[0] };
        controller.on_poll(&[call]);
        controller.on_progress(&rows);
        shapes = controller.step(&facts(Some(Rate::from_mbps(12)), 40));
    }
    assert!(!shapes.contains_key(&FlowId(1)) && shapes[&FlowId(2)].window.is_some(), "{shapes:?}");
    let share = controller.share(FlowId(2), Direction::Down).unwrap();
    assert!(share.target.is_some_and(|target| target < Rate::from_mbps(11) && target > Rate::from_mbps(9)), "{share:?}");
}

#[test]
fn flows_with_a_preference_and_fast_flows_come_first_if_there_are_too_many() {
    let mut controller = Controller::default();
    let count = MAX_SHAPES as u64;
    let mut subjects: Vec<Subject> = (0..count + 10).map(|id| subject(id, 0, Preference::default())).collect();
    subjects.push(subject(count + 50, 1, Preference { weight: 2.0, ..Preference::default() }));
    controller.follow(subjects, false);
    let row = |at: u64, bytes: u64| Progress {
        id: FlowId(3),
        rx: ByteCount::new(bytes),
        tx: ByteCount::ZERO,
        read_at: Time::from_millis(at),
        rtt_us: Some(40_000),
        receive_rtt_us: None,
    };
    controller.on_progress(&[row(1000, 0)]);
    controller.on_progress(&[row(1100, 100_000)]);
    let shapes = controller.step(&facts(Some(Rate::from_mbps(12)), 40));
    assert_eq!((shapes.len(), controller.exceeding()), (MAX_SHAPES, 11));
    // The fast one, the one with a weight, and the newest of the others.
    for (id, listed) in [(3, true), (count + 50, true), (0, false), (count + 9, true)] {
        assert_eq!(shapes.contains_key(&FlowId(id)), listed, "{id}");
    }
}

#[test]
fn what_is_promised_counts_each_rule_with_living_flows_once() {
    let capacity = PerDirection::both(Some(Rate::from_mbps(20)));
    let guarantee = |portion| Preference { guarantee: Some(portion), ..Preference::default() };
    let fixed = guarantee(Portion::Rate(Rate::from_mbps(2)));
    let elsewhere = Subject { link: LinkIndex(7), ..subject(9, 5, fixed) };
    let flows = [
        subject(1, 0, fixed),
        subject(2, 0, fixed),
        subject(3, 1, guarantee(Portion::Share(0.1))),
        subject(4, 2, Preference::default()),
        elsewhere,
    ];
    let mut controller = Controller::default();
    controller.follow(flows, false);
    let promised = |controller: &Controller, capacity| controller.promised(LINK, capacity).map(|rate| rate.bps() / 1_000_000).to_array();
    assert_eq!(promised(&controller, capacity), [4, 4]);
    assert_eq!(promised(&controller, PerDirection::default()), [2, 2], "a share of an unknown capacity promises nothing");
    // What a program has reserved counts without flows, too, and as one rule with its guarantee.
    let reserved = |rule, mbps| (LINK, Reserved { rule, rates: PerDirection { down: Some(Rate::from_mbps(mbps)), up: None } });
    controller.reserve([reserved(0, 3), reserved(8, 5)]);
    assert_eq!(promised(&controller, capacity), [10, 4]);
    controller.follow([], false);
    controller.reserve([]);
    assert_eq!(promised(&controller, capacity), [0, 0]);
}
