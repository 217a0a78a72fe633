//! A browser through `braid proxy`: a page of a hundred objects over HTTP and HTTPS. `make test-ui` installs the browser.

use crate::support::proxied::{PROXY, Proxied};
use crate::support::*;
use braid_lab::browser::{self, PICTURES};

#[test]
fn a_page_of_a_hundred_objects_loads_completely() {
    if !able() {
        return;
    }
    if !browser::installed().unwrap() {
        println!("skipped: there is no chromium here");
        return;
    }
    let mut proxied = Proxied::new(&[], "", false);
    let url = browser::publish(&proxied.web).unwrap();
    for url in [url.clone(), url.replace("http:", "https:")] {
        assert_eq!(browser::pictures(&proxied.lab, PROXY, &url).unwrap(), PICTURES, "{url}");
    }
    proxied.stop();
    assert_eq!(browser::pictures(&proxied.lab, PROXY, &url).unwrap(), 0, "the page came by another way than the proxy");
}
