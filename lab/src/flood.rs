//! A flood of frames from made-up Ethernet addresses.

use std::io;
use std::time::{Duration, Instant};

use braid_model::LinkIndex;
use braid_platform::linux::sys::{socket, tun};

/// Sends `count` ARP requests for 10.55.0.2 over a device of this thread's namespace, each from an address of its own, spread over `span`. Returns how many left.
pub fn flood_addresses(device: &str, count: u32, span: Duration) -> io::Result<u32> {
    let socket = socket::sender_of_frames(LinkIndex(tun::index(device)?))?;
    let begin = Instant::now();
    let mut sent = 0;
    for number in 0..count {
        let [a, b, c, d] = number.to_be_bytes();
        let source = [0x02, 0xbb, a, b, c, d];
        let mut frame = [0u8; 42];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&source);
        frame[12..22].copy_from_slice(&[0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
        frame[22..28].copy_from_slice(&source);
        frame[28..32].copy_from_slice(&[10, 55, 0, 100 + d % 100]);
        frame[38..42].copy_from_slice(&[10, 55, 0, 2]);
        sent += u32::from(socket.send(&frame).is_ok());
        let due = span.mul_f64(f64::from(number) / f64::from(count));
        if let Some(wait) = due.checked_sub(begin.elapsed()).filter(|wait| *wait > Duration::from_millis(1)) {
            std::thread::sleep(wait);
        }
    }
    Ok(sent)
}
