//! Both ends of the integration tests of `braid run`: a server that answers each client with the client's address, and clients that
//! print the answers.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

const PORT: u16 = 8080;

/// Time limit for one answer on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve"] => serve(),
        ["tcp", address, count] => print(repeat(count, || ask_tcp(parse(address)))),
        ["tcp-from", source, address, count] => print(repeat(count, || ask_tcp_from(parse(source), parse(address)))),
        ["tcp-threads", address, threads, count] => {
            let threads: Vec<_> = (0..number(threads))
                .map(|_| (address.to_owned(), count.to_owned()))
                .map(|(address, count)| thread::spawn(move || repeat(&count, || ask_tcp(parse(&address)))))
                .collect();
            print(threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect())
        }
        // Asks without a pause. Creates `begun` after the first answer, and asks once more after `end` exists.
        ["tcp-between", address, begun, end] => {
            let mut answers = Vec::new();
            let mut last = false;
            while !last {
                last = std::path::Path::new(end).exists();
                answers.push(or_error(ask_tcp(parse(address))));
                if answers.len() == 1 {
                    std::fs::write(begun, "")?;
                }
            }
            print(answers)
        }
        ["udp-connected", address, count] => print(repeat(count, || ask_connected(&unbound(address)?, parse(address)))),
        ["udp-unconnected", address, count] => print(repeat(count, || ask_unconnected(&unbound(address)?, parse(address)))),
        // One socket for both destinations: each answer comes over the link that its destination was assigned.
        ["udp-both", one, other] => {
            let socket = unbound(one)?;
            print([one, other, one, other].iter().map(|address| or_error(ask_unconnected(&socket, parse(address)))).collect())
        }
        // Connects one socket to one destination after the other, as a resolver does.
        ["udp-reconnect", one, other] => {
            let socket = unbound(one)?;
            print([one, other].iter().map(|address| or_error(ask_connected(&socket, parse(address)))).collect())
        }
        ["udp-server", port, address, count] => {
            let socket = UdpSocket::bind((IpAddr::from([0; 4]), number(port) as u16))?;
            socket.set_read_timeout(Some(LIMIT))?;
            print(repeat(count, || ask_unconnected(&socket, parse(address))))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("unknown command: {words:?}"))),
    }
}

fn parse(address: &str) -> IpAddr {
    address.parse().unwrap_or_else(|_| panic!("not an IP address: {address:?}"))
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("not a number: {text:?}"))
}

fn repeat(count: &str, mut ask: impl FnMut() -> io::Result<String>) -> Vec<String> {
    (0..number(count)).map(|_| or_error(ask())).collect()
}

fn or_error(answer: io::Result<String>) -> String {
    answer.unwrap_or_else(|error| format!("error: {error}"))
}

/// Prints every distinct answer with its count.
fn print(answers: Vec<String>) -> io::Result<()> {
    let mut counts = BTreeMap::<String, u64>::new();
    answers.into_iter().for_each(|answer| *counts.entry(answer).or_default() += 1);
    counts.iter().try_for_each(|(answer, count)| writeln!(io::stdout(), "{answer} {count}"))
}

fn ask_tcp(address: IpAddr) -> io::Result<String> {
    read_answer(TcpStream::connect((address, PORT))?)
}

fn ask_tcp_from(source: IpAddr, address: IpAddr) -> io::Result<String> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    socket.bind((source, 0).into())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let stream = runtime.block_on(async { socket.connect((address, PORT).into()).await?.into_std() })?;
    stream.set_nonblocking(false)?;
    read_answer(stream)
}

fn read_answer(mut stream: TcpStream) -> io::Result<String> {
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// An unbound socket; the standard library always binds.
fn unbound(address: &str) -> io::Result<UdpSocket> {
    let domain = if parse(address).is_ipv4() { socket2::Domain::IPV4 } else { socket2::Domain::IPV6 };
    let socket = socket2::Socket::new(domain, socket2::Type::DGRAM, None)?;
    socket.set_read_timeout(Some(LIMIT))?;
    Ok(socket.into())
}

fn ask_connected(socket: &UdpSocket, address: IpAddr) -> io::Result<String> {
    socket.connect((address, PORT))?;
    socket.send(b"who am I?")?;
    receive(socket)
}

fn ask_unconnected(socket: &UdpSocket, address: IpAddr) -> io::Result<String> {
    socket.send_to(b"who am I?", (address, PORT))?;
    receive(socket)
}

fn receive(socket: &UdpSocket) -> io::Result<String> {
    let mut answer = [0; 100];
    let length = socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
}

/// Serves until standard input ends. The first line of standard input lists the addresses to serve; `ready` on standard output confirms.
fn serve() -> io::Result<()> {
    let mut lines = io::stdin().lock().lines();
    for address in lines.next().transpose()?.unwrap_or_default().split_whitespace() {
        let streams = listen(parse(address))?;
        thread::spawn(move || {
            for mut stream in streams.incoming().flatten() {
                let _ = stream.peer_addr().and_then(|peer| stream.write_all(name(peer).as_bytes()));
            }
        });
        let datagrams = UdpSocket::bind((parse(address), PORT))?;
        thread::spawn(move || {
            while let Ok((_, peer)) = datagrams.recv_from(&mut [0; 100]) {
                let _ = datagrams.send_to(name(peer).as_bytes(), peer);
            }
        });
    }
    writeln!(io::stdout(), "ready")?;
    lines.for_each(drop);
    Ok(())
}

/// A listener with a backlog of 4096; the standard library's is 128.
fn listen(address: IpAddr) -> io::Result<TcpListener> {
    let domain = if address.is_ipv4() { socket2::Domain::IPV4 } else { socket2::Domain::IPV6 };
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(address, PORT).into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

fn name(peer: SocketAddr) -> String {
    peer.ip().to_canonical().to_string()
}
