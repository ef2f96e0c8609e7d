#!/bin/sh
# Installs Corella below ~/.local, or removes it again. It needs no rights of root.
#
#     sh install.sh [--from FOLDER_OR_URL] [--prefix FOLDER]
#     sh install.sh --remove [--prefix FOLDER]
#
# Files come from the folder of this script, unless --from names another or an address. Nothing is installed unless its
# checksum is the one in SHA256SUMS.
set -eu

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0"
}

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

from=$(dirname -- "$0")
prefix=$HOME/.local
remove=
while [ $# -gt 0 ]; do
    case $1 in
        --from | --prefix) [ $# -ge 2 ] || fail "$1 needs a value" ;;
    esac
    case $1 in
        --from) from=${2%/} && shift ;;
        --prefix) prefix=${2%/} && shift ;;
        --remove) remove=yes ;;
        -h | --help) usage && exit 0 ;;
        *) fail "there is no option $1; --help lists all" ;;
    esac
    shift
done
case $prefix in
    /*) ;;
    *) prefix=$PWD/$prefix ;;
esac
# The names of the installed files, for their removal.
list=$prefix/share/corella/installed

remove_files() {
    while read -r file; do
        rm -f -- "$prefix/$file"
    done <"$list"
    rm -f -- "$list"
    # Folders of other programs stay, because they are not empty.
    for folder in share/corella/systemd share/corella/prometheus share/corella/grafana share/corella \
        share/bash-completion/completions share/bash-completion share/zsh/site-functions share/zsh \
        share/fish/vendor_completions.d share/fish share/man/man1 share/man share bin; do
        rmdir -- "$prefix/$folder" 2>/dev/null || true
    done
}

if [ -n "$remove" ]; then
    [ -f "$list" ] || fail "nothing of Corella is installed in $prefix"
    remove_files
    cache=${XDG_CACHE_HOME:-$HOME/.cache}
    echo "removed from $prefix. What it made is still there, and may be deleted: packed weights in $cache/corella," \
        "models in ${HF_HOME:-$cache/huggingface} beside those of other programs, and what was typed in conversations" \
        "in ${XDG_STATE_HOME:-$HOME/.local/state}/corella"
    exit 0
fi

[ "$(uname -s) $(uname -m)" = "Linux x86_64" ] ||
    fail "there are files for Linux on x86-64 only, not for $(uname -s) on $(uname -m)"

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 1' HUP INT TERM

get() {
    case $from in
        http://* | https://*)
            if command -v curl >/dev/null; then
                curl --fail --silent --show-error --location --output "$scratch/$1" "$from/$1"
            elif command -v wget >/dev/null; then
                wget -q -O "$scratch/$1" "$from/$1"
            else
                fail "install curl or wget, or fetch the files and name their folder with --from"
            fi || fail "$from/$1 could not be fetched"
            ;;
        *) cp -- "$from/$1" "$scratch/$1" || fail "$from is no folder of a release" ;;
    esac
}

get SHA256SUMS
archive=$(sed -n 's/^[0-9a-f]\{64\}  \(corella-[^/]*-x86_64-unknown-linux-gnu\.tar\.gz\)$/\1/p' "$scratch/SHA256SUMS")
[ -n "$archive" ] || fail "$from/SHA256SUMS names no archive for this system"
get "$archive"
(cd "$scratch" && grep -F "  $archive" SHA256SUMS | sha256sum --check --strict --status) ||
    fail "the checksum of $archive is not the one in SHA256SUMS; fetch both again"
tar -xzf "$scratch/$archive" -C "$scratch"
unpacked=$scratch/${archive%.tar.gz}
"$unpacked/corella" --version >/dev/null || fail "the binary does not start on this system; it needs glibc 2.17 or later"

# An earlier version may have had other files.
[ ! -f "$list" ] || remove_files
mkdir -p -- "$(dirname -- "$list")"
put() {
    mkdir -p -- "$prefix/$(dirname -- "$3")"
    install -m "$1" -- "$2" "$prefix/$3"
    echo "$3" >>"$list"
}
put 755 "$unpacked/corella" bin/corella
for page in "$unpacked"/man/*; do
    put 644 "$page" "share/man/man1/${page##*/}"
done
put 644 "$unpacked/completions/corella.bash" share/bash-completion/completions/corella
put 644 "$unpacked/completions/_corella" share/zsh/site-functions/_corella
put 644 "$unpacked/completions/corella.fish" share/fish/vendor_completions.d/corella.fish
for document in LICENSE README.md THIRD-PARTY-LICENSES corella.cdx.json \
    systemd/corella.service systemd/corella.socket prometheus/alerts.yml prometheus/alerts_test.yml \
    grafana/corella.json; do
    put 644 "$unpacked/$document" "share/corella/$document"
done

echo "installed $("$prefix/bin/corella" --version) in $prefix"
case :$PATH: in
    *:"$prefix/bin":*) ;;
    *) echo "add it to the PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
echo "units for systemd, alerts for Prometheus and a dashboard for Grafana are in $prefix/share/corella"
remove="sh install.sh --remove"
[ "$prefix" = "$HOME/.local" ] || remove="$remove --prefix $prefix"
echo "remove it again: $remove"
