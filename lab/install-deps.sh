#!/bin/sh
# Installs the packages that lab/packages.txt lists under build and lab, or under the given names, on Debian 12 or newer and Ubuntu 22.04 or newer.
#
# Does nothing if all are installed. Starts and enables no service: only the programs are needed.
set -eu

list=$(dirname "$0")/packages.txt
wanted=$(awk -v names=" ${*:-build lab} " '/^\[/ { gsub(/[][]/, ""); take = index(names, " " $1 " "); next } take && NF && !/^#/ { print $1 }' "$list")
[ -n "$wanted" ] || { echo "install-deps: $list has nothing under $*" >&2; exit 1; }

if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "install-deps: this system has no dpkg; install the equivalents of:" $wanted >&2
    exit 1
fi

missing=
for package in $wanted; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "install-deps: missing:$missing" >&2
    echo "install-deps: run as root: sudo $0 $*" >&2
    exit 1
fi
echo "install-deps: installing$missing"

policy=/usr/sbin/policy-rc.d
saved=
restore() {
    rm -f "$policy"
    if [ -n "$saved" ]; then mv "$saved" "$policy"; fi
}
refuses() {
    [ -x "$policy" ] || return 1
    code=0
    "$policy" nginx start >/dev/null 2>&1 || code=$?
    [ "$code" -eq 101 ]
}
# 101 tells the packages' scripts not to start anything (Debian policy 9.3.3).
if ! refuses; then
    if [ -e "$policy" ]; then
        saved=$policy.before-braid
        mv "$policy" "$saved"
    fi
    trap restore EXIT
    trap 'exit 1' INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}
# The package lists on the machine may be old or absent: fetch them only if the first attempt fails.
install 2>/dev/null || { apt-get update -qq && install; }

# Installing a service enables it for the next boot, so disable it again. A service that was installed before stays unchanged.
if command -v systemctl >/dev/null 2>&1; then
    case " $missing " in
    *" nginx-light "*) systemctl disable nginx.service >/dev/null 2>&1 || true ;;
    esac
    case " $missing " in
    *" openvswitch-switch "*) systemctl disable openvswitch-switch.service >/dev/null 2>&1 || true ;;
    esac
    case " $missing " in
    *" snmpd "*) systemctl disable snmpd.service snmptrapd.socket >/dev/null 2>&1 || true ;;
    esac
    case " $missing " in
    *" babeld "*) systemctl disable babeld.service >/dev/null 2>&1 || true ;;
    esac
    case " $missing " in
    *" openssh-server "*) systemctl disable ssh.service ssh.socket >/dev/null 2>&1 || true ;;
    esac
fi
