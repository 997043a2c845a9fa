#!/usr/bin/env bash
# Brings up a MySQL and a Redis of its own, runs the benchmarks (bench.sh --help lists the flags), takes both down.
# FLASHSALE_MYSQL_DSN and FLASHSALE_REDIS_ADDR make it use servers that run already, and leave them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export FLASHSALE_MYSQL_NAME=${FLASHSALE_MYSQL_NAME:-bench}

for argument in "$@"; do
  case $argument in -h | -help | --help) exec go -C "$here" run . --help ;; esac
done

work=$(mktemp -d)
bench=
# shellcheck disable=SC2317 # the trap calls it
clean() {
  trap - EXIT INT TERM
  if [[ -n $bench ]]; then
    kill -TERM "$bench" 2>/dev/null || true
    wait "$bench" || true
  fi
  "$here/redis.sh" down
  "$here/../mysql/mysql.sh" down
  rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

go -C "$here" build -o "$work/bench" .
dsn=$("$here/../mysql/mysql.sh" up)
redis=$("$here/redis.sh" up)
# In the background, so that a signal to this script is acted upon at once.
FLASHSALE_MYSQL_DSN=$dsn FLASHSALE_REDIS_ADDR=$redis "$work/bench" "$@" &
bench=$!
code=0
wait "$bench" || code=$?
bench=
exit "$code"
