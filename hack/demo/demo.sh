#!/usr/bin/env bash
# The demo: a whole sale on real parts. "demo.sh up [flags of demo run]" runs it, "demo.sh down" removes what it made.
#
# With CLUSTER=current it runs on the current kubecontext, in the namespace flashsale-demo, and needs
#   DEMO_DSN   a MySQL database that the cluster's pods can reach: user:password@tcp(host:port)/database
#   IMG, DEMO_IMG   unless it is kind or minikube: names that the images are pushed to (with skopeo) and pulled from
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=$(make -s print-version)
image=${IMG:-flashsale:$version}
shop=${DEMO_IMG:-flashsale-demo:$version}
cluster=hack/cluster/cluster.sh
export FLASHSALE_MYSQL_NAME=demo FLASHSALE_MYSQL_BIND=10.99.0.1 FLASHSALE_MYSQL_PORT=3306
unset FLASHSALE_MYSQL_DSN # a server for tests: pods may not reach it, and the demo has one of its own
current=
if [[ ${CLUSTER:-} == current ]]; then current=yes; fi

say() { echo "demo: $*" >&2; }

parts() {
  if [[ $current ]]; then
    [[ -n ${DEMO_DSN:-} ]] || { say "CLUSTER=current needs DEMO_DSN, a MySQL database that pods can reach: user:password@tcp(host:port)/database"; exit 2; }
    $cluster up
    dsn=$DEMO_DSN
    return
  fi
  hack/mysql/mysql.sh provide
  $cluster up
  dsn=$($cluster exec hack/mysql/mysql.sh up)
}

images() {
  say "building the images $image and $shop"
  make -s image IMG="$image"
  mkdir -p dist/demo
  CGO_ENABLED=0 GOOS=linux go build -trimpath -ldflags '-s -w' -o dist/demo/demo ./hack/demo
  $cluster image hack/demo/Dockerfile dist/demo "$shop" dist/demo.tar >/dev/null
  $cluster load dist/flashsale.tar "$image"
  $cluster load dist/demo.tar "$shop"
}

install() {
  say "installing the operator from config/default"
  $cluster exec make -s deploy IMG="$image" >/dev/null
  # The tag stays the same from run to run, so the pod has to be told of a new image.
  $cluster exec kubectl -n flashsale-system rollout restart deployment/flashsale-manager >/dev/null
  $cluster exec kubectl -n flashsale-system rollout status deployment/flashsale-manager --timeout=120s >&2
}

case ${1:-} in
up)
  shift
  mkdir -p dist
  parts
  (umask 077 && echo "$dsn" >dist/demo.dsn)
  images
  install
  $cluster exec dist/demo/demo run --image "$image" --shop-image "$shop" --dsn-file dist/demo.dsn "$@"
  ;;
down)
  if [[ $current ]]; then
    # The operator stays: other sales may need it. "make undeploy" removes it.
    kubectl delete --ignore-not-found --timeout=120s -n flashsale-demo flashsale/iphone17
    kubectl delete --ignore-not-found --timeout=120s namespace flashsale-demo
  else
    if $cluster status >/dev/null 2>&1; then $cluster exec hack/mysql/mysql.sh down; fi
    $cluster down
    rm -rf "${FLASHSALE_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/flashsale}/mysql-demo"
  fi
  rm -f dist/demo.dsn
  ;;
*)
  echo "usage: $0 up [flags of 'demo run'] | down" >&2
  exit 2
  ;;
esac
