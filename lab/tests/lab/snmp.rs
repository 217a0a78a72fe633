//! The slicer of SNMP between net-snmp's programs: `snmpd` is the agent, `snmpget`, `snmpwalk`, `snmpbulkwalk` and `snmpset` are managers. All are in the
//! client's namespace of a lab.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::*;
use braid_lab::{Lab, LinkSpec};

/// The radio and its virtual access points, in the part of the tree that net-snmp keeps for trying things out.
const RADIO: &str = ".1.3.6.1.4.1.8072.9999.9999.1";
const ACCESS: &str = ".1.3.6.1.4.1.8072.9999.9999.2";
/// ifAdminStatus, ifOperStatus.
const ADMIN: &str = ".1.3.6.1.2.1.2.2.1.7";
const OPER: &str = ".1.3.6.1.2.1.2.2.1.8";

/// A program that is killed in the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Site {
    lab: Lab,
    /// Indexes of the shared interface, blue's and green's.
    interfaces: [u32; 3],
    agent: Option<Running>,
}

impl Site {
    /// An access point: three interfaces, an agent with the standard interface table and a table of radios and virtual access points.
    fn new() -> Self {
        let lab = Lab::builder().link(LinkSpec::new("eth0")).start().unwrap();
        let names = ["radio0", "blue0", "green0"];
        for name in names {
            let end = format!("{name}-end");
            let ip = |words: &[&str]| assert!(lab.client().command("ip").unwrap().args(words).status().unwrap().success());
            ip(&["link", "add", "name", name, "up", "type", "veth", "peer", "name", &end]);
            ip(&["link", "set", "dev", &end, "up"]);
        }
        let interfaces = names.map(|name| index(&lab, name));
        let mut site = Self { lab, interfaces, agent: None };
        let mut rows = vec![
            format!("{RADIO}.1.1.1 integer 1"),
            format!("{RADIO}.1.2.1 string wlan0"),
            format!("{RADIO}.1.3.1 integer 6"),
            format!("{RADIO}.1.4.1 integer 20"),
        ];
        for (number, name) in [(1, "blue"), (2, "green"), (3, "guests")] {
            for (column, value) in [(1, "integer 1"), (2, &*format!("string {name}")), (3, "integer 1"), (4, "integer 0")] {
                rows.push(format!("{ACCESS}.1.{column}.1.{number} {value}"));
            }
        }
        fs::write(site.path("radio.txt"), rows.join("\n")).unwrap();
        site.start_agent();
        site
    }

    fn path(&self, name: &str) -> PathBuf {
        self.lab.directory().join(name)
    }

    fn secret(&self, name: &str, value: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, format!("{value}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn start_agent(&mut self) {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lab/support/radio_mib.py");
        let config = format!(
            "rwcommunity agent 127.0.0.1\npass_persist .1.3.6.1.4.1.8072.9999.9999 /usr/bin/env python3 {} {}\n\
             createUser slicer SHA-256 \"agent password\" AES \"agent privacy\"\nrwuser slicer priv\n\
             sysName ap1\n",
            program.display(),
            self.path("radio.txt").display()
        );
        let file = self.secret("snmpd.conf", &config);
        let state = self.path("snmpd");
        let _ = fs::create_dir(&state);
        let log = File::create(self.path("snmpd.log")).unwrap();
        let mut command = self.lab.client().command("snmpd").unwrap();
        command.env("SNMP_PERSISTENT_DIR", &state).args(["-f", "-Lo", "-r", "-C", "-c"]).arg(file).arg("udp:127.0.0.1:1610");
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn();
        self.agent = Some(Running(child.expect("cannot run snmpd: run lab/install-deps.sh")));
        eventually("the agent answers", || self.run("snmpget", &["-v2c", "-c", "agent", "127.0.0.1:1610", ".1.3.6.1.2.1.1.5.0"]).0);
    }

    /// Runs a program of net-snmp: whether it succeeds, and what it prints.
    fn run(&self, program: &str, arguments: &[&str]) -> (bool, String) {
        let mut command = self.lab.client().command(program).unwrap();
        command
            .env("SNMPCONFPATH", "/nonexistent")
            .env("SNMP_PERSISTENT_DIR", self.path("snmp-tools"))
            .env("MIBS", "")
            .args(["-On", "-t", "3", "-r", "1"])
            .args(arguments);
        let output =
            command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("cannot run {program}: {error}; run lab/install-deps.sh"));
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    }

    /// A manager's request by SNMPv2c.
    fn ask(&self, program: &str, slice: &str, arguments: &[&str]) -> (bool, String) {
        let (options, names) = arguments.split_at(arguments.iter().position(|word| word.starts_with('.')).unwrap_or(arguments.len()));
        self.run(program, &[&["-v2c", "-c", slice], options, &["127.0.0.1:1161"], names].concat())
    }

    /// The lines of a walk over all.
    fn walk(&self, program: &str, slice: &str) -> Vec<String> {
        let (is_done, text) = self.ask(program, slice, &[".1"]);
        assert!(is_done, "{text}");
        text.lines().filter(|line| line.starts_with('.')).map(str::to_owned).collect()
    }

    fn get(&self, slice: &str, name: &str) -> String {
        let (is_done, text) = self.ask("snmpget", slice, &["-Ovq", name]);
        assert!(is_done, "{text}");
        text.trim().to_owned()
    }

    /// The value that the agent has.
    fn agent_has(&self, name: &str) -> String {
        self.run("snmpget", &["-v2c", "-c", "agent", "-Ovq", "127.0.0.1:1610", name]).1.trim().to_owned()
    }

    fn set(&self, slice: &str, arguments: &[&str]) -> (bool, String) {
        self.ask("snmpset", slice, arguments)
    }

    fn start(&self, name: &str, config: &str) -> Running {
        let file = self.path(&format!("{name}.toml"));
        fs::write(&file, config).unwrap();
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.log"))).unwrap();
        let mut command = self.lab.client().command(braid()).unwrap();
        command.args(["net", "snmp-slicer", "--config"]).arg(file).arg("--state-dir").arg(self.path(&format!("{name}-state")));
        Running(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }

    /// The slicer of slices blue and green.
    fn slicer(&self) -> Running {
        let running = self.start("slicer", &self.config());
        eventually("the slicer answers", || self.ask("snmpget", "blue", &[".1.3.6.1.2.1.1.5.0"]).0);
        running
    }

    fn config(&self) -> String {
        let [shared, blue, green] = self.interfaces;
        let files = ["agent", "blue", "green"].map(|name| self.secret(&format!("{name}.community"), name).display().to_string());
        let (auth, privacy) = (self.secret("blue.auth", "blue password"), self.secret("blue.privacy", "blue privacy"));
        let (plain, radio, access) = (ADMIN.trim_start_matches('.'), RADIO.trim_start_matches('.'), ACCESS.trim_start_matches('.'));
        let slice = |name: &str, community: &str, own: u32, number: u32, more: &str| {
            format!(
                "[[slice]]\nname = \"{name}\"\n[[slice.manager]]\ncommunity_file = \"{community}\"\nwrite = true\n{more}\
                 [[slice.view]]\nsubtree = \"1.3.6.1.2.1.1.5\"\n\
                 [[slice.view]]\ntable = \"1.3.6.1.2.1.2.2\"\nrows = [\"{shared}\", \"{own}\"]\nwrite = [7]\n\
                 [[slice.view]]\ntable = \"{radio}\"\nrows = [\"1\"]\nwrite = [3, 4]\n\
                 [[slice.view]]\ntable = \"{access}\"\nrows = [\"1.{number}\"]\nwrite = [2]\n"
            )
        };
        let user = format!(
            "[[slice.manager]]\nuser = \"blue\"\nauth = \"sha256\"\nauth_file = \"{}\"\nprivacy_file = \"{}\"\nwrite = true\n",
            auth.display(),
            privacy.display()
        );
        format!(
            "[[device]]\nname = \"ap1\"\nlisten = \"127.0.0.1:1161\"\nagent = \"127.0.0.1:1610\"\ncommunity_file = \"{}\"\n{}{}\
             [[shared]]\nobject = \"{radio}.1.3.1\"\npolicy = \"owner\"\nslice = \"blue\"\nvalues = [1, 6, 11]\n\
             [[shared]]\nobject = \"{radio}.1.4.1\"\npolicy = \"lowest\"\nleast = 1\nmost = 20\n\
             [[shared]]\nobject = \"{plain}.{shared}\"\npolicy = \"virtual\"\noperational = \"{}.{shared}\"\nvalues = [1, 2]\n\
             to = {{ blue = \"{plain}.{blue}\", green = \"{plain}.{green}\" }}\n",
            files[0],
            slice("blue", &files[1], blue, 1, &user),
            slice("green", &files[2], green, 2, ""),
            OPER.trim_start_matches('.'),
        )
    }
}

/// The index of a device.
fn index(lab: &Lab, name: &str) -> u32 {
    let shown = text(&lab.client().command("ip").unwrap().args(["-o", "link", "show", "dev", name]).output().unwrap().stdout);
    shown.split(':').next().and_then(|index| index.trim().parse().ok()).unwrap_or_else(|| panic!("{shown}"))
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["slicer", "outer", "snmpd"] {
                eprintln!("--- {name}\n{}", self.log(name));
            }
        }
    }
}

#[test]
fn two_managers_see_and_set_their_own_part_only() {
    if !able() {
        return;
    }
    let site = Site::new();
    let _slicer = site.slicer();
    let [shared, blue, green] = site.interfaces;
    // Each walk shows the slice's rows, and those alone; by GetNext and by GetBulk.
    for (slice, own, others, number) in [("blue", blue, green, 1), ("green", green, blue, 2)] {
        let walked = site.walk("snmpwalk", slice);
        assert_eq!(walked, site.walk("snmpbulkwalk", slice));
        let names: Vec<&str> = walked.iter().filter_map(|line| line.split(" = ").next()).collect();
        for wanted in [
            format!("{ADMIN}.{own}"),
            format!("{ADMIN}.{shared}"),
            format!("{ACCESS}.1.2.1.{number}"),
            format!("{RADIO}.1.4.1"),
            ".1.3.6.1.2.1.1.5.0".into(),
        ] {
            assert!(names.contains(&&*wanted), "{wanted} is not in {walked:#?}");
        }
        let is_own = |name: &str| {
            let ends = |rows: &[u32]| rows.iter().any(|row| name.ends_with(&format!(".{row}")));
            (name.starts_with(".1.3.6.1.2.1.2.2.1.") && ends(&[own, shared]))
                || name.starts_with(RADIO)
                || (name.starts_with(ACCESS) && name.ends_with(&format!(".1.{number}")))
                || name == ".1.3.6.1.2.1.1.5.0"
        };
        assert!(names.iter().all(|name| is_own(name)), "{walked:#?}");
        // Columns of the interface table for two rows, 4 of the radio, 4 of the virtual access point, and a name.
        assert!(names.len() > 30, "{names:?}");
        for foreign in [format!("{ADMIN}.{others}"), format!("{ACCESS}.1.2.1.3"), ".1.3.6.1.2.1.1.1.0".into(), ".1.3.6.1.2.1.2.1.0".into()]
        {
            assert!(site.get(slice, &foreign).starts_with("No Such"), "{foreign}");
            let (is_done, said) = site.set(slice, &[&foreign, "i", "1"]);
            assert!(!is_done && said.contains("noAccess"), "{said}");
        }
    }
    // A slice sets its SSID; the other one's stays. Nothing counts of a request of which a part is refused.
    let ssid = |number: u32| format!("{ACCESS}.1.2.1.{number}");
    let (is_done, said) = site.set("blue", &[&ssid(1), "s", "azure"]);
    assert!(is_done, "{said}");
    assert_eq!([1, 2].map(|number| site.agent_has(&ssid(number))), ["\"azure\"", "\"green\""]);
    let (is_done, said) = site.set("blue", &[&ssid(1), "s", "navy", &ssid(2), "s", "mine"]);
    assert!(!is_done && said.contains("noAccess"), "{said}");
    assert_eq!([1, 2].map(|number| site.agent_has(&ssid(number))), ["\"azure\"", "\"green\""]);
    // The agent's own refusal is passed on: a text is no number.
    let reason = |said: &str| said.lines().find(|line| line.starts_with("Reason:")).map(str::to_owned);
    let direct = site.run("snmpset", &["-v2c", "-c", "agent", "127.0.0.1:1610", &ssid(1), "i", "5"]).1;
    let (is_done, said) = site.set("blue", &[&ssid(1), "i", "5"]);
    assert!(!is_done && reason(&said).is_some() && reason(&said) == reason(&direct), "{said} {direct}");
    // A community that nobody has gets no answer.
    let (is_done, said) = site.ask("snmpget", "public", &["-t", "1", "-r", "0", ".1.3.6.1.2.1.1.5.0"]);
    assert!(!is_done && said.contains("Timeout"), "{said}");
    eventually("the log names the wrong community", || site.log("slicer").contains("with a community that no manager may use"));
}

#[test]
fn what_slices_share_is_mediated_as_documented() {
    if !able() {
        return;
    }
    let site = Site::new();
    let slicer = site.slicer();
    let [shared, blue, green] = site.interfaces;
    let (channel, power) = (format!("{RADIO}.1.3.1"), format!("{RADIO}.1.4.1"));
    let refused = |slice: &str, name: &str, value: &str, status: &str| {
        let (is_done, said) = site.set(slice, &[name, "i", value]);
        assert!(!is_done && said.contains(status), "{slice} {name} {value}: {said}");
    };
    let done = |slice: &str, name: &str, value: &str| {
        let (is_done, said) = site.set(slice, &[name, "i", value]);
        assert!(is_done, "{slice} {name} {value}: {said}");
    };
    // The channel is blue's, and one of three.
    refused("green", &channel, "11", "noAccess");
    refused("blue", &channel, "7", "wrongValue");
    done("blue", &channel, "11");
    assert_eq!([site.agent_has(&channel), site.get("green", &channel)], ["11", "11"]);
    // The power is the least that any slice asks for.
    refused("green", &power, "21", "wrongValue");
    for (slice, asked, set) in [("blue", "12", "12"), ("green", "18", "12"), ("blue", "20", "18")] {
        done(slice, &power, asked);
        assert_eq!([site.agent_has(&power), site.get("blue", &power)], [set, set], "{slice} asks for {asked}");
    }
    // Blue switches its interface off: its own goes down, the shared one and green's stay up, and green sees nothing of it.
    let admin = |index: u32| format!("{ADMIN}.{index}");
    done("blue", &admin(shared), "2");
    let state = |index: u32| site.agent_has(&admin(index));
    eventually("the agent shows blue's interface down", || state(blue) == "2");
    assert_eq!([state(shared), state(green)], ["1", "1"]);
    let is_up = |name: &str| {
        let shown = site.lab.client().command("ip").unwrap().args(["-o", "link", "show", "up", "dev", name]).output().unwrap();
        !shown.stdout.is_empty()
    };
    assert_eq!(["radio0", "green0", "blue0"].map(is_up), [true, true, false]);
    let oper = format!("{OPER}.{shared}");
    assert_eq!([site.get("blue", &admin(shared)), site.get("blue", &oper), site.get("green", &admin(shared))], ["2", "2", "1"]);
    refused("blue", &oper, "1", "noAccess");
    // Killed, the slicer leaves nothing half-made, and what slices asked for counts after.
    drop(slicer);
    let _slicer = site.slicer();
    assert_eq!([site.get("blue", &admin(shared)), site.get("green", &admin(shared))], ["2", "1"]);
    done("green", &power, "19");
    assert_eq!(site.agent_has(&power), "19");
    done("blue", &power, "15");
    done("green", &power, "20");
    assert_eq!(site.agent_has(&power), "15");
    done("blue", &admin(shared), "1");
    eventually("the agent shows blue's interface up", || state(blue) == "1");
}

#[test]
fn version_3_serves_managers_and_agents_and_slicers_cascade() {
    if !able() {
        return;
    }
    let mut site = Site::new();
    let slicer = site.slicer();
    let own = format!("{ACCESS}.1.2.1.1");
    let user = |password: &str, privacy: &str, level: &str, port: u16, arguments: &[&str]| {
        let address = format!("127.0.0.1:{port}");
        let (options, names) = arguments.split_at(arguments.iter().position(|word| word.starts_with('.')).unwrap_or(arguments.len()));
        let user = ["-v3", "-u", "blue", "-l", level, "-a", "SHA-256", "-A", password, "-x", "AES", "-X", privacy];
        [&user, options, &[&*address], names].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let run =
        |site: &Site, program: &str, arguments: &[String]| site.run(program, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let right = |port, arguments: &[&str]| user("blue password", "blue privacy", "authPriv", port, arguments);
    let (is_done, said) = run(&site, "snmpset", &right(1161, &[&own, "s", "indigo"]));
    assert!(is_done, "{said}");
    assert_eq!(site.agent_has(&own), "\"indigo\"");
    // The same by version 3 as by version 2c.
    let (is_done, walked) = run(&site, "snmpbulkwalk", &right(1161, &[".1"]));
    let lines: Vec<&str> = walked.lines().filter(|line| line.starts_with('.')).collect();
    assert!(is_done && lines.len() == site.walk("snmpwalk", "blue").len(), "{walked}");
    // Wrong passwords and a lower level get a report, which net-snmp names.
    for (password, privacy, level, part) in [
        ("another password", "blue privacy", "authPriv", "Authentication failure"),
        ("blue password", "blue privacy", "authNoPriv", "nsupported security level"),
        ("blue password", "another privacy", "authPriv", ""),
    ] {
        let (is_done, said) = run(&site, "snmpget", &user(password, privacy, level, 1161, &["-t", "1", "-r", "0", &own]));
        assert!(!is_done && said.contains(part), "{said}");
    }
    // Another slicer whose device is this one, by version 3: it gives a part of blue's part to others.
    let community = site.secret("sub.community", "sub").display().to_string();
    let config = format!(
        "[[device]]\nname = \"blue-of-ap1\"\nlisten = \"127.0.0.1:1162\"\nagent = \"127.0.0.1:1161\"\nuser = \"blue\"\nauth = \"sha256\"\nauth_file = \
         \"{}\"\nprivacy_file = \"{}\"\n[[slice]]\nname = \"sub\"\n[[slice.manager]]\ncommunity_file = \"{community}\"\nwrite = true\n\
         [[slice.view]]\nsubtree = \"{}\"\nwrite = true\n[[slice.view]]\nsubtree = \"1.3.6.1.4.1.8072.9999.9999\"\n",
        site.path("blue.auth").display(),
        site.path("blue.privacy").display(),
        own.trim_start_matches('.'),
    );
    let _outer = site.start("outer", &config);
    let sub =
        |site: &Site, program: &str, arguments: &[&str]| site.run(program, &[&["-v2c", "-c", "sub", "127.0.0.1:1162"], arguments].concat());
    eventually("the outer slicer answers", || sub(&site, "snmpget", &[&own]).0);
    let (is_done, walked) = sub(&site, "snmpwalk", &[".1"]);
    // The last line is about what comes after it.
    let values = walked.lines().filter(|line| !line.contains("No more variables"));
    let names: Vec<&str> = values.filter_map(|line| line.split(" = ").next()).filter(|name| name.starts_with('.')).collect();
    // The radio's 4 columns, and the 4 of blue's virtual access point: what both views show.
    assert!(is_done && names.len() == 8 && names.iter().all(|name| name.starts_with(RADIO) || name.ends_with(".1.1")), "{walked}");
    let (is_done, said) = sub(&site, "snmpset", &[&own, "s", "violet"]);
    assert!(is_done && site.agent_has(&own) == "\"violet\"", "{said}");
    let (is_done, said) = sub(&site, "snmpset", &[&format!("{RADIO}.1.4.1"), "i", "10"]);
    assert!(!is_done && said.contains("noAccess"), "{said}");
    // The inner slicer is killed and comes back; the outer one learns its clock again.
    drop(slicer);
    let slicer = site.slicer();
    let (is_done, said) = sub(&site, "snmpget", &[&own]);
    assert!(is_done && said.contains("violet"), "{said}");
    // The inner slicer asks the agent by version 3, too. The agent is killed and comes back.
    drop(slicer);
    let agent = format!("community_file = \"{}\"", site.path("agent.community").display());
    let (auth, privacy) = (site.secret("agent.auth", "agent password"), site.secret("agent.privacy", "agent privacy"));
    let with_user =
        format!("user = \"slicer\"\nauth = \"sha256\"\nauth_file = \"{}\"\nprivacy_file = \"{}\"", auth.display(), privacy.display());
    let _slicer = site.start("slicer", &site.config().replacen(&agent, &with_user, 1));
    eventually("the slicer answers by version 3", || site.ask("snmpget", "blue", &[&own]).0);
    assert!(site.get("blue", &own).contains("violet"));
    site.agent = None;
    let (is_done, said) = site.ask("snmpget", "blue", &["-t", "5", &own]);
    assert!(!is_done && said.contains("genError"), "{said}");
    eventually("the slicer's log names the silent agent", || site.log("slicer").contains("did not answer a request of slice blue"));
    site.start_agent();
    eventually("the slicer answers again", || site.ask("snmpget", "blue", &[&own]).0);
    assert!(site.set("blue", &[&own, "s", "blue"]).0);
}

#[test]
fn an_agent_that_never_answers_and_a_flood_cost_others_nothing() {
    if !able() {
        return;
    }
    let site = Site::new();
    let nowhere = format!(
        "[[device]]\nname = \"ap2\"\nlisten = \"127.0.0.1:1163\"\nagent = \"127.0.0.1:1611\"\ncommunity_file = \"{}\"\n",
        site.path("agent.community").display()
    );
    let config = site.config() + &nowhere;
    // The values that are shared are at both devices, as the views are.
    let slicer = site.start("slicer", &config);
    eventually("the slicer answers", || site.ask("snmpget", "blue", &[".1.3.6.1.2.1.1.5.0"]).0);
    // Blue floods the device without an agent, by many programs that wait.
    let waiting: Vec<Running> = (0..20)
        .map(|_| {
            let mut command = site.lab.client().command("snmpwalk").unwrap();
            command.env("SNMPCONFPATH", "/nonexistent").env("SNMP_PERSISTENT_DIR", site.path("snmp-tools")).args([
                "-v2c",
                "-c",
                "blue",
                "-t",
                "1",
                "-r",
                "30",
                "127.0.0.1:1163",
                ".1",
            ]);
            Running(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
        })
        .collect();
    // A stranger sends noise and wrong communities.
    site.lab
        .client()
        .run(|| {
            let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            for number in 0..20_000u32 {
                let _ = socket.send_to(&[&[0x30, 0x82, 0xff, 0xff][..], &number.to_be_bytes()].concat(), "127.0.0.1:1161");
            }
        })
        .unwrap();
    for slice in ["green", "blue"] {
        assert_eq!(site.get(slice, ".1.3.6.1.2.1.1.5.0"), "\"ap1\"");
        assert!(site.walk("snmpbulkwalk", slice).len() > 30);
    }
    drop(waiting);
    // A configuration that is wrong is not taken, and named; the former one stays. A right one comes into force without a stop.
    let file = site.path("slicer.toml");
    fs::write(&file, config.replacen("lowest", "least", 1)).unwrap();
    signal(slicer.0.id(), "HUP");
    eventually("the wrong configuration is refused", || site.log("slicer").contains("the former one stays in force"));
    assert!(site.ask("snmpget", "green", &[".1.3.6.1.2.1.1.5.0"]).0);
    fs::write(&file, config.replacen("1.3.6.1.2.1.1.5", "1.3.6.1.2.1.1", 1)).unwrap();
    signal(slicer.0.id(), "HUP");
    eventually("blue sees more", || !site.get("blue", ".1.3.6.1.2.1.1.1.0").starts_with("No Such"));
    assert!(site.get("green", ".1.3.6.1.2.1.1.1.0").starts_with("No Such"));
    // A secret that others can read is refused.
    fs::set_permissions(site.path("green.community"), Permissions::from_mode(0o644)).unwrap();
    let mut command = Command::new(braid());
    let output = command.args(["net", "snmp-slicer", "--check", "--config"]).arg(&file).output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("chmod 600"), "{}", text(&output.stderr));
    assert!(!site.log("slicer").contains("agent password") && !site.log("slicer").contains("blue privacy"));
}

fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}
