//! Checks that `docs/openapi.json` is current.

use braid_api::openapi::document;

#[test]
#[allow(clippy::disallowed_methods, reason = "the document is a file")]
fn the_checked_in_document_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let wanted = format!("{}\n", serde_json::to_string_pretty(&document()).unwrap());
    if std::env::var_os("BRAID_WRITE_OPENAPI").is_some() {
        std::fs::write(path, &wanted).unwrap();
    }
    let have = std::fs::read_to_string(path).unwrap_or_default();
    assert!(have == wanted, "docs/openapi.json is out of date: run BRAID_WRITE_OPENAPI=1 cargo test -p braid-api --test openapi");
}
