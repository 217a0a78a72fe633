# All commands for the source tree. `make demo` and `make test` install what they need.
CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
# Debian and Ubuntu releases that test-package tries.
SUITES ?= bookworm trixie
TARGET := $(or $(CARGO_TARGET_DIR),target)
# The tarball's program is statically linked, so that it runs on any Linux.
STATIC := $(shell uname -m)-unknown-linux-musl
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.NOTPARALLEL:
.PHONY: help deps deps-build program build demo net-demo test test-ui test-package test-verifier test-kernels test-containers test-arm64 test-mesh test-outsourced bench check check-sources audit screenshots deb static package book install uninstall

help:
	@echo "make demo       builds Braid and demonstrates it in a lab (two minutes)"
	@echo "make net-demo   the same for the network's side: a host walks over four access points under each mobility manager (two minutes; Open vSwitch)"
	@echo "make test       all tests; tests on the real kernel need root"
	@echo "make test-ui    tests the web page in Chromium, with a mock and a real daemon, and Chromium through the proxy (installs Chromium and Node)"
	@echo "make bench      all benchmarks of the documentation"
	@echo "make check      formatting, lints, the purity of the pure crates, module cycles, licences and sources of dependencies"
	@echo "make audit      licences, sources, duplicates and known vulnerabilities of all dependencies, with cargo-deny (installs it)"
	@echo "make screenshots  screenshots of the web page with a real daemon, to docs/screenshots (seven minutes; needs root; ALL=1: every view)"
	@echo "make deb        a package for Debian and Ubuntu, to $(TARGET)/package"
	@echo "make package    the same, and a tarball with a static program for any Linux"
	@echo "make test-package  installs, starts, upgrades and removes the .deb in plain root file systems (SUITES=\"bookworm noble\"); needs root"
	@echo "make test-verifier  loads each BPF program on each kernel of lab/kernels, in QEMU, from each compiler (UPDATE=1 rewrites the table); needs root, downloads from Debian"
	@echo "make test-kernels  tests all of Braid on each kernel of lab/kernels, in QEMU (KERNELS=\"6.1 6.12\" RUNS=checks; RUNS=adhoc compares the ad-hoc device with bonding, team and batman-adv); needs root, downloads from Debian"
	@echo "make test-containers  tests Braid beside Podman, Docker, ufw and firewalld in Debian 12, in QEMU (RUNS=\"podman ufw\"); needs root, downloads from Debian"
	@echo "make test-arm64  cross-builds Braid for arm64 and tests it on Debian's kernel in QEMU (KERNELS, default 6.12); needs root"
	@echo "make test-mesh  six hosts with three lossy radios each that move, and babeld on their ad-hoc devices; needs root"
	@echo "make test-outsourced  hands the device to a controller on os-ken, and takes it back by its death; needs root, installs os-ken from PyPI"
	@echo "make book       the handbook as web pages, to $(TARGET)/book (needs mdbook and jq)"
	@echo "make program    builds Braid, and installs only what the build needs"
	@echo "make install    installs the built program to $(PREFIX) (DESTDIR and PREFIX can be set)"
	@echo "make uninstall  removes what install installed; configuration and state stay"
	@echo "make deps       installs the Debian or Ubuntu packages that all of this needs"

deps:
	$(SUDO) lab/install-deps.sh

deps-build:
	$(SUDO) lab/install-deps.sh build

# Builds the lab too: without it, feature unification would select other features of the dependencies, and make demo would rebuild them.
program: deps-build
	$(CARGO) build --release --locked -p braid -p braid-lab

build: deps program

demo: build
	$(TARGET)/release/braid-lab demo --braid $(TARGET)/release/braid --out $(TARGET)/demo

net-demo: build
	$(TARGET)/release/braid-lab net-demo --braid $(TARGET)/release/braid --out $(TARGET)/demo

test: deps
	# All crates in one build: built apart, each half would select other features of its dependencies, and rebuild them.
	# Two tests at a time: a lab test runs its own links, servers and programs in real time, and waits most of it.
	$(CARGO) test --workspace --locked -- --test-threads=2

test-ui:
	web/tests/install-deps.sh
	$(CARGO) build --locked -p braid -p braid-lab
	cd web/tests && npm test
	# The same page from a real daemon, in a lab.
	$(SUDO) unshare --net --mount env BRAID=$(abspath $(TARGET))/debug/braid node --test web/tests/daemon.test.mjs
	# Another page, through the proxy.
	CHROMIUM=$${CHROMIUM:-chromium} $(CARGO) test --locked -p braid -p braid-lab --test lab proxy_browser::

screenshots: deps
	web/tests/install-deps.sh
	$(CARGO) build --locked -p braid -p braid-lab
	$(SUDO) env BRAID=$(abspath $(TARGET))/debug/braid BRAID_LAB=$(abspath $(TARGET))/debug/braid-lab ALL=$(ALL) \
	  node web/tests/screenshots.mjs

deb: program
	packaging/build deb $(TARGET)/release/braid $(TARGET)/package

static: deps-build
	$(SUDO) lab/install-deps.sh static
	packaging/static-target $(STATIC)
	CC_$(subst -,_,$(STATIC))=musl-gcc $(CARGO) build --release --locked -p braid --target $(STATIC)

package: deb static
	packaging/build tarball $(TARGET)/$(STATIC)/release/braid $(TARGET)/package

test-package: deb
	$(CARGO) build --locked -p braid-lab
	$(SUDO) env BRAID_LAB=$(abspath $(TARGET))/debug/braid-lab packaging/test $$(ls -t $(TARGET)/package/braid_*.deb | head -1) $(SUITES)

# BUILT=1 uses the program that the tests have built.
test-verifier: deps
	$(SUDO) lab/install-deps.sh kernels
	$(if $(BUILT),,$(CARGO) build --locked -p braid-lab)
	$(SUDO) env BRAID_KERNELS=$(abspath $(TARGET))/kernels KERNELS="$(KERNELS)" COMPILERS="$(COMPILERS)" UPDATE=$(UPDATE) \
	  lab/kernels/test-verifier $(TARGET)/debug/braid-lab

test-kernels: deps-build
	$(SUDO) lab/install-deps.sh static kernels
	packaging/static-target $(STATIC)
	CC_$(subst -,_,$(STATIC))=musl-gcc $(CARGO) build --release --locked -p braid -p braid-lab --target $(STATIC)
	$(SUDO) env BRAID_KERNELS=$(abspath $(TARGET))/kernels KERNELS="$(KERNELS)" lab/kernels/test-kernels $(TARGET)/$(STATIC)/release $(RUNS)

test-containers:
	$(MAKE) test-kernels KERNELS=6.1 RUNS="$(or $(RUNS),podman docker ufw firewalld)"

# Debian's tools for cross-building, and Rust's libraries for aarch64-unknown-linux-musl.
test-arm64: deps-build
	$(SUDO) lab/install-deps.sh kernels cross
	programs=$$(BRAID_KERNELS=$(abspath $(TARGET))/kernels CARGO="$(CARGO)" lab/kernels/build-for arm64 $(abspath $(TARGET))) \
	  && $(SUDO) env BRAID_KERNELS=$(abspath $(TARGET))/kernels ARCH=arm64 KERNELS="$(or $(KERNELS),6.12)" lab/kernels/test-kernels "$$programs" $(or $(RUNS),checks)

test-mesh: deps
	$(CARGO) build --locked -p braid -p braid-lab
	$(CARGO) test --locked -p braid -p braid-lab --test lab adhoc_mesh:: -- --ignored --nocapture

test-outsourced: deps
	$(CARGO) build --locked -p braid -p braid-lab
	python3 -m venv $(TARGET)/os-ken && $(TARGET)/os-ken/bin/pip install --quiet os-ken==4.2.2
	OSKEN=$(abspath $(TARGET))/os-ken/bin/python $(CARGO) test --locked -p braid -p braid-lab --test lab datapath::os_ken -- --ignored --nocapture

book: program
	docs/book/build $(TARGET)/release/braid $(TARGET)/book

bench: build
	$(TARGET)/release/braid-lab bench --braid $(TARGET)/release/braid --out $(TARGET)/bench

check: check-sources
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

# What needs no build.
check-sources:
	$(CARGO) fmt --all --check
	.ci/purity
	.ci/circles
	CARGO="$(CARGO)" .ci/licences

audit:
	CARGO="$(CARGO)" .ci/audit

# Root rarely has its own Rust toolchain, so install uses the program that the user built.
$(TARGET)/release/braid:
	$(MAKE) program

install: $(TARGET)/release/braid
	install -D -m 755 $(TARGET)/release/braid $(DESTDIR)$(PREFIX)/bin/braid
	install -D -m 644 braid.example.toml $(DESTDIR)$(PREFIX)/share/doc/braid/braid.example.toml
	install -D -m 644 controller.example.toml $(DESTDIR)$(PREFIX)/share/doc/braid/controller.example.toml
	install -D -m 644 slicer.example.toml $(DESTDIR)$(PREFIX)/share/doc/braid/slicer.example.toml
	install -D -m 644 snmp-slicer.example.toml $(DESTDIR)$(PREFIX)/share/doc/braid/snmp-slicer.example.toml
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	$(TARGET)/release/braid man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions
	$(TARGET)/release/braid completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/braid
	$(TARGET)/release/braid completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_braid

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/braid $(DESTDIR)$(PREFIX)/share/man/man1/braid.1 $(DESTDIR)$(PREFIX)/share/man/man1/braid-*.1
	rm -f $(DESTDIR)$(PREFIX)/share/bash-completion/completions/braid $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_braid
	rm -rf $(DESTDIR)$(PREFIX)/share/doc/braid
