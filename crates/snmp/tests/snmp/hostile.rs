//! Bad days: agents that lie, stay silent or never end; managers that flood; forged and malformed datagrams.

use std::time::Duration;

use braid_snmp::{Event, Limits, Message, Output, Pdu, PduKind, Setup, Value, VarBind};

use crate::support::*;

fn setup() -> Setup {
    let slices = vec![slice("blue", vec![subtree("1.3.6.1.2", true)]), slice("green", vec![subtree("1.3.6.1.2", false)])];
    Setup { devices: vec![device("ap1"), device("ap2")], slices, ..Setup::default() }
}

/// Sends a request, and answers what goes to the agent by `answer`, so often.
fn with_agent(kind: PduKind, mut answer: impl FnMut(&Pdu) -> Pdu) -> (Pdu, Vec<Event>) {
    let mut world = World::new(setup(), Vec::new());
    let asked = Pdu { request_id: 1, index: if kind == PduKind::GetBulk { 20 } else { 0 }, ..Pdu::asking(kind, [oid("1.3.6.1.2.1")]) };
    world.slicer.receive_request(world.now, 0, manager_address(), &Message::encode_community(b"blue", &asked));
    for _ in 0..10_000 {
        match world.slicer.poll_output() {
            Some(Output::ToAgent { bytes, .. }) => {
                let Message::Community { pdu, .. } = Message::decode(&bytes).unwrap() else { panic!() };
                world.slicer.receive_answer(world.now, 0, &Message::encode_community(b"agent", &answer(&pdu)));
            }
            Some(Output::ToManager { bytes, .. }) => {
                let Message::Community { pdu, .. } = Message::decode(&bytes).unwrap() else { panic!() };
                return (pdu, std::iter::from_fn(|| world.slicer.poll_event()).collect());
            }
            other => panic!("{other:?}"),
        }
    }
    panic!("no end");
}

#[test]
fn walks_that_do_not_go_forward_end() {
    for kind in [PduKind::GetNext, PduKind::GetBulk] {
        // The same name again, one before, and one outside the view that never ends.
        for name in ["1.3.6.1.2.1", "1.3.6.1.1"] {
            let (answer, events) = with_agent(kind, |asked| response(asked, vec![VarBind::new(oid(name), Value::Integer(1))]));
            assert_eq!(answer.status, 5, "genErr");
            assert!(events.iter().any(|event| event.to_string().contains("never end")), "{events:?}");
        }
    }
    // Names outside a table's rows without end: the agent makes up new ones.
    let mut setup = setup();
    setup.slices[0] = slice("blue", vec![table("1.3.6.1.2.1", &[&[5, 1]], &[])]);
    let mut world = World::new(setup, Vec::new());
    let asked = Pdu { request_id: 1, ..Pdu::asking(PduKind::GetNext, [oid("1.3.6.1.2.1")]) };
    world.slicer.receive_request(world.now, 0, manager_address(), &Message::encode_community(b"blue", &asked));
    let mut column = 0;
    let answer = loop {
        match world.slicer.poll_output() {
            Some(Output::ToAgent { bytes, .. }) => {
                let Message::Community { pdu, .. } = Message::decode(&bytes).unwrap() else { panic!() };
                column += 1;
                assert!(column < 1000, "no end");
                let made_up = VarBind::new(oid(&format!("1.3.6.1.2.1.{column}.6")), Value::Integer(1));
                world.slicer.receive_answer(world.now, 0, &Message::encode_community(b"agent", &response(&pdu, vec![made_up])));
            }
            Some(Output::ToManager { bytes, .. }) => break bytes,
            other => panic!("{other:?}"),
        }
    };
    let Message::Community { pdu, .. } = Message::decode(&answer).unwrap() else { panic!() };
    assert_eq!(pdu.status, 5);
}

#[test]
fn answers_that_do_not_fit_the_question_are_refused() {
    let other = |name: &str| VarBind::new(oid(name), Value::Integer(1));
    for bindings in [vec![], vec![other("1.3.6.1.2.2")], vec![other("1.3.6.1.2.1"), other("1.3.6.1.2.1")]] {
        let (answer, _) = with_agent(PduKind::Get, |asked| response(asked, bindings.clone()));
        assert_eq!(answer.status, 5, "{bindings:?}");
    }
    let (answer, _) = with_agent(PduKind::GetNext, |asked| response(asked, vec![]));
    assert_eq!(answer.status, 5);
    let many: Vec<VarBind> = (1..=100).map(|last| other(&format!("1.3.6.1.2.1.{last}"))).collect();
    let (answer, _) = with_agent(PduKind::GetBulk, |asked| response(asked, many.clone()));
    assert_eq!(answer.status, 5);
    // An error of no known number, with a place outside.
    let (answer, _) = with_agent(PduKind::Get, |asked| Pdu { status: 77, index: -3, ..response(asked, vec![]) });
    assert_eq!((answer.status, answer.index), (5, 0));
    let (answer, _) = with_agent(PduKind::GetNext, |asked| response(asked, vec![VarBind::new(oid("1.3.6.1.2.2"), Value::NoSuchObject)]));
    assert_eq!(answer.status, 5);
    // tooBig, however little is asked for.
    let (answer, _) = with_agent(PduKind::GetBulk, |asked| Pdu { status: 1, ..response(asked, vec![]) });
    assert_eq!(answer.status, 1);
}

#[test]
fn a_silent_agent_costs_its_own_requests_only() {
    let mut setup = setup();
    for slice in &mut setup.slices {
        let view = slice.views[&0].clone();
        slice.views.insert(1, view);
    }
    // The second device has an agent that answers.
    let mut world = World::new(setup, Vec::new());
    for id in 0..100 {
        let asked = Pdu { request_id: id, ..Pdu::asking(PduKind::Get, [oid("1.3.6.1.2.1.1.5.0")]) };
        world.slicer.receive_request(world.now, 0, manager_address(), &Message::encode_community(b"blue", &asked));
    }
    let sent = std::iter::from_fn(|| world.slicer.poll_output()).count();
    assert_eq!(sent, 16, "requests of a slice that wait for a device are limited");
    // The slice's requests to the other device, and another slice's to this one, are taken.
    for (community, device) in [(&b"blue"[..], 1), (b"green", 0)] {
        let asked = Pdu { request_id: 200, ..Pdu::asking(PduKind::Get, [oid("1.3.6.1.2.1.1.5.0")]) };
        world.slicer.receive_request(world.now, device, manager_address(), &Message::encode_community(community, &asked));
        assert!(matches!(world.slicer.poll_output(), Some(Output::ToAgent { device: at, .. }) if at == device));
    }
    // Each is sent once more, then gets genErr.
    let answers = world.pass(Duration::from_secs(5));
    assert_eq!(answers.len(), 18);
    for answer in answers {
        let Message::Community { pdu, .. } = Message::decode(&answer).unwrap() else { panic!() };
        assert_eq!(pdu.status, 5);
    }
    let texts: Vec<String> = world.events.iter().map(ToString::to_string).collect();
    assert!(
        texts.iter().any(|text| text.contains("slice blue") && text.contains("1.3.6.1.2.1.1.5.0") && text.contains("check that it runs")),
        "{texts:?}"
    );
}

#[test]
fn floods_are_cut_per_manager() {
    let mut setup = setup();
    setup.slices[0].managers[0].rate = 10;
    let agent = Tree::new([(oid("1.3.6.1.2.1.1.5.0"), Value::Integer(1))]);
    let mut world = World::new(setup, vec![agent]);
    let get = || Pdu::asking(PduKind::Get, [oid("1.3.6.1.2.1.1.5.0")]);
    let answered = (0..1000).filter(|_| world.ask("blue", get()).is_some()).count();
    assert_eq!(answered, 20, "two seconds' worth at once");
    assert!((0..100).all(|_| world.ask("green", get()).is_some()), "the other slice notices nothing");
    world.pass(Duration::from_secs(1));
    assert_eq!((0..1000).filter(|_| world.ask("blue", get()).is_some()).count(), 10);
    assert!(world.events.iter().any(|event| event.to_string().contains("`rate`")));
}

#[test]
fn strangers_get_no_answer() {
    let agent = Tree::new([(oid("1.3.6.1.2.1.1.5.0"), Value::Integer(1))]);
    let mut world = World::new(setup(), vec![agent]);
    let get = || Pdu::asking(PduKind::Get, [oid("1.3.6.1.2.1.1.5.0")]);
    for community in ["", "public", "blu", "bluee", "agent"] {
        assert_eq!(world.ask(community, get()), None, "{community}");
    }
    // The right community from elsewhere, also from a mapped address; a mapped loopback address is one.
    for (from, is_answered) in
        [("192.0.2.1:161", false), ("[::ffff:192.0.2.1]:161", false), ("[2001:db8::1]:161", false), ("[::ffff:127.0.0.1]:161", true)]
    {
        let bytes = Message::encode_community(b"blue", &get());
        world.slicer.receive_request(world.now, 0, from.parse().unwrap(), &bytes);
        assert_eq!(!world.run().is_empty(), is_answered, "{from}");
    }
    // What no manager sends.
    for kind in [PduKind::Response, PduKind::Trap, PduKind::Inform, PduKind::Report] {
        assert_eq!(world.ask("blue", Pdu::new(kind, 0, vec![])), None);
    }
    assert!(world.events.iter().all(|event| !event.to_string().contains("public")), "communities are secret");
    assert_eq!(world.agents[0].requests, 1);
}

#[test]
fn answers_are_no_larger_than_allowed() {
    let long = Value::Octets(vec![7; 200]);
    let agent = Tree::new((0..1000).map(|row| (oid(&format!("1.3.6.1.2.1.1.{row}")), long.clone())));
    let mut setup = setup();
    setup.limits = Limits { answer: 484, repetitions: 50 };
    let mut world = World::new(setup, vec![agent]);
    let bulk = |index| Pdu { index, ..Pdu::asking(PduKind::GetBulk, [oid("1.3")]) };
    let answer = world.ask("blue", bulk(i32::MAX)).unwrap();
    assert_eq!((answer.status, answer.bindings.len()), (0, 2));
    assert!(world.agents[0].requests <= 2, "no more is asked for than fits");
    // Many names: tooBig. Negative numbers count as none.
    let many = |kind, count: u32| Pdu::asking(kind, (0..count).map(|row| oid(&format!("1.3.6.1.2.1.1.{row}"))));
    let answer = world.ask("blue", many(PduKind::Get, 3)).unwrap();
    assert_eq!((answer.status, answer.bindings.len()), (1, 0));
    assert_eq!(world.ask("blue", many(PduKind::Get, 129)).unwrap().status, 1);
    assert_eq!(world.ask("blue", bulk(-1)).unwrap().bindings, []);
    assert_eq!(world.ask("blue", Pdu { status: -5, ..bulk(1) }).unwrap().bindings.len(), 1);
    assert_eq!(world.ask("blue", many(PduKind::Get, 0)).unwrap().status, 0);
    // Whether the answer to a request to set fits is known before anything is set.
    let set = Pdu::new(PduKind::Set, 0, vec![VarBind::new(oid("1.3.6.1.2.1.1.1"), Value::Octets(vec![1; 300]))]);
    let requests = world.agents[0].requests;
    assert_eq!((world.ask("blue", set).unwrap().status, world.agents[0].requests), (1, requests));
}

#[test]
fn a_manager_that_asks_again_is_answered_once() {
    let mut world = World::new(setup(), Vec::new());
    let asked = Pdu { request_id: 7, ..Pdu::asking(PduKind::Get, [oid("1.3.6.1.2.1.1.5.0")]) };
    let bytes = Message::encode_community(b"blue", &asked);
    (0..5).for_each(|_| world.slicer.receive_request(world.now, 0, manager_address(), &bytes));
    assert_eq!(std::iter::from_fn(|| world.slicer.poll_output()).count(), 1);
}

#[test]
fn forged_answers_do_not_count() {
    let mut world = World::new(setup(), Vec::new());
    let asked = Pdu { request_id: 7, ..Pdu::asking(PduKind::Get, [oid("1.3.6.1.2.1.1.5.0")]) };
    world.slicer.receive_request(world.now, 0, manager_address(), &Message::encode_community(b"blue", &asked));
    let Some(Output::ToAgent { bytes, .. }) = world.slicer.poll_output() else { panic!() };
    let Message::Community { pdu, .. } = Message::decode(&bytes).unwrap() else { panic!() };
    assert_ne!(pdu.request_id, 7, "the number cannot be guessed");
    let value = vec![VarBind::new(oid("1.3.6.1.2.1.1.5.0"), Value::Integer(1))];
    let right = response(&pdu, value);
    for (community, answer) in [
        (&b"other"[..], right.clone()),
        (b"agent", Pdu { request_id: 7, ..right.clone() }),
        (b"agent", Pdu { kind: PduKind::Get, ..right.clone() }),
    ] {
        world.slicer.receive_answer(world.now, 0, &Message::encode_community(community, &answer));
        assert_eq!(world.slicer.poll_output(), None);
    }
    // That of another device.
    world.slicer.receive_answer(world.now, 1, &Message::encode_community(b"agent", &right));
    assert_eq!(world.slicer.poll_output(), None);
    world.slicer.receive_answer(world.now, 0, &Message::encode_community(b"agent", &right));
    assert!(matches!(world.slicer.poll_output(), Some(Output::ToManager { .. })));
}

#[test]
fn notifications_go_to_slices_that_see_their_variables() {
    let mut setup = setup();
    let at = |port: u16| Some(std::net::SocketAddr::from(([127, 0, 0, 1], port)));
    setup.slices =
        vec![slice("blue", vec![table("1.3.6.1.2.1.2.2.1", &[&[3]], &[])]), slice("green", vec![table("1.3.6.1.2.1.2.2.1", &[&[4]], &[])])];
    for (place, slice) in setup.slices.iter_mut().enumerate() {
        slice.managers[0].notify = at(2000 + place as u16);
    }
    let mut world = World::new(setup, Vec::new());
    let begin = || {
        vec![
            VarBind::new(oid("1.3.6.1.2.1.1.3.0"), Value::TimeTicks(1)),
            VarBind::new(oid("1.3.6.1.6.3.1.1.4.1.0"), Value::Oid(oid("1.3.6.1.6.3.1.1.5.3"))),
        ]
    };
    let state = |row: u32| VarBind::new(oid(&format!("1.3.6.1.2.1.2.2.1.7.{row}")), Value::Integer(2));
    let mut sent = |kind, community: &[u8], more: Vec<VarBind>| {
        let pdu = Pdu::new(kind, 5, [begin(), more].concat());
        world.slicer.receive_notification(world.now, 0, manager_address(), &Message::encode_community(community, &pdu));
        let outputs = std::iter::from_fn(|| world.slicer.poll_output());
        outputs
            .map(|output| match output {
                Output::ToManager { to, bytes, .. } => (to.port(), bytes),
                Output::ToNotifier { to, bytes, .. } => (to.port(), bytes),
                other => panic!("{other:?}"),
            })
            .collect::<Vec<_>>()
    };
    let ports = |sent: Vec<(u16, Vec<u8>)>| sent.into_iter().map(|(port, _)| port).collect::<Vec<_>>();
    assert_eq!(ports(sent(PduKind::Trap, b"agent", vec![state(3)])), [2000]);
    assert_eq!(ports(sent(PduKind::Trap, b"agent", vec![state(4)])), [2001]);
    assert_eq!(ports(sent(PduKind::Trap, b"agent", vec![state(3), state(4)])), [0; 0]);
    assert_eq!(ports(sent(PduKind::Trap, b"agent", vec![])), [2000, 2001]);
    assert_eq!(ports(sent(PduKind::Trap, b"other", vec![state(3)])), [0; 0]);
    let informed = sent(PduKind::Inform, b"agent", vec![state(3)]);
    assert_eq!(ports(informed.clone()), [2000, 40000], "an inform is answered");
    let Message::Community { community, pdu } = Message::decode(&informed[0].1).unwrap() else { panic!() };
    assert_eq!((&community[..], pdu.kind, pdu.bindings), (&b"blue"[..], PduKind::Trap, [begin(), vec![state(3)]].concat()));
}
