#!/bin/sh
# Installs the dependencies of the page's tests on Debian 12 or newer: Chromium, Node 20 or newer, nftables, and fonts for the screenshots.
set -eu
cd "$(dirname "$0")"

missing=
command -v "${CHROMIUM:-chromium}" >/dev/null 2>&1 || missing="$missing chromium"
command -v node >/dev/null 2>&1 || missing="$missing nodejs"
command -v nft >/dev/null 2>&1 || [ -x /usr/sbin/nft ] || missing="$missing nftables"
command -v npm >/dev/null 2>&1 || missing="$missing npm"
[ -d /usr/share/fonts/opentype/inter ] || [ -d /usr/share/fonts/truetype/inter ] || missing="$missing fonts-inter"
if [ -n "$missing" ]; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "install-deps: missing:$missing; run as root: sudo $0" >&2
        exit 1
    fi
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null; }
    install 2>/dev/null || { apt-get update -qq && install; }
fi
major=$(node --version | sed 's/^v\([0-9]*\).*/\1/')
if [ "$major" -lt 20 ]; then
    echo "install-deps: node is $(node --version), 20 or newer is needed: see https://nodejs.org" >&2
    exit 1
fi
[ -d node_modules/playwright-core ] && [ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --no-audit --no-fund --silent
