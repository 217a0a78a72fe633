//! Entry point for the corpus and the fuzzer.

use braid_model::Time;
use braid_snmp::{AuthProtocol, Credentials, ManagerSetup, Message, Output, Policy, Setup, Shared, Slicer, UserKeys, Value};
use std::time::Duration;

use super::{Tree, device, identity, manager_address, oid, slice, subtree, table};

/// The slicer under a script: datagrams of managers and of an agent, some of them real, and time. Nothing panics, and the answer to every manager is a message
/// that fits.
pub fn snmp(script: &[u8]) {
    if let Ok(Message::Community { community, pdu }) = Message::decode(script) {
        let again = Message::decode(&Message::encode_community(&community, &pdu));
        assert_eq!(again, Ok(Message::Community { community, pdu }));
    }
    let mut agent = Tree::new((1..9).map(|row| (oid(&format!("1.3.6.1.2.1.2.2.1.7.{row}")), Value::Integer(1))));
    let mut slices =
        vec![slice("blue", vec![table("1.3.6.1.2.1.2.2.1", &[&[3], &[5]], &[7])]), slice("green", vec![subtree("1.3.6", true)])];
    let keys = user();
    let nets = vec!["127.0.0.0/8".parse().unwrap()];
    slices[0].managers.push(ManagerSetup { write: true, ..ManagerSetup::new(Credentials::User { name: b"blue".to_vec(), keys }, nets) });
    let policy = Policy::Virtual { operational: None, to: [(0, oid("1.3.6.1.2.1.2.2.1.7.8"))].into() };
    let shared = vec![Shared { device: 0, object: oid("1.3.6.1.2.1.2.2.1.7.3"), policy, bounds: Default::default() }];
    let setup = Setup { devices: vec![device("ap1")], slices, shared, ..Setup::default() };
    let (mut now, mut rest) = (Time::ZERO, script);
    let mut slicer = Slicer::new(now, &identity(1), setup);
    while let [operation, length, bytes @ ..] = rest {
        let (datagram, behind) = bytes.split_at(usize::from(*length).min(bytes.len()));
        rest = behind;
        match operation % 8 {
            0..=3 => slicer.receive_request(now, 0, manager_address(), datagram),
            4 => slicer.receive_answer(now, 0, datagram),
            5 => slicer.receive_notification(now, 0, manager_address(), datagram),
            _ => {
                now = now + Duration::from_millis(u64::from(*length) * 10);
                slicer.handle_timeout(now);
            }
        }
        while let Some(output) = slicer.poll_output() {
            match output {
                Output::ToManager { bytes, .. } => {
                    assert!(bytes.len() <= 1472 && Message::decode(&bytes).is_ok());
                }
                // The agent answers, if the script does not take its part.
                Output::ToAgent { bytes, .. } if operation & 8 == 0 => {
                    let Ok(Message::Community { community, pdu }) = Message::decode(&bytes) else { panic!() };
                    let answer = agent.answer(&pdu);
                    slicer.receive_answer(now, 0, &Message::encode_community(&community, &answer));
                }
                Output::ToAgent { .. } | Output::ToNotifier { .. } => {}
                Output::Store { job, .. } => slicer.stored(now, job, operation & 16 == 0),
            }
        }
        while let Some(event) = slicer.poll_event() {
            assert!(!event.to_string().is_empty());
        }
    }
    for row in [1, 2, 4, 6, 7] {
        // Only the slice that sees all may have set these; the other one's are 3, 5 and, by its own value, 8.
        assert!(agent.objects.contains_key(&oid(&format!("1.3.6.1.2.1.2.2.1.7.{row}"))));
    }
}

/// Keys, which take a while to make.
fn user() -> UserKeys {
    use std::sync::OnceLock;
    static KEYS: OnceLock<UserKeys> = OnceLock::new();
    KEYS.get_or_init(|| UserKeys::from_passwords(AuthProtocol::Sha256, b"a password", Some(b"a password")).unwrap()).clone()
}
