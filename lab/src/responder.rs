//! Small UDP services of the server: a DNS server (port 53) and an echo (port 7) on every address it has.

use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};

use crate::lab::Lab;
use crate::sys;

/// The services. They end when this value is dropped.
///
/// The DNS server resolves every name: `A` is 203.0.113.10 and `AAAA` 2001:db8:113::10, or .N and ::N for names whose first label is `nN`
/// (10 to 30); other questions get an empty answer. It answers from the address that was asked, so that each link's gateway is its resolver.
#[derive(Debug)]
pub struct Responder {
    quit: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Responder {
    /// Starts them; they answer when this returns.
    pub fn start(lab: &Lab) -> Result<Self> {
        let addresses = lab.server_addresses();
        let sockets = lab.server().run(move || bind(&addresses))??;
        let quit = Arc::new(sys::event()?);
        let signal = Arc::clone(&quit);
        let thread = lab.server().spawn_thread("lab-responder", move || serve(&sockets, &signal))?;
        Ok(Self { quit, thread: Some(thread) })
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        sys::raise(self.quit.as_fd());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sockets by the port that they serve. Without IPv6 in the lab, IPv6 addresses are left out.
fn bind(addresses: &[IpAddr]) -> Result<Vec<(u16, UdpSocket)>> {
    let mut sockets = Vec::new();
    for address in addresses {
        for port in [53, 7] {
            match UdpSocket::bind((*address, port)) {
                Ok(socket) => {
                    socket.set_nonblocking(true)?;
                    sockets.push((port, socket));
                }
                Err(_) if address.is_ipv6() => {}
                Err(error) => return Err(error).with_context(|| format!("cannot bind {address} port {port}")),
            }
        }
    }
    Ok(sockets)
}

fn serve(sockets: &[(u16, UdpSocket)], quit: &OwnedFd) {
    let fds: Vec<_> = sockets.iter().map(|(_, socket)| socket.as_raw_fd()).chain([quit.as_raw_fd()]).collect();
    let mut ready = Vec::new();
    let mut buffer = [0u8; 65536];
    while sys::wait_readable(&fds, &mut ready, None).is_ok() && ready.last() != Some(&true) {
        for ((port, socket), _) in sockets.iter().zip(&ready).filter(|(_, ready)| **ready) {
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let reply = if *port == 53 { answer(&buffer[..length]) } else { Some(buffer[..length].to_vec()) };
                if let Some(reply) = reply {
                    // A reply that cannot be sent (its link lost its carrier) is lost, as usual with UDP.
                    let _ = socket.send_to(&reply, from);
                }
            }
        }
    }
}

/// The reply to a DNS message (RFC 1035, section 4.1); `None` unless it holds exactly one question.
fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let is_one_question = query.get(2)? & 0x80 == 0 && query.get(4..6)? == [0, 1];
    let mut end = 12;
    while *query.get(end)? != 0 {
        end += usize::from(query[end]) + 1;
    }
    let kind = u16::from_be_bytes([*query.get(end + 1)?, *query.get(end + 2)?]);
    let question = query.get(12..end + 5)?;
    if !is_one_question {
        return None;
    }
    let data: Vec<u8> = match kind {
        1 => Lab::internet(host(question)).octets().to_vec(),
        28 => Lab::internet6(host(question)).octets().to_vec(),
        _ => Vec::new(),
    };
    let mut reply = query[..2].to_vec();
    // A response, authoritative, recursion available; recursion desired is copied from the question.
    reply.extend([0x84 | (query[2] & 1), 0x80, 0, 1, 0, u8::from(!data.is_empty()), 0, 0, 0, 0]);
    reply.extend(question);
    if !data.is_empty() {
        // The name by reference to the question, class IN, 60 s to live.
        reply.extend([0xc0, 12, question[question.len() - 4], question[question.len() - 3], 0, 1, 0, 0, 0, 60, 0, data.len() as u8]);
        reply.extend(data);
    }
    Some(reply)
}

/// The number N of a name whose first label is "nN".
fn host(question: &[u8]) -> u8 {
    let label = question.get(1..1 + usize::from(question[0])).unwrap_or_default();
    let number = std::str::from_utf8(label).ok().and_then(|label| label.strip_prefix('n')).and_then(|digits| digits.parse().ok());
    number.filter(|n| (10..=30).contains(n)).unwrap_or(10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(name: &str, kind: u16) -> Vec<u8> {
        let mut query = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            query.push(label.len() as u8);
            query.extend(label.bytes());
        }
        query.push(0);
        query.extend(kind.to_be_bytes());
        query.extend([0, 1]);
        query
    }

    #[test]
    fn names_resolve_to_their_addresses() {
        assert!(answer(&question("www.example.net", 1)).unwrap().ends_with(&[203, 0, 113, 10]));
        assert!(answer(&question("n23.lab", 1)).unwrap().ends_with(&[203, 0, 113, 23]));
        assert!(answer(&question("n23.lab", 28)).unwrap().ends_with(&[0, 0x23]));
        assert_eq!(answer(&question("n23.lab", 28)).unwrap()[..2], [0xab, 0xcd]);
    }

    #[test]
    fn other_questions_get_an_empty_answer_and_malformed_ones_none() {
        assert_eq!(answer(&question("a.b", 15)).unwrap()[6..8], [0, 0]);
        let whole = question("a.b", 1);
        for length in 0..whole.len() {
            assert_eq!(answer(&whole[..length]), None);
        }
        let mut response = whole;
        response[2] |= 0x80;
        assert_eq!(answer(&response), None, "a response is not answered, else two servers would talk for ever");
    }
}
