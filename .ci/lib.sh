# What ./run and ./test share: sourced by them, in the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Debian packages; "package:command" is not asked for where the command is there already.
build_packages=(cmake:cmake g++:g++ ninja-build:ninja pkg-config:pkg-config nlohmann-json3-dev libfmt-dev
                libspdlog-dev libpcre2-dev libcli11-dev libxxhash-dev libhwloc-dev)
test_packages=(libgtest-dev binutils:objdump)
fuzz_packages=(clang-19:clang++-19 libclang-rt-19-dev)

die() {
  echo "$0: $*" >&2
  exit 1
}

# quietly WHAT COMMAND...: one line to stderr; the command's output only if it fails.
quietly() {
  local what=$1 log status=0
  shift
  log=$(mktemp)
  echo "$what" >&2
  "$@" >"$log" 2>&1 || status=$?
  if ((status != 0)); then
    cat "$log" >&2
    rm -f "$log"
    die "failed: $*"
  fi
  rm -f "$log"
}

need() {
  local entry package missing=() root=()
  if ! command -v dpkg-query >/dev/null; then
    echo "no dpkg here: nothing is installed; needed are what Debian calls ${*%%:*}" >&2
    return
  fi
  for entry; do
    package=${entry%%:*}
    if [[ $entry == *:* ]] && command -v "${entry#*:}" >/dev/null; then continue; fi
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    local hint="missing packages; as root: apt-get install ${missing[*]}"
    command -v sudo >/dev/null || die "$hint"
    if [[ -t 0 ]]; then root=(sudo); else root=(sudo -n); fi
    "${root[@]}" true || die "$hint"
  fi
  quietly "installing ${missing[*]}" install_packages "${missing[@]}"
}

install_packages() {
  local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -qq --no-install-recommends)
  "${apt[@]}" install "$@" || { "${apt[@]}" update && "${apt[@]}" install "$@"; }
}

# configure PRESET [-Dname=value...]
configure() {
  local launcher=()
  if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  quietly "configuring build/$1" cmake --preset "$1" "${launcher[@]}" "${@:2}"
}

# build PRESET TARGET...: with ninja's progress on a terminal, else quietly.
build() {
  local command=(ninja -C "build/$1" "${@:2}")
  if [[ -t 2 ]]; then
    "${command[@]}" >&2 || die "failed: ${command[*]}"
  else
    quietly "building in build/$1 (the first time takes minutes)" "${command[@]}"
  fi
}
