//! What a slicer keeps in its state directory: its engine's id and number of starts (RFC 3414 section 2.2), and what slices have asked for.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use braid_model::Time;
use braid_peer::shared;
use braid_platform::linux::sys::bpf::now;
use braid_snmp::Slicer;
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};

const ENGINE: &str = "snmp-engine.json";
const ASKED: &str = "snmp-asked.json";
const LOCK: &str = "snmp-slicer.lock";
/// The begin of an engine's id: the enterprise number for examples of RFC 5612, since Braid has none, and the format "octets". Source: RFC 3411 section 5.
const ENGINE_BEGIN: [u8; 5] = [0x80, 0, 0x7e, 0xd9, 5];
/// The last number of starts. Source: RFC 3414 section 2.2.2.
const LAST_BOOT: u32 = i32::MAX as u32;

/// The files. No other slicer uses them.
#[derive(Debug, Clone)]
pub(super) struct Files {
    directory: PathBuf,
    _lock: Arc<File>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Engine {
    id: String,
    boots: u32,
}

impl Files {
    pub(super) fn open(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join(LOCK);
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock = lock.with_context(|| format!("cannot write {}: choose another directory with --state-dir", path.display()))?;
        if lock.try_lock().is_err() {
            bail!("another slicer uses the state directory {}: end it, or choose another directory with --state-dir", directory.display());
        }
        Ok(Self { directory: directory.to_owned(), _lock: Arc::new(lock) })
    }

    /// The engine's id, and the number of this start, which is on disk before it is used.
    pub(super) fn start(&self) -> anyhow::Result<(Vec<u8>, u32)> {
        let path = self.directory.join(ENGINE);
        let unusable = || {
            format!(
                "cannot use {}, which has the id and the number of starts of the SNMP engine: give it back, or remove it; then the engine gets a new id",
                path.display()
            )
        };
        let engine = match fs::read_to_string(&path) {
            Ok(text) => Some(serde_json::from_str::<Engine>(&text).with_context(unusable)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).with_context(unusable),
        };
        // An engine that has used up its starts gets a new id.
        let engine = match engine.filter(|engine| engine.boots < LAST_BOOT - 1) {
            Some(engine) => Engine { boots: engine.boots + 1, ..engine },
            None => {
                let random = [shared::random()?, shared::random()?].map(u64::to_ne_bytes).concat();
                Engine { id: HEXLOWER.encode(&[&ENGINE_BEGIN[..], &random].concat()), boots: 1 }
            }
        };
        let id = HEXLOWER.decode(engine.id.as_bytes()).with_context(unusable)?;
        if !(5..=32).contains(&id.len()) {
            bail!("{}", unusable());
        }
        self.replace(ENGINE, &serde_json::to_string(&engine)?)?;
        Ok((id, engine.boots))
    }

    /// Gives a slicer what an earlier one stored. A text that is damaged is set aside.
    pub(super) fn restore(&self, slicer: &mut Slicer) {
        self.restore_at(slicer, now());
    }

    fn restore_at(&self, slicer: &mut Slicer, now: Time) {
        let path = self.directory.join(ASKED);
        let problem = match fs::read_to_string(&path) {
            Ok(text) => match slicer.restore(now, &text) {
                Ok(()) => return,
                Err(error) => error.to_string(),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => error.to_string(),
        };
        let aside = path.with_extension("damaged");
        let _ = fs::rename(&path, &aside);
        tracing::error!(
            "cannot read what slices have asked for in {}: {problem}; it is now {}, and slices must ask again for what they share",
            path.display(),
            aside.display()
        );
    }

    /// Stores what slices have asked for.
    pub(super) fn store(&self, text: &str) -> anyhow::Result<()> {
        self.replace(ASKED, text)
    }

    /// Replaces a file as a whole, on the disk.
    fn replace(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let (path, new) = (self.directory.join(name), self.directory.join(format!("{name}.new")));
        let write = || {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.directory)?.sync_all()
        };
        write().with_context(|| format!("cannot write {}: see that the disk has room and this user may write there", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_snmp::{Identity, Setup};

    #[test]
    fn starts_are_counted_and_one_slicer_has_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::open(folder.path()).unwrap();
        let (id, boots) = files.start().unwrap();
        assert_eq!((boots, id.len(), &id[..5]), (1, 21, &ENGINE_BEGIN[..]));
        assert_eq!(files.start().unwrap(), (id.clone(), 2));
        assert!(Files::open(folder.path()).unwrap_err().to_string().contains("--state-dir"));
        drop(files);
        let files = Files::open(folder.path()).unwrap();
        fs::write(folder.path().join(ENGINE), format!("{{\"id\":\"{}\",\"boots\":{}}}", HEXLOWER.encode(&id), LAST_BOOT - 1)).unwrap();
        let (other, boots) = files.start().unwrap();
        assert!(other != id && boots == 1);
        for text in ["", "{}", "{\"id\":\"zz\",\"boots\":1}", "{\"id\":\"00\",\"boots\":1}"] {
            fs::write(folder.path().join(ENGINE), text).unwrap();
            assert!(files.start().unwrap_err().to_string().contains("remove it"), "{text}");
        }
    }

    #[test]
    fn a_damaged_text_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::open(folder.path()).unwrap();
        let mut slicer = Slicer::new(Time::ZERO, &Identity { engine: vec![1; 5], boots: 1, seed: [0; 32] }, Setup::default());
        files.restore_at(&mut slicer, Time::ZERO);
        files.store(&slicer.to_store()).unwrap();
        files.restore_at(&mut slicer, Time::ZERO);
        assert!(folder.path().join(ASKED).exists());
        files.store("{").unwrap();
        files.restore_at(&mut slicer, Time::ZERO);
        assert!(!folder.path().join(ASKED).exists() && folder.path().join("snmp-asked.damaged").exists());
    }
}
