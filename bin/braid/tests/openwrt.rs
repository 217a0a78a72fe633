//! The package for OpenWrt: its scripts, and the configuration that they write.

use std::path::Path;
use std::process::Command;

#[test]
fn a_configuration_of_openwrt_becomes_one_of_braid() {
    let test = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/openwrt/test");
    let output = Command::new("sh").arg(test).arg(env!("CARGO_BIN_EXE_braid")).env_remove("BRAID_FUNCTIONS").output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{said}");
}
