#!/usr/bin/env bash
# A Redis for benchmarks, without persistence. See usage below.
#
# Where the server comes from, first that works:
#   1. FLASHSALE_REDIS_ADDR  a server you run yourself (nothing is started or stopped)
#   2. redis-server on PATH
#   3. Debian's redis-server and what it needs, unpacked into the cache: the system is not changed, root is not needed
set -euo pipefail

usage() {
  cat >&2 <<'USAGE'
usage: redis.sh up | down

  up    start the server if it is not running, wait until it answers, print its address
  down  stop it and remove its state

environment:
  FLASHSALE_REDIS_ADDR  use this server (host:port) instead of starting one
  FLASHSALE_CACHE       downloads (default: ~/.cache/flashsale)
  FLASHSALE_STATE       pid and log (default: ~/.local/state/flashsale)
USAGE
}

say() { echo "redis: $*" >&2; }
die() { say "$*"; exit 1; }

CACHE=${FLASHSALE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/flashsale}
STATE=${FLASHSALE_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/flashsale}
DIR=$STATE/redis-bench
ROOT=$CACHE/redis

# The program with its environment, as an array.
SERVER=()

find_server() {
  local found libs
  if found=$(command -v redis-server); then SERVER=("$found"); return; fi
  [[ -x $ROOT/usr/bin/redis-server ]] || download
  libs=$(find "$ROOT" -name '*.so.*' -printf '%h\n' | sort -u | paste -sd:)
  SERVER=(env "LD_LIBRARY_PATH=$libs" "$ROOT/usr/bin/redis-server")
}

# download unpacks Debian's packages into the cache. apt gets lists and a cache of its own, and the system's sources and
# status: so it fetches the libraries that the system lacks, and not those it has.
download() {
  { command -v apt-get && command -v dpkg; } >/dev/null ||
    die "no Redis found. Put redis-server on PATH, or set FLASHSALE_REDIS_ADDR to a server you run."
  mkdir -p "$CACHE"
  exec 9>"$CACHE/redis.lock"
  flock 9
  [[ -x $ROOT/usr/bin/redis-server ]] && return
  local work apt deb
  work=$(mktemp -d "$CACHE/redis-download.XXXXXX")
  mkdir -p "$work"/{lists/partial,cache/archives/partial,root}
  apt=(apt-get -q -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  say "downloading Redis (about 2 MB, once) ..."
  "${apt[@]}" update >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; die "could not read the package lists"; }
  "${apt[@]}" install -y --download-only --no-install-recommends redis-server redis-tools >>"$work/log" 2>&1 ||
    { tail -5 "$work/log" >&2; die "could not download Redis"; }
  for deb in "$work"/cache/archives/*.deb; do dpkg -x "$deb" "$work/root"; done
  rm -rf "$ROOT"
  say "unpacked $(basename "$work"/cache/archives/redis-server*.deb)"
  mv "$work/root" "$ROOT"
  rm -rf "$work"
}

# pid prints the server's process number, if that process is ours: numbers are used again.
pid() { [[ -s $DIR/pid ]] && grep -qsF "redis-server" "/proc/$(cat "$DIR/pid")/cmdline" && cat "$DIR/pid"; }

answers() { timeout 1 bash -c "exec 3<>/dev/tcp/127.0.0.1/$1 && printf 'PING\r\n' >&3 && head -c 5 <&3 | grep -q PONG" 2>/dev/null; }

up() {
  if [[ -n ${FLASHSALE_REDIS_ADDR:-} ]]; then echo "$FLASHSALE_REDIS_ADDR"; return; fi
  if pid >/dev/null; then echo "127.0.0.1:$(cat "$DIR/port")"; return; fi
  find_server
  mkdir -p "$DIR"
  local port
  while port=$((20000 + RANDOM % 12000)); (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
  echo "$port" >"$DIR/port"
  # setsid: Ctrl-C is for the benchmark, which wants its servers until it has cleaned up.
  setsid "${SERVER[@]}" --bind 127.0.0.1 --port "$port" --save "" --appendonly no --dir "$DIR" --maxclients 20000 \
    </dev/null >"$DIR/log" 2>&1 &
  echo $! >"$DIR/pid"
  for _ in $(seq 100); do
    if answers "$port"; then
      say "up on 127.0.0.1:$port"
      echo "127.0.0.1:$port"
      return
    fi
    sleep 0.1
  done
  tail -5 "$DIR/log" >&2
  stop
  die "the server did not answer within 10 s (log above)"
}

stop() {
  local begin=$SECONDS signal=TERM
  while pid >/dev/null; do
    ((SECONDS - begin < 10)) || signal=KILL
    kill "-$signal" "$(pid)" 2>/dev/null || true
    sleep 0.1
  done
}

case ${1:-} in
up) up ;;
down)
  if [[ -n ${FLASHSALE_REDIS_ADDR:-} ]]; then exit 0; fi
  stop
  rm -rf "$DIR"
  say "down"
  ;;
*) usage; [[ ${1:-} == --help || ${1:-} == -h ]] || exit 2 ;;
esac
