#!/usr/bin/env bash
# A real MySQL 8.0+ for tests, the demo and benchmarks, with durability on. See usage below.
#
# Where the server comes from, first that works:
#   1. FLASHSALE_MYSQL_DSN   a server you run yourself (nothing is started or stopped)
#   2. mysqld on PATH, 8.0 or later and not MariaDB
#   3. Debian's mysql-server-core, unpacked into the cache: the system is not changed, root is not needed
# With FLASHSALE_MYSQL_FLAVOR=mariadb: mariadbd on PATH, or Debian's mariadb-server-core in the same way.
set -euo pipefail

usage() {
  cat >&2 <<'USAGE'
usage: mysql.sh up | down | dsn | status | kill | provide

  up       start the server if it is not running, wait until it answers, print its DSN
  down     stop it and remove its data
  dsn      print the DSN of the running server (go-sql-driver form)
  status   say whether it runs
  kill     kill -9 the server (fault tests); its keeper starts it again, as an init system would
  provide  only find or download the server's programs

environment:
  FLASHSALE_MYSQL_DSN   use this server instead of starting one
  FLASHSALE_MYSQL_NAME  instance name, so that several can run (default: default)
  FLASHSALE_MYSQL_BIND  address to listen on (default: 127.0.0.1)
  FLASHSALE_MYSQL_PORT  port (default: a free one, kept for the instance's life)
  FLASHSALE_MYSQL_ARGS  more options for the server, separated by spaces
  FLASHSALE_MYSQL_FLAVOR  mysql (the default) or mariadb
  FLASHSALE_CACHE       downloads (default: ~/.cache/flashsale)
  FLASHSALE_STATE       data and logs (default: ~/.local/state/flashsale)
USAGE
}

say() { echo "mysql: $*" >&2; }
die() { say "$*"; exit 1; }

CACHE=${FLASHSALE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/flashsale}
STATE=${FLASHSALE_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/flashsale}
NAME=${FLASHSALE_MYSQL_NAME:-default}
BIND=${FLASHSALE_MYSQL_BIND:-127.0.0.1}
DIR=$STATE/mysql-$NAME
FLAVOR=${FLASHSALE_MYSQL_FLAVOR:-mysql}
ROOT=$CACHE/$FLAVOR
read -ra EXTRA <<<"${FLASHSALE_MYSQL_ARGS:-}"

# The programs, as arrays, because an unpacked server starts through its own dynamic loader.
MYSQLD=()

find_server() {
  local found version
  if [[ $FLAVOR == mariadb ]]; then
    if found=$(command -v mariadbd); then
      MYSQLD=("$found" --no-defaults)
      return
    fi
    [[ -x $ROOT/usr/sbin/mariadbd ]] || download stable mariadb-server-core
    MYSQLD=(env "LD_LIBRARY_PATH=$ROOT/usr/lib/x86_64-linux-gnu" "$ROOT/usr/sbin/mariadbd" --no-defaults
      --lc-messages-dir="$ROOT/usr/share/mysql" --character-sets-dir="$ROOT/usr/share/mysql/charsets")
    return
  fi
  if found=$(command -v mysqld); then
    version=$("$found" --version)
    if [[ $version != *MariaDB* && $version =~ Ver\ ([0-9]+)\. && ${BASH_REMATCH[1]} -ge 8 ]]; then
      MYSQLD=("$found" --no-defaults)
      return
    fi
  fi
  [[ -x $ROOT/usr/sbin/mysqld ]] || download unstable mysql-server-core mysql-client-core
  local lib
  lib=$(dirname "$(find "$ROOT/usr/lib" -name 'ld-linux*' | head -1)")
  MYSQLD=("$(find "$lib" -name 'ld-linux*' | head -1)" --library-path "$lib" "$ROOT/usr/sbin/mysqld" --no-defaults
    --lc-messages-dir="$ROOT/usr/share/mysql" --character-sets-dir="$ROOT/usr/share/mysql/charsets"
    --plugin-dir="$ROOT/usr/lib/mysql/plugin")
}

# download SUITE PACKAGE... unpacks Debian's packages into the cache with an apt state of its own. Only unstable carries MySQL;
# taking it from there without touching the system needs its own C library as well, which the loader trick above then uses.
# From stable, which is the machine's own, only what is missing is taken.
download() {
  { command -v apt-get && command -v dpkg; } >/dev/null ||
    die "no $FLAVOR server found. Put one on PATH, or set FLASHSALE_MYSQL_DSN to a server you run."
  mkdir -p "$CACHE"
  exec 9>"$CACHE/$FLAVOR.lock"
  flock 9
  [[ -d $ROOT/usr/sbin ]] && return
  local suite=$1 work archive apt deb
  shift
  work=$(mktemp -d "$CACHE/$FLAVOR-download.XXXXXX")
  # shellcheck disable=SC2016 # apt-get fills it in
  archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -E '/debian/?$' | sort -u | head -1 || true)
  [[ -n $archive ]] || die "no Debian archive in this machine's apt sources; set FLASHSALE_MYSQL_DSN instead"
  mkdir -p "$work"/{lists/partial,cache/archives/partial,root}
  : >"$work/status"
  # shellcheck disable=SC1091 # says which release this machine runs
  if [[ $suite == stable ]]; then
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    cp /var/lib/dpkg/status "$work/status"
  fi
  echo "deb $archive $suite main" >"$work/sources.list"
  apt=(apt-get -q -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::State::status="$work/status"
    -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=root
    -o Debug::NoLocking=1)
  say "downloading $FLAVOR (tens of MB, once) ..."
  "${apt[@]}" update >"$work/log" 2>&1 || { tail -5 "$work/log" >&2; die "could not read the package list"; }
  "${apt[@]}" install -y --download-only --no-install-recommends "$@" >>"$work/log" 2>&1 ||
    { tail -5 "$work/log" >&2; die "could not download $FLAVOR"; }
  for deb in "$work"/cache/archives/*.deb; do dpkg -x "$deb" "$work/root"; done
  rm -rf "$ROOT"
  say "unpacked $(basename "$work/cache/archives/$1"_*.deb)"
  mv "$work/root" "$ROOT"
  rm -rf "$work"
}

# ours FILE prints the process number in a file, if that process is this instance's: numbers are used again.
ours() { [[ -s $DIR/$1 ]] && grep -qsF "$DIR" "/proc/$(cat "$DIR/$1")/cmdline" && cat "$DIR/$1"; }
pid() { ours pid; }
kept() { ours keeper >/dev/null; }

dsn() { echo "root@tcp($BIND:$(cat "$DIR/port"))/flashsale"; }

# answers is true once the server speaks the MySQL protocol: it greets with its version.
answers() { timeout 1 bash -c "exec 3<>/dev/tcp/$BIND/$1 && head -c 5 <&3 | grep -q ." 2>/dev/null; }

up() {
  if [[ -n ${FLASHSALE_MYSQL_DSN:-} ]]; then echo "$FLASHSALE_MYSQL_DSN"; return; fi
  mkdir -p "$DIR"
  exec 8>"$DIR/lock"
  flock 8
  if kept; then
    for _ in $(seq 120); do # it may be starting again
      if answers "$(cat "$DIR/port")"; then dsn; return; fi
      sleep 0.25
    done
  fi
  stop
  rm -f "$DIR/stop"
  find_server
  local port user=()
  [[ $EUID -eq 0 ]] && user=(--user=root)
  if [[ ! -e $DIR/data/.initialized ]]; then
    say "initialising a data directory ..."
    rm -rf "$DIR/data"
    echo "CREATE DATABASE flashsale; CREATE USER 'root'@'%'; GRANT ALL ON *.* TO 'root'@'%' WITH GRANT OPTION;" | tr ';' '\n' |
      sed 's/$/;/; /^ *;$/d' >"$DIR/init.sql"
    initialise >"$DIR/log" 2>&1 || { tail -20 "$DIR/log" >&2; die "could not initialise"; }
    touch "$DIR/data/.initialized"
  fi
  if [[ -n ${FLASHSALE_MYSQL_PORT:-} ]]; then
    echo "$FLASHSALE_MYSQL_PORT" >"$DIR/port"
  elif [[ ! -s $DIR/port ]]; then
    while port=$((20000 + RANDOM % 12000)); (exec 3<>"/dev/tcp/$BIND/$port") 2>/dev/null; do :; done
    echo "$port" >"$DIR/port"
  fi
  port=$(cat "$DIR/port")
  # Durability is on by default; named here because every figure and every promise of this project rests on it.
  # The keeper starts the server again when it was killed.
  local options=(--mysqlx=OFF --secure-file-priv=NULL --innodb-redo-log-capacity=1G)
  [[ $FLAVOR == mysql ]] || options=(--log-bin --binlog-format=ROW --innodb-log-file-size=1G --performance-schema)
  # shellcheck disable=SC2016 # for the inner shell
  setsid bash -c 'while :; do "$@" & echo $! >"$0/pid"; wait $!; [[ ! -e $0/stop ]] || exit 0; sleep 1; done' "$DIR" \
    "${MYSQLD[@]}" "${user[@]}" --datadir="$DIR/data" --socket="$DIR/data/mysql.sock" --pid-file="$DIR/mysqld.pid" \
    --bind-address="$BIND" --port="$port" --skip-name-resolve "${options[@]}" \
    --innodb-flush-log-at-trx-commit=1 --sync-binlog=1 \
    --innodb-buffer-pool-size=1G --max-connections=500 "${EXTRA[@]}" \
    </dev/null >>"$DIR/log" 2>&1 8>&- &
  echo $! >"$DIR/keeper"
  for _ in $(seq 240); do
    if answers "$port"; then
      say "up on $BIND:$port"
      dsn
      return
    fi
    sleep 0.25
  done
  tail -20 "$DIR/log" >&2
  stop
  die "the server did not answer within 60 s (log above)"
}

# initialise makes an empty data directory, and in it what init.sql says.
initialise() {
  if [[ $FLAVOR == mysql ]]; then
    "${MYSQLD[@]}" --initialize-insecure "${user[@]}" --datadir="$DIR/data" --init-file="$DIR/init.sql"
    return
  fi
  local share=$ROOT/usr/share/mysql
  [[ -d $share ]] || share=/usr/share/mysql
  mkdir -p "$DIR/data/mysql" "$DIR/data/flashsale"
  {
    printf "USE mysql;\nSET @auth_root_socket=NULL;\n"
    cat "$share/mysql_system_tables.sql" "$share/mysql_performance_tables.sql" "$share/mysql_system_tables_data.sql" "$share/fill_help_tables.sql"
    echo "FLUSH PRIVILEGES;"
    sed '1d' "$DIR/init.sql" # the first line creates the database
  } | "${MYSQLD[@]}" "${user[@]}" --bootstrap --datadir="$DIR/data"
}

# stop ends the server and its keeper, and waits until both are gone.
stop() {
  local begin=$SECONDS signal=TERM
  [[ -d $DIR ]] || return 0
  touch "$DIR/stop"
  while kept || pid >/dev/null; do
    ((SECONDS - begin < 30)) || signal=KILL
    if pid >/dev/null; then kill "-$signal" "$(pid)" 2>/dev/null || true; fi
    sleep 0.2
  done
  rm -f "$DIR/stop"
}

case ${1:-} in
up) up ;;
down)
  if [[ -n ${FLASHSALE_MYSQL_DSN:-} ]]; then exit 0; fi
  stop
  rm -rf "$DIR"
  say "down"
  ;;
dsn)
  if [[ -n ${FLASHSALE_MYSQL_DSN:-} ]]; then echo "$FLASHSALE_MYSQL_DSN"; exit 0; fi
  pid >/dev/null || die "not running; start it with: $0 up"
  dsn
  ;;
status) if pid >/dev/null; then say "running, pid $(pid), $(dsn)"; else say "not running"; exit 1; fi ;;
kill) kill -KILL "$(pid)" ;;
provide) find_server ;;
*) usage; [[ ${1:-} == --help || ${1:-} == -h ]] || exit 2 ;;
esac
