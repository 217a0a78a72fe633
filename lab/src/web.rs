//! A real HTTP and HTTPS server in the server namespace: nginx, with its own configuration and without the system's.

use std::fs::{self, File};
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use braid_model::ByteCount;
use braid_netem::Random;

use crate::lab::Lab;

/// Timeout of nginx's start.
const LIMIT: Duration = Duration::from_secs(60);

/// Files up to this size hold random bytes; larger ones are sparse and hold zeros.
const RANDOM_UP_TO: u64 = 4_000_000;

/// nginx on ports 80 and 443 (TLS, HTTP/2) of all server addresses. It ends when this value is dropped.
#[derive(Debug)]
pub struct Web {
    nginx: Child,
    root: PathBuf,
    certificate: PathBuf,
}

impl Web {
    /// Starts nginx and waits until it answers.
    pub fn start(lab: &Lab) -> Result<Self> {
        let home = lab.directory().join("web");
        let root = home.join("files");
        fs::create_dir_all(&root)?;
        let certificate = home.join("certificate.pem");
        let names = vec![Lab::internet(10).to_string(), Lab::internet(11).to_string()];
        let own = rcgen::generate_simple_self_signed(names).context("cannot make a certificate")?;
        fs::write(&certificate, own.cert.pem())?;
        fs::write(home.join("key.pem"), own.signing_key.serialize_pem())?;
        let config = home.join("nginx.conf");
        fs::write(&config, configuration(&home.to_string_lossy()))?;
        let log = File::create(home.join("start.log"))?;
        let mut command = lab.server().command("nginx")?;
        command.arg("-p").arg(&home).arg("-c").arg(&config).arg("-e").arg(home.join("error.log"));
        let nginx = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let mut web = Self { nginx: nginx.context("cannot run nginx: run lab/install-deps.sh")?, root, certificate };
        let begin = Instant::now();
        let answers = || lab.server().run(|| TcpStream::connect((Lab::internet(10), 80)).is_ok());
        while !answers()? {
            if let Some(status) = web.nginx.try_wait()? {
                bail!("nginx ended at once ({status}): {}", fs::read_to_string(home.join("start.log"))?.trim());
            }
            if begin.elapsed() > LIMIT {
                bail!("nginx does not answer after {LIMIT:?}");
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(web)
    }

    /// The URL of a file of this size at 203.0.113.10. Creates the file if it does not exist.
    pub fn url(&self, size: ByteCount) -> Result<String> {
        self.url_at(Lab::internet(10), size)
    }

    /// Like [`Self::url`], at another server address.
    pub fn url_at(&self, host: Ipv4Addr, size: ByteCount) -> Result<String> {
        self.make(size)?;
        Ok(format!("http://{host}/{}.bin", size.get()))
    }

    /// Creates a file with this content and name; returns its URL at 203.0.113.10 and its path on the disk.
    pub fn publish(&self, name: &str, content: &[u8]) -> Result<(String, PathBuf)> {
        let path = self.root.join(name);
        fs::write(&path, content).with_context(|| format!("cannot create {}", path.display()))?;
        Ok((format!("http://{}/{name}", Lab::internet(10)), path))
    }

    /// The same over TLS at 203.0.113.10, whose certificate is [`Self::certificate`].
    pub fn secure_url(&self, size: ByteCount) -> Result<String> {
        self.make(size)?;
        Ok(format!("https://{}/{}.bin", Lab::internet(10), size.get()))
    }

    /// The server's certificate, which is its own root.
    pub fn certificate(&self) -> &Path {
        &self.certificate
    }

    /// Path of the file on the disk.
    pub fn file(&self, size: ByteCount) -> Result<PathBuf> {
        self.make(size)?;
        Ok(self.path(size))
    }

    fn path(&self, size: ByteCount) -> PathBuf {
        self.root.join(format!("{}.bin", size.get()))
    }

    /// Creates a file of this size, named after it.
    fn make(&self, size: ByteCount) -> Result<()> {
        let path = self.path(size);
        if path.exists() {
            return Ok(());
        }
        let mut file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        if size.get() > RANDOM_UP_TO {
            return Ok(file.set_len(size.get())?);
        }
        let mut random = Random::new(size.get());
        let mut content: Vec<u8> = (0..size.get().div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
        content.truncate(size.get() as usize);
        Ok(file.write_all(&content)?)
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.nginx.kill();
        let _ = self.nginx.wait();
    }
}

/// One process, no master, no logs, all files below `home`.
fn configuration(home: &str) -> String {
    format!(
        "daemon off;
master_process off;
user root root;
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_timeout 30s;
    default_type application/octet-stream;
    types {{ text/html html; image/svg+xml svg; }}
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    server {{
        listen 80 backlog=4096;
        listen [::]:80 ipv6only=on backlog=4096;
        listen 443 ssl http2 backlog=4096;
        listen [::]:443 ssl http2 ipv6only=on backlog=4096;
        ssl_certificate {home}/certificate.pem;
        ssl_certificate_key {home}/key.pem;
        root {home}/files;
        location = /generate_204 {{ return 204; }}
    }}
}}
"
    )
}
