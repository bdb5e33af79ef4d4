#!/usr/bin/env bash
# Install Apptainer on Debian 12, which has no package of it: install_apptainer.sh [PREFIX]   (root; PREFIX /opt/apptainer)
#
# Debian sid has one, whose programs need a newer libc than Debian 12's. They are unpacked below PREFIX with that libc and
# its loader beside them; the libc of the system stays. Exit status: 0 installed, 2 usage, 3 it cannot be installed here.
# DEBIAN_MIRROR: a Debian archive (the one that apt uses). BUILD_USER: who builds with --fakeroot (builder; made if missing).
set -euo pipefail
prefix=${1:-/opt/apptainer}
user=${BUILD_USER:-builder}
private=$prefix/usr/lib/private
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
# of apptainer_1.4.5-2_amd64.deb
sum=26cf96e08fccb0e50ea0f285a5a19f940ee873d167a0680584fe6eba7d197d65

die() {
    echo "install_apptainer.sh: $1" >&2
    exit "${2:-3}"
}

[ "$(id -u)" = 0 ] || die "must run as root" 2
[ "$(uname -m)" = x86_64 ] || die "only for x86_64"
command -v apt-get >/dev/null || die "only for Debian"
[ -s $keyring ] || die "no keyring of the Debian archive at $keyring"
# shellcheck disable=SC2016  # apt fills in REPO_URI
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sort -u | sed -n 1p)}
[ -n "$mirror" ] || die "set DEBIAN_MIRROR: apt knows no archive"

# 1. What Apptainer runs: to pack images, to mount them without root, to be root in a namespace. make_base.sh needs mmdebstrap.
apt-get install -y --no-install-recommends patchelf squashfs-tools squashfuse fuse3 uidmap mmdebstrap >/dev/null

# 2. The packages of sid through folders of apt's own, so that the system's sources and lists stay as they are.
#    The Release file of a mirror that is not renewed may be past its date; the checksum of the package holds.
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,debs,libs} "$private"
: >"$work/status"
echo "deb [signed-by=$keyring] $mirror sid main" >"$work/sources.list"
apt=(-o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null
    -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache"
    -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update -qq || die "cannot read sid"
(cd "$work/debs" && apt-get "${apt[@]}" download -qq apptainer libc6 libseccomp2 libsqlite3-0) || die "sid has no apptainer"
echo "$sum $(echo "$work"/debs/apptainer_*.deb)" | sha256sum --check --status ||
    die "sid has another apptainer now: look at it, then change the checksum in this script"

# 3. Apptainer below the prefix, the libraries it needs beside it; a copy of the loader, as one of the two is a link.
dpkg -x "$work"/debs/apptainer_*.deb "$prefix"
for package in libc6 libseccomp2 libsqlite3-0; do dpkg -x "$work/debs/${package}"_*.deb "$work/libs"; done
for name in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 libresolv.so.2 libnss_files.so.2 libnss_dns.so.2 \
    'libseccomp.so.2*' 'libsqlite3.so.0*'; do
    find "$work/libs" -name "$name" -exec cp -a {} "$private/" \;
done
find "$work/libs" -type f -name ld-linux-x86-64.so.2 -exec cp {} "$private/" \; -quit
for program in usr/bin/apptainer usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
    patchelf --set-interpreter "$private/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$private" "$prefix/$program"
done

# 4. apptainer looks for etc and var in PREFIX/usr, its starter in PREFIX/usr/lib.
ln -sfn ../etc "$prefix/usr/etc"
ln -sfn ../var "$prefix/usr/var"
ln -sfn ../../etc "$prefix/usr/lib/etc"
ln -sfn ../../var "$prefix/usr/lib/var"
mkdir -p "$prefix/var/lib/apptainer/mnt/session" "$prefix/var/apptainer/mnt/session"
#    Where root lacks a capability, as in many virtual machines, asking for all of them fails.
sed -i 's/^root default capabilities = .*/root default capabilities = no/' "$prefix/etc/apptainer/apptainer.conf"

# 5. Who builds, with numbers of users to be root over. Without FUSE every start would unpack the image.
id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
for file in /etc/subuid /etc/subgid; do grep -q "^$user:" $file || echo "$user:100000:65536" >>$file; done
[ ! -e /dev/fuse ] || chmod 666 /dev/fuse
ln -sf "$prefix/usr/bin/apptainer" /usr/local/bin/apptainer
apptainer version
