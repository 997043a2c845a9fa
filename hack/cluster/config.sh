# shellcheck shell=bash
# Certificates, identities and configuration of the local node. Sourced by cluster.sh, whose variables it uses.
# shellcheck disable=SC2154

new_key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256)

# certificate NAME SUBJECT USAGE [ALTNAMES]: signed by the cluster's own authority.
certificate() {
  printf 'extendedKeyUsage=%s\n%s\n' "$3" "${4:+subjectAltName=$4}" >"$state/pki/$1.ext"
  openssl req "${new_key[@]}" -nodes -keyout "$state/pki/$1.key" -subj "$2" |
    openssl x509 -req -days 365 -CA "$state/pki/ca.crt" -CAkey "$state/pki/ca.key" -CAcreateserial \
      -extfile "$state/pki/$1.ext" -out "$state/pki/$1.crt"
}

# identity FILE USER [GROUP]: a token for USER and a kubeconfig that holds it.
identity() {
  local token
  token=$(openssl rand -hex 24)
  echo "$token,$2,$2,\"${3:-}\"" >>"$state/pki/tokens.csv"
  cat >"$1" <<YAML
apiVersion: v1
kind: Config
clusters:
- name: flashsale
  cluster: {server: "$api", certificate-authority-data: $(base64 -w0 "$state/pki/ca.crt")}
users:
- name: "$2"
  user: {token: $token}
contexts:
- name: flashsale
  context: {cluster: flashsale, user: "$2"}
current-context: flashsale
YAML
}

configure() (
  umask 077
  cd "$state" || exit
  # openssl talks on stderr when all is well: show that only if something fails.
  exec 3>&2 2>logs/configure.log
  trap '(($? == 0)) || cat logs/configure.log >&3' EXIT
  openssl req -x509 "${new_key[@]}" -nodes -days 365 -subj /CN=flashsale-ca -keyout pki/ca.key -out pki/ca.crt \
    -addext keyUsage=critical,keyCertSign,cRLSign
  openssl ecparam -name prime256v1 -genkey -noout -out pki/service-account.key
  local names="DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
  certificate apiserver /CN=kube-apiserver serverAuth \
    "$names,DNS:kubernetes.default.svc.cluster.local,IP:127.0.0.1,IP:$node_ip,IP:$service_ip"
  certificate kubelet "/O=system:nodes/CN=system:node:$node_name" serverAuth "DNS:$node_name,IP:$node_ip"
  certificate kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth

  identity "$kubeconfig" admin system:masters
  identity kube-controller-manager.kubeconfig system:kube-controller-manager
  identity kube-scheduler.kubeconfig system:kube-scheduler
  identity kube-proxy.kubeconfig system:kube-proxy
  identity kubelet.kubeconfig "system:node:$node_name" system:nodes

  # restrict_oom_score_adj: without CAP_SYS_RESOURCE runc cannot lower the score and no container would start.
  cat >containerd.toml <<TOML
version = 3
root = "$state/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "$state/containerd/opt"
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "$pause_image"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["$root/usr/lib/cni"]
conf_dir = "$state/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = false
TOML

  # Every pod has a routed link of its own (ptp): no bridge, so Services need no bridge netfilter in the kernel.
  cat >cni/10-flashsale.conflist <<JSON
{"cniVersion": "1.0.0", "name": "flashsale", "plugins": [{"type": "ptp", "ipam": {"type": "host-local",
  "dataDir": "/var/lib/cni/addresses", "ranges": [[{"subnet": "$pod_cidr"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON

  : >resolv.conf # no DNS server here: an empty file lets a look-up fail at once, not after a time-out
  # The node shares a developer's machine: no cgroup tree, reserves or eviction at common disk levels. Images are
  # never collected, as there is no registry to get them from again.
  cat >kubelet.yaml <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $node_ip
tlsCertFile: $state/pki/kubelet.crt
tlsPrivateKeyFile: $state/pki/kubelet.key
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $state/pki/ca.crt}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
volumePluginDir: $state/volume-plugins
resolvConf: $state/resolv.conf
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}
YAML

  cat >kube-proxy.yaml <<YAML
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: $state/kube-proxy.kubeconfig}
hostnameOverride: $node_name
mode: nftables
clusterCIDR: $pod_cidr
conntrack: {maxPerCore: 0, min: 0}
YAML
)

# An image of one file, written by hand: the node needs it before anything that builds images can be asked for.
pause_tar() (
  mkdir -p "$state/pause"
  cd "$state/pause" || exit
  tar --owner=0 --group=0 --numeric-owner --mtime=@0 -cf layer.tar -C "$bin" pause
  printf '{"architecture":"%s","os":"linux","config":{"Entrypoint":["/pause"],"User":"65535:65535"},%s}' \
    "$(dpkg --print-architecture)" \
    "\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:$(sha256sum layer.tar | cut -d' ' -f1)\"]}" >config.json
  printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$pause_image" >manifest.json
  tar -cf image.tar manifest.json config.json layer.tar
)
