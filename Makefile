# Everything a person does with the source. `make demo` and `make test` do their own set-up.
CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
# Debian and Ubuntu releases that test-package tries.
SUITES ?= bookworm trixie
TARGET := $(or $(CARGO_TARGET_DIR),target)
# The tarball's program is linked statically, so that any Linux runs it.
STATIC := $(shell uname -m)-unknown-linux-musl
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.NOTPARALLEL:
.PHONY: help deps deps-build program build demo test test-ui test-package test-verifier test-kernels test-arm64 bench check audit screenshots deb static package book install uninstall

help:
	@echo "make demo       build, and show what Braid does, in a laboratory of its own (two minutes)"
	@echo "make test       all tests; those on real kernels need root"
	@echo "make test-ui    tests of the web page in Chromium, against a mock and a real daemon, and of Chromium through the proxy (installs Chromium and Node)"
	@echo "make bench      measurements, with the figures the documentation quotes"
	@echo "make check      formatting, lints, the purity of the pure crates, circles between modules, licences and sources of dependencies"
	@echo "make audit      licences, sources, duplicates and known vulnerabilities of all dependencies, with cargo-deny (installs it)"
	@echo "make screenshots  pictures of the living web page, to docs/screenshots (seven minutes; needs root; ALL=1: every view)"
	@echo "make deb        a package for Debian and Ubuntu, to $(TARGET)/package"
	@echo "make package    the same, and a tarball with a static program for any Linux"
	@echo "make test-package  installs, starts, upgrades and removes the .deb in plain roots (SUITES=\"bookworm noble\"); needs root"
	@echo "make test-verifier  loads every BPF program alone on each kernel of lab/kernels, in QEMU, from each compiler (UPDATE=1 writes the table)"
	@echo "make test-kernels  all of Braid on each kernel of lab/kernels, in QEMU (KERNELS=\"6.1 6.12\" RUNS=checks); both need root and download from Debian"
	@echo "make test-arm64  cross-builds Braid for arm64 and tries it on Debian's kernel in QEMU (KERNELS, default 6.12); needs root"
	@echo "make book       the handbook as web pages, to $(TARGET)/book (needs mdbook and jq)"
	@echo "make program    build, without installing anything but what building needs"
	@echo "make install    install what was built to $(PREFIX) (DESTDIR and PREFIX are honoured)"
	@echo "make uninstall  remove what install installed; configuration and state stay"
	@echo "make deps       install the Debian or Ubuntu packages all this needs"

deps:
	$(SUDO) lab/install-deps.sh

deps-build:
	$(SUDO) lab/install-deps.sh build

# The laboratory too: without it the program would want other features of its dependencies, and make demo a build of each.
program: deps-build
	$(CARGO) build --release --locked -p braid -p braid-lab

build: deps program

demo: build
	$(TARGET)/release/braid-lab demo --braid $(TARGET)/release/braid --out $(TARGET)/demo

test: deps
	# Builds the program too, which the laboratory's tests run; by itself it would want other features of its dependencies, and a build of each.
	$(CARGO) test --workspace --exclude braid-lab --locked
	# The laboratory's tests one after the other: each has links, servers and programs of its own to keep in time.
	$(CARGO) test -p braid-lab --locked -- --test-threads=1

test-ui:
	web/tests/install-deps.sh
	$(CARGO) build --locked -p braid -p braid-lab
	cd web/tests && npm test
	# The same page from the living daemon, in a laboratory of its own.
	$(SUDO) unshare --net --mount env BRAID=$(abspath $(TARGET))/debug/braid node --test web/tests/daemon.test.mjs
	# Another page, through the proxy.
	CHROMIUM=$${CHROMIUM:-chromium} $(CARGO) test --locked -p braid -p braid-lab --test proxy_browser

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

# The same package and profile as the tests': a loader that they have built is not built again.
test-verifier: deps
	$(SUDO) lab/install-deps.sh kernels
	$(CARGO) build --locked -p braid-lab
	$(SUDO) env BRAID_KERNELS=$(abspath $(TARGET))/kernels KERNELS="$(KERNELS)" COMPILERS="$(COMPILERS)" UPDATE=$(UPDATE) \
	  lab/kernels/test-verifier $(TARGET)/debug/braid-lab

test-kernels: deps-build
	$(SUDO) lab/install-deps.sh static kernels
	packaging/static-target $(STATIC)
	CC_$(subst -,_,$(STATIC))=musl-gcc $(CARGO) build --release --locked -p braid -p braid-lab --target $(STATIC)
	$(SUDO) env BRAID_KERNELS=$(abspath $(TARGET))/kernels KERNELS="$(KERNELS)" lab/kernels/test-kernels $(TARGET)/$(STATIC)/release $(RUNS)

# Debian's tools for cross-building, and Rust's libraries for aarch64-unknown-linux-musl.
test-arm64: deps-build
	$(SUDO) lab/install-deps.sh kernels cross
	programs=$$(BRAID_KERNELS=$(abspath $(TARGET))/kernels CARGO="$(CARGO)" lab/kernels/build-for arm64 $(abspath $(TARGET))) \
	  && $(SUDO) env BRAID_KERNELS=$(abspath $(TARGET))/kernels ARCH=arm64 KERNELS="$(or $(KERNELS),6.12)" lab/kernels/test-kernels "$$programs" $(or $(RUNS),checks)

book: program
	docs/book/build $(TARGET)/release/braid $(TARGET)/book

bench: build
	$(TARGET)/release/braid-lab bench --braid $(TARGET)/release/braid --out $(TARGET)/bench

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	.ci/purity
	.ci/circles
	CARGO="$(CARGO)" .ci/licences

audit:
	CARGO="$(CARGO)" .ci/audit

# Root seldom has a Rust of its own: what the user has built is taken as it stands.
$(TARGET)/release/braid:
	$(MAKE) program

install: $(TARGET)/release/braid
	install -D -m 755 $(TARGET)/release/braid $(DESTDIR)$(PREFIX)/bin/braid
	install -D -m 644 braid.example.toml $(DESTDIR)$(PREFIX)/share/doc/braid/braid.example.toml
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	$(TARGET)/release/braid man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions
	$(TARGET)/release/braid completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/braid
	$(TARGET)/release/braid completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_braid

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/braid $(DESTDIR)$(PREFIX)/share/man/man1/braid.1 $(DESTDIR)$(PREFIX)/share/man/man1/braid-*.1
	rm -f $(DESTDIR)$(PREFIX)/share/bash-completion/completions/braid $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_braid
	rm -rf $(DESTDIR)$(PREFIX)/share/doc/braid
