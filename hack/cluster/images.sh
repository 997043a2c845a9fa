# shellcheck shell=bash
# Building images and giving them to a cluster of the current kubecontext. Sourced by cluster.sh.

# image DOCKERFILE CONTEXT NAME:TAG TAR: with a docker engine where one answers, otherwise with buildah.
image() {
  local dockerfile=$1 context=$2 name=$3 tar=$4 work
  if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    docker build --quiet --file "$dockerfile" --tag "$name" "$context" >&2
    docker save --output "$tar" "$name"
    return
  fi
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$work'" EXIT
  if ! command -v buildah >/dev/null; then
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
      rmdir "$work"
      fail "needs a docker engine or buildah (apt-get install buildah)"
    fi
    say "no docker engine answers: installing buildah (apt-get install) ..."
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends buildah; } \
      >"$work/apt.log" 2>&1 || { tail -n 20 "$work/apt.log" >&2; fail "could not install buildah"; }
  fi
  # Storage and policy of its own, so that nothing of the build stays behind and no configuration is needed.
  echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$work/policy.json"
  local storage=(--root "$work/root" --runroot "$work/run" --storage-driver vfs)
  if buildah "${storage[@]}" build --quiet --isolation chroot --signature-policy "$work/policy.json" \
    --file "$dockerfile" --tag "$name" "$context" >&2 &&
    buildah "${storage[@]}" push --quiet --signature-policy "$work/policy.json" \
      "$name" "docker-archive:$work/image.tar:$name" >&2; then
    mv "$work/image.tar" "$tar"
    rm -rf "$work"
  else
    rm -rf "$work"
    fail "buildah could not build $name"
  fi
}

# load_current TAR NAME:TAG: into the cluster of the current kubecontext, or to the registry that NAME begins with.
load_current() {
  local context
  context=$(kubectl config current-context)
  case $context in
    kind-*) kind load image-archive "$1" --name "${context#kind-}" ;;
    minikube*) minikube image load "$1" --profile "$context" ;;
    *)
      [[ $2 == */* ]] || fail "context '$context' pulls its images: give $2 a name with a registry (IMG, DEMO_IMG)"
      command -v skopeo >/dev/null || fail "needs skopeo to push $2"
      skopeo copy "docker-archive:$1" "docker://$2"
      ;;
  esac
}
