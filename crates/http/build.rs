//! Embeds the web page's files into the program: `web/` at the repository's root, or a placeholder if that is missing.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../../web");
    let placeholder = PathBuf::from("src/placeholder.html");
    println!("cargo::rerun-if-changed={}", root.display());
    println!("cargo::rerun-if-changed={}", placeholder.display());
    let mut files = Vec::new();
    if root.join("index.html").is_file() {
        list(&root, "", &mut files);
    } else {
        files.extend(["index.html", "network.html"].map(|name| (name.to_owned(), placeholder.clone())));
    }
    files.sort();
    let mut list = String::from("&[\n");
    for (name, path) in files {
        let path = path.canonicalize().expect("it was found");
        writeln!(list, "    ({name:?}, include_bytes!({path:?}).as_slice()),").expect("writing to a text cannot fail");
    }
    list.push(']');
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(out.join("pages.rs"), list).expect("the output directory can be written");
}

/// Collects the files that a browser needs; skips tests and their tools.
fn list(folder: &Path, prefix: &str, files: &mut Vec<(String, PathBuf)>) {
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        println!("cargo::rerun-if-changed={}", path.display());
        if path.is_dir() {
            if !matches!(name.as_str(), "tests" | "node_modules") && !name.starts_with('.') {
                list(&path, &format!("{prefix}{name}/"), files);
            }
        } else if ["html", "js", "css", "svg", "png", "ico", "woff2", "webmanifest"].iter().any(|kind| name.ends_with(&format!(".{kind}")))
        {
            files.push((format!("{prefix}{name}"), path));
        }
    }
}
