//! Checks that the invitation in `docs/protocol.md` is written and parsed as documented.

use braid_model::key::PublicKey;
use braid_peer::invite::{Invite, Token};

const DOCUMENT: &str = include_str!("../../../docs/protocol.md");

#[test]
fn the_documented_invitation_is_written_and_parsed() {
    let addresses = ["192.0.2.1:5757", "[2001:db8::1]:443", "relay.example.org:5757"].map(|address| address.parse().unwrap());
    let name = Some("van".parse().unwrap());
    let invite = Invite::new(PublicKey::from([0x44; 32]), Token::from([0x33; 16]), addresses.to_vec(), name).unwrap();
    let row = DOCUMENT.lines().skip_while(|line| *line != "| invitation | line |").nth(2).expect("the document has a row for it");
    let line = row.split('`').nth(1).expect("the line is between backquotes");
    assert_eq!(invite.to_line(), line);
    assert_eq!(Invite::parse(line), Ok(invite));
}
