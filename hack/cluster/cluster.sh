#!/usr/bin/env bash
# A local Kubernetes of one node, made of real parts: etcd, the control plane, kubelet, kube-proxy, containerd, runc.
#
# The Kubernetes programs are built from their Go modules (go.mod beside this file pins them); containerd, runc and the
# CNI plugins come from Debian's archive and are unpacked into the cache, not installed. Everything runs inside network,
# mount and process namespaces of its own, so that the machine's network and files stay as they are and that ending one
# process, the first of that process namespace, ends the daemons and every pod.
set -euo pipefail
umask 022 # containers run as other users, and must be able to enter their file systems

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=$(awk '$1 == "k8s.io/kubernetes" { print $2; exit }' "$here/go.mod")
cache=$(realpath -m "${FLASHSALE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/flashsale}")
state=$(realpath -m "${FLASHSALE_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/flashsale}")/cluster
lock=$cache/cluster.lock
bin=$cache/kubernetes-$version/bin
kubeconfig=$state/kubeconfig

node_name=flashsale-node
node_ip=10.99.0.1 # also where a process started through `exec` can listen for the pods
service_cidr=10.96.0.0/16
service_ip=10.96.0.1 # the `kubernetes` Service: always the first address of the range
pod_cidr=10.244.0.0/24
api=https://$node_ip:6443
pause_image=localhost/flashsale-pause:1
parts=(etcd kube-apiserver kube-controller-manager kube-scheduler containerd kubelet kube-proxy)

# shellcheck source=config.sh
. "$here/config.sh"
# shellcheck source=images.sh
. "$here/images.sh"

declare -A packages=(
  [etcd]=go.etcd.io/etcd/server/v3
  [kube-apiserver]=k8s.io/kubernetes/cmd/kube-apiserver
  [kube-controller-manager]=k8s.io/kubernetes/cmd/kube-controller-manager
  [kube-scheduler]=k8s.io/kubernetes/cmd/kube-scheduler
  [kube-proxy]=k8s.io/kubernetes/cmd/kube-proxy
  [kubelet]=k8s.io/kubernetes/cmd/kubelet
  [kubectl]=k8s.io/kubernetes/cmd/kubectl
  [pause]=./pause
)

usage() {
  cat <<USAGE
usage: $(basename "$0") COMMAND

  build [NAME...]   build the missing Kubernetes programs (all, or those named); needs Go, not root
  bin               print the folder they are in (for KUBEBUILDER_ASSETS)
  up                start the node, or the parts of it that have ended; returns at once if all is well
  status            tell what runs; exit code 0 only if the node is ready
  kubeconfig        print the path of the kubeconfig; its server answers only inside the node's network
  exec CMD...       run a command in the node's network (pods reach it at $node_ip) with KUBECONFIG and PATH set
  load TAR NAME:TAG import a docker-archive tar of an image
  image DOCKERFILE CONTEXT NAME:TAG TAR
                    build an image and write it as a docker-archive tar
  down              stop everything and remove its state; keep the cache

Environment: FLASHSALE_CACHE (now $cache) and FLASHSALE_STATE (now ${state%/cluster}).
CLUSTER=current: act on the current kubecontext (kind, minikube, any cluster) instead of a local node.
USAGE
}

say() { echo "cluster: $*" >&2; }
fail() { say "$*"; exit 1; }
need_root() { ((EUID == 0)) || { say "'$1' makes namespaces, so it needs root (run it with sudo)"; exit 3; }; }
need() {
  local tool
  for tool in "$@"; do command -v "$tool" >/dev/null || fail "needs '$tool' on PATH"; done
}

# locked FILE FUNCTION ARG...: only one run at a time goes on; the daemons never inherit the lock (see start).
locked() {
  local file=$1
  shift
  mkdir -p "$(dirname "$file")"
  exec 9>"$file"
  flock -n 9 || { say "waiting for another run ($file)"; flock 9; }
  "$@"
  exec 9>&-
}

# --- building and fetching --------------------------------------------------------------------------------------------

missing() {
  local name
  for name in "$@"; do [[ -x $bin/$name ]] || echo "$name"; done
}

build() {
  local name
  (($#)) || set -- "${!packages[@]}"
  for name in "$@"; do [[ -n ${packages[$name]:-} ]] || fail "cannot build '$name'; known: ${!packages[*]}"; done
  [[ -n $(missing "$@") ]] || return 0
  need go
  locked "$bin/../build.lock" build_missing "$@"
}

build_missing() {
  local name begin ticker flag=k8s.io/component-base/version mm=${version#v}
  local ldflags="-s -w -X $flag.gitVersion=$version"
  ldflags+=" -X $flag.gitMajor=${mm%%.*} -X $flag.gitMinor=$(cut -d. -f2 <<<"$mm")"
  mkdir -p "$bin"
  for name in $(missing "$@"); do
    say "building $name $version (up to several minutes the first time) ..."
    begin=$SECONDS
    # Under another name first, so that an interrupted build leaves no half of a program behind.
    tick "building $name" &
    ticker=$!
    (cd "$here" && GOWORK=off CGO_ENABLED=0 nice -n 5 \
      go build -trimpath -ldflags "$ldflags" -o "$bin/.$name.part" "${packages[$name]}" >&2) ||
      { kill $ticker; fail "building $name failed"; }
    kill $ticker
    mv "$bin/.$name.part" "$bin/$name"
    say "built $name in $((SECONDS - begin)) s"
  done
}

# tick WHAT: say every half minute that WHAT goes on, as long as this script lives.
tick() {
  local begin=$SECONDS
  exec 9>&-
  while sleep 30 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "  still $1 ($((SECONDS - begin)) s)"; done
}

# The node's own programs from Debian's archive, unpacked below $root.
# shellcheck source=/dev/null
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-unknown}")
root=$cache/node-$codename

fetch() {
  [[ -d $root ]] || locked "$cache/node.lock" fetch_missing
}

fetch_missing() {
  local work=$root.part uri apt deb begin=$SECONDS
  [[ ! -d $root ]] || return 0
  need apt-get dpkg
  say "fetching containerd, runc, the CNI plugins and nft from Debian's archive (about 40 MB) ..."
  rm -rf "$work"
  mkdir -p "$work"/{own,next}/{lists,cache/archives}/partial "$work/root"

  # runc, the plugins and nft in the system's own release: they and those of their libraries that it lacks.
  apt=(apt-get -qq -o APT::Sandbox::User=root -o "Dir::State::Lists=$work/own/lists" -o "Dir::Cache=$work/own/cache")
  "${apt[@]}" update >&2
  "${apt[@]}" install -y --download-only --reinstall --no-install-recommends \
    runc containernetworking-plugins nftables >&2

  # The kubelet wants containerd 2, which only Debian unstable has; that program runs on older C libraries as well.
  # shellcheck disable=SC2016 # apt-get's own variables
  uri=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
    awk -v own="$codename" 'NR == 1 || $2 == own && !found { uri = $1; found = $2 == own } END { print uri }')
  echo "deb $uri unstable main" >"$work/next/sources.list"
  : >"$work/next/status"
  apt=(apt-get -qq -o APT::Sandbox::User=root -o "Dir::State::Lists=$work/next/lists" -o "Dir::Cache=$work/next/cache"
    -o "Dir::State::status=$work/next/status" -o "Dir::Etc::SourceList=$work/next/sources.list"
    -o Dir::Etc::SourceParts=/dev/null)
  "${apt[@]}" update >&2 || fail "no Debian unstable in $uri: on another system set CLUSTER=current"
  (cd "$work/next/cache/archives" && "${apt[@]}" download containerd >&2)

  for deb in "$work"/{own,next}/cache/archives/*.deb; do dpkg -x "$deb" "$work/root"; done
  mv "$work/root" "$root"
  rm -rf "$work"
  say "fetched them in $((SECONDS - begin)) s"
}

# --- the node's namespaces --------------------------------------------------------------------------------------------

# $state/init holds the process that keeps the namespaces and the network namespace's number, against reused ids.
running() {
  local net
  [[ -s $state/init ]] && read -r init net <"$state/init" && [[ $(readlink "/proc/$init/ns/net") == "$net" ]]
}

inside() { nsenter --target "$init" --net --mount --pid -- "$@"; }
# join CMD...: become CMD in the node's network, with the machine's own files and processes.
join() {
  exec nsenter --net="/proc/$init/ns/net" -- \
    env KUBECONFIG="$kubeconfig" KUBECACHEDIR="$state/kube-cache" PATH="$bin:$PATH" "$@"
}
in_net() { (join "$@"); }
kube() { in_net kubectl --request-timeout=10s "$@"; }

# Process numbers in the .pid files are those inside the node's process namespace.
alive() {
  [[ -s $state/$1.pid ]] && [[ $(inside cat "/proc/$(<"$state/$1.pid")/comm" 2>/dev/null) == "${1:0:15}" ]]
}
kept() { [[ -s $state/$1.keeper ]] && inside kill -0 "$(<"$state/$1.keeper")" 2>/dev/null; }

# start NAME CMD...: a daemon of the node in a session of its own, unless it runs already. Like an init system, a keeper
# starts it again a second after it has ended, so that a sale can be shown to survive that too.
start() {
  local name=$1 libs
  shift
  ! kept "$name" || return 0
  say "starting $name"
  libs=$(printf '%s:' "$root"/usr/lib/*-linux-gnu*)
  # shellcheck disable=SC2016 # for the inner shell
  inside setsid --wait env PATH="$root/usr/sbin:$root/usr/bin:$bin:$PATH" LD_LIBRARY_PATH="${libs%:}" \
    bash -c 'while :; do "$@" & echo $! >"$0.pid"; wait $!; sleep 1; done & echo $! >"$0.keeper"' \
    "$state/$name" "$@" >>"$state/logs/$name.log" 2>&1 </dev/null 9>&-
}

# wait_for WHAT SECONDS PART CMD...: until CMD succeeds; if PART ends or time runs out, show the end of its log.
wait_for() {
  local what=$1 limit=$2 part=$3 begin=$SECONDS next=10
  shift 3
  until "$@" >/dev/null 2>&1; do
    sleep 0.5
    if ! alive "$part"; then give_up "$part" "$part has ended"; fi
    ((SECONDS - begin < limit)) || give_up "$part" "no $what after $limit s"
    ((SECONDS - begin < next)) || { say "  waiting for $what ($((SECONDS - begin)) s)"; next=$((next + 10)); }
  done
}

give_up() {
  tail -n 30 "$state/logs/$1.log" >&2 || true
  fail "$2; above is the end of $state/logs/$1.log (stop the rest with '$(basename "$0") down')"
}

make_namespaces() {
  local outer begin=$SECONDS
  (umask 077 && mkdir -p "$state"/{logs,pki,etcd,containerd,cni,var-log,kubelet,cni-results,volume-plugins})
  : >"$state/made-dirs"
  setsid unshare --net --mount --pid --fork --kill-child --mount-proc "$bin/pause" >"$state/logs/init.log" 2>&1 \
    </dev/null 9>&- &
  outer=$!
  until init=$(awk '{ print $1 }' "/proc/$outer/task/$outer/children" 2>/dev/null) && [[ -n $init ]] &&
    [[ $(cat "/proc/$init/comm" 2>/dev/null) == pause ]]; do
    ((SECONDS - begin < 10)) || { cat "$state/logs/init.log" >&2; fail "could not make the node's namespaces"; }
    sleep 0.1
  done
  echo "$init $(readlink "/proc/$init/ns/net")" >"$state/init"

  # containerd puts its containers' cgroups below /k8s.io.
  [[ -n $(find /sys/fs/cgroup -maxdepth 2 -name k8s.io) ]] || : >"$state/made-cgroups"
  # Fixed paths of the kubelet, containerd and CNI: private to the node. A folder made here is removed by `down`.
  local dir
  for dir in /var/lib/kubelet /var/lib/cni; do
    [[ -d $dir ]] || { mkdir "$dir" && echo "$dir" >>"$state/made-dirs"; }
  done
  # shellcheck disable=SC2016 # for the inner shell
  inside bash -euc '
    mount -n -t tmpfs -o mode=755 tmpfs /run
    mount --bind "$0/kubelet" /var/lib/kubelet
    mount --bind "$0/cni-results" /var/lib/cni
    mount --bind "$0/var-log" /var/log
    # The kubelet sets these for the whole machine, unless it finds the wanted values: show it those.
    for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
      kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
      file=$0/sysctl/${setting%=*}
      mkdir -p "${file%/*}"
      echo "${setting#*=}" >"$file"
      mount --bind "$file" "/proc/sys/${setting%=*}"
    done
    mkdir /run/lock /run/netns
    ip link set lo up
    # The API server and the kubelet want an address and a default route; nothing is at its other end.
    ip link add node0 type veth peer name node1
    ip addr add "$1/24" dev node0
    ip link set node0 up
    ip link set node1 up
    ip route add default dev node0
    echo 1 >/proc/sys/net/ipv4/ip_forward' "$state" "$node_ip"
}

# --- up, status, down -------------------------------------------------------------------------------------------------

healthy() {
  local part
  running || return 1
  for part in "${parts[@]}"; do alive "$part" || return 1; done
  kube get --raw /readyz >/dev/null 2>&1 && node_ready >/dev/null 2>&1
}

node_ready() { kube wait --for=condition=Ready "node/$node_name" --timeout=1s; }
ctr() { inside "$root/usr/bin/ctr" --address /run/containerd/containerd.sock --namespace k8s.io "$@"; }

up() {
  local begin=$SECONDS pki=$state/pki
  if healthy; then
    say "already up"
    return 0
  fi
  if ! running || [[ ! -e $state/configured ]]; then
    [[ ! -d $state ]] || down # what a reboot or an interrupted run left
    make_namespaces
    configure
    : >"$state/configured"
  fi

  # etcd need not survive a power cut: its data is removed with the node.
  start etcd "$bin/etcd" --name=node --data-dir="$state/etcd" --unsafe-no-fsync --log-level=warn \
    --listen-client-urls=http://127.0.0.1:2379 --advertise-client-urls=http://127.0.0.1:2379 \
    --listen-peer-urls=http://127.0.0.1:2380 --initial-advertise-peer-urls=http://127.0.0.1:2380 \
    --initial-cluster=node=http://127.0.0.1:2380
  start kube-apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --secure-port=6443 \
    --bind-address=0.0.0.0 --advertise-address=$node_ip --service-cluster-ip-range=$service_cidr \
    --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
    --client-ca-file="$pki/ca.crt" --token-auth-file="$pki/tokens.csv" --authorization-mode=Node,RBAC \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file="$pki/service-account.key" \
    --service-account-signing-key-file="$pki/service-account.key" \
    --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate="$pki/kubelet-client.crt" --kubelet-client-key="$pki/kubelet-client.key"
  start containerd "$root/usr/bin/containerd" --config "$state/containerd.toml"
  wait_for "API server" 120 kube-apiserver kube get --raw /readyz
  start kube-controller-manager "$bin/kube-controller-manager" \
    --kubeconfig="$state/kube-controller-manager.kubeconfig" --leader-elect=false \
    --use-service-account-credentials --root-ca-file="$pki/ca.crt" \
    --service-account-private-key-file="$pki/service-account.key" --flex-volume-plugin-dir="$state/volume-plugins"
  start kube-scheduler "$bin/kube-scheduler" --kubeconfig="$state/kube-scheduler.kubeconfig" --leader-elect=false

  wait_for "containerd" 60 containerd ctr version
  if ! ctr images ls -q 2>/dev/null | grep -x "$pause_image" >/dev/null; then
    pause_tar
    ctr images import - <"$state/pause/image.tar" >/dev/null
  fi
  start kubelet "$bin/kubelet" --config="$state/kubelet.yaml" --kubeconfig="$state/kubelet.kubeconfig" \
    --hostname-override=$node_name --node-ip=$node_ip
  start kube-proxy "$bin/kube-proxy" --config="$state/kube-proxy.yaml"
  wait_for "ready node" 120 kubelet node_ready
  wait_for "default service account" 60 kube-controller-manager kube -n default get serviceaccount default

  kube -n default delete pod up-check --ignore-not-found --now >/dev/null 2>&1
  kube -n default run up-check --image="$pause_image" --restart=Never >/dev/null
  wait_for "running pod" 120 kubelet kube -n default wait --for=condition=Ready pod/up-check --timeout=1s
  kube -n default delete pod up-check --now >/dev/null
  # kube-proxy: what controllers in pods will need first is the API server's own Service.
  wait_for "Service network" 60 kube-proxy in_net timeout 2 bash -c "exec 3<>/dev/tcp/$service_ip/443"
  say "up in $((SECONDS - begin)) s; kubeconfig $kubeconfig"
}

status() {
  local part
  running || { echo "down"; return 1; }
  for part in "${parts[@]}"; do
    if alive "$part"; then echo "$part: running"; else echo "$part: ended, see $state/logs/$part.log"; fi
  done
  kube get nodes 2>&1 || true
  healthy
}

# Host process numbers of everything in a network namespace.
members() {
  find /proc/[0-9]*/ns/net -maxdepth 0 -lname "${1//[][]/?}" -printf '%h\n' 2>/dev/null | cut -d/ -f3
}

down() {
  local net='' dir left signal begin=$SECONDS
  if [[ ! -d $state ]]; then
    say "already down"
    return 0
  fi
  if running; then
    read -r init net <"$state/init"
    [[ $(readlink /proc/self/ns/net) != "$net" ]] || fail "run 'down' outside of 'exec'"
    # The first process of a process namespace takes all others with it: daemons, shims and pods.
    kill -KILL "$init"
    # What is left was started through `exec`: ask it to end, and insist after ten seconds.
    sleep 0.3
    while left=$(members "$net" || true) && [[ -n $left ]] && ((SECONDS - begin < 20)); do
      signal=TERM
      ((SECONDS - begin < 10)) || signal=KILL
      # shellcheck disable=SC2086 # one word for each process
      kill -s $signal $left 2>/dev/null || true
      sleep 0.5
    done
    [[ -z $left ]] || fail "processes do not end: ${left//$'\n'/ }"
  fi
  if [[ -e $state/made-cgroups ]]; then
    find /sys/fs/cgroup -depth -type d -path '*/k8s.io*' -exec rmdir {} + 2>/dev/null || true
  fi
  if [[ -s $state/made-dirs ]]; then
    while read -r dir; do rmdir "$dir" || true; done <"$state/made-dirs"
  fi
  rm -rf --one-file-system "$state"
  say "down"
}

# --- the command line -------------------------------------------------------------------------------------------------

command=${1:-help}
(($# == 0)) || shift
case $command in
  build) build "$@"; exit ;;
  bin) echo "$bin"; exit ;;
  image)
    (($# == 4)) || { usage >&2; exit 2; }
    image "$@"
    exit
    ;;
  help | --help | -h) usage; exit ;;
  load) [[ $# == 2 && -r ${1:-} ]] || fail "load: needs a readable tar and the image's name" ;;
  exec) (($# > 0)) || fail "exec: needs a command" ;;
  up | status | down | kubeconfig) ;;
  *) usage >&2; exit 2 ;;
esac

if [[ ${CLUSTER:-} == current ]]; then
  case $command in
    up) kubectl version >&2 || fail "the current kubecontext's cluster does not answer" ;;
    status) kubectl get nodes ;;
    kubeconfig) echo "${KUBECONFIG:-$HOME/.kube/config}" ;;
    exec) exec "$@" ;;
    load) load_current "$@" ;;
    down) say "CLUSTER=current: nothing to stop" ;;
  esac
  exit
fi

case $command in
  kubeconfig) echo "$kubeconfig" ;;
  up)
    need_root up
    need nsenter unshare setsid flock ip openssl awk
    build
    fetch
    locked "$lock" up
    ;;
  status) need_root status; status ;;
  down) need_root down; locked "$lock" down ;;
  exec)
    need_root exec
    running || fail "the node is not up"
    join "$@"
    ;;
  load)
    need_root load
    running || fail "the node is not up"
    ctr images import - <"$1" >/dev/null
    say "loaded $1"
    ;;
esac
