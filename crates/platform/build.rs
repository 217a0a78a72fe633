//! Builds the BPF programs with clang, and a native version of the connection rule for the tests that compare it with the Rust reference.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let ebpf = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../ebpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed={}", ebpf.display());
    println!("cargo:rerun-if-env-changed=BRAID_CLANG");
    // `braid.bpf.c` includes the other program files.
    for name in ["braid", "adhoc", "trial"] {
        build_object(&ebpf.join(format!("{name}.bpf.c")), &out.join(format!("{name}.bpf.o")));
    }
    let mut native = cc::Build::new();
    // musl has no kernel headers, so the system's are searched after its own headers.
    for place in ["/usr/include".to_owned(), headers()] {
        native.flag(format!("-idirafter{place}"));
    }
    native.file(ebpf.join("native.c")).include(&ebpf).opt_level(2).compile("braid_native");
}

/// `lab/kernels/test-verifier` builds with the same flags. One disables the warning about constants in headers of libbpf before 1.6 that clang 21 and
/// later issue, another the warning about the unknown name of that flag in earlier compilers.
const FLAGS: &str = include_str!("../../ebpf/clang-flags");

fn build_object(source: &Path, object: &Path) {
    let clang = env::var("BRAID_CLANG").unwrap_or_else(|_| "clang".to_owned());
    let headers = headers();
    let status =
        Command::new(&clang).args(FLAGS.split_whitespace()).args(["-I", &headers, "-c"]).arg(source).arg("-o").arg(object).status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{clang} failed to build the BPF programs ({status}); install libbpf's headers (Debian: libbpf-dev)"),
        Err(error) => {
            panic!("cannot start {clang} to build the BPF programs: {error}; install it (Debian: clang), or set BRAID_CLANG")
        }
    }
}

/// The directory of architecture-specific headers on Debian and similar systems: the native one, or that of a package for cross-building.
///
fn headers() -> String {
    let machine = format!("{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it"));
    let [own, cross] = [format!("/usr/include/{machine}"), format!("/usr/{machine}/include")];
    if Path::new(&own).join("asm").exists() || !Path::new(&cross).exists() { own } else { cross }
}
