#!/usr/bin/env bash
# Prints a folder with etcd, kube-apiserver and kubectl, for tests against a real API server (KUBEBUILDER_ASSETS).
# In this order: one that is set, one that was built before, one that setup-envtest downloads, one built from source.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cluster=$here/cluster/cluster.sh
version=$(awk '$1 == "k8s.io/kubernetes" { print substr($2, 2); exit }' "$here/cluster/go.mod")

if [[ -n ${KUBEBUILDER_ASSETS:-} ]]; then echo "$KUBEBUILDER_ASSETS"; exit; fi
bin=$("$cluster" bin)
if [[ -x $bin/etcd && -x $bin/kube-apiserver && -x $bin/kubectl ]]; then echo "$bin"; exit; fi
if folder=$(timeout 120 go run sigs.k8s.io/controller-runtime/tools/setup-envtest@v0.25.1 use "${version%.*}.x" -p path 2>/dev/null); then
  echo "$folder"
  exit
fi
echo "envtest: no download of Kubernetes $version here, so it is built from source (10 minutes or more, once)" >&2
"$cluster" build etcd kube-apiserver kubectl >&2
echo "$bin"
