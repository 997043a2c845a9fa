# "make help" lists the targets. Tools are pinned, and built into bin/ under their version.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= v0.1.0
IMG ?= flashsale:$(VERSION)
CONTROLLER_GEN_VERSION := v0.23.0
GOLANGCI_LINT_VERSION := v2.15.0

BIN := $(CURDIR)/bin
CONTROLLER_GEN := $(BIN)/controller-gen-$(CONTROLLER_GEN_VERSION)
GOLANGCI_LINT := $(BIN)/golangci-lint-$(GOLANGCI_LINT_VERSION)
CLUSTER_SH := hack/cluster/cluster.sh
MYSQL_SH := hack/mysql/mysql.sh
CA_CERTIFICATES ?= /etc/ssl/certs/ca-certificates.crt
# Go files of the product's module, without those of the modules under hack/.
PACKAGES := ./...

##@ For users

.PHONY: demo
demo: ## Run a whole sale from nothing: 100,000 clicks on 5 units (CLUSTER=current: on your own cluster)
	hack/demo/demo.sh up

.PHONY: demo-down
demo-down: ## Remove what the demo made
	hack/demo/demo.sh down

.PHONY: deploy
deploy: ## Install the operator into the current cluster: make deploy IMG=registry.example/flashsale:v1
	@mkdir -p dist/deploy
	@img='$(IMG)'; [[ $${img##*/} == *:* ]] || { echo 'deploy: IMG needs a tag' >&2; exit 2; }; printf 'resources: [../../config/default]\nimages:\n- {name: flashsale, newName: "%s", newTag: "%s"}\n' "$${img%:*}" "$${img##*:}" >dist/deploy/kustomization.yaml
	kubectl apply --server-side --force-conflicts -k dist/deploy

.PHONY: undeploy
undeploy: ## Remove the operator (delete the FlashSales first: their finalizer needs it)
	@left=$$(kubectl get flashsales --all-namespaces --ignore-not-found -o name 2>/dev/null | wc -l); [[ $$left == 0 ]] || { echo "undeploy: $$left FlashSales are left. Delete them first, so that they drain: kubectl delete flashsales --all -n NAMESPACE" >&2; exit 1; }
	kubectl delete --ignore-not-found -k config/default

##@ For contributors

.PHONY: help
help: ## Show this
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: test
test: ## Run all tests but the end-to-end ones, on a real MySQL and a real API server
	@assets=$$(hack/envtest.sh); dsn=$$($(MYSQL_SH) up); FLASHSALE_MYSQL_DSN=$$dsn KUBEBUILDER_ASSETS=$$assets \
	  go test -race -timeout 20m $(GOTESTFLAGS) $$(go list $(PACKAGES) | grep -v /test/e2e); \
	  go -C hack/proof test -timeout 20m -count=1 $(GOTESTFLAGS) ./...; \
	  go -C hack/gitops test -count=1 $(GOTESTFLAGS) ./...

.PHONY: test-mariadb
test-mariadb: ## Run the tests of the inventory on MariaDB
	@dsn=$$(FLASHSALE_MYSQL_FLAVOR=mariadb FLASHSALE_MYSQL_NAME=mariadb $(MYSQL_SH) up); \
	  trap 'FLASHSALE_MYSQL_NAME=mariadb $(MYSQL_SH) down' EXIT; \
	  FLASHSALE_MYSQL_FLAVOR=mariadb FLASHSALE_MYSQL_DSN=$$dsn go test -timeout 20m -count=1 $(GOTESTFLAGS) ./reserver/...

.PHONY: e2e
e2e: image ## Run the demo and kill its parts, on a real node (root, or CLUSTER=current); E2E_KEEP=1 leaves it up
	go test -v -timeout 40m -count=1 ./test/e2e/...

.PHONY: soak
soak: ## Fifty sales of 5 units, 20,000 clicks each
	@dsn=$$($(MYSQL_SH) up); FLASHSALE_MYSQL_DSN=$$dsn FLASHSALE_TEST_CLICKS=20000 go test -v -timeout 30m -count=1 -run Fifty ./reserver/httpapi/

.PHONY: chaos
chaos: ## Sales under faults, their histories checked: make chaos SEED=7 ROUNDS=200 OUT=file.md
	@go -C hack/proof run ./chaos --seed $(or $(SEED),1) --rounds $(or $(ROUNDS),20) $(if $(OUT),--out $(abspath $(OUT)))

.PHONY: bench
bench: ## Measure claims beside the usual ways, growth, confirm, sweep, load: make bench ARGS="--plot docs/benchmarks.svg"
	@hack/bench/bench.sh $(if $(ONLY),--only $(ONLY)) $(ARGS)

.PHONY: bench-json
bench-json: ## The same as JSON lines: make -s bench-json ONLY=claims
	@hack/bench/bench.sh --json $(if $(ONLY),--only $(ONLY)) $(ARGS)

.PHONY: bench-manager
bench-manager: ## Measure the operator with 1,000 sales: make bench-manager ARGS="--idle=1h"
	@assets=$$(hack/envtest.sh); export FLASHSALE_MYSQL_NAME=$${FLASHSALE_MYSQL_NAME:-bench-manager}; dsn=$$($(MYSQL_SH) up); trap '$(MYSQL_SH) down' EXIT; \
	  go -C hack/bench build -o $(BIN)/bench-manager ./manager; \
	  FLASHSALE_MYSQL_DSN=$$dsn KUBEBUILDER_ASSETS=$$assets $(BIN)/bench-manager --root=. $(ARGS)

.PHONY: generate
generate: $(CONTROLLER_GEN) ## Generate deep copies
	$(CONTROLLER_GEN) object paths=./api/...

.PHONY: manifests
manifests: $(CONTROLLER_GEN) ## Generate the CRD and the manager's role
	$(CONTROLLER_GEN) crd paths=./api/... output:crd:dir=config/crd/bases
	$(CONTROLLER_GEN) rbac:roleName=flashsale-manager paths=./controllers/... output:rbac:dir=config/rbac

.PHONY: lint
lint: $(GOLANGCI_LINT) ## Run the linters
	$(GOLANGCI_LINT) run
	cd hack/proof && $(GOLANGCI_LINT) run -c $(CURDIR)/.golangci.yml ./...
	cd hack/bench && $(GOLANGCI_LINT) run -c $(CURDIR)/.golangci.yml ./...
	cd hack/gitops && $(GOLANGCI_LINT) run -c $(CURDIR)/.golangci.yml ./...

.PHONY: build
build: ## Build the static binaries into dist/
	@mkdir -p dist
	CGO_ENABLED=0 GOOS=linux go build -trimpath -ldflags '-s -w' -o dist/manager .
	CGO_ENABLED=0 GOOS=linux go build -trimpath -ldflags '-s -w' -o dist/reserver ./reserver

.PHONY: image
image: build ## Build the image as dist/flashsale.tar, with docker or buildah
	@[[ -r $(CA_CERTIFICATES) ]] || { echo 'image: no CA certificates at $(CA_CERTIFICATES): install ca-certificates, or set CA_CERTIFICATES' >&2; exit 1; }
	@install -m 0644 $(CA_CERTIFICATES) dist/ca-certificates.crt
	@install -m 0644 "$$(go env GOROOT)/lib/time/zoneinfo.zip" dist/zoneinfo.zip
	$(CLUSTER_SH) image Dockerfile . $(IMG) dist/flashsale.tar

.PHONY: print-version
print-version:
	@echo $(VERSION)

.PHONY: verify
verify: generate manifests ## Check that what is generated, and go.mod, are up to date
	go mod tidy
	go -C hack/proof mod tidy
	go -C hack/bench mod tidy
	go -C hack/gitops mod tidy
	@[[ -z "$$(git status --porcelain)" ]] || { git status --short; git --no-pager diff | head -50; echo 'verify: the tree has changes. Commit yours; those above that you did not make are of "make generate manifests" or "go mod tidy"' >&2; exit 1; }

.PHONY: mysql-up mysql-down cluster-up cluster-down
mysql-up: ## Start a real MySQL and print its DSN
	$(MYSQL_SH) up
mysql-down: ## Stop it and remove its data
	$(MYSQL_SH) down
cluster-up: ## Start a real one-node Kubernetes (needs root)
	$(CLUSTER_SH) up
cluster-down: ## Stop it and remove its state
	$(CLUSTER_SH) down

# tool NAME VERSION PACKAGE: built once a version.
define tool
	@echo "building $(1) $(2) ..."
	@mkdir -p $(BIN)
	@work=$$(mktemp -d $(BIN)/tool.XXXXXX) && GOBIN=$$work GOFLAGS= go install $(3)@$(2) && mv $$work/$(1) $(BIN)/$(1)-$(2) && rmdir $$work
endef
$(CONTROLLER_GEN):
	$(call tool,controller-gen,$(CONTROLLER_GEN_VERSION),sigs.k8s.io/controller-tools/cmd/controller-gen)
$(GOLANGCI_LINT):
	$(call tool,golangci-lint,$(GOLANGCI_LINT_VERSION),github.com/golangci/golangci-lint/v2/cmd/golangci-lint)
