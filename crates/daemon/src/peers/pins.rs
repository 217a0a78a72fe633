//! Stores the pinned keys of hosts that run Braid. Hosts that do not answer are not stored: a list of all contacted hosts would harm
//! privacy, and asking again costs one datagram.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use braid_model::key::PublicKey;
use braid_peer::state::StateDir;
use serde::{Deserialize, Serialize};

/// File name in the state directory.
const FILE: &str = "servers.json";
/// A renewed contact is written only if it is this many seconds newer than the stored one.
const MIN_UPDATE: i64 = 3600;

/// Stored form of a pin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Row {
    address: IpAddr,
    key: String,
    /// Time of the last contact, in seconds of Unix time.
    heard: i64,
}

/// A host, its key, and the time of the last contact in seconds of Unix time.
pub(crate) type Pin = (IpAddr, PublicKey, i64);

/// The file of pins.
pub(crate) struct Pins {
    written: BTreeMap<IpAddr, (PublicKey, i64)>,
    /// Channel to the thread that writes to disk; `None`: writing is disabled.
    writer: Option<mpsc::Sender<Vec<Row>>>,
}

impl Pins {
    /// Reads the stored pins. `Err` holds the reason why no host may be trusted: if the pins cannot be read, pinning again
    /// would let anyone take a host's place.
    pub(crate) fn open(dir: &Path) -> (Self, Result<Vec<Pin>, String>) {
        let path = dir.join(FILE);
        let nothing = Self { written: BTreeMap::new(), writer: None };
        if let Err(error) = StateDir::open(dir) {
            return (nothing, Err(format!("flows are not bonded directly to servers, because pinned keys cannot be stored: {error}")));
        }
        let pins = match read(&path) {
            Ok(pins) => pins,
            Err(reason) => {
                let detail = format!(
                    "{} cannot be read ({reason}): flows are not bonded directly to servers; repair or remove the file",
                    path.display()
                );
                return (nothing, Err(detail));
            }
        };
        let (writer, rows) = mpsc::channel();
        std::thread::spawn(move || write_all(&path, &rows));
        let written = pins.iter().map(|(host, key, heard)| (*host, (*key, *heard))).collect();
        (Self { written, writer: Some(writer) }, Ok(pins))
    }

    /// Writes changed pins in the background.
    pub(crate) fn keep(&mut self, pins: impl Iterator<Item = Pin>) {
        let now: BTreeMap<_, _> = pins.map(|(host, key, heard)| (host, (key, heard))).collect();
        let same = |host: &IpAddr, (key, heard): &(PublicKey, i64)| {
            self.written.get(host).is_some_and(|(old, before)| old == key && heard - before < MIN_UPDATE)
        };
        if now.len() == self.written.len() && now.iter().all(|(host, pin)| same(host, pin)) {
            return;
        }
        let row = |(host, (key, heard)): (&IpAddr, &(PublicKey, i64))| Row { address: *host, key: key.to_string(), heard: *heard };
        if let Some(writer) = &self.writer {
            let _ = writer.send(now.iter().map(row).collect());
        }
        self.written = now;
    }
}

fn read(path: &Path) -> Result<Vec<Pin>, String> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let rows: Vec<Row> = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    let pin = |row: Row| Ok((row.address, row.key.parse().map_err(|error| format!("{}: {error}", row.address))?, row.heard));
    rows.into_iter().map(pin).collect()
}

/// Writes the newest list that is received, until the channel closes.
fn write_all(path: &Path, rows: &mpsc::Receiver<Vec<Row>>) {
    while let Ok(next) = rows.recv() {
        let newest = rows.try_iter().last().unwrap_or(next);
        if let Err(error) = write(path, &newest) {
            tracing::warn!("{} cannot be written: {error}", path.display());
        }
    }
}

/// Writes a new file and renames it over the old one.
fn write(path: &Path, rows: &[Row]) -> io::Result<()> {
    let fresh: PathBuf = path.with_extension("json.new");
    let _ = fs::remove_file(&fresh);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(&serde_json::to_vec_pretty(rows)?)?;
    file.sync_all()?;
    fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

    use super::*;

    fn host(last: u8) -> IpAddr {
        [203, 0, 113, last].into()
    }

    fn key(byte: u8) -> PublicKey {
        PublicKey::from([byte; 32])
    }

    fn awaited(dir: &Path, expected: &[Pin]) {
        let begun = Instant::now();
        while read(&dir.join(FILE)).as_deref() != Ok(expected) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", read(&dir.join(FILE)));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn pins_survive_a_restart_in_a_private_file() {
        let scratch = tempfile::tempdir().unwrap();
        let (mut pins, before) = Pins::open(scratch.path());
        assert_eq!(before, Ok(vec![]));
        pins.keep([(host(1), key(1), 100), (host(2), key(2), 200)].into_iter());
        awaited(scratch.path(), &[(host(1), key(1), 100), (host(2), key(2), 200)]);
        assert_eq!(scratch.path().join(FILE).metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let (mut pins, before) = Pins::open(scratch.path());
        assert_eq!(before.unwrap(), [(host(1), key(1), 100), (host(2), key(2), 200)]);
        pins.keep([(host(2), key(2), 200)].into_iter());
        awaited(scratch.path(), &[(host(2), key(2), 200)]);
    }

    #[test]
    fn only_changed_pins_are_written() {
        let scratch = tempfile::tempdir().unwrap();
        let (mut pins, _) = Pins::open(scratch.path());
        pins.keep([(host(1), key(1), 100)].into_iter());
        awaited(scratch.path(), &[(host(1), key(1), 100)]);
        std::fs::remove_file(scratch.path().join(FILE)).unwrap();
        pins.keep([(host(1), key(1), 100 + MIN_UPDATE - 1)].into_iter());
        pins.keep([(host(1), key(1), 100 + MIN_UPDATE)].into_iter());
        awaited(scratch.path(), &[(host(1), key(1), 100 + MIN_UPDATE)]);
    }

    #[test]
    fn an_unreadable_file_is_kept_and_no_host_is_trusted() {
        let scratch = tempfile::tempdir().unwrap();
        for broken in ["", "{", "[{\"address\": \"203.0.113.1\", \"key\": \"short\", \"heard\": 1}]"] {
            std::fs::write(scratch.path().join(FILE), broken).unwrap();
            let (mut pins, before) = Pins::open(scratch.path());
            assert!(before.unwrap_err().contains("repair or remove"), "{broken}");
            pins.keep([(host(1), key(1), 100)].into_iter());
            drop(pins);
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(std::fs::read_to_string(scratch.path().join(FILE)).unwrap(), broken);
        }
    }

    #[test]
    fn a_directory_writable_by_others_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Pins::open(scratch.path()).1.unwrap_err().contains("chmod"));
    }
}
