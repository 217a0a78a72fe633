//! Builds the BPF programs with clang, and the connection rule natively for the tests that compare it with the Rust reference.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let ebpf = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../ebpf");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed={}", ebpf.display());
    println!("cargo:rerun-if-env-changed=BRAID_CLANG");
    // `braid.bpf.c` includes the other files of programs.
    for name in ["braid", "trial"] {
        build_object(&ebpf.join(format!("{name}.bpf.c")), &out.join(format!("{name}.bpf.o")));
    }
    let mut native = cc::Build::new();
    // musl has no kernel headers of its own: the system's serve, after whatever it has.
    for place in ["/usr/include".to_owned(), headers()] {
        native.flag(format!("-idirafter{place}"));
    }
    native.file(ebpf.join("native.c")).include(&ebpf).opt_level(2).compile("braid_native");
}

/// `lab/kernels/test-verifier` builds with the same flags. Two of the warnings: libbpf before 1.6 declares constants that clang 21 and later warn
/// about, by a name that earlier compilers do not have.
const FLAGS: &str = include_str!("../../ebpf/clang-flags");

fn build_object(source: &Path, object: &Path) {
    let clang = env::var("BRAID_CLANG").unwrap_or_else(|_| "clang".to_owned());
    let headers = headers();
    let status =
        Command::new(&clang).args(FLAGS.split_whitespace()).args(["-I", &headers, "-c"]).arg(source).arg("-o").arg(object).status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{clang} could not build the BPF programs ({status}): it needs libbpf's headers (Debian: libbpf-dev)"),
        Err(error) => {
            panic!("{clang} could not be started to build the BPF programs: {error}; install it (Debian: clang), or set BRAID_CLANG")
        }
    }
}

/// Where Debian and its like keep the headers of one machine: this one's, or another's from a package for cross-building.
fn headers() -> String {
    let machine = format!("{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it"));
    let [own, cross] = [format!("/usr/include/{machine}"), format!("/usr/{machine}/include")];
    if Path::new(&own).join("asm").exists() || !Path::new(&cross).exists() { own } else { cross }
}
